"""Accuracy and calibration of predicted probabilities, in NumPy."""
import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Reliability:
    """A reliability diagram: one entry per bin of the top probability; NaN where a bin is empty."""

    edges: np.ndarray  # [bins + 1]
    count: np.ndarray  # [bins], examples in the bin
    accuracy: np.ndarray  # [bins], their accuracy
    confidence: np.ndarray  # [bins], their mean top probability


def accuracy(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """Share of examples whose most probable class is the label; NaN without examples."""
    hits = _hits(probabilities, labels)
    return float(hits.mean()) if len(hits) else float("nan")


def reliability(probabilities: np.ndarray, labels: np.ndarray, bins: int = 15) -> Reliability:
    """Count, accuracy and confidence in equal bins of the top probability, closed on the left, the last on both sides.

    Probabilities are [N, K], labels integers [N].
    """
    hits, top = _hits(probabilities, labels), np.max(probabilities, axis=1)
    # Rounded like the probabilities, an edge stays in the bin that it opens, in any precision.
    edges = (np.arange(bins + 1) / bins).astype(top.dtype)
    index = np.clip(np.searchsorted(edges, top, side="right") - 1, 0, bins - 1)
    count = np.bincount(index, minlength=bins)
    with np.errstate(invalid="ignore"):  # 0 / 0 in empty bins
        means = [np.bincount(index, weights=x.astype(np.float64), minlength=bins) / count for x in (hits, top)]
    return Reliability(edges, count, *means)


def expected_calibration_error(probabilities: np.ndarray, labels: np.ndarray, bins: int = 15) -> float:
    """Expected calibration error sum_b n_b / N |accuracy_b - confidence_b| (Guo et al. 2017); NaN without examples."""
    diagram = reliability(probabilities, labels, bins)
    used = diagram.count > 0
    gaps = np.abs(diagram.accuracy - diagram.confidence)[used]
    return float(np.average(gaps, weights=diagram.count[used])) if used.any() else float("nan")


def _hits(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    probabilities, labels = np.asarray(probabilities), np.asarray(labels)
    if probabilities.ndim != 2 or labels.shape != probabilities.shape[:1]:
        raise ValueError(f"Expected probabilities [N, K] and labels [N]; got shapes {probabilities.shape} and "
                         f"{labels.shape}.")
    return np.argmax(probabilities, axis=1) == labels
