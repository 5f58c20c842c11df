"""Evaluation: class probabilities of the averaged and the raw model, and their scores on all sets of a dataset."""
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from libml.augment.augmenter import to_float
from libml.data.sets import SSLData, Subset
from libml.errors import printable
from libml.learn.model import SSLModel
from libml.learn.packing import exchange
from libml.results import metrics

MAX_CLASSES = 20  # that a table of scores lists
SMALL = 3 * 2 ** 17  # numbers in a batch: 512 images of 16x16


def _chunks(parts: Sequence[np.ndarray | Subset], size: int) -> Iterator[np.ndarray]:
    """Yields the images of all parts in their order, `size` at a time: of two parts, where one ends between."""
    ends = np.cumsum([len(part) for part in parts])
    for start in range(0, ends[-1], size):
        yield np.concatenate([part[max(0, start - first):max(0, start - first + size)]
                              for part, first in zip(parts, [0, *ends], strict=False)])


class Evaluator:
    """Class probabilities of the averaged and the raw model for images, spread over all replicas of a strategy.

    `batch` images of a replica are computed at a time; 0 for 256, and for more where they are small.
    """

    def __init__(self, model: SSLModel, strategy: tf.distribute.Strategy, batch: int = 0):
        self.strategy, self.batch = strategy, batch
        replicas = strategy.num_replicas_in_sync

        def predict(chunk: tf.Tensor) -> tf.Tensor:
            # Every replica gets the whole chunk and takes its rows: no input pipeline to set up for a few batches.
            context = tf.distribute.get_replica_context()
            if replicas > 1:
                rows = chunk.shape[0] // replicas
                chunk = chunk[context.replica_id_in_sync_group * rows:][:rows]
            mine = to_float(chunk)
            found = tf.stack([tf.nn.softmax(model.infer(mine, ema=ema)) for ema in (True, False)], 1)
            return exchange([], [found])[1][0]

        self._run = lambda chunk: strategy.experimental_local_results(strategy.run(predict, args=(chunk,)))[0]
        self._traced: dict[tuple, Callable] = {}  # by image shape

    def __call__(self, *parts: np.ndarray | Subset) -> np.ndarray:
        """Returns the probabilities [2, N, classes] of the averaged and the raw model for the images of all parts."""
        replicas, shape = self.strategy.num_replicas_in_sync, parts[0][:1].shape[1:]
        size, dtype = (self.batch or max(256, SMALL // np.prod(shape, dtype=int))) * replicas, parts[0][:1].dtype
        if shape not in self._traced:  # once, for any number of images
            spec = tf.TensorSpec([size if replicas > 1 else None, *shape], dtype)
            self._traced[shape] = tf.function(self._run, [spec], autograph=False)
        predictions = []
        for chunk in _chunks(parts, size):
            if replicas > 1:  # all get as many
                chunk = np.concatenate([chunk, np.zeros((size - len(chunk), *shape), dtype)])
            predictions.append(self._traced[shape](tf.constant(chunk)).numpy())
        return np.concatenate(predictions)[:sum(map(len, parts))].swapaxes(0, 1)


def evaluate_all(evaluator: Evaluator, data: SSLData) -> tuple[dict[str, float], np.ndarray]:
    """Returns all metrics of both models on labelled, validation and test images by tag, from one pass, and the
    averaged model's probabilities on the test set."""
    sets = data.evaluated()
    ends = np.cumsum([len(labels) for _, labels in sets.values()])[:-1]
    both = [np.split(p, ends) for p in evaluator(*(images for images, _ in sets.values()))]
    scores: dict[str, float] = {}
    for i, (name, (_, labels)) in enumerate(sets.items()):
        for prefix, probabilities in zip(("", "/raw"), both, strict=True):
            scores |= metrics.scores(probabilities[i], labels, prefix + ("" if name == "test" else f"/{name}"))
    return scores, both[0][list(sets).index("test")]


def table_of_scores(title: str, scores: dict[str, float], data: SSLData) -> str:
    """Formats the scores of both models on the sets of a dataset, and the test accuracy of its classes."""
    columns = {f"{prefix.strip('/')} {metric.title}".strip(): (metric.name + prefix, metric.digits)
               for prefix in ("", "/raw") for metric in metrics.METRICS.values()}
    lines = [title, f"{'':<16}" + "".join(f"{name:>{max(10, len(name) + 2)}}" for name in columns)]
    for part in ("train_labeled", "valid", "test"):
        suffix = "" if part == "test" else f"/{part}"
        if f"accuracy{suffix}" in scores:
            lines.append(f"{part:<16}" + "".join(f"{scores[tag + suffix]:>{max(10, len(name) + 2)}.{digits}f}"
                                                 for name, (tag, digits) in columns.items()))
    counts = np.bincount(data.test_labels, minlength=data.num_classes)
    classes = {name: count for name, count in zip(data.class_names, counts, strict=True) if count}
    worst = sorted(classes, key=lambda name: scores[f"accuracy/class/{name}"])
    lines.append(f"test accuracy by class, {'worst first' if len(worst) <= MAX_CLASSES else 'the worst'}:")
    for name in worst[:MAX_CLASSES]:
        lines.append(f"  {printable(name):<30} {scores[f'accuracy/class/{name}']:>6.2f} % of {classes[name]}")
    return "\n".join(lines)


def credal_coverage(y: np.ndarray, alpha: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Compares sets {p : p(y) >= 1 - alpha} [N] with held-back labels (-1: unknown); {} where none is known.

    `truth` is the share of sets that hold the true class, as the distribution that gives it all; `upper` the mean of
    the largest probability that a set's members give the true class: 1 if that is y, else alpha.
    """
    known = labels >= 0
    if not known.any():
        return {}
    right, alpha = (y == labels)[known], np.asarray(alpha, np.float64)[known]
    return {"truth": float(np.mean(right | (alpha >= 1))), "upper": float(np.mean(np.where(right, 1.0, alpha)))}
