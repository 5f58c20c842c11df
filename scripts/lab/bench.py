"""Measures speed and memory of this program's parts.

    python scripts/lab/bench.py augment|data|embed|peers|predict|scale|start|methods [--json] [FLAGS]

Contenders take turns, and the best of several rounds counts: a busy machine is unfair to all alike. Each benchmark
prints a table, or with --json a JSON object per row; its --help says what it measures and lists its options.
"""
import contextlib
import inspect
import io
import json
import multiprocessing
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from argparse import RawDescriptionHelpFormatter
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

import cssl
from cssl import CSSL, RunConfig, cli, tools
from cssl.program import exit_on_user_error

cli.start_tensorflow()  # quietly, before anything else does

import keras
import tensorflow as tf
from PIL import Image

import libml.data
from libml import experiment, features, networks
from libml.augment import OPS, Augmenter, pillow_policy, to_float
from libml.data import SSLData, sources
from libml.devices import distribute
from libml.errors import UserError
from libml.results import tables
from libml.results.predict import Classifier
from libml.train import distributed_batches, update_loop

ROOT = Path(__file__).resolve().parents[2]
URATIO, CLASSES = 7, 10
SETTINGS = {"WRN-28-2": dict(batch=64, filters=32, repeat=4, scales=3, size=32),
            "WRN-10-1": dict(batch=16, filters=16, repeat=1, scales=3, size=32),
            "digits": dict(batch=32, filters=16, repeat=1, scales=3, size=16)}
BASE = {"batch": 16, "filters": 16, "repeat": 1, "size": 32, "unlabeled": 2000, "classes": 10, "replicas": 1,
        "workers": 1, "precision": "off", "jit": False, "recompute": False}
SWEEP: dict[str, tuple] = {
    "batch": (4, 16, 32, 64), "filters": (16, 32, 64), "size": (16, 32, 64, 128, 224),
    "unlabeled": (1000, 10_000, 100_000, 1_000_000), "classes": (10, 100, 1000), "replicas": (2, 4), "workers": (2,),
    "precision": ("float16", "bfloat16"), "jit": (True,), "recompute": (True,)}
Results = Iterator[dict[str, object]]  # of each benchmark: numbers and words by name


def timed(call: Callable[[], object], count: int = 1) -> Callable[[], float]:
    """Returns a function that calls another, which does something `count` times, and returns the seconds of one."""
    def seconds() -> float:
        begun = time.perf_counter()
        call()
        return (time.perf_counter() - begun) / count

    return seconds


