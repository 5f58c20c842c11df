"""Runs on disk: finding them, reading their numbers, summarising them over seeds."""
import dataclasses
import glob
import json
import math
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from libml import data, paper
from libml.errors import UserError
from libml.paper import Column

LAST = (1, 10, 20, 50)
METRICS = {"error": "error %", "accuracy": "accuracy %", "ece": "ECE", "accuracy/valid": "validation accuracy %"}

# Where and how a run is made, not what is computed.
CIRCUMSTANCES = frozenset({"data_dir", "train_dir", "rerun", "eval_ckpt", "keep_ckpt", "save_kimg", "strategy",
                           "num_devices", "deterministic"})
# Never a reason for a row of its own.
INCIDENTAL = CIRCUMSTANCES | {"dataset", "seed", "report_kimg", "method"}


def medians(values: Iterable[float]) -> dict[str, float]:
    """Returns the medians of the last 1, 10, 20 and 50 values (of all where there are fewer), NaN without values."""
    values = np.asarray(list(values), np.float64)
    return {f"last{n:02d}": float(np.median(values[-n:])) if len(values) else float("nan") for n in LAST}


@dataclasses.dataclass(frozen=True)
class Run:
    """A run folder: its configuration, its reports in the order of their steps, and what is wrong with it."""

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
    def dataset(self) -> data.DatasetName:
        """The dataset's name, in parts."""
        text = str(self.config.get("dataset", "?"))
        try:
            return data.parse_name(text)
        except UserError:  # arrays of the user's own
            return data.DatasetName(text, 0, None, 0)

    def series(self, tag: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the steps and values of the reports that have the tag; `error` is 100 - accuracy."""
        source = "accuracy" if tag == "error" else tag
        pairs = [(report["step"], report[source]) for report in self.metrics if report.get(source) is not None]
        steps, values = np.asarray([p[0] for p in pairs]), np.asarray([p[1] for p in pairs], np.float64)
        return steps, 100 - values if tag == "error" else values

    def result(self, metric: str) -> float:
        """Returns the median of the last 20 reports of "error", "accuracy" (percent), "ece" …; NaN without any."""
        return medians(self.series(metric)[1])["last20"]

    def progress(self) -> str:
        """Says how far the run has come."""
        kimg = self.metrics[-1]["step"] / 1024 if self.metrics else 0
        return f"{kimg:g} of {self.config.get('train_kimg', '?')} kimg"


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


def read_run(path: str | Path) -> Run:
    """Reads a run folder, from metrics.jsonl or, where that is absent, from the event files; whatever is damaged
    becomes an entry of `problems`."""
    path, problems, config = Path(path), [], {}
    try:
        config = json.loads((path / "args/args.json").read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("not an object")
    except (OSError, ValueError) as error:
        config = {}
        problems.append(f"args/args.json is unreadable ({error})")
    log = path / "metrics.jsonl"
    reports = _read_log(log, problems) if log.exists() else _read_events(path / "tf")
    if not reports:
        problems.append("no reports yet")
    return Run(path, config, [reports[step] for step in sorted(reports)], problems)


def read_runs(patterns: Iterable[str | Path]) -> list[Run]:
    """Finds and reads runs."""
    return [read_run(path) for path in find_runs(patterns)]


def _read_log(path: Path, problems: list[str]) -> dict[int, dict]:
    reports, lines = {}, []
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        problems.append(f"{path.name} is unreadable ({error.strerror})")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            report = json.loads(line)
            reports[int(report["step"])] = report  # a resumed run repeats steps: the later report counts
        except (ValueError, KeyError, TypeError):
            if number < len(lines):  # a last line without its end is a killed run: the report before it stands
                problems.append(f"{path.name}, line {number} is unreadable")
    return reports


def _read_events(folder: Path) -> dict[int, dict]:
    # Slow to import, and needed only where there is no metrics.jsonl.
    from tensorboard.backend.event_processing import event_file_loader
    from tensorboard.util import tensor_util

    reports: dict[int, dict] = {}
    for path in sorted(folder.rglob("events.out.tfevents.*")):  # named by time
        for event in event_file_loader.EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.HasField("tensor"):
                    array = tensor_util.make_ndarray(value.tensor)
                    if array.ndim == 0 and np.issubdtype(array.dtype, np.number):
                        reports.setdefault(event.step, {"step": event.step})[value.tag] = float(array)
    return reports


def write_stats(run: Run, metrics: Iterable[str] = ("accuracy", "ece")) -> dict[str, dict[str, float]]:
    """Writes and returns the medians of each metric the run has: stats/accuracy.json, stats/ece.json."""
    written = {}
    for metric in metrics:
        _, values = run.series(metric)
        if len(values):
            written[metric] = medians(values)
            write_text(run.path / "stats" / f"{metric}.json", json.dumps(written[metric], indent=2) + "\n")
    return written


def write_text(path: Path, text: str) -> None:
    """Writes a file in one step, so that nobody sees half of it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"Cannot write {path} ({error.strerror}). Name a writable place.") from error


