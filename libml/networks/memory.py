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
_CUDA = 500_000_000  # bytes that CUDA and NCCL take of a GPU, beside TensorFlow


def images_of_update(config: RunConfig, model: SSLModel | None = None) -> int:
    """Returns how many views an update passes through the network, or fewer: methods may pass them again."""
    options, labeled, unlabeled = config.options, 1, 1
    if model is not None:
        labeled, unlabeled = 1 + model.strong_labeled_too, sum(model.views_per_image)
    return options.batch * (labeled + options.uratio * unlabeled * config.method.uses_unlabeled)


def count(config: RunConfig, image_shape: Sequence[int], images: int, model: SSLModel | None = None, *,
          map_bytes: int = 4) -> int:
    """Returns the bytes of weights, averages, slots, gradients and feature maps; 0 of keras:NAME without a `model`."""
    network = config.network
    weights = maps = widest = 0
    stages: list[tuple[int, int]] = []  # channels, blocks
    if is_application(network.arch):
        if model is not None:
            from libml.networks.builder import count_features  # needs TensorFlow

            weights = sum(math.prod(v.shape) for v in model.network.trainable_variables)
            maps = count_features(model.network)
    elif network.arch == "cnn13":
        stages = [(network.filters * times, 3) for times in (1, 2, 4)]
    elif network.arch in _MAPS:
        stages = [(network.filters << stage, network.repeat) for stage in range(min(network.scales, 64))]
    for stage, (channels, blocks) in enumerate(stages):
        size = channels * math.prod(math.ceil(extent / (1 << stage)) for extent in image_shape[:2])
        weights += blocks * 18 * channels ** 2
        widest = max(widest, size)
        maps += blocks * size * (1 if config.scale.recompute else _MAPS[network.arch])
    if config.scale.recompute and stages:  # the inputs of all blocks, and all maps of the one that is computed again
        maps += _MAPS[network.arch] * widest
    return 4 * weights * 5 + map_bytes * maps * images


def _may_recompute(config: RunConfig) -> bool:
    return config.network.arch in _MAPS and config.network.arch != "cnn13" and not config.scale.recompute


def check(config: RunConfig, image_shape: Sequence[int], available: int, *, model: SSLModel | None = None,
          processes: int = 1, weights_only: bool = False) -> None:
    """Raises UserError if a process cannot fit; `weights_only` where maps are not kept, or in GPUs, who do not say."""
    images = 0 if weights_only else images_of_update(config, model) // processes
    needed = count(config, image_shape, images, model)
    if needed > available:
        network, size = config.network, image_shape[0]
        what = f"filters={network.filters}, repeat={network.repeat}, scales={network.scales}"
        if is_application(network.arch):
            what, size = f"arch={network.arch}", config.data.image_size
        raise UserError(f"This run needs about {_gigabytes(needed)} of memory, and there are {_gigabytes(available)}: "
                        f"batch={config.options.batch}, uratio={config.options.uratio}, {what} on images of "
                        f"{size}x{size}. Make one of them smaller{', or give --recompute' * _may_recompute(config)}.")


def gpu_shortage(config: RunConfig, image_shape: Sequence[int], available: int, *, model: SSLModel,
                 replicas: int = 1) -> str:
    """Says that what a replica needs may not fit into the memory of its GPU, and which flags help; "" if it fits."""
    def needed(config: RunConfig) -> int:
        half = config.scale.mixed_precision != "off"
        images = images_of_update(config, model) // replicas
        return _CUDA + count(config, image_shape, images, model, map_bytes=2 if half else 4)

    if needed(config) <= available:
        return ""
    variants = {}
    if _may_recompute(config):
        variants["--recompute"] = config.replace(recompute=True)
    if config.scale.mixed_precision == "off" and not config.method.needs_float32:
        variants["--mixed_precision=float16"] = config.replace(mixed_precision="float16")
    if len(variants) == 2:
        variants["both"] = variants["--recompute"].replace(mixed_precision="float16")
    help = [f"{flags} would need {_gigabytes(needed(variant))}" for flags, variant in variants.items()
            if needed(variant) <= available]
    return (f"an update needs about {_gigabytes(needed(config))} of each GPU, and the smallest has "
            f"{_gigabytes(available)}: "
            f"{', '.join(help) or 'more GPUs, a smaller --batch or a smaller network would help'}.")


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.3g} GB" if size < 1e300 else "more than any machine has"
