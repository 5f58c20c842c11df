"""Small models of any method, their views and states: with noise in five classes, and like those of the digits."""
import keras
import numpy as np
import tensorflow as tf
from helpers import assert_continues, assert_two_replicas_meet_rarely, strategy_of

from libml import networks
from libml.augment import Augmenter
from libml.config import describe
from libml.networks import builder, layers

SHAPE, CLASSES, BATCH, SEED = (8, 8, 3), 5, 4, tf.constant([7, 8], tf.int64)


def residual_net():
    return networks.build("resnet", num_classes=CLASSES, image_shape=SHAPE, filters=4, repeat=1, scales=1, dropout=0.3,
                        seed=1)


class Plain(keras.Model):
    """A network that treats every image by itself."""

    def __init__(self, seed=1):
        super().__init__()
        self.hidden = keras.layers.Dense(6, activation="tanh", kernel_initializer=keras.initializers.GlorotNormal(seed))
        self.classifier = keras.layers.Dense(CLASSES, kernel_initializer=keras.initializers.GlorotNormal(2))
        self.hidden.build((None, np.prod(SHAPE)))
        self.classifier.build((None, 6))
        self.built = True

    def call(self, images, training=False):
        return self.classifier(self.hidden(tf.reshape(images, [-1, np.prod(SHAPE)])))


def make(method, network, replicas=1, **arguments):
    """A model, its unlabelled weight full from the start; options as the method declares them."""
    options = {name: value for name, value in dict(uratio=2, warmup_pos=0.0, warmup_kimg=0.0, K=1, mc_passes=3).items()
               if name in describe(method.Options)}
    images = np.random.RandomState(9).randint(0, 256, (7, *SHAPE)).astype(np.uint8)
    return method(network(), CLASSES, options=method.Options(batch=BATCH * replicas, **options), total_images=1000,
                  **{"set_sizes": (12, 40), "calibration": (images, np.arange(7) % CLASSES), **arguments})


def views_of(model, seed):
    generator = np.random.RandomState(seed)
    weak, strong = model.views_per_image if model.uses_unlabeled else (0, 0)
    sizes = {"labeled": BATCH, "weak": 2 * BATCH * weak, "strong": 2 * BATCH * strong}
    views = {name: tf.constant(generator.uniform(-1, 1, (n, *SHAPE)).astype(np.float32))
             for name, n in sizes.items() if n}
    if model.strong_labeled_too:
        views["labeled_strong"] = views["labeled"] + 0.1
    if model.weak_again:
        views["weak_again"] = views["weak"][:BATCH] - 0.1
    positions = np.random.RandomState(seed // 10).permutation(40).astype(np.int32)[seed % 10 * 2 * BATCH:][:2 * BATCH]
    return views | {"label": tf.constant(generator.randint(0, CLASSES, BATCH), tf.int32),
                    "labeled_index": tf.constant(generator.randint(0, 12, BATCH), tf.int32),
                    "unlabeled_index": tf.constant(positions)}


def joined(model, halves):
    """The whole batch: views of one kind stay together."""
    weak, strong = model.views_per_image if model.uses_unlabeled else (0, 0)
    kinds = {"labeled": 1, "labeled_strong": 1, "label": 1, "weak": weak, "strong": strong, "labeled_index": 1,
             "unlabeled_index": 1}
    return {name: tf.concat([part for k in range(kinds[name]) for part in
                             (tf.split(half[name], kinds[name])[k] for half in halves)], 0) for name in halves[0]}


def on_two_replicas(method, network, *updates, rarely=False, **arguments):
    """The state after updates on two replicas, each with its half of the views.

    From a checkpoint they go on to the same bits as before; if `rarely`, they meet no more often than they must.
    """
    strategy = strategy_of(2)
    with strategy.scope():
        model = make(method, network, replicas=2, **arguments)
    train = tf.function(lambda views: strategy.run(model.train_on_views, args=(views,)), autograph=False)
    updates = [strategy.experimental_distribute_values_from_function(
        lambda context, halves=halves: halves[context.replica_id_in_sync_group]) for halves in updates]
    if rarely:
        assert_two_replicas_meet_rarely(method, train.get_concrete_function(updates[0]).graph.as_graph_def())
    for halves in updates:
        train(halves)
    reached = state_of(model)
    assert_continues(model, lambda: train(updates[-1]))
    return reached


def state_of(model):
    return [v.numpy() for v in tf.nest.flatten(model.checkpoint_items())]


def assert_states_agree(found, wanted, before, atol=1e-7):
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=atol)
    assert any(np.abs(new - old).max() > 1e-6 for new, old in zip(wanted, before, strict=True))


