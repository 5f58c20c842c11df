"""Stateless losses and target transformations, per example and in float32; the caller averages and weights them."""
from __future__ import annotations

from collections.abc import Iterable

from libml.lazy import tf

_EPSILON = 1e-7  # keeps logarithms and quotients finite in the credal loss; part of its definition
_ALIGNMENT_EPSILON = 1e-6


def _float(x) -> tf.Tensor:
    return tf.cast(x, tf.float32)


def cross_entropy(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Cross-entropy -log p_y [N] of logits [N, C] with integer labels y [N]."""
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=_float(logits))


def soft_cross_entropy(logits: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
    """Cross-entropy -sum_k t_k log p_k [N] of logits [N, C] with target distributions t [N, C]."""
    return tf.nn.softmax_cross_entropy_with_logits(labels=_float(targets), logits=_float(logits))


def entropy(logits: tf.Tensor) -> tf.Tensor:
    """Shannon entropy -sum_k p_k log p_k [N] of p = softmax(logits), in nats (Grandvalet & Bengio 2005)."""
    log_p = tf.nn.log_softmax(_float(logits))
    return -tf.reduce_sum(tf.exp(log_p) * log_p, axis=-1)


def kl_divergence(target_probs: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """KL(t || softmax(logits)) = sum_k t_k log(t_k / p_k) [N], with 0 log 0 = 0; differentiable in both."""
    t = _float(target_probs)
    return tf.reduce_sum(tf.math.xlogy(t, t) - t * tf.nn.log_softmax(_float(logits)), axis=-1)


def squared_error(probs: tf.Tensor, target: tf.Tensor) -> tf.Tensor:
    """Brier-like consistency mean_k (p_k - t_k)^2 [N] of distributions [N, C] (Laine & Aila 2017)."""
    return tf.reduce_mean(tf.math.squared_difference(_float(probs), _float(target)), axis=-1)


def weight_decay(kernels: Iterable) -> tf.Tensor:
    """Sum of 0.5 ||W||^2 over the kernels, a scalar."""
    return sum((tf.nn.l2_loss(_float(kernel)) for kernel in kernels), start=tf.zeros([]))


def confidence_mask(q: tf.Tensor, threshold: float) -> tf.Tensor:
    """1 where max_k q_k >= threshold, else 0 [N]: FixMatch's selection (Sohn et al. 2020, Eq. 4)."""
    return _float(tf.reduce_max(_float(q), axis=-1) >= threshold)


def align(q: tf.Tensor, *, p_data: tf.Tensor, p_model: tf.Tensor) -> tf.Tensor:
    """Distribution alignment: q_k p_data_k / p_model_k, normalised [N, C] (Berthelot et al. 2020, ReMixMatch)."""
    a = _float(q) * ((_ALIGNMENT_EPSILON + _float(p_data)) / (_ALIGNMENT_EPSILON + _float(p_model)))
    return a / tf.reduce_sum(a, axis=-1, keepdims=True)


def sharpen(p: tf.Tensor, temperature: float) -> tf.Tensor:
    """p_k^(1/T), normalised [N, C] (Berthelot et al. 2019, MixMatch, Eq. 7)."""
    p = _float(p)
    p = (p / tf.reduce_max(p, axis=-1, keepdims=True)) ** (1 / temperature)  # the largest is 1: the sum cannot vanish
    return p / tf.reduce_sum(p, axis=-1, keepdims=True)


def smooth_targets(labels: tf.Tensor, alpha: tf.Tensor, num_classes: int) -> tf.Tensor:
    """Label smoothing (1 - alpha) onehot(y) + alpha / C [N, C], alpha a number or [N] (Szegedy et al. 2016)."""
    alpha = _float(alpha)[..., tf.newaxis]
    return (1 - alpha) * tf.one_hot(labels, num_classes) + alpha / num_classes


def project(p: tf.Tensor, reference: tf.Tensor, alpha: tf.Tensor) -> tf.Tensor:
    """Projection p^r [N, C] of p onto the border of the credal set {t : t_y >= 1 - alpha}, for p outside the set.

    p^r_y = 1 - alpha and p^r_k = alpha p_k / sum_{j != y} p_j elsewhere, with y the reference class [N]: the member of
    the set with the smallest KL(p^r || p) (Lienen & Hüllermeier, "Credal Self-Supervised Learning", NeurIPS 2021).
    """
    p = _float(p)
    alpha = _float(alpha)[..., tf.newaxis]
    is_reference = tf.one_hot(reference, p.shape[-1], on_value=True, off_value=False)
    others = tf.where(is_reference, 0.0, p)
    # Summing the others keeps the digits that 1 - p_y would lose.
    return tf.where(is_reference, 1 - alpha, alpha * others / (tf.reduce_sum(others, -1, keepdims=True) + _EPSILON))


def credal_loss(logits: tf.Tensor, reference: tf.Tensor, alpha: tf.Tensor) -> tf.Tensor:
    """Optimistic superset loss min_{t in Q} KL(t || p) [N], p = softmax(logits), Q = {t : t_y >= 1 - alpha}.

    0 if p_y >= 1 - alpha, else KL(p^r || p) with p^r of `project`, both clipped to [1e-7, 1]; but for these constants
    (1 - alpha) log((1 - alpha) / p_y) + alpha log(alpha / (1 - p_y)). alpha = 0 is cross-entropy, alpha = 1 no loss.
    Lienen & Hüllermeier, "Credal Self-Supervised Learning", NeurIPS 2021.
    """
    p = tf.nn.softmax(_float(logits))
    target = tf.clip_by_value(project(p, reference, alpha), _EPSILON, 1.0)
    divergence = tf.reduce_sum(target * tf.math.log(target / tf.clip_by_value(p, _EPSILON, 1.0)), axis=-1)
    p_reference = tf.gather(p, reference, axis=-1, batch_dims=1)
    return tf.where(p_reference >= 1 - _float(alpha), 0.0, divergence)
