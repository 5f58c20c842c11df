"""Run folders as training leaves them, with made-up numbers, and a quick way to call the tools that read them."""
import contextlib
import functools
import importlib
import io
import json
import multiprocessing
import os
import re
import resource
import runpy
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np

ROOT = Path(__file__).parent.parent
CLASSES = 10
# Constants, new shapes for the same numbers, and what only passes on.
PASSIVE = frozenset({"Const", "Identity", "IdentityN", "NoOp", "Reshape", "Squeeze", "ExpandDims", "StopGradient",
                     "PreventGradient", "Shape", "ShapeN", "EnsureShape"})


def code_blocks(document: Path) -> list[tuple[str, str]]:
    """The code blocks of a document with their languages, in order."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", document.read_text(encoding="utf-8"), re.M | re.S)


class Done(NamedTuple):
    """What a program returned and printed."""

    code: int
    stdout: str
    stderr: str


def invoke(tool: str | Callable[[], int | None], *arguments) -> Done:
    """Calls a main function, a tool's by its name, here, sparing the seconds that a new process takes to start."""
    main = importlib.import_module(f"cssl.tools.{tool}").main if isinstance(tool, str) else tool
    out, err = io.StringIO(), io.StringIO()
    with (mock.patch.object(sys, "argv", ["program", *map(str, arguments)]), contextlib.redirect_stdout(out),
          contextlib.redirect_stderr(err)):
        code = main()
    return Done(code or 0, out.getvalue(), err.getvalue())


class Program:
    """A program of the project as a process of its own, forked from one that has TensorFlow: seconds sooner.

    Its signals, files and exit code are those of a program that starts by itself. What a start does (the environment
    that TensorFlow reads, its banner) is another matter: the fixture `command` is for that.

    Args:
        words: as after `python`: a script, -m and a module, or -c and code, and their arguments.
        folder: gets a file for each of the two streams that it prints to.
        limit: the largest file that it may write, in bytes.
        environment: further variables.
    """

    def __init__(self, words: Sequence[str | Path], folder: Path, limit: int | None = None, **environment: str):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tensorflow", "keras", "libml.experiment"])
        self.files = [Path(tempfile.mkstemp(".txt", name, folder)[1]) for name in ("output", "error")]
        self.process = context.Process(target=_become, args=(list(map(str, words)), self.files, limit, environment))
        self.process.start()
        self.pid = self.process.pid

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self.files[0].read_text()

    @property
    def error(self) -> str:
        """What it has said on standard error."""
        return self.files[1].read_text()

    def poll(self) -> int | None:
        """Its exit code, None while it runs; minus the signal that killed it."""
        return self.process.exitcode

    def wait(self, timeout: float = 120) -> int:
        """Its exit code once it has ended."""
        self.process.join(timeout)
        assert self.poll() is not None, f"still runs after {timeout} s\n{self.output}{self.error}"
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kills it, if it runs, and waits for its end."""
        self.process.kill()
        self.wait()


def _become(words: list[str], files: list[Path], limit: int | None, environment: dict[str, str]) -> None:
    """The whole life of a Program."""
    for stream, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), stream)
    sys.stdout, sys.stderr = (open(stream, "w", buffering=1) for stream in (1, 2))
    os.environ.update(environment)
    os.chdir(ROOT)
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "-c", "exec"), {"__name__": "__main__"})
    elif words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def config(method: str = "CSSL", dataset: str = "cifar10.1@40-1", **settings) -> dict:
    """A resolved configuration, the paper's but for its length."""
    own = {"CSSL": {"alpha_bound": 0.0, "confidence": 0.0}, "FixMatch": {"confidence": 0.95}}.get(method, {})
    return {"method": method, "dataset": dataset, "augment": "d.d.d", "batch": 64, "uratio": 7, "lr": 0.03, "wd": 5e-4,
            "wu": 1, "arch": "resnet", "filters": 32, "repeat": 4, "train_kimg": 4, "report_kimg": 1, "seed": 0,
            **own, **settings}