class Summary(NamedTuple):
    """A cell over split seeds."""

    mean: float
    std: float  # of the sample (n - 1); NaN for one seed
    seeds: tuple[int, ...]
    runs: tuple[Run, ...]


@dataclasses.dataclass(frozen=True)
class Grid:
    """Rows (method and its settings) by columns (dataset, labels, metric), and remarks on what is not in it."""

    rows: tuple[str, ...]
    columns: tuple[Column, ...]
    cells: dict[tuple[str, Column], Summary]
    notes: tuple[str, ...]


def settings(run: Run) -> dict:
    """Returns what may set a run apart from another of its method: configuration and number of validation images."""
    return {"valid": run.dataset.valid} | {key: value for key, value in run.config.items() if key not in INCIDENTAL}


def row_labels(runs: list[Run]) -> list[str]:
    """Returns for each run its method, with the settings in which runs of the method on the same data differ."""
    values = defaultdict(lambda: defaultdict(set))
    for run in runs:
        name = run.dataset
        for key, value in settings(run).items():
            values[run.method, name.dataset, name.labels][key].add(json.dumps(value))
    differing = defaultdict(set)
    for (method, *_), by_key in values.items():
        differing[method] |= {key for key, seen in by_key.items() if len(seen) > 1}

    def label(run: Run) -> str:
        shown = [f"{key}={value}" for key, value in sorted(settings(run).items()) if key in differing[run.method]]
        return f"{run.method} ({', '.join(shown)})" if shown else run.method

    return [label(run) for run in runs]


def summarise(runs: list[Run], metrics: Iterable[str] = ("error",), expected_seeds: Iterable[int] = (),
              unfinished: bool = False) -> Grid:
    """Averages results over split seeds; runs of the same split count as one, by their mean.

    Unfinished runs are left out (unless `unfinished`) and named in the notes, as are missing seeds and damaged files.
    """
    metrics, expected_seeds, notes = tuple(metrics), sorted(set(expected_seeds)), []
    for run in runs:
        notes += [f"{run.path}: {problem}" for problem in run.problems]
        if run.config and run.metrics and not run.finished:
            notes.append(f"{run.path}: unfinished ({run.progress()}), {'included' if unfinished else 'left out'}")
    known = [run for run in runs if run.config]
    groups = defaultdict(lambda: defaultdict(list))
    for run, label in zip(known, row_labels(known), strict=True):
        name = run.dataset
        groups[label, name.dataset, name.labels][name.seed].append(run)
    cells = {}
    for (label, dataset, labels), all_by_seed in groups.items():
        place = f"{label} on {dataset}@{labels or 'all'}"
        missing = [seed for seed in expected_seeds if seed not in all_by_seed]
        if missing:
            notes.append(f"{place}: no run of split seed {', '.join(map(str, missing))}")
        usable = {seed: [run for run in same if run.metrics and (run.finished or unfinished)]
                  for seed, same in sorted(all_by_seed.items())}
        by_seed = {seed: same for seed, same in usable.items() if same}
        notes += [f"{place}: {len(same)} runs of split seed {seed}, counted once by their mean: "
                  + ", ".join(str(run.path) for run in same) for seed, same in by_seed.items() if len(same) > 1]
        for metric in metrics:
            values = {seed: np.mean([run.result(metric) for run in same]) for seed, same in by_seed.items()}
            for seed in [seed for seed, value in values.items() if math.isnan(value)]:
                notes.append(f"{place}, split seed {seed}: no {metric} was reported")
                del values[seed]
            if values:
                numbers = np.asarray(list(values.values()))
                cells[label, Column(dataset, labels, metric)] = Summary(
                    float(numbers.mean()), float(numbers.std(ddof=1)) if len(numbers) > 1 else float("nan"),
                    tuple(values), tuple(run for seed in values for run in by_seed[seed]))
    columns = sorted({column for _, column in cells},
                     key=lambda c: (c.dataset, c.labels or math.inf, metrics.index(c.metric)))
    return Grid(tuple(sorted({label for label, _ in cells})), tuple(columns), cells, tuple(notes))


