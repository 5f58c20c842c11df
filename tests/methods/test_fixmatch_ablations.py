"""FixMatch's ablations: each loss and update in NumPy, and the limits in which it is FixMatch again."""
import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import softmax
from models import augmented, decided, forward, random_views

from cssl.fixmatch import FixMatch
from cssl.remixmatch import ReMixMatch
from libml import data, networks
from libml.augment import Augmenter
from libml.config import RunConfig
from libml.errors import UserError
from libml.learn import Adam, Nesterov
from libml.randomness import fold_in


class Plain(keras.Model):
    """A network without batch normalisation, which treats every image by itself."""

    def __init__(self):
        super().__init__()
        self.classifier = keras.layers.Dense(10, kernel_initializer=keras.initializers.GlorotNormal(2))
        self.classifier.build((None, 16 * 16 * 3))
        self.built = True

    def call(self, images, training=False):
        return self.classifier(tf.reshape(images, [-1, 16 * 16 * 3]))


def plain(**options):
    return FixMatch(Plain(), 10, options=FixMatch.Options(batch=4, uratio=3, **options), total_images=4096)


def weights_after(model, views, steps=3):
    for _ in range(steps):
        model.train_on_views(views)
    return np.concatenate([v.numpy().ravel() for v in model.network.trainable_variables])


def test_defaults_change_nothing_about_a_run():
    config = RunConfig.of(FixMatch, dataset="cifar10.3@40-1")
    assert config.folder().name == ("FixMatch_archresnet_batch64_confidence0.95_filters32_lr0.03_repeat4_scales3_"
                                    "uratio7_wd0.0005_wu1.0")
    stored = json.loads(config.to_json())
    for name in ("optimizer", "momentum", "nesterov", "beta1", "beta2", "lr_decay", "lr_end", "teacher", "T", "target",
                 "anchoring", "cutout"):  # a run from before these options
        del stored[name]
    assert config.differences(stored) == {} and RunConfig.from_json(FixMatch, stored) == config
    other = RunConfig.of(FixMatch, dataset="cifar10.3@40-1", anchoring="weak.weak", cutout="no")
    assert "anchoringweak.weak" in other.folder().name and "cutoutno" in other.folder().name
    assert other.differences(stored) == {"anchoring": ("weak.strong", "weak.weak"), "cutout": ("yes", "no")}


# Optimiser and learning rate.

def test_momentum_and_nesterov():
    rng = np.random.RandomState(0)
    gradients = rng.normal(size=(4, 5)).astype(np.float32)
    for nesterov in (False, True):
        rule, weight, velocity = Nesterov(0.8, nesterov), np.zeros(5), np.zeros(5)
        found, slots = [tf.zeros(5)], [tf.zeros(5)]
        for gradient in gradients:
            velocity = 0.8 * velocity + gradient
            weight = weight - 0.1 * (gradient + 0.8 * velocity if nesterov else velocity)
            found, slots = rule.update(found, [tf.constant(gradient)], slots, 0.1, 0)
        np.testing.assert_allclose(found[0], weight, rtol=1e-5, atol=1e-6)  # float32 against float64


def test_options_reach_the_optimiser():
    rule = plain(momentum=0.5, nesterov=False).optimizer_rule
    assert isinstance(rule, Nesterov) and (rule.momentum, rule.nesterov) == (0.5, False)
    adam = plain(optimizer="adam")
    assert isinstance(adam.optimizer_rule, Adam) and len(adam.slots) == 2 * len(adam.ema_weights)
    assert (adam.optimizer_rule.beta1, adam.optimizer_rule.beta2, adam.optimizer_rule.epsilon) == (0.9, 0.999, 1e-8)
    assert plain(optimizer="adam", beta2=0.0).optimizer_rule.epsilon == 1e-4


def test_without_momentum_both_forms_are_gradient_descent():
    views = random_views()
    found = [weights_after(plain(momentum=0.0, nesterov=nesterov, confidence=0.0), views) for nesterov in (False, True)]
    np.testing.assert_array_equal(*found)
    assert not np.array_equal(found[0], weights_after(plain(confidence=0.0), views))


