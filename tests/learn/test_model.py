"""The model: the original program's trajectory, each method's loss in NumPy, and what one update changes."""
from collections import Counter
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import softmax
from models import align, augmented, decided, forward, random_views, skew

from cssl.cssl import CSSL
from cssl.fixmatch import FixMatch
from cssl.fixmatch_da import FixMatchDA
from cssl.lsmatch import LSMatch
from cssl.mean_teacher import MeanTeacher
from cssl.supervised import Supervised
from cssl.tools import doctor
from cssl.upsmatch import UPSMatch
from libml import data
from libml.errors import UserError
from libml.learn import losses
from libml.learn.model import SSLModel
from libml.learn.step import Step, UnlabeledLoss
from libml.learn.update import pseudo_label_accuracy, pseudo_label_quality


def test_trajectory_of_the_original_program():
    doctor.trajectory("CPU:0")  # raises


# Each method's loss against NumPy, from the same logits. 1e-5: float32 against float64.

def test_fixmatch_loss():
    views = random_views()
    x, weak, strong = forward(decided(FixMatch), views)
    q, p = softmax(weak), softmax(strong)
    threshold = float(np.median(q.max(1)))
    model, mask = decided(FixMatch, confidence=threshold), q.max(1) >= threshold
    expected = np.mean(-np.log(p[np.arange(12), q.argmax(1)]) * mask)
    scalars = model.train_on_views(views)
    assert 0 < mask.mean() < 1
    np.testing.assert_allclose(scalars["losses/xeu"], expected, rtol=1e-5)
    np.testing.assert_allclose(scalars["monitors/mask"], mask.mean(), rtol=1e-6)
    xe = np.mean(-np.log(softmax(x)[np.arange(4), views["label"]]))
    np.testing.assert_allclose(scalars["losses/xe"], xe, rtol=1e-5)
    correct = q.argmax(1) == views["unlabeled_label"].numpy()
    np.testing.assert_allclose(scalars["monitors/pseudo_known_correct"] / scalars["monitors/pseudo_known"],
                               correct.mean(), rtol=1e-6)
    np.testing.assert_allclose(scalars["monitors/pseudo_used_correct"] / scalars["monitors/pseudo_used"],
                               correct[mask].mean(), rtol=1e-6)


def test_fixmatch_da_loss():
    model, views = decided(FixMatchDA, confidence=0.12), random_views()
    p_model = skew(model)
    _, weak, strong = forward(model, views)
    q = softmax(weak)
    expected = np.mean(-(align(q, p_model) * np.log(softmax(strong))).sum(1) * (q.max(1) >= 0.12))
    np.testing.assert_allclose(model.train_on_views(views)["losses/xeu"], expected, rtol=1e-5)


@pytest.mark.parametrize("reference, bound", [("raw", 0.0), ("aligned", 0.0), ("raw", 0.6)])
def test_cssl_loss(reference, bound):
    model, views = decided(CSSL, reference=reference, alpha_bound=bound), random_views()
    p_model = skew(model)
    _, weak, strong = forward(model, views)
    q, p = softmax(weak), softmax(strong)
    a = align(q, p_model)
    y = (q if reference == "raw" else a).argmax(1)
    assert (q.argmax(1) != a.argmax(1)).any()  # the two references differ on this batch
    alpha = np.clip(1 - a.max(1), bound, 1)
    expected = []
    for row, label, size in zip(p, y, alpha, strict=True):
        target = size * row / (row.sum() - row[label] + 1e-7)
        target[label] = 1 - size
        target = np.clip(target, 1e-7, 1)
        expected.append(0 if row[label] >= 1 - size else np.sum(target * np.log(target / np.clip(row, 1e-7, 1))))
    scalars = model.train_on_views(views)
    np.testing.assert_allclose(scalars["losses/xeu"], np.mean(expected), rtol=1e-4)  # small differences of logarithms
    np.testing.assert_allclose(scalars["monitors/alpha"], alpha.mean(), rtol=1e-5)
    assert scalars["monitors/mask"] == 1


