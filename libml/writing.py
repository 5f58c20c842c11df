"""Files that are whole whenever they can be seen, and one clear line where the file system refuses."""
import json
import os
import re
import secrets
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, BinaryIO

from libml.errors import UserError

ADVICE = "Name a writable place with free space; what was written before is still there."
LOCK = "cssl.lock"  # of what `unfinished` makes
SOFTWARE = "cssl"  # by which our figures are known again
_FIGURE = rb"\x89PNG.{,200}Software\0cssl|<\?xml.{,999}<dc:title>cssl<"


@contextmanager
def writing(path: Path, advice: str = ADVICE) -> Iterator[None]:
    """Turns what the file system says into one clear line."""
    try:
        yield
    except OSError as error:
        raise UserError(f"Cannot write {path} ({error.strerror or error}). {advice}") from error


@contextmanager
def unfinished(folder: Path) -> Iterator[Path]:
    """Makes a folder within a hidden one beside `folder`, to be renamed to `folder` once it is whole; deletes what is
    left at the end.

    The hidden one holds a lock while its writer lives. Those of killed writers, for any folder here, go first; what
    has no such lock is not ours.
    """
    with ExitStack() as stack:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for left in folder.parent.glob(f".*-unfinished-*/{LOCK}"):
            with suppress(OSError), left.open("r+") as file:
                if _locks(file, wait=False):
                    shutil.rmtree(left.parent, ignore_errors=True)
        while True:
            hidden = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-unfinished-"))
            stack.callback(shutil.rmtree, hidden, ignore_errors=True)
            file = stack.enter_context((hidden / LOCK).open("w"))
            _locks(file, wait=True)
            if (hidden / LOCK).exists():  # nobody has taken it for a dead one's before it was locked
                break
        (hidden / folder.name).mkdir()
        yield hidden / folder.name


@contextmanager
def begun(folder: Path) -> Iterator[Path]:
    """As `unfinished`, but for long work: what a killed writer left is there again, and another one is waited for."""
    hidden = folder.with_name(f".{folder.name}-begun")
    (hidden / folder.name).mkdir(parents=True, exist_ok=True)
    with (hidden / LOCK).open("w") as file:
        if not _locks(file, wait=False):
            print(f"Waiting for another process that makes {folder}", flush=True)
            _locks(file, wait=True)
        yield hidden / folder.name
        shutil.rmtree(hidden, ignore_errors=True)


def _locks(file: IO[str], wait: bool) -> bool:
    """Locks an open file until it is closed or its process ends; False if another has it, or there are no locks."""
    with suppress(ImportError, OSError):  # Windows; some network file systems
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        return True
    return False


def _is_device(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()


def write_atomically(path: Path, write: Callable[[BinaryIO], object], durable: bool = False) -> None:
    """Writes a file under another name and moves it to its place: nobody sees half of it. A `durable` one is on the
    disk then, also if the power fails.

    A link stays one: what it names is replaced. Devices and pipes are written into.
    """
    with writing(path):
        if _is_device(path):
            with path.open("wb") as file:
                write(file)
            return
        path = Path(os.path.realpath(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
        try:
            with temporary.open("xb") as file:  # with the mode that the user's umask says
                write(file)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            if path.exists():
                temporary.chmod(path.stat().st_mode & 0o777)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def write_text(path: Path, text: str, durable: bool = False) -> None:
    write_atomically(path, lambda file: file.write(text.encode()), durable)


def check_writable(path: Path, ours: bytes) -> None:
    """Raises UserError if a file cannot be written there: before hours are spent on what is to be in it.

    A file that is there is overwritten only if it begins with `ours`, a regular expression, as this program's do.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder: name a file in it.")
    if _is_device(path):
        return
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
        if path.exists():
            with path.open("rb") as file:
                start = file.read(4096)
            if start and not re.match(ours, start, re.DOTALL):
                raise UserError(f"{path} was not written by this command, and would be overwritten. Name another file, "
                                "or move it away.")


def checksum(facts: dict) -> int:
    """Of what JSON keeps: tells what somebody has edited, or half restored, from what was written."""
    return zlib.crc32(json.dumps(facts, sort_keys=True).encode())


def figure_files(stem: str | Path, endings: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Returns the files of a figure, whose `stem` may carry the ending of one; UserError as `check_writable`."""
    stem = Path(stem)
    if not stem.name or stem.is_dir():
        raise UserError(f"{stem} is a folder: name a file in it.")
    if stem.suffix in (".png", ".svg"):
        stem = stem.with_suffix("")
    paths = [stem.with_name(f"{stem.name}.{ending}") for ending in endings]
    for path in paths:
        check_writable(path, _FIGURE)
    return paths
