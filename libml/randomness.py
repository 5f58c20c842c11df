"""Randomness that follows from seeds: numbers in the graph, seeds of layers, what Keras draws. Needs no TensorFlow."""
from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np

from libml.lazy import tf

# Where seeds are made: random kernels take them from the host, which would else wait for the device at each of them.
HOST = "CPU:0"
PHILOX = 1  # TensorFlow's number for it
_GENERATORS = threading.RLock()  # those of the process, which runs in several threads would draw from at once


def by_philox(draw: Callable[..., tf.Tensor], seed: tf.Tensor) -> tf.Tensor:
    """Calls a raw operation of a generator named Philox, as tf.random does with a dozen operations more."""
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
    return draw(key=key, counter=counter, alg=PHILOX)


def fold_in(seed: tf.Tensor, number: int | tf.Tensor) -> tf.Tensor:
    """Derives an independent seed [2] from a seed and a number: tf.random.experimental.stateless_fold_in."""
    with tf.device(HOST):
        draw = partial(tf.raw_ops.StatelessRandomUniformFullIntV2, shape=[], dtype=tf.int32)
        return tf.stack([by_philox(draw, seed), number])


def split(seed: tf.Tensor, count: int) -> list[tf.Tensor]:
    """Derives independent seeds [2] from a seed."""
    with tf.device(HOST):
        return tf.unstack(tf.random.split(seed, count, alg="philox"))


def bits(shape: Sequence[int] | tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Random integers over all of int32, because XLA makes other floats of the same bits."""
    return tf.random.stateless_uniform(shape, seed, minval=None, maxval=None, dtype=tf.int32, alg="philox")


def uniform(shape: Sequence[int] | tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Numbers in [0, 1], all but evenly spread; float32 in any precision, as half would distort a rate."""
    return tf.cast(bits(shape, seed), tf.float32) * 2.0 ** -32 + 0.5


def derived_seed(seed: int | None, *place: int) -> int | None:
    """Returns the seed of a place, apart from those of all other places; None of None."""
    return None if seed is None else int(np.random.SeedSequence([seed, *place]).generate_state(1)[0])


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Makes what Keras and NumPy draw without a seed of its own follow from this one (unless None)."""
    with _GENERATORS:
        before = random.getstate(), np.random.get_state()
        if seed is not None:
            random.seed(seed)  # Keras's initialisers draw their seeds here
            np.random.seed(np.random.SeedSequence(seed).generate_state(1))
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
