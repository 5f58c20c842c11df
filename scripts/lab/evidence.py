"""The paper's claims on real images, at a size that two cores can run, and every method on the handwritten digits.

    python scripts/lab/evidence.py [--parts=curves,digits,fashion_mnist,cifar10] [--train_dir=experiments] [--at_once=2]
                               [--filter=cssl.flexmatch] [--recorded] [--report] [--write] [-- FLAGS]

docs/evidence.md has the protocol. Runs what is missing, then prints the tables as Markdown. Flags after `--` are added
to each run. More parts are made when they are named: `pilot`, the runs on split 0 behind the protocol, `methods`, all
methods on the digits, and those whose names begin with `features`. CIFAR-10 and Fashion-MNIST: `cssl-data cifar10
fashion_mnist` first.
"""
import itertools
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import record
from matplotlib.figure import Figure

import cssl
from cssl import cli, tools
from cssl.program import STOPPED, exit_on_user_error
from cssl.tools.reproduce import AT_ONCE, Job, run_all, split_flags
from libml.data.names import parse_name
from libml.errors import UserError
from libml.results import metrics, plots, tables
from libml.results.paper import Column
from libml.run import Run
from libml.writing import write_text

ROOT = Path(__file__).resolve().parents[2]
FIGURES = ROOT / "docs" / "evidence"
RECORD = FIGURES / "runs.jsonl"
README, BENCHMARKS = ROOT / "README.md", ROOT / "BENCHMARKS.md"

REFERENCE = "CSSL"
CLAIMED = (REFERENCE, "FixMatch", "FixMatchDA")  # the methods that the claims compare
LABELS_ALONE = "Supervised"
LATER = ("FlexMatch", "FreeMatch", "SoftMatch", "AdaMatch", "Dash", "SimMatch", "C2S2L")  # the pilot's candidates
BEST_LATER = ("AdaMatch", "FreeMatch")  # the two of these that the pilot chose
ROWS = (
    ("CSSL", {}), ("FixMatch", {"confidence": 0.95}), ("FixMatch", {"confidence": 0.0}), ("FixMatchDA", {}),
    ("LSMatch", {}), ("UPSMatch", {}), *((name, {}) for name in BEST_LATER), (LABELS_ALONE, {}))
SMALL = {"filters": 16, "repeat": 1, "batch": 16, "train_kimg": 16, "report_kimg": 2, "save_kimg": 4, "keep_ckpt": 1,
         "ema": 0.98, "bn_momentum": 0.98}
FEATURES = {"features": "keras:MobileNetV2"}  # with --weights=FILE after the --, where it cannot be downloaded
SUBSET = Path("experiments", "cifar10_10000")  # the first 10,000 training images of CIFAR-10, all test images
SPREADING = "LabelSpreading (scikit-learn)"
REGRESSION = "logistic regression"
TAGS = ("accuracy", "ece", "nll")
START = 1 / 8  # of the length, where "faster at the start" is looked at: the first report from there on,
START_SLACK = 1.1  # if it is at most so many times later (digits: 4 kimg instead of 3.75)

# The original program on the same split and net, one run each: labelled images in kimg -> accuracy, ECE.
RECORDED = {"CSSL": {32: (37.9, 0.155), 56: (43.2, 0.285)}, "FixMatch": {32: (33.9, 0.228), 56: (40.1, 0.359)}}
SEEDS = 3  # ours; fewer have no spread to be within
RECORDED_FLAGS = {"filters": 16, "repeat": 1, "batch": 16, "uratio": 7, "train_kimg": 64, "report_kimg": 8,
                  "save_kimg": 8, "keep_ckpt": 1}


class Part(NamedTuple):
    """Runs of one kind: methods with their settings on datasets, in a folder of their own."""

    folder: str
    datasets: tuple[str, ...]
    rows: tuple[tuple[str, dict], ...]
    flags: dict
    last: int = 1  # reports whose median is a run's result

    def jobs(self, train_dir: Path, extra: dict[str, str] | None = None) -> list[Job]:
        """Lists the runs, all methods on one split before the next split; `extra` flags are added to each."""
        jobs = []
        for dataset, (method, settings) in itertools.product(self.datasets, self.rows):
            flags = {"dataset": dataset, "train_dir": (train_dir / self.folder).absolute(), **self.flags, **settings}
            if cssl.method(method).uses_all_labels:  # all splits are one: vary what else is random
                flags["seed"] = parse_name(dataset).seed
            jobs.append(Job(method, tuple((flags | (extra or {})).items())))
        return jobs


