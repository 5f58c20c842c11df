"""The Python API as docs/extending.md describes it: Keras's fit, predict and files, own networks, views and methods."""
import functools
import inspect
import random
import re
import runpy
import subprocess
import sys
import threading
from collections.abc import Iterator

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import ROOT
from helpers import code_blocks, invoke, strategy_of
from keras import layers

import cssl
from cssl import CSSL, FixMatch, FlexMatch, ReMixMatch, RunConfig, SimMatch, Supervised, UPSMatch, cli, train
from libml import data as data_module
from libml import experiment, networks
from libml.augment import Augmenter
from libml.config import describe
from libml.errors import OptionError, UserError
from libml.networks import custom as own
from libml.randomness import seeded

DIGITS = dict(image_shape=(16, 16, 3), mirror=False, shift=2, jit_compile=False)


def tiny_net(num_classes, image_shape):
    """With batch normalisation and dropout of Keras."""
    return keras.Sequential([keras.Input(image_shape), layers.Conv2D(4, 5, strides=4), layers.BatchNormalization(),
                             layers.ReLU(), layers.Dropout(0.1), layers.Flatten(), layers.Dense(num_classes)])


def make(method=CSSL, augment="d.d.x", own_strong=None, **options):
    return method(own.build_network(tiny_net, 10, (16, 16, 3), seed=0), 10, total_images=4096, seed=3, batch=4,
                  uratio=2, augmenter=Augmenter(augment, **DIGITS, own_strong=own_strong), **options)


# fit.

@pytest.fixture(scope="module")
def fitted(digits, tmp_path_factory):
    """A model that was fitted for two epochs of three updates, with callbacks; its history; where the files are."""
    folder, model = tmp_path_factory.mktemp("fitted"), make(confidence=0.3)
    history = model.fit(digits.dataset(model), epochs=2, steps_per_epoch=3, verbose=0,
                        validation_data=(digits.test_images, digits.test_labels),
                        callbacks=[keras.callbacks.ModelCheckpoint(str(folder / "{epoch}.keras")),
                                   keras.callbacks.TensorBoard(str(folder / "logs"), update_freq=1,
                                                               write_steps_per_second=True)])
    return model, history.history, folder


def test_history_holds_means_over_the_epoch(digits, fitted):
    """Against the scalars of the same six steps one by one; 1e-6: means of float32 in float64, rounded."""
    model, history, _ = fitted
    twin = make(confidence=0.3)
    step = tf.function(twin.train_on_bytes, autograph=False)
    steps = [{name: float(value) for name, value in step(batch).items()} for batch in digits.dataset(twin).take(6)]
    assert twin.fingerprint() == model.fingerprint()
    for name in ("losses/xe", "losses/total", "monitors/alpha", "monitors/lr", "metrics/kld"):
        wanted = [np.mean([scalars[name] for scalars in part]) for part in (steps[:3], steps[3:])]
        np.testing.assert_allclose(history[name], wanted, rtol=1e-6)
        assert len({scalars[name] for scalars in steps}) > 1
    assert history["loss"] == history["losses/total"]
    for part, found in zip((steps[:3], steps[3:]), history["monitors/pseudo_accuracy_masked"], strict=True):
        used, right = (sum(scalars[f"monitors/pseudo_used{end}"] for scalars in part) for end in ("", "_correct"))
        assert 0 < used < 3 and found == pytest.approx(right / used, rel=1e-6)


def test_callbacks_of_keras(digits, fitted):
    model, history, folder = fitted
    scores = model.evaluate(digits.test_images, digits.test_labels)
    assert {f"val_{name}": value for name, value in scores.items()} == {
        name: values[-1] for name, values in history.items() if name.startswith("val_")}
    first, second = (cssl.load_model(folder / f"{epoch}.keras") for epoch in (1, 2))
    assert [int(saved.updates.numpy()) for saved in (first, second)] == [3, 6]
    assert second.fingerprint() == model.fingerprint() != first.fingerprint()
    events = [event for file in sorted((folder / "logs/train").glob("events*"))
              for event in tf.compat.v1.train.summary_iterator(str(file))]
    means = {event.step: float(tf.make_ndarray(value.tensor)) for event in events for value in event.summary.value
             if value.tag == "epoch_loss"}
    assert means == pytest.approx(dict(enumerate(history["loss"])))
    assert any(value.tag == "epoch_steps_per_second" for event in events for value in event.summary.value)


def test_backup_and_restore_goes_on_after_a_crash(digits, tmp_path):
    def fit(model, **calls):
        model.fit(digits.dataset(model), epochs=3, steps_per_epoch=1, verbose=0, callbacks=[
            keras.callbacks.BackupAndRestore(str(tmp_path / "backup")), keras.callbacks.LambdaCallback(**calls)])

    with pytest.raises(ZeroDivisionError):
        fit(make(), on_epoch_begin=lambda epoch, logs: epoch == 2 and 1 / 0)
    again, begun = make(), []
    fit(again, on_train_begin=lambda logs: begun.append(int(again.updates.numpy())))
    assert begun == [2] and int(again.updates.numpy()) == 3


@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
def test_own_networks_in_half_precision(tmp_path, policy):
    """Their logits are half, unlike those of libml's networks."""
    config = RunConfig.of(CSSL, **TINY | {"train_steps": 2}, augment="d.d.x", mixed_precision=policy,
                          train_dir=str(tmp_path))
    model = train(config, network=tiny_net).model
    assert model.network.layers[-1].compute_dtype == policy and int(model.updates.numpy()) == 2


@pytest.mark.parametrize("how", [dict(steps_per_execution=2), dict(run_eagerly=True)])
def test_means_however_the_steps_are_run(digits, how):
    model, twin = make(Supervised), make(Supervised)
    model.compile(**how)
    history = model.fit(digits.dataset(model), steps_per_epoch=4, verbose=0).history
    losses = [float(twin.train_on_bytes(batch)["losses/total"]) for batch in digits.dataset(twin).take(4)]
    # 1e-5: eager and compiled code round differently.
    assert int(model.updates.numpy()) == 4 and history["loss"] == pytest.approx([np.mean(losses)], rel=1e-5)


def test_a_model_is_summarised(fitted):
    lines = []
    fitted[0].summary(print_fn=lambda text, **how: lines.append(text))
    assert "Total params" in "".join(lines)


