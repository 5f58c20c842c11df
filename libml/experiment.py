"""A run from its configuration: loads the data, builds the model, trains and evaluates, on any devices."""
from __future__ import annotations

import dataclasses
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import libml.data
from libml import distribute, memory, models, own
from libml.config import RunConfig, describe, expand
from libml.data import SSLData
from libml.errors import UserError
from libml.evaluate import Evaluator, evaluate_all
from libml.keras_model import dtype_policy
from libml.metrics import METRICS
from libml.model import SSLModel
from libml.run import Run, RunFolder
from libml.train import Hook, Interrupted, Trainer, checkpoint_of, format_seconds

__all__ = ["Evaluation", "Interrupted", "Result", "build", "evaluate", "find_checkpoint", "load", "train"]

PAPER_KIMG = 65536
MAX_MEMORY = 10 ** 12  # bytes that no machine of this program's users has
DEFAULT_DATA_DIR = "~/tensorflow_datasets"  # what TFDS uses


@dataclasses.dataclass(frozen=True)
class Result:
    """A trained run.

    Attributes:
        model: with the final weights; calling it uses their average.
        data: what it was trained on.
        folder: where its files are.
        run: its reports; `run.result("accuracy")` is the median of the last 20.
    """

    model: SSLModel
    data: SSLData
    folder: RunFolder
    run: Run


def load(config: RunConfig) -> SSLData:
    """Loads the images of a run."""
    return libml.data.load(config.data.dataset, config.data.data_dir or DEFAULT_DATA_DIR, config.data.image_size)


def build(config: RunConfig, data: SSLData, network: own.Builder | None = None, strong: Callable | None = None,
          ) -> SSLModel:
    """Builds network, augmenter and model, for the strategy in whose scope this is called."""
    augmentation, scale, seed = config.augmentation, config.scale, config.training.seed
    statistics = None
    if config.data.whiten:
        pixels = np.asarray(data.images[data.unlabeled[:50_000]], np.float32) / 127.5 - 1
        statistics = pixels.mean((0, 1, 2)), pixels.std((0, 1, 2))
    with dtype_policy(distribute.POLICIES[scale.mixed_precision]):
        if network is None:
            net = _build_network(config, data)
        else:
            net = own.build_network(network, data.num_classes, data.image_shape, seed)
        spec = augmentation.augment
        if augmentation.own_strong and strong is None:  # evaluation makes no views; nor had training CTAugment's rates
            spec = spec.rpartition(".")[0] + ".x"
        augmenter = data.augmenter(spec, depth=augmentation.adepth, threshold=augmentation.ath,
                                   decay=augmentation.adecay, own_strong=strong)
        return config.method(net, data.num_classes, options=config.options, augmenter=augmenter, seed=seed,
                             total_images=config.training.total_images, image_statistics=statistics,
                             loss_scaling=scale.mixed_precision == "float16", jit=scale.jit,
                             set_sizes=(len(data.labeled), len(data.unlabeled)))


def _build_network(config: RunConfig, data: SSLData) -> keras.Model:
    network = config.network
    if network.own_network:
        raise UserError(f"This run has a network of its own, {network.own_network}: give the function that builds it, "
                        "as network=….")
    return models.build(network.arch, num_classes=data.num_classes, image_shape=data.image_shape,
                        filters=network.filters, repeat=network.repeat, scales=network.scales,
                        dropout=getattr(config.options, "dropout", 0.0), bn_momentum=network.bn_momentum,
                        sync_bn=config.scale.sync_bn, seed=config.training.seed)


