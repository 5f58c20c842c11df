"""Features: made once, by the image alone, whatever stops it; heads of all methods on them; embeddings of others."""
import dataclasses
import itertools
import json
import time
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Program, strategy_of

import cssl
from cssl import CSSL, FixMatch, RunConfig, methods
from libml import features
from libml.augment import Copies, to_float
from libml.augment.copies import STRONG_DROPPED, STRONG_NOISE, WEAK_NOISE
from libml.data import cache, from_arrays, sources
from libml.errors import UserError
from libml.experiment import build, facts_of, load
from libml.results import baseline

TINY = dict(dataset="digits.1@40-60", features="pixels", augment="d.d.rac", feature_views="2,4", train_steps=6,
            report_kimg=0.2, batch=32)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder whose features of the digits are made once."""
    return tmp_path_factory.mktemp("features")


def config_of(place, method=CSSL, **settings):
    return RunConfig.of(method, **{**TINY, "data_dir": str(place), "train_dir": str(place / "runs"), **settings})


@pytest.fixture(autouse=True)
def few_strengths(monkeypatch):
    """Of logistic regression, beside which heads are trained: trying all takes longer than training them."""
    monkeypatch.setattr(baseline, "STRENGTHS", baseline.STRENGTHS[2:4])


def plain_of(place, **settings):
    """Without policies, for tests of where features go: their graph takes most of the time."""
    return config_of(place, augment="d.d.x", **settings)


def some_images(count: int, seed: int = 0, side: int = 32):
    rng = np.random.RandomState(seed)
    return from_arrays(rng.randint(0, 256, (count, side, side, 3)).astype(np.uint8), np.arange(count) % 2,
                       rng.randint(0, 256, (6, side, side, 3)).astype(np.uint8), np.arange(6) % 2, valid=0)


# What is stored.

def test_pixels_are_averaged_and_projected(place):
    """float16 keeps 11 bits: 1e-3 of numbers about 1."""
    data, digits = load(config_of(place)), sources.digits()
    assert data.images.shape == (1437, 7, 1, 256) and data.images.dtype == np.float16 and data.copies == (2, 4)
    numbers = 16 * 16 * 3
    directions = np.random.RandomState(0).normal(size=(numbers, 256)) / np.sqrt(numbers)
    expected = (digits.images.reshape(-1, numbers) / 127.5 - 1) @ directions
    np.testing.assert_allclose(data.plain[:, 0, 0], expected, atol=2e-3)
    large = some_images(3, side=70)
    made = features.Embedder.of(config_of(place), (70, 70, 3))(to_float(tf.constant(large.images)))[:, 0, 0]
    pooled = (large.images[:, :68, :68] / 127.5 - 1).reshape(3, 17, 4, 17, 4, 3).mean((2, 4))
    resized = tf.image.resize(pooled, (16, 16)).numpy().reshape(3, -1)
    np.testing.assert_allclose(made, resized @ directions, atol=2e-3)


def test_networks_of_keras_give_what_they_give_by_themselves(place):
    """Pooled, of the images at the size of the network; half a step of float16 and the order of sums apart."""
    settings = dict(features="keras:MobileNetV2,alpha=0.35", weights="none", image_size=64, feature_views="1,1")
    images = some_images(5)
    data = features.embed(config_of(place, **settings), images)
    body = features.Embedder.of(config_of(place, **settings), (32, 32, 3)).network.body
    pixels = tf.image.resize(tf.cast(images.images, tf.float32), (64, 64))
    expected = body(keras.applications.mobilenet_v2.preprocess_input(pixels)).numpy().mean((1, 2))
    np.testing.assert_allclose(data.plain[:, 0, 0], expected, rtol=2e-3, atol=2e-3)
    assert data.embedding.image_shape == (32, 32, 3) and data.image_shape == (1, 1, 1280)


def test_views_are_the_augmenters_own_and_follow_from_the_image_alone(place):
    """One order of the images, or another: the same features, up to the order of sums in a batch."""
    images = some_images(30)
    turned = dataclasses.replace(images, images=images.images[::-1].copy())
    first, second = (np.asarray(features.embed(config_of(place), data).images) for data in (images, turned))
    np.testing.assert_allclose(first, second[::-1], atol=2e-3)
    differences = np.abs(first[:, 1:].astype(np.float32) - first[:, :1]).max((2, 3))
    assert (differences[:, :2] > 0.01).mean() > 0.9 and (differences[:, 2:] > 0.01).mean() > 0.9  # some are identities
    embedder = features.Embedder.of(config_of(place), (32, 32, 3))
    augmenter = images.augmenter("d.d.x")
    choices = list(itertools.product((True, False), range(9), range(9)))
    samples = {"flip": tf.constant([flip for flip, *_ in choices]), "offset": tf.constant([o for _, *o in choices])}
    every = embedder(to_float(augmenter.weak_view(tf.constant(images.images[:1].repeat(len(choices), 0)), samples)))
    for view in (1, 2):
        assert np.abs(first[0, view] - every.numpy()).max((1, 2, 3)).min() < 2e-3


def counted(monkeypatch) -> list[int]:
    """The images that are embedded from here on, batch by batch."""
    batches, passes = [], features.passes

    def count(*arguments):
        for rows, vectors in passes(*arguments):
            yield rows, vectors
            batches.append(len(rows))

    monkeypatch.setattr(features, "passes", count)
    return batches


def test_a_killed_embedding_goes_on_where_it_was(place, tmp_path, monkeypatch):
    images, config = some_images(90), plain_of(tmp_path)
    whole = np.asarray(features.embed(plain_of(place), images).images)

    class Killed(BaseException):
        pass

    batches = counted(monkeypatch)
    monkeypatch.setattr(features, "FLUSH_SECONDS", 0.0)
    passes = features.passes

    def dies(*arguments):
        for number, made in enumerate(passes(*arguments)):
            if number == 3:
                raise Killed
            yield made

    with monkeypatch.context() as context:
        context.setattr(features, "passes", dies)
        with pytest.raises(Killed):
            features.embed(config, images)
    before = sum(batches)
    data = features.embed(config, images)
    np.testing.assert_array_equal(data.images, whole)
    assert 0 < before < 90 and sum(batches) == 90 + 6  # each image of training and test once
    batches.clear()
    features.embed(config, images)
    assert not batches and not list(tmp_path.rglob("*begun*"))


def test_what_is_half_done_is_believed_no_further_than_it_goes(place, tmp_path):
    """Rows that are said to be done, but are lost or no numbers, are made again."""
    images, config = some_images(90), plain_of(tmp_path)
    whole = features.embed(plain_of(place), images)
    with pytest.raises(ZeroDivisionError), pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache.Writer, "finish", lambda self: 1 / 0)
        features.embed(config, images)
    (file,) = tmp_path.rglob("images.npy")
    stored = np.lib.format.open_memmap(file, "r+")
    stored[7] = np.nan
    (file.parent / "test_images.npy").unlink()
    data = features.embed(config, images)
    np.testing.assert_allclose(data.images, whole.images, atol=2e-3)
    np.testing.assert_allclose(data.test_images, whole.test_images, atol=2e-3)


@pytest.mark.slow
def test_a_program_that_is_killed_goes_on(place, tmp_path):
    """SIGKILL while images are embedded: what was done stays done, and the features are those of no kill."""
    def start():
        return Program(["-c", "from cssl import CSSL, cli; from libml import features; features.FLUSH_SECONDS = 0.0; "
                        "cli.main(CSSL)", *(f"--{name}={value}" for name, value in {
                            **TINY, "train_steps": 1, "data_dir": tmp_path, "train_dir": tmp_path / "runs"}.items())],
                       tmp_path)

    killed = start()
    while not (found := list(tmp_path.rglob(".*-begun/*/done.npy"))) or not np.load(found[0]).any():
        assert killed.poll() is None, killed.error
        time.sleep(0.01)
    killed.kill()
    before = np.load(found[0])
    assert 0 < before.sum() < len(before)
    again = start()
    assert again.wait() == 0, again.error
    assert f"embedding training images: {len(before)} of {len(before)}" in again.output
    found, whole = np.load(next(tmp_path.rglob("images.npy"))), load(config_of(place)).images
    np.testing.assert_allclose(found.astype(np.float32), whole, atol=2e-3)  # batches of other images
    assert not list(tmp_path.rglob("*begun*"))


def test_new_images_are_embedded_alone(tmp_path, monkeypatch):
    batches, images = counted(monkeypatch), some_images(40)
    first = features.embed(plain_of(tmp_path), images)
    batches.clear()
    more = dataclasses.replace(images, images=np.concatenate([some_images(3, seed=1).images, images.images]))
    second = features.embed(plain_of(tmp_path), more)
    assert sum(batches) == 3
    np.testing.assert_array_equal(second.images[3:], first.images)


def test_damaged_features_of_an_earlier_state_are_not_taken_over(place, tmp_path):
    images = some_images(40)
    features.embed(plain_of(tmp_path), images)
    (file,) = tmp_path.rglob("images.npy")
    content = bytearray(file.read_bytes())
    content[-5000:] = bytes(5000)
    file.write_bytes(content)
    more = dataclasses.replace(images, images=np.concatenate([some_images(3, seed=1).images, images.images]))
    found, expected = (features.embed(plain_of(folder), more) for folder in (tmp_path, place))
    np.testing.assert_allclose(found.images, expected.images, atol=2e-3)


def test_several_devices_share_the_work(place):
    """Of two and four images at a time: the order of sums differs."""
    images = some_images(50)
    one, two = (np.asarray(features.embed(plain_of(place, feature_views=views), images, strategy).images)
                for views, strategy in (("1,3", None), ("1,2", strategy_of(2))))
    np.testing.assert_allclose(two, one[:, :4], atol=2e-3)


def test_a_cache_that_was_cut_short_is_named(tmp_path):
    features.embed(plain_of(tmp_path), some_images(20))
    (file,) = tmp_path.rglob("images.npy")
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(UserError, match="images.npy has changed since it was written.*Delete that folder"):
        features.embed(plain_of(tmp_path), some_images(20))


def test_a_full_disk_is_told_before_anything_is_computed(tmp_path, monkeypatch, capsys):
    batches = counted(monkeypatch)
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(UserError, match="No space left on device.*make room"):
        features.embed(plain_of(tmp_path), some_images(20))
    assert not batches and "256 numbers of each view, 0 MB" in capsys.readouterr().out


def test_two_processes_do_not_make_the_same(tmp_path):
    """The second waits, and finds the first one's."""
    place, made = tmp_path / "c", []

    def build(writer):
        made.append(1)
        writer.add("x", np.arange(3))

    with cache.begun(place) as inside:  # as another process that is about to end
        assert inside.is_dir()
    for _ in range(2):
        with cache.opened(place, build, resumes=True) as (arrays, _):
            assert list(arrays["x"]) == [0, 1, 2]
    assert made == [1]