def test_a_callback_may_stop_but_not_change_the_rate(digits):
    model = make(Supervised)
    stop = keras.callbacks.EarlyStopping("losses/wd", mode="max", min_delta=1e9)  # never better than at first
    model.fit(digits.dataset(model), epochs=5, steps_per_epoch=1, verbose=0, callbacks=[stop])
    assert int(model.updates.numpy()) == 2
    assert float(model.optimizer.learning_rate) == pytest.approx(0.03 * np.cos(8 / 4096 * 7 * np.pi / 16))
    with pytest.raises(UserError, match=r"learning_rate=0.5: .* own schedule"):
        model.fit(digits.dataset(model), steps_per_epoch=1, verbose=0,
                  callbacks=[keras.callbacks.LearningRateScheduler(lambda epoch: 0.5)])


def test_fit_does_what_train_does(digits, tmp_path, monkeypatch):
    """With a step that is traced once."""
    step, traced = FixMatch.train_on_bytes, []
    monkeypatch.setattr(FixMatch, "train_on_bytes", lambda model, batch: traced.append(batch) or step(model, batch))
    config = RunConfig.of(FixMatch, dataset="digits.1@40-1", batch=4, uratio=2, filters=4, scales=1, augment="d.d.x",
                          train_steps=4, report_kimg=1, seed=5, train_dir=str(tmp_path))
    model = experiment.build(config, digits)
    for _ in range(2):  # dataset(model) goes on where the model is
        model.fit(digits.dataset(model), steps_per_epoch=2, verbose=0)
    assert len(traced) == 1 and model.fingerprint() == train(config).model.fingerprint()


def test_the_rate_stays_where_its_schedule_ends(digits):
    """A cosine that went on would turn negative, and training would undo what it learnt."""
    model = make()
    wanted = model.options.lr * np.cos(7 * np.pi / 16)  # 1e-5: float32
    for updates in (4096 // 4, 3 * 4096 // 4):
        model.updates.assign(updates)
        history = model.fit(digits.dataset(model), steps_per_epoch=1, verbose=0).history
        assert [history["monitors/lr"][0], float(model.optimizer.learning_rate)] == pytest.approx([wanted] * 2, 1e-5)
    assert float(CSSL(model.made_of["network"], 10, total_images=0.5).rate_after(9, lambda images: images)) == 0


def test_batches_that_contradict_the_options(digits):
    def batches(batch=4, uratio=2, **changes):
        return data_module.batches(digits, batch=batch, uratio=uratio).map(
            lambda element: {name: changes.get(name, lambda x: x)(value) for name, value in element.items()})

    model, alone = make(), CSSL(tiny_net(10, (16, 16, 3)), 10)
    unknown = tf.data.Dataset.from_tensor_slices(
        {"labeled": digits.images[:8], "label": digits.labels[:8], "unlabeled": digits.images[:8]}).batch(4)
    for x, message in [
            (batches(batch=8), r"'labeled' as .*shape=\(8, .* batch=4 and uratio=2 of this CSSL mean uint8 of shape "
                               r"\[4, 16, 16, 3\]"),
            (batches(uratio=3), r"'unlabeled' as .*shape=\(12, .* mean uint8 of shape \[8, 16, 16, 3\]"),
            (unknown, "drop_remainder=True"),
            (batches(labeled=lambda x: tf.cast(x, tf.float32)), "'labeled' as .*float32.* mean uint8"),
            (batches(unlabeled=lambda x: x[:, :8]), r"'unlabeled' as .*shape=\(8, 8, 16, 3\)"),
            (batches(), "These batches never end"),
            (digits.images, "fit got ndarray; expected a dataset of dicts with labeled, label, unlabeled"),
            (tf.data.Dataset.from_tensors((digits.images[:4], digits.labels[:4])), "dataset of dicts")]:
        with pytest.raises(UserError, match=message) as caught:
            model.fit(x)
        assert "\n" not in str(caught.value)
    for x, message in [
            (batches(label=lambda y: tf.cast(y, tf.float32)), r"'label' as .*float32.* mean int64 of shape \[4\]"),
            (batches(label=lambda y: tf.one_hot(y, 10, dtype=tf.int64)), r"'label' as .*shape=\(4, 10\)"),
            (batches(label=lambda y: tf.sparse.from_dense(y)), "'label' as SparseTensorSpec.* mean int64"),
            (batches(labeled=tf.RaggedTensor.from_tensor), "'labeled' as RaggedTensorSpec"),
            (batches(label=lambda y: {"y": y}), "'label' as {'y': TensorSpec"),
            (batches(unlabeled_label=lambda y: y[:2]), r"'unlabeled_label' as .*shape=\(2,\).* int64 of shape \[8\]"),
            (batches().take(0), "The dataset has no batches"), (iter(batches()), "fit got OwnedIterator; expected"),
            (batches(label=lambda y: y + 10), "'label' that this CSSL does not know; .* 0 to 9"),
            (batches(label=lambda y: y - 20), "'label' that this CSSL does not know")]:
        with pytest.raises(UserError, match=message) as caught:
            model.fit(x, steps_per_epoch=1, verbose=0)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="and labels; expected"):
        model.fit(batches(), digits.labels)
    with pytest.raises(UserError, match="A batch is tuple; expected a dict"):
        model.compile()
        model.train_on_batch(digits.images[:4], digits.labels[:4])
    with pytest.raises(UserError, match="has no augmenter .* augmenter=data.augmenter"):
        alone.fit(batches())
    with pytest.raises(UserError, match="compile got 'adam', metrics, but CSSL has its own loss"):
        model.compile("adam", metrics=["accuracy"])
    with strategy_of(2).scope():
        model = make()
    with pytest.raises(UserError, match="fit trains on one device; .* cssl.train uses them all"):
        model.fit(batches(), steps_per_epoch=1)
    assert int(model.updates.numpy()) == 0


def test_validation_data_as_lists_and_without_end(digits):
    images, labels = digits.test_images[:8], digits.test_labels[:8]
    batches = tf.data.Dataset.from_tensor_slices((images, labels)).batch(4).repeat()
    found = []
    for more in (dict(validation_data=(list(images), [int(y) for y in labels])),
                 dict(validation_data=batches, validation_steps=2)):
        model = make()
        found.append(model.fit(digits.dataset(model), steps_per_epoch=1, verbose=0, **more).history["val_loss"][0])
    assert found[0] == pytest.approx(found[1], rel=1e-5)  # batches of another size: sums have another order


