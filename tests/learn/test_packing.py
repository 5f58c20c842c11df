"""Weights, averages, slots and statistics as a few vectors: there and back, in a loop, and what that saves."""
from collections import Counter

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import devices_of, kernels_of_loop, strategy_of

from cssl import CSSL, MeanTeacher, MetaPseudoLabels
from cssl.enaet import EnAET
from libml import networks
from libml.augment import Augmenter
from libml.config import RunConfig
from libml.devices.distribute import POLICIES
from libml.learn.packing import Packing, exchange
from libml.run import Run
from libml.train import Trainer, distributed_batches, update_loop

CONTROL = {"While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase", "Switch", "Enter"}


def test_there_and_back():
    tensors = [tf.reshape(tf.range(6.0), [2, 3]), tf.constant(7.0), tf.constant([8.0, 9.0]), tf.constant([1, 2])]
    packing = Packing([t.shape for t in tensors], [[2, 0], [1], [3]])
    vectors = packing.pack(tensors)
    assert [v.numpy().tolist() for v in vectors] == [[8, 9, 0, 1, 2, 3, 4, 5], [7], [1, 2]]
    for found, wanted in zip(packing.unpack(vectors), tensors, strict=True):
        assert found.dtype == wanted.dtype and found.shape == wanted.shape
        np.testing.assert_array_equal(found, wanted)
    some, = packing.pack({0: tensors[0], 2: -tensors[2]}, [0])
    assert some.numpy().tolist() == [-8, -9, 0, 1, 2, 3, 4, 5]


def replica_of(values):
    return values[int(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group))]


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int32", "int64", "float16", "float32", "float64"])
def test_rows_of_any_type_reach_all_replicas(dtype):
    """Bit by bit, the largest integers and what is no number, too; means of floats beside them."""
    numbers = [0, 1] if dtype == "bool" else [0, 1, 2, *(
        [np.iinfo(dtype).min, np.iinfo(dtype).max] if "int" in dtype else [-1 / 3, np.inf, np.nan, 6e-8])]
    rows = [np.array(np.roll(numbers, shift), dtype).reshape(-1, 1) for shift in range(2)]
    strategy = strategy_of(2)
    found = strategy.run(tf.function(lambda: exchange(
        [tf.constant(replica_of([[1.0, 3.0], [2.0, 4.0]])), tf.constant(replica_of([1.0, 2.0]), tf.float16)],
        [tf.constant(replica_of(rows)), tf.constant([[True]])]), autograph=False))
    flat = tf.nest.flatten(found)
    for mean, half, gathered, true in zip(*map(strategy.experimental_local_results, flat), strict=True):
        assert mean.numpy().tolist() == [1.5, 3.5] and half.numpy() == 1.5 and half.dtype == tf.float16
        assert true.numpy().tolist() == [[True]] * 2
        assert gathered.dtype == dtype and gathered.numpy().tobytes() == np.concatenate(rows).tobytes()


def test_gradients_flow_through_an_exchange():
    """Each replica's loss is a function of all rows: its own rows get the gradients of all losses."""
    def gradients():
        x = tf.constant(replica_of([[[1.0]], [[2.0]]]))
        with tf.GradientTape() as tape:
            tape.watch(x)
            (mean,), (rows, _) = exchange([x[0]], [x, tf.constant([7])])
            loss = replica_of([1.0, 10.0]) * tf.reduce_sum(rows ** 2 + mean)
        return tape.gradient(loss, x)

    strategy = strategy_of(2)
    found = strategy.experimental_local_results(strategy.run(tf.function(gradients, autograph=False)))
    assert [value.numpy().item() for value in found] == [11 * 2 * 1 + 11, 11 * 2 * 2 + 11]  # two rows, each mean's half


class Counting(keras.layers.Layer):
    """Counts its calls, in a variable that is no float."""

    def build(self, _):
        self.calls = self.add_weight(name="calls", shape=(), dtype="int32", initializer="zeros", trainable=False)

    def call(self, x):
        self.calls.assign_add(1)
        return x


def build(method, network=None, loss_scaling=False, **settings):
    network = network or networks.build("resnet", num_classes=10, image_shape=(16, 16, 3), filters=8, repeat=1,
                                        scales=1, seed=1)
    augmenter = Augmenter("d.d.d", image_shape=(16, 16, 3), mirror=False, shift=2, jit_compile=False)
    return method(network, 10, options=method.Options(batch=4, **settings), augmenter=augmenter, total_images=64,
                  loss_scaling=loss_scaling)


@pytest.mark.parametrize("method", [CSSL, MeanTeacher, EnAET, MetaPseudoLabels])
def test_states_there_and_back(method):
    model = build(method)
    rng = np.random.default_rng(0)
    for variable in tf.nest.flatten(model.checkpoint_items()):
        if variable.dtype.is_floating:
            variable.assign(rng.normal(size=variable.shape))
    state = model.update.read()
    packed = model.update.pack(state)
    groups = len(model.update.groups)
    assert groups <= len(packed.weights) == len(packed.ema) <= 2 * groups and len(packed.statistics) == 1
    found = model.update.unpack(packed)
    tf.nest.assert_same_structure(found, state)
    for ours, wanted in zip(tf.nest.flatten(found), tf.nest.flatten(state), strict=True):
        np.testing.assert_array_equal(ours, wanted)
    for vectors in (packed.weights, packed.slots):  # what is updated together has one layout
        assert {v.shape[0] for v in vectors} <= {v.shape[0] for v in packed.weights}