def _splits(name: str) -> tuple[str, ...]:
    return tuple(name.replace(".", f".{seed}", 1) for seed in range(1, 6))


PARTS = {
    "curves": Part("curves", ("cifar10.3@250-1",), tuple((method, {"seed": seed}) for seed in range(1, SEEDS + 1)
                                                         for method in RECORDED), RECORDED_FLAGS),
    "digits": Part("methods", _splits("digits.@40-1"), ROWS, {}, last=20),
    "fashion_mnist": Part("evidence", _splits("fashion_mnist.@40-1"), ROWS, SMALL),
    "cifar10": Part("evidence", _splits("cifar10.@250-1"), ROWS, SMALL),
    "features_40": Part("features", _splits("cifar10.@40-1"), ROWS, FEATURES, last=20),
    "features_250": Part("features", _splits("cifar10.@250-1"), ROWS, FEATURES, last=20),
    "features_fashion_mnist": Part("features", _splits("fashion_mnist.@40-1"), ROWS, FEATURES, last=20),
    "features_all": Part("features", _splits("cifar10.@40-1")[:3],  # as many as there was time for
                         tuple((name, {}) for name in cssl.methods() if not cssl.method(name).needs_pixels),
                         FEATURES, last=20),
    "features_resnet50": Part("features", _splits(f"folder:{SUBSET}.@40-1"),
                              (("CSSL", {}), ("FixMatch", {}), ("LSMatch", {}), (LABELS_ALONE, {})),
                              {"features": "keras:ResNet50"}, last=20),
    "pilot": Part("pilot", ("cifar10.0@250-5000",),
                  tuple((name, {}) for name in ("CSSL", "FixMatch", LABELS_ALONE, *LATER)), SMALL),
    "methods": Part("methods", _splits("digits.@40-1"), tuple((name, {}) for name in cssl.methods()), {}, last=20),
}
CLAIMS_PARTS = ("digits", "fashion_mnist", "cifar10")
FEATURES_PARTS = ("features_40", "features_250", "features_fashion_mnist")
TOGETHER = {"claims": CLAIMS_PARTS, "features_claims": FEATURES_PARTS, "credal": CLAIMS_PARTS}  # said of several parts


def write_subset(folder: Path, count: int = 10_000) -> None:
    """Writes the first training images of CIFAR-10 and all of its test images as PNG files, unless they are there."""
    cli.start_tensorflow()
    from PIL import Image

    from libml.data import sources

    source = sources.tfds_source("cifar10", cli.default_data_dir())
    for part, images, labels in (("train", source.images[:count], source.labels), ("test", source.test_images,
                                                                                   source.test_labels)):
        for number, (image, label) in enumerate(zip(images, labels, strict=False)):
            file = folder / part / source.class_names[label] / f"{number:05}.png"
            if not file.exists():
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(image).save(file)


def curves_table(runs: list[Run]) -> list[list[str]]:
    lines = [["method", "kimg", "metric", "original (one run)", "ours, mean", "ours, smallest to largest", "seeds",
              "within"]]
    for method, points in RECORDED.items():
        for kimg, recorded in points.items():
            for tag, theirs in zip(("accuracy", "ece"), recorded, strict=True):
                values = [float(report[tag]) for run in runs if run.method == method for report in run.reports
                          if report["step"] == 1024 * kimg and tag in report]
                if values:
                    shown, low, high = metrics.shown(tag), min(values), max(values)
                    lines.append([method, str(kimg), shown.column, f"{theirs:.{1 if tag == 'accuracy' else 3}f}",
                                  f"{sum(values) / len(values):.{shown.digits}f}",
                                  f"{low:.{shown.digits}f} to {high:.{shown.digits}f}", str(len(values)),
                                  "–" if len(values) < SEEDS else "yes" if low <= theirs <= high else "no"])
    return lines


