"""How much memory a run will need, counted before anything is built. Needs no TensorFlow."""
from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from libml.errors import UserError
from libml.networks.applications import is_application

if TYPE_CHECKING:
    from libml.config import RunConfig

# Feature maps that training keeps per block, from the measured peak of WRN-28-2 at batch 64 (6.7 GB).
_MAPS = {"resnet": 7, "mcdropresnet": 7, "shake": 12, "cnn13": 2}


def count(config: RunConfig, image_shape: Sequence[int], built: Any = None) -> int:
    """Returns the bytes of weights (their averages, slots and gradients) and of the feature maps of one update.

    Of a network of keras.applications only its layers tell: they count once it is `built`.
    """
    network, options = config.network, config.options
    weights = maps = widest = 0
    blocks: list[tuple[int, int, int]] = []
    if is_application(network.arch):
        if built is not None:
            weights, maps = sum(math.prod(v.shape) for v in built.trainable_variables), built.count_features()
    elif network.arch == "cnn13":
        blocks = [(scale, [1, 2, 4][scale], 3) for scale in range(3)]
    else:
        blocks = [(scale, 1 << scale, network.repeat) for scale in range(network.scales)]
    for scale, times, repeat in blocks:
        channels, side = network.filters * times, [math.ceil(extent / (1 << scale)) for extent in image_shape[:2]]
        weights += repeat * 18 * channels ** 2
        size = side[0] * side[1] * channels
        widest = max(widest, size)
        maps += repeat * size * (1 if config.scale.recompute else _MAPS[network.arch])
    if config.scale.recompute and blocks:  # the inputs of all blocks, and all maps of the one that is computed again
        maps += _MAPS[network.arch] * widest
    views = 1 + options.uratio * (1 + max(1, getattr(options, "K", 1))) if config.method.uses_unlabeled else 1
    return 4 * (weights * 5 + maps * options.batch * views)


def machine_memory(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns the bytes of memory this process may use: the machine's, or what its container is given."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for limit in (root / "memory.max", root / "memory" / "memory.limit_in_bytes"):  # of version 2 and 1 of cgroups
        with suppress(OSError, ValueError):  # another system; "max"
            sizes.append(int(limit.read_text()))
    return min(sizes)


def check(config: RunConfig, image_shape: Sequence[int], processes: int = 1, available: int | None = None,
          built: Any = None) -> None:
    """Raises UserError if a process of a run cannot fit into memory, this machine's unless another size is given."""
    if available is None:
        available = machine_memory()
    needed = count(config, image_shape, built) // processes
    if needed > available:
        network, size = config.network, image_shape[0]
        what = f"filters={network.filters}, repeat={network.repeat}, scales={network.scales}"
        if is_application(network.arch):
            what, size = f"arch={network.arch}", config.data.image_size
        raise UserError(f"This run needs about {_gigabytes(needed)} of memory, and there are {_gigabytes(available)}: "
                        f"batch={config.options.batch}, uratio={config.options.uratio}, {what} on images of "
                        f"{size}x{size}. Make one of them smaller{_advice(config)}.")


def _advice(config: RunConfig) -> str:
    recomputes = config.network.arch in _MAPS and config.network.arch != "cnn13" and not config.scale.recompute
    return ", or give --recompute" if recomputes else ""


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.3g} GB" if size < 1e300 else "more than any machine has"