@pytest.mark.parametrize("method, lacking", [(FlexMatch, "unlabeled_index"), (SimMatch, "labeled_index")])
def test_methods_that_need_positions_say_so(digits, method, lacking):
    network = networks.build("resnet", num_classes=10, image_shape=(16, 16, 3), filters=16, repeat=1, scales=1)
    model = method(network, 10, batch=4, uratio=2, augmenter=Augmenter("d.d.x", **DIGITS), set_sizes=(40, 1436))
    batches = digits.dataset(model).map(lambda batch: {key: batch[key] for key in ("labeled", "label", "unlabeled")})
    with pytest.raises(UserError, match=f"Batches have no '{lacking}', .* which {method.__name__} needs"):
        model.fit(batches, steps_per_epoch=1, verbose=0)
    few = method(network, 10, batch=4, uratio=2, augmenter=Augmenter("d.d.x", **DIGITS), set_sizes=(2, 2))
    with pytest.raises(UserError, match=f"'(un)?labeled_index' that this {method.__name__} does not know; .* 0 to 1"):
        few.fit(digits.dataset(few), steps_per_epoch=1, verbose=0)


def test_labels_of_unlabelled_images_may_be_left_out(digits):
    """They are for monitors alone: the weights become the same."""
    model, twin = make(), make()
    history = model.fit(digits.dataset(model).map(lambda batch: {key: batch[key] for key in (
        "labeled", "label", "unlabeled")}), steps_per_epoch=2, verbose=0).history
    twin.fit(digits.dataset(twin), steps_per_epoch=2, verbose=0)
    assert model.fingerprint() == twin.fingerprint() and "monitors/pseudo_accuracy" not in history


@pytest.mark.parametrize("arguments, message", [
    (dict(steps_per_epoch=0), "steps_per_epoch=0; expected a whole number from 1 up"),
    (dict(steps_per_epoch=-1), "steps_per_epoch=-1"), (dict(steps_per_epoch=1.5), "steps_per_epoch=1.5"),
    (dict(batch_size=8), "fit got batch_size; expected nothing of the kind"),
    (dict(class_weight={0: 1.0}, validation_split=0.1), "fit got class_weight, validation_split"),
    (dict(validation_data=np.zeros((2, 16, 16, 3), np.uint8)), "validation_data is ndarray"),
    (dict(validation_data=(np.zeros((2, 8, 16, 3), np.uint8), [0, 1])), r"shape \[2, 8, 16, 3\]"),
    (dict(validation_data=(np.zeros((2, 16, 16, 3), np.uint8), np.eye(10)[:2])), "Labels are float64 of shape"),
    (dict(validation_data=tf.data.Dataset.from_tensors(np.zeros((2, 16, 16, 3), np.uint8))), "expected a class number"),
    (dict(validation_data=tf.data.Dataset.from_tensors(0).take(0)), "The dataset has no images"),
    (dict(validation_data=tf.data.Dataset.from_tensors(0).repeat()), "validation data never end: .* validation_steps")])
def test_arguments_of_fit_that_make_no_sense(digits, arguments, message):
    """Endless before, ignored, or an error after an epoch that was trained for nothing."""
    model = make()
    with pytest.raises(UserError, match=message) as caught:
        model.fit(digits.dataset(model), **{"steps_per_epoch": 1, "verbose": 0, **arguments})
    assert "\n" not in str(caught.value) and int(model.updates.numpy()) == 0


# predict and evaluate.

def test_scores_of_predictions(digits, fitted):
    """ECE bin by bin; bytes, floats and datasets alike. 1e-5: graphs divide by 127.5 as they like."""
    model, images, labels = fitted[0], digits.test_images, digits.test_labels
    logits = model.predict(images, verbose=0)
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    scores = model.evaluate(images, labels)
    assert scores["accuracy"] == pytest.approx(100 * np.mean(p.argmax(1) == labels))
    bins = np.minimum((p.max(1) * 15).astype(int), 14)
    ece = sum(np.mean(bins == b) * abs(np.mean((p.argmax(1) == labels)[bins == b]) - p.max(1)[bins == b].mean())
              for b in set(bins))
    assert scores["ece"] == pytest.approx(ece, abs=1e-6)
    assert scores["loss"] == scores["nll"] == pytest.approx(-np.log(p[np.arange(len(p)), labels]).mean(), rel=1e-5)
    floats = images / 127.5 - 1
    np.testing.assert_allclose(model.predict(floats, verbose=0), logits, atol=1e-5)
    batches = tf.data.Dataset.from_tensor_slices((images, labels)).batch(50)
    np.testing.assert_allclose(model.predict(batches), logits, atol=1e-5)
    assert model.evaluate(batches) == pytest.approx(scores, abs=1e-4)
    with pytest.warns(UserWarning, match="If yours are from 0 to 1"):
        model.predict(images[:2] / 255, verbose=0)


@pytest.mark.parametrize("change, message", [
    (lambda x: x.astype(np.float32), "values from 0 to 255; expected -1 to 1. .* images.astype"),
    (lambda x: x / np.nan, "values from nan to nan"),
    (lambda x: x.astype(int), "Images are int64; expected uint8"),
    (lambda x: x[:, :8], r"shape \[2, 8, 16, 3\]; this model takes \[N, 16, 16, 3\]"),
    (lambda x: x[..., :1], r"shape \[2, 16, 16, 1\]"), (lambda x: x[0], r"shape \[16, 16, 3\].* image\[None\]"),
    (lambda x: x[:0], "no images"),
    (lambda x: tf.data.Dataset.from_tensors(x[:, :8]), r"shape \[2, 8, 16, 3\]")])
def test_images_that_the_model_does_not_take(digits, fitted, change, message):
    images = change(digits.test_images[:2])
    with pytest.raises(UserError, match=message) as caught:
        fitted[0].predict(images)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError):
        fitted[0].evaluate(images, [0, 1])


@pytest.mark.parametrize("call, message", [
    (lambda model, images: model.predict(images, batch_size=-1), "predict got batch_size=-1; expected a whole number"),
    (lambda model, images: model.evaluate(images, [0, 1], batch_size=1.5), "predict got batch_size=1.5"),
    (lambda model, images: RunConfig.of(keras.Model), "RunConfig.of got <class .*; expected the class of a method"),
    (lambda model, images: cssl.from_folder("here", image_size=True), "image_size=True: expected 1 to 4096 pixels")])
def test_arguments_that_make_no_sense(digits, fitted, call, message):
    with pytest.raises(UserError, match=message) as caught:
        call(fitted[0], digits.test_images[:2])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("network", ["keras", "libml"])