def write_run(folder: Path, accuracies: list[float], eces: list[float] | None = None, *, stats: bool = False,
              reported: dict | None = None, **settings) -> Path:
    """Writes a run that reported the given test accuracies at 1, 2, 3 … kimg, and the same further numbers each time.
    """
    resolved = config(**settings)
    name, split = resolved["dataset"].rsplit(".", 1)
    number = len(list(folder.rglob("tf")))  # keeps runs apart that differ in settings only
    run = folder / f"{name}.{resolved['augment']}.{split}" / f"{resolved['method']}_{number}"
    for part in ("args", "tf", "stats"):
        (run / part).mkdir(parents=True)
    (run / "args/args.json").write_text(json.dumps(resolved))
    (run / "args/environment.json").write_text(json.dumps({
        "commit": "0123abcd", "python": "3.11.2", "tensorflow": "2.21.0", "keras": "3.15.0", "machine": "2 cores",
        "started": "2026-01-01 00:00:00", "command": f"python -m cssl --dataset={resolved['dataset']} <&>"}))
    rng = np.random.default_rng(0)
    with open(run / "metrics.jsonl", "w") as file:
        for number, accuracy in enumerate(accuracies, 1):
            report = {"step": 1024 * number, "accuracy": accuracy, "ece": eces[number - 1] if eces else 0.1,
                      "losses/xe": 1 / number, "monitors/mask": 0.1 * number, "monitors/alpha": 1 / (1 + number),
                      "monitors/pseudo_accuracy": accuracy - 5, "monitors/pseudo_accuracy_masked": accuracy,
                      "class_distribution": rng.dirichlet(np.full(CLASSES, 5.0)).tolist(), **(reported or {})}
            if resolved["method"] == "CSSL":
                report["credal"] = {"class": [1, 2, 3], "alpha": [0.9 / number, 0.5, 0.1 * number],
                                    "deciles": (np.arange(11) / (10 * number)).tolist()}
            file.write(json.dumps(report) + "\n")
    if stats:
        write_stats_arrays(run, rng)
    return run


def write_stats_arrays(run: Path, rng: np.random.Generator) -> None:
    """Adds predictions, augmentation rates and pseudo-labels."""
    labels = rng.integers(0, CLASSES, 200)
    logits = rng.normal(size=(200, CLASSES)) + 2.5 * np.eye(CLASSES)[labels]
    probabilities = (np.exp(logits) / np.exp(logits).sum(1, keepdims=True)).astype(np.float32)
    np.savez(run / "stats/predictions.npz", probabilities=probabilities, labels=labels, step=4096)
    rates = np.full((3, 2, 17), np.nan)
    rates[0, 0], rates[1, 0], rates[1, 1, :6] = rng.uniform(0.5, 1, 17), rng.uniform(0.5, 1, 17), 0.9
    np.save(run / "stats/rates.npy", rates)
    (run / "stats/rates.json").write_text(json.dumps({"ops": ["blur", "rescale", "identity"],
                                                      "bins": [[17], [17, 6], []]}))
    shown = rng.integers(-1, CLASSES, 40)
    np.savez(run / "stats/pseudo_labels.npz", images=rng.integers(0, 256, (40, 8, 8, 3), np.uint8),
             probabilities=probabilities[:40], labels=shown, class_names=np.array([f"class<{c}>" for c in range(10)]),
             **{"class": probabilities[:40].argmax(1), "alpha": 1 - probabilities[:40].max(1) ** 2,
                "aligned": probabilities[40:80]})
    np.savez(run / "stats/test_samples.npz", images=rng.integers(0, 256, (50, 8, 8, 3), np.uint8),
             index=np.arange(100, 150))


@functools.cache
def strategy_of(replicas: int):
    """The strategy that the program itself uses, on logical CPU devices."""
    import tensorflow as tf

    from libml.config import ScaleOptions
    from libml.devices.distribute import create_strategy

    assert len(tf.config.list_logical_devices("CPU")) >= replicas  # and no other number can be configured from here on
    return create_strategy(ScaleOptions(num_devices=replicas))


def assert_continues(model, update: Callable) -> None:
    """From a checkpoint another update goes to the same bits as before."""
    import tensorflow as tf

    checkpoint = tf.train.Checkpoint(**model.checkpoint_items())
    with tempfile.TemporaryDirectory() as folder:
        path = checkpoint.write(f"{folder}/checkpoint")
        update()
        further = model.fingerprint()
        checkpoint.read(path).assert_consumed()
    assert model.fingerprint() != further
    update()
    assert model.fingerprint() == further


# Beside the one at the end of an update: one for each stage of the loss that waits for values of all replicas, and one
# for the gradients of what it got.
STAGES = {"flexmatch": 1, "adamatch": 1, "simmatch": 1, "softmatch": 2, "freematch": 2 + 1, "comatch": 2 + 1,
          "metapseudolabels": 2}


def assert_two_replicas_meet_rarely(method: type, definition) -> None:
    """Sums alone, whose shapes all replicas know: gathering would ask for shapes first."""
    nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    collectives = [node.op for node in nodes if "Collective" in node.op]
    assert collectives == ["CollectiveReduceV2"] * 2 * (1 + STAGES.get(method.__name__.lower(), 0))


def _used(function) -> list:
    """The nodes of a function on which its results and effects depend; TensorFlow drops the others."""
    by_name = {node.name: node for node in function.node_def}
    todo, found = [*function.ret.values(), *function.control_ret.values()], {}
    while todo:
        name = todo.pop().removeprefix("^").split(":")[0]
        if name in by_name and name not in found:
            found[name] = by_name[name]
            todo += by_name[name].input
    return list(found.values())


