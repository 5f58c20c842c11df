"""A run: its folder, configuration, reports, checkpoints, and the model in them.

The only module that knows the layout of a run folder. Needs no TensorFlow until somebody asks for the model.

    args/args.json, args/environment.json   configuration; program and machine
    args/data.json                          classes, shapes, whitening: the model is rebuilt from it without its images
    tf/                                     checkpoints, TensorBoard events
    stats/                                  medians of the last reports; predictions, sampled images, CTAugment's rates
    metrics.jsonl, train.log                one line per report; what was printed
    lock.json                               while a process trains
"""
from __future__ import annotations

import glob
import json
import math
import os
import re
import shutil
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from libml.config import RunConfig
from libml.data import files
from libml.data.names import DatasetName, parse_name
from libml.devices.lock import Lock
from libml.errors import UserError, printable
from libml.writing import checksum, write_atomically, write_text, writing

if TYPE_CHECKING:
    from libml.data import DataFacts, SSLData
    from libml.features import Embedder
    from libml.learn.model import SSLModel
    from libml.networks.custom import Builder
    from libml.results.predict import Predictions

LAST = (1, 10, 20, 50)
SCORES = {"accuracy": 100, "ece": 1}  # one of which is in every report, and the largest that they can be
CHECKPOINT = "model.ckpt"
HALF_WRITTEN = re.compile(r"\.(checkpoint|\w+\.(json|jsonl|npz|npy))-[a-z0-9_]{8}|.+\.tempstate\d+")
_PART = re.compile(r".+-(\d+)\.(index|data)(-\d+-of-\d+)?")  # of a checkpoint
LENGTHEN = ("The learning rate's cosine spans the first length of a run; one that is to be lengthened needs its final "
            "length as --schedule_kimg from the start. Use the same length")
DAMAGED = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error)  # what np.load and json raise


def abridged(names: Sequence[str]) -> str:
    return ", ".join(names[:12]) + (f", … ({len(names)})" if len(names) > 12 else "")


def medians(values: Iterable[float]) -> dict[str, float]:
    """Returns the medians of the last 1, 10, 20 and 50 values (of all where there are fewer), NaN without values."""
    array = np.asarray(list(values), np.float64)
    return {f"last{n:02d}": float(np.median(array[-n:])) if len(array) else math.nan for n in LAST}


def identity(data: SSLData) -> dict:
    """Returns by what a run knows its images again: a part of data.json."""
    return {"class_names": [str(name) for name in data.class_names], "digest": data.digest,
            "num_images": len(data.labels) + len(data.test_labels)}


def _is_number(value: object) -> bool:
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 1 << 63  # larger ones are no floats
    return isinstance(value, float)


