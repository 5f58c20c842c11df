"""Views, policies, CTAugment's state, RandAugment's samples, the --augment language, and what runs on a GPU."""

import functools

import helpers
import numpy as np
import pytest
import tensorflow as tf
from helpers import devices_of, real_images, strategy_of

from libml.augment import (
    AUTO_OPS,
    OPS,
    RAND_OPS,
    Augmenter,
    AugmentSpec,
    AutoAugment,
    RandAugment,
    autoaugment,
    ctaugment,
    parse_augment,
    parse_policy,
    pillow_policy,
    run_policy,
    to_float,
    to_uint8,
)
from libml.errors import UserError
from libml.learn.packing import exchange

try:  # at import, before anything starts TensorFlow's devices; harmless where it was done already
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 4)
except RuntimeError:
    pass

DIGITS = dict(image_shape=(16, 16, 3), mirror=False, shift=2)
CIFAR = dict(image_shape=(32, 32, 3), mirror=True, shift=4)


def seed_of(*numbers: int) -> tf.Tensor:
    return tf.constant(numbers, tf.int32)


def random_images(n: int, size: int = 16, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, size, size, 3), dtype=np.uint8)


def random_policy(table, n: int, depth: int, seed: int = 0) -> dict[str, tf.Tensor]:
    rng = np.random.default_rng(seed)
    return {"ops": tf.constant(rng.integers(0, len(table), (n, depth)), tf.int32),
            "params": tf.constant(rng.random((n, depth, 3)), tf.float32)}


# The language -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("text, expected", [
    ("d.d.d", AugmentSpec("d", "d", "d")),
    ("d.d.ra", AugmentSpec("d", "d", "ra")),
    ("x.m.x", AugmentSpec("x", "m", "x")),
    ("rac.d.d", AugmentSpec("rac", "d", "d")),
    ("d.aac.m.x", AugmentSpec("d", "m", "x", "aac")),
])
def test_parse(text, expected):
    assert parse_augment(text) == expected and str(expected) == text


def test_parse_policy():
    assert parse_policy("ra") == RandAugment(2, 1, 9, 0.5, 0)
    assert parse_policy("rac") == RandAugment(2, 1, 9, 0.5, 50)
    assert parse_policy("rac6") == RandAugment(2, 1, 5, 0.5, 50)  # below 6
    assert parse_policy("r3_7_25") == RandAugment(3, 7, 7, 1.0, 25)
    assert parse_policy("r4_15_75") == RandAugment(4, 15, 15, 1.0, 75)
    assert parse_policy("aa") == AutoAugment(0) and parse_policy("aac") == AutoAugment(50)
    assert parse_policy("d") is None and parse_policy("x") is None


def test_whose_policy_and_what_is_under_it():
    three, four, labeled = map(parse_augment, ("m.x.rac", "m.aac.x.rac", "aa.x.rac"))
    assert three.under("strong") == three.under("labeled_strong") == ("x", "rac")  # as strong views always were
    assert four.under("strong") == ("x", "rac") and four.under("labeled_strong") == ("m", "aac")
    assert labeled.labeled_policy and labeled.under("labeled") == ("d", "aa")
    assert [parse_augment(text).uses_ctaugment for text in ("d.d.x", "d.d.d", "d.d.d.x", "d.x.d.d")] == [
        False, True, True, True]


@pytest.mark.parametrize("text, reason", [
    ("", "1 part instead of 3 or 4"), ("d.d", "2 parts"), ("d.d.d.d.d", "5 parts"), ("d..d", "unknown weak part ''"),
    ("q.d.d", "unknown labeled part 'q'"), ("d.r2_9_50.d", "the weak part cannot"), ("d.d.aa.d", "weak part cannot"),
    ("d.d.m", "unknown strong part 'm'"), ("d..d.d", "unknown labeled_strong part ''"),
    *((f"d.d.{policy}", f"unknown strong part '{policy}'") for policy in (
        "r0_9_50", "r2_16_50", "r2_0_50", "r2_9_101", "rac1", "rac10")),
    ("d.m.d.d", "unknown labeled_strong part 'm'"),
    ("d.d.r2_9", "unknown strong part 'r2_9'"), ("d.d.r2_9_50x", "unknown strong part"), ("D.d.d", "unknown labeled"),
])
def test_parse_errors(text, reason):
    with pytest.raises(ValueError) as caught:
        parse_augment(text)
    message = str(caught.value)
    assert message.startswith(f"--augment={text}: ") and reason in message and "\n" not in message
    assert "labeled.weak.strong" in message and "for example d.d.d" in message


