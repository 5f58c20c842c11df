"""The classic methods: each loss re-derived in NumPy from the logits of its passes, limits, statistics, Adam, state."""
import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
from classic import (
    BATCH,
    CLASSES,
    SEED,
    SIDE,
    TOLERANCE,
    TOTAL,
    assert_statistics_of,
    make,
    passes,
    run,
    step_at,
    views_of,
)
from helpers import cross_entropy, kl, sharpen, softmax, spy

import cssl
from cssl import cli
from cssl.cssl import CSSL
from cssl.fixmatch import FixMatch
from cssl.fixmatch_da import FixMatchDA
from cssl.fully_supervised import FullySupervised
from cssl.ict import ICT
from cssl.lsmatch import LSMatch
from cssl.mean_teacher import MeanTeacher
from cssl.mixmatch import MixMatch
from cssl.pi_model import PiModel
from cssl.pseudo_label import PseudoLabel
from cssl.remixmatch import ReMixMatch
from cssl.uda import UDA
from cssl.upsmatch import UPSMatch
from cssl.vat import VAT
from libml import networks
from libml.augment import Augmenter
from libml.errors import UserError
from libml.learn import Adam, losses, mixing
from libml.randomness import fold_in

CLASSIC = [PiModel, PseudoLabel, MeanTeacher, VAT, ICT]
# Losses. The ramp is halfway: images seen / (0.4 * total) = 0.5.

def labeled_loss(model, views):
    return cross_entropy(passes(model, views["labeled"])[0], views["label"].numpy()).mean()


def test_pi_model():
    model = make(PiModel)
    views = views_of(model)
    loss, scalars, step = run(model, views, 200)
    one, two = (softmax(passes(model, part)[0]) for part in np.split(views["weak"].numpy(), 2))
    xeu = ((one - two) ** 2).mean()
    np.testing.assert_allclose(scalars["losses/xeu"], xeu, **TOLERANCE)
    np.testing.assert_allclose(loss, labeled_loss(model, views) + 10 * 0.5 * xeu, **TOLERANCE)
    assert_statistics_of(model, views["labeled"], step)


def test_mean_teacher():
    model = make(MeanTeacher)
    views = views_of(model)
    loss, _, step = run(model, views, 200)
    one, two = np.split(views["weak"].numpy(), 2)
    teacher, student = softmax(passes(model, one, ema=True)[0]), softmax(passes(model, two)[0])
    xeu = ((teacher - student) ** 2).mean()
    np.testing.assert_allclose(loss, labeled_loss(model, views) + 50 * 0.5 * xeu, **TOLERANCE)
    assert_statistics_of(model, views["labeled"], step)


