"""The CIFAR-10 splits of the original program, on the real labels."""
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from helpers import Program, plain_labeled

from libml import data

# Recorded from the original program: sorted indices of cifar10.3@N (long lists: length, head, sha256 of the list joined
# by commas), and the unlabelled order.
GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "cifar10_splits_seed3.json").read_text())
SIZES = (10, 20, 30, 40, 100, 250, 1000, 4000)


def digest(indices) -> str:
    return hashlib.sha256(",".join(map(str, indices)).encode()).hexdigest()


@pytest.mark.parametrize("size", SIZES)
def test_labeled_images_of_seed_3(real_data_dir, size):
    labeled = sorted(data.load(f"cifar10.3@{size}-1", real_data_dir).labeled.tolist())
    expected = GOLDEN["splits"][f"cifar10.3@{size}"]
    if isinstance(expected, list):
        assert labeled == expected
    else:
        assert {"n": len(labeled), "head": labeled[:8], "sha256": digest(labeled)} == expected


@pytest.mark.parametrize("seed", [0, 1, 2, 4, 5])
def test_labeled_images_of_other_seeds(real_data_dir, seed):
    for size in SIZES:
        dataset = data.load(f"cifar10.{seed}@{size}-1", real_data_dir)
        assert dataset.labeled.tolist() == plain_labeled(dataset.labels.tolist(), size, seed, [1.0] * 10)


def test_unlabeled_order(real_data_dir):
    order = data.load("cifar10.3@40-1", real_data_dir).order.tolist()
    assert order[:50] == GOLDEN["unlabeled_head"]
    assert digest(order) == GOLDEN["unlabeled_sha256"]


def test_images_are_in_the_order_of_the_original_files(real_data_dir):
    dataset = data.load("cifar10.3@40-1", real_data_dir)
    # The first images of data_batch_1 (frog truck truck deer car) and of test_batch (cat ship ship plane frog).
    assert dataset.labels[:5].tolist() == [6, 9, 9, 4, 1]
    assert dataset.test_labels[:5].tolist() == [3, 8, 8, 0, 6]
    assert dataset.images[0, 0, 0].tolist() == [59, 62, 63]  # the first pixel of the first file


def test_validation_comes_first_and_training_is_the_rest(real_data_dir):
    dataset = data.load("cifar10.3@40-5000", real_data_dir)
    assert dataset.valid.tolist() == dataset.order[:5000].tolist()
    assert dataset.unlabeled.tolist() == dataset.order[5000:].tolist()
    assert np.bincount(dataset.labels[dataset.valid]).tolist() == [500] * 10


@pytest.mark.slow
def test_inspect_dataset_prints_the_split(real_data_dir, tmp_path):
    sheet = tmp_path / "sheet.png"
    done = Program(["scripts/inspect_dataset.py", "--dataset=cifar10.3@40-1", "--json", f"--png={sheet}"], tmp_path,
                   ML_DATA=str(real_data_dir))
    assert done.wait() == 0, done.error
    facts = json.loads(done.output)
    assert facts["labeled_indices"] == GOLDEN["splits"]["cifar10.3@40"]
    assert digest(facts["unlabeled_indices"]) == GOLDEN["unlabeled_sha256"]
    assert (facts["num_valid"], facts["num_test"], facts["num_classes"]) == (1, 10000, 10)
    assert facts["class_counts"] == [5000] * 10
    assert sheet.read_bytes().startswith(b"\x89PNG")
