"""Predictions for image files: decoded by threads while the network works on the batch before, in fixed shapes."""
from __future__ import annotations

import dataclasses
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tqdm import tqdm

from libml import experiment
from libml.augment.augmenter import to_float
from libml.data import SSLData
from libml.data.files import IMAGE_SUFFIXES, image_files
from libml.data.sources import read_image
from libml.errors import UserError
from libml.learn import losses
from libml.results import calibration

BATCH = 256
EXPORT_FILE, SAVED_MODEL = "export.json", "saved_model"


def batch_size(count: int) -> int:
    """Images per call for so many images: three need no batch of 256."""
    return min(BATCH, max(8, 1 << (count - 1).bit_length()))


@dataclasses.dataclass(frozen=True)
class CredalRule:
    """How a method makes a credal set {p : p(y) >= 1 - alpha} of its prediction q for an unlabelled image.

    Attributes:
        mean_prediction: moving average of predictions to align with, [C]; None for methods that do not align.
        class_prior: p~ [C].
        alpha_bound: smallest alpha.
        reference: whether y is the class of the "raw" or of the "aligned" prediction.
    """

    mean_prediction: list[float] | None = None
    class_prior: list[float] | None = None
    alpha_bound: float = 0.0
    reference: str = "raw"

    @classmethod
    def of(cls, model: Any) -> CredalRule:
        """Reads the rule off a trained model."""
        own = {name: getattr(model.options, name) for name in ("alpha_bound", "reference")
               if hasattr(model.options, name)}
        if not model.uses_alignment:
            return cls(**own)
        mean = np.asarray(model.predictions).mean(0)
        return cls((mean / mean.sum()).tolist(), np.asarray(model.class_prior).tolist(), **own)

    def __call__(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns class y [N] and alpha [N] of logits [N, C]."""
        q = tf.nn.softmax(logits)
        a = q
        if self.mean_prediction is not None:
            a = losses.align(q, p_data=self.class_prior, p_model=self.mean_prediction)
        y, alpha = losses.credal_set(q, a, self.alpha_bound, self.reference)
        return y.numpy(), alpha.numpy()


@dataclasses.dataclass(frozen=True)
class Classifier:
    """A trained model, from a run or from an export.

    Attributes:
        name: where it comes from.
        class_names: one name per class.
        image_shape: height, width, channels.
        function: from uint8 images [N, H, W, 3] to logits and probabilities [N, C].
        credal: how its method makes a set of a prediction.
        held_out_scores: `calibration.conformity_scores` of the validation images.
    """

    name: str
    class_names: list[str]
    image_shape: tuple[int, int, int]
    function: Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]
    credal: CredalRule
    held_out_scores: Callable[[], np.ndarray]

    @classmethod
    def of_run(cls, restored: experiment.Restored, data: SSLData | None = None) -> Classifier:
        """The averaged model of a run; the run's images, needed for conformal sets only, are loaded unless given."""
        model, facts = restored.model, restored.facts

        @tf.function
        def function(images):
            logits = model.infer(to_float(images))
            return logits, tf.nn.softmax(logits)

        def scores() -> np.ndarray:
            images, labels = (experiment.images_of(restored) if data is None else data).held_out()
            return calibration.conformity_scores(made(images)[1], labels)

        made = cls(restored.checkpoint, facts.class_names, facts.image_shape, function, CredalRule.of(model), scores)
        return made

    @classmethod
    def of_export(cls, folder: Path) -> Classifier:
        """The SavedModel of an export."""
        try:
            facts = json.loads((folder / EXPORT_FILE).read_text(encoding="utf-8"))
            names, (height, width, channels) = list(facts["class_names"]), map(int, facts["image_shape"])
            rule, scores = CredalRule(**facts["credal"]), np.asarray(facts["conformity_scores"], np.float64)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{folder / EXPORT_FILE} does not describe an export ({type(error).__name__}: {error}). "
                            "Export the run again.") from error
        try:
            loaded = tf.saved_model.load(str(folder / SAVED_MODEL))
            signature = loaded.signatures["images"]
            shapes = signature.structured_input_signature[1]["images"].shape, signature.output_shapes["logits"]
        except Exception as error:  # a different type for every kind of damage
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            raise UserError(f"The export {folder} cannot be read ({reason}). Export the run again.") from error
        if [s.as_list()[1:] for s in shapes] != [[height, width, channels], [len(names)]]:
            raise UserError(f"{folder / EXPORT_FILE} tells of {len(names)} classes and images of "
                            f"{(height, width, channels)}, the SavedModel beside it of {shapes[1][1]} and "
                            f"{tuple(shapes[0][1:])}: they do not match. Export the run again.")

        def function(images):
            found = signature(images=images)
            return found["logits"], found["probabilities"]

        function.keep = loaded  # type: ignore[attr-defined]  # a signature does not hold its variables
        return cls(str(folder), names, (height, width, channels), function, rule, lambda: scores)

    def __call__(self, images: np.ndarray, batch: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Returns logits and probabilities [N, C] of uint8 images [N, H, W, 3], in padded batches of one shape."""
        if images.dtype != np.uint8 or images.shape[1:] != self.image_shape:
            raise UserError(f"Images are {images.dtype} of shape {list(images.shape)}; expected uint8 of shape "
                            f"{['N', *self.image_shape]}.")
        size = batch or batch_size(len(images))
        found = [np.zeros((0, 2, len(self.class_names)), np.float32)]
        for start in range(0, len(images), size):
            chunk = np.asarray(images[start:start + size])
            padded = np.concatenate([chunk, np.zeros((size - len(chunk), *self.image_shape), np.uint8)])
            found.append(np.stack([x.numpy() for x in self.function(tf.constant(padded))], 1)[:len(chunk)])
        both = np.concatenate(found)
        return both[:, 0], both[:, 1]


@dataclasses.dataclass(frozen=True)
class Predictions:
    """What a classifier says of image files.

    Attributes:
        files: those that could be read, [N].
        unreadable: the others, with the reason.
        logits: [N, C].
        probabilities: [N, C].
        classifier: who says it.
    """

    files: list[str]
    unreadable: list[tuple[str, str]]
    logits: np.ndarray
    probabilities: np.ndarray
    classifier: Classifier

    @property
    def classes(self) -> list[str]:
        """The most probable class of each file."""
        return [self.classifier.class_names[c] for c in self.probabilities.argmax(1)]

    @property
    def uncertainty(self) -> np.ndarray:
        """1 - max p [N]."""
        return 1 - self.probabilities.max(1, initial=0)

    def by_uncertainty(self) -> Predictions:
        """The same, the most uncertain first."""
        order = np.argsort(-self.uncertainty, kind="stable")
        return dataclasses.replace(self, files=[self.files[i] for i in order], logits=self.logits[order],
                                   probabilities=self.probabilities[order])

    def credal(self) -> tuple[np.ndarray, np.ndarray]:
        """Class number y [N] and alpha [N] of the set {p : p(y) >= 1 - alpha} that would label each file."""
        return self.classifier.credal(self.logits)

    def sets(self, coverage: float) -> list[list[str]]:
        """Conformal sets: of files like the validation images, this share of the sets holds the true class."""
        threshold = calibration.conformal_threshold(self.classifier.held_out_scores(), coverage)
        members = calibration.prediction_sets(self.probabilities, threshold)
        return [[self.classifier.class_names[c] for c in np.flatnonzero(row)] for row in members]

    def records(self, *, whole: bool = False, credal: bool = False, coverage: float | None = None) -> list[dict]:
        """One dictionary per file: file, class, probability, and on request the distribution and both kinds of set."""
        names = self.classifier.class_names
        records: list[dict[str, Any]] = [
            {"file": file, "class": name, "probability": _shortest(p.max())}
            for file, name, p in zip(self.files, self.classes, self.probabilities, strict=True)]
        if credal:
            for record, y, alpha in zip(records, *self.credal(), strict=True):
                record |= {"credal_class": names[y], "alpha": _shortest(alpha),
                           "credal_set": f"p({names[y]}) >= {1 - alpha:.4g}"}
        if coverage is not None:
            for record, members in zip(records, self.sets(coverage), strict=True):
                record["set"] = members
        if whole:
            for record, p in zip(records, self.probabilities, strict=True):
                record["probabilities"] = dict(zip(names, map(_shortest, p), strict=True))
        return records


def _shortest(value: np.floating) -> float:
    """The number with the fewest digits that is this float32."""
    return float(str(value))


def find_files(places: Iterable[str | Path]) -> list[Path]:
    """Returns the files named, and the images below the folders named; what is named twice is there once."""
    found: dict[Path, None] = {}
    for place in map(Path, places):
        if not place.exists():
            raise UserError(f"There is no {place}: expected image files or folders of them.")
        inside = image_files(place) if place.is_dir() else [place]
        if not inside:
            raise UserError(f"The folder {place} holds no image ({', '.join(sorted(IMAGE_SUFFIXES))}).")
        found |= dict.fromkeys(inside)
    return list(found)


def _decoded(files: Sequence[Path], height: int, width: int, batch: int) -> Iterator[list[np.ndarray | str]]:
    """Yields batches of decoded files; the next one is decoded while this one is used."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        def start(first: int) -> list[Future]:
            return [pool.submit(read_image, file, height, width) for file in files[first:first + batch]]

        ahead = start(0)
        for first in range(0, len(files), batch):
            current, ahead = ahead, start(first + batch)
            yield [future.result() for future in current]


def predict(classifier: Classifier, files: Sequence[Path]) -> Predictions:
    """Classifies files, resized to the classifier's image size; with a progress bar on a terminal."""
    (height, width, _), batch = classifier.image_shape, batch_size(len(files))
    read: list[str] = []
    unreadable: list[tuple[str, str]] = []
    found: list[tuple[np.ndarray, np.ndarray]] = [classifier(np.zeros((0, *classifier.image_shape), np.uint8))]
    with warnings.catch_warnings(), tqdm(total=len(files), unit="img", disable=None) as bar:
        warnings.simplefilter("ignore")  # Pillow's about odd files; of all threads, as filters belong to the process
        remaining = iter(files)
        for decoded in _decoded(files, height, width, batch):
            images = []
            for image, file in zip(decoded, remaining, strict=False):
                if isinstance(image, str):
                    unreadable.append((str(file), image))
                else:
                    read.append(str(file))
                    images.append(image)
            if images:
                found.append(classifier(np.stack(images), batch))
            bar.update(len(decoded))
    logits, probabilities = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return Predictions(read, unreadable, logits, probabilities, classifier)