@pytest.mark.parametrize("quantile", [None, 0.5, 1.0])
def test_pseudo_label(quantile):
    views = views_of(make(PseudoLabel))
    confidences = softmax(passes(make(PseudoLabel), views["weak"])[0]).max(-1)
    threshold = 0.0 if quantile is None else float(np.quantile(confidences, quantile)) + 1e-6
    model = make(PseudoLabel, threshold=threshold)
    loss, scalars, step = run(model, views, 200)
    logits = passes(model, views["weak"])[0]
    mask = softmax(logits).max(-1) > threshold
    xeu = (cross_entropy(logits, logits.argmax(-1)) * mask).mean()
    np.testing.assert_allclose(loss, labeled_loss(model, views) + 0.5 * xeu, **TOLERANCE)
    np.testing.assert_array_equal(model.compute_losses(views, step_at(model, 200)).pseudo_labels[1], mask)
    assert mask.mean() == {None: 1, 0.5: 0.5, 1.0: 0}[quantile]
    assert_statistics_of(model, views["labeled"], step)
    np.testing.assert_allclose(model.train_on_views(views)["monitors/mask"], mask.mean(), rtol=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_ict(monkeypatch, beta):
    weights = spy(monkeypatch, mixing, "beta_weights")
    model = make(ICT, beta=beta)
    views = views_of(model)
    loss, _, step = run(model, views, 200)
    m, y = weights[0].numpy().astype(np.float64), views["weak"].numpy()
    assert m.shape == (BATCH,) and ((m == 1).all() if beta == 0 else np.unique(m).size == BATCH)
    teacher = softmax(passes(model, y, ema=True)[0])
    mixed = m[:, None, None, None] * y + (1 - m[:, None, None, None]) * y[::-1]
    student = softmax(passes(model, mixed.astype(np.float32))[0])
    target = m[:, None] * teacher + (1 - m[:, None]) * teacher[::-1]
    xeu = ((target - student) ** 2).mean()
    np.testing.assert_allclose(loss, labeled_loss(model, views) + 50 * 0.5 * xeu, **TOLERANCE)
    assert_statistics_of(model, views["labeled"], step)


class Linear(keras.Model):
    """Logits W^T x: its worst direction has a closed form, and no batch normalisation joins the images."""

    def __init__(self):
        super().__init__()
        init = keras.initializers.RandomNormal(stddev=0.2, seed=3)
        self.classifier = keras.layers.Dense(CLASSES, kernel_initializer=init)
        self.classifier.build((None, SIDE * SIDE * 3))
        self.built = True

    def call(self, images, training=False):
        return self.classifier(tf.reshape(images, [-1, SIDE * SIDE * 3]))


class LinearEmbedding(Linear):
    """The same with the image as its embedding, for a second head."""

    def call(self, images, training=False, seed=None, outputs=None):
        found = {"logits": super().call(images), "embedding": tf.reshape(images, [-1, SIDE * SIDE * 3])}
        return found["logits"] if outputs is None else tuple(found[name] for name in outputs)


def test_vat_on_a_linear_model_is_the_closed_form():
    """One power iteration on the Fisher matrix: d ~ J^T (diag(p) - p p^T) J d0."""
    model = make(VAT, Linear(), vat_eps=0.5)
    views = views_of(model)
    loss, scalars, _ = run(model, views, 200)
    kernel = model.network.classifier.kernel.numpy().astype(np.float64)
    y = views["weak"].numpy().reshape(BATCH, -1).astype(np.float64)
    start = mixing.normal([BATCH, SIDE, SIDE, 3], fold_in(SEED, 1)).numpy()
    start = start.reshape(BATCH, -1).astype(np.float64)
    p = softmax(y @ kernel)
    change = start @ kernel
    direction = (p * (change - np.sum(p * change, -1, keepdims=True))) @ kernel.T
    direction /= np.linalg.norm(direction, axis=-1, keepdims=True)
    xeu = kl(softmax((y + 0.5 * direction) @ kernel), p).mean()
    # 1e-3 along the first direction instead of an infinitesimal step, in float32.
    np.testing.assert_allclose(scalars["losses/xeu"], xeu, rtol=0.01)
    entropy = -np.sum(p * np.log(p), -1).mean()
    np.testing.assert_allclose(scalars["losses/entropy"], entropy, rtol=1e-4)
    expected = labeled_loss(model, views) + 0.3 * 0.5 * scalars["losses/xeu"] + 0.06 * entropy
    np.testing.assert_allclose(loss, expected, rtol=1e-4)
    length = np.linalg.norm(model.worst_direction(views["weak"], p, step_at(model)).numpy().reshape(BATCH, -1),
                            axis=-1)
    np.testing.assert_allclose(length, 1, rtol=1e-5)


def test_vat_direction_hurts_more_than_a_random_one():
    model = make(VAT)
    views = views_of(model)
    _, scalars, step = run(model, views)
    assert_statistics_of(model, views["labeled"], step)
    noise = np.random.RandomState(1).normal(size=views["weak"].shape)
    noise *= 6 / np.sqrt((noise ** 2).sum((1, 2, 3), keepdims=True))
    teacher = softmax(passes(model, views["weak"])[0])
    random = kl(softmax(passes(model, (views["weak"] + noise).numpy().astype(np.float32))[0]), teacher).mean()
    assert scalars["losses/xeu"] > 1.5 * random


def deal(batches):
    """Row r of pass j is row r of batch (r - j) mod n."""
    n = len(batches)
    return [np.stack([batches[(r - j) % n][r] for r in range(len(batches[0]))]) for j in range(n)]


def mixed_passes(model, images):
    """Logits of images dealt into passes of a batch, in the order of the images; and the first pass's images."""
    dealt = deal(np.split(images, len(images) // BATCH))
    logits = deal([passes(model, part)[0] for part in dealt])
    return np.concatenate(logits), dealt[0]


@pytest.mark.parametrize("uratio, options", [
    (1, {}), (2, {}), (1, {"K": 1}), (1, {"K": 3, "T": 1.0}), (1, {"beta": 0.0})])
def test_mixmatch(monkeypatch, uratio, options):
    mixed = spy(monkeypatch, mixing, "mixup")
    model = make(MixMatch, uratio=uratio, warmup_kimg=1.0, **options)
    views = views_of(model, uratio)
    loss, scalars, step = run(model, views, 256)  # a quarter of the warm-up
    count, temperature = options.get("K", 2), options.get("T", 0.5)
    guess = np.mean([softmax(passes(model, part)[0]) for part in np.split(views["weak"].numpy(), count)], 0)
    guess = sharpen(guess, temperature)
    targets = np.concatenate([np.eye(CLASSES)[views["label"]], *[guess] * count])
    images = np.concatenate([views["labeled"], views["weak"]])
    mixed_images, mixed_targets = (x.numpy() for x in mixed[0])
    if options.get("beta") == 0.0:
        np.testing.assert_array_equal(mixed_images, images)
    # Targets were mixed as the images were: recover each row's weight and partner from the pixels.
    for i, image in enumerate(mixed_images):
        others = images.reshape(len(images), -1)
        direction = others - others[i]
        difference = image.reshape(-1) - others[i]
        share = direction @ difference / np.maximum((direction ** 2).sum(-1), 1e-9)
        partner = int(np.argmin(((share[:, None] * direction - difference) ** 2).sum(-1)))
        expected = targets[i] + share[partner] * (targets[partner] - targets[i])
        assert share[partner] <= 0.5 + 1e-5
        np.testing.assert_allclose(mixed_targets[i], expected, atol=1e-4)
    logits, first = mixed_passes(model, mixed_images)
    xe = cross_entropy(logits[:BATCH], mixed_targets[:BATCH]).mean()
    match = ((mixed_targets[BATCH:] - softmax(logits[BATCH:])) ** 2).mean()
    np.testing.assert_allclose(scalars["losses/xe"], xe, **TOLERANCE)
    np.testing.assert_allclose(loss, xe + 100 * 0.25 * match, **TOLERANCE)
    assert_statistics_of(model, first, step)


@pytest.mark.parametrize("count, temperature, p_unlabeled", [(1, 0.5, ""), (3, 1.0, ""), (2, 0.5, "1,2,3,2,1")])
def test_remixmatch(monkeypatch, count, temperature, p_unlabeled):
    mixed = spy(monkeypatch, mixing, "mixup")
    model = make(ReMixMatch, K=count, T=temperature, warmup_kimg=1.0, p_unlabeled=p_unlabeled)
    p_model, p_data = np.random.RandomState(0).dirichlet(np.ones(CLASSES), 2)
    model.predictions.assign(np.tile(p_model, (128, 1)))
    model.method_state["p_data"].assign(p_data)
    views = views_of(model)
    loss, scalars, step = run(model, views, 256)

    q = softmax(passes(model, views["weak"])[0])
    prior = np.array([1, 2, 3, 2, 1]) / 9 if p_unlabeled else p_data
    guess = q * (1e-6 + prior) / (1e-6 + p_model)
    guess = sharpen(guess / guess.sum(-1, keepdims=True), temperature)
    mixed_images, targets = (x.numpy() for x in mixed[0])
    assert len(targets) == (2 + count) * BATCH
    logits, first = mixed_passes(model, mixed_images)
    ce = cross_entropy(logits, targets)
    strong = views["strong"].numpy()[:BATCH]
    unmixed = cross_entropy(passes(model, strong)[0], guess).mean()
    turns = np.arange(BATCH) // (BATCH // 4)
    turned = np.stack([np.rot90(image, k) for image, k in zip(strong, turns, strict=True)])
    rotation = cross_entropy(passes(model, turned, outputs=("rotation",))[0], turns).mean()
    np.testing.assert_allclose(scalars["losses/kl"], unmixed, **TOLERANCE)
    np.testing.assert_allclose(scalars["losses/rot"], rotation, **TOLERANCE)
    expected = ce[:BATCH].mean() + 0.25 * (1.5 * ce[BATCH:].mean() + 0.5 * unmixed) + 0.5 * rotation
    np.testing.assert_allclose(loss, expected, **TOLERANCE)
    assert_statistics_of(model, first, step)

    output, labels = model.compute_losses(views, step_at(model, 256)), np.eye(CLASSES)[views["label"]].mean(0)
    np.testing.assert_allclose(output.mean_prediction, q.mean(0), rtol=1e-4)
    np.testing.assert_allclose(output.state["p_data"], 0.999 * p_data + 0.001 * labels, rtol=1e-5)


def test_remixmatch_without_mixing_keeps_guesses(monkeypatch):
    mixed = spy(monkeypatch, mixing, "mixup")
    model = make(ReMixMatch, K=2, beta=0.0)
    views = views_of(model)
    run(model, views)
    images, targets = mixed[0]
    np.testing.assert_array_equal(images, np.concatenate([views["labeled"], views["weak"], views["strong"]]))
    np.testing.assert_array_equal(targets[:BATCH], np.eye(CLASSES)[views["label"]])
    guess = sharpen(softmax(passes(model, views["weak"])[0]), 0.5)  # predictions and labels are uniform so far
    for part in np.split(targets[BATCH:].numpy(), 3):  # the same for the weak and both strong views
        np.testing.assert_allclose(part, guess, **TOLERANCE)


@pytest.mark.parametrize("options", [
    {}, {"confidence": 0.275, "temperature": 0.4, "we": 0.2, "wu": 3.0}, {"confidence": 0.0, "tsa": "linear", "K": 2},
    {"confidence": 0.0, "tsa": "exp"}, {"confidence": 0.0, "tsa": "log"}])
def test_uda(options):
    model = make(UDA, **options)
    views = views_of(model, 2)
    loss, scalars, step = run(model, views, 500)  # half of the run
    options = {"confidence": 0.95, "temperature": 1.0, "we": 0.0, "wu": 1.0, "tsa": "no", "K": 1} | options
    together = np.concatenate([views["labeled"], views["weak"], views["strong"]])
    x, weak, strong = np.split(passes(model, together)[0], [BATCH, 3 * BATCH])
    time = {"no": 1.0, "linear": 0.5, "exp": np.exp(-2.5), "log": 1 - np.exp(-2.5)}[options["tsa"]]
    ce = cross_entropy(x, views["label"].numpy())
    used = np.exp(-ce) <= time * (1 - 1 / CLASSES) + 1 / CLASSES + 1e-9
    xe = ce[used].mean() if used.any() else 0.0
    weak = np.tile(weak, (options["K"], 1))
    divergence = kl(softmax(weak / options["temperature"]), softmax(strong))
    mask = softmax(weak).max(-1) >= options["confidence"]
    entropy = -np.sum(softmax(weak) * np.log(softmax(weak)), -1).mean()
    np.testing.assert_allclose(scalars["losses/xe"], xe, **TOLERANCE)
    expected = xe + options["wu"] * (divergence * mask).mean() + options["we"] * entropy
    np.testing.assert_allclose(loss, expected, **TOLERANCE)
    if options["tsa"] == "exp":
        assert 0 < used.sum() < BATCH  # some labels are held back
    assert mask.mean() == {0.95: 0, 0.0: 1}.get(options["confidence"]) or 0 < mask.mean() < 1
    assert_statistics_of(model, together, step)


@pytest.mark.parametrize("tsa, progress", [
    ("linear", lambda t: t), ("exp", lambda t: np.exp(5 * (t - 1))), ("log", lambda t: 1 - np.exp(-5 * t))])
def test_uda_anneals_from_chance_to_certainty(tsa, progress):
    model = make(UDA, tsa=tsa)
    for time in (0.0, 0.25, 1.0):
        found = model.signal_threshold(step_at(model, int(time * TOTAL)))
        np.testing.assert_allclose(found, progress(time) * (1 - 1 / CLASSES) + 1 / CLASSES, rtol=1e-5)


@pytest.mark.parametrize("method, options", [
    (CSSL, {}), (FixMatch, {"confidence": 0.0}), (FixMatchDA, {"confidence": 0.0}), (LSMatch, {}),
    (UDA, {"confidence": 0.0}), (UPSMatch, {"conf_p": 0.0, "uncertainty_p": 1.0})])
def test_no_gradient_through_the_weak_views(method, options):
    model = make(method, **options)
    views = views_of(model)
    logits = tf.Variable(tf.random.stateless_normal([3 * BATCH, CLASSES], [0, 1]))
    model.forward_together = lambda views, step: tuple(tf.split(tf.convert_to_tensor(logits), 3))
    with tf.GradientTape() as tape:
        loss = model.compute_losses(views, step_at(model)).loss
    x, weak, strong = tf.split(tape.gradient(loss, logits), 3)
    assert float(tf.reduce_max(tf.abs(weak))) == 0 < float(tf.reduce_max(tf.abs(strong)))


@pytest.mark.parametrize("method", [MixMatch, ReMixMatch])
def test_no_gradient_through_the_guess(method, monkeypatch):
    """Stopping what is stopped already changes nothing."""
    model = make(method, LinearEmbedding(), warmup_kimg=0.0, beta=0.0)
    views, sharpen_ = views_of(model), losses.sharpen
    found = model.update.backward(views, SEED, model.update.read())["gradients"]
    monkeypatch.setattr(losses, "sharpen", lambda p, t: tf.stop_gradient(sharpen_(tf.stop_gradient(p), t)))
    for ours, wanted in zip(found, model.update.backward(views, SEED, model.update.read())["gradients"], strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("method", [*CLASSIC, MixMatch])
def test_at_the_start_of_the_ramp_only_labels_count(method):
    options = {"entmin_weight": 0.0} if method is VAT else {}
    model = make(method, **options)
    views = views_of(model)
    loss, scalars, _ = run(model, views, 0)
    assert loss == scalars["losses/xe"]
    assert scalars["losses/xeu"] > 0 or method is PseudoLabel  # which is not confident yet
    flat = make(method, **options, **({"warmup_kimg": 0.0} if method is MixMatch else {"warmup_pos": 0.0}))
    assert run(flat, views, 0)[0] == run(flat, views, TOTAL)[0]  # no warm-up: full weight from the start


def test_teachers_and_targets_get_no_gradient():
    for method in (PiModel, MeanTeacher):
        model = make(method, warmup_pos=0.0)
        views = views_of(model) | {"weak": tf.Variable(views_of(model)["weak"])}
        step = step_at(model)
        with tf.GradientTape() as tape:
            loss = model.compute_losses(views, step).loss
        first, second = tf.split(tf.convert_to_tensor(tape.gradient(loss, views["weak"])), 2)
        assert float(tf.reduce_max(tf.abs(first))) == 0 < float(tf.reduce_max(tf.abs(second)))


# The optimiser.

def test_adam_against_a_numpy_loop():
    generator = np.random.RandomState(0)
    weights = [generator.normal(size=shape) for shape in ((3, 4), (5,))]
    first, second = [0 * w for w in weights], [0 * w for w in weights]
    rule = Adam()
    ours = [tf.constant(w, tf.float32) for w in weights]
    slots = [tf.zeros(w.shape) for w in weights] * rule.slots_per_weight
    for t in range(1, 11):
        gradients = [generator.normal(size=w.shape) * 10 ** generator.uniform(-3, 3) for w in weights]
        first = [0.9 * m + 0.1 * g for m, g in zip(first, gradients, strict=True)]
        second = [0.999 * v + 0.001 * g ** 2 for v, g in zip(second, gradients, strict=True)]
        rate = 0.002 * np.sqrt(1 - 0.999 ** t) / (1 - 0.9 ** t)
        weights = [w - rate * m / (np.sqrt(v) + 1e-8) for w, m, v in zip(weights, first, second, strict=True)]
        ours, slots = rule.update(ours, [tf.constant(g, tf.float32) for g in gradients], slots, tf.constant(0.002),
                                  tf.constant(t - 1, tf.int64))
    for found, wanted in zip([*ours, *slots], [*weights, *first, *second], strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=1e-6)  # 1 - 0.999^t loses digits in float32


@pytest.mark.parametrize("method", [VAT, ICT])
def test_decoupled_decay_shrinks_the_kernels_alone(method):
    results = []
    for wd in (0.0, 0.5):
        model = make(method, wd=wd)
        before = [v.numpy() for v in model.network.trainable_variables]
        scalars = model.train_on_views(views_of(model))
        results.append([v.numpy() for v in model.network.trainable_variables])
        np.testing.assert_allclose(scalars["monitors/lr"], 0.002)
    assert float(model.learning_rate(tf.constant(TOTAL))) == pytest.approx(0.002)  # no decay
    for variable, old, plain, shrunk in zip(model.network.trainable_variables, before, *results, strict=True):
        expected = plain - 0.5 * 0.002 * old if variable.name == "kernel" else plain
        np.testing.assert_allclose(shrunk, expected, rtol=1e-5, atol=1e-7)
    assert float(scalars["losses/total"]) == pytest.approx(run(make(method, wd=0.5), views_of(model), 0)[0], rel=1e-5)


# Rotation head, state, views, flags.

def test_rotation_head_is_trained_averaged_decayed_and_saved():
    model = make(ReMixMatch, K=1)
    head = model.network.heads["rotation"]
    indices = [i for i, v in enumerate(model.network.trainable_variables) if any(v is w for w in head.variables)]
    assert len(indices) == 2 and len(set(indices) & set(model.update.groups["all"].decayed)) == 1
    before = [v.numpy() for v in [*head.variables, *(model.ema_weights[i] for i in indices)]]
    for seed in range(2):
        model.train_on_views(views_of(model, seed=seed))
    after = [v.numpy() for v in [*head.variables, *(model.ema_weights[i] for i in indices)]]
    assert all(np.abs(a - b).max() > 0 for a, b in zip(after, before, strict=True))
    items = model.checkpoint_items()
    assert any(v is head.kernel.value for v in items["weights"])
    assert items["state_p_data"].shape == (CLASSES,)
    assert np.abs(items["state_p_data"].numpy() - 1 / CLASSES).max() > 5e-5
    assert model.infer(views_of(model)["weak"]).shape == (BATCH, CLASSES)


def test_equal_seeds_give_equal_heads():
    def head(seed):
        network = networks.build("resnet", num_classes=CLASSES, image_shape=(SIDE, SIDE, 3), filters=4, repeat=1,
                                 seed=0)
        return networks.Heads(network, {"rotation": 4}, seed).heads["rotation"].kernel.numpy()

    np.testing.assert_array_equal(head(0), head(0))
    assert np.abs(head(0) - head(1)).max() > 0.01


@pytest.mark.parametrize("method, weak, strong, augmented_labels", [
    (PiModel, 2, 0, False), (PseudoLabel, 1, 0, False), (MeanTeacher, 2, 0, False), (VAT, 1, 0, False),
    (ICT, 1, 0, False), (MixMatch, 2, 0, False), (UDA, 1, 1, False), (ReMixMatch, 1, 8, True)])
def test_views(method, weak, strong, augmented_labels):
    model = make(method)
    model.augmenter = Augmenter("d.d.d", image_shape=(SIDE, SIDE, 3), mirror=True, shift=2, jit_compile=False)
    generator = np.random.RandomState(0)
    batch = {"labeled": generator.randint(0, 256, (4, SIDE, SIDE, 3)).astype(np.uint8), "label": tf.range(4),
             "unlabeled": generator.randint(0, 256, (6, SIDE, SIDE, 3)).astype(np.uint8),
             "unlabeled_label": tf.zeros([6], tf.int32)}
    views = model.make_views(batch)
    assert model.views_per_image == (weak, strong)
    assert views["weak"].shape[0] == 6 * weak and ("strong" in views) == ("probe" in views) == bool(strong)
    for kind in {"weak", "strong"} & set(views):
        parts = np.split(views[kind].numpy(), len(views[kind]) // 6)
        assert all((a != b).any() for i, a in enumerate(parts) for b in parts[:i])  # no view is another one again
    centre = np.isclose(views["labeled"].numpy(), 127 / 127.5 - 1).all(-1)  # cutout's grey
    assert (centre.sum((1, 2)) >= 4).all() == augmented_labels


def test_presets_and_flags():
    def parse(method, *flags):
        config = cli.configuration(method, ["program", *flags])
        return config.values(), config.presets

    config, preset = parse(ReMixMatch, "--dataset=cifar10.1@40-1")
    assert (config["K"], config["w_rot"], config["warmup_kimg"]) == (1, 2.0, 8192.0)
    assert set(preset) == {"K", "w_rot", "warmup_kimg"}
    config, preset = parse(ReMixMatch, "--dataset=cifar10.1@250-1")
    assert (config["K"], config["w_rot"], config["uratio"]) == (8, 0.5, 1) and not preset
    assert parse(ReMixMatch, "--dataset=cifar10.1@40-1", "--K=4")[0]["K"] == 4
    assert parse(UDA, "--dataset=cifar10.1@40-1")[0]["augment"] == "d.d.rac"
    assert parse(UDA, "--dataset=cifar10.1@40-1", "--augment=d.d.d")[0]["augment"] == "d.d.d"
    assert cssl.method("vat") is VAT  # not the class it builds on
    assert parse(FullySupervised, "--dataset=cifar10.2@40-1")[0]["dataset"] == "cifar10.2@all-1"
    assert parse(VAT, "--dataset=cifar100.1@400-1")[0]["wd"] == 0.02  # the preset is for L2 in the loss
    assert parse(UDA, "--dataset=cifar100.1@400-1")[0]["wd"] == 0.001
    with pytest.raises(UserError, match="wu"):
        parse(PiModel, "--wu=2")
    with pytest.raises(UserError, match="half precision rounds away"):
        parse(VAT, "--mixed_precision=float16")
    with pytest.raises(UserError, match="T=0"):
        parse(MixMatch, "--T=0")
    assert "40 labels: K 1, w_rot 2.0" in " ".join(cli.help_text(ReMixMatch).split())
    assert "any: augment d.d.rac" in " ".join(cli.help_text(UDA).split())


DEFAULTS = {
    PiModel: dict(consistency_weight=10, warmup_pos=0.4), PseudoLabel: dict(consistency_weight=1, threshold=0.95),
    MeanTeacher: dict(consistency_weight=50, warmup_pos=0.4, lr=0.03, wd=0.0005),
    VAT: dict(vat=0.3, vat_eps=6, entmin_weight=0.06, wd=0.02, lr=0.002, warmup_pos=0.4),
    ICT: dict(consistency_weight=50, beta=0.5, wd=0.02, lr=0.002), MixMatch: dict(w_match=100, beta=0.5, T=0.5, K=2),
    UDA: dict(wu=1, we=0, confidence=0.95, temperature=1, uratio=7, tsa="no"),
    ReMixMatch: dict(K=8, w_match=1.5, w_kl=0.5, w_rot=0.5, warmup_kimg=1024, beta=0.75, T=0.5)}


@pytest.mark.parametrize("method", DEFAULTS)
def test_defaults_are_those_of_the_comparison(method):
    options = dataclasses.asdict(method.Options())
    assert {name: options[name] for name in DEFAULTS[method]} == DEFAULTS[method]
    assert options["uratio"] == (7 if method is UDA else 1)
