"""Says whether this machine computes what it should: facts about it, then about a minute of checks.

    cssl-doctor [--fast] [--json] [--train_dir=experiments] [--data_dir=DIR]

Checks: four updates against those of the original program; one step again and again while all cores are busy;
augmentation against Pillow, with and without XLA. Each line is ok, FAIL or skipped, what was checked, what was
measured, and how long that took. Exit code 1 if a check fails. The output belongs into every issue.
"""
from __future__ import annotations

import functools
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import cssl
from cssl import CSSL, cli, tools
from libml.config import RunConfig
from libml.data.names import DATASETS
from libml.devices.machine import cpu_facts, usable_cores
from libml.errors import UserError
from libml.lazy import tf

if TYPE_CHECKING:
    from libml.learn import SSLModel

ROOT = Path(cssl.__file__).resolve().parent.parent  # where `python -m cssl.cssl` finds this very program
TRAJECTORY = Path(__file__).with_name("trajectory_fixmatch.npz")
# Rounding makes 1e-5 of the first two updates; the tiny batches amplify it, to 2e-5 and 1e-3 in the next two.
TOLERANCES = (1e-5, 1e-5, 1e-4, 5e-3)
GPU_TOLERANCE = 1e-3  # of a step, relative to a variable's largest entry: sums there come in any order
REPEATS = 30
CHILD_SECONDS = 300  # nothing that is started here takes a tenth of it


class Failed(Exception):
    """What was measured is not as it should be."""


class Skipped(Exception):
    """There is nothing to measure, or nobody asked."""


# Facts.

def facts(train_dir: Path, data_dir: Path) -> dict[str, str]:
    """Returns what is known of program and machine; what cannot be found out says why."""
    tellers: dict[str, Callable[[], str]] = {
        "program": _program, "versions": _versions, "CPU": _cpu, "devices": _devices, "oneDNN": _onednn,
        "build": _build, "disk": functools.partial(_disk, train_dir), "memory": _memory,
        "datasets": functools.partial(_datasets, data_dir)}
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


def _program() -> str:
    from libml import experiment

    return f"cssl {cssl.__version__}, commit {experiment.commit_of(ROOT)}, in {ROOT}"


def _versions() -> str:
    import keras
    import PIL

    return (f"Python {platform.python_version()}, TensorFlow {tf.__version__}, Keras {keras.__version__}, "
            f"NumPy {np.__version__}, Pillow {PIL.__version__}; {platform.platform()}")


def _cpu() -> str:
    model, flags = cpu_facts()
    vectors = [flag for flag in flags.split() if re.match("avx|fma|f16c|amx|asimd|sve", flag)]
    return f"{model}, {os.cpu_count()} cores ({usable_cores()} usable), {' '.join(vectors) or 'vectors unknown'}"


def _devices() -> str:
    names = ["CPU:0"]
    for gpu in tf.config.list_physical_devices("GPU"):
        details = tf.config.experimental.get_device_details(gpu)
        capability = ".".join(map(str, details.get("compute_capability", "?")))
        names.append(f"{gpu.name.removeprefix('/physical_device:')} {details.get('device_name', '?')} "
                     f"(compute capability {capability})")
    if len(names) == 1:
        names.append("no GPU that TensorFlow can use")
    if shutil.which("nvidia-smi"):  # knows the size of a GPU's memory, and GPUs that TensorFlow cannot use
        memory = subprocess.run(["nvidia-smi", "--query-gpu=name,memory.total,memory.free,driver_version",
                                 "--format=csv,noheader"], capture_output=True, text=True, timeout=60).stdout
        names.append(f"nvidia-smi (name, memory, free, driver): {'; '.join(memory.strip().splitlines())}")
    return "; ".join(names)


def _onednn() -> str:
    from libml.devices import distribute

    if tf.config.list_physical_devices("GPU"):
        return "of no account: networks run on the GPU"
    return ("on: fast convolutions on CPUs, but wrong gradients of narrow networks (runs whose --filters is not a "
            "multiple of 16 turn it off)" if distribute.onednn_is_on() else
            "off: convolutions on CPUs are slower and add up in another order")


def _build() -> str:
    build = tf.sysconfig.get_build_info()
    gpus = "CPUs only"
    if build.get("is_rocm_build"):
        gpus = "ROCm"
    elif build.get("is_cuda_build"):
        gpus = f"CUDA {build.get('cuda_version')}, cuDNN {build.get('cudnn_version')}"
    return f"{gpus}; {'XLA' if tf.test.is_built_with_xla() else 'no XLA: no --jit, no views on GPUs'}"


def _disk(train_dir: Path) -> str:
    place = next(path for path in (train_dir.absolute(), *train_dir.absolute().parents) if path.exists())
    return f"{shutil.disk_usage(place).free / 1e9:.1f} GB free for runs in {train_dir}"