def test_the_size_of_images_is_known_without_an_augmenter(network):
    net = tiny_net(4, (16, 16, 3)) if network == "keras" else networks.build(
        "resnet", num_classes=4, image_shape=(16, 16, 3), filters=4, repeat=1, scales=1)
    with pytest.raises(UserError, match=r"takes \[N, 16, 16, 3\]"):
        CSSL(net, 4).predict(np.zeros((1, 32, 32, 3), np.uint8))


def test_batches_to_predict_and_evaluate(digits, fitted):
    """As many as one says; never all of what has no end."""
    images, labels = digits.test_images[:8], digits.test_labels[:8]
    batches = tf.data.Dataset.from_tensor_slices((images, labels)).batch(4)
    assert fitted[0].predict(batches.repeat(), steps=3).shape == (12, 10)
    assert fitted[0].evaluate(batches.repeat(), steps=2) == fitted[0].evaluate(batches)
    assert fitted[0].evaluate(images, labels, batch_size=3, steps=2) == fitted[0].evaluate(images[:6], labels[:6],
                                                                                           batch_size=3)
    for call, message in [(lambda: fitted[0].predict(batches.repeat()), "These batches never end: .* with steps"),
                          (lambda: fitted[0].evaluate(batches.repeat()), "These batches never end"),
                          (lambda: fitted[0].evaluate(batches, labels), "evaluate got labels beside a dataset"),
                          (lambda: fitted[0].evaluate(images, labels, sample_weight=[1] * 8), "got sample_weight"),
                          (lambda: fitted[0].evaluate(batches.map(lambda x, y: (x, y, y))), "Batches have 3 parts"),
                          (lambda: fitted[0].predict(images, steps=0), "predict got steps=0"),
                          (lambda: fitted[0].predict([images[0], images[1][:8]]), "Images are of several shapes")]:
        with pytest.raises(UserError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_labels_that_make_no_sense(digits, fitted):
    for labels in (None, [0], [0, 10], [0, -1], [0.0, 1.0], np.eye(10, dtype=int)[:2]):
        with pytest.raises(UserError, match="expected a class number from 0 to 9 for each of the 2 images"):
            fitted[0].evaluate(digits.test_images[:2], labels)


# Files.

@keras.saving.register_keras_serializable()
def turned(images, seed):
    """A strong augmentation: the negative, upside down, with a little noise."""
    noise = tf.random.stateless_uniform(tf.shape(images), seed, 0, 3, tf.int32)
    return tf.cast(tf.clip_by_value(255 - tf.cast(images[:, ::-1], tf.int32) + noise, 0, 255), tf.uint8)


def test_a_file_continues_to_the_same_bits(digits, tmp_path):
    """Dropout's stream, batch normalisation, momentum, averages, alignment and views go on."""
    model = make(augment="d.d.d", own_strong=turned, confidence=0.3)
    model.fit(digits.dataset(model), steps_per_epoch=2, verbose=0)
    model.save(tmp_path / "m.keras")
    again = keras.saving.load_model(tmp_path / "m.keras")
    assert type(again) is CSSL and again.options == model.options and again.augmenter.own_strong is turned
    np.testing.assert_array_equal(again.predict(digits.test_images, verbose=0),
                                  model.predict(digits.test_images, verbose=0))
    histories = [m.fit(digits.dataset(m), steps_per_epoch=3, verbose=0).history for m in (model, again)]
    assert histories[0] == histories[1] and model.fingerprint() == again.fingerprint()
    assert int(again.updates.numpy()) == 5


class Remembering(FixMatch):
    """A method from outside, with state and an argument of its own."""

    def __init__(self, network, num_classes, *, size=2, **arguments):
        self.size = size
        super().__init__(network, num_classes, **arguments)

    def initial_state(self):
        return {"memory": np.arange(self.size, dtype=np.int32)}


@pytest.mark.parametrize("method, arch, arguments", [
    (ReMixMatch, "cnn13", dict(w_rot=0.25)), (Remembering, "shake", dict(size=5, options=FixMatch.Options(batch=2))),
    (UPSMatch, "mcdropresnet", dict(loss_scaling=True, image_statistics=(np.float32([0.1, 0.2, 0.3]), np.ones(3)),
                                    set_sizes=(40, 1000), seed=7))])
def test_every_kind_of_model_can_be_saved(tmp_path, method, arch, arguments):
    with experiment.dtype_policy("mixed_bfloat16"):
        network = networks.build(arch, num_classes=10, image_shape=(16, 16, 3), filters=4, repeat=1, dropout=0.3,
                                 seed=1)
        model = method(network, 10, augmenter=Augmenter("d.d.d", **DIGITS), **arguments)
    for k, variable in enumerate(tf.nest.flatten(model.checkpoint_items())):
        variable.assign(tf.cast(tf.random.stateless_uniform(variable.shape, [k, 0], 0.5, 1), variable.dtype) + 1)
    model.save(tmp_path / "m.keras")
    again = cssl.load_model(tmp_path / "m.keras")
    assert again.fingerprint() == model.fingerprint() and again.options == model.options
    assert again.network.variables[0].shape == model.network.variables[0].shape
    assert (again.seed, again.num_unlabeled, again.loss_scaling) == (model.seed, model.num_unlabeled,
                                                                    model.loss_scaling)
    images = np.random.RandomState(0).randint(0, 256, (3, 16, 16, 3)).astype(np.uint8)
    logits = model.predict(images, verbose=0)
    np.testing.assert_array_equal(again.predict(images, verbose=0), logits)  # of bfloat16 layers, whitened
    network.save(tmp_path / "network.keras")
    np.testing.assert_array_equal(keras.saving.load_model(tmp_path / "network.keras")(images / 255.0),
                                  network(images / 255.0))


def test_files_that_hold_something_else(tmp_path):
    """Ours where it is ours to say; else Keras's own errors, and a file that was there stays as it was."""
    with pytest.raises(UserError, match=r"m.h5 would be of the older format.*; expected a name that ends in .keras"):
        make().save(tmp_path / "m.h5")
    make(augment="d.d.x").save_weights(tmp_path / "plain.weights.h5")
    with pytest.raises(ValueError, match="The file has no rates: it holds another kind of model"):
        make(augment="d.d.d").load_weights(tmp_path / "plain.weights.h5")
    with pytest.raises(OSError):
        make().save(tmp_path / f"{'x' * 300}.keras")
    with pytest.raises(ValueError, match="File not found"):
        cssl.load_model(tmp_path / "none.keras")
    (tmp_path / "garbage.keras").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="keras"):
        cssl.load_model(tmp_path / "garbage.keras")
    assert (tmp_path / "garbage.keras").read_bytes() == b"nothing" and not (tmp_path / "m.h5").exists()