def curves_figure(runs: list[Run]) -> Figure:
    figure = plots.curves(runs, ("accuracy", "ece"))
    for number, axis in enumerate(figure.axes):
        for colour, points in zip(plots.COLOURS, RECORDED.values(), strict=False):
            axis.plot(list(points), [values[number] for values in points.values()], "x", color=colour, markersize=9)
        axis.set_title("cifar10.3@250; crosses: the original program", fontsize="small")
    return figure


def report_from(run: Run, share: float) -> dict:
    """The first report of a run from a share of its length on; {} if it comes too late."""
    begin = share * 1024 * run.settings["train_kimg"]
    return next((report for report in run.reports if begin <= report["step"] <= START_SLACK * begin), {})


CLAIMS = (("better with few labels (accuracy)", "accuracy"), ("better calibrated (ECE)", "ece"),
          (f"faster at the start (accuracy at {START:g} of the length)", "start"))


def values_of(grid: tables.Grid, row: str, tag: str) -> dict[int, float]:
    """Returns a row's results by split seed, of the metric of a claim, on the one dataset of a grid."""
    cell = grid.cells.get((row, grid.columns[0]._replace(metric="accuracy" if tag == "start" else tag)))
    if cell is None:
        return {}
    if tag == "start":  # NaN where no report is there
        return {run.dataset.seed: report_from(run, START).get("accuracy", math.nan) for run in cell.runs}
    return cell.by_seed


def claims_table(grids: list[tables.Grid]) -> list[list[str]]:
    """Answers the paper's claims, one grid per dataset: CSSL against FixMatch's forms, positive if CSSL is better."""
    lines = [["claim", "dataset", "CSSL against", "better by", "95 % interval", "better in", "answer"]]
    for claim, tag in CLAIMS:
        for grid in grids:
            for row in grid.rows:
                if not row.startswith(CLAIMED[1:]):
                    continue
                ours, theirs = (values_of(grid, name, tag) for name in (REFERENCE, row))
                better = tables.paired_difference(*((theirs, ours) if tag == "ece" else (ours, theirs)))
                if math.isnan(better.mean):
                    continue
                digits = 3 if tag == "ece" else 2
                lines.append([claim, grid.columns[0].place, row, f"{better.mean:+.{digits}f}",
                              better.interval(digits),
                              f"{sum(value > 0 for value in better.differences)} of {len(better.differences)}",
                              better.verdict])
    return lines


def forest(found: Mapping[tuple[str, Column], tables.Difference], reference: str) -> Figure:
    """Draws paired differences to a row with their intervals, and every split's: a row of panels per dataset."""
    places = sorted({(column.dataset, column.labels or 0) for _, column in found})
    tags = list(dict.fromkeys(column.metric for _, column in found))
    names = list(dict.fromkeys(row for row, _ in found))
    shown = list(map(plots.plain, names))
    figure, axes = plots.panels(len(places), len(tags), 3.4, 0.9 + 0.26 * len(names), grid="x")
    for line, (dataset, labels) in zip(axes, places, strict=True):
        for axis, tag in zip(line, tags, strict=True):
            column = Column(dataset, labels or None, tag)
            for row, name in enumerate(names):
                if (name, column) in found:
                    difference = found[name, column]
                    axis.plot(difference.differences, [row] * len(difference.differences), "|", color=plots.COLOURS[5])
                    axis.plot([difference.low, difference.high], [row, row], color=plots.COLOURS[0], linewidth=2)
                    axis.plot(difference.mean, row, "o", color=plots.COLOURS[0], markersize=4)
            axis.axvline(0, color="black", linewidth=1)
            axis.set_yticks(range(len(names)), shown if axis is line[0] else [""] * len(names), fontsize="small")
            axis.set(ylim=(len(names) - 0.5, -0.5), title=plots.plain(column.place))
            axis.set_xlabel(f"{metrics.shown(tag).title}, minus {plots.plain(reference)}'s", fontsize="small")
    return figure


