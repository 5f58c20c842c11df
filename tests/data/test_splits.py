"""Splits on hand-made labels, against an independent retelling of the rule."""
import numpy as np
import pytest
from helpers import plain_held_out, plain_labeled

from libml.data import splits


def plain_order(labels, frequencies):
    waiting, taken, out = [[] for _ in frequencies], [0] * len(frequencies), []

    def wanted():
        lack = [f - t / max(max(taken), 1) for f, t in zip(frequencies, taken, strict=True)]
        return lack.index(max(lack))

    for i, label in enumerate(labels):
        waiting[label].append(i)
        while waiting[wanted()]:
            c = wanted()
            out.append(waiting[c].pop(0))
            taken[c] += 1
    return out + sum(waiting, [])


@pytest.mark.parametrize("seed", [0, 1, 5, 2 ** 31])
@pytest.mark.parametrize("counts", [(20, 20, 20), (40, 10, 25, 5), (3, 1), (1, 1, 1, 60)])
def test_labeled_indices_follow_the_rule(seed, counts):
    labels = np.random.RandomState(7).permutation(np.repeat(np.arange(len(counts)), counts))
    frequencies = splits.class_frequencies(labels, len(counts))
    for size in (1, 2, len(labels) // 2, len(labels) - 1):
        got = splits.labeled_indices(labels, size, seed, frequencies)
        assert got.tolist() == plain_labeled(labels.tolist(), size, seed, frequencies.tolist())


def test_labeled_indices_can_take_everything_exactly_once():
    labels = np.random.RandomState(0).randint(0, 7, 200)
    got = splits.labeled_indices(labels, 200, 3, splits.class_frequencies(labels, 7))
    assert sorted(got.tolist()) == list(range(200))


def test_labeled_indices_leave_the_global_generator_alone():
    np.random.seed(11)
    expected = np.random.rand()
    np.random.seed(11)
    splits.labeled_indices(np.arange(10) % 2, 4, 5, np.ones(2))
    assert np.random.rand() == expected


@pytest.mark.parametrize("equal", [False, True])
def test_unlabeled_order_follows_the_rule(equal):
    labels = np.random.RandomState(1).choice(5, 300, p=[0.4, 0.3, 0.1, 0.1, 0.1])
    frequencies = np.ones(5) if equal else splits.class_frequencies(labels, 5)
    order = splits.unlabeled_order(labels, frequencies)
    assert order.tolist() == plain_order(labels.tolist(), frequencies.tolist())
    assert sorted(order.tolist()) == list(range(300))


def test_unlabeled_order_is_balanced_from_the_start():
    labels = np.repeat(np.arange(10), 50)  # sorted by class: nothing can be balanced before the last class is read
    order = splits.unlabeled_order(np.random.RandomState(0).permutation(labels), np.ones(10))
    first = np.bincount(np.random.RandomState(0).permutation(labels)[order[:100]], minlength=10)
    assert first.max() - first.min() <= 1


def random_hashes(count, seed=0):
    return np.random.RandomState(seed).randint(2 ** 63, size=count, dtype=np.uint64) * 2 + 1


@pytest.mark.parametrize("share", [0.1, 0.2, 0.9])
def test_held_out_images_follow_the_rule(share):
    labels = np.random.RandomState(2).permutation(np.repeat([0, 1, 2, 3, 7], [1000, 10, 2, 1, 3]))
    hashes = random_hashes(len(labels))
    for seed in ([0, 0], [1, 0], [1, 1]):
        held = splits.held_out(labels, hashes, share, seed)
        assert held.tolist() == plain_held_out(labels.tolist(), hashes, share, seed)
        # Of 1000 draws within 5 standard deviations; of small classes at least one on either side.
        counts = np.bincount(labels[held], minlength=8)
        assert abs(counts[0] - 1000 * share) < 5 * np.sqrt(1000 * share * (1 - share))
        assert 1 <= counts[1] <= 9 and counts[2] == 1 and counts[3] == 0 and 1 <= counts[7] <= 2
    assert splits.held_out(labels[:0], hashes[:0], share, [1, 0]).tolist() == []


def test_who_is_held_out_depends_on_the_seed_and_on_nobody_else():
    labels, hashes = np.arange(2000) % 4, random_hashes(2000)
    whole = set(splits.held_out(labels, hashes, 0.2, [1, 0]))
    part = np.flatnonzero(np.random.RandomState(3).rand(2000) < 0.7)
    assert set(part[splits.held_out(labels[part], hashes[part], 0.2, [1, 0])]) == whole & set(part)
    for other in ([2, 0], [1, 1]):  # another seed: 4 % in common, as chance has it
        assert len(whole & set(splits.held_out(labels, hashes, 0.2, other))) < 0.1 * 2000
