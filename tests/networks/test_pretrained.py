"""Networks of keras.applications: preprocessing, statistics, randomness, decay, weight files, presets, a whole run."""
import random
import urllib.error
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import (
    CLASSES,
    SHAPE,
    SMALL,
    assert_states_agree,
    joined,
    make,
    on_two_replicas,
    state_of,
    tiny,
    views_of,
)

import cssl
from cssl.cssl import CSSL
from cssl.fixmatch import FixMatch
from cssl.supervised import Supervised
from cssl.vat import VAT
from libml import experiment, networks
from libml.config import RunConfig
from libml.devices import distribute
from libml.errors import UserError
from libml.learn.model import SSLModel
from libml.learn.step import LossOutput
from libml.networks import applications, builder, layers

SEED = tf.constant([3, 4], tf.int64)


def images(n=6, seed=0, shape=SHAPE):
    return np.random.default_rng(seed).uniform(-1, 1, (n, *shape)).astype(np.float32)


def states(network):
    return [v.numpy() for v in network.non_trainable_variables]


# What is known without TensorFlow.

def test_names_and_native_sizes_are_those_of_keras(monkeypatch):
    from keras.src.applications import imagenet_utils

    class Asked(Exception):
        """Carries the native size."""

    def ask(input_shape, default_size, **kwargs):
        raise Asked(default_size)

    monkeypatch.setattr(imagenet_utils, "obtain_input_shape", ask)
    found = {}
    for name in dir(keras.applications):
        if name[0].isupper() and not name.startswith("MobileNetV3"):  # which takes any size; its weights are for 224
            with pytest.raises(Asked) as asked:
                getattr(keras.applications, name)(weights=None)
            found[name] = asked.value.args[0]
    assert found | {"MobileNetV3Large": 224, "MobileNetV3Small": 224} == applications.NATIVE_SIZES


def test_presets_of_ready_networks():
    config = RunConfig.of(CSSL, dataset="cifar10.1@40-1", arch="keras:EfficientNetV2S")
    values = config.values()
    assert {name: values[name] for name in config.presets} == {
        "weights": "imagenet", "image_size": 384, "batch": 8, "lr": 0.003, "ema": 0.99, "bn_momentum": 0.99,
        "train_kimg": 64.0, "report_kimg": 1.0, "save_kimg": 1.0, "keep_ckpt": 5}
    assert config.updates == applications.FINE_TUNING_UPDATES
    given = RunConfig.of(CSSL, arch="keras:VGG16", image_size=64, lr=0.5, train_steps=640)
    assert (given.data.image_size, given.options.lr, given.options.batch) == (64, 0.5, 16)
    assert (given.training.train_kimg, given.training.report_kimg) == (10.0, 10 / 64)
    assert RunConfig.of(VAT, arch="keras:VGG16").options.lr == 0.0002  # Adam's scale
    scratch = RunConfig.of(CSSL, arch="keras:VGG16", weights="none")
    assert scratch.presets == {"image_size", "batch"} and scratch.options.lr == 0.03
    assert RunConfig.of(CSSL).network.weights == "none" and RunConfig.of(CSSL).presets == frozenset()


def test_presets_of_ready_networks_on_own_images(tmp_path):
    for name in "ab":
        (tmp_path / "train" / name).mkdir(parents=True)
        for i in range(3):
            keras.utils.save_img(tmp_path / "train" / name / f"{i}.png", np.zeros((70, 80, 3)))
    config = RunConfig.of(CSSL, dataset=f"folder:{tmp_path}", arch="keras:MobileNetV2")
    assert (config.data.image_size, config.options.batch, config.training.train_kimg) == (224, 8, 64.0)
    assert RunConfig.of(CSSL, dataset=f"folder:{tmp_path}").data.image_size == 64


