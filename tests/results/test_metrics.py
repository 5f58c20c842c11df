"""Metrics against loops over examples and scikit-learn, at bin edges, limits and for known values."""
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import balanced_accuracy_score, log_loss, recall_score

from libml.results import metrics


def binary(top, dtype=np.float64):
    """Probabilities [N, 2] whose first class has the given (top) probability."""
    top = np.asarray(top, dtype)
    return np.stack([top, 1 - top], axis=1)


def oracle(probabilities, labels, bins):
    """Expected calibration error by comparing each example with each bin's edges."""
    total = 0.0
    for b in range(bins):
        inside = []
        for p, y in zip(probabilities, labels, strict=True):
            low, high = p.dtype.type(b / bins), p.dtype.type((b + 1) / bins)
            if low <= p.max() < high or (b == bins - 1 and p.max() >= high):
                inside.append((float(p.max()), float(np.argmax(p) == y)))
        if inside:
            confidence, hits = np.mean(inside, axis=0)
            total += len(inside) / len(labels) * abs(hits - confidence)
    return total


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 60), classes=st.integers(1, 12), bins=st.integers(1, 20),
       sharpness=st.floats(0.05, 20), dtype=st.sampled_from([np.float32, np.float64]))
def test_equals_a_loop(seed, n, classes, bins, sharpness, dtype):
    rng = np.random.default_rng(seed)
    logits = sharpness * rng.normal(size=(n, classes))
    probabilities = np.exp(logits - logits.max(1, keepdims=True))
    probabilities = (probabilities / probabilities.sum(1, keepdims=True)).astype(dtype)
    labels = rng.integers(0, classes, n)
    error = metrics.expected_calibration_error(probabilities, labels, bins)
    assert error == pytest.approx(oracle(probabilities, labels, bins), abs=1e-12)  # float64 sums in another order
    diagram = metrics.reliability(probabilities, labels, bins)
    assert diagram.count.sum() == n and 0 <= error <= 1
    hits = np.nansum(diagram.count * diagram.accuracy)
    assert hits / n == pytest.approx(metrics.accuracy(probabilities, labels), abs=1e-12)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("bins", [10, 15, 49])
