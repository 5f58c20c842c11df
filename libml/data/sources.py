"""Where images come from: TFDS, the embedded digits, folders of image files. Decoded once, then memory-mapped."""
import hashlib
import importlib.util
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
import tensorflow as tf
from PIL import Image, ImageOps
from tqdm import tqdm

from libml.data import cache, files, splits
from libml.data.names import DATASETS, Dataset
from libml.errors import UserError

TEST_SHARE = 0.2  # of a user's labelled images, where none are named for the test
Told = Callable[[str, int, int], None]  # of long work: what is done, how many, of how many
CACHE_NAME = f"{cache.NAME}-1"  # the number changes when the stored arrays change their meaning


@dataclass(frozen=True)
class Images:
    images: np.ndarray  # [N, H, W, 3] uint8 for training, labelled ones and others; often memory-mapped
    labels: np.ndarray  # [N] int64, -1 where the class is not known
    test_images: np.ndarray  # [M, H, W, 3] uint8
    test_labels: np.ndarray  # [M] int64
    class_names: list[str]
    mirror: bool = True  # whether the default weak augmentation mirrors (house numbers and digits change by it)
    notes: list[str] = field(default_factory=list)  # warnings for the user to read, one line each
    remarks: list[str] = field(default_factory=list)  # what was done as it is meant to be, one line each
    fingerprint: str = ""  # tells the pixels of the user's images from others
    contents: tuple[np.ndarray, np.ndarray] | None = None  # [N] and [M] uint64, what tells the user's files apart


@dataclass(frozen=True)
class Source(Images):
    """Images before any choice of labels."""

    unlabeled_order: np.ndarray | None = None  # [N] int64, by the rules of the published splits; None for own images
    folds: np.ndarray | None = None  # [folds, 1000], predefined labelled sets (STL-10)
    chosen_valid: np.ndarray | None = None  # indices of the images that the user has chosen for validation


def to_rgb(images: np.ndarray) -> np.ndarray:
    """Makes [N, H, W] or [N, H, W, channels] uint8 images three-channelled: grey is repeated, alpha dropped."""
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or images.dtype != np.uint8 or not all(images.shape[1:]) or images.shape[-1] > 4:
        raise UserError(f"Images are {images.dtype} of shape {list(images.shape)}; expected uint8 of shape [N, height, "
                        "width] or [N, height, width, 1 to 4 channels].")
    if images.shape[-1] < 3:
        return np.repeat(images[..., :1], 3, axis=-1)
    return images[..., :3]


