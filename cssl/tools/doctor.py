"""Says whether this machine computes what it should: facts about it, then about two minutes of checks.

    cssl-doctor [--fast] [--json] [--train_dir=experiments] [--data_dir=DIR]

Checks: four updates against those of the original program; one step again and again while all cores are busy;
augmentation against Pillow, with and without XLA. Each is a process of its own: one that crashes is a line, and the
others go on. A line is ok or FAIL, what was checked, what was measured, and how long that took. Exit code 1 if a check
fails. The output belongs into every issue.
"""
from __future__ import annotations

import functools
import json
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

import cssl
from cssl import CSSL, cli, tools
from libml.config import RunConfig
from libml.data.names import DATASETS
from libml.devices.machine import cpu_facts, nvidia_smi, usable_cores, usable_memory
from libml.lazy import tf

if TYPE_CHECKING:
    from libml.learn import SSLModel

ROOT = Path(cssl.__file__).resolve().parent.parent  # where another Python finds this very program
GOLDEN = Path(__file__).with_name("trajectory_fixmatch.npz")
# Rounding makes 1e-5 of the first two updates; the tiny batches amplify it, to 2e-5 and 1e-3 in the next two.
TOLERANCES = (1e-5, 1e-5, 1e-4, 5e-3)
GPU_TOLERANCE = 1e-3  # of a step, relative to a variable's largest entry: sums there come in any order
REPEATS = 30
PACKAGES = ("tensorflow", "keras", "numpy", "pillow")
CHILD_SECONDS = 300  # no check takes a tenth of it


class Failed(Exception):
    """What was measured is not as it should be."""


# Facts.

def facts(train_dir: str, data_dir: str) -> dict[str, str]:
    """Returns what is known of program and machine; what cannot be found out says why."""
    from libml import experiment
    from libml.data import sources
    from libml.devices.distribute import onednn_is_on

    runs = Path(train_dir)
    prepared = [name for name, dataset in DATASETS.items()
                if dataset.tfds_name and sources.tfds_version_dir(dataset.tfds_name, Path(data_dir))]
    tellers: dict[str, Callable[[], str]] = {
        "program": lambda: f"cssl {cssl.__version__}, commit {experiment.commit_of(ROOT)}, in {ROOT}",
        "versions": lambda: ", ".join([f"Python {platform.python_version()}", *(
            f"{name} {metadata.version(name)}" for name in PACKAGES), platform.platform()]),
        "CPU": _cpu,
        "GPUs": lambda: "; ".join(map(_gpu, tf.config.list_physical_devices("GPU"))) or "none that TensorFlow can use",
        "nvidia-smi": lambda: "; ".join(nvidia_smi("name,memory.total,memory.free,driver_version")) or "not there",
        "oneDNN": lambda: "on, but for runs whose --filters is not a multiple of 16" if onednn_is_on() else "off",
        "build": lambda: ", ".join(f"{key} {value}" for key, value in tf.sysconfig.get_build_info().items()),
        "memory": lambda: f"{usable_memory() / 1e9:.1f} GB",
        "disk": lambda: "{:.1f} GB free for {}".format(shutil.disk_usage(next(
            place for place in (runs, *runs.parents) if place.exists())).free / 1e9, runs),
        "datasets": lambda: f"{', '.join([*prepared, 'digits'])} in {data_dir}"}
    found = {}
    for name, tell in tellers.items():
        try:
            found[name] = tell()
        except Exception as error:  # a fact less is no reason to stop
            found[name] = f"unknown ({_first_line(error)})"
    return found


def _first_line(error: Exception) -> str:
    name, lines = type(error).__name__, str(error).strip().splitlines() or [""]
    # TensorFlow puts a traceback before the message of what happens while it traces.
    line = lines[-1 if lines[0].startswith("in user code") else 0].strip().removeprefix(f"{name}: ")
    return f"{name}: {line[:200]}"


def _cpu() -> str:
    model, flags = cpu_facts()
    vectors = " ".join(re.findall(r"\b(?:avx|fma|f16c|amx|asimd|sve)\w*", flags))
    return f"{model}, {os.cpu_count()} cores ({usable_cores()} usable), {vectors or 'vectors unknown'}"


def _gpu(device: tf.config.PhysicalDevice) -> str:
    details = tf.config.experimental.get_device_details(device)
    capability = ".".join(map(str, details.get("compute_capability", "?")))
    return (f"{device.name.removeprefix('/physical_device:')} {details.get('device_name', '?')} "
            f"(compute capability {capability})")


# Checks: each returns what it measured, or raises.

