"""Batches: a pure function of (seed, step), exact epochs, disjoint shards; datasets from arrays."""
import pickle
import tracemalloc
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import cssl
from libml import data
from libml.data import sets
from libml.errors import UserError


@pytest.fixture(scope="module")
def tiny():
    """Images whose first pixel names them."""
    images = np.zeros((50, 8, 8, 3), np.uint8)
    images[:, 0, 0, 0] = np.arange(50)
    labels = np.arange(50) % 5
    return data.from_arrays(images, labels, images[:5], labels[:5], seed=1, num_labels=10, valid=2)


def take(dataset, count, **options):
    stream = data.batches(dataset, batch=8, uratio=3, seed=5, **options).take(count)
    return [{key: value.numpy() for key, value in batch.items()} for batch in stream]


def same(a, b):
    return all(np.array_equal(a[key], b[key]) for key in a) and a.keys() == b.keys()


def test_batches_are_flat_dicts_of_static_shape(tiny):
    spec = data.batches(tiny, batch=8, uratio=3).element_spec
    assert {key: (tuple(value.shape), value.dtype.name) for key, value in spec.items()} == {
        "labeled": ((8, 8, 8, 3), "uint8"), "label": ((8,), "int32"),
        "unlabeled": ((24, 8, 8, 3), "uint8"), "unlabeled_label": ((24,), "int32"),
        "labeled_index": ((8,), "int32"), "unlabeled_index": ((24,), "int32")}


def test_the_batch_of_a_step_does_not_depend_on_where_the_run_started(tiny):
    run = take(tiny, 30)
    for step in (0, 1, 7, 29):
        assert same(take(tiny, 1, start_step=step)[0], run[step])


def test_labels_belong_to_their_images(tiny):
    for batch in take(tiny, 5):
        np.testing.assert_array_equal(batch["labeled"][:, 0, 0, 0] % 5, batch["label"])
        np.testing.assert_array_equal(batch["unlabeled"][:, 0, 0, 0] % 5, batch["unlabeled_label"])


@pytest.mark.parametrize("shards", [1, 2])
def test_positions_name_their_images(tiny, shards):
    for batch in take(tiny, 6, num_shards=shards, local_shards=shards):
        np.testing.assert_array_equal(batch["labeled"], tiny.images[tiny.labeled[batch["labeled_index"]]])
        np.testing.assert_array_equal(batch["label"], tiny.labeled_classes[batch["labeled_index"]])
        np.testing.assert_array_equal(batch["unlabeled"], tiny.images[tiny.unlabeled[batch["unlabeled_index"]]])


def test_every_epoch_is_another_exact_permutation(tiny):
    stream = np.concatenate([batch["unlabeled"][:, 0, 0, 0] for batch in take(tiny, 20)])[:480]
    epochs = stream.reshape(10, 48)
    expected = sorted(tiny.unlabeled.tolist())
    assert all(sorted(epoch) == expected for epoch in epochs.tolist())
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 10
    labeled = np.concatenate([batch["labeled"][:, 0, 0, 0] for batch in take(tiny, 20)]).reshape(16, 10)
    assert all(sorted(epoch) == sorted(tiny.labeled.tolist()) for epoch in labeled.tolist())
    assert len({tuple(epoch) for epoch in labeled.tolist()}) == 16


def test_seeds_give_different_streams(tiny):
    first = next(iter(data.batches(tiny, batch=8, uratio=3, seed=6)))
    assert not np.array_equal(first["unlabeled"], take(tiny, 1)[0]["unlabeled"])


def test_permutations_are_spread_evenly():
    """1200 epochs of 3 images: each of the 6 orders about 200 times; 60 is more than four standard deviations (13)."""
    orders = data.stream_indices(tf.constant(0), seed=3, stream=1, total=3, batch=3600, first=0, count=3600)
    _, counts = np.unique(orders.numpy().reshape(-1, 3), axis=0, return_counts=True)
    assert len(counts) == 6 and counts.min() > 140 and counts.max() < 260


@pytest.mark.parametrize("workers, local", [(2, 1), (2, 2), (1, 4), (4, 2)])
def test_shards_of_a_step_are_the_global_batch(tiny, workers, local):
    whole = take(tiny, 3, start_step=11)
    parts = [take(tiny, 3 * local, start_step=11, num_shards=workers * local, first_shard=worker * local,
                  local_shards=local) for worker in range(workers)]
    for step in range(3):
        pieces = [parts[worker][step * local + i] for worker in range(workers) for i in range(local)]
        assert same({key: np.concatenate([piece[key] for piece in pieces]) for key in whole[0]}, whole[step])


def test_a_batch_that_does_not_divide_names_the_nearest(tiny):
    with pytest.raises(UserError, match="A batch of 8 does not divide over 3 replicas; the nearest that does is 9"):
        data.batches(tiny, batch=8, uratio=3, num_shards=3)


def test_parts_limit_the_labelled_images(tiny):
    for limit, labeled in ((4, 4), (sets.EVALUATED, 10)):
        with mock.patch.object(sets, "EVALUATED", limit):
            sizes = {name: (len(images), len(labels)) for name, (images, labels) in tiny.evaluated().items()}
        assert sizes == {"train_labeled": (labeled, labeled), "valid": (2, 2), "test": (5, 5)}