# Views.

def drawn(counts, spec="d.d.rac", n=4000):
    """Views of features that say which copy they are."""
    numbers = np.arange(1 + sum(counts), dtype=np.float16)
    stored = np.broadcast_to(numbers[None, :, None, None], (n, 1 + sum(counts), 1, 8))
    statistics = np.full(8, 5, np.float32), np.full(8, 2, np.float32)
    copies = Copies(spec, image_shape=(1, 1, 8), counts=counts, statistics=statistics)
    seed = tf.constant([1, 2], tf.int64)
    return [getattr(copies, kind)(tf.constant(stored), seed).numpy() for kind in ("labeled", "weak", "strong")]


def test_each_draw_takes_one_of_the_copies():
    """Counts of 4,000 draws: within five standard deviations."""
    for kind, views in zip(("labeled", "weak", "strong"), drawn((2, 4)), strict=True):
        assert views.shape == (4000, 1, 1, 8) and (views == views[..., :1]).all()
        found = np.bincount(views[:, 0, 0, 0].astype(int), minlength=7)
        chosen = slice(3, 7) if kind == "strong" else slice(1, 3)
        assert found[chosen].sum() == 4000
        share = 1 / (chosen.stop - chosen.start)
        assert (abs(found[chosen] - 4000 * share) < 5 * np.sqrt(4000 * share * (1 - share))).all()
    labeled, weak, _ = drawn((2, 4), "x.x.rac")
    assert (labeled == 0).all() and (weak == 0).all()
    assert (drawn((0, 2))[1] == 0).all()  # no weak copies: the plain view


