"""Losses: gold values in NumPy float64, gradients, limits, and the geometry of the credal loss."""
import numpy as np
import pytest
import tensorflow as tf
from helpers import softmax

from libml.learn import losses

RNG = np.random.default_rng(0)
N, K = 64, 7
LOGITS = RNG.normal(0, 2, (N, K))
LABELS = RNG.integers(0, K, N)
ALPHA = RNG.uniform(0.02, 0.98, N)
TARGETS = RNG.dirichlet(np.ones(K), N)
ONEHOT = np.eye(K)[LABELS]
# float32 against float64: inputs rounded at 6e-8, losses up to 10, a few roundings each.
TOLERANCE = dict(rtol=1e-5, atol=2e-6)
# The constants 1e-7 of the credal loss shift it by up to 1e-7 times a logarithm per class, or alpha 1e-7 / (1 - p_y).
CREDAL = dict(rtol=1e-5, atol=1e-5)


P = softmax(LOGITS)
P_Y = P[np.arange(N), LABELS]


def f32(x):
    return tf.constant(x, tf.float32)


def value_and_gradient(f, x):
    x = tf.convert_to_tensor(x)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = f(x)
    return y.numpy(), tape.gradient(y, x).numpy()


def numeric_gradient(f, x, eps=1e-6):
    """Central differences of a per-example function in float64; their error is about 1e-9."""
    result = np.zeros_like(x)
    for k in range(x.shape[-1]):
        step = np.zeros_like(x)
        step[:, k] = eps
        result[:, k] = (f(x + step) - f(x - step)) / (2 * eps)
    return result


GOLD = {
    "cross_entropy": (lambda x: losses.cross_entropy(x, LABELS), lambda x: -np.log(softmax(x)[np.arange(N), LABELS])),
    "soft_cross_entropy": (lambda x: losses.soft_cross_entropy(x, f32(TARGETS)),
                           lambda x: -np.sum(TARGETS * np.log(softmax(x)), -1)),
    "entropy": (losses.entropy, lambda x: -np.sum(softmax(x) * np.log(softmax(x)), -1)),
    "kl_divergence": (lambda x: losses.kl_divergence(f32(TARGETS), x),
                      lambda x: np.sum(TARGETS * np.log(TARGETS / softmax(x)), -1)),
    "kl_divergence_first": (lambda x: losses.kl_divergence(tf.nn.softmax(x), f32(LOGITS[::-1])),
                            lambda x: np.sum(softmax(x) * np.log(softmax(x) / P[::-1]), -1)),
    "squared_error": (lambda x: losses.squared_error(tf.nn.softmax(x), f32(TARGETS)),
                      lambda x: np.mean((softmax(x) - TARGETS) ** 2, -1)),
    "sharpen": (lambda x: losses.sharpen(tf.nn.softmax(x), 0.5)[:, 0], lambda x: softmax(x / 0.5)[:, 0]),
}


@pytest.mark.parametrize("name", GOLD)
def test_gold_values_and_gradients(name):
    loss, gold = GOLD[name]
    value, gradient = value_and_gradient(loss, f32(LOGITS))
    assert value.shape == (N,) and value.dtype == np.float32
    np.testing.assert_allclose(value, gold(LOGITS), **TOLERANCE)
    np.testing.assert_allclose(gradient, numeric_gradient(gold, LOGITS), **TOLERANCE)