def nodes_by_place(definition, start: str = "") -> tuple[list, list]:
    """The nodes of a GraphDef and its functions: those that run as single kernels, those that XLA compiles.

    With `start`, those of this one of its functions.
    """
    functions = {function.signature.name: function for function in definition.library.function}
    outside: list = []
    inside: list = []

    def walk(nodes, place: list) -> None:
        for node in nodes:
            place.append(node)
            for attribute in node.attr.values():
                for called in [*([attribute.func] if attribute.func.name else []), *attribute.list.func]:
                    function = functions[called.name]
                    walk(_used(function), inside if function.attr["_XlaMustCompile"].b else place)

    walk(_used(functions[start]) if start else definition.node, outside)
    return outside, inside


def devices_of(node) -> set[str]:
    """The kinds of devices for which this build of TensorFlow has a kernel that takes the node's types."""
    from libml.augment import gpu

    return gpu.devices_of(node)


def gpu_kernel(node):
    """The kernel that runs a node on a GPU, or None."""
    from libml.augment import gpu

    found = [kernel for kernel in gpu.kernels_for(node) if kernel.device_type in ("GPU", "DEFAULT")]
    return max(found, key=lambda kernel: (kernel.priority, kernel.device_type == "GPU"), default=None)


def kernels_of_loop(definition) -> tuple[list, list]:
    """The nodes of one turn of a GraphDef's only loop that start a kernel, and those that XLA compiles (into one)."""
    (loop,) = [node for node in definition.node if node.op in ("While", "StatelessWhile")]
    outside, inside = nodes_by_place(definition, loop.attr["body"].func.name)
    return [node for node in outside if node.op not in PASSIVE], inside


# Oracles in NumPy and Python, and images.

def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def cross_entropy(logits, targets):
    targets = np.eye(logits.shape[-1])[targets] if np.ndim(targets) == 1 else targets
    return -np.sum(targets * np.log(softmax(logits)), -1)


def kl(p, q):
    return np.sum(p * np.log(p / q), -1)


def sharpen(p, temperature):
    p = p ** (1 / temperature)
    return p / p.sum(-1, keepdims=True)


def plain_labeled(labels, size, seed, frequencies):
    """The rule as a list program, with the global legacy generator."""
    by_class = [[i for i, label in enumerate(labels) if label == c] for c in range(len(frequencies))]
    if seed != 0:
        np.random.seed(seed)
        for members in by_class:
            np.random.shuffle(members)
    taken, chosen = [0] * len(frequencies), []
    for _ in range(size):
        lack = [f - t / max(max(taken), 1) for f, t in zip(frequencies, taken, strict=True)]
        c = lack.index(max(lack))
        chosen.append(by_class[c][taken[c]])
        taken[c] += 1
    return chosen


def plain_held_out(labels, hashes, share, seed):
    """The rule with Python's integers."""
    factor = 2 * int(np.random.RandomState(seed).randint(2 ** 63, size=1, dtype=np.uint64)[0]) + 1
    mixed = [int(value) * factor % 2 ** 64 for value in hashes]
    held = set()
    for c in set(labels):
        members = sorted((mixed[i], i) for i, label in enumerate(labels) if label == c)
        small = [i for place, i in members if place < share * 2 ** 64]
        held |= {i for _, i in members[:min(max(len(small), 1), len(members) - 1)]}
    return sorted(held)


def spy(monkeypatch, owner, name):
    """Collects what a function returns."""
    real, results = getattr(owner, name), []

    def call(*args, **kwargs):
        results.append(real(*args, **kwargs))
        return results[-1]

    monkeypatch.setattr(owner, name, call)
    return results


@functools.cache
def real_images(n: int = 64) -> np.ndarray:
    """The first CIFAR-10 images; skips the test where TFDS has none."""
    import pytest

    tfds = pytest.importorskip("tensorflow_datasets")
    try:
        data = tfds.load("cifar10", split=f"train[:{n}]", download=False)
    except (AssertionError, FileNotFoundError, tfds.core.DatasetNotFoundError) as error:
        pytest.skip(f"CIFAR-10 is not in TFDS's data directory: {type(error).__name__}")
    return np.stack([example["image"] for example in tfds.as_numpy(data)])


def make_images(folder: Path, names) -> Path:
    from PIL import Image

    for k, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (k * 37 % 256, k * 91 % 256, 7)).save(path, "PNG")
    return folder


def round_of(session):
    """What a model would say: of even images cat, surer of later ones."""
    from libml.labelling.learner import Round

    numbers = np.arange(len(session.names))
    p = np.linspace(0.5, 0.99, len(numbers))
    probabilities = np.where((numbers % 2 == 0)[:, None], np.stack([p, 1 - p], 1), np.stack([1 - p, p], 1))
    return Round(10, ["cat", "dog"], numbers, {n: n for n in range(len(numbers))}, probabilities, 1 - p,
                 [n for n in range(len(numbers) - 1, -1, -1) if not session.random[n]])
