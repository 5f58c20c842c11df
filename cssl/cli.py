"""The command line: the only place that defines flags and reads the environment."""
import importlib
import inspect
import json
import os
import pkgutil
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path


def _import_tensorflow() -> None:
    """Imports TensorFlow with oneDNN on (unless the user says otherwise) and without its banner.

    TensorFlow reads its environment once, when it is imported, and leaves oneDNN off on CPUs without AVX-512. Its
    start-up messages go straight to file descriptor 2, where they would bury ours; they are shown if the import fails.
    """
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
    if os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3") == "0":
        return  # the user wants to see everything
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as banner:
        os.dup2(banner.fileno(), 2)
        try:
            import tensorflow as tf

            tf.config.list_physical_devices()  # drivers complain on first use
        except BaseException:
            banner.seek(0)
            os.write(stderr, banner.read())
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


_import_tensorflow()

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from absl import flags  # noqa: E402

from libml import distribute, models, paper, results  # noqa: E402
from libml.augment import Augmenter, parse_augment  # noqa: E402
from libml.data import GRAMMAR, SSLData, check_batch, load, parse_name  # noqa: E402
from libml.distribute import ScaleOptions  # noqa: E402
from libml.errors import UserError  # noqa: E402
from libml.options import describe, option  # noqa: E402
from libml.ssl import SSLModel  # noqa: E402
from libml.train import (  # noqa: E402
    Evaluator,
    Interrupted,
    Trainer,
    TrainOptions,
    checkpoint_of,
    evaluate,
    format_seconds,
)


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """What to train on and where files go."""

    dataset: str = option("cifar10.1@4000-5000", f"dataset name: {GRAMMAR}")
    data_dir: str = option("", "folder of the TFDS datasets; default $ML_DATA, else what TFDS uses")
    train_dir: str = option("./experiments", "folder for runs")
    rerun: str = option("", "name of a repetition: a folder between train_dir and the run")
    image_size: int = option(32, "side to which the images of folder datasets are resized")
    whiten: bool = option(False, "normalise images by the training images' mean and standard deviation per channel")
    eval_ckpt: str = option("", "evaluate this checkpoint (file, folder or run) instead of training")


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """The network."""

    arch: str = option("resnet", "network", choices=tuple(models.ARCHITECTURES))
    filters: int = option(32, "filters of the first stage: 32 is WRN-28-2, 128 WRN-28-8")
    repeat: int = option(4, "residual blocks per stage")
    scales: int = option(0, "stages, each at half the resolution; 0: ceil(log2(width)) - 2")
    bn_momentum: float = option(0.999, "momentum of batch normalisation's moving statistics")


@dataclass(frozen=True, kw_only=True)
class AugmentOptions:
    """Augmentation."""

    augment: str = option("d.d.d", "labelled.weak.strong; weak: d default, m mirror, x none; strong: d CTAugment, ra, "
                                   "rac, r<N>_<M>_<C>, x none")
    adepth: int = option(2, "CTAugment: operations per image")
    ath: float = option(0.80, "CTAugment: bins whose relative rate is lower are not drawn")
    adecay: float = option(0.99, "CTAugment: decay of the rates")


GROUPS = {"data": DataOptions, "network": NetworkOptions, "augmentation": AugmentOptions, "training": TrainOptions,
          "scale": ScaleOptions}

# What a dataset changes where the user said nothing. Digits: a small net and fast averages, minutes on a CPU.
PRESETS = {
    "cifar100": {"filters": 128, "wd": 0.001},
    "digits": {"filters": 16, "repeat": 1, "scales": 3, "batch": 32, "ema": 0.98, "bn_momentum": 0.98,
               "train_kimg": 30.0, "report_kimg": 0.5, "save_kimg": 5.0, "keep_ckpt": 2,
               "warmup_kimg": 4.0},
}

WIDTHS = {"digits": 16, "stl10": 96}  # of images that are not 32 pixels wide

