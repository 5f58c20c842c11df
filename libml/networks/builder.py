"""A network by its name."""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import keras

from libml.networks import pretrained
from libml.networks.applications import default_scales, is_application
from libml.networks.layers import Factory
from libml.networks.nets import CNN13, ShakeShake, WideResNet

ARCHITECTURES: dict[str, Callable[..., keras.Model]] = {
    "resnet": WideResNet, "cnn13": CNN13, "shake": ShakeShake,
    "mcdropresnet": WideResNet}  # the original's name for what every network here can do: dropout in chosen passes

BLOCKS = ("resnet", "mcdropresnet", "shake")  # architectures of residual blocks


def build(arch: str, *, num_classes: int, image_shape: Sequence[int], filters: int = 32, repeat: int = 4,
          scales: int | None = None, dropout: float = 0.0, bn_momentum: float = 0.999, sync_bn: bool = False,
          seed: int | None = None, weights: str = "none", input_size: int = 0, recompute: bool = False,
          ) -> keras.Model:
    """Returns a built network for images of `image_shape` [H, W, C]; equal seeds give equal initial weights.

    With `recompute` training keeps only the inputs of residual blocks and computes the rest again: less memory.
    Networks keras:NAME of keras.applications may start from `weights` (imagenet, or a file); they resize images to
    `input_size` first (0: they take them as they are).
    """
    settings = SimpleNamespace(**locals() | {"image_shape": tuple(image_shape)})  # all arguments, to build it again
    make = Factory(seed, bn_momentum, sync_bn)
    if recompute and arch not in BLOCKS:
        raise ValueError(f"recompute: {arch} has no residual blocks to compute again; {', '.join(BLOCKS)} have.")
    if is_application(arch):
        network = pretrained.build(make, arch, input_size or image_shape[0], weights, num_classes, dropout)
    else:
        if arch not in ARCHITECTURES:
            raise ValueError(f"Unknown architecture {arch!r}: choose one of {', '.join(sorted(ARCHITECTURES))}.")
        scales = default_scales(image_shape[1]) if scales is None else scales
        if min(scales, repeat, filters) < 1:
            raise ValueError(f"Network sizes must be at least 1; got scales={scales}, repeat={repeat}, "
                             f"filters={filters}.")
        if not 0 <= dropout < 1:
            raise ValueError(f"The dropout rate must be in [0, 1); got {dropout}.")
        network = ARCHITECTURES[arch](make, num_classes=num_classes, image_shape=settings.image_shape,
                                      filters=filters, repeat=repeat, scales=scales, dropout=dropout)
        network.recompute = recompute
    network.image_shape, network.settings = settings.image_shape, settings
    return network


def count_weights(model: keras.Model) -> int:
    """Number of trainable weights."""
    return sum(math.prod(v.shape) for v in model.trainable_variables)
