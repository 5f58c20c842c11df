"""All methods of the project, whatever they are: the command line, a kill and what follows, one replica against two."""
import json
import signal
import subprocess
import sys
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import ROOT
from fake_runs import invoke

from cssl import cli
from libml import models, optim
from libml.ssl import fold_in

METHODS = cli.method_modules()
# Forty updates, a report and a checkpoint every four. No policies: they take most of the time to build a graph, and
# test_train.py kills runs with them.
TINY = ["--dataset=digits.1@40-1", "--filters=4", "--scales=1", "--batch=16", "--uratio=2", "--augment=d.d.x",
        "--train_steps=40", "--report_kimg=0.0625", "--save_kimg=0.0625"]


def kill_after_first_checkpoint(module, folder, log):
    """Runs the command of a method and kills it as soon as its first checkpoint is there; returns the exit code."""
    with log.open("w") as file:
        process = subprocess.Popen([sys.executable, "-m", f"cssl.{module}", *TINY, f"--train_dir={folder}"], cwd=ROOT,
                                   stdout=file, stderr=file)
    deadline = time.monotonic() + 240
    while process.poll() is None and time.monotonic() < deadline and not list(folder.glob("*/*/*/tf/checkpoint")):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    return process.wait()


def run_of(folder):
    """The only run in a folder: its path, the values of its last checkpoint, its reports without the clock."""
    (path,) = [args.parent.parent for args in folder.rglob("args.json")]
    reader = tf.train.load_checkpoint(str(path / "tf"))
    values = {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map() if ".ATTRIBUTES" in name}
    values.pop("save_counter/.ATTRIBUTES/VARIABLE_VALUE", None)
    reports = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return path, values, [{k: v for k, v in report.items() if k != "images_per_s"} for report in reports]


@pytest.mark.slow
@pytest.mark.parametrize("module", METHODS)
def test_train_kill_resume_evaluate_extract(module, tmp_path, capsys):
    method = cli.method_class(module)
    killed, whole, codes = tmp_path / "killed", tmp_path / "whole", []
    killer = threading.Thread(target=lambda: codes.append(
        kill_after_first_checkpoint(module, killed, tmp_path / "log")))
    killer.start()
    assert cli._main(method, ["program", *TINY, f"--train_dir={whole}"]) == 0
    killer.join()
    assert codes == [-signal.SIGKILL], (tmp_path / "log").read_text()
    (log,) = killed.rglob("metrics.jsonl")
    assert len(log.read_text().splitlines()) < 10  # it was in the middle

    capsys.readouterr()
    assert cli._main(method, ["program", *TINY, f"--train_dir={killed}"]) == 0
    assert "Continuing from" in capsys.readouterr().out
    (path, found, reports), (_, wanted, undisturbed) = run_of(killed), run_of(whole)
    assert set(found) == set(wanted) and len(wanted) > 10
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    assert reports == undisturbed and [report["step"] for report in reports] == list(range(64, 641, 64))

    assert cli._main(method, ["program", f"--eval_ckpt={path}"]) == 0
    shown = capsys.readouterr().out
    test = next(line.split() for line in shown.splitlines() if line.startswith("test"))
    assert float(test[1]) == pytest.approx(reports[-1]["accuracy"], abs=0.01)
    assert f"{method.__name__} on " in shown and "40 updates" in shown
    assert invoke("extract_accuracy", path).code == 0
    assert json.loads((path / "stats" / "accuracy.json").read_text())["last01"] == reports[-1]["accuracy"]


# Replicas.

SHAPE, CLASSES, BATCH = (8, 8, 3), 5, 4


def residual_net():
    return models.build("resnet", num_classes=CLASSES, image_shape=SHAPE, filters=4, repeat=1, scales=1, dropout=0.3,
                        seed=1)


