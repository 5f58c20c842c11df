"""Writes stats/<metric>.json of runs: medians over the last 1, 10, 20, 50 reports.

    cssl-extract RUN_OR_FOLDER_OR_GLOB … [--metric=accuracy]

The numbers are those of the averaged model on the test set, from metrics.jsonl or, without it, from the event files.
One line per run is printed; runs without numbers are named on stderr, and the exit code is then 1.
"""
import sys

from cssl import tools
from libml.errors import UserError, printable
from libml.results.metrics import METRICS
from libml.run import find_runs


def main(metric: str = "accuracy") -> int:
    parser = tools.parser(__doc__, runs=True)
    parser.add_argument("--metric", choices=tuple(METRICS), default=metric, help="default: %(default)s")
    args = parser.parse_args()
    failed = False
    for run in find_runs(args.runs):
        try:
            written = run.write_stats([args.metric])
            if not written:
                raise UserError(f"no {args.metric} to extract")
            values = " ".join(f"{key} {value:.4f}" for key, value in written[args.metric].items())
            tools.show(f"{run.path}: {values}" + ("" if run.finished else f"  unfinished: {run.progress()}"))
        except UserError as error:  # the others' are written all the same
            run.problems.append(str(error))
            failed = True
        for problem in run.problems:
            print(f"warning: {printable(f'{run.path}: {problem}')}", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    tools.exit_on_user_error(main)
