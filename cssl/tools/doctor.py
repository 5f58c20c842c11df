"""Says whether this machine computes what it should: facts about it, then a minute of checks.

    cssl-doctor [--fast]

Each check is a process of its own: one that crashes is a line, and the others go on. Exit code 1 if one fails. The
output belongs into every issue.
"""
from __future__ import annotations

import math
import os
import platform
import re
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import numpy as np

import cssl
from cssl import CSSL, cli, tools
from libml.config import RunConfig, ScaleOptions
from libml.devices.machine import (
    CARDS,
    CONTAINER,
    INSTALL,
    cpu_facts,
    nvidia_smi,
    unusable_cards,
    usable_cores,
    usable_memory,
)
from libml.errors import UserError
from libml.lazy import tf

ROOT = Path(cssl.__file__).resolve().parent.parent  # where another Python finds this very program
GOLDEN = Path(__file__).with_name("trajectory_fixmatch.npz")
# Rounding makes 1e-5 of the first two updates; the tiny batches amplify it, to 2e-5 and 1e-3 in the next two.
TOLERANCES = (1e-5, 1e-5, 1e-4, 5e-3)
GPU_TOLERANCE = 1e-3  # of a step, relative to a variable's largest entry: sums there come in any order
REPEATS = 20
CURES = {"ptxas|libdevice": INSTALL, "CUDA_ERROR_INVALID_HANDLE|no kernel image|sm_120": CONTAINER}  # by what is said
CHILD_SECONDS = 300  # no check takes a tenth of it


# Tasks: each returns what it found on a device, or raises.

def facts(device: str) -> str:
    """What is known of program and machine, a line each."""
    from libml.experiment import environment_facts

    known, (_, features) = environment_facts(), cpu_facts()
    gpus = []
    for gpu in tf.config.list_physical_devices("GPU"):
        details = tf.config.experimental.get_device_details(gpu)
        capability = ".".join(map(str, details.get("compute_capability", "?")))
        gpus.append(f"{gpu.name.rpartition('device:')[2]} {details.get('device_name')} (capability {capability})")
    told = {"program": f"cssl {cssl.__version__}, commit {known['commit']}, in {ROOT}",
            "versions": ", ".join([f"Python {known['python']}", *(
                f"{name} {metadata.version(name)}" for name in ("tensorflow", "keras", "numpy", "pillow"))]),
            "machine": f"{known['machine']} ({usable_cores()} usable), {usable_memory() / 1e9:.1f} GB of memory",
            "system": platform.platform(),
            "vectors": " ".join(re.findall(r"\b(?:avx|fma|f16c|amx|asimd|sve)\w*", features)) or "unknown",
            "GPUs": "; ".join(gpus) or "none that TensorFlow can use",
            "build": ", ".join(f"{key} {value}" for key, value in tf.sysconfig.get_build_info().items())}
    return "\n".join(f"{name:<10}{fact}" for name, fact in told.items())


def trajectory(device: str) -> str:
    """Four FixMatch updates have the losses and monitors of the original program's."""
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

    found = []
    for k in range(len(TOLERANCES)):
        scalars = step({"labeled": to_float(golden["labeled"][k]), "label": tf.constant(golden["label"][k]),
                        "weak": to_float(golden["weak"][k]), "strong": tf.constant(golden["strong"][k])})
        tags = ("losses/xe", "losses/xeu", "losses/wd", "monitors/mask", "monitors/lr")
        pairs = [(float(scalars[tag]), float(golden[f"hist/{tag}"][k])) for tag in tags]
        found.append(float(np.max([abs(a - b) / abs(b) if a != b else 0.0 for a, b in pairs])))  # NaN stays NaN
    text = "largest relative deviations " + ", ".join(
        f"{value:.1e} (allowed {allowed:g})" for value, allowed in zip(found, TOLERANCES, strict=True))
    if not (np.array(found) <= TOLERANCES).all():
        raise UserError(text)
    return text


def cards(device: str) -> str:
    """TensorFlow sees the cards that the driver does, and has kernels for them."""
    listed, seen = nvidia_smi(CARDS), len(tf.config.list_physical_devices("GPU"))
    built = tf.sysconfig.get_build_info().get("cuda_compute_capabilities", [])
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if fault := unusable_cards(listed, seen, built, hidden):
        raise UserError(fault)
    return f"nvidia-smi lists {'; '.join(listed) or 'none'}, TensorFlow uses {seen}" + (
        f"; CUDA_VISIBLE_DEVICES={hidden}" if hidden is not None else "")


