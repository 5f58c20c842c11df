"""The later methods: worked numbers, limits, NumPy re-derivations, where gradients stop, whose statistics move."""
import dataclasses
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import ROOT, softmax
from models import BATCH, CLASSES, SHAPE, PlainEmbedding, make, residual_net, views_of

import cssl
from cssl import cli
from cssl.adamatch import AdaMatch
from cssl.alphamatch import AlphaMatch, powered_mean
from cssl.c2s2l import C2S2L
from cssl.comatch import CoMatch
from cssl.crmatch import CRMatch
from cssl.dash import Dash
from cssl.fixmatch import FixMatch
from cssl.fixmatch_da import FixMatchDA
from cssl.flexmatch import FlexMatch
from cssl.freematch import FreeMatch
from cssl.refixmatch import ReFixMatch
from cssl.rerankmatch import ReRankMatch
from cssl.simmatch import SimMatch
from cssl.softmatch import SoftMatch
from cssl.uda import UDA
from libml import data, networks
from libml.augment import Augmenter, to_float
from libml.config import RunConfig, ScaleOptions
from libml.devices import distribute
from libml.errors import UserError
from libml.learn import banks, losses
from libml.learn.step import Step
from libml.randomness import fold_in

SIX = dict(rtol=0, atol=2e-6)  # worked numbers are given to six digits; float32 adds as much
LATER = (AdaMatch, AlphaMatch, C2S2L, CoMatch, Dash, FlexMatch, FreeMatch, ReFixMatch, ReRankMatch, SimMatch, SoftMatch)
SEED = tf.constant([7, 8], tf.int64)


def logits(p):
    return tf.constant(np.log(p), tf.float32)


def model_of(method, classes=3, sizes=(3, 10), calibration=None, network=None, batch=2, uratio=1, **options):
    """A model for computations on given logits; its network is not used unless it is given."""
    if network is None:
        network = PlainEmbedding()
        network.classifier = keras.layers.Dense(classes)
        network.classifier.build((None, 6))
    return method(network, classes, options=method.Options(batch=batch, uratio=uratio, **options), total_images=1000,
                  set_sizes=sizes, calibration=calibration)


def step_of(model, images_seen=0, **state):
    """A step at a time, with other values of the method's state."""
    step = Step(model, SEED, model.update.read())
    step.images_seen = tf.constant(images_seen, tf.int64)
    step.state |= {name: tf.constant(value, step.state[name].dtype) for name, value in state.items()}
    return step


def close(found, wanted, **tolerance):
    np.testing.assert_allclose(found, wanted, **(tolerance or SIX))


# C2S2L: scores, possibility degrees, projection.

CALIBRATION = np.array([[.8, .1, .1], [.5, .4, .1], [.2, .7, .1], [.3, .3, .4]])
PROJECTIONS = [
    ([.5, .3, .2], [1, .25, .25], [.75, .15, .10], .130812), ([.2, .5, .3], [1, .6, .2], [.4, .4, .2], .106908),
    ([.1, .2, .3, .4], [.3, 1, .5, .1], [.1, .5, .3, .1], .319516), ([.2, .5, .3], [1, 1, 1], [.2, .5, .3], 0)]


def calibrated(size=4, classes=3, **options):
    images = np.random.RandomState(0).randint(0, 256, (size, *SHAPE)).astype(np.uint8)
    return model_of(C2S2L, classes, calibration=(images, np.arange(size) % classes), **options)


@pytest.mark.parametrize("score", ["diff", "prop"])
def test_c2s2l_possibility(score):
    model = calibrated(score=score)
    scores = tf.gather(model.nonconformity(tf.constant(CALIBRATION, tf.float32)), [0, 0, 0, 2], batch_dims=1)
    weak = tf.constant([[.62, .28, .1]])
    if score == "diff":
        close(scores, [-.7, -.1, .5, -.1])
        close(model.nonconformity(weak), [[-.34, .34, .52]])
    else:
        close(model.nonconformity(weak), [[.28 / .72001, .62 / .38001, .62 / .20001]])
    close(model.possibility(weak, tf.sort(scores)), [[1, .5, .25]])
    close(calibrated(score=score, normalize="largest").possibility(weak, tf.sort(scores)), [[1, .4, .2]])


def test_c2s2l_counts_equal_scores_and_raises_the_first_of_equal_degrees():
    model = calibrated(normalize="largest")
    p = tf.constant([[.4, .4, .2]])  # scores 0, 0, .2
    close(model.possibility(p, tf.constant([0., 0., .2, .3])), [[1, 1, .6]])
    close(model.possibility(p, tf.constant([-.1, 0., 0., .1])), [[1, .8, .2]])


@pytest.mark.parametrize(("p", "pi", "wanted", "loss"), PROJECTIONS)
def test_projection(p, pi, wanted, loss):
    close(losses.project_possibility([p], [pi]), [wanted])
    close(losses.possibility_loss(logits([p]), [pi]), [loss])


def test_projection_to_one_class_is_cross_entropy():
    close(losses.project_possibility([[.2, .5, .3]], [[1, 0, 0]]), [[1, 0, 0]])
    # Two classes at the clip: their targets of 1e-5 take 2e-4 away.
    close(losses.possibility_loss(logits([[.2, .5, .3]]), [[1, 0, 0]]), [-np.log(.2)], rtol=0, atol=3e-4)


def blocks(p, pi):
    """The published algorithm: from the least possible class, the longest proportional block that breaks nothing."""
    order = np.argsort(-pi, kind="stable")
    p, pi, t = p[order], pi[order], np.zeros(len(p))
    j = len(p) - 1
    while j >= 0:
        fixed = t[j + 1:].sum()
        for i in range(j + 1):
            t[i:j + 1] = p[i:j + 1] / p[i:j + 1].sum() * (pi[i] - fixed)
            if all(t[k:].sum() <= pi[k] + 1e-9 for k in range(i, j + 1)):
                break
        j = i - 1
    return t[np.argsort(order)]


def random_case(generator, classes):
    p, pi = generator.dirichlet(np.full(classes, .5)) + 1e-6, generator.uniform(0, 1, classes)
    if generator.rand() < .5:
        pi = np.round(pi, 1)  # equal degrees
    pi[generator.randint(classes)] = 1
    return p / p.sum(), pi


@pytest.mark.parametrize("classes", [2, 3, 10, 33])
def test_projection_is_the_published_algorithm_s_and_optimal(classes):
    cases = [random_case(np.random.RandomState(seed), classes) for seed in range(60)]
    stacked = [np.stack(part).astype(np.float32) for part in zip(*cases, strict=True)]
    found = losses.project_possibility(*stacked).numpy().astype(np.float64)
    close(found, [blocks(*case) for case in cases], rtol=0, atol=1e-5)
    # The conditions of Karush, Kuhn and Tucker for this convex problem.
    for t, p, pi in zip(found, *(part.astype(np.float64) for part in stacked), strict=True):
        close(t.sum(), 1, rtol=0, atol=1e-5)
        order = np.argsort(-pi, kind="stable")
        sums, ratio = np.cumsum(t[order][::-1])[::-1], (t / p)[order]
        assert (sums <= pi[order] + 1e-5).all()
        for i in range(1, classes):
            assert ratio[i] <= ratio[i - 1] * (1 + 1e-4) + 1e-5
            if ratio[i] < ratio[i - 1] * (1 - 1e-4) - 1e-5 and t[order][i] > 1e-6:  # a price was paid: it is tight
                assert abs(sums[i] - pi[order][i]) < 1e-5


def test_projection_beats_a_fine_grid():
    grid = np.array([(a, b, 200 - a - b) for a in range(201) for b in range(201 - a)]) / 200
    for seed in range(40):
        p, pi = random_case(np.random.RandomState(seed), 3)
        allowed = grid[np.all([grid[:, pi <= pi[k]].sum(1) <= pi[k] + 1e-9 for k in range(3)], 0)]
        with np.errstate(divide="ignore", invalid="ignore"):
            best = np.nan_to_num(allowed * np.log(allowed / p)).sum(1).min()
        t = losses.project_possibility([p], [pi]).numpy()[0].astype(np.float64)
        ours = np.sum(np.where(t > 0, t * np.log(np.maximum(t, 1e-30) / p), 0))
        # A step of the grid is 1/200; the divergence changes by its logarithms.
        assert ours <= best + 1e-5 and best - ours < .15, (p, pi)


