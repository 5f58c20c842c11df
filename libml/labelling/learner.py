"""The model that learns while labels come: features of all images once, then a new head after every few labels."""
from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from libml import experiment, features
from libml.config import RunConfig
from libml.data import DataFacts, SSLData, files, sources
from libml.data.sets import DEFAULT_DATA_DIR
from libml.errors import UserError
from libml.labelling import choose
from libml.labelling.estimate import Point
from libml.labelling.session import Decision, Session
from libml.learn.model import SSLModel
from libml.results import baseline, calibration
from libml.results.predict import Classifier

UPDATES, BATCH = 384, 32  # of a head: a second or two
FIRST, SHARE = 5, 0.1  # labels until the next one: so many, or this part of all
RANKED = 200  # images that are ordered after each
ALONE = 0.01  # strength of logistic regression beside it: choosing one takes longer than all else
ASKED = 1000  # images of the random part, at most, on which accuracy is measured
COVERAGE = 0.9  # of conformal sets, from the random part


@dataclass(frozen=True)
class Round:
    """What a head trained on so many labels says of all readable images."""

    labels: int
    classes: list[str]
    numbers: np.ndarray  # [N], of the images
    row: dict[int, int]  # where an image stands here
    probabilities: np.ndarray  # [N, C]
    size: np.ndarray  # [N], of their credal sets: alpha
    ranking: list[int] = field(default_factory=list)
    seconds: float = 0.0

    def guess(self, n: int) -> tuple[str, float] | None:
        """The most probable class of an image, and how probable."""
        if n not in self.row:
            return None
        p = self.probabilities[self.row[n]]
        return self.classes[int(p.argmax())], float(p.max())


def configuration(method: type[SSLModel], session: Session, **given: Any) -> RunConfig:
    """Returns the configuration of a run on the images of a session, as that of its dataset.csv will be."""
    parts: dict[str, list[files.File]] = {part: [] for part in files.PARTS}
    for n in range(len(session.names)):
        path = str(session.path(n))
        with suppress(OSError):  # it is gone, and will be unreadable
            status = os.stat(path)
            if not os.access(path, os.R_OK):
                continue
            parts["unlabeled"].append(files.File("", path, status.st_size, status.st_mtime_ns, (0, n)))
    name = f"csv:{session.file.with_name('dataset.csv').resolve()}"
    return RunConfig.of(method, dataset=name, listing=files.Listing(session.folder, parts, []), **given)


def prepare(config: RunConfig, session: Session, told: sources.Told | None = None,
            ) -> tuple[SSLData, np.ndarray, dict[int, str]]:
    """Returns features of the readable images as data without labels, their numbers, and why others are unreadable."""
    listing = config.listing
    assert listing
    names = [str(session.path(n)) for n in range(len(session.names))]
    arrays, meta, _ = sources.decode(listing, listing.parts, config.data.image_size,
                                     files.expand("data_dir", config.data.data_dir or DEFAULT_DATA_DIR), told)
    listed = {file.path for file in listing.parts["unlabeled"]}
    bad = {n: meta["unreadable"].get(path, "it is gone, or may not be read") for n, path in enumerate(names)
           if path in meta["unreadable"] or path not in listed}
    images = arrays["images"]
    if len(images) < 2:
        raise UserError(f"{listing.path} has {len(images)} readable images; a classifier needs more.")
    data = SSLData(images, np.full(len(images), -1), np.asarray(images[:1]), np.zeros(1, np.int64), ["0", "1"],
                   config.data.mirror, fingerprint=str(listing.path), name=config.data.dataset, num_valid=0,
                   labeled=np.zeros(0, np.int64), labeled_classes=np.zeros(0, np.int64), order=np.arange(len(images)))
    return features.embed(config, data, told=told), np.array([n for n in range(len(names)) if n not in bad]), bad


