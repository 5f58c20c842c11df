"""Probabilities to trust: temperature scaling, and prediction sets of a stated coverage, both from held-out images."""
from __future__ import annotations

import math

import numpy as np
from scipy.optimize import brentq
from scipy.special import softmax

from libml.errors import UserError

LOWEST, HIGHEST = 0.05, 20.0  # of a temperature: beyond them all probabilities are 0 and 1, or equal
MIN_IMAGES = 50  # docs/predict_export.md: with fewer, the fitted temperature does more harm than good too often


def probabilities(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """softmax(logits / T) [N, C] in float64."""
    return softmax(np.asarray(logits, np.float64) / temperature, axis=1)


def fit_temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    """Returns the temperature T in [0.05, 20] that minimises the NLL of softmax(logits / T) (Guo et al. 2017).

    The NLL is convex in 1/T, its derivative by 1/T being the mean of sum_k p_k z_k - z_label: the root is the minimum.
    """
    z = np.asarray(logits, np.float64)
    z_label = z[np.arange(len(labels)), labels]

    def slope(inverse: float) -> float:
        return float(((softmax(z * inverse, axis=1) * z).sum(1) - z_label).mean())

    low, high = 1 / HIGHEST, 1 / LOWEST
    if slope(low) >= 0:
        return HIGHEST
    if slope(high) <= 0:
        return LOWEST
    return 1 / brentq(slope, low, high, xtol=1e-10, rtol=1e-12)


def choose_temperature(logits: np.ndarray, labels: np.ndarray) -> tuple[float, str]:
    """Returns the temperature to use, and a line about it: 1 where the held-out images cannot tell a better one."""
    if len(labels) < MIN_IMAGES:
        return 1.0, (f"temperature 1: {len(labels)} validation images are too few to fit one, it takes {MIN_IMAGES} "
                     "(the number behind the dash of the dataset's name)")
    if (np.argmax(logits, axis=1) == labels).all():  # the smaller T, the better: no minimum
        return 1.0, f"temperature 1: all {len(labels)} validation images are classified right, which fits any below"
    temperature = fit_temperature(logits, labels)
    return temperature, f"temperature {temperature:.4f}, fitted on {len(labels)} validation images"


def conformity_scores(p: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """1 - p_label [N] of held-out images, sorted: what prediction sets are calibrated with."""
    return np.sort(1 - np.asarray(p, np.float64)[np.arange(len(labels)), labels])


def conformal_threshold(scores: np.ndarray, coverage: float) -> float:
    """Returns the ceil((n + 1) coverage)-th smallest of n held-out scores.

    {k : 1 - p_k <= threshold} then holds the true class of a new image of the same kind with at least this probability
    (split conformal prediction, Vovk et al. 2005).
    """
    if not (isinstance(coverage, float | np.number) and 0 < coverage < 1):
        raise UserError(f"coverage={coverage}: expected a number between 0 and 1, such as 0.9.")
    rank = max(1, math.ceil((len(scores) + 1) * coverage - 1e-9))  # 0.1 and its like are not quite what they say
    if rank > len(scores):
        needed = math.ceil(coverage / (1 - coverage) - 1e-9)
        raise UserError(f"Sets of coverage {coverage:g} need {needed} validation images that were not trained on; "
                        f"there are {len(scores)}. Train with more (the number behind the dash of the dataset's name), "
                        "or ask for less coverage.")
    return float(np.sort(scores)[rank - 1])


def prediction_sets(p: np.ndarray, threshold: float) -> np.ndarray:
    """Members [N, C] bool of the conformal sets of distributions p [N, C]."""
    return 1 - np.asarray(p, np.float64) <= threshold