def test_functions_that_keras_does_not_know_are_given(tmp_path):
    def mine(images, seed):
        return images

    make(own_strong=mine).save(tmp_path / "m.keras")
    with pytest.raises(TypeError, match="Could not locate function 'mine'"):
        cssl.load_model(tmp_path / "m.keras")
    assert cssl.load_model(tmp_path / "m.keras", custom_objects={"mine": mine}).augmenter.own_strong is mine


@pytest.mark.parametrize("path", ["x" * 300, "a/" * 2100, "a\0b"], ids=["name", "path", "NUL"])
def test_paths_that_no_file_system_takes(digits, tmp_path, path):
    path, model = f"{tmp_path}/{path}", make()
    for use in (lambda: cssl.open(path), lambda: cssl.open_export(path), lambda: cssl.from_folder(path),
                lambda: cssl.from_csv(path), lambda: cssl.load("cifar10.1@40-1", data_dir=path),
                lambda: train(RunConfig.of(CSSL, **TINY, train_dir=path)), lambda: model.export(path, digits),
                lambda: model.predict_files(path, digits),
                lambda: networks.build("keras:MobileNet,alpha=0.1", num_classes=2, image_shape=(32, 32, 3),
                                       weights=path)):
        with pytest.raises(UserError, match="file systems? takes?|File name too long|null byte") as caught:
            use()
        assert "\n" not in str(caught.value)


def test_heads_are_saved(tmp_path):
    network = networks.build("resnet", num_classes=3, image_shape=(8, 8, 3), filters=4, repeat=1)
    heads = networks.Heads(network, {"small": 2, "own": layers.Dense(5)}, seed=1)
    heads.save(tmp_path / "heads.keras")
    again, images = keras.saving.load_model(tmp_path / "heads.keras"), tf.ones([2, 8, 8, 3])
    for name in ("small", "own", "logits"):
        np.testing.assert_array_equal(again(images, outputs=(name,))[0], heads(images, outputs=(name,))[0])


@pytest.mark.slow
def test_a_file_is_read_by_another_process(digits, fitted, tmp_path, command):
    """That has made no model before, and imports no method by name."""
    model = fitted[0]
    model.save(tmp_path / "m.keras")
    np.save(tmp_path / "images.npy", digits.test_images[:20])
    code = ("import sys, numpy as np, cssl; assert 'keras' not in sys.modules; m = cssl.load_model(sys.argv[1]); "
            "np.save(sys.argv[3], m.predict(np.load(sys.argv[2]), verbose=0)); print(m.fingerprint())")
    done = command("-c", code, tmp_path / "m.keras", tmp_path / "images.npy", tmp_path / "logits.npy",
                   TF_ENABLE_ONEDNN_OPTS="0")
    assert done.stdout.split()[-1] == model.fingerprint()
    np.testing.assert_allclose(np.load(tmp_path / "logits.npy"), model.predict(digits.test_images[:20], verbose=0),
                               atol=1e-5)  # other numbers of devices and threads


# Options.

def test_hyperparameters_by_name():
    network = tiny_net(4, (8, 8, 3))
    assert CSSL(network, 4, confidence=0.5, batch=8).options == CSSL.Options(confidence=0.5, batch=8)
    for given, message in [(dict(confidence=2), "confidence=2.0: expected a number from 0 to 1"),
                           (dict(confidenze=1), "did you mean confidence"),
                           (dict(batch="8"), "batch='8': expected int")]:
        with pytest.raises(OptionError, match=message):
            CSSL(network, 4, **given)
    with pytest.raises(UserError, match="Got options and also batch"):
        CSSL(network, 4, options=CSSL.Options(), batch=8)


@pytest.mark.parametrize("name", sorted(cssl.methods()))
def test_help_says_every_argument(name):
    method = cssl.method(name)
    for option, field in describe(method.Options).items():
        assert f"        {option}: {field.metadata['help']} [" in method.__doc__
    for argument in ("network", "num_classes", "augmenter", "total_images", "seed", "jit"):
        assert len(re.findall(rf"^    {argument}: \S", method.__doc__, re.M)) == 1
    assert method.__doc__.count("**hyperparameters") == 1 and not method.__doc__.startswith("\n")
    parameters = inspect.signature(method).parameters
    assert list(parameters)[:2] == ["network", "num_classes"] and set(describe(method.Options)) < set(parameters)
    assert all(parameters[option].default == field.default for option, field in describe(method.Options).items())


@pytest.mark.parametrize("arguments, message", [
    (dict(num_classes=10.0), "CSSL got num_classes=10.0; expected a whole number from 2 up"),
    (dict(num_classes=1), "num_classes=1"), (dict(total_images=0), "total_images=0; expected a positive number"),
    (dict(total_images=float("nan")), "total_images=nan"), (dict(seed=None), "seed=None; expected a whole number"),
    (dict(seed=2 ** 70), "of 64 bits"), (dict(augmenter="d.d.d"), r"augmenter='d.d.d'; expected data.augmenter\("),
    (dict(options=Supervised.Options()), r"options=.*; expected CSSL.Options\("),
    (dict(options={"batch": 4}), "options={'batch': 4}; expected"),
    (dict(loss_scaling="x"), "loss_scaling='x'; expected True or False"), (dict(calibration=7), "calibration=7; expec"),
    (dict(calibration=([], [1])), "expected images and their classes"), (dict(set_sizes=5), "set_sizes=5; expected"),
    (dict(set_sizes=(40, "x")), "expected the numbers of labelled"), (dict(image_statistics=5), "statistics=5; expec"),
    (dict(image_statistics=(np.zeros(3), np.zeros(3))), "each channel, which must not be 0")])
def test_arguments_of_a_model_that_make_no_sense(arguments, message):
    with pytest.raises(UserError, match=message) as caught:
        CSSL(tiny_net(10, (16, 16, 3)), **{"num_classes": 10, **arguments})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("network, message", [
    (lambda: "resnet", "The network is str"), (lambda: keras.Sequential([layers.Dense(4)]), "has no weights yet"),
    (lambda: tiny_net(5, (8, 8, 3)), r"gives \(None, 5\); expected \(None, 4\)"),
    (lambda: keras.Sequential([keras.Input((8, 8, 3)), tiny_net(4, (8, 8, 3)), layers.Softmax()]), "ends in a softmax"),
    (lambda: keras.Sequential([keras.Input((8, 8, 3)), layers.Flatten(), layers.Dense(4, activation="softmax")]),
     "ends in a softmax")])
