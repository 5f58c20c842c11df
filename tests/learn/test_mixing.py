"""Mixing weights against SciPy, MixUp and interleaving by their properties, rotations against NumPy."""
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

from libml.learn import mixing

SEED = tf.constant([3, 4], tf.int64)


@pytest.mark.parametrize("beta", [0.4, 0.5, 0.75, 1.0, 4.0, 50.0])
def test_weights_have_the_distribution_of_the_larger_part(beta):
    m = mixing.beta_weights(20_000, beta=beta, seed=SEED).numpy()
    assert m.min() >= 0.5 - 1e-6 and m.max() <= 1
    found = scipy.stats.kstest(m.astype(np.float64), lambda x: 1 - 2 * scipy.stats.beta.sf(x, beta, beta))
    assert found.pvalue > 1e-3
    larger = np.random.RandomState(0).beta(beta, beta, 200_000)
    larger = np.maximum(larger, 1 - larger)
    assert abs(m.mean() - larger.mean()) < 4 * m.std() / np.sqrt(len(m))  # four standard errors


@pytest.mark.parametrize("beta", [0.3, 0.75, 3.0])
def test_weights_are_the_quantiles_of_their_uniform_numbers(beta):
    """The table's error stays below 1e-5 between its knots but for the rare first cell."""
    bits = mixing.bits([500], SEED).numpy().astype(np.float64) * 2.0 ** -32 + 0.5
    exact = scipy.stats.beta.isf(0.5 * bits, beta, beta)
    np.testing.assert_allclose(mixing.beta_weights(500, beta=beta, seed=SEED), exact, atol=2e-5)


def test_weights_are_keyed_and_the_same_compiled():
    def draw(seed):
        return mixing.beta_weights(64, beta=0.75, seed=seed)

    first = draw(SEED).numpy()
    np.testing.assert_array_equal(first, draw(SEED))
    assert (first != draw(SEED + 1).numpy()).mean() > 0.9
    np.testing.assert_allclose(first, tf.function(draw, jit_compile=True, autograph=False)(SEED), atol=1e-6)
    np.testing.assert_array_equal(mixing.beta_weights(5, beta=0.0, seed=SEED), np.ones(5))


def test_normal_numbers():
    x = mixing.normal([100, 200], SEED).numpy()
    assert np.isfinite(x).all() and scipy.stats.kstest(x.ravel(), "norm").pvalue > 1e-3
    np.testing.assert_array_equal(x, mixing.normal([100, 200], SEED))
    compiled = tf.function(lambda seed: mixing.normal([100, 200], seed), jit_compile=True, autograph=False)(SEED)
    np.testing.assert_allclose(x, compiled, atol=1e-4)


def test_normal_numbers_are_finite_at_the_ends(monkeypatch):
    ends = tf.constant([-2 ** 31, 2 ** 31 - 1], tf.int32)
    monkeypatch.setattr(mixing, "bits", lambda shape, seed: ends)
    assert np.isfinite(mixing.normal([2], SEED)).all()


def test_mixup_mixes_images_and_targets_alike_with_a_permutation():
    n = 12
    images, targets = tf.reshape(tf.eye(n), [n, 2, 2, 3]), 2 * tf.eye(n)
    mixed, labels = mixing.mixup(images, targets, beta=0.75, seed=SEED)
    mixed = mixed.numpy().reshape(n, n)
    np.testing.assert_allclose(labels, 2 * mixed, rtol=1e-6)
    np.testing.assert_allclose(mixed.sum(1), 1, rtol=1e-6)
    own = np.diag(mixed)
    assert (own >= 0.5).all()
    partners = mixed - np.diag(own) > 0
    alone = own > 1 - 1e-6  # its own partner
    assert (partners.sum(1) + alone == 1).all() and (partners.sum(0) + alone == 1).all() and alone.sum() < n / 2
    unmixed, labels = mixing.mixup(images, targets, beta=0.0, seed=SEED)
    np.testing.assert_array_equal(unmixed, images)
    np.testing.assert_array_equal(labels, targets)


def test_mix_limits():
    a, b = np.random.RandomState(0).rand(2, 3, 2, 2, 3).astype(np.float32)
    np.testing.assert_array_equal(mixing.mix(a, b, np.ones(3, np.float32)), a)
    np.testing.assert_array_equal(mixing.mix(a, b, np.zeros(3, np.float32)), b)
    m = np.array([0.1, 0.5, 0.9], np.float32)
    np.testing.assert_allclose(mixing.mix(a, b, m)[2], 0.9 * a[2] + 0.1 * b[2], rtol=1e-6)


@pytest.mark.parametrize("count, size", [(1, 4), (3, 8), (3, 9), (5, 3)])
def test_interleave_gives_like_shares_and_undoes_itself(count, size):
    batches = [tf.constant([[i, row] for row in range(size)]) for i in range(count)]
    dealt = mixing.interleave(batches)
    for batch in dealt:
        shares = np.bincount(batch.numpy()[:, 0], minlength=count)
        assert shares.sum() == size and np.ptp(shares) <= 1
    np.testing.assert_array_equal(np.sort(np.concatenate(dealt)[:, 0]), np.repeat(np.arange(count), size))
    np.testing.assert_array_equal(mixing.interleave(dealt), batches)


@pytest.mark.parametrize("n", [2, 8, 10])
def test_rotations_match_numpy(n):
    images = np.random.RandomState(0).rand(n, 4, 4, 3).astype(np.float32)
    rotated, turns = mixing.rotate_quarters(tf.constant(images))
    assert np.bincount(turns, minlength=4).max() <= -(-n // 4) and (np.diff(turns) >= 0).all()
    for image, result, k in zip(images, rotated.numpy(), turns.numpy(), strict=True):
        np.testing.assert_array_equal(result, np.rot90(image, k))


def test_rotations_need_squares():
    with pytest.raises(ValueError, match="square images, got 4x6"):
        mixing.rotate_quarters(tf.zeros([4, 4, 6, 3]))
