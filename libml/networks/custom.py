"""A user-supplied network or strong augmentation: built, validated, fingerprinted."""
from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from libml.errors import UserError
from libml.lazy import keras, tf
from libml.randomness import seeded

if TYPE_CHECKING:
    from libml.config import RunConfig
    from libml.learn.model import SSLModel

    Builder = Callable[[int, tuple[int, int, int]], keras.Model]


def check_network(network: keras.Model, num_classes: int) -> None:
    """Raises UserError unless this is a built classifier from images to logits, as far as that shows without a pass."""
    if not isinstance(network, keras.Model):
        raise UserError(f"The network is {type(network).__name__}; expected a Keras model from images to logits.")
    if not network.built:
        raise UserError(f"The network {network.name} has no weights yet: give it a keras.Input, or call it once on "
                        "images.")
    shape = None
    with suppress(AttributeError, ValueError):  # only models of a known graph have one
        shape = network.output_shape
    if shape is not None and (not isinstance(shape, tuple) or len(shape) != 2 or shape[1] != num_classes):
        raise UserError(f"The network {network.name} gives {shape}; expected (None, {num_classes}): one logit per "
                        "class.")
    last = network.layers[-1] if shape is not None else None
    if isinstance(last, keras.layers.Softmax) or getattr(last, "activation", None) is keras.activations.softmax:
        raise UserError(f"The network {network.name} ends in a softmax; expected logits: leave it out.")


def build_network(builder: Builder, num_classes: int, image_shape: tuple[int, int, int], seed: int) -> keras.Model:
    """Calls builder(num_classes, image_shape) and checks that it returns a classifier from float images to logits.

    Equal seeds give equal initial weights.
    """
    if not callable(builder) or isinstance(builder, keras.Model):
        raise UserError(f"network is {type(builder).__name__}; expected a function of num_classes and image_shape that "
                        "returns a Keras model, so that a continued run can build it again.")
    with seeded(seed):
        network = builder(num_classes, image_shape)
        if isinstance(network, keras.Model) and not network.built:
            network(tf.zeros([1, *image_shape]))  # creates the weights
    check_network(network, num_classes)
    try:
        logits, _ = network.stateless_call(network.trainable_variables, network.non_trainable_variables,
                                           tf.zeros([2, *image_shape]), training=False)  # as training calls it
    except Exception as error:  # layers raise whatever they like
        raise UserError(f"The network {network.name} does not take images of {image_shape} "
                        f"({str(error).strip().splitlines()[0][:200]}).") from error
    if logits.shape != (2, num_classes):
        raise UserError(f"The network {network.name} makes {logits.shape} of two images; expected (2, {num_classes}): "
                        "one logit per class.")
    return network


def _name_of(function: Callable) -> str:
    """Returns the name of a function, a partial one, or an object, in letters that suit a folder's name."""
    function = getattr(function, "func", function)  # functools.partial
    return re.sub(r"\W+", "_", getattr(function, "__name__", type(function).__name__)).strip("_") or "own"


def _canonical(config: Any, names: dict[str, str]) -> Any:
    """Replaces names by numbers in a Keras configuration: Keras numbers layers by how many there were before."""
    if isinstance(config, dict):
        if isinstance(config.get("name"), str):
            names.setdefault(config["name"], f"#{len(names)}")
        return {key: _canonical(value, names) for key, value in config.items() if key != "shared_object_id"}
    if isinstance(config, list | tuple):
        return [_canonical(value, names) for value in config]
    return names.get(config, config) if isinstance(config, str) else config


def _short_hash(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=repr).encode()).hexdigest()[:8]


def fingerprint(network: keras.Model) -> str:
    """Returns a short hash of a network's structure, as far as Keras knows it: layers, their settings and weights."""
    try:
        config: Any = network.get_config()
    except NotImplementedError:  # a subclass that does not say what it is made of
        config = [type(layer).__name__ for layer in network.layers]
    facts = [type(network).__name__, _canonical(config, {}),
             [[v.name, list(v.shape), str(v.dtype), v.trainable] for v in network.variables]]
    return _short_hash(facts)


def with_fingerprints(config: RunConfig, model: SSLModel, network: Builder | None, strong: Callable | None,
                      ) -> RunConfig:
    """Returns the configuration with names and fingerprints of what the user supplied; UserError if others are stored.
    """
    fingerprints = {}
    if network is not None:
        fingerprints["own_network"] = f"{_name_of(network)}-{fingerprint(model.made_of['network'])}"
    if strong is not None:
        fingerprints["own_strong"] = _name_of(strong)
        if hasattr(strong, "get_config"):
            fingerprints["own_strong"] += f"-{_short_hash(strong.get_config())}"
    values = config.values()
    for name, value in fingerprints.items():
        if values[name] not in ("", value):
            raise UserError(f"This is a run with {name}={values[name]}, but {name}={value} was given: pass the same "
                            "one.")
    return config.replace(**fingerprints)