def peak_mb() -> int:
    """The largest memory of this process so far. (What getrusage says counts that of the process which started it.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) >> 10


def take_turns(rounds: int, **contenders: Callable[[], float]) -> dict[str, float]:
    """Returns the least seconds of each of several functions that return seconds; a first round warms up."""
    seconds = [{name: contender() for name, contender in contenders.items()} for _ in range(1 + rounds)]
    return {name: min(turn[name] for turn in seconds[1:]) for name in contenders}


def noise(size: int, count: int = 2000, classes: int = CLASSES) -> SSLData:
    """Random images with 40 labels, or one per class."""
    images = np.random.default_rng(0).integers(0, 256, (count, size, size, 3), np.uint8)
    labels = np.arange(count) % classes
    return libml.data.from_arrays(images, labels, images[:classes], labels[:classes], num_labels=max(40, classes))


def updates_of(config: RunConfig, dataset: SSLData, strategy: tf.distribute.Strategy | None = None) -> tuple:
    """Returns a model, its batches, and a function that makes so many updates of the training loop with them."""
    strategy = strategy or tf.distribute.get_strategy()
    with strategy.scope():
        model = experiment.build(config, dataset)
    batches = distributed_batches(model, dataset, strategy)
    loop = update_loop(model, strategy)
    return model, batches, lambda count=1: loop(batches, tf.constant(count)).numpy()


def in_processes(measure: Callable[..., dict], *arguments, workers: int = 1) -> dict:
    """Returns what a function returns in a process of its own, or in the first of several workers; else its error."""
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(workers)]
    addresses = [f"127.0.0.1:{server.getsockname()[1]}" for server in servers]
    for server in servers:
        server.close()
    with contextlib.ExitStack() as processes:
        results = []
        for index in range(workers):
            cluster = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            os.environ["TF_CONFIG"] = json.dumps(cluster) if workers > 1 else ""  # of processes that start from now on
            pool = processes.enter_context(multiprocessing.get_context("spawn").Pool(1))
            results.append(pool.apply_async(measure, arguments))
        try:
            return [result.get(timeout=600) for result in results][0]
        except Exception as error:  # whatever it was: the next ones are measured
            return {"error": f"{type(error).__name__}: {error}"[:300]}


def augment(dataset: str = "cifar10.0@40-1", images: int = 448, rounds: int = 10) -> Results:
    """Images per second of the full strong view in the graph, against a plain Pillow loop on one thread, which gets its
    random numbers for free; then each operation alone. About a minute."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    pictures = np.asarray(libml.data.load(dataset, cli.default_data_dir()).images[:images])
    tensor, seed = tf.constant(pictures), tf.constant([0, 0])
    settings = dict(image_shape=pictures.shape[1:], mirror=True, shift=pictures.shape[1] // 8)
    augmenter, plain = Augmenter("d.d.d", **settings), Augmenter("d.d.d", jit_compile=False, **settings)
    samples = augmenter.sample_strong(images, seed)
    strong, strong_plain = tf.function(augmenter.strong, autograph=False), tf.function(plain.strong, autograph=False)
    assert np.array_equal(strong(tensor, seed), augmenter.strong_reference(pictures, samples)), "views differ"
    best = take_turns(rounds, pillow=timed(lambda: augmenter.strong_reference(pictures, samples), images),
                      graph=timed(lambda: strong(tensor, seed).numpy(), images),
                      graph_without_xla=timed(lambda: strong_plain(tensor, seed).numpy(), images))
    yield {"images": images, "dataset": dataset,
           **{f"{name}_images_per_s": 1 / seconds for name, seconds in best.items()},
           "ratio": best["pillow"] / best["graph"], "ratio_without_xla": best["pillow"] / best["graph_without_xla"]}
    params = np.random.default_rng(0).random((images, 3), dtype=np.float32)
    alone = {"ops": np.zeros([images, 1], int), "params": params[:, None]}
    for name, op in OPS.items():
        graph = tf.function(op.graph, jit_compile=True, autograph=False)
        best = take_turns(
            max(rounds // 3, 1),
            pillow=timed(lambda: pillow_policy({name: op}, pictures, alone), images),  # noqa: B023
            graph=timed(lambda: graph(tensor, params).numpy(), images))  # noqa: B023 - called at once
        yield {"op": name, **{f"{key}_us_per_image": 1e6 * seconds for key, seconds in best.items()}}


def data(dataset: str = "cifar10.3@40-1", batch: int = 64, uratio: int = URATIO, steps: int = 300, rounds: int = 5,
         ) -> Results:
    """Images per second that the input pipeline alone delivers, and seconds to its first batch; --steps to a round."""
    begun = time.perf_counter()
    images = libml.data.load(dataset, cli.default_data_dir())
    batches = iter(libml.data.batches(images, batch=batch, uratio=uratio))
    next(batches)
    first = time.perf_counter() - begun
    best = take_turns(rounds, step=timed(lambda: [next(batches) for _ in range(steps)], steps))
    yield {"dataset": dataset, "batch": batch, "uratio": uratio,
           "images_per_s": round(batch * (1 + uratio) / best["step"]), "first_batch_s": round(first, 3)}


def embed(network: str = "keras:MobileNetV2", size: int = 96, rounds: int = 5, batches: str = "16,32,64,128,256",
          precision: str = "off") -> Results:
    """Passes per second of --features, views and all, against the network's forward pass alone at the best of some
    batches; random weights, compiled views. Peak memory of a process that embeds, and when it has trained a head."""
    config = RunConfig.of(CSSL, dataset="digits.1@40-1", features=network, weights="none", image_size=size,
                          mixed_precision=precision)
    dataset, counts = noise(size, 256), config.feature_views
    embedder = features.Embedder.of(config, dataset.image_shape)
    augmenter = dataset.augmenter(config.augmentation.augment, jit_compile=True)  # as for many images
    rows = np.tile(np.arange(len(dataset.images)), 1000)  # more than are asked for
    made = features.passes(embedder, augmenter, None, dataset.images, rows.astype(np.uint64), rows, counts)
    forward = tf.function(embedder, autograph=False)
    floats = {batch: to_float(tf.constant(np.resize(dataset.images, (batch, size, size, 3))))
              for batch in map(int, batches.split(","))}
    best = take_turns(rounds, embed=timed(lambda: next(made), features.PASSES // (1 + sum(counts)) * (1 + sum(counts))),
                      **{str(batch): timed(lambda x=x: forward(x).numpy(), batch) for batch, x in floats.items()})
    ours, batch = best.pop("embed"), min(best, key=best.__getitem__)
    yield {"network": network, "size": size, "precision": precision, "passes_per_s": 1 / ours,
           "bare_passes_per_s": 1 / best[batch], "at_batch": batch, "ratio": best[batch] / ours,
           **in_processes(_memory_of_features, config.values())}


def _memory_of_features(values: dict) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        config = RunConfig.of(CSSL, **values | {"data_dir": folder})
        started, dataset = peak_mb(), experiment.load(config, noise(config.data.image_size))
        embedded, (_, _, updates) = peak_mb(), updates_of(config, dataset)
        updates(64)
    return {"started_mb": started, "embedding_mb": embedded, "training_mb": peak_mb(),
            "cache_mb_per_1000_images": dataset.images[:1].nbytes / 1e3}


def peers(torch: str = "", settings: str = ",".join(SETTINGS), rounds: int = 5) -> Results:
    """A whole training step against bare ones of the same network, Keras's and PyTorch's: forward pass, cross-entropy,
    backward pass and SGD on as many ready float images as it has views. --torch names a Python that has PyTorch."""
    for name in settings.split(","):
        setting = {**SETTINGS[name], "images": SETTINGS[name]["batch"] * (1 + 2 * URATIO)}  # with weak and strong views
        dataset = noise(setting["size"])
        config = RunConfig.of(CSSL, uratio=URATIO, **{option: setting[option] for option in (
            "batch", "filters", "repeat", "scales")}).with_data(dataset)
        model, _, updates = updates_of(config, dataset)
        bare = experiment.build(config, dataset).network
        bare.compile(optimizer=keras.optimizers.SGD(0.03, momentum=0.9, nesterov=True),
                     loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        x = tf.random.uniform([setting["images"], *dataset.image_shape], -1, 1)
        y = tf.random.uniform([setting["images"]], 0, CLASSES, tf.int32)

        def bare_steps(count: int, bare=bare, x=x, y=y) -> None:
            for _ in range(count):
                float(bare.train_on_batch(x, y))

        steps: dict[str, Callable[[int], object]] = {"whole": updates, "keras": bare_steps}
        with contextlib.ExitStack() as stack:
            if torch:
                peer = stack.enter_context(subprocess.Popen(
                    [torch, str(Path(__file__).with_name("torch_step.py")), json.dumps(setting)],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
                theirs, ours = int(peer.stdout.readline()), networks.count_weights(model.network)
                assert theirs == ours, f"PyTorch's network has {theirs} weights, ours {ours}"
                steps["torch"] = lambda count, peer=peer: (print(count, file=peer.stdin, flush=True),
                                                           peer.stdout.readline())
            once = take_turns(1, **{key: timed(lambda step=step: step(1)) for key, step in steps.items()})
            counts = {key: max(1, round(1 / seconds)) for key, seconds in once.items()}  # a round takes a second
            best = take_turns(rounds, **{key: timed(lambda step=step, count=counts[key]: step(count), counts[key])
                                         for key, step in steps.items()})
        row = {f"{key}_s": seconds for key, seconds in best.items()}
        row |= {f"whole/{key}": best["whole"] / best[key] for key in steps if key != "whole"}
        row |= _inside_a_run(bare_steps) if name == "digits" else {}
        yield {"machine": experiment.environment_facts()["machine"], "setting": name, "images": setting["images"]} | row


def _inside_a_run(bare_steps: Callable[[int], None]) -> dict[str, float]:
    """Seconds per update of a run on the digits, reports and all, beside bare steps between them; what reports take."""
    turns: list[tuple[float, float, float]] = []
    begun = time.perf_counter()

    def hook(trainer, report: dict) -> None:
        nonlocal begun
        whole = (time.perf_counter() - begun) / trainer.report_updates
        turns.append((whole, timed(lambda: bare_steps(8), 8)(), (1 + URATIO) * trainer.batch / report["images_per_s"]))
        begun = time.perf_counter()

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        experiment.train(RunConfig.of(CSSL, dataset="digits.1@40-1", train_dir=folder), hooks=[hook])
    whole, bare, training = zip(*turns[1:], strict=True)  # in the first, caches fill
    return {"run_s": min(whole), "bare_s": min(bare), "run/bare": min(whole) / min(bare),
            "reports": 1 - sum(training) / sum(whole)}


def predict(files: int = 512, keras_files: int = 32, size: int = 32, rounds: int = 3, filters: int = 32,
            repeat: int = 4) -> Results:
    """JPEG files of 64 pixels that are classified per second, against Keras's predict of one image after the other, on
    fewer files: its rate does not depend on them."""
    config = RunConfig.of(CSSL, dataset="cifar10.1@40-1", filters=filters, repeat=repeat, augment="d.d.x")
    dataset = noise(size)
    model = experiment.build(config, dataset)
    classifier = Classifier.of_model(model, dataset.class_names, lambda: dataset)

    def one_by_one(files: list[Path]) -> np.ndarray:
        return np.concatenate([model.predict(sources.resize(Image.open(file), size)[None], verbose=0)
                               for file in files])

    with tempfile.TemporaryDirectory() as folder:
        rng, paths = np.random.default_rng(0), [Path(folder, f"{number:05d}.jpg") for number in range(files)]
        for path in paths:
            small = Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8))
            small.resize((64, 64), Image.Resampling.BICUBIC).save(path)
        few = paths[:keras_files]
        difference = np.abs(classifier.predict(paths).logits[:len(few)] - one_by_one(few)).max()
        best = take_turns(rounds, keras=timed(lambda: one_by_one(few), len(few)),
                          predict=timed(lambda: classifier.predict(paths), files))
    yield {"images_per_s": 1 / best["predict"], "keras_images_per_s": 1 / best["keras"],
           "ratio": best["keras"] / best["predict"], "largest_difference_of_a_logit": float(difference)}


def scale(steps: int = 20, only: str = "", base: str = "{}") -> Results:
    """Step time (median of --steps), images per second, labelled and unlabelled, and peak memory over many settings.

    Every configuration runs in processes of its own and changes a single setting of the first; `size` has a batch of 4
    throughout. --only=workers,size varies these alone; --base is another base, as JSON: '{"filters": 32}'.
    """
    names = only.split(",") if only else list(SWEEP)
    try:
        start = BASE | json.loads(base)
    except (TypeError, ValueError):
        start = {}
    if not {*names} <= {*SWEEP} or {*start} != {*BASE}:
        raise UserError(f"--only={only} --base={base}: expected names of {', '.join(SWEEP)}, and of {', '.join(BASE)}.")
    configs = [start] + [{**start, **({"batch": 4} if name == "size" else {}), name: value}
                         for name in names for value in SWEEP[name]]
    for number, config in enumerate(configs):
        if config not in configs[:number]:
            yield config | in_processes(_one_scale, config, steps, workers=config["workers"])


def _one_scale(config: dict, steps: int) -> dict[str, float]:
    run = RunConfig.of(CSSL, uratio=URATIO, scales=3, num_devices=config["replicas"],
                       mixed_precision=config["precision"],
                       **{name: config[name] for name in ("batch", "filters", "repeat", "jit", "recompute")})
    strategy = distribute.create_strategy(run.scale, os.environ)
    dataset = noise(config["size"], config["unlabeled"], config["classes"])
    model, _, updates = updates_of(run.with_data(dataset), dataset, strategy)
    first, *times = (timed(updates)() for _ in range(3 + steps))
    seconds = float(np.median(times[2:]))  # two more warm up
    assert np.isfinite(updates()).all()
    distribute.ProcessGroup(strategy).final_barrier()
    return {"step_s": round(seconds, 4), "images_per_s": round(config["batch"] * (1 + URATIO) / seconds, 1),
            "peak_memory_mb": peak_mb(), "compile_s": round(first, 1),
            "weights": networks.count_weights(model.network)}


def start(against: str = "", rounds: int = 3) -> Results:
    """Seconds from `python cssl.py --dataset=digits.1@40-1` to its first report, after 16 updates: of two runs, and of
    the second continued after a signal. --against names the root of another checkout, measured beside this one."""
    roots = {"this checkout": ROOT}
    if against:
        roots["the other"] = Path(against).resolve()
    found = defaultdict(list)
    for _ in range(rounds):
        for name, root in roots.items():
            with tempfile.TemporaryDirectory() as place:
                found[name].append([_seconds_to_report(root, f"{place}/{run}", f"{place}/cache") for run in (1, 2, 2)])
    for name, seconds in found.items():
        first, second, continuation = np.min(seconds, axis=0)
        yield {"checkout": name, "first": first, "second": second, "continuation": continuation}


def _seconds_to_report(root: Path, folder: str, cache: str) -> float:
    begun = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-u", "cssl.py", "--dataset=digits.1@40-1", f"--train_dir={folder}"],
                               cwd=root, env={**os.environ, "PYTHONPATH": str(root), "XDG_CACHE_HOME": cache},
                               stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    seconds = next((time.perf_counter() - begun for line in process.stdout if " kimg  accuracy" in line), None)
    process.terminate()
    process.communicate()
    if seconds is None:
        raise UserError(f"The run of {root} made no report: exit code {process.returncode}.")
    return seconds


def methods(methods: str = ",".join(cssl.methods().values()), flags: str = "", rounds: int = 3) -> Results:
    """One update of each method and of FixMatch, in turns, on noise of 32x32 pixels, with the network of --flags; what
    the network's passes explain of their ratio, and the rest, the method's own share: banks, projections, mixing."""
    for name in [cssl.methods()[cssl.method(name).__name__] for name in methods.split(",")]:  # UserError: unknown
        yield {"method": name} | in_processes(_one_method, name, shlex.split(flags), rounds)


def _one_method(method: str, flags: list[str], rounds: int) -> dict[str, float]:
    seconds, images = {}, {}
    for name in dict.fromkeys(("fixmatch", method)):
        config = cli.configuration(cssl.method(name), [name, "--dataset=cifar10.1@40-1", *flags])
        model, batches, updates = updates_of(config, experiment.load(config, noise(32)))
        seconds[name], images[name] = timed(updates), _passes(model, next(batches))
    best = take_turns(rounds, **seconds)
    ratio, explained = best[method] / best["fixmatch"], images[method] / images["fixmatch"]
    return {"step_s": best[method], "fixmatch_s": best["fixmatch"], "ratio": ratio,
            "explained": explained, "own_share": 1 - explained / ratio}


def _passes(model, batch) -> float:
    """Returns the images of an update's passes through the network, those without gradients counted a third."""
    graph = tf.function(model.train_on_bytes, autograph=False).get_concrete_function(batch).graph
    counted = [sum(op.inputs[0].shape[0] for op in graph.get_operations()
                   if op.type == kind and op.inputs[0].shape[-1] == 3)  # the first layer sees colours
               for kind in ("Conv2D", "Conv2DBackpropFilter")]
    return counted[1] + (counted[0] - counted[1]) / 3


def main() -> None:  # what benchmarks take on the command line are their arguments
    parser = tools.parser(__doc__)
    commands = parser.add_subparsers(required=True, dest="benchmark", metavar="BENCHMARK")
    for function in (augment, data, embed, peers, predict, scale, start, methods):
        command = commands.add_parser(function.__name__, description=inspect.getdoc(function),
                                      formatter_class=RawDescriptionHelpFormatter)
        command.add_argument("--json", action="store_true")
        for name, argument in inspect.signature(function).parameters.items():
            command.add_argument(f"--{name}", default=argument.default, type=type(argument.default),
                                 help=f"default: {argument.default}")
    given = vars(parser.parse_args())
    measure, as_json, columns = globals()[given.pop("benchmark")], given.pop("json"), None
    for row in measure(**given):
        cells = [f"{value:.{1 if abs(value) >= 100 else 4}f}" if isinstance(value, float) else str(value)
                 for value in row.values()]
        header, *lines = tables.markdown([list(row), cells]).splitlines()
        shown = json.dumps(row) if as_json else "\n".join([header, *lines] if list(row) != columns else lines[1:])
        print(shown, flush=True)
        columns = list(row)


if __name__ == "__main__":
    exit_on_user_error(main)