def train(config: RunConfig, data: SSLData | None = None, *, network: own.Builder | None = None,
          strong: Callable | None = None, hooks: Sequence[Hook] = (),
          environment: Mapping[str, str] | None = None) -> Result:
    """Trains a run to its end, from wherever its folder left off. Raises Interrupted after SIGTERM or SIGINT.

    Args:
        config: what to train.
        data: images that the program has at hand, instead of those of `config.data.dataset`.
        network: a function of num_classes and image_shape that returns a Keras classifier from float images in [-1, 1]
            to logits, instead of `config.network`.
        strong: the strong augmentation, instead of the one of `config.augmentation`: a function in the graph of uint8
            images [N, H, W, 3] and a seed [2], to uint8 or to floats in [-1, 1].
        hooks: called after every report as hook(trainer, report), or Keras callbacks, whose epochs are the reports.
        environment: variables that may describe a cluster (TF_CONFIG, SLURM's); none by default.
    """
    if network is None and not config.trusts_onednn and distribute.onednn_is_on():
        raise UserError(f"filters={config.network.filters}: oneDNN, which TensorFlow uses here, computes some "
                        "gradients wrong unless channels are multiples of 16. Set TF_ENABLE_ONEDNN_OPTS=0 before "
                        "TensorFlow is imported, or choose such a number.")
    if config.augmentation.own_strong and strong is None:
        raise UserError(f"This run has a strong augmentation of its own, {config.augmentation.own_strong}: give it, as "
                        "strong=….")
    strategy = distribute.create_strategy(config.scale,
                                          distribute.find_cluster(config.scale.strategy, environment or {}))
    with distribute.watch(strategy):
        fields = config.fields(config.method)
        distribute.check_same(strategy, {name: value for name, value in config.values().items()
                                         if not fields[name].metadata["local"]})
        distribute.check_jit(config.scale, strategy.num_replicas_in_sync)
        libml.data.check_batch(config.options.batch, strategy.num_replicas_in_sync)
        group = distribute.ProcessGroup(strategy)
        with group.errors_stop_all():
            if data is None:
                data = load(config)
            else:
                config = config.with_data(data)
            if network is None:  # of another nothing is known yet
                gpus = tf.config.list_physical_devices("GPU")
                memory.check(config, data.image_shape, group.size, available=MAX_MEMORY if gpus else None)
            with strategy.scope():
                model = _build(config, data, network, strong)
            config = own.describe(config, model, network, strong)
            folder = RunFolder(config.folder())
        distribute.check_same(strategy, {"own": [config.network.own_network, config.augmentation.own_strong]})
        trainer = Trainer(model, data, config, folder, strategy, hooks, group)
        with trainer.claimed(environment_facts()):
            with group.errors_stop_all():
                _announce(trainer, config)
            started = time.perf_counter()
            trainer.run()
            if trainer.is_chief:
                _conclude(trainer, time.perf_counter() - started)
        if group.size > 1:  # proof, in every process's output, that all hold the same weights
            print(f"worker {group.rank}: weights sha256 {model.fingerprint()}", flush=True)
        return Result(model, data, folder, folder.read())


def _build(config: RunConfig, data: SSLData, network: own.Builder | None = None, strong: Callable | None = None,
           ) -> SSLModel:
    try:
        return build(config, data, network, strong)
    except UserError:
        raise
    except ValueError as error:  # libraries say what they got and what they wanted, in one line
        raise UserError(str(error)) from error


def environment_facts() -> dict:
    """Returns what a reader of the results will want to know about this program and machine."""
    root, commit = Path(__file__).parent.parent, ""
    if (root / ".git").exists():
        with suppress(OSError):  # no git here
            commit = subprocess.run(["git", "-C", root, "describe", "--always", "--dirty"], capture_output=True,
                                    text=True).stdout.strip()
    return {"commit": commit or "unknown", "python": platform.python_version(),
            "tensorflow": tf.__version__, "keras": keras.__version__,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "devices": [device.name for device in tf.config.list_logical_devices()],
            "started": time.strftime("%Y-%m-%d %H:%M:%S"), "command": " ".join(sys.argv)}


def _lacks(model: SSLModel) -> dict[str, str]:
    """Returns what this model does not do of all that an option may need, and why."""
    name, strong = type(model).__name__, model.uses_unlabeled and model.views_per_image[1] > 0
    lacks = {"CTAugment": "it belongs to CTAugment" if strong else f"{name} has no strong views",
             "alignment": f"{name} does not align its predictions",
             "unlabelled images": f"{name} uses no unlabelled images"}
    does = {"CTAugment": strong and model.augmenter.learns_rates, "alignment": model.uses_alignment,
            "unlabelled images": model.uses_unlabeled}
    return {need: reason for need, reason in lacks.items() if not does[need]}


def _announce(trainer: Trainer, config: RunConfig) -> None:
    """Prints the resolved configuration in plain units, the network's size, and where files go."""
    model, data, log, values = trainer.model, trainer.data, trainer.log, config.values()
    for note in data.notes:
        log(f"warning: {note}")
    lacks = _lacks(model)
    for name, field in config.fields(config.method).items():
        if field.metadata["needs"] in lacks and values[name] != field.default:
            log(f"warning: --{name} has no effect: {lacks[field.metadata['needs']]}.")
    log(f"{type(model).__name__} on {data.name}: {len(data.labeled)} labelled, {len(data.unlabeled)} unlabelled, "
        f"{data.num_valid} validation, {len(data.test_labels)} test images of {'x'.join(map(str, data.image_shape))}, "
        f"{data.num_classes} classes")
    for title, options in config.groups(config.method).items():
        shown = [f"{name}={values[name]}{' (preset)' if name in config.presets else ''}" for name in describe(options)
                 if values[name] != ""]
        log(f"  {title.split(' (')[0]}: {', '.join(shown)}")
    images = trainer.total_updates * trainer.batch
    unlabeled = ""
    if trainer.uratio:
        unlabeled = f", {images * trainer.uratio / len(data.unlabeled):.1f} epochs of the unlabelled ones"
    log(f"  length: {images / 1024:.12g} kimg = {images} labelled images = {trainer.total_updates} updates = "
        f"{images / len(data.labeled):.1f} epochs of the labelled images{unlabeled}; a report every "
        f"{trainer.report_updates} updates")
    if config.training.train_kimg > PAPER_KIMG:
        log(f"  note: that is {config.training.train_kimg / PAPER_KIMG:g} times the length of the paper's runs, whose "
            f"2^20 updates of 64 images are --train_kimg={PAPER_KIMG}")
    name = config.network.own_network or config.network.arch
    log(f"  network: {name}, {models.count_weights(model.network):,} weights")
    log(f"  files: {trainer.folder.path}")