def trainer(model, digits, folder, **settings):
    config = RunConfig.of(type(model), dataset="digits.1@40-1", batch=model.options.batch, train_steps=4, **settings)
    Run(folder).claim(config, {})
    return Trainer(Run(folder, config=config, data=digits, model=model), tf.distribute.get_strategy())


def batches_of(run, start=0):
    return distributed_batches(run.model, run.data, run.strategy, start)


def own_network():
    return keras.Sequential([keras.Input((16, 16, 3)), keras.layers.Conv2D(8, 3, strides=4),
                             keras.layers.BatchNormalization(), Counting(), keras.layers.GlobalAveragePooling2D(),
                             keras.layers.Dense(10)])


@pytest.mark.parametrize("network", [lambda: None, own_network])
def test_a_loop_that_carries_the_state_makes_the_same_updates(network, digits, tmp_path):
    """The same bits: these are the same operations, with and without variables between two updates."""
    looped, stepped = (build(CSSL, network()) for _ in range(2))
    stepped.network.set_weights(looped.network.get_weights())
    for ours, theirs in zip(looped.ema_weights, stepped.ema_weights, strict=True):
        theirs.assign(ours)
    run = trainer(looped, digits, tmp_path)
    update_loop(looped, run.strategy)(batches_of(run), tf.constant(3))
    batches, step = batches_of(run), tf.function(stepped.train_on_bytes, autograph=False)
    for _ in range(3):
        step(next(batches))
    assert looped.fingerprint() == stepped.fingerprint()
    if network():
        assert int(looped.network.layers[2].calls.numpy()) == 3


class Breaking(CSSL):
    """Its loss is infinite in the third update."""

    def compute_losses(self, views, step):
        output = super().compute_losses(views, step)
        broken = tf.where(step.updates == 2, np.float32(np.inf), 1.0)
        return output._replace(scalars=output.scalars | {"losses/broken": broken})


def test_a_loop_tells_the_first_update_that_is_not_finite(digits, tmp_path):
    """Even where those after it are finite again."""
    run = trainer(build(Breaking), digits, tmp_path)
    loop = update_loop(run.model, run.strategy, run.totals, run.scalar_names)
    last = loop(batches_of(run), tf.constant(2)).numpy()
    assert np.isfinite(last).all() and last[-1] == 2 and run.totals[-1] == 2
    last = loop(batches_of(run, 2), tf.constant(3)).numpy()
    values = dict(zip(run.scalar_names, last[-len(run.scalar_names) - 1:], strict=False))
    assert last[-1] == 1 and values["losses/broken"] == np.inf and np.isfinite(values["losses/xe"])
    assert run.totals[-1] == 5 and np.isinf(run._means()["losses/broken"])


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["off", "float16"])
def test_kernels_of_an_update(precision, digits, tmp_path):
    """WRN-28-2 with compiled views, as on a GPU: at most 1,000 kernels, most of them the network's own."""
    with networks.dtype_policy(POLICIES[precision]):
        network = networks.build("resnet", num_classes=10, image_shape=(16, 16, 3), filters=32, repeat=4, scales=3,
                                 seed=1)
        model = build(CSSL, network, loss_scaling=precision == "float16")
    model.augmenter.jit_compile = model.augmenter.on_gpu = True
    run = trainer(model, digits, tmp_path)
    loop = update_loop(model, run.strategy, run.totals)
    function = loop.get_concrete_function(batches_of(run), tf.constant(1))
    definition = function.graph.as_graph_def()
    kernels, inside = kernels_of_loop(definition)
    count = Counter(node.op for node in kernels)
    assert 500 < len(kernels) <= 1000, count.most_common(20)
    assert count["Conv2D"] == 2 * 28 and count["Conv2DBackpropFilter"] == 28  # one pass and CTAugment's probe
    # Nothing is read from or written to variables, and nothing needs the CPU but the batch.
    assert not {op for op in count if "Variable" in op}
    # Control flow asks the host: nothing but the loop over a policy's operations, whose length is a constant.
    (loop,) = [node for node in definition.node if node.op == "While"]
    (condition,) = [f for f in definition.library.function if f.signature.name == loop.attr["cond"].func.name]
    assert {node.op for node in condition.node_def} <= {"Less", "Identity", "NoOp"}  # a count: no loss is looked at
    compiled = Counter(node.op for node in inside)
    control = {op: number for op, number in (count + compiled).items() if op in CONTROL}
    assert control == {"StatelessWhile": 1}, control  # strong views and probe together
    missing = {node.op for node in kernels if not devices_of(node) & {"GPU", "DEFAULT"}}
    if "GPU" in devices_of(next(node for node in kernels if node.op == "Conv2D")):
        assert missing <= {"IteratorGetNext"}, missing
