"""EnAET's transformations (Wang et al. 2020): images changed in the graph, and the numbers that describe the change."""
import math

import numpy as np
import tensorflow as tf

from libml.augment import kernels
from libml.randomness import uniform

NUMBERS = {"projective": 8, "affine": 6, "similarity": 5, "euclidean": 4, "ccbs": 4}  # that describe each of them
_CENTRE = np.array([0, 0, 16, 0, 0, 16, 0, 0])  # of a projection's coefficients, and their spread: for any image size
_SPREAD = np.array([1, 1, 20, 1, 1, 20, 0.015, 0.015])


def bilinear(images: tf.Tensor, coefficients: tf.Tensor) -> tf.Tensor:
    """Image.transform(PERSPECTIVE, BILINEAR), black outside; uint8 [N, H, W, C], coefficients a..h float64 [N, 8].

    A pixel at (x, y) is taken from ((a x + b y + c) / (g x + h y + 1), (d x + e y + f) / (g x + h y + 1)).
    """
    height, width, channels = images.shape[1:]
    a, b, c, d, e, f, g, h = (v[:, None, None] for v in tf.unstack(coefficients, axis=-1))
    x, y = tf.range(width, dtype=tf.float64) + 0.5, tf.range(height, dtype=tf.float64)[:, None] + 0.5
    below = g * x + h * y + 1
    x, y = (a * x + b * y + c) / below, (d * x + e * y + f) / below
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    x, y = tf.where(inside, x, 0.5) - 0.5, tf.where(inside, y, 0.5) - 0.5
    left, top = tf.floor(x), tf.floor(y)
    flat = tf.reshape(tf.cast(images, tf.float32), [-1, height * width, channels])  # GPUs gather no bytes

    def neighbour(down: int, right: int) -> tf.Tensor:
        row = tf.clip_by_value(tf.cast(top, tf.int32) + down, 0, height - 1)
        column = tf.clip_by_value(tf.cast(left, tf.int32) + right, 0, width - 1)
        return tf.cast(tf.gather(flat, row * width + column, batch_dims=1), tf.float64)

    right, down = (x - left)[..., None], (y - top)[..., None]
    first = neighbour(0, 0) + (neighbour(0, 1) - neighbour(0, 0)) * right
    second = neighbour(1, 0) + (neighbour(1, 1) - neighbour(1, 0)) * right
    return tf.where(inside[..., None], tf.cast(first + (second - first) * down, tf.uint8), tf.constant(0, tf.uint8))


def corners(scale: tf.Tensor, turns: tf.Tensor, shifts: tf.Tensor, height: int, width: int) -> tf.Tensor:
    """The image's corners [N, 4, 2] after scaling [N] about the centre, quarter turns [N] and shifts [N, 4, 2]."""
    centre = tf.constant([width / 2 + 0.5, height / 2 + 0.5], tf.float64)
    square = tf.constant([[0, 0], [width, 0], [width, height], [0, height]], tf.float64)
    scaled = centre + tf.cast(scale, tf.float64)[:, None, None] * (square - centre)
    order = (tf.range(4) + tf.cast(turns, tf.int32)[:, None]) % 4
    return tf.gather(scaled, order, batch_dims=1) + tf.cast(shifts, tf.float64)


def projective(points: tf.Tensor, height: int, width: int) -> tf.Tensor:
    """Coefficients [N, 8] of the projection of four points [N, 4, 2] to the corners (Heckbert 1989, Sec. 2.2.3)."""
    (x0, y0), (x1, y1), (x2, y2), (x3, y3) = (tf.unstack(p, axis=-1) for p in tf.unstack(points, axis=1))
    dx1, dx2, sx, dy1, dy2, sy = x1 - x2, x3 - x2, x0 - x1 + x2 - x3, y1 - y2, y3 - y2, y0 - y1 + y2 - y3
    area = dx1 * dy2 - dx2 * dy1
    g, h = (sx * dy2 - dx2 * sy) / area, (dx1 * sy - sx * dy1) / area
    a, b, c, d, e, f = x1 - x0 + g * x1, x3 - x0 + h * x3, x0, y1 - y0 + g * y1, y3 - y0 + h * y3, y0
    adjugate = tf.stack([width * (e - f * h), width * (c * h - b), width * (b * f - c * e), height * (f * g - d),
                         height * (a - c * g), height * (c * d - a * f), d * h - e * g, b * g - a * h], -1)
    return adjugate / (a * e - b * d)[:, None]