def repeated_steps(device: str) -> str:
    """On a CPU, one step from one state gives the same bits each time; how long it takes, and holds up the host."""
    from libml import experiment

    size = {} if device.startswith("CPU") else {"batch": 64, "filters": 32, "repeat": 4}
    config = RunConfig.of(CSSL, dataset="digits.1@40-1", **{"batch": 16, "uratio": 3, **size})  # type: ignore[arg-type]
    dataset = experiment.load(config)
    model = experiment.build(config, dataset)
    batch = next(iter(dataset.dataset(model)))
    step = tf.function(lambda: model.train_on_bytes(batch)["losses/total"], autograph=False)
    variables = tf.nest.flatten(model.checkpoint_items())
    start = [variable.read_value() for variable in variables]
    times, ends = [], set()
    for _ in range(1 + REPEATS):  # the first traces
        for variable, value in zip(variables, start, strict=True):
            variable.assign(value)
        begun = time.perf_counter()
        loss = step()
        held = time.perf_counter() - begun
        loss.numpy()
        times.append((held, time.perf_counter() - begun))
        ends.add(model.fingerprint())
    held, whole = np.mean(times[1:], axis=0)
    text = f"{len(ends)} different end{'s' * (len(ends) > 1)} of {1 + REPEATS} equal steps"
    if len(ends) > 1 and device.startswith("CPU"):
        raise UserError(text)
    return (f"{text}; {model.options.batch / whole:.0f} labelled images/s, {whole:.3f} s a step, of which the host is "
            f"held {held / whole:.0%}")


