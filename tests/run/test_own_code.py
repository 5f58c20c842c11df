"""A run knows a user's own method and network by their source: an edited one does not find it."""
import importlib
import linecache
import sys
import types

import numpy as np
import pytest

import cssl
from cssl import CSSL, RunConfig, train
from libml.errors import UserError

METHOD = """
from cssl import SSLModel
from libml.learn import UnlabeledLoss, losses
from libml.lazy import tf


class Soft(SSLModel):
    def unlabeled_loss(self, weak, strong, views, step):
        q = tf.stop_gradient(tf.nn.softmax(weak))
        return UnlabeledLoss(losses.cross_entropy(strong, tf.argmax(q, -1)), tf.reduce_max(q, -1))
"""
NETWORK = """
import keras


class Own(keras.layers.Layer):
    def call(self, x):
        return 2 * x


class Net(keras.Model):
    def __init__(self, classes):
        super().__init__()
        self.parts = [Own(), keras.layers.Flatten(), keras.layers.Dense(classes)]

    def call(self, x, training=False):
        for part in self.parts:
            x = part(x)
        return x


def net(num_classes, image_shape):
    return Net(num_classes)
"""


@pytest.fixture(scope="module")
def data():
    images = np.random.RandomState(0).randint(0, 256, (60, 8, 8), np.uint8)
    return cssl.from_arrays(images[:40], np.arange(40) % 3, images[40:], np.arange(20) % 3, num_labels=12)


def start(method, folder, data, **own):
    config = RunConfig.of(method, batch=4, uratio=1, filters=16, repeat=1, augment="x.x.x", train_steps=2,
                          report_kimg=0.01, save_kimg=0.01, train_dir=str(folder))
    return train(config, data, **own)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Gives a function that makes a module of source, in a file, or in a cell of a notebook."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(source, notebook=False):
        sys.modules.pop("mine", None)
        if notebook:
            name, made = f"<cell {hash(source)}>", types.ModuleType("__main__")
            linecache.cache[name] = (len(source), None, source.splitlines(True), name)
            monkeypatch.setitem(sys.modules, "__main__", made)
            exec(compile(source, name, "exec"), vars(made))
            return made
        (tmp_path / "mine.py").write_text(source)
        importlib.invalidate_caches()
        linecache.clearcache()
        monkeypatch.setattr(sys, "dont_write_bytecode", True)  # edits may come within a second
        return importlib.import_module("mine")

    return make


@pytest.mark.parametrize("notebook", [False, True])
def test_an_edited_method_is_another_one(tmp_path, data, module, notebook):
    run = start(module(METHOD, notebook).Soft, tmp_path, data)
    again = METHOD.replace("        q =", "        # a comment\n        q  =")
    edited = module(again, notebook)
    assert start(edited.Soft, tmp_path, data).path == run.path
    edited = module(METHOD.replace("tf.reduce_max(q, -1))", "1 - tf.reduce_max(q, -1))"), notebook)
    with pytest.raises(UserError, match=r"own_method=~\w{8}, this command says own_method=~\w{8}\. Use the same code"):
        start(edited.Soft, tmp_path, data)
    assert cssl.open(run.path, data=data, method_class=edited.Soft).evaluate()  # the loss is not asked


def test_an_edited_network_is_another_one(tmp_path, data, module):
    run = start(CSSL, tmp_path, data, network=module(NETWORK).net)
    assert run.evaluate() == cssl.open(run.path, data=data, network=module(NETWORK).net).evaluate()
    edited = module(NETWORK.replace("2 * x", "-x")).net
    with pytest.raises(UserError, match=r"own_network=net-\w{8}~\w{8}, this command says .* Use the same code"):
        start(CSSL, tmp_path, data, network=edited)
    with pytest.raises(UserError, match="This is a run with own_network="):
        cssl.open(run.path, data=data, network=edited).evaluate()


FUNCTIONAL = """
import functools
import keras


def twice(x):
    return 2 * x


def net(num_classes, image_shape):
    return keras.Sequential([keras.Input(image_shape), keras.layers.Flatten(), keras.layers.Activation(twice),
                             keras.layers.Dense(num_classes)])


def darker(by, images, seed):
    return images // by


class View:
    def __call__(self, images, seed):
        return images


half, same = functools.partial(darker, 2), View()
"""


@pytest.mark.parametrize(("part", "name", "old", "new"), [
    ("network", "net", "2 * x", "-x"), ("strong", "half", "darker, 2", "darker, 3"),
    ("strong", "half", "images //", "255 - images //"), ("strong", "same", "return images\n", "return 255 - images\n")])
def test_edited_functions_of_layers_and_views_are_others(tmp_path, data, module, part, name, old, new):
    run = start(CSSL, tmp_path, data, **{part: getattr(module(FUNCTIONAL), name)})
    assert start(CSSL, tmp_path, data, **{part: getattr(module(FUNCTIONAL), name)}).path == run.path
    with pytest.raises(UserError, match="Use the same code"):
        start(CSSL, tmp_path, data, **{part: getattr(module(FUNCTIONAL.replace(old, new)), name)})


def test_a_run_from_before_knows_no_source(tmp_path, data, module):
    run = start(module(METHOD).Soft, tmp_path, data)
    run.args.write_text(run.args.read_text().replace(run.config.training.own_method, ""))
    assert start(module(METHOD).Soft, tmp_path, data).path == run.path


def test_methods_of_the_package_are_known_by_name(tmp_path, data):
    assert start(CSSL, tmp_path, data).config.training.own_method == ""


def test_what_a_method_logs_replaces_no_result(tmp_path, data, module):
    logs = METHOD.replace("tf.reduce_max(q, -1))", "tf.reduce_max(q, -1), scalars={'accuracy': tf.constant(99.0)})")
    with pytest.raises(UserError, match=r"Soft logs accuracy, as reports call .* such as monitors/NAME"):
        start(module(logs).Soft, tmp_path, data)
