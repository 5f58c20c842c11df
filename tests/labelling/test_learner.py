"""What the learner trains on, and on which images it is measured."""
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import make_images

from libml.labelling import learner as learners
from libml.labelling.choose import unit
from libml.labelling.learner import Learner, Round
from libml.labelling.session import Session, next_images


@pytest.fixture
def learner(tmp_path, monkeypatch):
    """A learner of 300 images whose heads note what they are given, and say cat."""
    session = Session(make_images(tmp_path / "many", [f"{k:03}.png" for k in range(300)]), ["cat", "dog"])
    made = Learner(session, None)
    made.numbers = np.arange(300)
    made.row = {n: n for n in range(300)}
    seen = []

    def train(rows, labels, unlabeled=None):
        seen.append((set(rows.tolist()), set(unlabeled.tolist())))
        return ["cat", "dog"], np.tile([0.9, 0.1], (300, 1)), np.full(300, 0.1)

    made.heads = SimpleNamespace(train=train, vectors=unit(np.random.default_rng(0).normal(size=(300, 5))), seen=seen,
                                 alone=lambda rows, labels, asked: np.full(len(asked), "cat"))
    return made


def label(session, count):
    for _ in range(count):
        n, = next_images(session, [], 1)
        session.label([n], "cat" if n % 3 else "dog", "order")


def test_no_image_for_measuring_is_in_training_not_even_unlabelled(learner):
    session = learner.session
    label(session, 40)
    part = [n for n in range(300) if session.random[n]]
    session.label(part[-2:], "dog", "audit")
    learner._train(learner._labelled())
    (rows, stream), = learner.heads.seen
    assert rows == {n for n, decision in session.decided.items() if decision.split == "train"} and len(rows) == 36
    assert stream == set(range(300)) - set(part)


def test_the_random_images_are_measured_in_the_order_in_which_they_are_asked_for(learner, monkeypatch):
    """All that are labelled count, also where the part is larger than what is looked at."""
    monkeypatch.setattr(learners, "ASKED", 4)
    label(learner.session, 40)
    learner._train(learner._labelled())
    labelled = {n for n, decision in learner.session.decided.items() if decision.by == "random"}
    assert set(learner.points[0].predicted) == labelled and len(labelled) == 4


def test_a_class_that_is_gone_is_learned_anew_at_once(learner):
    session = learner.session
    label(session, 40)
    learner._train(learner._labelled())
    session.label([n for n in range(300) if session.open(n) and not session.random[n]][:2], "cat", "grid")
    learner.stop = None

    def due():
        found = []
        learner.session.changed.wait_for = lambda condition: found.append(condition())
        learner._wait()
        return found[0]

    assert not due()
    session.rename_class("dog", "wolf")
    assert due()


def test_a_class_that_the_model_does_not_know_makes_conformal_sets_larger(learner):
    """Nine random images of one unknown class: no threshold leaves one out, so every set has all classes."""
    session = learner.session
    part = [n for n in range(300) if session.random[n]][:9]
    learner.round = Round(10, ["cat", "dog"], learner.numbers, learner.row, np.tile([0.9, 0.1], (300, 1)),
                          np.full(300, 0.1))
    session.label(part, "cat", "order")
    assert learner.singletons() == 1
    session.add_class("owl")
    session.label(part, "owl", "order")
    assert learner.singletons() == 0
