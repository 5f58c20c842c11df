"""AutoAugment (Cubuk et al. 2019): policies that a search has found, two operations each, and how one is drawn."""
import functools
import json
from pathlib import Path

import numpy as np
import tensorflow as tf

from libml.augment.ops import AUTO_OPS, Policy
from libml.augment.spec import LEVELS

DEPTH = 2
NUMBERS = 1 + 3 * DEPTH  # uniform numbers per image: which policy; of each step whether at all, sign or column, row


@functools.cache
def policies(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The operations, probabilities and levels, each [policies, DEPTH], found on cifar10 or svhn."""
    steps = json.loads(Path(__file__).with_name("autoaugment.json").read_text(encoding="utf-8"))[name]
    ops, chances, levels = np.moveaxis(np.array(steps, object), -1, 0)
    numbers = np.vectorize(list(AUTO_OPS).index)(ops)
    return numbers.astype(np.int32), chances.astype(np.float32), levels.astype(np.float32)


def sample(name: str, uniform: tf.Tensor) -> Policy:
    """A policy per image from uniform numbers [N, NUMBERS]; a step that is not applied becomes Identity."""
    tables = policies(name)
    chosen = tf.cast(uniform[:, 0] * len(tables[0]), tf.int32)
    ops, chance, level = (tf.gather(tf.constant(table), chosen) for table in tables)
    steps = tf.reshape(uniform[:, 1:], [-1, DEPTH, 3])
    ops = tf.where(steps[..., 0] < chance, ops, list(AUTO_OPS).index("Identity"))
    return {"ops": ops, "params": tf.concat([((level + 0.5) / LEVELS)[..., None], steps[..., 1:]], -1)}