class Heads:
    """Trains heads on the same features again and again; what was traced serves as long as the classes stay."""

    def __init__(self, config: RunConfig, data: SSLData):
        self.config = config.replace(train_kimg=UPDATES * BATCH / 1024, schedule_kimg=0.0, batch=BATCH)
        self.data, self.statistics = data, data.image_statistics()
        mean, deviation = self.statistics
        self.plain = data.plain[:, 0, 0]
        self.vectors = choose.unit((np.asarray(self.plain, np.float32) - mean) / deviation)
        self._made: tuple[SSLModel, list[np.ndarray], Classifier] | None = None
        self._classes: list[str] = []

    def train(self, rows: np.ndarray, labels: list[str], unlabeled: np.ndarray | None = None,
              ) -> tuple[list[str], np.ndarray, np.ndarray]:
        """Returns the classes of the labels of some rows, and what a head trained on them says of all images: their
        probabilities [N, C] and the sizes of their credal sets [N]."""
        classes = sorted(set(labels))
        if self._made is None or classes != self._classes:
            most = len(self.data.images)  # the number of labels changes from head to head
            facts = DataFacts(classes, self.data.image_shape, (most, most), self.data.mirror, self.statistics,
                              copies=self.data.copies)
            model = experiment.build(self.config, facts)
            self._made = model, model.get_weights(), Classifier.of_model(model, classes, lambda: self.data)
            self._classes = classes
        model, initial, classifier = self._made
        model.set_weights(initial)
        data = replace(
            self.data, class_names=classes, labeled=np.asarray(rows), order=np.arange(len(self.data.images))
            if unlabeled is None else unlabeled, labeled_classes=np.array([classes.index(name) for name in labels]))
        model.fit(data.dataset(model), steps_per_epoch=UPDATES, verbose=0)
        p = classifier(self.data.plain)[1]
        sets = classifier.in_batches(classifier.credal, self.data.plain) if classifier.credal else {}
        return classes, p, sets.get("alpha", 1 - p.max(1))

    def alone(self, rows: np.ndarray, labels: list[str], asked: np.ndarray) -> np.ndarray:
        """Returns the classes that logistic regression on the labels alone gives to the rows that are asked for."""
        mean, deviation = self.statistics

        def normal(chosen: np.ndarray) -> np.ndarray:
            return (np.asarray(self.plain[np.asarray(chosen)], np.float32) - mean) / deviation

        classes = sorted(set(labels))
        nothing = np.zeros((0, len(mean)), np.float32), np.zeros(0, np.int64)
        found = baseline.logistic_regression(normal(rows), np.array([classes.index(name) for name in labels]),
                                             normal(asked), nothing, len(classes), strengths=(ALONE,))
        return np.array(classes, object)[found.argmax(1)]