def test_projection_with_one_level_is_that_of_cssl():
    generator = np.random.RandomState(0)
    p = (.99 * generator.dirichlet(np.full(10, .5), 200) + .001).astype(np.float32)  # nothing to clip
    alpha, y = generator.uniform(.01, .99, 200).astype(np.float32), generator.randint(0, 10, 200)
    pi = np.where(np.eye(10)[y] > 0, 1, alpha[:, None])
    outside = p[np.arange(200), y] < 1 - alpha - 1e-3
    wanted = losses.project(p, y, alpha).numpy()
    assert outside.sum() > 50
    # CSSL's own adds 1e-7 to the sum of the others.
    close(losses.project_possibility(p, pi).numpy()[outside], wanted[outside], rtol=1e-4, atol=1e-5)
    close(losses.possibility_loss(logits(p), pi), losses.credal_loss(logits(p), y, alpha), rtol=0, atol=1e-5)


def test_projection_takes_vanishing_probabilities():
    p = tf.nn.softmax([[200., 0, -100, -300], [0, 0, 0, 200]])
    pi = tf.constant([[.1, .3, .2, 1], [1, .5, .5, 0]])
    t = losses.project_possibility(p, pi)
    close(t, [[.1, .1, .1, .7], [.5, .25, .25, 0]], rtol=0, atol=1e-5)
    loss = losses.possibility_loss(tf.constant([[200., 0, -100, -300]]), pi[:1])
    assert np.isfinite(loss).all()


def test_c2s2l_s_gradient_is_that_of_a_fixed_target():
    x = tf.Variable([[.3, -.2, .9], [2., 0, 0]])
    pi = tf.constant([[1., .6, .2], [1, 1, 1]])
    with tf.GradientTape(persistent=True) as tape:
        loss = losses.possibility_loss(x, pi)
        target = tf.stop_gradient(losses.project_possibility(tf.nn.softmax(x), pi))
        fixed = losses.clipped_kl(target[:1], tf.nn.softmax(x[:1]))
    close(tape.gradient(loss, x)[0], tape.gradient(fixed, x)[0])
    close(tape.gradient(loss, x)[1], [0, 0, 0])
    close(tape.gradient(loss, x)[0], (softmax(x.numpy()) - target)[0], rtol=0, atol=1e-5)


def predict(model, images, weights, statistics, training):
    found, _ = model.network.stateless_call(weights, statistics, images, training=training)
    return softmax(found.numpy().astype(np.float64))


def degrees_by_hand(model, images, weights, statistics):
    """Possibility degrees, and the scores of the calibration images."""
    calibration = tf.cast(model.calibration_images, tf.float32) / 127.5 - 1
    classes, p = model.calibration_classes, predict(model, calibration, weights, statistics, False)
    score = np.array([[max(np.delete(row, k)) - row[k] for k in range(CLASSES)] for row in p])
    scores = score[np.arange(len(classes)), classes]
    pi = np.array([[(np.sum(scores >= max(np.delete(row, k)) - row[k] - 1e-7) + 1) / (len(scores) + 1)
                    for k in range(CLASSES)] for row in predict(model, images, weights, statistics, False)])
    return pi / pi.max(-1, keepdims=True), scores


def c2s2l_by_hand(model, views, weights, statistics):
    """Loss from the passes' probabilities; scores from the calibration images."""
    pi, scores = degrees_by_hand(model, views["weak"], weights[0], statistics)
    p = predict(model, np.concatenate([views["labeled"], views["strong"]]), list(weights[1]), statistics, True)

    def kl(t, p):
        t, p = np.clip(t, 1e-5, 1), np.clip(p, 1e-5, 1)
        return np.sum(t * np.log(t / p), -1)

    xe = kl(np.eye(CLASSES)[views["label"]], p[:BATCH]).mean()
    rows = []
    for p_i, pi_i in zip(p[BATCH:], pi, strict=True):
        inside = all(p_i[pi_i <= bound].sum() <= bound + 1e-5 for bound in pi_i)
        rows.append(0 if inside else kl(blocks(p_i, pi_i), p_i))
    return xe, np.mean(rows), np.sort(scores)


def test_c2s2l_step():
    """Scores and weak views from the snapshot in inference mode; the loss, and the statistics, from the other pass."""
    model = make(C2S2L, residual_net)
    for i, v in enumerate(model.network.non_trainable_variables):
        v.assign(v + tf.abs(tf.random.stateless_normal(v.shape, [i, 3])) * .1)
    views, now = views_of(model, 0), [tf.convert_to_tensor(v) for v in model.network.trainable_variables]
    statistics = [tf.convert_to_tensor(v) for v in model.network.non_trainable_variables]
    step = step_of(model)
    loss, scalars, new, *_ = model.compute_losses(views, step)
    xe, xeu, scores = c2s2l_by_hand(model, views, (now, now), statistics)
    close(new["scores"], scores, rtol=0, atol=1e-5)
    close([scalars["losses/xe"], scalars["losses/xeu"], loss], [xe, xeu, xe + xeu], rtol=2e-4, atol=1e-5)
    assert xeu > .001
    together = np.concatenate([views["labeled"], views["strong"]])
    _, moved = model.network.stateless_call(now, statistics, together, training=True)
    for found, wanted in zip(step.new_statistics, moved, strict=True):
        close(found, wanted, rtol=1e-5, atol=1e-7)

    # Between calibrations the old snapshot judges, and stays.
    later = [w + .1 for w in now]
    second = Step(model, SEED, model.update.read()._replace(weights=later, method=new))
    second.images_seen = tf.constant(5 * BATCH, tf.int64)
    loss, _, new, *_ = model.compute_losses(views, second)
    xe, xeu, _ = c2s2l_by_hand(model, views, (now, later), statistics)
    close(loss, xe + xeu, rtol=2e-4, atol=1e-5)
    close(new["snapshot_0"], now[0], rtol=0, atol=0)


def test_c2s2l_credal_sets():
    """In a graph; by the snapshot that the first update calibrated with, not by the weights that it made."""
    model = make(C2S2L, residual_net)
    views, sets = views_of(model, 0), tf.function(model.credal_sets)
    images = views["weak"]
    close(sets(images, model(images))["possibility"], np.ones((2 * BATCH, CLASSES)))  # not calibrated yet
    state = model.update.read()
    wanted, _ = degrees_by_hand(model, images, state.weights, state.statistics)
    model.train_on_views(views)
    found = sets(images, model(images))
    assert set(found) == {"possibility"} and len(np.unique(wanted)) > 3
    close(found["possibility"], wanted, rtol=1e-6)


@pytest.mark.parametrize(("update", "due"), [(0, True), (1, False), (8, False), (9, True), (10, False), (19, True),
                                             (1019, True), (1023, False), (1024, True), (1033, True), (1034, False)])
def test_c2s2l_calibrates_at_epochs_and_every_tenth_update(update, due):
    model = calibrated()
    state = model.snapshot(step_of(model, 2 * update, scores=np.full(4, .25)))
    assert np.any(state["scores"] != .25) == due


def test_c2s2l_many_calibration_images_are_read_in_parts():
    model = calibrated(size=11)
    images = tf.cast(tf.convert_to_tensor(model.calibration_images), tf.float32) / 127.5 - 1
    p = softmax(model.infer(images, ema=False).numpy())
    wanted = [max(np.delete(row, k)) - row[k] for row, k in zip(p, np.arange(11) % 3, strict=True)]
    for chunk in (4, 11, 256):
        close(model.calibrate(step_of(model).state, chunk), np.sort(wanted), rtol=1e-5, atol=1e-5)


def labelled(counts, seed=1):
    """Data with the given numbers of labelled images per class."""
    classes = np.repeat(np.arange(len(counts)), counts)
    images = np.zeros((len(classes), 8, 8, 3), np.uint8)
    return data.from_arrays(images, classes, images[:2], classes[:2], seed=seed, valid=0)


def test_calibration_images_are_held_out_in_proportion():
    whole = labelled([4] * 10)
    part = data.hold_out(whole, .25)
    assert len(part.labeled) == 30 and sorted(part.calibration_classes) == list(range(10))
    assert not set(part.labeled) & set(part.calibration)
    assert set(part.labeled) | set(part.calibration) == set(whole.labeled)
    np.testing.assert_array_equal(whole.labels[part.calibration], part.calibration_classes)
    np.testing.assert_array_equal(part.labels[part.labeled], part.labeled_classes)
    np.testing.assert_array_equal(data.hold_out(whole, .25).calibration, part.calibration)
    assert set(data.hold_out(labelled([4] * 10, seed=2), .25).calibration) != set(part.calibration)
    batch = next(iter(data.batches(part, batch=30, uratio=1)))
    assert sorted(batch["labeled_index"].numpy()) == list(range(30))
    assert len(data.hold_out(whole, .9).labeled) == 10  # each class keeps one
    np.testing.assert_array_equal(data.hold_out(part, .25).calibration, part.calibration)  # the data of a run again
    np.testing.assert_array_equal(data.hold_out(part, 0).labeled, whole.labeled)
    assert np.bincount(data.hold_out(labelled([40, 20, 10, 2]), .5).calibration_classes).tolist() == [20, 10, 5, 1]


