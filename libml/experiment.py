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
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import keras
import numpy as np
import tensorflow as tf

import libml.data
from libml import features, networks
from libml.augment import gpu
from libml.augment.spec import parse_augment
from libml.config import OWN, RunConfig, describe
from libml.data import DataFacts, SSLData
from libml.devices import distribute, machine
from libml.errors import OptionError, UserError, check_function, printable
from libml.learn.model import SSLModel
from libml.networks import custom, memory
from libml.networks.applications import is_application
from libml.networks.layers import dtype_policy
from libml.results.evaluate import Evaluator, evaluate_all
from libml.results.metrics import METRICS, per_class_accuracy
from libml.run import Run, abridged, identity
from libml.train import Hook, Trainer
from libml.writing import write_text

if TYPE_CHECKING:
    from libml.networks.custom import Builder

PAPER_KIMG = 65536
SPARED = 0.002  # seconds of an update on a CPU by compiled views, besides those for each pixel


def load(config: RunConfig, data: SSLData | None = None, strategy: tf.distribute.Strategy | None = None) -> SSLData:
    """Returns the images of a run, loaded unless they are at hand, or features of them, with calibration images where
    its method asks for a share of them."""
    if not isinstance(data, SSLData | None):
        raise UserError(f"data is {type(data).__name__}; expected images as cssl.from_arrays or cssl.load returns "
                        "them.")
    options, share = config.data, getattr(config.options, "calibration", 0.0)
    if data is None:
        data = (features.load_file(config) if config.dataset.dataset == "arrays" and options.features else
                libml.data.load(options.dataset, options.data_dir, options.image_size, config.listing))
    data = data if options.mirror else dataclasses.replace(data, mirror=False)
    data = features.embed(config, data, strategy)
    return libml.data.hold_out(data, share)


def facts_of(config: RunConfig, data: SSLData) -> DataFacts:
    return DataFacts.of(data, data.image_statistics() if config.data.whiten or data.copies is not None else None)


def compiles_views(config: RunConfig, image_shape: Sequence[int], strong: int) -> bool:
    """Whether XLA makes the views, `strong` ones of each unlabelled image: on a CPU where that wins time."""
    if config.data.features:  # they are made before
        return False
    if config.scale.views != "auto" or tf.config.list_physical_devices("GPU"):
        return config.scale.views != "kernels"
    pixels = config.options.batch * (1 + config.options.uratio * strong) * image_shape[0] * image_shape[1]
    return config.updates * (SPARED + features.SPARED_BY_PIXEL * pixels) >= features.COMPILING


def build(config: RunConfig, data: SSLData | DataFacts, network: Builder | None = None,
          strong: Callable | None = None) -> SSLModel:
    """Builds network, augmenter and model for data of `load`, for the strategy in whose scope this is called."""
    augmentation, scale, seed = config.augmentation, config.scale, config.training.seed
    data = data if isinstance(data, DataFacts) else facts_of(config, data)
    options = config.options
    if options.p_unlabeled == "labels" and data.label_prior is not None:
        options = dataclasses.replace(options, p_unlabeled=",".join(map(str, data.label_prior)))
    try:
        with dtype_policy(distribute.policy(scale)):
            if network is None:
                net = _build_network(config, data)
            else:
                net = custom.build_network(network, data.num_classes, data.image_shape, seed)
            spec = augmentation.augment
            if augmentation.own_strong and strong is None:  # evaluation makes no views; nor had training CTAugment's
                spec = spec.rpartition(".")[0] + ".x"  # rates
            augmenter = data.augmenter(spec, depth=augmentation.adepth, threshold=augmentation.ath,
                                       decay=augmentation.adecay, cutout=augmentation.cutout,
                                       policies=config.dataset.entry.auto_augment, own_strong=strong)
            model = config.method(net, data.num_classes, options=options, augmenter=augmenter, seed=seed,
                                  total_images=config.total_images, image_statistics=data.image_statistics,
                                  loss_scaling=scale.mixed_precision == "float16", jit=scale.jit,
                                  set_sizes=data.set_sizes, calibration=data.calibration)
    except UserError:
        raise
    except ValueError as error:  # libraries say what they got and what they wanted, in one line
        raise UserError(str(error)) from error
    augmenter.jit_compile = compiles_views(config, data.image_shape, model.uses_unlabeled * model.views_per_image[1])
    return model


