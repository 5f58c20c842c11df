"""Networks: wide residual net, 13-layer CNN and shake-shake net, from images in [-1, 1] to logits and embedding."""
import itertools
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

from libml.networks.layers import PACKAGE, Factory, Noise, dtype_policy, recomputed


class Network(keras.Model):
    """What the networks share: arguments of a call, global mean, dense layer.

    Subclasses have that layer as `classifier`, and `features(x, training, noise)`, the map [N, H', W', channels] before
    the mean.
    """

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
        """Returns the arguments of `build`, and the precision; whoever builds it again has its weights, too."""
        return {"dtype_policy": self.dtype_policy.name, **vars(self.settings), "weights": "none"}

    @classmethod
    def from_config(cls, config):
        from libml.networks.builder import build  # which needs this class

        config = dict(config)
        with dtype_policy(config.pop("dtype_policy")):
            return build(**config)

    def twin(self, seed: int | None) -> keras.Model:
        """Returns the same network with the weights of another seed."""
        return self.from_config({**self.get_config(), "weights": self.settings.weights, "seed": seed})

    @property
    def map_shape(self) -> tuple[int, ...]:
        assert self.image_shape is not None
        found, = self(np.zeros((1, *self.image_shape), np.float32), outputs=("map",))
        return tuple(found.shape[1:])

    def through(self, blocks, x, training, noise):
        for block in blocks:
            recompute = self.recompute and training
            x = recomputed(block, x, noise) if recompute else block(x, training=training, noise=noise)
        return x

    def call(self, images, training=False, seed=None, mc_dropout=False, embedding_dropout=0.0, outputs=None):
        """Logits [N, classes] of images [N, H, W, C], or a tuple of `outputs`: "logits", "embedding", which is the mean
        of the map, and "map". `seed` (integers [2]) feeds all randomness; dropout acts if and only if `mc_dropout`,
        whatever `training` is. `embedding_dropout` is the rate of another one, on the embedding."""
        if seed is None and (mc_dropout or embedding_dropout or training and self.needs_seed_in_training):
            raise ValueError(f"{type(self).__name__} got seed=None, but this pass is random: give two integers.")
        noise = Noise(seed, self.dropout if mc_dropout else 0.0)
        x = tf.cast(self.features(images, training, noise), tf.float32)
        embedding = noise.dropout(tf.reduce_mean(x, axis=[1, 2]), embedding_dropout)
        if outputs is None:
            return self.classifier(embedding)
        if unknown := set(outputs) - {"logits", "embedding", "map"}:
            raise ValueError(f"{self.name} has no output {', '.join(map(repr, sorted(unknown)))}; it has logits, "
                             "embedding and map, and networks.Heads gives it more.")
        found = {"embedding": embedding, "map": x}
        return tuple(found[name] if name in found else self.classifier(embedding) for name in outputs)


class ResidualBlock(keras.layers.Layer):
    """BN, LeakyReLU, conv, BN, LeakyReLU, (MC dropout,) conv; plus the shortcut."""

    def __init__(self, make: Factory, name: str, channels: int, filters: int, stride: int, activate_shortcut: bool):
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
        y = tf.nn.leaky_relu(self.norm2(self.conv1(y), training=training), 0.1)
        y = self.conv2(noise.dropout(y))
        return y + (x if self.shortcut is None else self.shortcut(x))


def _stages(filters: int, repeat: int, scales: int) -> Iterator[tuple[str, int, int, int]]:
    """The name, channels, filters and stride of each residual block behind a stem of 16 channels."""
    channels = 16
    for stage, block in itertools.product(range(scales), range(repeat)):
        yield f"stage{stage}_block{block}", channels, filters << stage, 2 if stage > 0 and block == 0 else 1
        channels = filters << stage


class WideResNet(Network):
    """Pre-activation wide residual net (Zagoruyko & Komodakis 2016) with LeakyReLU; WRN-28-2: filters 32, repeat 4."""

    def __init__(self, make: Factory, *, num_classes, image_shape, filters, repeat, scales, dropout):
        super().__init__(dropout, name="resnet")
        self.stem, self.last_stage = make.conv("stem", image_shape[-1], 16, 3), (scales - 1) * repeat
        self.blocks = [ResidualBlock(make, *sizes, activate_shortcut=i == 0)
                       for i, sizes in enumerate(_stages(filters, repeat, scales))]
        channels = filters << scales - 1
        self.norm = make.norm("norm", channels)
        self.classifier = make.dense("classifier", channels, num_classes)
        self.built = True

    def early(self, x, training, noise):
        """Feature map before the last stage."""
        return self.through(self.blocks[:self.last_stage], self.stem(x), training, noise)

    def features(self, x, training, noise, early=None):
        """The whole map, of images or of what is `early` already."""
        blocks, x = (self.blocks, self.stem(x)) if early is None else (self.blocks[self.last_stage:], early)
        return tf.nn.leaky_relu(self.norm(self.through(blocks, x, training, noise), training=training), 0.1)