def credal_table(runs: list[Run]) -> list[list[str]]:
    """Puts the size of credal sets beside the error of pseudo-labels: smallest to largest of the runs of a dataset."""
    lines = [["dataset", "share of the length", "mean alpha", "error of pseudo-labels", "sets with the true class"]]
    for dataset in dict.fromkeys(run.dataset.dataset for run in runs):
        for share in (START, 0.5, 1.0):
            reports = [report_from(run, share) for run in runs if run.dataset.dataset == dataset]
            columns = [(report["monitors/alpha"], 1 - report["monitors/pseudo_accuracy"], report["credal"]["truth"])
                       for report in reports if report]
            if columns:
                lines.append([dataset, f"{share:g}", *(f"{min(values):.3f} to {max(values):.3f}"
                                                       for values in zip(*columns, strict=True))])
    return lines


def promise_table(runs: list[Run], sure: float = 0.9) -> list[list[str]]:
    """Says of the smallest sets at the end of runs, with 1 - alpha from `sure` on, how often their class is right."""
    lines = [["dataset", f"pseudo-labels with 1 − alpha from {sure:g} on", "mean of 1 − alpha", "share right"]]
    for dataset in dict.fromkeys(run.dataset.dataset for run in runs):
        promised, hits = promises(run for run in runs if run.dataset.dataset == dataset)
        here = promised >= sure
        if here.any():
            lines.append([dataset, f"{here.sum()} of {len(here)}", f"{promised[here].mean():.3f}",
                          f"{hits[here].mean():.3f}"])
    return lines


