"""Measures how many images per second the input pipeline alone delivers.

    python scripts/lab/bench_data.py --dataset=cifar10.3@40-1 [--json]
"""
import argparse
import json
import time
from pathlib import Path

from cssl import cli
from cssl.program import exit_on_user_error


def main() -> None:
    """Times the pipeline: best of several rounds, because machines are noisy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="cifar10.3@40-1")
    parser.add_argument("--data_dir", type=Path, default=cli.default_data_dir())
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--uratio", type=int, default=7)
    parser.add_argument("--steps", type=int, default=300, help="steps per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    start = time.perf_counter()
    cli.start_tensorflow()
    from libml import data

    dataset = data.load(args.dataset, args.data_dir)
    iterator = iter(data.batches(dataset, batch=args.batch, uratio=args.uratio))
    next(iterator)
    first = time.perf_counter() - start
    best = float("inf")
    for _ in range(args.rounds):
        start = time.perf_counter()
        for _ in range(args.steps):
            next(iterator)
        best = min(best, time.perf_counter() - start)
    rate = args.steps * args.batch * (1 + args.uratio) / best
    result = {"dataset": args.dataset, "batch": args.batch, "uratio": args.uratio, "images_per_s": round(rate),
              "first_batch_s": round(first, 3)}
    print(json.dumps(result) if args.json else
          f"{args.dataset}: {rate:,.0f} images/s at batch {args.batch}, uratio {args.uratio}; "
          f"first batch after {first:.2f} s")


if __name__ == "__main__":
    exit_on_user_error(main)
