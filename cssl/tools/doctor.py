"""Says whether this machine computes what it should: facts about it, then about two minutes of checks.

    cssl-doctor [--fast] [--json] [--train_dir=experiments] [--data_dir=DIR]

Checks: four updates against those of the original program; one step again and again while all cores are busy;
augmentation against Pillow, with and without XLA; on all GPUs, or two CPUs: sums of known numbers, and a step against
that of one device; GPUs that TensorFlow cannot use; images per second. Each is a process of its own: one that crashes
is a line, and the others go on. Exit code 1 if one fails. The output belongs into every issue.
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
from typing import TYPE_CHECKING

import numpy as np

import cssl
from cssl import CSSL, cli, tools
from libml.config import RunConfig, ScaleOptions
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
INSTALL = "pip install 'cssl[gpu]' brings CUDA's libraries"
CONTAINER = "NVIDIA's container of TensorFlow (nvcr.io/nvidia/tensorflow) has newer ones"
CURES = {"ptxas|libdevice": INSTALL, "CUDA_ERROR_INVALID_HANDLE|no kernel image|sm_120": CONTAINER}  # by what is said
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


def small_step(device: str, **settings: int) -> tuple[SSLModel, Callable[[], tf.Tensor]]:
    """Returns a small CSSL model on a device and its step on one fixed batch of digits, as a tf.function."""
    from libml import experiment

    config = RunConfig.of(CSSL, dataset="digits.1@40-1", **{"batch": 16, "uratio": 3, **settings})  # type: ignore[arg-type]
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


def cards(device: str) -> str:
    """TensorFlow sees the cards that the driver does, and has kernels for them."""
    listed, seen = nvidia_smi("name,compute_cap"), len(tf.config.list_physical_devices("GPU"))
    built = tf.sysconfig.get_build_info().get("cuda_compute_capabilities", [])
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if len(listed) > seen and (hidden is None or not seen and hidden not in ("", "-1")):
        raise Failed(f"nvidia-smi lists {'; '.join(listed)}, TensorFlow uses {seen}: {INSTALL}")
    for card in listed:
        own = re.search(r", (\d+)\.(\d)$", card)
        if own and not any(fits(int(own[1]), int(own[2]), kind) for kind in built):
            raise Failed(f"{card}: this TensorFlow has kernels for {', '.join(built)}: {CONTAINER}")
    return f"{len(listed)} listed, {seen} used" + (f"; CUDA_VISIBLE_DEVICES={hidden}" if hidden is not None else "")


def fits(major: int, minor: int, kind: str) -> bool:
    """Whether a card runs kernels of a kind: sm_80 those of 8.0 to 8.9, compute_90 what is compiled when it starts."""
    built = re.search(r"_(\d+)(\d)", kind)
    return built is not None and int(built[1]) == major and int(built[2]) <= minor


def strategy_of(devices: str) -> tf.distribute.Strategy:
    """Returns the strategy that a run would have on all GPUs, or on two CPUs."""
    from libml.devices.distribute import create_strategy

    gpus = len(tf.config.list_physical_devices("GPU"))
    return create_strategy(ScaleOptions(num_devices=gpus if devices == "GPUs" else 2), None)


def all_reduce(devices: str) -> str:
    """Sums over devices of whole numbers, of which floats are exact, are right bit by bit."""
    strategy = strategy_of(devices)
    replicas, sizes = strategy.num_replicas_in_sync, [2 ** 12, 2 ** 20, 2 ** 24, *[2 ** 28] * (devices == "GPUs")]
    add = tf.function(lambda x: tf.distribute.get_replica_context().all_reduce("sum", x), autograph=False)
    for size in sizes:  # bytes
        own = np.arange(size // 4) * np.arange(7, 7 + replicas)[:, None] % 1021
        given = strategy.experimental_distribute_values_from_function(
            lambda context, own=own: tf.constant(own[context.replica_id_in_sync_group], tf.float32))
        for found in strategy.experimental_local_results(strategy.run(add, args=(given,))):
            if (wrong := found.numpy() != own.sum(0)).any():
                raise Failed(f"{wrong.mean():.1%} of {size} bytes are wrong on {found.device}")
    return f"{', '.join(f'{size >> 10} KB' for size in sizes)} over {replicas} devices: every bit is right"


def several_devices(devices: str) -> str:
    """A step over several devices, each with its share of the images, changes weights as one device does."""
    from cssl import FixMatch
    from libml import networks

    strategy = strategy_of(devices)
    rng, replicas, changes = np.random.default_rng(0), strategy.num_replicas_in_sync, []
    views = {name: rng.normal(size=(4 * replicas, 16, 16, 3)) for name in ("labeled", "weak", "strong")}
    for scope, parts in ((tf.distribute.get_strategy(), 1), (strategy, replicas)):
        with scope.scope():
            network = networks.build("resnet", num_classes=10, image_shape=(16, 16, 3), filters=16, repeat=1, scales=2,
                                     sync_bn=True, seed=1)
            model = FixMatch(network, 10, batch=4 * replicas, uratio=1, confidence=0.0, total_images=1024)
        before = np.concatenate([variable.numpy().ravel() for variable in network.trainable_variables])
        given = scope.experimental_distribute_values_from_function(lambda context, parts=parts: {
            "label": tf.range(context.replica_id_in_sync_group, 4 * replicas, parts) % 10,
            **{name: tf.constant(array[context.replica_id_in_sync_group::parts], tf.float32)
               for name, array in views.items()}})
        scope.run(tf.function(model.train_on_views, autograph=False), args=(given,))
        changes.append(np.concatenate([variable.numpy().ravel() for variable in network.trainable_variables]) - before)
    largest = _relative(*changes)
    text = f"changes of weights by {replicas} devices and by one differ by at most {largest:.1e} of the largest"
    if not largest <= GPU_TOLERANCE:
        raise Failed(text)
    return text


def speed(device: str) -> str:
    """How long a step takes, and for how much of it the host is held up before it can prepare the next."""
    gpu = device.startswith("GPU")
    model, step = small_step(device, **(dict(filters=32, repeat=4, batch=64, uratio=7) if gpu else {}))
    step().numpy()
    held = busy = 0.0
    for _ in range(REPEATS):
        begun = time.perf_counter()
        loss = step()
        held += time.perf_counter() - begun
        loss.numpy()
        busy += time.perf_counter() - begun
    rate = REPEATS * model.options.batch / busy
    return f"{rate:.0f} labelled images/s, {busy / REPEATS:.3f} s a step, of which the host is held {held / busy:.0%}"


CHECKS: dict[str, Callable[[str], str]] = {
    "trajectory of the original program": trajectory, "cards": cards, "repeated steps": repeated_steps,
    "Pillow": pillow, "Pillow with XLA": functools.partial(pillow, jit=True), "all-reduce": all_reduce,
    "several devices": several_devices, "speed": speed}


# Each check is a process of its own.

def child(task: str, *arguments: str) -> None:
    """Runs a check, or gathers the facts, and prints as JSON whether it went well, and what it says."""
    cli.start_tensorflow(onednn=not task.startswith("trajectory"))  # settled when TensorFlow is imported
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
        hidden = {"CUDA_VISIBLE_DEVICES": "-1"} if "CPUs" in arguments else {}
        done = subprocess.run(program_of(task, *arguments), cwd=ROOT, capture_output=True, text=True,
                              errors="replace", timeout=CHILD_SECONDS, env={**os.environ, **hidden})
    except subprocess.TimeoutExpired:
        return False, f"no answer within {CHILD_SECONDS} s"
    if done.returncode == 0:
        well, said = json.loads(done.stdout.splitlines()[-1])
    else:
        well, said = False, (done.stderr.strip().splitlines() or ["nothing was said"])[-1][:200]
        ended = signal.Signals(-done.returncode).name if done.returncode < 0 else f"exit code {done.returncode}"
        said = f"{ended}: {said}"
    cures = [cure for pattern, cure in CURES.items() if re.search(pattern, said + done.stderr) and cure not in said]
    return well, said if well else ": ".join([said, *cures])


def run_checks(gpus: list[str], fast: bool) -> Iterator[tuple[str, str, str, float]]:
    """Runs the checks of this machine one by one; yields ok or FAIL, its name, what was measured, and the seconds."""
    together = "GPUs" if len(gpus) > 1 else "CPUs"
    where = {trajectory: ["CPU:0"], cards: ["GPUs"], all_reduce: [together], several_devices: [together]}
    for name, check in CHECKS.items():
        for device in where.get(check, ["CPU:0", *gpus]):
            if not (fast and name.endswith("XLA")):
                begun = time.perf_counter()
                well, measured = in_child(name, device)
                yield ("ok" if well else "FAIL", f"{name}, {device}", measured, round(time.perf_counter() - begun, 1))


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
    for outcome in run_checks(re.findall(r"\bGPU:\d+", known.get("GPUs", "")), args.fast):
        done.append(outcome)
        lines("{:<6}{:<44}{}  [{:.1f} s]".format(*outcome))
    failed = [name for result, name, *_ in done if result == "FAIL"] + ["facts"] * (not well)
    if args.json:
        checks = [dict(zip(("result", "name", "measured", "seconds"), outcome, strict=True)) for outcome in done]
        print(json.dumps({"ok": not failed, "facts": known, "checks": checks}, indent=1))
    else:
        lines(f"\nFailed: {'; '.join(failed)}." if failed else "\nThis machine computes what it should.")
    return int(bool(failed))


if __name__ == "__main__":
    tools.exit_on_user_error(main)
