"""Networks: exact structure against NumPy, counts, initial weights, randomness, precision, stateless use, replicas."""
import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import strategy_of

from libml import networks
from libml.networks import layers, nets

with contextlib.suppress(RuntimeError):  # too late if TensorFlow has already started; then others have asked for two
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0],
                                               [tf.config.LogicalDeviceConfiguration()] * 2)

SHAPE = (16, 16, 3)
ARCHITECTURES = sorted(networks.ARCHITECTURES)


def small(arch="resnet", image_shape=SHAPE, **kwargs):
    kwargs = dict(filters=8, repeat=2, seed=1) | kwargs
    return networks.build(arch, num_classes=5, image_shape=image_shape, **kwargs)


def images(n=6, shape=SHAPE, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, (n, *shape)).astype(np.float32)


def randomize(net, seed=0):
    """Gives every variable a value that matters, so that none can be left out or swapped unnoticed."""
    rng = np.random.default_rng(seed)
    for v in net.variables:
        positive = v.name in ("gamma", "moving_variance")
        value = rng.uniform(0.5, 1.5, v.shape) if positive else rng.normal(0, 0.3, v.shape)
        v.assign(value / (np.sqrt(np.prod(v.shape[:-1])) * 0.3) if v.name == "kernel" else value)


# A forward pass in NumPy float64. It consumes values in creation order, which pins the order of the variables too.

