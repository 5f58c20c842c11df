"""What methods put on a network: further layers on its embedding or map, a teacher beside it, decoders."""
from types import SimpleNamespace

import keras
import numpy as np
import tensorflow as tf

from libml.errors import UserError
from libml.networks.layers import PACKAGE, Factory, Noise
from libml.networks.nets import ResidualBlock, WideResNet
from libml.randomness import derived_seed


@keras.saving.register_keras_serializable(PACKAGE)
class Heads(keras.Model):
    """A network with further layers on its embedding, trained, averaged and saved with the rest.

    The network gives class logits by default, and its "logits", "embedding" and "map" by `outputs`. A head is, by its
    name, the units of a dense layer, or a Keras layer of your own: from the map, if it has an attribute `of = "map"`.
    """

    def __init__(self, network: keras.Model, heads: dict[str, int | keras.layers.Layer], seed: int | None = None):
        if not hasattr(network, "classifier"):
            raise UserError(f"The network {network.name} has no embedding for the heads {', '.join(heads)}: use one of "
                            "libml.networks, or one of your own with `classifier` and `outputs` as there.")
        super().__init__(name=f"{network.name}_heads")
        self.network, self.seed = network, seed
        self.image_shape = getattr(network, "image_shape", None)
        self.given = SimpleNamespace(**heads)  # which Keras does not track
        for name in {"logits", "embedding", "map"} & set(heads):
            raise ValueError(f"A head cannot be called {name!r}: every network has an output of that name.")
        channels = network.classifier.kernel.shape[0]
        self.heads = {}
        for index, (name, head) in enumerate(heads.items()):
            if isinstance(head, int):
                head = Factory(derived_seed(seed, head, index)).dense(name, channels, head)
            of_map = getattr(head, "of", "embedding") == "map"
            if of_map and not hasattr(network, "map_shape"):
                raise UserError(f"The network {network.name} has no feature map for the head {head.name}: use one of "
                                "libml.networks, or one of your own with `map_shape` and the output \"map\" as there.")
            if not head.built:
                head.build((None, *network.map_shape) if of_map else (None, channels))
            self.heads[name] = head
        self.built = True

    def get_config(self):
        return {name: keras.saving.serialize_keras_object(value) for name, value in (
            ("network", self.network), ("heads", vars(self.given)), ("seed", self.seed))}

    @classmethod
    def from_config(cls, config):
        return cls(**{name: keras.saving.deserialize_keras_object(value) for name, value in config.items()})

    def call(self, images, training=False, seed=None, outputs=None, **options):
        """Class logits, or the tuple of `outputs`: "logits", "embedding" or heads by name, from one pass."""
        if outputs is None:
            return self.network(images, training=training, seed=seed, **options)
        sources = [getattr(self.heads[name], "of", "embedding") if name in self.heads else name for name in outputs]
        inner = tuple(dict.fromkeys(sources))
        found = self.network(images, training=training, seed=seed, outputs=inner, **options)
        values = dict(zip(inner, found, strict=True))
        return tuple(self.heads[name](values[source]) if name in self.heads else values[source]
                     for name, source in zip(outputs, sources, strict=True))


class TeacherAndStudent(keras.Model):
    """Two networks that do not share weights: the student answers, unless its teacher is asked."""

    def __init__(self, student: keras.Model, teacher: keras.Model):
        super().__init__(name=f"{student.name}_with_teacher")
        self.student, self.teacher = student, teacher
        self.built = True

    def call(self, images, training=False, seed=None, outputs=None, teacher=False, **options):
        network = self.teacher if teacher else self.student
        return network(images, training=training, seed=seed, outputs=outputs, **options)


class _Decoder(keras.layers.Layer):
    """Tells how one image was made of another from a residual net's maps of both: its last stage again, and dense."""

    def __init__(self, make: Factory, name: str, network: WideResNet, units: int):
        super().__init__(name=name)
        self.blocks = []
        for i, block in enumerate(network.blocks[network.last_stage:]):
            channels, filters = block.conv1.kernel.shape[2:]
            self.blocks.append(ResidualBlock(make, f"{name}_block{i}", channels, filters, block.conv1.strides[0],
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
    """A wide residual net with decoders of what was done to an image: by name, how many numbers each estimates."""

    def __init__(self, network: WideResNet, units: dict[str, int], seed: int | None = None):
        if not isinstance(network, WideResNet):
            raise ValueError(f"Decoders need the stages of a wide residual net; got {type(network).__name__}: use "
                             "--arch=resnet.")
        super().__init__(name=f"{network.name}_decoders")
        self.network, self.decoders = network, {}
        for index, (name, count) in enumerate(units.items()):
            make = Factory(derived_seed(seed, 2 ** 31, index), network.norm.momentum, network.norm.sync)
            self.decoders[name] = _Decoder(make, f"decoder_{name}", network, count)
        self.built = True

    def call(self, images, training=False, seed=None, outputs=None, original=None):
        """Class logits, or `outputs`: "logits", "map" (before the last stage), decoders, given the map `original`."""
        if outputs is None:
            return self.network(images, training=training, seed=seed)
        noise = Noise(seed, 0.0)
        values = {"map": self.network.early(images, training, noise)}
        if "logits" in outputs:
            x = self.network.features(images, training, noise, early=values["map"])
            values["logits"] = self.network.classifier(tf.reduce_mean(tf.cast(x, tf.float32), axis=[1, 2]))
        return tuple(values[name] if name in values else self.decoders[name](
            original, values["map"], training=training, noise=noise) for name in outputs)


class Projection(keras.layers.Layer):
    """Head for contrastive losses: dense layer as wide as its input, LeakyReLU, dense layer, to unit length or not."""

    def __init__(self, units: int, slope: float = 0.0, seed: int | None = None, normalize: bool = True):
        super().__init__(name="projection", dtype="float32")
        self.units, self.slope, self.normalize = units, slope, normalize
        self.make = Factory(None if seed is None else seed + units)  # heads of one seed differ by their width

    def build(self, input_shape):
        channels = input_shape[-1]
        self.hidden = self.make.dense("projection_hidden", channels, channels)
        self.final = self.make.dense("projection_final", channels, self.units)

    def call(self, embedding):
        vectors = self.final(tf.nn.leaky_relu(self.hidden(embedding), self.slope))
        return tf.math.l2_normalize(vectors, -1) if self.normalize else vectors


class MapVector(keras.layers.Layer):
    """Head that makes one vector of a whole feature map, place by place: a dense layer."""

    of = "map"

    def __init__(self, units: int, seed: int | None = None):
        super().__init__(name="map_vector", dtype="float32")
        self.units, self.make = units, Factory(None if seed is None else seed + units)

    def build(self, input_shape):
        self.dense = self.make.dense("map_vector_dense", int(np.prod(input_shape[1:])), self.units)

    def call(self, features):
        return self.dense(tf.reshape(features, [-1, int(np.prod(features.shape[1:]))]))
