"""Networks: wide residual net, 13-layer CNN and shake-shake net, from images in [-1, 1] to logits and embedding."""
import itertools
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import keras
import numpy as np
import tensorflow as tf

from libml.applications import is_application
from libml.config import default_scales
from libml.errors import UserError
from libml.keras_model import PACKAGE, dtype_policy


@keras.saving.register_keras_serializable(PACKAGE)
class BatchNormalization(keras.layers.Layer):
    """Batch normalisation on TensorFlow's fused op, optionally with statistics shared by all replicas."""

    def __init__(self, momentum: float = 0.999, epsilon: float = 1e-3, sync: bool = False, **kwargs):
        super().__init__(**kwargs)
        self.momentum, self.epsilon, self.sync = momentum, epsilon, sync

    def get_config(self):
        """What it was made with."""
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


class _Factory:
    """Makes built layers with the project's initialisers, each with a seed of its own."""

    def __init__(self, seed: int | None, bn_momentum: float, sync_bn: bool):
        self.seed, self.bn_momentum, self.sync_bn = seed, bn_momentum, sync_bn
        self.index = itertools.count()

    def _seed(self) -> int | None:
        if self.seed is None:
            return None
        return int(np.random.SeedSequence([self.seed, next(self.index)]).generate_state(1)[0] >> 1)

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


class _Noise:
    """Stateless random numbers of one forward pass: every draw folds the next number into the seed."""

    def __init__(self, seed, dropout: float, drawn: int = 0):
        self.seed, self.dropout_rate, self.drawn = seed, dropout, drawn

    def uniform(self, shape):
        seed = tf.random.experimental.stateless_fold_in(self.seed, self.drawn, alg="philox")
        self.drawn += 1
        # From integers, because XLA makes other floats of the same bits; float32, as half would distort the rate.
        bits = tf.random.stateless_uniform(shape, seed, minval=None, maxval=None, dtype=tf.int32, alg="philox")
        return tf.cast(bits, tf.float32) * 2.0 ** -32 + 0.5

    def dropout(self, x, rate=None):
        rate = self.dropout_rate if rate is None else rate
        if not rate:
            return x
        keep = self.uniform(tf.shape(x)) >= rate
        return tf.where(keep, x / (1 - rate), tf.zeros([], x.dtype))


def _recomputed(block: keras.layers.Layer, x: tf.Tensor, noise: _Noise) -> tf.Tensor:
    """Trains a block of which only the input is kept: the backward pass runs it again for its feature maps."""
    variables, statistics, drawn = block.variables, block.non_trainable_variables, noise.drawn

    def run(x, *values):
        again = _Noise(noise.seed, noise.dropout_rate, drawn)
        with keras.StatelessScope(list(zip(variables, values, strict=True))) as scope:
            y = block(x, training=True, noise=again)
            new = [tf.stop_gradient(scope.get_current_value(v)) for v in statistics]
        noise.drawn = again.drawn
        return y, *new

    y, *new = tf.recompute_grad(run)(x, *map(tf.convert_to_tensor, variables))
    for variable, value in zip(statistics, new, strict=True):
        variable.assign(value)
    return y


