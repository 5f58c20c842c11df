"""Evaluation: class probabilities of the averaged and the raw model, and their scores on all sets of a dataset."""
import numpy as np
import tensorflow as tf

from libml import metrics
from libml.augment.augmenter import to_float
from libml.data import SSLData
from libml.model import SSLModel


class Evaluator:
    """Class probabilities of the averaged and the raw model for arrays of images, spread over all replicas."""

    def __init__(self, model: SSLModel, strategy: tf.distribute.Strategy, batch: int = 256):
        self.strategy, self.batch = strategy, batch
        replicas = strategy.num_replicas_in_sync

        def predict(chunk: tf.Tensor) -> tf.Tensor:
            # Every replica gets the whole chunk and takes its rows: no input pipeline to set up for a few batches.
            context = tf.distribute.get_replica_context()
            mine = to_float(chunk[context.replica_id_in_sync_group * batch:][:batch])
            both = tf.stack([tf.nn.softmax(model.infer(mine, ema=ema)) for ema in (True, False)], 1)
            return context.all_gather(both, 0) if replicas > 1 else both

        @tf.function(autograph=False)
        def run(chunk):
            return strategy.experimental_local_results(strategy.run(predict, args=(chunk,)))[0]

        self._run = run

    def __call__(self, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the probabilities [N, classes] of the averaged and of the raw model."""
        size = self.batch * self.strategy.num_replicas_in_sync
        chunks = []
        for start in range(0, len(images), size):
            chunk = np.asarray(images[start:start + size])
            padded = np.concatenate([chunk, np.zeros((size - len(chunk), *chunk.shape[1:]), np.uint8)])
            chunks.append(self._run(tf.constant(padded)).numpy()[:len(chunk)])
        both = np.concatenate(chunks)
        return both[:, 0], both[:, 1]


def evaluate_all(evaluator: Evaluator, data: SSLData, extra: np.ndarray | None = None,
                 ) -> tuple[dict[str, float], np.ndarray, np.ndarray]:
    """Evaluates both models on labelled, validation and test images, in one pass.

    Returns:
        All metrics by tag; the averaged model's probabilities on the test set and on `extra` images.
    """
    sets = data.evaluated()
    arrays = [images for images, _ in sets.values()]
    arrays.append(data.test_images[:0] if extra is None else extra)
    ends = np.cumsum([len(array) for array in arrays])[:-1]
    both = [np.split(p, ends) for p in evaluator(np.concatenate(arrays))]
    scores: dict[str, float] = {}
    for i, (name, (_, labels)) in enumerate(sets.items()):
        for prefix, probabilities in zip(("", "/raw"), both, strict=True):
            scores |= metrics.scores(probabilities[i], labels, prefix + ("" if name == "test" else f"/{name}"))
    return scores, both[0][list(sets).index("test")], both[0][-1]
