"""What may be wrong with images and labels: contradicted ones, near-duplicates, strange, blank, unreadable images."""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import numpy as np

from libml.errors import UserError
from libml.labelling.learner import Heads, Learner
from libml.labelling.session import Decision, Session

FOLDS, NEAREST = 5, 5
SAME, STRANGE = 0.98, 0.05  # cosine of near-duplicates; p-value below which an image is like no class
BLANK = 2.0  # levels of 255 by which a blank picture's pixels deviate, at most
BLOCK = 1024  # images that are compared with all others at a time


@dataclass(frozen=True)
class Finding:
    number: int  # of the image
    kind: str  # label, duplicate, strange, blank or unreadable
    score: float  # the smaller, the worse
    told: str  # one line
    other: int = -1  # the image that it is like
    suggested: str = ""  # the class that it may have


def contradicted(vectors: np.ndarray, labels: np.ndarray) -> Iterator[tuple[int, int, float]]:
    """Yields row, other class and probability of the given one, where logistic regression on the other folds is surer
    of another class than it is of a tenth of that class's own images (after confident learning, Northcutt et al.
    2021, who take the mean)."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_predict

    counts = np.bincount(labels)
    folds = min(FOLDS, *counts[counts > 0]) if len(labels) else 0
    if folds < 2 or np.count_nonzero(counts) < 2:
        return
    present, y = np.unique(labels, return_inverse=True)
    p = cross_val_predict(LogisticRegression(max_iter=1000, C=0.01), vectors, y, method="predict_proba",
                          cv=StratifiedKFold(folds, shuffle=True, random_state=0))
    usual = np.array([np.quantile(p[y == c, c], 0.1) for c in range(len(present))])
    sure = np.where(p >= usual, p, 0)
    sure[np.arange(len(y)), y] = 0
    for row in np.flatnonzero((p.argmax(1) != y) & (sure.max(1) > 0)):
        yield int(row), int(present[sure[row].argmax()]), float(p[row, y[row]])


def duplicates(vectors: np.ndarray, told: Callable[[int, int], None] = lambda done, total: None,
               ) -> Iterator[tuple[int, int, float]]:
    """Yields row, an earlier row that it is like, and their cosine."""
    for start in range(0, len(vectors), BLOCK):
        block = vectors[start:start + BLOCK]
        cosine = block @ vectors[:start + len(block)].T
        cosine[np.arange(len(block))[:, None] <= np.arange(start + len(block)) - start] = -1  # itself, and later ones
        for i in np.flatnonzero(cosine.max(1, initial=-1) >= SAME):
            yield start + int(i), int(cosine[i].argmax()), float(cosine[i].max())
        told(min(start + BLOCK, len(vectors)), len(vectors))


def strangeness(vectors: np.ndarray, labelled: np.ndarray) -> np.ndarray:
    """Returns conformal p-values [N]: which share of the labelled images is as far from its nearest labelled ones."""
    def mean_distance(x: np.ndarray, skip: int) -> np.ndarray:
        parts = [np.sort(1 - x[start:start + BLOCK] @ labelled.T, axis=1)[:, skip:skip + NEAREST].mean(1)
                 for start in range(0, len(x), BLOCK)]
        return np.concatenate(parts) if parts else np.zeros(0)

    usual = np.sort(mean_distance(labelled, 1))
    as_far = len(usual) - np.searchsorted(usual, mean_distance(vectors, 0), side="left")
    return (1 + as_far) / (1 + len(usual))


def findings(heads: Heads, numbers: np.ndarray, known: dict[int, Decision], names: list[str],
             unreadable: dict[int, str], told: Callable[[int, int], None] = lambda done, total: None) -> list[Finding]:
    """Returns all that is odd, the worst of each kind first."""
    found = [Finding(n, "unreadable", 0.0, f"cannot be read: {reason}") for n, reason in unreadable.items()]
    rows = {int(n): i for i, n in enumerate(numbers)}
    kept = [i for n, i in rows.items() if n not in known or known[n].split != "excluded"]
    labelled = [(rows[n], decision) for n, decision in known.items() if decision.label and n in rows]
    images = heads.data.pictures[0] if heads.data.pictures else heads.data.images
    for i in kept:
        if (deviation := float(np.std(images[i]))) <= BLANK:
            found.append(Finding(int(numbers[i]), "blank", deviation,
                                 f"almost one colour: its pixels deviate by {deviation:.1f} of 255 levels"))
    vectors = heads.vectors
    if labelled:
        classes = sorted({decision.label for _, decision in labelled})
        at = np.array([row for row, _ in labelled])
        y = np.array([classes.index(decision.label) for _, decision in labelled])
        normal = (np.asarray(heads.plain[at], np.float32) - heads.statistics[0]) / heads.statistics[1]
        found += sorted((Finding(int(numbers[at[i]]), "label", p, f"labelled {classes[y[i]]} (p = {p:.2f} by the "
                                 f"others), they say {classes[c]}", suggested=classes[c])
                         for i, c, p in contradicted(normal, y)), key=lambda finding: finding.score)
        if len(at) > NEAREST:
            p_values, labelled_rows = strangeness(vectors, vectors[at]), set(at.tolist())
            strange = [i for i in kept if p_values[i] <= STRANGE and i not in labelled_rows]
            found += sorted((Finding(int(numbers[i]), "strange", float(p_values[i]), "unlike any labelled image: p = "
                                     f"{p_values[i]:.3f}") for i in strange), key=lambda finding: finding.score)
    pairs = []
    for i, j, cosine in duplicates(vectors[kept], told):
        n, other = int(numbers[kept[i]]), int(numbers[kept[j]])
        here, there = (known.get(m, Decision("", "unlabelled", "")) for m in (n, other))
        odd = " WITH ANOTHER LABEL" * bool(here.label and there.label and here.label != there.label)
        odd += f" ({here.split} and {there.split})" * (here.split != there.split)
        pairs.append(Finding(n, "duplicate", 1 - cosine, f"like {names[other]}, cosine {cosine:.4f}{odd}", other))
    return found + sorted(pairs, key=lambda pair: ("WITH" not in pair.told, pair.score))


class Audit:
    """The audit of a session's images, made when somebody asks for it."""

    def __init__(self, session: Session, learner: Learner):
        self.session, self.learner = session, learner
        self._found: list[Finding] | None = None
        self._working, self._problem, self._done = False, "", (0, 0)

    def start(self) -> None:
        if self.learner.heads is None:
            raise UserError("The features are not ready yet: the audit compares images by them.")
        if not self._working:
            self._working = True
            threading.Thread(target=self._work, daemon=True, name="audit").start()

    def _work(self) -> None:
        learner, session = self.learner, self.session
        assert learner.heads
        try:
            with session.changed:
                known, unreadable = session.all(), dict(session.unreadable)
            self._found = findings(learner.heads, learner.numbers, known, session.names, unreadable,
                                   lambda *done: setattr(self, "_done", done))
            self._problem = ""
        except Exception as error:  # the page goes on
            self._problem = f"{type(error).__name__}: {str(error)[:200]}"
        finally:
            self._working = False

    def found(self) -> dict:
        """What the page shows: findings with what is known of each image now."""
        known, names = self.session.all(), self.session.names
        return {"working": self._working, "problem": self._problem, "done": self._done,
                "ready": self.learner.heads is not None, "made": self._found is not None, "items": [
                    asdict(finding) | {"name": names[finding.number], "other_name": names[finding.other]
                                       if finding.other >= 0 else "",
                                       "label": known[finding.number].label if finding.number in known else None,
                                       "excluded": finding.number in known
                                       and known[finding.number].split == "excluded"}
                    for finding in (self._found or [])[:500]]}
