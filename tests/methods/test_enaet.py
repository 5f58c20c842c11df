"""EnAET: transformations against Pillow and worked numbers, losses and steps re-derived in NumPy, two optimisers."""
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from classic import BATCH, CLASSES, SEED, TOLERANCE, make, views_of
from helpers import assert_continues, cross_entropy, kl, sharpen, softmax, spy, strategy_of
from PIL import Image, ImageEnhance

from cssl import cli
from cssl.enaet import EnAET
from cssl.mixmatch import MixMatch
from libml import networks
from libml.augment import to_float, transformations
from libml.learn import losses, mixing
from libml.learn.step import Step
from libml.learn.update import LOSS_SEEDS
from libml.randomness import fold_in

# Transformations.

SHIFTS = np.array([[4, -4], [0, 0], [-2, 1], [3, 0]])


@pytest.mark.parametrize("scale, turns, shifts, coefficients", [
    (1.0, 0, 0 * SHIFTS, [1, 0, 0, 0, 1, 0, 0, 0]), (1.0, 1, 0 * SHIFTS, [0, 1, 0, -1, 0, 32, 0, 0]),
    (1.2, 0, 0 * SHIFTS, [0.833333, 0, 2.75, 0, 0.833333, 2.75, 0, 0]),
    (1.0, 0, SHIFTS, [1.03843, 0.028845, -4.03834, -0.120457, 0.843199, 3.854622, -0.002743, -0.001232])])
def test_projective_coefficients(scale, turns, shifts, coefficients):
    points = transformations.corners(tf.constant([scale], tf.float64), tf.constant([turns]), tf.constant(shifts[None]),
                                     32, 32)
    np.testing.assert_allclose(transformations.projective(points, 32, 32)[0], coefficients, atol=1e-6)


