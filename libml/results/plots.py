"""Figures of runs: curves over seeds, calibration, pseudo-labels, class distribution, augmentation rates."""
import functools
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, fontManager, get_font
from matplotlib.ticker import MaxNLocator

from libml.errors import UserError
from libml.results import metrics
from libml.results.paper import Column
from libml.results.tables import Difference, mean_and_std, row_labels
from libml.run import Run
from libml.writing import writing

# Okabe and Ito's palette: told apart by colour-blind readers too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
TITLES = {"monitors/mask": "mask rate", "monitors/alpha": "mean alpha",
          "monitors/pseudo_accuracy": "pseudo-label accuracy",
          "monitors/pseudo_accuracy_masked": "accuracy of those used"}
PSEUDO_LABEL_TAGS = tuple(TITLES)
# Fonts that come with matplotlib, Linux, macOS and Windows, whose letters together are those of most scripts.
FONTS = ("DejaVu Sans", "Noto Sans CJK SC", "WenQuanYi Zen Hei", "Noto Sans Devanagari", "Noto Sans Thai", "Unifont",
         "Arial Unicode MS", "PingFang SC", "Microsoft YaHei", "Malgun Gothic", "Nirmala UI")
LEGEND_INSIDE, LINE_INCHES, LETTER_INCHES = 40, 0.17, 0.085  # letters of a label in a panel; size of a small letter


@functools.cache
def _fonts() -> tuple[list[str], frozenset[int]]:
    """Returns those of FONTS that this machine has, and the letters that they have."""
    names = [name for name in FONTS if name in fontManager.get_font_names()]
    return names, frozenset[int]().union(*(get_font(findfont(name)).get_charmap() for name in names))


def _label(axis: Axis, places: Sequence[float] | np.ndarray, names: Sequence[str]) -> None:
    """Writes names, in any script, beside an axis; a letter that no font has becomes its number, such as \\u732b."""
    fonts, letters = _fonts()
    shown = ["".join(letter if ord(letter) in letters else f"\\u{ord(letter):04x}" for letter in name)
             for name in names]
    axis.set_ticks(places, shown, fontsize="small", fontfamily=fonts, parse_math=False)


def panels(rows: int, columns: int, width: float = 4.2, height: float = 3.0) -> tuple[Figure, np.ndarray]:
    """Returns a figure with panels of this size in inches, and their axes [rows, columns]."""
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False)