def test_a_class_does_not_give_its_only_image(program, tmp_path):
    done = program(C2S2L, "--dataset=digits.1@10-1", f"--train_dir={tmp_path}", code=2)
    assert "digits.1@10-1 has 10 labelled images, none of which its class can spare for calibration" in done.stderr
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="has 10 labelled images, none of which its class can spare for calibration"):
        data.hold_out(labelled([1] * 10), .25)
    with pytest.raises(ValueError, match="C2S2L got no calibration images"):
        model_of(C2S2L)


# FlexMatch.

def test_flexmatch_thresholds():
    def taus(counts, warmup=True):
        beta = model_of(FlexMatch, thresh_warmup=warmup).learned(tf.constant(counts))
        return np.stack([beta, .95 * beta / (2 - beta)])

    close(taus([4, 2, 0]), [[1, .5, 0], [.95, .316667, 0]])
    close(taus([3, 1, 0]), [[.5, .166667, 0], [.316667, .086364, 0]])
    close(taus([3, 1, 0], False), [[1, .333333, 0], [.95, .19, 0]])
    close(taus([0, 0, 0]), np.zeros((2, 3)))
    close(taus([0, 0, 0], False), np.zeros((2, 3)))


def test_flexmatch_remembers_confident_predictions():
    model = model_of(FlexMatch)
    q = np.array([[.97, .02, .01], [.6, .3, .1], [.01, .98, .01], [.02, .01, .97], [.4, .5, .1]])
    views = {"unlabeled_index": tf.constant([7, 2, 4, 7, 0])}  # 7 occurs twice: the last confident one counts
    chosen = np.full(10, -1)
    chosen[[0, 7]] = 1, 0
    step = step_of(model, chosen=chosen, counts=[1, 1, 0])
    _, mask, _, new, _ = model.unlabeled_loss(logits(q), logits(q), views, step)
    tau = .95 * (1 / 8) / (2 - 1 / 8)
    np.testing.assert_array_equal(mask, q.max(-1) >= np.array([tau, tau, 0])[q.argmax(-1)])
    chosen[[7, 4]] = 2, 1
    np.testing.assert_array_equal(new["chosen"], chosen)
    np.testing.assert_array_equal(new["counts"], [0, 2, 1])


def test_flexmatch_counts_stay_what_a_recount_gives():
    model, generator = model_of(FlexMatch, sizes=(3, 12)), np.random.RandomState(0)
    step = step_of(model)
    for _ in range(12):
        q = generator.dirichlet([.05] * 3, 8) + 1e-9
        index = tf.constant(generator.randint(0, 12, 8), tf.int32)
        step.state = model.unlabeled_loss(logits(q), logits(q), {"unlabeled_index": index}, step).state
        chosen = step.state["chosen"].numpy()
        np.testing.assert_array_equal(step.state["counts"], np.bincount(chosen[chosen >= 0], minlength=3))
    assert (chosen >= 0).sum() > 6


# FreeMatch.

FIRST = np.array([[.8, .15, .05], [.2, .5, .3], [.6, .3, .1]])


def test_freematch_thresholds():
    model = model_of(FreeMatch)
    averages = model.averages(tf.constant(FIRST, tf.float32), step_of(model))
    close(averages["tau"], .333633)
    close(averages["p"], [.333533, .333317, .333150])
    close(averages["h"], [.333667, .333333, .333000])
    close(model.thresholds(averages), [.333633, .333417, .333250])
    for options, wanted in (({}, [.8, .48, .32]), ({"tau_max": .5}, [.5, .3, .2])):
        frozen = model_of(FreeMatch, momentum=1.0, **options)
        averages = frozen.averages(tf.constant(FIRST, tf.float32), step_of(frozen, tau=.8, p=[.5, .3, .2]))
        close(frozen.thresholds(averages), wanted)


def test_freematch_goes_on_from_its_bound():
    """As in USB: an average that was bounded falls from the bound on, not from where it would have been."""
    model = model_of(FreeMatch, momentum=.9, tau_max=.95)
    step, wanted = step_of(model), 1 / 3
    for confidence in [.99] * 60 + [.93] * 10:
        step.state = model.averages(tf.constant([[confidence, 1 - confidence, 0]], tf.float32), step)
        wanted = min(.9 * wanted + .1 * confidence, .95)
    close(step.state["tau"], wanted)
    close(wanted, .93 + .02 * .9 ** 10, rtol=1e-9)


def test_freematch_fairness():
    model = model_of(FreeMatch)
    ps = np.array([[.7, .2, .1], [.3, .6, .1], [.2, .3, .5]])
    step = step_of(model, p=[.5, .3, .2], h=[.6, .3, .1])
    strong = tf.Variable(logits(ps))

    def fairness(strong, mask):
        return model.fairness(strong, mask, step.state, step)

    with tf.GradientTape() as tape:
        loss = fairness(strong, tf.ones(3))
    close(loss, -1.220205)
    shift, numeric = 1e-3, np.zeros((3, 3))
    for i, k in itertools.product(range(3), repeat=2):
        change = shift * np.eye(9)[3 * i + k].reshape(3, 3)
        numeric[i, k] = (fairness(strong + change, tf.ones(3)) - fairness(strong - change, tf.ones(3))) / (2 * shift)
    close(tape.gradient(loss, strong), numeric, rtol=0, atol=3e-4)  # differences of float32 over 0.002
    assert np.abs(numeric).max() > .01

    extra = np.concatenate([ps, [[.1, .1, .8]]])
    close(fairness(logits(extra), tf.constant([1., 1, 1, 0])), -1.220205)  # not masked in
    assert fairness(strong, tf.zeros(3)) == 0
    # A class that no strong view predicts: a constant of its share times log 1e-12.
    two = fairness(logits(ps[:2]), tf.ones(2))
    a, b = np.array([.217391, .260870, .521739]), np.array([.5 / .5, .4 / .5])
    close(two, a[:2] @ np.log(b / b.sum()) + a[2] * np.log(1e-12), rtol=1e-5, atol=1e-5)
    with tf.GradientTape() as tape:
        none = fairness(strong, tf.zeros(3))
    assert np.isfinite(tape.gradient(none, strong)).all()


# SoftMatch.

def test_softmatch_weights():
    model = model_of(SoftMatch)
    step = step_of(model)
    q = tf.constant(FIRST, tf.float32)
    weights, new = model.weights(q, step)
    close(weights, [1, 1, 1])
    a = losses.align(q, p_data=1 / 3, p_model=new["p_model"])
    close(new["p_model"], FIRST.mean(0))
    close(a, [[.650191, .205323, .144486], [.094842, .399335, .505823], [.410729, .345877, .243394]])
    close([new["mu"], new["var"]], [.333522, .999015])
    _, new = model.weights(q, step_of(model, p_model=[.5, .3, .2]))
    close(new["p_model"], .999 * np.array([.5, .3, .2]) + .001 * FIRST.mean(0))


def test_softmatch_gaussian():
    def weight(n_sigma):
        return model_of(SoftMatch, n_sigma=n_sigma).gaussian(tf.constant([.95, .9, .85, .8, .7]), .9, .01)

    close(weight(2.0), [1, 1, .606531, .135335, .000335])
    close(weight(0.0), np.ones(5))
    close(weight(1e6), [1, 1, 0, 0, 0])  # the mask [c >= mu]


# AdaMatch.

def test_adamatch_targets():
    labeled, q = np.array([[.9, .05, .05], [.2, .7, .1]]), np.array([[.6, .3, .1], [.2, .5, .3]])
    model = model_of(AdaMatch)
    a, mask, new = model.targets(tf.constant(labeled, tf.float32), tf.constant(q, tf.float32), step_of(model))
    close(new["p_labeled"], [.333550, .333375, .333075])
    close(new["p_unlabeled"], q.mean(0))
    close(a, [[.545674, .272694, .181632], [.153979, .384745, .461277]])
    np.testing.assert_array_equal(mask, [0, 0])  # the threshold is .76
    for confidence, wanted in ((.545 / .8, [1, 0]), (.546 / .8, [0, 0]), (.461 / .8, [1, 1])):
        model = model_of(AdaMatch, confidence=confidence)
        _, mask, _ = model.targets(tf.constant(labeled, tf.float32), tf.constant(q, tf.float32), step_of(model))
        np.testing.assert_array_equal(mask, wanted)


