"""Layers that all networks are made of: batch normalisation, seeded weights, stateless noise, blocks computed again."""
import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager

import keras
import tensorflow as tf

from libml.randomness import derived_seed, fold_in, uniform

PACKAGE = "cssl"  # of the names under which Keras saves classes


@contextmanager
def dtype_policy(name: str) -> Iterator[None]:
    """Sets the precision of the layers that are made meanwhile."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


@keras.saving.register_keras_serializable(PACKAGE)
class BatchNormalization(keras.layers.Layer):
    """Batch normalisation on TensorFlow's fused op, optionally with statistics shared by all replicas."""

    def __init__(self, momentum: float = 0.999, epsilon: float = 1e-3, sync: bool = False, **kwargs):
        super().__init__(**kwargs)
        self.momentum, self.epsilon, self.sync = momentum, epsilon, sync

    def get_config(self):
        return super().get_config() | {"momentum": self.momentum, "epsilon": self.epsilon, "sync": self.sync}

    def build(self, input_shape):
        # autocast=False: parameters and statistics stay float32 under mixed precision, as the fused op wants them.
        shape, common = (input_shape[-1],), dict(dtype="float32", autocast=False)
        self.gamma = self.add_weight(name="gamma", shape=shape, initializer="ones", **common)
        self.beta = self.add_weight(name="beta", shape=shape, initializer="zeros", **common)
        common.update(trainable=False, aggregation="mean")
        self.moving_mean = self.add_weight(name="moving_mean", shape=shape, initializer="zeros", **common)
        self.moving_variance = self.add_weight(name="moving_variance", shape=shape, initializer="ones", **common)

    def call(self, x, training=False):
        gamma, beta = tf.convert_to_tensor(self.gamma), tf.convert_to_tensor(self.beta)
        mean, variance = tf.convert_to_tensor(self.moving_mean), tf.convert_to_tensor(self.moving_variance)
        context = tf.distribute.get_replica_context()
        if training and self.sync and context is not None and context.num_replicas_in_sync > 1:
            y, batch_mean, batch_variance = self._normalize_across_replicas(x, gamma, beta, mean, context)
        else:
            unused = tf.zeros([0])
            y, batch_mean, batch_variance, *_ = tf.raw_ops.FusedBatchNormV3(
                x=x, scale=gamma, offset=beta, mean=unused if training else mean,
                variance=unused if training else variance, epsilon=self.epsilon, is_training=training)
        if training:
            self.moving_mean.assign(mean + (1 - self.momentum) * (batch_mean - mean))
            self.moving_variance.assign(variance + (1 - self.momentum) * (batch_variance - variance))
        return y

    def _normalize_across_replicas(self, x, gamma, beta, shift, context):
        """Normalises with the statistics of all replicas' batches, which must be of one size."""
        local_mean, local_variance = tf.nn.moments(tf.cast(x, tf.float32), axes=[0, 1, 2])
        # Second moments about the moving mean, equal on all replicas and near the mean: little cancellation.
        local_mean -= shift
        moments = tf.stack([local_mean, local_variance + tf.square(local_mean)])
        mean, square = tf.unstack(context.all_reduce(tf.distribute.ReduceOp.MEAN, moments))
        variance, mean = square - tf.square(mean), mean + shift
        scale = gamma * tf.math.rsqrt(variance + self.epsilon)
        y = tf.cast(tf.cast(x, tf.float32) * scale + (beta - mean * scale), x.dtype)  # as precise as the fused op
        count = tf.cast(tf.size(x) // x.shape[-1] * context.num_replicas_in_sync, tf.float32)
        return y, mean, variance * count / tf.maximum(count - 1, 1)  # Bessel's correction, as the fused op has it


class Factory:
    """Makes built layers with the project's initialisers, each with a seed of its own."""

    def __init__(self, seed: int | None, bn_momentum: float = 0.0, sync_bn: bool = False):
        self.seed, self.bn_momentum, self.sync_bn = seed, bn_momentum, sync_bn
        self.index = itertools.count()

    def _seed(self) -> int | None:
        seed = derived_seed(self.seed, next(self.index))
        return None if seed is None else seed >> 1

    def conv(self, name: str, channels: int, filters: int, size: int, stride: int = 1, padding: str = "same"):
        init = keras.initializers.RandomNormal(stddev=1 / math.sqrt(0.5 * size * size * filters), seed=self._seed())
        layer = keras.layers.Conv2D(filters, size, stride, padding, kernel_initializer=init, name=name)
        layer.build((None, None, None, channels))
        return layer

    def norm(self, name: str, channels: int):
        layer = BatchNormalization(self.bn_momentum, sync=self.sync_bn, name=name)
        layer.build((None, None, None, channels))
        return layer

    def dense(self, name: str, channels: int, units: int):
        # float32 logits under any precision policy: the losses are sensitive to their rounding.
        init = keras.initializers.GlorotNormal(seed=self._seed())
        layer = keras.layers.Dense(units, kernel_initializer=init, dtype="float32", name=name)
        layer.build((None, channels))
        return layer


class Noise:
    """Stateless random numbers of one forward pass: every draw folds the next number into the seed."""

    def __init__(self, seed, dropout: float, drawn: int = 0):
        self.seed, self.dropout_rate, self.drawn = seed, dropout, drawn

    def uniform(self, shape):
        seed = fold_in(self.seed, self.drawn)
        self.drawn += 1
        return uniform(shape, seed)

    def dropout(self, x, rate=None):
        rate = self.dropout_rate if rate is None else rate
        if not rate:
            return x
        keep = self.uniform(tf.shape(x)) >= rate
        return tf.where(keep, x / (1 - rate), tf.zeros([], x.dtype))


def recomputed(block: keras.layers.Layer, x: tf.Tensor, noise: Noise) -> tf.Tensor:
    """Trains a block of which only the input is kept: the backward pass runs it again for its feature maps."""
    variables, statistics, drawn = block.variables, block.non_trainable_variables, noise.drawn

    def run(x, *values):
        again = Noise(noise.seed, noise.dropout_rate, drawn)
        with keras.StatelessScope(list(zip(variables, values, strict=True))) as scope:
            y = block(x, training=True, noise=again)
            new = [tf.stop_gradient(scope.get_current_value(v)) for v in statistics]
        noise.drawn = again.drawn
        return y, *new

    y, *new = tf.recompute_grad(run)(x, *map(tf.convert_to_tensor, variables))
    for variable, value in zip(statistics, new, strict=True):
        variable.assign(value)
    return y
