"""All methods of the project, whatever they are: a run cut off and continued, one replica against two."""
import json
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import ROOT
from models import (
    BATCH,
    CLASSES,
    SEED,
    Plain,
    PlainEmbedding,
    assert_states_agree,
    joined,
    make,
    on_two_replicas,
    residual_net,
    state_of,
    views_of,
)

import cssl
from cssl import FlexMatch
from libml import train
from libml.augment import gpu
from libml.config import describe
from libml.devices import distribute
from libml.learn import Adam
from libml.learn.model import Equal, SSLModel
from libml.learn.step import LossOutput
from libml.randomness import fold_in
from libml.run import Run
from libml.train import Trainer

METHODS = sorted(cssl.methods().values())


def each(modules):
    """Parameters of a test: the many that are not CSSL take their time together."""
    return [pytest.param(module, marks=() if module == "cssl" else pytest.mark.slow) for module in modules]


# Two reports and checkpoints, one every four updates. No policies: they take most of the time to build a graph, and
# test_train.py kills runs with them.
TINY = ["--dataset=digits.1@40-1", "--filters=8", "--scales=1", "--batch=8", "--uratio=2", "--augment=d.d.x",
        "--train_steps=8", "--report_kimg=0.03125", "--save_kimg=0.03125"]


def run_of(folder):
    """The only run in a folder: its path, the values of its last checkpoint, its reports without the clock."""
    (path,) = [args.parent.parent for args in folder.rglob("args.json")]
    reader = tf.train.load_checkpoint(str(path / "tf"))
    values = {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map() if ".ATTRIBUTES" in name}
    values.pop("save_counter/.ATTRIBUTES/VARIABLE_VALUE", None)
    reports = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return path, values, [{k: v for k, v in report.items() if k != "images_per_s"} for report in reports]


def lose_last_checkpoint(path):
    for file in path.glob(f"tf/{Path(Run(path).checkpoints()[-1]).name}.*"):
        file.unlink()


def train_twice(monkeypatch):
    """Has the next run lose its last checkpoint and go on from the one before, with what it has traced already.

    Half the time of another start, and as telling: what a checkpoint lacks has its value of the end, not of the middle.
    Returns a list that gets what the run had ended with before, and its model.
    """
    once, loops, seen = Trainer.train, [], []

    def loop(*arguments):
        loops.append(loops[0] if loops else train.update_loop.__wrapped__(*arguments))
        return loops[0]

    def twice(trainer):
        once(trainer)
        seen.append((*run_of(trainer.run.path), trainer.model))
        lose_last_checkpoint(trainer.run.path)
        once(trainer)
        assert len(loops) == 2 and loops[0].experimental_get_tracing_count() == 1

    loop.__wrapped__ = train.update_loop
    monkeypatch.setattr(train, "update_loop", loop)
    monkeypatch.setattr(Trainer, "train", twice)
    return seen


def assert_same_bits(found, wanted):
    assert set(found) == set(wanted) and len(wanted) > 10
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize("module", each(METHODS))
def test_train_continue_restore(module, tmp_path, program, monkeypatch):
    """Eight updates in one go, and again from the checkpoint after four: what a kill before the last checkpoint leaves.
    The checkpoint and what the folder says of the run are enough to build its model again.
    (Starts of their own: below, and test_train.py, which also kills runs at random moments, as does
    scripts/lab/torture.py.)"""
    method, flags = cssl.method(module), [*TINY, f"--train_dir={tmp_path}"]
    flags += ["--warmup_kimg=0.0234375"] * ("warmup_kimg" in describe(method.Options))  # three updates
    seen = train_twice(monkeypatch)
    assert "4 of 8 updates done" in program(method, *flags).stdout
    monkeypatch.undo()
    ((path, wanted, undisturbed, model),), (_, found, reports) = seen, run_of(tmp_path)
    assert_same_bits(found, wanted)
    assert reports == undisturbed and [report["step"] for report in reports] == [32, 64]
    assert json.loads((path / "stats" / "accuracy.json").read_text())["last01"] == reports[-1]["accuracy"]
    assert cssl.open(path).model.fingerprint() == model.fingerprint()


@pytest.mark.slow
def test_another_start_on_two_replicas_continues(tmp_path, program):
    """(Every method's update on two replicas, and from a checkpoint of theirs: below. On one: test_train.py.)"""
    flags = [*TINY, "--num_devices=2", f"--train_dir={tmp_path}"]
    program(FlexMatch, *flags)
    path, wanted, undisturbed = run_of(tmp_path)
    lose_last_checkpoint(path)
    assert "4 of 8 updates done" in program(FlexMatch, *flags).stdout
    _, found, reports = run_of(tmp_path)
    assert_same_bits(found, wanted)
    assert reports == undisturbed


