"""The command line: translates flags to a RunConfig. The only place that defines flags and reads the environment."""
from __future__ import annotations

import dataclasses
import inspect
import os
import signal
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

import cssl
from cssl.program import exit_on_user_error
from libml.config import RunConfig, describe
from libml.data.names import DATASETS
from libml.errors import OptionError, UserError

if TYPE_CHECKING:
    from libml.learn.model import SSLModel

TRAIN_STEPS = "length in updates, instead of train_kimg"
# What --help shows first, and how wide it is: all flags of a method fit two screens.
EXAMPLES = {"--dataset=digits.1@40-1": "built in",
            "--dataset=cifar10.3@40-1": "the paper's data",
            "--dataset=folder:my_images": "yours",
            "--dataset=folder:my_images --features=keras:MobileNetV2": "minutes"}
FIRST = ("dataset", "train_dir", "train_kimg", "train_steps", "features", "arch", "weights", "augment", "seed", "rerun",
         "mixed_precision", "eval_ckpt")
WIDTH, INDENT = 118, 32


def main(method: type[SSLModel], *, network: Callable | None = None, strong: Callable | None = None) -> None:
    """The program of a method, with a network or a strong augmentation of its own if `train` is to take them."""
    exit_on_user_error(lambda: run(method, sys.argv, network, strong))


def console(name: str | None = None) -> None:
    """Runs a method by name; as an installed command, by the name of the command."""
    main(cssl.method(name or Path(sys.argv[0]).stem.removeprefix("cssl-").replace("-", "_")))


def default_data_dir() -> Path:
    chosen = os.environ.get("ML_DATA") or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    return Path(os.path.expanduser(chosen))


def start_tensorflow(onednn: bool = True) -> None:
    """Imports TensorFlow with oneDNN on (unless the user says otherwise, or it is not to be) and without its banner.

    TensorFlow reads its environment once, when it is imported, and leaves oneDNN off on CPUs without AVX-512. Its
    start-up messages go straight to file descriptor 2, where they would bury ours; they are shown if the import fails.
    """
    if not onednn:
        os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
    if os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3") == "0" or "tensorflow" in sys.modules:
        return  # the user wants to see everything, or has seen it
    if sys.stderr is None:  # closed: there is nothing to bury
        return
    sys.stderr.flush()
    stderr = os.dup(2)
    hidden = {"sklearn", "matplotlib"} - sys.modules.keys()  # Keras takes a second for them, and needs neither
    try:
        place = tempfile.TemporaryFile()
    except OSError:  # a machine without a place for it
        place = open(os.devnull, "w+b")  # noqa: SIM115 - closed below
    with place as banner:
        os.dup2(banner.fileno(), 2)
        sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
        try:
            import keras  # noqa: F401
            import tensorflow as tf

            tf.config.list_physical_devices()  # drivers complain on first use
        except Exception:
            banner.seek(0)
            os.write(stderr, banner.read())
            raise
        finally:
            for package in hidden:
                del sys.modules[package]
            os.dup2(stderr, 2)
            os.close(stderr)


def define_flags(method: type[SSLModel]) -> flags.FlagValues:
    values = flags.FlagValues()
    define: dict[type, Callable] = {bool: flags.DEFINE_boolean, int: flags.DEFINE_integer, float: flags.DEFINE_float}
    for name, field in RunConfig.fields(method).items():
        if not field.metadata["flag"]:
            continue
        text, choices = field.metadata["help"], field.metadata["choices"]
        if choices and not field.metadata["also"]:
            flags.DEFINE_enum(name, str(field.default), choices, text, flag_values=values)
        else:
            define.get(type(field.default), flags.DEFINE_string)(name, field.default, text, flag_values=values)
    flags.DEFINE_integer("train_steps", None, TRAIN_STEPS, flag_values=values)
    flags.DEFINE_string("flagfile", "", "file with one flag a line", flag_values=values)
    return values