def test_views_without_copies_are_noise_of_stated_strength():
    """32,000 numbers: a standard deviation within 3 %, a share within 2 points."""
    labeled, weak, strong = (view.ravel() for view in drawn((0, 0), "d.d.x"))
    for view in (labeled, weak):
        assert abs(view.mean()) < 0.01 and view.std() == pytest.approx(2 * WEAK_NOISE, rel=0.03)
    assert np.mean(strong == 5) == pytest.approx(STRONG_DROPPED, abs=0.02)
    assert strong[strong != 5].std() == pytest.approx(2 * STRONG_NOISE, rel=0.03)
    assert not np.array_equal(labeled, weak)


# Heads.

@pytest.mark.parametrize("name", sorted(methods()))
def test_every_method_trains_a_head(name, place):
    method = cssl.method(name)
    if method.needs_pixels:
        with pytest.raises(UserError, match="transforms images, which features are not"):
            config_of(place, method)
        return
    settings = {} if method.uses_all_labels else {"dataset": "digits.1@40-60"}
    config = config_of(place, method, batch=8, **settings)
    data = load(config)
    model = build(config, facts_of(config, data))
    before = [v.numpy() for v in model.network.trainable_variables]
    for batch in data.dataset(model).take(2):
        model.train_on_bytes(batch)
    assert model.updates.numpy() == 2
    after = [v.numpy() for v in model.network.trainable_variables]
    assert all(np.isfinite(v).all() for v in after) and any((a != b).any() for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("arch", ["linear", "mlp"])
def test_heads_drop_dimensions_in_training_alone(arch):
    from libml import networks

    x = tf.random.stateless_normal([64, 1, 1, 50], [1, 2])
    plain, without = (networks.build(arch, num_classes=3, image_shape=(1, 1, 50), seed=0, head_dropout=rate)
                      for rate in (0.5, 0.0))
    np.testing.assert_array_equal(plain(x), without(x))
    np.testing.assert_array_equal(without(x, training=True, seed=[1, 2]), without(x))
    first, again, other = (plain(x, training=True, seed=seed).numpy() for seed in ([1, 2], [1, 2], [1, 3]))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any() and (first != plain(x).numpy()).any()


def test_where_all_have_labels_nothing_is_compared_with_labels_alone(place):
    """Logistic regression would take longer than the run."""
    run = cssl.train(config_of(place, cssl.FullySupervised, baseline=True))
    assert run.finished and not (run.path / "stats/baseline.json").exists()


@pytest.mark.slow
def test_a_run_is_continued_predicts_images_and_is_exported(place, tmp_path, program):
    """From the command line; files get what their features get, as the network behind the features makes them."""
    from PIL import Image

    flags = [f"--{name}={value}" for name, value in {
        **TINY, "data_dir": place, "train_steps": 24, "save_kimg": 0.2, "seed": 3}.items()]
    halves, whole = tmp_path / "halves", tmp_path / "whole"
    program(FixMatch, *flags[:-1], f"--train_dir={halves}", "--train_steps=12", "--schedule_kimg=0.75", "--seed=3")
    done = program(FixMatch, *flags, f"--train_dir={halves}", "--schedule_kimg=0.75")
    program(FixMatch, *flags, f"--train_dir={whole}", "--schedule_kimg=0.75")
    assert "Does it help? FixMatch" in done.stdout and "labels alone" in done.stdout
    run, other = (cssl.open(next(folder.rglob("args")).parent) for folder in (halves, whole))
    assert run.model.fingerprint() == other.model.fingerprint()
    assert json.loads((run.path / "stats/baseline.json").read_text()).keys() >= {"labels_alone", "interval"}

    digits = sources.digits()
    for number, image in enumerate(digits.test_images[:20]):
        Image.fromarray(image).save(tmp_path / f"{number:02}.png")
    found = run.predict([tmp_path / f"{number:02}.png" for number in range(20)])
    stored = run.model.predict(run.data.test_images[:20].astype(np.float32))
    np.testing.assert_allclose(found.logits, stored, atol=1e-4)  # products in batches of another size
    assert run.evaluate()["accuracy"] == pytest.approx(run.reports[-1]["accuracy"])
    described = run.export(tmp_path / "export")
    assert max(described["largest_difference_of_a_probability"].values()) < 1e-3
    exported = cssl.open_export(tmp_path / "export").predict(tmp_path / "00.png")
    np.testing.assert_allclose(exported.logits[0], found.logits[0], atol=1e-3)
    assert run.predict(tmp_path / "00.png").sets(0.5)


def test_a_run_on_two_devices(place, tmp_path, program):
    flags = [f"--{name}={value}" for name, value in {**TINY, "data_dir": place, "train_dir": tmp_path}.items()]
    done = program(CSSL, *flags, "--num_devices=2", "--nobaseline")
    assert "devices: 2 in 1 process" in done.stdout and "Finished after 6 updates" in done.stdout


@pytest.mark.slow
def test_other_weights_are_not_taken_for_those_of_a_run(tmp_path):
    import shutil

    body = keras.applications.MobileNetV2(include_top=False, weights=None, input_shape=(32, 32, 3), alpha=0.35)
    body.save_weights(tmp_path / "a.weights.h5")
    settings = dict(features="keras:MobileNetV2,alpha=0.35", weights=str(tmp_path / "a.weights.h5"), image_size=32,
                    feature_views="1,1", baseline=False, batch=8, uratio=1)
    run = cssl.train(config_of(tmp_path, **settings), some_images(24))
    again = cssl.open(run.path, data=run.data)
    assert again.predict(_saved(tmp_path)).logits.shape == (1, 2)
    for v in body.weights:
        v.assign(v + 0.1)
    body.save_weights(tmp_path / "b.weights.h5")
    shutil.copy(tmp_path / "b.weights.h5", tmp_path / "a.weights.h5")
    with pytest.raises(UserError, match="are others than those that the run's features were made with"):
        cssl.open(run.path, data=run.data).predict(_saved(tmp_path))


def _saved(folder):
    from PIL import Image

    Image.fromarray(some_images(2).images[0]).save(folder / "one.png")
    return folder / "one.png"


# Embeddings from elsewhere.

def embeddings(count=80, views=(), dimensions=6, seed=0):
    rng = np.random.RandomState(seed)
    labels = np.arange(count) % 2
    return rng.normal(size=(count, *views, dimensions)) + labels.reshape(-1, *[1] * (1 + len(views))), labels


@pytest.mark.parametrize("views, counts", [((), (0, 0)), ((6,), (2, 3))])
def test_embeddings_are_trained_on_as_they_are(views, counts, tmp_path):
    x, labels = embeddings(views=views)
    labels[::3] = -1
    test, test_labels = embeddings(20, seed=1)
    data = cssl.from_features(x, labels, test, test_labels, valid=4, feature_views="2,3" if views else "")
    assert data.copies == counts
    plain = (x[:, 0] if views else x).astype(np.float16)
    order = np.argsort(labels < 0, kind="stable")
    np.testing.assert_array_equal(data.plain[:, 0, 0], plain[order])
    np.testing.assert_array_equal(data.labels, labels[order])
    run = cssl.train(RunConfig.of(CSSL, train_dir=str(tmp_path), batch=8, ema=0.5, train_steps=40), data)
    assert run.config.data.features == "own" and run.config.network.arch == "linear"
    assert run.evaluate()["accuracy"] > 70  # two clouds 2.4 standard deviations apart
    with pytest.raises(UserError, match="was trained on the embeddings of own, which images do not tell"):
        cssl.open(run.path, data=data).predict(_saved(tmp_path))


def test_a_file_of_embeddings_from_the_command_line(tmp_path, program):
    x, labels = embeddings()
    np.savez(tmp_path / "e.npz", features=x, labels=labels, test_features=x[:20], test_labels=labels[:20],
             class_names=["a", "b"])
    flags = [f"--features={tmp_path / 'e.npz'}", f"--train_dir={tmp_path / 'runs'}", "--batch=8", "--train_steps=20"]
    done = program(CSSL, "--dataset=arrays.1@10-4", *flags)
    assert "10 labelled, 76 unlabelled, 4 validation, 20 test images of 1x1x6" in done.stdout
    assert "views: the features with noise" in done.stdout
    (run,) = (cssl.open(path.parent.parent) for path in (tmp_path / "runs").rglob("args.json"))
    assert run.data.class_names == ["a", "b"]


def test_embeddings_of_a_dataset_follow_its_order(tmp_path):
    """And its splits: what is labelled is what is labelled of the images."""
    digits = sources.digits()
    np.savez(tmp_path / "e.npz", features=digits.images.reshape(len(digits.images), -1)[:, ::16] / 255,
             test_features=digits.test_images.reshape(len(digits.test_images), -1)[:, ::16] / 255, labels=digits.labels)
    data, images = (load(RunConfig.of(CSSL, dataset="digits.3@40-10", features=name))
                    for name in (str(tmp_path / "e.npz"), ""))
    np.testing.assert_array_equal(data.labeled, images.labeled)
    np.testing.assert_array_equal(data.shown(data.labeled), images.images[images.labeled])


def test_embeddings_of_named_files_follow_the_images(tmp_path):
    """In any order, those held out for the test among them, and one file that is none of the images."""
    from PIL import Image

    colours = np.random.RandomState(0).permutation(40)
    for number, colour in enumerate(colours):
        part = f"train/{'ab'[number % 2]}" if number < 30 else "unlabeled"
        (tmp_path / "my" / part).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (int(colour),) * 3).save(tmp_path / "my" / part / f"{number}.png")
    (tmp_path / "my/train/b/broken.png").write_bytes(b"no picture")
    names = [str(path.relative_to(tmp_path / "my")) for path in (tmp_path / "my").rglob("*.png")]
    shades = np.array([0 if "broken" in name else colours[int(name.split("/")[-1][:-4])] for name in names])
    views = np.stack([shades, 100 + shades], 1)[..., None] + np.zeros(3)

    def loaded(dataset=f"folder:{tmp_path}/my.1@10-4", **arrays):
        np.savez(tmp_path / "e.npz", **arrays)
        return load(RunConfig.of(CSSL, dataset=dataset, features=str(tmp_path / "e.npz"), feature_views="0,1",
                                 image_size=8, data_dir=str(tmp_path / "data")))

    data = loaded(features=views, files=names)
    train, test = data.pictures
    np.testing.assert_array_equal(data.images[:, 0, 0], train[:, 0, 0])
    np.testing.assert_array_equal(data.images[:, 1, 0], train[:, 0, 0] + 100.0)
    np.testing.assert_array_equal(data.test_images[:, 0, 0], test[:, 0, 0])
    assert len(test) > 0 and len(train) + len(test) == 40
    with pytest.raises(UserError, match=r"39 of the 40 images of .*my.1@10-4 are none of the files named .* such as "
                                        r"unlabeled/39.png: name all of them, from .*my on"):
        loaded(features=views[:1], files=["unlabeled/39.png"])
    with pytest.raises(UserError, match=r"files are <U\d+ of shape \[1\]; expected text, one name for each of the 41"):
        loaded(features=views, files=names[:1])
    with pytest.raises(UserError, match="digits.1@40-10 has no files. Leave the array out"):
        loaded("digits.1@40-10", features=views, files=names)
    with pytest.raises(UserError, match="has no array labels or test_features or test_labels"):
        loaded("arrays.1@40-10", features=views, files=names)


