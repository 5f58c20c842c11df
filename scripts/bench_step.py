"""Measures a whole training step against a bare Keras step on as many images of the same network.

    python scripts/bench_step.py [--json] [--sweep]

The whole step: weak and strong views, policies, one forward and backward pass over 960 images, SGD, averages,
alignment, probe and rate update. The bare step: `train_on_batch` of the network on 960 ready float images with
Keras's SGD. Contenders take turns and the best of several rounds counts. `--sweep` adds other batch sizes and widths.
"""
import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from cssl import CSSL, RunConfig, cli
from cssl.program import exit_on_user_error

cli.start_tensorflow()

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from libml import data, experiment  # noqa: E402


def contenders(batch: int, uratio: int, filters: int, repeat: int):
    """Returns functions that run one whole and one bare step."""
    rng = np.random.RandomState(0)
    count = 2000
    images = rng.randint(0, 256, (count, 32, 32, 3)).astype(np.uint8)
    labels = np.arange(count) % 10
    dataset = data.from_arrays(images, labels, images[:10], labels[:10], num_labels=40)
    config = RunConfig.of(CSSL, batch=batch, uratio=uratio, filters=filters, repeat=repeat).with_data(dataset)
    model, bare = experiment.build(config, dataset), experiment.build(config, dataset).network
    batches = iter(data.batches(dataset, batch=batch, uratio=uratio))
    whole = tf.function(lambda: model.train_step(next(batches))["losses/total"], autograph=False)

    bare.compile(optimizer=keras.optimizers.SGD(0.03, momentum=0.9, nesterov=True),
                 loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    total = batch * (1 + 2 * uratio)
    x = tf.constant(rng.uniform(-1, 1, (total, 32, 32, 3)).astype(np.float32))
    y = tf.constant(rng.randint(0, 10, total))
    return (lambda: float(whole())), (lambda: float(bare.train_on_batch(x, y)))


def process_age() -> float | None:
    """Seconds since this process started (Linux; None elsewhere)."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        return round(uptime - ticks / os.sysconf("SC_CLK_TCK"), 1)
    except OSError:
        return None


def measure(batch: int, uratio: int, filters: int, repeat: int, rounds: int) -> dict:
    """Times both contenders, in turns."""
    whole, bare = contenders(batch, uratio, filters, repeat)
    whole()
    first = process_age()
    bare()
    best = {"whole": float("inf"), "bare": float("inf")}
    for _ in range(rounds):
        for name, step in (("whole", whole), ("bare", bare)):
            start = time.perf_counter()
            step()
            best[name] = min(best[name], time.perf_counter() - start)
    return {"batch": batch, "uratio": uratio, "filters": filters, "repeat": repeat,
            "step_s": round(best["whole"], 4), "bare_step_s": round(best["bare"], 4),
            "ratio": round(best["whole"] / best["bare"], 4),
            "images_per_s": round(batch * (1 + uratio) / best["whole"], 1), "start_to_first_step_s": first,
            "peak_memory_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)}


def main() -> None:
    """Measures the paper's setting, and with --sweep others, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--uratio", type=int, default=7)
    parser.add_argument("--filters", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--sweep", action="store_true", help="also batch 16 and 32, filters 16 and 64")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = measure(args.batch, args.uratio, args.filters, args.repeat, args.rounds)
    if args.sweep:
        result["sweep"] = []
        for flags in (["--batch=16"], ["--batch=32"], ["--batch=16", "--filters=16"], ["--batch=16", "--filters=64"]):
            done = subprocess.run([sys.executable, Path(__file__), *flags, f"--rounds={args.rounds}", "--json"],
                                  capture_output=True, text=True, check=True)
            result["sweep"].append(json.loads(done.stdout))
    if args.json:
        print(json.dumps(result))
        return
    for row in [result, *result.get("sweep", [])]:
        print("filters {filters}, batch {batch}, uratio {uratio}: whole step {step_s:.3f} s, bare Keras step "
              "{bare_step_s:.3f} s, ratio {ratio:.3f}, {images_per_s:.0f} images/s, first step "
              "{start_to_first_step_s} s after the start, peak memory {peak_memory_mb} MB".format(**row))


if __name__ == "__main__":
    exit_on_user_error(main)
