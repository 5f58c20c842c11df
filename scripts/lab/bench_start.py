"""Measures how long a run takes to start, and to continue, beside that of another checkout of this program.

    python scripts/lab/bench_start.py [--against=FOLDER] [--rounds=3] [--json]

Seconds from `python cssl.py --dataset=digits.1@40-1` to its first report, after 16 updates: imports, data, network,
tracing, compiling, updates, evaluation. "first" finds no compiled views of a run before, "second" has them, and
"continuation" goes on with the run of the second, which was stopped by a signal. The contenders take turns, and the
best of the rounds counts.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cssl.program import exit_on_user_error
from libml.errors import UserError
from libml.results import tables

HERE = Path(__file__).resolve().parents[2]


def seconds_to_report(root: Path, folder: str, cache: str) -> float:
    """Starts the command of a checkout, stops it at its first report, and returns how long that took."""
    begun = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-u", "cssl.py", "--dataset=digits.1@40-1", f"--train_dir={folder}"],
                               cwd=root, env={**os.environ, "PYTHONPATH": str(root), "XDG_CACHE_HOME": cache},
                               stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout
    seconds = next((time.perf_counter() - begun for line in process.stdout if " kimg  accuracy" in line), None)
    process.terminate()
    process.communicate()
    if seconds is None:
        raise UserError(f"The run of {root} made no report: exit code {process.returncode}.")
    return seconds


def main() -> None:
    """Prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="the root of another checkout")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    roots = {"this checkout": HERE}
    if args.against:
        if not (args.against / "cssl.py").exists():
            raise UserError(f"--against={args.against} has no cssl.py: name the root of a checkout.")
        roots["the other"] = args.against.resolve()
    best: dict[str, dict[str, float]] = {name: {} for name in roots}
    for _ in range(args.rounds):
        for name, root in roots.items():
            with tempfile.TemporaryDirectory() as place:
                for what, folder in (("first", "1"), ("second", "2"), ("continuation", "2")):
                    seconds = seconds_to_report(root, f"{place}/{folder}", f"{place}/cache")
                    best[name][what] = min(seconds, best[name].get(what, seconds))
    if args.json:
        print(json.dumps(best))
        return
    print(tables.markdown([["seconds to the first report", "first", "second", "continuation"], *(
        [name, *(f"{seconds:.1f}" for seconds in found.values())] for name, found in best.items())]))


if __name__ == "__main__":
    exit_on_user_error(main)
