"""Features: every image embedded once by a frozen network, in its plain view and some weak and strong ones.

What is trained on them is a head: the data are vectors with copies, of which `augment.Copies` draws the views.
"""
from __future__ import annotations

import hashlib
import json
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from tqdm import tqdm

from libml import networks
from libml.augment import to_float
from libml.augment.augmenter import Augmenter
from libml.config import OWN, RunConfig, parse_views
from libml.data import DataFacts, SSLData, cache, files, from_arrays
from libml.data.sets import DEFAULT_DATA_DIR, Embedding, check_unmasked, twins, with_twins_of_valid
from libml.data.sources import Told
from libml.devices import distribute
from libml.errors import UserError
from libml.networks.layers import dtype_policy

PASSES = 128  # views that go through the network at a time, about
FLUSH_SECONDS, TOLD_SECONDS = 0.5, 30.0  # between what is kept for a continuation, and between lines of progress
COMPILING, SPARED_BY_PIXEL = 5.0, 6e-8  # seconds to compile views on a CPU, and what that spares for each pixel
CHECKED = 1024  # stored images that are looked at at a time
CACHE_NAME = "cssl_features-1"  # the number changes when the stored numbers change their meaning
ARRAYS = "features, test_features, labels, test_labels, class_names; or features, files"


class Embedder:
    """From float images in [-1, 1] to features [N, 1, 1, D], rounded as they are stored."""

    def __init__(self, network: keras.Model):
        self.network = network
        self.image_shape: tuple[int, int, int] = network.image_shape
        self.width = int(network.classifier.kernel.shape[0])

    @classmethod
    def of(cls, config: RunConfig, image_shape: Sequence[int]) -> Embedder:
        """Builds the network that `--features` names, with the weights that `--weights` says."""
        with dtype_policy(distribute.policy(config.scale)):
            return cls(networks.build(config.data.features, num_classes=2, image_shape=image_shape,
                                      weights=config.network.weights, input_size=config.data.image_size,
                                      seed=config.training.seed))

    def __call__(self, images: tf.Tensor) -> tf.Tensor:
        vectors, = self.network(images, outputs=("embedding",))
        return tf.cast(tf.cast(vectors, tf.float16), tf.float32)[:, None, None]

    def digest(self) -> str:
        """Tells its weights from others."""
        digest, head = hashlib.sha256(), {id(v) for v in self.network.classifier.variables}
        for variable in self.network.variables:
            if id(variable) not in head:
                digest.update(variable.numpy().tobytes())
        return digest.hexdigest()[:16]


def restored(config: RunConfig, facts: DataFacts) -> Embedder | None:
    """Returns what made a run's features, None where nothing did; UserError if it has other weights now."""
    if facts.copies is None:
        return None
    if facts.embedding is None:
        raise UserError(f"This run was trained on the embeddings of {config.data.features}, which images do not tell. "
                        "Embed yours as those were, and give them to run.model.predict, [N, 1, 1, D].")
    embedder = Embedder.of(config, facts.embedding.image_shape)
    if embedder.digest() != facts.embedding.weights:
        raise UserError(f"The weights {config.network.weights} of {config.data.features} are others than those that "
                        "the run's features were made with. Bring those back, under that name.")
    return embedder