def _conclude(trainer: Trainer, seconds: float) -> None:
    """Writes the medians of the last reports, prints the result and what to do next."""
    run, path = trainer.folder.read(), shlex.quote(str(trainer.folder.path))
    medians, reports = trainer.folder.write_stats(METRICS, run), len(run.metrics)
    if trainer.updates >= trainer.total_updates:
        trainer.log(f"Finished after {trainer.updates} updates; this process took {format_seconds(seconds)}.")
    if not medians:
        trainer.log(f"warning: the reports of this run are lost: {trainer.folder.reports} has none. "
                    f"`--eval_ckpt={path}` evaluates its checkpoints.")
        return
    trainer.log(f"Result (median of the last {min(20, reports)} reports, averaged weights, "
                f"{len(trainer.data.test_labels)} test images): accuracy {medians['accuracy']['last20']:.2f} %, ECE "
                f"{medians['ece']['last20']:.4f}")
    trainer.log(f"Next: tensorboard --logdir {path}\n"
                f"      cssl-table {path}\n"
                f"      cssl-report {path} -o report.html")


# Evaluation.

@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Scores of both models of a checkpoint by tag; as text, a table."""

    title: str
    scores: dict[str, float]

    def __str__(self) -> str:
        columns = [(f"{prefix.strip('/')} {metric.title}".strip(), metric, prefix) for prefix in ("", "/raw")
                   for metric in METRICS.values()]
        lines = [self.title, f"{'':<16}" + "".join(f"{title:>14}" for title, *_ in columns)]
        for part in ("train_labeled", "valid", "test"):
            suffix = "" if part == "test" else f"/{part}"
            if f"accuracy{suffix}" in self.scores:
                lines.append(f"{part:<16}" + "".join(
                    f"{self.scores[metric.name + prefix + suffix]:>14.{metric.digits}f}"
                    for _, metric, prefix in columns))
        return "\n".join(lines)


def find_checkpoint(text: str) -> tuple[str, RunFolder | None]:
    """Returns a checkpoint's prefix and its run folder (None if it is not inside one), from a file, folder or run."""
    path = expand("eval_ckpt", text)
    found: list[str] = []
    if path.is_dir():
        run = RunFolder(path.parent if path.name == "tf" else path)
        files = sorted(path.glob("*.index"), key=lambda file: file.stat().st_mtime)  # checkpoints of any other name
        found = run.checkpoints() or [str(file.with_suffix("")) for file in files]
    prefix = found[-1] if found else str(path).removesuffix(".index").removesuffix(".data-00000-of-00001")
    if not Path(prefix + ".index").exists():
        raise UserError(f"No checkpoint at {text}: expected a run folder, its tf folder, or a file such as "
                        "tf/model.ckpt-65536.index.")
    run = RunFolder(Path(prefix).parent.parent)
    return prefix, run if run.args.exists() else None


def stored_config(run: RunFolder, method: type[SSLModel]) -> RunConfig:
    """Reads a run's configuration."""
    try:
        return RunConfig.from_json(method, json.loads(run.args.read_text(encoding="utf-8")))
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{run.args} does not describe a run ({error}). Bring the file back as training wrote it.") \
            from error


def evaluate(config: RunConfig, checkpoint: str, data: SSLData | None = None, network: own.Builder | None = None,
             ) -> Evaluation:
    """Evaluates both models of a checkpoint, by its prefix, on a dataset."""
    data = load(config) if data is None else data
    memory.check(config, data.image_shape, available=MAX_MEMORY)
    model = _build(config, data, network)
    own.describe(config, model, network, None)
    try:
        checkpoint_of(model).read(checkpoint).expect_partial().assert_existing_objects_matched()
    except Exception as error:  # TensorFlow's reader raises a different type for every kind of damage
        reason = str(error).strip().splitlines()[0][:200]
        raise UserError(f"Checkpoint {checkpoint} cannot be read as {config.method.__name__} on {config.data.dataset} "
                        f"({reason}).") from error
    scores, *_ = evaluate_all(Evaluator(model, tf.distribute.get_strategy()), data)
    return Evaluation(f"{checkpoint}: {config.method.__name__} on {config.data.dataset}, "
                      f"{int(model.updates.numpy())} updates", scores)