class PlainEmbedding(Plain):
    """The same with its hidden layer as the embedding, the image as the map, and dropout that drops nothing."""

    map_shape = SHAPE

    def twin(self, seed):
        return PlainEmbedding(seed % 1000)

    def call(self, images, training=False, seed=None, outputs=None, mc_dropout=False, embedding_dropout=0.0):
        embedding = self.hidden(tf.reshape(images, [-1, np.prod(SHAPE)]))
        found = {"logits": self.classifier(embedding), "embedding": embedding, "map": images}
        return found["logits"] if outputs is None else tuple(found[name] for name in outputs)


SMALL = "keras:MobileNet,alpha=0.1"


def tiny(rate=0.5, momentum=0.75, sync=False, stride=1):
    """What the real ones are made of, small: nested models, all kinds of convolution, stochastic depth, statistics."""
    inputs = keras.Input(SHAPE)
    x = keras.layers.Normalization()(keras.layers.Rescaling(1 / 127.5)(inputs))
    x = keras.layers.Conv2D(6, 1, stride, padding="same")(x)
    x = keras.Sequential([keras.Input(x.shape[1:]), keras.layers.BatchNormalization(), keras.layers.ReLU()])(x)
    y = keras.layers.SeparableConv2D(6, 3, padding="same")(keras.layers.DepthwiseConv2D(3, padding="same")(x))
    y = keras.layers.Dropout(rate, (None, 1, 1, 1), seed=1)(keras.layers.BatchNormalization()(y))
    body = keras.Model(inputs, keras.layers.Add()([x, y]), name="tiny")
    rng = np.random.RandomState(1)
    for v in body.weights:
        if "kernel" in v.name:
            v.assign(rng.normal(0, 0.5, v.shape))
    for layer in builder._layers(body):
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.momentum, layer.synchronized = momentum, sync
    return builder.Application(layers.Factory(1, 0, False), body, lambda x: x, num_classes=CLASSES, dropout=0.3)


# Like those of the digits.

def small_network(num_classes=10, **options):
    return networks.build("resnet", num_classes=num_classes, image_shape=(16, 16, 3), filters=4, repeat=1, scales=2,
                        seed=1, **options)


def random_views(batch=4, uratio=3, seed=0, size=16):
    rng = np.random.RandomState(seed)
    def images(count):
        colours = rng.uniform(-1, 1, (count, 1, 1, 3))  # so that predictions differ from image to image
        return tf.constant((0.3 * rng.uniform(-1, 1, (count, size, size, 3)) + 0.7 * colours).astype(np.float32))

    return {"labeled": images(batch), "label": tf.constant(rng.randint(0, 10, batch)), "weak": images(batch * uratio),
            "strong": images(batch * uratio), "unlabeled_label": tf.constant(rng.randint(0, 10, batch * uratio))}


def decided(method, **options):
    network = small_network(dropout=0.3)
    network.classifier.kernel.assign(3 * network.classifier.kernel)  # predictions of several classes
    return method(network, 10, options=method.Options(batch=4, uratio=3, **options), total_images=4096)


def forward(model, views):
    """Training-mode logits of the three parts, in one pass, as float64."""
    parts = [views[name] for name in ("labeled", "weak", "strong")]
    network = model.network
    logits, _ = network.stateless_call(network.trainable_variables, network.non_trainable_variables,
                                       tf.concat(parts, 0), training=True)
    return np.split(logits.numpy().astype(np.float64), np.cumsum([len(part) for part in parts])[:-1])


def skew(model, seed=3):
    """Fills the alignment buffer with something far from uniform; returns the average the next step will see."""
    rng = np.random.RandomState(seed)
    history = rng.dirichlet(20 * rng.dirichlet(np.full(10, 0.5)) + 0.01, 128).astype(np.float32)
    model.predictions.assign(history)
    mean = history.astype(np.float64).mean(0)
    return mean / mean.sum()


def align(q, p_model, prior=0.1):
    a = q * (1e-6 + prior) / (1e-6 + p_model)
    return a / a.sum(1, keepdims=True)


def augmented(method, digits, augment="d.d.d", network=None, **options):
    augmenter = Augmenter(augment, image_shape=digits.image_shape, mirror=digits.mirror, shift=digits.augmenter().shift,
                          jit_compile=False)
    return method(network or small_network(dropout=0.3), 10, options=method.Options(batch=4, uratio=3, **options),
                  augmenter=augmenter, seed=7, total_images=4096)