class CNN13(Network):
    """The 13-layer network of the semi-supervised literature (Laine & Aila 2017); MC dropout after the poolings."""

    def __init__(self, make: Factory, *, num_classes, image_shape, filters, repeat, scales, dropout):
        del repeat, scales  # its depth is fixed
        if min(image_shape[:2]) < 12:
            raise ValueError(f"cnn13 got images of shape {tuple(image_shape)}, but needs at least 12x12 pixels.")
        super().__init__(dropout, name="cnn13")
        widths = [filters] * 3 + [2 * filters] * 3 + [4 * filters, 2 * filters, filters]
        self.body, channels = [], image_shape[-1]
        for i, width in enumerate(widths):
            size, padding = (3 if i < 7 else 1), ("valid" if i == 6 else "same")
            self.body += [make.conv(f"conv{i}", channels, width, size, padding=padding), make.norm(f"norm{i}", width)]
            channels = width
        self.classifier = make.dense("classifier", channels, num_classes)
        self.built = True

    def features(self, x, training, noise):
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

    def __init__(self, make: Factory, name: str, channels: int, filters: int, stride: int):
        super().__init__(name=name)
        self.stride = stride
        # Not a list of lists: Keras before 3.15 leaves the layers within such out of its files.
        self.first, self.second = ([make.conv(f"{name}_{branch}_conv1", channels, filters, 3, stride),
                                    make.norm(f"{name}_{branch}_norm1", filters),
                                    make.conv(f"{name}_{branch}_conv2", filters, filters, 3),
                                    make.norm(f"{name}_{branch}_norm2", filters)] for branch in "ab")
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
        for conv1, norm1, conv2, norm2 in (self.first, self.second):
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


class ShakeShake(Network):
    """Shake-shake regularised residual net (Gastaldi 2017); 26 2x32d: filters 32, repeat 4."""

    needs_seed_in_training = True

    def __init__(self, make: Factory, *, num_classes, image_shape, filters, repeat, scales, dropout):
        super().__init__(dropout, name="shake")
        self.stem = make.conv("stem", image_shape[-1], 16, 3)
        self.norm = make.norm("norm", 16)
        self.blocks = [_ShakeBlock(make, *sizes) for sizes in _stages(filters, repeat, scales)]
        self.classifier = make.dense("classifier", filters << scales - 1, num_classes)
        self.built = True

    def features(self, x, training, noise):
        return tf.nn.relu(self.through(self.blocks, self.norm(self.stem(x), training=training), training, noise))


class Linear(Network):
    """A dense layer on features [N, 1, 1, D], of which training drops a part, `head_dropout`, of the dimensions."""

    needs_seed_in_training = True
    head_dropout = 0.0

    def __init__(self, make: Factory, *, num_classes, image_shape, filters, repeat, scales, dropout):
        del filters, repeat, scales
        super().__init__(dropout, name="head")
        self.classifier = make.dense("classifier", self.body(make, image_shape[-1]), num_classes)
        self.built = True

    def body(self, make: Factory, width: int) -> int:
        """Makes what comes before the last layer; returns how many numbers that gets."""
        return width

    def features(self, x, training, noise):
        return noise.dropout(x, self.head_dropout if training else None)


class MLP(Linear):
    """A hidden layer of 512 units more."""

    def body(self, make, width):
        self.hidden = make.dense("hidden", width, 512)
        return self.hidden.units

    def features(self, x, training, noise):
        return tf.nn.leaky_relu(self.hidden(super().features(x, training, noise)), 0.1)


class Pixels(Network):
    """Features that need no trained weights: pixels averaged to 16x16, in 256 random directions that stay the same."""

    side, width = 16, 256

    def __init__(self, make: Factory, *, num_classes, image_shape, filters, repeat, scales, dropout):
        del filters, repeat, scales
        super().__init__(dropout, name="pixels")
        numbers = self.side ** 2 * image_shape[-1]
        self.pool = max(1, min(image_shape[:2]) // self.side)
        self.projection = keras.layers.Dense(self.width, use_bias=False, dtype="float32", name="projection")
        self.projection.build((None, numbers))
        directions = np.random.RandomState(0).normal(size=(numbers, self.width)) / np.sqrt(numbers)
        self.projection.set_weights([directions.astype(np.float32)])
        self.projection.trainable = False
        self.classifier = make.dense("classifier", self.width, num_classes)
        self.built = True

    def features(self, x, training, noise):
        x = tf.nn.avg_pool2d(tf.cast(x, tf.float32), self.pool, self.pool, "VALID")
        x = tf.image.resize(x, (self.side, self.side))
        return self.projection(tf.reshape(x, [-1, 1, 1, self.side ** 2 * x.shape[-1]]))
