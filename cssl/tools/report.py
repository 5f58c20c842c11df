"""Writes one self-contained HTML page about runs: results beside the paper's, curves, calibration, samples.

    cssl-report RUNS … [-o report.html] [--title=…] [--no-images]
    cssl-report RUN_A RUN_B                                 # two runs, side by side

The page needs no network, nor the runs: its pictures are inside. Unfinished and damaged runs are named on it.
"""
import base64
import functools
import html
import io
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from cssl import tools
from libml.errors import UserError, printable
from libml.results import plots, tables
from libml.results.metrics import METRICS, shown
from libml.run import Run, find_runs, medians
from libml.writing import check_writable, write_text

STYLE = Path(__file__).with_name("report.css")
SAMPLES = 12
MAX_FIGURES = 24  # runs whose figures are drawn; beyond it the page grows to tens of megabytes


def text(value: object) -> str:
    """Escapes text for HTML; bytes that are no UTF-8, which names of files may have, become visible."""
    return html.escape(printable(value))


def table(lines: list[list[str]]) -> str:
    cells = ("th", *["td"] * (len(lines) - 1))
    rows = ("".join(f"<{cell}>{text(value)}</{cell}>" for value in line)
            for cell, line in zip(cells, lines, strict=True))
    return f'<div class="scroll"><table>{"".join(f"<tr>{row}</tr>" for row in rows)}</table></div>'


def note(message: object) -> str:
    return f'<p class="note">{text(message)}</p>'


def png(save: Callable[[io.BytesIO], object]) -> str:
    """Returns a picture, by what writes it as PNG, as a data URL."""
    buffer = io.BytesIO()
    save(buffer)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def section(title: str, make: Callable[[], str | Figure | None], heading: str = "h4") -> str:
    """Formats a part of the page under its title; what a run did not store, or what is damaged, becomes a remark."""
    try:
        made = make()
        if isinstance(made, Figure):  # wide ones are more than a small screen shows: they scroll
            wide = " wide" if made.get_size_inches()[0] > 4.5 else ""
            source = png(functools.partial(made.savefig, format="png", dpi=100))
            made = f'<div class="scroll"><img class="figure{wide}" alt="{title}" src="{source}"></div>'
    except UserError as error:
        made = note(error)
    except Exception as error:  # damaged arrays raise any type, in NumPy, Pillow and matplotlib
        made = note(f"Not shown: what was stored for it is damaged ({type(error).__name__}: {error}).")
    return f"<{heading}>{title}</{heading}>{note('This run has none.') if made is None else made}"


class Samples:
    """Images with their predictions [N, K], and their classes, -1 where these are unknown."""

    def __init__(self, kind: str, images: np.ndarray, q: np.ndarray, labels: np.ndarray, names: np.ndarray):
        self.kind, self.images, self.q, self.labels, self.names = kind, images, q, labels, [text(n) for n in names]
        self.known, self.right = labels >= 0, q.argmax(1) == labels

    def best(self, p: np.ndarray) -> str:
        return ", ".join(f"{self.names[c]}&nbsp;{p[c]:.2f}" for c in np.argsort(-p, kind="stable")[:2])

    def card(self, index: int, below: str) -> str:
        """Shows an image with its most probable classes and the truth; its frame says whether the first is right."""
        frame = "unknown" if not self.known[index] else "right" if self.right[index] else "wrong"
        source = png(functools.partial(Image.fromarray(self.images[index]).save, format="PNG"))
        truth = self.names[self.labels[index]] if self.known[index] else "unknown"
        return (f'<figure class="{frame}"><img alt="{self.kind} image" src="{source}"><figcaption>'
                f'{self.best(self.q[index])}<br>{below}<span class="quiet">truth: {truth}</span></figcaption></figure>')

    def sheet(self, below: Callable[[int], str] = lambda index: "") -> str:
        """Shows the surest predictions that are right, wrong or unknown to be, and the least sure of all."""
        order = np.argsort(-self.q.max(1), kind="stable")
        chosen = {"Confident and right": order[(self.known & self.right)[order]],
                  "Confident and wrong": order[(self.known & ~self.right)[order]],
                  "Confident, truth unknown": order[~self.known[order]], "Least confident": order[::-1]}
        cards = {title: "".join(self.card(index, below(index)) for index in found[:SAMPLES])
                 for title, found in chosen.items()}
        return "".join(f'<h5>{title}</h5><div class="samples">{made}</div>' for title, made in cards.items() if made)