def embed(config: RunConfig, data: SSLData, strategy: tf.distribute.Strategy | None = None,
          told: Told | None = None) -> SSLData:
    """Returns the data with features in place of images, as `--features` says; the first call makes and keeps them."""
    if not config.data.features or data.copies is not None:
        return data
    if config.data.features == OWN:
        raise UserError(f"features={OWN} is of data that bring features along, as cssl.from_features makes them; for "
                        "images expected keras:NAME, pixels or FILE.npz.")
    if config.data.features.endswith(".npz"):
        arrays = read_file(config.data.features)
        return _with_features(data, _by_file(arrays, data) if "files" in arrays else arrays, config.data.feature_views)
    counts, augment = config.feature_views, config.augmentation.augment
    weights, network = config.network.weights, config.data.features
    if weights not in ("none", "imagenet"):
        weights = str(cache.content_hash(files.expand("weights", weights)))
    of = [network, f"{weights}-{config.training.seed}" if weights == "none" else weights, config.data.image_size,
          distribute.policy(config.scale), list(counts), augment, data.mirror, list(data.image_shape)]
    hashes = [np.array([_hash(image) for image in images], np.uint64) for images in (data.images, data.test_images)]
    digest = hashlib.sha256(json.dumps(of).encode() + b"".join(part.tobytes() for part in hashes)).hexdigest()[:16]
    title = data.name.rpartition("/")[2].partition(".")[0][:40]
    folder = files.expand("data_dir", config.data.data_dir or DEFAULT_DATA_DIR) / "features"
    folder /= f"{CACHE_NAME}-{title.replace(':', '-')}-{digest}"

    def build(writer: cache.Writer) -> None:
        embedder = Embedder.of(config, data.image_shape)
        augmenter = data.augmenter(augment, policies=config.dataset.entry.auto_augment)
        assert isinstance(augmenter, Augmenter)  # of images
        pixels = len(data.images) * counts[1] * data.image_shape[0] * data.image_shape[1]
        augmenter.jit_compile |= pixels * SPARED_BY_PIXEL > COMPILING
        writer.meta |= {"of": of, "embedding": asdict(Embedding(network, embedder.digest(), data.image_shape))}
        _embed(writer, data, hashes, partial(passes, embedder, augmenter, strategy), counts, embedder.width,
               cache.siblings(folder, of), told)

    with cache.opened(folder, build, resumes=True) as (arrays, meta):
        features, test, embedding = arrays["images"], arrays["test_images"], Embedding.from_dict(meta["embedding"])
    size = sum(array.nbytes for array in (features, test)) / 1e6
    remark = (f"features of {network} at {config.data.image_size}x{config.data.image_size}: {test.shape[-1]} numbers, "
              f"the plain view, {counts[0]} weak and {counts[1]} strong ones ({augment}): {size:,.0f} MB in {folder}")
    return replace(data, images=features, test_images=test, copies=counts, embedding=embedding,
                   pictures=(data.images, data.test_images), remarks=[*data.remarks, remark],
                   fingerprint=f"{data.fingerprint} {digest}")


def plain_vectors(data: SSLData) -> dict[str, np.ndarray]:
    """Returns normalised features [n, D] of the labelled, held-out and test images; of images those of their pixels."""
    parts = {"labeled": data.plain[data.labeled], "held": data.held_out()[0], "test": data.test_images}
    if data.copies is None:
        embedder = Embedder(networks.build("pixels", num_classes=2, image_shape=data.image_shape))
        parts = {name: np.concatenate([np.zeros((0, embedder.width), np.float32), *(
            embedder(to_float(tf.constant(images[start:start + PASSES]))).numpy()[:, 0, 0]
            for start in range(0, len(images), PASSES))]) for name, images in parts.items()}
    vectors = {name: np.asarray(x, np.float32).reshape(len(x), x.shape[-1]) for name, x in parts.items()}
    mean, deviation = data.image_statistics() if data.copies is not None else (
        vectors["labeled"].mean(0), vectors["labeled"].std(0))
    return {name: (x - mean) / np.where(deviation > 1e-6, deviation, 1) for name, x in vectors.items()}


