"""Optimisers as pure functions from gradients to new values, so that one place can assign them on every replica."""
from collections.abc import Sequence

import tensorflow as tf

Tensors = list[tf.Tensor]


class Nesterov:
    """SGD with Nesterov momentum in the form TensorFlow 1 had: the velocity sums gradients, not steps.

    v <- m v + g;  w <- w - lr (g + m v). Unlike Keras's form, a change of the learning rate acts on the whole velocity
    at once.
    """

    slots_per_weight = 1

    def __init__(self, momentum: float = 0.9):
        self.momentum = momentum

    def update(self, weights: Sequence, gradients: Sequence, slots: Sequence, lr: tf.Tensor, updates: tf.Tensor,
               ) -> tuple[Tensors, Tensors]:
        """Returns the new weights and slots."""
        del updates
        velocity = [self.momentum * v + g for v, g in zip(slots, gradients, strict=True)]
        new = [w - lr * (g + self.momentum * v) for w, g, v in zip(weights, gradients, velocity, strict=True)]
        return new, velocity
