"""A user-supplied network, strong augmentation or method: built, validated, fingerprinted."""
from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import json
import re
import textwrap
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from libml.errors import UserError, check_function
from libml.lazy import keras, tf
from libml.randomness import seeded

if TYPE_CHECKING:
    from libml.config import RunConfig
    from libml.learn.model import SSLModel

    Builder = Callable[[int, tuple[int, int, int]], keras.Model]

_BUILT: weakref.WeakSet[keras.Model] = weakref.WeakSet()


def check_network(network: keras.Model, num_classes: int) -> None:
    """Raises UserError unless this is a built classifier from images to logits, as far as that shows without a pass."""
    if not isinstance(network, keras.Model):
        raise UserError(f"The network is {type(network).__name__}; expected a Keras model from images to logits.")
    name = f"The network {network.name}"
    if not network.built:
        raise UserError(f"{name} has no weights yet: give it a keras.Input, or call it once on images.")
    shape = None
    with suppress(AttributeError, ValueError):  # only models of a known graph have one
        shape = network.output_shape
    if shape is not None and (not isinstance(shape, tuple) or len(shape) != 2 or shape[1] != num_classes):
        raise UserError(f"{name} gives {shape}; expected (None, {num_classes}): one logit per class.")
    last = network.layers[-1] if shape is not None else None
    if isinstance(last, keras.layers.Softmax) or getattr(last, "activation", None) is keras.activations.softmax:
        raise UserError(f"{name} ends in a softmax; expected logits: leave it out.")
    if not network.trainable_variables:
        raise UserError(f"{name} has no weights to train: it has no layers with weights, or all are frozen (trainable "
                        "= False).")
    dtypes = {v.dtype for v in network.trainable_variables} - {"float32"}
    if dtypes:
        raise UserError(f"{name} has weights of {', '.join(sorted(dtypes))}; expected float32, which mixed precision "
                        "has too.")


def check_values(network: keras.Model, num_classes: int, image_shape: tuple[int, int, int]) -> None:
    """Raises UserError unless a network makes finite logits of noise, and no more, in predictions and in training."""
    rng, size, name = np.random.RandomState(0), 8, f"The network {network.name}"
    weights = [tf.convert_to_tensor(v) for v in network.trainable_variables]
    options = {"seed": tf.constant([0, 0], tf.int64)} if "seed" in inspect.signature(network.call).parameters else {}

    def run(weights: Sequence[tf.Tensor], training: bool) -> tuple[tf.Tensor, list, list]:
        images = tf.constant(rng.uniform(-1, 1, (size, *image_shape)), tf.float32)
        return network.stateless_call(weights, network.non_trainable_variables, images, training=training,
                                      return_losses=True, **options)

    for training in (False, True):
        try:
            with tf.GradientTape() as tape:
                tape.watch(weights)
                logits, _, added = run(weights, training)
        except Exception as error:  # layers raise whatever they like
            reason = str(error).strip().splitlines()[0][:200]
            raise UserError(f"{name} does not take images of {image_shape} ({reason}).") from error
        found = f"{logits.dtype.name} of shape {logits.shape}" if tf.is_tensor(logits) else type(logits).__name__
        if not tf.is_tensor(logits) or logits.shape != (size, num_classes) or logits.dtype not in (
                "float32", "float16", "bfloat16"):
            raise UserError(f"{name} makes {found} of {size} images; expected float32 of shape {(size, num_classes)}: "
                            "one logit per class.")
        if not tf.reduce_all(tf.math.is_finite(logits)):
            raise UserError(f"{name} gives NaN or infinite logits {'in training' if training else 'at inference'}, of "
                            "noise from -1 to 1; expected finite ones.")
    if added or any(v.constraint is not None for v in network.trainable_variables):
        raise UserError(f"{name} has regularizers, losses or constraints of its own, which would have no effect: the "
                        "loss is the method's. Leave them out; its option wd decays kernels.")
    if all(gradient is None for gradient in tape.gradient(logits, weights)):
        raise UserError(f"{name} cannot learn: no gradient of its logits comes to its weights.")
    # Logits may lie between 0 and 1 by chance; whatever the weights are, only probabilities do.
    for _ in range(8):
        if tf.reduce_any((logits < 0) | (logits > 1)):
            return
        logits, *_ = run([v.numpy() * rng.choice([-1, 1], v.shape) + rng.normal(0, 0.02, v.shape) for v in weights],
                         training=True)
    last = "softmax" if np.allclose(tf.reduce_sum(logits, -1), 1, atol=1e-2) else "sigmoid"
    raise UserError(f"{name} gives numbers from 0 to 1 whatever its weights are, as if it ended in a {last}; expected "
                    "logits: leave it out.")


def build_network(builder: Builder, num_classes: int, image_shape: tuple[int, int, int], seed: int) -> keras.Model:
    """What builder(num_classes, image_shape) makes, which must be a classifier; equal seeds give equal weights."""
    if isinstance(builder, keras.Model):
        raise UserError(f"network is {type(builder).__name__}; expected a function of num_classes and image_shape that "
                        "returns a Keras model, so that a continued run can build it again.")
    check_function(builder, "network", "num_classes", "image_shape")
    with seeded(seed):
        network = builder(num_classes, image_shape)
        if isinstance(network, keras.Model) and not network.built:
            network(tf.zeros([1, *image_shape]))  # creates the weights
    check_network(network, num_classes)
    if network in _BUILT:
        raise UserError(f"The function {_name_of(builder)} returned a network that it has returned before, which is "
                        "trained by now; expected a new one at each call.")
    _BUILT.add(network)
    check_values(network, num_classes, image_shape)
    return network


