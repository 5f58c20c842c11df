"""Training batches that are a pure function of (seed, step): nothing to remember, nothing to replay."""
from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

from libml.errors import UserError

if TYPE_CHECKING:
    from libml.data.sets import SSLData

READERS, PREFETCHED = 2, 4  # batches that are read at a time, and that wait to be used


def stream_indices(step: tf.Tensor, *, seed: int, stream: int, total: int, batch: int, first: int,
                   count: int) -> tf.Tensor:
    """Returns elements first .. first + count of a step's batch from an endless stream: position p belongs to epoch
    p // total, whose permutation of 0 .. total - 1 is a function of (seed, stream, epoch)."""
    if count == 0:  # a method that uses no unlabelled images
        return tf.zeros([0], tf.int64)
    positions = tf.cast(step, tf.int64) * batch + first + tf.range(count, dtype=tf.int64)
    epoch = positions // total
    key = tf.constant([seed, stream], tf.int64)
    seeds = tf.concat([tf.tile(key[None], [count, 1]), epoch[:, None]], 1)
    # The raw op: tf.random.experimental.index_shuffle does not take one seed per element in TensorFlow 2.21.
    shuffled = tf.raw_ops.RandomIndexShuffle(index=positions % total, seed=seeds, rounds=8,
                                             max_index=tf.constant(total - 1, tf.int64))
    return tf.ensure_shape(shuffled, [count])


def options() -> tf.data.Options:
    found = tf.data.Options()
    found.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    # Its thread sleeps as long as the run has lasted, up to a minute: a process with one core waits for it at its end.
    found.autotune.enabled = False
    return found


def check_batch(batch: int, num_shards: int) -> None:
    """Raises UserError, naming the nearest batch that would do, where a batch does not divide over the replicas."""
    if batch % num_shards:
        nearest = num_shards * max(1, math.ceil(batch / num_shards - 0.5))  # the lower one of two
        raise UserError(f"A batch of {batch} does not divide over {num_shards} replicas; the nearest that does is "
                        f"{nearest}.")


def batches(data: SSLData, *, batch: int, uratio: int, seed: int = 0, start_step: int | tf.Tensor = 0,
            num_shards: int = 1, first_shard: int = 0, local_shards: int = 1) -> tf.data.Dataset:
    """Returns the endless training batches from `start_step` on.

    With several replicas, element i is shard `first_shard + i % local_shards` of step `start_step + i // local_shards`:
    the shards of a step together are the same global batch, however many there are. Labels of unlabelled images, -1
    where unknown, are for monitoring only; indices are positions in `data.labeled` and `data.unlabeled`.
    """
    check_batch(batch, num_shards)
    images, labels = np.asarray(data.images), data.labels.astype(np.int32)  # asarray: a plain view of a memory map
    labeled, classes, unlabeled = data.labeled, data.labeled_classes.astype(np.int32), data.unlabeled
    labeled_count = batch // num_shards
    unlabeled_count = labeled_count * uratio
    dtype = tf.as_dtype(images.dtype)
    shapes = {"labeled": (labeled_count, *images.shape[1:]), "label": (labeled_count,),
              "unlabeled": (unlabeled_count, *images.shape[1:]), "unlabeled_label": (unlabeled_count,)}

    def gather(x: np.ndarray, u: np.ndarray):
        return images[labeled[x]], classes[x], images[unlabeled[u]], labels[unlabeled[u]]

    @tf.autograph.experimental.do_not_convert  # it has no control flow, and a start would take 0.1 s more
    def make(element: tf.Tensor) -> dict[str, tf.Tensor]:
        step = start_step + element // local_shards
        shard = first_shard + element % local_shards
        x = stream_indices(step, seed=seed, stream=0, total=len(labeled), batch=batch,
                           first=shard * labeled_count, count=labeled_count)
        u = stream_indices(step, seed=seed, stream=1, total=len(unlabeled), batch=batch * uratio,
                           first=shard * unlabeled_count, count=unlabeled_count)
        # NumPy reads the memory map in place; a TensorFlow constant would be a second copy of the dataset.
        values = tf.numpy_function(gather, [x, u], [dtype, tf.int32, dtype, tf.int32], stateful=False)
        parts = {name: tf.ensure_shape(value, shapes[name]) for name, value in zip(shapes, values, strict=True)}
        return parts | {"labeled_index": tf.cast(x, tf.int32), "unlabeled_index": tf.cast(u, tf.int32)}

    return (tf.data.Dataset.range(np.iinfo(np.int64).max)
            .map(make, num_parallel_calls=READERS, deterministic=True).prefetch(PREFETCHED).with_options(options()))
