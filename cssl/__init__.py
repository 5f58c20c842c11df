"""Semi-supervised image classification: one module per method, runs by `RunConfig` and `train`. Cheap to import.

    from cssl import CSSL, RunConfig, train
    result = train(RunConfig.of(CSSL, dataset="digits.1@40-1"))
"""
import functools
import importlib
import re
import sys
from pathlib import Path
from typing import Any

import libml

__version__ = "0.2.0"


def _check_libml() -> None:
    """FixMatch's README puts its clone, which has a package libml too, on PYTHONPATH: say so rather than fail later."""
    ours, found = Path(__file__).resolve().parent.parent / "libml", Path(libml.__path__[0]).resolve()
    if found != ours:
        message = (f"Another package named libml, in {found.parent}, hides the one of this program, in {ours.parent}. "
                   "Take that folder off PYTHONPATH and start again.")
        program = Path(sys.argv[0])
        if program.name.startswith(("-m", "cssl")) or program.resolve().parent == ours.parent / "scripts":
            print(f"error: {message}", file=sys.stderr)
            raise SystemExit(2)
        raise ImportError(message)


_check_libml()

from libml.errors import UserError  # noqa: E402 - of ours
from libml.lazy import exports  # noqa: E402


@functools.cache
def methods() -> dict[str, str]:
    """Returns the methods of this package: class name -> module name. A method's module defines the class named like
    it, but for case and underscores; any other module is a helper."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        match = re.search(rf"^class ({path.stem.replace('_', '')})\(", path.read_text(encoding="utf-8"), re.I | re.M)
        if match:
            found[match[1]] = path.stem
    return found


def method(name: str) -> Any:
    """Returns a method's class, by the name of the class or of its module."""
    names = {module: name for name, module in methods().items()}
    name = names.get(name, name)
    if name not in names.values():
        raise UserError(f"There is no method {name!r}; there are {', '.join(names.values())}.")
    return getattr(importlib.import_module(f"{__name__}.{methods()[name]}"), name)


__getattr__, __dir__ = exports(__name__, {
    **{name: f"{__name__}.{module}" for name, module in methods().items()}, "RunConfig": "libml.config",
    "option": "libml.config", "SSLModel": "libml.learn.model", "train": "libml.experiment", "load": "libml.data",
    **dict.fromkeys(("from_arrays", "from_csv", "from_folder"), "libml.data")})


def find_run(checkpoint: str | Path, method_class: Any = None) -> tuple[str, Any, Any]:
    """Returns the prefix of a checkpoint, its run folder and the run's configuration; None for these outside a run.

    `method_class` is the class of a method that is not in this package.
    """
    from libml import experiment

    prefix, run = experiment.find_checkpoint(str(checkpoint))
    if run is None:
        return prefix, None, None
    name = run.read().method
    ours = method_class is not None and method_class.__name__ == name
    return prefix, run, experiment.stored_config(run, method_class if ours else method(name))


def _find(checkpoint: str | Path, data_dir: str = "", method_class: Any = None) -> tuple[Any, str]:
    """Returns the configuration of a run and the prefix of a checkpoint, by the run's folder or a file in it."""
    prefix, run, config = find_run(checkpoint, method_class)
    if run is None:
        raise UserError(f"{checkpoint} is not in a run folder, which would describe its model.")
    return config.replace(data_dir=data_dir) if data_dir else config, prefix


def evaluate(checkpoint: str | Path, *, data: Any = None, data_dir: str = "", method_class: Any = None,
             network: Any = None) -> dict:
    """Evaluates a run, or one of its checkpoints, as the run's own configuration describes it; returns its scores by
    tag (`accuracy`, `ece/raw`, `nll/valid`, `accuracy/class/cat` …).

    Args:
        checkpoint: run folder, its folder tf, or a file in it.
        data: what to evaluate on, instead of the run's own dataset.
        data_dir: folder of the TFDS datasets.
        method_class: the class of a method that is not in this package.
        network: the function that built the network, where `train` got one.
    """
    from libml import experiment

    config, prefix = _find(checkpoint, data_dir, method_class)
    return experiment.evaluate(config, prefix, data, network).scores


def load_model(path: str | Path, **arguments: Any) -> Any:
    """Loads what `model.save` wrote: keras.saving.load_model, which here knows all methods and networks.

    A method from outside this package is known once its class is defined; own functions and layers are registered with
    Keras, or given as `custom_objects`.
    """
    import keras

    from libml.learn import keras_model
    from libml.networks import heads

    del heads  # networks register themselves
    for name in methods():
        method(name)
    classes = keras_model.KerasModel.__subclasses__()
    while classes:
        cls = classes.pop()
        keras_model.register(cls)
        classes += cls.__subclasses__()
    return keras.saving.load_model(path, **arguments)


def classifier(run: str | Path, *, data: Any = None, data_dir: str = "", method_class: Any = None,
               network: Any = None) -> Any:
    """Returns a `libml.results.predict.Classifier` of a run, one of its checkpoints, or an export.

    Args:
        run: run folder, its folder tf, a file in it, or the folder of an export.
        data: the run's data, if it is at hand; conformal sets need its validation images.
        data_dir: folder of the TFDS datasets.
        method_class: the class of a method that is not in this package.
        network: the function that builds the network, of a run with one of its own.
    """
    from libml import experiment
    from libml.results.predict import EXPORT_FILE, Classifier

    if (Path(run) / EXPORT_FILE).exists():
        return Classifier.of_export(Path(run))
    return Classifier.of_run(experiment.restore(*_find(run, data_dir, method_class), data, network), data)


def predict(run: str | Path, files: Any, **options: Any) -> Any:
    """Classifies image files with a run or an export; returns `libml.results.predict.Predictions`: files, classes,
    probabilities, uncertainty, credal(), sets(coverage), records().

    Args:
        run: run folder, checkpoint, or the folder of an export.
        files: image files, or folders of them; one or several.
        **options: those of `classifier`.
    """
    from libml.results import predict as library

    places = [files] if isinstance(files, str | Path) else files
    return library.predict(classifier(run, **options), library.find_files(places))


def export(run: str | Path, folder: str | Path, *, data: Any = None, data_dir: str = "", method_class: Any = None,
           network: Any = None, temperature: float | None = None, onnx: bool = False, force: bool = False) -> dict:
    """Writes a run's averaged model, calibrated, as SavedModel, .keras and TFLite; returns what export.json says.

    Args:
        run: run folder, its folder tf, or a file in it.
        folder: where to put it, all or nothing.
        data: the run's data, if it is at hand.
        data_dir: folder of the TFDS datasets.
        method_class: the class of a method that is not in this package.
        network: the function that builds the network, of a run with one of its own.
        temperature: the one to use instead of fitting it on the validation images.
        onnx: whether to write ONNX too.
        force: whether an older export there is replaced.
    """
    from libml import experiment
    from libml.results import export as library

    library.check_target(Path(folder), force)
    config, prefix = _find(run, data_dir, method_class)
    config = config.replace(mixed_precision="off")  # weights are float32 in every precision
    return library.export(experiment.restore(config, prefix, data, network), Path(folder), run=str(Path(run).resolve()),
                          data=data, temperature=temperature, onnx=onnx, force=force)
