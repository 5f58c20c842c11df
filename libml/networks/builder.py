"""A network by its name: one of `nets`, or one of keras.applications with the same interface."""
from __future__ import annotations

import math
import re
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import keras
import tensorflow as tf

from libml.data.files import expand
from libml.errors import UserError
from libml.networks import applications
from libml.networks.layers import Factory
from libml.networks.nets import CNN13, MLP, Linear, Network, Pixels, ShakeShake, WideResNet
from libml.randomness import fold_in, seeded

ARCHITECTURES: dict[str, Callable[..., keras.Model]] = {
    "resnet": WideResNet, "cnn13": CNN13, "shake": ShakeShake,
    "mcdropresnet": WideResNet}  # the original's name for what every network here can do: dropout in chosen passes
# Heads on features, and what makes features without weights.
ON_FEATURES: dict[str, Callable[..., keras.Model]] = {"linear": Linear, "mlp": MLP, "pixels": Pixels}
BLOCKS = ("resnet", "mcdropresnet", "shake")  # architectures of residual blocks


def build(arch: str, *, num_classes: int, image_shape: Sequence[int], filters: int = 32, repeat: int = 4,
          scales: int = 0, dropout: float = 0.0, head_dropout: float = 0.0, bn_momentum: float = 0.999,
          sync_bn: bool = False, seed: int | None = None, weights: str = "none", input_size: int = 0,
          recompute: bool = False,
          ) -> keras.Model:
    """Returns a built network for images of `image_shape` [H, W, C]; equal seeds give equal initial weights.

    With `recompute` training keeps only the inputs of residual blocks and computes the rest again: less memory.
    Networks keras:NAME may start from `weights` (imagenet, or a file); they resize images to `input_size` unless 0.
    """
    settings = SimpleNamespace(**locals() | {"image_shape": tuple(image_shape)})  # all arguments, to build it again
    make = Factory(seed, bn_momentum, sync_bn)
    if recompute and arch not in BLOCKS:
        raise ValueError(f"recompute: {arch} has no residual blocks to compute again; {', '.join(BLOCKS)} have.")
    if applications.is_application(arch):
        network = _application(make, arch, input_size or image_shape[0], weights, num_classes, dropout)
    elif arch not in ARCHITECTURES | ON_FEATURES:
        raise ValueError(f"Unknown architecture {arch!r}: choose one of {', '.join(sorted(ARCHITECTURES))}.")
    else:
        network = (ARCHITECTURES | ON_FEATURES)[arch](
            make, num_classes=num_classes, image_shape=settings.image_shape, filters=filters, repeat=repeat,
            scales=scales or applications.default_scales(image_shape[1]), dropout=dropout)
        network.recompute, network.head_dropout = recompute, head_dropout
    network.image_shape, network.settings = settings.image_shape, settings
    return network


def count_weights(model: keras.Model) -> int:
    return sum(math.prod(v.shape) for v in model.trainable_variables)


def _layers(model: keras.Model) -> Iterator[keras.layers.Layer]:
    """All layers of a model, those of models within it too."""
    for layer in model.layers:
        if isinstance(layer, keras.Model):
            yield from _layers(layer)
        else:
            yield layer


def count_features(network: keras.Model) -> int:
    """Numbers that the layers of the functional models in a network give for one image: what training keeps of it."""
    layers = [layer for layer in _layers(network) if not isinstance(layer, keras.layers.InputLayer)]
    outputs = [shape for layer in layers if hasattr(layer, "output") for shape in tf.nest.flatten(layer.output)]
    return sum(tf.TensorShape(output.shape[1:]).num_elements() for output in outputs)