def trajectory_deviations() -> list[float]:
    """Replays four FixMatch updates of the original program; returns the largest relative deviation in each.

    Compared are losses and monitors before each update. The network has 8 filters: oneDNN must be off.
    """
    from cssl import FixMatch
    from libml import networks
    from libml.augment.augmenter import to_float

    golden = np.load(GOLDEN)
    network = networks.build("resnet", num_classes=10, image_shape=(32, 32, 3), filters=8, repeat=2, scales=3)
    ends = np.cumsum([math.prod(variable.shape) for variable in network.trainable_variables])
    for variable, values in zip(network.trainable_variables, np.split(golden["init"], ends[:-1]), strict=True):
        variable.assign(values.reshape(variable.shape))
    model = FixMatch(network, 10, options=FixMatch.Options(batch=4, uratio=3, confidence=0.3), total_images=1024)
    step = tf.function(model.train_on_views, autograph=False)

    largest = []
    for k in range(len(TOLERANCES)):
        scalars = step({"labeled": to_float(golden["labeled"][k]), "label": tf.constant(golden["label"][k]),
                        "weak": to_float(golden["weak"][k]), "strong": tf.constant(golden["strong"][k])})
        tags = ("losses/xe", "losses/xeu", "losses/wd", "monitors/mask", "monitors/lr")
        pairs = [(float(scalars[tag]), float(golden[f"hist/{tag}"][k])) for tag in tags]
        largest.append(float(np.max([abs(a - b) / abs(b) if a != b else 0.0 for a, b in pairs])))  # NaN stays NaN
    return largest


def trajectory(device: str) -> str:
    """Four updates of FixMatch are those of the original program."""
    with tf.device(device):
        deviations = trajectory_deviations()
    pairs = list(zip(deviations, TOLERANCES, strict=True))
    text = "relative deviations " + ", ".join(f"{value:.1e} (allowed {allowed:g})" for value, allowed in pairs)
    if not all(value <= allowed for value, allowed in pairs):
        raise Failed(text)
    return text