# Conversions and weak views -----------------------------------------------------------------------------------------

def test_conversions():
    levels = np.arange(256, dtype=np.uint8)
    expected = levels / 127.5 - 1
    # One float32 step near 1 is 1.2e-7: TensorFlow may multiply by the reciprocal instead of dividing.
    np.testing.assert_allclose(to_float(levels), expected, rtol=0, atol=1.3e-7)
    assert np.array_equal(to_uint8(to_float(levels)), levels)
    assert np.array_equal(to_uint8(tf.constant([-2.0, -1.0, 0.0, 1.0, 2.0])), [0, 0, 128, 255, 255])  # 127.5 to even


@pytest.mark.parametrize("settings", [CIFAR, DIGITS], ids=["cifar", "digits"])
def test_weak_view_is_a_mirrored_and_shifted_image(settings):
    size, shift = settings["image_shape"][0], settings["shift"]
    augmenter = Augmenter("d.m.x", jit_compile=False, **settings)
    images = random_images(64, size)
    candidates = []
    for flip in (False, True):
        padded = np.pad(images[:, :, ::-1] if flip else images, ((0, 0), (shift,) * 2, (shift,) * 2, (0, 0)), "reflect")
        starts = range(2 * shift + 1)
        candidates += [padded[:, y : y + size, x : x + size] for y in starts for x in starts]
    view = augmenter.labeled(images, seed_of(3, 4)).numpy()
    same = (np.stack(candidates) == view).all((2, 3, 4))  # [which, image]
    assert (same.sum(0) == 1).all()  # each view is exactly one mirror and shift of its image
    flipped = same[len(candidates) // 2 :].any(0)
    assert 16 < flipped.sum() < 48 if settings["mirror"] else not flipped.any()  # 64 fair coins: 32 +- 4 sigma
    assert len(set(same.argmax(0))) > 15  # of 64 draws from at least 25
    mirrored = augmenter.weak(images, seed_of(3, 4)).numpy()  # the weak part is m: mirrored or not, never shifted
    as_is, turned = (mirrored == images).all((1, 2, 3)), (mirrored == images[:, :, ::-1]).all((1, 2, 3))
    assert (as_is ^ turned).all() and 16 < turned.sum() < 48


def test_none_means_untouched():
    images = random_images(4)
    augmenter = Augmenter("x.x.x", jit_compile=False, **DIGITS)
    assert np.array_equal(augmenter.labeled(images, seed_of(0, 0)), images)
    assert np.array_equal(augmenter.weak(images, seed_of(0, 0)), images)
    np.testing.assert_allclose(augmenter.strong(images, seed_of(0, 0)), images / 127.5 - 1, atol=1.3e-7)


def test_seeds():
    images = random_images(32)
    augmenter = Augmenter("d.d.d", jit_compile=False, **DIGITS)
    for view in (augmenter.labeled, augmenter.weak, augmenter.strong, lambda *a: augmenter.probe(*a)[0]):
        first, second, other = (view(images, seed_of(*s)).numpy() for s in ((1, 2), (1, 2), (1, 3)))
        assert np.array_equal(first, second)
        assert not np.array_equal(first, other)
    # One seed, independent streams: the labelled view, the weak view and the one under the strong view all differ.
    offsets = augmenter.sample_strong(32, seed_of(1, 2))["offset"].numpy()
    under = np.stack([np.pad(i, ((2, 2), (2, 2), (0, 0)), "reflect")[y : y + 16, x : x + 16]
                      for i, (y, x) in zip(images, offsets, strict=True)])
    views = [augmenter.labeled(images, seed_of(1, 2)).numpy(), augmenter.weak(images, seed_of(1, 2)).numpy(), under]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert (views[a] == views[b]).all((1, 2, 3)).sum() < 10  # by chance 1 in 25: 32/25 expected
    assert np.array_equal(augmenter.weak(images, tf.constant([1, 2], tf.int64)).shape, images.shape)


def test_samples_are_uniform():
    n = 20000
    samples = Augmenter("d.d.d", jit_compile=False, **CIFAR).sample_strong(n, seed_of(0, 1))

    def check(counts: np.ndarray) -> None:
        expected = counts.sum() / len(counts)
        assert np.abs(counts - expected).max() < 5 * np.sqrt(expected)  # 5 sigma; the seed is fixed

    check(np.bincount(samples["ops"].numpy().ravel(), minlength=len(OPS)))
    check(np.bincount(samples["offset"].numpy().ravel(), minlength=9))
    check(np.bincount(samples["flip"].numpy().astype(int), minlength=2))
    check(np.histogram(samples["centre"].numpy(), 32, (0, 1))[0])
    assert np.corrcoef(samples["ops"].numpy().T)[0, 1] < 0.03  # slots are independent: 1/sqrt(n) is 0.007


# Policies and whole pipelines against Pillow --------------------------------------------------------------------------

def test_mixed_policies():
    images, policy = random_images(120), random_policy(OPS, 120, 3)
    assert np.array_equal(run_policy(OPS, images, policy), pillow_policy(OPS, images, policy))


def test_every_pair_of_auto_augment_ops():
    ops = np.stack(np.meshgrid(np.arange(16), np.arange(16)), -1).reshape(-1, 2)  # transparency passes between ops
    images = np.insert(random_images(len(ops)), 3, 255, axis=3)
    policy = random_policy(AUTO_OPS, len(ops), 2) | {"ops": tf.constant(ops, tf.int32)}
    expected = pillow_policy(AUTO_OPS, images, policy)
    assert np.array_equal(run_policy(AUTO_OPS, tf.constant(images), policy), expected)
    assert (expected[..., 3] == 0).any()


@pytest.mark.parametrize("spec, jit_compile, on_gpu", [
    ("d.d.d", False, False), ("d.d.d", True, True), ("d.d.rac", False, False), ("d.d.aac", False, False),
    *(pytest.param(spec, True, on_gpu, marks=pytest.mark.slow) for spec, on_gpu in (
        ("d.d.d", False), ("d.d.aac", False), ("d.d.aac", True)))])
def test_pipeline_on_real_images(spec, jit_compile, on_gpu):
    """In the forms for ordinary kernels, for XLA on a CPU and for XLA on a GPU, all of which run anywhere.

    What XLA compiles of RandAugment is AutoAugment's, with fewer operations.
    """
    images = real_images()
    augmenter = Augmenter(spec, jit_compile=jit_compile, policies="cifar10", **CIFAR)
    augmenter.on_gpu = on_gpu
    if augmenter.learns_rates:
        augmenter.rates.assign(tf.random.stateless_uniform(augmenter.rates.shape, seed_of(0, 0), 0.5, 1.0))
    strong = tf.function(augmenter.strong, autograph=False)
    for s in range(3):
        view = strong(images, seed_of(s, 1)).numpy()
        samples = augmenter.sample_strong(len(images), seed_of(s, 1))
        assert view.dtype == np.float32 and np.abs(view).max() <= 1
        assert np.array_equal(view, augmenter.strong_reference(images, samples))  # bit for bit
    lopsided = samples | {"ops": tf.ones_like(samples["ops"]) * [1, 2]}  # one operation has all images, the others none
    # In a graph XLA has this code already; it compiles once more what is called eagerly.
    view_of = tf.function(augmenter.strong_view, autograph=False) if jit_compile else augmenter.strong_view
    assert np.array_equal(view_of(images, lopsided), augmenter.strong_reference(images, lopsided))


@pytest.mark.parametrize("spec, part", [
    ("d.d.ra", "strong"), ("x.m.r3_9_40", "strong"), ("d.d.x", "strong"), ("m.x.d", "strong"),
    ("d.d.r1_1_100", "strong"), ("d.d.r4_15_75", "strong"), ("rac4.d.d", "labeled"), ("m.aac.d.x", "labeled_strong"),
])
def test_pipeline_on_random_images(spec, part):
    augmenter = Augmenter(spec, jit_compile=False, image_shape=(20, 28, 3), mirror=True, shift=3, depth=3,
                          policies="svhn")
    images = np.random.default_rng(1).integers(0, 256, (48, 20, 28, 3), dtype=np.uint8)
    view = tf.function(functools.partial(augmenter.strong, part=part), autograph=False)(images, seed_of(5, 6)).numpy()
    samples = augmenter.sample_strong(48, seed_of(5, 6), part=part)
    assert np.array_equal(view, augmenter.strong_reference(images, samples, part))


@pytest.mark.parametrize("cutout", ["no", "only"])
def test_ctaugment_without_cutout_and_cutout_alone(cutout):
    augmenter, whole = (Augmenter("x.x.d", jit_compile=False, cutout=c, **CIFAR) for c in (cutout, "yes"))
    images = np.maximum(random_images(32, 32), 128)  # lighter than what cutout leaves
    samples, both = (a.sample_strong(32, seed_of(2, 3)) for a in (augmenter, whole))
    view = augmenter.strong_view(images, samples).numpy()
    assert np.array_equal(view, augmenter.strong_reference(images, samples))
    grey = np.float32(127) / np.float32(127.5) - np.float32(1)
    plain = images / np.float32(127.5) - np.float32(1)
    if cutout == "no":  # the policy as it would be with cutout
        assert np.array_equal(samples["ops"], both["ops"]) and np.array_equal(samples["params"], both["params"])
        assert np.array_equal(view[:4, :2], augmenter.strong_view(images, both).numpy()[:4, :2])
        assert not (view == grey).all(-1).sum((1, 2)).min() and augmenter.learns_rates
    else:  # the image, and a hole of at most half the side
        hole = (view == grey).all(-1)
        assert np.array_equal(np.where(hole[..., None], plain, view), plain)
        assert (hole.sum((1, 2)) >= 64).all() and hole.sum((1, 2)).max() == 256
        assert not augmenter.learns_rates and "ops" not in samples


# AutoAugment --------------------------------------------------------------------------------------------------------

def test_auto_augment_policies_are_those_of_the_paper():
    ops, chances, levels = autoaugment.policies("cifar10")
    names = np.array(list(AUTO_OPS))
    assert ops.shape == (95, 2) and autoaugment.policies("svhn")[0].shape == (40, 2)
    assert names[ops[:2]].tolist() == [["Invert", "Contrast"], ["Rotate", "TranslateX"]]
    np.testing.assert_array_equal(chances[:2], np.float32([[0.1, 0.2], [0.7, 0.3]]))
    np.testing.assert_array_equal(levels[:2], [[7, 6], [2, 9]])


@pytest.mark.parametrize("name", ["cifar10", "svhn"])
def test_auto_augment_statistics(name):
    n = 40000
    augmenter = Augmenter("d.d.aac", jit_compile=False, policies=name, **CIFAR)
    samples = augmenter.sample_strong(n, seed_of(1, 1))
    found, identity = samples["ops"].numpy(), list(AUTO_OPS).index("Identity")
    ops, chances, levels = autoaugment.policies(name)
    for slot in range(2):
        expected = np.bincount(ops[:, slot], weights=chances[:, slot], minlength=len(AUTO_OPS)) / len(ops)
        expected[identity] += 1 - expected.sum()
        shares = np.bincount(found[:, slot], minlength=len(AUTO_OPS)) / n
        np.testing.assert_allclose(shares, expected, atol=5 * np.sqrt(0.25 / n))  # 5 sigma; the seed is fixed
    drawn = (samples["params"].numpy()[..., 0] * 16).astype(int)
    known = {(op, level) for slot in range(2) for op, level in zip(ops[:, slot], levels[:, slot], strict=True)}
    pairs = {(op, level) for op, level in zip(found.ravel(), drawn.ravel(), strict=True) if op != identity}
    assert pairs <= known and len(pairs) > 0.9 * len(known)
    # The two steps come from one policy: together they are seen only if some policy has both.
    both = {tuple(row) for row in found if identity not in row}
    assert both == {tuple(row) for row, chance in zip(ops, chances, strict=True) if chance.min() > 0}


def test_auto_augment_needs_policies():
    for spec in ("d.d.aa", "aac.d.d", "d.aa.d.d"):
        with pytest.raises(UserError, match=f"--augment={spec}: AutoAugment has policies for cifar10, cifar100"):
            Augmenter(spec, jit_compile=False, **DIGITS)


def test_strong_view_ends_with_cutout():
    augmenter = Augmenter("x.x.d", jit_compile=False, **CIFAR)
    white = np.full([32, 32, 32, 3], 255, np.uint8)
    samples = augmenter.sample_strong(32, seed_of(0, 0)) | {"ops": tf.fill([32, 2], list(OPS).index("identity"))}
    hole = augmenter.strong_view(white, samples).numpy() == np.float32(127) / np.float32(127.5) - np.float32(1)
    for mask, (x, y) in zip(hole[..., 0], samples["centre"].numpy(), strict=True):
        row, column = int(y * 32), int(x * 32)
        expected = np.zeros([32, 32], bool)
        expected[max(row - 8, 0) : row + 8, max(column - 8, 0) : column + 8] = True
        assert np.array_equal(mask, expected)


def test_rand_augment_hides_with_zero():
    augmenter = Augmenter("x.x.r1_9_50", jit_compile=False, **CIFAR)
    white = np.full([8, 32, 32, 3], 255, np.uint8)
    samples = augmenter.sample_strong(8, seed_of(0, 0)) | {
        "ops": tf.fill([8, 1], list(RAND_OPS).index("TranslateX")), "centre": tf.fill([8, 2], 0.5)}
    view = augmenter.strong_view(white, samples).numpy()
    right = samples["params"].numpy()[:, 0, 1] >= 0.5
    for image, positive in zip(view, right, strict=True):
        expected = np.full([32, 32, 3], image.max())
        expected[:, -9:] = 0 if positive else expected[:, -9:]
        expected[:, :9] = expected[:, :9] if positive else 0
        expected[8:24, 8:24] = 0
        assert np.array_equal(image, expected)
    assert 0 < right.sum() < 8


def test_rand_augment_truncates_bytes():
    from libml.augment import augmenter

    x = np.arange(256, dtype=np.uint8).astype(np.float32) / np.float32(127.5) - np.float32(1)
    expected = ((x * np.float32(0.5) + np.float32(0.5)) * np.float32(255)).astype(np.uint8)
    assert np.array_equal(augmenter._TRUNCATED, expected)
    assert 0 < (expected != np.arange(256)).sum() < 128 and (np.arange(256) - expected <= 1).all()


def test_rand_augment_statistics():
    n = 20000
    samples = Augmenter("d.d.ra", jit_compile=False, **CIFAR).sample_strong(n, seed_of(3, 3))
    ops = np.bincount(samples["ops"].numpy().ravel(), minlength=14) / (2 * n)
    sigma = np.sqrt(0.25 / (2 * n))
    np.testing.assert_allclose(ops[0], 0.5 + 0.5 / 14, atol=5 * sigma)  # not applied, or Identity itself
    np.testing.assert_allclose(ops[1:], 0.5 / 14, atol=5 * sigma)
    def magnitudes(spec):
        drawn = Augmenter(spec, jit_compile=False, **CIFAR).sample_strong(n, seed_of(3, 3))["params"].numpy()[..., 0]
        return np.bincount((drawn * 16).astype(int).ravel(), minlength=16) / drawn.size

    np.testing.assert_allclose(magnitudes("d.d.ra"), [0] + [1 / 9] * 9 + [0] * 6, atol=5 * sigma)
    np.testing.assert_allclose(magnitudes("d.d.rac5"), [0] + [1 / 4] * 4 + [0] * 11, atol=5 * sigma)
    assert magnitudes("d.d.rac2")[1] == magnitudes("d.d.r3_15_0")[15] == 1
    fixed = Augmenter("d.d.r3_4_0", jit_compile=False, **CIFAR).sample_strong(n, seed_of(3, 3))
    assert set((fixed["params"].numpy()[..., 0] * 16).astype(int).ravel()) == {4}
    np.testing.assert_allclose(np.bincount(fixed["ops"].numpy().ravel()) / (3 * n), 1 / 14, atol=5 * sigma)


# CTAugment ----------------------------------------------------------------------------------------------------------

def python_probabilities(rates: np.ndarray, bins: int, threshold: float, decay: float) -> np.ndarray:
    p = rates[:bins].astype(float) + (1 - decay)
    p = p / p.max()
    p[p < threshold] = 0
    return p / p.sum()


def test_training_policies_follow_the_rates():
    augmenter = Augmenter("d.d.d", jit_compile=False, **CIFAR)
    rates = np.random.default_rng(0).uniform(0.5, 1.0, augmenter.rates.shape).astype(np.float32)
    augmenter.rates.assign(rates)
    samples = augmenter.sample_strong(60000, seed_of(0, 9))
    ops, params = samples["ops"].numpy().ravel(), samples["params"].numpy().reshape(-1, ctaugment.PARAMETERS)
    assert params.min() >= 0 and params.max() < 1
    for i, op in enumerate(OPS.values()):
        for column, bins in enumerate(op.bins):
            u = params[ops == i, column]
            counts = np.histogram(u, bins, (0, 1))[0]
            p = python_probabilities(rates[i, column], bins, 0.80, 0.99)
            assert (p == 0).any()  # the threshold has something to do
            # 5 sigma; one more for numbers that fall on an edge and are counted in the neighbouring bin
            assert (np.abs(counts - len(u) * p) <= 5 * np.sqrt(len(u) * p) + 1).all()
            within = u * bins % 1
            assert abs(within.mean() - 0.5) < 5 * np.sqrt(1 / 12 / len(u))


def test_probes_ignore_the_rates():
    augmenter = Augmenter("d.d.d", jit_compile=False, **DIGITS)
    images = random_images(64)
    first, policy = augmenter.probe(images, seed_of(0, 0))
    augmenter.rates.assign(augmenter.rates * np.random.default_rng(0).random(augmenter.rates.shape))
    second, again = augmenter.probe(images, seed_of(0, 0))
    assert np.array_equal(first, second) and np.array_equal(policy["params"], again["params"])
    assert np.array_equal(first, pillow_policy(OPS, images, policy))


@pytest.mark.parametrize("spec", ["d.d.d", "m.x.d", "d.d.d.rac"])
def test_strong_views_and_probes_may_be_made_together(spec):
    augmenter = Augmenter(spec, jit_compile=False, **DIGITS)
    images, weak = random_images(24), random_images(8, seed=1)
    strong, probe, policy = augmenter.strong_and_probe(images, seed_of(1, 2), weak, seed_of(3, 4))
    alone, again = augmenter.probe(weak, seed_of(3, 4))
    assert np.array_equal(strong, augmenter.strong(images, seed_of(1, 2)))
    assert np.array_equal(probe, alone) and np.array_equal(policy["params"], again["params"])


def python_update(rates: np.ndarray, policy, probabilities: np.ndarray, labels: np.ndarray, decay: float) -> np.ndarray:
    """The rule, one hit after the other, in double precision."""
    rates, ops, params = rates.astype(float), np.asarray(policy["ops"]), np.asarray(policy["params"])
    names = list(OPS)
    for n in range(len(labels)):
        proximity = 1 - 0.5 * np.abs(probabilities[n] - np.eye(probabilities.shape[1])[labels[n]]).sum()
        for op, row in zip(ops[n], params[n].tolist(), strict=True):
            for column, bins in enumerate(OPS[names[op]].bins):
                chosen = int(row[column] * bins * 0.999)
                rates[op, column, chosen] = decay * rates[op, column, chosen] + (1 - decay) * proximity
    return rates


def random_predictions(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.dirichlet(np.full(10, 0.3), n).astype(np.float32), rng.integers(0, 10, n)


def learn(augmenter: Augmenter, policy, probabilities, labels) -> None:
    _, (lessons,) = exchange([], [augmenter.lessons(policy, probabilities, labels)])
    augmenter.rates.assign(augmenter.updated_rates(lessons, augmenter.rates))


@pytest.mark.parametrize("crowded", [False, True])
def test_update_is_sequential(crowded):
    augmenter = Augmenter("d.d.d", jit_compile=False, decay=0.9, **DIGITS)
    policy = random_policy(OPS, 64, 2)
    if crowded:  # everything on few bins, so that order matters
        policy = {"ops": policy["ops"] % 2, "params": policy["params"] * 0.1}
    probabilities, labels = random_predictions(64)
    expected = python_update(augmenter.rates.numpy(), policy, probabilities, labels, 0.9)
    update = tf.function(functools.partial(learn, augmenter), autograph=False)
    update(policy, probabilities, labels)
    # Rates are at most 1 and sum at most 128 float32 terms that shrink geometrically: a few steps of 6e-8.
    np.testing.assert_allclose(augmenter.rates, expected, rtol=0, atol=1e-6)
    assert (expected != 1).sum() >= (2 if crowded else 60)
    if crowded:
        turned = {key: value[::-1] for key, value in policy.items()}
        wrong = python_update(np.ones(augmenter.rates.shape), turned, probabilities[::-1], labels[::-1], 0.9)
        assert np.abs(wrong - expected).max() > 1e-2  # in another order the result is another
    for repetition in range(3):  # and on from there
        expected = python_update(augmenter.rates.numpy(), policy, probabilities, labels, 0.9)
        update(policy, probabilities, labels)
        np.testing.assert_allclose(augmenter.rates, expected, rtol=0, atol=1e-6, err_msg=str(repetition))


def test_replicas_make_one_update():
    replicas = 2
    strategy = strategy_of(replicas)
    with strategy.scope():
        augmenter = Augmenter("d.d.d", **DIGITS)
    images, steps, n = random_images(8), 3, 8
    probabilities, labels = random_predictions(n * replicas)
    sliced = tf.reshape(probabilities, [replicas, n, 10]), tf.reshape(tf.constant(labels), [replicas, n])

    def step(i: tf.Tensor) -> None:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        weak = augmenter.labeled(images, tf.stack([i, replica]))
        _, policy = augmenter.probe(weak, tf.stack([i, replica]))
        learn(augmenter, policy, sliced[0][replica], sliced[1][replica])

    @tf.function
    def run(count: tf.Tensor) -> None:
        for i in tf.range(count):
            strategy.run(step, args=(i,))

    run(tf.constant(steps))
    rates = [value.numpy() for value in strategy.experimental_local_results(augmenter.rates)]
    assert len(rates) == replicas and all(np.array_equal(rates[0], other) for other in rates[1:])

    alone = Augmenter("d.d.d", jit_compile=False, **DIGITS)
    expected = np.ones(alone.rates.shape)
    for i in range(steps):
        policies = [alone.probe(images, seed_of(i, r))[1] for r in range(replicas)]
        gathered = {key: np.concatenate([p[key] for p in policies]) for key in policies[0]}
        expected = python_update(expected, gathered, probabilities, labels, 0.99)
    np.testing.assert_allclose(rates[0], expected, rtol=0, atol=1e-6)  # float32 against double, as above
    assert (expected != 1).sum() > 20


def test_rates_are_saved_and_restored(tmp_path):
    augmenter = Augmenter("d.d.d", jit_compile=False, **DIGITS)
    learn(augmenter, random_policy(OPS, 16, 2), *random_predictions(16))
    path = tf.train.Checkpoint(augmenter=augmenter).save(str(tmp_path / "model"))
    other = Augmenter("d.d.d", jit_compile=False, **DIGITS)
    assert not np.array_equal(other.rates, augmenter.rates)
    tf.train.Checkpoint(augmenter=other).restore(path).assert_consumed()
    assert np.array_equal(other.rates, augmenter.rates)
    assert any("rates" in name for name, _ in tf.train.list_variables(path))


def test_only_ctaugment_has_rates():
    augmenter = Augmenter("d.d.ra", jit_compile=False, **DIGITS)
    assert not augmenter.learns_rates and not augmenter.variables and not hasattr(augmenter, "rates")
    cta = Augmenter("d.d.d", jit_compile=False, **DIGITS)
    assert cta.learns_rates and not cta.trainable_variables and cta.rates.shape == (19, 2, 17)
    assert (cta.rates.numpy() == 1).all()


def test_constructor_errors():
    with pytest.raises(ValueError, match="image_shape"):
        Augmenter("d.d.d", image_shape=(32, 32, 1), mirror=True, shift=4)
    with pytest.raises(ValueError, match="shift=8"):
        Augmenter("d.d.d", image_shape=(8, 8, 3), mirror=True, shift=8)
    for wrong in (dict(depth=0), dict(depth="2"), dict(cutout="maybe")):
        with pytest.raises(UserError, match="expected a number of operations from 1 up, and yes, no or only"):
            Augmenter("d.d.d", **DIGITS, **wrong)


# GPU ----------------------------------------------------------------------------------------------------------------

# Op types on the path, outside and inside the functions that XLA compiles: everything used must be on these lists.
OUTSIDE = set("""
Abs AddV2 AssignVariableOp Cast ConcatV2 Const Cumsum DivNoNan Equal ExpandDims Fill GatherV2 Greater Identity Less
LessEqual Max Maximum Minimum Mul NoOp OneHot OnesLike Pack PartitionedCall Placeholder Pow Range ReadVariableOp RealDiv
Reshape SelectV2 StatefulPartitionedCall StatelessRandomGetKeyCounter StatelessRandomUniformFullIntV2
StatelessRandomUniformV2 StridedSlice Sub Sum
""".split())
INSIDE = set("""
Abs AddN AddV2 BatchMatMulV2 Bitcast BitwiseAnd Cast ConcatV2 Const Cumsum DenseBincount Equal Fill Floor FloorDiv
GatherV2 Greater GreaterEqual Identity LeftShift Less LessEqual LogicalAnd LogicalOr Max Maximum Min Minimum Mul Neg
Pack Pad Range RealDiv Reshape RightShift Round SelectV2 Slice StatelessWhile StridedSlice Sub Sum TensorScatterUpdate
TopKV2 Transpose
""".split())
# Served on every device by kernels that move or hold things: these need none of their own for GPUs.
PLUMBING = {"Const", "NoOp", "PartitionedCall", "Placeholder", "ReadVariableOp", "StatefulPartitionedCall"}


def nodes_by_place(spec: str) -> tuple[list, list]:
    """All nodes of a step's augmentation: those that run as single kernels, those that XLA compiles."""
    augmenter = Augmenter(spec, policies="svhn", **CIFAR)
    augmenter.on_gpu = True

    @tf.function(autograph=False)
    def step(images, seed, probabilities, labels):
        views = [augmenter.labeled(images, seed), augmenter.weak(images, seed)]
        if not augmenter.learns_rates:
            return [*views, augmenter.strong(images, seed)]
        strong, probed, policy = augmenter.strong_and_probe(images, seed, views[0], seed)
        learn(augmenter, policy, probabilities, labels)
        return [*views, strong, probed]

    graph = step.get_concrete_function(
        tf.TensorSpec([16, 32, 32, 3], tf.uint8), tf.TensorSpec([2], tf.int32), tf.TensorSpec([16, 10]),
        tf.TensorSpec([16], tf.int32)).graph
    return helpers.nodes_by_place(graph.as_graph_def())


@pytest.mark.parametrize("spec", ["d.d.d", "m.d.rac", "d.m.x", "d.d.aac"])
def test_everything_runs_on_a_gpu(spec):
    outside, inside = nodes_by_place(spec)
    assert outside and inside
    assert {node.op for node in outside} <= OUTSIDE and {node.op for node in inside} <= INSIDE
    # The lists above were made with kernels registered for GPUs; a build without any cannot check them again.
    matmul = tf.compat.v1.NodeDef(op="MatMul", attr={"T": tf.compat.v1.AttrValue(type=tf.float32.as_datatype_enum)})
    if "GPU" not in devices_of(matmul):
        pytest.skip("op types checked; this build of TensorFlow has no GPU kernels to look up")
    for node in outside:
        wanted = {"GPU", "DEFAULT"} if node.op in PLUMBING else {"GPU"}
        assert devices_of(node) & wanted, f"{node.op} has no GPU kernel:\n{node}"
    for node in inside:
        assert "XLA_GPU_JIT" in devices_of(node), f"XLA cannot compile {node.op} for GPUs:\n{node}"