class Plain(keras.Model):
    """A network that treats every image by itself."""

    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(6, activation="tanh", kernel_initializer=keras.initializers.GlorotNormal(1))
        self.classifier = keras.layers.Dense(CLASSES, kernel_initializer=keras.initializers.GlorotNormal(2))
        self.hidden.build((None, np.prod(SHAPE)))
        self.classifier.build((None, 6))
        self.built = True

    def call(self, images, training=False):
        return self.classifier(self.hidden(tf.reshape(images, [-1, np.prod(SHAPE)])))


def make(method, network, replicas=1):
    """A model, its unlabelled weight full from the start; options as the method declares them."""
    options = {name: value for name, value in dict(uratio=2, warmup_pos=0.0, warmup_kimg=0.0, K=1).items()
               if name in cli.describe(method.Options)}
    return method(network(), CLASSES, options=method.Options(batch=BATCH * replicas, **options), total_images=1000)


def views_of(model, seed):
    generator = np.random.RandomState(seed)
    weak, strong = model.views_per_image if model.uses_unlabeled else (0, 0)
    sizes = {"labeled": BATCH, "weak": 2 * BATCH * weak, "strong": 2 * BATCH * strong}
    views = {name: tf.constant(generator.uniform(-1, 1, (n, *SHAPE)).astype(np.float32))
             for name, n in sizes.items() if n}
    return views | {"label": tf.constant(generator.randint(0, CLASSES, BATCH), tf.int32)}


def joined(model, halves):
    """The whole batch: views of one kind stay together."""
    weak, strong = model.views_per_image if model.uses_unlabeled else (0, 0)
    kinds = {"labeled": 1, "label": 1, "weak": weak, "strong": strong}
    return {name: tf.concat([part for k in range(kinds[name]) for part in
                             (tf.split(half[name], kinds[name])[k] for half in halves)], 0) for name in halves[0]}


def on_two_replicas(method, network, halves):
    """The state after one update on two replicas, each with its half."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice())
    with strategy.scope():
        model = make(method, network, replicas=2)
    values = strategy.experimental_distribute_values_from_function(
        lambda context: halves[context.replica_id_in_sync_group])
    tf.function(lambda views: strategy.run(model.train_on_views, args=(views,)))(values)
    return state_of(model)


def state_of(model):
    return [v.numpy() for v in tf.nest.flatten(model.checkpoint_items())]


def assert_states_agree(found, wanted, before, atol=1e-7):
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=atol)
    assert any(np.abs(new - old).max() > 1e-6 for new, old in zip(wanted, before, strict=True))


@pytest.mark.parametrize("module", METHODS)
def test_two_replicas_average_two_single_ones(module):
    """Any method, random draws and batch normalisation included: each replica has seeds of its own."""
    method = cli.method_class(module)
    # Biases before batch normalisation have no gradient but rounding, which Adam blows up to full steps.
    network = Plain if isinstance(method.optimizer_rule, optim.Adam) else residual_net
    single = make(method, network, replicas=2)
    halves, before = [views_of(single, seed) for seed in (0, 1)], state_of(single)
    key = tf.constant([0, 0], tf.int64)
    results = [single._compute_gradients(half, fold_in(fold_in(key, replica), 2), single.read())
               for replica, half in enumerate(halves)]
    mean = tf.nest.map_structure(lambda a, b: (a + b) / 2, *results)
    single._gradients = lambda views, now: mean
    single.train_on_views(halves[0])
    # VAT's direction is a small difference of float32 predictions, which eager and compiled code round differently.
    atol = 2e-5 if module == "vat" else 1e-7
    assert_states_agree(on_two_replicas(method, network, halves), state_of(single), before, atol)


RANDOM = ("ict", "mixmatch", "remixmatch", "upsmatch", "vat")  # replicas draw other numbers than one alone


@pytest.mark.parametrize("module", [module for module in METHODS if module not in RANDOM])
def test_two_replicas_do_what_one_does_with_the_whole_batch(module):
    method = cli.method_class(module)
    single = make(method, Plain, replicas=2)
    halves, before = [views_of(single, seed) for seed in (0, 1)], state_of(single)
    single.train_on_views(joined(single, halves))
    assert_states_agree(on_two_replicas(method, Plain, halves), state_of(single), before)