# Always part of a run folder's name, as in the original; everything else appears where it differs from its default.
NAMED = ("alpha_bound", "arch", "batch", "conf_p", "confidence", "filters", "lr", "repeat", "scales", "uncertainty_p",
         "uratio", "wd", "wu")
# Not part of what is computed: a run may continue with other values.
FREE = results.CIRCUMSTANCES | {"train_kimg"}

STOPPED = (130, 143)  # exit codes after SIGINT and SIGTERM: the state is saved, the same command continues


def default_data_dir() -> Path:
    """Returns $ML_DATA, else what TFDS itself would use."""
    chosen = os.environ.get("ML_DATA") or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    return Path(chosen).expanduser()


def guarded(main: Callable[[], int | None]) -> None:
    """Runs a program's main function; a UserError becomes one line on stderr and exit code 2."""
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def run_program(command: list[str], **options) -> int:
    """Runs a program to its end and returns its exit code; a signal to this one stops that one, which then saves."""
    process = None
    previous = {signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: None),  # a terminal sends it to both
                signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: process and process.terminate())}
    try:
        process = subprocess.Popen(command, **options)
        return process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def method_modules() -> list[str]:
    """Returns the names of the method modules: every module of the package but this one."""
    return sorted(info.name for info in pkgutil.iter_modules([str(Path(__file__).parent)]) if info.name != "cli")


def method_class(module: str) -> type[SSLModel]:
    """Returns the method that a module of this package defines; those it imports, to build on, do not count."""
    name = f"cssl.{module}"
    members = vars(importlib.import_module(name)).values()
    return next(m for m in members if inspect.isclass(m) and issubclass(m, SSLModel) and m.__module__ == name)


def console(module: str | None = None) -> None:
    """Runs a method by name; as an installed command, by the name of the command."""
    main(method_class(module or Path(sys.argv[0]).stem.removeprefix("cssl-").replace("-", "_")))


def main(method: type[SSLModel]) -> None:
    """The program: flags to objects to training."""
    guarded(lambda: _main(method, sys.argv))


# Flags.

def option_groups(method: type[SSLModel]) -> dict[str, type]:
    """Returns the option classes by the title of their group, the method's own first."""
    return {f"{method.__name__} (symbols of the paper)": method.Options, **GROUPS}


def default_config(method: type[SSLModel]) -> dict:
    """Returns the configuration without flags and presets."""
    return {name: field.default for options in option_groups(method).values()
            for name, field in describe(options).items()}


def define_flags(method: type[SSLModel]) -> flags.FlagValues:
    """Derives the flags of a method from its options."""
    values = flags.FlagValues()
    define = {bool: flags.DEFINE_boolean, int: flags.DEFINE_integer, float: flags.DEFINE_float}
    for options in option_groups(method).values():
        for name, field in describe(options).items():
            text, choices = field.metadata["help"], field.metadata["choices"]
            if choices:
                flags.DEFINE_enum(name, field.default, choices, text, flag_values=values)
            else:
                define.get(type(field.default), flags.DEFINE_string)(name, field.default, text, flag_values=values)
    flags.DEFINE_integer("train_steps", None, "length in updates, instead of train_kimg", flag_values=values)
    return values


def help_text(method: type[SSLModel]) -> str:
    """Returns the grouped list of flags with defaults."""
    lines = [inspect.getdoc(inspect.getmodule(method)) or "", ""]
    for title, options in option_groups(method).items():
        lines.append(f"{title}:")
        for name, field in describe(options).items():
            choices = f" ({'|'.join(field.metadata['choices'])})" if field.metadata["choices"] else ""
            default = "" if field.default == "" else f" [{field.default}]"
            lines.append(f"  --{name}{choices}{default}\n      {field.metadata['help']}")
        if options is TrainOptions:
            lines.append("  --train_steps\n      length in updates, instead of train_kimg")
        lines.append("")
    by_labels = {"any": method.presets(None), "40 labels": method.presets(40)}
    lines.append("Presets, where a flag is not given: " + "; ".join(
        f"{name}: {', '.join(f'{k} {v}' for k, v in preset.items())}"
        for name, preset in (by_labels | PRESETS).items() if preset))
    return "\n".join(lines)


