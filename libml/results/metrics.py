"""What predicted probabilities are judged by, in NumPy; evaluation, logs, tables, plots and report read METRICS."""
import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

WHERE = {"valid": "validation", "train_labeled": "labelled", "raw": "raw"}  # in tags, after the metric's name


@dataclasses.dataclass(frozen=True)
class Reliability:
    """A reliability diagram: one entry per bin of the top probability; NaN where a bin is empty."""

    edges: np.ndarray  # [bins + 1]
    count: np.ndarray  # [bins], examples in the bin
    accuracy: np.ndarray  # [bins], their accuracy
    confidence: np.ndarray  # [bins], their mean top probability


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else float("nan")


def _hits(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    if np.ndim(probabilities) != 2 or np.shape(labels) != np.shape(probabilities)[:1]:
        raise ValueError(f"Expected probabilities [N, K] and labels [N]; got shapes {np.shape(probabilities)} and "
                         f"{np.shape(labels)}.")
    return np.argmax(probabilities, axis=1) == labels


def accuracy(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """Share of examples whose most probable class is the label; this and what follows are NaN without examples."""
    return _mean(_hits(probabilities, labels))


def per_class_accuracy(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Share [K] of each class's examples whose most probable class it is; NaN for a class without examples."""
    hits = _hits(probabilities, labels)
    classes = np.shape(probabilities)[1]
    with np.errstate(invalid="ignore"):  # 0 / 0
        return np.bincount(labels, weights=hits, minlength=classes) / np.bincount(labels, minlength=classes)


def balanced_accuracy(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """Mean accuracy of the classes that have examples, each counting alike."""
    found = per_class_accuracy(probabilities, labels)
    return _mean(found[~np.isnan(found)])


def reliability(probabilities: np.ndarray, labels: np.ndarray, bins: int = 15) -> Reliability:
    """Count, accuracy and confidence in equal bins [low, high) of the top probability, the last [low, 1]."""
    hits, top = _hits(probabilities, labels), np.max(probabilities, axis=1)
    # Rounded like the probabilities, an edge stays in the bin that it opens, in any precision.
    edges = (np.arange(bins + 1) / bins).astype(top.dtype)
    index = np.clip(np.searchsorted(edges, top, side="right") - 1, 0, bins - 1)
    count = np.bincount(index, minlength=bins)
    with np.errstate(invalid="ignore"):  # 0 / 0 in empty bins
        means = [np.bincount(index, weights=x.astype(np.float64), minlength=bins) / count for x in (hits, top)]
    return Reliability(edges, count, *means)


def expected_calibration_error(probabilities: np.ndarray, labels: np.ndarray, bins: int = 15) -> float:
    """Expected calibration error sum_b n_b / N |accuracy_b - confidence_b| (Guo et al. 2017)."""
    diagram = reliability(probabilities, labels, bins)
    used = diagram.count > 0
    gaps = np.abs(diagram.accuracy - diagram.confidence)[used]
    return float(np.average(gaps, weights=diagram.count[used])) if used.any() else float("nan")


def negative_log_likelihood(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """Mean of -log p_label, with p_label clipped at float32's smallest normal number."""
    _hits(probabilities, labels)
    p = np.asarray(probabilities, np.float64)[np.arange(len(labels)), labels]
    return _mean(-np.log(np.maximum(p, np.finfo(np.float32).tiny)))


def brier_score(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """Brier's original score, from 0 to 2: the mean over examples of the sum over classes of (p - onehot)^2."""
    _hits(probabilities, labels)
    errors = np.array(probabilities, np.float64)
    errors[np.arange(len(labels)), labels] -= 1
    return _mean(np.square(errors).sum(axis=1))


class Metric(NamedTuple):
    """A metric: its tag, how it is shown, and the function of probabilities [N, C] and labels [N] that computes it."""

    name: str
    title: str
    digits: int  # behind the point
    function: Callable[[np.ndarray, np.ndarray], float]
    unit: str = ""


METRICS = {metric.name: metric for metric in (
    Metric("accuracy", "accuracy", 2, lambda probabilities, labels: 100 * accuracy(probabilities, labels), "%"),
    Metric("ece", "ECE", 3, expected_calibration_error),
    Metric("nll", "NLL", 3, negative_log_likelihood),
    Metric("brier", "Brier score", 3, brier_score),
    Metric("balanced_accuracy", "balanced accuracy", 2,
           lambda probabilities, labels: 100 * balanced_accuracy(probabilities, labels), "%"),
)}
ERROR = Metric("error", "error", 2, lambda probabilities, labels: 100 - 100 * accuracy(probabilities, labels), "%")


def scores(probabilities: np.ndarray, labels: np.ndarray, suffix: str = "") -> dict[str, float]:
    """Returns all metrics by tag; `suffix` says of what, such as /raw/valid."""
    return {name + suffix: metric.function(probabilities, labels) for name, metric in METRICS.items()}


class Shown(NamedTuple):
    """How the values of a tag are shown: "test accuracy (%)" at an axis, "accuracy %" over a column."""

    title: str
    column: str
    digits: int


def is_metric(tag: str) -> bool:
    """Whether a tag is `error`, a metric, or a metric and where, such as ece/valid or nll/raw/valid."""
    name, *where = tag.split("/")
    return tag == "error" or name in METRICS and set(where) <= set(WHERE)


def shown(tag: str) -> Shown:
    """Returns how a tag is shown; one that is no metric's as it is."""
    if not is_metric(tag):
        return Shown(tag, tag, 3)
    name, *where = tag.split("/")
    metric = METRICS.get(name, ERROR)
    title = " ".join([*(WHERE[place] for place in where), metric.title])
    test = "" if {"valid", "train_labeled"} & set(where) else "test "
    return Shown(f"{test}{title} ({metric.unit})" if metric.unit else test + title, f"{title} {metric.unit}".strip(),
                 metric.digits)


def listed() -> str:
    return f"{', '.join(['error', *METRICS])}, the latter also with /{', /'.join(WHERE)} behind them"