@pytest.mark.parametrize("change, message", [
    ({"features": np.zeros((5, 3))}, "embeddings of 5 training and 360 test images, but .* has 1437 and 360"),
    ({"features": np.zeros((1437, 4))}, r"for training have the shape \[1, 4\], for the test \[1, 3\]"),
    ({"features": np.zeros((1437, 3, 3))}, "There are 2 views .* but feature_views=2,4 are 6"),
    ({"features": np.zeros((1437, 3), int)}, "int64 of shape .*expected floats"),
    ({"test_features": np.full((360, 3), np.nan)}, "test_features have NaN.* in row 0"),
    ({"features": np.full((1437, 3), 1e6)}, "too large for float16, in row 0"),
    ({"labels": np.zeros(1437, int)}, "The labels beside the embeddings are others"),
    ({"features": np.full((1437, 3), 1e-9)}, "features are too small for float16: their mean size is 1e-09"),
    ({"features": None}, "has no array features"), (None, "cannot be read as embeddings")])
def test_files_that_do_not_fit(change, message, tmp_path):
    arrays = {"features": np.zeros((1437, 3)), "test_features": np.zeros((360, 3)), **(change or {})}
    np.savez(tmp_path / "e.npz", **{name: value for name, value in arrays.items() if value is not None})
    if change is None:
        (tmp_path / "e.npz").write_bytes(b"PK nothing")
    with pytest.raises(UserError, match=message):
        load(RunConfig.of(CSSL, dataset="digits.3@40-10", features=str(tmp_path / "e.npz")))