def test_projective_solves_the_linear_system():
    """Eight equations: four points go to the corners of an image that is not square."""
    generator = np.random.RandomState(0)
    height, width = 24, 40
    corners = np.array([[0, 0], [width, 0], [width, height], [0, height]])
    points = corners * generator.uniform(0.8, 1.2, (10, 1, 1)) + generator.randint(-3, 4, (10, 4, 2))
    found = transformations.projective(tf.constant(points), height, width)
    for four, ours in zip(points, found.numpy(), strict=True):
        rows, values = [], []
        for (x, y), (u, v) in zip(four, corners, strict=True):
            rows += [[x, y, 1, 0, 0, 0, -u * x, -u * y], [0, 0, 0, x, y, 1, -v * x, -v * y]]
            values += [u, v]
        np.testing.assert_allclose(ours, np.linalg.solve(rows, values), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("scale, shear, coefficients", [
    (1.1, 15, [-0.24359, 0.909091, 8.06819, -0.94116, 0, 34.852623]),
    (1.1, 0, [0, 0.909091, 3.318182, -0.909091, 0, 34.227273]), (1, 0, [0, 1, 2, -1, 0, 36])])
def test_affine_coefficients(scale, shear, coefficients):
    found = transformations.affine(*(tf.constant([value], tf.float32) for value in (90, (3, -2), scale, shear)), 32, 32)
    np.testing.assert_allclose(found[0], [*coefficients, 0, 0], atol=1e-5)  # an angle in float32


def test_bilinear_is_pillow_s():
    generator = np.random.RandomState(1)
    images = generator.randint(0, 256, (24, 20, 28, 3)).astype(np.uint8)
    angle = generator.uniform(-math.pi, math.pi, 24)
    coefficients = np.stack([np.cos(angle), np.sin(angle), generator.uniform(-10, 20, 24), -np.sin(angle),
                             np.cos(angle), generator.uniform(-10, 20, 24), generator.uniform(-0.02, 0.02, 24),
                             generator.uniform(-0.01, 0.01, 24)], -1)
    coefficients[0] = [1, 0, 0, 0, 1, 0, 0, 0]
    coefficients[::2, 6:] = 0
    found = transformations.bilinear(tf.constant(images), tf.constant(coefficients)).numpy()
    np.testing.assert_array_equal(found[0], images[0])
    for image, ours, numbers in zip(images, found, coefficients, strict=True):
        wanted = Image.fromarray(image).transform((28, 20), Image.Transform.PERSPECTIVE, tuple(numbers),
                                                  Image.Resampling.BILINEAR)
        np.testing.assert_array_equal(ours, wanted)


def test_transformed_images_are_what_their_numbers_say():
    """Every image is made again, by Pillow and from the target alone."""
    images = np.random.RandomState(2).randint(0, 256, (40, 32, 32, 3)).astype(np.uint8)
    found = transformations.transform(tf.constant(images), SEED)
    assert {name: target.shape[1] for name, (_, target) in found.items()} == transformations.NUMBERS
    scale = np.array([1, 1, 20, 1, 1, 20, 0.015, 0.015])

    def matrix(target):
        cos, sin, x, y, size, shear = [*target, *[0.0] * (6 - len(target))]
        angle, shear = math.atan2(sin, cos), math.radians(30 * shear)
        linear = np.array([[math.cos(angle + shear), math.sin(angle + shear)], [-math.sin(angle), math.cos(angle)]])
        linear /= (1 + 0.2 * size) * math.cos(shear)
        offset = 16.5 - linear @ (16.5 + 6.4 * np.array([x, y]))
        return [*linear[0], offset[0], *linear[1], offset[1], 0, 0]

    for name, (changed, target) in found.items():
        wrong = 0
        for image, ours, numbers in zip(images, changed.numpy(), target.numpy().astype(float), strict=True):
            wanted = Image.fromarray(image)
            if name == "ccbs":
                for operation, factor in zip((ImageEnhance.Color, ImageEnhance.Contrast, ImageEnhance.Brightness,
                                              ImageEnhance.Sharpness), numbers, strict=True):
                    wanted = operation(wanted).enhance(factor)
                np.testing.assert_array_equal(ours, wanted)
                continue
            coefficients = numbers * scale + [0, 0, 16, 0, 0, 16, 0, 0] if name == "projective" else matrix(numbers)
            wanted = wanted.transform((32, 32), Image.Transform.PERSPECTIVE, tuple(coefficients),
                                      Image.Resampling.BILINEAR)
            wrong += (np.abs(ours.astype(int) - wanted) > 1).mean()
        # Targets are float32: a value may round to the next level, a pixel on the border may fall off the image.
        assert wrong / len(images) < 2e-3, name
    angles = np.arctan2(found["affine"][1][:, 1], found["affine"][1][:, 0])
    assert angles.min() < -2 and angles.max() > 2  # all around
    for name, low, high in (("affine", -1.0001, 1.0001), ("ccbs", 0.2, 1.8)):
        target = found[name][1].numpy()
        assert low <= target.min() < low + 0.25 and high - 0.25 < target.max() <= high
    np.testing.assert_array_equal(found["affine"][1][:, :5], found["similarity"][1])  # one draw for all three
    np.testing.assert_array_equal(found["affine"][1][:, :4], found["euclidean"][1])
    pixels = found["affine"][1].numpy()[:, 2:4] * 6.4
    np.testing.assert_allclose(pixels, np.round(pixels), atol=1e-5)


def test_targets_of_the_worked_example():
    found = np.array([0, 1, 3 / 6.4, -2 / 6.4, (1.1 - 1) / 0.2, 15 / 30])
    np.testing.assert_allclose(found, [0, 1, 0.46875, -0.3125, 0.5, 0.5])
    centre, spread = transformations._CENTRE, transformations._SPREAD
    for coefficients, target in (([1, 0, 0, 0, 1, 0, 0, 0], [1, 0, -0.8, 0, 1, -0.8, 0, 0]),
                                 ([0, 1, 0, -1, 0, 32, 0, 0], [0, 1, -0.8, -1, 0, 0.8, 0, 0])):
        np.testing.assert_allclose((coefficients - centre) / spread, target)


def test_mosaic():
    images = np.random.RandomState(3).randint(0, 256, (30, 32, 32, 3)).astype(np.uint8)
    centres = np.random.RandomState(4).uniform(size=(30, 2)).astype(np.float32)
    found = transformations.mosaic(tf.constant(images), tf.constant(centres)).numpy()
    clipped = 0
    for image, ours, (x, y) in zip(images, found, centres, strict=True):
        column, row = int(x * 32), int(y * 32)
        part = np.s_[max(row - 4, 0):row + 4, max(column - 4, 0):column + 4]
        wanted = image.copy()
        wanted[part] = image[part].mean((0, 1)).astype(np.uint8)
        clipped += image[part].size < 8 * 8 * 3
        np.testing.assert_array_equal(ours, wanted)
    assert 0 < clipped < 30


# The method.

def test_decoder_rate():
    model = make(EnAET)
    model.total_images = 1024 * 1000
    rates = [float(model.decoder_rate(tf.constant(1000 * epoch))) for epoch in (0, 1, 100, 250, 500, 750, 1000)]
    np.testing.assert_allclose(rates, [0.1, 0.099999, 0.091406, 0.055, 0.01, 0.0055, 0.001], rtol=1e-5)
    assert float(model.learning_rate(tf.constant(0))) == pytest.approx(0.002)


def logits_of(model, images, **options):
    found, statistics = model.network.stateless_call(
        [tf.convert_to_tensor(v) for v in model.network.trainable_variables],
        [tf.convert_to_tensor(v) for v in model.network.non_trainable_variables], images, training=True, **options)
    return found, statistics


@pytest.mark.parametrize("time, weights", [(0.05, [0.5, 0.375, 0.25, 0.1, 0.025]), (0.6, [1, 0.75, 0.5, 0.2, 0.05])])
def test_losses(time, weights, monkeypatch):
    """The five decoders' weights grow up to a tenth of the run, the guesses' up to a twentieth."""
    changed, mosaics, mixtures = (spy(monkeypatch, transformations, "transform"),
                                  spy(monkeypatch, transformations, "mosaic"), spy(monkeypatch, mixing, "mixup"))
    model = make(EnAET, warmup_pos=1.0)
    views = views_of(model)
    step = Step(model, SEED, model.update.read())
    step.images_seen = tf.constant(int(time * 1000), tf.int64)
    loss, scalars, *_ = model.compute_losses(views, step)
    first, second = np.split(views["weak"].numpy(), 2)
    third = to_float(mosaics[0]).numpy()
    (logits, original), _ = logits_of(model, first, outputs=("logits", "map"))
    predictions = [softmax(np.float64(x)) for x in (logits, *(logits_of(model, y)[0] for y in (second, third)))]
    guess = sharpen(np.mean(predictions, 0), 0.5)
    divergences, errors = [kl(guess, predictions[2]).mean()], []
    for name, (images, target) in changed[0].items():
        (logits, decoded), _ = logits_of(model, to_float(images), outputs=("logits", name), original=original)
        assert decoded.shape == target.shape
        divergences.append(kl(guess, softmax(np.float64(logits))).mean())
        errors.append(((decoded.numpy() - target.numpy()) ** 2).mean())
        np.testing.assert_allclose(scalars[f"losses/{name}"], errors[-1], **TOLERANCE)
    mixed, targets = (x.numpy() for x in mixtures[0])
    assert len(mixed) == 4 * BATCH
    parts = mixing.interleave(tf.split(mixed, 4))
    results = [logits_of(model, part) for part in parts]
    logits = np.concatenate(mixing.interleave([result[0] for result in results])).astype(np.float64)
    match = ((softmax(logits[BATCH:]) - targets[BATCH:]) ** 2).mean()
    expected = (cross_entropy(logits[:BATCH], targets[:BATCH]).mean() + 75 * time * match + np.dot(weights, errors) +
                np.mean(divergences))
    np.testing.assert_allclose(loss, expected, **TOLERANCE)
    for found, wanted in zip(step.new_statistics, results[0][1], strict=True):  # of the first mixed pass alone
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-7)
    decoders = [v for decoder in model.network.decoders.values() for v in decoder.non_trainable_variables]
    assert len(decoders) == 5 * 6 and all(float(tf.reduce_max(tf.abs(v))) in (0, 1) for v in decoders)  # not moved