# Replicas.

def averaged(single, halves):
    """The state after an update of one replica by the mean of what it finds in two halves of a batch."""
    key = tf.constant([0, 0], tf.int64)
    results = [single.update.backward(half, fold_in(fold_in(key, replica), 2), single.update.read())
               for replica, half in enumerate(halves)]
    mean = tf.nest.map_structure(lambda a, b: (a + b) / 2, *results)
    single.update.backward = lambda *_: mean
    single.train_on_views(halves[0])
    return state_of(single)


OWN = ("enaet", "meta_pseudo_labels")  # need networks that their own tests have, with updates and checkpoints
# Ranks each replica's images among themselves; needs a feature map, and so a network with batch normalisation.
APART = ("rerankmatch", "crmatch")


@pytest.mark.parametrize("module", each(module for module in METHODS if module not in OWN
                                        and not cssl.method(module).communicates))
def test_two_replicas_average_two_single_ones(module):
    """Any method, random draws and batch normalisation included: each replica has seeds of its own."""
    method = cssl.method(module)
    # Biases before batch normalisation have no gradient but rounding, which Adam blows up to full steps.
    network = Plain if isinstance(method.optimizer_rule, Adam) else residual_net
    single = make(method, network, replicas=2)
    halves, before = [views_of(single, seed) for seed in (0, 1)], state_of(single)
    # VAT's direction is a small difference of float32 predictions, which eager and compiled code round differently.
    atol = 2e-5 if module == "vat" else 1e-7
    assert_states_agree(on_two_replicas(method, network, halves, rarely=True), averaged(single, halves), before,
                        atol)


# Replicas draw other numbers than one alone.
RANDOM = ("fully_supervised_mixup", "ict", "mixmatch", "mixup", "remixmatch", "upsmatch", "vat")


@pytest.mark.parametrize("module", [module for module in METHODS if module not in RANDOM + APART + OWN])
def test_two_replicas_do_what_one_does_with_the_whole_batch(module):
    """(Where they do not communicate, they do what two single ones do: see above.)"""
    method = cssl.method(module)
    network = PlainEmbedding if method.communicates else Plain
    single = make(method, network, replicas=2)
    updates, before = [[views_of(single, 10 * i + half) for half in (0, 1)] for i in range(2)], state_of(single)
    updates = updates if method.communicates else updates[:1]  # what the first leaves behind counts in the second
    for halves in updates:
        single.train_on_views(joined(single, halves))
    found = (on_two_replicas(method, network, *updates, rarely=True) if method.communicates else
             averaged(make(method, network, replicas=2), updates[0]))
    # Sums over replicas in another order: units of 1e-7 of numbers around 1, which a second update multiplies.
    assert_states_agree(found, state_of(single), before, atol=3e-6 if method.communicates else 1e-7)


# Compiled, and in half precision.

def in_half_precision(build):
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy(distribute.POLICIES["float16"])
    try:
        return build()
    finally:
        keras.config.set_dtype_policy(policy)


@pytest.mark.parametrize("module", each(METHODS))
def test_operations_have_gpu_kernels_and_compile(module):
    """TensorFlow can run every operation of the losses on GPUs; XLA compiles them, random draws included, to the same
    numbers."""
    model = make(cssl.method(module), residual_net if module == "enaet" else PlainEmbedding)
    arguments = views_of(model, 0), SEED, model.update.read()
    compiled = tf.function(model.update.backward, jit_compile=True, autograph=False)
    assert gpu.cpu_only(compiled, *arguments) == []
    if module == "enaet":
        return  # XLA takes half a minute; test_enaet.py compiles what others do not have
    # VAT's direction is a small difference of predictions.
    tolerance = dict(rtol=1e-2, atol=1e-2) if module == "vat" else dict(rtol=1e-4, atol=1e-5)
    for found, wanted in zip(tf.nest.flatten(compiled(*arguments)), tf.nest.flatten(model.update.backward(*arguments)),
                             strict=True):
        np.testing.assert_allclose(found, wanted, **tolerance)


