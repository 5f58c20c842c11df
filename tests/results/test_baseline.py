"""Logistic regression on labels alone, and the difference to it."""
import numpy as np
import pytest

from libml.results import baseline


def clouds(count, seed, classes=3, dimensions=5):
    rng = np.random.RandomState(seed)
    y = np.arange(count) % classes
    return rng.normal(size=(count, dimensions)) + 2 * np.eye(classes, dimensions)[y], y


def test_it_is_scikit_learns_with_the_strength_that_validation_prefers():
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import log_loss

    (x, y), held, (test, _) = clouds(30, 0), clouds(120, 1), clouds(300, 2)
    losses = {c: log_loss(held[1], LogisticRegression(max_iter=1000, C=c).fit(x, y).predict_proba(held[0]))
              for c in baseline.STRENGTHS}
    expected = LogisticRegression(max_iter=1000, C=min(losses, key=losses.__getitem__)).fit(x, y)
    found = baseline.logistic_regression(x, y, test, held, 4)
    np.testing.assert_array_equal(found[:, :3], expected.predict_proba(test))
    np.testing.assert_array_equal(found[:, 3], 0)  # no label says what the last class is like
    np.testing.assert_array_equal(found.argmax(1), expected.predict(test))


@pytest.mark.parametrize("labels", [3, 6, 30])
def test_few_labels_are_cross_validated_or_not_searched(labels):
    x, y = clouds(labels, 0)
    test, truth = clouds(600, 1)
    found = baseline.logistic_regression(x, y, test, (x[:0], y[:0]), 3)
    assert np.mean(found.argmax(1) == truth) > (0.5 if labels == 3 else 0.65)


def test_labels_of_one_class_give_that_class():
    x, y = clouds(9, 0)
    found = baseline.logistic_regression(x[y == 2], y[y == 2], x, (x[:0], y[:0]), 3)
    np.testing.assert_array_equal(found, np.tile([0, 0, 1], (9, 1)))


def test_the_interval_is_that_of_resampled_images():
    """Against a bootstrap drawn image by image, and the normal approximation: within a tenth of its width."""
    rng = np.random.RandomState(0)
    ours, theirs = rng.uniform(size=1000) < 0.8, rng.uniform(size=1000) < 0.7
    difference, low, high = baseline.paired_interval(ours, theirs)
    change = ours.astype(float) - theirs
    assert difference == pytest.approx(100 * change.mean())
    drawn = [change[rng.randint(0, 1000, 1000)].mean() for _ in range(4000)]
    error = 100 * change.std() / np.sqrt(1000)
    np.testing.assert_allclose([low, high], 100 * np.quantile(drawn, [0.025, 0.975]), atol=0.4 * error)
    np.testing.assert_allclose([low, high], [difference - 1.96 * error, difference + 1.96 * error], atol=0.4 * error)