def test_adamatch_targets_of_the_authors():
    labeled, q = ([[.9, .05, .05], [.2, .7, .1]], [[.6, .3, .1], [.2, .5, .3]])
    for confidence, wanted in ((.9, [0, 0]), (.599 / .8, [1, 0]), (.6 / .8, [0, 0]), (.499 / .8, [1, 1])):
        model = model_of(AdaMatch, form="authors", confidence=confidence)
        a, mask, new = model.targets(tf.constant(labeled), tf.constant(q), step_of(model))
        np.testing.assert_array_equal(mask, wanted)
    close(new["p_labeled"], [.333550, .333375, .333075])
    close(tf.reduce_mean(new["p_unlabeled"], 0), [.333854, .333854, .332292])
    close(a, [[.599898, .299792, .100310], [.199856, .499379, .300765]])


def test_adamatch_schedules():
    authors, usb = (model_of(AdaMatch, form=form) for form in ("authors", "usb"))  # of 1000 images
    close([authors.warmup(step_of(authors, images)) for images in (0, 125, 250, 500, 1000)],
          [0, .146447, .5, 1, 1])
    close([authors.learning_rate(tf.constant(images)) for images in (0, 500, 1000)], [.03, .023717, .0075])
    close(usb.warmup(step_of(usb)), 1)
    close(usb.learning_rate(tf.constant(1000)), .03 * np.cos(7 * np.pi / 16))
    assert usb.optimizer_rule.nesterov and not authors.optimizer_rule.nesterov


def adamatch_of_the_authors(network, **options):
    model = AdaMatch(network, CLASSES, options=AdaMatch.Options(batch=BATCH, uratio=2, form="authors", **options),
                     total_images=1000)
    views = views_of(model, 3)
    return model, views, Step(model, SEED, model.update.read())


def test_adamatch_of_the_authors():
    """Where no image changes another's logits both passes are one."""
    model, views, step = adamatch_of_the_authors(PlainEmbedding(), confidence=.5)
    step.images_seen = tf.constant(250)
    total, scalars, *_ = model.compute_losses(views, step)
    x, strong_x, weak, strong = (model.network(views[name]).numpy() for name in ("labeled", "labeled_strong", "weak",
                                                                               "strong"))
    label, rows = views["label"].numpy(), np.arange(BATCH)
    xe = np.mean([-np.log(softmax(found)[rows, label]) for found in (x, strong_x)])
    p, q = softmax(x), softmax(weak)
    p_l = .999 / CLASSES + .001 * p.mean(0)
    p_u = (127 / CLASSES + q.mean(0)) / 128
    a = q * (1e-6 + p_l) / (1e-6 + p_u)
    a /= a.sum(1, keepdims=True)
    mask = a.max(1) >= .5 * p.max(1).mean()
    xeu = np.mean(mask * -np.log(softmax(strong)[np.arange(len(a)), a.argmax(1)]))
    close([scalars["losses/xe"], scalars["losses/xeu"], total], [xe, xeu, xe + .5 * xeu], rtol=1e-5)  # float32
    assert 0 < mask.sum()


def test_adamatch_interpolates_labelled_logits():
    model, views, step = adamatch_of_the_authors(residual_net())
    x, _, _ = model.logits(views, step)
    moved = step.new_statistics
    step = Step(model, SEED, model.update.read())
    labeled = tf.concat([views["labeled"], views["labeled_strong"]], 0)
    alone = step.forward(labeled, update_statistics=False)
    together = step.forward(tf.concat([labeled, views["weak"], views["strong"]], 0))[:2 * BATCH]
    share = ((x - together) / (alone - together)).numpy()
    assert share.min() >= -1e-3 and share.max() <= 1 + 1e-3 and share.std() > .2  # rounding of small differences
    for ours, theirs in zip(moved, step.new_statistics, strict=True):  # those of the joint pass alone
        np.testing.assert_array_equal(ours, theirs)


def test_adamatch_names_its_form():
    made = model_of(AdaMatch, form="authors")
    assert made.strong_labeled_too and not model_of(AdaMatch).strong_labeled_too
    config = RunConfig.of(AdaMatch, dataset="cifar10.3@40-1", form="authors")
    assert "form" in str(config.folder()) and "form" not in str(RunConfig.of(AdaMatch,
                                                                            dataset="cifar10.3@40-1").folder())


# Dash.

def test_dash_threshold():
    model = model_of(Dash, batch=64)

    def rho(k, total=512.0, count=256.0):
        return model.threshold(step_of(model, round(1024 * (128 + 640 * k)), total=total, count=count))

    close([rho(k) for k in (0, .99, 1, 5, 15, 16, 50)], [2.0002, 2.0002, 1.574961, .605417, .055465, .05, .05])
    close(rho(0, 0.0, 0.0), .05)


def test_dash_selects_by_the_weak_loss_and_hardens():
    weak = tf.constant([[2., 0, -1]])
    target = softmax(np.array([[4., 0, -2]]))
    close(target, [[.979629, .017943, .002428]])
    strong = logits([[.5, .3, .2]])
    start = 128 * 1024

    def outcome(rho_hat, **options):
        model = model_of(Dash, C=1.0, **options)
        loss, mask, *_ = model.unlabeled_loss(weak, strong, {}, step_of(model, start, total=rho_hat, count=1))
        return loss.numpy()[0], mask.numpy()[0]

    soft, hard = -(target[0] @ np.log([.5, .3, .2])), -np.log(.5)
    close(outcome(.2131), [soft, 1])  # H(t, w) = .213016
    close(outcome(.2129), [soft, 0])
    close(outcome(0.0, rho_min=.1699), [hard, 1])  # one-hot: .169846
    close(outcome(0.0, rho_min=.1698), [hard, 0])


def test_dash_s_smallest_threshold_is_fixmatch_s():
    x = np.random.RandomState(0).normal(size=(200, 3)) * 4
    weak, strong = tf.constant(x, tf.float32), tf.constant(x[::-1].copy(), tf.float32)
    dash, fixmatch = model_of(Dash, warmup_kimg=0.0), model_of(FixMatch, confidence=float(np.exp(-.05)))
    (ours, mask, *_), (theirs, wanted, *_) = (model.unlabeled_loss(weak, strong, {}, step_of(model))
                                            for model in (dash, fixmatch))
    np.testing.assert_array_equal(mask, wanted)
    close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert 0 < mask.numpy().mean() < 1


def test_dash_measures_the_end_of_its_warm_up():
    model = model_of(Dash, classes=CLASSES, batch=BATCH, uratio=2, warmup_kimg=300 * BATCH / 1024,
                     network=residual_net())
    views = views_of(model, 0)
    for update, inside in ((43, 0), (44, 1), (299, 1), (300, 0)):
        step = step_of(model, update * BATCH, total=3.0, count=2.0)
        loss, scalars, new, *_ = model.compute_losses(views, step)
        close(new["count"], 2 + inside)
        close(new["total"], 3 + inside * scalars["losses/xe"])
        assert (loss == scalars["losses/xe"]) == (update < 300)  # labels alone until then
        assert new["total"].shape == ()


# AlphaMatch.

def alpha_loss(weak, strong, alpha, beta, literal=False):
    """(g, loss, gradients of weak and strong logits)."""
    x = tf.Variable(logits([[weak]] + [[s] for s in strong]))
    weights = [1 - beta] + [beta / len(strong)] * len(strong)
    with tf.GradientTape() as tape:
        log_p = tf.nn.log_softmax(x)
        log_g = powered_mean(tf.stop_gradient(log_p), weights, alpha)
        log_g = log_g if literal else tf.nn.log_softmax(log_g)
        loss = sum(w * losses.alpha_divergence(log_g, view, alpha)
                   for w, view in zip(weights, tf.unstack(log_p), strict=True))
    return np.exp(log_g)[0], loss.numpy()[0], tape.gradient(loss, x).numpy()[:, 0]


ONE = ([.7, .2, .1], [[.5, .3, .2]])


@pytest.mark.parametrize(("views", "alpha", "beta", "g", "loss"), [
    (ONE, 1.5, .5, [.607395, .250684, .141921], .0224554), (ONE, 1.5, .2, [.664851, .219985, .115164], .0137090),
    (ONE, 3.0, .5, None, .0230735), (ONE, 1.0, .5, [.604930, .250465, .144606], .0222678),
    (ONE, 0.0, .5, [.6, .25, .15], .0219012), (ONE, 1.5, 0.0, ONE[0], 0), (ONE, 1.5, 1.0, ONE[1][0], 0),
    (([.7, .2, .1], [[.5, .3, .2], [.4, .4, .2]]), 1.5, .5, [.582717, .272280, .145003], .0371019),
    (([.7, .2, .1], [[.7, .2, .1]]), 1.5, .5, [.7, .2, .1], 0)])