class Learner(threading.Thread):
    """Embeds a session's images, then trains whenever enough labels have come; keeps the newest round."""

    def __init__(self, session: Session, config: RunConfig, order: str = choose.ORDERS[0]):
        super().__init__(name="learner", daemon=True)
        self.session, self.config, self.order = session, config, order
        self.progress: tuple[str, int, int] | None = ("starting", 0, 0)
        self.problem = ""
        self.round: Round | None = None
        self.points: list[Point] = []
        self.heads: Heads | None = None
        self.one_class: float | None = None  # of the newest round, see `singletons`
        self.paused = self.stopped = False
        self.busy = False

    def run(self) -> None:
        try:
            self._run()
        except UserError as error:
            self.problem = str(error)
        except Exception as error:  # labels go on without a model
            self.problem = f"The model has stopped ({type(error).__name__}: {str(error)[:300]}). Labels are still kept."
        self.progress = None
        if self.problem:
            print(f"warning: {self.problem}", flush=True)
            with self.session.changed:
                self.session.changed.notify_all()

    def stop(self) -> None:
        with self.session.changed:
            self.stopped = True
            self.session.changed.notify_all()

    def _tell(self, *what: str | int) -> None:
        self.progress = what  # type: ignore[assignment]

    def _embed(self) -> None:
        data, self.numbers, bad = prepare(self.config, self.session, self._tell)
        self.session.set_unreadable(bad)
        self.row = {int(n): i for i, n in enumerate(self.numbers)}
        self.heads = Heads(self.config, data)
        self.progress = None

    def learn(self) -> None:
        """Embeds and trains once, in the calling thread."""
        self._embed()
        self._train(self._labelled())

    def _run(self) -> None:
        self._embed()
        begun = self._labelled()
        for part in (4, 2, 1):  # the curve of what was labelled before
            if len(begun) // part >= 2 * FIRST or part == 1:
                self._train(begun[:len(begun) // part])
        while self._wait():
            self._train(self._labelled())

    def _labelled(self) -> list[tuple[int, Decision]]:
        """What is trained on, in the order in which it came."""
        with self.session.changed:
            return [(n, decision) for n, decision in self.session.all().items()
                    if decision.split == "train" and n in self.row]

    def _wait(self) -> bool:
        """Waits for labels that are worth a round; False at the end."""
        def due() -> bool:
            labelled = {n: decision.label for n, decision in self._labelled()}
            new, names = len(labelled.items() ^ self._trained.items()), set(labelled.values())
            return self.stopped or not self.paused and len(names) > 1 and (
                new >= max(FIRST, SHARE * len(labelled)) or not names.issuperset(self._trained.values()))

        with self.session.changed:
            self.session.changed.wait_for(due)
        return not self.stopped

    _trained: dict[int, str] = {}

    def _train(self, labelled: list[tuple[int, Decision]]) -> None:
        """Trains on some labels and publishes what follows."""
        self._trained = {n: decision.label for n, decision in labelled}
        if len(set(self._trained.values())) < 2 or self.stopped:
            return
        assert self.heads
        self.busy, started = True, time.monotonic()
        rows, names = np.array([self.row[n] for n in self._trained]), list(self._trained.values())
        session = self.session
        with session.changed:
            known = session.all()
        # No image for measuring is in training, not even without its label.
        stream = np.array([row for n, row in self.row.items()
                           if (known[n].split == "train" if n in known else not session.random[n])])
        classes, p, size = self.heads.train(rows, names, stream)
        waiting = np.array([i for i, n in enumerate(self.numbers) if session.open(int(n)) and not session.random[n]],
                           np.int64)
        ranked = choose.ranking(self.order, size[waiting], self.heads.vectors[waiting], self.heads.vectors[rows],
                                min(RANKED, len(waiting)), np.random.default_rng(len(rows)))
        self.round = Round(len(rows), classes, self.numbers, self.row, p, size,
                           [int(self.numbers[waiting[i]]) for i in ranked], time.monotonic() - started)
        self.one_class = self.singletons()
        asked = np.array([self.row[n] for n in session.shuffled if session.random[n] and n in self.row][:ASKED],
                         np.int64)  # in the order in which they are asked for
        alone = self.heads.alone(rows, names, asked).tolist() if len(asked) else []
        best = p.argmax(1)
        numbers = [int(self.numbers[i]) for i in asked]
        point = Point(len(rows), {n: classes[best[i]] for n, i in zip(numbers, asked, strict=True)},
                      dict(zip(numbers, alone, strict=True)))
        self.points = [*(other for other in self.points if other.labels < point.labels), point]
        self.busy = False

    def rename(self, old: str, new: str) -> None:
        """Calls a class by its new name in what was learned, until the next head."""
        def renamed(predicted: dict[int, str]) -> dict[int, str]:
            return {n: new if name == old else name for n, name in predicted.items()}

        self.points = [replace(point, predicted=renamed(point.predicted), alone=renamed(point.alone))
                       for point in self.points]
        now = self.round
        if now and old in now.classes:
            names = [new if name == old else name for name in now.classes]
            classes = list(dict.fromkeys(names))
            p = np.stack([now.probabilities[:, [k for k, name in enumerate(names) if name == one]].sum(1)
                          for one in classes], 1)
            self.round = replace(now, classes=classes, probabilities=p)

    def singletons(self) -> float | None:
        """The share of unlabelled images whose conformal set, calibrated on the random part, has one class; None while
        that is too small."""
        now = self.round
        if now is None:
            return None
        with self.session.changed:
            held = [(now.row[n], decision.label) for n, decision in self.session.all().items()
                    if decision.by == "random" and decision.label and n in now.row]
            rest = [now.row[int(n)] for n in now.numbers if self.session.open(int(n))]
        if len(held) < COVERAGE / (1 - COVERAGE) - 1e-9 or not rest:
            return None
        scores = np.array([1 - now.probabilities[row, now.classes.index(label)] if label in now.classes else 1
                           for row, label in held])  # of a class that it does not know: as far off as can be
        members = calibration.prediction_sets(now.probabilities[rest],
                                              calibration.conformal_threshold(scores, COVERAGE))
        return float((members.sum(1) == 1).mean())
