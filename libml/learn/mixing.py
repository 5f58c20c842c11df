"""Mixing of images and targets, interleaving of batches, rotations, noise: stateless, and the same under XLA."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from libml.lazy import tf
from libml.randomness import bits, split, uniform

_KNOTS = 1025  # of the quantile function; linear in between, to within 1e-4 of the exact weight


def draw_labels(p: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Draws a class [N] from each of the distributions [N, C], by inverting the distribution function."""
    below = tf.cumsum(p, axis=-1)[:, :-1] <= uniform([p.shape[0], 1], seed)
    return tf.reduce_sum(tf.cast(below, tf.int32), -1)


def normal(shape: Sequence[int], seed: tf.Tensor) -> tf.Tensor:
    """Standard normal numbers, by inverting their distribution function."""
    inside = 2.0 ** -31 * (1 - 2.0 ** -23)  # never quite -1 or 1, where the inverse is infinite
    return 2 ** 0.5 * tf.math.erfinv(tf.cast(bits(shape, seed), tf.float32) * inside)


def beta_weights(n: int, *, beta: float, seed: tf.Tensor) -> tf.Tensor:
    """Mixing weights m = max(b, 1 - b) [n], b ~ Beta(beta, beta); beta = 0 is the limit m = 1.

    By inverting the distribution function: TensorFlow's gamma samples, the usual way to Beta, do not compile with XLA.
    The smaller part to the power of beta is nearly linear in the uniform number near 0: a small table of it is enough.
    """
    if not beta:
        return tf.ones([n])
    import scipy.special  # slow to import, and few methods mix

    smaller = scipy.special.betaincinv(beta, beta, np.linspace(0, 0.5, _KNOTS))  # quantiles of 1 - m
    table = tf.constant((2 * smaller) ** beta, tf.float32)
    position = uniform([n], seed) * (_KNOTS - 1)
    index = tf.minimum(tf.cast(position, tf.int32), _KNOTS - 2)
    low, high = tf.gather(table, index), tf.gather(table, index + 1)
    return 1 - 0.5 * (low + (high - low) * (position - tf.cast(index, tf.float32))) ** (1 / beta)


def mix(a: tf.Tensor, b: tf.Tensor, m: tf.Tensor) -> tf.Tensor:
    """m a + (1 - m) b with one weight m per row [n]."""
    m = tf.reshape(m, [-1] + [1] * (len(a.shape) - 1))
    return m * a + (1 - m) * b


def mixup(images: tf.Tensor, targets: tf.Tensor, *, beta: float, seed: tf.Tensor, one_weight: bool = False,
          ) -> tuple[tf.Tensor, tf.Tensor]:
    """Mixes images [n, H, W, channels] and targets [n, C] with a shuffled copy of themselves (Zhang et al. 2018).

    The weight of an image itself is at least that of its partner, so a row stays what it was, labelled or guessed
    (Berthelot et al. 2019, Eq. 9). Join several batches to mix across them. With `one_weight` all rows have the same.
    """
    n = images.shape[0]
    shuffle_seed, beta_seed = split(seed, 2)
    partner = tf.argsort(bits([n], shuffle_seed), stable=True)
    m = beta_weights(1 if one_weight else n, beta=beta, seed=beta_seed)
    return mix(images, tf.gather(images, partner), m), mix(targets, tf.gather(targets, partner), m)


def mixup_reversed(images: tf.Tensor, targets: tf.Tensor, *, beta: float, seed: tf.Tensor,
                   ) -> tuple[tf.Tensor, tf.Tensor]:
    """Mixes images [n, H, W, channels] and targets [n, C] with themselves in reverse order."""
    m = beta_weights(images.shape[0], beta=beta, seed=seed)
    return mix(images, images[::-1], m), mix(targets, targets[::-1], m)


def interleave(batches: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Deals out the rows of equally large batches so that each result has equal shares of all; undoes itself."""
    count, size = len(batches), batches[0].shape[0]
    row = np.arange(size)
    sources = [(row - j) % count * size + row for j in range(count)]
    joined = tf.concat(batches, 0)
    return [tf.gather(joined, source) for source in sources]


def forward_interleaved(step, images: tf.Tensor, batch: int) -> tf.Tensor:
    """Logits of images [n, …] in forward passes of `batch` images, each an even mixture of all of them.

    Batch normalisation then sees the same kind of batch each time, and moves its averages with the first one only.
    """
    batches = interleave(tf.split(images, images.shape[0] // batch))
    logits = [step.forward(part, update_statistics=i == 0) for i, part in enumerate(batches)]
    return tf.concat(interleave(logits), 0)


def rotate_quarters(images: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Turns the first quarter of the images by 0, the next by 90, 180 and 270 degrees; returns the turns [n] too."""
    n, height, width = images.shape[:3]
    if height != width:
        raise ValueError(f"Rotations need square images, got {height}x{width}.")
    turns = np.arange(n) * 4 // n
    a, b, c, d = tf.split(images, np.bincount(turns, minlength=4))
    swap = [0, 2, 1, 3]  # rows and columns; tf.image.rot90 would add assertions and branches to the graph
    rotated = [a, tf.transpose(b, swap)[:, ::-1], c[:, ::-1, ::-1], tf.transpose(d[:, ::-1], swap)]
    return tf.concat(rotated, 0), tf.constant(turns, tf.int32)