def help_text(method: type[SSLModel]) -> str:
    """Returns what `--help` prints: examples, the flags that people use first, and all others by group."""
    module = inspect.getmodule(method)
    spec = getattr(module, "__spec__", None)  # none of a file that Python was given
    program = f"python {f'-m {spec.name}' if spec else Path(sys.argv[0]).name}"
    lines = [inspect.getdoc(module) or "", ""]
    width = max(map(len, EXAMPLES))
    lines += [f"    {program} {example:{width}}  # {purpose}" for example, purpose in EXAMPLES.items()
              if not (method.needs_pixels and "--features" in example)]
    shown = {name: field for name, field in RunConfig.fields(method).items() if field.metadata["flag"]}
    groups = {"most used": FIRST} | {title: tuple(describe(kind)) for title, kind in RunConfig.groups(method).items()}
    for title, names in groups.items():
        lines += ["", f"{title}:"]
        for name in names:
            if name == "train_steps":
                lines += _flag("--train_steps", TRAIN_STEPS)
            elif name in shown:
                lines += _described(name, shown.pop(name))
    presets = {**method.presets,
               **{name: {k: v for k, v in {**dataset.presets, **method.presets.get(name, {})}.items()
                         if k in RunConfig.fields(method)} for name, dataset in DATASETS.items()}}
    lines += ["", *textwrap.wrap("presets, where a flag is not given: " + "; ".join(
        f"{name}: {', '.join(f'{k} {v}' for k, v in preset.items())}" for name, preset in presets.items() if preset),
        WIDTH)]
    return "\n".join([*lines, "--flagfile=FILE reads flags from a file, one a line; scripts/configs has the paper's."])


def _described(name: str, field: dataclasses.Field) -> list[str]:
    """The lines about one flag: with its default, or as a switch, and its choices."""
    text, choices = field.metadata["help"], [*field.metadata["choices"], *filter(None, [field.metadata["also"]])]
    if isinstance(field.default, bool):
        return _flag(f"--[no]{name}" if field.default else f"--{name}", f"on: {text}" if field.default else text)
    default = f"{field.default:g}" if isinstance(field.default, float) else field.default
    return _flag(f"--{name}={default}", f"{'|'.join(choices)}: {text}" if choices else text)


def _flag(start: str, text: str) -> list[str]:
    first, *more = textwrap.wrap(text, WIDTH - INDENT, break_on_hyphens=False) or [""]
    return [f"  {start:<{INDENT - 3}} {first}", *(" " * INDENT + line for line in more)]


def configuration(method: type[SSLModel], argv: list[str]) -> RunConfig:
    values = define_flags(method)
    try:
        rest = values(argv)
    except (flags.Error, ValueError, OSError) as error:
        message = str(error).strip().splitlines()[-1].removeprefix("ERROR:: ")
        raise UserError(f"{message} (--help lists the flags)") from error
    if len(rest) > 1:
        raise UserError(f"Unexpected argument {rest[1]!r}; flags are written --name=value (--help lists them).")
    names = [name for name in (*RunConfig.fields(method), "train_steps") if name in values]
    given = {name: values[name].value for name in names if values[name].present}
    given["data_dir"] = given.get("data_dir") or str(default_data_dir())
    return RunConfig.of(method, **given)


def run(method: type[SSLModel], argv: list[str], network: Callable | None = None,
        strong: Callable | None = None) -> int:
    if any(argument in ("--help", "-h", "-help", "--helpfull") for argument in argv[1:]):
        print(help_text(method))
        return 0
    config = configuration(method, argv)
    if "eval_ckpt" in config.given and not config.data.eval_ckpt:
        raise OptionError("eval_ckpt is empty: name a run or a checkpoint, or leave it out to train.")
    start_tensorflow(config.trusts_onednn)
    if config.data.eval_ckpt:
        return evaluate(config, network)
    from libml import experiment
    from libml.train import Interrupted

    if hasattr(signal, "SIGHUP"):  # a closed terminal does not end training; train.log goes on
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        experiment.train(config, network=network, strong=strong, environment=os.environ)
    except Interrupted as interrupted:
        return 128 + interrupted.args[0]
    return 0


def evaluate(config: RunConfig, network: Callable | None = None) -> int:
    """Prints the scores of both models of a checkpoint; the run's own configuration describes the model."""
    from libml import experiment
    from libml.results.evaluate import table_of_scores
    from libml.run import open_run

    run = open_run(config.data.eval_ckpt, data_dir=config.data.data_dir, network=network, method=lambda name: (
        config.method if config.method.__name__ == name else cssl.method(name)))
    stored, asked = run.config.values(), config.values()
    for option in sorted(config.given & set(stored) - {"dataset"}):
        if config.fields(run.config.method)[option].metadata["fixed"] and stored[option] != asked[option]:
            raise UserError(f"--{option}={asked[option]} contradicts {run.path}, which was trained with {option}="
                            f"{stored[option]}: leave it out.")
    if "dataset" in config.given:  # other images for the same network, or the run's own as they are now
        run.data = experiment.load(run.config.replace(dataset=config.data.dataset))
    scores, updates = run.evaluate(), int(run.model.updates.numpy())
    print(table_of_scores(f"{run.checkpoint}: {run.method} on {run.data.name}, {updates} updates", scores, run.data))
    return 0
