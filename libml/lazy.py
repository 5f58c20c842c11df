"""TensorFlow and Keras, imported when first used: help, configurations and tables of finished runs need neither."""
import importlib
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras as keras
    import tensorflow as tf
else:
    class _Module(ModuleType):
        """Stands for a module until something of it is asked for."""

        def __getattr__(self, name: str):
            value = getattr(importlib.import_module(self.__name__), name)
            setattr(self, name, value)
            return value

    tf, keras = _Module("tensorflow"), _Module("keras")


def exports(package: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns a package's `__getattr__` and `__dir__` for names that are imported when asked for: name -> module."""
    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(names[name])
        value = getattr(module, name) if hasattr(module, name) else importlib.import_module(f"{names[name]}.{name}")
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *names})