def test_transformations():
    p_data, p_model = RNG.dirichlet(np.ones(K), 2)
    expected = P * (1e-6 + p_data) / (1e-6 + p_model)
    expected /= expected.sum(-1, keepdims=True)
    np.testing.assert_allclose(losses.align(f32(P), p_data=p_data, p_model=p_model), expected, **TOLERANCE)
    np.testing.assert_allclose(losses.align(f32(P), p_data=p_data, p_model=p_data), P, **TOLERANCE)
    assert np.isfinite(losses.align(f32(P), p_data=np.eye(K)[0], p_model=np.eye(K)[1])).all()

    expected = (1 - ALPHA[:, None]) * ONEHOT + ALPHA[:, None] / K
    np.testing.assert_allclose(losses.smooth_targets(LABELS, ALPHA, K), expected, **TOLERANCE)
    np.testing.assert_allclose(losses.smooth_targets(LABELS, 0.25, K), 0.75 * ONEHOT + 0.25 / K, **TOLERANCE)

    np.testing.assert_allclose(losses.sharpen(f32(P), 1.0), P, **TOLERANCE)
    cold = losses.sharpen(f32([[0.1] * 10, [0.2] + [0.8 / 9] * 9, [1.0] + [0.0] * 9]), 0.001)
    np.testing.assert_allclose(cold, [[0.1] * 10, [1.0] + [0.0] * 9, [1.0] + [0.0] * 9], **TOLERANCE)

    mask = losses.confidence_mask(f32([[0.5, 0.5], [0.25, 0.75], [1.0, 0.0]]), 0.75)
    assert mask.dtype == tf.float32 and mask.numpy().tolist() == [0, 1, 1]

    weights = [RNG.normal(size=s) for s in ((3, 3, 2, 4), (4, 2))]
    expected = sum(0.5 * np.sum(w ** 2) for w in weights)
    np.testing.assert_allclose(losses.weight_decay(f32(w) for w in weights), expected, rtol=1e-6)
    assert losses.weight_decay([]) == 0


# The credal loss

def credal_gold(logits):
    """Closed form of the minimum of KL(t || p) over t_y >= 1 - alpha."""
    p = softmax(logits)[np.arange(N), LABELS]
    return np.where(p >= 1 - ALPHA, 0,
                    (1 - ALPHA) * np.log((1 - ALPHA) / p) + ALPHA * np.log(ALPHA / (1 - p)))


def test_credal_loss_equals_the_definition_with_its_constants():
    others = P * (1 - ONEHOT)
    target = ONEHOT * (1 - ALPHA[:, None]) + ALPHA[:, None] * others / (others.sum(-1, keepdims=True) + 1e-7)
    np.testing.assert_allclose(losses.project(f32(P), LABELS, f32(ALPHA)), target, **TOLERANCE)
    target, p = np.clip(target, 1e-7, 1), np.clip(P, 1e-7, 1)
    expected = np.where(P_Y >= 1 - ALPHA, 0, np.sum(target * np.log(target / p), -1))
    np.testing.assert_allclose(losses.credal_loss(f32(LOGITS), LABELS, f32(ALPHA)), expected, **TOLERANCE)


def test_credal_loss_and_gradient_equal_the_closed_form():
    inside = P_Y >= 1 - ALPHA
    assert 5 < inside.sum() < N - 5
    value, gradient = value_and_gradient(lambda x: losses.credal_loss(x, LABELS, f32(ALPHA)), f32(LOGITS))
    np.testing.assert_allclose(value, credal_gold(LOGITS), **CREDAL)
    # d loss / d p_y = alpha / (1 - p_y) - (1 - alpha) / p_y, and d p_y / d z_k = p_y ([k = y] - p_k).
    outer = np.where(inside, 0, ALPHA / (1 - P_Y) - (1 - ALPHA) / P_Y)
    np.testing.assert_allclose(gradient, (outer * P_Y)[:, None] * (ONEHOT - P), **CREDAL)
    assert np.all(value[inside] == 0) and np.all(gradient[inside] == 0)
    assert np.all(value[~inside] > 0)


def test_credal_loss_limits():
    logits = f32(LOGITS)
    value, gradient = value_and_gradient(lambda x: losses.credal_loss(x, LABELS, tf.zeros(N)), logits)
    expected = value_and_gradient(lambda x: losses.cross_entropy(x, LABELS), logits)
    # The other classes' targets are clipped to 1e-7, each costing up to 1e-7 log 1e7 = 1.6e-6.
    np.testing.assert_allclose(value, expected[0], rtol=1e-5, atol=K * 1.7e-6)
    np.testing.assert_allclose(gradient, expected[1], **CREDAL)
    value, gradient = value_and_gradient(lambda x: losses.credal_loss(x, LABELS, tf.ones(N)), logits)
    assert np.all(value == 0) and np.all(gradient == 0)


