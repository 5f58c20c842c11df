"""Trains every method on the handwritten digits and compares them with labels alone.

    python scripts/lab/bench_methods.py [--at_once=2]       (all methods x 5 splits; minutes each on 2 cores)
    python scripts/lab/bench_methods.py --methods cssl,mixmatch --seeds 1 --flags "--train_kimg=5"
    python scripts/lab/bench_methods.py --table             (only print what is finished)
    python scripts/lab/bench_methods.py --recorded --write  (go on from docs/evidence/runs.jsonl, and add to it)
    python scripts/lab/bench_methods.py --speed --flags "--filters=32 --repeat=4 --batch=64"        (what a step costs)

Runs go one after the other with the digits preset, or so many at once, each with its share of the cores. A run that was
stopped continues, a finished one is not repeated. scikit-learn's LabelSpreading (7 neighbours) on the same splits is
one more row. Prints a Markdown table, or with `--json` the same numbers as JSON.

--speed times one update of each method and of FixMatch, in turns, on noise of 32x32 pixels, with --flags' network.
Beside their ratio stands what the network's passes explain: images that are trained on, and a third of those that only
go forward, over FixMatch's. What is above that is the method's own: banks, projections, mixing.
"""
import argparse
import contextlib
import json
import math
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import record
from sklearn.semi_supervised import LabelSpreading

import cssl
from cssl import cli
from cssl.program import STOPPED, exit_on_user_error
from cssl.tools.reproduce import AT_ONCE, Job, parse_extra, run_all
from libml.errors import UserError
from libml.results import tables
from libml.results.metrics import METRICS, scores, shown
from libml.run import Run

RECORD = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "runs.jsonl"
BASELINE = "supervised"
SPREADING = "LabelSpreading (scikit-learn)"


def measure(runs: list[Run]) -> dict:
    """Returns the results of a method over its runs: medians of the last 20 reports, median speed."""
    row = {"runs": len(runs), "images_per_s": statistics.median(
        report["images_per_s"] for run in runs for report in run.metrics if "images_per_s" in report)}
    return row | _statistics([{name: run.result(name) for name in METRICS} for run in runs])


def label_spreading(names: list[str]) -> dict:
    """Returns the results of scikit-learn's LabelSpreading on the pixels, with the same labelled images."""
    cli.start_tensorflow()
    from libml import data

    found = []
    for name in names:
        dataset = data.load(name, ".")
        def pixels(images):
            return np.asarray(images)[..., 0].reshape(len(images), -1) / 255
        labels = np.full(len(dataset.labels), -1)
        labels[dataset.labeled] = dataset.labeled_classes
        model = LabelSpreading(kernel="knn", n_neighbors=7).fit(pixels(dataset.images), labels)
        with np.errstate(invalid="ignore"):  # an image no label has reached
            probabilities = model.predict_proba(pixels(dataset.test_images))
        probabilities = np.nan_to_num(probabilities, nan=1 / dataset.num_classes)
        found.append(scores(probabilities, dataset.test_labels))
    return {"runs": len(names), "images_per_s": None, **_statistics(found)}


def _statistics(found: list[dict[str, float]]) -> dict:
    numbers = {}
    for name in METRICS:
        mean, std = tables.mean_and_std([run[name] for run in found])
        numbers |= {key: None if math.isnan(value) else value for key, value in ((name, mean), (f"{name}_std", std))}
    return numbers


def job_of(method: str, seed: str, labels: str, folder: Path, flags: list[str]) -> Job:
    """Returns the run of a method on a split."""
    given = {"dataset": f"digits.{seed}@{labels}-1", "train_dir": folder, **parse_extra(flags)}
    if cssl.method(method).uses_all_labels:  # all splits are one: vary what else is random
        given["seed"] = seed
    return Job(cssl.method(method).__name__, tuple(given.items()))


def table(rows: dict[str, dict]) -> str:
    """Returns the rows as Markdown, best first, with the difference to labels alone."""
    lines = [["method", "accuracy %", "against labels alone", *(shown(name).column for name in METRICS
                                                                if name != "accuracy"), "images/s", "runs"]]
    for name, row in sorted(rows.items(), key=lambda item: -item[1]["accuracy"]):
        cells = {metric: tables.format_mean(row[metric], row[f"{metric}_std"], shown(metric).digits)
                 for metric in METRICS}
        gain = "–"  # only between the same splits
        if BASELINE in rows and rows[BASELINE]["runs"] == row["runs"]:
            gain = f"{row['accuracy'] - rows[BASELINE]['accuracy']:+.2f}"
        lines.append([name if name == SPREADING else cssl.method(name).__name__, cells.pop("accuracy"), gain,
                      *cells.values(), "–" if row["images_per_s"] is None else f"{row['images_per_s']:.0f}",
                      str(row["runs"])])
    return tables.markdown(lines)


# What a step costs.

def passes(model, batch) -> float:
    """Returns the images of an update's passes through the network, those without gradients counted a third."""
    import tensorflow as tf

    graph = tf.function(model.train_on_bytes, autograph=False).get_concrete_function(batch).graph
    counted = {kind: sum(op.inputs[0].shape[0] for op in graph.get_operations()
                         if op.type == kind and op.inputs[0].shape[-1] == 3)  # the first layer sees colours
               for kind in ("Conv2D", "Conv2DBackpropFilter")}
    trained = counted["Conv2DBackpropFilter"]
    return trained + (counted["Conv2D"] - trained) / 3


