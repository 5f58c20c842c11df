"""Writes stats/accuracy.json (extract_ece.py: stats/ece.json) of runs: medians over the last 1, 10, 20, 50 reports.

    python scripts/extract_accuracy.py RUN_OR_FOLDER_OR_GLOB …
    python scripts/extract_ece.py RUN_OR_FOLDER_OR_GLOB …

The numbers are those of the averaged model on the test set, from metrics.jsonl or, without it, from the event files.
One line per run is printed; runs without numbers are named on stderr, and the exit code is then 1.
"""
import argparse
import sys

from cssl import cli
from libml import results


def main(metric: str = "accuracy") -> int:
    """Extracts one metric of the runs on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="run folders, folders above them, or globs")
    failed = False
    for run in results.read_runs(parser.parse_args().runs):
        written = results.write_stats(run, [metric]).get(metric)
        problems = run.problems + ([] if written else [f"no {metric} to extract"])
        if written:
            state = "" if run.finished else f"  unfinished: {run.progress()}"
            print(f"{run.path}: " + " ".join(f"{key} {value:.4f}" for key, value in written.items()) + state)
        for problem in problems:
            print(f"warning: {run.path}: {problem}", file=sys.stderr)
        failed |= not written
    return int(failed)


if __name__ == "__main__":
    cli.guarded(main)