@pytest.mark.parametrize("values, message", [
    (dict(arch="keras:EfficentNetV2B0"), "did you mean EfficientNetV2B0"),
    (dict(arch="keras:"), "has no classifier ''; try EfficientNetV2B0"),
    (dict(arch="keras:VGG16,alpha=0.5"), "'alpha=0.5' is no argument of VGG16"),
    (dict(arch="keras:MobileNet,alpha=wide"), "'alpha=wide' is no argument of MobileNet"),
    (dict(arch="vgg"), "expected resnet, cnn13, shake, mcdropresnet, linear, mlp, keras:NAME"),
    (dict(arch="keras:VGG16", whiten=True), "brings its own normalisation"),
    (dict(weights="imagenet"), "weights=imagenet: resnet starts from random weights; expected none")])
def test_bad_networks_are_one_line(program, tmp_path, values, message):
    flags = [f"--{name}" if value is True else f"--{name}={value}" for name, value in values.items()]
    done = program(CSSL, *flags, f"--train_dir={tmp_path / 'runs'}", code=2)
    assert message in done.stderr and not (tmp_path / "runs").exists()


def test_folder_names_are_short_and_safe(tmp_path):
    long = tmp_path / ("x" * 100) / "net.weights.h5"
    name = RunConfig.of(CSSL, dataset="cifar10.1@40-1", arch="keras:MobileNetV2,alpha=0.5", weights=str(long)).folder()
    assert "_archkeras-MobileNetV2,alpha=0.5_" in name.name and "_weightsnet.weights.h5-" in name.name
    assert ":" not in str(name.relative_to("experiments")) and len(name.name) < 220
    other = RunConfig.of(CSSL, dataset="cifar10.1@40-1", arch="keras:MobileNetV2,alpha=0.5", weights="net.weights.h5")
    assert other.folder() != name


# Preprocessing.

def identity():
    inputs = keras.Input((4, 4, 3))
    return keras.Model(inputs, keras.layers.Activation("linear")(inputs))


@pytest.mark.parametrize("name, expected", [  # of the pixel (10, 20, 30)
    ("ResNet50", (30 - 103.939, 20 - 116.779, 10 - 123.68)), ("VGG19", (30 - 103.939, 20 - 116.779, 10 - 123.68)),
    ("ResNet50V2", (10 / 127.5 - 1, 20 / 127.5 - 1, 30 / 127.5 - 1)),
    ("MobileNetV2", (10 / 127.5 - 1, 20 / 127.5 - 1, 30 / 127.5 - 1)),
    ("DenseNet121", ((10 / 255 - 0.485) / 0.229, (20 / 255 - 0.456) / 0.224, (30 / 255 - 0.406) / 0.225)),
    ("EfficientNetB0", (10, 20, 30)), ("EfficientNetV2B0", (10, 20, 30)), ("MobileNetV3Small", (10, 20, 30)),
    ("ConvNeXtTiny", (10, 20, 30)), *((name, None) for name in ("MobileNet", "InceptionV3", "Xception", "NASNetMobile",
                                                               "InceptionResNetV2", "VGG16"))])
def test_views_become_what_preprocess_input_makes_of_pixels(name, expected):
    pixels = np.random.RandomState(0).randint(0, 256, (2, 4, 4, 3)).astype(np.float32)
    pixels[0, 0, 0] = 10, 20, 30
    net = builder.Application(layers.Factory(1, 0, False), identity(), builder._preprocessing(name),
                                 num_classes=2, dropout=0.0)
    found = net.features(tf.constant(pixels / 127.5 - 1), False, layers.Noise(None, 0.0)).numpy()
    family = getattr(keras.applications, getattr(keras.applications, name).__module__.split(".")[-1])
    wanted = family.preprocess_input(pixels.copy())
    np.testing.assert_allclose(found, wanted, atol=1e-4)  # float32 of numbers up to 255, there and back
    if expected:
        np.testing.assert_allclose(found[0, 0, 0], expected, atol=1e-4)


def test_other_sizes_are_resized_within_the_network():
    net = networks.build(SMALL, num_classes=5, image_shape=(16, 16, 3), input_size=32, seed=1)
    x = images(shape=(16, 16, 3))
    np.testing.assert_allclose(net(x), net(tf.image.resize(x, (32, 32))), atol=1e-6)
    assert net.body.input_shape == (None, 32, 32, 3)


