"""Half precision, loss scaling and XLA: the same training, up to stated rounding."""
import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from cssl.cssl import CSSL
from cssl.fixmatch import FixMatch
from libml import networks
from libml.augment import Augmenter
from libml.config import RunConfig, ScaleOptions
from libml.data import load
from libml.devices.distribute import POLICIES, check_jit
from libml.errors import UserError
from libml.run import Run
from libml.train import Trainer


@contextlib.contextmanager
def policy(name):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(POLICIES[name])
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def make_model(precision="off", method=CSSL, jit=False, augmenter=None, classes=4, size=8):
    with policy(precision):
        network = networks.build("resnet", num_classes=classes, image_shape=(size, size, 3), filters=8, repeat=1,
                                 seed=3, bn_momentum=0.9)
        return method(network, classes, options=method.Options(batch=8, uratio=2, ema=0.9), total_images=1000,
                      loss_scaling=precision == "float16", jit=jit, augmenter=augmenter)


def views():
    normal = np.random.default_rng(0).normal
    return {name: tf.constant(normal(size=(count, 8, 8, 3)), tf.float32)
            for name, count in (("labeled", 8), ("weak", 16), ("strong", 16))} | {"label": tf.range(8) % 4}


def train(model, steps):
    run, batch = tf.function(model.train_on_views, autograph=False), views()
    return np.array([[float(value) for _, value in sorted(run(batch).items()) if _.startswith("losses")]
                     for _ in range(steps)])


@pytest.fixture(scope="module")
def float32_losses():
    return train(make_model(), 10)


# float16 has 11 significant bits, bfloat16 8: rounding of 5e-4 and 4e-3 per operation, a few tens of them in a row.
@pytest.mark.parametrize(("precision", "tolerance"), [("float16", 0.01), ("bfloat16", 0.06)])
def test_losses_agree_with_float32(precision, tolerance, float32_losses):
    model = make_model(precision)
    losses = train(model, 10)
    np.testing.assert_allclose(losses, float32_losses, rtol=tolerance, atol=tolerance)
    assert not np.array_equal(losses, float32_losses), "nothing was computed in half precision"
    assert losses[-1, 1] < losses[0, 1]  # the total falls
    for variable in tf.nest.flatten(model.checkpoint_items()):
        assert variable.dtype in (tf.float32, tf.int64)
        assert np.isfinite(variable.numpy()).all()
    if precision == "float16":
        assert float(model.loss_scale.numpy()) == 2.0 ** 15
        assert int(model.good_steps.numpy()) == 10


def test_gradients_are_finite_and_those_of_float32():
    """By direction: rounding moves single small gradients a lot, the whole gradient hardly at all.

    TensorFlow's own CPU kernels sum bfloat16 filter gradients in bfloat16: each is off by 2 % of its length, and the
    cosine of all is 0.976. With oneDNN and bfloat16 instructions (0.17 %) it is above 0.99.
    """
    def gradient(precision):
        update = make_model(precision).update
        values = tf.function(lambda v: update.backward(v, tf.constant([0, 0], tf.int64), update.read())["gradients"],
                             autograph=False)(views())
        return np.concatenate([value.numpy().ravel() for value in values])

    reference = gradient("off")
    for precision in ("float16", "bfloat16"):
        found = gradient(precision)
        assert found.dtype == np.float32 and np.isfinite(found).all()
        cosine = found @ reference / np.linalg.norm(found) / np.linalg.norm(reference)
        assert cosine > (0.999 if precision == "float16" else 0.95)


def test_overflow_skips_the_update_and_halves_the_scale():
    model = make_model("float16")
    run, batch = tf.function(model.train_on_views, autograph=False), views()
    model.loss_scale.assign(2.0 ** 24)  # gradients beyond float16's 65504
    before = [v.numpy() for v in tf.nest.flatten(model.checkpoint_items()) if v.dtype == tf.float32]
    names = [v.name for v in tf.nest.flatten(model.checkpoint_items()) if v.dtype == tf.float32]
    scalars = run(batch)
    assert float(scalars["monitors/loss_scale"]) == 2.0 ** 23
    for name, old, variable in zip(names, before, [v for v in tf.nest.flatten(model.checkpoint_items())
                                                   if v.dtype == tf.float32], strict=True):
        if "loss_scale" not in name:
            np.testing.assert_array_equal(variable.numpy(), old, err_msg=name)
    assert int(model.updates.numpy()) == 1  # the batch counts: the schedule goes on
    for _ in range(12):
        scalars = run(batch)
    assert 1 < float(scalars["monitors/loss_scale"]) < 2.0 ** 22
    assert int(model.good_steps.numpy()) > 0 and np.isfinite(float(scalars["losses/total"]))


def test_scale_grows_after_many_good_steps():
    model = make_model("float16")
    model.good_steps.assign(1999)
    train(model, 1)
    assert float(model.loss_scale.numpy()) == 2.0 ** 16
    assert int(model.good_steps.numpy()) == 0


@pytest.mark.slow
def test_xla_computes_the_same(float32_losses):
    """XLA fuses and so rounds otherwise: 1e-3 after ten steps; moving statistics of batch normalisation too."""
    model, plain = make_model(jit=True), make_model()
    np.testing.assert_allclose(train(model, 10), float32_losses, rtol=1e-3, atol=1e-4)
    train(plain, 10)
    for found, wanted in zip(model.network.non_trainable_variables, plain.network.non_trainable_variables, strict=True):
        np.testing.assert_allclose(found.numpy(), wanted.numpy(), rtol=1e-3, atol=1e-4)


def test_xla_and_communication():
    check_jit(ScaleOptions(jit=True, sync_bn=True), 1, FixMatch)
    check_jit(ScaleOptions(jit=True), 4, FixMatch)
    with pytest.raises(UserError, match="--sync_bn.s communication between 2 replicas"):
        check_jit(ScaleOptions(jit=True, sync_bn=True), 2, FixMatch)


class Uncompilable(FixMatch):
    """A loss with Python in it, which XLA cannot compile."""

    def unlabeled_loss(self, weak, strong, views, step):
        found = super().unlabeled_loss(weak, strong, views, step)
        mask = tf.numpy_function(lambda x: x, [found.mask], tf.float32)
        return found._replace(mask=tf.ensure_shape(mask, found.mask.shape))


@pytest.mark.parametrize(("method", "compiles"), [(FixMatch, True), (Uncompilable, False)])
@pytest.mark.slow
def test_what_xla_cannot_compile_runs_without(method, compiles, tmp_path, capsys):
    augmenter = Augmenter("x.x.x", image_shape=(16, 16, 3), mirror=False, shift=2, jit_compile=False)
    model = make_model(method=method, jit=True, augmenter=augmenter, classes=10, size=16)
    config = RunConfig.of(method, dataset="digits.1@40-1", batch=8, uratio=2, train_steps=2)
    Run(tmp_path).claim(config, {})
    run = Run(tmp_path, config=config, data=load("digits.1@40-1", tmp_path), model=model)
    Trainer(run, tf.distribute.get_strategy()).train()
    assert int(model.updates.numpy()) == 2
    assert ("warning: XLA cannot compile" in capsys.readouterr().out) != compiles
    assert model.jit == compiles
