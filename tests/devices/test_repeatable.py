"""What makes runs repeat: seeds with named algorithms, --deterministic down to XLA, TF32 where it is wanted."""
import ast

import pytest
import tensorflow as tf
from conftest import ROOT
from helpers import Program

from cssl import CSSL, RunConfig
from libml import experiment
from libml.augment import augmenter
from libml.config import ScaleOptions
from libml.data import batches, load
from libml.devices.distribute import ProcessGroup, create_strategy
from libml.errors import UserError

REFUSING = """
import cssl
from libml.lazy import tf

class Refusing(cssl.FixMatch):
    '''Draws a number without a seed, which determinism forbids.'''

    def unlabeled_loss(self, weak, strong, views, step):
        return super().unlabeled_loss(weak, strong + tf.random.uniform([]), views, step)

cssl.main(Refusing)
"""


@pytest.mark.parametrize("path", [path for room in ("libml", "cssl") for path in sorted((ROOT / room).rglob("*.py"))
                                  if "random" in path.read_text(encoding="utf-8")], ids=lambda path: path.stem)
def test_random_numbers_name_their_algorithm(path):
    """TensorFlow's own choice depends on the device and on XLA."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("tf.random."):
            assert {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}.get("alg") == "'philox'", (
                f"line {node.lineno}: {ast.unparse(node)}")


def test_numbers_of_views_are_what_tensorflow_chose_on_cpus():
    for seed in ([0, 0], [3, 2 ** 40]):
        for stream in range(4):
            folded = tf.random.experimental.stateless_fold_in(tf.constant(seed, tf.int64), stream)
            expected = tf.random.stateless_uniform([5, 7], folded)
            found = augmenter.uniform_numbers(tf.constant(seed, tf.int64), stream, 5, 7)
            assert (found.numpy() == expected.numpy()).all()


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [True, False])
def test_deterministic_reaches_xla(tmp_path, deterministic):
    """XLA writes down with what options it compiles; those of GPUs are among them on any machine."""
    code = ("import tensorflow as tf; from libml import config; from libml.devices import distribute; "
            f"distribute.create_strategy(config.ScaleOptions(deterministic={deterministic})); "
            "tf.function(lambda x: 2 * tf.sin(x), jit_compile=True, autograph=False)(tf.ones([4]))")
    process = Program(["-c", code], tmp_path, XLA_FLAGS=f"--xla_dump_to={tmp_path}")
    assert process.wait() == 0, process.error
    (options,) = tmp_path.glob("*debug_options")
    assert ("xla_gpu_deterministic_ops: true" in options.read_text()) == deterministic


@pytest.mark.slow
def test_an_operation_that_refuses_determinism_is_one_line(tmp_path):
    file = tmp_path / "refusing.py"
    file.write_text(REFUSING)
    flags = ["--dataset=digits.1@40-1", "--batch=4", "--uratio=1", "--filters=16", "--repeat=1", "--scales=1",
             "--augment=x.x.x", "--train_steps=1", f"--train_dir={tmp_path / 'runs'}"]
    process = Program([file, *flags, "--deterministic"], tmp_path)
    assert process.wait() == 2 and len(process.error.splitlines()) == 1, process.error
    assert process.error.startswith("error: --deterministic: an operation of this run has no form that repeats")
    assert "require a seed" in process.error


def test_an_operation_without_a_deterministic_kernel_is_one_line():
    """As GPUs raise it."""
    group = ProcessGroup(tf.distribute.get_strategy())
    message = ("Graph execution error:\n\nDetected at node gradients/DepthwiseConv2dNativeBackpropFilter\n"
               "A deterministic GPU implementation of DepthwiseConvBackpropFilter is not currently available.\n [[x]]")
    with pytest.raises(UserError, match=r"repeats bit by bit \(A deterministic GPU implementation of Depth") as caught:
        with group.watched():
            raise tf.errors.UnimplementedError(None, None, message)
    assert "\n" not in str(caught.value)
    with pytest.raises(tf.errors.UnimplementedError, match="something else"):
        with group.watched():
            raise tf.errors.UnimplementedError(None, None, "something else")


def test_tf32_is_tensorflows_unless_told_otherwise():
    enabled = tf.config.experimental.tensor_float_32_execution_enabled
    assert enabled()
    create_strategy(ScaleOptions())
    assert enabled() and experiment.environment_facts()["tf32"] is True
    try:
        create_strategy(ScaleOptions(tf32=False))
        assert not enabled() and experiment.environment_facts()["tf32"] is False
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(True)


def test_options_of_machines_belong_to_no_run():
    """A run's folder has the same name, and a run goes on, whatever they are."""
    config = RunConfig.of(CSSL, dataset="cifar10.1@40-1")
    for changed in (dict(tf32=False), dict(communication="ring"), dict(deterministic=True)):
        other = config.replace(**changed)
        assert other.folder() == config.folder() and not other.differences({"method": "CSSL", **config.values()})


@pytest.mark.parametrize("uratio", [0, 2])
def test_batches_never_end(uratio, tmp_path):
    """TensorFlow makes an exchange between processes of each batch of a dataset that may end."""
    endless = batches(load("digits.1@40-1", tmp_path), batch=4, uratio=uratio)
    assert endless.cardinality() == tf.data.INFINITE_CARDINALITY
