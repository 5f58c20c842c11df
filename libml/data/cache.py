"""Named arrays in a folder, memory-mapped when read and complete whenever they can be seen."""
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import numpy as np

from libml.errors import UserError
from libml.writing import begun, checksum, unfinished, writing

DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError)  # what reading a damaged cache raises
NAME, CONTENTS = "cssl_cache", "contents.json"


class Writer:
    """Collects the arrays of a cache folder that is not visible yet."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._open: dict[str, np.memmap] = {}
        self.found: set[str] = set()  # what a killed writer had left
        self.meta: dict = {}

    def create(self, name: str, shape: tuple[int, ...], dtype) -> np.ndarray:
        """Returns a file-backed array to fill, so that a large one is never held in memory as a whole. Its space is
        taken at once: a disk that is full later would kill the process without a word. What a killed writer has filled
        is in it."""
        path = self._folder / f"{name}.npy"
        with suppress(OSError, ValueError):  # there is none, or not a whole one
            array = np.lib.format.open_memmap(path, "r+")
            if (array.shape, array.dtype) == (shape, dtype):
                self._open[name] = array
                self.found.add(name)
                return array
        self._open[name] = np.lib.format.open_memmap(path, "w+", dtype, shape)
        if path.stat().st_size > shutil.disk_usage(path).free:  # rather than fill it for everybody else
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with suppress(AttributeError), path.open("r+b") as file:  # not on macOS and Windows
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        return self._open[name]

    def add(self, name: str, array: np.ndarray) -> None:
        self.create(name, array.shape, array.dtype)[...] = array

    def flush(self) -> None:
        for array in self._open.values():
            array.flush()

    def finish(self) -> None:
        """Flushes everything and writes the list of contents last."""
        self.flush()
        self._open.clear()
        paths = sorted(self._folder.glob("*.npy"))
        (self._folder / CONTENTS).write_text(json.dumps({
            "files": {path.name: path.stat().st_size for path in paths},
            "written": {path.name: [path.stat().st_mtime_ns, content_hash(path)] for path in paths},
            "meta": self.meta, "checksum": checksum(self.meta)}))


def content_hash(file: str | Path) -> int:
    """Returns 64 bits that tell the contents of files apart, 0 of one that cannot be read."""
    digest = hashlib.blake2b(digest_size=8)
    try:
        with open(file, "rb") as content:
            while chunk := content.read(1 << 20):
                digest.update(chunk)
    except OSError:
        return 0
    return int.from_bytes(digest.digest(), "little")


def read(folder: Path) -> tuple[dict[str, np.ndarray], dict]:
    """Returns the arrays (memory-mapped, read-only) and the notes of a cache; an error of DAMAGED if they changed."""
    contents = json.loads((folder / CONTENTS).read_text())
    if contents.get("checksum", found := checksum(contents["meta"])) != found:
        raise ValueError(f"{CONTENTS} is not what its checksum says")
    for name, size in contents["files"].items():
        status = (folder / name).stat()
        # Files that were copied have another time: they are read. Caches of older versions know sizes alone.
        time, content = contents.get("written", {}).get(name, (status.st_mtime_ns, 0))
        if status.st_size != size or status.st_mtime_ns != time and content_hash(folder / name) != content:
            raise ValueError(f"{name} has changed since it was written")
    return {name.removesuffix(".npy"): np.load(folder / name, mmap_mode="r")
            for name in contents["files"]}, contents["meta"]


@contextmanager
def opened(folder: Path, build: Callable[[Writer], None], resumes: bool = False,
           ) -> Iterator[tuple[dict[str, np.ndarray], dict]]:
    """Gives the arrays (memory-mapped, read-only) and the notes of a cache, after building it where there is none; with
    `resumes` from where a killed process left off.

    What a damaged one leads to, in the block too, becomes one clear line.
    """
    if not folder.exists():
        _write(folder, build, begun if resumes else unfinished)
    try:
        yield read(folder)
    except DAMAGED as error:
        raise UserError(f"The cache {folder} is damaged ({error}). Delete that folder and start again; it is made anew "
                        "from the data.") from error


def _write(folder: Path, build: Callable[[Writer], None],
           aside: Callable[[Path], AbstractContextManager[Path]]) -> None:
    """Builds a cache folder next to its final place and moves it there in one atomic step."""
    advice = (f"Make {folder.parent} writable and make room for the decoded images, or copy the data to a folder of "
              "your own and name that with --data_dir.")
    with writing(folder, advice), aside(folder) as place:
        if folder.exists():  # while its other writer was waited for
            return
        writer = Writer(place)
        build(writer)
        writer.finish()
        try:
            os.rename(place, folder)
        except OSError:
            if not (folder / CONTENTS).exists():  # otherwise another process was first: its arrays are the same
                raise


def siblings(folder: Path, of: object) -> dict[Path, int]:
    """Returns the other caches beside a folder whose notes say that they are `of` this, with their sizes in bytes."""
    found = dict[Path, int]()
    for path in sorted(folder.parent.glob(f"[!.]*/{CONTENTS}")):
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # damaged
            contents = json.loads(path.read_text())
            if contents["meta"]["of"] == of and path.parent != folder:
                found[path.parent] = sum(contents["files"].values())
    return found
