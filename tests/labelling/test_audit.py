"""What is odd is found, and what is not is left alone."""
from types import SimpleNamespace

import numpy as np
import pytest

from libml.labelling import audit
from libml.labelling.choose import unit
from libml.labelling.session import Decision


@pytest.fixture
def clusters():
    """Three clusters of 40 vectors in 30 dimensions, far apart beside their width."""
    rng = np.random.default_rng(0)
    return np.repeat(4 * np.eye(3, 30), 40, axis=0) + 0.5 * rng.normal(size=(120, 30)), np.repeat([0, 1, 2], 40)


def test_swapped_labels_are_contradicted(clusters):
    vectors, labels = clusters
    wrong = labels.copy()
    wrong[[3, 50, 100]] = [1, 2, 0]
    found = {row: other for row, other, _ in audit.contradicted(vectors, wrong)}
    assert found == {3: 0, 50: 1, 100: 2}
    assert not list(audit.contradicted(vectors, labels))
    assert not list(audit.contradicted(vectors[:1], labels[:1]))  # nothing to compare with
    assert not list(audit.contradicted(vectors[:40], labels[:40]))


def test_duplicates_are_all_pairs_that_are_near():
    rng = np.random.default_rng(1)
    vectors = rng.normal(size=(audit.BLOCK + 50, 16))
    vectors[7], vectors[audit.BLOCK + 3] = vectors[5] * 2, vectors[11] + 1e-3
    vectors = unit(vectors)
    told = []
    found = {(row, other) for row, other, _ in audit.duplicates(vectors, lambda *done: told.append(done))}
    cosine = vectors @ vectors.T
    rows, others = np.nonzero(np.tril(cosine >= audit.SAME, -1))
    assert found == set(zip(rows.tolist(), others.tolist(), strict=True)) >= {(7, 5), (audit.BLOCK + 3, 11)}
    assert told[-1] == (len(vectors), len(vectors))


def test_p_values_are_uniform_for_images_of_the_same_kind(clusters):
    """Of labelled and other images from one distribution, p-values are about uniform: within 0.1 of it everywhere, some
    three standard deviations of 300 and 300 draws; one that is far away has the smallest."""
    rng = np.random.default_rng(2)
    labelled, others = unit(rng.normal(size=(300, 8)) + 2), unit(rng.normal(size=(300, 8)) + 2)
    p = audit.strangeness(np.concatenate([others, -labelled[:1]]), labelled)
    assert p[-1] == 1 / 301
    grid = np.linspace(0, 1, 21)
    # A labelled image has one neighbour fewer than another image, which is itself: p-values are a little too large.
    assert (np.mean(p[:-1, None] <= grid, axis=0) - grid).max() < 0.1


def test_all_findings(clusters):
    vectors, labels = clusters
    images = np.random.default_rng(3).integers(0, 255, (120, 4, 4, 3)).astype(np.uint8)
    images[9] = 17
    vectors[60] = vectors[61]
    vectors[119] = -2
    data = SimpleNamespace(pictures=None, images=images)
    heads = SimpleNamespace(data=data, vectors=unit(vectors), plain=vectors,
                            statistics=(vectors.mean(0), vectors.std(0)))
    known = {n: Decision("abc"[labels[n]], "test" if n == 60 else "train", "order") for n in range(118)}
    known[3] = Decision("b", "train", "order")
    known[8] = Decision("", "excluded", "order")
    names = [f"{n}.png" for n in range(125)]
    found = audit.findings(heads, np.arange(120), known, names, {124: "no image"})
    by_kind = {kind: [one.number for one in found if one.kind == kind] for kind in ("unreadable", "blank", "label",
                                                                                    "duplicate", "strange")}
    assert by_kind["unreadable"] == [124] and by_kind["blank"] == [9] and 3 in by_kind["label"]
    assert by_kind["duplicate"] == [61] and by_kind["strange"][0] == 119
    twin = next(one for one in found if one.kind == "duplicate")
    assert twin.other == 60 and "(train and test)" in twin.told
    assert next(one for one in found if one.number == 3).suggested == "a"