def read_file(path: str) -> dict[str, np.ndarray]:
    """Reads the arrays of a file of embeddings."""
    file = files.expand("features", path)
    try:
        with np.load(file, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
    except (*cache.DAMAGED, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{file} cannot be read as embeddings ({error}). Expected what "
                        f"numpy.savez(file, {ARRAYS}) writes.") from error
    if missing := {"features", *({"test_features"} if "files" not in arrays else ())} - arrays.keys():
        raise UserError(f"{file} has no array {' or '.join(sorted(missing))}, but {', '.join(arrays)[:60]}; expected "
                        f"{ARRAYS}. Where --dataset names images, labels and class_names are not needed.")
    return arrays


def load_file(config: RunConfig) -> SSLData:
    """Returns the data of a file of embeddings that has labels, too."""
    if not config.data.features.endswith(".npz"):
        raise UserError(f"--dataset={config.data.dataset} --features={config.data.features}: arrays come with a file "
                        "of embeddings, --features=FILE.npz, or from a program.")
    arrays, name = read_file(config.data.features), config.dataset
    if missing := {"test_features", "labels", "test_labels"} - arrays.keys():
        raise UserError(f"{config.data.features} has no array {' or '.join(sorted(missing))}: put the class of each "
                        "embedding there (-1: not known), or name the images with --dataset.")
    names = arrays["class_names"].tolist() if "class_names" in arrays else None
    if names and not all(isinstance(name, str) for name in names):
        raise UserError(f"class_names in {config.data.features} are {arrays['class_names'].dtype}; expected text.")
    return from_features(arrays["features"], arrays["labels"], arrays["test_features"], arrays["test_labels"],
                         seed=name.seed, num_labels=name.labels, valid=name.valid or 0, class_names=names,
                         name=name.dataset, feature_views=config.data.feature_views)


def from_features(features: np.ndarray, labels: np.ndarray, test_features: np.ndarray, test_labels: np.ndarray, *,
                  feature_views: str = "", name: str = "", **settings) -> SSLData:
    """Builds a dataset of embeddings from elsewhere, [N, D], or [N, views, D] where the first view is the plain one;
    [M, D] of test images. Labels and settings are as `from_arrays` takes them.

    `feature_views` says how many of the others are weak and strong ones, such as "2,4". Without any, views are the
    embeddings with noise: `libml.augment.copies` says how strong.
    """
    check_unmasked(features, labels, test_features, test_labels)
    vectors, test = _vectors(features, "features"), _vectors(test_features, "test_features")
    classes = np.asarray(labels)
    if classes.shape != vectors.shape[:1] or not np.issubdtype(classes.dtype, np.integer):
        raise UserError(f"labels are {classes.dtype} of shape {list(classes.shape)}; expected one whole number for "
                        f"each of the {len(vectors)} embeddings: 0, 1, ... (-1: none).")
    name = name or f"arrays:{hashlib.sha256(vectors.tobytes() + test.tobytes()).hexdigest()[:8]}"
    last = np.argsort(classes < 0, kind="stable")  # labelled ones first, as from_arrays wants them
    blanks = [np.broadcast_to(np.zeros((1, 1, 1, 3), np.uint8), (len(x), 1, 1, 3)) for x in (vectors, test)]
    data = from_arrays(blanks[0], classes[last], blanks[1], test_labels, name=name, **settings)
    data = replace(data, notes=[*data.notes, *twins(vectors[:, 0], test[:, 0])])
    data = with_twins_of_valid(data, vectors[last, 0])
    return _with_features(data, {"features": vectors[last, :, 0], "test_features": test[:, :, 0]}, feature_views)


def _by_file(arrays: dict[str, np.ndarray], data: SSLData) -> dict[str, np.ndarray]:
    """Puts the embeddings of named files in the order of the data, which know what each of their files holds."""
    if data.listing is None or data.contents is None:
        raise UserError(f"There are names of files beside the embeddings, but {data.name} has no files. Leave the "
                        "array out, and give embeddings in the order of the images.")
    vectors, names = _vectors(arrays["features"], "features")[:, :, 0], arrays["files"]
    if names.shape != vectors.shape[:1] or names.dtype.kind != "U":
        raise UserError(f"files are {names.dtype} of shape {list(names.shape)}; expected text, one name for each of "
                        f"the {len(vectors)} embeddings.")
    place = data.listing.path
    folder = place.parent if place.is_file() else place
    rows = {cache.content_hash(folder / name): row for row, name in enumerate(names.tolist())}
    found, test = ([rows.get(content, -1) for content in part.tolist()] for part in data.contents)
    if lost := found.count(-1) + test.count(-1):
        raise UserError(f"{lost} of the {len(found) + len(test)} images of {data.name} are none of the files named "
                        f"beside the embeddings, such as {names[0]}: name all of them, from {folder} on.")
    return {"features": vectors[found], "test_features": vectors[test, 0]}


def _with_features(data: SSLData, arrays: dict[str, np.ndarray], feature_views: str) -> SSLData:
    """Puts embeddings from elsewhere in the place of images."""
    features, test = (_vectors(arrays[name], name) for name in ("features", "test_features"))
    if (len(features), len(test)) != (len(data.images), len(data.test_images)):
        raise UserError(f"There are embeddings of {len(features)} training and {len(test)} test images, but "
                        f"{data.name} has {len(data.images)} and {len(data.test_images)}; expected one of each, in "
                        "that order.")
    if features.shape[-1] != test.shape[-1] or test.shape[1] != 1:
        raise UserError(f"Embeddings for training have the shape {list(features.shape[1::2])}, for the test "
                        f"{list(test.shape[1::2])}; expected [views, D] and [D] with one D.")
    are_pictures = data.image_shape[0] > 1  # else they hold the places of what is not known
    for name in ("labels", "test_labels"):
        if are_pictures and name in arrays and not np.array_equal(arrays[name], getattr(data, name)):
            raise UserError(f"The {name} beside the embeddings are others than those of {data.name}: they are of other "
                            "images, or in another order.")
    views = features.shape[1] - 1
    counts = parse_views(feature_views) if feature_views else (0, 0)
    counts = counts if views else (0, 0)
    if sum(counts) != views:
        raise UserError(f"There are {views} views of each embedding besides the plain one, but feature_views="
                        f"{feature_views} are {sum(counts)}: say how many are weak and strong ones, such as 2,4.")
    digest = hashlib.sha256(np.ascontiguousarray(features).data)
    digest.update(np.ascontiguousarray(test).data)
    return replace(data, images=features, test_images=test, copies=counts, mirror=False,
                   pictures=(data.images, data.test_images) if are_pictures else None,
                   fingerprint=f"{data.fingerprint} {digest.hexdigest()}")


def _vectors(given: np.ndarray, name: str) -> np.ndarray:
    """Returns embeddings as they are stored, [N, views, 1, D] in float16."""
    given = np.asarray(given)
    if given.ndim not in (2, 3) or not all(given.shape) or not np.issubdtype(given.dtype, np.floating):
        raise UserError(f"{name} are {given.dtype} of shape {list(given.shape)}; expected floats [N, D] or "
                        "[N, views, D].")
    with np.errstate(over="ignore"):
        stored = given.astype(np.float16)
    if not np.isfinite(stored).all():
        row = int(np.flatnonzero(~np.isfinite(stored).reshape(len(stored), -1).all(1))[0])
        raise UserError(f"{name} have NaN, or numbers that are too large for float16, in row {row}: leave it out, or "
                        "scale them.")
    if np.mean((abs(stored) < np.finfo(np.float16).tiny) & (given != 0)) > 0.1:
        raise UserError(f"{name} are too small for float16: their mean size is {abs(given).mean():.1g}; scale them.")
    some = given[:CHECKED].astype(np.float64)
    spread, lost = some.std(0).mean(), abs(stored[:CHECKED] - some).mean()
    if 0 < spread < 10 * lost:
        raise UserError(f"{name} differ from each other by {spread:.1g}, and float16 rounds {lost:.1g} of that away: "
                        "subtract their mean.")
    return stored.reshape(len(stored), -1, 1, stored.shape[-1])


def _hash(image: np.ndarray) -> int:
    return int.from_bytes(hashlib.blake2b(np.ascontiguousarray(image).data, digest_size=8).digest(), "little")


def _embed(writer: cache.Writer, data: SSLData, hashes: list[np.ndarray], embed_rows: Callable, counts: tuple[int, int],
           width: int, siblings: Iterable[Path], told: Told | None) -> None:
    """Fills the arrays of a cache, from where a killed process left them, with what `siblings` have first."""
    parts = [("", data.images, hashes[0], counts), ("test_", data.test_images, hashes[1], (0, 0))]
    known: list[tuple[str, np.ndarray, np.ndarray]] = []
    for folder in siblings:
        with suppress(*cache.DAMAGED):  # made again
            arrays, _ = cache.read(folder)
            known += [(prefix, arrays[f"{prefix}hashes"], arrays[f"{prefix}images"]) for prefix, *_ in parts]
    size = 2 * width * sum(len(images) * (1 + sum(kinds)) for _, images, _, kinds in parts)
    print(f"Embedding {len(data.images)} training and {len(data.test_images)} test images: {width} numbers of each "
          f"view, {size / 1e6:,.0f} MB", flush=True)
    for prefix, images, keys, kinds in parts:
        stored = writer.create(f"{prefix}images", (len(images), 1 + sum(kinds), 1, width), np.float16)
        writer.add(f"{prefix}hashes", keys)
        done = writer.create(f"{prefix}done", (len(images),), np.bool_)
        if f"{prefix}images" not in writer.found:
            done[:] = False
        for other, there, vectors in known:
            if other == prefix and vectors.shape[1:] == stored.shape[1:] and len(vectors) == len(there):
                _, here, found = np.intersect1d(keys, there, return_indices=True)
                new = ~done[here]
                stored[here[new]], done[here[new]] = vectors[found[new]], True
        for start in range(0, len(done), CHECKED):  # of what was there
            part = slice(start, start + CHECKED)
            done[part] &= np.isfinite(stored[part]).all((1, 2, 3))
        todo, title = np.flatnonzero(~done), f"embedding {'test' if prefix else 'training'} images"
        fresh: list[np.ndarray] = []
        with _progress(title, len(images), len(todo), told) as advance:
            for rows, vectors in embed_rows(images, keys, todo, kinds):
                if not np.isfinite(vectors).all():
                    raise UserError(f"The features of image {rows[0]} or one near it are NaN, or too large for "
                                    "float16: the network or its weights do not suit these images.")
                stored[rows], fresh = vectors, [*fresh, rows]
                if advance(len(rows)):
                    writer.flush()  # what is done is on the disk before that is
                    done[np.concatenate(fresh)], fresh = True, []


def passes(embedder: Embedder, augmenter: Augmenter, strategy: tf.distribute.Strategy | None, images: np.ndarray,
            keys: np.ndarray, todo: np.ndarray, counts: tuple[int, int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields rows and their features [n, views, 1, D]. What is random in a view follows from the image alone."""
    strategy = strategy or tf.distribute.get_strategy()
    replicas, (weak, strong) = strategy.num_replicas_in_sync, counts
    taken: list[int] = []  # random numbers of each image, call by call

    def choices(uniform: tf.Tensor) -> tuple[list, list]:
        """What weak and strong views are made with."""
        def take(count: int) -> tf.Tensor:
            taken.append(count)
            return uniform[:, sum(taken[:-1]):][:, :count]

        taken.clear()
        return ([augmenter.weak_samples(take(3)) for _ in range(weak)],
                [augmenter.strong_samples(take) for _ in range(strong)])

    choices(tf.zeros([1, 1 << 12]))
    numbers, size = sum(taken), max(1, PASSES // (1 + weak + strong))

    def views(x: tf.Tensor, uniform: tf.Tensor) -> tf.Tensor:
        kept, (of_weak, of_strong) = augmenter.spec.weak == "x", choices(uniform)
        made = [to_float(x), *(to_float(x if kept else augmenter.weak_view(x, samples)) for samples in of_weak),
                *(augmenter.strong_view(x, samples) for samples in of_strong)]
        flat = tf.reshape(tf.stack(made, 1), [-1, *x.shape[1:]])
        return tf.reshape(tf.cast(embedder(flat), tf.float16), [x.shape[0], len(made), 1, embedder.width])

    @tf.function(autograph=False)
    def run(x, uniform):
        return strategy.run(views, args=(x, uniform))

    def spread(array: np.ndarray) -> tf.Tensor:
        """Gives each replica its part."""
        return strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(np.split(array, replicas)[context.replica_id_in_sync_group]))

    for start in range(0, len(todo), size * replicas):
        rows = todo[start:start + size * replicas]
        padded = np.resize(rows, size * replicas)  # batches of one shape: the network is traced once
        uniform = np.stack([np.random.Generator(np.random.Philox(key=int(key))).random(numbers, np.float32)
                            for key in keys[padded]])
        found = strategy.experimental_local_results(run(spread(np.asarray(images[padded])), spread(uniform)))
        yield rows, np.concatenate([part.numpy() for part in found])[:len(rows)]


@contextmanager
def _progress(title: str, total: int, todo: int, told_to: Told | None) -> Iterator:
    """Gives a function that counts images and says when to flush: a bar on a terminal, else a line now and then."""
    started = told = flushed = time.monotonic()
    count = 0

    def advance(images: int) -> bool:
        nonlocal count, told, flushed
        count, now = count + images, time.monotonic()
        bar.update(images)
        if told_to:
            told_to(title, total - todo + count, total)
        if bar.disable and (now - told > TOLD_SECONDS or count == todo):
            told, rate = now, count / max(now - started, 1e-9)
            print(f"{title}: {total - todo + count} of {total}, {rate:.0f} images/s, "
                  f"{max(0, todo - count) / rate:.0f} s left", flush=True)
        if now - flushed > FLUSH_SECONDS:
            flushed = now
            return True
        return False

    with tqdm(total=total, initial=total - todo, desc=title, unit="img", disable=None, file=sys.stderr) as bar:
        yield advance