class _Network(keras.Model):
    """What the networks share: arguments of a call, global mean, dense layer. Subclasses give `features`."""

    needs_seed_in_training = False
    recompute = False  # whether training keeps only the inputs of blocks
    image_shape: tuple[int, ...] | None = None  # of what `build` makes

    def __init_subclass__(cls, **arguments):
        super().__init_subclass__(**arguments)
        keras.saving.register_keras_serializable(PACKAGE)(cls)

    def __init__(self, dropout: float, **kwargs):
        super().__init__(**kwargs)
        self.dropout = dropout

    def get_config(self):
        """The arguments of `build`, and the precision."""
        # Whoever makes it again has its weights, too.
        return {"dtype_policy": self.dtype_policy.name, **vars(self.settings), "weights": "none"}

    @classmethod
    def from_config(cls, config):
        """Builds a network of what `get_config` returned."""
        config = dict(config)
        with dtype_policy(config.pop("dtype_policy")):
            return build(**config)

    def twin(self, seed: int | None) -> keras.Model:
        """Returns the same network with the weights of another seed."""
        return build(**{**vars(self.settings), "seed": seed})

    @property
    def map_shape(self) -> tuple[int, ...]:
        """The shape of the feature map of one image."""
        assert self.image_shape is not None
        found, = self(np.zeros((1, *self.image_shape), np.float32), outputs=("map",))
        return tuple(found.shape[1:])

    def through(self, blocks, x, training, noise):
        """What residual blocks make of a feature map, one after the other."""
        for block in blocks:
            x = _recomputed(block, x, noise) if self.recompute and training else block(x, training=training,
                                                                                       noise=noise)
        return x

    def call(self, images, training=False, seed=None, mc_dropout=False, embedding_dropout=0.0, outputs=None):
        """Logits [N, classes] of images [N, H, W, C], or what `outputs` asks for, as a tuple.

        Outputs are "logits", "embedding", the pooled features [N, channels], and "map", the features [N, H', W',
        channels] before. `seed` (integers [2]) feeds all randomness; dropout acts if and only if `mc_dropout`, whatever
        `training` is. `embedding_dropout` is the rate of another one, on the embedding.
        """
        if seed is None and (mc_dropout or embedding_dropout or training and self.needs_seed_in_training):
            raise ValueError(f"{type(self).__name__} got seed=None, but this pass is random: give two integers.")
        noise = _Noise(seed, self.dropout if mc_dropout else 0.0)
        x = tf.cast(self.features(images, training, noise), tf.float32)
        embedding = noise.dropout(tf.reduce_mean(x, axis=[1, 2]), embedding_dropout)
        if outputs is None:
            return self.classifier(embedding)
        unknown = set(outputs) - {"logits", "embedding", "map"}
        if unknown:
            raise ValueError(f"{self.name} has no output {', '.join(map(repr, sorted(unknown)))}; it has logits, "
                             "embedding and map, and models.Heads gives it more.")
        found = {"embedding": embedding, "map": x}
        return tuple(found[name] if name in found else self.classifier(embedding) for name in outputs)


class _ResidualBlock(keras.layers.Layer):
    """BN, LeakyReLU, conv, BN, LeakyReLU, (MC dropout,) conv; plus the shortcut."""

    def __init__(self, make: _Factory, name: str, channels: int, filters: int, stride: int, activate_shortcut: bool):
        super().__init__(name=name)
        self.activate_shortcut = activate_shortcut
        self.norm1 = make.norm(f"{name}_norm1", channels)
        self.conv1 = make.conv(f"{name}_conv1", channels, filters, 3, stride)
        self.norm2 = make.norm(f"{name}_norm2", filters)
        self.conv2 = make.conv(f"{name}_conv2", filters, filters, 3)
        self.shortcut = make.conv(f"{name}_shortcut", channels, filters, 1, stride) if channels != filters else None
        self.built = True

    def call(self, x, training, noise):
        y = tf.nn.leaky_relu(self.norm1(x, training=training), 0.1)
        if self.activate_shortcut:
            x = y
        y = self.conv1(y)
        y = tf.nn.leaky_relu(self.norm2(y, training=training), 0.1)
        y = self.conv2(noise.dropout(y))
        return y + (x if self.shortcut is None else self.shortcut(x))


class WideResNet(_Network):
    """Pre-activation wide residual net (Zagoruyko & Komodakis 2016) with LeakyReLU; WRN-28-2: filters 32, repeat 4."""

    def __init__(self, make: _Factory, *, num_classes, image_shape, filters, repeat, scales, dropout):
        super().__init__(dropout, name="resnet")
        self.stem, self.last_stage = make.conv("stem", image_shape[-1], 16, 3), (scales - 1) * repeat
        self.blocks, channels = [], 16
        for stage, block in itertools.product(range(scales), range(repeat)):
            stride = 2 if stage > 0 and block == 0 else 1
            name, width = f"stage{stage}_block{block}", filters << stage
            self.blocks.append(_ResidualBlock(make, name, channels, width, stride, stage == block == 0))
            channels = width
        self.norm = make.norm("norm", channels)
        self.classifier = make.dense("classifier", channels, num_classes)
        self.built = True

    def features(self, x, training, noise):
        """Feature map [N, H', W', channels] before the global mean."""
        return self.late(self.early(x, training, noise), training, noise)

    def early(self, x, training, noise):
        """Feature map before the last stage."""
        return self.through(self.blocks[:self.last_stage], self.stem(x), training, noise)

    def late(self, x, training, noise):
        """The last stage."""
        x = self.through(self.blocks[self.last_stage:], x, training, noise)
        return tf.nn.leaky_relu(self.norm(x, training=training), 0.1)


