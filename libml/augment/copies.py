"""Views of features: stored copies, one of which each draw takes, or the features themselves with noise."""
from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import tensorflow as tf

from libml.augment.augmenter import _LABELED, _STRONG, _WEAK, uniform_numbers
from libml.augment.spec import AugmentSpec, parse_augment
from libml.randomness import by_philox, fold_in

# Of features without copies: the standard deviations of the noise, in those of each dimension, and the part of the
# dimensions that a strong view loses.
WEAK_NOISE, STRONG_NOISE, STRONG_DROPPED = 0.1, 0.3, 0.3


class Copies:
    """The `Augmenter` of features [N, views, 1, D]: the plain view, then `counts` of weak and of strong ones.

    Without copies weak views are the features with WEAK_NOISE, strong ones with STRONG_NOISE and STRONG_DROPPED of
    their dimensions at the mean; `statistics` are mean and standard deviation per dimension.
    """

    learns_rates = on_gpu = jit_compile = False
    stored_dtype = tf.float16

    def __init__(self, spec: AugmentSpec | str, *, image_shape: Sequence[int], counts: Sequence[int],
                 statistics: tuple[np.ndarray, np.ndarray]):
        self.spec = parse_augment(spec) if isinstance(spec, str) else spec
        self.image_shape, self.counts = tuple(image_shape), tuple(counts)
        self.statistics = tuple(np.asarray(x, np.float32) for x in statistics)
        self.stored_shape = (1 + sum(self.counts), *self.image_shape[1:])

    def get_config(self) -> dict:
        return {"spec": str(self.spec), "image_shape": self.image_shape, "counts": self.counts,
                "statistics": [x.tolist() for x in self.statistics]}

    @classmethod
    def from_config(cls, config: dict) -> Copies:
        return cls(**config)

    def _view(self, features: tf.Tensor, seed: tf.Tensor, stream: int) -> tf.Tensor:
        """One view of each [N, 1, 1, D], of the kind that the stream of random numbers stands for."""
        n, (weak, strong) = features.shape[0], self.counts
        first, count, noise = (1, weak, WEAK_NOISE) if stream != _STRONG else (1 + weak, strong, STRONG_NOISE)
        if count:
            chosen = first + tf.cast(uniform_numbers(seed, stream, n, 1)[:, 0] * count, tf.int32)
            return tf.gather(features, chosen, axis=1, batch_dims=1)[:, None]
        x, (mean, deviation) = tf.cast(features[:, :1], tf.float32), self.statistics
        if sum(self.counts):  # there are copies, of the other kind
            return x
        draw = partial(tf.raw_ops.StatelessRandomNormalV2, shape=[n, 1, 1, x.shape[-1]])
        x += noise * deviation * by_philox(draw, fold_in(seed, stream))
        if stream != _STRONG:
            return x
        kept = uniform_numbers(fold_in(seed, stream), stream, n, x.shape[-1])[:, None, None] >= STRONG_DROPPED
        return tf.where(kept, x, mean)

    def labeled(self, features: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        """A weak view of labelled images; the plain one where `--augment` has x for them."""
        return features[:, :1] if self.spec.labeled == "x" else self._view(features, seed, _LABELED)

    def weak(self, features: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        return features[:, :1] if self.spec.weak == "x" else self._view(features, seed, _WEAK)

    def strong(self, features: tf.Tensor, seed: tf.Tensor, rates: None = None, part: str = "strong") -> tf.Tensor:
        return tf.cast(self._view(features, seed, _STRONG), tf.float32)
