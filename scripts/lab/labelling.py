"""A simulated user of cssl-label: what each order of images buys, and how far the accuracy shown is from the true one.

    python scripts/lab/labelling.py [--datasets=digits,fashion_mnist,cifar10] [--weights=FILE] [--write]
    python scripts/lab/labelling.py --answers     # how long keys wait while a model trains; how long 100,000 files take

SIZE of each dataset's training images stand for a folder; the user knows the truth and labels in each of the orders,
every tenth image drawn at random, as the page asks. The accuracy is that on all images without a label. Records go to
docs/evidence/labelling.jsonl, those that are there are not made again; --write puts the table into
docs/evidence/labelling.md. On 2 cores it takes some half an hour.
"""
from __future__ import annotations

import argparse
import dataclasses
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

import cssl  # noqa: E402
from cssl import cli, program  # noqa: E402
from libml.labelling.choose import ORDERS  # noqa: E402
from libml.labelling.session import EVERY  # noqa: E402
from libml.writing import write_text  # noqa: E402

SIZE, SEEDS, LABELS = 3000, 5, (10, 20, 40, 70, 110, 160)
RECORDS, TABLE = ROOT / "docs" / "evidence" / "labelling.jsonl", ROOT / "docs" / "evidence" / "labelling.md"
FEATURES = {"digits": "pixels"}  # else keras:MobileNetV2


