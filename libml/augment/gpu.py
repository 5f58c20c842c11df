"""What a GPU makes of the views: whether XLA can compile them for it, and which single kernels it lacks."""
import functools
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import tensorflow as tf
from tensorflow.python.framework import kernels  # nothing public tells which there are

from libml.errors import UserError
from libml.writing import write_text

TRIAL_SECONDS = 600
TRIAL = """
import numpy as np
import tensorflow as tf
from libml.augment import Augmenter
for gpu in tf.config.list_physical_devices("GPU"):
    tf.config.experimental.set_memory_growth(gpu, True)
augmenter = Augmenter("x.x.d", image_shape=(8, 8, 3), mirror=True, shift=1)
augmenter.strong(np.zeros((1, 8, 8, 3), np.uint8), tf.constant([0, 0], tf.int64))
"""


def xla_failure(remembered: Path) -> str:
    """Returns why XLA cannot compile views for this machine's GPUs, "" if it can.

    Asked once for each GPU and TensorFlow, in a process that it may end; failures that may pass are not remembered.
    """
    details = [tf.config.experimental.get_device_details(gpu) for gpu in tf.config.list_physical_devices("GPU")]
    key = "; ".join([f"TensorFlow {tf.__version__}", *sorted({
        f"{gpu.get('device_name')} {'.'.join(map(str, gpu.get('compute_capability', ())))}" for gpu in details})])
    known: dict = {}
    with suppress(OSError, ValueError, TypeError):  # not there, or damaged
        known = dict(json.loads(remembered.read_text(encoding="utf-8")))
    if key not in known:
        reason, lasts = _try_xla()
        if not lasts:
            return reason
        known[key] = reason
        with suppress(UserError):  # no place for it: next time it is tried again
            write_text(remembered, json.dumps(known, indent=1))
    return str(known[key])


def _try_xla() -> tuple[str, bool]:
    """Returns why the trial failed, and whether it will again."""
    try:
        done = subprocess.run([sys.executable, "-c", TRIAL], cwd=Path(__file__).parents[2], capture_output=True,
                              text=True, errors="replace", timeout=TRIAL_SECONDS)
    except subprocess.TimeoutExpired:
        return f"no answer in {TRIAL_SECONDS} s", False
    if not done.returncode:
        return "", True
    lines = done.stderr.strip().splitlines() or ["no message"]
    told = [line.strip() for line in lines if re.search(r"LLVM ERROR|ptxas|libdevice|PTX", line)]
    reason = (told or lines)[-1][:200]
    if done.returncode < 0:
        reason = f"{signal.Signals(-done.returncode).name}: {reason}"
    if "ptxas" in reason or "libdevice" in reason:
        reason += "; pip install 'cssl[gpu]' has what is missing"
    return reason, bool(told) or done.returncode < 0


_kernels_of = functools.cache(kernels.get_registered_kernels_for_op)


def kernels_for(node: tf.compat.v1.NodeDef) -> list:
    """The kernels of this build of TensorFlow that take a node's types."""
    return [kernel for kernel in _kernels_of(node.op).kernel
            if all({node.attr[c.name].type, *node.attr[c.name].list.type} - {0} <= set(c.allowed_values.list.type)
                   for c in kernel.constraint if c.name in node.attr)]  # 0 stands for "a list" or "no list"


def devices_of(node: tf.compat.v1.NodeDef) -> set[str]:
    return {kernel.device_type for kernel in kernels_for(node)}


def cpu_only(function: Callable, *arguments: object) -> list[str]:
    """Returns the types of a function's operations that have kernels for CPUs alone."""
    graph = tf.function(function, autograph=False).get_concrete_function(*arguments).graph.as_graph_def()
    nodes = [*graph.node, *(node for called in graph.library.function for node in called.node_def)]
    return sorted({node.op for node in nodes if devices_of(node) & {"CPU", "GPU", "DEFAULT"} == {"CPU"}})