def test_one_mixing_weight_for_the_batch():
    images = tf.random.stateless_uniform([6, 2, 2, 3], SEED)
    mixed, targets = mixing.mixup(images, tf.eye(6), beta=0.75, seed=SEED, one_weight=True)
    largest = tf.reduce_max(targets, -1).numpy()
    np.testing.assert_array_equal(largest[largest < 1], largest[largest < 1][0])
    assert (largest < 1).sum() >= 4  # an image may be its own partner
    np.testing.assert_allclose(mixed, np.tensordot(targets, images, 1), rtol=1e-5)


def test_without_its_own_terms_it_is_mixmatch():
    options = dict(beta=0.0, w_match=20.0, T=0.4)
    ours = make(EnAET, w_aet=0.0, w_kl=0.0, mosaic=False, warmup_pos=0.0, **options)
    theirs = make(MixMatch, warmup_kimg=0.0, **options)
    views = views_of(ours)
    found, wanted = (model.compute_losses(views, Step(model, SEED, model.update.read())) for model in (ours, theirs))
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)


def test_gradients_go_through_both_images_and_stop_at_the_guess(monkeypatch):
    model = make(EnAET, w_match=0.0, w_kl=0.0, beta=0.0)
    views = views_of(model)
    step = Step(model, SEED, model.update.read())
    step.images_seen = tf.constant(1000, tf.int64)
    with tf.GradientTape(persistent=True) as tape:
        weak = tf.Variable(views["weak"])
        tape.watch(step.weights)
        loss, scalars, *_ = model.compute_losses(views | {"weak": tf.convert_to_tensor(weak)}, step)
    # The transformed image is made of bytes, which have no gradient: this one comes through the original's map.
    first, second = np.split(tape.gradient(scalars["losses/aet"], weak).numpy(), 2)
    assert np.abs(first).max() > 1e-6 and np.abs(second).max() == 0
    gradients = tape.gradient(scalars["losses/aet"], step.weights, unconnected_gradients="zero")
    moved = {name for name, group in model.update.groups.items()
             if any(np.abs(gradients[i]).max() > 1e-6 for i in group.indices)}
    assert moved == {"network", "decoders"}
    whole = make(EnAET, beta=0.0, warmup_pos=0.0)
    found = whole.update.backward(views, SEED, whole.update.read())["gradients"]
    real = losses.sharpen
    monkeypatch.setattr(losses, "sharpen", lambda p, t: tf.stop_gradient(real(tf.stop_gradient(p), t)))
    for ours, wanted in zip(found, whole.update.backward(views, SEED, whole.update.read())["gradients"], strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=1e-6)


