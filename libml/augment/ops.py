"""The operations: for each its bins, its definition in Pillow, and the same in the graph; and policies of them.

`OPS` holds CTAugment's 19 operations on RGB, `RAND_OPS` the 14 of RandAugment on RGBA (or RGB), `AUTO_OPS` those and
AutoAugment's two more. Parameters are float32 in [0, 1); Python's arithmetic on them, in doubles, is part of them.
"""
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from libml.augment import kernels
from libml.augment.spec import LEVELS


@dataclass(frozen=True)
class Op:
    """One operation; `bins` are those of its learnable parameters, `parameters` counts the plain random ones too."""

    bins: tuple[int, ...]
    pillow: Callable[..., Image.Image]  # (image, *parameters)
    graph: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]  # (uint8 [N, H, W, C], float32 [N, at least `parameters`])
    parameters: int


def _op(bins: Sequence[int], pillow: Callable, graph: Callable, parameters: int | None = None) -> Op:
    """An op whose `graph` takes the columns of its parameters one by one."""
    count = len(bins) if parameters is None else parameters
    graph = tf.autograph.experimental.do_not_convert(graph)  # nothing to convert, and lambdas make it complain
    return Op(tuple(bins), pillow, lambda images, params: graph(images, *(params[:, i] for i in range(count))), count)


def _blended(pillow: Callable, graph: Callable) -> Op:
    return _op([17], lambda x, u: Image.blend(x, pillow(x), u), lambda x, u: kernels.blend(x, graph(x), u))


def _enhanced(pillow: Callable, graph: Callable) -> Op:
    return _op([17], lambda x, u: pillow(x).enhance(0.1 + 1.9 * u), lambda x, u: graph(x, kernels.scaled(u, 1.9, 0.1)))


def _transform(x: Image.Image, entry: str, value: float) -> Image.Image:
    matrix = dict(a=1, b=0, c=0, d=0, e=1, f=0) | {entry: value}
    return x.transform(x.size, Image.Transform.AFFINE, tuple(matrix.values()))


def _affine(entry: str) -> Op:
    # The translations go through here too: 0.3(2u - 1) is in pixels, so nearest-neighbour moves nothing at all.
    # That is what CTAugment has always computed, and what published results used.
    return _op([17], lambda x, u: _transform(x, entry, 0.3 * (2 * u - 1)),
               lambda x, u: kernels.affine(x, **{entry: 0.3 * (2 * tf.cast(u, tf.float64) - 1)}))


def _square(x: Image.Image, half: int, centre_x: float, centre_y: float) -> Image.Image:
    """Fills a square of twice `half` with 127, transparent."""
    column, row = int(centre_x * x.width), int(centre_y * x.height)
    box = (max(column - half, 0), max(row - half, 0), min(column + half, x.width), min(row + half, x.height))
    x = x.copy()
    if half:  # Pillow fills a box of no size without complaint, but says nowhere that it does
        x.paste((127, 127, 127, 0)[:len(x.mode)], box)
    return x


def _rescale(x: Image.Image, u: float, v: float) -> Image.Image:
    margin = kernels.MAX_MARGIN * u
    crop = x.crop((margin * x.width, margin * x.height, x.width * (1 - margin), x.height * (1 - margin)))
    return crop.resize(x.size, Image.Resampling[kernels.RESAMPLING[int(5.99 * v)]])