def upright(image: Image.Image) -> Image.Image:
    """Returns an image upright and in RGB; ValueError for unknown scales."""
    image = ImageOps.exif_transpose(image)  # cameras store how they were held
    if image.mode == "F" or image.mode.startswith("I"):  # I;16, I;16B, or I, in which Pillow reads 16-bit PGM
        levels = np.asarray(image).astype(np.float64)
        low, high = levels.min(), levels.max()
        if not (0 <= low and (high <= 1 if image.mode == "F" else high == 0 or 256 <= high < 65536)):
            raise ValueError(f"its values go from {low:.6g} to {high:.6g}; expected floats of 0 to 1, or whole numbers "
                             "of 8 or 16 bits")
        image = Image.fromarray((np.round(levels * 255) if image.mode == "F" else levels // 256).astype(np.uint8))
    return image.convert("RGB")


def resize(image: Image.Image, size: int, width: int = 0) -> np.ndarray:
    """Resizes one image to size x size (or another width), as `upright`."""
    return np.asarray(upright(image).resize((width or size, size), Image.Resampling.BICUBIC))


def digits() -> Source:
    """Returns scikit-learn's handwritten digits at 16x16x3; every fifth image is a test image."""
    package = importlib.util.find_spec("sklearn")
    assert package and package.origin  # its file is read without a second of imports
    table = np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    # [1797, 65]: 8x8 levels of 0 to 16, and the class
    pixels = np.round(table[:, :-1].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    images = np.stack([resize(Image.fromarray(image), 16) for image in pixels])
    labels = table[:, -1].astype(np.int64)
    test = np.arange(len(labels)) % 5 == 0
    order = splits.unlabeled_order(labels[~test], splits.class_frequencies(labels[~test], 10))
    return Source(images[~test], labels[~test], images[test], labels[test], [str(d) for d in range(10)], mirror=False,
                  unlabeled_order=order)


def tfds_version_dir(tfds_name: str, data_dir: Path) -> Path | None:
    """Returns the folder of the newest prepared version of a TFDS dataset."""
    versions = [path.parent for path in (data_dir / tfds_name).glob("*/dataset_info.json")]
    return max(versions, default=None, key=lambda path: [int(part) if part.isdigit() else -1
                                                         for part in path.name.split(".")])


def tfds_source(name: str, data_dir: Path) -> Source:
    """Returns one of the paper's datasets; the first call decodes it into a cache beside the TFDS files."""
    dataset = DATASETS[name]
    version_dir = tfds_version_dir(dataset.tfds_name, data_dir)
    if version_dir is None:
        raise UserError(f"No data for {name}: {data_dir / dataset.tfds_name} holds no prepared TFDS dataset. Run "
                        f"`cssl-data {name} --data_dir={data_dir}` on a machine with a network,"
                        " or name the folder that has it with --data_dir or $ML_DATA.")
    try:
        with cache.opened(version_dir / f"{CACHE_NAME}-{name}",
                          lambda writer: _decode_tfds(dataset, version_dir, data_dir, writer)) as (arrays, meta):
            return Source(arrays["images"], arrays["labels"], arrays["test_images"], arrays["test_labels"],
                          meta["class_names"], dataset.mirror, unlabeled_order=arrays["order"],
                          folds=arrays.get("folds"))
    except tf.errors.OpError as error:  # a missing or truncated file
        raise UserError(f"The files of {dataset.tfds_name}/{version_dir.name} cannot be read "
                        f"({error.message.splitlines()[0][:200]}). Prepare it again with cssl-data.") from error


def _decode_tfds(dataset: Dataset, version_dir: Path, data_dir: Path, writer: cache.Writer) -> None:
    """Stores images and labels in the order of the original files, which TFDS shuffles when it writes."""
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core import hashing

    try:
        builder = tfds.builder_from_directory(version_dir)
        height, width, _ = builder.info.features["image"].shape
        counts = {split: builder.info.splits[split].num_examples for split in (*dataset.train_splits, "test")}
    except Exception as error:
        raise UserError(f"The TFDS dataset in {version_dir} cannot be read ({error}). Delete that folder and prepare "
                        "it again with cssl-data.") from error
    side, has_ids = dataset.width, "id" in builder.info.features
    top, left = (side - height) // 2, (side - width) // 2
    read = tfds.ReadConfig(interleave_cycle_length=1)
    for prefix, part in (("", dataset.train_splits), ("test_", ("test",))):
        images = writer.create(f"{prefix}images", (sum(counts[split] for split in part), side, side, 3), np.uint8)
        labels = writer.create(f"{prefix}labels", images.shape[:1], np.int64)
        stop = 0
        for split in part:
            start = done = stop
            stop += counts[split]
            # Where there is no id, builders key example i by the integer i; they store by the hash of the key.
            stored = iter(sorted(range(counts[split]), key=hashing.Hasher(split).hash_key))
            examples = builder.as_dataset(split=split, shuffle_files=False, read_config=read).batch(256).prefetch(2)
            with tqdm(total=stop - start, desc=f"decoding {builder.info.name} {split}", unit="img",
                      disable=None) as bar:
                for batch in examples.as_numpy_iterator():
                    known = batch["label"].astype(np.int64)
                    numbers = ([int(text.rsplit(b"_", 1)[1]) for text in batch["id"]] if has_ids
                               else list(islice(stored, len(known))))
                    where = start + np.array(numbers)
                    images[where, top:top + height, left:left + width] = to_rgb(batch["image"])
                    labels[where] = np.where(known < 0, -1, dataset.relabel(known) if dataset.relabel else known)
                    done += len(known)
                    bar.update(len(known))
            if done != stop:
                raise UserError(f"{builder.info.name} has {done - start} examples in split {split}, its description "
                                f"promises {stop - start}. Prepare it again with cssl-data.")
        if not prefix:
            known, names = np.maximum(labels, 0), builder.info.features["label"].names
            frequencies = np.ones(len(names)) if dataset.equal_classes else splits.class_frequencies(known, len(names))
            writer.add("order", splits.unlabeled_order(known, frequencies))
            writer.meta["class_names"] = list(names)
    if dataset.tfds_name == "stl10":
        candidates = [version_dir / "fold_indices.txt",
                      *sorted((data_dir / "downloads" / "extracted").glob("*/stl10_binary/fold_indices.txt"))]
        for file in [path for path in candidates if path.exists()][:1]:
            writer.add("folds", np.array([line.split() for line in file.read_text().splitlines() if line], np.int64))


def decode(listing: files.Listing, parts: dict[str, list[files.File]], image_size: int, data_dir: Path,
           told: Told | None = None) -> tuple[dict[str, np.ndarray], dict, str]:
    """Returns arrays and notes of the readable images of a listing's parts, resized to a square, from a cache that the
    first call makes; and a remark about what is kept of earlier states."""
    path = listing.path
    inside = os.path.join(path.parent if path.is_file() else path, "")
    contents = [[(file.label, file.path.removeprefix(inside), file.size, file.modified) for file in part]
                for part in parts.values()]
    place = path.resolve()
    facts = ["hashed", str(place), image_size, listing.class_names, contents]
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    location = data_dir / "folders" / f"{CACHE_NAME}-{place.name[:40]}-{digest}"  # names of files are limited

    def build(writer: cache.Writer) -> None:
        writer.meta["of"] = str(place), image_size, bool(parts["valid"])
        _decode_files(path.name, parts, listing.class_names, image_size, writer, told)

    with cache.opened(location, build) as (arrays, meta):
        found = {f"{part}{name}": arrays[f"{part}{name}"] if name == "images" else np.array(arrays[f"{part}{name}"])
                 for part in ("", "test_") for name in ("images", "labels", "hashes")}
        meta = {"notes": list(meta["notes"]), "num_valid": int(meta.get("num_valid", 0)), **meta}
        old = cache.siblings(location, meta.get("of"))
    return found, meta, (f"Decoded images of {path} as it was before take {sum(old.values()) / 1e6:,.1f} MB and may be "
                         f"deleted if no run uses them: {', '.join(map(str, old))}" if old else "")


def files_source(listing: files.Listing, image_size: int, data_dir: Path, seed: int, whole: bool = False) -> Source:
    """Returns the images of a listing, resized to a square; those for validation if it is taken as a `whole`.

    Without test images, about a fifth of every class is held out, by the split's seed and each file's contents.
    """
    path, parts = listing.path, listing.parts if whole else listing.parts | {"valid": []}
    arrays, meta, old = decode(listing, parts, image_size, data_dir)
    names, remarks = listing.class_names, [str(listing), *filter(None, [old])]
    notes, num_valid = [*meta["notes"], *listing.notes], meta["num_valid"]
    images, labels, hashes = (arrays[name] for name in ("images", "labels", "hashes"))
    test_images, test_labels, test_hashes = (arrays[f"test_{name}"] for name in ("images", "labels", "hashes"))
    fingerprint = hashlib.sha256(hashes.tobytes() + test_hashes.tobytes()).hexdigest()
    valid = np.arange(len(labels)) < num_valid
    present = np.bincount(labels[(labels >= 0) & ~valid], minlength=len(names))
    if (present == 0).any():
        raise UserError(f"{path if path.is_file() else path / 'train'} has no readable image of class "
                        f"{names[int(np.argmin(present))]!r}. Add some, or remove that class.")
    order = np.lexsort((labels, hashes))
    pairs = (np.diff(hashes[order]) == 0) & (np.diff(labels[order]) != 0) & (labels[order[:-1]] >= 0)
    if pairs.any():
        notes.append(f"{pairs.sum()} pictures of {path} are training images of two classes, byte for byte, one of them "
                     f"of {names[labels[order[1:][pairs][0]]]!r}.")
    if not parts["test"]:
        held = np.flatnonzero(~valid & (labels >= 0))
        held = held[splits.held_out(labels[held], hashes[held], TEST_SHARE, [seed, 0])]
        test_images, test_labels, test_hashes = images[held], labels[held], hashes[held]
        keep = np.setdiff1d(np.arange(len(labels)), held)
        images, labels, hashes, valid = images[keep], labels[keep], hashes[keep], valid[keep]
        what = "`test` rows" if path.is_file() else "`test` folder"
        (remarks if whole else notes).append(
            f"{path} has no {what}: {len(held)} of its labelled images are held out as test set.")
    if not len(test_labels):
        where = "give some rows the split `test`" if path.is_file() else f"put some into {path / 'test'}/<class>"
        raise UserError(f"{path} leaves no readable test image: {where}, or give at least one class two images, so "
                        "that one can be held out.")
    if twins := int(np.isin(test_hashes, hashes).sum()):
        notes.append(f"{twins} of the {len(test_labels)} test images of {path} have the same bytes as training images: "
                     "the result will be too good.")
    if not whole and listing.parts["valid"]:
        notes.append(f"{len(listing.parts['valid'])} validation images of {path} are not used: the dataset's name says "
                     "how many training images to take instead.")
    return Source(images, labels, test_images, test_labels, names, notes=notes, remarks=remarks,
                  fingerprint=fingerprint, contents=(hashes, np.array(test_hashes)),
                  chosen_valid=np.flatnonzero(valid) if parts["valid"] else None)


def read_image(file: str | Path, height: int, width: int) -> np.ndarray | str:
    """Decodes and resizes a file; the reason if that fails."""
    try:
        with Image.open(file) as image:
            return resize(image, height, width)
    except Exception as error:  # Pillow raises many types for damaged files
        return (str(error) or type(error).__name__).splitlines()[0]


def _decode_files(title: str, parts: dict[str, list[files.File]], names: list[str], size: int, writer: cache.Writer,
                  told: Told | None) -> None:
    """Stores readable images for training (validation, labelled, unlabelled) and test, with hashes of their files."""
    classes, unreadable = {name: c for c, name in enumerate(names)} | {"": -1}, dict[str, str]()
    for prefix, part in (("", parts["valid"] + parts["train"] + parts["unlabeled"]), ("test_", parts["test"])):
        images = writer.create(f"{prefix}images", (len(part), size, size, 3), np.uint8)
        kept, hashes = list[int](), list[int]()
        with warnings.catch_warnings(), ThreadPoolExecutor() as pool:
            warnings.simplefilter("ignore")
            decoded = pool.map(lambda file: (read_image(file.path, size, size), cache.content_hash(file.path)), part)
            for i, (pixels, content) in enumerate(tqdm(decoded, f"decoding {title}", len(part), unit="img",
                                                       disable=None)):
                if told:
                    told("reading images", i, len(part))
                if not content:  # the file system's doing, not the file's: it would be skipped for ever
                    reason = pixels if isinstance(pixels, str) else "it was there a moment ago"
                    raise UserError(f"{part[i].path} cannot be read ({reason}). Make it readable, or move it away, and "
                                    "start again.")
                if isinstance(pixels, str):
                    unreadable[part[i].path] = pixels
                else:
                    images[len(kept)] = pixels
                    kept.append(i)
                    hashes.append(content)
        if len(kept) < len(part):
            writer.add(f"{prefix}images", np.array(images[:len(kept)]))
        writer.add(f"{prefix}labels", np.array([classes[part[i].label] for i in kept], np.int64))
        writer.add(f"{prefix}hashes", np.array(hashes, np.uint64))
        if not prefix:
            writer.meta["num_valid"] = sum(i < len(parts["valid"]) for i in kept)
    first = ", ".join(f"{path} ({reason})" for path, reason in islice(unreadable.items(), 3))
    note = f"{len(unreadable)} unreadable image files were skipped: {first}{', …' * (len(unreadable) > 3)}"
    writer.meta |= {"unreadable": unreadable, "notes": [note] if unreadable else []}