class Run:
    """A run of `train`, finished or not. What is not at hand (config, data, model) is read when it is asked for.

    Args:
        checkpoint: prefix of the checkpoint that the model is read from; the newest by default.
        method: returns a method's class by its name.
        data_dir: folder of the TFDS datasets; that of the run by default.
        network: the function that builds the network, of a run with a custom one.
    """

    def __init__(self, path: str | Path, *, checkpoint: str = "", method: Callable[[str], type[SSLModel]] | None = None,
                 config: RunConfig | None = None, data: SSLData | None = None, data_dir: str = "",
                 network: Builder | None = None, model: SSLModel | None = None):
        self.path = path = Path(path)
        self.args, self.facts_file = path / "args" / "args.json", path / "args" / "data.json"
        self.environment_file = path / "args" / "environment.json"
        self.report_file, self.log_file = path / "metrics.jsonl", path / "train.log"
        self.checkpoint_dir, self.stats, self.lock = path / "tf", path / "stats", Lock(path)
        self.network = network
        self.problems: list[str] = []  # what is damaged or missing
        self._checkpoint, self._method, self._data_dir = checkpoint, method, data_dir
        at_hand = {"config": config, "data": data, "model": model}
        self.__dict__ |= {name: value for name, value in at_hand.items() if value is not None}

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @cached_property
    def settings(self) -> dict:
        """What args.json says, of any version and method; {} if it is unreadable."""
        try:
            settings = json.loads(self.args.read_text(encoding="utf-8"))
            if not isinstance(settings, dict) or not all(_is_number(settings.get(name, 1)) and settings.get(name, 1) > 0
                                                         for name in ("train_kimg", "batch")):
                raise ValueError("not a configuration")
        except (OSError, ValueError, RecursionError) as error:
            self.problems.append(f"args/args.json is unreadable ({error})")
            return {}
        return settings

    @cached_property
    def config(self) -> RunConfig:
        """The configuration; UserError if args.json does not hold one of a known method."""
        if not self.settings or self._method is None:
            reason = "nothing says which class its method is" if self.settings else "; ".join(self.problems)
            raise UserError(f"{self.args} does not describe a run ({reason}). Bring back the file that training wrote.")
        config = RunConfig.from_json(self._method(self.method), self.settings)
        return config.replace(data_dir=self._data_dir) if self._data_dir else config

    @property
    def method(self) -> str:
        return str(self.settings.get("method", "?"))

    @property
    def dataset(self) -> DatasetName:
        text = str(self.settings.get("dataset", "?"))
        try:
            return parse_name(text)
        except UserError:  # a dataset that this program does not know
            return DatasetName(text, 0, None, 0)

    def described(self, file: str) -> dict:
        """Reads one of the folder's JSON files; {} where there is none that can be read."""
        with suppress(OSError, ValueError, RecursionError):
            contents = json.loads((self.path / file).read_text(encoding="utf-8"))
            return contents if isinstance(contents, dict) else {}
        return {}

    @cached_property
    def reports(self) -> list[dict]:
        """The reports by step, from metrics.jsonl or, where that is absent or damaged, from the event files."""
        by_step, damages = _read_log(self.report_file) if os.path.exists(self.report_file) else ({}, [])
        if damages or not by_step:
            by_step = {**_read_events(self.checkpoint_dir), **by_step}
            self.problems += damages
        if not by_step:
            self.problems.append("no reports yet")
        return [by_step[step] for step in sorted(by_step)]

    def read(self) -> Run:
        """Reads configuration and reports anew; what is damaged becomes an entry of `problems`."""
        self.problems = []
        for name in ("settings", "reports"):
            self.__dict__.pop(name, None)
            getattr(self, name)
        return self

    @property
    def finished(self) -> bool:
        return self._reaches(self.settings.get("train_kimg", math.inf))

    def _reaches(self, kimg: float) -> bool:
        """Whether the last report is that of the last update: a length need not be a whole number of batches."""
        return bool(self.reports) and kimg * 1024 - self.reports[-1]["step"] < self.settings.get("batch", 1)

    def fulfils(self, config: RunConfig) -> bool:
        """Whether this is the run of a configuration, and has reached its end."""
        return (self.args.exists() and not config.differences(self.settings)
                and self._reaches(config.training.train_kimg))

    def progress(self) -> str:
        kimg = self.reports[-1]["step"] / 1024 if self.reports else 0
        return f"{kimg:g} of {self.settings.get('train_kimg', '?')} kimg"

    def series(self, tag: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the steps and values of the reports that have the tag; `error` is 100 - accuracy."""
        source = "accuracy" if tag == "error" else tag
        pairs = [(report["step"], report[source]) for report in self.reports if _is_number(report.get(source))]
        steps, values = np.asarray([p[0] for p in pairs]), np.asarray([p[1] for p in pairs], np.float64)
        return steps, 100 - values if tag == "error" else values

    def result(self, metric: str, last: int = 20) -> float:
        """Returns the median of the last reports of "error", "accuracy" (percent), "ece" …; NaN without any."""
        if last < 1:
            raise UserError(f"last={last}: expected how many of the last reports count, 1 or more.")
        values = self.series(metric)[1][-last:]
        return float(np.median(values)) if len(values) else math.nan

    def arrays(self, name: str, keys: Sequence[str]) -> dict[str, np.ndarray]:
        """Reads stats/<name>.npz, or the only array of stats/<name>.npy; a UserError if it is missing or damaged."""
        paths = [path for ending in ("npz", "npy") if (path := self.stats / f"{name}.{ending}").exists()]
        if not paths:
            raise UserError(f"There is no {self.stats / name}: training writes it at a report; let it get that far.")
        try:
            loaded = np.load(paths[0], allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                return {keys[0]: loaded}
            with loaded:
                return {key: loaded[key] for key in keys}
        except DAMAGED as error:
            raise UserError(f"{paths[0]} is damaged ({error}). Continue the run: the next report writes it again.") \
                from error

    @cached_property
    def checkpoint(self) -> str:
        checkpoints = [self._checkpoint] if self._checkpoint else self.checkpoints()
        if not checkpoints:
            raise UserError(f"{self.path} has no checkpoint yet: training writes one every --save_kimg.")
        return checkpoints[-1]

    @cached_property
    def facts(self) -> DataFacts:
        """What the model has to know of its data: as training stored it, or, of older runs, from the dataset."""
        from libml import experiment

        stored = self._stored_facts()
        return experiment.DataFacts.from_dict(stored) if stored else experiment.facts_of(self.config, self.data)

    def _stored_facts(self) -> dict:
        """Reads data.json; {} of versions that wrote none, UserError where it is missing or damaged."""
        from libml import experiment

        cure = ("it tells of which images and classes the run is. Bring it back as training wrote it, or start a new "
                "run in another --train_dir or --rerun.")
        if not self.facts_file.exists():
            if "weights" in self.settings:  # an option that is younger than the file
                raise UserError(f"{self.facts_file} is missing: {cure}")
            return {}
        try:
            stored = json.loads(self.facts_file.read_text(encoding="utf-8"))
            experiment.DataFacts.from_dict(stored)
            if "checksum" in stored and stored.pop("checksum") != checksum(stored):
                raise ValueError("it is not what its checksum says")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.facts_file} is damaged ({type(error).__name__}: {error}): {cure}") from error
        return stored

    @cached_property
    def data(self) -> SSLData:
        """The run's images, as its method divides them; UserError if they are not those of its model."""
        from libml import experiment

        data = experiment.load(self.config)
        if self.facts_file.exists():
            experiment.check_fits(self.facts, data)
            self._check_unchanged(identity(data), "Bring them back, or evaluate what is there now by saying so: "
                                  f"--dataset={data.name}, or evaluate(data) in Python")
        return data

    def calibration_data(self) -> SSLData:
        """The run's images; UserError if it was opened with others, whose validation images it may have trained on."""
        self._check_unchanged(identity(self.data), "Open it with those it was trained on")
        return self.data

    @cached_property
    def model(self) -> SSLModel:
        """The model of the checkpoint: calling it uses the averaged weights. Needs none of the run's images."""
        from libml import experiment

        return experiment.restore(self)

    @cached_property
    def embedder(self) -> Embedder | None:
        """What makes the features of images that the model takes; None where it takes images."""
        from libml import features

        return features.restored(self.config, self.facts)

    def evaluate(self, data: SSLData | None = None) -> dict[str, float]:
        """Evaluates both models of the checkpoint on the run's own images, or others; returns scores by tag: accuracy
        (percent), ece/raw, nll/valid, accuracy/class/cat …"""
        from libml import experiment

        return experiment.evaluate(self, data)

    def predict(self, images: str | Path | Iterable[str | Path], *, credal: bool = False) -> Predictions:
        """Classifies image files, or those in folders, one or several: files, classes, probabilities, uncertainty,
        sets(coverage), records(). `credal` makes the method's credal sets too; UserError if it has none."""
        from libml.results.predict import Classifier

        return Classifier.of_model(self.model, self.facts.class_names, self.calibration_data, self.embedder).predict(
            images, credal=credal)

    def export(self, folder: str | Path, *, temperature: float | None = None, onnx: bool = False, force: bool = False,
               ) -> dict:
        """Writes the averaged model, calibrated, as SavedModel, .keras and TFLite; returns what export.json says.

        `temperature` stands for the one that validation images fit; `force` replaces an older export.
        """
        from libml.results import export

        return export.export_run(self, Path(folder), temperature=temperature, onnx=onnx, force=force)

    def claim(self, config: RunConfig, environment: dict, facts: dict | None = None) -> None:
        """Writes the configuration and what is known of the data; refuses a folder with another run's."""
        self.read()
        if self.args.exists() and (self.checkpoints() or self.reports):
            if not self.settings:
                raise UserError(f"{self.args} is not readable ({self.problems[0]}). Move {self.path} away to start a "
                                "new run.")
            for name, (here, there) in config.differences(self.settings).items():
                advice = LENGTHEN if name == "schedule_kimg" else "Use the same value"
                if name.startswith("own_") and "~" in here:
                    advice = "Use the same code (the part behind ~ is its digest)"
                raise UserError(f"{self.path} holds a run with {name}={here}, this command says {name}={there}. "
                                f"{advice}, or another --train_dir or --rerun.")
            if facts is not None:
                self._check_unchanged(facts, "Bring them back to continue; to train on what is there now, start a new "
                                      "run in another --train_dir or --rerun")
        if self.fulfils(config):
            return  # nothing will be computed: what describes it stays
        for folder in (self.args.parent, self.checkpoint_dir, self.stats, self.path):
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
                for file in folder.iterdir():  # what killed processes left half written: our names, and TensorFlow's
                    if HALF_WRITTEN.fullmatch(file.name) and file.is_file():
                        file.unlink(missing_ok=True)
        write_text(self.args, config.to_json())
        write_text(self.environment_file, json.dumps(environment, indent=1))
        if facts is not None:
            write_text(self.facts_file, json.dumps(facts | {"checksum": checksum(facts)}, indent=1))
        self.__dict__.pop("settings", None)  # they may say another length now

    def _check_unchanged(self, now: dict, advice: str) -> None:
        """Raises UserError if classes, images or split are not those of data.json; older versions knew only classes."""
        before = self._stored_facts()
        if not before or before.get("digest") == now["digest"]:
            return
        names, digest = before["class_names"], before.get("digest")
        if len(names) != len(now["class_names"]) or digest and names != now["class_names"]:
            change = f"its classes were {abridged(names)} and are {abridged(now['class_names'])}"
        elif not isinstance(digest, dict):
            return
        elif before.get("num_images") != now["num_images"]:
            change = f"it had {before.get('num_images')} images and has {now['num_images']}"
        elif digest.get("images") != now["digest"]["images"]:
            change = "as many images, but other ones, in other classes, or with other features"
        else:
            change = "the same images, divided otherwise into labelled, validation and test images"
        raise UserError(f"The images of {self.settings.get('dataset')} have changed since {self.path} was trained on "
                        f"them: {change}. {advice}. cssl-predict works with the run as it is.")

    def add_report(self, report: dict) -> None:
        self.lock.check()
        reports = self.reports
        with writing(self.report_file), self.report_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(report) + "\n")
        reports.append(report)

    def drop_reports(self, after: int) -> list[dict]:
        """Drops the reports after a number of images; returns the others. Keeps a copy of a damaged file."""
        self.lock.check()
        kept = [report for report in self.reports if report["step"] <= after]
        if any(self.report_file.name in problem for problem in self.problems):
            with writing(self.report_file):
                copies = len(list(self.path.glob(f"{self.report_file.name}.damaged*")))
                shutil.copy2(self.report_file, self.path / f"{self.report_file.name}.damaged{copies or ''}")
        write_text(self.report_file, "".join(json.dumps(report) + "\n" for report in kept))
        self.reports = kept
        return kept

    def write_arrays(self, name: str, **arrays: Any) -> None:
        write_atomically(self.stats / f"{name}.npz", lambda file: np.savez(file, **arrays))

    def write_rates(self, rates: np.ndarray, description: dict) -> None:
        write_atomically(self.stats / "rates.npy", lambda file: np.save(file, rates))
        write_text(self.stats / "rates.json", json.dumps(description))

    def write_stats(self, metrics: Iterable[str]) -> dict[str, dict[str, float]]:
        """Writes and returns the medians of each metric: stats/accuracy.json, stats/ece.json …"""
        written = {}
        for metric in metrics:
            _, values = self.series(metric)
            if len(values):
                written[metric] = medians(values)
                write_text(self.stats / f"{metric}.json", json.dumps(written[metric], indent=2) + "\n")
        return written

    def log(self, text: str) -> None:
        with writing(self.log_file), self.log_file.open("a", encoding="utf-8", errors="backslashreplace") as log:
            log.write(text + "\n")

    def checkpoints(self) -> list[str]:
        """Returns the prefixes of the checkpoints, oldest first, by their files."""
        return [self.checkpoint_at(number) for number, files in self._checkpoint_files() if len(files) == 2]

    def lost_checkpoint(self) -> str:
        """Says so if the newest checkpoint lacks a file, and the one before, if any, is read in its place."""
        newest, files = (self._checkpoint_files() or [(0, {"index", "data"})])[-1]
        if len(files) == 2:
            return ""
        used, missing = ["none", *self.checkpoints()][-1], "index" if "data" in files else "data"
        return f"{self.checkpoint_at(newest)} lacks its {missing} file; {used} is used instead"

    def _checkpoint_files(self) -> list[tuple[int, set[str]]]:
        """Returns the checkpoints, oldest first, each with which of index and data there are."""
        found: dict[int, set[str]] = {}
        for file in self.checkpoint_dir.glob(f"{CHECKPOINT}-*"):
            match = _PART.fullmatch(file.name)
            if match:
                found.setdefault(int(match[1]), set()).add(match[2])
        return sorted(found.items())

    def checkpoint_at(self, images: int) -> str:
        return str(self.checkpoint_dir / f"{CHECKPOINT}-{images}")

    def keep_checkpoints(self, count: int) -> None:
        """Deletes all but the newest checkpoints and writes the list of them that TensorFlow reads."""
        self.lock.check()
        prefixes = self.checkpoints()
        names = [Path(prefix).name for prefix in prefixes[-count:]]
        lines = [f'model_checkpoint_path: "{names[-1]}"', *(f'all_model_checkpoint_paths: "{name}"' for name in names)]
        write_text(self.checkpoint_dir / "checkpoint", "\n".join(lines) + "\n")
        for prefix in prefixes[:-count]:
            for file in sorted(glob.glob(glob.escape(prefix) + ".*"), reverse=True):  # the index first
                if _PART.fullmatch(Path(file).name):  # beside copies of the user's
                    Path(file).unlink(missing_ok=True)

    def set_aside(self, prefixes: Iterable[str]) -> None:
        """Renames damaged checkpoints, which would otherwise count as the newest."""
        for prefix in prefixes:
            for file in glob.glob(glob.escape(prefix) + ".*"):
                with writing(Path(file)):
                    os.replace(file, f"{file}.damaged")


