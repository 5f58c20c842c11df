"""MixUp, DeFixMatch, and MixMatch and ReMixMatch with other views and losses: NumPy re-derivations, limits, views."""
import numpy as np
import pytest
import tensorflow as tf
from classic import BATCH, CLASSES, SIDE, TOLERANCE, assert_statistics_of, make, passes, run, views_of
from helpers import cross_entropy, sharpen, softmax, spy

from cssl import cli
from cssl.defixmatch import DeFixMatch
from cssl.fully_supervised_mixup import FullySupervisedMixUp
from cssl.mixmatch import MixMatch
from cssl.mixup import MixUp
from cssl.remixmatch import ReMixMatch
from libml import experiment
from libml.augment import Augmenter, to_float
from libml.learn import mixing
from libml.randomness import fold_in


def mixed(values, m):
    m = m.reshape([-1] + [1] * (values.ndim - 1))
    return (m * values + (1 - m) * values[::-1]).astype(np.float32)


@pytest.mark.parametrize("beta, cta", [(0.0, False), (0.5, False), (0.5, True)])
def test_mixup(beta, cta, monkeypatch):
    weights = spy(monkeypatch, mixing, "beta_weights")
    model = make(MixUp, beta=beta, cta=cta)
    views = views_of(model)
    unlabeled = views["strong" if cta else "weak"].numpy()
    loss, scalars, step = run(model, views)
    first, second = (w.numpy().astype(np.float64) for w in weights)
    assert (first == 1).all() if beta == 0 else (first != second).any() and min(first.min(), second.min()) >= 0.5
    images, target = mixed(views["labeled"].numpy(), first), mixed(np.eye(CLASSES)[views["label"]], first)
    xe = cross_entropy(passes(model, images)[0], target).mean()
    guess = softmax(passes(model, unlabeled)[0])
    xeu = cross_entropy(passes(model, mixed(unlabeled, second))[0], mixed(guess, second)).mean()
    np.testing.assert_allclose([scalars["losses/xe"], scalars["losses/xeu"]], [xe, xeu], **TOLERANCE)
    assert loss == pytest.approx(xe + xeu, rel=1e-4)
    assert run(model, views, 0)[0] == loss  # full weight from the start
    assert_statistics_of(model, images, step)
    if beta == 0:
        np.testing.assert_allclose(xeu, -np.sum(guess * np.log(guess), -1).mean(), rtol=1e-5)  # entropy


def test_fully_supervised_mixup_is_its_labelled_part(monkeypatch):
    views = views_of(make(MixUp))
    _, scalars, _ = run(make(MixUp), views)
    loss, _, _ = run(make(FullySupervisedMixUp), views)
    assert loss == pytest.approx(scalars["losses/xe"], rel=1e-6)
    assert FullySupervisedMixUp.Options().wd == 0.002 and MixUp.Options().wd == 0.02
    config = cli.configuration(FullySupervisedMixUp, ["program", "--dataset=cifar10.2@40-1"])
    assert config.values()["dataset"] == "cifar10.2@all-1"


def batch_of():
    images = tf.constant(np.random.RandomState(0).randint(0, 256, (10, SIDE, SIDE, 3)).astype(np.uint8))
    return {"labeled": images[:4], "label": tf.range(4), "unlabeled": images[4:],
            "unlabeled_label": tf.zeros([6], tf.int32)}


def with_augmenter(model):
    model.augmenter = Augmenter("d.d.d", image_shape=(SIDE, SIDE, 3), mirror=True, shift=2, jit_compile=False)
    return model


@pytest.mark.parametrize("method, kinds", [
    (MixUp, {"strong", "unlabeled_label"}), (MixMatch, {"strong", "unlabeled_label"}), (FullySupervisedMixUp, set())])
def test_views_of_ctaugment(method, kinds):
    """Strong views alone, of labelled images too, and the probe that teaches CTAugment."""
    model = with_augmenter(make(method, cta=True))
    views = model.make_views(batch_of())
    assert set(views) == {"labeled", "label", "probe"} | kinds
    seed = fold_in(model.step_seed(model.update.read().updates), 1)
    np.testing.assert_array_equal(views["labeled"], model.augmenter.strong(batch_of()["labeled"], fold_in(seed, 4)))
    assert "CTAugment" not in experiment._lacks(model)
    plain = with_augmenter(make(method))
    assert "probe" not in plain.make_views(batch_of()) and "CTAugment" in experiment._lacks(plain)