def test_projection_minimises_the_divergence_over_the_set():
    outside = np.flatnonzero(P_Y < 1 - ALPHA)
    projection = losses.project(f32(P), LABELS, f32(ALPHA)).numpy().astype(np.float64)
    # Members sum to 1 but for the constant: alpha (1 - S / (S + 1e-7)) with S = 1 - p_y not tiny here.
    np.testing.assert_allclose(projection.sum(-1), 1, atol=1e-5)
    best = losses.credal_loss(f32(LOGITS), LABELS, f32(ALPHA)).numpy()
    for i in outside:
        members = RNG.dirichlet(np.full(K, 0.5), 300)
        near = np.abs(projection[i] * (1 + 0.05 * RNG.normal(size=(300, K))))
        members = np.concatenate([members, near / near.sum(-1, keepdims=True)])
        # Moves mass to y where a draw is no member: onto the border or into the set.
        share = np.maximum(members[:, LABELS[i]], 1 - ALPHA[i] * RNG.choice([1, 0.9], len(members)))
        rest = members * (1 - ONEHOT[i])
        members = rest / rest.sum(-1, keepdims=True) * (1 - share)[:, None] + ONEHOT[i] * share[:, None]
        divergence = np.sum(members * np.log(np.maximum(members, 1e-300) / P[i]), -1)
        assert divergence.min() >= best[i] - 1e-5  # float32 and the constants, as in CREDAL


def test_credal_loss_is_convex_along_segments_of_probabilities():
    p, q = RNG.dirichlet(np.ones(K), (2, N))
    weights = np.linspace(0, 1, 21)[:, None, None]
    path = weights * p + (1 - weights) * q  # [21, N, K]
    values = np.stack([losses.credal_loss(f32(np.log(x)), LABELS, f32(ALPHA)) for x in path]).astype(np.float64)
    assert np.all(values[1:-1] <= (values[:-2] + values[2:]) / 2 + 2e-6)  # float32 rounding of values up to 10


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("alpha", [0.0, 1e-6, 0.03, 0.5, 1.0])
def test_saturated_logits(dtype, alpha):
    rows = np.array([[1e4, -1e4, -1e4], [-1e4, 1e4, -1e4], [1e4, 1e4, -1e4], [-1e4] * 3, [1e4] * 3, [1e4, 0, -1e4]])
    logits = tf.cast(rows, dtype)
    labels = np.zeros(len(rows), int)
    target = np.eye(3)[labels].astype(np.float32)
    for loss in (lambda x: losses.credal_loss(x, labels, tf.fill([len(rows)], alpha)),
                 lambda x: losses.cross_entropy(x, labels), lambda x: losses.soft_cross_entropy(x, target),
                 lambda x: losses.soft_cross_entropy(x, losses.smooth_targets(labels, alpha, 3)), losses.entropy,
                 lambda x: losses.kl_divergence(target, x), lambda x: losses.kl_divergence(tf.nn.softmax(x), x[::-1])):
        value, gradient = value_and_gradient(loss, logits)
        assert value.dtype == np.float32 and np.isfinite(value).all() and np.all(value >= -1e-5)
        assert np.isfinite(gradient.astype(np.float32)).all()
    value = losses.credal_loss(logits, labels, tf.fill([len(rows)], alpha)).numpy()
    assert value[0] == pytest.approx(0, abs=1e-5)  # right and certain
    if alpha < 0.5:
        assert value[1] > 3  # wrong and certain


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_inputs_are_computed_in_float32(dtype):
    half = tf.cast(LOGITS, dtype)
    for loss in (lambda x: losses.credal_loss(x, LABELS, f32(ALPHA)), lambda x: losses.cross_entropy(x, LABELS),
                 losses.entropy, lambda x: losses.kl_divergence(f32(TARGETS), x)):
        np.testing.assert_array_equal(loss(half), loss(tf.cast(half, tf.float32)))


def test_compiled_credal_loss():
    arguments = f32(LOGITS), tf.constant(LABELS), f32(ALPHA)
    expected = losses.credal_loss(*arguments)
    for jit in (False, True):
        compiled = tf.function(losses.credal_loss, jit_compile=jit)
        np.testing.assert_allclose(compiled(*arguments), expected, **TOLERANCE)