def promises(runs: Iterable[Run]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the probabilities 1 - alpha that credal sets promise at the end, and where their class is right."""
    found = [run.arrays("pseudo_labels", ("class", "alpha", "labels")) for run in runs]
    y, alpha, truth = (np.concatenate([arrays[key] for arrays in found]) for key in ("class", "alpha", "labels"))
    known = truth >= 0
    return 1 - alpha[known], (y == truth)[known]


def credal_validity(runs: Sequence[Run]) -> Figure:
    """Draws what credal sets promise beside what is true, a row per dataset, as docs/evidence.md says."""
    groups: dict = defaultdict(list)
    for run in runs:
        groups[run.dataset.dataset, run.dataset.labels or 0].append(run)

    def of_sets(runs: Iterable[Run], name: str) -> plots.Series:
        reports = [[report for report in run.reports if name in report.get("credal", {})] for run in runs]
        return [(np.asarray([r["step"] for r in found]), np.asarray([r["credal"][name] for r in found]))
                for found in reports]

    figure, axes = plots.panels(len(groups), 3, 3.6, 2.8, grid="both")
    for (left, middle, right), ((dataset, labels), same) in zip(axes, sorted(groups.items()), strict=True):
        errors = [(steps, 1 - values) for steps, values in (run.series("monitors/pseudo_accuracy") for run in same)]
        lines = ((left, "mean alpha", [run.series("monitors/alpha") for run in same]),
                 (left, "error of pseudo-labels", errors), (middle, "holds the true class", of_sets(same, "truth")),
                 (middle, "upper probability of the true class", of_sets(same, "upper")))
        for number, (axis, label, series) in enumerate(lines):
            plots.band(axis, series, label, plots.COLOURS[number])
        promised, hits = promises(same)
        tenths = np.minimum((promised * 10).astype(int), 9)
        for here in (tenths == tenth for tenth in np.unique(tenths)):
            right.plot(promised[here].mean(), hits[here].mean(), "o", color=plots.COLOURS[0],
                       markersize=2 + 14 * np.sqrt(here.mean()))
        right.plot([0, 1], [0, 1], **plots.DIAGONAL)
        right.set(xlabel="1 − alpha: promised at least", ylabel="share right", xlim=(0, 1.02), ylim=(0, 1.02))
        left.set(title=f"{plots.plain(dataset)}, {labels or 'all'} labels ({len(same)} runs)", ylim=(0, 1))
        middle.set(ylim=(0, 1.02))
        left.legend(fontsize="x-small")
        middle.legend(fontsize="x-small")
    return figure


def label_spreading(datasets: tuple[str, ...]) -> list[dict[str, float]]:
    """Scores of scikit-learn's LabelSpreading on the pixels of digits, by split."""
    cli.start_tensorflow()
    from sklearn.semi_supervised import LabelSpreading

    from libml import data

    results = []
    for dataset in (data.load(name, ".") for name in datasets):
        pixels, test = (np.asarray(images)[..., 0].reshape(len(images), -1) / 255
                        for images in (dataset.images, dataset.test_images))
        labels = np.full(len(pixels), -1)
        labels[dataset.labeled] = dataset.labeled_classes
        with np.errstate(invalid="ignore"):  # an image no label has reached
            probabilities = LabelSpreading(kernel="knn", n_neighbors=7).fit(pixels, labels).predict_proba(test)
        results.append(metrics.scores(np.nan_to_num(probabilities, nan=1 / dataset.num_classes), dataset.test_labels))
    return results


def methods_table(runs: list[Run], spreading: list[dict[str, float]]) -> list[list[str]]:
    """Puts all methods beside each other, best first: results, the difference to labels alone, median speed."""
    results, rates = defaultdict(list), defaultdict(list)
    for run in runs:
        results[run.method].append({tag: run.result(tag) for tag in metrics.METRICS})
        rates[run.method] += run.series("images_per_s")[1].tolist()
    results[SPREADING] = spreading
    means = {name: {tag: tables.mean_and_std([result[tag] for result in found]) for tag in metrics.METRICS}
             for name, found in results.items()}
    first, *others = metrics.METRICS
    lines = [["method", metrics.shown(first).column, "against labels alone",
              *(metrics.shown(tag).column for tag in others), "images/s", "runs"]]
    for name, row in sorted(means.items(), key=lambda item: -item[1][first][0]):
        accuracy, *cells = (tables.format_mean(*row[tag], metrics.shown(tag).digits) for tag in metrics.METRICS)
        comparable = len(results[name]) == len(results.get(LABELS_ALONE, ()))  # only between the same splits
        gain = f"{row[first][0] - means[LABELS_ALONE][first][0]:+.2f}" if comparable else "–"
        lines.append([name, accuracy, gain, *cells, f"{statistics.median(rates[name]):.0f}" if rates[name] else "–",
                      str(len(results[name]))])
    return lines


def best_table(table: list[list[str]], count: int = 10) -> list[list[str]]:
    """Returns the first lines of the table of all methods that do not see all labels, without speed."""
    head, *lines = table
    lines = [line for line in lines if line[0] == SPREADING or not cssl.method(line[0]).uses_all_labels]
    return [line[:-2] for line in (head, *lines[:count])]


def features_table(runs: list[Run]) -> list[list[str]]:
    """Puts methods and logistic regression on the same features beside each other, most accurate first: results, and
    paired differences to CSSL and to logistic regression, with Student's intervals over splits."""
    results: dict[str, dict] = defaultdict(dict)  # row -> tag -> split -> result
    for (row, column), cell in tables.summarise(runs, TAGS).cells.items():
        results[row][column.metric] = cell.by_seed
    for run in runs:  # of one split all say the same, but for those who keep labels for calibration
        found = {} if run.settings.get("calibration") else run.described("stats/baseline.json")
        known = {"accuracy": found.get("labels_alone"), **found.get("labels_alone_scores", {})}
        for tag in TAGS:
            if known.get(tag) is not None:
                results[REGRESSION].setdefault(tag, {})[run.dataset.seed] = known[tag]

    def difference(row: str, other: str, tag: str) -> str:
        found = tables.paired_difference(*(results.get(name, {}).get(tag, {}) for name in (row, other)))
        digits = metrics.shown(tag).digits
        known = row != other and not math.isnan(found.mean)
        return f"{found.mean:+.{digits}f} ({found.interval(digits)})" if known else "–"

    lines = [["method", *(metrics.shown(tag).column for tag in TAGS),
              *(f"{metrics.shown(tag).column}, minus {REFERENCE}'s" for tag in TAGS),
              f"accuracy %, minus {REGRESSION}'s", "splits"]]
    means = {row: {tag: tables.mean_and_std([*values.values()]) for tag, values in found.items()}
             for row, found in results.items()}
    for row in sorted(results, key=lambda row: -means[row]["accuracy"][0]):
        lines.append([row, *(tables.format_mean(*means[row].get(tag, (None, None)), metrics.shown(tag).digits)
                             for tag in TAGS), *(difference(row, REFERENCE, tag) for tag in TAGS),
                      difference(row, REGRESSION, "accuracy"), str(len(results[row]["accuracy"]))])
    return lines


def first_table(runs: list[Run]) -> list[list[str]]:
    """The table of the README's first screen: what few labels reach on frozen features, and in what time."""
    rows = {line[0]: line[1:3] for line in features_table(runs)[1:]}
    lines = [["40 labels of CIFAR-10, features of MobileNetV2", "accuracy %", "ECE", "minutes"]]
    for row, method, title in (("CSSL", "CSSL", "CSSL"), ("LSMatch", "LSMatch", "LSMatch"),
                               ("FixMatch", "FixMatch", "FixMatch"), (LABELS_ALONE, LABELS_ALONE, "labels alone"),
                               (REGRESSION, "", f"{REGRESSION} (scikit-learn)")):
        took = [record.seconds(run) / 60 for run in runs if run.method == method]
        if row in rows:
            lines.append([title, *rows[row], f"{statistics.median(took):.1f}" if took else "–"])
    return lines


def regression_table(runs: list[Run]) -> list[list[str]]:
    """Puts CSSL's last model beside logistic regression on the same features and labels, split by split."""
    lines = [["split", "CSSL, last model", "logistic regression", "difference (over test images)"]]
    for run in runs:
        if run.method == REFERENCE and (found := run.described("stats/baseline.json")):
            low, high = found["interval"]
            lines.append([str(run.dataset.seed), f"{found['method']:.2f}", f"{found['labels_alone']:.2f}",
                          f"{found['difference']:+.2f} ({low:.2f} to {high:.2f})"])
    return lines


def section(title: str, runs: list[Run], *texts: str | list[list[str]]) -> str:
    facts = [run.described("args/environment.json") for run in runs]
    commits, machines = (", ".join(sorted({str(fact.get(key, "?")) for fact in facts}))
                         for key in ("commit", "machine"))
    hours = sum(map(record.seconds, runs)) / 3600
    return joined(f"### {title}", f"{len(runs)} runs; commit {commits}; {machines}; {hours:.1f} hours of runs.", *texts)


def joined(*texts: str | list[list[str]]) -> str:
    return "\n\n".join(text if isinstance(text, str) else tables.markdown(text) for text in texts)


class Block(NamedTuple):
    """What is written of one part, or of several together: Markdown, and figures by name."""

    text: str
    figures: Mapping[str, Figure] = MappingProxyType({})


def report(done: dict[str, list[Run]]) -> dict[str, Block]:
    """Returns what there is to say of the runs of each part, by the names of parts and of TOGETHER."""
    blocks = {}
    if done.get("curves"):
        blocks["curves"] = Block(section("The original's own curves", done["curves"], curves_table(done["curves"])),
                                 {"curves": curves_figure(done["curves"])})
    grids = {name: tables.summarise(runs, TAGS, last=PARTS[name].last) for name, runs in done.items()
             if runs and name in (*CLAIMS_PARTS, *FEATURES_PARTS)}
    differences = {name: tables.differences(grid, REFERENCE) for name, grid in grids.items()}
    for name, title in (("claims", "The paper's claims"), ("features_claims", "The paper's claims on features")):
        claims = claims_table([grids[part] for part in TOGETHER[name] if part in grids])
        compared = dict(itertools.chain(*(differences[part].items() for part in CLAIMS_PARTS if part in grids)))
        if len(claims) > 1:
            blocks[name] = Block(joined(f"### {title}", claims),
                                 {"forest": forest(compared, REFERENCE)} if name == "claims" else {})
    for name, runs in done.items():
        title = f"{PARTS[name].datasets[0].replace('.1@', ', ').removesuffix('-1')} labels"
        if name in CLAIMS_PARTS and runs:
            blocks[name] = Block(section(
                title, runs, tables.table_of(grids[name]), "Differences to CSSL, split by split:",
                tables.table_of_differences(differences[name], REFERENCE)))
        elif name.startswith("features") and runs:
            texts = [features_table(runs)]
            if name == "features_all":
                blocks["first"] = Block(joined(first_table(runs)))
            if name in FEATURES_PARTS:
                texts += ["CSSL beside logistic regression:", regression_table(runs)]
            title = "Every method: " * (name == "features_all") + title
            blocks[name] = Block(section(f"{title}, features of {PARTS[name].flags['features']}", runs, *texts))
    credal = [run for name, runs in done.items() if name in CLAIMS_PARTS for run in runs
              if run.method == REFERENCE and any("truth" in found.get("credal", {}) for found in run.reports)]
    if credal:
        blocks["credal"] = Block(joined("### What credal sets promise", credal_table(credal), promise_table(credal)),
                                 {"credal": credal_validity(credal)})
    if done.get("methods"):
        table = methods_table(done["methods"], label_spreading(PARTS["methods"].datasets))
        blocks["methods"] = Block(section("Every method on the digits", done["methods"], table))
        blocks["best"] = Block(joined(best_table(table)))
    if done.get("pilot"):
        grid = tables.summarise(done["pilot"], ("accuracy/valid", "ece/valid"), last=1)
        blocks["pilot"] = Block(section("Pilot (validation images of split 0)", done["pilot"], tables.table_of(grid)))
    return blocks


def replace(documents: dict[Path, str], name: str, text: str) -> None:
    """Puts a text in the place that one of the documents has for it."""
    begin, end = (f"<!-- {which}: scripts/lab/evidence.py {name} -->" for which in ("begin", "end"))
    for path, document in documents.items():
        before, _, rest = document.partition(begin)
        _, found, after = rest.partition(end)
        if found:
            documents[path] = f"{before}{begin}\n{text}\n{end}{after}"
            return
    raise UserError(f"There is no place for {name}: expected the lines {begin} and {end} in "
                    f"{' or '.join(path.name for path in documents)}.")


def main() -> int:
    parser = tools.parser(__doc__)
    parser.add_argument("--parts", default=",".join(name for name in PARTS if name not in (
                        "pilot", "methods") and not name.startswith("features")),
                        help=f"of {', '.join(PARTS)}; default: %(default)s")
    parser.add_argument("--train_dir", type=Path, default=Path("experiments"), help="default: %(default)s")
    parser.add_argument("--at_once", type=int, default=1, help=AT_ONCE)
    parser.add_argument("--filter", default="", help="keep the runs whose command contains this text")
    parser.add_argument("--recorded", action="store_true", help=f"count the runs of {RECORD.name} as finished")
    parser.add_argument("--report", action="store_true", help="train nothing, show what is finished")
    parser.add_argument("--write", action="store_true", help="write the tables of these parts into BENCHMARKS.md and "
                        "docs/evidence")
    argv, extra = split_flags(sys.argv[1:])
    args = parser.parse_args(argv)
    parts = args.parts.split(",")
    if not set(parts) <= set(PARTS):
        raise UserError(f"Unknown --parts={args.parts}: expected some of {', '.join(PARTS)}, with commas between.")
    jobs = {name: [job for job in PARTS[name].jobs(args.train_dir, extra) if args.filter in str(job)]
            for name in parts}
    if args.recorded:
        record.restore(RECORD, args.train_dir)
    code = 0
    if not args.report:
        if "features_resnet50" in parts:
            write_subset(SUBSET)
        todo = [job for name in parts for job in jobs[name] if not job.finished()]
        # A series that is stopped should leave answers, and what they are worth beside labels alone.
        todo.sort(key=lambda job: (job.method not in CLAIMED, job.method != LABELS_ALONE))
        keep = (lambda run: record.save([run], args.train_dir, RECORD)) if args.write else None
        code = run_all(todo, args.at_once, keep)
    if code not in STOPPED:
        done = {name: [run for job in jobs[name] if (run := job.finished())] for name in parts}
        blocks = report(done)
        print(joined(*(block.text for block in blocks.values())) or "Nothing is finished yet.")
        if args.write:
            # What is said of several parts is only written where all of them were asked for.
            written = {name: block for name, block in blocks.items() if {*TOGETHER.get(name, ())} <= {*parts}}
            documents = {path: path.read_text(encoding="utf-8")
                         for path in (README, BENCHMARKS, *sorted(FIGURES.glob("*.md")))}
            for name, block in written.items():
                replace(documents, name, block.text)
                for figure, drawn in block.figures.items():
                    plots.save(drawn, FIGURES / figure, ("png",))
            for path, document in documents.items():
                write_text(path, document)
            record.save(itertools.chain(*done.values()), args.train_dir, RECORD)
    return code


if __name__ == "__main__":
    exit_on_user_error(main)
