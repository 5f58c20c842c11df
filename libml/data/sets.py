"""The labelled, unlabelled, validation and test images of a dataset: what they are, loading and dividing them."""
from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

from libml.augment.augmenter import Augmenter
from libml.augment.copies import Copies
from libml.data import batching, files, sources, splits
from libml.data.names import DatasetName, parse_name
from libml.errors import OptionError, UserError

if TYPE_CHECKING:
    from libml.learn.model import SSLModel

DEFAULT_DATA_DIR = "~/tensorflow_datasets"  # what TFDS uses
SAMPLED = 256  # images of a named array on the disk, by which it is known again
EVALUATED = 10_000  # labelled images, at most
WHITENED, CHUNK = 50_000, 256  # images that whitening looks at, and how many at a time
VALID_SHARE, VALID_MINIMUM = 0.1, 20  # of a user's labelled images, for validation, where every class has so many


@dataclass(frozen=True)
class Subset:
    """Some images of an array, which may be large: read when a slice of them is asked for."""

    images: np.ndarray
    indices: np.ndarray

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, part: slice) -> np.ndarray:
        return np.asarray(self.images[self.indices[part]])


@dataclass(frozen=True, kw_only=True)
class SSLData(sources.Images):
    """Images with their labelled, unlabelled, validation and test parts; indices point into `images`."""

    name: str  # what the user asked for
    labeled: np.ndarray  # [L] int64, the labelled images
    labeled_classes: np.ndarray  # [L] int64
    order: np.ndarray  # [N] int64, all training images in the order of the unlabelled stream
    num_valid: int  # how many at the front of `order` are validation images; the rest is the unlabelled set
    calibration: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # [K], see `hold_out`
    calibration_classes: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    undivided: tuple[np.ndarray, np.ndarray] | None = None  # labelled images and classes before `hold_out`
    listing: files.Listing | None = None  # the image files that they were read from
    # Of features, float16 [N, 1 + weak + strong views, 1, D] and [M, 1, 1, D] for the test: the numbers of views, what
    # they were made by, and the images themselves, for training and test, where they are known.
    copies: tuple[int, int] | None = None
    embedding: Embedding | None = None
    pictures: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return self.plain.shape[1:]

    @property
    def plain(self) -> np.ndarray:
        """What is evaluated: the images, or the plain view of features."""
        return self.images if self.copies is None else self.images[:, :1]

    def shown(self, indices: np.ndarray, test: bool = False) -> np.ndarray:
        """The images themselves, to look at; grey squares for features of images that are not known."""
        arrays = (self.images, self.test_images) if self.copies is None else self.pictures
        if arrays is None:
            return np.full((len(indices), 8, 8, 3), 127, np.uint8)
        return np.asarray(arrays[test][indices])

    @property
    def label_prior(self) -> np.ndarray:
        """The classes' shares among the labelled images, [classes], each counted once more than it is there."""
        counts = np.bincount(self.labeled_classes, minlength=self.num_classes) + 1
        return counts / counts.sum()

    @property
    def unlabeled(self) -> np.ndarray:
        """Indices of the unlabelled training images (the labelled ones are among them)."""
        return self.order[self.num_valid:]

    @property
    def valid(self) -> np.ndarray:
        return self.order[:self.num_valid]

    @property
    def digest(self) -> dict[str, str]:
        """What a run depends on, as a short digest of each: `classes`, `images` and `split` (who is labelled, for
        validation, for calibration, for the test). Equal digests mean the same data; no image is read for it."""
        sizes, parts = (len(self.test_labels), self.num_valid), (self.labeled, self.calibration, self.order)
        return {"classes": _digest(repr(self.class_names).encode()),
                "images": _digest(self.fingerprint.encode(), self.labels.tobytes(), self.test_labels.tobytes()),
                "split": _digest(repr(sizes).encode(), *(part.tobytes() for part in parts))}

    def augmenter(self, augment: str = "d.d.d", **settings) -> Augmenter | Copies:
        """Makes the views of these images, as `--augment` says; further settings as `Augmenter` takes them."""
        return DataFacts.of(self, self.copies and self.image_statistics()).augmenter(augment, **settings)

    def dataset(self, model: SSLModel) -> tf.data.Dataset:
        """Returns the endless batches of a model, for `fit`: those that `train` would use, each time from its next
        update on."""
        options = model.options

        def following(_: tf.Tensor) -> tf.data.Dataset:
            return batching.batches(self, batch=options.batch, uratio=options.uratio if model.uses_unlabeled else 0,
                                    seed=model.seed, start_step=tf.convert_to_tensor(model.updates))

        return tf.data.Dataset.range(1).flat_map(following).apply(
            tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)).with_options(batching.options())

    def image_statistics(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns float32 mean and standard deviation per channel, in [-1, 1], of the first unlabelled images.

        Counts of the 256 levels are exact; sums of floats would stop growing after some millions of pixels.
        """
        chosen, counts = self.unlabeled[:WHITENED], np.zeros((3, 256), np.int64)
        if self.copies is not None:
            features = np.concatenate([np.asarray(self.plain[chosen[start:start + CHUNK], 0, 0], np.float32)
                                       for start in range(0, len(chosen), CHUNK)])
            deviation = features.std(0, dtype=np.float64)  # a dimension that never changes tells nothing
            return (features.mean(0, dtype=np.float64).astype(np.float32),
                    np.where(deviation > 1e-6, deviation, 1).astype(np.float32))
        for start in range(0, len(chosen), CHUNK):
            pixels = self.images[chosen[start:start + CHUNK]].reshape(-1, 3)
            counts += [np.bincount(channel, minlength=256) for channel in pixels.T]
        shares, levels = counts / counts.sum(1, keepdims=True), np.arange(256) / 127.5 - 1
        mean = shares @ levels
        deviation = np.sqrt((shares * (levels - mean[:, None]) ** 2).sum(1))
        return mean.astype(np.float32), deviation.astype(np.float32)

    def held_out(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns validation images and labels, without images whose label was used: the published splits overlap."""
        chosen = np.setdiff1d(self.valid, np.concatenate([self.labeled, self.calibration]))
        chosen = chosen[self.labels[chosen] >= 0]
        return self.plain[chosen], self.labels[chosen]

    def evaluated(self) -> dict[str, tuple[np.ndarray | Subset, np.ndarray]]:
        """Returns what is evaluated, as (images, labels): the first labelled images, validation, test."""
        sets: dict[str, tuple[np.ndarray | Subset, np.ndarray]] = {
            "train_labeled": (Subset(self.plain, self.labeled[:EVALUATED]), self.labeled_classes[:EVALUATED]),
            "valid": (Subset(self.plain, self.valid), self.labels[self.valid]),
            "test": (self.test_images, self.test_labels)}
        return {name: pair for name, pair in sets.items() if len(pair[1])}


def _digest(*facts: bytes) -> str:
    return hashlib.sha256(b"".join(facts)).hexdigest()[:16]


@dataclass(frozen=True)
class Embedding:
    """What made features of images: enough to know it again."""

    network: str  # as --features says
    weights: str  # digest of its weights
    image_shape: tuple[int, int, int]  # of the images

    @classmethod
    def from_dict(cls, facts: dict) -> Embedding:
        height, width, channels = map(int, facts["image_shape"])
        return cls(str(facts["network"]), str(facts["weights"]), (height, width, channels))


@dataclass(frozen=True)
class DataFacts:
    """What a model has to know of its data: enough to rebuild it where the images are not."""

    class_names: list[str]
    image_shape: tuple[int, int, int]  # height, width, channels
    set_sizes: tuple[int, int]  # the numbers of labelled and unlabelled images
    mirror: bool
    image_statistics: tuple[np.ndarray, np.ndarray] | None = None  # as of SSLData; None: no whitening
    label_prior: np.ndarray | None = None
    calibration: tuple[np.ndarray, np.ndarray] | None = None  # images and classes; data.json has their number only
    copies: tuple[int, int] | None = None  # of features: weak and strong views
    embedding: Embedding | None = None

    @classmethod
    def of(cls, data: SSLData, image_statistics: tuple[np.ndarray, np.ndarray] | None = None) -> DataFacts:
        return cls(list(data.class_names), data.image_shape, (len(data.labeled), len(data.unlabeled)), data.mirror,
                   image_statistics, data.label_prior,
                   (np.asarray(data.plain[data.calibration]), data.calibration_classes), data.copies, data.embedding)

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    def augmenter(self, augment: str, **settings) -> Augmenter | Copies:
        """Makes the views: on a GPU compiled ones, as few others can be made there; weak ones are shifted by up to an
        eighth of the width (4 at 32x32, 12 at 96x96). Those of features are made before, or noise."""
        if self.copies is not None:
            assert self.image_statistics is not None
            return Copies(augment, image_shape=self.image_shape, counts=self.copies, statistics=self.image_statistics)
        compiled = bool(tf.config.list_physical_devices("GPU"))
        return Augmenter(augment, image_shape=self.image_shape, mirror=self.mirror, shift=self.image_shape[1] // 8,
                         **{"jit_compile": compiled} | settings)

    def to_dict(self) -> dict:
        """Returns data.json; numbers keep their bits."""
        return {"class_names": [str(name) for name in self.class_names], "image_shape": list(self.image_shape),
                "set_sizes": list(self.set_sizes), "mirror": bool(self.mirror),
                "image_statistics": self.image_statistics and [np.asarray(x).tolist() for x in self.image_statistics],
                "label_prior": None if self.label_prior is None else self.label_prior.tolist(),
                "calibration": 0 if self.calibration is None else len(self.calibration[1]),
                **({} if self.copies is None else {"copies": self.copies, "embedding": self.embedding
                                                   and asdict(self.embedding)})}

    @classmethod
    def from_dict(cls, facts: dict) -> DataFacts:
        """Reads data.json; ValueError, KeyError or TypeError if it is something else."""
        names, statistics, prior = facts["class_names"], facts["image_statistics"], facts.get("label_prior")
        if statistics is not None:
            mean, deviation = (np.asarray(x, np.float32) for x in statistics)
            statistics = mean, deviation
        (height, width, channels), (labeled, unlabeled) = map(int, facts["image_shape"]), map(int, facts["set_sizes"])
        if not 0 < min(height, width, channels) <= max(height, width, channels) < 1 << 14:
            raise ValueError(f"image_shape is {facts['image_shape']}")
        if statistics is not None and not all(x.shape == (channels,) and np.isfinite(x).all() for x in statistics):
            raise ValueError(f"image_statistics is {facts['image_statistics']}")
        if not isinstance(names, list) or len(names) < 2 or not all(isinstance(name, str) for name in names):
            raise ValueError(f"class_names is {names!r}")
        if "digest" in facts and facts["digest"]["classes"] != _digest(repr(names).encode()):
            raise ValueError("class_names are others than those of its digest")
        size, embedding = int(facts.get("calibration", 0)), facts.get("embedding")
        copies = (int(facts["copies"][0]), int(facts["copies"][1])) if "copies" in facts else None
        return cls(names, (height, width, channels), (labeled, unlabeled), bool(facts["mirror"]), statistics,
                   None if prior is None else np.asarray(prior, np.float64),
                   (np.zeros((size, height, width, channels), np.float16 if copies else np.uint8),
                    np.zeros(size, np.int64)), copies, embedding and Embedding.from_dict(embedding))


def load(name: str, data_dir: str | Path = "", image_size: int | None = None,
         listing: files.Listing | None = None) -> SSLData:
    """Loads a dataset by its name on the command line, such as cifar10.3@40-1 or folder:PATH.

    `data_dir` (by default that of TFDS) has the TFDS datasets and gets the decoded images. A user's images, whose
    `listing` may be known already, are resized to the side `image_size`; by default 32, or what suits all of a folder.
    """
    parsed = parse_name(name)
    data_dir = files.expand("data_dir", str(data_dir) or DEFAULT_DATA_DIR)
    if parsed.is_arrays:
        raise UserError(f"{name} are arrays of a Python program: give them to train or evaluate as `data`.")
    if parsed.path:
        if not parsed.is_whole and os.path.exists(itself := files.expand("dataset", name.partition(":")[2])):
            raise UserError(f"{itself} is there, but by its name it is also a split of {parsed.path}. Rename it.")
        if image_size is not None and not (type(image_size) is int and 0 < image_size <= 4096):
            raise OptionError(f"image_size={image_size!r}: expected 1 to 4096 pixels.")
        listing = listing or files.listing(files.expand("dataset", parsed.path), parsed.is_csv)
        size = image_size or (files.image_size(listing.pixels) if parsed.is_whole else 32)
        source = sources.files_source(listing, size, data_dir, parsed.seed, parsed.is_whole)
    else:
        source = parsed.entry.load() if parsed.entry.load else sources.tfds_source(parsed.dataset, data_dir)
    return replace(make_split(source, parsed), listing=listing)


def from_folder(path: str | Path, *, image_size: int | None = None, data_dir: str | Path = "") -> SSLData:
    """Loads all images of path/train/<class>, path/unlabeled and path/test/<class>.

    Without `test`, about a fifth of the labelled images is held out. All are resized to squares of `image_size`, by
    default 32, 64 or 96, what suits them, and kept in `data_dir` for the next time.
    """
    return load(f"folder:{os.fsdecode(path)}", data_dir, image_size)


def from_csv(path: str | Path, *, image_size: int | None = None, data_dir: str | Path = "") -> SSLData:
    """Loads the images of a CSV file with rows file,label or file,label,split; an empty label means unlabelled, names
    are relative to the file's folder. The rest as `from_folder`."""
    return load(f"csv:{os.fsdecode(path)}", data_dir, image_size)


def from_arrays(images: np.ndarray, labels: np.ndarray, test_images: np.ndarray, test_labels: np.ndarray, *,
                seed: int = 1, num_labels: int | None = None, valid: int = 1,
                class_names: list[str] | None = None, mirror: bool = True, name: str = "") -> SSLData:
    """Builds a dataset from [N, H, W] or [N, H, W, 1 to 4] uint8 images and [N] integer labels, -1 for none.

    Args:
        seed: which of the possible labelled sets to draw.
        num_labels: how many labels to use, None for all.
        valid: how many images to set aside for validation.
        class_names: the numbers themselves when None.
        mirror: whether a mirrored image keeps its class.
        name: tells runs on these arrays from those on others: arrays:NAME; by default a digest of the arrays.

    What you write into the arrays later changes nothing here: images are copied, but for read-only arrays. So give
    large ones as `np.load(file, mmap_mode="r")`, which stay on the disk.
    """
    check_unmasked(images, labels, test_images, test_labels)
    labels, test_labels = np.asarray(labels), np.asarray(test_labels)
    for array in (labels, test_labels):
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
            raise UserError(f"Labels are {array.dtype} of shape {list(array.shape)}; expected one whole number per "
                            "image: 0, 1, ... (-1: none).")
    labels, test_labels = labels.astype(np.int64), test_labels.astype(np.int64)
    images, test_images = _own_images(images), _own_images(test_images)
    if len(images) != len(labels) or len(test_images) != len(test_labels) or not (len(labels) and len(test_labels)):
        raise UserError(f"Got {len(images)} images with {len(labels)} labels and {len(test_images)} test images with "
                        f"{len(test_labels)} labels; expected one label per image (-1: none) and a test set.")
    if images.shape[1:] != test_images.shape[1:]:
        raise UserError(f"Training images are {images.shape[1:3]}, test images {test_images.shape[1:3]}; "
                        "resize them alike.")
    lowest, num_classes = int(labels.min()), int(labels.max()) + 1
    missing = np.setdiff1d(np.arange(min(num_classes, len(labels))), labels).tolist()
    if lowest < -1 or num_classes < 2 or missing or test_labels.min() < 0 or test_labels.max() >= num_classes:
        raise UserError(f"Training labels run from {lowest} to {num_classes - 1}, without {missing[:3] or 'gaps'}, "
                        f"test labels from {test_labels.min()} to {test_labels.max()}; expected classes 0, 1, ..., "
                        "each with a training image (-1: no label).")
    if isinstance(class_names, str | set | frozenset):
        raise UserError(f"class_names is {type(class_names).__name__}; expected a list: the first name is class 0.")
    names = [str(c) for c in (range(num_classes) if class_names is None else class_names)]
    if not len(names) == len(set(names)) == num_classes:
        raise UserError(f"Got {len(set(names))} class names for {num_classes} classes (named in all: {len(names)}); "
                        "expected another one for each class.")
    if not all(isinstance(number, int | np.integer) and number >= 0 for number in (seed, valid)):
        raise UserError(f"seed={seed}, valid={valid}: expected whole numbers, 0 or more.")
    if not isinstance(mirror, bool | np.bool_):
        raise UserError(f"mirror={mirror!r}: expected True or False.")
    digest = hashlib.sha256()
    for array in (images, labels, test_images, test_labels):
        part = max(1, len(array) // SAMPLED) if name and isinstance(array, np.memmap) else 1  # larger than memory
        digest.update(np.ascontiguousarray(array[::part]).data)
    name = name or f"arrays:{digest.hexdigest()[:8]}"
    if (np.diff((labels < 0).astype(np.int8)) < 0).any():  # labelled images first, as validation images need labels;
        first = np.argsort(labels < 0, kind="stable")  # the copy may be large: only where it must be
        images, labels = images[first], labels[first]
    known = np.prod(images.shape[1:3]) > 1 and not (name and isinstance(images, np.memmap))
    source = sources.Source(images, labels, test_images, test_labels, names, mirror=mirror,
                            notes=twins(images, test_images) if known else [], fingerprint=digest.hexdigest())
    split = parse_name(f"{name}.{seed}@{'all' if num_labels is None else num_labels}-{valid}")
    if not split.is_arrays or "/" in name:
        raise UserError(f"name={name!r}: expected arrays, or arrays:NAME, where NAME has no slash.")
    data = make_split(source, split)
    return with_twins_of_valid(data, images) if known else data


def check_unmasked(*arrays: object) -> None:
    if any(isinstance(array, np.ma.MaskedArray) for array in arrays):
        raise UserError("There is a masked array, whose mask would be lost; expected arrays without (a label of -1: "
                        "none).")


def twins(images: Iterable[np.ndarray], others: Iterable[np.ndarray], part: str = "test") -> list[str]:
    """Returns a line about images of another part, if any, with the same bytes as training images."""
    mine, theirs = ([hash(image.tobytes()) for image in array] for array in (images, others))
    return _twins(mine, theirs, part)


def with_twins_of_valid(data: SSLData, images: np.ndarray) -> SSLData:
    """Returns the data with that line about its validation images, if there are any; `images` or their features."""
    found = twins((images[i] for i in data.unlabeled), images[data.valid], "validation") if data.num_valid else []
    return replace(data, notes=[*data.notes, *found])


def _twins(contents: Iterable[int], others: Sequence[int], part: str) -> list[str]:
    known = set(contents)
    count = sum(content in known for content in others)
    harm = "the result" if part == "test" else "validation scores, and sets calibrated with them,"
    return [f"{count} of the {len(others)} {part} images have the same bytes as training images: {harm} will be too "
            "good."] if count else []


def _own_images(given: np.ndarray) -> np.ndarray:
    """Returns images as RGB, apart from an array that its owner may write into."""
    given = np.asarray(given)
    images = sources.to_rgb(given)
    return images.copy() if images.flags.writeable and np.may_share_memory(images, given) else images


def make_split(source: sources.Source, name: DatasetName) -> SSLData:
    """Chooses the labelled, validation and unlabelled images of a source."""
    num_known = int(np.sum(source.labels >= 0))
    num_classes = len(source.class_names)
    notes, remarks, num_valid = list(source.notes), list(source.remarks), name.valid or 0
    if num_valid >= len(source.labels):
        raise UserError(f"{name} sets {num_valid} images aside for validation, but {name.dataset} has only "
                        f"{len(source.labels)} training images; leave some for training.")
    published = source.unlabeled_order is not None  # the original's rules to the letter: unknown counts as class 0
    labels = np.maximum(np.asarray(source.labels), 0) if published else np.asarray(source.labels[:num_known])
    frequencies = np.ones(num_classes) if name.entry.equal_classes else splits.class_frequencies(labels, num_classes)
    drawn = labels  # where labelled images come from
    if published:
        order = np.asarray(source.unlabeled_order)
    else:  # a user's: images without a label follow after all those with one
        order = np.concatenate([splits.unlabeled_order(labels, frequencies), np.arange(num_known, len(source.labels))])
        if name.is_whole:
            valid, remark = _validation_of_user(source, labels, name)
            order, num_valid = np.concatenate([valid, order[~np.isin(order, valid)]]), len(valid)
            remarks.append(remark)
        if num_valid >= num_known:
            raise UserError(f"{name} sets {num_valid} images aside for validation, but only {num_known} have a label; "
                            "leave some for training.")
        drawn = labels.copy()  # nor are labelled images drawn from those for validation
        drawn[order[:num_valid]] = -1
        num_known -= num_valid
    if (name.labels or 0) > num_known:
        besides = "" if published else " besides those for validation"
        raise UserError(f"{name} asks for {name.labels} labels, but {name.dataset} has {num_known} labelled training "
                        f"images{besides}; ask for at most that many, or for `all`.")
    if name.labels is None:
        labeled = np.flatnonzero(np.asarray(source.labels) >= 0 if published else drawn >= 0)
    elif name.dataset == "stl10" and name.labels == 1000:
        labeled = _fold(source, name)
    else:
        labeled = splits.labeled_indices(drawn, name.labels, name.seed, frequencies)
        if name.labels < num_classes:
            notes.append(f"{name} has fewer labels ({name.labels}) than classes ({num_classes}): some have none.")
    unknown = int(np.sum(np.asarray(source.labels)[labeled] < 0))
    if unknown:
        notes.append(f"{unknown} labelled images of {name} are unlabelled ones that count as class 0, as in the "
                     "original program; only stl10 with 1000 labels uses the dataset's own labelled folds.")
    if not published and source.contents is not None:
        contents = source.contents[0]
        notes += _twins(contents[order[num_valid:]].tolist(), contents[order[:num_valid]].tolist(), "validation")
    shared = np.intersect1d(order[:num_valid], labeled).size
    if shared and num_valid > 1:
        notes.append(f"{shared} of the {num_valid} validation images of {name} are labelled training images too, as "
                     "in the original program: validation accuracy is optimistic.")
    return SSLData(source.images, np.asarray(source.labels), source.test_images, np.asarray(source.test_labels),
                   source.class_names, source.mirror, notes, remarks, source.fingerprint, source.contents,
                   name=str(name), labeled=labeled, labeled_classes=labels[labeled], order=order, num_valid=num_valid)


def _validation_of_user(source: sources.Source, labels: np.ndarray, name: DatasetName) -> tuple[np.ndarray, str]:
    """Returns the indices of the validation images of a user's data, and what to say about them."""
    if source.chosen_valid is not None:
        return source.chosen_valid, f"{len(source.chosen_valid)} images of its own are for validation."
    fewest = int(np.bincount(labels, minlength=len(source.class_names)).min())
    if fewest < VALID_MINIMUM:
        return np.zeros(0, np.int64), (f"No image is set aside for validation: that needs {VALID_MINIMUM} labelled "
                                       f"training images of every class, and one has {fewest}.")
    assert source.contents is not None  # as of all images that are named by a path alone
    held = splits.held_out(labels, source.contents[0][:len(labels)], VALID_SHARE, [name.seed, 1])
    return held, f"{len(held)} of the labelled training images, about a tenth of every class, are for validation."


def hold_out(data: SSLData, share: float) -> SSLData:
    """Returns the data with a share of its labelled images set aside for calibration, drawn by the split's seed.

    Classes give in proportion, and each keeps at least one image to train on. What was set aside before comes back.
    """
    if data.undivided is not None:
        data = replace(data, labeled=data.undivided[0], labeled_classes=data.undivided[1], undivided=None,
                       calibration=np.zeros(0, np.int64), calibration_classes=np.zeros(0, np.int64))
    if not share:
        return data
    order = np.random.RandomState(parse_name(data.name).seed).permutation(len(data.labeled))
    classes = data.labeled_classes[order]
    counts, by_class = np.bincount(classes), np.argsort(classes, kind="stable")
    ranks = np.empty(len(order), np.int64)  # among those of the same class
    ranks[by_class] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    part = ranks / counts[classes]
    spare = np.argsort(part, kind="stable")[int(np.sum(ranks == 0)):]  # all but the first of each class
    chosen = order[spare[:max(1, round(share * len(order)))]]
    if not len(chosen):
        raise UserError(f"{data.name} has {len(order)} labelled images, none of which its class can spare for "
                        "calibration; ask for more labels, two of some class at least.")
    rest = np.setdiff1d(np.arange(len(order)), chosen)
    return replace(data, labeled=data.labeled[rest], labeled_classes=data.labeled_classes[rest],
                   calibration=data.labeled[chosen], calibration_classes=data.labeled_classes[chosen],
                   undivided=(data.labeled, data.labeled_classes))


def _fold(source: sources.Source, name: DatasetName) -> np.ndarray:
    if source.folds is None:
        raise UserError("stl10 with 1000 labels needs the dataset's fold_indices.txt, which was not found when the "
                        "images were decoded. Put it beside dataset_info.json, delete the cssl_cache folder there and "
                        "start again.")
    if name.seed >= len(source.folds):
        raise UserError(f"{name}: stl10 with 1000 labels has folds 0 to {len(source.folds) - 1}; use one as seed.")
    return np.asarray(source.folds[name.seed])