class Comparison(NamedTuple):
    """A cell of ours beside the paper's: difference ours - paper, and whether it is within two of the paper's std."""

    row: str
    column: Column
    ours: Summary
    match: paper.Match | None  # None: the paper has no such cell
    theirs: paper.Cell | None
    difference: float
    within: bool | None  # None: no std to measure by

    @property
    def deviations(self) -> str:
        """The settings in which our runs differ from the paper's, in words."""
        found = self.match.deviations.items() if self.match else ()
        return ", ".join(f"{key} {ours} instead of {theirs}" for key, (ours, theirs) in found)


def compare(grid: Grid, tables: Iterable[str] = tuple(paper.TABLES)) -> list[Comparison]:
    """Puts the paper's number beside each cell of a grid."""
    lines = []
    for (row, column), ours in grid.cells.items():
        printed = column._replace(metric="error") if column.metric == "accuracy" else column
        run = ours.runs[0]
        match = paper.compare({**run.config, "valid": run.dataset.valid}, printed, tuple(tables))
        theirs, difference, within = None, float("nan"), None
        if match:
            theirs = match.cell
            if column.metric == "accuracy":
                theirs = theirs._replace(mean=100 - theirs.mean)
            difference = ours.mean - theirs.mean
            within = None if theirs.std is None else bool(abs(difference) <= 2 * theirs.std)
        lines.append(Comparison(row, column, ours, match, theirs, difference, within))
    return sorted(lines, key=lambda line: (grid.columns.index(line.column), line.row))


def column_title(column: Column) -> str:
    """Names a column: dataset, labels and metric."""
    return f"{column.dataset}, {column.labels or 'all'} labels, {METRICS[column.metric]}"


def format_cell(cell: Summary | paper.Cell | None, metric: str) -> str:
    """Formats mean ± std with the digits the paper uses; a dash for None."""
    if cell is None:
        return "–"
    digits = 3 if metric == "ece" else 2
    std = "" if cell.std is None or math.isnan(cell.std) else f" ± {cell.std:.{digits}f}"
    return f"{cell.mean:.{digits}f}{std}"


def table_of(grid: Grid) -> list[list[str]]:
    """Returns a grid as text: a header line, then a line per row; the number of seeds in brackets."""
    lines = [["method", *map(column_title, grid.columns)]]
    for row in grid.rows:
        found = [(column, grid.cells.get((row, column))) for column in grid.columns]
        lines.append([row, *(format_cell(cell, column.metric) + (f" ({len(cell.seeds)})" if cell else "")
                             for column, cell in found)])
    return lines


def table_of_comparisons(comparisons: list[Comparison]) -> list[list[str]]:
    """Returns comparisons as text: a header line, then a line per cell."""
    lines = [["method", "column", "seeds", "ours", "paper", "difference", "within 2 std", "paper's row", "deviations"]]
    for line in comparisons:
        metric = line.column.metric
        difference = f"{line.difference:+.{3 if metric == 'ece' else 2}f}" if line.match else "–"
        lines.append([line.row, column_title(line.column), str(len(line.ours.seeds)), format_cell(line.ours, metric),
                      format_cell(line.theirs, metric), difference, {True: "yes", False: "no", None: "–"}[line.within],
                      f"{line.match.table.name}: {line.match.row.name}" if line.match else "–",
                      line.deviations or ("none" if line.match else "–")])
    return lines