def affine(angle: tf.Tensor, shift: tf.Tensor, scale: tf.Tensor, shear: tf.Tensor, height: int, width: int,
           ) -> tf.Tensor:
    """Coefficients [N, 8] of a rotation and shear (degrees [N]), scaling [N] about the centre and shift [N, 2]."""
    angle, shear, scale = (tf.cast(v, tf.float64) for v in (angle * (math.pi / 180), shear * (math.pi / 180), scale))
    x, y = width / 2 + 0.5, height / 2 + 0.5
    to_x, to_y = (tf.cast(v, tf.float64) for v in tf.unstack(shift, axis=-1))
    size = scale * tf.cos(shear)
    a, b = tf.cos(angle + shear) / size, tf.sin(angle + shear) / size
    d, e = -tf.sin(angle) / size, tf.cos(angle) / size
    zero = tf.zeros_like(a)
    return tf.stack([a, b, x - a * (x + to_x) - b * (y + to_y), d, e, y - d * (x + to_x) - e * (y + to_y), zero, zero],
                    -1)


def mosaic(images: tf.Tensor, centre: tf.Tensor) -> tf.Tensor:
    """Gives a square of a quarter of the width, around `centre` [N, 2] (x, y in [0, 1]), its own mean colour."""
    n, height, width = images.shape[:3]
    hole = kernels.box(centre, tf.fill([n], max(2, width // 4)), height, width)
    count = tf.reduce_sum(tf.cast(hole, tf.int32), [1, 2], keepdims=True)
    total = tf.reduce_sum(tf.where(hole, tf.cast(images, tf.int32), 0), [1, 2], keepdims=True)
    return tf.where(hole, tf.cast(total // tf.maximum(count, 1), tf.uint8), images)


def transform(images: tf.Tensor, seed: tf.Tensor) -> dict[str, tuple[tf.Tensor, tf.Tensor]]:
    """Returns uint8 images [N, H, W, 3] changed in each of five ways, with float32 targets [N, `NUMBERS`]."""
    n, height, width = images.shape[:3]
    u = uniform([n, 19], seed)
    reach = min(4, width // 8)  # pixels; smaller images must not fold
    turns, shifts = tf.minimum(tf.floor(4 * u[:, 0]), 3), tf.floor((2 * reach + 1) * u[:, 1:9]) - reach
    points = corners(0.8 + 0.4 * u[:, 9], turns, tf.reshape(tf.minimum(shifts, reach), [n, 4, 2]), height, width)
    coefficients = projective(points, height, width)
    sides = tf.constant([0.2 * width, 0.2 * height])
    angle, scale, shear = 360 * u[:, 10] - 180, 0.8 + 0.4 * u[:, 11], 60 * u[:, 12] - 30
    shift = tf.round((2 * u[:, 13:15] - 1) * sides)
    radians = angle * (math.pi / 180)
    target = tf.concat([tf.stack([tf.cos(radians), tf.sin(radians)], -1), shift / sides,
                        tf.stack([(scale - 1) / 0.2, shear / 30], -1)], -1)
    one, none = tf.ones([n]), tf.zeros([n])
    factors = 0.2 + 1.6 * u[:, 15:19]
    changed = images
    for operation, factor in zip((kernels.color, kernels.contrast, kernels.brightness, kernels.sharpness),
                                 tf.unstack(factors, axis=-1), strict=True):
        changed = operation(changed, factor)
    return {"projective": (bilinear(images, coefficients), tf.cast((coefficients - _CENTRE) / _SPREAD, tf.float32)),
            "affine": (bilinear(images, affine(angle, shift, scale, shear, height, width)), target),
            "similarity": (bilinear(images, affine(angle, shift, scale, none, height, width)), target[:, :5]),
            "euclidean": (bilinear(images, affine(angle, shift, one, none, height, width)), target[:, :4]),
            "ccbs": (changed, factors)}