def test_mixmatch_on_strong_views_is_mixmatch():
    views = views_of(make(MixMatch))
    wanted, _, _ = run(make(MixMatch), views)
    views["strong"] = views.pop("weak")
    assert run(make(MixMatch, cta=True), views)[0] == wanted


@pytest.mark.parametrize("use_dm, use_xe", [(False, True), (True, False), (False, False)])
def test_remixmatch_without_alignment_or_cross_entropy(use_dm, use_xe):
    model = make(ReMixMatch, K=1, beta=0.0, warmup_kimg=0.0, use_dm=use_dm, use_xe=use_xe)
    model.predictions.assign(np.tile(np.array([0.4, 0.3, 0.1, 0.1, 0.1], np.float32), (128, 1)))
    views = views_of(model)
    loss, scalars, _ = run(model, views)
    q = softmax(passes(model, views["weak"])[0])
    aligned = q * 0.2 / [0.4, 0.3, 0.1, 0.1, 0.1]
    guess = sharpen(aligned / aligned.sum(-1, keepdims=True) if use_dm else q, 0.5)
    images = tf.concat([views["labeled"], views["weak"], views["strong"]], 0)
    parts = mixing.interleave(tf.split(images, 3))
    logits = np.concatenate(mixing.interleave([passes(model, part)[0] for part in parts]))[BATCH:]
    target = np.tile(guess, (2, 1))
    match = cross_entropy(logits, target) if use_xe else (softmax(logits) - target) ** 2
    np.testing.assert_allclose(scalars["losses/xeu"], match.mean(), rtol=5e-4)  # epsilons in the alignment
    assert np.isfinite(loss)


# DeFixMatch.

def labeled_strong(views, seed=5):
    return views | {"labeled_strong": views["labeled"] + tf.random.stateless_normal(views["labeled"].shape, [seed, 0])}


def matching(weak, strong, confidence):
    q = softmax(weak)
    return ((q.max(-1) >= confidence) * cross_entropy(strong, q.argmax(-1))).mean()


@pytest.mark.parametrize("confidence", [0.0, 0.3, 0.95])
def test_defixmatch(confidence):
    model = make(DeFixMatch, confidence=confidence, K=2)
    views = labeled_strong(views_of(model))
    loss, scalars, step = run(model, views)
    together = np.concatenate([views[name] for name in ("labeled", "labeled_strong", "weak", "strong")])
    x, x_strong, weak, strong = np.split(passes(model, together)[0], [BATCH, 2 * BATCH, 3 * BATCH])
    label = views["label"].numpy()
    xe = (cross_entropy(x, label).mean() + cross_entropy(x_strong, label).mean()) / 2
    unlabeled, anti = matching(np.tile(weak, (2, 1)), strong, confidence), matching(x, x_strong, confidence)
    np.testing.assert_allclose([scalars["losses/xeu"], scalars["losses/anti"]], [unlabeled, anti], **TOLERANCE)
    np.testing.assert_allclose(loss, xe + 0.5 * (unlabeled - anti), **TOLERANCE)
    assert_statistics_of(model, together, step)


def test_defixmatch_on_one_batch_twice_is_supervised():
    model = make(DeFixMatch, confidence=0.2)
    views = labeled_strong(views_of(model))
    loss, scalars, _ = run(model, views | {"weak": views["labeled"], "strong": views["labeled_strong"]})
    assert scalars["losses/xeu"] > 0 and loss == pytest.approx(scalars["losses/xe"], rel=1e-5)


def test_defixmatch_views():
    model = with_augmenter(make(DeFixMatch))
    views = model.make_views(batch_of())
    seed = fold_in(model.step_seed(model.update.read().updates), 1)
    np.testing.assert_array_equal(views["labeled_strong"],
                                  model.augmenter.strong(batch_of()["labeled"], fold_in(seed, 4)))
    np.testing.assert_array_equal(views["labeled"],
                                  to_float(model.augmenter.labeled(batch_of()["labeled"], fold_in(seed, 1))))
    assert "probe" in views