def np_conv(x, kernel, bias, stride=1, padding="same"):
    k = kernel.shape[0]
    out = [-(-s // stride) if padding == "same" else s - k + 1 for s in x.shape[1:3]]
    if padding == "same":
        total = [max((o - 1) * stride + k - s, 0) for o, s in zip(out, x.shape[1:3], strict=True)]
        x = np.pad(x, [(0, 0), *((t // 2, t - t // 2) for t in total), (0, 0)])
    y = np.zeros((len(x), *out, kernel.shape[-1])) + bias
    for i in range(k):
        for j in range(k):
            patch = x[:, i:i + stride * (out[0] - 1) + 1:stride, j:j + stride * (out[1] - 1) + 1:stride]
            y += patch @ kernel[i, j]
    return y


def np_leaky(x, slope):
    return np.where(x > 0, x, slope * x)


class NumpyForward:
    def __init__(self, net, training):
        self.values = iter([v.numpy().astype(np.float64) for v in net.trainable_variables])
        self.moving = iter([v.numpy().astype(np.float64) for v in net.non_trainable_variables])
        self.training, self.updated = training, []

    def conv(self, x, stride=1, padding="same"):
        return np_conv(x, next(self.values), next(self.values), stride, padding)

    def norm(self, x):
        gamma, beta, mean, var = next(self.values), next(self.values), next(self.moving), next(self.moving)
        if self.training:
            n = x.size / x.shape[-1]
            moving, (mean, var) = (mean, var), (x.mean((0, 1, 2)), x.var((0, 1, 2)))
            self.updated += [0.25 * moving[0] + 0.75 * mean, 0.25 * moving[1] + 0.75 * var * n / (n - 1)]
        return (x - mean) / np.sqrt(var + 1e-3) * gamma + beta

    def dense(self, x):
        return x @ next(self.values) + next(self.values)

    def resnet(self, x, filters, repeat, scales):
        x = self.conv(x)
        for stage in range(scales):
            for block in range(repeat):
                stride = 2 if stage and not block else 1
                y = np_leaky(self.norm(x), 0.1)
                shortcut = y if stage == block == 0 else x
                y = self.conv(y, stride)
                y = self.conv(np_leaky(self.norm(y), 0.1))
                x = y + (self.conv(shortcut, stride) if shortcut.shape[-1] != filters << stage else shortcut)
        embedding = np_leaky(self.norm(x), 0.1).mean((1, 2))
        return self.dense(embedding), embedding

    def cnn13(self, x):
        for i in range(9):
            if i in (3, 6):
                n, h, w, c = x.shape
                x = x.reshape(n, h // 2, 2, w // 2, 2, c).max((2, 4))
            x = self.norm(np_leaky(self.conv(x, padding="valid" if i == 6 else "same"), 0.2))
        embedding = x.mean((1, 2))
        return self.dense(embedding), embedding


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("arch, filters", [("resnet", 8), ("resnet", 16), ("cnn13", 8)])
def test_forward_pass_equals_numpy(arch, filters, training):
    net = small(arch, filters=filters, bn_momentum=0.25)
    randomize(net)
    x, oracle = images(), NumpyForward(net, training)
    logits, embedding = (oracle.cnn13(x) if arch == "cnn13" else oracle.resnet(x, filters, repeat=2, scales=2))
    got_logits, got_embedding = net(x, training=training, outputs=("logits", "embedding"))
    # float32 through a dozen layers: some 1e-6 of values around 1; any structural difference is far above 1e-4.
    np.testing.assert_allclose(got_logits, logits, atol=1e-4)
    np.testing.assert_allclose(got_embedding, embedding, atol=1e-4)
    assert not list(oracle.values) and not list(oracle.moving)
    if training:
        for v, expected in zip(net.non_trainable_variables, oracle.updated, strict=True):
            # Bessel's correction alone is 1/1500 or more.
            np.testing.assert_allclose(v.numpy(), expected, rtol=1e-4, atol=1e-5)


def test_weight_counts():
    shape = (32, 32, 3)
    assert networks.count_weights(networks.build("resnet", num_classes=10, image_shape=shape)) == 1_469_642
    assert networks.count_weights(networks.build("resnet", num_classes=100, image_shape=shape,
                                                 filters=128)) == 23_409_092
    cnn13 = networks.build("cnn13", num_classes=10, image_shape=shape, filters=128)
    widths = [3] + [128] * 3 + [256] * 3 + [512, 256, 128]
    sizes = [9] * 7 + [1] * 2
    assert networks.count_weights(cnn13) == 1290 + sum(
        k * a * b + 3 * b for k, a, b in zip(sizes, widths, widths[1:], strict=False))


def test_order_and_kind_of_variables():
    net = small(repeat=1)
    block0, block1 = (["norm1/gamma", "norm1/beta", "conv1/kernel", "conv1/bias", "norm2/gamma", "norm2/beta",
                       "conv2/kernel", "conv2/bias", "shortcut/kernel", "shortcut/bias"] for _ in range(2))
    assert [v.path for v in net.trainable_variables] == (
        ["stem/kernel", "stem/bias"] + [f"stage0_block0_{p}" for p in block0] + [f"stage1_block0_{p}" for p in block1]
        + ["norm/gamma", "norm/beta", "classifier/kernel", "classifier/bias"])
    for arch in ARCHITECTURES:
        net = small(arch, dropout=0.5)
        assert {v.name for v in net.non_trainable_variables} == {"moving_mean", "moving_variance"}
        assert len({v.path for v in net.variables}) == len(net.variables)


def test_default_momentum_of_moving_statistics():
    layer, x = networks.BatchNormalization(), tf.constant([1.0, 3.0], shape=[2, 1, 1, 1])
    layer(x, training=True)
    np.testing.assert_allclose(layer.moving_mean, [0.002], rtol=1e-4)  # 1 - 0.999 in float32
    np.testing.assert_allclose(layer.moving_variance, [0.999 * 1 + 0.001 * 2], rtol=1e-6)


def test_default_scales_follow_the_width():
    for width, scales in ((8, 1), (16, 2), (28, 3), (32, 3), (96, 5)):
        net = networks.build("resnet", num_classes=2, image_shape=(width, width, 1), filters=2, repeat=1)
        assert len(net.blocks) == scales


def test_initial_weights():
    net = networks.build("resnet", num_classes=10, image_shape=(32, 32, 3), filters=64, repeat=1, seed=3)
    for v in net.variables:
        value = v.numpy()
        if v.name == "kernel" and value.ndim == 4:
            expected = 1 / np.sqrt(0.5 * value.shape[0] ** 2 * value.shape[3])
            # The standard error of a standard deviation is 1/sqrt(2n) of it; 5 of them leave no room for chance.
            assert abs(value.std() / expected - 1) < 5 / np.sqrt(2 * value.size)
            assert abs(value.mean()) < 5 * expected / np.sqrt(value.size)
        elif v.name == "kernel":
            assert abs(value.std() / np.sqrt(2 / sum(value.shape)) - 1) < 5 / np.sqrt(2 * value.size)
        else:
            np.testing.assert_array_equal(value, 1 if v.name in ("gamma", "moving_variance") else 0)


def test_initial_weights_are_a_function_of_the_seed():
    a, b, c = small(seed=1), small(seed=1), small(seed=2)
    for u, v, w in zip(a.variables, b.variables, c.variables, strict=True):
        np.testing.assert_array_equal(u.numpy(), v.numpy())
        assert v.name != "kernel" or np.abs(v.numpy() - w.numpy()).min() > 0
    same_shape = [v.numpy() for v in a.trainable_variables if v.shape == (3, 3, 8, 8)]
    assert len(same_shape) == 3 and not np.any(same_shape[0] == same_shape[1])
    keras.utils.set_random_seed(7)
    d = small(seed=None)
    keras.utils.set_random_seed(7)
    np.testing.assert_array_equal(d.stem.kernel.numpy(), small(seed=None).stem.kernel.numpy())


def test_heads_give_several_outputs_from_one_pass():
    projection = keras.Sequential([keras.layers.Dense(6, activation="relu"), keras.layers.Dense(3)])
    net = networks.Heads(small(repeat=1, bn_momentum=0.5), {"rotation": 4, "turn": 4, "projection": projection}, seed=1)
    x, before = images(), [v.numpy() for v in net.non_trainable_variables]
    names = ("projection", "logits", "rotation", "embedding", "logits")
    found = net(x, training=True, outputs=names)
    moved = [v.numpy() for v in net.non_trainable_variables]
    for name, output in zip(names, found, strict=True):
        for variable, value in zip(net.non_trainable_variables, before, strict=True):
            variable.assign(value)
        (alone,) = net(x, training=True, outputs=(name,))
        np.testing.assert_array_equal(output, alone)
        for variable, value in zip(net.non_trainable_variables, moved, strict=True):  # by one pass, not by five
            np.testing.assert_array_equal(variable, value)
    assert [output.shape[1] for output in found] == [3, 5, 4, net.network.classifier.kernel.shape[0], 5]
    np.testing.assert_array_equal(net(x), net.network(x))
    np.testing.assert_array_equal(net(x, outputs=("embedding",))[0], net.network(x, outputs=("embedding",))[0])
    assert not np.any(net.heads["rotation"].kernel.numpy() == net.heads["turn"].kernel.numpy())
    assert [v.path for v in net.trainable_variables[:-8]] == [v.path for v in net.network.trainable_variables]


def test_heads_misused():
    with pytest.raises(ValueError, match="cannot be called 'logits'"):
        networks.Heads(small(), {"logits": 4})
    with pytest.raises(ValueError, match="no output 'rotations'"):
        networks.Heads(small(), {"rotation": 4})(images(), outputs=("rotations",))


@pytest.mark.parametrize("arguments, message", [
    (dict(arch="vgg"), "Unknown architecture 'vgg': choose one of cnn13, mcdropresnet, resnet, shake"),
    (dict(arch="cnn13", image_shape=(8, 8, 3)), "12x12")])
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        small(**arguments)


# Randomness

@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_dropout_acts_only_when_asked(arch):
    net, x = small(arch, dropout=0.3), images()
    plain = net(x)
    np.testing.assert_array_equal(plain, net(x, seed=[1, 2]))
    np.testing.assert_array_equal(plain, small(arch)(x))
    a, b, c = (net(x, seed=seed, mc_dropout=True).numpy() for seed in ([1, 2], [1, 2], [1, 3]))
    np.testing.assert_array_equal(a, b)
    assert np.all(a != plain) and np.all(a != c)
    with pytest.raises(ValueError, match="seed=None"):
        net(x, mc_dropout=True)


def test_dropout_mask():
    noise = layers.Noise([3, 4], dropout=0.3)
    x = tf.ones([100, 10, 10, 10])
    a, b = noise.dropout(x).numpy(), noise.dropout(x).numpy()
    kept = np.float32(1 / 0.7)
    assert set(np.unique(a)) == {np.float32(0), kept}
    assert abs((a > 0).mean() - 0.7) < 5 * np.sqrt(0.21 / a.size)  # five standard errors
    assert abs(((a > 0) & (b > 0)).mean() - 0.49) < 5 * np.sqrt(0.25 / a.size)  # layers are independent


def test_shake_mixes_at_random_in_training_and_evenly_otherwise():
    a, b = tf.constant(images(4, seed=1)), tf.constant(images(4, seed=2))
    forward, backward = (tf.reshape(tf.constant(w), [4, 1, 1, 1]) for w in ([0., 1., .25, .5], [1., .5, 0., .125]))
    with tf.GradientTape() as tape:
        tape.watch([a, b])
        y = nets._shake(a, b, forward, backward)
    da, db = tape.gradient(y, [a, b], output_gradients=a)
    np.testing.assert_allclose(y, forward * a + (1 - forward) * b, atol=1e-6)  # float32 rounding of values below 1
    np.testing.assert_allclose(da, backward * a, atol=1e-6)
    np.testing.assert_allclose(db, (1 - backward) * a, atol=1e-6)

    net = small("shake", repeat=1)
    randomize(net)
    x = np.repeat(images(1), 4, axis=0)
    with pytest.raises(ValueError, match="seed=None"):
        net(x, training=True)
    y = net(x, training=True, seed=[1, 2]).numpy()
    assert np.ptp(y, axis=0).min() > 0  # every image has weights of its own
    np.testing.assert_array_equal(net(x, training=True, seed=[1, 2]), y)
    block, ones = net.blocks[0], tf.ones([1, 4, 4, 16])
    first, second = (n2(c2(tf.nn.relu(n1(c1(ones))))) for c1, n1, c2, n2 in (block.first, block.second))
    shortcut = block.shortcut_norm(block.shortcut[0](ones))
    expected = shortcut + 0.5 * (first + second)
    np.testing.assert_allclose(block(ones, training=False, noise=layers.Noise(None, 0.0)), expected, atol=1e-5)


# Stateless use, precision, compilation, replicas

def values(variables):
    return [tf.identity(v.value) for v in variables]


def gradients(net, x, **kwargs):
    """Logits, updated statistics and gradients of a loss that weights all logits differently."""
    trainable, other = values(net.trainable_variables), values(net.non_trainable_variables)
    with tf.GradientTape() as tape:
        tape.watch(trainable)
        logits, updated = net.stateless_call(trainable, other, x, training=True, **kwargs)
        loss = tf.reduce_mean(tf.reduce_sum(tf.nn.softmax(logits) * tf.range(5.0), -1))
    return logits, updated, tape.gradient(loss, trainable)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_stateless_call_equals_call(arch):
    net, other, x = small(arch), small(arch, seed=2), images()
    randomize(net, seed=1)
    randomize(other, seed=2)
    for target, source in zip(other.non_trainable_variables, net.non_trainable_variables, strict=True):
        target.assign(source)
    before = [v.numpy() for v in net.variables]

    @tf.function(autograph=False)
    def run(trainable, statistics, training):
        return net.stateless_call(trainable, statistics, x, training=training, seed=tf.constant([1, 2]))

    statistics = values(net.non_trainable_variables)
    for model in (net, other):  # its own weights, then others in their place, as an average of weights would be
        logits, unchanged = run(values(model.trainable_variables), statistics, False)
        np.testing.assert_allclose(logits, model(x), atol=1e-5)  # graph optimisation reorders float32 sums
        for u, v in zip(unchanged, statistics, strict=True):
            np.testing.assert_array_equal(u, v)
        logits, updated = run(values(model.trainable_variables), statistics, True)
        if model is net:
            for v, value in zip(net.variables, before, strict=True):
                np.testing.assert_array_equal(v, value)  # nothing was assigned behind the caller's back
        np.testing.assert_allclose(logits, model(x, training=True, seed=[1, 2]), atol=1e-5)
        for u, v in zip(updated, model.non_trainable_variables, strict=True):
            np.testing.assert_allclose(u, v.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("arch", sorted(set(ARCHITECTURES) - {"mcdropresnet"}))  # which is resnet
@pytest.mark.slow
def test_compiled_by_xla(arch):
    net, x = small(arch, repeat=1, dropout=0.3), images()
    plain, compiled = (tf.function(gradients, jit_compile=jit, autograph=False)(
        net, x, seed=tf.constant([1, 2]), mc_dropout=True) for jit in (False, True))
    for a, b in zip(tf.nest.flatten(plain), tf.nest.flatten(compiled), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)  # same random numbers, other order of float32 sums


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("arch", ["resnet", "shake"])
@pytest.mark.slow
def test_recomputing_blocks_changes_nothing(arch, policy):
    """Logits, moving statistics and gradients are the same, with the same random numbers; each block runs twice."""
    found, convolutions = [], []
    for recompute in (False, True):
        with networks.dtype_policy(policy):
            net = small(arch, dropout=0.3, repeat=1, scales=2, recompute=recompute)
        randomize(net)
        run = tf.function(lambda net=net: gradients(net, images(), seed=tf.constant([1, 2]), mc_dropout=True),
                          autograph=False).get_concrete_function()
        found.append(tf.nest.flatten(run()))
        convolutions.append(sum(op.type == "Conv2D" for op in run.graph.get_operations()))
    for plain, recomputed in zip(*found, strict=True):
        # The same operations in the same order, but for gradients that meet at a block's input: rounding.
        scale = max(1e-3, float(np.abs(plain).max()))
        np.testing.assert_allclose(recomputed, plain, atol=scale * (1e-5 if policy == "float32" else 2e-2))
    assert convolutions[1] == 2 * convolutions[0] - 1  # all but the stem


def test_recomputing_needs_blocks():
    with pytest.raises(ValueError, match="cnn13 has no residual blocks to compute again; resnet, mcdropresnet, shake"):
        small("cnn13", recompute=True)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype, tolerance", [("float16", 0.02), ("bfloat16", 0.15)])
def test_mixed_precision(arch, dtype, tolerance):
    """Tolerances: some ten layers of rounding at 2^-11 (float16) or 2^-8 (bfloat16), for logits around 1."""
    expected = gradients(small(arch, repeat=1), images(), seed=[1, 2])
    keras.config.set_dtype_policy(f"mixed_{dtype}")
    try:
        net = small(arch, repeat=1)
        assert net.blocks[0].compute_dtype == dtype if arch != "cnn13" else net.body[0].compute_dtype == dtype
    finally:
        keras.config.set_dtype_policy("float32")
    got = gradients(net, images(), seed=[1, 2])
    for a in tf.nest.flatten(got):
        assert a.dtype == tf.float32 and np.isfinite(a).all()
    np.testing.assert_allclose(got[0], expected[0], atol=tolerance)
    for a, b in zip(got[1], expected[1], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-3)  # updates weigh 0.001


def numeric_gradient_of_norm(x, gamma, beta, dy, eps=1e-5):
    """Central differences of sum(dy * batch-normalised x) in float64."""
    def f(x):
        return np.sum(dy * ((x - x.mean((0, 1, 2))) / np.sqrt(x.var((0, 1, 2)) + 1e-3) * gamma + beta))
    result = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[i] = eps
        result[i] = (f(x + step) - f(x - step)) / (2 * eps)
    return result


def test_gradient_of_batch_normalization():
    rng = np.random.default_rng(0)
    x, dy = rng.normal(1, 2, (2, 3, 2, 3)), rng.normal(size=(2, 3, 2, 3))
    layer = networks.BatchNormalization()
    layer.build(x.shape)
    gamma, beta = rng.normal(size=3), rng.normal(size=3)
    layer.gamma.assign(gamma)
    layer.beta.assign(beta)
    inputs = tf.constant(x, tf.float32)
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        y = layer(inputs, training=True)
    gradient = tape.gradient(y, inputs, output_gradients=tf.constant(dy, tf.float32))
    np.testing.assert_allclose(gradient, numeric_gradient_of_norm(x, gamma, beta, dy), atol=1e-5)  # float32


@pytest.fixture(scope="module")
def strategy():
    return strategy_of(2)


@pytest.mark.parametrize("sync_bn", [False, True])
def test_replicas(strategy, sync_bn):
    """With sync_bn two replicas compute what one does on the whole batch; without, each has statistics of its own."""
    with strategy.scope():
        net = small(repeat=1, bn_momentum=0.25, sync_bn=sync_bn)
    single = small(repeat=1, bn_momentum=0.25)
    for model in (net, single):
        randomize(model)
    x = images(8) * np.linspace(0.5, 2, 8).reshape(-1, 1, 1, 1).astype(np.float32)  # halves that differ clearly

    @tf.function(autograph=False)
    def run(per_replica):
        return strategy.run(gradients, args=(net, per_replica))

    halves = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(np.split(x, 2)[context.replica_id_in_sync_group]))
    results = [strategy.experimental_local_results(r) for r in tf.nest.flatten(run(halves), expand_composites=False)]
    replicas = [tf.nest.pack_sequence_as(gradients(single, x), [r[i] for r in results]) for i in range(2)]
    if sync_bn:
        logits, statistics, gradient = gradients(single, x)
        np.testing.assert_allclose(tf.concat([r[0] for r in replicas], 0), logits, atol=1e-5)  # order of sums
        for r in replicas:
            for a, b in zip(r[1], statistics, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)  # finer than Bessel's correction
        for a, b, c in zip(replicas[0][2], replicas[1][2], gradient, strict=True):
            np.testing.assert_allclose((a + b) / 2, c, rtol=1e-3, atol=1e-5)
    else:
        for r, half in zip(replicas, np.split(x, 2), strict=True):
            for a, b in zip(tf.nest.flatten(r), tf.nest.flatten(gradients(single, half)), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
        assert np.abs(replicas[0][1][0] - replicas[1][1][0]).max() > 1e-5