def test_first_step_of_adam_has_the_size_of_the_learning_rate():
    model = plain(optimizer="adam", lr=0.002, confidence=0.0)
    before = model.network.classifier.kernel.numpy()
    model.train_on_views(random_views())
    step = np.abs(model.network.classifier.kernel.numpy() - before)
    # m / sqrt(v) is a sign, but for epsilon, which counts where a gradient is near 0.
    np.testing.assert_allclose(np.percentile(step, [2, 100]), 0.002, rtol=1e-3)


def test_linear_decay():
    model = plain(lr_decay="linear")
    found = [float(model.learning_rate(tf.constant(images, tf.int64))) for images in (0, 1024, 4096)]
    np.testing.assert_allclose(found, [0.03, 0.0275, 0.02], rtol=1e-6)
    cosine = plain()
    np.testing.assert_allclose(cosine.learning_rate(tf.constant(2048, tf.int64)), 0.03 * np.cos(7 * np.pi / 32),
                               rtol=1e-6)


# Teacher.

def teacher_logits(model, images, training):
    network = model.network
    logits, _ = network.stateless_call([tf.convert_to_tensor(v) for v in model.ema_weights],
                                       [tf.convert_to_tensor(v) for v in network.non_trainable_variables], images,
                                       training=training)
    return logits.numpy().astype(np.float64)


@pytest.mark.parametrize("kind", ["moving", "batch"])
@pytest.mark.parametrize("K", [1, 2])
def test_teacher(kind, K):
    model, views = decided(FixMatch, teacher=kind, confidence=0.0, K=K), random_views()
    views["strong"] = tf.tile(views["strong"], [K, 1, 1, 1]) * tf.reshape(tf.linspace(1.0, 0.5, 12 * K), [-1, 1, 1, 1])
    for i, average in enumerate(model.ema_weights):
        average.assign(average + 0.1 * tf.random.stateless_normal(average.shape, [5, i]))
    network = model.network
    joint, statistics = network.stateless_call(network.trainable_variables, network.non_trainable_variables,
                                               tf.concat([views["labeled"], views["strong"]], 0), training=True)
    label = np.tile(teacher_logits(model, views["weak"], kind == "batch").argmax(1), K)
    p = softmax(joint.numpy().astype(np.float64))
    expected = -np.log(p[4:][np.arange(12 * K), label]).mean()
    xe = -np.log(p[:4][np.arange(4), views["label"]]).mean()
    scalars = model.train_on_views(views)
    np.testing.assert_allclose(scalars["losses/xeu"], expected, rtol=1e-5)  # float32 against float64
    np.testing.assert_allclose(scalars["losses/xe"], xe, rtol=1e-5)
    for found, wanted in zip(network.non_trainable_variables, statistics, strict=True):  # the student's pass, alone
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["moving", "batch"])
@pytest.mark.parametrize("anchoring", ["weak.strong", "strong.weak"])
def test_a_teacher_without_memory_is_the_student(kind, anchoring):
    """With ema=0 the averaged weights are the weights; without batch normalisation the passes are the same then."""
    views, shared = random_views(), dict(ema=0.0, confidence=0.3, anchoring=anchoring, lr=0.001)
    expected = weights_after(plain(**shared), views)
    # Passes of other sizes round differently, and the average is a - (a - w): a few float32 steps.
    np.testing.assert_allclose(weights_after(plain(teacher=kind, **shared), views), expected, rtol=1e-4, atol=1e-6)
    assert np.abs(expected - weights_after(plain(**shared | {"confidence": 1.0}), views)).max() > 1e-4  # labels matter


# Sharpening and anchoring.

def test_sharpening_hard():
    views = random_views()
    _, weak, strong = forward(decided(FixMatch), views)
    q, sharp = softmax(weak), softmax(weak / 0.5)
    threshold = float(np.median(sharp.max(1)))
    model = decided(FixMatch, T=0.5, confidence=threshold)
    mask = sharp.max(1) >= threshold
    assert (mask != (q.max(1) >= threshold)).any()  # T changes the mask
    expected = np.mean(-np.log(softmax(strong)[np.arange(12), q.argmax(1)]) * mask)  # but not the label
    np.testing.assert_allclose(model.train_on_views(views)["losses/xeu"], expected, rtol=1e-5)


