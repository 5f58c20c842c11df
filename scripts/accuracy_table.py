"""Prints results over seeds as a table: rows are methods, columns dataset and labels; optionally beside the paper's.

    python scripts/accuracy_table.py RUNS … [--metric=error,ece] [--format=markdown|latex|csv] [--seeds=1-5]
                                            [--compare=paper] [--table=efficiency] [--unfinished]

A cell is mean ± standard deviation (of the sample, n - 1) over split seeds of the median of the last 20 reports, with
the number of seeds in brackets. Unfinished runs, missing seeds and damaged files are named below the table (LaTeX: in
comments, CSV: on stderr). --compare=paper prints one line per cell: ours, the paper's, the difference, whether it is
within two of the paper's standard deviations, and every setting in which our runs differ from the paper's.
"""
import argparse
import csv
import sys

from cssl import cli
from libml import paper, results
from libml.errors import UserError

_LATEX = str.maketrans({**{c: f"\\{c}" for c in "&%$#_{}"}, "\\": r"\textbackslash{}", "±": r"$\pm$", "–": "--",
                        "τ": r"$\tau$", "α": r"$\alpha$", "≥": r"$\geq$", "~": r"\textasciitilde{}",
                        "^": r"\textasciicircum{}"})


def markdown(lines: list[list[str]]) -> str:
    """Formats a header and rows as a Markdown table."""
    lines = [[cell.replace("|", r"\|") for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines)


def latex(lines: list[list[str]]) -> str:
    """Formats a header and rows as a LaTeX tabular (booktabs)."""
    header, *rows = [" & ".join(cell.translate(_LATEX) for cell in line) + r" \\" for line in lines]
    return "\n".join([rf"\begin{{tabular}}{{l{'c' * (len(lines[0]) - 1)}}}", r"\toprule", header, r"\midrule", *rows,
                      r"\bottomrule", r"\end{tabular}"])


def csv_grid(grid: results.Grid) -> list[list]:
    """Returns a grid as numbers: mean, std and number of seeds of each column."""
    parts = ("mean", "std", "seeds")
    lines = [["method", *(f"{results.column_title(c)}, {part}" for c in grid.columns for part in parts)]]
    for row in grid.rows:
        cells = [grid.cells.get((row, column)) for column in grid.columns]
        lines.append([row, *(value for cell in cells
                             for value in ((cell.mean, cell.std, len(cell.seeds)) if cell else ("", "", 0)))])
    return lines


def seed_list(text: str) -> list[int]:
    """Parses 1-5 or 1,2,4."""
    try:
        seeds = []
        for part in text.split(","):
            first, _, last = part.partition("-")
            seeds += range(int(first), int(last or first) + 1)
        return seeds
    except ValueError:
        raise UserError(f"Malformed --seeds={text}: expected seeds such as 1-5 or 1,2,4.") from None


def main() -> None:
    """Prints the table asked for on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="run folders, folders above them, or globs")
    parser.add_argument("--metric", default="error",
                        help=f"one or more of {', '.join(results.METRICS)}, with commas between")
    parser.add_argument("--format", choices=("markdown", "latex", "csv"), default="markdown")
    parser.add_argument("--seeds", type=str, help="split seeds that should be there: 1-5 or 1,2,4")
    parser.add_argument("--compare", choices=("paper",), help="put the paper's numbers beside ours")
    parser.add_argument("--table", choices=tuple(paper.TABLES), help="compare with this table only")
    parser.add_argument("--unfinished", action="store_true", help="include unfinished runs, as far as they got")
    args = parser.parse_args()
    metrics = args.metric.split(",")
    if not set(metrics) <= set(results.METRICS):
        raise UserError(f"Unknown --metric={args.metric}: expected {', '.join(results.METRICS)}, with commas between.")
    seeds = seed_list(args.seeds) if args.seeds else ()
    grid = results.summarise(results.read_runs(args.runs), metrics, seeds, args.unfinished)
    notes = list(grid.notes)
    if args.compare:
        tables = (args.table,) if args.table else tuple(paper.TABLES)
        lines = results.table_of_comparisons(results.compare(grid, tables))
    else:
        lines = csv_grid(grid) if args.format == "csv" else results.table_of(grid)
    if not grid.cells:
        notes.append("no finished run: the table is empty")
    if args.format == "csv":
        csv.writer(sys.stdout, lineterminator="\n").writerows(lines)
        print("".join(f"note: {note}\n" for note in notes), end="", file=sys.stderr)
    elif args.format == "latex":
        print("\n".join([latex(lines), *(f"% {note}" for note in notes)]))
    else:
        print("\n".join([markdown(lines), *([""] if notes else []), *(f"- {note}" for note in notes)]))


if __name__ == "__main__":
    cli.guarded(main)
