"""Measures step time, images per second and peak memory over batch, width, replicas, workers, precision, XLA …

    python scripts/lab/bench_scale.py [--json] [--only=workers,size] [--steps=20] [--figure=growth.png]

Every configuration runs in processes of its own: real ones over loopback for workers, logical CPU devices for replicas
where there is no GPU. One changes a single setting of the first, so rows compare with it (`size`, the side of the
images, has a batch of 4 throughout); images count as the program's `images/s` does: labelled and unlabelled images per
second, summed over replicas. `unlabeled` images are the handwritten digits, enlarged, again and again; memory holds as
many as there are. --figure draws how time and memory grow with whatever was varied. Ten minutes or more on 2 cores;
bfloat16 takes far longer where the CPU has no instructions for it.
"""
import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

import figures

from libml.results import plots, tables

BASE = {"batch": 16, "filters": 16, "repeat": 1, "size": 32, "unlabeled": 2000, "classes": 10, "replicas": 1,
        "workers": 1, "precision": "off", "jit": False, "recompute": False}
GROWTH: dict[str, tuple] = {"batch": (4, 16, 32, 64), "filters": (16, 32, 64), "size": (16, 32, 64, 128, 224),
                            "unlabeled": (1000, 10_000, 100_000, 1_000_000), "classes": (10, 100, 1000)}
SWEEP: dict[str, tuple] = {**GROWTH, "replicas": (2, 4), "workers": (2,), "precision": ("float16", "bfloat16"),
                           "jit": (True,), "recompute": (True,)}
URATIO, WARM_UP = 7, 2
TIMEOUT = 300  # seconds for one configuration


def configurations(only: list[str], base: dict) -> list[dict]:
    """The base configuration and its variations, each once."""
    found = [base]
    for name in only or SWEEP:
        start = {**base, "batch": 4} if name == "size" else base
        found += [{**start, name: value} for value in SWEEP[name]]
    return [config for i, config in enumerate(found) if config not in found[:i]]


def measure(config: dict, steps: int) -> dict:
    """Runs one configuration in this process, one of `workers`; returns its numbers."""
    from cssl import CSSL, RunConfig, cli

    cli.start_tensorflow()

    import numpy as np
    import tensorflow as tf

    from libml import data, experiment, networks
    from libml.data import sources
    from libml.devices import distribute
    from libml.train import distributed_batches, update_loop

    run = RunConfig.of(CSSL, uratio=URATIO, scales=3, num_devices=config["replicas"],
                       mixed_precision=config["precision"],
                       **{name: config[name] for name in ("batch", "filters", "repeat", "jit", "recompute")})
    strategy = distribute.create_strategy(run.scale, distribute.find_cluster("auto", os.environ))
    real, classes = sources.digits().images, config["classes"]
    larger = config["size"] // real.shape[1]
    images = np.resize(real.repeat(larger, 1).repeat(larger, 2), (config["unlabeled"], *[config["size"]] * 2, 3))
    labels = np.arange(len(images)) % classes
    dataset = data.from_arrays(images, labels, images[:classes], labels[:classes], num_labels=max(40, classes))
    with strategy.scope():
        model = experiment.build(run.with_data(dataset), dataset)
    batches = distributed_batches(dataset, strategy, batch=config["batch"], uratio=URATIO)

    loop, one = update_loop(model, strategy), tf.constant(1, tf.int64)

    started = time.perf_counter()
    loop(batches, one).numpy()
    compile_seconds = time.perf_counter() - started
    for _ in range(WARM_UP):
        loop(batches, one).numpy()
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        last = loop(batches, one).numpy()
        times.append(time.perf_counter() - started)
    seconds = sorted(times)[len(times) // 2]
    assert np.isfinite(last).all()
    distribute.ProcessGroup(strategy).final_barrier()
    return {"step_s": round(seconds, 4), "images_per_s": round(config["batch"] * (1 + URATIO) / seconds, 1),
            "compile_s": round(compile_seconds, 1), "weights": networks.count_weights(model.network),
            "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10}


def run(config: dict, steps: int) -> dict:
    """Runs one configuration in fresh processes; its numbers are the first worker's, memory is that of one process."""
    count = config["workers"]
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    addresses = [f"127.0.0.1:{s.getsockname()[1]}" for s in sockets]
    for s in sockets:
        s.close()
    processes = []
    for index in range(count):
        environment = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
        if count > 1:
            environment["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses},
                                                   "task": {"type": "worker", "index": index}})
        processes.append(subprocess.Popen(
            [sys.executable, __file__, f"--steps={steps}", f"--configuration={json.dumps(config)}"],
            env={**environment, "PYTHONPATH": str(Path(__file__).parents[2])}, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True))
    try:
        outputs = [process.communicate(timeout=TIMEOUT) for process in processes]
    except subprocess.TimeoutExpired:
        return {**config, "error": f"not done after {TIMEOUT} s"}
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        return {**config, "error": " ".join(error.strip()[-300:] for _, error in outputs)}
    return {**config, **json.loads(outputs[0][0].splitlines()[-1])}


def main() -> None:
    """Prints a table, or one JSON object per configuration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="timed steps; the median counts")
    parser.add_argument("--only", default="", help=f"vary these settings only, of {', '.join(SWEEP)}")
    parser.add_argument("--base", type=json.loads, default={}, help="another base, as JSON: '{\"filters\": 32}'")
    parser.add_argument("--figure", type=Path, help="draw how time and memory grow with what was varied")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--configuration", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.configuration:
        print(json.dumps(measure(json.loads(args.configuration), args.steps)))
        return
    only = [name for name in args.only.split(",") if name]
    if not {*only} <= {*SWEEP} or not {*args.base} <= {*BASE}:
        parser.error(f"--only has names of {', '.join(SWEEP)}, --base of {', '.join(BASE)}")
    columns, rows = [*BASE, "step_s", "images_per_s", "peak_memory_mb", "compile_s", "weights"], []
    if not args.json:
        print(tables.markdown([columns]))
    for config in configurations(only, BASE | args.base):
        row = run(config, args.steps)
        rows.append(row)
        if args.json:
            print(json.dumps(row), flush=True)
        else:
            *_, line = tables.markdown([columns, [str(row.get(name, "")) for name in columns]]).splitlines()
            print(line + row.get("error", ""), flush=True)
    if args.figure:
        plots.save(figures.growth(rows, [name for name in GROWTH if name in (only or SWEEP)]), args.figure, ("png",))


if __name__ == "__main__":
    main()