def test_lsmatch_loss():
    model, views = decided(LSMatch), random_views()
    p_model = skew(model)
    _, weak, strong = forward(model, views)
    q = softmax(weak)
    alpha = 1 - align(q, p_model).max(1)
    target = np.eye(10)[q.argmax(1)] * (1 - alpha)[:, None] + alpha[:, None] / 10
    expected = np.mean(-(target * np.log(softmax(strong))).sum(1))
    np.testing.assert_allclose(model.train_on_views(views)["losses/xeu"], expected, rtol=1e-5)


def test_upsmatch_uses_the_uncertainty_of_dropout_passes():
    views = random_views()
    def mask(**options):
        return float(decided(UPSMatch, **options).train_on_views(views)["monitors/mask"])
    assert mask(conf_p=0.0, uncertainty_p=1.0) == 1.0
    assert mask(conf_p=0.0, uncertainty_p=0.0) == 0.0
    model = decided(UPSMatch, conf_p=0.0)
    middle = float(model.train_on_views(views)["monitors/uncertainty"])
    assert 0 < middle < 0.5 and 0 < mask(conf_p=0.0, uncertainty_p=middle) < 1
    # One pass has no spread, so no image is uncertain.
    assert mask(conf_p=0.0, uncertainty_p=0.0, mc_passes=1) == 1.0


def test_upsmatch_mask_from_given_passes():
    """The deviation is that of the population, at the class with the largest mean."""
    rng = np.random.RandomState(0)
    weak, strong, passes = rng.normal(size=(6, 10)), rng.normal(size=(6, 10)), 2 * rng.normal(size=(8, 6, 10))
    probabilities = softmax(passes)
    u = probabilities.std(0)[np.arange(6), probabilities.mean(0).argmax(-1)]
    kappa = float(np.sort(u)[2:4].mean())  # three pass
    tau = float(np.sort(softmax(weak).max(-1)[u <= kappa])[:2].mean())  # of which two pass
    logits = iter(tf.constant(passes, tf.float32))
    step = SimpleNamespace(forward=lambda images, **options: next(logits))
    model = decided(UPSMatch, conf_p=tau, uncertainty_p=kappa)
    loss, mask, monitors, *_ = model.unlabeled_loss(tf.constant(weak, tf.float32), tf.constant(strong, tf.float32),
                                                    {"weak": None}, step)
    expected = (softmax(weak).max(-1) >= tau) & (u <= kappa)
    assert expected.sum() == 2
    np.testing.assert_array_equal(mask, expected)
    np.testing.assert_allclose(monitors["monitors/uncertainty"], u.mean(), rtol=1e-5)
    np.testing.assert_allclose(loss, -np.log(softmax(strong)[np.arange(6), weak.argmax(-1)]), rtol=1e-5)


def test_upsmatch_dropout_does_not_touch_statistics_or_the_loss():
    views = random_views()
    a, b = decided(UPSMatch, conf_p=0.0, uncertainty_p=1.0), decided(FixMatch, confidence=0.0)
    ups, fix = a.train_on_views(views), b.train_on_views(views)
    for tag in ("losses/xe", "losses/xeu", "losses/total"):
        np.testing.assert_array_equal(ups[tag], fix[tag])
    for left, right in zip(a.network.variables, b.network.variables, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-6, atol=1e-7)


def test_supervised_ignores_unlabelled_images():
    model, views = decided(Supervised), random_views()
    scalars = model.train_on_views({"labeled": views["labeled"], "label": views["label"]})
    assert set(scalars) == {"losses/xe", "losses/wd", "losses/total", "monitors/lr"}