def test_adam_for_the_network_and_sgd_for_the_decoders():
    model = make(EnAET, wd=0.5, decoder_wd=0.1)
    views, before = views_of(model), model.update.read()
    seed = fold_in(model.step_seed(before.updates), LOSS_SEEDS)
    gradients = model.update.backward(views, seed, before)["gradients"]
    scalars = model.train_on_views(views)
    np.testing.assert_allclose([scalars["monitors/lr"], scalars["monitors/lr_decoders"]], [0.002, 0.1], rtol=1e-6)
    network, decoders = (set(group.indices) for group in model.update.groups.values())
    assert len(network) + len(decoders) == len(gradients) and len(decoders) > len(network)
    for i, (v, old, g) in enumerate(zip(model.network.trainable_variables, before.weights, gradients, strict=True)):
        old, g = old.numpy().astype(np.float64), g.numpy().astype(np.float64)
        if i in network:  # the first step of Adam is the gradient's sign, but for epsilon; all weights shrink
            wanted = old * (1 - 0.5 * 0.002) - 0.002 * g / (np.abs(g) + 1e-8 / np.sqrt(0.001))
            clear = np.abs(g) > 1e-4  # rounding of vanishing gradients, which Adam makes a full step
            np.testing.assert_allclose(v.numpy()[clear], wanted[clear], rtol=1e-4, atol=1e-6)
        else:  # theirs is part of the gradient
            np.testing.assert_allclose(v.numpy(), old - 0.1 * 1.9 * (g + 0.1 * old), rtol=1e-4, atol=1e-6)
    norm = sum(0.5 * np.sum(np.square(before.weights[i], dtype=np.float64)) for i in decoders)
    without = make(EnAET, wd=0.5, decoder_wd=0.0).train_on_views(views)["losses/total"]
    np.testing.assert_allclose(scalars["losses/total"] - without, 0.1 * norm, rtol=1e-4)  # only theirs is in the loss


@pytest.mark.slow
def test_two_replicas_average_their_gradients():
    """Adam's steps blow rounding up, its first moments do not: they are a tenth of the mean gradient. From a checkpoint
    both optimisers go on to the same bits."""
    strategy = strategy_of(2)
    single = make(EnAET)
    parts = [views_of(single, seed=seed) for seed in (0, 1)]
    for part in parts:
        part.pop("unlabeled_label")
    key = tf.constant([0, 0], tf.int64)
    fold = tf.random.experimental.stateless_fold_in
    found = [single.update.backward(part, fold(fold(key, i, alg="philox"), 2, alg="philox"), single.update.read())
             for i, part in enumerate(parts)]
    mean = tf.nest.map_structure(lambda a, b: (a + b) / 2, *found)
    with strategy.scope():
        model = make(EnAET)
    # Without a graph, as the other side: a graph's optimiser may round a pixel to its neighbouring level.
    views = strategy.experimental_distribute_values_from_function(
        lambda context: parts[context.replica_id_in_sync_group])
    def update():
        strategy.run(model.train_on_views, args=(views,))

    update()
    slots = [v.numpy() for v in model.slots]
    network, decoders = (group.indices for group in model.update.groups.values())
    for slot, i in zip(slots, network, strict=False):
        np.testing.assert_allclose(slot, 0.1 * mean["gradients"][i].numpy(), rtol=1e-3, atol=1e-6)
    for slot, i in zip(slots[2 * len(network):], decoders, strict=True):
        decayed = mean["gradients"][i] + model.options.decoder_wd * single.network.trainable_variables[i]
        np.testing.assert_allclose(slot, decayed.numpy(), rtol=1e-3, atol=1e-5)
    for ours, wanted in zip(model.network.non_trainable_variables, mean["statistics"], strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-6)
    assert_continues(model, update)


