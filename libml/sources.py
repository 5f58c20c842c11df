"""Where images come from: TFDS, the embedded digits, folders of image files. Decoded once, then memory-mapped."""
import hashlib
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tensorflow as tf
from PIL import Image, ImageOps
from tqdm import tqdm

from libml import cache, splits
from libml.datasets import DATASETS, Dataset
from libml.errors import UserError

CACHE_NAME = "cssl_cache-1"  # the number changes when the stored arrays change their meaning
IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm", ".tif", ".tiff", ".gif"}


@dataclass
class Source:
    """All images of a dataset, before any choice of labels.

    Attributes:
        images: [N, H, W, 3] uint8, training images in canonical order, labelled ones and others.
        labels: [N] int64 class, -1 where nobody knows it.
        test_images: [M, H, W, 3] uint8.
        test_labels: [M] int64.
        class_names: one name per class.
        mirror: whether a mirrored image keeps its class (house numbers and digits do not).
        unlabeled_order: [N] int64, the class-balanced order of the unlabelled stream, by the rules of the published
            splits; None for the user's own images.
        frequencies: [classes] wanted class shares; from the labels when None.
        folds: [folds, 1000] predefined labelled sets (STL-10), or None.
        notes: one line each, for the user to read.
    """

    images: np.ndarray
    labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    class_names: list[str]
    mirror: bool = True
    unlabeled_order: np.ndarray | None = None
    frequencies: np.ndarray | None = None
    folds: np.ndarray | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def split_labels(self) -> np.ndarray:
        """Labels as the published splits see them: an unknown class counts as class 0."""
        return np.maximum(np.asarray(self.labels), 0)


def to_rgb(images: np.ndarray) -> np.ndarray:
    """Makes [N, H, W] or [N, H, W, channels] uint8 images three-channelled: grey is repeated, alpha dropped."""
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or images.dtype != np.uint8 or images.shape[-1] not in (1, 2, 3, 4):
        raise UserError(f"Images are {images.dtype} of shape {list(images.shape)}; expected uint8 of shape [N, height, "
                        "width] or [N, height, width, 1 to 4 channels].")
    if images.shape[-1] < 3:
        return np.repeat(images[..., :1], 3, axis=-1)
    return images[..., :3]


