"""Semi-supervised image classification: one module per method, one `Run` per training. Cheap to import; types are in
__init__.pyi.

    import cssl
    run = cssl.train(cssl.RunConfig.of(cssl.CSSL, dataset="digits.1@40-1"))
    run.result("accuracy"), run.predict("photos").classes, run.export("model")
"""
import functools
import importlib
import re
import sys
from pathlib import Path

import libml

__version__ = "0.3.0"


def _check_libml() -> None:
    """FixMatch's README puts its clone, which has a package libml too, on PYTHONPATH: say so rather than fail later."""
    ours, other = Path(__file__).resolve().parent.parent / "libml", Path(libml.__path__[0]).resolve()
    if other != ours:
        message = (f"Another package named libml, in {other.parent}, hides the one of this program, in {ours.parent}. "
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
def methods():
    """Returns the methods of this package: class name -> module name. A method's module defines the class named like
    it, but for case and underscores; any other module is a helper."""
    names = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        match = re.search(rf"^class ({path.stem.replace('_', '')})\(", path.read_text(encoding="utf-8"), re.I | re.M)
        if match:
            names[match[1]] = path.stem
    return names


def method(name):
    """Returns a method's class, by the name of the class or of its module."""
    names = {module: name for name, module in methods().items()}
    name = names.get(name, name)
    if name not in names.values():
        raise UserError(f"There is no method {name!r}; there are {', '.join(names.values())}.")
    return getattr(importlib.import_module(f"{__name__}.{methods()[name]}"), name)


# Imported when somebody asks for them; __init__.pyi tells type checkers, and a test compares the two.
__getattr__, __dir__ = exports(__name__, {
    **{name: f"{__name__}.{module}" for name, module in methods().items()},
    **dict.fromkeys(("RunConfig", "option"), "libml.config"), "SSLModel": "libml.learn.model", "Run": "libml.run",
    "train": "libml.experiment", "from_features": "libml.features", "main": "cssl.cli",
    **dict.fromkeys(("from_arrays", "from_csv", "from_folder", "load"), "libml.data"),
    "augment": "libml", "losses": "libml.learn", "metrics": "libml.results"})


def open(path, *, data=None, data_dir="", method_class=None, network=None):
    """Opens a run by its folder, one above a single run, its folder tf, or a checkpoint in it.

    Args:
        data: the run's images, if they are at hand; else they are loaded where they are needed.
        data_dir: folder of the TFDS datasets, instead of the run's.
        method_class: the class of a method that is not in this package.
        network: the function that built the network, where `train` got one.
    """
    from libml.run import open_run

    def by_name(name):
        return method_class if method_class is not None and method_class.__name__ == name else method(name)

    return open_run(path, data=data, data_dir=data_dir, method=by_name, network=network)


def open_export(folder):
    """Opens the folder that `Run.export` wrote, to predict with it."""
    from libml.results.predict import Classifier

    return Classifier.of_export(folder)


def load_model(path, **arguments):
    """Loads what `model.save` wrote: keras.saving.load_model, which here knows all methods whose class is defined.

    Custom functions and layers are registered with Keras, or given as `custom_objects`.
    """
    import keras

    from libml.learn import keras_model
    from libml.networks import heads  # noqa: F401 - networks register themselves

    for name in methods():
        method(name)
    classes = keras_model.KerasModel.__subclasses__()
    while classes:
        cls = classes.pop()
        keras_model.register(cls)
        classes += cls.__subclasses__()
    return keras.saving.load_model(path, **arguments)
