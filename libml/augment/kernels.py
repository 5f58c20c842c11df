"""Image operations on batches in the graph, equal in every pixel to Pillow's, channels [R, G, B] or [R, G, B, A].

What ImageEnhance, ImageOps and ImageFilter have is named as there. Pillow computes with C floats and fixed-point
integers; each function below does the same. A compiler may contract a*b + c to one rounding (XLA does), Pillow's builds
do not: `_product` makes both give the same number.
"""
import functools
import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from PIL import Image

RESAMPLING = ("LANCZOS", "BICUBIC", "BILINEAR", "BOX", "HAMMING", "NEAREST")  # the order of rescale's methods
_RESAMPLE_BITS = 22  # Pillow's fixed-point precision for 8-bit resampling
MAX_MARGIN = 0.25  # of the side; rescale crops less than this


def _product(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    """a * b rounded once, whatever a compiler fuses it with; b must be integers of at most 11 bits."""
    # Cut a in two halves: both partial products are exact, so the sum is the only rounding.
    integer, mask = (tf.int32, -(1 << 12)) if a.dtype == tf.float32 else (tf.int64, -(1 << 27))
    high = tf.bitcast(tf.bitwise.bitwise_and(tf.bitcast(a, integer), tf.constant(mask, integer)), a.dtype)
    return high * b - (high - a) * b  # differences: graph optimisers reorder sums


def scaled(u: tf.Tensor, factor: float, offset: float) -> tf.Tensor:
    """offset + factor * u in float64 with Python's two roundings; u: float32 values."""
    high = float(np.float32(factor))  # 24 bits times 24 bits: exact, and so is the rest times u
    u = tf.cast(u, tf.float64)
    return (high * u - (high - factor) * u) - (-offset)  # differences, as in _product


def truncated(u: tf.Tensor, factor: float) -> tf.Tensor:
    """int(u * factor) as Python computes it, int32."""
    return tf.cast(tf.cast(u, tf.float64) * factor, tf.int32)


def with_alpha(rgb: tf.Tensor, images: tf.Tensor, opaque: bool = False) -> tf.Tensor:
    """Gives rgb the transparency of images, or none."""
    if images.shape[-1] == 3:
        return rgb
    alpha = images[..., 3:]
    return tf.concat([rgb, tf.fill(tf.shape(alpha), tf.constant(255, tf.uint8)) if opaque else alpha], -1)


def blend(first: tf.Tensor, second: tf.Tensor, alpha: tf.Tensor) -> tf.Tensor:
    """Image.blend: images with whole values, alpha float [N] in 0..2, to uint8."""
    first, second = tf.cast(first, tf.float32), tf.cast(second, tf.float32)
    alpha = tf.reshape(tf.cast(alpha, tf.float32), [-1, 1, 1, 1])
    return tf.cast(tf.clip_by_value(first - _product(alpha, first - second), 0.0, 255.0), tf.uint8)


def _enhanced(worst: tf.Tensor, images: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """From `worst` (factor 0) to the images (1) and beyond; transparency stays."""
    return with_alpha(blend(worst, images[..., :3], factor), images)


def _grey(images: tf.Tensor) -> tf.Tensor:
    """Pillow's conversion to mode L: [N, H, W, 1] int32."""
    x = tf.cast(images, tf.int32)
    return (x[..., 0:1] * 19595 + x[..., 1:2] * 38470 + x[..., 2:3] * 7471 + 0x8000) // 65536


def brightness(images: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    return _enhanced(tf.zeros_like(images[..., :3]), images, factor)


def color(images: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    return _enhanced(_grey(images), images, factor)


def contrast(images: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    grey = _grey(images)  # transparent pixels count in the mean
    count = images.shape[1] * images.shape[2]
    mean = (2 * tf.reduce_sum(grey, [1, 2, 3], keepdims=True) + count) // (2 * count)
    return _enhanced(mean, images, factor)


def sharpness(images: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    return _enhanced(smooth(images), images, factor)


def autocontrast(images: tf.Tensor) -> tf.Tensor:
    low = tf.cast(tf.reduce_min(images[..., :3], [1, 2], keepdims=True), tf.float64)
    high = tf.cast(tf.reduce_max(images[..., :3], [1, 2], keepdims=True), tf.float64)
    x = tf.cast(images[..., :3], tf.float64)
    scale = 255.0 / tf.maximum(high - low, 1.0)
    stretched = tf.clip_by_value(_product(scale, x) - _product(scale, low), 0.0, 255.0)
    return tf.where(high > low, tf.cast(stretched, tf.uint8), images[..., :3])


def equalize(images: tf.Tensor) -> tf.Tensor:
    x = tf.cast(images[..., :3], tf.int32)
    rows = 3 * (images.shape[0] or tf.shape(images)[0])  # one histogram and one table per image and channel
    numbered = x + tf.reshape(tf.range(rows) * 256, [-1, 1, 1, 3])
    counts = tf.raw_ops.DenseBincount(
        input=tf.reshape(numbered, [-1]), size=rows * 256, weights=tf.zeros([0], tf.int32), binary_output=False)
    below = tf.cumsum(tf.reshape(counts, [-1, 256]), axis=-1, exclusive=True)
    brightest = tf.reshape(tf.reduce_max(x, [1, 2]), [-1, 1])
    # All pixels but those of the brightest value: the running count at that value.
    step = tf.reduce_sum(tf.where(brightest == tf.range(256), below, 0), -1, keepdims=True) // 255
    # A floor of whole numbers in floats, which vectorise: the half keeps it clear of the next whole number either way.
    quotient = tf.floor((tf.cast(step // 2 + below, tf.float32) + 0.5) / tf.cast(tf.maximum(step, 1), tf.float32))
    table = tf.cast(tf.where(step > 0, tf.minimum(quotient, 255.0), tf.range(256.0)), tf.uint8)
    return tf.gather(tf.reshape(table, [-1]), numbered)


def posterize(images: tf.Tensor, bits: tf.Tensor) -> tf.Tensor:
    """Keeps bits, int32 [N] in 0..8."""
    mask = tf.cast(256 - tf.bitwise.left_shift(tf.ones_like(bits), 8 - bits), tf.uint8)
    return tf.bitwise.bitwise_and(images[..., :3], tf.reshape(mask, [-1, 1, 1, 1]))


def solarize(images: tf.Tensor, threshold: tf.Tensor) -> tf.Tensor:
    x = images[..., :3]
    return tf.where(tf.cast(x, tf.int32) < tf.reshape(threshold, [-1, 1, 1, 1]), x, 255 - x)


def _filtered(images: tf.Tensor, kernel: Sequence[Sequence[int]]) -> tf.Tensor:
    """ImageFilter.Kernel divided by its sum, as whole float32; Pillow leaves the border as it is."""
    height, width = images.shape[1:3]
    border, size = len(kernel) // 2, height * width * 3
    flat = tf.reshape(images[..., :3], [-1, size])
    # A neighbour is a fixed distance away in the flat image; what that brings in from other rows is on the border.
    reach = border * (width + 1) * 3
    padded = tf.cast(tf.concat([flat[:, :reach], flat, flat[:, :reach]], 1), tf.float32)
    total = 0.0
    for i, row in enumerate(kernel):
        for j, weight in enumerate(row):
            start = (i * width + j) * 3
            if weight:
                total += weight * padded[:, start : start + size]
    y, x = np.arange(height)[:, None, None], np.arange(width)[:, None]
    inside = (y >= border) & (y < height - border) & (x >= border) & (x < width - border) & np.ones(3, bool)
    filtered = tf.floor(total / float(np.sum(kernel)) + 0.5)
    return tf.reshape(tf.where(inside.ravel(), filtered, tf.cast(flat, tf.float32)), [-1, height, width, 3])


def blur(images: tf.Tensor) -> tf.Tensor:
    return _filtered(images, [[1, 1, 1, 1, 1], [1, 0, 0, 0, 1], [1, 0, 0, 0, 1], [1, 0, 0, 0, 1], [1, 1, 1, 1, 1]])


def smooth(images: tf.Tensor) -> tf.Tensor:
    # sum / 13 + 1/2 is never nearer than 1/26 to an integer, so rounding errors cannot change the result.
    return _filtered(images, [[1, 1, 1], [1, 5, 1], [1, 1, 1]])


def _take(images: tf.Tensor, y: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """images[n, y[n, i, j], x[n, i, j]]; y and x must lie inside the image."""
    height, width, channels = images.shape[1:]
    index = (tf.reshape(tf.range(tf.shape(images)[0]), [-1, 1, 1]) * height + y) * width + x
    return tf.gather(tf.reshape(images, [-1, channels]), index)


def affine(images: tf.Tensor, a=1.0, b=0.0, c=0.0, d=0.0, e=1.0, f=0.0) -> tf.Tensor:
    """Image.transform(AFFINE, NEAREST) with zeros outside: source x = ax + by + c, y = dx + ey + f; float64 [N]."""
    height, width = images.shape[1:3]
    # 16.16 fixed point, at the centre of the pixel.
    a, b, c, d, e, f = (tf.cast(tf.floor(tf.reshape(tf.cast(v, tf.float64), [-1, 1, 1]) * 65536.0 + 0.5), tf.int32)
                        for v in (a, b, c + a * 0.5 + b * 0.5, d, e, f + d * 0.5 + e * 0.5))
    x, y = tf.range(width), tf.range(height)[:, None]
    source_x = tf.bitwise.right_shift(c + a * x + b * y, 16)
    source_y = tf.bitwise.right_shift(f + d * x + e * y, 16)
    inside = (source_x >= 0) & (source_x < width) & (source_y >= 0) & (source_y < height)
    moved = _take(images, tf.clip_by_value(source_y, 0, height - 1), tf.clip_by_value(source_x, 0, width - 1))
    return tf.where(inside[..., None], moved, tf.constant(0, tf.uint8))


def rotate(images: tf.Tensor, degrees: tf.Tensor, limit: int) -> tf.Tensor:
    """Image.rotate by whole degrees, int32 [N] within -limit..limit, nearest, zeros outside."""
    height, width = images.shape[1:3]
    # The angles are few, so their matrices are constants made as Pillow makes them, with the C library's cosine.
    rows = []
    for angle in range(-limit, limit + 1):
        radians = -math.radians(angle)
        cos, sin = round(math.cos(radians), 15), round(math.sin(radians), 15)
        minus_sin = round(-math.sin(radians), 15)
        x, y = width / 2, height / 2
        rows.append((cos, sin, cos * -x + sin * -y + x, minus_sin, cos, minus_sin * -x + cos * -y + y))
    columns = zip(*rows, strict=True)
    return affine(images, *(tf.gather(tf.constant(column, tf.float64), degrees + limit) for column in columns))


@functools.cache
def _resampling_table(size: int) -> np.ndarray:
    """Fixed-point matrices [methods, starts, ends, size, size] of crop and resize back along one axis.

    At odd sizes a tie, rounded half to even, makes the end differ by one. Each is what Pillow makes of unit vectors in
    whole numbers of 32 bits, which it rounds as it rounds its weights for bytes.
    """
    slack = size % 2
    table = np.zeros((len(RESAMPLING), round(MAX_MARGIN * size) + 1, 1 + 2 * slack, size, size), np.int32)
    for method, start, end in np.ndindex(table.shape[:3]):
        crop = min(size - start + end - slack, size) - start
        units = Image.fromarray(np.eye(crop, dtype=np.int32) << _RESAMPLE_BITS)
        resized = units.resize((size, crop), Image.Resampling[RESAMPLING[method]])
        table[method, start, end, :, start : start + crop] = np.asarray(resized).T
    return table


def _resample(x: tf.Tensor, margin: tf.Tensor, method: tf.Tensor) -> tf.Tensor:
    """One pass over axis 1 of whole-valued float32 [N, size, …]."""
    size = x.shape[1]
    start = tf.cast(tf.round(margin * size), tf.int32)  # half to even, as Python's round in Image.crop
    end = tf.cast(tf.round((1.0 - margin) * size), tf.int32)
    table = _resampling_table(size)
    row = (method * table.shape[1] + start) * table.shape[2] + end - (size - start) + size % 2
    weights = tf.gather(tf.constant(table.reshape(-1, size, size)), row)
    # Two halves of 11 bits and a sign: products with bytes, and their sums, are exact in float32, even as TF32 on GPUs.
    high = tf.bitwise.right_shift(weights + 2048, 12)
    halves = tf.cast(tf.concat([high, weights - high * 4096], 1), tf.float32)
    sums = tf.cast(tf.matmul(halves, tf.reshape(x, [-1, size, x.shape[2] * x.shape[3]])), tf.int32)
    total = sums[:, :size] * 4096 + sums[:, size:] + (1 << (_RESAMPLE_BITS - 1))
    rounded = tf.clip_by_value(tf.bitwise.right_shift(total, _RESAMPLE_BITS), 0, 255)
    return tf.reshape(tf.cast(rounded, tf.float32), [-1, *x.shape[1:]])


def rescale(images: tf.Tensor, margin: tf.Tensor, method: tf.Tensor) -> tf.Tensor:
    """Crops the margin (float64 [N], of the side) and resizes back by RESAMPLING[method]; rows first, like Pillow."""
    x = tf.transpose(tf.cast(images, tf.float32), [0, 2, 1, 3])
    x = tf.transpose(_resample(x, margin, method), [0, 2, 1, 3])
    return tf.cast(_resample(x, margin, method), tf.uint8)


def box(centre: tf.Tensor, size: tf.Tensor, height: int, width: int) -> tf.Tensor:
    """Mask [N, H, W, 1] of the square [c - size // 2, c + size // 2); centre [N, 2] is (x, y) in [0, 1)."""
    half = tf.reshape(size // 2, [-1, 1])
    x = truncated(centre[:, 0:1], width) - tf.range(width)  # [N, W]
    y = truncated(centre[:, 1:2], height) - tf.range(height)
    inside_x, inside_y = (x <= half) & (x > -half), (y <= half) & (y > -half)
    return (inside_y[:, :, None] & inside_x[:, None, :])[..., None]


def square(images: tf.Tensor, size: tf.Tensor, centre: tf.Tensor) -> tf.Tensor:
    """Fills a square with 127, transparent; size int32 [N], as in `box`."""
    grey = tf.constant([127, 127, 127, 0][:images.shape[3]], tf.uint8)
    return tf.where(box(centre, size, *images.shape[1:3]), grey, images)


def cutout(images: tf.Tensor, u: tf.Tensor, centre: tf.Tensor) -> tf.Tensor:
    return square(images, 1 + tf.cast(tf.cast(u, tf.float64) * min(images.shape[1:3]) * 0.499, tf.int32), centre)


def mirror_and_shift(images: tf.Tensor, flip: tf.Tensor, offset: tf.Tensor, shift: int) -> tf.Tensor:
    """Flips where `flip` [N], reflect-pads by `shift` and crops at `offset` [N, 2] (y, x) in 0..2*shift."""
    height, width = images.shape[1:3]

    def source(start: tf.Tensor, size: int) -> tf.Tensor:
        i = tf.abs(tf.range(size) + start[:, None] - shift)  # reflect without repeating the edge
        return size - 1 - tf.abs(size - 1 - i)

    y, x = source(offset[:, 0], height), source(offset[:, 1], width)
    x = tf.where(flip[:, None], width - 1 - x, x)
    return _take(images, y[:, :, None], x[:, None, :])
