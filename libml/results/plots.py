"""Figures of runs: curves over seeds, calibration, pseudo-labels, class distribution, augmentation rates."""
import functools
import itertools
import textwrap
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from libml.errors import UserError, printable
from libml.results import metrics
from libml.results.tables import mean_and_std, row_labels
from libml.run import Run
from libml.writing import SOFTWARE, figure_files, write_atomically

# Okabe and Ito's palette: told apart by colour-blind readers too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
TITLES = {"monitors/mask": "mask rate", "monitors/alpha": "mean alpha",
          "monitors/pseudo_accuracy": "pseudo-label accuracy",
          "monitors/pseudo_accuracy_masked": "accuracy of those used"}
PSEUDO_LABEL_TAGS = tuple(TITLES)
KIMG, DIAGONAL = "labelled images seen (kimg)", {"color": "black", "linestyle": "--", "linewidth": 1}
LINE_INCHES, LETTER_INCHES = 0.17, 0.085  # size of a small letter

Series = Sequence[tuple[np.ndarray, np.ndarray]]  # steps and values of each run


def _label(axis: Axis, places: Sequence[float] | np.ndarray, names: Sequence[str]) -> None:
    axis.set_ticks(places, list(map(printable, names)), fontsize="small", parse_math=False)


def plain(name: object) -> str:
    """A name of any letters, for figures: no formula, no line break."""
    return printable(name).replace("$", r"\$")


def panels(rows: int, columns: int, width: float, height: float, grid: str = "") -> tuple[Figure, np.ndarray]:
    """Returns a figure with panels of this size in inches, and their axes [rows, columns], with a grid of x or both."""
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat if grid else ():
        axis.grid(axis=grid, alpha=0.3)
    return figure, axes


def save(figure: Figure, stem: str | Path, endings: Sequence[str] = ("png", "svg")) -> list[Path]:
    paths = figure_files(stem, endings)
    for path, ending in zip(paths, endings, strict=True):
        metadata = {"Software" if ending == "png" else "Creator": SOFTWARE}
        write_atomically(path, functools.partial(figure.savefig, format=ending, dpi=150, metadata=metadata))
    return paths


def without_damaged(draw: Callable[[list[Run]], Figure], runs: list[Run]) -> Figure:
    """Draws runs but those whose files are damaged: that becomes an entry of their `problems`."""
    try:
        return draw(runs)
    except Exception as error:  # a different type for every kind of damage
        damages: dict[Run, str] = {}
        for run in runs:
            try:
                draw([run])
            except Exception as damage:
                damages[run] = (str(damage) if isinstance(damage, UserError) else
                                f"what it stored is damaged ({type(damage).__name__}: {damage})")
        if not runs or isinstance(error, UserError) and len(damages) == len(runs):
            raise
        if len(damages) == len(runs):
            raise UserError(f"{runs[0].path}: {damages[runs[0]]}.") from error
        for run, problem in damages.items():
            run.problems.append(problem)
        return draw([run for run in runs if run not in damages])


