"""Calibration against a loop over examples, at bin edges and for known values."""
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libml import calibration


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
    error = calibration.expected_calibration_error(probabilities, labels, bins)
    assert error == pytest.approx(oracle(probabilities, labels, bins), abs=1e-12)  # float64 sums in another order
    diagram = calibration.reliability(probabilities, labels, bins)
    assert diagram.count.sum() == n and 0 <= error <= 1
    hits = np.nansum(diagram.count * diagram.accuracy)
    assert hits / n == pytest.approx(calibration.accuracy(probabilities, labels), abs=1e-12)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("bins", [10, 15, 49])
def test_edges_belong_to_the_bin_that_they_open(dtype, bins):
    edges = (np.arange(bins + 1) / bins).astype(dtype)
    for b in range(bins // 2 + 1, bins):  # from one half on they are top probabilities of two classes
        for value, expected in ((edges[b], b), (np.nextafter(edges[b], dtype(0)), b - 1)):
            count = calibration.reliability(binary([value], dtype), np.zeros(1, int), bins).count
            assert np.flatnonzero(count).tolist() == [expected]
    over = np.nextafter(dtype(1), dtype(2))  # a softmax may round to above one
    count = calibration.reliability(binary([1, over], dtype), np.zeros(2, int), bins).count
    assert count[-1] == 2


def test_known_values():
    # Ten predictions at 0.8, eight right: calibrated. At 1.0 and all wrong: an error of 1.
    labels = np.array([0] * 8 + [1] * 2)
    assert calibration.expected_calibration_error(binary([0.8] * 10), labels) == pytest.approx(0, abs=1e-15)
    assert calibration.expected_calibration_error(binary([1.0] * 4), np.ones(4, int)) == 1
    # Two bins: 3 examples at 0.6, one right (gap 4/15), and 1 at 0.9, right (gap 0.1).
    probabilities, labels = binary([0.6, 0.6, 0.6, 0.9]), np.array([0, 1, 1, 0])
    expected = 0.75 * (0.6 - 1 / 3) + 0.25 * 0.1
    assert calibration.expected_calibration_error(probabilities, labels) == pytest.approx(expected, abs=1e-15)
    diagram = calibration.reliability(probabilities, labels)
    assert np.flatnonzero(diagram.count).tolist() == [9, 13] and diagram.count[[9, 13]].tolist() == [3, 1]
    np.testing.assert_allclose(diagram.accuracy[[9, 13]], [1 / 3, 1])
    np.testing.assert_allclose(diagram.confidence[[9, 13]], [0.6, 0.9])
    assert np.isnan(diagram.accuracy[0]) and np.isnan(diagram.confidence[0])
    assert calibration.accuracy(probabilities, labels) == 0.5


def test_no_examples_and_bad_shapes():
    none = np.zeros((0, 10)), np.zeros(0, int)
    assert np.isnan(calibration.accuracy(*none)) and np.isnan(calibration.expected_calibration_error(*none))
    with pytest.raises(ValueError, match=r"\(3, 2\) and \(2,\)"):
        calibration.accuracy(np.zeros((3, 2)), np.zeros(2, int))
