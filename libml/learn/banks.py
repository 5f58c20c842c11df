"""Averages, queues and tables that a method keeps as state: of fixed size, the same on all replicas."""
from __future__ import annotations

from libml.lazy import tf


def running_mean(old: tf.Tensor, new: tf.Tensor, decay: float) -> tf.Tensor:
    """Returns decay * old + (1 - decay) * new; where old is all zeros, which means that nothing was seen yet, new."""
    return tf.where(tf.reduce_any(old != 0), old + (1 - decay) * (new - old), new)


def push(queue: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """Returns a queue [n, …] with new rows [m, …], m <= n, at its end, the oldest m gone."""
    return tf.concat([queue[rows.shape[0]:], rows], 0)


def last_occurrence(keys: tf.Tensor, counts: tf.Tensor | None = None) -> tf.Tensor:
    """Returns, for each of n keys [n], the position of the last equal one that counts ([n] bool; None: all), or -1.

    A table whose rows are written by keys that repeat holds what the device wrote last, unless all write the same.
    """
    positions = tf.range(keys.shape[0])
    same = keys[:, tf.newaxis] == keys
    return tf.reduce_max(tf.where(same if counts is None else same & counts, positions, -1), axis=1)
