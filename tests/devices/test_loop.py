"""What the loop of training makes devices send, wait for and exchange, read from its graph: no GPU is needed."""
import pytest
import tensorflow as tf
from helpers import strategy_of
from tensorflow.python.eager import context  # nothing public has the graphs of each device

import cssl
from libml import data, networks
from libml.augment import Augmenter
from libml.train import distributed_batches, update_loop


def loop_of(module, replicas, augment="d.d.d"):
    """The loop of a small model, and batches for it."""
    method, strategy, digits = cssl.method(module), strategy_of(replicas), data.load("digits.1@40-1", ".")
    with strategy.scope():
        network = networks.build("resnet", num_classes=10, image_shape=(16, 16, 3), filters=8, repeat=1, scales=1,
                                 seed=1)
        augmenter = Augmenter(augment, image_shape=(16, 16, 3), mirror=False, shift=2, jit_compile=False)
        model = method(network, 10, options=method.Options(batch=8), augmenter=augmenter, total_images=64,
                       set_sizes=(len(digits.labeled), len(digits.unlabeled)))
    return update_loop(model, strategy), distributed_batches(model, digits, strategy)


def origin(node, nodes):
    """The operation whose output a node passes on: of what a loop carries, the one before the loop."""
    while node.op in ("_Send", "Identity", "Switch", "Merge", "Enter"):
        node = nodes[node.input[0].split(":")[0]]
    return node.op


@pytest.mark.parametrize(("module", "replicas"), [("cssl", 2), pytest.param("cssl", 4, marks=pytest.mark.slow)])
def test_no_state_leaves_its_device(module, replicas):
    """Between devices go constants, what only orders them (an empty one), the loop's condition, and the keys of
    collectives, which are the function's arguments. Nothing that was read, or that an update computes."""
    loop, batches = loop_of(module, replicas)
    context.enable_run_metadata()
    try:
        loop(batches, tf.constant(2, tf.int64))
        functions = context.export_run_metadata().function_graphs
    finally:
        context.disable_run_metadata()
    sent = []
    for graph in (graph for function in functions for graph in function.partition_graphs):
        nodes = {node.name: node for node in graph.node}
        sent += [origin(node, nodes) for node in graph.node if node.op == "_Send"]
    assert len(sent) >= replicas and set(sent) <= {"Const", "LoopCond", "_Arg"}, sent
