"""Optimisers as pure functions from gradients to new values, so that one place can assign them on every replica."""
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from libml.lazy import tf

if TYPE_CHECKING:
    Tensors = list[tf.Tensor]


class Nesterov:
    """SGD with Nesterov momentum in the form TensorFlow 1 had: the velocity sums gradients, not steps.

    v <- m v + g;  w <- w - lr (g + m v), or w - lr v without Nesterov's look-ahead. Unlike Keras's form, a change of
    the learning rate acts on the whole velocity at once.
    """

    slots_per_weight = 1

    def __init__(self, momentum: float = 0.9, nesterov: bool = True):
        self.momentum, self.nesterov = momentum, nesterov

    def update(self, weights: Sequence, gradients: Sequence, slots: Sequence, lr: tf.Tensor, updates: tf.Tensor,
               ) -> tuple[Tensors, Tensors]:
        """Returns the new weights and slots."""
        del updates
        velocity = [self.momentum * v + g for v, g in zip(slots, gradients, strict=True)]
        if not self.nesterov:
            return [w - lr * v for w, v in zip(weights, velocity, strict=True)], velocity
        new = [w - lr * (g + self.momentum * v) for w, g, v in zip(weights, gradients, velocity, strict=True)]
        return new, velocity


class Adam:
    """Adam (Kingma & Ba 2015) with epsilon outside the bias correction, as the paper's faster form and TensorFlow 1."""

    slots_per_weight = 2

    def __init__(self, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8):
        self.beta1, self.beta2, self.epsilon = beta1, beta2, epsilon

    def update(self, weights: Sequence, gradients: Sequence, slots: Sequence, lr: tf.Tensor, updates: tf.Tensor,
               ) -> tuple[Tensors, Tensors]:
        """Returns the new weights and slots; `updates` counts those before this one."""
        time = tf.cast(updates + 1, tf.float32)
        lr = lr * tf.sqrt(1 - self.beta2 ** time) / (1 - self.beta1 ** time)
        first, second = slots[:len(weights)], slots[len(weights):]
        first = [m + (1 - self.beta1) * (g - m) for m, g in zip(first, gradients, strict=True)]
        second = [v + (1 - self.beta2) * (g * g - v) for v, g in zip(second, gradients, strict=True)]
        new = [w - lr * m / (tf.sqrt(v) + self.epsilon) for w, m, v in zip(weights, first, second, strict=True)]
        return new, [*first, *second]