def test_networks_that_are_no_classifiers(network, message):
    with pytest.raises(UserError, match=message) as caught:
        CSSL(network(), 4)
    assert "\n" not in str(caught.value)


class Strange(keras.Model):
    """A dense layer, and what a function of its logits and of `training` makes of them."""

    def __init__(self, last, units=10):
        super().__init__()
        self.flatten, self.dense, self.last = layers.Flatten(), layers.Dense(units), last

    def call(self, images, training=False):
        return self.last(self.dense(self.flatten(images)), training)


def frozen(num_classes, image_shape):
    network = tiny_net(num_classes, image_shape)
    network.trainable = False
    return network


NAN = float("nan")
STRANGE = [  # what no constructor can see
    (lambda x, training: tf.nn.softmax(x), "from 0 to 1 whatever its weights are, as if it ended in a softmax"),
    (lambda x, training: keras.ops.sigmoid(x), "as if it ended in a sigmoid; expected logits: leave it out"),
    (lambda x, training: x if training else x * NAN, "NaN or infinite logits at inference"),
    (lambda x, training: x * NAN if training else x, "NaN or infinite logits in training"),
    (lambda x, training: tf.stop_gradient(x), "cannot learn: no gradient"),
    (lambda x, training: {"logits": x}, "makes dict of 8 images; expected float32"),
    (lambda x, training: None, "makes NoneType of 8 images"),
    (lambda x, training: x[:, None], r"makes float32 of shape \(8, 1, 10\)"),
    (lambda x, training: tf.cast(100 * x, tf.int32), "makes int32 of shape"),
    (lambda x, training: 1 / 0, r"does not take images of \(16, 16, 3\) \(.*division by zero")]


@pytest.mark.parametrize("last, message", STRANGE)
def test_networks_are_tried_before_training_begins(digits, tmp_path, last, message):
    """By `train`, before there is a folder, and by `fit`."""
    with pytest.raises(UserError, match=message) as caught:
        train(RunConfig.of(CSSL, **TINY, train_dir=str(tmp_path / "runs")),
              network=lambda num_classes, image_shape: built(last, image_shape))
    assert "\n" not in str(caught.value) and not (tmp_path / "runs").exists()
    model = CSSL(built(last, (16, 16, 3)), 10, batch=4, uratio=2, augmenter=Augmenter("d.d.x", **DIGITS))
    with pytest.raises(UserError, match=message):
        model.fit(digits.dataset(model), steps_per_epoch=1, verbose=0)


def dense(num_classes, image_shape, **arguments):
    return keras.Sequential([keras.Input(image_shape), layers.Flatten(), layers.Dense(num_classes, **arguments)])


def built(last, image_shape):
    network = Strange(lambda x, training: x)
    network(tf.zeros([1, *image_shape]))
    network.last = last
    return network


@pytest.mark.parametrize("bias", [0.5, 0.1])
def test_logits_between_0_and_1_are_no_probabilities(bias):
    """A classifier that starts with one value for all classes, which may even add up to 1."""
    network = keras.Sequential([keras.Input((16, 16, 3)), layers.Flatten(), layers.Dense(
        10, kernel_initializer="zeros", bias_initializer=keras.initializers.Constant(bias))])
    own.check_values(network, 10, (16, 16, 3))


def test_networks_that_cannot_learn(digits):
    with pytest.raises(UserError, match="has no weights to train: .* frozen"):
        CSSL(frozen(10, (16, 16, 3)), 10)
    model = make()
    model.network.trainable = False
    with pytest.raises(UserError, match="has other weights to train than when this CSSL was made"):
        model.fit(digits.dataset(model), steps_per_epoch=1)
    double = keras.Sequential([keras.Input((8, 8, 3)), layers.Flatten(), layers.Dense(4, dtype="float64")])
    with pytest.raises(UserError, match="has weights of float64; expected float32"):
        CSSL(double, 4)


def test_a_network_is_built_anew_for_each_run():
    """One that another run has trained already would start from what that run has learned."""
    network = tiny_net(10, (16, 16, 3))
    own.build_network(lambda num_classes, image_shape: network, 10, (16, 16, 3), 0)
    with pytest.raises(UserError, match="returned a network that it has returned before"):
        own.build_network(lambda num_classes, image_shape: network, 10, (16, 16, 3), 0)


def test_methods_that_need_more_of_a_network():
    with pytest.raises(UserError, match="UPSMatch needs a network that knows mc_dropout"):
        UPSMatch(tiny_net(4, (8, 8, 3)), 4)
    with pytest.raises(UserError, match="no embedding for the heads rotation"):
        ReMixMatch(tiny_net(4, (8, 8, 3)), 4)


# Own networks and strong views in runs.

TINY = dict(dataset="digits.1@40-1", batch=8, uratio=2, report_kimg=0.03125, save_kimg=0.03125, train_steps=8)


def stop_at_once(trainer, report):
    trainer.model.stop_training = True


def test_batches_go_on_wherever_they_are_asked_for_again(digits):
    """Of one dataset, too: fit after fit, or epoch after epoch of a part of it."""
    def trained(*fits):
        model = make()
        batches = digits.dataset(model)
        for count, epochs in fits:
            model.fit(batches.take(count), epochs=epochs, verbose=0)
        return model.fingerprint()

    assert trained((2, 1), (2, 1)) == trained((2, 2)) == trained((4, 1))
    with pytest.raises(UserError, match="These batches never end"):
        make().fit(digits.dataset(make()), verbose=0)


def test_threads_draw_one_after_the_other():
    def draw(within=lambda: None, seed=1):
        with seeded(seed):
            return random.random(), within(), random.random()

    inside, leave = threading.Event(), threading.Event()
    other = threading.Thread(target=draw, args=(lambda: (inside.set(), leave.wait(60)), 2))
    alone, together = draw(), draw(lambda: (other.start(), inside.wait(0.5))[:0])
    leave.set()
    other.join()
    assert together[::2] == alone[::2]