def save(figure: Figure, stem: str | Path, endings: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Writes a figure in one or more formats and returns the paths; `stem` may carry the ending of one."""
    stem = Path(stem)
    if not stem.name or stem.is_dir():
        raise UserError(f"{stem} is a folder: name a file in it.")
    if stem.suffix in (".png", ".svg"):
        stem = stem.with_suffix("")
    paths = [stem.with_name(f"{stem.name}.{ending}") for ending in endings]
    with writing(stem):
        stem.parent.mkdir(parents=True, exist_ok=True)
        for path in paths:
            figure.savefig(path, dpi=150)
    return paths


def over_seeds(series: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Joins series (steps, values) of several runs: all steps, with mean and sample std over the runs that have them.

    The std is 0 where a single run has the step.
    """
    by_step = defaultdict(list)
    for steps, values in series:
        for step, value in zip(steps, values, strict=True):
            by_step[int(step)].append(value)
    mean, std = np.asarray([mean_and_std(by_step[step]) for step in sorted(by_step)]).reshape(-1, 2).T
    return np.asarray(sorted(by_step)), mean, np.nan_to_num(std)


def _band(axis: Axes, series: Sequence[tuple[np.ndarray, np.ndarray]], label: str, colour: str) -> None:
    """Draws the mean of several runs' series over images seen, within one standard deviation."""
    steps, mean, std = over_seeds(series)
    axis.plot(steps / 1024, mean, color=colour, label=label, marker="o" if len(steps) == 1 else None)
    axis.fill_between(steps / 1024, mean - std, mean + std, color=colour, alpha=0.2, linewidth=0)


def curves(runs: Sequence[Run], tags: Sequence[str] = ("error",)) -> Figure:
    """Plots tags over images seen: a panel per tag, dataset and label number, a line per method, its runs in brackets.

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
    kinds = [(column, tag) for column in columns for tag in tags]
    width = len(tags) if len(tags) > 1 else min(len(columns), 4)
    figure, axes = panels(-(-len(kinds) // width), width, 4.2 if width < 3 else 3.4)
    for axis in axes.flat[len(kinds):]:
        axis.set_axis_off()
    for axis, (column, tag) in zip(axes.flat, kinds, strict=False):
        for number, label in enumerate(labels):
            series = lines.get((column, tag, label))
            if series:
                _band(axis, series, f"{label} ({len(series)})", COLOURS[number % len(COLOURS)])
        axis.set(xlabel="labelled images seen (kimg)", ylabel=TITLES.get(tag) or metrics.shown(tag).title,
                 title=f"{column[0]}, {column[1] or 'all'} labels")
        axis.grid(alpha=0.3)
    _add_legends(figure)
    return figure


def _add_legends(figure: Figure) -> None:
    """Puts a legend into every panel; labels that are too long for that, wrapped, below them all."""
    lines = {str(line.get_label()): line for axis in figure.axes for line in axis.lines}
    if max(map(len, lines)) <= LEGEND_INSIDE:
        for axis in figure.axes:
            if axis.lines:
                axis.legend(fontsize="small")
        return
    width, height = figure.get_size_inches()
    width = max(width, 6.0)
    texts = [textwrap.fill(label, int((width - 1) / LETTER_INCHES), subsequent_indent="  ") for label in lines]
    legend = LINE_INCHES * sum(text.count("\n") + 1.5 for text in texts)
    figure.set_size_inches(width, max(height, 1.5 * legend) + legend)  # the panels keep more than half of it
    figure.legend(lines.values(), texts, loc="outside lower center", fontsize="small")


def _title(run: Run) -> str:
    return f"{run.method}\n{run.settings.get('dataset', run.path.name)}"


def reliability(runs: Sequence[Run], bins: int = 15) -> Figure:
    """Draws, for each run, the accuracy per bin of confidence over the histogram of confidences, on the test set."""
    figure, axes = panels(2, len(runs), 3.4, 2.6)
    for (top, bottom), run in zip(axes.T, runs, strict=True):
        arrays = run.arrays("predictions", ("probabilities", "labels"))
        diagram = metrics.reliability(arrays["probabilities"], arrays["labels"], bins)
        ece = metrics.expected_calibration_error(arrays["probabilities"], arrays["labels"], bins)
        accuracy = metrics.accuracy(arrays["probabilities"], arrays["labels"])
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
    figure, axes = panels(2, len(runs), 3.8, 2.6)
    for (top, bottom), run in zip(axes.T, runs, strict=True):
        pairs = [(report["step"], report["class_distribution"]) for report in run.reports
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
            labels = run.arrays("predictions", ("labels",))["labels"]
            bottom.bar(classes + 0.2, np.bincount(labels, minlength=len(classes)) / len(labels), 0.4, color=COLOURS[4],
                       label="true")
        bottom.set(xlabel="class", ylabel="share of test images")
        bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
        bottom.legend(fontsize="x-small")
    return figure


def class_accuracy(runs: Sequence[Run]) -> Figure:
    """Draws the accuracy on the test images of each class, a bar per run, with the name and number of the class."""
    found = [run.arrays("predictions", ("probabilities", "labels")) for run in runs]
    classes = max(arrays["probabilities"].shape[1] for arrays in found)
    names = [str(number) for number in range(classes)]
    for run in runs:
        if (run.path / "stats" / "pseudo_labels.npz").exists():
            names[:] = [str(name) for name in run.arrays("pseudo_labels", ("class_names",))["class_names"]]
    counts = np.bincount(found[0]["labels"], minlength=classes)
    figure, axes = panels(1, 1, 7.0, 0.9 + max(0.14 * len(runs), 0.24) * classes)
    axis, height = axes[0, 0], 0.8 / len(runs)
    for number, (run, arrays) in enumerate(zip(runs, found, strict=True)):
        shares = 100 * np.nan_to_num(metrics.per_class_accuracy(arrays["probabilities"], arrays["labels"]))
        shares = np.pad(shares, (0, classes - len(shares)))
        rows = np.arange(classes) + (number - (len(runs) - 1) / 2) * height
        axis.barh(rows, shares, height, color=COLOURS[number % len(COLOURS)],
                  label=f"{'AB'[number]}: {run.method}" if len(runs) == 2 else run.method)
        if len(runs) == 1:
            for row, share in zip(rows, shares, strict=True):
                axis.text(101, row, f"{share:.1f}", va="center", fontsize="x-small")
    _label(axis.yaxis, range(classes), [f"{name} ({count})" for name, count in zip(names, counts, strict=True)])
    axis.set(xlim=(0, 100), xlabel="accuracy on the test images of the class (%)")
    axis.invert_yaxis()
    axis.grid(axis="x", alpha=0.3)
    if len(runs) > 1:
        figure.legend(loc="outside upper center", ncols=len(runs), fontsize="small")
    return figure


def credal_sets(run: Run) -> Figure | None:
    """Plots how the credal sets of a sample of unlabelled images shrink: deciles of alpha; None if there are none."""
    reports = [report for report in run.reports if "credal" in report]
    if not reports:
        return None
    steps = np.asarray([report["step"] for report in reports]) / 1024
    deciles = np.asarray([report["credal"]["deciles"] for report in reports])
    figure, axes = panels(1, 1, 4.4, 2.8)
    axis = axes[0, 0]
    for low, shade, label in ((0, 0.12, "all images"), (1, 0.2, "80 %"), (3, 0.3, "40 %")):
        axis.fill_between(steps, deciles[:, low], deciles[:, 10 - low], color=COLOURS[0], alpha=shade, linewidth=0,
                          label=label)
    axis.plot(steps, deciles[:, 5], color=COLOURS[0], marker="o" if len(steps) == 1 else None, label="median")
    axis.set(xlabel="labelled images seen (kimg)", ylabel="alpha, size of the credal set", ylim=(0, 1))
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
    return figure


def promises(runs: Iterable[Run]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the probabilities 1 - alpha that credal sets promise at the end of runs, and where their class is right.

    Images whose class is unknown are left out.
    """
    found = [run.arrays("pseudo_labels", ("class", "alpha", "labels")) for run in runs]
    y, alpha, truth = (np.concatenate([arrays[key] for arrays in found]) for key in ("class", "alpha", "labels"))
    known = truth >= 0
    return 1 - alpha[known], (y == truth)[known]


def credal_validity(runs: Sequence[Run], bins: int = 10) -> Figure:
    """Draws what credal sets promise beside what is true, a row per dataset, over the runs that have them.

    Left: their mean size alpha and the error of pseudo-labels over the run. Middle: the share of sets that hold the
    true class, and the largest probability that their members give it. Right: at the end, how often the set's class is
    the true one, by the probability 1 - alpha that it is at least to have.
    """
    groups: dict = defaultdict(list)
    for run in runs:
        if any("truth" in report.get("credal", {}) for report in run.reports):
            groups[run.dataset.dataset, run.dataset.labels or 0].append(run)
    if not groups:
        raise UserError(f"None of the {len(runs)} runs has credal sets of images whose classes are known: nothing to "
                        "draw.")
    figure, axes = panels(len(groups), 3, 3.6, 2.8)
    for (left, middle, right), ((dataset, labels), same) in zip(axes, sorted(groups.items()), strict=True):
        def of_sets(name: str, same=same) -> list:
            reports = [[report for report in run.reports if name in report.get("credal", {})] for run in same]
            return [(np.asarray([r["step"] for r in found]), np.asarray([r["credal"][name] for r in found]))
                    for found in reports]

        errors = [(steps, 1 - values) for steps, values in (run.series("monitors/pseudo_accuracy") for run in same)]
        lines = ((left, "mean alpha", [run.series("monitors/alpha") for run in same]),
                 (left, "error of pseudo-labels", errors), (middle, "holds the true class", of_sets("truth")),
                 (middle, "upper probability of the true class", of_sets("upper")))
        for number, (axis, label, series) in enumerate(lines):
            _band(axis, series, label, COLOURS[number])
        promised, hits = promises(same)
        index = np.minimum((promised * bins).astype(int), bins - 1)
        for here in (index == number for number in range(bins)):
            if here.any():
                right.plot(promised[here].mean(), hits[here].mean(), "o", color=COLOURS[0],
                           markersize=2 + 14 * np.sqrt(here.mean()))
        right.plot([0, 1], [0, 1], color="black", linestyle="--", linewidth=1)
        right.set(xlabel="1 − alpha: promised at least", ylabel="share right", xlim=(0, 1.02), ylim=(0, 1.02))
        left.set(title=f"{dataset}, {labels or 'all'} labels ({len(same)} runs)", ylim=(0, 1))
        middle.set(ylim=(0, 1.02))
        for axis in (left, middle):
            axis.set_xlabel("labelled images seen (kimg)")
            axis.legend(fontsize="x-small")
        for axis in (left, middle, right):
            axis.grid(alpha=0.3)
    return figure


def forest(found: Mapping[tuple[str, Column], Difference], reference: str) -> Figure:
    """Draws paired differences to a row with their intervals, and every split's: a row of panels per dataset."""
    places = sorted({(column.dataset, column.labels or 0) for _, column in found})
    tags = list(dict.fromkeys(column.metric for _, column in found))
    names = list(dict.fromkeys(row for row, _ in found))
    figure, axes = panels(len(places), len(tags), 3.4, 0.9 + 0.26 * len(names))
    for line, (dataset, labels) in zip(axes, places, strict=True):
        for axis, tag in zip(line, tags, strict=True):
            for row, name in enumerate(names):
                difference = found.get((name, Column(dataset, labels or None, tag)))
                if difference is None:
                    continue
                axis.plot(difference.differences, [row] * len(difference.differences), "|", color=COLOURS[5])
                axis.plot([difference.low, difference.high], [row, row], color=COLOURS[0], linewidth=2)
                axis.plot(difference.mean, row, "o", color=COLOURS[0], markersize=4)
            axis.axvline(0, color="black", linewidth=1)
            axis.set_yticks(range(len(names)), names if axis is line[0] else [""] * len(names), fontsize="small")
            axis.set(ylim=(len(names) - 0.5, -0.5), title=f"{dataset}, {labels or 'all'} labels")
            axis.set_xlabel(f"{metrics.shown(tag).title}, minus {reference}'s", fontsize="small")
            axis.grid(axis="x", alpha=0.3)
    return figure


def augmentation_rates(run: Run) -> Figure | None:
    """Plots the rates that a run's CTAugment has learned; None if it has none."""
    names = run.described("stats/rates.json")
    return plot_rates(run.arrays("rates", ("rates",))["rates"], names["ops"], names["bins"]) if names else None


def plot_rates(rates: np.ndarray, names: Sequence[str], bins: Sequence[Sequence[int]]) -> Figure:
    """Plots CTAugment's rates [operations, parameters, bins], a line per parameter that has bins."""
    lines, labels = [], []
    for name, of_parameters, sizes in zip(names, rates, bins, strict=True):
        for parameter, (line, size) in enumerate(zip(of_parameters, sizes, strict=False)):
            if size:
                lines.append(np.where(np.arange(len(line)) < size, line, np.nan))
                labels.append(name if parameter == 0 else f"{name} [{parameter + 1}]")
    figure, axes = panels(1, 1, 7.0, 0.22 * len(lines) + 1)
    image = axes[0, 0].imshow(np.asarray(lines, np.float64), aspect="auto", vmin=min(0.8, np.nanmin(lines)), vmax=1)
    axes[0, 0].set_yticks(range(len(labels)), labels, fontsize="x-small")
    axes[0, 0].set(xlabel="bin of the operation's parameter, from 0 to 1", title="CTAugment's rates")
    figure.colorbar(image, ax=axes[0, 0], label="rate")
    return figure


def plot_images(rows: Sequence[np.ndarray], names: Sequence[str], columns: Sequence[object] = (), title: str = "",
                gap: int = 2) -> Figure:
    """Plots rows of images [n, H, W, 3] with the names of rows and columns, white where a row is shorter."""
    height, width = rows[0].shape[1] + gap, rows[0].shape[2] + gap
    sheet = np.full([len(rows) * height, max(1, *map(len, rows)) * width, 3], 255, np.uint8)
    for r, row in enumerate(rows):
        for c, image in enumerate(row):
            sheet[r * height:(r + 1) * height - gap, c * width:(c + 1) * width - gap] = image
    inches = min(14.0, 0.65 * sheet.shape[1] / width + 1)
    figure, axes = panels(1, 1, inches, (inches - 1) * sheet.shape[0] / sheet.shape[1] + (0.5 if title else 0.1))
    axes[0, 0].imshow(sheet, interpolation="nearest")
    _label(axes[0, 0].yaxis, (np.arange(len(rows)) + 0.5) * height, names)
    axes[0, 0].set_xticks((np.arange(len(columns)) + 0.5) * width, columns)
    axes[0, 0].set_title(title)
    return figure


def plot_captioned(images: Sequence[np.ndarray], captions: Sequence[str], columns: int = 8) -> Figure:
    """Plots images [H, W, 3], each over its caption, row by row."""
    rows = -(-len(images) // columns)
    figure, axes = panels(rows, min(columns, len(images)), 1.5, 1.9)
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, image, caption in zip(axes.flat, images, captions, strict=False):
        axis.imshow(image, interpolation="nearest")
        axis.text(0.5, -0.03, caption, transform=axis.transAxes, fontsize="x-small", ha="center", va="top",
                  parse_math=False)
    return figure