def parse(method: type[SSLModel], argv: list[str]) -> tuple[dict, dict]:
    """Returns the resolved configuration, flat, and what a preset contributed to it."""
    values = define_flags(method)
    try:
        rest = values(argv)
    except flags.Error as error:
        message = str(error).strip().splitlines()[-1]
        raise UserError(f"{message} (--help lists the flags)") from error
    if len(rest) > 1:
        raise UserError(f"Unexpected argument {rest[1]!r}; flags are written --name=value (--help lists them).")
    config = {name: values[name].value for name in default_config(method)}
    given = {name for name in config if values[name].present}
    dataset = parse_name(config["dataset"])
    if method.uses_all_labels:
        dataset = replace(dataset, labels=None)
        config["dataset"] = str(dataset)
    by_dataset = PRESETS.get(dataset.dataset, {})
    if method.decoupled_weight_decay:  # another scale than that of the L2 penalty
        by_dataset = {name: value for name, value in by_dataset.items() if name != "wd"}
    preset = {name: value for name, value in {**method.presets(dataset.labels), **by_dataset}.items()
              if name in config and name not in given and not (name == "train_kimg" and values["train_steps"].present)}
    config |= preset
    if values["train_steps"].present:
        if "train_kimg" in given:
            raise UserError("--train_steps and --train_kimg both say how long to train; give one of them.")
        config["train_kimg"] = values["train_steps"].value * config["batch"] / 1024
    config["data_dir"] = config["data_dir"] or str(default_data_dir())
    width = WIDTHS.get(dataset.dataset, config["image_size"] if dataset.dataset.startswith("folder:") else 32)
    config["scales"] = config["scales"] or max(1, models.default_scales(width))
    _check(method, config)
    return config, preset


def _check(method: type[SSLModel], config: dict) -> None:
    positive = ("batch", "uratio", "filters", "repeat", "train_kimg", "report_kimg", "save_kimg", "keep_ckpt", "lr",
                "K", "image_size", "adepth", "T", "temperature", "mc_passes")
    for name in positive:
        if config.get(name, 1) <= 0:
            raise UserError(f"--{name}={config[name]}: expected a positive number.")
    for name in ("confidence", "conf_p", "alpha_bound", "ema", "bn_momentum", "ath", "adecay", "uncertainty_p",
                 "threshold", "warmup_pos"):
        if not 0 <= config.get(name, 0) <= 1:
            raise UserError(f"--{name}={config[name]}: expected a number from 0 to 1.")
    for name in ("wd", "wu", "schedule_kimg", "scales", "seed", "we", "consistency_weight", "vat", "vat_eps",
                 "entmin_weight", "beta", "w_match", "w_kl", "w_rot", "warmup_kimg"):
        if config.get(name, 0) < 0:
            raise UserError(f"--{name}={config[name]}: expected 0 or more.")
    if 0 < config["schedule_kimg"] < config["train_kimg"]:
        raise UserError(f"--schedule_kimg={config['schedule_kimg']} is shorter than --train_kimg="
                        f"{config['train_kimg']}: the cosine would end, and turn negative, before the run does.")
    if method.needs_float32 and config["mixed_precision"] != "off":
        raise UserError(f"--mixed_precision={config['mixed_precision']}: {method.__name__} needs changes of a pixel "
                        "that half precision rounds away; leave it off.")
    parse_augment(config["augment"])


# Objects.

def options_of(kind: type, config: dict):
    """Builds an options object from the flat configuration."""
    return kind(**{name: config[name] for name in describe(kind)})