@pytest.mark.parametrize("module", each(module for module in METHODS if not cssl.method(module).needs_float32))
def test_half_precision(module):
    """The loss is that of float32 to two digits of float16's three; an update that overflows changes nothing."""
    full = make(cssl.method(module), residual_net)
    half = in_half_precision(lambda: make(cssl.method(module), residual_net, loss_scaling=True))
    views = views_of(full, 0)
    wanted, found = (model.update.backward(views, SEED, model.update.read())["scalars"] for model in (full, half))
    np.testing.assert_allclose(found["losses/total"], wanted["losses/total"], rtol=0.02)
    before = half.update.read()
    half.loss_scale.assign(np.inf)  # as large as makes an overflow
    half.train_on_views(views)
    after = half.update.read()
    for name in ("weights", "ema", "statistics", "slots", "method"):
        tf.nest.map_structure(np.testing.assert_array_equal, getattr(after, name), getattr(before, name))
    half.loss_scale.assign(2.0 ** 10)
    assert np.isfinite(half.train_on_views(views)["losses/total"])
    assert any(np.any(new != old) for new, old in zip(half.update.read().weights, before.weights, strict=True))


class Bank(SSLModel):
    """State of every kind: a queue of embeddings, a counter, a class per unlabelled image, a moving average."""

    views_per_image = (1, 0)

    def initial_state(self):
        return {"queue": Equal(np.zeros((20, 6), np.float32)), "count": np.zeros((), np.int32),
                "chosen": np.full(self.num_unlabeled, -1, np.int64), "mean": np.zeros(CLASSES, np.float32)}

    def compute_losses(self, views, step):
        logits, embedding = step.forward(views["weak"], outputs=("logits", "embedding"))
        p = tf.nn.softmax(logits)
        rows, state = step.gather(embedding), step.state
        new = {
            "queue": tf.concat([state["queue"], tf.stop_gradient(rows)], 0)[-20:],
            "count": state["count"] + rows.shape[0], "mean": 0.9 * state["mean"] + 0.1 * tf.reduce_mean(p, 0),
            "chosen": tf.tensor_scatter_nd_update(state["chosen"], step.gather(views["unlabeled_index"])[:, None],
                                                  step.gather(tf.argmax(p, -1)))}
        everywhere = step.mean(tf.reduce_mean(p, 0))  # gradients flow through both kinds of communication
        spread = tf.reduce_sum(everywhere * tf.math.log(everywhere))
        likeness = tf.reduce_mean(tf.matmul(rows, rows, transpose_b=True) ** 2)
        return LossOutput(self.labeled_cross_entropy(views, step) + spread + likeness, {}, new)


def bank_views(model, update):
    """Two halves of a batch; their unlabelled images are not the same."""
    positions = np.random.RandomState(update).permutation(40)[:4 * BATCH].astype(np.int32)
    return [views_of(model, 10 * update + half) | {"unlabeled_index": tf.constant(part)}
            for half, part in enumerate(np.split(positions, 2))]


def test_state_of_any_kind_is_the_same_on_two_replicas():
    single = make(Bank, PlainEmbedding, replicas=2, set_sizes=(8, 40))
    updates, before = [bank_views(single, update) for update in range(2)], state_of(single)
    for halves in updates:
        single.train_on_views(joined(single, halves))
    found = on_two_replicas(Bank, PlainEmbedding, *updates, set_sizes=(8, 40))
    assert_states_agree(found, state_of(single), before, atol=1e-6)
    state = {name: v.numpy() for name, v in single.method_state.items()}
    assert state["count"] == 32 and state["count"].dtype == np.int32
    assert state["chosen"].dtype == np.int64
    seen = np.concatenate([half["unlabeled_index"] for halves in updates for half in halves])
    np.testing.assert_array_equal(np.flatnonzero(state["chosen"] >= 0), np.unique(seen))
    assert np.abs(state["queue"]).min() > 0 and 0.1 < state["mean"].sum() < 0.2


def test_communication_cannot_be_compiled():
    halves = bank_views(make(Bank, PlainEmbedding, set_sizes=(8, 40)), 0)
    with pytest.raises(ValueError, match="--jit cannot compile Bank's communication between 2 replicas; leave it out"):
        on_two_replicas(Bank, PlainEmbedding, halves, set_sizes=(8, 40), jit=True)
    make(Bank, PlainEmbedding, set_sizes=(8, 40), jit=True).train_on_views(halves[0])  # one replica has none


def test_every_method_is_documented():
    text = (ROOT / "docs/methods.md").read_text(encoding="utf-8")
    for name, module in cssl.methods().items():
        assert f"| [{name}](#{name.lower()}) |" in text and f"| `python -m cssl.{module}` |" in text, name
        assert f"### {name}\n" in text and f"[cssl/{module}.py](../cssl/{module}.py)" in text, name