def test_sharpening_soft():
    views = random_views()
    _, weak, strong = forward(decided(FixMatch), views)
    q, sharp = softmax(weak), softmax(weak / 0.5)
    threshold = float(np.median(q.max(1)))
    model = decided(FixMatch, T=0.5, target="soft", confidence=threshold)
    expected = np.mean(-(sharp * np.log(softmax(strong))).sum(1) * (q.max(1) >= threshold))
    scalars = model.train_on_views(views)
    np.testing.assert_allclose(scalars["losses/xeu"], expected, rtol=1e-5)
    np.testing.assert_allclose(scalars["monitors/mask"], (q.max(1) >= threshold).mean(), rtol=1e-6)


def test_limits_of_sharpening():
    views = random_views()
    fixmatch = weights_after(plain(confidence=0.3), views)
    np.testing.assert_array_equal(weights_after(plain(confidence=0.3, T=1.0), views), fixmatch)
    # A temperature near 0 makes the soft target the hard label, and the mask does not know about it.
    np.testing.assert_allclose(weights_after(plain(confidence=0.3, T=1e-4, target="soft"), views), fixmatch, rtol=1e-4,
                               atol=1e-6)
    # All hard masks are 1 at a temperature near 0: FixMatch without a threshold.
    np.testing.assert_array_equal(weights_after(plain(confidence=0.9, T=1e-4), views),
                                  weights_after(plain(confidence=0.0), views))


@pytest.mark.parametrize("anchoring", ["weak.strong", "weak.weak", "strong.strong", "strong.weak"])
def test_anchoring(anchoring):
    views, model = random_views(), decided(FixMatch, anchoring=anchoring, confidence=0.0)
    logits = dict(zip(("labeled", "weak", "strong"), forward(model, views), strict=True))
    guess, trained = (logits[name] for name in anchoring.split("."))
    label = guess.argmax(1)
    expected = np.mean(-np.log(softmax(trained)[np.arange(12), label]))
    scalars = model.train_on_views(views)
    np.testing.assert_allclose(scalars["losses/xeu"], expected, rtol=1e-5)
    right = (label == views["unlabeled_label"].numpy()).mean()  # the log judges the labels that are used
    np.testing.assert_allclose(scalars["monitors/pseudo_known_correct"], right, rtol=1e-6)


def test_alike_views_make_all_anchorings_alike():
    views = random_views()
    views["strong"] = views["weak"]
    expected = weights_after(plain(confidence=0.3), views)
    for anchoring in ("weak.weak", "strong.strong", "strong.weak"):
        found = weights_after(plain(confidence=0.3, anchoring=anchoring), views)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)  # sums of gradients in another order


# Views of labelled images.

class TwoViews(FixMatch):
    """Wants strong views of the labelled images as well."""

    strong_labeled_too = True


def batch_of(digits):  # noqa: F811 - the fixture
    return next(iter(data.batches(digits, batch=4, uratio=3)))


@pytest.mark.parametrize("augment, part", [("m.x.rac", "strong"), ("m.r2_5_0.x.rac", "labeled_strong")])
def test_strong_views_of_labelled_images_as_well(digits, augment, part):  # noqa: F811
    model, batch = augmented(TwoViews, digits, augment), batch_of(digits)
    views = model.make_views(batch)
    seed = fold_in(fold_in(model.step_seed(model.update.read().updates), 1), 4)
    expected = model.augmenter.strong(batch["labeled"], seed, part=part)
    np.testing.assert_array_equal(views["labeled_strong"], expected)
    plainly = augmented(FixMatch, digits, augment).make_views(batch)
    assert "labeled_strong" not in plainly
    for name in ("labeled", "weak", "strong"):  # what others make too is the same
        np.testing.assert_array_equal(views[name], plainly[name])
    assert np.isfinite(model.train_on_views(views)["losses/total"])