def test_alphamatch_target_and_loss(views, alpha, beta, g, loss):
    found_g, found, _ = alpha_loss(*views, alpha, beta)
    if g is not None:
        close(found_g, g)
    close(found, loss, rtol=0, atol=2e-7)


def test_alphamatch_gradients():
    close(alpha_loss(*ONE, 1.5, .5)[2], [[.048357, -.025851, -.022506], [-.053458, .025431, .028027]])
    g, _, (_, strong) = alpha_loss([.98, .01, .01], [[.4, .3, .3]], 1.5, .5)
    close(g, [.912384, .043808, .043808])
    close(strong, [-.271128, .135564, .135564])


def test_alphamatch_needs_no_gradient_of_its_target():
    """The target minimises what it appears in."""
    x = tf.Variable(logits([[ONE[0]], ONE[1]]))
    with tf.GradientTape() as tape:
        log_p = tf.nn.log_softmax(x)
        log_g = tf.nn.log_softmax(powered_mean(log_p, [.5, .5], 1.5))
        # The sum of u enters the divergence as 1: written out, so that it may vary.
        loss = sum(.5 * (tf.reduce_sum(tf.exp(1.5 * log_g - .5 * view)) - 1) / .75 for view in tf.unstack(log_p))
    close(tape.gradient(loss, x)[:, 0], alpha_loss(*ONE, 1.5, .5)[2])


def test_alpha_divergence():
    u, v = logits([.7, .2, .1]), logits([.5, .3, .2])
    for alpha, wanted in ((.5, .0880868), (1, .0851228), (1.5, .0830149), (2, .0816667)):
        close(losses.alpha_divergence(u, v, alpha), wanted, rtol=0, atol=2e-7)
    close(losses.alpha_divergence(u, v, 0), losses.alpha_divergence(v, u, 1), rtol=1e-6, atol=0)
    close(losses.alpha_divergence(u, v, .9999), .0851228, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("e", "normalized", "literal"), [
    (1e-2, 1.17, .020), (1e-4, 11.8, 2.6e-4), (1e-6, 118, 2.7e-6)])
def test_alphamatch_s_two_targets_part_where_views_do(e, normalized, literal):
    """Weak and strong view are sure of different classes: the largest gradients, to the digits that are known."""
    found = [np.abs(alpha_loss([1 - e, e], [[e, 1 - e]], 1.5, .5, form)[2]).max() for form in (False, True)]
    close(found, [normalized, literal], rtol=.03)


@pytest.mark.parametrize(("align", "target"), [(False, "normalized"), (True, "normalized"), (True, "literal")])
def test_alphamatch_step(align, target):
    model = make(AlphaMatch, residual_net)
    model.options = dataclasses.replace(model.options, align=align, target=target, K=2)
    views = views_of(model, 0)
    step = step_of(model)
    step.predictions = tf.constant(np.random.RandomState(0).dirichlet(np.ones(CLASSES), 128), tf.float32)
    scalars = model.compute_losses(views, step).scalars
    together = np.concatenate([views["labeled"], views["weak"], views["strong"]])
    p = softmax(model.network(together, training=True).numpy().astype(np.float64))[BATCH:]
    weak, strong = p[:2 * BATCH], np.split(p[2 * BATCH:], 2)
    a = weak / (step.predictions.numpy().mean(0) + 1e-6) if align else weak
    a = a / a.sum(-1, keepdims=True)
    g = (.5 * a ** -.5 + .25 * strong[0] ** -.5 + .25 * strong[1] ** -.5) ** -2
    g /= g.sum(-1, keepdims=True) if target == "normalized" else 1
    divergence = [np.sum(g ** 1.5 * view ** -.5 - g, -1) / .75 for view in (weak, *strong)]
    close(scalars["losses/xeu"], np.mean(.5 * divergence[0] + .25 * divergence[1] + .25 * divergence[2]), rtol=1e-3,
          atol=1e-6)


# CoMatch.

Q = np.array([[.7, .2, .1], [.1, .6, .3]])
A = [[.636364, .181818, .181818], [.076923, .461538, .461538]]
T = [[.660807, .175557, .163636], [.071029, .513586, .415385]]


def comatch(**options):
    return model_of(CoMatch, low_dim=2, queue_batch=1, batch=1, uratio=1, **options)  # a memory of two


def test_comatch_alignment():
    """Over the plain mean, as the authors have it: 1e-6 more would change a rare class by 0.2 %."""
    model = comatch()
    empty = step_of(model).state["means"]
    queue = banks.push(empty, tf.reduce_mean(tf.constant([Q], tf.float32), 1))
    close(model.over_mean(tf.constant(Q, tf.float32), queue), A)
    close(queue[-1], [.4, .4, .2])
    assert not np.any(queue[:-1]) and queue.shape == (32, 3)
    rare = np.array([[.9989, .001, .0001], [.5, .4989, .0011]])
    queue = banks.push(empty, tf.reduce_mean(tf.constant([rare], tf.float32), 1))
    a = rare / rare.mean(0)
    close(model.over_mean(tf.constant(rare, tf.float32), queue), a / a.sum(1, keepdims=True), rtol=1e-6)
    nobody = tf.constant(Q * [1, 1, 0], tf.float32)  # predicts the last class, to as many digits as there are
    a = model.over_mean(nobody, banks.push(empty, tf.reduce_mean(nobody[None], 1)))
    close(a, [[7 / 9, 2 / 9, 0], [1 / 7, 6 / 7, 0]])


def test_comatch_smooths_once_the_memory_is_full():
    model = comatch()
    bank = dict(bank_z=[[1, 0], [.6, .8]], bank_q=[[1, 0, 0], [0, 1, 0]])
    a, z = tf.constant(A), tf.eye(2)
    close(model.smoothed(a, z, step_of(model, 2, **bank)), T)
    close(model.smoothed(a, z, step_of(model, 1, **bank)), A)  # the memory is not a batch old
    close(model.smoothed(a, z, step_of(model, 2)), A)  # nor full
    close(model_of(CoMatch, low_dim=2, alpha=1.0, queue_batch=1, batch=1).smoothed(a, z, step_of(model, 2, **bank)), A)
    close((T @ np.transpose(T))[0, 1], .205072)


def test_comatch_contrastive_loss():
    z0, z1 = tf.constant([[1, 0], [.8, .6]]), tf.constant([[.6, .8], [1, 0]])
    close(tf.nn.softmax(tf.matmul(z0, z1, transpose_b=True) / .2), [[.119203, .880797], [.689974, .310026]])
    close(comatch(contrast_th=.2).contrastive(tf.constant(T), z0, z1), [1.786579, 1.034961])
    # No neighbours: SimCLR's one-sided loss.
    close(comatch(contrast_th=.8).contrastive(tf.constant(T), z0, z1), [2.126927, 1.171100])


def test_comatch_without_extras_is_uda_with_soft_targets():
    generator = np.random.RandomState(0)
    views = {name: tf.constant(generator.uniform(-1, 1, (n, *SHAPE)).astype(np.float32))
             for name, n in (("labeled", BATCH), ("weak", 2 * BATCH), ("strong", 4 * BATCH))}
    views["label"] = tf.constant(generator.randint(0, CLASSES, BATCH), tf.int32)
    common = dict(classes=CLASSES, batch=BATCH, uratio=2, confidence=.3)
    ours = model_of(CoMatch, wc=0.0, alpha=1.0, network=PlainEmbedding(), **common)
    theirs = model_of(UDA, network=PlainEmbedding(), temperature=1.0, **common)
    step = step_of(ours, means=np.full((32, CLASSES), 1e6))  # no alignment: a batch does not move their proportions
    loss, scalars, *_ = ours.compute_losses(views, step)
    first = views | {"strong": views["strong"][:2 * BATCH]}
    wanted = theirs.compute_losses(first, step_of(theirs)).scalars
    logits_w, logits_s = (theirs.network(first[name]).numpy().astype(np.float64) for name in ("weak", "strong"))
    p, mask = softmax(logits_w), softmax(logits_w).max(-1) >= .3
    cross = -np.sum(p * np.log(softmax(logits_s)), -1) * mask
    close(scalars["losses/xeu"], cross.mean(), rtol=1e-4, atol=1e-6)
    entropy = (-np.sum(p * np.log(p), -1) * mask).mean()
    close(scalars["losses/xeu"] - entropy, wanted["losses/xeu"], rtol=1e-3, atol=1e-5)  # UDA's is a divergence
    close(loss, wanted["losses/xe"] + scalars["losses/xeu"], rtol=1e-5, atol=1e-6)
    assert 0 < mask.mean() < 1