def _memory() -> str:
    kilobytes = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M))
    free, total = (1024 * int(kilobytes[name]) / 1e9 for name in ("MemAvailable", "MemTotal"))
    return f"{free:.1f} GB of {total:.1f} GB free"


def _datasets(data_dir: Path) -> str:
    from libml.data import cache, sources

    found = []
    for name, dataset in DATASETS.items():
        folder = sources.tfds_version_dir(dataset.tfds_name, data_dir) if dataset.tfds_name else None
        if folder:
            try:
                state = "not decoded yet" if cache.read(sources.cache_folder(name, folder)) is None else "decoded"
            except UserError:
                state = "cache damaged"
            found.append(f"{name} ({state})")
    return f"{', '.join(found) or 'none'} in {data_dir}; digits (embedded)"


# Checks: each returns what it measured, or raises.

def trajectory_deviations() -> list[float]:
    """Replays four FixMatch updates of the original program; returns the largest relative deviation in each.

    Compared are losses and monitors before each update. The network has 8 filters: oneDNN must be off.
    """
    from cssl import FixMatch
    from libml import networks
    from libml.augment.augmenter import to_float

    golden = np.load(TRAJECTORY)
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


def trajectory() -> str:
    """Four updates of FixMatch are those of the original program."""
    child = ("from cssl import cli; cli.start_tensorflow(onednn=False)\n"
             "import json, tensorflow as tf; tf.config.set_visible_devices([], 'GPU')\n"
             "from cssl.tools import doctor; print(json.dumps(doctor.trajectory_deviations()))")
    # TensorFlow settles when it is imported whether it uses oneDNN: this process has it, that one must not.
    done = subprocess.run([sys.executable, "-c", child], cwd=ROOT, capture_output=True, text=True,
                          timeout=CHILD_SECONDS)
    if done.returncode:
        raise Failed(f"exit code {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1][:200]}")
    deviations = json.loads(done.stdout.splitlines()[-1])
    text = "relative deviations " + ", ".join(f"{value:.1e}" for value in deviations)
    text += " (allowed " + ", ".join(f"{value:g}" for value in TOLERANCES) + ")"
    if not all(value <= allowed for value, allowed in zip(deviations, TOLERANCES, strict=True)):
        raise Failed(text)
    return text


@contextmanager
def busy_cores() -> Iterator[None]:
    """Keeps all cores busy, each with a process that ends by itself should this one die."""
    spin = f"import time; end = time.monotonic() + {CHILD_SECONDS}\nwhile time.monotonic() < end: pass"
    processes = [subprocess.Popen([sys.executable, "-S", "-c", spin]) for _ in range(usable_cores())]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextmanager
def on(device: str) -> Iterator[None]:
    """Computes on a device; fails where it is not usable, while TensorFlow would quietly take the CPU."""
    usable = [found.name.removeprefix("/device:") for found in tf.config.list_logical_devices()]
    if device not in usable:
        raise Failed(f"TensorFlow cannot use {device}; it has {', '.join(usable)}")
    with tf.device(device):
        yield


def small_step(device: str) -> tuple[SSLModel, Callable[[], tf.Tensor]]:
    """Returns a small CSSL model on a device and its step on one fixed batch of digits, as a tf.function."""
    from libml import data, experiment
    from libml.data import sources

    digits = sources.digits()
    dataset = data.from_arrays(digits.images, digits.labels, digits.test_images, digits.test_labels, num_labels=40,
                               mirror=False)
    config = RunConfig.of(CSSL, filters=16, repeat=1, scales=3, batch=16, uratio=3).with_data(dataset)
    with tf.device("CPU:0"):
        batch = next(iter(data.batches(dataset, batch=config.options.batch, uratio=config.options.uratio)))
    with on(device):
        model = experiment.build(config, dataset)
    step = on(device)(lambda: model.train_on_bytes(batch)["losses/total"])
    return model, tf.function(step, autograph=False)


def repeated_steps(device: str) -> str:
    """One step from one state gives the same bits each time, whatever else the machine does."""
    model, step = small_step(device)
    variables = tf.nest.flatten(model.checkpoint_items())
    start = [variable.numpy() for variable in variables]
    first: list[np.ndarray] = []
    differing, largest = 0, 0.0
    step()  # traces, which takes long enough without the load
    with busy_cores():
        for _ in range(REPEATS):
            for variable, value in zip(variables, start, strict=True):
                variable.assign(value)
            loss = step()
            after = [loss.numpy(), *(variable.numpy() for variable in variables)]
            first = first or after
            differing += any(a.tobytes() != b.tobytes() for a, b in zip(after, first, strict=True))
            largest = float(np.max([largest, *map(_relative, after, first)]))
    text = f"{differing} of {REPEATS} repeats differ under load"
    if differing:
        text += f", by at most {largest:.1e} of a variable's largest entry"
    if differing and (device.startswith("CPU") or not largest <= GPU_TOLERANCE):
        raise Failed(text)
    return text


def _relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(np.subtract(a, b, dtype=np.float64)).max() / (np.abs(b).max() or 1))