def test_labelled_images_train_on_their_policy(digits):  # noqa: F811
    batch = batch_of(digits)
    model, usual = augmented(FixMatch, digits, "r2_9_50.d.d"), augmented(FixMatch, digits, "d.d.d")
    views, plainly = model.make_views(batch), usual.make_views(batch)
    seed = fold_in(fold_in(model.step_seed(model.update.read().updates), 1), 1)
    samples = model.augmenter.sample_strong(4, seed, part="labeled")
    reference = Augmenter("x.x.r2_9_50", image_shape=digits.image_shape, mirror=digits.mirror,
                          shift=digits.augmenter().shift,
                          jit_compile=False)
    images = np.stack([np.pad(image, ((2, 2), (2, 2), (0, 0)), "reflect")[y:y + 16, x:x + 16] for image, (y, x) in zip(
        batch["labeled"].numpy(), samples["offset"].numpy(), strict=True)])
    still = samples | {"offset": tf.zeros_like(samples["offset"])}
    np.testing.assert_array_equal(views["labeled"], reference.strong_reference(images, still))
    for name in ("weak", "strong"):
        np.testing.assert_array_equal(views[name], plainly[name])
    np.testing.assert_array_equal(views["probe"]["images"], plainly["probe"]["images"])  # of the weak view, as ever


def test_remixmatch_takes_the_second_part(digits):  # noqa: F811
    batch = batch_of(digits)
    network = networks.build("resnet", num_classes=10, image_shape=(16, 16, 3), filters=4, repeat=1, scales=2, seed=1)
    three, four = (augmented(ReMixMatch, digits, augment, network, K=1).make_views(batch) for augment in (
        "d.d.rac", "d.x.d.rac"))
    assert not np.array_equal(three["labeled"], four["labeled"])
    np.testing.assert_array_equal(three["strong"], four["strong"])


def test_cutout_alone_learns_no_rates(digits):  # noqa: F811
    augmenter = Augmenter("d.d.d", image_shape=digits.image_shape, mirror=digits.mirror, shift=digits.augmenter().shift,
                          jit_compile=False, cutout="only")
    model = FixMatch(Plain(), 10, options=FixMatch.Options(batch=4, uratio=3), augmenter=augmenter, total_images=4096)
    assert "probe" not in model.make_views(batch_of(digits)) and "rates" not in model.checkpoint_items()
    assert np.isfinite(model.train_on_bytes(batch_of(digits))["losses/total"])


def test_programs(program, tmp_path):
    """From flags to a folder; AutoAugment on digits is an error before anything is built."""
    tiny = ["--dataset=digits.1@40-1", "--filters=8", "--scales=1", "--batch=8", "--uratio=1", "--train_steps=2",
            "--report_kimg=0.015625", f"--train_dir={tmp_path}"]
    done = program(FixMatch, *tiny, "--augment=d.x.d.x", "--optimizer=adam", "--lr=0.002", "--teacher=batch",
                   "--lr_decay=linear", "--lr_end=0.001", "--target=soft", "--T=0.5")
    assert "warning: --augment=d.x.d.x: the second part has no effect: FixMatch makes no strong" in done.stdout
    (args,) = tmp_path.rglob("args.json")
    for part in ("optimizeradam", "teacherbatch", "lr_decaylinear", "lr_end0.001", "targetsoft", "T0.5"):
        assert part in args.parent.parent.name
    done = program(FixMatch, *tiny, "--augment=d.d.aac", code=2)
    assert "--augment=d.d.aac: AutoAugment has policies for cifar10" in done.stderr


def test_auto_augment_is_for_datasets_that_have_policies():
    for dataset, fits in {"cifar100.1@400-1": True, "svhn_noextra.1@40-1": True, "stl10.1@1000-1": False}.items():
        if fits:
            assert RunConfig.of(FixMatch, dataset=dataset, augment="d.d.aac").dataset.entry.auto_augment
        else:
            with pytest.raises(UserError, match="on other images take RandAugment"):
                RunConfig.of(FixMatch, dataset=dataset, augment="d.d.aac")
