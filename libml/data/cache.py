"""Named arrays in a folder, memory-mapped when read and complete whenever they can be seen."""
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from libml.errors import UserError

CONTENTS = "contents.json"


class Writer:
    """Collects the arrays of a cache folder that is not visible yet."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._open: dict[str, np.memmap] = {}
        self.meta: dict = {}

    def create(self, name: str, shape: tuple[int, ...], dtype) -> np.ndarray:
        """Returns a file-backed array to fill, so that a large one is never held in memory as a whole."""
        self._open[name] = np.lib.format.open_memmap(self._folder / f"{name}.npy", "w+", dtype, shape)
        return self._open[name]

    def add(self, name: str, array: np.ndarray) -> None:
        """Stores an array that exists already."""
        self.create(name, array.shape, array.dtype)[...] = array

    def finish(self) -> None:
        """Flushes everything and writes the list of contents last."""
        for array in self._open.values():
            array.flush()
        self._open.clear()
        sizes = {path.name: path.stat().st_size for path in sorted(self._folder.glob("*.npy"))}
        (self._folder / CONTENTS).write_text(json.dumps({"files": sizes, "meta": self.meta}))


def write(folder: Path, build: Callable[[Writer], None]) -> None:
    """Builds a cache folder next to its final place and moves it there in one atomic step."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-unfinished-", dir=folder.parent))
    except OSError as error:
        raise UserError(f"Cannot write the decoded images to {folder} ({error.strerror}). Make {folder.parent} "
                        "writable, or copy the data to a folder of your own and name that with --data_dir.") from error
    try:
        writer = Writer(temporary)
        build(writer)
        writer.finish()
        temporary.chmod(0o755)
        try:
            os.rename(temporary, folder)
        except OSError:
            if not (folder / CONTENTS).exists():  # otherwise another process was first: its arrays are the same
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def read_or_build(folder: Path, build: Callable[[Writer], None]) -> tuple[dict[str, np.ndarray], dict]:
    """Returns what `read` does, after building the cache where there is none."""
    if (contents := read(folder)) is None:
        write(folder, build)
        contents = read(folder)
    assert contents is not None
    return contents


def read(folder: Path) -> tuple[dict[str, np.ndarray], dict] | None:
    """Returns the arrays (memory-mapped, read-only) and the notes stored with them, or None if there is no cache."""
    if not folder.exists():
        return None
    try:
        contents = json.loads((folder / CONTENTS).read_text())
        for name, size in contents["files"].items():
            if (actual := (folder / name).stat().st_size) != size:
                raise ValueError(f"{name} has {actual} bytes instead of {size}")
        return {name.removesuffix(".npy"): np.load(folder / name, mmap_mode="r")
                for name in contents["files"]}, contents["meta"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"The cache of decoded images {folder} is damaged ({error}). "
                        f"Delete that folder and start again; it is rebuilt from the data beside it.") from error
