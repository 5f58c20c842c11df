"""Writes one self-contained HTML page about runs: results beside the paper's, curves, calibration, samples.

    cssl-report RUNS … [-o report.html] [--title=…] [--no-images]
    cssl-report RUN_A RUN_B                                 # two runs, side by side

RUNS are run folders, folders above them, or globs. The page needs no network, nor the runs: its pictures are inside.
Unfinished and damaged runs are named on it; what a run did not store is left out with a remark.
"""
import base64
import html
import io
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from cssl import tools
from libml.errors import UserError
from libml.results import plots, tables
from libml.results.metrics import METRICS, shown
from libml.run import Run, find_runs, medians
from libml.writing import write_text

STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --text: #1b1f24; --line: #d0d7de; --shade: #f6f8fa; --quiet: #57606a;
--note: #9a4b00; --right: #1a7f37; --wrong: #cf222e; --bar: #0072b2; }
@media (prefers-color-scheme: dark) { :root { --back: #0d1117; --text: #e6edf3; --line: #30363d; --shade: #161b22;
--quiet: #9da7b1; --note: #f0a85b; --right: #3fb950; --wrong: #ff7b72; --bar: #58a6ff; } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 75rem; padding: 1rem 2rem 4rem;
color: var(--text); background: var(--back); }
h1 { font-size: 1.7rem; margin-bottom: 0; } h2 { border-bottom: 1px solid var(--line); margin-top: 2.2rem; }
h3 { margin-bottom: .3rem; } h4 { margin: 1rem 0 .3rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; margin: .6rem 0; }
th, td { border: 1px solid var(--line); padding: .25rem .6rem; text-align: left; font-variant-numeric: tabular-nums; }
td:not(:last-child) { white-space: nowrap; } th, tr:nth-child(even) td { background: var(--shade); }
img.figure { max-width: 100%; background: #ffffff; border-radius: 6px; }
code, pre { background: var(--shade); font-size: .88em; } code { overflow-wrap: anywhere; }
pre { padding: .6rem; white-space: pre-wrap; overflow-wrap: anywhere; }
.note { color: var(--note); } .quiet { color: var(--quiet); }
summary { cursor: pointer; font-weight: 600; padding: .3rem 0; overflow-wrap: anywhere; }
.samples { display: grid; grid-template-columns: repeat(auto-fill, minmax(7.2rem, 1fr)); gap: .6rem; }
.samples figure { margin: 0; max-width: 9rem; font-size: .78rem; line-height: 1.35; overflow-wrap: anywhere; }
.samples img { width: 100%; image-rendering: pixelated; border: 3px solid var(--quiet); box-sizing: border-box; }
.samples .right img { border-color: var(--right); } .samples .wrong img { border-color: var(--wrong); }
.samples svg { display: block; width: 100%; height: 2rem; border-bottom: 1px solid var(--line); }
.samples polyline { fill: none; stroke: var(--bar); stroke-width: 2; vector-effect: non-scaling-stroke; }
.alpha { height: .4rem; background: var(--line); margin: .15rem 0; } .alpha i { display: block; height: 100%;
background: var(--bar); }
.settings { columns: 3 16rem; font-size: .85rem; overflow-wrap: anywhere; }
details.run { border: 1px solid var(--line); border-radius: 6px; padding: .2rem 1rem; margin: .6rem 0; min-width: 0; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 1rem;
align-items: start; }
@media (max-width: 600px) { body { padding: .5rem .8rem 3rem; } details.run { padding: .2rem .6rem; }
img.figure { height: auto; } img.wide { max-width: none; width: max(100%, 38rem); } }
"""
SAMPLES = 12
MAX_FIGURES = 24  # runs whose figures are drawn; beyond it the page grows to tens of megabytes


def text(value: object) -> str:
    """Escapes text for HTML."""
    return html.escape(str(value))


def table(lines: list[list[str]]) -> str:
    """Formats a header and rows."""
    header, *rows = lines
    body = "".join("<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return (f'<div class="scroll"><table><tr>{"".join(f"<th>{text(cell)}</th>" for cell in header)}</tr>{body}'
            "</table></div>")


def note(message: object) -> str:
    """Formats a remark."""
    return f'<p class="note">{text(message)}</p>'


def embedded(data: bytes) -> str:
    """Returns a PNG as a data URL."""
    return "data:image/png;base64," + base64.b64encode(data).decode()


def figure(plot: Callable[[], Figure | None], alternative: str) -> str:
    """Puts a figure into the page; what a run did not store becomes a remark. On small screens it scrolls."""
    try:
        plotted = plot()
    except UserError as error:
        return note(error)
    if plotted is None:
        return ""
    buffer = io.BytesIO()
    plotted.savefig(buffer, format="png", dpi=100)
    wide = " wide" if plotted.get_size_inches()[0] > 4.5 else ""  # more than a small screen shows
    return (f'<div class="scroll"><img class="figure{wide}" alt="{text(alternative)}" '
            f'src="{embedded(buffer.getvalue())}"></div>')


def card(image: np.ndarray, right: bool | None, alternative: str, caption: str) -> str:
    """Formats one image; its frame says whether its class is right, if that is known."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    kind = "unknown" if right is None else "right" if right else "wrong"
    return (f'<figure class="{kind}"><img alt="{alternative}" src="{embedded(buffer.getvalue())}">'
            f"<figcaption>{caption}</figcaption></figure>")


def groups_of_cards(groups: dict[str, Sequence[str]]) -> str:
    """Formats cards under their titles; empty groups are left out."""
    return "".join(f'<h4>{title}</h4><div class="samples">{"".join(cards)}</div>'
                   for title, cards in groups.items() if cards)


def sparkline(values: Sequence[float]) -> str:
    """Draws numbers from 0 to 1 as a line."""
    values = [values[0], *values] if len(values) == 1 else values
    points = " ".join(f"{100 * i / (len(values) - 1):.1f},{30 - 28 * value:.1f}" for i, value in enumerate(values))
    return (f'<svg viewBox="0 0 100 30" preserveAspectRatio="none" role="img" aria-label="alpha over the run, from '
            f'{values[0]:.2f} to {values[-1]:.2f}"><polyline points="{points}"></polyline></svg>')


class Samples:
    """The unlabelled images that a run keeps, with its predictions and, of some methods, their credal sets."""

    def __init__(self, run: Run):
        arrays = run.arrays("pseudo_labels", ("images", "probabilities", "labels", "class_names"))
        self.images, self.q, self.labels = arrays["images"], arrays["probabilities"], arrays["labels"]
        self.names = [text(name) for name in arrays["class_names"]]
        self.known, self.right = self.labels >= 0, self.q.argmax(1) == self.labels
        self.reports = [report["credal"] for report in run.reports if "credal" in report]
        self.credal = run.arrays("pseudo_labels", ("class", "alpha", "aligned")) if self.reports else {}

    def truth(self, index: int) -> str:
        """The class of an image, if known."""
        return f'<span class="quiet">truth: {self.names[self.labels[index]] if self.known[index] else "unknown"}</span>'

    def set_of(self, index: int) -> str:
        """Describes the credal set of an image: p(class) >= 1 - alpha, and the aligned prediction."""
        if not self.credal:
            return ""
        alpha, aligned = self.credal["alpha"][index], self.credal["aligned"][index]
        best = ", ".join(f"{self.names[c]}&nbsp;{aligned[c]:.2f}" for c in np.argsort(-aligned, kind="stable")[:2])
        return (f'<div class="alpha"><i style="width: {100 * alpha:.1f}%"></i></div>α = {alpha:.2f}<br>'
                f"p({self.names[self.credal['class'][index]]}) ≥&nbsp;{1 - alpha:.2f}<br>"
                f'<span class="quiet">aligned: {best}</span><br>')

    def card(self, index: int, over_time: bool = False) -> str:
        """Shows an image with its pseudo-label, its credal set, how that has shrunk if asked for, and the truth."""
        right = bool(self.right[index]) if self.known[index] else None
        line = sparkline([report["alpha"][index] for report in self.reports]) if over_time else ""
        guess = int(self.q[index].argmax())
        return card(self.images[index], right, "training image",
                    f"{line}{self.names[guess]} {self.q[index, guess]:.2f}<br>{self.set_of(index)}{self.truth(index)}")


def pseudo_labels(run: Run, images: bool) -> str:
    """Shows credal sets and how they shrink; confident right, confident wrong and unsure pseudo-labels."""
    try:
        samples = Samples(run)
    except UserError as error:
        return note(error)
    known, right = samples.known, samples.right
    share = f"{np.mean(right[known]):.1%} of {known.sum()} with a known class are right. " if known.any() else ""
    parts = [f'<p class="quiet">{len(known)} unlabelled images at the last report, as they are, without augmentation, '
             f"predicted by the averaged model. {share}</p>"]
    if samples.credal:
        outside = known & (samples.credal["class"] != samples.labels)
        parts += ["<p>A credal set holds all distributions that give its class at least 1 − α; the bar is α. As the "
                  "run becomes sure, sets shrink to one label. "
                  f"{np.mean(samples.credal['alpha'] < 0.05):.1%} have α below 0.05; "
                  f"{int(outside.sum())} are built around a wrong class.</p>",
                  figure(lambda: plots.credal_sets(run), "credal sets over time")]
    if not images:
        return "".join(parts)
    order = np.argsort(-samples.q.max(1), kind="stable")
    chosen = {"Confident and right": order[(known & right)[order]],
              "Confident and wrong": order[(known & ~right)[order]],
              "Confident, truth unknown": order[~known[order]], "Least confident": order[::-1]}
    groups: dict[str, Sequence[str]] = {}
    if samples.credal:
        groups["How the sets of the first images shrank (α over the run)"] = [
            samples.card(index, over_time=True) for index in range(len(samples.reports[-1]["alpha"]))]
    groups |= {title: [samples.card(index) for index in found[:SAMPLES]] for title, found in chosen.items()}
    return "".join(parts) + groups_of_cards(groups)


def test_images(run: Run) -> str:
    """Shows the test images that the averaged model is least sure of, and those where it is sure and wrong."""
    try:
        stored = run.arrays("test_samples", ("images", "index"))
        predicted = run.arrays("predictions", ("probabilities", "labels"))
        names = [text(name) for name in run.arrays("pseudo_labels", ("class_names",))["class_names"]]
    except UserError:
        return note("This run has stored no test images; training does at every report, since this version.")
    p, labels = predicted["probabilities"][stored["index"]], predicted["labels"][stored["index"]]
    order = np.argsort(-p.max(1), kind="stable")

    def show(i: int) -> str:
        best = [f"{names[c]} {p[i, c]:.2f}" for c in np.argsort(-p[i], kind="stable")[:2]]
        return card(stored["images"][i], bool(p[i].argmax() == labels[i]), "test image",
                    f'{"<br>".join(best)}<br><span class="quiet">truth: {names[labels[i]]}</span>')

    wrong = order[(p.argmax(1) != labels)[order]]
    return groups_of_cards({"Test images: most uncertain": [show(i) for i in order[::-1][:SAMPLES]],
                            "Test images: confident and wrong": [show(i) for i in wrong[:SAMPLES]]})


def comparison(first: Run, second: Run) -> str:
    """Sets two runs beside each other: settings in which they differ, results, agreement, calibration, classes."""
    pair = (first, second)
    names = [f"{letter}: {run.method} on {run.settings.get('dataset', '?')}"
             for letter, run in zip("AB", pair, strict=True)]
    shared = {*first.settings} & {*second.settings}
    settings = [[key, *(str(run.settings[key]) for run in pair)] for key in sorted(shared)
                if first.settings[key] != second.settings[key]]
    parts = ["<h2>Side by side</h2>", table([["", *names], *(settings or [["settings", "the same", "the same"]])])]
    for letter, run in zip("AB", pair, strict=True):
        own = ", ".join(f"{key} = {value}" for key, value in sorted(run.settings.items()) if key not in shared)
        parts.append(f'<p class="quiet">Settings that only {letter} has: {text(own)}.</p>' if own else "")
    tags = [tag for tag in METRICS if all(len(run.series(tag)[1]) for run in pair)]
    if tags:
        results = {tag: [run.result(tag) for run in pair] for tag in tags}
        parts.append(table([["median of the last 20", "A", "B", "B − A"], *(
            [shown(tag).column, *(f"{value:{sign}.{shown(tag).digits}f}" for sign, value in (("", a), ("", b),
                                                                                             ("+", b - a)))]
            for tag, (a, b) in results.items())]))
    try:
        stored = [run.arrays("predictions", ("probabilities", "labels")) for run in pair]
        if np.array_equal(stored[0]["labels"], stored[1]["labels"]):
            a, b = (arrays["probabilities"].argmax(1) == arrays["labels"] for arrays in stored)
            parts.append(table([["test images, at the last report", "B right", "B wrong"],
                                ["A right", str(int((a & b).sum())), str(int((a & ~b).sum()))],
                                ["A wrong", str(int((~a & b).sum())), str(int((~a & ~b).sum()))]]))
    except UserError:  # the figures below say what is missing
        pass
    return "".join([*parts, figure(lambda: plots.reliability(pair), "both reliability diagrams"),
                    figure(lambda: plots.class_accuracy(pair), "accuracy of each class, both runs")])


def run_section(run: Run, opened: bool, figures: bool, images: bool) -> str:
    """Describes one run: configuration, environment, calibration, classes, augmentation rates, pseudo-labels."""
    state = "finished" if run.finished else f"unfinished, {run.progress()}"
    environment = run.described("args/environment.json") or {"environment": "not recorded"}
    command = environment.pop("command", None)
    parts = [f'<details class="run"{" open" if opened else ""}><summary>{text(run.method)} on '
             f'{text(run.settings.get("dataset", "?"))} <span class="quiet">({text(state)})</span></summary>',
             f'<p class="quiet"><code>{text(run.path)}</code></p>', *map(note, run.problems)]
    if run.reports:
        columns = {tag: medians(run.series(tag)[1]) for tag in METRICS if len(run.series(tag)[1])}
        parts.append(table([["median of the last", *(shown(tag).column for tag in columns)], *(
            [str(int(last[4:])), *(f"{values[last]:.{shown(tag).digits}f}" for tag, values in columns.items())]
            for last in medians([]))]))
    if command:
        parts.append(f"<h4>Command</h4><pre>{text(command)}</pre>")
    settings = "<br>".join(f"{text(key)} = {text(value)}" for key, value in sorted(run.settings.items()))
    parts.append("<details><summary>Environment and configuration</summary>"
                 f"{table([list(environment), [str(value) for value in environment.values()]])}"
                 f'<p class="settings">{settings}</p></details>')
    if run.reports and figures:
        parts += ["<h4>Calibration on the test set</h4>",
                  figure(lambda: plots.reliability([run]), "reliability diagram and histogram of confidences"),
                  "<h4>Accuracy of each class</h4>",
                  figure(lambda: plots.class_accuracy([run]), "accuracy of each class"),
                  "<h4>Predicted classes</h4>",
                  figure(lambda: plots.class_distribution([run]), "predicted classes over time"),
                  "<h4>CTAugment rates</h4>",
                  figure(lambda: plots.augmentation_rates(run), "CTAugment rates") or note("None stored: this run has "
                                                                                           "no CTAugment."),
                  "<h4>Pseudo-labels</h4>", pseudo_labels(run, images), test_images(run) if images else ""]
    return "\n".join([*parts, "</details>"])


def page(runs: list[Run], title: str, images: bool = True) -> str:
    """Builds the page; `images` says whether it shows those of the datasets."""
    reported = [run for run in runs if run.reports]
    tags = ["error", *(tag for tag in METRICS
                       if tag != "accuracy" and any(len(run.series(tag)[1]) for run in reported))]
    grid = tables.summarise(runs, tags)
    done = sum(run.finished for run in runs)
    parts = ["<!DOCTYPE html>", f'<html lang="en"><head><meta charset="utf-8">'
             f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{text(title)}</title>',
             f"<style>{STYLE}</style></head><body><h1>{text(title)}</h1>",
             f'<p class="quiet">Runs: {len(runs)}, finished: {done}.</p>', "<h2>Results</h2>"]
    if grid.cells:
        parts += ["<p>Mean ± standard deviation over split seeds (their number in brackets) of the median of the last "
                  "20 reports.</p>", table(tables.table_of(grid)), "<h2>Next to the paper's numbers</h2>"]
        comparisons = tables.compare_with_paper(grid)
        if any(line.near for line in comparisons):
            parts += ["<p>Lienen &amp; Hüllermeier, NeurIPS 2021. “Within 2 std” uses the paper's standard deviation; "
                      "deviations are settings in which these runs differ from the paper's.</p>",
                      table(tables.table_of_comparisons([line for line in comparisons if line.near]))]
        else:
            parts.append("<p>The paper has no result for these methods, datasets and label numbers.</p>")
    else:
        parts.append(note("No finished run yet."))
    parts += [note(remark) for remark in grid.notes]
    if len(reported) == len(runs) == 2:
        parts.append(comparison(*runs))
    parts += ["<h2>Learning curves</h2>",
              figure(lambda: plots.curves(reported, tags), "metrics on the test set over time"),
              "<h2>Pseudo-labels over time</h2>",
              figure(lambda: plots.curves(reported, plots.PSEUDO_LABEL_TAGS), "quality of pseudo-labels over time"),
              "<h2>Runs</h2>"]
    if len(runs) > MAX_FIGURES:
        parts.append(note(f"Figures are drawn for the first {MAX_FIGURES} runs only; name fewer runs to see others."))
    sections = [run_section(run, len(runs) <= 2, number < MAX_FIGURES, images) for number, run in enumerate(runs)]
    parts += ['<div class="pair">', *sections, "</div>"] if len(runs) == 2 else sections
    return "\n".join([*parts, "</body></html>\n"])


def main() -> None:
    """Writes the page asked for on the command line."""
    parser = tools.parser(__doc__, runs=True)
    parser.add_argument("-o", "--output", type=Path, default=Path("report.html"), help="default: %(default)s")
    parser.add_argument("--title", default="Semi-supervised learning runs")
    parser.add_argument("--no-images", action="store_true", help="leave out the images of the datasets: a small page")
    args = parser.parse_args()
    write_text(args.output, page(find_runs(args.runs), args.title, not args.no_images))
    print(args.output)


if __name__ == "__main__":
    tools.exit_on_user_error(main)