def pseudo_labels(run: Run, images: bool) -> str:
    reports = [report["credal"] for report in run.reports if "credal" in report]  # of some methods
    stored = run.arrays("pseudo_labels", ("images", "probabilities", "labels", "class_names"))
    samples = Samples("training", *stored.values())
    known, right = samples.known, samples.right
    share = f"{np.mean(right[known]):.1%} of {known.sum()} with a known class are right. " if known.any() else ""
    page = (f'<p class="quiet">{len(known)} unlabelled images at the last report, as they are, without augmentation, '
            f"predicted by the averaged model. {share}</p>")
    if not reports:
        return page + (samples.sheet() if images else "")
    y, alpha, aligned = run.arrays("pseudo_labels", ("class", "alpha", "aligned")).values()
    page += ("<p>A credal set holds all distributions that give its class at least 1 − α; the bar is α. As the run "
             f"becomes sure, sets shrink to one label. {np.mean(alpha < 0.05):.1%} have α below 0.05; "
             f"{(known & (y != samples.labels)).sum()} are built around a wrong class.</p>"
             + section("Credal sets over time", lambda: plots.credal_sets(run)))
    if not images:
        return page

    def credal(i: int) -> str:
        return (f'<div class="alpha"><i style="width: {100 * alpha[i]:.1f}%"></i></div>α = {alpha[i]:.2f}<br>'
                f"p({samples.names[y[i]]}) ≥&nbsp;{np.floor(100 * (1 - alpha[i])) / 100:.2f}<br>"  # so that it holds
                f'<span class="quiet">aligned: {samples.best(aligned[i])}</span><br>')

    return page + samples.sheet(credal)


def test_images(run: Run) -> str:
    images, index = run.arrays("test_samples", ("images", "index")).values()
    p, labels = run.arrays("predictions", ("probabilities", "labels")).values()
    names = run.arrays("pseudo_labels", ("class_names",))["class_names"]
    return Samples("test", images, p[index], labels[index], names).sheet()


def comparison(pair: list[Run]) -> str:
    first, second = pair
    settings = [[key, *(str(run.settings.get(key, "–")) for run in pair)]
                for key in sorted({*first.settings, *second.settings})
                if first.settings.get(key) != second.settings.get(key)]
    names = [f"{letter}: {run.method} on {run.settings.get('dataset', '?')}"
             for letter, run in zip("AB", pair, strict=True)]
    results = [["median of the last 20", "A", "B", "B − A"]]
    for tag in METRICS:
        if all(len(run.series(tag)[1]) for run in pair):
            a, b, digits = first.result(tag), second.result(tag), shown(tag).digits
            results.append([shown(tag).column, f"{a:.{digits}f}", f"{b:.{digits}f}", f"{b - a:+.{digits}f}"])
    parts = ["<h2>Side by side</h2>", table([["", *names], *(settings or [["settings", "the same", "the same"]])]),
             table(results)]

    def agreement() -> str:
        stored = [run.arrays("predictions", ("probabilities", "labels")) for run in pair]
        if not np.array_equal(stored[0]["labels"], stored[1]["labels"]):
            raise UserError("The runs were tested on different images.")
        a, b = (arrays["probabilities"].argmax(1) == arrays["labels"] for arrays in stored)
        return table([["", "B right", "B wrong"], ["A right", str((a & b).sum()), str((a & ~b).sum())],
                      ["A wrong", str((~a & b).sum()), str((~a & ~b).sum())]])

    return "".join([*parts, section("Test images, at the last report", agreement),
                    section("Both calibrations", lambda: plots.reliability(pair)),
                    section("Accuracy of each class, both runs", lambda: plots.class_accuracy(pair))])