@pytest.mark.parametrize(("change", "value", "usual"), [
    (keras.config.set_image_data_format, "channels_first", "channels_last"),
    (tf.config.run_functions_eagerly, True, False)])
def test_global_settings_that_would_fail_later(tmp_path, change, value, usual):
    change(value)
    try:
        with pytest.raises(UserError, match="expected channels_last and graphs"):
            train(RunConfig.of(CSSL, **TINY, train_dir=str(tmp_path)))
    finally:
        change(usual)


def test_integers_that_are_no_bytes_and_data_of_other_classes(digits, tmp_path):
    model, labels = make(), np.arange(8) % 2
    two = cssl.from_arrays(digits.images[:8], labels, digits.images[8:16], labels)
    with pytest.raises(UserError, match="Images are int64; expected uint8, or floats from -1 to 1"):
        model(tf.constant(digits.images[:2], tf.int64))
    for use in (model.predict_files, model.export):
        with pytest.raises(UserError, match="data is SSLData of 2 classes, but this CSSL has 10"):
            use(tmp_path / "x", two)


@pytest.mark.slow
def test_a_run_with_an_own_network_and_strong_view(tmp_path, digits, monkeypatch):
    def start(folder, network=tiny_net, hooks=(), strong=turned):
        return train(RunConfig.of(CSSL, **TINY, train_dir=str(tmp_path / folder)), network=network, strong=strong,
                     hooks=hooks)

    broken = start("broken", hooks=[stop_at_once])
    assert len(broken.reports) == 1 and isinstance(broken.model.network, keras.Sequential)
    path = broken.path
    assert path.parent.name == "Augment_turned" and path.name.startswith("CSSL_network_tiny_net_alpha_bound0.0_batch8_")

    def changed(num_classes, image_shape, activation="gelu"):
        return keras.Sequential([*tiny_net(num_classes, image_shape).layers[:-1],
                                 layers.Dense(num_classes, activation=activation)])

    changed.__name__ = "tiny_net"  # edited, as it were: the same weights, another function
    for network in (changed, functools.partial(changed, activation="relu")):
        with pytest.raises(UserError, match=r"holds a run with own_network=tiny_net-\w{8}, this command says "
                                            r"own_network=tiny_net-\w{8}\. Use the same value"):
            start("broken", network)

    def edited(images, seed):
        return turned(images, seed + 1)

    edited.__name__ = "turned"
    with pytest.raises(UserError, match=r"own_strong=turned~\w{8}, this command says own_strong=turned~\w{8}\. Use"):
        start("broken", strong=edited)
    hooks = [keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}.keras")),
             keras.callbacks.TensorBoard(str(tmp_path / "logs"), write_steps_per_second=True),
             keras.callbacks.LambdaCallback(on_train_batch_end=print)]
    with pytest.warns(UserWarning, match="The hook LambdaCallback: train does not call on_train_batch_end"):
        finished, whole = start("broken"), start("whole", hooks=hooks)
    assert cssl.load_model(tmp_path / "2.keras").fingerprint() == whole.model.fingerprint()
    assert list((tmp_path / "logs/train").glob("events*"))
    assert finished.model.fingerprint() == whole.model.fingerprint()
    assert len(finished.reports) == len(whole.reports) == 2
    batch = next(iter(digits.dataset(whole.model)))
    pixels = tf.cast(tf.round((whole.model.make_views(batch)["strong"] + 1) * 127.5), tf.int32)
    difference = pixels - (255 - tf.cast(batch["unlabeled"][:, ::-1], tf.int32))
    assert set(np.unique(difference)) == {0, 1, 2}

    scores = cssl.open(path, network=tiny_net).evaluate()
    assert scores["accuracy"] == finished.reports[-1]["accuracy"]
    assert "| CSSL" in invoke("table", tmp_path / "whole").stdout
    with pytest.raises(UserError, match="a network of its own, tiny_net-.*: give the function that builds it"):
        cssl.open(path).evaluate()
    stored = RunConfig.from_json(CSSL, whole.settings)
    with pytest.raises(UserError, match="a strong augmentation of its own, turned: give it, as strong="):
        train(stored, network=tiny_net)
    assert train(stored, network=tiny_net, strong=turned).model.fingerprint() == whole.model.fingerprint()
    with pytest.raises(UserError, match="This is a run with own_network=.* but own_network=.* was given"):
        cssl.open(path, network=changed).evaluate()
    output = []
    monkeypatch.setattr("builtins.print", lambda *text, **options: output.append(str(text[0])))
    assert cli.run(CSSL, ["own.py", f"--eval_ckpt={path}"], network=tiny_net) == 0
    assert "8 updates" in output[-1]


def test_an_own_network_on_two_replicas(tmp_path):
    result = train(RunConfig.of(FixMatch, **TINY | {"train_steps": 2}, train_dir=str(tmp_path), strategy="mirrored",
                                num_devices=2), network=tiny_net, strong=turned)
    weights = result.model.network.trainable_variables
    for variable in weights:
        copies = [copy.numpy() for copy in variable.value.values]
        assert len(copies) == 2
        np.testing.assert_array_equal(*copies)
    start = own.build_network(tiny_net, 10, (16, 16, 3), seed=0).trainable_variables
    assert all(0 < np.abs(a.numpy() - b.numpy()).max() < 1 for a, b in zip(weights, start, strict=True))