class CNN13(_Network):
    """The 13-layer network of the semi-supervised literature (Laine & Aila 2017); MC dropout after the poolings."""

    def __init__(self, make: _Factory, *, num_classes, image_shape, filters, repeat, scales, dropout):
        del repeat, scales  # its depth is fixed
        if min(image_shape[:2]) < 12:
            raise ValueError(f"cnn13 got images of shape {tuple(image_shape)}, but needs at least 12x12 pixels.")
        super().__init__(dropout, name="cnn13")
        widths = [filters] * 3 + [2 * filters] * 3 + [4 * filters, 2 * filters, filters]
        sizes, paddings = [3] * 7 + [1] * 2, ["same"] * 6 + ["valid"] + ["same"] * 2
        self.body, channels = [], image_shape[-1]
        for i, (width, size, padding) in enumerate(zip(widths, sizes, paddings, strict=True)):
            self.body += [make.conv(f"conv{i}", channels, width, size, padding=padding), make.norm(f"norm{i}", width)]
            channels = width
        self.classifier = make.dense("classifier", channels, num_classes)
        self.built = True

    def features(self, x, training, noise):
        """Feature map [N, H', W', filters] before the global mean."""
        for i, (conv, norm) in enumerate(zip(self.body[::2], self.body[1::2], strict=True)):
            if i in (3, 6):
                x = noise.dropout(tf.nn.max_pool2d(x, 2, 2, "SAME"))
            x = norm(tf.nn.leaky_relu(conv(x), 0.2), training=training)
        return x


@tf.custom_gradient
def _shake(a, b, forward, backward):
    """Mixes a and b with the weight `forward`; gradients are shared out with the independent weight `backward`."""
    def gradient(dy):
        da = backward * dy
        return da, dy - da, None, None
    return b + forward * (a - b), gradient