# The interface of our networks.

def test_outputs_heads_seeds_and_the_same_weights_from_the_same_seed():
    before = random.getstate()
    nets = [networks.build(SMALL, num_classes=5, image_shape=(32, 32, 3), seed=seed) for seed in (1, 1, 2)]
    assert random.getstate() == before
    for a, b, c in zip(*(net.trainable_variables for net in nets), strict=True):
        np.testing.assert_array_equal(a, b)
        assert "kernel" not in a.name or (a.numpy() != c.numpy()).any()
    x = images(shape=(32, 32, 3))
    logits, embedding = nets[0](x, outputs=("logits", "embedding"))
    assert embedding.shape == (6, 102) and logits.shape == (6, 5)
    np.testing.assert_allclose(logits, embedding @ nets[0].classifier.kernel + nets[0].classifier.bias, atol=1e-6)
    np.testing.assert_allclose(nets[0](x), logits, atol=1e-6)
    assert networks.Heads(nets[0], {"rotation": 4}, seed=1)(x, outputs=("rotation",))[0].shape == (6, 4)


def test_two_methods_need_to_know_how_a_network_is_built():
    with pytest.raises(ValueError, match="Decoders need the stages of a wide residual net; got Application"):
        make(cssl.EnAET, tiny)
    model = make(cssl.MetaPseudoLabels, lambda: networks.build(
        "keras:MobileNetV2,alpha=0.35", num_classes=CLASSES, image_shape=SHAPE, input_size=32, seed=1))
    student, teacher = (net.trainable_variables for net in (model.network.student, model.network.teacher))
    assert [v.shape for v in student] == [v.shape for v in teacher]
    assert not np.array_equal(student[0], teacher[0])


@pytest.mark.parametrize("name", sorted({*cssl.methods().values()} - {"enaet", "meta_pseudo_labels"}))
def test_every_method_takes_a_step(name):
    model = make(cssl.method(name), tiny)
    before = state_of(model)
    scalars = model.train_on_views(views_of(model, 0))
    assert np.isfinite(scalars["losses/total"])
    changed = [not np.array_equal(a, b) for a, b in zip(before, state_of(model), strict=True)]
    assert sum(changed) > 10


# Statistics of batch normalisation.

def one_pass(**arguments):
    class OnePass(SSLModel):
        """A forward pass over labelled images, and one over weak views as given."""

        views_per_image = (1, 0)

        def compute_losses(self, views, step):
            logits = step.forward(views["weak"], **arguments)
            return LossOutput(tf.reduce_mean(logits ** 2), {})

    return OnePass


def test_only_the_chosen_pass_moves_statistics():
    still = {}
    for name, arguments in {"chosen": {}, "other": {"update_statistics": False}, "inference": {"training": False},
                            "teacher": {"ema": True}}.items():
        model = make(one_pass(**arguments), tiny)
        before = states(model.network)
        model.train_on_views(views_of(model, 0))
        still[name] = [np.array_equal(a, b) for a, b in zip(before, states(model.network), strict=True)]
    names = [v.name for v in model.network.non_trainable_variables]
    assert names == ["mean", "variance", "count", *["moving_mean", "moving_variance"] * 2, "seed_generator_state"]
    assert all(still["other"]) and all(still["inference"]) and all(still["teacher"])
    assert still["chosen"] == ["moving" not in name for name in names]


def test_statistics_move_by_the_momentum_towards_those_of_the_batch():
    model = make(one_pass(), tiny)
    views = views_of(model, 0)
    pixels = (views["weak"].numpy().astype(np.float64) + 1) * 127.5 / 127.5  # Rescaling; Normalization: mean 0, var 1
    conv = next(layer for layer in model.network.body.layers if isinstance(layer, keras.layers.Conv2D))
    out = pixels @ conv.kernel.numpy()[0, 0] + conv.bias.numpy()
    model.train_on_views(views)
    mean, variance = states(model.network)[3:5]
    np.testing.assert_allclose(mean, 0.25 * out.mean((0, 1, 2)), rtol=1e-4)  # float32, and Normalization's epsilon
    np.testing.assert_allclose(variance, 0.75 + 0.25 * out.var((0, 1, 2)), rtol=1e-4)


