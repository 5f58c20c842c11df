"""Splits on hand-made labels, against an independent retelling of the rule."""
import numpy as np
import pytest

from libml.data import splits


def plain_labeled(labels, size, seed, frequencies):
    """The rule as a list program, with the global legacy generator."""
    by_class = [[i for i, label in enumerate(labels) if label == c] for c in range(len(frequencies))]
    if seed != 0:
        np.random.seed(seed)
        for members in by_class:
            np.random.shuffle(members)
    taken, chosen = [0] * len(frequencies), []
    for _ in range(size):
        lack = [f - t / max(max(taken), 1) for f, t in zip(frequencies, taken, strict=True)]
        c = lack.index(max(lack))
        chosen.append(by_class[c][taken[c]])
        taken[c] += 1
    return chosen


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


def test_stratified_holdout_takes_a_fifth_of_every_class():
    labels = np.repeat([0, 1, 2, 3], [100, 10, 2, 1])
    held = splits.stratified_holdout(labels, 0.2, seed=4)
    assert np.bincount(labels[held], minlength=4).tolist() == [20, 2, 1, 0]
    assert held.tolist() == splits.stratified_holdout(labels, 0.2, seed=4).tolist()
    assert held.tolist() != splits.stratified_holdout(labels, 0.2, seed=5).tolist()
