"""How much memory training a network will need: what cannot fit is refused before it is tried. Needs no TensorFlow."""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from libml.errors import UserError
from libml.networks.applications import is_application

if TYPE_CHECKING:
    from libml.config import RunConfig
    from libml.learn.model import SSLModel

# Feature maps that training keeps per block, from the measured peak of WRN-28-2 at batch 64 (6.7 GB).
_MAPS = {"resnet": 7, "mcdropresnet": 7, "shake": 12, "cnn13": 2}


def images_of_update(config: RunConfig, model: SSLModel | None = None) -> int:
    """Returns how many views an update passes through the network: at least so many, until there is a model."""
    options, labeled, unlabeled = config.options, 1, 1
    if model is not None:
        labeled, unlabeled = 1 + model.strong_labeled_too, sum(model.views_per_image)
    return options.batch * (labeled + options.uratio * unlabeled * config.method.uses_unlabeled)


def count(config: RunConfig, image_shape: Sequence[int], images: int, model: SSLModel | None = None) -> int:
    """Returns the bytes of weights (their averages, slots and gradients) and of the feature maps of some images.

    Of a network of keras.applications only its layers tell: they count once there is a `model`.
    """
    network = config.network
    weights = maps = widest = 0
    stages: list[tuple[int, int]] = []  # channels, blocks
    if is_application(network.arch):
        if model is not None:
            weights = sum(math.prod(v.shape) for v in model.network.trainable_variables)
            maps = model.network.count_features()
    elif network.arch == "cnn13":
        stages = [(network.filters * times, 3) for times in (1, 2, 4)]
    else:
        stages = [(network.filters << stage, network.repeat) for stage in range(min(network.scales, 64))]
    for stage, (channels, blocks) in enumerate(stages):
        size = channels * math.prod(math.ceil(extent / (1 << stage)) for extent in image_shape[:2])
        weights += blocks * 18 * channels ** 2
        widest = max(widest, size)
        maps += blocks * size * (1 if config.scale.recompute else _MAPS[network.arch])
    if config.scale.recompute and stages:  # the inputs of all blocks, and all maps of the one that is computed again
        maps += _MAPS[network.arch] * widest
    return 4 * (weights * 5 + maps * images)


def check(config: RunConfig, image_shape: Sequence[int], available: int, *, model: SSLModel | None = None,
          processes: int = 1, weights_only: bool = False) -> None:
    """Raises UserError if one of the processes of a run cannot fit into the available bytes.

    Of weights only, where nothing else is kept, or feature maps are in the memory of GPUs, which nobody tells.
    """
    images = 0 if weights_only else images_of_update(config, model) // processes
    needed = count(config, image_shape, images, model)
    if needed > available:
        network, size = config.network, image_shape[0]
        what = f"filters={network.filters}, repeat={network.repeat}, scales={network.scales}"
        if is_application(network.arch):
            what, size = f"arch={network.arch}", config.data.image_size
        recomputes = network.arch in _MAPS and network.arch != "cnn13" and not config.scale.recompute
        raise UserError(f"This run needs about {_gigabytes(needed)} of memory, and there are {_gigabytes(available)}: "
                        f"batch={config.options.batch}, uratio={config.options.uratio}, {what} on images of "
                        f"{size}x{size}. Make one of them smaller{', or give --recompute' * recomputes}.")


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.3g} GB" if size < 1e300 else "more than any machine has"
