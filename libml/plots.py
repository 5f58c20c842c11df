"""Figures of runs: curves over seeds, calibration, pseudo-labels, class distribution, augmentation rates."""
import json
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from libml import calibration
from libml.errors import UserError
from libml.results import Run, row_labels

# Okabe and Ito's palette: told apart by colour-blind readers too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
TITLES = {"error": "test error (%)", "accuracy": "test accuracy (%)", "ece": "test ECE", "monitors/mask": "mask rate",
          "monitors/alpha": "mean alpha", "monitors/pseudo_accuracy": "pseudo-label accuracy",
          "monitors/pseudo_accuracy_masked": "accuracy of those used"}
DAMAGED = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error)  # what np.load and json raise
PSEUDO_LABEL_TAGS = ("monitors/mask", "monitors/alpha", "monitors/pseudo_accuracy", "monitors/pseudo_accuracy_masked")


def _figure(rows: int, columns: int, width: float = 4.2, height: float = 3.0) -> tuple[Figure, np.ndarray]:
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False)


def save(figure: Figure, stem: str | Path) -> list[Path]:
    """Writes a figure as PNG and SVG and returns the two paths; `stem` may carry either ending."""
    stem = Path(stem)
    if stem.suffix in (".png", ".svg"):
        stem = stem.with_suffix("")
    paths = [stem.with_name(f"{stem.name}.{ending}") for ending in ("png", "svg")]
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        for path in paths:
            figure.savefig(path, dpi=150)
    except OSError as error:
        raise UserError(f"Cannot write {error.filename or stem} ({error.strerror}). Name a writable place.") from error
    return paths