def test_normalization_uses_the_statistics_it_is_given():
    """They are variables that Keras reads once; a checkpoint brings others."""
    net = tiny()
    moved = [tf.convert_to_tensor(v) for v in net.non_trainable_variables]
    moved[0] += 0.5
    weights = [tf.convert_to_tensor(v) for v in net.trainable_variables]
    found, _ = net.stateless_call(weights, moved, images(), training=False)
    wanted = net(images() - 0.5, training=False)  # (x + 1) - 0.5 before Normalization
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert np.abs(found - net(images(), training=False)).max() > 1e-2


def test_two_replicas_and_synchronised_statistics():
    """Synchronised and without randomness, two replicas do what one does with the whole batch."""
    def network():
        return tiny(rate=0.0, sync=True)

    single = make(FixMatch, network, replicas=2)
    halves, before = [views_of(single, seed) for seed in (0, 1)], state_of(single)
    single.train_on_views(joined(single, halves))
    # Sums over the batch have another order: some 1e-6 of gradients around 0.1.
    assert_states_agree(on_two_replicas(FixMatch, network, halves), state_of(single), before, atol=1e-5)


# Randomness.

def test_randomness_comes_from_the_seed_of_the_pass():
    net, x = tiny(), images(32)
    before = states(net)

    def run(seed, training=True):
        weights, moved = ([tf.convert_to_tensor(v) for v in group] for group in
                          (net.trainable_variables, net.non_trainable_variables))
        found, after = net.stateless_call(weights, moved, x, training=training, seed=seed)
        np.testing.assert_array_equal(after[-1], before[-1])  # the layer's own seed is as it was
        return found.numpy()

    np.testing.assert_array_equal(run(SEED), run(SEED))
    assert np.abs(run(SEED) - run(SEED + 1)).max() > 1e-3
    np.testing.assert_array_equal(run(None, False), run(None, False))
    compiled = tf.function(lambda seed: net(x, training=True, seed=seed), jit_compile=False)
    np.testing.assert_allclose(compiled(SEED), run(SEED), atol=1e-5)
    with pytest.raises(ValueError, match="got seed=None, but this pass is random"):
        net(x, training=True)
    assert not tiny(rate=0.0).needs_seed_in_training


def test_a_run_that_is_continued_draws_the_same():
    """Three updates against two, a copy of the state in a new network, and one."""
    whole, first, then = (make(FixMatch, tiny) for _ in range(3))
    views = [views_of(whole, seed) for seed in range(3)]
    for seen in views:
        whole.train_on_views(seen)
    for seen in views[:2]:
        first.train_on_views(seen)
    for new, old in zip(*(tf.nest.flatten(model.checkpoint_items()) for model in (then, first)), strict=True):
        new.assign(old)
    then.network(images(), training=True, seed=SEED)  # what others draw does not matter
    for new, old in zip(*(tf.nest.flatten(model.checkpoint_items()) for model in (then, first)), strict=True):
        new.assign(old)
    then.train_on_views(views[2])
    assert then.fingerprint() == whole.fingerprint() != first.fingerprint()


@pytest.mark.slow
def test_replicas_draw_apart_and_repeat():
    single = make(FixMatch, tiny, replicas=2)
    half = views_of(single, 0)
    found = [on_two_replicas(FixMatch, tiny, [half, half]) for _ in range(2)]
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)
    single.train_on_views(joined(single, [half, half]))
    assert any(np.abs(a - b).max() > 1e-4 for a, b in zip(found[0], state_of(single), strict=True))


def test_all_random_layers_of_efficientnet_are_found():
    net = networks.build("keras:EfficientNetB0", num_classes=3, image_shape=(32, 32, 3), seed=1)
    kept = [v for v in net.non_trainable_variables if "seed" in v.name]
    assert len(kept) == len(net._seeds()) > 5 and net.needs_seed_in_training
    x = images(4, shape=(32, 32, 3))
    a, b, c = (net.stateless_call(net.trainable_variables, net.non_trainable_variables, x, training=True,
                                  seed=SEED + i)[0].numpy() for i in (0, 0, 1))
    np.testing.assert_array_equal(a, b)
    assert np.abs(a - c).max() > 0