def pillow(device: str) -> str:
    """Every operation of CTAugment, RandAugment and AutoAugment makes the pixels that Pillow makes."""
    from libml.augment import AUTO_OPS, OPS, Augmenter

    number, wrong = 64, []
    images = np.random.default_rng(0).integers(0, 256, (number, 32, 32, 3)) * np.arange(number)[:, None, None, None]
    images = (images // number).astype(np.uint8)  # from black to the largest contrast
    for augment, table in {"d.d.d": OPS, "d.d.aac": AUTO_OPS}.items():  # AutoAugment's hold RandAugment's
        augmenter = Augmenter(augment, image_shape=(32, 32, 3), mirror=True, shift=4, policies="cifar10",
                              jit_compile=device.endswith("XLA"))
        samples = {name: value.numpy() for name, value in augmenter.sample_strong(number, tf.constant([1, 2])).items()}
        samples["ops"][:, 0] = np.arange(number) % len(table)  # chance might leave one out
        wanted = augmenter.strong_reference(images, samples)
        view = tf.function(augmenter.strong_view, autograph=False)
        found = view(tf.constant(images), tf.nest.map_structure(tf.constant, samples)).numpy()
        pixels = (found != wanted).any(-1).sum((1, 2))  # of each image, those that differ
        wrong += [f"{int(count)} after {' and '.join(list(table)[op] for op in ops)}"
                  for count, ops in zip(pixels, samples["ops"], strict=True) if count]
    if wrong:
        raise UserError(f"pixels differ in {len(wrong)} images: {'; '.join(wrong[:3])}{' …' if wrong[3:] else ''}")
    return f"{len(OPS)} and {len(AUTO_OPS)} operations: no pixel of {2 * number} images differs"


def strategy_of(devices: str, tf32: bool = True) -> tf.distribute.Strategy:
    """Returns the strategy that a run would have on all GPUs, or on two CPUs."""
    from libml.devices.distribute import create_strategy

    gpus = len(tf.config.list_physical_devices("GPU"))
    return create_strategy(ScaleOptions(num_devices=gpus if devices == "GPUs" else 2, tf32=tf32), None)


def whole_numbers(count: int, replica: int) -> np.ndarray:
    """One replica's; 32 bits each, as those of 8 GPUs at once would be gigabytes."""
    return np.arange(count, dtype=np.int32) * np.int32(7 + replica) % np.int32(1021)


def all_reduce(devices: str) -> str:
    """Sums over devices of whole numbers, of which floats are exact, are right bit by bit."""
    strategy = strategy_of(devices)
    replicas, sizes = strategy.num_replicas_in_sync, [2 ** 12, 2 ** 20, 2 ** 24, *[2 ** 28] * (devices == "GPUs")]
    add = tf.function(lambda x: tf.distribute.get_replica_context().all_reduce("sum", x), autograph=False)
    for size in sizes:  # bytes
        given = strategy.experimental_distribute_values_from_function(
            lambda context, size=size: tf.constant(whole_numbers(size // 4, context.replica_id_in_sync_group),
                                                   tf.float32))
        wanted = sum(whole_numbers(size // 4, replica) for replica in range(replicas))
        for found in strategy.experimental_local_results(strategy.run(add, args=(given,))):
            if (wrong := found.numpy() != wanted).any():
                raise UserError(f"{wrong.mean():.1%} of {size} bytes are wrong on {found.device}")
    return f"{', '.join(f'{size >> 10} KB' for size in sizes)} over {replicas} devices: every bit is right"


def several_devices(devices: str) -> str:
    """A step over several devices, each with its share of the images, changes weights as one device does.

    Without TF32, whose rounding of single products is larger than what is allowed.
    """
    from cssl import FixMatch
    from libml import networks

    strategy = strategy_of(devices, tf32=False)
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
    alone, together = changes
    largest = float(np.abs(together - alone).max() / np.abs(alone).max())
    text = f"changes of weights by {replicas} devices and by one differ by at most {largest:.1e} of the largest"
    if not largest <= GPU_TOLERANCE:
        raise UserError(text)
    return text


def child(task: str, device: str) -> None:
    """Does a task, a function of this module, and prints what it found; exit code 1 if that is not as it should be."""
    if device.startswith("CPU"):  # as on a machine without GPUs; of these, TensorFlow takes the first that it sees
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    cli.start_tensorflow(onednn=task != "trajectory")  # whose network has 8 filters
    gpus = tf.config.list_physical_devices("GPU")
    if device.startswith("GPU:"):
        tf.config.set_visible_devices(gpus[int(device.split()[0][4:])], "GPU")
    for gpu in gpus:  # leaves memory to others
        tf.config.experimental.set_memory_growth(gpu, True)
    try:
        print(globals()[task](device))
    except Exception as error:
        name, lines = type(error).__name__, str(error).strip().splitlines() or [""]
        # TensorFlow puts a traceback before the message of what happens while it traces.
        line = lines[-1 if lines[0].startswith("in user code") else 0].strip().removeprefix(f"{name}: ")[:200]
        print(error if isinstance(error, UserError) else f"{name}: {line}")
        sys.exit(1)


def program_of(task: str, device: str) -> list[str]:
    return [sys.executable, "-c", f"from cssl.tools import doctor; doctor.child({task!r}, {device!r})"]


def in_child(task: str, device: str) -> tuple[bool, str]:
    """Returns whether a task went well, and what it said; a process that was ended, or does not end, failed."""
    try:
        done = subprocess.run(program_of(task, device), cwd=ROOT, capture_output=True, text=True, errors="replace",
                              timeout=CHILD_SECONDS)
    except subprocess.TimeoutExpired:
        return False, f"no answer within {CHILD_SECONDS} s"
    said = done.stdout.strip()
    if done.returncode not in (0, 1) or not said:
        ended = signal.Signals(-done.returncode).name if done.returncode < 0 else f"exit code {done.returncode}"
        said = f"{ended}: {(done.stderr.strip().splitlines() or ['nothing was said'])[-1][:200]}"
    cures = [cure for pattern, cure in CURES.items() if re.search(pattern, said + done.stderr) and cure not in said]
    return done.returncode == 0, ": ".join([said, *cures]) if done.returncode else said


def main() -> int:
    parser = tools.parser(__doc__)
    parser.add_argument("--fast", action="store_true", help="leave out what XLA has to compile")
    args = parser.parse_args()
    well, known = in_child("facts", "GPUs")
    print(f"{known if well else f'facts unknown ({known})'}\n", flush=True)
    failed = [] if well else ["facts"]
    gpus = re.findall(r"\bGPU:\d+", known)
    each, together = ["CPU:0", *gpus], ["GPUs" if len(gpus) > 1 else "CPUs"]
    with_xla = [] if args.fast else [f"{device} with XLA" for device in each]
    where = {"trajectory": ["CPU:0"], "cards": ["GPUs"], "repeated_steps": each, "pillow": [*each, *with_xla],
             "all_reduce": together, "several_devices": together}
    for task, device in ((task, device) for task, devices in where.items() for device in devices):
        begun = time.perf_counter()
        well, measured = in_child(task, device)
        name = f"{task.replace('_', ' ')}, {device}"
        print(f"{'ok' if well else 'FAIL':<6}{name:<24}{measured}  [{time.perf_counter() - begun:.1f} s]", flush=True)
        failed += [] if well else [name]
    print(f"\nFailed: {'; '.join(failed)}." if failed else "\nThis machine computes what it should.")
    return int(bool(failed))


if __name__ == "__main__":
    tools.exit_on_user_error(main)