def test_edges_belong_to_the_bin_that_they_open(dtype, bins):
    edges = (np.arange(bins + 1) / bins).astype(dtype)
    for b in range(bins // 2 + 1, bins):  # from one half on they are top probabilities of two classes
        for value, expected in ((edges[b], b), (np.nextafter(edges[b], dtype(0)), b - 1)):
            count = metrics.reliability(binary([value], dtype), np.zeros(1, int), bins).count
            assert np.flatnonzero(count).tolist() == [expected]
    over = np.nextafter(dtype(1), dtype(2))  # a softmax may round to above one
    count = metrics.reliability(binary([1, over], dtype), np.zeros(2, int), bins).count
    assert count[-1] == 2


def test_known_values():
    # Ten predictions at 0.8, eight right: calibrated. At 1.0 and all wrong: an error of 1.
    labels = np.array([0] * 8 + [1] * 2)
    assert metrics.expected_calibration_error(binary([0.8] * 10), labels) == pytest.approx(0, abs=1e-15)
    assert metrics.expected_calibration_error(binary([1.0] * 4), np.ones(4, int)) == 1
    # Two bins: 3 examples at 0.6, one right (gap 4/15), and 1 at 0.9, right (gap 0.1).
    probabilities, labels = binary([0.6, 0.6, 0.6, 0.9]), np.array([0, 1, 1, 0])
    expected = 0.75 * (0.6 - 1 / 3) + 0.25 * 0.1
    assert metrics.expected_calibration_error(probabilities, labels) == pytest.approx(expected, abs=1e-15)
    diagram = metrics.reliability(probabilities, labels)
    assert np.flatnonzero(diagram.count).tolist() == [9, 13] and diagram.count[[9, 13]].tolist() == [3, 1]
    np.testing.assert_allclose(diagram.accuracy[[9, 13]], [1 / 3, 1])
    np.testing.assert_allclose(diagram.confidence[[9, 13]], [0.6, 0.9])
    assert np.isnan(diagram.accuracy[0]) and np.isnan(diagram.confidence[0])
    assert metrics.accuracy(probabilities, labels) == 0.5


def test_no_examples_and_bad_shapes():
    none = np.zeros((0, 10)), np.zeros(0, int)
    assert all(np.isnan(value) for value in metrics.scores(*none).values())
    for metric in metrics.METRICS.values():
        with pytest.raises(ValueError, match=r"\(3, 2\) and \(2,\)"):
            metric.function(np.zeros((3, 2)), np.zeros(2, int))


def random_predictions(n=200, classes=7, seed=0):
    rng = np.random.default_rng(seed)
    return rng.dirichlet(np.full(classes, 0.5), n).astype(np.float32), rng.integers(0, classes, n)


def test_nll_and_brier_against_scikit_learn_and_loops():
    probabilities, labels = random_predictions()
    clipped = np.maximum(probabilities.astype(np.float64), np.finfo(np.float32).tiny)
    exact = clipped / clipped.sum(1, keepdims=True)  # scikit-learn wants rows that sum to one in float64
    assert metrics.negative_log_likelihood(exact, labels) == pytest.approx(
        log_loss(labels, exact, labels=range(7)), rel=1e-9)
    loop = np.mean([sum((p[c] - (c == y)) ** 2 for c in range(7)) for p, y in zip(exact, labels, strict=True)])
    assert metrics.brier_score(exact, labels) == pytest.approx(loop, rel=1e-12)


def test_accuracy_of_each_class_against_scikit_learn():
    probabilities, labels = random_predictions(classes=7)
    labels = np.where(labels == 3, 5, labels) // 2  # uneven classes; 3 of 7 have no example
    found = metrics.per_class_accuracy(probabilities, labels)
    expected = recall_score(labels, probabilities.argmax(1), labels=range(4), average=None)
    np.testing.assert_allclose(found[:4], expected, atol=1e-12)
    assert np.isnan(found[4:]).all() and found.shape == (7,)
    guesses = np.where(probabilities.argmax(1) < 4, probabilities.argmax(1), 0)
    assert metrics.balanced_accuracy(np.eye(7)[guesses], labels) == pytest.approx(
        balanced_accuracy_score(labels, guesses), abs=1e-12)
    # Nine of one class, all right, and one of another, wrong: 90 % are right, half of the classes.
    assert metrics.balanced_accuracy(np.eye(2)[[0] * 10], np.array([0] * 9 + [1])) == 0.5


@pytest.mark.parametrize(("probabilities", "nll", "brier"), [
    (np.eye(4)[[1, 2]], 0, 0),  # certain and right
    (np.full((2, 4), 0.25), np.log(4), 0.75),  # uniform: (3/4)^2 + 3 (1/4)^2
    (np.eye(4)[[0, 0]], 126 * math.log(2), 2),  # certain and wrong; 2^-126 is float32's smallest normal number
])
def test_limits(probabilities, nll, brier):
    for dtype in (np.float32, np.float64):
        predictions = probabilities.astype(dtype), np.array([1, 2])
        assert metrics.negative_log_likelihood(*predictions) == pytest.approx(nll, abs=1e-12)
        assert metrics.brier_score(*predictions) == pytest.approx(brier, abs=1e-12)


def test_scores_by_tag():
    predictions = random_predictions()
    found = metrics.scores(*predictions, "/raw/valid")
    assert list(found) == [f"{name}/raw/valid" for name in ("accuracy", "ece", "nll", "brier", "balanced_accuracy")]
    assert found["accuracy/raw/valid"] == 100 * metrics.accuracy(*predictions)


@pytest.mark.parametrize(("tag", "expected"), [
    ("error", ("test error (%)", "error %", 2)), ("accuracy", ("test accuracy (%)", "accuracy %", 2)),
    ("accuracy/valid", ("validation accuracy (%)", "validation accuracy %", 2)), ("ece", ("test ECE", "ECE", 3)),
    ("nll/raw", ("test raw NLL", "raw NLL", 3)),
    ("brier/train_labeled", ("labelled Brier score", "labelled Brier score", 3)),
    ("losses/xe", None), ("ece/nowhere", None), ("error/valid", None)])
def test_tags_are_shown(tag, expected):
    assert metrics.is_metric(tag) == bool(expected)
    assert metrics.shown(tag) == (expected or (tag, tag, 3))