def measure_step(method: str, flags: list[str], rounds: int) -> dict:
    """Times updates of a method and of FixMatch, in turns."""
    cli.start_tensorflow()
    import tensorflow as tf

    from libml import data, experiment
    from libml.train import distributed_batches, update_loop

    images = np.random.default_rng(0).integers(0, 256, (2000, 32, 32, 3), np.uint8)
    labels = np.arange(len(images)) % 10
    found = {}
    for name in dict.fromkeys(("fixmatch", method)):
        config = cli.configuration(cssl.method(name), [name, "--dataset=cifar10.1@40-1", *flags])
        dataset = experiment.parts(config, data.from_arrays(images, labels, images[:10], labels[:10], num_labels=40))
        model, strategy = experiment.build(config, dataset), tf.distribute.get_strategy()
        ratio = model.options.uratio if model.uses_unlabeled else 0
        batches = distributed_batches(dataset, strategy, batch=model.options.batch, uratio=ratio)
        loop = update_loop(model, strategy)
        found[name] = [lambda loop=loop, batches=batches: loop(batches, tf.constant(1, tf.int64)).numpy(),
                       passes(model, next(batches)), float("inf")]
        for _ in range(2):
            found[name][0]()
    for _ in range(rounds):
        for entry in found.values():
            begun = time.perf_counter()
            entry[0]()
            entry[2] = min(entry[2], time.perf_counter() - begun)
    (_, images_fixmatch, fixmatch), (_, images_own, own) = found["fixmatch"], found[method]
    return {"method": method, "step_s": own, "fixmatch_s": fixmatch, "ratio": own / fixmatch,
            "explained": images_own / images_fixmatch}


def speed(methods: list[str], flags: str, rounds: int, as_json: bool) -> int:
    """Measures methods in processes of their own and prints them."""
    lines = [["method", "update, s", "FixMatch's, s", "ratio", "explained by passes", "own share of the update"]]
    for method in methods:
        done = subprocess.run([sys.executable, __file__, f"--measure={method}", f"--flags={flags}",
                               f"--rounds={rounds}"], stdout=subprocess.PIPE, text=True, check=True)
        row = json.loads(done.stdout.splitlines()[-1])
        if as_json:
            print(json.dumps(row), flush=True)
            continue
        lines.append([cssl.method(method).__name__, f"{row['step_s']:.3f}", f"{row['fixmatch_s']:.3f}",
                      f"{row['ratio']:.3f}", f"{row['explained']:.3f}",
                      f"{100 * (1 - row['explained'] / row['ratio']):+.1f} %"])
        print(tables.markdown(lines).splitlines()[-1], file=sys.stderr, flush=True)
    if not as_json:
        print(tables.markdown(lines))
    return 0


def main() -> int:
    """The program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(cssl.methods().values()), help="modules of cssl, comma-separated")
    parser.add_argument("--seeds", default="1,2,3,4,5", help="split seeds, comma-separated")
    parser.add_argument("--labels", default="40", help="number of labels")
    parser.add_argument("--train_dir", default="./experiments/methods", help="folder for the runs")
    parser.add_argument("--flags", default="", help="further flags for every run, in one string")
    parser.add_argument("--at_once", type=int, default=1, help=AT_ONCE)
    parser.add_argument("--table", action="store_true", help="start nothing, print what is finished")
    parser.add_argument("--recorded", action="store_true", help=f"count the runs of {RECORD.name} as finished")
    parser.add_argument("--write", action="store_true", help=f"add finished runs to {RECORD.name}")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--speed", action="store_true", help="time one update of each method instead")
    parser.add_argument("--rounds", type=int, default=3, help="of --speed; the best counts")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure_step(arguments.measure, shlex.split(arguments.flags), arguments.rounds)))
        return 0
    methods = arguments.methods.split(",")
    unknown = sorted(set(methods) - set(cssl.methods().values()))
    if unknown:
        raise UserError(f"Unknown methods {', '.join(unknown)}; there are {', '.join(cssl.methods().values())}.")
    if arguments.speed:
        return speed(methods, arguments.flags, arguments.rounds, arguments.json)
    folder, seeds = Path(arguments.train_dir).absolute(), arguments.seeds.split(",")
    if arguments.recorded:
        record.restore(RECORD, folder.parent)
    jobs = {method: [job_of(method, seed, arguments.labels, folder, shlex.split(arguments.flags)) for seed in seeds]
            for method in methods}

    def keep(*runs: Run) -> None:
        record.save(runs, folder.parent, RECORD)

    code = 0
    if not arguments.table:
        todo = [job for found in jobs.values() for job in found if not job.finished()]
        with contextlib.redirect_stdout(sys.stderr):  # the table goes to stdout
            code = run_all(todo, arguments.at_once, quiet=True, keep=keep if arguments.write else None)
        if code in STOPPED:
            return code
    done = {method: [run for job in found if (run := job.finished())] for method, found in jobs.items()}
    rows = {method: measure(runs) for method, runs in done.items() if runs}
    if arguments.write:
        keep(*(run for runs in done.values() for run in runs))
    rows[SPREADING] = label_spreading([f"digits.{seed}@{arguments.labels}-1" for seed in seeds])
    print(json.dumps(rows, indent=1) if arguments.json else table(rows))
    return code


if __name__ == "__main__":
    exit_on_user_error(main)
