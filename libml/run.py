"""A run on disk: the only module that knows the layout of a run folder. Needs no TensorFlow.

    args/args.json, args/environment.json   configuration; program and machine
    args/data.json                          classes, shapes, whitening: the model is rebuilt from it without its images
    tf/                                     checkpoints, TensorBoard events
    stats/                                  medians of the last reports; predictions, sampled images, CTAugment's rates
    metrics.jsonl, train.log                one line per report; what was printed
    lock.json                               while a process trains
"""
from __future__ import annotations

import dataclasses
import glob
import json
import math
import os
import re
import shutil
import socket
import sys
import tempfile
import threading
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from libml.config import RunConfig
from libml.data import names as datasets
from libml.errors import UserError

LAST = (1, 10, 20, 50)
CHECKPOINT = "model.ckpt"
DAMAGED = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error)  # what np.load and json raise
BEAT_SECONDS, SILENT_SECONDS = 10, 60  # a lock of another machine is renewed this often; is dead after so long


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns what the file system says into one clear line."""
    try:
        yield
    except OSError as error:
        raise UserError(f"Cannot write {path} ({error.strerror or error}). Name a writable place with free space; "
                        "what was written before is still there.") from error


def write_atomically(path: Path, write: Callable[[BinaryIO], Any]) -> None:
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


def check_writable(path: Path) -> None:
    """Raises UserError if a file cannot be written there: before hours are spent on what is to be in it."""
    if path.is_dir():
        raise UserError(f"{path} is a folder: name a file in it.")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()


def write_text(path: Path, text: str) -> None:
    """Writes a text file atomically."""
    write_atomically(path, lambda file: file.write(text.encode()))


def medians(values: Iterable[float]) -> dict[str, float]:
    """Returns the medians of the last 1, 10, 20 and 50 values (of all where there are fewer), NaN without values."""
    array = np.asarray(list(values), np.float64)
    return {f"last{n:02d}": float(np.median(array[-n:])) if len(array) else math.nan for n in LAST}


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run folder holds: configuration, reports in the order of their steps, and what is wrong with it."""

    path: Path
    config: dict
    metrics: list[dict]
    problems: list[str]

    @property
    def finished(self) -> bool:
        """Whether the last report is that of the last update (a length need not be a whole number of batches)."""
        left = self.config.get("train_kimg", math.inf) * 1024 - (self.metrics[-1]["step"] if self.metrics else 0)
        return bool(self.metrics) and left < self.config.get("batch", 1)

    @property
    def method(self) -> str:
        """The name of the method."""
        return str(self.config.get("method", "?"))

    @property
    def dataset(self) -> datasets.DatasetName:
        """The dataset's name, parsed."""
        text = str(self.config.get("dataset", "?"))
        try:
            return datasets.parse_name(text)
        except UserError:  # a dataset that this program does not know
            return datasets.DatasetName(text, 0, None, 0)

    def series(self, tag: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the steps and values of the reports that have the tag; `error` is 100 - accuracy."""
        source = "accuracy" if tag == "error" else tag
        pairs = [(report["step"], report[source]) for report in self.metrics if _is_number(report.get(source))]
        steps, values = np.asarray([p[0] for p in pairs]), np.asarray([p[1] for p in pairs], np.float64)
        return steps, 100 - values if tag == "error" else values

    def result(self, metric: str, last: int = 20) -> float:
        """Returns the median of the last reports of "error", "accuracy" (percent), "ece" …; NaN without any."""
        values = self.series(metric)[1][-last:]
        return float(np.median(values)) if len(values) else math.nan

    def progress(self) -> str:
        """Says how far the run has come."""
        kimg = self.metrics[-1]["step"] / 1024 if self.metrics else 0
        return f"{kimg:g} of {self.config.get('train_kimg', '?')} kimg"

    def arrays(self, name: str, keys: Sequence[str]) -> dict[str, np.ndarray]:
        """Reads stats/<name>.npz, or the only array of stats/<name>.npy; a UserError if it is missing or damaged."""
        files = [path for ending in ("npz", "npy") if (path := self.path / "stats" / f"{name}.{ending}").exists()]
        if not files:
            raise UserError(f"There is no {self.path / 'stats' / name}: training writes it at a report; let the run "
                            "get that far.")
        try:
            loaded = np.load(files[0], allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                return {keys[0]: loaded}
            with loaded:
                return {key: loaded[key] for key in keys}
        except DAMAGED as error:
            raise UserError(f"{files[0]} is damaged ({error}). Continue the run: the next report writes it again.") \
                from error

    def described(self, file: str) -> dict:
        """Reads one of the folder's JSON files; {} where there is none that can be read."""
        try:
            found = json.loads((self.path / file).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def find_runs(patterns: Iterable[str | Path]) -> list[Path]:
    """Returns the run folders (those with args/args.json) at or below the given folders or globs, sorted."""
    found = set()
    for pattern in map(str, patterns):
        places = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
        runs = {path.parent.parent for place in places for path in Path(place).rglob("args/args.json")}
        if not runs:
            raise UserError(f"No runs in {pattern}: expected folders with args/args.json at or below it, "
                            "as training writes them into --train_dir.")
        found |= runs
    return sorted(found)


def read_runs(patterns: Iterable[str | Path]) -> list[Run]:
    """Finds and reads runs."""
    return [RunFolder(path).read() for path in find_runs(patterns)]


def _read_log(path: Path) -> tuple[dict[int, dict], list[str]]:
    """Returns the reports of metrics.jsonl by step, and what is wrong with it."""
    reports: dict[int, dict] = {}
    problems: list[str] = []
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        return {}, [f"{path.name} is unreadable ({error.strerror})"]
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            report = json.loads(line)
            if not _is_number(report["step"]) or not any(_is_number(report.get(tag)) for tag in ("accuracy", "ece")):
                raise ValueError
            reports[int(report["step"])] = report  # a resumed run repeats steps: the later report counts
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            problems.append(f"{path.name}, line {number} is unreadable")
    return reports, problems


def _read_events(folder: Path) -> dict[int, dict]:
    files = sorted(folder.glob("events.out.tfevents.*"))  # named by time
    if not files:
        return {}
    # Slow to import, and needed only where metrics.jsonl is absent or damaged.
    from tensorboard.backend.event_processing import event_file_loader
    from tensorboard.util import tensor_util

    reports: dict[int, dict] = {}
    for path in files:
        with suppress(Exception):  # the loader raises many types for damaged files; what came before counts
            for event in event_file_loader.EventFileLoader(str(path)).Load():
                for value in event.summary.value:
                    if value.HasField("tensor"):
                        array = tensor_util.make_ndarray(value.tensor)
                        if array.ndim == 0 and np.issubdtype(array.dtype, np.number):
                            reports.setdefault(event.step, {"step": event.step})[value.tag] = float(array)
    return reports


class RunFolder:
    """The folder of a run: its files, who may write them, and what they hold."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.args = self.path / "args" / "args.json"
        self.environment = self.path / "args" / "environment.json"
        self.data_facts = self.path / "args" / "data.json"
        self.checkpoint_dir = self.path / "tf"
        self.stats = self.path / "stats"
        self.reports = self.path / "metrics.jsonl"
        self.log_file = self.path / "train.log"
        self.lock_file = self.path / "lock.json"
        self._held = ""  # the text of the lock while this process holds it

    # Configuration.

    def claim(self, config: RunConfig, environment: dict, data_facts: dict | None = None) -> None:
        """Writes the configuration and what is known of the data; refuses a folder with another configuration's run."""
        if self.finished(config):
            return  # nothing will be computed: what describes it stays
        if self.args.exists() and (self.checkpoints() or self.read().metrics):
            try:
                found = json.loads(self.args.read_text(encoding="utf-8"))
                differences = config.differences(found)
            except (OSError, ValueError, TypeError) as error:
                raise UserError(f"{self.args} is not readable ({error}). Move {self.path} away to start a new run.") \
                    from error
            for name, (here, there) in differences.items():
                advice = "Use the same value"
                if name == "schedule_kimg":
                    advice = ("The learning rate's cosine spans the first length of a run; one that is to be "
                              "lengthened needs its final length as --schedule_kimg from the start. Use the same "
                              "length")
                raise UserError(f"{self.path} holds a run with {name}={here}, this command says {name}={there}. "
                                f"{advice}, or another --train_dir or --rerun.")
        for folder in (self.args.parent, self.checkpoint_dir, self.stats):
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
                self._sweep(folder)
        self._sweep(self.path)
        write_text(self.args, config.to_json())
        write_text(self.environment, json.dumps(environment, indent=1))
        if data_facts is not None:
            write_text(self.data_facts, json.dumps(data_facts, indent=1))

    def _sweep(self, folder: Path) -> None:
        """Deletes what killed processes left half written, by this class's and TensorFlow's names for it."""
        for file in folder.iterdir():
            if re.fullmatch(r"\..+-[a-z0-9_]{8}|.+\.tempstate\d+", file.name) and file.is_file():
                file.unlink(missing_ok=True)

    def finished(self, config: RunConfig) -> Run | None:
        """Returns the run if it is this very one and has reached its end."""
        if not self.args.exists():
            return None
        run = self.read()
        wanted = dataclasses.replace(run, config={"method": config.method.__name__, **config.values()})
        return run if not config.differences(run.config) and wanted.finished else None

    # Reports.

    def read(self) -> Run:
        """Reads configuration and reports, these from metrics.jsonl and, where that is absent or damaged, from the
        event files; whatever is damaged becomes an entry of `problems`."""
        problems: list[str] = []
        config: dict = {}
        try:
            config = json.loads(self.args.read_text(encoding="utf-8"))
            if not isinstance(config, dict) or not all(_is_number(config.get(name, 1)) for name in ("train_kimg",
                                                                                                    "batch")):
                config = {}
                raise ValueError("not a configuration")
        except (OSError, ValueError) as error:
            problems.append(f"args/args.json is unreadable ({error})")
        reports: dict[int, dict] = {}
        damages = [""]
        if self.reports.exists():
            reports, damages = _read_log(self.reports)
        if damages or not reports:
            reports = {**_read_events(self.checkpoint_dir), **reports}
            problems += filter(None, damages)
        if not reports:
            problems.append("no reports yet")
        return Run(self.path, config, [reports[step] for step in sorted(reports)], problems)

    def add_report(self, report: dict) -> None:
        """Appends a report."""
        self._check_held()
        with writing(self.reports), self.reports.open("a", encoding="utf-8") as file:
            file.write(json.dumps(report) + "\n")

    def drop_reports(self, after: int) -> list[dict]:
        """Drops the reports after a number of images; returns the others. Keeps a copy of a damaged file."""
        self._check_held()
        run = self.read()
        kept = [report for report in run.metrics if report["step"] <= after]
        text = "".join(json.dumps(report) + "\n" for report in kept)
        if self.reports.exists():
            with writing(self.reports):
                if any(self.reports.name in problem for problem in run.problems):
                    copies = len(list(self.path.glob(f"{self.reports.name}.damaged*")))
                    shutil.copy2(self.reports, self.path / f"{self.reports.name}.damaged{copies or ''}")
        write_text(self.reports, text)
        return kept

    def write_arrays(self, name: str, **arrays: Any) -> None:
        """Writes stats/<name>.npz."""
        write_atomically(self.stats / f"{name}.npz", lambda file: np.savez(file, **arrays))

    def write_rates(self, rates: np.ndarray, description: dict) -> None:
        """Writes CTAugment's rates, and which operations and bins they belong to."""
        write_atomically(self.stats / "rates.npy", lambda file: np.save(file, rates))
        write_text(self.stats / "rates.json", json.dumps(description))

    def write_stats(self, metrics: Iterable[str], run: Run) -> dict[str, dict[str, float]]:
        """Writes and returns the medians of each metric of the run, as read: stats/accuracy.json, stats/ece.json …"""
        written = {}
        for metric in metrics:
            _, values = run.series(metric)
            if len(values):
                written[metric] = medians(values)
                write_text(self.stats / f"{metric}.json", json.dumps(written[metric], indent=2) + "\n")
        return written

    def log(self, text: str) -> None:
        """Appends a line to train.log."""
        with writing(self.log_file), self.log_file.open("a", encoding="utf-8", errors="backslashreplace") as log:
            log.write(text + "\n")

    # Checkpoints.

    def checkpoints(self) -> list[str]:
        """Returns the prefixes of the checkpoints, oldest first, by their files."""
        found = {}
        for index in self.checkpoint_dir.glob(f"{CHECKPOINT}-*.index"):
            match = re.fullmatch(rf"{re.escape(CHECKPOINT)}-(\d+)", index.stem)
            if match and list(self.checkpoint_dir.glob(f"{index.stem}.data-*")):
                found[int(match[1])] = str(index.with_suffix(""))
        return [found[number] for number in sorted(found)]

    def checkpoint(self, images: int) -> str:
        """Returns the prefix of the checkpoint after a number of labelled images."""
        return str(self.checkpoint_dir / f"{CHECKPOINT}-{images}")

    def keep_checkpoints(self, count: int) -> None:
        """Deletes all but the newest checkpoints and writes the list of them that TensorFlow reads."""
        self._check_held()
        found = self.checkpoints()
        names = [Path(prefix).name for prefix in found[-count:]]
        lines = [f'model_checkpoint_path: "{names[-1]}"', *(f'all_model_checkpoint_paths: "{name}"' for name in names)]
        write_text(self.checkpoint_dir / "checkpoint", "\n".join(lines) + "\n")
        for prefix in found[:-count]:
            for file in sorted(glob.glob(glob.escape(prefix) + ".*"), reverse=True):  # the index first
                Path(file).unlink(missing_ok=True)

    def set_aside(self, prefixes: Iterable[str]) -> None:
        """Renames damaged checkpoints, which would otherwise count as the newest."""
        for prefix in prefixes:
            for file in glob.glob(glob.escape(prefix) + ".*"):
                with writing(Path(file)):
                    os.replace(file, f"{file}.damaged")

    # The lock.

    @contextmanager
    def lock(self) -> Iterator[None]:
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
                                f"another --train_dir or --rerun; if it is gone, delete {self.lock_file.name} there.")
            stale = self._private_file()
            with suppress(FileNotFoundError):
                os.rename(self.lock_file, stale)  # of several that try, one succeeds
                if stale.read_text(errors="replace") != seen:  # and this one came too late: it has another's new lock
                    with suppress(FileExistsError):
                        os.link(stale, self.lock_file)
                stale.unlink(missing_ok=True)
        ended = threading.Event()

        def beat_on() -> None:
            while not ended.wait(BEAT_SECONDS):
                with suppress(OSError):
                    if self._holder()[0] == text:
                        os.utime(self.lock_file)

        threading.Thread(target=beat_on, daemon=True, name="run lock").start()
        self._held = text
        try:
            yield
        finally:
            self._held = ""
            ended.set()
            with suppress(OSError):
                if self._holder()[0] == text:
                    self.lock_file.unlink()

    def _take(self, text: str) -> bool:
        """Creates the lock; False if there is one."""
        mine = self._private_file()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            mine.write_text(text)
            os.link(mine, self.lock_file)  # whole from the first moment; of several that try, one succeeds
            return True
        except FileExistsError:
            if self.lock_file.is_file():
                return False
            raise UserError(f"{self.lock_file} is not a file: move it away.") from None
        except OSError as error:
            raise UserError(f"Cannot write to the run folder {self.path} ({error.strerror}). Name a writable "
                            "--train_dir.") from error
        finally:
            with suppress(OSError):
                mine.unlink()

    def _private_file(self) -> Path:
        return self.lock_file.with_suffix(f".{socket.gethostname()}-{os.getpid()}-{threading.get_ident()}")

    def _holder(self) -> tuple[str | None, float]:
        """Returns the text of the lock (None: there is none any more) and when it was renewed."""
        try:
            return self.lock_file.read_text(errors="replace"), self.lock_file.stat().st_mtime
        except FileNotFoundError:
            return None, 0.0

    def _check_held(self) -> None:
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
