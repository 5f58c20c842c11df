"""Stateless losses and target transformations, per example and in float32; the caller averages and weights them."""
from __future__ import annotations

from collections.abc import Iterable

from libml.lazy import tf

# They keep logarithms and quotients finite, and are part of the definitions.
_EPSILON, _ALIGNMENT_EPSILON, _CONFORMAL_EPSILON = 1e-7, 1e-6, 1e-5


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
    """
    p = tf.nn.softmax(_float(logits))
    inside = tf.gather(p, reference, axis=-1, batch_dims=1) >= 1 - _float(alpha)
    return tf.where(inside, 0.0, clipped_kl(project(p, reference, alpha), p, _EPSILON))


def project_possibility(p: tf.Tensor, possibility: tf.Tensor) -> tf.Tensor:
    """Member t [N, C] with the smallest KL(t || p) of the credal set of possibility degrees pi [N, C] with max 1.

    The set is {t : sum of t_j over pi_j <= pi_k is at most pi_k, for every k}. With classes sorted by pi, t / p falls
    with pi and changes only where a constraint is tight. So the sums of t over the least possible classes, as a
    function of those of p, are the greatest convex function under the points (sum of p, pi) that starts at (0, 0).
    Its slope at class i is max_{a < i} min_{b >= i} (pi_b - pi_a) / (p_{a+1} + … + p_b). With pi = (1, alpha, alpha,
    …) this is `project`. Lienen, Demir & Hüllermeier, "Conformal Credal Self-Supervised Learning", COPA 2023.
    """
    p, pi = tf.maximum(_float(p), 1e-20), _float(possibility)
    num_classes = p.shape[-1]
    order = tf.argsort(pi, axis=-1, stable=True)  # rising
    p, pi = tf.gather(p, order, batch_dims=1), tf.gather(pi, order, batch_dims=1)
    below = tf.concat([tf.zeros_like(pi[:, :1]), pi[:, :-1]], 1)  # pi_a of the a classes below i
    after = tf.linalg.band_part(tf.ones([num_classes, num_classes]), 0, -1)  # [a, b]: class b is not among the a least
    mass = tf.cumsum(after * p[:, tf.newaxis], axis=-1)  # summed for each a, since a difference would lose digits
    slope = tf.where(after > 0, (pi[:, tf.newaxis] - below[..., tf.newaxis]) / tf.maximum(mass, 1e-20), 3e38)
    shift = 1
    while shift < num_classes:  # minimum over all b >= i, by doubling
        shifted = tf.pad(slope[..., shift:], [[0, 0], [0, 0], [0, shift]], constant_values=3e38)
        slope, shift = tf.minimum(slope, shifted), 2 * shift
    t = p * tf.reduce_max(tf.where(after > 0, slope, 0.0), axis=1)
    return tf.gather(t, tf.argsort(order, axis=-1), batch_dims=1)


def clipped_kl(target_probs: tf.Tensor, probs: tf.Tensor, least: float = _CONFORMAL_EPSILON) -> tf.Tensor:
    """KL(t || p) [N] of distributions, both clipped to [least, 1]: to 1e-5 in conformal credal learning."""
    t, p = (tf.clip_by_value(_float(x), least, 1.0) for x in (target_probs, probs))
    return tf.reduce_sum(t * tf.math.log(t / p), axis=-1)


def possibility_loss(logits: tf.Tensor, possibility: tf.Tensor) -> tf.Tensor:
    """Optimistic superset loss min_t KL(t || p) [N] over the credal set of `project_possibility`; 0 inside it."""
    p = tf.nn.softmax(_float(logits))
    p_fixed, pi = tf.stop_gradient(p), tf.stop_gradient(_float(possibility))
    least = _float(pi[:, tf.newaxis] <= pi[..., tf.newaxis])  # [k, j]: class j is at most as possible as k
    inside = tf.reduce_all(tf.linalg.matvec(least, p_fixed) <= pi + _CONFORMAL_EPSILON, axis=-1)
    return tf.where(inside, 0.0, clipped_kl(tf.stop_gradient(project_possibility(p_fixed, pi)), p))


def alpha_divergence(log_u: tf.Tensor, log_v: tf.Tensor, alpha: float) -> tf.Tensor:
    """D_a(u || v) = (sum_k u_k^a v_k^(1 - a) - 1) / (a (a - 1)) [N] of log-distributions [N, C].

    Its limits are KL(u || v) at a = 1 and KL(v || u) at a = 0 (Gong, Wang & Liu, "AlphaMatch", CVPR 2021). If u does
    not sum to 1, its sum stands for the 1.
    """
    log_u, log_v = _float(log_u), _float(log_v)
    if alpha == 1:
        terms = tf.exp(log_u) * (log_u - log_v)
    elif alpha == 0:
        terms = tf.exp(log_v) * (log_v - log_u)
    else:  # not the difference of two sums near 1, which would lose its digits
        terms = tf.exp(log_u) * tf.math.expm1((1 - alpha) * (log_v - log_u)) / (alpha * (alpha - 1))
    return tf.reduce_sum(terms, axis=-1)


def batch_mean_triplet(vectors: tf.Tensor, ids: tf.Tensor, used: tf.Tensor, margin: float) -> tf.Tensor:
    """Mean over anchors of max(0, margin + mean distance to others of the same id - to those of other ids), a scalar.

    Euclidean, of vectors [N, D] that are normalised here, with integer ids [N], where `used` [N] is 1, not 0. Anchors
    without a partner of either kind do not count.
    """
    v = tf.math.l2_normalize(_float(vectors), -1)
    squared = 2 - 2 * tf.matmul(v, v, transpose_b=True)
    apart = squared > 1e-6  # what is nearer than 0.001 drowns in rounding, and the root has no gradient at 0
    distance = tf.where(apart, tf.sqrt(tf.where(apart, squared, 1.0)), 0.0)
    both = used[:, tf.newaxis] * used
    same = ids[:, tf.newaxis] == ids
    positive = both * tf.cast(same, tf.float32) * (1 - tf.eye(v.shape[0]))
    negative = both * tf.cast(~same, tf.float32)
    counts = [tf.reduce_sum(pairs, 1) for pairs in (positive, negative)]
    near, far = (tf.math.divide_no_nan(tf.reduce_sum(pairs * distance, 1), count)
                 for pairs, count in zip((positive, negative), counts, strict=True))
    anchors = tf.cast((counts[0] > 0) & (counts[1] > 0), tf.float32)
    return tf.math.divide_no_nan(tf.reduce_sum(anchors * tf.nn.relu(margin + near - far)), tf.reduce_sum(anchors))