def pad_square(images: np.ndarray, size: int) -> np.ndarray:
    """Zero-pads [N, H, W, C] images symmetrically to size x size."""
    before = [(size - extent) // 2 for extent in images.shape[1:3]]
    after = [size - extent - b for extent, b in zip(images.shape[1:3], before, strict=True)]
    return np.pad(images, ((0, 0), (before[0], after[0]), (before[1], after[1]), (0, 0)))


def resize(image: Image.Image, size: int, width: int = 0) -> np.ndarray:
    """Resizes one Pillow image to size x size (or to height `size` and another width), upright, to RGB uint8; 16-bit
    images keep their upper 8 bits."""
    image = ImageOps.exif_transpose(image)  # cameras store how they were held
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return np.asarray(image.convert("RGB").resize((width or size, size), Image.Resampling.BICUBIC))


def digits() -> Source:
    """Returns scikit-learn's handwritten digits at 16x16x3; every fifth image is a test image."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    pixels = np.round(bunch.images * (255 / 16)).astype(np.uint8)
    images = np.stack([resize(Image.fromarray(image), 16) for image in pixels])
    labels = bunch.target.astype(np.int64)
    test = np.arange(len(labels)) % 5 == 0
    images, labels, test_images, test_labels = images[~test], labels[~test], images[test], labels[test]
    order = splits.unlabeled_order(labels, splits.class_frequencies(labels, 10))
    return Source(images, labels, test_images, test_labels, [str(d) for d in range(10)], mirror=False,
                  unlabeled_order=order)


def _version(path: Path) -> tuple[int, ...]:
    parts = path.name.split(".")
    return tuple(int(part) if part.isdigit() else -1 for part in parts)


def tfds_version_dir(tfds_name: str, data_dir: Path) -> Path | None:
    """Returns the folder of the newest prepared version of a TFDS dataset."""
    versions = [path.parent for path in (data_dir / tfds_name).glob("*/dataset_info.json")]
    return max(versions, key=_version, default=None)


def cache_folder(name: str, version_dir: Path) -> Path:
    """Returns where the decoded images of a prepared TFDS dataset are, or will be."""
    return version_dir / f"{CACHE_NAME}-{name}"


def tfds_source(name: str, data_dir: Path) -> Source:
    """Returns one of the paper's datasets; the first call decodes it into a cache beside the TFDS files."""
    dataset = DATASETS[name]
    version_dir = tfds_version_dir(dataset.tfds_name, data_dir)
    if version_dir is None:
        raise UserError(f"No data for {name}: {data_dir / dataset.tfds_name} holds no prepared TFDS dataset. Run "
                        f"`cssl-data {name} --data_dir={data_dir}` on a machine with a network,"
                        " or name the folder that has it with --data_dir or $ML_DATA.")
    folder = cache_folder(name, version_dir)
    arrays, meta = cache.read_or_build(folder, lambda writer: _decode_tfds(dataset, version_dir, data_dir, writer))
    num_classes = len(meta["class_names"])
    return Source(arrays["images"], arrays["labels"], arrays["test_images"], arrays["test_labels"], meta["class_names"],
                  mirror=dataset.mirror, unlabeled_order=arrays["order"], folds=arrays.get("folds"),
                  frequencies=np.ones(num_classes) if dataset.equal_classes else None)


def _decode_tfds(dataset: Dataset, version_dir: Path, data_dir: Path, writer: cache.Writer) -> None:
    import tensorflow_datasets as tfds

    try:
        builder = tfds.builder_from_directory(version_dir)
        height, width, _ = builder.info.features["image"].shape
        counts = {split: builder.info.splits[split].num_examples for split in (*dataset.train_splits, "test")}
    except Exception as error:
        raise UserError(f"The TFDS dataset in {version_dir} cannot be read ({error}). Delete that folder and prepare "
                        "it again with cssl-data.") from error
    size = (dataset.pad_to, dataset.pad_to) if dataset.pad_to else (height, width)
    num_train = sum(counts[split] for split in dataset.train_splits)
    writer.meta["class_names"] = list(builder.info.features["label"].names)
    for prefix, part, total in (("", dataset.train_splits, num_train), ("test_", ("test",), counts["test"])):
        images = writer.create(f"{prefix}images", (total, *size, 3), np.uint8)
        labels = writer.create(f"{prefix}labels", (total,), np.int64)
        start = 0
        for split in part:
            stop = start + counts[split]
            _decode_split(builder, split, dataset, images[start:stop], labels[start:stop])
            start = stop
        if not prefix:
            known = np.maximum(labels, 0)
            num_classes = len(writer.meta["class_names"])
            frequencies = (np.ones(num_classes) if dataset.equal_classes
                           else splits.class_frequencies(known, num_classes))
            writer.add("order", splits.unlabeled_order(known, frequencies))
    if dataset.tfds_name == "stl10":
        candidates = [version_dir / "fold_indices.txt",
                      *sorted((data_dir / "downloads" / "extracted").glob("*/stl10_binary/fold_indices.txt"))]
        found = next((path for path in candidates if path.exists()), None)
        if found:
            writer.add("folds", np.array([line.split() for line in found.read_text().splitlines() if line], np.int64))


def _decode_split(builder, split: str, dataset: Dataset, images: np.ndarray, labels: np.ndarray) -> None:
    """Fills images and labels in the order of the original files, which TFDS shuffles when it writes."""
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core import hashing

    read = tfds.ReadConfig(interleave_cycle_length=1)
    examples = builder.as_dataset(split=split, shuffle_files=False, read_config=read).batch(256).prefetch(2)
    positions = None
    if "id" not in builder.info.features:
        # Builders key example i by the integer i and store examples sorted by the hash of their key.
        hasher = hashing.Hasher(split)
        positions = np.array(sorted(range(len(labels)), key=hasher.hash_key))
    done = 0
    with tqdm(total=len(labels), desc=f"decoding {builder.info.name} {split}", unit="img", disable=None) as bar:
        for batch in _readable(examples.as_numpy_iterator(), builder.info.full_name):
            count = len(batch["label"])
            if positions is None:
                where = np.array([int(text.rsplit(b"_", 1)[1]) for text in batch["id"]])
            else:
                where = positions[done:done + count]
            pixels = to_rgb(batch["image"])
            images[where] = pad_square(pixels, dataset.pad_to) if dataset.pad_to else pixels
            known = batch["label"].astype(np.int64)
            labels[where] = np.where(known < 0, -1, dataset.relabel(known) if dataset.relabel else known)
            done += count
            bar.update(count)
    if done != len(labels):
        raise UserError(f"{builder.info.name} has {done} examples in split {split}, its description promises "
                        f"{len(labels)}. Prepare it again with cssl-data.")


def _readable(batches: Iterator[dict], name: str) -> Iterator[dict]:
    try:
        yield from batches
    except tf.errors.OpError as error:  # a missing or truncated file
        raise UserError(f"The files of {name} cannot be read ({error.message.splitlines()[0][:200]}). Prepare it again "
                        "with cssl-data.") from error


def folder_source(path: Path, image_size: int, data_dir: Path, seed: int) -> Source:
    """Returns the images below path/train/<class>, path/unlabeled and path/test/<class>, resized to a square.

    Without `test`, a fifth of every class is held out, chosen by the split's seed.
    """
    files = _list_folder(path)
    listing = [(str(file.relative_to(path)), file.stat().st_size, file.stat().st_mtime_ns)
               for part in files.values() for _, file in part]
    digest = hashlib.sha256(repr(("upright", str(path.resolve()), image_size, listing)).encode()).hexdigest()[:16]
    location = data_dir / "folders" / f"{CACHE_NAME}-{path.name}-{digest}"
    arrays, meta = cache.read_or_build(location, lambda writer: _decode_folder(path, files, image_size, writer))
    names, notes = meta["class_names"], list(meta["notes"])
    loose = [str(file) for part in ("train", "test") for file in path.glob(f"{part}/*") if _is_image(file)]
    if loose:
        notes.append(f"{len(loose)} images are in no class folder and are not used: {', '.join(sorted(loose)[:3])}"
                     f"{', …' if len(loose) > 3 else ''}")
    images, labels = arrays["images"], np.array(arrays["labels"])
    test_images, test_labels = arrays["test_images"], arrays["test_labels"]
    if len(names) < 2:
        raise UserError(f"{path / 'train'} has one class folder, {names[0]!r}; a classifier needs at least two.")
    present = np.bincount(labels[labels >= 0], minlength=len(names))
    if (present == 0).any():
        raise UserError(f"{path / 'train'} has no readable image of class {names[int(np.argmin(present))]!r}. "
                        "Add some, or remove that class folder.")
    if not meta["has_test"]:
        held = splits.stratified_holdout(labels[labels >= 0], 0.2, seed)  # labelled files come first
        test_images, test_labels = images[held], labels[held]
        keep = np.setdiff1d(np.arange(len(labels)), held)
        images, labels = images[keep], labels[keep]
        notes.append(f"{path} has no `test` folder: {len(held)} of its labelled images are held out as test set.")
    if not len(test_labels):
        raise UserError(f"{path} leaves no test image: put some into {path / 'test'}/<class>, or give at least one "
                        "class two images, so that one can be held out.")
    return Source(images, labels, test_images, test_labels, names, notes=notes)


def _list_folder(path: Path) -> dict[str, list[tuple[str, Path]]]:
    """Returns (class name, file) pairs of the three parts, in a stable order."""
    if not (path / "train").is_dir():
        raise UserError(f"{path} has no folder `train`. Expected {path}/train/<class>/*.png or *.jpg, optionally "
                        f"{path}/unlabeled/** and {path}/test/<class>/*.")

    def by_class(part: str) -> list[tuple[str, Path]]:
        classes = sorted(entry for entry in (path / part).iterdir() if entry.is_dir())
        return [(entry.name, file) for entry in classes for file in _image_files(entry)]

    parts = {"train": by_class("train"),
             "unlabeled": [("", file) for file in _image_files(path / "unlabeled")],
             "test": by_class("test") if (path / "test").is_dir() else []}
    if not parts["train"]:
        raise UserError(f"{path / 'train'} holds no image in class folders. Expected {path}/train/<class>/*.png "
                        "or *.jpg.")
    for entry in sorted((path / "train").iterdir()):
        if entry.is_dir() and not any(name == entry.name for name, _ in parts["train"]):
            raise UserError(f"The class folder {entry} holds no image (.png, .jpg). Add some, or remove the folder.")
    only_test = sorted({name for name, _ in parts["test"]} - {name for name, _ in parts["train"]})
    if only_test:
        raise UserError(f"Class {only_test[0]!r} has images in {path / 'test'} but none in {path / 'train'}. "
                        "Add training images of it, or remove it from the test folder.")
    return parts


def _is_image(file: Path) -> bool:
    return file.suffix.lower() in IMAGE_SUFFIXES and not file.name.startswith(".") and file.is_file()


def _image_files(folder: Path) -> list[Path]:
    """The images below a folder; hidden files, which systems leave behind, are none."""
    return sorted(filter(_is_image, folder.rglob("*")))


def _decode_file(file: Path, size: int) -> np.ndarray | None:
    try:
        with warnings.catch_warnings(), Image.open(file) as image:
            warnings.simplefilter("ignore")
            return resize(image, size)
    except Exception:  # Pillow raises many types for damaged files; the caller lists them all
        return None


def _decode_folder(path: Path, files: dict, size: int, writer: cache.Writer) -> None:
    names = sorted({name for name, _ in files["train"]})
    classes = {name: c for c, name in enumerate(names)} | {"": -1}
    unreadable = []
    for prefix, part in (("", files["train"] + files["unlabeled"]), ("test_", files["test"])):
        images, labels = writer.create(f"{prefix}images", (len(part), size, size, 3), np.uint8), list[int]()
        with ThreadPoolExecutor() as pool, tqdm(total=len(part), desc=f"decoding {path.name}", unit="img",
                                                disable=None) as bar:
            decoded = pool.map(lambda pair: _decode_file(pair[1], size), part)
            for (name, file), pixels in zip(part, decoded, strict=True):
                if pixels is None:
                    unreadable.append(str(file))
                else:
                    images[len(labels)] = pixels
                    labels.append(classes[name])
                bar.update()
        if len(labels) < len(part):
            writer.add(f"{prefix}images", np.array(images[:len(labels)]))
        writer.add(f"{prefix}labels", np.array(labels, np.int64))
    notes = []
    if unreadable:
        notes.append(f"{len(unreadable)} unreadable image files were skipped: {', '.join(unreadable)}")
    writer.meta.update(class_names=names, notes=notes, has_test=bool(files["test"]))
