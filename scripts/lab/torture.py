"""Kills one run again and again, lets it finish, and counts the bits in which it differs from a run left alone.

    python scripts/lab/torture.py --kills=100 [--folder=torture]

A tiny run on the digits is trained once in peace, then once under SIGKILL: a third of the kills come while a checkpoint
is written, a third when a report is, the others at any moment. The same command continues what is in the folder. About
12 s a kill on two cores. Exit code 1 if a bit of weights, averages, rates or reports differs.
"""
import json
import random
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from cssl import cli, tools
from cssl.program import exit_on_user_error
from libml.errors import UserError
from libml.lazy import tf
from libml.run import Run, find_runs

ROOT = Path(__file__).parents[2]
KINDS = ("any moment", "checkpoint", "report")
UPDATES = 8000


def start(train_dir: Path) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, str(ROOT / "cssl.py"), "--dataset=digits.1@40-1", "--batch=8",
                             "--uratio=2", "--filters=16", "--scales=1", "--report_kimg=0.125", "--save_kimg=0.125",
                             f"--train_steps={UPDATES}", f"--train_dir={train_dir}"],
                            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def signs(train_dir: Path, kind: str) -> tuple:
    """What changes on disk at the moment a kill of this kind waits for."""
    if kind == "report":
        return tuple(path.stat().st_size for path in train_dir.rglob("metrics.jsonl"))
    # TensorFlow writes under temporary names before a checkpoint's own appear.
    return tuple(sorted(path.name for path in train_dir.glob("*/*/*/tf/*") if "events" not in path.name))


def kill_at(process: subprocess.Popen, train_dir: Path, kind: str, rng: random.Random) -> bool:
    """Waits for the moment and kills; False if the run had ended by itself."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(rng.uniform(0, 20) if kind == "any moment" else rng.uniform(5, 7))
    before = None
    while kind != "any moment" and process.poll() is None:
        with suppress(OSError):  # a file went while it was looked at
            now = signs(train_dir, kind)
            before = before or now
            if now != before:
                time.sleep(rng.choice((0.0, 0.0, 0.001, 0.003)))
                break
    process.kill()
    process.communicate()
    return process.returncode == -9


def finish(train_dir: Path) -> Run:
    process = start(train_dir)
    _, errors = process.communicate()
    if process.returncode:
        raise UserError(f"The run in {train_dir} ended with exit code {process.returncode}: {errors.strip()[-500:]}")
    (run,) = find_runs([train_dir])
    return run


def checkpoint_contents(run: Run) -> dict[str, bytes]:
    """Returns all of a run that must repeat: variables of the last checkpoint, reports but for the clock."""
    reader = tf.train.load_checkpoint(run.checkpoints()[-1])
    found = {name: np.asarray(reader.get_tensor(name)).tobytes() for name in reader.get_variable_to_shape_map()
             if "save_counter" not in name and name != "_CHECKPOINTABLE_OBJECT_GRAPH"}
    reports = [{tag: value for tag, value in report.items() if tag != "images_per_s"} for report in run.read().reports]
    return found | {"reports": json.dumps(reports).encode()}


def differing_bits(found: Mapping[str, bytes], wanted: Mapping[str, bytes]) -> tuple[int, int]:
    """Returns the number of bits in which two such contents differ, and of all bits; what is missing differs whole."""
    pairs = [(found.get(name, b""), wanted.get(name, b"")) for name in {*found, *wanted}]
    different = sum(int(np.unpackbits(np.frombuffer(a, np.uint8) ^ np.frombuffer(b, np.uint8)).sum())
                    if len(a) == len(b) else 8 * max(len(a), len(b)) for a, b in pairs)
    return different, 8 * sum(max(len(a), len(b)) for a, b in pairs)


def main() -> int:
    parser = tools.parser(__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--folder", type=Path, default=Path("torture"))
    args = parser.parse_args()
    cli.start_tensorflow()
    killed, kills = args.folder / "killed", dict.fromkeys(KINDS, 0)
    whole = finish(args.folder / "whole")
    for number in range(args.kills):
        kind = KINDS[number % len(KINDS)]
        if not kill_at(start(killed), killed, kind, random.Random(number)):
            print(f"The run ended by itself after {number} kills.")
            break
        kills[kind] += 1
        print(f"kill {number + 1} of {args.kills} ({kind})", flush=True)
    different, size = differing_bits(checkpoint_contents(finish(killed)), checkpoint_contents(whole))
    print(f"{sum(kills.values())} kills ({', '.join(f'{count} at {kind}' for kind, count in kills.items())}): "
          f"{different} of {size} bits differ")
    return int(different > 0)


if __name__ == "__main__":
    exit_on_user_error(main)