def test_several_strong_views_average_their_losses():
    views = random_views()
    other = random_views(seed=9)["strong"]
    model = decided(FixMatch, confidence=0.0, K=2)
    both = {**views, "strong": tf.concat([views["strong"], other], 0)}
    parts = [both["labeled"], both["weak"], both["strong"]]
    logits, _ = model.network.stateless_call(model.network.trainable_variables, model.network.non_trainable_variables,
                                             tf.concat(parts, 0), training=True)
    _, weak, first, second = np.split(logits.numpy().astype(np.float64), [4, 16, 28])
    y = weak.argmax(1)
    expected = np.mean([-np.log(softmax(s)[np.arange(12), y]) for s in (first, second)])
    np.testing.assert_allclose(model.train_on_views(both)["losses/xeu"], expected, rtol=1e-5)


# The update.

def test_one_update_is_nesterov_sgd_then_averages():
    """Against NumPy, over three updates; 1e-5 relative to the largest weight: float32 rounding."""
    model, views = decided(FixMatch, confidence=0.0, ema=0.9, lr=0.1), random_views()
    network = model.network
    velocity = [np.zeros(v.shape) for v in network.trainable_variables]
    for k in range(3):
        weights = [v.numpy().astype(np.float64) for v in network.trainable_variables]
        averages = [v.numpy().astype(np.float64) for v in model.ema_weights]
        with tf.GradientTape() as tape:
            parts = [views[name] for name in ("labeled", "weak", "strong")]
            logits, statistics = network.stateless_call(network.trainable_variables, network.non_trainable_variables,
                                                        tf.concat(parts, 0), training=True)
            x, weak, strong = tf.split(logits, [4, 12, 12])
            total = (tf.reduce_mean(losses.cross_entropy(x, views["label"]))
                     + tf.reduce_mean(losses.cross_entropy(strong, tf.argmax(weak, -1)))
                     + 0.0005 * losses.weight_decay(v for v in network.trainable_variables if v.name == "kernel"))
        gradients = tape.gradient(total, [v.value for v in network.trainable_variables])
        lr = 0.1 * np.cos(7 * np.pi / 16 * 4 * k / 4096)
        np.testing.assert_allclose(model.train_on_views(views)["monitors/lr"], lr, rtol=1e-6)
        for i, (gradient, variable) in enumerate(zip(gradients, network.trainable_variables, strict=True)):
            velocity[i] = 0.9 * velocity[i] + gradient.numpy()
            new = weights[i] - lr * (gradient.numpy() + 0.9 * velocity[i])
            np.testing.assert_allclose(variable, new, atol=1e-5 * max(1, np.abs(new).max()))
            np.testing.assert_allclose(model.ema_weights[i], 0.9 * averages[i] + 0.1 * new,
                                       atol=1e-5 * max(1, np.abs(new).max()))
        for variable, expected in zip(network.non_trainable_variables, statistics, strict=True):
            np.testing.assert_array_equal(variable, expected)
    assert int(model.updates.numpy()) == 3


def test_alignment_average_is_read_before_this_batch_enters():
    model, views = decided(CSSL), random_views()
    before = model.predictions.numpy()
    np.testing.assert_allclose(before, 0.1)
    _, weak, _ = forward(model, views)
    model.train_on_views(views)
    after = model.predictions.numpy()
    np.testing.assert_array_equal(after[:-1], before[1:])
    np.testing.assert_allclose(after[-1], softmax(weak).mean(0), rtol=1e-5)


def test_class_prior_is_read_from_the_flag():
    model = decided(CSSL, p_unlabeled="1,1,1,1,1,1,1,1,1,11")
    np.testing.assert_allclose(model.class_prior, [0.05] * 9 + [0.55], rtol=1e-6)
    with pytest.raises(ValueError, match="expected 10 non-negative numbers"):
        decided(CSSL, p_unlabeled="0.5,0.5")


def test_evaluated_model_is_averaged_weights_with_current_statistics():
    model, views = decided(FixMatch, confidence=0.0), random_views()
    for _ in range(3):
        model.train_on_views(views)
    twin = decided(FixMatch).network
    for target, source in zip(twin.trainable_variables, model.ema_weights, strict=True):
        target.assign(source)
    for target, source in zip(twin.non_trainable_variables, model.network.non_trainable_variables, strict=True):
        target.assign(source)
    np.testing.assert_allclose(model(views["weak"]), twin(views["weak"]), rtol=1e-5, atol=1e-6)
    raw = model.infer(views["weak"], ema=False)
    np.testing.assert_allclose(raw, model.network(views["weak"]), rtol=1e-5, atol=1e-6)