def build_model(method: type[SSLModel], config: dict, data: SSLData) -> SSLModel:
    """Builds network, augmenter and model from the flat configuration."""
    options = options_of(method.Options, config)
    statistics = None
    if config["whiten"]:
        pixels = np.asarray(data.images[data.unlabeled[:50_000]], np.float32) / 127.5 - 1
        statistics = pixels.mean((0, 1, 2)), pixels.std((0, 1, 2))
    # Layers take the policy that holds when they are created.
    keras.config.set_dtype_policy(distribute.POLICIES[config["mixed_precision"]])
    try:
        network = models.build(config["arch"], num_classes=data.num_classes, image_shape=data.image_shape,
                               filters=config["filters"], repeat=config["repeat"], scales=config["scales"],
                               dropout=getattr(options, "dropout", 0.0), bn_momentum=config["bn_momentum"],
                               sync_bn=config["sync_bn"], seed=config["seed"])
        # Compiled views pay off where they keep a GPU busy; on a CPU the network's time dwarfs what they save.
        augmenter = Augmenter(config["augment"], image_shape=data.image_shape, mirror=data.mirror, shift=data.shift,
                              depth=config["adepth"], threshold=config["ath"], decay=config["adecay"],
                              jit_compile=bool(tf.config.list_physical_devices("GPU")))
        return method(network, data.num_classes, options=options, augmenter=augmenter, seed=config["seed"],
                      total_images=options_of(TrainOptions, config).total_images, image_statistics=statistics,
                      loss_scaling=config["mixed_precision"] == "float16", jit=config["jit"])
    except UserError:
        raise
    except ValueError as error:  # libraries say what they got and what they wanted, in one line
        raise UserError(str(error)) from error


def run_folder(method: type[SSLModel], config: dict) -> Path:
    """Returns the folder of a run, laid out as the original's."""
    name = parse_name(config["dataset"])
    spec = parse_augment(config["augment"])
    dataset = name.dataset.replace(os.sep, "_")
    labels = "all" if name.labels is None else name.labels
    middle = (f"CTAugment_depth{config['adepth']}_th{config['ath']:.2f}_decay{config['adecay']:.3f}"
              if spec.strong == "d" else f"Augment_{spec.strong}")
    defaults = default_config(method)
    skip = {*FREE, *describe(AugmentOptions), "dataset", "report_kimg"}
    parts = sorted(f"{n}{v}" for n, v in config.items()
                   if n in NAMED or n in defaults and n not in skip and v != defaults[n])
    return (Path(config["train_dir"]).expanduser() / config["rerun"] /
            f"{dataset}.{config['augment']}.{name.seed}@{labels}-{name.valid}" / middle /
            "_".join([method.__name__, *parts]).replace(os.sep, "_")[:250])


def differences(found: dict, wanted: dict) -> dict[str, tuple]:
    """Returns what two configurations compute differently: name -> (found, wanted)."""
    found, wanted = ({**config, "schedule_kimg": paper.horizon(config)} for config in (found, wanted))
    return {name: (found.get(name), wanted.get(name)) for name in sorted({*found, *wanted} - {*FREE})
            if found.get(name) != wanted.get(name)}


def finished_run(module: str, flags: list[str]) -> results.Run | None:
    """Returns the run that a method's command makes, if it is on disk and has reached its end."""
    method = method_class(module)
    config, _ = parse(method, [module, *flags])
    folder = run_folder(method, config)
    if not (folder / "args" / "args.json").exists():
        return None
    run = results.read_run(folder)
    wanted = {"method": method.__name__, **config}
    return run if not differences(run.config, wanted) and replace(run, config=wanted).finished else None


