"""What the loop of training makes devices send, wait for and exchange, read from its graph: no GPU is needed."""

import pytest
import tensorflow as tf
from helpers import assert_two_replicas_meet_rarely, gpu_kernel, strategy_of
from tensorflow.python.eager import context  # nothing public has the graphs of each device
from tensorflow.python.framework import function_def_to_graph, op_def_registry  # nor what memory operations use

import cssl
from libml import data, networks
from libml.augment import Augmenter
from libml.train import distributed_batches, update_loop


def loop_of(module, replicas, augment="d.d.d", compiled_views=False):
    """The loop of a small model, and batches for it."""
    method, strategy, digits = cssl.method(module), strategy_of(replicas), data.load("digits.1@40-1", ".")
    with strategy.scope():
        network = networks.build("resnet", num_classes=10, image_shape=(16, 16, 3), filters=8, repeat=1, scales=1,
                                 seed=1)
        augmenter = Augmenter(augment, image_shape=(16, 16, 3), mirror=False, shift=2, jit_compile=compiled_views)
        augmenter.on_gpu = compiled_views
        model = method(network, 10, options=method.Options(batch=8), augmenter=augmenter, total_images=64,
                       set_sizes=(len(digits.labeled), len(digits.unlabeled)),
                       calibration=(digits.images[:9], digits.labels[:9]))
    return update_loop(model, strategy), distributed_batches(model, digits, strategy)


def origin(node, nodes):
    """The operation whose output a node passes on: of what a loop carries, the one before the loop."""
    while node.op in ("_Send", "Identity", "Switch", "Merge", "Enter"):
        node = nodes[node.input[0].split(":")[0]]
    return node.op


@pytest.mark.parametrize(("module", "replicas", "augment"), [("cssl", 2, "d.d.d"), *(pytest.param(
    module, replicas, "d.d.x", marks=pytest.mark.slow) for module, replicas in (("cssl", 4), ("comatch", 2)))])
def test_no_state_leaves_its_device(module, replicas, augment):
    """Between devices go constants, what only orders them (an empty one), the loop's condition, the keys of collectives
    (arguments of the function), and what the host makes: the number of updates (Cast) and seeds (Pack). Nothing else
    that was read, or that an update computes. (Two replicas meet no more often than they must.)"""
    loop, batches = loop_of(module, replicas, augment)
    context.enable_run_metadata()
    try:
        loop(batches, tf.constant(2))
        functions = context.export_run_metadata().function_graphs
    finally:
        context.disable_run_metadata()
    sent = []
    for graph in (graph for function in functions for graph in function.partition_graphs):
        nodes = {node.name: node for node in graph.node}
        sent += [(origin(node, nodes), tf.as_dtype(node.attr["T"].type)) for node in graph.node if node.op == "_Send"]
    assert {op for op, dtype in sent if dtype.is_floating} == {"Const"}, sent
    assert {op for op, dtype in sent if not dtype.is_floating} <= {"Const", "LoopCond", "_Arg", "Cast", "Pack"}, sent
    assert sum(op == "Cast" for op, _ in sent) == replicas - 1, sent
    if replicas == 2:
        graph = loop.get_concrete_function(batches, tf.constant(1)).graph
        assert_two_replicas_meet_rarely(cssl.method(module), graph.as_graph_def())


class Placement:
    """Which memory of a machine with a GPU the values of a function are in, by the kernels that this TensorFlow has."""

    def __init__(self, definition, name):
        (function,) = [f for f in definition.library.function if f.signature.name == name]
        graph, _ = function_def_to_graph.function_def_to_graph_def(function)
        by_name = {node.name: node for node in graph.node}
        self.compiled = {f.signature.name for f in definition.library.function if f.attr["_XlaMustCompile"].b}
        self.results = [result.split(":")[0] for result in function.ret.values()]
        self.nodes = {}  # those that results depend on, each after those that it takes something from
        self.on_host = {}  # by name: whether each input, and each output, is in the host's memory
        self.waits = {}  # by name: the nodes whose outputs a device has made and the host takes
        self.depth = {}  # by name: how often the host waits, one time after the other, before a node can start

        def visit(name):
            if name in self.nodes:
                return
            sources = [source.removeprefix("^").partition(":") for source in by_name[name].input]
            for source, _, _ in sources:
                visit(source)
            node = self.nodes[name] = by_name[name]
            inputs, _ = self.on_host[name] = self.memory(node)
            self.waits[name] = {source for (source, _, port), here in zip(sources, inputs, strict=False)
                                if here and not self.on_host[source][1][int(port or 0)]}
            self.depth[name] = max((self.depth[source] + (source in self.waits[name]) for source, _, _ in sources),
                                   default=0)

        for result in self.results:
            visit(result)

    def is_compiled(self, node):
        return any(attribute.func.name in self.compiled for attribute in node.attr.values())

    def memory(self, node):
        if node.op == "Placeholder":  # what a loop carries: integers of 32 bits and handles stay on the host
            return [], [tf.as_dtype(node.attr["dtype"].type) in (tf.int32, tf.resource)]
        kernel, definition = gpu_kernel(node), op_def_registry.get(node.op)
        hosted = node.device.endswith("CPU:0") or node.op in ("Const", "IteratorGetNext")  # constants: once, beforehand
        hosted |= kernel is None and not self.is_compiled(node)
        return [[hosted or kernel is not None and argument.name in kernel.host_memory_arg
                 for argument in arguments for _ in range(length_of(argument, node))]
                for arguments in (definition.input_arg, definition.output_arg)]


def length_of(argument, node):
    """The number of tensors of an operation's argument."""
    if argument.number_attr:
        return node.attr[argument.number_attr].i
    return len(node.attr[argument.type_list_attr].list.type) if argument.type_list_attr else 1


@pytest.mark.parametrize("module", ["cssl", pytest.param("fixmatch", marks=pytest.mark.slow)])
def test_the_host_runs_ahead_of_the_device(module):
    """It waits for nothing that the device makes before it has started all views and convolutions of an update, nor to
    know whether there is another one."""
    loop, batches = loop_of(module, 1, compiled_views=True)
    definition = loop.get_concrete_function(batches, tf.constant(1)).graph.as_graph_def()
    (node,) = [node for node in definition.node if node.op in ("While", "StatelessWhile")]
    condition, body = (Placement(definition, node.attr[part].func.name) for part in ("cond", "body"))
    assert not any(condition.waits.values()) and condition.on_host[condition.results[0]][1] == [True]
    convolutions = [body.depth[node.name] for node in body.nodes.values() if node.op == "Conv2D"]
    views = [body.depth[node.name] for node in body.nodes.values() if body.is_compiled(node)]
    assert len(convolutions) == 8 and len(views) == 3 and not any(convolutions + views), (convolutions, views)
    # What CTAugment's rates learn: of positions in their table, which are integers of 32 bits.
    assert sum(map(len, body.waits.values())) <= 6, body.waits


@pytest.mark.parametrize("module", ["flexmatch", *(pytest.param(module, marks=pytest.mark.slow)
                                                   for module in ("enaet", "meta_pseudo_labels"))])
def test_replicas_meet_as_rarely_as_can_be(module):
    """(The updates of all other methods: tests/methods/test_methods.py; with CTAugment: above.)"""
    loop, batches = loop_of(module, 2, "d.d.x")
    graph = loop.get_concrete_function(batches, tf.constant(1)).graph
    assert_two_replicas_meet_rarely(cssl.method(module), graph.as_graph_def())
