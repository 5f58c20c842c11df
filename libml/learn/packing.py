"""Many tensors as a few vectors, so that an update is a handful of operations instead of a handful per tensor."""
from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from libml.lazy import tf


class Packing:
    """Which of some tensors make up which vector, and in which order.

    Args:
        shapes: of the tensors.
        vectors: positions of the tensors of each vector; tensors of a vector have one dtype.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], vectors: Iterable[Sequence[int]]):
        self.shapes = [tuple(shape) for shape in shapes]
        self.vectors = [list(vector) for vector in vectors]

    def vector(self, tensors: Mapping[int, tf.Tensor] | Sequence[tf.Tensor], number: int) -> tf.Tensor:
        """Returns one vector of tensors by position."""
        return tf.concat([tf.reshape(tensors[i], [-1]) for i in self.vectors[number]], 0)

    def pack(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns all vectors."""
        return [self.vector(tensors, number) for number in range(len(self.vectors))]

    def tensors(self, vector: tf.Tensor, number: int) -> dict[int, tf.Tensor]:
        """Returns the tensors of one vector by position."""
        positions = self.vectors[number]
        parts = tf.split(vector, [math.prod(self.shapes[i]) for i in positions])
        return {i: tf.reshape(part, self.shapes[i]) for i, part in zip(positions, parts, strict=True)}

    def unpack(self, vectors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns all tensors."""
        found: dict[int, tf.Tensor] = {}
        for number, vector in enumerate(vectors):
            found |= self.tensors(vector, number)
        return [found[i] for i in range(len(self.shapes))]
