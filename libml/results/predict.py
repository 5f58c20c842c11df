"""Predictions for image files: decoded by threads while the network works on the batch before, in fixed shapes."""
from __future__ import annotations

import dataclasses
import json
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from tqdm import tqdm

from libml.augment.augmenter import to_float
from libml.data.files import IMAGE_SUFFIXES, image_files
from libml.data.sources import read_image
from libml.errors import UserError
from libml.learn.model import SSLModel
from libml.results import calibration

if TYPE_CHECKING:
    from libml.data import SSLData
    from libml.run import Run

    Tensors = dict[str, tf.Tensor]

BATCH = 256
EXPORT_FILE, SAVED_MODEL = "export.json", "saved_model"


def batch_size(count: int) -> int:
    """Images per call for so many images: three need no batch of 256."""
    return min(BATCH, max(8, 1 << (count - 1).bit_length()))


class Classifier:
    """From uint8 images to logits, probabilities and credal sets: a trained model, or an export of one.

    Args:
        name: of the method.
        class_names: one name per class.
        image_shape: height, width, channels.
        function: from uint8 images [N, H, W, 3] to logits and probabilities [N, C].
        credal: from images to the method's credal sets, see `SSLModel.credal_sets`; None for methods without any.
        held_out_scores: returns `calibration.conformity_scores` of the validation images.
    """

    def __init__(self, name: str, class_names: Sequence[str], image_shape: tuple[int, int, int],
                 function: Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]], *,
                 credal: Callable[[tf.Tensor], Tensors] | None = None,
                 held_out_scores: Callable[[], np.ndarray]):
        self.name, self.class_names, self.image_shape = name, list(class_names), image_shape
        self.function, self.credal, self.held_out_scores = function, credal, held_out_scores

    @classmethod
    def of_model(cls, model: SSLModel, class_names: Sequence[str], data: Callable[[], SSLData]) -> Classifier:
        """The averaged weights of a model; `data` returns the images that conformal sets are calibrated with."""
        @tf.function(autograph=False)
        def function(images):
            logits = model.infer(to_float(images))
            return logits, tf.nn.softmax(logits)

        @tf.function(autograph=False)
        def credal(images):
            images = to_float(images)
            return model.credal_sets(images, tf.nn.softmax(model.infer(images)))

        def scores() -> np.ndarray:
            images, labels = data().held_out()
            return calibration.conformity_scores(classifier(images)[1], labels)

        height, width, channels = model.image_shape
        has_sets = type(model).credal_sets is not SSLModel.credal_sets
        classifier = cls(type(model).__name__, class_names, (height, width, channels), function,
                         credal=credal if has_sets else None, held_out_scores=scores)
        return classifier

    @classmethod
    def of_run(cls, run: Run) -> Classifier:
        """The averaged weights of a run's checkpoint."""
        return cls.of_model(run.model, run.facts.class_names, lambda: run.data)

    @classmethod
    def of_export(cls, folder: Path) -> Classifier:
        """The SavedModel of an export."""
        try:
            facts = json.loads((folder / EXPORT_FILE).read_text(encoding="utf-8"))
            names, (height, width, channels) = list(facts["class_names"]), map(int, facts["image_shape"])
            scores = np.asarray(facts["conformity_scores"], np.float64)
            if scores.ndim != 1 or not ((scores >= 0) & (scores <= 1)).all():
                raise ValueError("conformity_scores are no numbers from 0 to 1")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise UserError(f"{folder / EXPORT_FILE} does not describe an export ({type(error).__name__}: {error}). "
                            "Export the run again.") from error
        try:
            loaded = tf.saved_model.load(str(folder / SAVED_MODEL))
            signature, credal = loaded.signatures["images"], loaded.signatures.get("credal")
            shapes = signature.structured_input_signature[1]["images"].shape, signature.output_shapes["logits"]
            inside = [name.decode() for name in loaded.class_names.numpy()]
        except Exception as error:  # a different type for every kind of damage
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            raise UserError(f"The export {folder} cannot be read ({reason}). Export the run again.") from error
        if [s.as_list()[1:] for s in shapes] != [[height, width, channels], [len(names)]] or names != inside:
            raise UserError(f"{folder / EXPORT_FILE} tells of {len(names)} classes ({', '.join(map(str, names))[:60]}) "
                            f"and images of {(height, width, channels)}, the SavedModel beside it of {len(inside)} "
                            f"({', '.join(inside)[:60]}) and {tuple(shapes[0][1:])}: they do not match. Export the run "
                            "again.")

        def function(images):
            outputs = signature(images=images)
            return outputs["logits"], outputs["probabilities"]

        classifier = cls(str(facts.get("method", "?")), names, (height, width, channels), function,
                         credal=credal and (lambda images: credal(images=images)), held_out_scores=lambda: scores)
        classifier._loaded = loaded  # a signature does not hold its variables
        return classifier

    _loaded: Any = None

    def in_batches(self, function: Callable[[tf.Tensor], Tensors], images: np.ndarray, batch: int = 0,
                   ) -> dict[str, np.ndarray]:
        """Returns what a function makes of uint8 images [N, H, W, 3], in padded batches of one shape."""
        if images.dtype != np.uint8 or images.shape[1:] != self.image_shape:
            raise UserError(f"Images are {images.dtype} of shape {list(images.shape)}; expected uint8 of shape "
                            f"{['N', *self.image_shape]}.")
        size, parts = batch or batch_size(len(images)), []
        for start in range(0, max(len(images), 1), size):
            chunk = np.asarray(images[start:start + size])
            padded = np.concatenate([chunk, np.zeros((size - len(chunk), *self.image_shape), np.uint8)])
            parts.append({name: value.numpy()[:len(chunk)] for name, value in function(tf.constant(padded)).items()})
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def __call__(self, images: np.ndarray, batch: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Returns logits and probabilities [N, C] of uint8 images."""
        outputs = self.in_batches(lambda x: dict(zip(("logits", "probabilities"), self.function(x), strict=True)),
                                  images, batch)
        return outputs["logits"], outputs["probabilities"]


class Export:
    """A folder that an export wrote: predicts without the run.

    Args:
        folder: the export.
    """

    def __init__(self, folder: str | Path):
        self.path = Path(folder)
        self.classifier = Classifier.of_export(self.path)

    def predict(self, images: str | Path | Iterable[str | Path], *, credal: bool = False) -> Predictions:
        """Classifies image files, as `Run.predict`."""
        return predict(self.classifier, find_files(images), credal=credal)


@dataclasses.dataclass(frozen=True)
class Predictions:
    """What a classifier says of image files.

    Attributes:
        files: those that could be read, [N].
        unreadable: the others, with the reason.
        logits: [N, C].
        probabilities: [N, C].
        classifier: who says it.
        credal: the method's credal sets, if they were asked for: class [N], alpha [N] and aligned [N, C] of sets
            {p : p(class) >= 1 - alpha}, or possibility [N, C], the largest probability of every set of classes.
    """

    files: list[str]
    unreadable: list[tuple[str, str]]
    logits: np.ndarray
    probabilities: np.ndarray
    classifier: Classifier
    credal: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

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
                                   probabilities=self.probabilities[order],
                                   credal={name: values[order] for name, values in self.credal.items()})

    def sets(self, coverage: float) -> list[list[str]]:
        """Conformal sets: of files like the validation images, this share of the sets holds the true class."""
        threshold = calibration.conformal_threshold(self.classifier.held_out_scores(), coverage)
        members = calibration.prediction_sets(self.probabilities, threshold)
        return [[self.classifier.class_names[c] for c in np.flatnonzero(row)] for row in members]

    def records(self, *, whole: bool = False, coverage: float | None = None) -> list[dict]:
        """One dictionary per file: file, class, probability, credal sets if they were asked for, and on request the
        distribution and conformal sets."""
        names = self.classifier.class_names
        records: list[dict[str, Any]] = [
            {"file": file, "class": name, "probability": _shortest(p.max())}
            for file, name, p in zip(self.files, self.classes, self.probabilities, strict=True)]
        for i, record in enumerate(records if self.credal else ()):
            record |= self._credal_record(i)
        if coverage is not None:
            for record, members in zip(records, self.sets(coverage), strict=True):
                record["set"] = members
        if whole:
            for record, p in zip(records, self.probabilities, strict=True):
                record["probabilities"] = dict(zip(names, map(_shortest, p), strict=True))
        return records

    def _credal_record(self, i: int) -> dict[str, Any]:
        """Describes one credal set."""
        names = self.classifier.class_names
        if "possibility" in self.credal:
            pi = self.credal["possibility"][i]
            order = [c for c in np.argsort(-pi, kind="stable") if pi[c] > 0]
            return {"credal_class": names[order[0]],
                    "credal_set": ", ".join(f"pi({names[c]}) = {-_at_most(-pi[c]):.4g}" for c in order)}
        y, alpha = self.credal["class"][i], self.credal["alpha"][i]
        return {"credal_class": names[y], "alpha": _shortest(alpha),
                "credal_set": f"p({names[y]}) >= {_at_most(1 - float(alpha)):.4g}"}


def _at_most(bound: float) -> float:
    """Four decimals of a lower bound, rounded so that it holds."""
    return math.floor(float(bound) * 1e4) / 1e4 + 0.0  # no -0


def _shortest(value: np.floating) -> float:
    """The number with the fewest digits that is this float32."""
    return float(str(value))


def find_files(places: str | Path | Iterable[str | Path]) -> list[Path]:
    """Returns the files named, and the images below the folders named; what is named twice is there once."""
    places = [places] if isinstance(places, str | Path) else places
    found: dict[Path, Path] = {}  # by where a file really is: one spelling of each
    for place in map(Path, places):
        if not place.exists():
            raise UserError(f"There is no {place}: expected image files or folders of them.")
        inside = image_files(place) if place.is_dir() else [place]
        if not inside:
            raise UserError(f"The folder {place} holds no image ({', '.join(sorted(IMAGE_SUFFIXES))}).")
        for file in inside:
            found.setdefault(file.resolve(), file)
    return list(found.values())


def _decoded(files: Sequence[Path], height: int, width: int, batch: int) -> Iterator[list[np.ndarray | str]]:
    """Yields batches of decoded files; the next one is decoded while this one is used."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        def start(first: int) -> list[Future]:
            return [pool.submit(read_image, file, height, width) for file in files[first:first + batch]]

        ahead = start(0)
        for first in range(0, len(files), batch):
            current, ahead = ahead, start(first + batch)
            yield [future.result() for future in current]


def predict(classifier: Classifier, files: Sequence[Path], *, credal: bool = False) -> Predictions:
    """Classifies files, resized to the classifier's image size; with a progress bar on a terminal."""
    if credal and classifier.credal is None:
        raise UserError(f"{classifier.name} has no credal sets to show: its method labels images with distributions. "
                        "Leave --credal out, or use a run of CSSL or C2S2L.")
    (height, width, _), batch = classifier.image_shape, batch_size(len(files))
    read: list[str] = []
    unreadable: list[tuple[str, str]] = []

    def outputs(images: np.ndarray) -> dict[str, np.ndarray]:
        logits, probabilities = classifier(images, batch)
        sets = classifier.in_batches(classifier.credal, images, batch) if credal and classifier.credal else {}
        return {"logits": logits, "probabilities": probabilities, **sets}

    parts: list[dict[str, np.ndarray]] = []
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
                parts.append(outputs(np.stack(images)))
            bar.update(len(decoded))
    parts = parts or [outputs(np.zeros((0, *classifier.image_shape), np.uint8))]
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return Predictions(read, unreadable, joined.pop("logits"), joined.pop("probabilities"), classifier, joined)
