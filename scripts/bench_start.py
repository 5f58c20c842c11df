"""Measures how long a run takes to start, and to continue, beside that of another checkout of this program.

    python scripts/bench_start.py [--against=FOLDER] [--rounds=3] [--json]

A start is the whole of `python cssl.py --dataset=digits.1@40-1` with one update: imports, data, network, tracing, the
update, its report and checkpoint. A continuation is the same command with two updates, in the same folder. The
contenders take turns, and the best of the rounds counts; seconds of wall time and of CPU time.
"""
import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cssl.program import exit_on_user_error
from libml import tables
from libml.errors import UserError

HERE = Path(__file__).resolve().parent.parent


def run(root: Path, folder: str, updates: int) -> tuple[float, float]:
    """Runs the command of a checkout to its end; returns its wall and CPU seconds."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "cssl.py", "--dataset=digits.1@40-1", "--schedule_kimg=30", f"--train_dir={folder}",
                    f"--train_steps={updates}"], cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, check=True,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (time.perf_counter() - begun,
            after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


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
    best: dict = {}
    for _ in range(args.rounds):
        for name, root in roots.items():
            with tempfile.TemporaryDirectory() as folder:
                for what, updates in (("start", 1), ("continuation", 2)):
                    found = run(root, folder, updates)
                    best[name, what] = tuple(map(min, zip(found, best.get((name, what), found), strict=True)))
    rows = [{"contender": name, "what": what, "wall_s": wall, "cpu_s": cpu} for (name, what), (wall, cpu) in
            best.items()]
    if args.json:
        print(json.dumps(rows))
        return
    print(tables.markdown([["", "", "wall, s", "CPU, s"], *(
        [row["contender"], row["what"], f"{row['wall_s']:.1f}", f"{row['cpu_s']:.1f}"] for row in rows)]))


if __name__ == "__main__":
    exit_on_user_error(main)