@pytest.mark.parametrize("change, message", [
    (dict(labels=np.array(["a"] * 80)), "labels are <U1 of shape .80.; expected one whole number for each of the 80"),
    (dict(labels=None), "labels are object of shape"), (dict(features=3.0), "features are float64 of shape"),
    (dict(features=np.ma.masked_array(np.ones((80, 3)), mask=True)), "There is a masked array"),
    (dict(labels=np.ma.masked_array(np.arange(80) % 2, mask=True)), "There is a masked array"),
    (dict(feature_views=(1, 2)), "expected the numbers of weak and strong views"),
    (dict(feature_views="junk"), "feature_views=junk: expected")])
def test_arrays_that_make_no_sense(change, message):
    x, labels = embeddings()
    arrays = {"features": x, "labels": labels, "test_features": x[:20], "test_labels": labels[:20], **change}
    with pytest.raises(UserError, match=message):
        cssl.from_features(**arrays)


def test_what_float16_would_round_away_is_told():
    vectors, labels = np.random.RandomState(0).normal(size=(12, 5)), np.arange(12) % 2
    cssl.from_features(vectors[:8] + 10, labels[:8], vectors[8:] + 10, labels[8:])
    with pytest.raises(UserError, match=r"features differ from each other by 0.9, and float16 rounds 0.9 of that"):
        cssl.from_features(vectors[:8] + 10_000, labels[:8], vectors[8:] + 10_000, labels[8:])


