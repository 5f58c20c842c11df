"""CTAugment's state: one rate per bin of every parameter, how policies are sampled from the rates, how rates learn."""
import numpy as np
import tensorflow as tf

from libml.augment.ops import OPS, Policy

PARAMETERS = max(op.parameters for op in OPS.values())  # columns of policy["params"]
_LEARNED = max(len(op.bins) for op in OPS.values())  # of which the first have bins
MAX_BINS = max(max(op.bins, default=0) for op in OPS.values())
PROBE, TRAINING = 1 + PARAMETERS, 1 + PARAMETERS + _LEARNED  # uniform numbers per operation
RATES_SHAPE = (len(OPS), _LEARNED, MAX_BINS)

BINS = np.array([op.bins + (0,) * (_LEARNED - len(op.bins)) for op in OPS.values()], np.int32)  # [ops, 2], 0: none
_LARGEST = np.nextafter(np.float32(1), np.float32(0))  # parameters stay below 1


def sample_probe(uniform: tf.Tensor) -> Policy:
    """A probe policy per image from uniform numbers [N, depth, 1 + PARAMETERS]: everything equally likely."""
    return {"ops": tf.cast(uniform[..., 0] * len(OPS), tf.int32), "params": uniform[..., 1 : 1 + PARAMETERS]}


def sample_training(rates: tf.Tensor, uniform: tf.Tensor, threshold: float, decay: float) -> Policy:
    """A training policy per image from uniform numbers [N, depth * TRAINING]: bins as the rates say, uniform within."""
    uniform = tf.reshape(uniform, [uniform.shape[0], -1, TRAINING])
    policy = sample_probe(uniform)
    p = tf.where(np.arange(MAX_BINS) < BINS[..., None], rates + (1 - decay), 0.0)
    p = tf.math.divide_no_nan(p, tf.reduce_max(p, -1, keepdims=True))
    p = tf.where(p < threshold, 0.0, p)
    p = tf.math.divide_no_nan(p, tf.reduce_sum(p, -1, keepdims=True))
    # Inverse transform: the first bin whose cumulated chance exceeds a uniform number.
    chance = tf.gather(tf.cumsum(p, axis=-1), policy["ops"])
    point = uniform[..., 1 + PARAMETERS :, None] * chance[..., -1:]
    chosen = tf.reduce_sum(tf.cast(chance <= point, tf.float32), -1)
    bins = tf.gather(tf.constant(BINS, tf.float32), policy["ops"])
    within = policy["params"][..., :_LEARNED]
    learned = tf.where(bins > 0, tf.minimum((chosen + within) / tf.maximum(bins, 1.0), _LARGEST), within)
    return {"ops": policy["ops"], "params": tf.concat([learned, policy["params"][..., _LEARNED:]], -1)}


def hits(policy: Policy) -> tf.Tensor:
    """Which rate every learned parameter of a policy falls on: flat index float32 [N, depth * 2], -1 for none."""
    bins = tf.gather(BINS, policy["ops"])
    u = tf.cast(policy["params"][..., :_LEARNED], tf.float64)
    chosen = tf.cast(u * tf.cast(bins, tf.float64) * 0.999, tf.int32)
    index = (policy["ops"][..., None] * _LEARNED + np.arange(_LEARNED)) * MAX_BINS + chosen
    index = tf.where(bins > 0, index, -1)
    return tf.cast(tf.reshape(index, [index.shape[0], -1]), tf.float32)


def updated_rates(rates: tf.Tensor, hit: tf.Tensor, proximity: tf.Tensor, decay: float) -> tf.Tensor:
    """rate = decay * rate + (1 - decay) * proximity for every hit [N, depth * 2] in batch order; proximity [N]."""
    # In closed form: n hits leave decay^n of the rate, and each adds (1 - decay) * decay^(later hits of the bin) of its
    # proximity. Dense sums, no scatter, so the result does not depend on the order of threads.
    proximity = tf.reshape(tf.ones_like(hit) * proximity[:, None], [-1, 1])
    hit = tf.reshape(hit, [-1, 1])
    place = tf.cumsum(tf.ones_like(hit))
    later = tf.where(place < place[:, 0], tf.cast(hit == hit[:, 0], tf.float32), 0.0)  # [hits, hits]
    later = tf.reduce_sum(later, 1, keepdims=True)
    mine = hit == tf.range(float(np.prod(RATES_SHAPE)))  # [hits, rates]
    gain = tf.reduce_sum(tf.where(mine, proximity * (1 - decay), 0.0) * tf.pow(decay, later), 0)
    kept = tf.pow(decay, tf.reduce_sum(tf.cast(mine, tf.float32), 0))
    return tf.reshape(kept, RATES_SHAPE) * rates + tf.reshape(gain, RATES_SHAPE)
