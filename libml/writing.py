"""Files that are whole whenever they can be seen, and one clear line where the file system refuses."""
from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from libml.errors import UserError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns what the file system says into one clear line."""
    try:
        yield
    except OSError as error:
        raise UserError(f"Cannot write {path} ({error.strerror or error}). Name a writable place with free space; "
                        "what was written before is still there.") from error


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Writes a file under another name and moves it to its place: nobody sees half of it."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        try:
            with os.fdopen(handle, "wb") as file:
                write(file)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def write_text(path: Path, text: str) -> None:
    """Writes a text file atomically."""
    write_atomically(path, lambda file: file.write(text.encode()))


def check_writable(path: Path) -> None:
    """Raises UserError if a file cannot be written there: before hours are spent on what is to be in it."""
    if path.is_dir():
        raise UserError(f"{path} is a folder: name a file in it.")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
