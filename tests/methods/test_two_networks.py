"""Meta Pseudo Labels: two networks in one step, against closed forms and NumPy; groups of weights; replicas, resume."""
import keras
import numpy as np
import pytest
import tensorflow as tf
from classic import BATCH, CLASSES, SEED, SIDE, TOLERANCE, make, views_of
from helpers import assert_continues, cross_entropy, softmax, strategy_of

from cssl.meta_pseudo_labels import MetaPseudoLabels
from libml import networks
from libml.learn import losses, mixing
from libml.learn.model import SSLModel
from libml.learn.step import Step

PLAIN = dict(dropout=0.0, warmup_pos=0.0, wait_pos=0.0)


class Bias(keras.Model):
    """Every image has the same logits."""

    def __init__(self, logits):
        super().__init__()
        self.logits = self.add_weight(name="bias", shape=(len(logits),), initializer="zeros")
        self.logits.assign(logits)
        self.built = True

    def call(self, images, training=False, seed=None, outputs=None):
        return tf.zeros([images.shape[0], 1]) + self.logits


class Linear(keras.Model):
    """Treats every image by itself, with weights of a seed."""

    def __init__(self, seed=1):
        super().__init__()
        self.classifier = keras.layers.Dense(CLASSES, kernel_initializer=keras.initializers.GlorotNormal(seed))
        self.classifier.build((None, SIDE * SIDE * 3))
        self.built, self.twin = True, Linear

    def call(self, images, training=False, seed=None, outputs=None):
        return self.classifier(tf.reshape(images, [-1, SIDE * SIDE * 3]))


def bias_model(student, teacher, **options):
    return MetaPseudoLabels(Bias(student), len(student), teacher=Bias(teacher), total_images=8000,
                            options=MetaPseudoLabels.Options(batch=8, **{**PLAIN, **options}))


def bias_views(labels):
    images = tf.zeros([len(labels), SIDE, SIDE, 3])
    return {"labeled": images, "label": tf.constant(labels, tf.int32), "weak": images, "strong": images}


def test_first_step_of_a_student_of_two_logits():
    model = bias_model([0.0, 0.0], np.log([0.8, 0.2]), label_smoothing=0.0, wd=0.0)
    scalars = model.train_on_views(bias_views([0] * 8))
    np.testing.assert_allclose(model.network.student.logits, [0.0285, -0.0285], rtol=1e-5)
    np.testing.assert_allclose(scalars["losses/student_xe"], 0.693147, atol=1e-6)
    change = 0.665053 - 0.693147
    np.testing.assert_allclose(model.method_state["baseline"], 0.01 * change, atol=1e-6)
    np.testing.assert_allclose(scalars["monitors/feedback"], 0.99 * change, atol=2e-6)  # six digits are given


def test_soft_labels_give_no_feedback_and_hard_ones_do():
    z = tf.constant([[1.0, 0.0, -1.0]])
    p = [0.665241, 0.244728, 0.090031]
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(z)
        soft = losses.soft_cross_entropy(z, tf.stop_gradient(tf.nn.softmax(z)))
        hard = losses.soft_cross_entropy(z, tf.one_hot([0], 3))
    np.testing.assert_allclose(tf.nn.softmax(z)[0], p, atol=1e-6)
    np.testing.assert_allclose(tape.gradient(soft, z)[0], 0, atol=1e-7)
    np.testing.assert_allclose(tape.gradient(hard, z)[0], [-0.334759, *p[1:]], atol=1e-6)


@pytest.mark.parametrize("update, teacher, student", [
    (0, 1e-5, 0), (2999, 0.03, 0), (3000, 0.03001, 1e-5), (4999, 0.05, 0.02), (7999, 0.04998725, 0.05),
    (150_000, 0.02566551, 0.02607556), (300_000, 0, 0)])
def test_learning_rates(update, teacher, student):
    options = MetaPseudoLabels.Options(warmup_pos=1 / 60, wait_pos=0.01)
    model = MetaPseudoLabels(Bias([0.0, 0.0]), 2, teacher=Bias([0.0, 0.0]), options=options, total_images=300_000 * 128)
    seen = tf.constant(update * 128, tf.int64)
    # float32: a warm-up of 5000 updates is a step of 1e-5 with a relative error of 1e-7
    np.testing.assert_allclose([model.teacher_rate(seen), model.learning_rate(seen)], [teacher, student], rtol=1e-5,
                               atol=2e-9)


