"""Measures step time, images per second and peak memory over batch, width, replicas, workers, precision and XLA.

    python scripts/bench_scale.py [--json] [--only=workers] [--steps=20]

Every configuration runs in processes of its own: real ones over loopback for workers, logical CPU devices for replicas
where there is no GPU. One changes a single setting of the first, so rows compare with it; images count as the
program's `images/s` does: labelled and unlabelled images per second, summed over replicas. Five minutes or more on 2
cores; bfloat16 takes far longer where the CPU has no instructions for it.
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

from libml import tables

BASE = {"batch": 16, "filters": 16, "replicas": 1, "workers": 1, "precision": "off", "jit": False}
SWEEP = {"batch": (32, 64), "filters": (32, 64), "replicas": (2, 4), "workers": (2,),
         "precision": ("float16", "bfloat16"), "jit": (True,)}
URATIO, REPEAT, WARM_UP = 7, 1, 2
TIMEOUT = 300  # seconds for one configuration


def configurations(only: str | None) -> list[dict]:
    """The base configuration and its variations."""
    chosen = {name: values for name, values in SWEEP.items() if only in (None, name)}
    return [BASE] + [{**BASE, name: value} for name, values in chosen.items() for value in values]


def measure(config: dict, steps: int) -> dict:
    """Runs one configuration in this process, one of `workers`; returns its numbers."""
    from cssl import CSSL, RunConfig, cli

    cli.start_tensorflow()

    import numpy as np
    import tensorflow as tf

    from libml import data, distribute, experiment, models
    from libml.train import distributed_batches

    run = RunConfig.of(CSSL, batch=config["batch"], uratio=URATIO, filters=config["filters"], repeat=REPEAT,
                       num_devices=config["replicas"], mixed_precision=config["precision"], jit=config["jit"])
    strategy = distribute.create_strategy(run.scale, distribute.find_cluster("auto", os.environ))
    images = np.random.RandomState(0).randint(0, 256, (2000, 32, 32, 3)).astype(np.uint8)
    labels = np.arange(len(images)) % 10
    dataset = data.from_arrays(images, labels, images[:10], labels[:10], num_labels=40)
    with strategy.scope():
        model = experiment.build(run.with_data(dataset), dataset)
    batches = distributed_batches(dataset, strategy, batch=config["batch"], uratio=URATIO)

    @tf.function(autograph=False)
    def step():
        losses = strategy.run(lambda batch: model.train_step(batch)["losses/total"], args=(next(batches),))
        return strategy.experimental_local_results(losses)[0]

    started = time.perf_counter()
    step().numpy()
    compile_seconds = time.perf_counter() - started
    for _ in range(WARM_UP):
        step().numpy()
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        loss = float(step().numpy())
        times.append(time.perf_counter() - started)
    seconds = sorted(times)[len(times) // 2]
    assert np.isfinite(loss)
    distribute.ProcessGroup(strategy).final_barrier()
    return {"step_s": round(seconds, 4), "images_per_s": round(config["batch"] * (1 + URATIO) / seconds, 1),
            "compile_s": round(compile_seconds, 1), "weights": models.count_weights(model.network),
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
            env={**environment, "PYTHONPATH": str(Path(__file__).parent.parent)}, stdout=subprocess.PIPE,
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
    parser.add_argument("--only", choices=tuple(SWEEP), help="vary this setting only")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--configuration", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.configuration:
        print(json.dumps(measure(json.loads(args.configuration), args.steps)))
        return
    columns = [*BASE, "step_s", "images_per_s", "peak_memory_mb", "compile_s", "weights"]
    if not args.json:
        print(tables.markdown([columns]))
    for config in configurations(args.only):
        row = run(config, args.steps)
        if args.json:
            print(json.dumps(row), flush=True)
        else:
            *_, line = tables.markdown([columns, [str(row.get(name, "")) for name in columns]]).splitlines()
            print(line + row.get("error", ""), flush=True)


if __name__ == "__main__":
    main()