def simulate(heads, truth: np.ndarray, order: str, seed: int):
    """Yields after each number of labels the true accuracy, the one shown, and its interval, in percent."""
    from libml.labelling import choose, estimate

    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(len(truth))
    random, pool = shuffled[:len(truth) // EVERY], shuffled[len(truth) // EVERY:]
    trained, held, queue = list[int](), list[int](), list[int]()
    for count in LABELS:
        while len(trained) + len(held) < count:
            if (len(trained) + len(held)) % EVERY == EVERY - 1:
                held.append(int(random[len(held)]))
            else:
                known = set(trained)
                trained.append(next(int(n) for n in [*queue, *pool] if n not in known))
        names = [str(truth[n]) for n in trained]
        classes, p, size = heads.train(np.array(trained), names, np.sort(pool))
        right = np.array(classes)[p.argmax(1)] == truth.astype(str)
        rest = np.setdiff1d(np.arange(len(truth)), [*trained, *held])
        shown = right[held].mean() if held else np.nan
        low, high = estimate.clopper_pearson(int(right[held].sum()), len(held)) if held else (0.0, 1.0)
        yield {"labels": count, "accuracy": 100 * right[rest].mean(), "shown": 100 * shown, "low": 100 * low,
               "high": 100 * high}
        waiting = np.setdiff1d(pool, trained)
        queue = [int(waiting[i]) for i in choose.ranking(order, size[waiting], heads.vectors[waiting],
                                                         heads.vectors[trained], 200, rng)]


def run(dataset: str, weights: str, commit: str) -> None:
    """Makes what is missing of a dataset's records."""
    import libml.data
    from libml import features
    from libml.labelling.learner import Heads

    done = {(r["dataset"], r["order"], r["seed"]) for r in records()}
    features_of = FEATURES.get(dataset, "keras:MobileNetV2")
    for seed in range(SEEDS):
        todo = [order for order in ORDERS if (dataset, order, seed) not in done]
        if not todo:
            continue
        given = {"weights": weights} if features_of.startswith("keras:") and weights else {}
        config = cssl.RunConfig.of(cssl.CSSL, dataset=f"{dataset}.1@40-1", features=features_of, **given)
        data = features.embed(config, libml.data.load(config.data.dataset, config.data.data_dir))
        chosen = np.sort(np.random.default_rng(seed).permutation(len(data.images))[:SIZE])
        data = dataclasses.replace(data, images=np.array(data.images[chosen]), labels=np.array(data.labels[chosen]),
                                   order=np.arange(len(chosen)), num_valid=0, pictures=None)
        heads = Heads(config, data)
        for order in todo:
            started = time.time()
            curve = list(simulate(heads, data.labels, order, seed))
            with RECORDS.open("a") as file:
                file.write(json.dumps({"dataset": dataset, "order": order, "seed": seed, "images": len(chosen),
                                       "commit": commit, "seconds": round(time.time() - started, 1),
                                       "curve": curve}) + "\n")
            print(dataset, order, seed, " ".join(f"{point['accuracy']:.1f}" for point in curve), flush=True)


class Page:
    """The real command, and what a page asks of it."""

    def __init__(self, folder: Path, *flags: str):
        started = time.monotonic()
        self.process = subprocess.Popen([sys.executable, "-u", "-m", "cssl.tools.label", str(folder), *flags], cwd=ROOT,
                                        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout
        found = next(filter(None, (re.search(r"Open http://([^/]+)(/\S+/)", line) for line in self.process.stdout)))
        self.started = time.monotonic() - started
        self.connection, self.place = http.client.HTTPConnection(found[1], timeout=600), found[2]

    def ask(self, path: str, body: dict | None = None) -> tuple[dict, float]:
        """Returns the answer, and how many milliseconds it took."""
        started = time.monotonic()
        self.connection.request("POST" if body else "GET", self.place + path, body and json.dumps(body),
                                {"Content-Type": "application/json"} if body else {})
        answer = json.loads(self.connection.getresponse().read())
        return answer, 1000 * (time.monotonic() - started)


def answers() -> None:
    """Prints how long labels take to be answered while the model trains, and how long many files take to start."""
    from PIL import Image

    from libml.data import sources

    digits = sources.digits()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "digits")
        folder.mkdir()
        for k, (image, label) in enumerate(zip(digits.images, digits.labels, strict=True)):
            Image.fromarray(image).save(folder / f"{k:04}_{label}.png")
        page = Page(folder, "--features=pixels", "--nomirror", f"--data_dir={place}/data",
                    "--classes=0,1,2,3,4,5,6,7,8,9")
        taken: dict[bool, list[float]] = {True: [], False: []}
        state, _ = page.ask("state")
        for _ in range(300):
            item = state["queue"][0]
            busy = state["busy"] or bool(state["progress"]["title"])
            state, milliseconds = page.ask("do", {"act": "label", "files": [item["name"]],
                                                  "label": item["name"][-5], "by": "order"})
            taken[busy or state["busy"]].append(milliseconds)
            time.sleep(0.25)
        page.process.terminate()
        page.process.wait()
        for busy, times in taken.items():
            if times:
                print(f"{len(times)} labels {'while it learns' if busy else 'while it waits'}: median "
                      f"{np.median(times):.1f} ms, 95 % {np.quantile(times, 0.95):.1f} ms, longest {max(times):.1f} ms")
        print(f"the model has learned from {state['learned']} labels")
        many = Path(place, "many")
        for k in range(100):
            (many / f"{k:02}").mkdir(parents=True)
            for j in range(1000):
                os.link(folder / f"{j:04}_{digits.labels[j]}.png", many / f"{k:02}" / f"{j:04}.png")
        page = Page(many, "--features=pixels", f"--data_dir={place}/data", "--classes=a,b")
        state, first = page.ask("state")
        print(f"{state['files']} files: the address after {page.started:.1f} s, the first answer after {first:.0f} ms")
        page.process.kill()
        page.process.wait()


def records() -> list[dict]:
    return [json.loads(line) for line in RECORDS.read_text().splitlines()] if RECORDS.exists() else []


def table() -> str:
    """Returns the accuracy over labels of each order, and how far what is shown lies from it."""
    from scipy.stats import t

    def with_interval(values: np.ndarray) -> str:
        half = t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
        return f"{values.mean():.1f} ± {half:.1f}"

    found = records()
    lines = ["| dataset | order | " + " | ".join(f"{n} labels" for n in LABELS) + " |",
             "|---|---|" + "---|" * len(LABELS)]
    shown = ["| dataset | order | shown minus true at 110, 160 labels | size of the difference | interval holds it |",
             "|---|---|---|---|---|"]
    for dataset in dict.fromkeys(r["dataset"] for r in found):
        curves = {order: np.array([[p["accuracy"] for p in r["curve"]] for r in sorted(
            (r for r in found if (r["dataset"], r["order"]) == (dataset, order)), key=lambda r: r["seed"])])
            for order in ORDERS}
        for order, curve in curves.items():
            lines.append(f"| {dataset} | {order} | " + " | ".join(map(with_interval, curve.T)) + " |")
        for order in ORDERS[:2]:
            lines.append(f"| {dataset} | {order} minus random | " + " | ".join(
                map(with_interval, (curves[order] - curves["random"]).T)) + " |")
        for order in ORDERS:
            points = [p for r in found if (r["dataset"], r["order"]) == (dataset, order) for p in r["curve"][-2:]]
            gap = np.array([p["shown"] - p["accuracy"] for p in points])
            holds = np.mean([p["low"] <= p["accuracy"] <= p["high"] for p in points])
            shown.append(f"| {dataset} | {order} | {gap.mean():+.1f} | {abs(gap).mean():.1f} | {100 * holds:.0f} % |")
    return "\n".join([*lines, "", "How far the accuracy that the page shows, on the random images labelled so far, is "
                      "from the true one, in points, and how often its interval (95 %) holds that:", "", *shown])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", default="digits,fashion_mnist,cifar10")
    parser.add_argument("--weights", default="", help="file of ImageNet weights of MobileNetV2")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--answers", action="store_true")
    args = parser.parse_args()
    if args.answers:
        answers()
        return
    cli.start_tensorflow()
    from libml.experiment import commit_of, environment_facts

    for dataset in filter(None, args.datasets.split(",")):
        run(dataset, args.weights, commit_of(ROOT))
    text = table()
    print(text)
    if args.write:
        facts = environment_facts()
        write_text(TABLE, "# Labelling: what the order of images buys\n\n"
                   "After this page you know how much accuracy each order of images buys for the same number of "
                   "labels.\n\n"
                   f"Made by `python scripts/lab/labelling.py --write`: at most {SIZE} of each dataset's training "
                   f"images, {SEEDS} seeds; accuracy in percent on all images without a label, mean and Student's "
                   f"interval (95 %). {facts['machine']}; commits "
                   f"{', '.join(sorted({r['commit'] for r in records()}))}. Heads of records before 77c1474 had "
                   "the random images among their unlabelled ones, which the page's have not.\n\n"
                   f"{text}\n")


if __name__ == "__main__":
    program.exit_on_user_error(main)
