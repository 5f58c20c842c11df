"""Who may write into a folder: one process, of this machine or another that shares it."""
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

BEAT_SECONDS, SILENT_SECONDS = 10, 60  # a lock is renewed this often; that of another machine is dead after so long


class Lock:
    """The lock of a folder: the file lock.json in it.

    A process of this machine holds the folder while it lives. One of another machine, whose life cannot be seen from
    here, holds it while it renews its lock: one that is silent is waited for, then taken over.
    """

    def __init__(self, path: Path, work: str = "trained", instead: str = "use another --train_dir or --rerun"):
        self.path, self.file = path, path / "lock.json"
        self._work, self._instead = work, instead  # for messages: what is done here, and what else one can do
        self._held = ""  # the text of the lock while this process holds it

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Holds the folder for this process; a UserError says who else does."""
        text = json.dumps({"process": os.getpid(), "started": _process_start(os.getpid()), "machine": _machine(),
                           "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")})
        try:
            while not self._create(text):
                self._remove_dead()
        except OSError as error:
            raise UserError(f"Cannot write to {self.path} ({error.strerror}). Make it writable, or "
                            f"{self._instead}.") from error
        ended = threading.Event()

        def renew() -> None:
            while not ended.wait(BEAT_SECONDS):
                with suppress(OSError):
                    if self._read()[0] == text:
                        os.utime(self.file)

        threading.Thread(target=renew, daemon=True, name="run lock").start()
        self._held = text
        try:
            yield
        finally:
            self._held = ""
            ended.set()
            with suppress(OSError):
                if self._read()[0] == text:
                    self.file.unlink()

    def check(self) -> None:
        """Raises UserError if this process held the folder and has lost it."""
        text = self._read()[0] if self._held else ""
        if text is None:
            raise UserError(f"{self.path} was moved or deleted while it was {self._work}. Bring it back, and the same "
                            "command continues it.")
        if text != self._held:
            raise UserError(f"{self.path} was taken over by another process while this one stood still: {text[:200]}")

    def _create(self, text: str) -> bool:
        private = self.file.with_suffix(f".{socket.gethostname()}-{os.getpid()}-{threading.get_ident()}")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            private.write_text(text)
            os.link(private, self.file)  # whole from the first moment; of several that try, one succeeds
            return True
        except FileExistsError:
            if self.file.is_file():
                return False
            raise UserError(f"{self.file} is not a file: move it away.") from None
        finally:
            with suppress(OSError):
                private.unlink()

    def _remove_dead(self) -> None:
        """Removes the lock of a process that is gone; a UserError names one that is not."""
        text, renewed = self._read()
        if text is None:
            return
        holder: dict = {}
        with suppress(ValueError, TypeError):  # damaged
            holder = dict(json.loads(text))
        who = f"process {holder.get('process')} on {holder.get('host')}"
        if holder.get("machine") == _machine():
            lives = _process_start(holder.get("process", 0)) == holder.get("started")
        else:
            print(f"Waiting up to {SILENT_SECONDS} s to see whether {who}, which holds {self.path}, is alive",
                  file=sys.stderr, flush=True)
            deadline, lives = time.monotonic() + SILENT_SECONDS, False
            while not lives and time.monotonic() < deadline:
                time.sleep(0.5)
                lives = self._read() != (text, renewed)
        if lives:
            raise UserError(f"{self.path} is being {self._work} by {who} since {holder.get('since')}. Wait for it, "
                            f"stop it, or {self._instead}; if it is gone, delete {self.file.name} there.")
        with suppress(FileNotFoundError), self.file.open("r+", errors="replace") as file:
            with suppress(ImportError, OSError):  # Windows; a file system that has no such locks
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX)  # of several that come here, one at a time
            if file.read() == text and os.path.samestat(os.fstat(file.fileno()), self.file.stat()):
                self.file.unlink()

    def _read(self) -> tuple[str | None, float]:
        """Returns the text of the lock (None: there is none) and when it was renewed."""
        try:
            return self.file.read_text(errors="replace"), self.file.stat().st_mtime
        except FileNotFoundError:
            return None, 0.0


def _machine() -> str:
    """Identifies this boot of this machine or container; process numbers are comparable only within it."""
    facts = [socket.gethostname()]
    with suppress(OSError):
        facts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(facts)


def _process_start(process: int) -> str | None:
    """When a process of this machine started, in the kernel's ticks; None if there is no such process.

    Elsewhere than on Linux only whether it lives can be told.
    """
    try:
        if not Path("/proc/self").exists():
            os.kill(process, 0)
            return "alive"
        fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
        return None if fields[0] in "ZX" else fields[19]
    except PermissionError:  # another user's
        return "alive"
    except OSError:
        return None