# Weight decay, precision, memory, oneDNN.

def test_all_kernels_decay():
    model = make(Supervised, tiny)
    decayed = [model.network.trainable_variables[i].name for i in model.update.groups["all"].decayed]
    assert decayed == ["kernel", "kernel", "depthwise_kernel", "pointwise_kernel", "kernel"]  # of the dense layer
    kernels = [v.numpy() for v in model.network.trainable_variables if len(v.shape) > 1]
    expected = sum(0.5 * np.sum(np.square(kernel, dtype=np.float64)) for kernel in kernels)
    assert float(model.train_on_views(views_of(model, 0))["losses/wd"]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_a_compiled_step_does_the_same():
    """With XLA, and without stochastic depth, which it draws otherwise. Its sums have another order: 1e-5."""
    plain, compiled = (make(FixMatch, lambda: tiny(rate=0.0), jit=jit) for jit in (False, True))
    views, before = views_of(plain, 0), state_of(plain)
    for model in (plain, compiled):
        model.train_on_views(views)
    assert_states_agree(state_of(compiled), state_of(plain), before, atol=1e-5)


def test_half_precision_has_float32_logits():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        half = tiny(rate=0.0)
    finally:
        keras.config.set_dtype_policy(before)
    found, moved = half.stateless_call(half.trainable_variables, half.non_trainable_variables, images(), training=True)
    assert found.dtype == tf.float32 and all(v.dtype != tf.bfloat16 for v in moved)
    # bfloat16 has 8 bits: 0.4 % of each number, through five layers.
    np.testing.assert_allclose(found, tiny(rate=0.0)(images(), training=True), atol=0.2)


def test_onednn_is_trusted_but_with_narrow_strided_convolutions(monkeypatch, tmp_path):
    monkeypatch.setattr(distribute, "onednn_is_on", lambda: True)
    assert RunConfig.of(CSSL, arch=SMALL, filters=3).trusts_onednn
    for name, narrow in (("Xception", True), ("MobileNetV3Small", False)):
        config = RunConfig.of(Supervised, arch=f"keras:{name}", train_dir=str(tmp_path / "runs"))
        net = networks.build(f"keras:{name}", num_classes=2, image_shape=(96, 96, 3))
        assert config.trusts_onednn == net.trusts_onednn == (not narrow)
        if narrow:
            with pytest.raises(UserError, match="keras:Xception: oneDNN.* Set TF_ENABLE_ONEDNN_OPTS=0"):
                experiment.train(config)
    assert tiny().trusts_onednn and not tiny(stride=2).trusts_onednn
    model = make(Supervised, tiny)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.train_on_views(views_of(model, 0))
    strided = make(Supervised, lambda: tiny(stride=2))
    with pytest.warns(UserWarning, match="oneDNN"):
        strided.train_on_views(views_of(strided, 0))


# Files of weights.

def original(top=False, alpha=0.1, seed=5):
    net = keras.applications.MobileNet(alpha=alpha, include_top=top, weights=None, input_shape=(32, 32, 3), classes=7)
    rng = np.random.RandomState(seed)
    net.set_weights([rng.uniform(0.1, 1, w.shape) for w in net.get_weights()])
    return net


@pytest.fixture(scope="module")
def weight_files(tmp_path_factory):
    """Files of one network, and its weights."""
    folder, whole, body = tmp_path_factory.mktemp("weights"), original(top=True), original()
    body.set_weights(whole.get_weights()[:len(body.weights)])
    nested = keras.Sequential([keras.Input((32, 32, 3)), body, keras.layers.Flatten(), keras.layers.Dense(2)])
    for name, net in {"whole": whole, "body": body, "nested": nested}.items():
        net.save(folder / f"{name}.keras")
    for name, net in {"whole": whole, "body": body, "wider": original(alpha=0.2)}.items():
        net.save_weights(folder / f"{name}.weights.h5")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        body.save(folder / "legacy.h5")
    original(alpha=0.2).save(folder / "wider.keras")
    (folder / "garbage.keras").write_bytes(b"nothing")
    (folder / "garbage.weights.h5").write_bytes(b"nothing")
    return folder, body.get_weights()


@pytest.mark.parametrize("name", ["whole.keras", "body.keras", "nested.keras", "whole.weights.h5", "body.weights.h5",
                                  "legacy.h5"])
def test_weights_come_from_files(weight_files, name):
    folder, wanted = weight_files
    net = networks.build(SMALL, num_classes=5, image_shape=(32, 32, 3), weights=str(folder / name), seed=1)
    for found, expected in zip(net.body.get_weights(), wanted, strict=True):
        np.testing.assert_array_equal(found, expected)
    assert net.classifier.kernel.shape == (102, 5)


@pytest.mark.parametrize("name, message", [
    ("none.weights.h5", "There is no file of weights .*none.weights.h5; expected a .weights.h5 or .keras file of"),
    ("wider.weights.h5", "do not fit"), ("wider.keras", "do not fit .*shape"), ("garbage.keras", "do not fit"),
    ("garbage.weights.h5", "do not fit")])
def test_other_files_are_one_line(weight_files, name, message):
    with pytest.raises(UserError, match=message) as caught:
        networks.build(SMALL, num_classes=5, image_shape=(32, 32, 3), weights=str(weight_files[0] / name))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_a_missing_download_is_one_line(monkeypatch, tmp_path, program):
    from keras.src.utils import file_utils

    def offline(*args, **kwargs):
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.setattr(file_utils, "urlretrieve", offline)
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))  # nothing was downloaded before
    done = program(Supervised, "--dataset=digits.1@40-1", "--arch=keras:MobileNet", f"--train_dir={tmp_path / 'runs'}",
                   code=2)
    assert "ImageNet weights of MobileNet cannot be downloaded" in done.stderr
    assert "Download https://storage.googleapis.com/" in done.stderr and "mobilenet_1_0_224_tf_no_top.h5" in done.stderr
    assert "~/.keras/models" in done.stderr and not list(tmp_path.glob("runs/*/*/*/tf/*"))


