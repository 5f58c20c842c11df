"""Predictions for image files: decoded by threads while the network works on the batch before, in fixed shapes."""
from __future__ import annotations

import dataclasses
import json
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf
from tqdm import tqdm

from libml.augment.augmenter import to_float
from libml.data.files import IMAGE_SUFFIXES, expand, image_files
from libml.data.sources import read_image
from libml.errors import UserError
from libml.learn.model import SSLModel
from libml.results import calibration
from libml.writing import checksum

if TYPE_CHECKING:
    from libml.data import SSLData
    from libml.features import Embedder

    Tensors = dict[str, tf.Tensor]

BATCH = 256
EXPORT_FILE, CLASSES, SAVED_MODEL = "export.json", "classes.json", "saved_model"


def batch_size(count: int) -> int:
    """Images per call for so many images: three need no batch of 256."""
    return min(BATCH, max(8, 1 << (count - 1).bit_length()))


@dataclasses.dataclass(frozen=True)
class Classifier:
    """From uint8 images to logits, probabilities and credal sets: a trained model, or an export of one."""

    name: str  # of the method
    class_names: list[str]
    image_shape: tuple[int, int, int]  # height, width, channels
    function: Callable[[tf.Tensor], Tensors]  # from uint8 images [N, H, W, 3] to "logits" and "probabilities" [N, C]
    held_out_scores: Callable[[], np.ndarray]  # `calibration.conformity_scores` of the validation images
    credal: Callable[[tf.Tensor], Tensors] | None = None  # as `SSLModel.credal_sets`; None for methods without any
    embedder: Embedder | None = None  # makes the model's features of images; None for a model of images
    origin: object = None  # what the functions need and do not hold themselves

    @classmethod
    def of_model(cls, model: SSLModel, class_names: Sequence[str], data: Callable[[], SSLData],
                 embedder: Embedder | None = None) -> Classifier:
        """The averaged weights of a model, behind what makes its features if it has any; `data` returns the images that
        conformal sets are calibrated with."""
        def ready(images):
            x = to_float(images)
            return embedder(x) if embedder is not None and images.dtype == "uint8" else x

        @tf.function(autograph=False)
        def function(images):
            logits = model.infer(ready(images))
            return {"logits": logits, "probabilities": tf.nn.softmax(logits)}

        @tf.function(autograph=False)
        def credal(images):
            images = ready(images)
            return model.credal_sets(images, tf.nn.softmax(model.infer(images)))

        def scores() -> np.ndarray:
            images, labels = data().held_out()
            return calibration.conformity_scores(classifier(images)[1], labels)

        height, width, channels = model.image_shape if embedder is None else embedder.image_shape
        has_sets = type(model).credal_sets is not SSLModel.credal_sets
        classifier = cls(type(model).__name__, list(class_names), (height, width, channels), function, scores,
                         credal if has_sets else None, embedder)
        return classifier

    @classmethod
    def of_export(cls, folder: str | Path) -> Classifier:
        """The SavedModel of an export."""
        folder = Path(folder)
        try:
            facts, classes = (json.loads((folder / file).read_text(encoding="utf-8"))
                              for file in (EXPORT_FILE, CLASSES))
            scores = np.asarray(facts["conformity_scores"], np.float64)
            if scores.ndim != 1 or not ((scores >= 0) & (scores <= 1)).all():
                raise ValueError("conformity_scores are no numbers from 0 to 1")
            loaded = tf.saved_model.load(str(folder / SAVED_MODEL))
            function, credal = loaded.signatures["images"], loaded.signatures.get("credal")
            names = [name.decode() for name in loaded.class_names.numpy()]
            height, width, channels = function.structured_input_signature[1]["images"].shape[1:]
            told = facts["class_names"], facts["image_shape"]
            if not {"logits", "probabilities"} <= function.structured_outputs.keys():
                raise ValueError("its signature `images` gives other outputs than logits and probabilities")
        except Exception as error:  # a different type for every kind of damage
            reason = (str(error).strip().splitlines() or ["nothing is said"])[0][:200]
            raise UserError(f"The export {folder} cannot be read ({type(error).__name__}: {reason}). Export the run "
                            "again.") from error
        if told != (names, [height, width, channels]) or classes != names:
            raise UserError(f"{folder / EXPORT_FILE} or {CLASSES} tells of other classes or images than the SavedModel "
                            f"beside it, with {len(names)} classes ({', '.join(names)[:60]}) and images of "
                            f"{(height, width, channels)}: they do not match. Export the run again.")
        written = facts.pop("checksum", None)
        if written is not None and written != checksum(facts):  # older ones have none
            raise UserError(f"{folder / EXPORT_FILE} is not what its checksum says: somebody has edited it. Export the "
                            "run again.")
        return cls(str(facts.get("method", "?")), names, (height, width, channels),
                   lambda images: function(images=images), lambda: scores,
                   credal and (lambda images: credal(images=images)), origin=loaded)  # which has the variables

    def in_batches(self, function: Callable[[tf.Tensor], Tensors], images: np.ndarray, batch: int = 0,
                   ) -> dict[str, np.ndarray]:
        """Returns what a function makes of uint8 images [N, H, W, 3], or of stored features, in padded batches of one
        shape."""
        if images.dtype != np.float16 and (images.dtype != np.uint8 or images.shape[1:] != self.image_shape):
            raise UserError(f"Images are {images.dtype} of shape {list(images.shape)}; expected uint8 of shape "
                            f"{['N', *self.image_shape]}.")
        size, parts = batch or batch_size(len(images)), []
        for start in range(0, max(len(images), 1), size):
            chunk = np.asarray(images[start:start + size])
            padding = np.zeros((size - len(chunk), *chunk.shape[1:]), images.dtype)
            padded = np.concatenate([chunk, padding])
            parts.append({name: value.numpy()[:len(chunk)] for name, value in function(tf.constant(padded)).items()})
        outputs = {name: np.concatenate([part[name] for part in parts]) for name in parts[0] if name != "classes"}
        classes, largest = len(self.class_names), np.finfo(np.float32).max
        for name, values in outputs.items():
            shape = (len(images),) if name in ("class", "alpha") else (len(images), classes)
            low, high = {"logits": (-largest, largest), "class": (0, classes - 1)}.get(name, (-1e-3, 1 + 1e-3))
            if values.shape != shape or not ((values >= low) & (values <= high)).all():
                raise UserError(f"The model ({self.name}) predicts NaN, or what is no {name}: its training diverged, "
                                "or its files are damaged. Use an earlier checkpoint, or export it again.")
        return outputs

    def __call__(self, images: np.ndarray, batch: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Returns logits and probabilities [N, C] of uint8 images."""
        outputs = self.in_batches(self.function, images, batch)
        return outputs["logits"], outputs["probabilities"]

    def predict(self, images: str | Path | Iterable[str | Path], *, credal: bool = False) -> Predictions:
        """Classifies image files, as `Run.predict`, resized to `image_shape`; with a progress bar on a terminal."""
        files, notes = find_files(images)
        if credal and self.credal is None:
            raise UserError(f"{self.name} has no credal sets to show: its method labels images with distributions. "
                            "Leave --credal out, or use a run of CSSL or C2S2L.")
        (height, width, _), batch = self.image_shape, batch_size(len(files))
        read: list[str] = []
        unreadable: list[tuple[str, str]] = []
        parts: list[dict[str, np.ndarray]] = []

        def use(images: np.ndarray) -> None:
            logits, probabilities = self(images, batch)
            sets = self.in_batches(self.credal, images, batch) if credal and self.credal else {}
            parts.append({"logits": logits, "probabilities": probabilities, **sets})

        def decode(first: int) -> Iterator[np.ndarray | str]:
            return pool.map(lambda file: read_image(file, height, width), files[first:first + batch])

        with warnings.catch_warnings(), ThreadPoolExecutor(os.cpu_count()) as pool, \
                tqdm(total=len(files), unit="img", disable=None) as bar:
            warnings.simplefilter("ignore")  # Pillow's about odd files, in all threads: filters are the process's
            ahead = decode(0)
            for first in range(0, len(files), batch):
                current, ahead = ahead, decode(first + batch)  # decoded while the network works on this one
                found = []
                for file, image in zip(map(str, files[first:first + batch]), current, strict=True):
                    if isinstance(image, str):
                        unreadable.append((file, image))
                    else:
                        read.append(file)
                        found.append(image)
                    bar.update()
                if found:
                    use(np.stack(found))
        if not parts:
            use(np.zeros((0, *self.image_shape), np.uint8))
        joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return Predictions(read, unreadable, joined.pop("logits"), joined.pop("probabilities"), self, joined,
                           notes)


@dataclasses.dataclass(frozen=True)
class Predictions:
    """What a classifier says of image files.

    `credal` has the method's credal sets, if they were asked for: class [N], alpha [N] and aligned [N, C] of sets
    {p : p(class) >= 1 - alpha}, or possibility [N, C], the largest probability of every set of classes.
    """

    files: list[str]  # those that could be read, N
    unreadable: list[tuple[str, str]]  # the others, with the reason
    logits: np.ndarray  # [N, C]
    probabilities: np.ndarray  # [N, C]
    classifier: Classifier
    credal: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)  # one line for each folder with more than images

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
        names, records = self.classifier.class_names, []
        if whole and len(set(names)) < len(names):
            raise UserError("Two classes have one name: a distribution over names does not tell them apart. Leave it "
                            "out, or take the array `probabilities`.")
        sets = self.sets(coverage) if coverage is not None else []
        for i, (file, name, p) in enumerate(zip(self.files, self.classes, self.probabilities, strict=True)):
            record: dict[str, object] = {"file": file, "class": name, "probability": _shortest(p.max())}
            if self.credal:
                record |= self._credal_record(i)
            if sets:
                record["set"] = sets[i]
            if whole:
                record["probabilities"] = dict(zip(names, map(_shortest, p), strict=True))
            records.append(record)
        return records

    def _credal_record(self, i: int) -> dict[str, str | float]:
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


def find_files(places: str | Path | Iterable[str | Path]) -> tuple[list[Path], list[str]]:
    """Returns the files named, and the images below the folders named, with what is passed over there; what is named
    twice is there once."""
    places = [places] if isinstance(places, str | Path) or not isinstance(places, Iterable) else list(places)
    for place in places:
        if not isinstance(place, str | os.PathLike):
            raise UserError(f"A file is {type(place).__name__}; expected the names of image files or folders.")
    if "" in places:
        raise UserError("An empty name was given; expected image files or folders of them (the current one is \".\").")
    found: dict[Path, Path] = {}  # by where a file really is: one spelling of each
    notes: list[str] = []
    for place in (expand("images", os.fspath(place)) for place in places):
        if not place.exists():
            raise UserError(f"There is no {place}: expected image files or folders of them.")
        if not (place.is_dir() or place.is_file()):  # reading a pipe may last for ever
            raise UserError(f"{place} is a pipe or a device; expected image files or folders of them.")
        inside, passed = image_files(place) if place.is_dir() else ([place], [])
        if not inside:
            raise UserError(f"The folder {place} holds no image ({', '.join(sorted(IMAGE_SUFFIXES))}). "
                            f"{' '.join(passed)}".strip())
        notes += passed
        for file in inside:
            found.setdefault(file.resolve(), file)
    return list(found.values()), notes
