"""Trains every method on the handwritten digits and compares them with labels alone.

    python scripts/bench_methods.py                     (about 15 methods x 3 splits; minutes each on 2 cores)
    python scripts/bench_methods.py --methods cssl,mixmatch --seeds 1 --flags "--train_kimg=5"
    python scripts/bench_methods.py --table             (only print what is finished)

Runs go one after the other with the digits preset, each in a process of its own. A run that was stopped continues, a
finished one is not repeated. scikit-learn's LabelSpreading (7 neighbours) on the same splits is one more row. Prints a
Markdown table, or with `--json` the same numbers as JSON.
"""
import argparse
import json
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
from sklearn.semi_supervised import LabelSpreading

from cssl import cli
from libml import calibration, data, results
from libml.errors import UserError

BASELINE = "supervised"
SPREADING = "LabelSpreading (scikit-learn)"


def measure(runs: list[results.Run]) -> dict:
    """Returns the results of a method over its runs: medians of the last 20 reports, median speed."""
    row = {"runs": len(runs), "images_per_s": statistics.median(
        report["images_per_s"] for run in runs for report in run.metrics if "images_per_s" in report)}
    for metric in ("accuracy", "ece"):
        row |= _statistics(metric, [run.result(metric) for run in runs])
    return row


def label_spreading(names: list[str]) -> dict:
    """Returns the results of scikit-learn's LabelSpreading on the pixels, with the same labelled images."""
    accuracies, errors = [], []
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
        accuracies.append(100 * calibration.accuracy(probabilities, dataset.test_labels))
        errors.append(calibration.expected_calibration_error(probabilities, dataset.test_labels))
    return {"runs": len(names), "images_per_s": None, **_statistics("accuracy", accuracies),
            **_statistics("ece", errors)}


def _statistics(metric: str, values: list[float]) -> dict:
    return {metric: statistics.mean(values), f"{metric}_std": statistics.stdev(values) if len(values) > 1 else None}


def table(rows: dict[str, dict]) -> str:
    """Returns the rows as Markdown, best first, with the difference to labels alone."""
    def cell(row, metric, digits):
        std = row[f"{metric}_std"]
        return f"{row[metric]:.{digits}f}" + ("" if std is None else f" ± {std:.{digits}f}")

    lines = ["| method | accuracy | against labels alone | ECE | images/s | runs |", "|---|---|---|---|---|---|"]
    for name, row in sorted(rows.items(), key=lambda item: -item[1]["accuracy"]):
        gain = "–"  # only between the same splits
        if BASELINE in rows and rows[BASELINE]["runs"] == row["runs"]:
            gain = f"{row['accuracy'] - rows[BASELINE]['accuracy']:+.2f}"
        speed = "–" if row["images_per_s"] is None else f"{row['images_per_s']:.0f}"
        title = name if name == SPREADING else cli.method_class(name).__name__
        lines.append(f"| {title} | {cell(row, 'accuracy', 2)} | {gain} | "
                     f"{cell(row, 'ece', 4)} | {speed} | {row['runs']} |")
    return "\n".join(lines)


def main() -> int:
    """The program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(cli.method_modules()), help="modules of cssl, comma-separated")
    parser.add_argument("--seeds", default="1,2,3", help="split seeds, comma-separated")
    parser.add_argument("--labels", default="40", help="number of labels")
    parser.add_argument("--train_dir", default="./experiments/methods", help="folder for the runs")
    parser.add_argument("--flags", default="", help="further flags for every run, in one string")
    parser.add_argument("--table", action="store_true", help="start nothing, print what is finished")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    arguments = parser.parse_args()
    methods = arguments.methods.split(",")
    unknown = sorted(set(methods) - set(cli.method_modules()))
    if unknown:
        raise UserError(f"Unknown methods {', '.join(unknown)}; there are {', '.join(cli.method_modules())}.")
    rows, failed = {}, []
    for method in methods:
        done = []
        for seed in arguments.seeds.split(","):
            flags = [f"--dataset=digits.{seed}@{arguments.labels}-1",
                     f"--train_dir={Path(arguments.train_dir).absolute()}", *shlex.split(arguments.flags)]
            if cli.method_class(method).uses_all_labels:  # all splits are one: vary what else is random
                flags.append(f"--seed={seed}")
            run = cli.finished_run(method, flags)
            if run is None and not arguments.table:
                command = [sys.executable, "-m", f"cssl.{method}", *flags]
                print(f"$ {shlex.join(command[1:])}", file=sys.stderr, flush=True)
                code = cli.run_program(command, cwd=Path(__file__).parent.parent, stdout=subprocess.DEVNULL)
                if code in cli.STOPPED:
                    return code
                run = cli.finished_run(method, flags)
                failed += [f"{method} on split {seed}"] if run is None else []
            done += [run] if run is not None else []
        if done:
            rows[method] = measure(done)
    rows[SPREADING] = label_spreading([f"digits.{seed}@{arguments.labels}-1" for seed in arguments.seeds.split(",")])
    print(json.dumps(rows, indent=1) if arguments.json else table(rows))
    for name in failed:
        print(f"warning: {name} did not reach its end", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    cli.guarded(main)
