"""Who may write into a folder: one process, of this machine or another that shares it."""
from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from libml.errors import UserError

BEAT_SECONDS, SILENT_SECONDS = 10, 60  # a lock of another machine is renewed this often; is dead after so long


class Lock:
    """The lock of a folder, a file in it."""

    def __init__(self, path: Path):
        self.path, self.file = path, path / "lock.json"
        self._held = ""  # the text of the lock while this process holds it

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Holds the folder for this process; a UserError says who else does.

        A process of this machine holds it while it lives. One of another machine, whose life cannot be seen from here,
        holds it while it renews its lock: one that is silent is waited for, then taken over.
        """
        token = {"process": os.getpid(), "started": _process_start(os.getpid()), "machine": _machine(),
                 "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        text = json.dumps(token)
        while not self._take(text):
            seen, beat = self._holder()
            if seen is None:
                continue
            holder: dict = {}
            with suppress(ValueError, TypeError):  # damaged, or just being written
                holder = dict(json.loads(seen))
            if not self._is_dead(holder, seen, beat):
                raise UserError(f"{self.path} is being trained by process {holder.get('process')} on "
                                f"{holder.get('host')} since {holder.get('since')}. Wait for it, stop it, or use "
                                f"another --train_dir or --rerun; if it is gone, delete {self.file.name} there.")
            stale = self._private_file()
            with suppress(FileNotFoundError):
                os.rename(self.file, stale)  # of several that try, one succeeds
                if stale.read_text(errors="replace") != seen:  # and this one came too late: it has another's new lock
                    with suppress(FileExistsError):
                        os.link(stale, self.file)
                stale.unlink(missing_ok=True)
        ended = threading.Event()

        def beat_on() -> None:
            while not ended.wait(BEAT_SECONDS):
                with suppress(OSError):
                    if self._holder()[0] == text:
                        os.utime(self.file)

        threading.Thread(target=beat_on, daemon=True, name="run lock").start()
        self._held = text
        try:
            yield
        finally:
            self._held = ""
            ended.set()
            with suppress(OSError):
                if self._holder()[0] == text:
                    self.file.unlink()

    def _take(self, text: str) -> bool:
        """Creates the lock; False if there is one."""
        mine = self._private_file()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            mine.write_text(text)
            os.link(mine, self.file)  # whole from the first moment; of several that try, one succeeds
            return True
        except FileExistsError:
            if self.file.is_file():
                return False
            raise UserError(f"{self.file} is not a file: move it away.") from None
        except OSError as error:
            raise UserError(f"Cannot write to the run folder {self.path} ({error.strerror}). Name a writable "
                            "--train_dir.") from error
        finally:
            with suppress(OSError):
                mine.unlink()

    def _private_file(self) -> Path:
        return self.file.with_suffix(f".{socket.gethostname()}-{os.getpid()}-{threading.get_ident()}")

    def _holder(self) -> tuple[str | None, float]:
        """Returns the text of the lock (None: there is none any more) and when it was renewed."""
        try:
            return self.file.read_text(errors="replace"), self.file.stat().st_mtime
        except FileNotFoundError:
            return None, 0.0

    def check(self) -> None:
        """Raises UserError if this process trained here but does not hold the folder any more."""
        found = self._holder()[0] if self._held else ""
        if found is None:
            raise UserError(f"{self.path} was moved or deleted while it was trained. Bring it back, and the same "
                            "command continues it.")
        if found != self._held:
            raise UserError(f"{self.path} was taken over by another process while this one stood still: {found[:200]}")

    def _is_dead(self, holder: dict, seen: str, beat: float) -> bool:
        if holder.get("machine") == _machine():
            return _process_start(holder.get("process", 0)) != holder.get("started")
        print(f"Waiting up to {SILENT_SECONDS} s to see whether process {holder.get('process')} on "
              f"{holder.get('host')}, which holds {self.path}, is alive", file=sys.stderr, flush=True)
        deadline = time.monotonic() + SILENT_SECONDS
        while time.monotonic() < deadline:
            time.sleep(0.5)
            if self._holder() != (seen, beat):
                return False
        return True


def _machine() -> str:
    """A name for this machine since it was started, containers apart: process numbers mean something only within."""
    facts = [socket.gethostname()]
    with suppress(OSError):
        facts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(facts)


def _process_start(process: int) -> str | None:
    """When a process of this machine started, in the kernel's ticks; None if there is no such process."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
        return None if fields[0] in "ZX" else fields[19]
    except OSError:
        if not Path("/proc/self").exists():  # not Linux: only whether it lives can be told
            try:
                os.kill(process, 0)
            except ProcessLookupError:
                return None
            except OSError:  # another user's
                pass
            return "alive"
        return None