class Application(Network):
    """A dense layer on a body of keras.applications; `preprocess` turns pixels in [0, 255] into what it takes."""

    def __init__(self, make: Factory, body: keras.Model, preprocess: Callable, *, num_classes: int, dropout: float):
        super().__init__(dropout, name=body.name)
        self.body, self.preprocess = body, preprocess
        self.classifier = make.dense("classifier", body.output_shape[-1], num_classes)
        self.needs_seed_in_training = bool(self._seeds())
        self.built = True

    def _seeds(self) -> list[keras.Variable]:
        """The states of the random layers (stochastic depth): Keras counts them among the non-trainable variables."""
        return [layer.seed_generator.state for layer in _layers(self.body) if hasattr(layer, "seed_generator")]

    def features(self, x, training, noise):
        size = self.body.input_shape[1:3]
        if tuple(x.shape[1:3]) != size:
            x = tf.cast(tf.image.resize(x, size), x.dtype)
        for layer in _layers(self.body):
            if isinstance(layer, keras.layers.Normalization):
                layer.finalize_state()  # its statistics are variables, which it would read once, when it is built
        # Randomness comes from the seed of this pass: the layers' own states are set for it, and put back.
        seeds = [(state, tf.convert_to_tensor(state)) for state in self._seeds()] if training else []
        for i, (state, _) in enumerate(seeds):
            seed = fold_in(noise.seed, i)
            state.assign(tf.cast(seed, state.dtype))
        x = self.body(self.preprocess((x + 1) * 127.5), training=training)
        for state, value in seeds:
            state.assign(value)
        return noise.dropout(x)

    @property
    def trusts_onednn(self) -> bool:
        """Whether no strided 1x1 convolution has channels that oneDNN gets wrong: see `RunConfig.trusts_onednn`."""
        return not any(isinstance(layer, keras.layers.Conv2D) and set(layer.kernel_size) == {1}
                       and max(layer.strides) > 1 and any(size % 16 for size in layer.kernel.shape[2:])
                       for layer in _layers(self.body))

    @property
    def map_shape(self) -> tuple[int, ...]:
        return tuple(self.body.output.shape[1:])


def _application(make: Factory, arch: str, side: int, weights: str, num_classes: int, dropout: float) -> Application:
    """The network `keras:NAME` for images of side x side; `weights` of its body are none, imagenet, or a file."""
    name, arguments = applications.parse(arch)
    try:
        with warnings.catch_warnings(), seeded(make.seed):
            warnings.simplefilter("ignore")  # weights of the native size are what other sizes start from, too
            body = getattr(keras.applications, name)(
                include_top=False, weights="imagenet" if weights == "imagenet" else None, input_shape=(side, side, 3),
                **arguments)
    except Exception as error:  # sizes that do not suit it are ValueErrors, downloads fail with a bare Exception
        message = " ".join(str(error).split())
        url = re.search(r"https?://\S+?(?=[:,]?\s|$)", message)
        if isinstance(error, ValueError) or not url:
            raise UserError(f"{arch} cannot be made for images of {side}x{side}: {message[:300]}") from error
        raise UserError(f"The ImageNet weights of {name} cannot be downloaded ({message[-120:]}). Download {url[0]} "
                        "elsewhere and put it into ~/.keras/models, or name the file with --weights=FILE; "
                        "--weights=none starts without.") from error
    if weights not in ("none", "imagenet"):
        load_weights(body, expand("weights", weights), name)
    for layer in _layers(body):
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.momentum, layer.synchronized = make.bn_momentum, make.sync_bn
    return Application(make, body, _preprocessing(name), num_classes=num_classes, dropout=dropout)


def _preprocessing(name: str) -> Callable:
    """The function preprocess_input that keras.applications has beside a network."""
    return sys.modules[getattr(keras.applications, name).__module__].preprocess_input


def load_weights(body: keras.Model, path: Path, name: str) -> None:
    """Fills a network without its top from a .weights.h5, .h5 or .keras file, which may have a top; else UserError."""
    expected = f"expected a .weights.h5 or .keras file of {name}, whole or without its top"
    if not path.is_file():
        raise UserError(f"There is no file of weights {path}; {expected}.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the top, which is not wanted; what is missing is an error
            if path.suffix == ".keras":
                weights = keras.saving.load_model(path, compile=False).weights
                body.set_weights([v.numpy() for v in weights[:len(body.weights)]])
            else:
                body.load_weights(path)
    except Exception as error:  # Keras, h5py and zipfile raise many types for files that are something else
        reason = "it is no such file" if isinstance(error, zipfile.BadZipFile) else " ".join(str(error).split())[:200]
        raise UserError(f"The weights in {path} do not fit ({reason}); {expected}.") from error