def claim_folder(folder: Path, method: type[SSLModel], config: dict) -> None:
    """Writes the configuration into a new run folder; refuses a folder that holds another configuration."""
    path = folder / "args" / "args.json"
    wanted = {"method": method.__name__, **config}
    if path.exists():
        try:
            found = json.loads(path.read_text())
        except ValueError as error:
            raise UserError(f"{path} is not readable ({error}). Move {folder} away to start anew.") from error
        for name, (here, there) in differences(found, wanted).items():
            advice = "Use the same value"
            if name == "schedule_kimg":
                advice = ("The learning rate's cosine spans the first length of a run; one that is to be lengthened "
                          "needs its final length as --schedule_kimg from the start. Use the same length")
            raise UserError(f"{folder} holds a run with {name}={here}, this command says {name}={there}. {advice}, or "
                            "another --train_dir or --rerun.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        results.write_text(path, json.dumps(wanted, indent=1))
        results.write_text(folder / "args" / "environment.json", json.dumps(environment(), indent=1))
    except OSError as error:
        raise UserError(f"Cannot write to the run folder {folder} ({error.strerror}). Name a writable --train_dir.") \
            from error


def environment() -> dict:
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


# The program.

def _main(method: type[SSLModel], argv: list[str]) -> int:
    if any(argument in ("--help", "-h", "-help", "--helpfull") for argument in argv[1:]):
        print(help_text(method))
        return 0
    config, preset = parse(method, argv)
    if config["eval_ckpt"]:
        return evaluate_checkpoint(method, config)
    scale = options_of(ScaleOptions, config)
    strategy = distribute.create_strategy(scale, distribute.find_cluster(scale.strategy, os.environ))
    with distribute.watch(strategy):
        distribute.check_jit(scale, strategy.num_replicas_in_sync)
        check_batch(config["batch"], strategy.num_replicas_in_sync)
        distribute.check_same(strategy, {k: v for k, v in config.items() if k not in ("data_dir", "train_dir")})
        return train(method, config, preset, strategy)


def train(method: type[SSLModel], config: dict, preset: dict, strategy: tf.distribute.Strategy) -> int:
    """Trains from the flat configuration; returns the exit code."""
    is_chief = distribute.worker_index(strategy) == 0
    folder = run_folder(method, config)
    with distribute.Council(strategy).together():
        data = load(config["dataset"], config["data_dir"], config["image_size"])
        with strategy.scope():
            model = build_model(method, config, data)
        if is_chief:
            claim_folder(folder, method, config)
    trainer = Trainer(model, data, options_of(TrainOptions, config), folder, strategy, is_chief)
    announce(trainer, config, preset)
    started = time.perf_counter()
    try:
        result = trainer.run()
    except Interrupted as interrupted:
        return 128 + interrupted.signum
    if is_chief:
        conclude(trainer, result, time.perf_counter() - started)
    if distribute.worker_count(strategy) > 1:  # proof, in every process's output, that all hold the same weights
        print(f"worker {distribute.worker_index(strategy)}: weights sha256 {model.fingerprint()}", flush=True)
    return 0


def ignored_flags(model: SSLModel) -> dict[str, str]:
    """Returns the flags that every method has but this model does not use, and why."""
    name, strong = type(model).__name__, model.uses_unlabeled and model.views_per_image[1] > 0
    ignored = {}
    if not model.augmenter.uses_probe or not strong:
        reason = f"{name} has no strong views" if not strong else "it belongs to CTAugment"
        ignored |= dict.fromkeys(("adepth", "ath", "adecay"), reason)
    if not model.uses_alignment:
        ignored["p_unlabeled"] = f"{name} does not align its predictions"
    if not model.uses_unlabeled:
        ignored |= dict.fromkeys(("uratio", "wu", "K"), f"{name} uses no unlabelled images")
    return ignored


def announce(trainer: Trainer, config: dict, preset: dict) -> None:
    """Prints the resolved configuration in plain units, the network's size, and where files go."""
    model, data = trainer.model, trainer.data
    for note in data.notes:
        trainer.say(f"warning: {note}")
    defaults = default_config(type(model))
    for name, reason in ignored_flags(model).items():
        if config.get(name) != defaults.get(name):
            trainer.say(f"warning: --{name} has no effect: {reason}.")
    trainer.say(f"{type(model).__name__} on {data.name}: {len(data.labeled)} labelled, {len(data.unlabeled)} "
                f"unlabelled, {data.num_valid} validation, {len(data.test_labels)} test images of "
                f"{'x'.join(map(str, data.image_shape))}, {data.num_classes} classes")
    for title, options in option_groups(type(model)).items():
        shown = [f"{name}={config[name]}{' (preset)' if name in preset else ''}" for name in describe(options)
                 if config[name] != ""]
        trainer.say(f"  {title.split(' (')[0]}: {', '.join(shown)}")
    images = trainer.total_updates * trainer.batch
    unlabeled = ""
    if trainer.uratio:
        unlabeled = f", {images * trainer.uratio / len(data.unlabeled):.1f} epochs of the unlabelled ones"
    trainer.say(f"  length: {images / 1024:.12g} kimg = {images} labelled images = {trainer.total_updates} updates = "
                f"{images / len(data.labeled):.1f} epochs of the labelled images{unlabeled}; "
                f"a report every {trainer.report_updates} updates")
    trainer.say(f"  network: {config['arch']}, {models.count_weights(model.network):,} weights")
    trainer.say(f"  files: {trainer.folder}")


def conclude(trainer: Trainer, result: dict, seconds: float) -> None:
    """Prints the result and what to do next."""
    results.write_stats(results.read_run(trainer.folder))
    reports = len(results.read_run(trainer.folder).metrics)
    trainer.say(f"Finished after {trainer.total_updates} updates; this process took {format_seconds(seconds)}.")
    trainer.say(f"Result (median of the last {min(20, reports)} reports, averaged weights, "
                f"{len(trainer.data.test_labels)} test images):"
                f" accuracy {result['accuracy']['last20']:.2f} %, ECE {result['ece']['last20']:.4f}")
    trainer.say(f"Next: tensorboard --logdir {trainer.folder}\n"
                f"      python scripts/accuracy_table.py {trainer.folder}\n"
                f"      python scripts/report.py {trainer.folder} -o report.html")


def find_checkpoint(text: str) -> tuple[str, Path | None]:
    """Returns a checkpoint's prefix and its run folder (None if it is not inside one), from a file, folder or run."""
    path = Path(text).expanduser()
    prefix = tf.train.latest_checkpoint(path) or tf.train.latest_checkpoint(path / "tf")
    if prefix is None:
        prefix = str(path).removesuffix(".index").removesuffix(".data-00000-of-00001")
        if not Path(prefix + ".index").exists():
            raise UserError(f"No checkpoint at {text}: expected a run folder, its tf folder, or a file such as "
                            f"tf/model.ckpt-65536.index.")
    run = Path(prefix).parent.parent
    return prefix, run if (run / "args" / "args.json").exists() else None


def evaluate_checkpoint(method: type[SSLModel], config: dict) -> int:
    """Prints accuracy and ECE of both models of a checkpoint; the run's own configuration describes the model."""
    prefix, run = find_checkpoint(config["eval_ckpt"])
    if run is not None:
        stored = results.read_run(run)
        methods = {m.__name__: m for m in map(method_class, method_modules())}
        if stored.method not in methods:
            raise UserError(f"{run / 'args' / 'args.json'} names no method of this program ({stored.method}).")
        method, config = methods[stored.method], {**config, **stored.config, "data_dir": config["data_dir"]}
    data = load(config["dataset"], config["data_dir"], config["image_size"])
    model = build_model(method, config, data)
    try:
        checkpoint_of(model).read(prefix).expect_partial().assert_existing_objects_matched()
    except Exception as error:  # TensorFlow's reader raises a different type for every kind of damage
        reason = str(error).strip().splitlines()[0][:200]
        raise UserError(f"Checkpoint {prefix} cannot be read as {method.__name__} on {config['dataset']} ({reason}).") \
            from error
    scores, *_ = evaluate(Evaluator(model, tf.distribute.get_strategy()), data)
    print(f"{prefix}: {method.__name__} on {config['dataset']}, {int(model.updates.numpy())} updates")
    print(f"{'':<16}{'accuracy':>10}{'ECE':>9}{'raw accuracy':>15}{'raw ECE':>10}")
    for part in ("train_labeled", "valid", "test"):
        suffix = "" if part == "test" else f"/{part}"
        if f"accuracy{suffix}" in scores:
            print(f"{part:<16}{scores[f'accuracy{suffix}']:>10.2f}{scores[f'ece{suffix}']:>9.4f}"
                  f"{scores[f'accuracy/raw{suffix}']:>15.2f}{scores[f'ece/raw{suffix}']:>10.4f}")
    return 0