def _build_network(config: RunConfig, data: DataFacts) -> keras.Model:
    network = config.network
    if network.own_network:
        raise UserError(f"This run has a network of its own, {network.own_network}: give the function that builds it, "
                        "as network=….")
    named = {name: value for name, value in vars(network).items() if name != "own_network"}
    return networks.build(**named, num_classes=data.num_classes, image_shape=data.image_shape,
                          dropout=getattr(config.options, "dropout", 0.0), sync_bn=config.scale.sync_bn,
                          seed=config.training.seed, input_size=config.data.image_size,
                          recompute=config.scale.recompute)


def train(config: RunConfig, data: SSLData | None = None, *, network: Builder | None = None,
          strong: Callable | None = None, hooks: Sequence[Hook] = (),
          environment: Mapping[str, str] | None = None) -> Run:
    """Trains a run to its end, from wherever its folder left off. Raises Interrupted after SIGTERM or SIGINT.

    Args:
        data: images that the program has at hand, instead of those of `config.data.dataset`.
        network: a function of num_classes and image_shape that returns a Keras classifier from float images in [-1, 1]
            to logits, instead of `config.network`. A run knows it by name, layers, weights and its classes' source.
        strong: the strong augmentation, instead of the one of `config.augmentation`: a function in the graph of uint8
            images [N, H, W, 3] and a seed [2], to uint8 or to floats in [-1, 1]. A run knows it by name and source.
        hooks: called after every report as hook(trainer, report), or Keras callbacks, whose epochs are the reports.
        environment: variables that may describe a cluster (TF_CONFIG, SLURM's); none by default.
    """
    _check(config, data, network, strong, hooks)
    strategy = distribute.create_strategy(config.scale, environment)
    group = distribute.ProcessGroup(strategy)
    with group.watched():
        if group.size > 1:
            fields = config.fields(config.method)
            group.check_same({name: value for name, value in config.values().items()
                              if not fields[name].metadata["local"]})
        distribute.check_jit(config.scale, strategy.num_replicas_in_sync, config.method)
        libml.data.check_batch(config.options.batch, strategy.num_replicas_in_sync)
        with group.errors_stop_all():
            run, facts = _prepare(config, data, network, strong, strategy, group.size)
        group.check_same([run.config.network.own_network, run.config.augmentation.own_strong,
                          run.config.training.own_method, run.data.digest])
        caches = Path((environment or {}).get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        failure = _try_views(config, run.model, caches / "cssl" / "views.json")
        trainer = Trainer(run, strategy, hooks, group)
        with ExitStack() as stack:
            with group.errors_stop_all():
                if trainer.is_chief:  # holds the folder, which from here on describes this run
                    stack.enter_context(run.lock.hold())
                    run.claim(run.config, environment_facts(), facts.to_dict() | identity(run.data))
                _announce(trainer, failure, environment)
            started = time.perf_counter()
            trainer.train()
            if trainer.is_chief:
                _conclude(trainer, time.perf_counter() - started)
        if group.size > 1:  # proof, in every process's output, that all hold the same weights
            print(f"worker {group.rank}: weights sha256 {run.model.fingerprint()}", flush=True)
        return run


def _check(config: RunConfig, data: SSLData | None, network: Builder | None, strong: Callable | None,
           hooks: Sequence[Hook]) -> None:
    """Raises UserError for what would fail at the first report, or go wrong unseen."""
    if not isinstance(config, RunConfig) or not isinstance(data, SSLData | None):
        raise UserError(f"train got {type(config).__name__} and {type(data).__name__}; expected RunConfig.of(Method, …)"
                        " and, if there are any, images as cssl.from_arrays or cssl.load returns them.")
    if not isinstance(hooks, Sequence):
        raise UserError(f"hooks is {type(hooks).__name__}; expected a list of functions and Keras callbacks.")
    for hook in hooks:
        if isinstance(hook, type):
            raise UserError(f"The hook {hook.__name__} is a class; expected an instance of it.")
        if isinstance(hook, keras.callbacks.Callback):
            _check_callback(hook)
        else:
            check_function(hook, "A hook", "trainer", "report")
    if keras.config.image_data_format() != "channels_last" or tf.config.functions_run_eagerly():
        raise UserError("Keras is set to channels_first, or TensorFlow to run functions eagerly; expected channels_last"
                        " and graphs: keras.config.set_image_data_format, tf.config.run_functions_eagerly.")
    if network is None and not config.trusts_onednn and distribute.onednn_is_on():
        arch = config.network.arch
        what = arch if is_application(arch) else f"filters={config.network.filters}"
        raise UserError(f"{what}: oneDNN computes some gradients wrong unless channels are multiples of 16. Set "
                        "TF_ENABLE_ONEDNN_OPTS=0 before TensorFlow is imported, or choose such a number.")
    source = config.data.features or (OWN if data is not None and data.copies is not None else "")
    if source and (network, strong) != (None, None):
        raise UserError(f"features={source}: a network or a strong augmentation of your own is for "
                        "images. Leave one of them out.")
    unused = [name for name in ("recompute", "sync_bn") if network is not None and getattr(config.scale, name)]
    if unused:
        raise OptionError(f"{unused[0]}=True: a network of your own does what you build into it; leave it out.")
    if config.augmentation.own_strong and strong is None:
        name = config.augmentation.own_strong.partition("~")[0]
        raise UserError(f"This run has a strong augmentation of its own, {name}: give it, as strong=….")


def _check_callback(hook: keras.callbacks.Callback) -> None:
    """Raises UserError for what a Keras callback would be asked in vain, or would do to the run."""
    name = f"The hook {type(hook).__name__}"
    for word in ("save_freq", "update_freq"):
        if getattr(hook, word, "epoch") != "epoch":
            raise UserError(f"{name} wants to be called at batches ({word}), which train does not do: its epochs are "
                            "the reports. Leave that out, or use model.fit.")
    own = [vars(hook), *(vars(cls) for cls in type(hook).__mro__ if not cls.__module__.startswith("keras."))]
    for method in ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end"):
        if any(method in part for part in own):  # of loggers that many use, beside what they do at epochs
            warnings.warn(f"{name}: train does not call {method}, as its epochs are the reports.", stacklevel=4)
    if getattr(hook, "restore_best_weights", False) or isinstance(hook, keras.callbacks.BackupAndRestore):
        raise UserError(f"{name} puts other weights into the model than are in the run's checkpoint. Leave "
                        "restore_best_weights and BackupAndRestore out: the same call continues a run, and cssl.open "
                        "opens any of its checkpoints.")


def _prepare(config: RunConfig, data: SSLData | None, network: Builder | None, strong: Callable | None,
             strategy: tf.distribute.Strategy, processes: int) -> tuple[Run, DataFacts]:
    """Returns the run, whose configuration data and custom parts have completed, and the facts of its data."""
    if data is not None:
        config = config.with_data(data)
    data = load(config, data, strategy if processes == 1 else None)
    check_memory = partial(memory.check, config, data.image_shape, machine.usable_memory(), processes=processes,
                           weights_only=bool(tf.config.list_physical_devices("GPU")))
    if network is None:  # of another nothing is known
        check_memory()
    begun = Run(config.folder()).checkpoints()
    facts = facts_of(config, data)
    with strategy.scope():  # a checkpoint has the initial weights; their file may be gone
        model = build(config.replace(weights="none") if begun else config, facts, network, strong)
    if network is None:
        check_memory(model=model)
    config = custom.with_fingerprints(config, model, network, strong).replace(
        own_method=custom.code_of(*custom.own_classes([config.method])))
    run = Run(config.folder(), config=config, data=data, model=model, network=network)
    if config.data.whiten and run.checkpoints() and run.facts_file.exists():  # another version computed other ones
        model.image_statistics = run.facts.image_statistics
        facts = dataclasses.replace(facts, image_statistics=model.image_statistics)
    return run, facts


def commit_of(root: Path) -> str:
    """Returns a folder's commit, with "-dirty" if more than documents has changed since; "unknown" without Git."""
    def git(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True)

    if (root / ".git").exists():
        with suppress(OSError):  # no git here
            # Documents do not count: a series of runs writes its results into them while it goes on.
            changed = git("diff", "--quiet", "HEAD", "--", ".", ":!docs", ":!*.md").returncode == 1
            commit = git("describe", "--always").stdout.strip()
            return (commit or "unknown") + "-dirty" * changed
    return "unknown"


def environment_facts() -> dict:
    return {"commit": commit_of(Path(__file__).parent.parent), "python": platform.python_version(),
            "tensorflow": tf.__version__, "keras": keras.__version__,
            "machine": f"{machine.cpu_facts()[0]}, {os.cpu_count()} cores",
            "devices": [device.name for device in tf.config.list_logical_devices()],
            "tf32": tf.config.experimental.tensor_float_32_execution_enabled(),
            "started": time.strftime("%Y-%m-%d %H:%M:%S"), "command": " ".join(sys.argv)}


def _lacks(model: SSLModel) -> dict[str, str]:
    """Returns what this model lacks of all that an option may need, and why."""
    name = type(model).__name__
    strong = model.uses_unlabeled and model.views_per_image[1] > 0 or model.strong_labeled
    needs = {"CTAugment": (strong and model.augmenter.learns_rates,
                           "it belongs to CTAugment" if strong else f"{name} has no strong views"),
             "alignment": (model.uses_alignment, f"{name} does not align its predictions"),
             "unlabelled images": (model.uses_unlabeled, f"{name} uses no unlabelled images")}
    return {need: reason for need, (met, reason) in needs.items() if not met}


def _try_views(config: RunConfig, model: SSLModel, cache: Path) -> str:
    """Leaves the views to single kernels where XLA cannot compile them; returns why."""
    failure = ""
    if config.scale.views == "auto" and not config.data.features and tf.config.list_physical_devices("GPU"):
        failure = gpu.xla_failure(cache)
        model.augmenter.jit_compile = not failure
    return failure and f" (XLA cannot compile them: {failure}; to try again, --views=xla, or delete {cache})"


def _precision(config: RunConfig) -> str:
    """Returns what there is to say of half precision on these devices, "" if nothing."""
    asked, gpus = config.scale.mixed_precision, tf.config.list_physical_devices("GPU")
    if asked == "auto":
        return f"  precision: {distribute.policy(config.scale)}"
    if asked == "float16" and not gpus:
        return ("warning: CPUs have no fast kernels for float16: an update may take minutes. --mixed_precision=auto is "
                "bfloat16 where this machine is fast at it.")
    if asked == "off" and not gpus and machine.fast_at_bfloat16() and not config.method.needs_float32:
        return "  note: this CPU multiplies bfloat16 several times faster: --mixed_precision=bfloat16"
    return ""


def _gpu_shortage(trainer: Trainer) -> str:
    gpus = map(tf.config.experimental.get_device_details, tf.config.get_visible_devices("GPU"))
    available = machine.gpu_memory({details.get("device_name") for details in gpus})
    if available is None or trainer.run.network is not None:  # of another network nothing is known
        return ""
    return memory.gpu_shortage(trainer.config, trainer.data.image_shape, available, model=trainer.model,
                               replicas=trainer.strategy.num_replicas_in_sync)


def _unusable_cards(environment: Mapping[str, str] | None) -> str:
    hidden = "unknown" if environment is None else environment.get("CUDA_VISIBLE_DEVICES")
    with suppress(OSError, subprocess.SubprocessError):  # a driver that fails: cssl-doctor says so
        return machine.unusable_cards(machine.nvidia_smi(machine.CARDS), len(tf.config.list_physical_devices("GPU")),
                              tf.sysconfig.get_build_info().get("cuda_compute_capabilities", []), hidden)
    return ""


def _announce(trainer: Trainer, failure: str = "", environment: Mapping[str, str] | None = None) -> None:
    model, data, log, config = trainer.model, trainer.data, trainer.log, trainer.run.config
    values = config.values()
    for note in data.notes:
        log(f"warning: {printable(note)}")
    for warning in filter(None, (_unusable_cards(environment), _gpu_shortage(trainer))):
        log(f"warning: {warning}")
    if remark := _precision(config):
        log(remark)
    lacks = _lacks(model)
    for name, field in config.fields(config.method).items():
        if field.metadata["needs"] in lacks and values[name] != field.default:
            log(f"warning: --{name} has no effect: {lacks[field.metadata['needs']]}.")
    name, spec = type(model).__name__, parse_augment(config.augmentation.augment)
    if spec.labeled_strong and not (model.strong_labeled or model.strong_labeled_too):
        log(f"warning: --augment={spec}: the second part has no effect: {name} makes no strong labelled views.")
    if spec.labeled_policy and model.strong_labeled:
        log(f"warning: --augment={spec}: the first part has no effect: {name} trains on strong labelled views.")
    log(f"{name} on {data.name}: {len(data.labeled)} labelled, "
        f"{f'{len(data.calibration)} calibration, ' * bool(len(data.calibration))}{len(data.unlabeled)} unlabelled, "
        f"{data.num_valid} validation, {len(data.test_labels)} test images of {'x'.join(map(str, data.image_shape))}, "
        f"{data.num_classes} classes")
    for remark in data.remarks:
        log(f"  data: {printable(remark)}")
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
    log(f"  network: {name}, {networks.count_weights(model.network):,} weights")
    if trainer.strategy.num_replicas_in_sync > 1:
        by = distribute.communication(config.scale, len(tf.config.list_logical_devices("GPU")))
        log(f"  devices: {trainer.strategy.num_replicas_in_sync} in {trainer.group.size} "
            f"process{'es' * (trainer.group.size > 1)}, communicating by {by}")
    views = "compiled by XLA" if model.augmenter.jit_compile else f"by single kernels, without XLA{failure}"
    if data.copies is not None:
        views = "stored copies" if sum(data.copies) else "the features with noise"
    elif tf.config.list_physical_devices("GPU") and not model.augmenter.jit_compile:
        types = gpu.cpu_only(model.make_views, data.dataset(model).element_spec)
        views += f"; only CPUs have kernels of {', '.join(types)}" * bool(types)
    log(f"  views: {views}")
    log(f"  files: {trainer.run.path}")


def _conclude(trainer: Trainer, seconds: float) -> None:
    """Writes the medians of the last reports, prints the result and what to do next."""
    run, path = trainer.run, shlex.quote(str(trainer.run.path))
    medians, reports = run.write_stats(METRICS), len(run.reports)
    if trainer.updates >= trainer.total_updates:
        trainer.log(f"Finished after {trainer.updates} updates; this process took {timedelta(seconds=int(seconds))}.")
    if not medians:
        trainer.log(f"warning: the reports of this run are lost: {run.report_file} has none. "
                    f"`--eval_ckpt={path}` evaluates its checkpoints.")
        return
    trainer.log(f"Result (median of the last {min(20, reports)} reports, averaged weights, "
                f"{len(trainer.data.test_labels)} test images): accuracy {medians['accuracy']['last20']:.2f} %, ECE "
                f"{medians['ece']['last20']:.4f}")
    config = run.config
    if config.training.baseline and not config.method.uses_all_labels and trainer.updates >= trainer.total_updates:
        from libml.results import baseline  # slow to import

        found = run.arrays("predictions", ("probabilities",))["probabilities"]
        numbers, line = baseline.compare(run.method, found, trainer.data, features.plain_vectors(trainer.data))
        write_text(run.stats / "baseline.json", json.dumps(numbers, indent=1) + "\n")
        what = "the same features" if trainer.data.copies is not None else "pixels"
        trainer.log(f"Does it help? {line} (labels alone: logistic regression on {what}; 95 % interval over the test "
                    "images)")
    trainer.log(f"Next: tensorboard --logdir {path}\n"
                f"      cssl-table {path}\n"
                f"      cssl-report {path} -o report.html")


def check_fits(facts: DataFacts, data: SSLData) -> None:
    """Raises UserError if images or classes are not those that a model was trained for; unnamed ones may be any."""
    if data.image_shape != facts.image_shape:
        raise UserError(f"{data.name} has images of {data.image_shape}, the model was trained on images of "
                        f"{facts.image_shape}: use images of that size.")
    unnamed = [str(number) for number in range(facts.num_classes)]
    same_names = sorted(data.class_names) == sorted(facts.class_names)  # in another order: other classes
    if data.num_classes != facts.num_classes or data.class_names != facts.class_names and (
            same_names or unnamed not in (data.class_names, facts.class_names)):
        raise UserError(f"The classes of {data.name} do not match those of the model: {abridged(data.class_names)} "
                        f"instead of {abridged(facts.class_names)}. Use the classes that it was trained for.")


def restore(run: Run, config: RunConfig | None = None) -> SSLModel:
    """Rebuilds the model of a run, or of its configuration with some changes, and reads its checkpoint."""
    config, facts = config or run.config, run.facts
    memory.check(config, facts.image_shape, machine.usable_memory(), weights_only=True)
    model = build(config.replace(weights="none"), facts, run.network)  # all weights are in the checkpoint
    custom.with_fingerprints(config, model, run.network, None)
    try:
        checkpoint = tf.train.Checkpoint(**model.checkpoint_items())
        checkpoint.read(run.checkpoint).expect_partial().assert_existing_objects_matched()
    except Exception as error:  # TensorFlow's reader raises a different type for every kind of damage
        reason = str(error).strip().splitlines()[0][:200]
        raise UserError(f"Checkpoint {run.checkpoint} cannot be read as {config.method.__name__} on "
                        f"{config.data.dataset} ({reason}).") from error
    return model


def evaluate(run: Run, data: SSLData | None = None) -> dict[str, float]:
    data = run.data if data is None else load(run.config, data)
    check_fits(run.facts, data)
    scores, test = evaluate_all(Evaluator(run.model, tf.distribute.get_strategy()), data)
    for name, value in zip(data.class_names, per_class_accuracy(test, data.test_labels), strict=True):
        if not np.isnan(value):
            scores[f"accuracy/class/{name}"] = 100 * float(value)
    return scores
