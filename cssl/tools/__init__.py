"""Commands around training: data, tables, figures, checks. TensorFlow starts only where images are computed."""
import argparse
import importlib
import sys
from pathlib import Path
from typing import NoReturn

from cssl.program import exit_on_user_error
from libml.errors import UserError, printable

TOOLS = ("audit", "data", "doctor", "export", "extract", "inspect", "label", "plot", "predict", "report", "reproduce",
         "table")


def console() -> None:
    """Runs a tool, by the name of the installed command: cssl-<tool>."""
    name = f"{__name__}.{Path(sys.argv[0]).stem.removeprefix('cssl-')}"
    exit_on_user_error(lambda: importlib.import_module(name).main())


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as all programs here do."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (--help lists the flags)")


def parser(description: str | None, runs: bool = False) -> Parser:
    """Returns a parser that shows a module's docstring; `runs` are what most tools read."""
    made = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if runs:
        made.add_argument("runs", nargs="+", help="run folders, folders above them, or globs")
    return made


def on_terminal() -> bool:
    """Whether standard output is a terminal; it may be closed."""
    return sys.stdout is not None and sys.stdout.isatty()


def show(text: object) -> None:
    """Prints a line; on a terminal, what would command it is escaped: names of files and classes may hold anything."""
    print(printable(text) if on_terminal() else text)
