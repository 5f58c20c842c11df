"""What labels buy: accuracy on the random part with its interval, its curve, and what more of them promise."""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

LEVEL, DRAWS = 0.95, 400  # of intervals; resampled curves for a band
MORE = 50  # labels whose worth is told in advance
POINTS, IMAGES = 3, 20  # of a curve, before a fit tells anything


@dataclass
class Point:
    """What a model trained on so many labels says of the images of the random part, labelled yet or not."""

    labels: int
    predicted: dict[int, str]  # class by number of image
    alone: dict[int, str]  # by logistic regression on the labels alone


def clopper_pearson(right: int, total: int) -> tuple[float, float]:
    """Returns the exact interval (95 %) of a share of which `right` of `total` were seen."""
    from scipy.stats import beta

    tail = (1 - LEVEL) / 2
    return (float(beta.ppf(tail, right, total - right + 1)) if right else 0.0,
            float(beta.ppf(1 - tail, right + 1, total - right)) if right < total else 1.0)


def expected_gain(labels: np.ndarray, right: np.ndarray, more: int = MORE) -> tuple[float, float, float] | None:
    """Returns what `more` labels are expected to add to the accuracy, with a band, from what models of so many `labels`
    [P] got `right` [P, images]; None while that says nothing.

    The error falls as a power of the number of labels, fitted to the curve by least squares in both logarithms; the
    band is of the same fit on resampled images. More labels never harm here: gains start at 0.
    """
    right = np.asarray(right, bool)
    if len(set(labels)) < POINTS or right.shape[1] < IMAGES:
        return None
    draws = np.random.default_rng(0).integers(right.shape[1], size=(DRAWS, right.shape[1]))
    draws[0] = np.arange(right.shape[1])
    errors = 1 - right[:, draws].mean(2)  # [P, draws]
    x = np.log(np.asarray(labels, float))
    y = np.log(np.maximum(errors, 0.5 / right.shape[1]))  # none wrong of n: as good as half a one
    slope = ((x - x.mean()) @ (y - y.mean(0))) / ((x - x.mean()) ** 2).sum()
    slope, last = np.minimum(slope, 0), labels[-1]
    at = y.mean(0) - slope * x.mean()
    gain = np.exp(at + slope * np.log(last)) - np.exp(at + slope * np.log(last + more))
    low, high = np.quantile(gain, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(gain[0]), float(low), float(high)


def summary(points: list[Point], truth: dict[int, str], enough_gain: float, enough_accuracy: float | None) -> dict:
    """Returns all that the page shows of the random part, whose labels are `truth`, in percent."""
    known = [n for n in truth if all(n in point.predicted for point in points)]
    if not points or not known:
        return {"images": 0}
    right = np.array([[point.predicted[n] == truth[n] for n in known] for point in points])
    alone = np.array([[point.alone.get(n) == truth[n] for n in known] for point in points])
    total, labels = len(known), np.array([point.labels for point in points])

    def interval(row: np.ndarray) -> list[float]:
        return [100 * value for value in (float(row.mean()), *clopper_pearson(int(row.sum()), total))]

    found: dict = {"images": total, "accuracy": interval(right[-1]), "alone": interval(alone[-1]),
                   "curve": [[point.labels, *interval(row), 100 * float(other.mean())]
                             for point, row, other in zip(points, right, alone, strict=True)]}
    gain = expected_gain(labels, right)
    if gain:
        found["gain"] = [100 * value for value in gain]
    if enough_accuracy is not None and found["accuracy"][1] >= enough_accuracy:
        found["enough"] = f"at least {enough_accuracy:g} % are right"
    elif gain and 100 * gain[2] < enough_gain:
        found["enough"] = f"{MORE} more labels are expected to add less than {enough_gain:g} points"
    return found