@pytest.mark.parametrize("own_parts, message", [
    (dict(network=tiny_net(10, (16, 16, 3))), "network is Sequential; expected a function"),
    (dict(network=lambda c, shape: None), "The network is NoneType"),
    (dict(network=lambda c, shape: tiny_net(c + 1, shape)), r"gives \(None, 11\); expected \(None, 10\)"),
    (dict(network=lambda c, shape: tiny_net(c, (8, 8, 3))), r"does not take images of \(16, 16, 3\)"),
    (dict(strong="flip"), "The strong augmentation is str"),
    (dict(strong=lambda x, seed: tf.cast(x, tf.float32)), "returns floats from 0 to 255 for noise; expected -1 to 1"),
    (dict(strong=lambda x, seed: x[:, :8]), r"into uint8 of shape \(8, 8, 16, 3\); expected the same shape"),
    (dict(strong=lambda x, seed: tf.cast(x, tf.int32)), "into int32"),
    (dict(strong=lambda x, seed: tf.cast(x, tf.float32) / 255), r"floats from 0 to 1 for noise; expected -1 to 1 \(2"),
    (dict(strong=lambda x, seed: None), "The strong augmentation returns NoneType; expected images"),
    (dict(strong=lambda x, seed: (x, seed)), "returns tuple; expected images"),
    (dict(strong=lambda x: x), r"<lambda>\(x\); expected a function of images and seed"),
    (dict(strong=lambda x, seed: x + np.random.randint(255, size=x.shape).astype(np.uint8)),
     "two views of one image with one seed"),
    (dict(strong=lambda x, seed: tf.cast(x, tf.float32) * NAN), "returns floats from nan to nan"),
    (dict(network=lambda num_classes: None), r"network is <lambda>\(num_classes\); expected a function of num_classes"),
    (dict(hooks=[5]), "A hook is int; expected a function of trainer and report"),
    (dict(hooks=[lambda: None]), r"A hook is <lambda>\(\); expected a function of trainer and report"),
    (dict(hooks=[keras.callbacks.EarlyStopping]), "The hook EarlyStopping is a class; expected an instance"),
    (dict(hooks=[keras.callbacks.ModelCheckpoint("x.keras", save_freq=7)]), r"to be called at batches \(save_freq\)"),
    (dict(hooks=[keras.callbacks.EarlyStopping("ece", restore_best_weights=True)]), "EarlyStopping puts other weights"),
    (dict(network=lambda c, shape: dense(c, shape, kernel_regularizer="l2")), "has regularizers, losses or"),
    (dict(network=lambda c, shape: dense(c, shape, activity_regularizer="l2")), "which would have no effect"),
    (dict(network=lambda c, shape: dense(c, shape, kernel_constraint="non_neg")), "constraints of its own"),
    (dict(hooks=print), "hooks is builtin_function_or_method; expected a list"),
    (dict(network=tiny_net, recompute=True), "recompute=True: a network of your own does what you build into it"),
    (dict(network=tiny_net, sync_bn=True), "sync_bn=True: a network of your own"),
    (dict(data=(np.zeros((4, 8, 8, 3)), np.arange(4))), "train got RunConfig and tuple; expected")])
def test_own_parts_that_make_no_sense(tmp_path, own_parts, message):
    options = {name: own_parts[name] for name in own_parts.keys() & {"recompute", "sync_bn"}}
    config = RunConfig.of(CSSL, **TINY, **options, train_dir=str(tmp_path / "runs"))
    with pytest.raises(UserError, match=message) as caught:
        train(config, **{name: value for name, value in own_parts.items() if name not in options})
    assert "\n" not in str(caught.value) and not (tmp_path / "runs").exists()


def test_a_digest_tells_structures_apart_and_nothing_else():
    def net(kernel=3, skip=True):
        inputs = keras.Input((8, 8, 3))
        x = layers.Conv2D(3, kernel, padding="same")(inputs)
        y = layers.Conv2D(3, kernel, padding="same")(x)
        both = layers.Add()([x, y] if skip else [y, y])
        return keras.Model(inputs, layers.Dense(4)(layers.GlobalMaxPooling2D()(both)))

    class Plain(keras.Model):
        def __init__(self, units):
            super().__init__()
            self.body, self.head = layers.Dense(units), layers.Dense(4)

        def call(self, images, training=False):
            return self.head(self.body(layers.Flatten()(images)))

    def plain(units):
        return own.build_network(lambda c, shape: Plain(units), 4, (8, 8, 3), 0)

    found = [own.fingerprint(network) for network in (net(), net(), net(kernel=1), net(skip=False), plain(5), plain(5),
                                                 plain(6))]
    assert found[0] == found[1] and found[4] == found[5] and len(set(found)) == 5


def test_initial_weights_follow_from_the_seed():
    before = np.random.get_state()[1].tolist()
    weights = [own.build_network(tiny_net, 4, (8, 8, 3), seed).get_weights() for seed in (1, 1, 2)]
    assert np.random.get_state()[1].tolist() == before
    assert all((a == b).all() for a, b in zip(*weights[:2], strict=True))
    assert not (weights[0][0] == weights[2][0]).all()


def test_a_run_is_as_before_where_nothing_is_own(tmp_path):
    """The names of folders, and what an older args.json lacks."""
    config = RunConfig.of(CSSL, **TINY, train_dir=str(tmp_path))
    assert "own" not in str(config.folder().relative_to(tmp_path)) and "_archresnet_" in config.folder().name
    stored = config.values() | {"method": "CSSL"}
    del stored["own_network"], stored["own_strong"]
    assert config.differences(stored) == {}
    assert "own_network" not in cli.help_text(CSSL) and "own_network" not in cli.define_flags(CSSL)


# The document.

@pytest.mark.slow
def test_the_document_runs_as_it_stands(tmp_path, monkeypatch):
    """Python blocks in one session, the file they tell to write, and the commands."""
    monkeypatch.chdir(tmp_path)
    session, outputs = {"__name__": "session"}, []
    for language, code in code_blocks(ROOT / "docs/extending.md"):
        if language == "bash":
            outputs += [invoke(functools.partial(run_line, words), *words).stdout for words in commands_of(code)]
        elif match := re.match(r'"""(\w+\.py):', code):
            (tmp_path / match[1]).write_text(code)
            assert len(code.splitlines()) <= 25
        else:
            exec(compile(code, "docs/extending.md", "exec"), session)
    assert "SoftMask" in outputs[0] and "8 updates" in outputs[1] and "SoftMask" in outputs[2]
    assert session["history"].history["val_accuracy"] and (tmp_path / "best.keras").exists()
    assert len(list((tmp_path / "runs").rglob("args.json"))) == 5


def commands_of(script: str) -> Iterator[list[str]]:
    """What bash would give to Python, command by command: later ones may name what earlier ones wrote."""
    lines = script.splitlines()
    for number, line in enumerate(lines):
        quiet = "\n".join(["python() { :; }", 'cssl-table() { python -m cssl.tools.table "$@"; }', *lines[:number],
                           'python() { printf "%s\\n" "$@"; }', line])
        words = subprocess.run(["bash", "-euc", quiet], capture_output=True, text=True, check=True).stdout.splitlines()
        if words:
            yield words


def run_line(words: list[str]) -> int:
    """Runs `python FILE …` or `python -m MODULE …` here, as __main__."""
    sys.argv[:] = words[words[0] == "-m":]
    with pytest.raises(SystemExit) as end:
        (runpy.run_module if words[0] == "-m" else runpy.run_path)(sys.argv[0], run_name="__main__")
    assert not end.value.code, (words, end.value.code)
    return 0