def test_sizes_that_do_not_suit_are_one_line():
    with pytest.raises(UserError, match="keras:InceptionV3 cannot be made for images of 32x32: Input size must be at"):
        networks.build("keras:InceptionV3", num_classes=2, image_shape=(32, 32, 3))


# A whole run.

@pytest.mark.slow
def test_a_run_goes_on_without_the_file_it_started_from(weight_files, tmp_path, program):
    file = tmp_path / "start.weights.h5"
    file.write_bytes((weight_files[0] / "body.weights.h5").read_bytes())
    flags = ["--dataset=digits.1@40-1", f"--arch={SMALL}", "--image_size=32", f"--weights={file}", "--batch=8",
             "--train_steps=4", "--report_kimg=0.03125", "--lr=0.0001", f"--train_dir={tmp_path / 'runs'}"]
    shown = program(Supervised, *flags).stdout
    assert "bn_momentum=0.98 (preset)" in shown and "network: keras:MobileNet,alpha=0.1" in shown
    (path,) = (tmp_path / "runs").glob("*/*/*")
    reader = tf.train.load_checkpoint(str(path / "tf"))
    first = reader.get_tensor("weights/0/.ATTRIBUTES/VARIABLE_VALUE")
    np.testing.assert_allclose(first, weight_files[1][0], atol=0.05)  # four small steps from the file's 0.1 to 1
    file.unlink()
    assert "This run is finished" in program(Supervised, *flags).stdout
    accuracy = cssl.open(path).evaluate()["accuracy"]
    assert f"accuracy {accuracy:6.2f}" in shown
    done = program(Supervised, *flags, f"--rerun={tmp_path.name}", code=2)
    assert "There is no file of weights" in done.stderr
