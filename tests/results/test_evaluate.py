"""Evaluation of all sets of a dataset, a chunk of images at a time."""
import tracemalloc

import numpy as np
import pytest
import tensorflow as tf

from cssl import CSSL, from_arrays
from libml import networks
from libml.results import metrics
from libml.results.evaluate import Evaluator, evaluate_all

SHAPE = (16, 16, 3)


@pytest.fixture(scope="module")
def data():
    """Images of 2 MB, the sets of which end in the middle of chunks."""
    rng = np.random.RandomState(0)
    images, labels = rng.randint(0, 256, (2700, *SHAPE), np.uint8), np.arange(2700) % 4
    return from_arrays(images[:2000], labels[:2000], images[2000:], labels[2000:], valid=130, name="arrays:x")


@pytest.fixture(scope="module")
def evaluator():
    network = networks.build("resnet", num_classes=4, image_shape=SHAPE, filters=4, repeat=1, scales=1, seed=1)
    return Evaluator(CSSL(network, 4), tf.distribute.get_strategy(), batch=100)


def test_scores_are_those_of_all_images_in_one_array(data, evaluator):
    """To the bit: the chunks hold the same images."""
    sets = {"train_labeled": (data.images[data.labeled], data.labeled_classes),
            "valid": (data.images[data.valid], data.labels[data.valid]), "test": (data.test_images, data.test_labels)}
    together = evaluator(np.concatenate([images for images, _ in sets.values()]))
    found, test = evaluate_all(evaluator, data)
    start = 0
    for name, (_, labels) in sets.items():
        for prefix, probabilities in zip(("", "/raw"), together, strict=True):
            suffix = prefix + ("" if name == "test" else f"/{name}")
            part = probabilities[start:start + len(labels)]
            for tag, value in metrics.scores(part, labels, suffix).items():
                assert found.pop(tag) == value, tag
        start += len(labels)
    assert found == {}
    np.testing.assert_array_equal(test, together[0][-len(data.test_labels):])


def test_no_copy_of_all_images_is_made(data, evaluator):
    evaluate_all(evaluator, data)  # traced
    tracemalloc.start()
    evaluate_all(evaluator, data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < data.images.nbytes / 2