def test_smoothing_and_sharpening():
    model = bias_model([0.0] * 10, [0.0] * 10)
    np.testing.assert_allclose(model.smooth(tf.constant([0.8, 0.2] + [0.0] * 8)), [0.695, 0.185] + [0.015] * 8,
                               rtol=1e-5)
    sharpened = softmax(np.array([1, 0, -1]) / model.options.temperature)
    np.testing.assert_allclose(sharpened, [0.770960, 0.184761, 0.044278], atol=1e-6)


@pytest.mark.parametrize("feedback, sign", [("none", "code"), ("soft", "code"), ("hard", "code"), ("hard", "paper")])
def test_three_updates_in_numpy(feedback, sign, monkeypatch):
    """All that the step computes, for networks whose gradients are softmax minus target."""
    monkeypatch.setattr(mixing, "draw_labels", lambda p, seed: tf.argmax(p, -1, tf.int32))
    student, teacher = np.array([0.1, -0.2, 0.3]), np.array([1.0, 0.2, -0.5])
    model = bias_model(list(student), list(teacher), feedback=feedback, sign=sign, warmup_pos=0.002, wu=3.0,
                       confidence=0.5, wd=0.01)
    average, slots, baseline = student.copy(), np.zeros((2, 3)), 0.0
    for update, labels in enumerate([[0, 1, 1, 2, 0, 0, 1, 2], [2] * 8, [0] * 4 + [1] * 4]):
        model.train_on_views(bias_views(labels))

        def smooth(target):
            return 0.85 * target + 0.05

        one_hot, lr = np.eye(3)[labels], 0.05 * min((update + 1) / 2, 1)  # the cosine is at its start
        p, q = softmax(teacher), softmax(teacher / 0.7)
        label = np.eye(3)[p.argmax()] if feedback == "hard" else p
        gradient = softmax(student) - smooth(label) + 0.01 * student
        slots[0] = 0.9 * slots[0] + gradient
        before, change = cross_entropy(np.tile(student, (8, 1)), one_hot).mean(), 0.0
        student = student - lr * (gradient + 0.9 * slots[0])
        if feedback != "none":
            change = (cross_entropy(np.tile(student, (8, 1)), one_hot).mean() - before) * (-1 if sign == "paper" else 1)
            baseline += 0.01 * (change - baseline)
        ramp = min(1, update / 2)
        gradient = (p - smooth(one_hot).mean(0)) + 3 * ramp * (q.max() >= 0.5) * (p - q) + 0.01 * teacher
        gradient += (change - baseline) * (p - label)
        slots[1] = 0.9 * slots[1] + gradient
        teacher = teacher - lr * (gradient + 0.9 * slots[1])
        average += (1 - min(0.995, (1 + update) / (10 + update))) * (student - average)
        for found, wanted in ((model.network.student.logits, student), (model.network.teacher.logits, teacher),
                              (model.ema_weights[0], average), (model.method_state["baseline"], baseline)):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-7)  # float32, and differences of losses
    np.testing.assert_allclose(model.infer(tf.zeros([1, SIDE, SIDE, 3]))[0], average, rtol=1e-4)


def logits_of(network, images):
    """Logits in training mode and new statistics."""
    logits, statistics = network.stateless_call([tf.convert_to_tensor(v) for v in network.trainable_variables],
                                                [tf.convert_to_tensor(v) for v in network.non_trainable_variables],
                                                images, training=True)
    return logits.numpy().astype(np.float64), statistics


