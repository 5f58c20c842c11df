"""How good pseudo-labels are: compared with labels that were held back, which no loss ever sees."""
from __future__ import annotations

import numpy as np

from libml.lazy import tf


def pseudo_label_quality(scores: tf.Tensor, labels: tf.Tensor, mask: tf.Tensor | None = None) -> dict[str, tf.Tensor]:
    """Compares argmax(scores [N, C]) with held-back labels (-1: unknown), over all images and over those used.

    Returns the shares of images that count, and of images that count and are right: the quotient of their sums is the
    accuracy over any number of batches, even if some batch has no image that counts. Where there are several views of
    the images, the first one counts.
    """
    n = labels.shape[0]
    mask = tf.ones(labels.shape) if mask is None else mask[:n]
    known = tf.cast(labels >= 0, tf.float32)
    correct = known * tf.cast(tf.argmax(scores[:n], -1, labels.dtype) == labels, tf.float32)
    return {"monitors/pseudo_known": tf.reduce_mean(known),
            "monitors/pseudo_known_correct": tf.reduce_mean(correct),
            "monitors/pseudo_used": tf.reduce_mean(known * mask),
            "monitors/pseudo_used_correct": tf.reduce_mean(correct * mask)}


def finish(scalars: dict[str, float]) -> dict[str, float]:
    """Turns shares, averaged over batches, into the accuracy of all pseudo-labels and of those that were used.

    Where there were none, it is left out; of tensors, it is NaN.
    """
    scalars = dict(scalars)
    for name, accuracy in (("known", "pseudo_accuracy"), ("used", "pseudo_accuracy_masked")):
        counted, right = (scalars.pop(f"monitors/pseudo_{name}{part}", 0.0) for part in ("", "_correct"))
        if not isinstance(counted, float) or counted:
            scalars[f"monitors/{accuracy}"] = right / counted
    return scalars


def credal_coverage(y: np.ndarray, alpha: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Compares sets {p : p(y) >= 1 - alpha} [N] with held-back labels (-1: unknown); {} where none is known.

    `truth` is the share of sets that hold the true class, as the distribution that gives it all; `upper` the mean of
    the largest probability that a set's members give the true class: 1 if that is y, else alpha.
    """
    known = labels >= 0
    if not known.any():
        return {}
    right, alpha = (y == labels)[known], np.asarray(alpha, np.float64)[known]
    return {"truth": float(np.mean(right | (alpha >= 1))), "upper": float(np.mean(np.where(right, 1.0, alpha)))}