def on(device: str, function: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    """Returns a function as a graph that is computed on a device."""
    @tf.function(autograph=False)
    def run(*arguments):
        with tf.device(device):
            return function(*arguments)

    return run


def small_step(device: str) -> tuple[SSLModel, Callable[[], tf.Tensor]]:
    """Returns a small CSSL model on a device and its step on one fixed batch of digits, as a tf.function."""
    from libml import experiment

    config = RunConfig.of(CSSL, dataset="digits.1@40-1", batch=16, uratio=3)
    dataset = experiment.load(config)
    with tf.device(device):
        model = experiment.build(config, dataset)
    with tf.device("CPU:0"):
        batch = next(iter(dataset.dataset(model)))
    return model, on(device, lambda: model.train_on_bytes(batch)["losses/total"])


def repeated_steps(device: str) -> str:
    """One step from one state gives the same bits each time, whatever else the machine does."""
    model, step = small_step(device)
    variables = tf.nest.flatten(model.checkpoint_items())
    start = [variable.numpy() for variable in variables]
    first: list[np.ndarray] = []
    differing, largest = 0, 0.0
    step()  # traces, which takes long enough without the load
    spin = f"import time; end = time.monotonic() + {CHILD_SECONDS}\nwhile time.monotonic() < end: pass"
    load = [subprocess.Popen([sys.executable, "-S", "-c", spin], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            for _ in range(usable_cores())]  # they end by themselves should this process die
    try:
        for _ in range(REPEATS):
            for variable, value in zip(variables, start, strict=True):
                variable.assign(value)
            loss = step()
            after = [loss.numpy(), *(variable.numpy() for variable in variables)]
            first = first or after
            differing += any(a.tobytes() != b.tobytes() for a, b in zip(after, first, strict=True))
            largest = float(np.max([largest, *map(_relative, after, first)]))
    finally:
        for process in load:
            process.kill()
    text = f"{differing} of {REPEATS} repeats differ under load"
    if differing:
        text += f", by at most {largest:.1e} of a variable's largest entry"
    if differing and (device.startswith("CPU") or not largest <= GPU_TOLERANCE):
        raise Failed(text)
    return text


def _relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(np.subtract(a, b, dtype=np.float64)).max() / (np.abs(b).max() or 1))


def pillow(device: str, jit: bool = False) -> str:
    """Every operation of CTAugment, RandAugment and AutoAugment makes the pixels that Pillow makes."""
    from libml.augment import AUTO_OPS, OPS, Augmenter

    number, wrong = 128, []
    images = np.random.default_rng(0).integers(0, 256, (number, 32, 32, 3)) * np.arange(number)[:, None, None, None]
    images = (images // number).astype(np.uint8)  # from black to the largest contrast
    for augment, table in {"d.d.d": OPS, "d.d.aac": AUTO_OPS}.items():  # AutoAugment's hold RandAugment's
        augmenter = Augmenter(augment, image_shape=(32, 32, 3), mirror=True, shift=4, policies="cifar10",
                              jit_compile=jit)
        samples = {name: value.numpy() for name, value in augmenter.sample_strong(number, tf.constant([1, 2])).items()}
        samples["ops"][:, 0] = np.arange(number) % len(table)  # chance might leave one out
        wanted = augmenter.strong_reference(images, samples)
        found = on(device, augmenter.strong_view)(
            tf.constant(images), tf.nest.map_structure(tf.constant, samples)).numpy()
        pixels = (found != wanted).any(-1).sum((1, 2))  # of each image, those that differ
        wrong += [f"{int(count)} after {' and '.join(list(table)[op] for op in ops)}"
                  for count, ops in zip(pixels, samples["ops"], strict=True) if count]
    if wrong:
        raise Failed(f"pixels differ in {len(wrong)} images: {'; '.join(wrong[:3])}{' …' if wrong[3:] else ''}")
    return f"{len(OPS)} and {len(AUTO_OPS)} operations: no pixel of {2 * number} images differs"


CHECKS: dict[str, Callable[[str], str]] = {
    "trajectory of the original program": trajectory, "repeated steps": repeated_steps, "Pillow": pillow,
    "Pillow with XLA": functools.partial(pillow, jit=True)}


# Each check is a process of its own.

def child(task: str, *arguments: str) -> None:
    """Runs a check, or gathers the facts, and prints what came of it as JSON: whether it went well, and what it says.

    TensorFlow settles when it is imported whether it uses oneDNN: most checks have it, the trajectory must not.
    """
    cli.start_tensorflow(onednn=not task.startswith("trajectory"))
    for gpu in tf.config.list_physical_devices("GPU"):  # leaves memory to others
        tf.config.experimental.set_memory_growth(gpu, True)
    try:
        well, said = True, json.dumps(facts(*arguments)) if task == "facts" else CHECKS[task](*arguments)
    except Exception as error:
        well, said = False, str(error) if isinstance(error, Failed) else _first_line(error)
    print(json.dumps([well, said]))


def program_of(task: str, *arguments: str) -> list[str]:
    """Returns the command line of a process that calls `child`."""
    return [sys.executable, "-c", f"from cssl.tools import doctor; doctor.child(*{(task, *arguments)!r})"]


def in_child(task: str, *arguments: str) -> tuple[bool, str]:
    """Returns what a process that calls `child` printed; one that was ended, or does not end, failed."""
    try:
        done = subprocess.run(program_of(task, *arguments), cwd=ROOT, capture_output=True, text=True,
                              errors="replace", timeout=CHILD_SECONDS)
    except subprocess.TimeoutExpired:
        return False, f"no answer within {CHILD_SECONDS} s"
    if done.returncode == 0:
        well, said = json.loads(done.stdout.splitlines()[-1])
        return well, said
    ended = f"exit code {done.returncode}" if done.returncode > 0 else signal.Signals(-done.returncode).name
    return False, f"{ended}: {(done.stderr.strip().splitlines() or ['nothing was said'])[-1][:200]}"


class Outcome(NamedTuple):
    """What came of a check."""

    result: str
    name: str
    measured: str
    seconds: float


def run_checks(devices: list[str], fast: bool) -> Iterator[Outcome]:
    """Runs the checks of this machine, one after the other."""
    for name in CHECKS:
        for device in devices[:1] if name.startswith("trajectory") else devices:
            if not (fast and name.endswith("XLA")):
                begun = time.perf_counter()
                well, measured = in_child(name, device)
                yield Outcome("ok" if well else "FAIL", f"{name}, {device}", measured,
                              round(time.perf_counter() - begun, 1))


def main() -> int:
    """Prints facts and checks as the command line asks; returns the exit code."""
    parser = tools.parser(__doc__)
    parser.add_argument("--fast", action="store_true", help="leave out what XLA has to compile")
    parser.add_argument("--json", action="store_true", help="print one JSON object; the lines go to stderr")
    parser.add_argument("--train_dir", type=Path, default=Path("experiments"), help="where runs go: %(default)s")
    parser.add_argument("--data_dir", type=Path, default=cli.default_data_dir(), help="default: %(default)s")
    args = parser.parse_args()
    lines = functools.partial(print, file=sys.stderr if args.json else sys.stdout, flush=True)
    places = [str(place.expanduser().absolute()) for place in (args.train_dir, args.data_dir)]
    well, found = in_child("facts", *places)
    known = json.loads(found) if well else {"facts": f"unknown ({found})"}
    lines("".join(f"{name:<12}{fact}\n" for name, fact in known.items()))
    done = []
    for outcome in run_checks(["CPU:0", *re.findall(r"\bGPU:\d+", known.get("GPUs", ""))], args.fast):
        done.append(outcome)
        lines("{:<6}{:<44}{}  [{:.1f} s]".format(*outcome))
    failed = [outcome.name for outcome in done if outcome.result == "FAIL"] + ["facts"] * (not well)
    if args.json:
        checks = [outcome._asdict() for outcome in done]
        print(json.dumps({"ok": not failed, "facts": known, "checks": checks}, indent=1))
    else:
        lines(f"\nFailed: {'; '.join(failed)}." if failed else "\nThis machine computes what it should.")
    return int(bool(failed))


if __name__ == "__main__":
    tools.exit_on_user_error(main)
