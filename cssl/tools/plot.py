"""Plots runs, as PNG and SVG.

    cssl-plot curves|reliability|pseudo|classes RUNS … [-o figures/curves] [--tags=error,ece]

curves: learning curves, a panel per dataset and label number, a line per method, bands of one standard deviation over
seeds. reliability: accuracy against confidence with the histogram of confidences, at the last report. pseudo: share of
pseudo-labels used, their alpha, and their accuracy against the held-back true labels, over time. classes: predicted
classes of the test images over time.
"""
import functools
import sys
from pathlib import Path

from cssl import tools
from libml.errors import UserError, printable
from libml.results import plots
from libml.run import find_runs

PANEL_PER_RUN = {"reliability": plots.reliability, "classes": plots.class_distribution}
MAX_PANELS = 12
def main() -> None:
    parser = tools.parser(__doc__)
    parser.add_argument("kind", choices=("curves", "pseudo", *PANEL_PER_RUN))
    parser.add_argument("runs", nargs="+", help="run folders, folders above them, or globs")
    parser.add_argument("-o", "--output", type=Path, help="path without extension; default: figures/<kind>")
    parser.add_argument("--tags", default="error", help="what `curves` shows: error, or tags of metrics.jsonl, with "
                                                        "commas between")
    args = parser.parse_args()
    runs = find_runs(args.runs)
    for run in runs:
        if run.reports and not run.finished:
            run.problems.append(f"unfinished ({run.progress()})")
    if args.kind in PANEL_PER_RUN and len(runs) > MAX_PANELS:
        raise UserError(f"{args.kind} draws a panel per run and got {len(runs)} runs; name at most {MAX_PANELS}.")
    tags = plots.PSEUDO_LABEL_TAGS if args.kind == "pseudo" else args.tags.split(",")
    draw = PANEL_PER_RUN.get(args.kind, functools.partial(plots.curves, tags=tags))
    try:
        if not any(run.reports for run in runs):
            raise UserError("None of the runs has a report yet: nothing to draw.")
        figure = plots.without_damaged(draw, [run for run in runs if run.reports])
    finally:
        for run in runs:
            for problem in run.problems:
                print(f"warning: {printable(f'{run.path}: {problem}')}", file=sys.stderr)
    for path in plots.save(figure, args.output or Path("figures") / args.kind):
        tools.show(path)


if __name__ == "__main__":
    tools.exit_on_user_error(main)