OPS: dict[str, Op] = {
    "autocontrast": _blended(ImageOps.autocontrast, kernels.autocontrast),
    "blur": _blended(lambda x: x.filter(ImageFilter.BLUR), kernels.blur),
    "brightness": _enhanced(ImageEnhance.Brightness, kernels.brightness),
    "color": _enhanced(ImageEnhance.Color, kernels.color),
    "contrast": _enhanced(ImageEnhance.Contrast, kernels.contrast),
    # The centre, uniform over pixels, comes as two more parameters x and y: floor(v * extent). They have no bins.
    "cutout": _op([17], lambda x, u, cx, cy: _square(x, (1 + int(u * min(x.size) * 0.499)) // 2, cx, cy),
                  lambda x, u, cx, cy: kernels.cutout(x, u, tf.stack([cx, cy], -1)), parameters=3),
    "equalize": _blended(ImageOps.equalize, kernels.equalize),
    "identity": _op([], lambda x: x, lambda x: x),
    "invert": _blended(ImageOps.invert, lambda x: 255 - x),
    "posterize": _op([8], lambda x, u: ImageOps.posterize(x, 1 + int(7.999 * u)),
                     lambda x, u: kernels.posterize(x, 1 + kernels.truncated(u, 7.999))),
    "rescale": _op([17, 6], _rescale, lambda x, u, v: kernels.rescale(
        x, kernels.MAX_MARGIN * tf.cast(u, tf.float64), kernels.truncated(v, 5.99))),
    "rotate": _op([17], lambda x, u: x.rotate(int(round(45 * (2 * u - 1)))), lambda x, u: kernels.rotate(
        x, tf.cast(tf.round(45 * (2 * tf.cast(u, tf.float64) - 1)), tf.int32), limit=45)),
    "sharpness": _enhanced(ImageEnhance.Sharpness, kernels.sharpness),
    "shear_x": _affine("b"),
    "shear_y": _affine("d"),
    "smooth": _blended(lambda x: x.filter(ImageFilter.SMOOTH), kernels.smooth),
    "solarize": _op([17], lambda x, u: ImageOps.solarize(x, int(255.999 * u)),
                    lambda x, u: kernels.solarize(x, kernels.truncated(u, 255.999))),
    "translate_x": _affine("c"),
    "translate_y": _affine("f"),
}


# RandAugment and AutoAugment. Two parameters each: magnitude M = int(16u) in 0..15, and a sign, negative where v < 1/2.
# Geometric operations bring in transparent black, the enhancers keep transparency, the others drop it. Above 9, which
# none draws unless told so, the operations extrapolate.

def _rand(pillow: Callable, graph: Callable, value: Sequence[float] = (), signed: bool = False) -> Op:
    """An op whose setting is value[M], with a sign if `signed`; without values it has none."""
    if not value:
        return _op([LEVELS, 2], lambda x, u, v: pillow(x), lambda x, u, v: graph(x))
    dtype = tf.int32 if isinstance(value[0], int) else tf.float64

    def setting(u: float, v: float) -> float:
        return value[int(u * LEVELS)] * (-1 if signed and v < 0.5 else 1)

    def setting_graph(u: tf.Tensor, v: tf.Tensor) -> tf.Tensor:
        chosen = tf.gather(tf.constant(value, dtype), kernels.truncated(u, LEVELS))
        return tf.where(v < 0.5, -chosen, chosen) if signed else chosen

    return _op([LEVELS, 2], lambda x, u, v: pillow(x, setting(u, v)), lambda x, u, v: graph(x, setting_graph(u, v)))


def _opaque(pillow: Callable, graph: Callable) -> tuple[Callable, Callable]:
    """Makes an RGB operation drop transparency."""
    return (lambda x, *s: pillow(x.convert("RGB"), *s).convert(x.mode),
            lambda x, *s: kernels.with_alpha(graph(x[..., :3], *s), x, opaque=True))


def _rand_affine(entry: str, value: Sequence[float]) -> Op:
    return _rand(lambda x, s: _transform(x, entry, s), lambda x, s: kernels.affine(x, **{entry: s}), value, signed=True)


def _posterize(x: Image.Image, bits: int) -> Image.Image:
    return ImageOps.posterize(x, bits) if bits else Image.new(x.mode, x.size)  # Pillow has become strict about 0 bits


_M = range(LEVELS)
_FACTORS = [0.18 * m + 0.1 for m in _M]
_SHEARS = [0.03 * m for m in _M]

RAND_OPS: dict[str, Op] = {
    "Identity": _rand(lambda x: x, lambda x: x),
    "AutoContrast": _rand(*_opaque(ImageOps.autocontrast, kernels.autocontrast)),
    "Equalize": _rand(*_opaque(ImageOps.equalize, kernels.equalize)),
    "Rotate": _rand(lambda x, degrees: x.rotate(degrees),
                    lambda x, degrees: kernels.rotate(x, degrees, limit=3 * LEVELS),
                    [3 * m for m in _M], signed=True),
    "Solarize": _rand(*_opaque(ImageOps.solarize, kernels.solarize), [256 - int(25.6 * m) for m in _M]),
    "Color": _rand(lambda x, f: ImageEnhance.Color(x).enhance(f), kernels.color, _FACTORS),
    "Contrast": _rand(lambda x, f: ImageEnhance.Contrast(x).enhance(f), kernels.contrast, _FACTORS),
    "Brightness": _rand(lambda x, f: ImageEnhance.Brightness(x).enhance(f), kernels.brightness, _FACTORS),
    "Sharpness": _rand(lambda x, f: ImageEnhance.Sharpness(x).enhance(f), kernels.sharpness, _FACTORS),
    "ShearX": _rand_affine("b", _SHEARS),
    "TranslateX": _rand_affine("c", [float(m) for m in _M]),
    "TranslateY": _rand_affine("f", [float(m) for m in _M]),
    # From 10 on no bit is left: black, as the arithmetic has it.
    "Posterize": _rand(*_opaque(_posterize, kernels.posterize), [max(4 - int(0.4 * m), 0) for m in _M]),
    "ShearY": _rand_affine("d", _SHEARS),
}
AUTO_OPS: dict[str, Op] = {
    **RAND_OPS,
    "Invert": _rand(*_opaque(ImageOps.invert, lambda x: 255 - x)),
    # The side is 2M; the centre comes in place of the sign and as one more parameter: column, then row.
    "Cutout": _op([LEVELS], lambda x, u, cx, cy: _square(x, int(u * LEVELS), cx, cy),
                  lambda x, u, cx, cy: kernels.square(x, 2 * kernels.truncated(u, LEVELS), tf.stack([cx, cy], -1)),
                  parameters=3),
}


def apply(name: str, images: tf.Tensor, params: tf.Tensor) -> tf.Tensor:
    """One operation of any table in the graph: images uint8 [N, H, W, C], params float32 [N, parameters]."""
    op = (OPS | AUTO_OPS)[name]
    return op.graph(tf.convert_to_tensor(images, tf.uint8), tf.convert_to_tensor(params, tf.float32))


# Policies: every image of a batch goes through its own operations. Forms in the graph: for ordinary kernels; for XLA on
# a CPU; for XLA on a GPU.
PARTITIONED, CHUNKED, SELECTED = "partitioned", "chunked", "selected"
Policy = dict[str, tf.Tensor]  # "ops" int32 [N, depth] into the table's order, "params" float32 [N, depth, P]


@functools.cache
def _partitioned(table: tuple[Op, ...], height: int, width: int, channels: int) -> Callable:
    """A function (images, ops, params) -> images, traced once for all views: operations see their own images only."""
    @tf.function(autograph=False, experimental_attributes={"_noinline": True}, input_signature=[
        tf.TensorSpec([None, height, width, channels], tf.uint8), tf.TensorSpec([None], tf.int32),
        tf.TensorSpec([None, None], tf.float32)])
    def run(images, ops, params):
        parts, part_params, index = (tf.dynamic_partition(x, ops, len(table))
                                     for x in (images, params, tf.range(tf.shape(images)[0])))
        return tf.dynamic_stitch(index, [op.graph(*mine) for op, *mine in zip(table, parts, part_params, strict=True)])

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
            changed = op.graph(tf.gather(result, lanes), tf.gather(params, lanes))
            return done + chunk, tf.tensor_scatter_nd_update(result, lanes[:, None], changed)

        _, result = tf.while_loop(lambda done, _, i=i: done < counts[i], body, [tf.constant(0), result])
    return result[:n]


def _selected(table: list[Op], images: tf.Tensor, ops: tf.Tensor, params: tf.Tensor) -> tf.Tensor:
    """The same with every operation on all images: on a GPU cheaper than loops whose lengths the host has to ask."""
    result = images
    for i, op in enumerate(table):
        if op.parameters:
            result = tf.where(tf.reshape(ops == i, [-1, 1, 1, 1]), op.graph(images, params), result)
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