def test_real_networks():
    """Losses from the passes of both; batch normalisation's averages are moved by the student's one pass alone."""
    views = views_of(make(MetaPseudoLabels), 2)
    together = np.concatenate([views["labeled"], views["weak"], views["strong"]])
    x, weak, strong = np.split(logits_of(make(MetaPseudoLabels).network.teacher, together)[0], [BATCH, 3 * BATCH])
    q = softmax(weak / 0.7)
    threshold = float(np.median(q.max(-1)))
    model = make(MetaPseudoLabels, confidence=threshold, **PLAIN)
    before = model.update.read()
    student, teacher = model.network.student, model.network.teacher
    weights = [[v.numpy() for v in network.trainable_variables] for network in (student, teacher)]
    assert any(np.abs(a - b).max() > 0.01 for a, b in zip(*weights, strict=True))  # they start apart
    mask = q.max(-1) >= threshold
    target = np.eye(CLASSES)[views["label"]]
    student_logits, statistics = logits_of(student, np.concatenate([views["strong"], views["labeled"]]))
    scalars = model.train_on_views(views)
    expected = {"losses/xe": cross_entropy(x, 0.85 * target + 0.03).mean(),
                "losses/xeu": (mask * cross_entropy(strong, q)).mean(), "monitors/mask": 0.5,
                "losses/student": cross_entropy(student_logits[:-BATCH], 0.85 * softmax(strong) + 0.03).mean(),
                "losses/student_xe": cross_entropy(student_logits[-BATCH:], target).mean()}
    after = cross_entropy(logits_of(student, views["labeled"])[0], target).mean()  # the new weights
    expected["monitors/feedback"] = 0.99 * (after - expected["losses/student_xe"])
    for name, value in expected.items():
        np.testing.assert_allclose(scalars[name], value, err_msg=name, **TOLERANCE)
    for found, wanted in zip(student.non_trainable_variables, statistics, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-7)
    old = before.statistics[len(statistics):]
    assert len(old) == len(statistics) > 0
    for found, wanted in zip(teacher.non_trainable_variables, old, strict=True):
        np.testing.assert_array_equal(found, wanted)


def gradients_of(model, views):
    found = model.update.backward(views, SEED, model.update.read())["gradients"]
    return [[found[i].numpy() for i in group.indices] for group in model.update.groups.values()]


def test_each_network_gets_the_gradient_of_its_own_loss():
    model = make(MetaPseudoLabels, Linear(), wu=0.0, feedback="none", wd=0.0, **PLAIN)
    views = views_of(model)
    student, teacher = gradients_of(model, views)
    with tf.GradientTape() as tape:
        target = model.smooth(tf.one_hot(views["label"], CLASSES))
        loss = tf.reduce_mean(losses.soft_cross_entropy(model.network.teacher(views["labeled"]), target))
    wanted = tape.gradient(loss, [v.value for v in model.network.teacher.trainable_variables])
    for ours, theirs in zip(teacher, wanted, strict=True):  # a supervised teacher
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-7)
    model.network.teacher.classifier.kernel.assign(0 * model.network.teacher.classifier.kernel)
    changed, _ = gradients_of(model, views)
    assert np.abs(changed[0] - student[0]).max() > 1e-3  # the teacher labels what the student learns


def test_feedback_changes_the_teacher_only_if_labels_are_hard():
    views = views_of(make(MetaPseudoLabels, Linear(), **PLAIN))
    found = {}
    for feedback, sign in (("none", "code"), ("soft", "code"), ("hard", "code"), ("hard", "paper")):
        model = make(MetaPseudoLabels, Linear(), feedback=feedback, sign=sign, **PLAIN)
        found[feedback, sign] = gradients_of(model, views)
    none, soft, code, paper = (value[1][0] for value in found.values())
    np.testing.assert_allclose(soft, none, atol=1e-7)  # softmax minus softmax
    assert np.abs(code - paper).max() > 1e-5
    np.testing.assert_allclose(code + paper, 2 * none, atol=1e-6)  # opposite signs
    np.testing.assert_array_equal(found["hard", "code"][0][0], found["hard", "paper"][0][0])


def test_labels_are_drawn_from_the_distribution():
    p = np.array([0.5, 0.0, 0.3, 0.2])
    labels = mixing.draw_labels(tf.tile(tf.constant(p, tf.float32)[None], [20_000, 1]), SEED).numpy()
    share = np.bincount(labels, minlength=4) / labels.size
    np.testing.assert_allclose(share, p, atol=5 * np.sqrt(0.25 / labels.size))  # five standard deviations
    assert share[1] == 0