def test_comatch_remembers_aligned_predictions_and_labels():
    model = make(CoMatch, PlainEmbedding)
    views = views_of(model, 0)
    _, scalars, new, *_ = model.compute_losses(views, step_of(model))
    x, z = (part.numpy() for part in model.network(np.concatenate([views["weak"], views["labeled"]]),
                                                   outputs=("logits", "z")))
    q = softmax(x[:2 * BATCH])
    a = q / q.mean(0)
    rows = np.concatenate([a / a.sum(-1, keepdims=True), np.eye(CLASSES)[views["label"]]])
    close(new["bank_q"][-3 * BATCH:], rows, rtol=0, atol=1e-5)
    close(new["bank_z"][-3 * BATCH:], z, rtol=0, atol=1e-5)
    close(np.linalg.norm(z, axis=1), np.ones(len(z)))
    assert new["bank_q"].shape == (5 * 3 * BATCH, CLASSES) and not new["bank_q"][0].numpy().any()
    assert scalars["losses/contrast"] > 0


# SimMatch.

def padded(rows):
    return np.pad(np.asarray(rows, np.float32), [(0, 0), (0, 126)])


def test_simmatch_targets():
    model = model_of(SimMatch, classes=2)
    state = {"bank": tf.constant(padded([[1, 0], [0, 1], [.6, .8]])), "classes": tf.constant([0, 1, 1])}
    z_w, z_s = padded([[.8, .6]]), padded([[1, 0]])
    target, like = model.targets(tf.constant([[.7, .3]]), z_w, state)
    close(model.likeness(z_w, state["bank"]), [[.164248, .022229, .813524]])
    close(like, [[.314393, .018235, .667372]])
    close(target, [[.646425, .353575]])
    strong = model.likeness(z_s, state["bank"])
    close(strong, [[.981970, .000045, .017985]])
    close(-np.sum(like * np.log(strong)), 2.870032, rtol=0, atol=1e-5)
    close(model_of(SimMatch, classes=2, alpha=1.0).targets(tf.constant([[.7, .3]]), z_w, state)[0], [[.7, .3]])


def test_simmatch_moves_the_last_of_equal_images():
    model = model_of(SimMatch, classes=2)
    bank = padded([[1, 0], [0, 1], [.6, .8]])
    step = step_of(model, bank=bank, classes=[0, 1, 1])
    z = padded([[0, 1], [-1, 0], [1, 0]])
    new = model.updated_bank(tf.constant([2, 0, 2]), tf.constant(z), tf.constant([0, 1, 0]), step)
    wanted = bank.copy()
    wanted[0] = .7 * bank[0] + .3 * z[1]
    wanted[2] = .7 * bank[2] + .3 * z[2]
    wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
    close(new["bank"], wanted)
    np.testing.assert_array_equal(new["classes"], [1, 1, 0])
    close(np.linalg.norm(model.method_state["bank"].numpy(), axis=1), np.ones(3))


@pytest.mark.parametrize("ready", [False, True])
def test_simmatch_step(ready):
    model = make(SimMatch, PlainEmbedding)
    model.options = dataclasses.replace(model.options, warmup_kimg=1.0, confidence=.3)
    views = views_of(model, 0)
    step = step_of(model, 1024 if ready else 1023)
    loss, scalars, *_ = model.compute_losses(views, step)
    bank, classes = step.state["bank"].numpy(), step.state["classes"].numpy()
    (weak, z_w), (strong, z_s) = ([part.numpy().astype(np.float64) for part in
                                   model.network(views[name], outputs=("logits", "z"))] for name in ("weak", "strong"))
    q = softmax(weak)
    a = q / (q.mean(0) + 1e-6)
    a /= a.sum(-1, keepdims=True)
    o, v = (softmax(z @ bank.T / .1) for z in (z_w, z_s))
    r = o * a[:, classes]
    r /= r.sum(-1, keepdims=True)
    target = .9 * a + .1 * o @ np.eye(CLASSES)[classes] if ready else a
    mask = target.max(-1) >= .3
    close(scalars["losses/xeu"], (-np.sum(target * np.log(softmax(strong)), -1) * mask).mean(), rtol=1e-4, atol=1e-6)
    close(scalars["losses/in"], -np.sum(r * np.log(v), -1).mean() if ready else 0, rtol=1e-4, atol=1e-6)
    close(loss, scalars["losses/xe"] + scalars["losses/xeu"] + scalars["losses/in"], rtol=1e-6, atol=1e-6)
    assert 0 < mask.mean() < 1


# CRMatch.

CONFIDENT = .265  # half of the images are


def test_crmatch():
    """One pass for classes and vectors, and one for the turns, from the network's own outputs."""
    model = make(CRMatch, residual_net)
    model.options = dataclasses.replace(model.options, confidence=CONFIDENT, w_distance=3.0, w_rot=.5)
    views = views_of(model, 3)
    step = Step(model, SEED, model.update.read())
    total, scalars, *_ = model.compute_losses(views, step)
    moved = step.new_statistics
    together = [views[name] for name in ("labeled", "weak", "strong")]
    step = Step(model, SEED, model.update.read())
    found = step.forward(tf.concat(together, 0), outputs=("logits", "map"))
    (x, weak, strong), (_, map_weak, map_strong) = (np.split(values.numpy(), [BATCH, BATCH + len(views["weak"])])
                                                    for values in found)
    for ours, theirs in zip(moved, step.new_statistics, strict=True):  # the turned images move none
        np.testing.assert_array_equal(ours, theirs)
    dense = model.network.heads["vector"].dense
    e_weak, e_strong = (values.reshape(len(values), -1) @ dense.kernel.numpy() + dense.bias.numpy()
                        for values in (map_weak, map_strong))
    cosine = (e_weak * e_strong).sum(1) / np.linalg.norm(e_weak, axis=1) / np.linalg.norm(e_strong, axis=1)
    q = softmax(weak)
    mask = q.max(1) >= CONFIDENT
    assert 0 < mask.sum() < len(mask)
    xe = -np.log(softmax(x)[np.arange(BATCH), views["label"]]).mean()
    xeu = np.mean(mask * -np.log(softmax(strong)[np.arange(len(q)), q.argmax(1)]))
    distance = np.mean(mask * np.maximum(cosine, 0))
    turned = np.concatenate([np.rot90(views["weak_again"], k, (1, 2)) for k in range(4)])
    embedding, = step.forward(tf.constant(turned), outputs=("embedding",), update_statistics=False)
    head = model.network.heads["rotation"]
    hidden = np.maximum(embedding.numpy() @ head.hidden.kernel.numpy() + head.hidden.bias.numpy(), 0)
    turns = softmax(hidden @ head.final.kernel.numpy() + head.final.bias.numpy())
    rot = -np.log(turns[np.arange(4 * BATCH), np.repeat(np.arange(4), BATCH)]).mean()
    # float32 through a small network
    close([scalars[f"losses/{name}"] for name in ("xe", "xeu", "distance", "rot")], [xe, xeu, distance, rot], rtol=1e-4)
    close(total, xe + xeu + 3 * distance + .5 * rot, rtol=1e-4)
    plain, compiled = (function(views, SEED, model.update.read()) for function in (model.update.backward,
                                                                                 model.update.compiled))
    for ours, theirs in zip(tf.nest.flatten(compiled), tf.nest.flatten(plain), strict=True):
        close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_crmatch_makes_only_the_views_it_uses():
    """The first weak views are FixMatch's; those to turn are others, of the first images alone."""
    images = np.random.RandomState(0).randint(0, 256, (3 * BATCH, *SHAPE)).astype(np.uint8)
    batch = {"labeled": images[:BATCH], "label": tf.range(BATCH), "unlabeled": images[BATCH:],
             "unlabeled_label": tf.zeros(2 * BATCH, tf.int32)}
    found = []
    for method in (CRMatch, FixMatch):
        augmenter = Augmenter("d.d.x", image_shape=SHAPE, mirror=True, shift=2, jit_compile=False)
        found.append(make(method, residual_net, augmenter=augmenter).make_views(batch))
    ours, theirs = found
    again = ours.pop("weak_again")
    assert ours.keys() == theirs.keys()
    for name, views in theirs.items():
        np.testing.assert_array_equal(ours[name], views)
    seed = fold_in(fold_in(make(CRMatch, residual_net).step_seed(tf.constant(0, tf.int64)), 1), 2)
    wanted = augmenter.weak(images[BATCH:], fold_in(seed, 1))[:BATCH]
    np.testing.assert_array_equal(again, to_float(wanted))
    assert np.any(again != ours["weak"][:BATCH])


@pytest.mark.parametrize(("filters", "channels"), [(32, 128), (128, 512), (8, 32)])
def test_crmatch_s_vector_is_as_long_as_the_map_has_channels(filters, channels):
    """USB's num_features: 128 for WRN-28-2, 512 for WRN-28-8."""
    network = networks.build("resnet", num_classes=CLASSES, image_shape=(32, 32, 3), filters=filters, repeat=1, seed=1)
    dense = CRMatch(network, CLASSES).network.heads["vector"].dense
    assert dense.kernel.shape == (8 * 8 * channels, channels)