def test_statistics_for_whitening_are_exact_and_need_little_memory():
    """Of 3 million pixels: in floats they would be 37 MB, and NumPy's float32 sums off by a thousandth."""
    rng = np.random.RandomState(0)
    images = rng.randint(0, 256, (3000, 32, 32, 3), np.uint8) // np.array([1, 2, 4], np.uint8)
    labels = np.arange(3000) % 2
    dataset = data.from_arrays(images, labels, images[:2], labels[:2], valid=0, name="arrays:x")
    tracemalloc.start()
    mean, deviation = dataset.image_statistics()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    pixels = images.astype(np.float64) / 127.5 - 1
    for found, exact in ((mean, pixels.mean((0, 1, 2))), (deviation, pixels.std((0, 1, 2)))):
        np.testing.assert_array_equal(found, exact.astype(np.float32))
    assert peak < images.nbytes


def test_arrays_without_labels_stay_in_the_unlabelled_stream_only():
    images = np.random.RandomState(0).randint(0, 256, (30, 8, 8)).astype(np.uint8)
    labels = np.where(np.arange(30) % 3 == 0, np.arange(30) % 2, -1)
    dataset = data.from_arrays(images, labels, images[:4], labels[:4] % 2, valid=3)
    assert len(dataset.labeled) == 7 and (dataset.labels[dataset.labeled] >= 0).all()  # 3 are for validation
    assert (dataset.labels[dataset.valid] >= 0).all()
    assert len(dataset.unlabeled) == 27 and dataset.image_shape == (8, 8, 3)


@pytest.mark.parametrize("channels", [[], [1], [3], [4]])
def test_what_is_written_into_arrays_later_changes_no_data(channels):
    images = np.random.RandomState(0).randint(0, 256, (12, 8, 8, *channels)).astype(np.uint8)
    labels, test_images, test_labels, class_names = np.arange(12) % 2, images[:4].copy(), np.arange(4) % 2, ["a", "b"]
    dataset = data.from_arrays(images, labels, test_images, test_labels, class_names=class_names)
    kept = pickle.dumps(dataset)
    for array in (images, labels, test_images, test_labels):
        array[:] = 1 - array
    class_names[0] = "c"
    assert pickle.dumps(dataset) == kept


def test_memory_maps_are_copied_only_where_their_order_changes(tmp_path):
    np.save(tmp_path / "images.npy", np.random.RandomState(0).randint(0, 256, (12, 8, 8, 3)).astype(np.uint8))
    images = np.load(tmp_path / "images.npy", mmap_mode="r")
    labels = np.array([0, 1, 0, 1, -1, -1, -1, -1, -1, -1, -1, -1])
    for given, shared in ((labels, True), (labels[::-1], False)):
        dataset = data.from_arrays(images, given, images[:4], labels[:4])
        assert np.shares_memory(dataset.images, images) == shared
        assert (dataset.labels[:4] >= 0).all() and (dataset.labels[4:] < 0).all()
        np.testing.assert_array_equal(dataset.images, images[np.argsort(given < 0, kind="stable")])


@pytest.mark.parametrize("change, message", [
    ({"images": np.zeros((4, 8, 8, 3))}, "float64"),
    ({"images": np.zeros((4, 8, 8, 5), np.uint8)}, "1 to 4 channels"),
    ({"labels": [0, 1, 0]}, "4 images with 3 labels"),
    ({"labels": [0, 2, 0, 2]}, "without \\[1\\]"),
    ({"labels": [0, 0, 0, 0]}, "expected classes"), ({"labels": [0, 1, -2, 1]}, "from -2 to 1"),
    ({"labels": [0, 1, 10 ** 12, 1]}, "to 1000000000000, without \\[2, 3\\]"),
    ({"labels": np.array([0, 1, 2 ** 63, 1], np.uint64)}, "from -9223372036854775808 to 1"),
    ({"name": "arrays:../x"}, "has no slash"), ({"images": np.zeros((4, 0, 8), np.uint8)}, "of shape .4, 0, 8, 1"),
    ({"labels": np.ma.array([0, 1, 0, 1], mask=[0, 0, 0, 1])}, "a masked array, whose mask would be lost"),
    ({"mirror": "no"}, "mirror='no': expected True or False"), ({"mirror": 0}, "mirror=0"),
    ({"class_names": ["a", "a"]}, "Got 1 class names for 2 classes"),
    ({"images": np.zeros((0, 8, 8), np.uint8), "labels": np.zeros(0, int)}, "0 images with 0 labels"),
    ({"test_labels": [0, 5]}, "0 to 5"),
    ({"test_images": np.zeros((2, 9, 9), np.uint8)}, "resize them alike"),
])
def test_bad_arrays_are_refused(change, message):
    arguments = {"images": np.zeros((4, 8, 8), np.uint8), "labels": [0, 1, 0, 1],
                 "test_images": np.zeros((2, 8, 8), np.uint8), "test_labels": [0, 1]}
    with pytest.raises(UserError, match=message):
        data.from_arrays(**{**arguments, **change})


def test_equal_bytes_in_training_and_test_arrays_are_counted():
    images = np.random.RandomState(0).randint(0, 256, (12, 8, 8), np.uint8)
    vectors, labels = np.random.RandomState(0).normal(size=(12, 5)), np.arange(12) % 2
    for make, arrays in ((data.from_arrays, images), (cssl.from_features, vectors)):
        found = make(arrays[:9], labels[:9], arrays[6:], labels[6:])
        assert found.notes == ["3 of the 6 test images have the same bytes as training images: the result will be too "
                               "good."]
        assert not make(arrays[:6], labels[:6], arrays[6:], labels[6:], valid=2).notes
        found = make(np.concatenate([arrays[:6]] * 2), np.tile(labels[:6], 2), arrays[6:], labels[6:], valid=2)
        assert found.notes == ["2 of the 2 validation images have the same bytes as training images: validation scores,"
                               " and sets calibrated with them, will be too good."]
