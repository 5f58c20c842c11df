"""Tables of runs: results over seeds, beside the paper's, as Markdown, LaTeX or CSV."""
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from libml.config import sets_row_apart
from libml.results import metrics, paper
from libml.results.paper import Column
from libml.run import Run

_LATEX = str.maketrans({**{c: f"\\{c}" for c in "&%$#_{}"}, "\\": r"\textbackslash{}", "±": r"$\pm$", "–": "--",
                        "τ": r"$\tau$", "α": r"$\alpha$", "≥": r"$\geq$", "~": r"\textasciitilde{}",
                        "^": r"\textasciicircum{}"})


def mean_and_std(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Returns mean and standard deviation of the sample (n - 1); the latter is NaN for one value."""
    array = np.asarray(values, np.float64)
    return float(array.mean()), float(array.std(ddof=1)) if len(array) > 1 else math.nan


def format_mean(mean: float | None, std: float | None, digits: int) -> str:
    """Formats mean ± std; without what is None or NaN, a dash for nothing."""
    known = [f"{value:.{digits}f}" for value in (mean, std) if value is not None and not math.isnan(value)]
    return " ± ".join(known) or "–"


def markdown(lines: list[list[str]]) -> str:
    lines = [[cell.replace("|", r"\|") for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines)


def latex(lines: list[list[str]]) -> str:
    header, *rows = [" & ".join(cell.translate(_LATEX) for cell in line) + r" \\" for line in lines]
    return "\n".join([rf"\begin{{tabular}}{{l{'c' * (len(lines[0]) - 1)}}}", r"\toprule", header, r"\midrule", *rows,
                      r"\bottomrule", r"\end{tabular}"])


class Summary(NamedTuple):
    """A cell over split seeds."""

    mean: float
    std: float  # of the sample (n - 1); NaN for one seed
    by_seed: dict[int, float]
    runs: tuple[Run, ...]

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(self.by_seed)


class Grid(NamedTuple):
    """Rows (method and its settings) by columns (dataset, labels, metric), and remarks on what is not in it."""

    rows: tuple[str, ...]
    columns: tuple[Column, ...]
    cells: dict[tuple[str, Column], Summary]
    notes: tuple[str, ...]


def row_labels(runs: Sequence[Run]) -> list[str]:
    """Returns for each run its method, with the settings in which runs of the method on the same data differ."""
    values, labels = defaultdict(set), []
    settings = [{"valid": run.dataset.valid} | {key: value for key, value in run.settings.items()
                                                if sets_row_apart(key)} for run in runs]
    for run, own in zip(runs, settings, strict=True):
        for key, value in own.items():
            values[run.method, run.dataset.dataset, run.dataset.labels, key].add(json.dumps(value))
    differing = {(method, key) for (method, *_, key), seen in values.items() if len(seen) > 1}
    for run, own in zip(runs, settings, strict=True):
        shown = [f"{key}={value}" for key, value in sorted(own.items()) if (run.method, key) in differing]
        labels.append(f"{run.method} ({', '.join(shown)})" if shown else run.method)
    return labels


def _ranges(numbers: list[int]) -> str:
    """Writes sorted numbers as 1, 3-5."""
    ends = [i for i in range(len(numbers)) if numbers[i:i + 2] != [numbers[i], numbers[i] + 1]]
    firsts = [0, *(end + 1 for end in ends)]
    return ", ".join(str(numbers[end]) if first == end else f"{numbers[first]}-{numbers[end]}"
                     for first, end in zip(firsts, ends, strict=False))


def summarise(runs: list[Run], tags: Iterable[str] = ("error",), expected_seeds: Iterable[int] = (),
              unfinished: bool = False, last: int = 20) -> Grid:
    """Averages results, medians of the `last` reports, over split seeds; runs of a split count as one, by their mean.

    Unfinished runs are left out (unless `unfinished`) and named in the notes, as are missing seeds and damaged files.
    """
    tags, expected_seeds, notes = tuple(tags), sorted(set(expected_seeds)), []
    for run in runs:
        notes += [f"{run.path}: {problem}" for problem in run.problems]
        if run.settings and run.reports and not run.finished:
            notes.append(f"{run.path}: unfinished ({run.progress()}), {'included' if unfinished else 'left out'}")
    known = [run for run in runs if run.settings]
    groups: dict = defaultdict(lambda: defaultdict(list))
    for run, label in zip(known, row_labels(known), strict=True):
        name = run.dataset
        groups[label, name.dataset, name.labels][name.seed].append(run)
    cells = {}
    for (label, dataset, labels), all_by_seed in groups.items():
        place = f"{label} on {dataset}@{labels or 'all'}"
        missing = [seed for seed in expected_seeds if seed not in all_by_seed]
        if missing:
            notes.append(f"{place}: no run of split seed {_ranges(missing)}")
        usable = {seed: [run for run in same if run.reports and (run.finished or unfinished)]
                  for seed, same in sorted(all_by_seed.items())}
        by_seed = {seed: same for seed, same in usable.items() if same}
        notes += [f"{place}: {len(same)} runs of split seed {seed}, counted once by their mean: "
                  + ", ".join(str(run.path) for run in same) for seed, same in by_seed.items() if len(same) > 1]
        for tag in tags:
            found = {seed: float(np.mean([run.result(tag, last) for run in same])) for seed, same in by_seed.items()}
            values = {seed: value for seed, value in found.items() if not math.isnan(value)}
            notes += [f"{place}, split seed {seed}: no {tag} was reported" for seed in found if seed not in values]
            if values:
                cells[label, Column(dataset, labels, tag)] = Summary(
                    *mean_and_std([*values.values()]), values, tuple(run for seed in values for run in by_seed[seed]))
    columns = sorted({column for _, column in cells},
                     key=lambda c: (c.dataset, c.labels or math.inf, tags.index(c.metric)))
    return Grid(tuple(sorted({label for label, _ in cells})), tuple(columns), cells, tuple(notes))


class Difference(NamedTuple):
    """Mean of paired differences, one per split seed that both have, with its 95 % interval."""

    mean: float
    low: float  # NaN for one seed, as `high`
    high: float
    differences: tuple[float, ...]

    def interval(self, digits: int) -> str:
        """The interval as text; a dash for one seed, which has none."""
        return "–" if math.isnan(self.low) else f"{self.low:+.{digits}f} to {self.high:+.{digits}f}"

    @property
    def verdict(self) -> str:
        """Whether the mean is above 0: yes or no where the interval says so, else undecided."""
        return "yes" if self.low > 0 else "no" if self.high < 0 else "undecided"


def paired_difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Difference:
    """Returns the mean of ours - theirs over the seeds of both, with Student's interval.

    Its level holds for normal differences. (The percentile bootstrap covers their mean in 83 % of cases, not 95, where
    there are five.) No interval can tell much from five numbers, which is why they are there too.
    """
    differences = np.asarray([ours[seed] - theirs[seed] for seed in sorted({*ours} & {*theirs})], np.float64)
    differences = differences.round(9)  # equal results differ by nothing, not by rounding: that would be an answer
    from scipy.special import stdtrit  # slow to import

    count = len(differences)
    mean, std = mean_and_std(differences) if count else (math.nan, math.nan)
    reach = stdtrit(count - 1, 0.975) * std / math.sqrt(count or 1)  # NaN of one
    return Difference(mean, mean - reach, mean + reach, tuple(differences.tolist()))


def differences(grid: Grid, reference: str) -> dict[tuple[str, Column], Difference]:
    """Returns the differences of all other rows of a grid to one of them, where both have seeds in common."""
    found = {}
    for (row, column), cell in grid.cells.items():
        other = grid.cells.get((reference, column))
        if row != reference and other and {*cell.seeds} & {*other.seeds}:
            found[row, column] = paired_difference(cell.by_seed, other.by_seed)
    return found


def table_of_differences(found: Mapping[tuple[str, Column], Difference], reference: str) -> list[list[str]]:
    lines = [["method", "column", f"difference to {reference}", "95 % interval", "above in", "seeds"]]
    for (row, column), difference in found.items():
        digits = metrics.shown(column.metric).digits
        lines.append([row, column.title, f"{difference.mean:+.{digits}f}", difference.interval(digits),
                      str(sum(value > 0 for value in difference.differences)), str(len(difference.differences))])
    return lines


class Comparison(NamedTuple):
    """A cell of ours beside the paper's."""

    row: str
    column: Column
    ours: Summary
    near: paper.PaperCell | None  # None: the paper has no such cell
    theirs: paper.Cell | None

    @property
    def difference(self) -> float:
        return self.ours.mean - self.theirs.mean if self.theirs else math.nan

    @property
    def within(self) -> bool | None:
        """Whether the difference is within two of the paper's standard deviations; None without one."""
        return abs(self.difference) <= 2 * self.theirs.std if self.theirs and self.theirs.std is not None else None

    @property
    def deviations(self) -> str:
        found = self.near.deviations.items() if self.near else ()
        return ", ".join(f"{key} {ours} instead of {theirs}" for key, (ours, theirs) in found)


def compare_with_paper(grid: Grid, tables: Iterable[str] = tuple(paper.TABLES)) -> list[Comparison]:
    lines = []
    for (row, column), ours in grid.cells.items():
        printed = column._replace(metric="error") if column.metric == "accuracy" else column
        run = ours.runs[0]
        near = paper.nearest_cell({**run.settings, "valid": run.dataset.valid}, printed, tuple(tables))
        theirs = near.cell if near else None
        if theirs and column.metric == "accuracy":
            theirs = theirs._replace(mean=100 - theirs.mean)
        lines.append(Comparison(row, column, ours, near, theirs))
    return sorted(lines, key=lambda line: (grid.columns.index(line.column), line.row))


def format_cell(cell: Summary | paper.Cell | None, tag: str) -> str:
    """Formats mean ± std with the digits the paper uses; a dash for None."""
    return format_mean(cell and cell.mean, cell and cell.std, metrics.shown(tag).digits)


def table_of(grid: Grid) -> list[list[str]]:
    """Returns a grid as text: a header line, then a line per row; the number of seeds in brackets."""
    lines = [["method", *(column.title for column in grid.columns)]]
    for row in grid.rows:
        found = [(column.metric, grid.cells.get((row, column))) for column in grid.columns]
        lines.append([row, *(format_cell(cell, tag) + (f" ({len(cell.seeds)})" if cell else "")
                             for tag, cell in found)])
    return lines


def numbers_of(grid: Grid) -> list[list]:
    lines: list[list] = [["method", *(f"{column.title}, {number}" for column in grid.columns
                                      for number in ("mean", "std", "seeds"))]]
    for row in grid.rows:
        cells = [grid.cells.get((row, column)) for column in grid.columns]
        lines.append([row, *(value for cell in cells
                             for value in ((cell.mean, cell.std, len(cell.seeds)) if cell else ("", "", 0)))])
    return lines


def table_of_comparisons(comparisons: list[Comparison]) -> list[list[str]]:
    lines = [["method", "column", "seeds", "ours", "paper", "difference", "within 2 std", "paper's row", "deviations"]]
    for line in comparisons:
        tag, near = line.column.metric, line.near
        difference = f"{line.difference:+.{metrics.shown(tag).digits}f}" if near else "–"
        lines.append([line.row, line.column.title, str(len(line.ours.seeds)), format_cell(line.ours, tag),
                      format_cell(line.theirs, tag), difference, {True: "yes", False: "no", None: "–"}[line.within],
                      f"{near.table.name}: {near.row.name}" if near else "–",
                      line.deviations or ("none" if near else "–")])
    return lines