def test_crmatch_needs_a_feature_map():
    class Mapless(PlainEmbedding):
        """Has an embedding and no more."""

        @property
        def map_shape(self):
            raise AttributeError

    with pytest.raises(UserError, match="has no feature map for the head map_vector"):
        make(CRMatch, Mapless)


def test_crmatch_without_its_terms_is_fixmatch():
    ours, theirs = make(CRMatch, residual_net), make(FixMatch, residual_net)
    ours.options = dataclasses.replace(ours.options, confidence=.2, w_distance=0.0, w_rot=0.0)
    theirs.options = dataclasses.replace(theirs.options, confidence=.2)
    views = views_of(ours, 3)
    found = ours.compute_losses(views, Step(ours, SEED, ours.update.read()))[0]
    wanted = theirs.compute_losses(views, Step(theirs, SEED, theirs.update.read()))[0]
    close(found, wanted, rtol=1e-6)


def test_crmatch_pushes_both_features_apart():
    """The gradient of the likeness reaches both views; where no image is confident, none."""
    model = make(CRMatch, residual_net)
    views = views_of(model, 3)
    for confidence, reached in ((0.0, True), (1.0, False)):
        model.options = dataclasses.replace(model.options, confidence=confidence, w_rot=0.0, wu=0.0)
        watched = [views["weak"], views["strong"]]
        with tf.GradientTape() as tape:
            tape.watch(watched)
            scalars = model.compute_losses(views, Step(model, SEED, model.update.read())).scalars
        gradients = tape.gradient(scalars["losses/distance"], watched)
        assert [float(tf.reduce_max(tf.abs(g))) > 1e-7 for g in gradients] == [reached] * 2


# ReRankMatch, ReFixMatch.

VECTORS, IDS = tf.constant([[3., 4], [4, 3], [0, 2], [5, 0]]), tf.constant([0, 0, 1, 1])


def test_batch_mean_triplet():
    def loss(*used, margin=.5):
        return losses.batch_mean_triplet(VECTORS, IDS, tf.constant(used), margin)

    close(loss(1., 1, 1, 1), .585087)
    v = VECTORS.numpy() / np.linalg.norm(VECTORS, axis=1, keepdims=True)
    d = np.linalg.norm(v[:, None] - v, axis=-1)
    close([d[0, 1], d[0, 2], d[0, 3], d[2, 3]], [.282843, .632456, .894427, 1.414214])
    hinges = np.maximum(.5 + d[0, 1] - d[:2, 2], 0)
    close(loss(1., 1, 1, 0), hinges.mean())  # the third has no partner of its kind
    assert loss(1., 1, 0, 0) == 0 and loss(0., 0, 0, 0) == 0 and loss(1., 1, 1, 1, margin=0.0) > 0


def test_batch_mean_triplet_has_finite_gradients_everywhere():
    for vectors, used in ((tf.ones([4, 2]), tf.ones(4)), (VECTORS, tf.zeros(4)), (tf.zeros([4, 2]), tf.ones(4))):
        vectors = tf.Variable(vectors)
        with tf.GradientTape() as tape:
            loss = losses.batch_mean_triplet(vectors, IDS, used, .5)
        gradient = tape.gradient(loss, vectors)
        assert np.isfinite(gradient).all() and np.abs(gradient).max() < 1e3


@pytest.mark.parametrize("rank_on", ["embedding", "logits"])
def test_rerankmatch_step(rank_on):
    model = make(ReRankMatch, PlainEmbedding)
    views = views_of(model, 0)
    fixmatch = make(FixMatch, PlainEmbedding)
    base = {}
    for confidence in (.3, 1.0):
        for each in (model, fixmatch):
            each.options = dataclasses.replace(each.options, confidence=confidence)
        model.options = dataclasses.replace(model.options, rank_on=rank_on, w_rank=2.0)
        loss, scalars, *_ = model.compute_losses(views, step_of(model))
        base[confidence] = fixmatch.compute_losses(views, step_of(fixmatch)).loss
        close(loss, base[confidence] + 2 * scalars["losses/rank"], rtol=1e-6, atol=1e-6)
        x, u = (model.network(views[name], outputs=(rank_on,))[0] for name in ("labeled", "strong"))
        q = softmax(model.network(views["weak"]).numpy())
        mask = (q.max(-1) >= confidence).astype(np.float32)
        rank = losses.batch_mean_triplet(x, views["label"], tf.ones(BATCH), .5)
        rank += losses.batch_mean_triplet(u, tf.constant(q.argmax(-1)), tf.constant(mask), .5)
        close(scalars["losses/rank"], rank, rtol=1e-5, atol=1e-6)
        assert mask.any() == (confidence < 1)
    model.options = dataclasses.replace(model.options, w_rank=0.0)
    close(model.compute_losses(views, step_of(model))[0], base[1.0], rtol=0, atol=1e-6)


def test_refixmatch():
    model = model_of(ReFixMatch)
    q, s = np.array([[.6, .3, .1], [.97, .02, .01]]), tf.constant([[1., 0, 0], [1, 0, 0]])
    u = softmax(q / .5)
    close(u[0], [.521732, .286333, .191935])
    loss, mask, *_ = model.unlabeled_loss(logits(q), s, {}, step_of(model))
    close(loss, [.181745, -np.log(softmax(s.numpy()))[1, 0]])
    close(mask, [1, 1])
    loss, mask, *_ = model_of(ReFixMatch, target="logits").unlabeled_loss(logits(q), s, {}, step_of(model))
    u, p = q[0] ** 2 / np.sum(q[0] ** 2), softmax(s.numpy() / .5)[0]
    close(loss, [np.sum(u * np.log(u / p)), -np.log(softmax(s.numpy()))[1, 0]])
    close(mask, [1, 1])


# Limits: what is left of a method when its own idea is switched off.

@pytest.mark.parametrize(("method", "options", "state"), [
    (FlexMatch, {}, {"counts": [5, 5, 0]}),  # two classes fully learned, the third never predicted
    (FreeMatch, {"momentum": 1.0, "w_fair": 0.0}, {"tau": .95}), (ReRankMatch, {"w_rank": 0.0}, {})])
def test_without_its_idea_it_is_fixmatch(method, options, state):
    model, fixmatch = model_of(method, **options), model_of(FixMatch)
    generator = np.random.RandomState(0)
    x = [tf.constant(generator.normal(size=(n, 3)) * scale - [0, 0, 9], tf.float32)
         for n, scale in ((4, 1), (40, 4), (40, 1))]
    views = {"label": tf.constant([0, 1, 1, 0]), "unlabeled_index": tf.range(40) % 10}
    found = []
    for each in (model, fixmatch):
        each.forward_together = lambda views, step, outputs=None: x if outputs is None else [(p, p) for p in x]
        found.append(each.compute_losses(views, step_of(each, **(state if each is model else {}))))
    close(found[0][0], found[1][0], rtol=1e-6, atol=1e-6)
    ours, theirs = (output.pseudo_labels[1].numpy() for output in found)
    np.testing.assert_array_equal(ours, theirs)
    assert 0 < ours.mean() < 1


def test_simmatch_without_instances_is_fixmatch_da_masked_by_its_target():
    x = np.random.RandomState(0).normal(size=(2, 12, 3)) * 3
    weak, strong = (tf.constant(part, tf.float32) for part in x)
    model = model_of(SimMatch, alpha=1.0, w_in=0.0, warmup_kimg=0.0)
    z = tf.constant(padded(np.ones((12, 2))))
    model.forward_together = lambda views, step, outputs: ((weak[:2], z[:2]), (weak, z), (strong, z))
    views = {"label": tf.constant([0, 1]), "labeled_index": tf.constant([0, 1])}
    loss, scalars, *_ = model.compute_losses(views, step_of(model))
    other = model_of(FixMatchDA)
    step = step_of(other)
    q = softmax(x[0])
    step.predictions = tf.constant(np.tile(q.mean(0), (128, 1)), tf.float32)
    a = other.aligned(tf.constant(q, tf.float32), step.predictions)
    mask = np.max(a, -1) >= .95
    close(scalars["losses/xeu"], np.mean(losses.soft_cross_entropy(strong, a) * mask), rtol=1e-5, atol=1e-6)
    close(loss, scalars["losses/xe"] + scalars["losses/xeu"], rtol=1e-6, atol=1e-6)


# Gradients, statistics, compilation, precision.

BOTH_VIEWS = (AlphaMatch,)  # learn from the weak view as well