def run_section(run: Run, opened: bool, figures: bool, images: bool) -> str:
    state = "finished" if run.finished else f"unfinished, {run.progress()}"
    environment = run.described("args/environment.json") or {"environment": "not recorded"}
    command = environment.pop("command", None)
    parts = [f'<details class="run"{" open" if opened else ""}><summary>{text(run.method)} on '
             f'{text(run.settings.get("dataset", "?"))} <span class="quiet">({text(state)})</span></summary>',
             f'<p class="quiet"><code>{text(run.path)}</code></p>', *map(note, run.problems)]
    if run.reports:
        parts.append(table([["median of the last", *(str(int(last[4:])) for last in medians([]))], *(
            [shown(tag).column, *(f"{value:.{shown(tag).digits}f}" for value in medians(run.series(tag)[1]).values())]
            for tag in METRICS if len(run.series(tag)[1]))]))
    if command:
        parts.append(f"<h4>Command</h4><pre>{text(command)}</pre>")
    described = {**environment, **dict(sorted(run.settings.items()))}
    parts.append('<details><summary>Environment and configuration</summary><p class="settings">' + "<br>".join(
        f"{text(key)} = {text(value)}" for key, value in described.items()) + "</p></details>")
    if run.reports and figures:
        parts += [section("Calibration on the test set", lambda: plots.reliability([run])),
                  section("Accuracy of each class", lambda: plots.class_accuracy([run])),
                  section("Predicted classes", lambda: plots.class_distribution([run])),
                  section("CTAugment rates", lambda: plots.augmentation_rates(run)),
                  section("Pseudo-labels", lambda: pseudo_labels(run, images)),
                  section("Test images", lambda: test_images(run)) if images else ""]
    return "\n".join([*parts, "</details>"])


def results(runs: list[Run], tags: list[str]) -> list[str]:
    grid = tables.summarise(runs, tags)
    remarks = [note(remark) for remark in grid.notes]
    if not grid.cells:
        return [note("No finished run yet."), *remarks]
    comparisons = [line for line in tables.compare_with_paper(grid) if line.near]
    beside = ["<p>The paper has no result for these methods, datasets and label numbers.</p>"]
    if comparisons:
        beside = ["<p>Lienen &amp; Hüllermeier, NeurIPS 2021. “Within 2 std” uses the paper's standard deviation; "
                  "deviations are settings in which these runs differ from the paper's.</p>",
                  table(tables.table_of_comparisons(comparisons))]
    return ["<p>Mean ± standard deviation over split seeds (their number in brackets) of the median of the last 20 "
            "reports.</p>", table(tables.table_of(grid)), "<h2>Next to the paper's numbers</h2>", *beside, *remarks]


def page(runs: list[Run], title: str, images: bool = True) -> str:
    """Builds the page; `images` says whether it shows those of the datasets."""
    reported = [run for run in runs if run.reports]
    tags = ["error", *(tag for tag in METRICS
                       if tag != "accuracy" and any(len(run.series(tag)[1]) for run in reported))]
    parts = [f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><meta name="generator" '
             f'content="cssl-report"><title>{text(title)}</title>'
             '<meta name="viewport" content="width=device-width, initial-scale=1"><style>', STYLE.read_text(),
             f'</style></head><body><h1>{text(title)}</h1><p class="quiet">Runs: {len(runs)}, finished: '
             f"{sum(run.finished for run in runs)}.</p><h2>Results</h2>", *results(runs, tags)]
    if len(reported) == len(runs) == 2:
        parts.append(comparison(runs))

    def curves(title: str, tags: Sequence[str]) -> str:
        draw = functools.partial(plots.without_damaged, lambda runs: plots.curves(runs, tags), reported)
        return section(title, draw, "h2")

    parts += [curves("Learning curves", tags), curves("Pseudo-labels over time", plots.PSEUDO_LABEL_TAGS),
              "<h2>Runs</h2>"]
    if len(runs) > MAX_FIGURES:
        parts.append(note(f"Figures are drawn for the first {MAX_FIGURES} runs only; name fewer runs to see others."))
    sections = [run_section(run, len(runs) <= 2, number < MAX_FIGURES, images) for number, run in enumerate(runs)]
    parts += ['<div class="pair">', *sections, "</div>"] if len(runs) == 2 else sections
    return "\n".join([*parts, "</body></html>\n"])


def main() -> None:
    parser = tools.parser(__doc__, runs=True)
    parser.add_argument("-o", "--output", type=Path, default=Path("report.html"), help="default: %(default)s")
    parser.add_argument("--title", default="Semi-supervised learning runs")
    parser.add_argument("--no-images", action="store_true", help="leave out the images of the datasets: a small page")
    args = parser.parse_args()
    check_writable(args.output, rb"<!DOCTYPE html>.{,99}cssl-report")
    with np.errstate(all="ignore"):  # of damaged runs numbers may be any
        write_text(args.output, page(find_runs(args.runs), args.title, not args.no_images))
    print(args.output)


if __name__ == "__main__":
    tools.exit_on_user_error(main)