def predictions(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Reads the probabilities [N, K] of a run's test images and their labels [N]; UserError if they are none."""
    p, labels = run.arrays("predictions", ("probabilities", "labels")).values()
    if not (p.ndim == 2 and p.size and labels.shape == p.shape[:1] and p.dtype.kind == "f" and labels.dtype.kind in "iu"
            and ((p >= 0) & (p < 1.001)).all() and ((labels >= 0) & (labels < p.shape[1])).all()):
        raise UserError(f"{run.stats / 'predictions.npz'} holds no probabilities and classes: it is damaged, or the "
                        "run has diverged. Continue the run, or leave it out.")
    return p, labels


def over_seeds(series: Series) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Joins the series of several runs: all steps, with mean and sample std (0 of one) over the runs that have them."""
    by_step = defaultdict(list)
    for steps, values in series:
        for step, value in zip(steps, values, strict=True):
            by_step[int(step)].append(value)
    mean, std = np.asarray([mean_and_std(by_step[step]) for step in sorted(by_step)]).reshape(-1, 2).T
    return np.asarray(sorted(by_step)), mean, np.nan_to_num(std)


def band(axis: Axes, series: Series, label: str, colour: str) -> None:
    """Draws the mean of several runs' series over images seen, within one standard deviation."""
    steps, mean, std = over_seeds(series)
    axis.plot(steps / 1024, mean, color=colour, label=label, marker="o" if len(steps) == 1 else None)
    axis.fill_between(steps / 1024, mean - std, mean + std, color=colour, alpha=0.2, linewidth=0)
    axis.set_xlabel(KIMG)


def curves(runs: Sequence[Run], tags: Sequence[str] = ("error",)) -> Figure:
    """Plots tags over images seen: a panel per tag, dataset and label number, a line per method, its runs in brackets.

    The band is one standard deviation over the runs of a method. Tags that no run has are left out.
    """
    lines: dict = defaultdict(lambda: defaultdict(list))  # (dataset and labels, tag) -> label -> series
    for run, label in zip(runs, row_labels(runs), strict=True):
        for number, tag in enumerate(tags):
            series = run.series(tag)
            if len(series[1]):
                lines[(run.dataset.dataset, run.dataset.labels or 0), number][label].append(series)
    if not lines:
        raise UserError(f"None of the {len(runs)} runs has reported {', '.join(tags)}: nothing to draw.")
    labels = sorted({label for by_label in lines.values() for label in by_label})
    columns, shown = ({key[i] for key in lines} for i in (0, 1))
    kinds = sorted(itertools.product(columns, shown))
    width = len(shown) if len(shown) > 1 else min(len(columns), 4)
    figure, axes = panels(-(-len(kinds) // width), width, 4.2 if width < 3 else 3.4, 3.0, grid="both")
    for axis in axes.flat[len(kinds):]:
        axis.set_axis_off()
    for axis, ((dataset, count), number) in zip(axes.flat, kinds, strict=False):
        for label, series in sorted(lines[(dataset, count), number].items()):
            band(axis, series, f"{plain(label)} ({len(series)})", COLOURS[labels.index(label) % len(COLOURS)])
        axis.set(ylabel=TITLES.get(tags[number]) or metrics.shown(tags[number]).title,
                 title=f"{plain(dataset)}, {count or 'all'} labels")
    _add_legend(figure)
    return figure


def _add_legend(figure: Figure) -> None:
    """Puts one legend below all panels, and makes room for it: labels may be long."""
    lines = {str(line.get_label()): line for axis in figure.axes for line in axis.lines}
    width, height = figure.get_size_inches()
    width = max(width, 6.0)
    texts = [textwrap.fill(label, int((width - 1) / LETTER_INCHES), subsequent_indent="  ") for label in lines]
    legend = LINE_INCHES * sum(text.count("\n") + 1.5 for text in texts)
    figure.set_size_inches(width, max(height, 1.5 * legend) + legend)  # the panels keep more than half of it
    figure.legend(lines.values(), texts, loc="outside lower center", fontsize="small")


def reliability(runs: Sequence[Run]) -> Figure:
    """Draws, for each run, the accuracy per bin of confidence over the histogram of confidences, on the test set."""
    figure, axes = panels(2, len(runs), 3.4, 2.6)
    for (top, bottom), run in zip(axes.T, runs, strict=True):
        predicted = predictions(run)
        diagram, ece = metrics.reliability(*predicted), metrics.expected_calibration_error(*predicted)
        accuracy, confidence = metrics.accuracy(*predicted), predicted[0].max(1).mean()
        used = diagram.count > 0
        bars = {"width": 1 / len(used), "align": "edge", "edgecolor": "white"}
        top.bar(diagram.edges[:-1][used], diagram.accuracy[used], color=COLOURS[0], label="accuracy", **bars)
        top.plot(diagram.confidence[used], diagram.accuracy[used], "o", color=COLOURS[1], markersize=3,
                 label="at mean confidence")
        top.plot([0, 1], [0, 1], **DIAGONAL)
        top.set(xlim=(0, 1), ylim=(0, 1), ylabel="accuracy", title=_heading(run))
        top.text(0.03, 0.95, f"ECE {ece:.3f}", transform=top.transAxes, va="top")
        top.legend(fontsize="x-small", loc="lower right")
        bottom.bar(diagram.edges[:-1], diagram.count / diagram.count.sum(), color=COLOURS[5], **bars)
        bottom.axvline(accuracy, color=COLOURS[0], label=f"accuracy {accuracy:.3f}")
        bottom.axvline(confidence, color=COLOURS[1], linestyle="--", label=f"mean confidence {confidence:.3f}")
        bottom.set(xlim=(0, 1), xlabel="confidence", ylabel="share of images")
        bottom.legend(fontsize="x-small", loc="upper left")
    return figure


def _heading(run: Run) -> str:
    return f"{plain(run.method)}\n{plain(run.settings.get('dataset', run.path.name))}"


def class_distribution(runs: Sequence[Run]) -> Figure:
    """Draws, for each run, the classes predicted for the test images over time."""
    figure, axes = panels(1, len(runs), 3.8, 2.6)
    for axis, run in zip(axes[0], runs, strict=True):
        pairs = [(report["step"], report["class_distribution"]) for report in run.reports
                 if report.get("class_distribution")]
        if not pairs:
            raise UserError(f"{run.path} has reported no class_distribution: nothing to draw.")
        steps, shares = (np.asarray(values) for values in zip(*pairs, strict=True))
        image = axis.pcolormesh(steps / 1024, np.arange(shares.shape[1]), shares.T, vmin=0, shading="nearest")
        figure.colorbar(image, ax=axis, label="share")
        axis.set(xlabel="kimg", ylabel="class", title=_heading(run))
        axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def class_accuracy(runs: Sequence[Run]) -> Figure:
    """Draws the accuracy on the test images of each class of one run or two, with the name and number of the class."""
    found = [predictions(run) for run in runs]
    classes = max(p.shape[1] for p, _ in found)
    names = [str(number) for number in range(classes)]
    for run in runs:
        if (run.stats / "pseudo_labels.npz").exists():
            names[:] = map(str, run.arrays("pseudo_labels", ("class_names",))["class_names"])
    counts = np.bincount(found[0][1], minlength=classes)
    figure, ((axis,),) = panels(1, 1, 7.0, 0.9 + max(0.14 * len(runs), 0.24) * classes, grid="x")
    height = 0.8 / len(runs)
    for number, (run, predicted) in enumerate(zip(runs, found, strict=True)):
        shares = 100 * np.nan_to_num(metrics.per_class_accuracy(*predicted))
        shares = np.pad(shares, (0, classes - len(shares)))
        rows = np.arange(classes) + (number - (len(runs) - 1) / 2) * height
        axis.barh(rows, shares, height, color=COLOURS[number], label=f"{'AB'[number]}: {plain(run.method)}")
        if len(runs) == 1:
            for row, share in zip(rows, shares, strict=True):
                axis.text(101, row, f"{share:.1f}", va="center", fontsize="x-small")
    _label(axis.yaxis, range(classes), [f"{name} ({count})" for name, count in zip(names, counts, strict=True)])
    axis.set(xlim=(0, 100), xlabel="accuracy on the test images of the class (%)")
    axis.invert_yaxis()
    if len(runs) > 1:
        figure.legend(loc="outside upper center", ncols=len(runs), fontsize="small")
    return figure


def credal_sets(run: Run) -> Figure:
    """Plots how the credal sets of a sample of unlabelled images shrink: deciles of alpha."""
    reports = [report for report in run.reports if "credal" in report]
    steps = np.asarray([report["step"] for report in reports]) / 1024
    deciles = np.asarray([report["credal"]["deciles"] for report in reports])
    figure, ((axis,),) = panels(1, 1, 4.4, 2.8, grid="both")
    for low, shade, label in ((0, 0.12, "all images"), (1, 0.2, "80 %"), (3, 0.3, "40 %")):
        axis.fill_between(steps, deciles[:, low], deciles[:, 10 - low], color=COLOURS[0], alpha=shade, linewidth=0,
                          label=label)
    axis.plot(steps, deciles[:, 5], color=COLOURS[0], marker="o" if len(steps) == 1 else None, label="median")
    axis.set(xlabel=KIMG, ylabel="alpha, size of the credal set", ylim=(0, 1))
    axis.legend(fontsize="small")
    return figure


def augmentation_rates(run: Run) -> Figure | None:
    """Plots the rates that a run's CTAugment has learned, a line per parameter that has bins; None if it has none."""
    described = run.described("stats/rates.json")
    if not described:
        return None
    rates = run.arrays("rates", ("rates",))["rates"]  # [operations, parameters, bins]
    lines, labels = [], []
    for name, of_parameters, sizes in zip(described["ops"], rates, described["bins"], strict=True):
        for parameter, (line, size) in enumerate(zip(of_parameters, sizes, strict=False)):
            if size:
                lines.append(np.where(np.arange(len(line)) < size, line, np.nan))
                labels.append(name if parameter == 0 else f"{name} [{parameter + 1}]")
    figure, ((axis,),) = panels(1, 1, 7.0, 0.22 * len(lines) + 1)
    image = axis.imshow(np.asarray(lines, np.float64), aspect="auto", vmin=min(0.8, np.nanmin(lines)), vmax=1)
    axis.set_yticks(range(len(labels)), labels, fontsize="x-small")
    axis.set(xlabel="bin of the operation's parameter, from 0 to 1", title="CTAugment's rates")
    figure.colorbar(image, ax=axis, label="rate")
    return figure


def plot_images(rows: Sequence[np.ndarray], names: Sequence[str]) -> Figure:
    """Plots rows of images [n, H, W, 3] with their names, white where a row is shorter."""
    height, width = (side + 2 for side in rows[0].shape[1:3])  # two white pixels between images
    sheet = np.full([len(rows) * height, max(1, *map(len, rows)) * width, 3], 255, np.uint8)
    for r, row in enumerate(rows):
        for c, image in enumerate(row):
            sheet[r * height:(r + 1) * height - 2, c * width:(c + 1) * width - 2] = image
    inches = min(14.0, 0.65 * sheet.shape[1] / width + 1)
    figure, ((axis,),) = panels(1, 1, inches, (inches - 1) * sheet.shape[0] / sheet.shape[1] + 0.1)
    axis.imshow(sheet, interpolation="nearest")
    _label(axis.yaxis, (np.arange(len(rows)) + 0.5) * height, names)
    axis.set_xticks([])
    return figure
