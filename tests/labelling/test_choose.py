"""Which images come next: by what each order promises."""
import numpy as np

from libml.labelling.choose import ORDERS, ranking, unit


def test_unsure_takes_the_largest_sets_first():
    size = np.array([0.1, 0.9, 0.5, 0.9])
    found = ranking("unsure", size, np.eye(4), np.zeros((0, 4)), 3, np.random.default_rng(0))
    assert found.tolist() == [1, 3, 2]


def test_spread_leaves_out_what_looks_like_labelled_or_chosen_ones():
    """Two tight clusters and a labelled image in one: the first choice is of the other, the next is not a twin."""
    rng = np.random.default_rng(0)
    centres = np.eye(3)
    vectors = unit(np.repeat(centres, 50, axis=0) + 0.01 * rng.normal(size=(150, 3)))
    for seed in range(5):
        found = ranking("spread", np.full(150, 0.5), vectors, unit(centres[:1]), 2, np.random.default_rng(seed))
        assert sorted(found // 50) == [1, 2]


def test_spread_prefers_unsure_images():
    rng = np.random.default_rng(0)
    vectors, size = unit(rng.normal(size=(1000, 20))), np.repeat([0.0, 1.0], 500)
    found = ranking("spread", size, vectors, vectors[:1], 50, np.random.default_rng(1))
    assert (found >= 500).mean() > 0.9


def test_every_order_gives_each_image_once():
    rng = np.random.default_rng(0)
    vectors = unit(np.repeat(rng.normal(size=(3, 4)), 4, axis=0))  # with equal ones
    for order in ORDERS:
        found = ranking(order, rng.random(12), vectors, vectors[:2], 12, np.random.default_rng(2))
        assert sorted(found) == list(range(12))
        assert ranking(order, np.zeros(0), np.zeros((0, 4)), vectors, 5, np.random.default_rng(2)).tolist() == []