def _name_of(function: Callable) -> str:
    """Returns the name of a function, a partial one, or an object, in letters that suit a folder's name."""
    function = getattr(function, "func", function)  # functools.partial
    return re.sub(r"\W+", "_", getattr(function, "__name__", type(function).__name__)).strip("_") or "own"


def _canonical(config: object, names: dict[str, str]) -> object:
    """Replaces names by numbers in a Keras configuration: Keras numbers layers by how many there were before."""
    if isinstance(config, dict):
        if isinstance(config.get("name"), str):
            names.setdefault(config["name"], f"#{len(names)}")
        return {key: _canonical(value, names) for key, value in config.items() if key != "shared_object_id"}
    if isinstance(config, list | tuple):
        return [_canonical(value, names) for value in config]
    return names.get(config, config) if isinstance(config, str) else config


def _short_hash(facts: object) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=repr).encode()).hexdigest()[:8]


def fingerprint(network: keras.Model) -> str:
    """Returns a short hash of a network's structure, as far as Keras knows it: layers, their settings and weights."""
    try:
        config = network.get_config()
    except NotImplementedError:  # a subclass that does not say what it is made of
        config = [type(layer).__name__ for layer in network.layers]
    variables = [[v.name, list(v.shape), str(v.dtype), v.trainable] for v in network.variables]
    return _short_hash([type(network).__name__, _canonical(config, {}), variables])


def _is_own(thing: Callable | type) -> bool:
    """Whether a class or function is in a file or notebook of the user's: neither of this program nor of an installed
    package."""
    try:
        file = Path(inspect.getfile(thing)).resolve()
    except (OSError, TypeError):  # of a notebook, or built in
        return thing.__module__ == "__main__"
    root = Path(__file__).resolve().parents[2]
    return not ({"site-packages", "dist-packages"} & {*file.parts} or any(
        file.is_relative_to(root / package) for package in ("cssl", "libml")))


def _sources(thing: object) -> list[str]:
    """The source of a function, a class or an object's class; [] where none can be read, as of what was typed at a
    prompt."""
    if isinstance(thing, functools.partial):
        given = [value for value in (*thing.args, *thing.keywords.items())
                 if isinstance(value, bool | int | float | str | tuple)]
        return [repr(given), *_sources(thing.func)]
    with suppress(OSError, TypeError):
        return [inspect.getsource(thing)]  # type: ignore[arg-type]  # what has none raises TypeError
    if not isinstance(thing, type):
        return _sources(type(thing)) if _is_own(type(thing)) else []
    return [source for part in vars(thing).values() if inspect.isfunction(part)  # of a notebook's class
            for source in _sources(part)]


def code_of(*things: object) -> str:
    """Returns ~ and a digest of the source of functions and classes, without its layout and comments; "" without any.
    """
    found: list[str] = []
    for source in (source for thing in things for source in _sources(thing)):
        with suppress(SyntaxError):  # a part of a statement
            found.append(ast.unparse(ast.parse(textwrap.dedent(source))))
    return f"~{_short_hash(found)}" if found else ""


def own_classes(classes: Iterable[type]) -> list[type]:
    """Those of classes, and of what they inherit from, that are the user's."""
    own = {base for cls in classes for base in cls.__mro__ if _is_own(base)}
    return sorted(own, key=lambda cls: cls.__qualname__)


def _code_of_network(network: keras.Model, builder: Builder) -> str:
    layers, builder = network._flatten_layers(), getattr(builder, "func", builder)  # nothing public has nested ones
    functions: dict[str, Callable] = {
        value.__qualname__: value for layer in layers for name, value in vars(layer).items()
        if inspect.isfunction(value) and not hasattr(type(layer), name) and _is_own(value)}
    if classes := own_classes({type(layer) for layer in layers}):  # what these are made with, Keras may not know
        functions |= {"": builder} if getattr(builder, "__name__", "<lambda>") != "<lambda>" else {}
    return code_of(*classes, *(functions[name] for name in sorted(functions)))


def with_fingerprints(config: RunConfig, model: SSLModel, network: Builder | None, strong: Callable | None,
                      ) -> RunConfig:
    """Returns the configuration with what identifies the user's network and view; UserError if it has others."""
    fingerprints, values = {}, config.values()
    if network is not None:
        given = model.made_of["network"]
        fingerprints["own_network"] = f"{_name_of(network)}-{fingerprint(given)}{_code_of_network(given, network)}"
    if strong is not None:
        fingerprints["own_strong"] = _name_of(strong)
        if hasattr(strong, "get_config"):
            fingerprints["own_strong"] += f"-{_short_hash(strong.get_config())}"
        fingerprints["own_strong"] += code_of(strong)
    for name, value in fingerprints.items():
        if values[name] and not config.agree(name, values[name], value):
            raise UserError(f"This is a run with {name}={values[name]}, but {name}={value} was given: pass the same "
                            "one.")
    return config.replace(**fingerprints)