def test_transformations_are_compiled_on_gpus():
    """A GPU's single kernels would have 2,859 launches, and images of integers in the host's memory."""
    model = make(EnAET)
    model.augmenter = SimpleNamespace(on_gpu=True, jit_compile=True, learns_rates=False)
    views = {name: value for name, value in views_of(model).items() if name != "unlabeled_label"}
    loss = tf.function(lambda views: model.compute_losses(views, Step(model, SEED, model.update.read())).loss)
    graph = loss.get_concrete_function(views).graph
    compiled = [function.signature.name for function in graph.as_graph_def().library.function
                if function.attr["_XlaMustCompile"].b]
    assert sorted(re.sub(r"__inference_|_\d+", "", name) for name in compiled) == ["mosaic", "transform"]


@pytest.mark.slow
def test_transformations_compile():
    """All that XLA compiles of this method alone; images may differ by a level, where it rounds once and not twice."""
    images = tf.constant(np.random.RandomState(5).randint(0, 256, (4, 16, 16, 3)).astype(np.uint8))

    def transform():
        return transformations.transform(images, SEED), transformations.mosaic(images, mixing.uniform([4, 2], SEED))

    pairs = zip(tf.nest.flatten(tf.function(transform, jit_compile=True)()), tf.nest.flatten(transform()), strict=True)
    for found, wanted in pairs:
        if wanted.dtype == tf.uint8:
            found, wanted = tf.cast(found, tf.int32), tf.cast(wanted, tf.int32)
            assert (np.abs(found - wanted) > 1).mean() < 0.01  # beside those that fall off the image
        else:
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_settings_of_its_authors():
    def parse(*flags):
        return cli.configuration(EnAET, ["program", *flags])

    for dataset, weight in (("cifar10", 75), ("cifar100", 150), ("svhn", 250), ("stl10", 50)):
        config = parse(f"--dataset={dataset}.1@1000-1")
        assert config.values()["w_match"] == weight and ("w_match" in config.presets) == (dataset != "cifar10")
        assert config.values()["warmup_pos"] == (500 if dataset == "stl10" else 50) / 1024
    assert parse("--dataset=svhn.1@1000-1", "--w_match=3").values()["w_match"] == 3
    assert config.values()["batch"] == 128 and config.values()["uratio"] == 1 and config.values()["wd"] == 0.02
    assert "svhn: w_match 250.0" in " ".join(cli.help_text(EnAET).split())


def test_needs_stages(program):
    with pytest.raises(ValueError, match="Decoders need the stages of a wide residual net; got CNN13"):
        networks.Decoders(networks.build("cnn13", num_classes=3, image_shape=(16, 16, 3), filters=4), {"affine": 6})
    done = program(EnAET, "--dataset=digits.1@40-1", "--arch=cnn13", "--filters=16", "--train_steps=1", code=2)
    assert "use --arch=resnet" in done.stderr


def test_decoders_are_the_last_stage_again():
    network = networks.build("resnet", num_classes=CLASSES, image_shape=(32, 32, 3), filters=8, repeat=2, seed=0)
    decoders = networks.Decoders(network, {"affine": 6, "ccbs": 4}, seed=0)
    images = tf.zeros([2, 32, 32, 3])
    logits, features = decoders(images, outputs=("logits", "map"))
    np.testing.assert_array_equal(logits, network(images))
    assert features.shape == (2, 16, 16, 16)
    assert decoders(images, outputs=("affine",), original=features)[0].shape == (2, 6)
    decoder = decoders.decoders["affine"]
    stage = sum(networks.count_weights(block) for block in network.blocks[4:]) + networks.count_weights(network.norm)
    assert networks.count_weights(decoder) == stage + 2 * 32 * 6 + 6
    kernels = [decoders.decoders[name].blocks[0].conv1.kernel.numpy() for name in ("affine", "ccbs")]
    assert np.abs(kernels[0] - kernels[1]).max() > 0.01
