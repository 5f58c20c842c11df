"""Models whose averaged weights differ from their weights, views for them, and single passes: for losses in NumPy."""
import numpy as np
import tensorflow as tf

from libml import networks
from libml.learn.step import Step

CLASSES, BATCH, SIDE, TOTAL = 5, 8, 8, 1000
SEED = tf.constant([7, 8], tf.int64)
# Float32 passes compiled differently, and exponentials of their logits.
TOLERANCE = dict(rtol=2e-4, atol=1e-6)


def make(method, network=None, **options):
    """A model whose averaged weights differ from its weights."""
    network = network or networks.build("resnet", num_classes=CLASSES, image_shape=(SIDE, SIDE, 3), filters=4, repeat=1,
                                      scales=1, bn_momentum=0.5, seed=1)
    model = method(network, CLASSES, options=method.Options(batch=BATCH, **options), total_images=TOTAL)
    for i, average in enumerate(model.ema_weights):
        noise = tf.random.stateless_normal(average.shape, [5, i])
        average.assign(average + 0.1 * noise)
    return model


def views_of(model, uratio=1, seed=0):
    generator = np.random.RandomState(seed)
    weak, strong = model.views_per_image

    def images(n):
        return tf.constant(generator.uniform(-1, 1, (n, SIDE, SIDE, 3)).astype(np.float32))

    views = {"labeled": images(BATCH), "label": tf.constant(generator.randint(0, CLASSES, BATCH), tf.int32),
             "weak": images(weak * uratio * BATCH),
             "unlabeled_label": tf.constant(generator.randint(-1, CLASSES, uratio * BATCH), tf.int32)}
    return views | ({"strong": images(strong * uratio * BATCH)} if strong else {})


def step_at(model, images_seen=0):
    step = Step(model, SEED, model.update.read())
    step.images_seen = tf.constant(images_seen, tf.int64)
    return step


def run(model, views, images_seen=TOTAL):
    """Loss, scalars and the step."""
    step = step_at(model, images_seen)
    output = model.compute_losses(views, step)
    return float(output.loss), {name: float(value) for name, value in output.scalars.items()}, step


def passes(model, images, ema=False, **options):
    """Logits and new statistics of a pass in training mode, in float64."""
    weights = model.ema_weights if ema else model.network.trainable_variables
    logits, statistics = model.network.stateless_call(
        [tf.convert_to_tensor(v) for v in weights], [tf.convert_to_tensor(v) for v in
                                                     model.network.non_trainable_variables], images, training=True,
        **options)
    logits = logits[0] if isinstance(logits, tuple) else logits
    return logits.numpy().astype(np.float64), statistics


def assert_statistics_of(model, images, step):
    """Only the pass over these images moved the averages."""
    _, expected = passes(model, images)
    moved = 0
    for found, wanted, old in zip(step.new_statistics, expected, step.statistics, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-7)
        moved += float(tf.reduce_max(tf.abs(found - old))) > 1e-5
    assert moved == len(expected) > 0