def test_whitening_normalises_every_forward_pass():
    plain, views = decided(FixMatch, confidence=0.0), random_views()
    mean, deviation = np.float32([0.1, -0.2, 0.3]), np.float32([0.5, 1.5, 2.0])
    model = decided(FixMatch, confidence=0.0)
    model.image_statistics = mean, deviation
    white = {k: (v - mean) / deviation if v.shape.rank == 4 else v for k, v in views.items()}
    np.testing.assert_allclose(model.infer(views["weak"]), plain.infer(white["weak"]), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(model.train_on_views(views)["losses/total"], plain.train_on_views(white)["losses/total"],
                               rtol=1e-6)


# From uint8 batches.

@pytest.mark.parametrize("augment", [pytest.param("d.d.d", marks=pytest.mark.slow), "d.d.rac", "x.x.x"])
def test_steps_are_a_function_of_seed_and_step(digits, augment):
    batches = list(data.batches(digits, batch=4, uratio=3).take(3))
    runs = []
    for _ in range(2):
        model = augmented(CSSL, digits, augment)
        step = model.train_on_bytes
        runs.append([float(step(batch)["losses/total"]) for batch in batches]
                    + [v.numpy().tobytes() for v in model.network.variables])
    assert runs[0] == runs[1]


def test_views_change_from_step_to_step(digits):
    model = augmented(CSSL, digits)
    batch = next(iter(data.batches(digits, batch=4, uratio=3)))
    first = model.make_views(batch)
    again = model.make_views(batch)
    model.updates.assign(1)
    later = model.make_views(batch)
    assert np.array_equal(first["strong"], again["strong"]) and not np.array_equal(first["strong"], later["strong"])
    assert first["weak"].shape == (12, 16, 16, 3) and first["strong"].shape == (12, 16, 16, 3)
    assert not np.array_equal(first["weak"], first["strong"])


def test_rates_learn_from_the_probe_with_the_averaged_model(digits):
    model = augmented(FixMatch, digits)
    batch = next(iter(data.batches(digits, batch=4, uratio=3)))
    views = model.make_views(batch)
    probabilities = tf.nn.softmax(model.infer(views["probe"]["images"], ema=True))
    before = model.augmenter.rates.numpy()
    lessons = model.augmenter.lessons(views["probe"]["policy"], probabilities, batch["label"])
    expected = model.augmenter.updated_rates(lessons, before)
    model.train_on_bytes(batch)
    assert not np.array_equal(model.augmenter.rates, before)
    np.testing.assert_allclose(model.augmenter.rates, expected, rtol=1e-6)


def test_randaugment_has_no_probe(digits):
    views = augmented(CSSL, digits, "d.d.rac").make_views(next(iter(data.batches(digits, batch=4, uratio=3))))
    assert "probe" not in views


def test_any_keras_classifier_can_be_trained(digits):
    """With Keras's own batch normalisation and dropout, whose seed state must move on by itself."""
    network = keras.Sequential([keras.Input((16, 16, 3)), keras.layers.Conv2D(4, 3, strides=2), keras.layers.ReLU(),
                                keras.layers.BatchNormalization(), keras.layers.Dropout(0.5), keras.layers.Flatten(),
                                keras.layers.Dense(10)])
    model = augmented(CSSL, digits, network=network)
    before = [v.numpy().copy() for v in network.variables]
    step = tf.function(model.train_on_bytes, autograph=False)
    for batch in data.batches(digits, batch=4, uratio=3).take(2):
        scalars = step(batch)
    assert np.isfinite(float(scalars["losses/total"]))
    moved = [not np.array_equal(v, b) for v, b in zip(network.variables, before, strict=True)]
    assert all(moved), [v.path for v, m in zip(network.variables, moved, strict=True) if not m]


def test_fit_works_for_a_keras_user(digits):
    model = augmented(CSSL, digits)
    model.compile()
    history = model.fit(data.batches(digits, batch=4, uratio=3), steps_per_epoch=3, epochs=2, verbose=0)
    assert len(history.history["losses/xe"]) == 2 and int(model.updates.numpy()) == 6


def test_checkpoint_holds_everything(digits, tmp_path):
    """Save after two steps, continue in a new model: the next step must be the same to the last bit."""
    batches = list(data.batches(digits, batch=4, uratio=3).take(3))
    first = augmented(CSSL, digits)
    for batch in batches[:2]:
        first.train_on_bytes(batch)
    path = tf.train.Checkpoint(**first.checkpoint_items()).write(str(tmp_path / "x"))
    second = augmented(CSSL, digits)
    tf.train.Checkpoint(**second.checkpoint_items()).read(path).assert_consumed()
    a, b = first.train_on_bytes(batches[2]), second.train_on_bytes(batches[2])
    assert {k: float(v) for k, v in a.items()} == {k: float(v) for k, v in b.items()}
    for left, right in zip([*first.variables, first.augmenter.rates], [*second.variables, second.augmenter.rates],
                           strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("method, augment", [(CSSL, "d.d.d"), (MeanTeacher, "d.d.x")])
def test_a_step_reads_every_variable_once(digits, method, augment):
    """Data flow then orders uses and change; of control dependencies, the graph optimiser drops some."""
    model = augmented(method, digits, augment)
    batch = next(iter(data.batches(digits, batch=4, uratio=model.options.uratio)))
    reads, written = Counter(), set()
    for op in tf.function(model.train_on_bytes, autograph=False).get_concrete_function(batch).graph.get_operations():
        if op.type == "ReadVariableOp":
            reads[op.inputs[0].name] += 1
        elif op.type.startswith("Assign"):
            written.add(op.inputs[0].name)
    assert len(written) == len(tf.nest.flatten(model.checkpoint_items()))
    assert {name: reads[name] for name in written} == dict.fromkeys(written, 1)


# What a method may and may not do.

def test_methods_are_keras_models():
    model = decided(CSSL)
    assert isinstance(model, keras.Model) and isinstance(model, SSLModel) and issubclass(MeanTeacher, keras.Model)


def test_methods_are_imported_without_tensorflow(command):
    command("-c", "import importlib, pkgutil, sys, cssl\n"
            "for module in pkgutil.iter_modules(cssl.__path__):\n"
            "    module.name == 'cli' or importlib.import_module(f'cssl.{module.name}')\n"
            "sys.exit(bool({'tensorflow', 'keras', 'scipy', 'PIL'} & set(sys.modules)))")


@pytest.mark.parametrize("jit", [False, True])
def test_held_back_labels_never_reach_a_loss(digits, jit):
    seen = []

    class Curious(FixMatch):
        def compute_losses(self, views, step):
            seen.append(dict(views))
            return super().compute_losses(views, step)

    model = augmented(Curious, digits)
    model.jit = jit
    batch = next(iter(data.batches(digits, batch=4, uratio=3)))
    scalars = model.train_on_bytes(batch)
    model.trial_loss(batch)
    for views in seen:
        assert set(views) == {"labeled", "label", "weak", "strong", "labeled_index", "unlabeled_index"}
    assert len(seen) > 0 and float(scalars["monitors/pseudo_known"]) == 1
    if not jit:
        np.testing.assert_array_equal(seen[0]["unlabeled_index"], batch["unlabeled_index"])
    assert not any("index" in name for name in model.make_views(
        {name: value for name, value in batch.items() if "index" not in name}))


def test_pseudo_label_monitors():
    """Five images of known class and one of unknown; two views, of which the first counts."""
    labels, guesses = tf.constant([0, 1, 2, 3, 4, -1]), [0, 1, 2, 0, 0, 0]
    scores = tf.one_hot(guesses + [5] * 6, 6)
    mask = tf.constant([1, 1, 0, 1, 0, 1] + [1] * 6, tf.float32)
    shares = {tag: float(value) for tag, value in pseudo_label_quality(scores, labels, mask).items()}
    found = pseudo_label_accuracy(shares | {"losses/xe": 1.0})
    assert found == pytest.approx({"losses/xe": 1.0, "monitors/pseudo_accuracy": 3 / 5,
                                   "monitors/pseudo_accuracy_masked": 2 / 3})
    nothing = dict.fromkeys(shares, 0.0)
    assert pseudo_label_accuracy(nothing) == {} and len(nothing) == 4


def test_outputs_of_a_joint_pass():
    model, views = decided(FixMatch, K=2), random_views()
    views["strong"] = tf.concat([views["strong"], random_views(seed=9)["strong"]], 0)
    step = Step(model, tf.constant([1, 2], tf.int64), model.update.read())
    parts = model.forward_together(views, step, outputs=("embedding", "logits"))
    assert [[output.shape[0] for output in part] for part in parts] == [[4, 4], [24, 24], [24, 24]]
    for (embedding, logits), wanted in zip(parts, model.forward_together(views, step), strict=True):
        np.testing.assert_allclose(logits, wanted, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(model.network.classifier(embedding), wanted, rtol=1e-5, atol=1e-6)


class Misused(SSLModel):
    """Does what `misuse` does, then what FixMatch would."""

    def initial_state(self):
        return {"count": np.zeros((), np.int32)}

    def unlabeled_loss(self, weak, strong, views, step):
        state = self.misuse(weak, views, step)
        if not isinstance(state, dict | None):
            return state
        return UnlabeledLoss(losses.cross_entropy(strong, tf.argmax(weak, -1)), tf.ones([12]),
                             state=state if isinstance(state, dict) else step.state)


@pytest.mark.parametrize("alignment, misuse, message", [
    (True, lambda self, weak, views, step: None, "but its loss returns no mean_prediction"),
    (False, lambda self, weak, views, step: self.aligned(weak, step.predictions), "set uses_alignment = True in the "),
    (False, lambda self, weak, views, step: {**step.state, "counts": 1}, "returns state .'count', 'counts'.; initial"),
    (False, lambda self, weak, views, step: weak[:, 0], "unlabeled_loss of Misused returns .*expected UnlabeledLoss"),
    (False, lambda self, weak, views, step: UnlabeledLoss(weak[:, 0], weak), r"its mask \(12, \d+\); expected \(12,\)"),
    (False, lambda self, weak, views, step: {}, "returns state ..; initial_state.. declares .'count'.: return all"),
    (False, lambda self, weak, views, step: step.forward(views["weak"], outputs=("head",)), "no output 'head'")])
def test_misuse_is_named(monkeypatch, alignment, misuse, message):
    monkeypatch.setattr(Misused, "uses_alignment", alignment)
    monkeypatch.setattr(Misused, "misuse", misuse, raising=False)
    with pytest.raises(ValueError, match=message):
        decided(Misused).train_on_views(random_views())


def test_a_bare_loss_is_named(monkeypatch):
    monkeypatch.setattr(Misused, "compute_losses", lambda self, views, step: tf.zeros([]))
    with pytest.raises(UserError, match="compute_losses of Misused returns .*; expected LossOutput"):
        decided(Misused).train_on_views(random_views())


def test_a_plain_classifier_has_no_other_outputs(digits):
    network = keras.Sequential([keras.Input((16, 16, 3)), keras.layers.Flatten(), keras.layers.Dense(10)])
    model = augmented(FixMatch, digits, network=network)
    step = Step(model, tf.constant([1, 2], tf.int64), model.update.read())
    with pytest.raises(ValueError, match="Sequential gives class logits only"):
        step.forward(random_views()["weak"], outputs=("logits", "embedding"))
