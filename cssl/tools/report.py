"""Writes one self-contained HTML page about runs: results beside the paper's, curves, calibration, samples.

    cssl-report RUNS … [-o report.html] [--title=…]

RUNS are run folders, folders above them, or globs. The page needs no network: its pictures are inside. Unfinished and
damaged runs are named on it; what a run did not store is left out with a remark.
"""
import base64
import html
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from cssl import tools
from libml import plots, tables
from libml.errors import UserError
from libml.metrics import METRICS, shown
from libml.run import Run, medians, read_runs, write_text

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 75rem; padding: 1rem 2rem 4rem;
color: #1b1f24; }
h1 { font-size: 1.7rem; margin-bottom: 0; } h2 { border-bottom: 1px solid #d0d7de; margin-top: 2.2rem; }
h3 { margin-bottom: .3rem; } h4 { margin: 1rem 0 .3rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; margin: .6rem 0; }
th, td { border: 1px solid #d0d7de; padding: .25rem .6rem; text-align: left; font-variant-numeric: tabular-nums; }
td:not(:last-child) { white-space: nowrap; } th { background: #f6f8fa; }
tr:nth-child(even) td { background: #fafbfc; }
img.figure { max-width: 100%; } code, pre { background: #f6f8fa; font-size: .88em; }
code { overflow-wrap: anywhere; }
pre { overflow-x: auto; padding: .6rem; }
.note { color: #9a4b00; } .quiet { color: #57606a; } summary { cursor: pointer; font-weight: 600; padding: .3rem 0; }
.samples { display: flex; flex-wrap: wrap; gap: .6rem; }
.samples figure { margin: 0; width: 7.2rem; font-size: .78rem; }
.samples img { width: 100%; image-rendering: pixelated; border: 3px solid #8c959f; box-sizing: border-box; }
.right img { border-color: #1a7f37; } .wrong img { border-color: #cf222e; }
.settings { columns: 3 16rem; font-size: .85rem; } details.run { border: 1px solid #d0d7de; border-radius: 6px;
padding: .2rem 1rem; margin: .6rem 0; }
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
    """Puts a figure into the page; what a run did not store becomes a remark."""
    try:
        plotted = plot()
    except UserError as error:
        return note(error)
    if plotted is None:
        return ""
    buffer = io.BytesIO()
    plotted.savefig(buffer, format="png", dpi=100)
    return f'<img class="figure" alt="{text(alternative)}" src="{embedded(buffer.getvalue())}">'


def pseudo_labels(run: Run) -> str:
    """Shows confident right, confident wrong and unsure pseudo-labels with their images."""
    try:
        arrays = run.arrays("pseudo_labels", ("images", "probabilities", "labels", "class_names"))
    except UserError as error:
        return note(error)
    guess, sure = np.argmax(arrays["probabilities"], axis=1), np.max(arrays["probabilities"], axis=1)
    known, right = arrays["labels"] >= 0, guess == arrays["labels"]
    order = np.argsort(-sure, kind="stable")
    groups = {"Confident and right": order[(known & right)[order]],
              "Confident and wrong": order[(known & ~right)[order]],
              "Confident, truth unknown": order[~known[order]], "Least confident": order[::-1]}
    parts = []
    for title, chosen in groups.items():
        figures = []
        for index in chosen[:SAMPLES]:
            buffer = io.BytesIO()
            Image.fromarray(arrays["images"][index]).save(buffer, "PNG")
            truth = text(arrays["class_names"][arrays["labels"][index]]) if known[index] else "unknown"
            kind = ("right" if right[index] else "wrong") if known[index] else "unknown"
            figures.append(f'<figure class="{kind}"><img alt="training image" src="{embedded(buffer.getvalue())}">'
                           f'<figcaption>{text(arrays["class_names"][guess[index]])} {sure[index]:.2f}<br>'
                           f'<span class="quiet">truth: {truth}</span></figcaption></figure>')
        if figures:
            parts.append(f'<h4>{title}</h4><div class="samples">{"".join(figures)}</div>')
    share = f"{np.mean(right[known]):.1%} of {known.sum()} with a known class are right. " if known.any() else ""
    return f'<p class="quiet">{len(guess)} unlabelled images at the last report. {share}</p>' + "".join(parts)


def run_section(run: Run, opened: bool, figures: bool) -> str:
    """Describes one run: configuration, environment, calibration, classes, augmentation rates, pseudo-labels."""
    state = "finished" if run.finished else f"unfinished, {run.progress()}"
    environment = run.described("args/environment.json") or {"environment": "not recorded"}
    command = environment.pop("command", None)
    parts = [f'<details class="run"{" open" if opened else ""}><summary>{text(run.method)} on '
             f'{text(run.config.get("dataset", "?"))} <span class="quiet">({text(state)})</span></summary>',
             f'<p class="quiet"><code>{text(run.path)}</code></p>', *map(note, run.problems)]
    if run.metrics:
        columns = {tag: medians(run.series(tag)[1]) for tag in METRICS if len(run.series(tag)[1])}
        parts.append(table([["median of the last", *(shown(tag).column for tag in columns)], *(
            [str(int(last[4:])), *(f"{values[last]:.{shown(tag).digits}f}" for tag, values in columns.items())]
            for last in medians([]))]))
    if command:
        parts.append(f"<h4>Command</h4><pre>{text(command)}</pre>")
    parts += ["<h4>Environment</h4>", table([list(environment), [str(value) for value in environment.values()]])]
    settings = "<br>".join(f"{text(key)} = {text(value)}" for key, value in sorted(run.config.items()))
    parts.append(f'<h4>Configuration</h4><p class="settings">{settings}</p>')
    if run.metrics and figures:
        parts += ["<h4>Calibration on the test set</h4>",
                  figure(lambda: plots.reliability([run]), "reliability diagram and histogram of confidences"),
                  "<h4>Predicted classes</h4>",
                  figure(lambda: plots.class_distribution([run]), "predicted classes over time"),
                  "<h4>CTAugment rates</h4>",
                  figure(lambda: plots.augmentation_rates(run), "CTAugment rates") or note("None stored: this run has "
                                                                                           "no CTAugment."),
                  "<h4>Pseudo-labels</h4>", pseudo_labels(run)]
    return "\n".join([*parts, "</details>"])


def page(runs: list[Run], title: str) -> str:
    """Builds the page."""
    reported = [run for run in runs if run.metrics]
    tags = ["error", *(tag for tag in METRICS
                       if tag != "accuracy" and any(len(run.series(tag)[1]) for run in reported))]
    grid = tables.summarise(runs, tags)
    done = sum(run.finished for run in runs)
    parts = ["<!DOCTYPE html>", f'<html lang="en"><head><meta charset="utf-8"><title>{text(title)}</title>',
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
    parts += ["<h2>Learning curves</h2>",
              figure(lambda: plots.curves(reported, tags), "metrics on the test set over time"),
              "<h2>Pseudo-labels over time</h2>",
              figure(lambda: plots.curves(reported, plots.PSEUDO_LABEL_TAGS), "quality of pseudo-labels over time"),
              "<h2>Runs</h2>"]
    if len(runs) > MAX_FIGURES:
        parts.append(note(f"Figures are drawn for the first {MAX_FIGURES} runs only; name fewer runs to see others."))
    parts += [run_section(run, len(runs) == 1, number < MAX_FIGURES) for number, run in enumerate(runs)]
    return "\n".join([*parts, "</body></html>\n"])


def main() -> None:
    """Writes the page asked for on the command line."""
    parser = tools.parser(__doc__, runs=True)
    parser.add_argument("-o", "--output", type=Path, default=Path("report.html"), help="default: %(default)s")
    parser.add_argument("--title", default="Semi-supervised learning runs")
    args = parser.parse_args()
    write_text(args.output, page(read_runs(args.runs), args.title))
    print(args.output)


if __name__ == "__main__":
    tools.exit_on_user_error(main)