def test_own_views_and_networks_are_for_images(tmp_path):
    vectors, labels = np.random.RandomState(0).normal(size=(12, 5)), np.arange(12) % 2
    data = cssl.from_features(vectors[:8], labels[:8], vectors[8:], labels[8:])
    with pytest.raises(UserError, match="features=own: a network or a strong augmentation of your own is for images"):
        cssl.train(cssl.RunConfig.of(cssl.CSSL, train_steps=1, train_dir=str(tmp_path)), data, strong=lambda x, seed: x)


def test_the_row_that_is_no_number_is_the_callers():
    x, labels = embeddings()
    x[3, 2], labels[:10] = np.nan, -1
    with pytest.raises(UserError, match="features have NaN.* in row 3"):
        cssl.from_features(x, labels, x[20:40], labels[20:40])


def test_features_of_a_flag_and_of_a_program_contradict_each_other(tmp_path):
    x, labels = embeddings()
    data = cssl.from_features(x, labels, x, labels, valid=4)
    with pytest.raises(UserError, match="features=pixels: the data bring features of their own"):
        cssl.train(RunConfig.of(CSSL, features="pixels", train_dir=str(tmp_path)), data)


@pytest.mark.parametrize("flags, message", [
    ("--eval_ckpt=", "--eval_ckpt is empty"), ("--features=own", "features=own is of data that bring features along"),
    ("--features=mobilenet", "--features=mobilenet: expected keras:NAME"),
    ("--features=keras:MobileNetV9", "--features=keras:MobileNetV9: keras.applications has no classifier"),
    ("--features=pixels --arch=resnet", "--arch=resnet: features are trained on by linear or mlp"),
    ("--features=pixels --augment=d.d.d", "--augment=d.d.d: CTAugment asks the network that is trained"),
    ("--features=pixels --feature_views=3", "--feature_views=3: expected the numbers of weak and strong views"),
    ("--features=pixels --whiten", "features are always normalised"), ("--arch=linear", "expected --features"),
    ("--features=keras:MobileNetV2 --weights=/nowhere/w.h5", "There is no file of weights /nowhere/w.h5"),
    ("--features=/nowhere/e.npz", "/nowhere/e.npz cannot be read as embeddings"),
    ("--dataset=arrays.1@10-4", "expected --features")])
def test_flags_that_make_no_sense(flags, message, tmp_path, program):
    done = program(CSSL, "--dataset=digits.1@40-10", *flags.split(), f"--data_dir={tmp_path}",
                   f"--train_dir={tmp_path / 'runs'}", code=2)
    assert message in done.stderr and not (tmp_path / "runs").exists()