@pytest.mark.parametrize("method", [method for method in LATER if method is not C2S2L])
def test_gradients_stop_at_the_weak_views(method):
    model = make(method, PlainEmbedding)
    low = {name: 0.0 for name in ("confidence", "warmup_kimg") if hasattr(model.options, name)}
    model.options = dataclasses.replace(model.options, **low)
    views = views_of(model, 0)
    strong = model.views_per_image[1]
    sizes = [BATCH, 2 * BATCH, 2 * BATCH * strong]
    x = tf.Variable(np.random.RandomState(1).normal(size=(sum(sizes), CLASSES)), dtype=tf.float32)
    z = tf.Variable(np.random.RandomState(2).normal(size=(sum(sizes), 128)), dtype=tf.float32)

    def given(views, step, outputs=None):
        parts = [tf.split(part, sizes) for part in (x, tf.math.l2_normalize(z[:, :self_dimension(model)], -1))]
        for part in parts:
            part[1] = tf.tile(part[1], [strong, 1])
        return parts[0] if outputs is None else list(zip(*parts, strict=True))

    model.forward_together = given
    step = step_of(model, 10 * BATCH, **({"total": 30.0, "count": 1.0} if method is Dash else {}))
    with tf.GradientTape(persistent=True) as tape:
        loss = model.compute_losses(views, step).loss
    largest = [float(tf.reduce_max(tf.abs(part))) for part in tf.split(tape.gradient(loss, x), sizes)]
    assert largest[0] > 0 and largest[2] > 0 and (largest[1] > 0) == (method in BOTH_VIEWS)
    embedding = tape.gradient(loss, z)
    used = [0.0] * 3 if embedding is None else [float(tf.reduce_max(tf.abs(part)))
                                                for part in tf.split(tf.convert_to_tensor(embedding), sizes)]
    wanted = {CoMatch: [False, False, True], SimMatch: [False, False, True], ReRankMatch: [True, False, True]}
    assert [value > 0 for value in used] == wanted.get(method, [False] * 3)


def self_dimension(model):
    return getattr(model.options, "low_dim", 128)


def test_c2s2l_s_weak_views_get_no_gradient():
    model = make(C2S2L, PlainEmbedding)
    views = views_of(model, 0)
    views = views | {name: tf.Variable(views[name]) for name in ("weak", "strong")}
    with tf.GradientTape() as tape:
        loss = model.compute_losses(views, step_of(model)).loss
    weak, strong = tape.gradient(loss, [views["weak"], views["strong"]])
    assert weak is None and float(tf.reduce_max(tf.abs(strong))) > 0


@pytest.mark.parametrize("method", LATER)
def test_a_joint_pass_moves_the_statistics_once(method):
    model = make(method, lambda: networks.build("resnet", num_classes=CLASSES, image_shape=SHAPE, filters=4, repeat=1,
                                              scales=1, bn_momentum=.5, seed=1))
    views = views_of(model, 0)
    kinds = ("labeled", "strong") if method is C2S2L else ("labeled", "weak", "strong")
    weights = [tf.convert_to_tensor(v) for v in model.network.trainable_variables]
    before = [tf.convert_to_tensor(v) for v in model.network.non_trainable_variables]
    _, wanted = model.network.stateless_call(weights, before, np.concatenate([views[kind] for kind in kinds]),
                                             training=True)
    step = step_of(model)
    model.compute_losses(views, step)
    for found, moved, old in zip(step.new_statistics, wanted, before, strict=True):
        close(found, moved, rtol=1e-5, atol=1e-7)
        assert np.abs(found - old).max() > 1e-5


def test_methods_that_communicate_say_so():
    for name, module in cssl.methods().items():
        source = (ROOT / "cssl" / f"{module}.py").read_text(encoding="utf-8")
        talks = any(call in source for call in ("step.gather(", "step.mean(", "step.exchange("))
        assert cssl.method(name).communicates == talks, name


def test_jit_is_refused_where_replicas_communicate():
    with pytest.raises(UserError, match="--jit cannot compile FreeMatch's communication between 2 replicas"):
        distribute.check_jit(ScaleOptions(jit=True), 2, FreeMatch)
    distribute.check_jit(ScaleOptions(jit=True), 1, FreeMatch)
    distribute.check_jit(ScaleOptions(jit=True), 2, C2S2L)
    distribute.check_jit(ScaleOptions(), 2, FreeMatch)


# Helpers of tables and queues, options, presets.

def test_last_occurrence():
    keys = tf.constant([5, 3, 5, 7, 3])
    np.testing.assert_array_equal(banks.last_occurrence(keys), [2, 4, 2, 3, 4])
    counts = tf.constant([True, True, False, False, False])
    np.testing.assert_array_equal(banks.last_occurrence(keys, counts), [0, 1, 0, -1, 1])


def test_push_and_running_mean():
    np.testing.assert_array_equal(banks.push(tf.range(5), tf.constant([8, 9])), [2, 3, 4, 8, 9])
    close(banks.running_mean(tf.zeros(2), tf.constant([.3, .7]), .9), [.3, .7])
    close(banks.running_mean(tf.constant([0., 1]), tf.constant([.5, .5]), .9), [.05, .95])


def test_missing_set_sizes_are_named():
    for method, kind in ((FlexMatch, "unlabelled"), (SimMatch, "labelled")):
        with pytest.raises(ValueError, match=f"per {kind} image: give set_sizes"):
            model_of(method, sizes=(0, 0))


DEFAULTS = {
    FlexMatch: dict(confidence=.95, thresh_warmup=True), FreeMatch: dict(momentum=.999, w_fair=.01, tau_max=1.0),
    SoftMatch: dict(momentum=.999, n_sigma=2), AdaMatch: dict(confidence=.95, momentum=.999, form="usb"),
    Dash: dict(C=1.0001, gamma=1.27, rho_min=.05, T=.5, warmup_kimg=128, decay_kimg=640),
    SimMatch: dict(confidence=.95, temperature=.1, alpha=.9, w_in=1, bank_momentum=.7, warmup_kimg=64),
    CoMatch: dict(confidence=.95, alpha=.9, temperature=.2, contrast_th=.8, queue_batch=5, low_dim=64, wc=1),
    AlphaMatch: dict(alpha=1.5, beta=.5, K=1, align=False, target="normalized"),
    ReFixMatch: dict(confidence=.95, T=.5, target="probabilities"),
    CRMatch: dict(confidence=.95, w_distance=1, w_rot=1),
    ReRankMatch: dict(confidence=.95, w_rank=1, margin=.5, rank_on="embedding"),
    C2S2L: dict(calibration=.25, score="diff", gamma=.1, refresh=10, normalize="all")}


@pytest.mark.parametrize("method", DEFAULTS)
def test_defaults(method):
    options = dataclasses.asdict(method.Options())
    common = dict(batch=64, uratio=7, lr=.03, wd=.0005, ema=.999, wu=1)
    assert {name: options[name] for name in DEFAULTS[method] | common} == DEFAULTS[method] | common
    assert method.views_per_image == (1, 2) if method is CoMatch else options["K"] == 1


def test_presets():
    def preset(method, dataset):
        return RunConfig.of(method, dataset=dataset).values()

    assert preset(C2S2L, "cifar10.1@250-1")["augment"] == "d.d.rac"
    assert preset(AlphaMatch, "cifar100.1@400-1")["align"] and not preset(AlphaMatch, "cifar10.1@40-1")["align"]
    assert preset(FreeMatch, "svhn.1@40-1")["tau_max"] == preset(FreeMatch, "svhn_noextra.1@40-1")["tau_max"] == .95
    assert preset(CoMatch, "stl10.1@1000-1")["wc"] == 5 and preset(CoMatch, "cifar10.1@40-1")["wc"] == 1
    assert "align True" in " ".join(cli.help_text(AlphaMatch).split()) and "align True" not in cli.help_text(FreeMatch)
    assert "reconstruction" in cli.help_text(ReRankMatch)
    assert set(LATER) <= {cssl.method(name) for name in cssl.methods()}
    assert preset(Dash, "digits.1@40-1")["warmup_kimg"] == 4


def test_heads_have_seeded_weights_that_decay():
    kernels = []
    for seed in (0, 0, 1):
        model = make(CoMatch, PlainEmbedding, seed=seed)
        head = model.network.heads["z"]
        kernels.append(head.final.kernel.numpy())
        names = [v.name for v in head.trainable_variables]
        assert sorted(names) == ["bias", "bias", "kernel", "kernel"] and len(model.update.groups["all"].decayed) == 4
    np.testing.assert_array_equal(kernels[0], kernels[1])
    assert np.abs(kernels[0] - kernels[2]).max() > .01
    assert networks.Projection(3).units == 3