class _ShakeBlock(keras.layers.Layer):
    """Two branches (ReLU, conv, BN, ReLU, conv, BN), mixed at random per image in training, plus the shortcut."""

    def __init__(self, make: _Factory, name: str, channels: int, filters: int, stride: int):
        super().__init__(name=name)
        self.stride = stride
        self.branches = [[make.conv(f"{name}_{branch}_conv1", channels, filters, 3, stride),
                          make.norm(f"{name}_{branch}_norm1", filters),
                          make.conv(f"{name}_{branch}_conv2", filters, filters, 3),
                          make.norm(f"{name}_{branch}_norm2", filters)] for branch in "ab"]
        self.shortcut = None
        if channels != filters or stride != 1:
            # Where the resolution halves, two paths a pixel apart see what one strided 1x1 convolution would skip.
            widths = [filters] if stride == 1 else [filters - filters // 2, filters // 2]
            self.shortcut = [make.conv(f"{name}_shortcut{i}", channels, w, 1, stride) for i, w in enumerate(widths)]
            self.shortcut_norm = make.norm(f"{name}_shortcut_norm", filters)
        self.built = True

    def call(self, x, training, noise):
        activated = tf.nn.relu(x)
        outputs = []
        for conv1, norm1, conv2, norm2 in self.branches:
            y = tf.nn.relu(norm1(conv1(activated), training=training))
            outputs.append(norm2(conv2(noise.dropout(y)), training=training))
        if training:
            shape = [tf.shape(x)[0], 1, 1, 1]
            y = _shake(*outputs, *(tf.cast(noise.uniform(shape), x.dtype) for _ in range(2)))
        else:
            y = 0.5 * (outputs[0] + outputs[1])
        if self.shortcut is not None:
            shifted = tf.pad(activated[:, 1:, 1:], [[0, 0], [0, 1], [0, 1], [0, 0]]) if self.stride > 1 else None
            paths = [conv(path) for conv, path in zip(self.shortcut, (activated, shifted), strict=False)]
            x = self.shortcut_norm(tf.concat(paths, -1), training=training)
        return x + y


class ShakeShake(_Network):
    """Shake-shake regularised residual net (Gastaldi 2017); 26 2x32d: filters 32, repeat 4."""

    needs_seed_in_training = True

    def __init__(self, make: _Factory, *, num_classes, image_shape, filters, repeat, scales, dropout):
        super().__init__(dropout, name="shake")
        self.stem = make.conv("stem", image_shape[-1], 16, 3)
        self.norm = make.norm("norm", 16)
        self.blocks, channels = [], 16
        for stage, block in itertools.product(range(scales), range(repeat)):
            stride = 2 if stage > 0 and block == 0 else 1
            self.blocks.append(_ShakeBlock(make, f"stage{stage}_block{block}", channels, filters << stage, stride))
            channels = filters << stage
        self.classifier = make.dense("classifier", channels, num_classes)
        self.built = True

    def features(self, x, training, noise):
        """Feature map [N, H', W', channels] before the global mean."""
        return tf.nn.relu(self.through(self.blocks, self.norm(self.stem(x), training=training), training, noise))


def _input_of(head: keras.layers.Layer) -> str:
    """Which output of the network a head of `Heads` sees."""
    return getattr(head, "of", "embedding")


@keras.saving.register_keras_serializable(PACKAGE)
class Heads(keras.Model):
    """A network with further layers on its embedding, trained, averaged and saved with the rest.

    Args:
        network: gives class logits by default, and its "logits" and "embedding" by `outputs`.
        heads: by name, the units of a dense layer, or a Keras layer of your own from embedding to output; from the
            map before it, if the layer has an attribute `of = "map"`.
        seed: of the dense layers' initial weights.
    """

    def __init__(self, network: keras.Model, heads: dict[str, int | keras.layers.Layer], seed: int | None = None):
        if not hasattr(network, "classifier"):
            raise UserError(f"The network {network.name} has no embedding for the heads {', '.join(heads)}: use one of "
                            "libml.models, or one of your own with `classifier` and `outputs` as there.")
        super().__init__(name=f"{network.name}_heads")
        self.network, self.seed = network, seed
        self.image_shape = getattr(network, "image_shape", None)
        self.given = SimpleNamespace(**heads)
        channels = network.classifier.kernel.shape[0]

        def layer(index, name, head):
            if not isinstance(head, int):
                if not head.built:
                    head.build(self._shape_of(head, channels))
                return head
            # Seed sequences of their own, apart from those of the network's layers and of each other.
            own = None if seed is None else int(np.random.SeedSequence([seed, head, index]).generate_state(1)[0])
            return _Factory(own, 0.0, False).dense(name, channels, head)

        for name in {"logits", "embedding", "map"} & set(heads):
            raise ValueError(f"A head cannot be called {name!r}: every network has an output of that name.")
        self.heads = {name: layer(index, name, head) for index, (name, head) in enumerate(heads.items())}
        self.built = True

    def _shape_of(self, head: keras.layers.Layer, channels: int) -> tuple:
        """The shape of what a head sees."""
        if _input_of(head) == "embedding":
            return None, channels
        if not hasattr(self.network, "map_shape"):
            raise UserError(f"The network {self.network.name} has no feature map for the head {head.name}: use one of "
                            "libml.models, or one of your own with `map_shape` and the output \"map\" as there.")
        return None, *self.network.map_shape

    def get_config(self):
        """What it was made with."""
        return {name: keras.saving.serialize_keras_object(value) for name, value in (
            ("network", self.network), ("heads", vars(self.given)), ("seed", self.seed))}

    @classmethod
    def from_config(cls, config):
        """Makes one of what `get_config` returned."""
        return cls(**{name: keras.saving.deserialize_keras_object(value) for name, value in config.items()})

    def call(self, images, training=False, seed=None, outputs=None, **options):
        """Class logits, or the tuple of `outputs`: "logits", "embedding" or heads by name, from one pass."""
        if outputs is None:
            return self.network(images, training=training, seed=seed, **options)
        inner = tuple(dict.fromkeys(_input_of(self.heads[name]) if name in self.heads else name for name in outputs))
        found = dict(zip(inner, self.network(images, training=training, seed=seed, outputs=inner, **options),
                         strict=True))
        return tuple(self.heads[name](found[_input_of(self.heads[name])]) if name in self.heads else found[name]
                     for name in outputs)


class TeacherAndStudent(keras.Model):
    """Two networks that do not share weights: the student answers, unless its teacher is asked."""

    def __init__(self, student: keras.Model, teacher: keras.Model):
        super().__init__(name=f"{student.name}_with_teacher")
        self.student, self.teacher = student, teacher
        self.built = True

    def call(self, images, training=False, seed=None, outputs=None, teacher=False, **options):
        """What one of the two gives."""
        network = self.teacher if teacher else self.student
        return network(images, training=training, seed=seed, outputs=outputs, **options)


class _Decoder(keras.layers.Layer):
    """Tells how one image was made of another from a residual net's maps of both: its last stage again, and dense."""

    def __init__(self, make: _Factory, name: str, network: WideResNet, units: int):
        super().__init__(name=name)
        stage = network.blocks[network.last_stage:]
        self.blocks = []
        for i, block in enumerate(stage):
            channels, filters = block.conv1.kernel.shape[2:]
            self.blocks.append(_ResidualBlock(make, f"{name}_block{i}", channels, filters, block.conv1.strides[0],
                                              activate_shortcut=False))
        self.norm = make.norm(f"{name}_norm", filters)
        self.dense = make.dense(f"{name}_dense", 2 * filters, units)
        self.built = True

    def call(self, original, changed, training, noise):
        pooled = []
        for x in (original, changed):
            for block in self.blocks:
                x = block(x, training=training, noise=noise)
            x = tf.nn.leaky_relu(self.norm(x, training=training), 0.1)
            pooled.append(tf.reduce_mean(tf.cast(x, tf.float32), axis=[1, 2]))
        return self.dense(tf.concat(pooled, -1))


class Decoders(keras.Model):
    """A wide residual net with decoders of what was done to an image, each with a last stage of its own.

    Args:
        network: the classifier.
        units: the numbers that each decoder estimates, by its name.
        seed: of the decoders' initial weights.
    """

    def __init__(self, network: WideResNet, units: dict[str, int], seed: int | None = None):
        if not isinstance(network, WideResNet):
            raise ValueError(f"Decoders need the stages of a wide residual net; got {type(network).__name__}: use "
                             "--arch=resnet.")
        super().__init__(name=f"{network.name}_decoders")
        self.network, self.decoders = network, {}
        for index, (name, count) in enumerate(units.items()):
            own = None if seed is None else int(np.random.SeedSequence([seed, 2 ** 31, index]).generate_state(1)[0])
            make = _Factory(own, network.norm.momentum, network.norm.sync)
            self.decoders[name] = _Decoder(make, f"decoder_{name}", network, count)
        self.built = True

    def call(self, images, training=False, seed=None, outputs=None, original=None):
        """Class logits, or the tuple of `outputs`: "logits", "map" (before the last stage), or decoders by name.

        A decoder gets the map of the image that was changed as `original`.
        """
        if outputs is None:
            return self.network(images, training=training, seed=seed)
        noise = _Noise(seed, 0.0)
        found = {"map": self.network.early(images, training, noise)}
        if "logits" in outputs:
            x = self.network.late(found["map"], training, noise)
            found["logits"] = self.network.classifier(tf.reduce_mean(tf.cast(x, tf.float32), axis=[1, 2]))
        return tuple(found[name] if name in found else self.decoders[name](
            original, found["map"], training=training, noise=noise) for name in outputs)


class Projection(keras.layers.Layer):
    """Head for contrastive losses: dense layer as wide as its input, LeakyReLU, dense layer, to unit length.

    Args:
        units: length of the vectors.
        slope: of the LeakyReLU below 0.
        seed: of the initial weights.
        normalize: whether they are brought to unit length; logits are not.
    """

    def __init__(self, units: int, slope: float = 0.0, seed: int | None = None, normalize: bool = True):
        super().__init__(name="projection", dtype="float32")
        self.units, self.slope, self.seed, self.normalize = units, slope, seed, normalize

    def build(self, input_shape):
        """Makes the layers for embeddings [N, channels]."""
        make, channels = _Factory(None if self.seed is None else self.seed + self.units, 0.0, False), input_shape[-1]
        self.hidden = make.dense("projection_hidden", channels, channels)
        self.final = make.dense("projection_final", channels, self.units)

    def call(self, embedding):
        """Vectors [N, units]."""
        found = self.final(tf.nn.leaky_relu(self.hidden(embedding), self.slope))
        return tf.math.l2_normalize(found, -1) if self.normalize else found


class MapVector(keras.layers.Layer):
    """Head that makes one vector of a whole feature map, place by place: a dense layer.

    Args:
        units: length of the vectors.
        seed: of the initial weights.
    """

    of = "map"

    def __init__(self, units: int, seed: int | None = None):
        super().__init__(name="map_vector", dtype="float32")
        self.units, self.seed = units, seed

    def build(self, input_shape):
        """Makes the layer for maps [N, H, W, channels]."""
        make = _Factory(None if self.seed is None else self.seed + self.units, 0.0, False)
        self.dense = make.dense("map_vector_dense", int(np.prod(input_shape[1:])), self.units)

    def call(self, features):
        """Vectors [N, units]."""
        return self.dense(tf.reshape(features, [-1, int(np.prod(features.shape[1:]))]))


ARCHITECTURES: dict[str, Callable[..., keras.Model]] = {
    "resnet": WideResNet, "cnn13": CNN13, "shake": ShakeShake,
    "mcdropresnet": WideResNet}  # the original's name for what every network here can do: dropout in chosen passes

BLOCKS = ("resnet", "mcdropresnet", "shake")  # architectures of residual blocks


def build(arch: str, *, num_classes: int, image_shape: Sequence[int], filters: int = 32, repeat: int = 4,
          scales: int | None = None, dropout: float = 0.0, bn_momentum: float = 0.999, sync_bn: bool = False,
          seed: int | None = None, weights: str = "none", input_size: int = 0, recompute: bool = False,
          ) -> keras.Model:
    """Returns a built network for images of `image_shape` [H, W, C]; equal seeds give equal initial weights.

    With `recompute` training keeps only the inputs of residual blocks and computes the rest again: less memory.
    `weights` and `input_size` are those of networks of keras.applications, keras:NAME: see `libml.pretrained.build`.
    """
    settings = dict(arch=arch, num_classes=num_classes, image_shape=tuple(image_shape), filters=filters, repeat=repeat,
                    scales=scales, dropout=dropout, bn_momentum=bn_momentum, sync_bn=sync_bn, seed=seed,
                    weights=weights, input_size=input_size, recompute=recompute)
    if recompute and arch not in BLOCKS:
        raise ValueError(f"recompute: {arch} has no residual blocks to compute again; {', '.join(BLOCKS)} have.")
    if is_application(arch):
        from libml import pretrained  # which needs the classes above

        network = pretrained.build(arch, num_classes=num_classes, image_shape=image_shape, input_size=input_size,
                                   weights=weights, dropout=dropout, bn_momentum=bn_momentum, sync_bn=sync_bn,
                                   seed=seed)
    else:
        if arch not in ARCHITECTURES:
            raise ValueError(f"Unknown architecture {arch!r}: choose one of {', '.join(sorted(ARCHITECTURES))}.")
        scales = default_scales(image_shape[1]) if scales is None else scales
        if min(scales, repeat, filters) < 1:
            raise ValueError(f"Network sizes must be at least 1; got scales={scales}, repeat={repeat}, "
                             f"filters={filters}.")
        if not 0 <= dropout < 1:
            raise ValueError(f"The dropout rate must be in [0, 1); got {dropout}.")
        network = ARCHITECTURES[arch](_Factory(seed, bn_momentum, sync_bn), num_classes=num_classes,
                                      image_shape=tuple(image_shape), filters=filters, repeat=repeat, scales=scales,
                                      dropout=dropout)
        network.recompute = recompute
    network.image_shape, network.settings = tuple(image_shape), SimpleNamespace(**settings)
    return network


def count_weights(model: keras.Model) -> int:
    """Number of trainable weights."""
    return sum(math.prod(v.shape) for v in model.trainable_variables)
