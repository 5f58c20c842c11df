"""Hyperparameters, each declared once: default, meaning and choices; flags and configuration files derive from them."""
import dataclasses
from typing import Any


def option(default: Any, help: str, *, choices: tuple = ()) -> Any:
    """Declares one hyperparameter of a dataclass of options."""
    return dataclasses.field(default=default, metadata={"help": help, "choices": choices})


def describe(options: type) -> dict[str, dataclasses.Field]:
    """Returns the fields of a dataclass of options by name."""
    return {field.name: field for field in dataclasses.fields(options)}
