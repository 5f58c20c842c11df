"""Prints results over seeds as a table: rows are methods, columns dataset and labels; optionally beside the paper's.

    cssl-table RUNS … [--metric=error,ece,nll/valid] [--seeds=1-5] [--compare=paper | --against=CSSL]

A cell is mean ± standard deviation (of the sample, n - 1) over split seeds of the median of the last reports, with the
number of seeds in brackets. Unfinished runs, missing seeds and damaged files are named below the table (LaTeX: in
comments, CSV: on stderr). --compare has a line per cell: whether ours is within two of the paper's standard deviations
of the paper's, and every setting that differs. --against has the mean of the differences split by split, Student's 95 %
interval, and in how many splits a row is above.
"""
import csv
import io
import re
import sys

from cssl import tools
from libml.errors import UserError, printable
from libml.results import metrics, paper, tables
from libml.run import find_runs

MAX_SEEDS = 10_000


def seed_list(text: str) -> list[int]:
    seeds: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", item)
        found = range(int(match[1]), int(match[2] or match[1]) + 1) if match else ()
        if not 0 < len(found) <= MAX_SEEDS:
            raise UserError(f"Malformed --seeds={text}: expected seeds such as 1-5 or 1,2,4, at most {MAX_SEEDS}.")
        seeds += found
    return seeds


def main() -> None:
    parser = tools.parser(__doc__, runs=True)
    parser.add_argument("--metric", default="error", help=f"one or more, with commas between, of {metrics.listed()}")
    parser.add_argument("--format", choices=("markdown", "latex", "csv"), default="markdown")
    parser.add_argument("--seeds", type=str, help="split seeds that should be there: 1-5 or 1,2,4")
    parser.add_argument("--compare", choices=("paper",), help="put the paper's numbers beside ours")
    parser.add_argument("--table", choices=tuple(paper.TABLES), help="compare with this table only")
    parser.add_argument("--against", metavar="ROW", help="print paired differences to this row")
    parser.add_argument("--last", type=int, default=20, help="reports whose median is a run's result; default: 20")
    parser.add_argument("--unfinished", action="store_true", help="include unfinished runs, as far as they got")
    args = parser.parse_args()
    tags = args.metric.split(",")
    if not all(map(metrics.is_metric, tags)):
        raise UserError(f"Unknown --metric={args.metric}: expected {metrics.listed()}; with commas between.")
    if args.last < 1:
        raise UserError(f"--last={args.last} is out of range: expected 1 or more reports.")
    if args.against is not None and args.compare:
        raise UserError("--against and --compare are two tables: give one of them.")
    if args.table and not args.compare:
        raise UserError("--table chooses a table of the paper: it belongs to --compare=paper.")
    seeds = () if args.seeds is None else seed_list(args.seeds)
    grid = tables.summarise(find_runs(args.runs), tags, seeds, args.unfinished, args.last)
    notes = list(grid.notes)
    if args.compare:
        chosen = (args.table,) if args.table else tuple(paper.TABLES)
        lines = tables.table_of_comparisons(tables.compare_with_paper(grid, chosen))
    elif args.against is not None:
        if args.against not in grid.rows:
            raise UserError(f"There is no row {args.against!r}: there are {', '.join(grid.rows) or 'none'}.")
        lines = tables.table_of_differences(tables.differences(grid, args.against), args.against)
    else:
        lines = tables.numbers_of(grid) if args.format == "csv" else tables.table_of(grid)
    if not grid.cells:
        notes.append("no finished run: the table is empty")
    notes = list(map(printable, notes))
    if args.format != "csv" or tools.on_terminal():
        lines = [[printable(cell) if isinstance(cell, str) else cell for cell in line] for line in lines]
    if args.format == "csv":
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(lines)
        print(text.getvalue(), end="")
        print("".join(f"note: {note}\n" for note in notes), end="", file=sys.stderr)
    elif args.format == "latex":
        print("\n".join([tables.latex(lines), *(f"% {note}" for note in notes)]))
    else:
        print("\n".join([tables.markdown(lines), *([""] if notes else []), *(f"- {note}" for note in notes)]))


if __name__ == "__main__":
    tools.exit_on_user_error(main)