def test_dropout_of_the_embedding():
    network = networks.build("resnet", num_classes=3, image_shape=(SIDE, SIDE, 3), filters=4, repeat=1,
                             scales=1, seed=0)
    images = tf.random.stateless_uniform([64, SIDE, SIDE, 3], SEED)
    (whole,), (dropped,) = (network(images, seed=SEED, outputs=("embedding",), **options)
                            for options in ({}, {"embedding_dropout": 0.25}))
    kept = dropped.numpy() != 0
    np.testing.assert_allclose(dropped.numpy()[kept], whole.numpy()[kept] / 0.75, rtol=1e-6)
    assert 0.6 < kept.mean() < 0.9
    with pytest.raises(ValueError, match="this pass is random"):
        network(images, embedding_dropout=0.25)
    model = make(MetaPseudoLabels, warmup_pos=0.0, wait_pos=0.0)  # at 0.2, by default
    views = views_of(model)
    without = gradients_of(make(MetaPseudoLabels, **PLAIN), views)
    for dropped, kept in zip(gradients_of(model, views), without, strict=True):
        assert np.abs(dropped[0] - kept[0]).max() > 1e-4
    np.testing.assert_array_equal(model.infer(views["weak"]), model.infer(views["weak"]))


# Replicas, compilation, checkpoints.

def halves(views):
    """The images of a batch for two replicas."""
    parts = {name: tf.split(value, 2) for name, value in views.items() if name != "unlabeled_label"}
    return [{name: part[i] for name, part in parts.items()} for i in range(2)]


def on_two_replicas(views, updates, **arguments):
    strategy = strategy_of(2)
    options = MetaPseudoLabels.Options(batch=BATCH, feedback="hard", sign="paper", **PLAIN)
    with strategy.scope():
        model = MetaPseudoLabels(Linear(), CLASSES, options=options, total_images=1000, **arguments)
    train = tf.function(lambda part: strategy.run(model.train_on_views, args=(part,)))
    parts = strategy.experimental_distribute_values_from_function(
        lambda context: halves(views)[context.replica_id_in_sync_group])
    for _ in range(updates):
        train(parts)
    reached = state_of(model)
    assert_continues(model, lambda: train(parts))
    return reached


def state_of(model):
    return [v.numpy() for v in tf.nest.flatten(model.checkpoint_items())]


@pytest.mark.slow
def test_two_replicas_do_what_one_does(monkeypatch):
    """The student's step inside the update is along the gradient of the whole batch; from a checkpoint both networks go
    on to the same bits."""
    monkeypatch.setattr(mixing, "draw_labels", lambda p, seed: tf.argmax(p, -1, tf.int32))
    options = MetaPseudoLabels.Options(batch=BATCH, feedback="hard", sign="paper", **PLAIN)
    single = MetaPseudoLabels(Linear(), CLASSES, options=options, total_images=1000)
    views, before = views_of(single), state_of(single)
    for _ in range(3):
        single.train_on_views(views)
    found = on_two_replicas(views, 3)
    assert abs(float(single.method_state["baseline"])) > 1e-4
    for ours, wanted, old in zip(found, state_of(single), before, strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-6)  # sums in another order
        assert np.abs(wanted - old).max() > 1e-5


# Groups.

class Forgetful(SSLModel):
    """Trains its kernels alone."""

    def weight_groups(self):
        return {"kernels": self.group([v for v in self.network.trainable_variables if v.name == "kernel"])}


def test_a_group_for_every_weight():
    with pytest.raises(ValueError, match="weight_groups.. must have each of the network's weights once"):
        make(Forgetful, Linear())


def test_a_network_that_cannot_be_built_twice():
    with pytest.raises(ValueError, match="A Bias cannot be built twice: give the model a `teacher` too"):
        MetaPseudoLabels(Bias([0.0, 0.0]), 2)


def test_step_uses_other_weights_where_told():
    model = make(MetaPseudoLabels, Linear(), **PLAIN)
    step, images = Step(model, SEED, model.update.read()), views_of(model)["weak"]
    zeros = [0 * weight for weight in step.weights]
    np.testing.assert_array_equal(step.forward(images, weights=zeros), np.zeros((BATCH, CLASSES)))
    assert np.abs(step.forward(images)).max() > 0