def over_seeds(series: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Joins series (steps, values) of several runs: all steps, with mean and sample std over the runs that have them.

    The std is 0 where a single run has the step.
    """
    by_step = defaultdict(list)
    for steps, values in series:
        for step, value in zip(steps, values, strict=True):
            by_step[int(step)].append(value)
    steps = sorted(by_step)
    return (np.asarray(steps), np.asarray([np.mean(by_step[step]) for step in steps]),
            np.asarray([np.std(by_step[step], ddof=1) if len(by_step[step]) > 1 else 0.0 for step in steps]))


def curves(runs: Sequence[Run], tags: Sequence[str] = ("error",)) -> Figure:
    """Draws tags over images seen: a panel per tag, dataset and label number, a line per method, its runs in brackets.

    The band is one standard deviation over the runs of a method. Tags that no run has are left out.
    """
    lines = defaultdict(list)  # (column, tag, label) -> series
    for run, label in zip(runs, row_labels(runs), strict=True):
        name = run.dataset
        for tag in tags:
            steps, values = run.series(tag)
            if len(values):
                lines[(name.dataset, name.labels or 0), tag, label].append((steps, values))
    if not lines:
        raise UserError(f"None of the {len(runs)} runs has reported {', '.join(tags)}: nothing to draw.")
    columns = sorted({key[0] for key in lines})
    tags = [tag for tag in tags if any(key[1] == tag for key in lines)]
    labels = sorted({key[2] for key in lines})
    panels = [(column, tag) for column in columns for tag in tags]
    width = len(tags) if len(tags) > 1 else min(len(columns), 4)
    figure, axes = _figure(-(-len(panels) // width), width, 4.2 if width < 3 else 3.4)
    for axis in axes.flat[len(panels):]:
        axis.set_axis_off()
    for axis, (column, tag) in zip(axes.flat, panels, strict=False):
        for number, label in enumerate(labels):
            series = lines.get((column, tag, label))
            if series:
                steps, mean, std = over_seeds(series)
                colour = COLOURS[number % len(COLOURS)]
                axis.plot(steps / 1024, mean, color=colour, label=f"{label} ({len(series)})",
                          marker="o" if len(steps) == 1 else None)
                axis.fill_between(steps / 1024, mean - std, mean + std, color=colour, alpha=0.2, linewidth=0)
        axis.set(xlabel="labelled images seen (kimg)", ylabel=TITLES.get(tag, tag),
                 title=f"{column[0]}, {column[1] or 'all'} labels")
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(fontsize="small")
    return figure


def read_arrays(run: Run, name: str, keys: Sequence[str]) -> dict[str, np.ndarray]:
    """Reads stats/<name>.npz of a run; a UserError says so if it is missing or damaged."""
    path = run.path / "stats" / f"{name}.npz"
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {key: arrays[key] for key in keys}
    except FileNotFoundError:
        raise UserError(f"There is no {path}: training writes it at a report; let the run get that far.") from None
    except DAMAGED as error:
        raise UserError(f"{path} is damaged ({error}). Continue the run: the next report writes it anew.") from error


def _title(run: Run) -> str:
    return f"{run.method}\n{run.config.get('dataset', run.path.name)}"


def reliability(runs: Sequence[Run], bins: int = 15) -> Figure:
    """Draws, for each run, the accuracy per bin of confidence over the histogram of confidences, on the test set."""
    figure, axes = _figure(2, len(runs), 3.4, 2.6)
    for (top, bottom), run in zip(axes.T, runs, strict=True):
        arrays = read_arrays(run, "predictions", ("probabilities", "labels"))
        diagram = calibration.reliability(arrays["probabilities"], arrays["labels"], bins)
        ece = calibration.expected_calibration_error(arrays["probabilities"], arrays["labels"], bins)
        accuracy = calibration.accuracy(arrays["probabilities"], arrays["labels"])
        left, width = diagram.edges[:-1], np.diff(diagram.edges)
        used = diagram.count > 0
        top.bar(left[used], diagram.accuracy[used], width[used], align="edge", color=COLOURS[0], edgecolor="white",
                label="accuracy")
        top.plot(diagram.confidence[used], diagram.accuracy[used], "o", color=COLOURS[1], markersize=3,
                 label="at mean confidence")
        top.plot([0, 1], [0, 1], color="black", linestyle="--", linewidth=1)
        top.set(xlim=(0, 1), ylim=(0, 1), ylabel="accuracy", title=_title(run))
        top.text(0.03, 0.95, f"ECE {ece:.3f}", transform=top.transAxes, va="top")
        top.legend(fontsize="x-small", loc="lower right")
        share = diagram.count / diagram.count.sum()
        bottom.bar(left, share, width, align="edge", color=COLOURS[5], edgecolor="white")
        confidence = np.max(arrays["probabilities"], axis=1).mean()
        bottom.axvline(accuracy, color=COLOURS[0], label=f"accuracy {accuracy:.3f}")
        bottom.axvline(confidence, color=COLOURS[1], linestyle="--", label=f"mean confidence {confidence:.3f}")
        bottom.set(xlim=(0, 1), xlabel="confidence", ylabel="share of images")
        bottom.legend(fontsize="x-small", loc="upper left")
    return figure


def class_distribution(runs: Sequence[Run]) -> Figure:
    """Draws, for each run, the classes predicted for the test images over time, and at the end beside the truth."""
    figure, axes = _figure(2, len(runs), 3.8, 2.6)
    for (top, bottom), run in zip(axes.T, runs, strict=True):
        pairs = [(report["step"], report["class_distribution"]) for report in run.metrics
                 if report.get("class_distribution")]
        if not pairs:
            raise UserError(f"{run.path} has reported no class_distribution: nothing to draw.")
        steps, shares = np.asarray([p[0] for p in pairs]) / 1024, np.asarray([p[1] for p in pairs])
        classes = np.arange(shares.shape[1])
        image = top.pcolormesh(steps, classes, shares.T, vmin=0, shading="nearest") if len(steps) > 1 else None
        if image is not None:
            figure.colorbar(image, ax=top, label="share")
        top.set(xlabel="kimg", ylabel="class", title=_title(run))
        bottom.bar(classes - 0.2, shares[-1], 0.4, color=COLOURS[0], label="predicted")
        if (run.path / "stats" / "predictions.npz").exists():
            labels = read_arrays(run, "predictions", ("labels",))["labels"]
            bottom.bar(classes + 0.2, np.bincount(labels, minlength=len(classes)) / len(labels), 0.4, color=COLOURS[4],
                       label="true")
        bottom.set(xlabel="class", ylabel="share of test images")
        bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
        bottom.legend(fontsize="x-small")
    return figure


def augmentation_rates(run: Run) -> Figure | None:
    """Draws CTAugment's learned rates, a line per operation and parameter; None if the run has none."""
    path = run.path / "stats" / "rates.npy"
    if not path.exists():
        return None
    try:
        rates = np.load(path, allow_pickle=False)
        names = path.with_suffix(".json")
        described = json.loads(names.read_text(encoding="utf-8")) if names.exists() else {}
    except DAMAGED as error:
        raise UserError(f"{path} is damaged ({error}). Continue the run: the next report writes it anew.") from error
    rates = rates.reshape(len(rates), -1, rates.shape[-1]).astype(np.float64)  # [ops, parameters, bins]
    operations = described.get("ops") or [f"operation {index}" for index in range(len(rates))]
    lines, labels = [], []
    for index, operation in enumerate(operations):
        # Without a list of bins a parameter beyond the first that never moved is taken to be unused.
        sizes = described["bins"][index] if "bins" in described else [
            rates.shape[-1] for number, line in enumerate(rates[index])
            if number == 0 or not np.all(np.isnan(line) | (line == 1))]
        sizes = sizes if isinstance(sizes, list) else [sizes]
        for parameter, size in enumerate(sizes[:rates.shape[1]]):
            if size:
                used = np.arange(rates.shape[-1]) < size
                lines.append(np.where(used, rates[index, parameter], np.nan))
                labels.append(operation if parameter == 0 else f"{operation} [{parameter + 1}]")
    figure, axes = _figure(1, 1, 7.0, 0.22 * len(lines) + 1)
    image = axes[0, 0].imshow(np.asarray(lines), aspect="auto", vmin=0, vmax=1, cmap="viridis")
    axes[0, 0].set_yticks(range(len(labels)), labels, fontsize="x-small")
    axes[0, 0].set_xlabel("bin of the operation's parameter, from 0 to 1")
    figure.colorbar(image, ax=axes[0, 0], label="rate")
    return figure


def synthetic(grid: np.ndarray, truth: np.ndarray, functions: dict[str, np.ndarray],
              data: Sequence[np.ndarray]) -> Figure:
    """Draws the synthetic example: learned functions [seeds, grid] by method, the truth and the data."""
    labeled, classes, unlabeled = data
    figure, axes = _figure(1, 1, 6.5, 4.2)
    axis = axes[0, 0]
    axis.scatter(unlabeled, np.full(len(unlabeled), 0.5), s=6, color=COLOURS[5], label="unlabelled")
    axis.scatter(labeled, classes, marker="x", color=COLOURS[6], label="labelled")
    axis.plot(grid, truth, color=COLOURS[6], linestyle="--", label="truth")
    for colour, (name, lines) in zip((COLOURS[3], COLOURS[2], COLOURS[4], COLOURS[0]), functions.items(), strict=False):
        axis.plot(grid, lines.T, color=colour, alpha=0.35, linewidth=0.7)
        axis.plot(grid, lines.mean(axis=0), color=colour, linewidth=2.5, label=name)
    axis.set(xlabel="x", ylabel="probability of the positive class", ylim=(-0.05, 1.05))
    axis.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
