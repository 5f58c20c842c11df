"""Files that are whole whenever they can be seen, and one clear line where the file system refuses."""
from __future__ import annotations

import glob
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from libml.errors import UserError

ADVICE = "Name a writable place with free space; what was written before is still there."


@contextmanager
def writing(path: Path, advice: str = ADVICE) -> Iterator[None]:
    """Turns what the file system says into one clear line."""
    try:
        yield
    except OSError as error:
        raise UserError(f"Cannot write {path} ({error.strerror or error}). {advice}") from error


@contextmanager
def unfinished(folder: Path, swept: str = "", advice: str = ADVICE) -> Iterator[Path]:
    """Makes a hidden folder beside `folder`, to be renamed to it once it is whole; deletes what is there at the end.

    It is locked while its writer lives. Those of killed writers, which are not, go first: of the same `folder`, or all
    whose names match `swept`.
    """
    prefix = f".{folder.name}-unfinished-"
    with writing(folder, advice):
        folder.parent.mkdir(parents=True, exist_ok=True)
        for left in list(folder.parent.glob(swept or f"{glob.escape(prefix)}*")):
            lock = _lock(left, wait=False)
            if lock is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(lock)
        while True:
            place = Path(tempfile.mkdtemp(dir=folder.parent, prefix=prefix))
            lock = _lock(place, wait=True)
            if place.exists():  # nobody has taken it for a dead one's before it was locked
                break
    try:
        place.chmod(0o755)
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _lock(folder: Path, wait: bool) -> int | None:
    """Locks a folder until the handle that is returned is closed; None where another process has it or none can."""
    try:
        import fcntl

        handle = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):  # Windows
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:  # it is another's, or of a file system without locks
        os.close(handle)
        return None
    return handle


def _is_device(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Writes a file under another name and moves it to its place: nobody sees half of it.

    A link stays one: what it names is replaced. Devices and pipes are written into.
    """
    with writing(path):
        if _is_device(path):
            with path.open("wb") as file:
                write(file)
            return
        path = Path(os.path.realpath(path))
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
    write_atomically(path, lambda file: file.write(text.encode()))


def check_writable(path: Path) -> None:
    """Raises UserError if a file cannot be written there: before hours are spent on what is to be in it."""
    if path.is_dir():
        raise UserError(f"{path} is a folder: name a file in it.")
    if _is_device(path):
        return
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
