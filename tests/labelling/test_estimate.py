"""What labels buy: intervals by SciPy, a fit by the law it assumes."""
import numpy as np
import pytest
from scipy.stats import binomtest

from libml.labelling import estimate
from libml.labelling.estimate import Point


@pytest.mark.parametrize("right, total", [(0, 7), (7, 7), (3, 10), (190, 200), (1, 1)])
def test_interval_is_clopper_and_pearsons(right, total):
    expected = binomtest(right, total).proportion_ci(0.95, "exact")
    # Both invert the same Beta distribution; SciPy's roots are good to about 1e-9.
    np.testing.assert_allclose(estimate.clopper_pearson(right, total), expected, atol=1e-7)


def correct(labels, a, b, images=2000):
    """Right and wrong images [P, images] whose error is a n^-b; an image that more labels get wrong, fewer do, too."""
    errors = a * np.asarray(labels, float) ** -b
    return np.arange(images)[None] >= np.round(errors * images)[:, None]


def test_a_power_law_is_continued():
    labels = np.array([10, 20, 40, 80, 160])
    gain, low, high = estimate.expected_gain(labels, correct(labels, 1.5, 0.5))
    expected = 1.5 * 160 ** -0.5 - 1.5 * 210 ** -0.5
    assert abs(gain - expected) < 2e-4  # errors are whole numbers of 2000 images
    assert 0 <= low < gain < high


def test_labels_that_bring_nothing_promise_nothing():
    labels = np.array([10, 20, 40, 80])
    gain, low, high = estimate.expected_gain(labels, correct(labels, 0.3, 0.0))
    assert gain == low == high == 0


def test_few_points_or_images_say_nothing():
    assert estimate.expected_gain(np.array([10, 20]), correct([10, 20], 1, 0.5)) is None
    labels = np.array([10, 20, 40])
    assert estimate.expected_gain(labels, correct(labels, 1, 0.5, images=19)) is None
    assert estimate.expected_gain(labels, np.ones((3, 20), bool)) is not None  # all right: no logarithm of zero


def test_summary_counts_on_the_labelled_random_images():
    truth = {n: "cat" if n % 2 else "dog" for n in range(40)}
    wrong = {n: "bird" for n in range(100)}
    points = [Point(10, wrong | {n: truth[n] for n in range(20)}, wrong),
              Point(40, wrong | {n: truth[n] for n in range(30)}, wrong | {0: "dog"})]
    found = estimate.summary(points, truth, 1.0, None)
    low, high = binomtest(30, 40).proportion_ci(0.95, "exact")
    assert found["images"] == 40 and found["alone"][0] == 100 / 40
    np.testing.assert_allclose(found["accuracy"], [75, 100 * low, 100 * high], atol=1e-5)
    assert [row[0] for row in found["curve"]] == [10, 40] and found["curve"][0][1] == 50
    assert "gain" not in found and "enough" not in found
    assert "enough" in estimate.summary(points, truth, 1.0, 50.0) and "enough" not in estimate.summary(
        points, truth, 1.0, 70.0)  # by the lower end of the interval
    assert estimate.summary([], truth, 1.0, None) == {"images": 0}


def test_it_is_enough_when_the_band_is_below_what_was_asked():
    truth = {n: "cat" for n in range(60)}
    points = [Point(labels, {n: "cat" if n >= 3 else "dog" for n in truth}, {}) for labels in (10, 20, 40)]
    assert "less than 1 points" in estimate.summary(points, truth, 1.0, None)["enough"]
    assert "less than 1 points" in estimate.summary(points, truth, 1.0, 99.0)["enough"]  # either of the two will do
