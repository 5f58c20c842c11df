"""Many tensors as a few vectors, and what replicas tell each other in them."""
from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from libml.lazy import tf

Kind = TypeVar("Kind", bound=Hashable)
Means = TypeVar("Means")  # a tensor, or tensors in lists and dicts
Rows = TypeVar("Rows")  # likewise


class Packing:
    """Which tensors, by position, make up which vector, in which order; those of a vector have one dtype."""

    def __init__(self, shapes: Sequence[Sequence[int]], vectors: Iterable[Sequence[int]]):
        self.shapes = [tuple(shape) for shape in shapes]
        self.vectors = [list(vector) for vector in vectors]

    def pack(self, tensors: Mapping[int, tf.Tensor] | Sequence[tf.Tensor],
             numbers: Iterable[int] | None = None) -> list[tf.Tensor]:
        """Returns all vectors, or those of some numbers, of tensors by position."""
        vectors = self.vectors if numbers is None else [self.vectors[number] for number in numbers]
        return [tf.concat([tf.reshape(tensors[i], [-1]) for i in positions], 0) for positions in vectors]

    def unpack(self, vectors: Iterable[tf.Tensor]) -> list[tf.Tensor]:
        found: dict[int, tf.Tensor] = {}
        for vector, positions in zip(vectors, self.vectors, strict=True):
            parts = tf.split(vector, [math.prod(self.shapes[i]) for i in positions])
            found |= {i: tf.reshape(part, self.shapes[i]) for i, part in zip(positions, parts, strict=True)}
        return [found[i] for i in range(len(self.shapes))]


def by_kind(kinds: Mapping[int, Kind]) -> dict[Kind, list[int]]:
    found: dict[Kind, list[int]] = {}
    for position, kind in kinds.items():
        found.setdefault(kind, []).append(position)
    return found


def replicas() -> tf.distribute.ReplicaContext | None:
    """Returns the context of this replica, or None where it is the only one."""
    context = tf.distribute.get_replica_context()
    return None if context is None or context.num_replicas_in_sync == 1 else context


def exchange(means: Means, rows: Rows) -> tuple[Means, Rows]:
    """Returns means of floats over all replicas (what is no float stays), and tensors [n, …] of one after the other.

    Gradients flow back to floats. All of it is the sum of one vector (and one more for float64): NCCL is known to hang
    with several sums in flight, and TensorFlow's own way to gather asks for shapes first, through the host. Of what is
    gathered each replica has zeros in place of the others' rows, so that the sum is exact; what is no float goes as its
    bytes.
    """
    context = replicas()
    if context is None:
        return means, rows
    floats, local = [t for t in tf.nest.flatten(means) if t.dtype.is_floating], tf.nest.flatten(rows)
    count = context.num_replicas_in_sync
    own = tf.one_hot(context.replica_id_in_sync_group, count, on_value=True, off_value=False)
    sent = [_as_floats(tensor) for tensor in floats]
    for tensor in map(_as_floats, local):
        sent.append(tf.where(tf.reshape(own, [-1] + [1] * len(tensor.shape)), tensor, tf.zeros([], tensor.dtype)))
    packing = Packing([tensor.shape for tensor in sent], by_kind({i: t.dtype for i, t in enumerate(sent)}).values())
    sums = packing.unpack(context.all_reduce(tf.distribute.ReduceOp.SUM, vector) for vector in packing.pack(sent))
    averages = iter(tf.cast(total / count, tensor.dtype) for total, tensor in zip(sums, floats, strict=False))
    everywhere = [_as_before(tf.reshape(total, [-1, *total.shape[2:]]), tensor.dtype)
                  for total, tensor in zip(sums[len(floats):], local, strict=True)]
    return (tf.nest.map_structure(lambda t: next(averages) if t.dtype.is_floating else t, means),
            tf.nest.pack_sequence_as(rows, everywhere))


def _as_floats(tensor: tf.Tensor) -> tf.Tensor:
    if tensor.dtype.is_floating:
        return tensor if tensor.dtype == tf.float64 else tf.cast(tensor, tf.float32)
    return tf.cast(tensor if tensor.dtype == tf.bool else tf.bitcast(tensor, tf.uint8), tf.float32)


def _as_before(floats: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    if dtype.is_floating or dtype == tf.bool:
        return tf.cast(floats, dtype)
    return tf.bitcast(tf.cast(floats, tf.uint8), dtype)
