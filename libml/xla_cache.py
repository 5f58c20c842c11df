"""What XLA has compiled for this CPU, kept between runs, so that a second start need not compile it again.

TensorFlow can read and write such files (its persistent cache), but a damaged one makes every later run fail, and it
loads machine code for whatever CPU it was made. So each process gets a folder of its own, with whole files of its own
kind; what it adds comes back under a name that holds its checksum.
"""
from __future__ import annotations

import hashlib
import importlib.metadata
import shutil
import sys
import tempfile
import time
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

from libml.devices.machine import cpu_facts
from libml.errors import UserError
from libml.run import write_atomically

FLAG = "--tf_xla_persistent_cache_directory"
CPU_ALONE = "--tf_xla_persistent_cache_device_types=CPU"  # it was never tried on others
UNTRIED = (2, 22)  # from this TensorFlow on: one that does not know a flag would end the process
MAX_BYTES = 64 << 20  # kept per kind of CPU, the newest: some thirty settings
FREE_BYTES = 1 << 30  # that a disk must have left to be used for this
ABANDONED_SECONDS = 24 * 3600.0  # after which the folder of a process that was killed is removed


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _tensorflow_version() -> str:
    for name in ("tensorflow", "tensorflow-cpu"):
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "99.0"


class XlaCache:
    """The files for this CPU and this TensorFlow below a folder, as one process uses them.

    TensorFlow reads `environment` once. Where anything is in the way (TensorFlow was imported before, no such folder,
    no room, a CPU of unknown features, a cache that the user has set up) it does nothing.

    Args:
        folder: where to keep files.
        environment: of this process; gets TensorFlow's flags.
    """

    def __init__(self, folder: Path, environment: MutableMapping[str, str]):
        self.own: Path | None = None
        flags, features, version = environment.get("TF_XLA_FLAGS", ""), cpu_facts()[1], _tensorflow_version()
        self._environment, self._flags = environment, flags
        ready = tuple(map(int, version.split(".")[:2])) < UNTRIED and "tensorflow" not in sys.modules
        placed = folder.is_absolute() and not any(letter.isspace() for letter in str(folder))  # one word of the flags
        if not ready or not placed or not features or FLAG in flags:
            return
        kind = "\n".join([features, version, environment.get("XLA_FLAGS", "")])
        self.store = folder / _digest(kind.encode())
        with suppress(OSError):
            self.store.mkdir(parents=True, exist_ok=True)
            self._clean()
            if shutil.disk_usage(self.store).free > FREE_BYTES:
                own = Path(tempfile.mkdtemp(prefix="process-", dir=self.store))
                self._fetch(own)
                self.own = own
                environment["TF_XLA_FLAGS"] = f"{flags} {FLAG}={own} {CPU_ALONE}".strip()

    def _kept(self) -> list[Path]:
        """All files, newest first."""
        return sorted(self.store.glob("*.pb"), key=lambda file: file.stat().st_mtime, reverse=True)

    def _clean(self) -> None:
        size = 0
        for file in self._kept():
            size += file.stat().st_size
            if size > MAX_BYTES:
                file.unlink(missing_ok=True)
        for folder in self.store.glob("process-*"):
            if time.time() - folder.stat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)

    def _fetch(self, own: Path) -> None:
        for file in self._kept():
            digest, _, name = file.name.partition("-")
            content = file.read_bytes()
            if _digest(content) == digest:
                (own / name).write_bytes(content)
            else:  # cut short, or otherwise damaged
                file.unlink(missing_ok=True)

    def keep(self) -> None:
        """Adds what this process has compiled so far to what is kept."""
        if self.own is None:
            return
        with suppress(OSError, UserError):
            known = {file.name.partition("-")[2] for file in self._kept()}
            for file in self.own.glob("*.pb"):
                if file.name not in known:
                    self._add(file.name, file.read_bytes())

    def _add(self, name: str, content: bytes) -> None:
        write_atomically(self.store / f"{_digest(content)}-{name}", lambda file: file.write(content))

    def close(self) -> None:
        """Keeps what there is, and removes this process's folder."""
        self.keep()
        if self.own is not None:
            shutil.rmtree(self.own, ignore_errors=True)
            self.own, self._environment["TF_XLA_FLAGS"] = None, self._flags