def pillow(device: str, jit: bool) -> str:
    """Every operation of CTAugment, RandAugment and AutoAugment makes the pixels that Pillow makes."""
    from libml.augment import AUTO_OPS, OPS, Augmenter

    rng, number = np.random.default_rng(0), 128
    contrast = rng.random((number, 1, 1, 3))
    images = (contrast * rng.integers(0, 256, (number, 32, 32, 3)) + (1 - contrast) * rng.integers(0, 256)).astype(
        np.uint8)
    wrong = []
    for augment, table in {"d.d.d": OPS, "d.d.aac": AUTO_OPS}.items():  # AutoAugment's hold RandAugment's
        augmenter = Augmenter(augment, image_shape=(32, 32, 3), mirror=True, shift=4, policies="cifar10",
                              jit_compile=jit)
        samples = {name: value.numpy() for name, value in augmenter.sample_strong(number, tf.constant([1, 2])).items()}
        samples["ops"][:, 0] = np.arange(number) % len(table)  # chance might leave one out
        wanted = augmenter.strong_reference(images, samples)
        view = tf.function(on(device)(augmenter.strong_view), autograph=False)
        found = view(tf.constant(images), {name: tf.constant(value) for name, value in samples.items()}).numpy()
        pixels = (found != wanted).any(-1).sum((1, 2))  # of each image, those that differ
        wrong += [f"{int(count)} after {' and '.join(list(table)[op] for op in ops)}"
                  for count, ops in zip(pixels, samples["ops"], strict=True) if count]
    if wrong:
        raise Failed(f"pixels differ in {len(wrong)} images: {'; '.join(wrong[:3])}{' …' if wrong[3:] else ''}")
    return f"{len(OPS)} and {len(AUTO_OPS)} operations: no pixel of {2 * number} images differs"


def skipped(reason: str) -> str:
    """Stands for a check that cannot be made, or that nobody asked for."""
    raise Skipped(reason)


def checks(fast: bool) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yields the checks of this machine, by name."""
    gpus = [f"GPU:{i}" for i in range(len(tf.config.list_physical_devices("GPU")))]
    yield "trajectory of the original program", trajectory
    for device in ("CPU:0", *gpus):
        yield f"repeated steps, {device}", functools.partial(repeated_steps, device)
        yield f"Pillow, {device}", functools.partial(pillow, device, False)
        yield f"Pillow, {device} with XLA", (functools.partial(skipped, "left out by --fast") if fast else
                                             functools.partial(pillow, device, True))
    if not gpus:
        yield "GPU", functools.partial(skipped, "no GPU visible")


@dataclass(frozen=True)
class Check:
    """The outcome of a check: ok, FAIL or skipped."""

    result: str
    name: str
    measured: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.result:<8}{self.name:<36}{self.measured}  [{self.seconds:.1f} s]"


def run_check(name: str, check: Callable[[], str]) -> Check:
    """Runs a check; whatever it raises is its outcome."""
    begun = time.perf_counter()
    try:
        result, measured = "ok", check()
    except Skipped as reason:
        result, measured = "skipped", str(reason)
    except Failed as reason:
        result, measured = "FAIL", str(reason)
    except Exception as error:  # the others still run
        result, measured = "FAIL", _first_line(error)
    return Check(result, name, measured, round(time.perf_counter() - begun, 1))


def main() -> int:
    """Prints facts and checks as the command line asks; returns the exit code."""
    parser = tools.parser(__doc__)
    parser.add_argument("--fast", action="store_true", help="leave out what XLA has to compile")
    parser.add_argument("--json", action="store_true", help="print one JSON object; the lines go to stderr")
    parser.add_argument("--train_dir", type=Path, default=Path("experiments"), help="where runs go: %(default)s")
    parser.add_argument("--data_dir", type=Path, default=cli.default_data_dir(), help="default: %(default)s")
    args = parser.parse_args()
    lines = functools.partial(print, file=sys.stderr if args.json else sys.stdout, flush=True)
    try:
        cli.start_tensorflow()
        with suppress(RuntimeError):  # a Python program has used its devices before, as they are
            for gpu in tf.config.list_physical_devices("GPU"):  # leaves memory to the runs that are started here
                tf.config.experimental.set_memory_growth(gpu, True)
        known = facts(args.train_dir.expanduser(), args.data_dir.expanduser())
        for name, fact in known.items():
            lines(f"{name:<12}{fact}")
        lines()
        done = []
        for name, check in checks(args.fast):
            done.append(run_check(name, check))
            lines(done[-1])
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    failed = sum(check.result == "FAIL" for check in done)
    if args.json:
        print(json.dumps({"ok": not failed, "facts": known, "checks": [asdict(check) for check in done]}, indent=1))
    else:
        lines(f"\n{failed} of {len(done)} checks failed" if failed else "\nThis machine computes what it should.")
    return int(failed > 0)


if __name__ == "__main__":
    tools.exit_on_user_error(main)
