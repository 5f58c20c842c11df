"""Named arrays in a folder, memory-mapped when read and complete whenever they can be seen."""
import errno
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

import numpy as np

from libml.errors import UserError

CONTENTS, LOCK = "contents.json", "lock"
STARTING = 3600  # seconds after which a writer must have locked what it writes


class Writer:
    """Collects the arrays of a cache folder that is not visible yet."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._open: dict[str, np.memmap] = {}
        self.meta: dict = {}

    def create(self, name: str, shape: tuple[int, ...], dtype) -> np.ndarray:
        """Returns a file-backed array to fill, so that a large one is never held in memory as a whole. Its space is
        taken at once: a disk that is full later would kill the process without a word."""
        path = self._folder / f"{name}.npy"
        self._open[name] = np.lib.format.open_memmap(path, "w+", dtype, shape)
        if path.stat().st_size > shutil.disk_usage(path).free:  # rather than fill it for everybody else
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with suppress(AttributeError), path.open("r+b") as file:  # not on macOS and Windows
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        return self._open[name]

    def add(self, name: str, array: np.ndarray) -> None:
        self.create(name, array.shape, array.dtype)[...] = array

    def finish(self) -> None:
        """Flushes everything and writes the list of contents last."""
        for array in self._open.values():
            array.flush()
        self._open.clear()
        sizes = {path.name: path.stat().st_size for path in sorted(self._folder.glob("*.npy"))}
        (self._folder / CONTENTS).write_text(json.dumps({"files": sizes, "meta": self.meta}))


@contextmanager
def opened(folder: Path, build: Callable[[Writer], None]) -> Iterator[tuple[dict[str, np.ndarray], dict]]:
    """Gives the arrays (memory-mapped, read-only) and the notes of a cache, after building it where there is none.

    What a damaged one leads to, in the block too, becomes one clear line.
    """
    if not folder.exists():
        _write(folder, build)
    try:
        contents = json.loads((folder / CONTENTS).read_text())
        for name, size in contents["files"].items():
            if (actual := (folder / name).stat().st_size) != size:
                raise ValueError(f"{name} has {actual} bytes instead of {size}")
        yield {name.removesuffix(".npy"): np.load(folder / name, mmap_mode="r")
               for name in contents["files"]}, contents["meta"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"The cache of decoded images {folder} is damaged ({error}). "
                        f"Delete that folder and start again; it is rebuilt from the data beside it.") from error


def _write(folder: Path, build: Callable[[Writer], None]) -> None:
    """Builds a cache folder next to its final place and moves it there in one atomic step."""
    with ExitStack() as stack:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            _sweep(folder.parent)
            temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-unfinished-", dir=folder.parent))
            stack.callback(shutil.rmtree, temporary, ignore_errors=True)
            _locks(stack.enter_context((temporary / LOCK).open("w")))
            writer = Writer(temporary)
            build(writer)
            writer.finish()
            temporary.chmod(0o755)
            (temporary / LOCK).unlink()
            os.rename(temporary, folder)
        except OSError as error:
            if not (folder / CONTENTS).exists():  # otherwise another process was first: its arrays are the same
                raise UserError(f"Cannot write the decoded images to {folder} ({error.strerror}). Make {folder.parent} "
                                "writable and make room, or copy the data to a folder of your own and name that with "
                                "--data_dir.") from error


def _locks(file: IO[str]) -> bool:
    """Locks an open file until it is closed or its process ends; False if another has it, or there are no locks."""
    with suppress(ImportError, OSError):  # Windows; some network file systems
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _sweep(folder: Path) -> None:
    """Removes what writers have left that were killed: as large as a cache, and of no use."""
    for left in folder.glob(".*-unfinished-*"):
        with suppress(OSError):
            if (left / LOCK).exists():
                with (left / LOCK).open("r+") as file:
                    dead = _locks(file)
            else:  # killed before it had locked it, unless it is just about to
                dead = time.time() - left.stat().st_mtime > STARTING
            if dead:
                shutil.rmtree(left, ignore_errors=True)


def siblings(folder: Path, of: object) -> dict[Path, int]:
    """Returns the other caches beside a folder whose notes say that they are `of` this, with their sizes in bytes."""
    found = dict[Path, int]()
    for path in sorted(folder.parent.glob(f"[!.]*/{CONTENTS}")):
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # damaged
            contents = json.loads(path.read_text())
            if contents["meta"]["of"] == of and path.parent != folder:
                found[path.parent] = sum(contents["files"].values())
    return found