def find_runs(patterns: Iterable[str | Path]) -> list[Run]:
    """Returns the runs (folders with args/args.json) at or below the given folders or globs, each once, by path."""
    found: dict[str, Path] = {}  # by real path
    for pattern in map(str, patterns):
        places = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
        below = [run for place in sorted(places) for run in _runs_below(place)]
        if not below:
            raise UserError(f"No runs in {pattern}: expected folders with args/args.json at or below it, "
                            "as training writes them into --train_dir.")
        for run in below:
            found.setdefault(os.path.realpath(run), run)
    return [Run(path).read() for path in sorted(found.values())]


def _runs_below(place: str) -> Iterator[Path]:
    """Yields the runs at or below a folder, through links, too; then folders that cannot be read: they may be runs."""
    seen, errors = set(), list[OSError]()
    for folder, folders, _ in os.walk(place, onerror=errors.append, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            folders.clear()
        elif os.path.isfile(os.path.join(folder, "args", "args.json")):
            yield Path(folder)
        seen.add(real)
    yield from (Path(error.filename) for error in errors if isinstance(error, PermissionError))


def find_checkpoint(text: str | Path) -> str:
    """Returns the prefix of a checkpoint by its file, or of the newest in a run, its folder tf, or above a lone run."""
    path, prefixes, lost = files.expand("eval_ckpt", str(text)), list[str](), ""
    if path.is_dir():
        runs = [args.parent.parent for args in sorted(path.rglob("args/args.json"))]
        if len(runs) > 1:
            raise UserError(f"{text} holds {len(runs)} runs; name one of them, such as {runs[0]}.")
        path = runs[0] if runs else path
        run = Run(path.parent if path.name == "tf" else path)
        prefixes, lost = run.checkpoints(), run.lost_checkpoint()
        if prefixes and lost:
            print(f"warning: {printable(lost)}", file=sys.stderr, flush=True)
    prefix = prefixes[-1] if prefixes else str(path).removesuffix(".index").removesuffix(".data-00000-of-00001")
    if not Path(prefix + ".index").exists():
        reason = f" ({lost})" if lost else ""
        raise UserError(f"No checkpoint at {text}{reason}: expected a run folder, its tf folder, or a file such as "
                        "tf/model.ckpt-65536.index.")
    return prefix


def open_run(text: str | Path, *, method: Callable[[str], type[SSLModel]] | None = None, data: SSLData | None = None,
             data_dir: str = "", network: Builder | None = None) -> Run:
    """Opens a run by what `find_checkpoint` takes; further arguments as `Run` has them."""
    prefix = find_checkpoint(text)
    path, is_folder = Path(prefix).parent.parent, files.expand("eval_ckpt", str(text)).is_dir()
    if is_folder and prefix in Run(path).checkpoints():
        prefix = ""  # the newest when it is read: a run that trains may have deleted this one by then
    run = Run(path, checkpoint=prefix, method=method, data_dir=data_dir, network=network)
    if not run.args.exists():
        raise UserError(f"{text} is not in a run folder, which would describe its model.")
    if data is not None:
        from libml import experiment

        run.data = experiment.load(run.config, data)
        experiment.check_fits(run.facts, run.data)
    return run


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
            step, scores = report["step"], [report[tag] / most for tag, most in SCORES.items()
                                            if _is_number(report.get(tag))]
            if not scores or any(score < 0 or score > 1 for score in scores) or not _is_number(step) or not step >= 0:
                raise ValueError
            reports[int(step)] = report  # a resumed run repeats steps: the later report counts
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            problems.append(f"{path.name}, line {number} is unreadable")
    return reports, problems


def _read_events(folder: Path) -> dict[int, dict]:
    events = sorted(glob.glob(os.path.join(glob.escape(str(folder)), "events.out.tfevents.*")))  # named by time
    if not events:
        return {}
    # Slow to import, and needed only where metrics.jsonl is absent or damaged.
    from tensorboard.backend.event_processing import event_file_loader
    from tensorboard.util import tensor_util

    reports: dict[int, dict] = {}
    for path in events:
        with suppress(Exception):  # the loader raises many types for damaged files; what came before counts
            for event in event_file_loader.EventFileLoader(path).Load():
                for value in event.summary.value:
                    if value.HasField("tensor"):
                        array = tensor_util.make_ndarray(value.tensor)
                        if array.ndim == 0 and np.issubdtype(array.dtype, np.number):
                            reports.setdefault(event.step, {"step": event.step})[value.tag] = float(array)
    return reports
