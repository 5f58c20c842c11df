"""Running policies: every image of a batch goes through its own operations, in the graph or through Pillow."""

import functools
from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf
from PIL import Image

from libml.augment.ops import Op

# Forms of a policy in the graph: for ordinary kernels; for XLA on a CPU; for XLA on a GPU.
PARTITIONED, CHUNKED, SELECTED = "partitioned", "chunked", "selected"
Policy = dict[str, tf.Tensor]  # "ops" int32 [N, depth] into the table's order, "params" float32 [N, depth, P]


def _call(op: Op, images: tf.Tensor, params: tf.Tensor) -> tf.Tensor:
    return op.graph(images, *(params[:, i] for i in range(op.parameters)))


@functools.cache
def _partitioned(table: tuple[Op, ...], height: int, width: int, channels: int) -> Callable:
    """Returns a function (images, ops, params) -> images for any number of images, so that operations are traced once
    for all views: each operation sees only its own images, with one partition and one stitch per batch."""
    @tf.function(autograph=False, experimental_attributes={"_noinline": True}, input_signature=[
        tf.TensorSpec([None, height, width, channels], tf.uint8), tf.TensorSpec([None], tf.int32),
        tf.TensorSpec([None, None], tf.float32)])
    def run(images, ops, params):
        parts = tf.dynamic_partition(images, ops, len(table))
        part_params = tf.dynamic_partition(params, ops, len(table))
        index = tf.dynamic_partition(tf.range(tf.shape(images)[0]), ops, len(table))
        done = [_call(*args) for args in zip(table, parts, part_params, strict=True)]
        return tf.dynamic_stitch(index, done)

    return run


def _chunked(table: list[Op], images: tf.Tensor, ops: tf.Tensor, params: tf.Tensor) -> tf.Tensor:
    """The same with static shapes, as XLA needs: each operation takes its images in chunks of constant size."""
    n = images.shape[0]
    chunk = min(max(4, n // 56), n)  # a third of an operation's share: few idle lanes, few turns
    order = tf.argsort(ops, stable=True)
    counts = tf.reduce_sum(tf.cast(ops[:, None] == tf.range(len(table)), tf.int32), 0)
    starts = tf.cumsum(counts, exclusive=True)
    # A spare image at the end takes the lanes that the last chunk of an operation leaves empty.
    result = tf.concat([images, images[:1]], 0)
    params = tf.concat([params, params[:1]], 0)
    order = tf.concat([order, tf.fill([chunk], n)], 0)

    for i, op in enumerate(table):
        if not op.parameters:  # identity
            continue

        def body(done: tf.Tensor, result: tf.Tensor, i: int = i, op: Op = op) -> tuple[tf.Tensor, tf.Tensor]:
            # Gathered, not sliced: XLA takes the start of a slice for a constant and compiles anew for every value.
            lanes = tf.gather(order, starts[i] + done + tf.range(chunk))
            lanes = tf.where(done + tf.range(chunk) < counts[i], lanes, n)
            changed = _call(op, tf.gather(result, lanes), tf.gather(params, lanes))
            return done + chunk, tf.tensor_scatter_nd_update(result, lanes[:, None], changed)

        _, result = tf.while_loop(lambda done, _, i=i: done < counts[i], body, [tf.constant(0), result])
    return result[:n]


def _selected(table: list[Op], images: tf.Tensor, ops: tf.Tensor, params: tf.Tensor) -> tf.Tensor:
    """The same with every operation on all images: many times the work, but no image decides what runs.

    On a GPU that work is small, while a loop whose length depends on the images asks the host at every turn.
    """
    result = images
    for i, op in enumerate(table):
        if op.parameters:
            result = tf.where(tf.reshape(ops == i, [-1, 1, 1, 1]), _call(op, images, params), result)
    return result


def run_policy(table: Mapping[str, Op], images: tf.Tensor, policy: Policy, form: str = PARTITIONED) -> tf.Tensor:
    """Applies policy["ops"][:, 0], then [:, 1], … to uint8 images, in one of the forms; all make the same pixels."""
    entries, ops, params = list(table.values()), policy["ops"], policy["params"]
    if form == PARTITIONED:
        run, shape = _partitioned(tuple(entries), *images.shape[1:]), images.shape
        for slot in range(ops.shape[1]):
            images = run(images, ops[:, slot], params[:, slot])
        return tf.reshape(images, shape)
    # A loop in the graph, so that the operations are compiled once and not once per slot.
    run = {CHUNKED: _chunked, SELECTED: _selected}[form]
    body = lambda slot, x: (slot + 1, run(entries, x, ops[:, slot], params[:, slot]))  # noqa: E731
    return tf.while_loop(lambda slot, _: slot < ops.shape[1], body, [tf.constant(0), images])[1]


def pillow_policy(table: Mapping[str, Op], images: np.ndarray, policy: Policy) -> np.ndarray:
    """The same through Pillow, image by image: the reference."""
    ops, params = np.asarray(policy["ops"]).tolist(), np.asarray(policy["params"]).tolist()
    entries, result = list(table.values()), []
    for pixels, image_ops, image_params in zip(images, ops, params, strict=True):
        image = Image.fromarray(pixels)
        for op, row in zip(image_ops, image_params, strict=True):
            image = entries[op].pillow(image, *row[: entries[op].parameters])
        result.append(np.asarray(image))
    return np.stack(result)
