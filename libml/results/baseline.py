"""Whether unlabelled images help: a run beside logistic regression on its labels alone, on the same features."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from libml.data import SSLData
from libml.results import metrics
from libml.results.calibration import MIN_IMAGES

STRENGTHS = tuple(10.0 ** k for k in range(-5, 2))  # C, of which validation or cross-validation chooses
FOLDS, DRAWS, LEVEL = 5, 20_000, 0.95


def logistic_regression(x: np.ndarray, y: np.ndarray, test: np.ndarray, held: tuple[np.ndarray, np.ndarray],
                        classes: int, strengths: Sequence[float] = ()) -> np.ndarray:
    """Returns the probabilities [m, classes] that scikit-learn's logistic regression on features x [n, D] gives those
    of `test`; 0 for classes without a label.

    Its strength is the one, of `strengths` if any are given, that has the highest likelihood on `held` images and
    labels; where these are few, in cross-validation; where a class has but one label, the middle one.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV, PredefinedSplit, StratifiedKFold

    strengths = strengths or STRENGTHS
    probabilities = np.zeros((len(test), classes))
    if len(np.unique(y)) == 1:
        probabilities[:, y[0]] = 1
        return probabilities
    fewest = int(np.unique(y, return_counts=True)[1].min())
    model = LogisticRegression(max_iter=1000, C=strengths[len(strengths) // 2])
    if len(strengths) > 1 and len(held[1]) >= MIN_IMAGES and set(held[1]) <= set(y):
        part = np.repeat([-1, 0], [len(y), len(held[1])])  # those of -1 are always trained on
        search = GridSearchCV(model, {"C": strengths}, scoring="neg_log_loss", cv=PredefinedSplit(part), refit=False)
        search.fit(np.concatenate([x, held[0]]), np.concatenate([y, held[1]]))
        model.set_params(C=search.best_params_["C"])
    elif len(strengths) > 1 and fewest > 1:
        folds = StratifiedKFold(min(FOLDS, fewest), shuffle=True, random_state=0)
        model = GridSearchCV(model, {"C": strengths}, scoring="neg_log_loss", cv=folds)
    probabilities[:, np.unique(y)] = model.fit(x, y).predict_proba(test)
    return probabilities


def paired_interval(better: np.ndarray, worse: np.ndarray) -> tuple[float, float, float]:
    """Returns the difference in accuracy between two classifiers that are right [N] or not on the same images, in
    percent, and its interval by the bootstrap over images."""
    change = better.astype(int) - worse.astype(int)
    counts = np.bincount(change + 1, minlength=3)  # resampled images are lost, kept and won ones in these proportions
    drawn = np.random.default_rng(0).multinomial(len(change), counts / len(change), DRAWS)
    low, high = np.quantile((drawn[:, 2] - drawn[:, 0]) / len(change), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return 100 * float(change.mean()), 100 * float(low), 100 * float(high)


def compare(name: str, probabilities: np.ndarray, data: SSLData, features: dict[str, np.ndarray]) -> tuple[dict, str]:
    """Compares a method's predictions of the test images with logistic regression on the labelled images' `features`
    (by "labeled", "held" and "test"); returns the numbers, and a line about them."""
    held = features["held"], data.held_out()[1]
    regression = logistic_regression(features["labeled"], data.labeled_classes, features["test"], held,
                                     data.num_classes)
    right, baseline = (found.argmax(1) == data.test_labels for found in (probabilities, regression))
    difference, low, high = paired_interval(right, baseline)
    ours, theirs = 100 * float(right.mean()), 100 * float(baseline.mean())
    verdict = ("unlabelled images help" if low > 0 else "unlabelled images do not help: labels alone are better"
               if high < 0 else "whether unlabelled images help is undecided")
    return ({"method": ours, "labels_alone": theirs, "difference": difference, "interval": [low, high],
             "labels_alone_scores": metrics.scores(regression, data.test_labels)},
            f"{name} {ours:.1f} %, labels alone {theirs:.1f} %: {difference:+.1f} ({low:.1f} to {high:.1f}), {verdict}")
