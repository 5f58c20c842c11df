"""Predictions for files, without the dataset: whose they are, what is said of them, and what cannot be read."""
import csv
import dataclasses
import io
import json
import math
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from conftest import ENVIRONMENT, ROOT
from helpers import softmax
from PIL import Image

import cssl
from cssl import C2S2L, CSSL, FixMatch, RunConfig, from_arrays, train
from cssl.tools import export as export_tool
from cssl.tools import predict as tool
from libml import experiment
from libml.augment import to_float
from libml.data import DataFacts, sources
from libml.errors import UserError, printable
from libml.results import calibration
from libml.results import predict as library
from libml.run import identity


@pytest.fixture(scope="module")
def predictions(shipped):
    """Those of the run for its own test files."""
    return cssl.open(shipped.run).predict(shipped.images / "test")


def rows(text: str) -> list[dict]:
    return list(csv.DictReader(io.StringIO(text)))


def test_files_get_the_probabilities_of_the_last_report(shipped, predictions):
    stored = np.load(shipped.run / "stats/predictions.npz")  # written in training, of all test images in this order
    assert len(predictions.files) == 60 and not predictions.unreadable
    # Other batches, hence other sums in the last dense layer: the last bits may differ.
    np.testing.assert_allclose(predictions.probabilities, stored["probabilities"], atol=1e-6)
    truth = [Path(file).parent.name for file in predictions.files]
    assert [predictions.classifier.class_names[label] for label in stored["labels"]] == truth
    assert np.mean(np.array(predictions.classes) == truth) * 100 == pytest.approx(
        cssl.open(shipped.run).evaluate()["accuracy"])


def test_a_run_needs_no_images_to_predict(shipped, predictions, program):
    kept = shipped.images.with_name("elsewhere")
    shipped.images.rename(kept)
    try:
        again = cssl.open(shipped.run).predict(kept / "test")
        np.testing.assert_array_equal(again.logits, predictions.logits)
        assert "folder `train`" in program(tool.main, shipped.run, kept / "test", "--coverage=0.9", code=2).stderr
    finally:
        kept.rename(shipped.images)


def test_what_is_stored_is_enough_to_rebuild_the_model(shipped):
    stored = json.loads((shipped.run / "args/data.json").read_text())
    assert stored["class_names"][:3] == ["eight", "five", "four"] and stored["image_shape"] == [16, 16, 3]
    assert stored["set_sizes"] == [60, 240] and stored["mirror"] is True
    config = cssl.open(shipped.run).config
    data = experiment.load(config)
    pixels = np.asarray(data.images[data.unlabeled], np.float64) / 127.5 - 1
    facts = DataFacts.from_dict(stored)
    np.testing.assert_array_equal(facts.image_statistics[0], np.float32(pixels.mean((0, 1, 2))))  # through JSON
    np.testing.assert_array_equal(facts.image_statistics[1], np.float32(pixels.std((0, 1, 2))))
    assert facts.to_dict() | identity(data) | {"checksum": stored["checksum"]} == stored


def test_older_runs_load_their_dataset(shipped, predictions, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(shipped.run, run)
    (run / "args/data.json").unlink()
    with pytest.raises(UserError, match="data.json is missing"):
        cssl.open(run).predict(predictions.files)
    settings = json.loads((run / "args/args.json").read_text())
    del settings["weights"]
    (run / "args/args.json").write_text(json.dumps(settings))
    np.testing.assert_array_equal(cssl.open(run).predict(predictions.files).logits, predictions.logits)
    stored = json.loads((shipped.run / "args/data.json").read_text())
    for damaged in ({}, stored | {"image_shape": [100_000, 100_000, 3]}, stored | {"image_shape": [0, 0, 3]},
                    stored | {"image_statistics": [[1.0], [2.0]]}):
        (run / "args/data.json").write_text(json.dumps(damaged))
        with pytest.raises(UserError, match="data.json is damaged"):
            cssl.open(run).predict(predictions.files)


def test_the_tables_columns(shipped, predictions, program, tmp_path):
    folder = shipped.images / "test"
    found = rows(program(tool.main, shipped.run, folder, "--all").stdout)
    assert list(found[0])[:3] == ["file", "class", "probability"]
    assert list(found[0])[3:] == [f"p_{name}" for name in predictions.classifier.class_names]
    np.testing.assert_array_equal([[np.float32(row[f"p_{name}"]) for name in predictions.classifier.class_names]
                                   for row in found], predictions.probabilities)  # short, and yet exact
    assert [row["class"] for row in found] == predictions.classes
    program(tool.main, shipped.run, folder, "--all", f"--csv={tmp_path / 'x.csv'}")
    assert rows((tmp_path / "x.csv").read_text()) == found
    listed = json.loads(program(tool.main, shipped.run, folder, "--json", "--sort=uncertainty").stdout)
    certain = [record["probability"] for record in listed]
    assert certain == sorted(certain) and {record["file"] for record in listed} == set(predictions.files)
    assert np.float32(certain[0]) == predictions.probabilities.max(1).min()


def test_credal_sets_are_those_of_training(shipped, predictions, program):
    found = rows(program(tool.main, shipped.run, shipped.images / "test", "--credal").stdout)
    reader = tf.train.load_checkpoint(str(shipped.run / "tf"))
    name = next(name for name in reader.get_variable_to_shape_map() if name.startswith("predictions/"))
    p_model = reader.get_tensor(name).astype(np.float64).mean(0)
    assert np.abs(p_model - 0.1).max() > 0.005  # training has moved it: alignment is visible
    q = softmax(predictions.logits.astype(np.float64))
    a = q * (1e-6 + 0.1) / (1e-6 + p_model / p_model.sum())
    a /= a.sum(1, keepdims=True)
    alpha = np.clip(1 - a.max(1), 0.05, 1)  # the run's alpha_bound
    np.testing.assert_allclose([float(row["alpha"]) for row in found], alpha, atol=1e-5)  # float32
    names = predictions.classifier.class_names
    assert [row["credal_class"] for row in found] == [names[y] for y in q.argmax(1)]
    first = found[0]
    assert first["credal_set"].startswith(f"p({first['credal_class']}) >= ")
    for row, size in zip(found, alpha, strict=True):  # four decimals, rounded so that the bound holds
        assert 0 <= 1 - size - float(row["credal_set"].split(" >= ")[1]) < 1e-4 + 1e-6


def test_sets_of_possibilities_are_c2s2l_s_own(tmp_path, program):
    """As its model makes them, classes that are impossible left out; an upper bound, so rounded upwards."""
    run = train(RunConfig.of(C2S2L, dataset="digits.1@40-1", batch=4, uratio=1, filters=4, repeat=1, scales=1,
                             refresh=2, train_steps=6, train_dir=str(tmp_path / "runs")))
    files = []
    for number, image in enumerate(sources.digits().test_images[:5]):
        Image.fromarray(image).save(tmp_path / f"{number}.png")
        files.append(tmp_path / f"{number}.png")
    found = rows(program(tool.main, tmp_path / "runs", *files, "--credal").stdout)
    images = tf.constant(run.data.test_images[:5])
    sets = run.model.credal_sets(to_float(images), tf.nn.softmax(run.model.predict(images)))
    possibility = sets["possibility"].numpy()
    for row, pi in zip(found, possibility, strict=True):
        shown = dict(member.removeprefix("pi(").split(") = ") for member in row["credal_set"].split(", "))
        assert shown.keys() == {str(c) for c in np.flatnonzero(pi)} and row["credal_class"] == str(pi.argmax())
        assert all(0 <= float(value) - pi[int(c)] < 1e-4 + 1e-6 for c, value in shown.items())
        assert list(shown) == [str(c) for c in np.argsort(-pi, kind="stable") if pi[c]]


def test_methods_without_credal_sets_say_so(tmp_path, program):
    train(RunConfig.of(FixMatch, dataset="digits.1@40-1", batch=4, uratio=1, filters=4, repeat=1, scales=1,
                       augment="d.d.x", train_steps=1, train_dir=str(tmp_path / "runs")))
    Image.new("RGB", (9, 9)).save(tmp_path / "x.png")
    error = program(tool.main, tmp_path / "runs", tmp_path / "x.png", "--credal", code=2).stderr
    assert "FixMatch has no credal sets to show" in error


def test_conformal_sets_of_a_run(shipped, predictions, program):
    folder = shipped.images / "test"
    found = rows(program(tool.main, shipped.run, folder, "--coverage=0.9").stdout)
    data = experiment.load(cssl.open(shipped.run).config)
    assert not set(data.valid) & set(data.labeled)
    p = predictions.classifier(data.images[data.valid])[1].astype(np.float64)
    scores = np.sort(1 - p[np.arange(60), data.labels[data.valid]])
    threshold = scores[math.ceil(61 * 0.9) - 1]
    names = predictions.classifier.class_names
    expected = ["|".join(names[c] for c in range(10) if 1 - float(row[c]) <= threshold)
                for row in predictions.probabilities]
    assert [row["set"] for row in found] == expected
    assert len({row["set"] for row in found}) > 1
    error = program(tool.main, shipped.run, folder, "--coverage=0.99", code=2).stderr
    assert "need 99 validation images that were not trained on; there are 60" in error
    for wrong, message in {"0": "between 0 and 1", "1.5": "between 0 and 1", "much": "invalid float value"}.items():
        assert message in program(tool.main, shipped.run, folder, f"--coverage={wrong}", code=2).stderr


@pytest.mark.parametrize("n, coverage, rank", [(9, 0.9, 9), (19, 0.9, 18), (99, 0.99, 99), (10, 0.5, 6)])
def test_the_finite_sample_quantile(n, coverage, rank):
    scores = np.random.default_rng(0).permutation(n) / n
    assert calibration.conformal_threshold(scores, coverage) == (rank - 1) / n
    needed = math.ceil(coverage / (1 - coverage) - 1e-9)
    calibration.conformal_threshold(np.zeros(needed), coverage)
    assert calibration.conformal_threshold(scores, 1e-12) == 0  # no less than the smallest
    with pytest.raises(UserError, match=f"need {needed} "):
        calibration.conformal_threshold(np.zeros(needed - 1), coverage)


def test_sets_cover_as_promised():
    rng, n, draws, coverage = np.random.default_rng(1), 30, 4000, 0.8
    p = rng.dirichlet(np.full(5, 0.7), (draws, n + 1))
    labels = (rng.random((draws, n + 1, 1)) > np.cumsum(p, -1)).sum(-1)
    hits = []
    for distribution, label in zip(p, labels, strict=True):
        threshold = calibration.conformal_threshold(
            calibration.conformity_scores(distribution[:n], label[:n]), coverage)
        hits.append(calibration.prediction_sets(distribution[n:], threshold)[0, label[n]])
    # Between coverage and coverage + 1 / (n + 1) in expectation; four standard errors of 4000 draws are 0.025.
    assert coverage - 0.025 < np.mean(hits) < coverage + 1 / (n + 1) + 0.025


def test_temperature_minimises_the_likelihood():
    rng = np.random.default_rng(0)
    z = rng.normal(size=(4000, 6)) * 2
    labels = (rng.random((4000, 1)) > np.cumsum(softmax(z / 1.7), 1)).sum(1)
    found = calibration.fit_temperature(z, labels)
    assert found == pytest.approx(1.7, rel=0.05)  # its standard error is about 2 %
    grid = np.linspace(0.5, 4, 3501)

    def nll(t: float) -> float:
        return -np.log(softmax(z / t)[np.arange(4000), labels]).mean()

    losses = [nll(t) for t in grid]
    assert found == pytest.approx(grid[np.argmin(losses)], abs=0.001)  # the grid's step
    assert nll(found) <= min(losses) + 1e-12  # rounding of a mean of 4000
    assert calibration.fit_temperature(z, z.argmin(1)) == calibration.HIGHEST
    assert calibration.fit_temperature(z, z.argmax(1)) == calibration.LOWEST


def test_no_temperature_where_images_cannot_tell_it():
    z = np.random.default_rng(0).normal(size=(60, 4))
    wrong = (z.argmax(1) + 1) % 4
    assert calibration.choose_temperature(z[:49], wrong[:49]) == (
        1.0, "temperature 1: 49 validation images are too few to fit one, it takes 50 (the number behind the dash of "
        "the dataset's name)")
    assert calibration.choose_temperature(z, z.argmax(1))[0] == 1 and calibration.choose_temperature(z, wrong)[0] > 1


def test_published_splits_calibrate_on_images_that_were_not_trained_on():
    data = cssl.load("digits.1@40-100", "")
    images, labels = data.held_out()
    shared = np.intersect1d(data.valid, data.labeled)
    assert len(shared) and len(labels) == 100 - len(shared) == len(images)


def test_unreadable_files_are_listed_and_the_others_stay_in_order(shipped, predictions, program, tmp_path, monkeypatch):
    for number, file in enumerate(predictions.files[:20]):
        shutil.copy(file, tmp_path / f"{number:02d}.png")
    (tmp_path / "03.png").write_bytes(Path(predictions.files[3]).read_bytes()[:60])
    (tmp_path / "11.png").write_text("no image")
    (tmp_path / "notes.txt").write_text("not looked at")
    monkeypatch.setattr(library, "BATCH", 8)  # three batches
    done = program(tool.main, shipped.run, tmp_path, tmp_path / "00.png")
    found = rows(done.stdout)
    kept = [number for number in range(20) if number not in (3, 11)]
    assert [Path(row["file"]).name for row in found] == [f"{number:02d}.png" for number in kept]
    np.testing.assert_allclose([float(row["probability"]) for row in found],
                               predictions.probabilities.max(1)[kept], atol=1e-6)
    note, *lines, last = done.stderr.splitlines()
    assert "files that are no images (1)" in note and last == "2 of 20 files could not be read."
    assert [line.split(" (")[0] for line in lines] == [
        f"unreadable: {tmp_path / name}" for name in ("03.png", "11.png")]
    done = program(tool.main, shipped.run, tmp_path / "03.png", tmp_path / "11.png", code=2)
    assert "None of the 2 files can be read" in done.stderr
    assert "None of the 1 files" in program(tool.main, shipped.run, tmp_path / "notes.txt", code=2).stderr


def test_names_of_files_keep_their_bytes(shipped, predictions, program, tmp_path):
    odd = os.fsencode(tmp_path) + b"/caf\xe9, \"new\".png"
    shutil.copy(predictions.files[0], odd)
    program(tool.main, shipped.run, os.fsdecode(odd), f"--csv={tmp_path / 'x.csv'}")
    with open(tmp_path / "x.csv", encoding="utf-8", errors="surrogateescape") as file:
        assert [os.fsencode(row["file"]) for row in csv.DictReader(file)] == [odd]
    assert "caf" in program(tool.main, shipped.run, os.fsdecode(odd), "--json").stdout


def hostile_predictions(predictions, names: dict[str, str]) -> list[dict]:
    """Records of files whose classes have other names."""
    renamed = [names.get(name, name) for name in predictions.classifier.class_names]
    classifier = dataclasses.replace(predictions.classifier, held_out_scores=lambda: np.linspace(0, 1, 99),
                                     class_names=renamed)
    return dataclasses.replace(predictions, classifier=classifier).records(whole=True, coverage=0.9)


def test_names_of_classes_are_told_apart(predictions):
    """A set is read back by splitting at bars outside of quotes, doubled ones being quotes themselves."""
    names = {"one": "a|b", "two": 'say "a"', "three": "a", "four": "\x1b[2J\n"}
    records = hostile_predictions(predictions, names)
    expected = [record["set"] for record in records]
    found = rows(tool.to_csv(records))
    assert [next(csv.reader([row["set"].replace("\n", "<newline>")], delimiter="|"), []) for row in found] == [
        [name.replace("\n", "<newline>") for name in members] for members in expected]
    assert {"p_a|b", 'p_say "a"', "p_\x1b[2J\n"} <= set(found[0])
    shown = tool.to_csv(hostile_predictions(predictions, names), printable)
    assert "\x1b" not in shown and "p_\\x1b[2J\\n" in shown and len(shown.splitlines()) == 1 + len(found)


# Prints to a terminal, given its number, then to the pipe that it was started with: TensorFlow starts once.
TWICE = """
import os, sys
from cssl.program import exit_on_user_error
from cssl.tools import predict
terminal, pipe = int(sys.argv.pop(1)), os.dup(1)
for place in (terminal, pipe):
    os.dup2(place, 1)
    try:
        exit_on_user_error(predict.main)
    except SystemExit as end:
        assert not end.code, end.code
    sys.stdout.flush()
"""


@pytest.mark.slow
def test_a_pipe_gets_names_as_they_are_and_a_terminal_escaped_ones(exported, predictions, tmp_path):
    odd = os.fsencode(tmp_path) + b"/caf\xe9\x1b[2J.png"
    shutil.copy(predictions.files[0], odd)
    terminal, ours = pty.openpty()
    done = subprocess.run([sys.executable, "-c", TWICE, str(ours), exported, odd], cwd=ROOT, capture_output=True,
                          timeout=300, pass_fds=[ours],
                          env={**ENVIRONMENT, "TF_ENABLE_ONEDNN_OPTS": "0", "PYTHONIOENCODING": "utf-8"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].startswith(odd + b",") and len(done.stdout.splitlines()) == 2
    assert rb"/caf\udce9\x1b[2J.png," in os.read(terminal, 10_000)


def test_images_of_any_size_and_kind_are_resized_as_training_folders(shipped, tmp_path):
    rng = np.random.default_rng(0)
    colour = Image.fromarray(rng.integers(0, 256, (40, 25, 3), np.uint8))
    colour.convert("L").save(tmp_path / "grey.png")
    colour.convert("RGBA").save(tmp_path / "alpha.png")
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held upright
    colour.save(tmp_path / "turned.jpg", exif=exif)
    found = cssl.open(shipped.run).predict(tmp_path)
    assert [Path(file).name for file in found.files] == ["alpha.png", "grey.png", "turned.jpg"]
    images = np.stack([sources.read_image(file, 16, 16) for file in found.files])
    np.testing.assert_array_equal(found.logits, found.classifier(images)[0])
    wide = library.read_image(tmp_path / "alpha.png", 10, 20)
    np.testing.assert_array_equal(wide, np.asarray(colour.resize((20, 10), Image.Resampling.BICUBIC)))


def test_batches_of_one_shape():
    assert [library.batch_size(n) for n in (1, 8, 9, 200, 257, 100_000)] == [8, 8, 16, 256, 256, 256]
    shapes = []

    def function(images):
        shapes.append(tuple(images.shape))
        first = tf.cast(images[:, 0, 0], tf.float32) / 255
        return {"logits": first[:, :2], "probabilities": first[:, 1:]}

    images = np.random.default_rng(0).integers(0, 256, (600, 2, 2, 3), np.uint8)
    logits, probabilities = library.Classifier("", ["a", "b"], (2, 2, 3), function, list)(images)
    assert shapes == [(256, 2, 2, 3)] * 3
    np.testing.assert_array_equal(logits, images[:, 0, 0, :2] / np.float32(255))
    np.testing.assert_array_equal(probabilities, images[:, 0, 0, 1:] / np.float32(255))


def test_arrays_must_be_images_of_the_models_size(predictions):
    for images in (np.zeros((2, 16, 16, 3), np.float32), np.zeros((2, 32, 32, 3), np.uint8), np.zeros(5)):
        with pytest.raises(UserError, match=r"expected uint8 of shape \['N', 16, 16, 3\]"):
            predictions.classifier(images)


def test_bad_input_is_one_line(shipped, program, tmp_path):
    def error(*arguments):
        return program(tool.main, *arguments, code=2).stderr

    (tmp_path / "empty").mkdir()
    assert "holds no image (.bmp" in error(shipped.run, tmp_path / "empty")
    assert f"There is no {tmp_path / 'none'}" in error(shipped.run, tmp_path / "none")
    assert "No checkpoint at" in error(tmp_path / "empty", shipped.images)
    run = tmp_path / "run"
    shutil.copytree(shipped.run / "args", run / "args")
    assert "No checkpoint at" in error(run, shipped.images)
    shutil.copytree(shipped.run / "tf", tmp_path / "loose/tf")
    assert "is not in a run folder" in error(tmp_path / "loose/tf", shipped.images)
    assert "An empty name was given" in error(shipped.run, "")
    assert "Cannot write /proc/x.csv" in error(shipped.run, tmp_path / "none", "--csv=/proc/x.csv")  # said first
    assert "is a folder" in error(shipped.run, tmp_path / "none", f"--csv={tmp_path}")


@pytest.mark.parametrize("call, message", [
    (lambda run: cssl.open(run.path, data="digits"), "data is str; expected images as"),
    (lambda run: run.evaluate("digits"), "data is str; expected images as"),
    (lambda run: run.predict(None), "A file is NoneType; expected the names"),
    (lambda run: run.predict(b"a.png"), "A file is int; expected the names"),
    (lambda run: run.predict([]).sets("x"), "coverage=x: expected a number between 0 and 1"),
    (lambda run: run.export("no", temperature="1"), "temperature='1': expected 0.05 to 20")])
def test_arguments_that_make_no_sense(shipped, call, message):
    with pytest.raises(UserError, match=message) as caught:
        call(cssl.open(shipped.run))
    assert "\n" not in str(caught.value)


def test_what_is_no_file_is_named(shipped, predictions, program, tmp_path):
    folder = tmp_path / "mixed"
    folder.mkdir()
    odd = folder / "a\rb.png"
    shutil.copy(predictions.files[0], odd)
    shutil.copy(odd, folder / ".c.png")
    os.mkfifo(folder / "pipe.png")
    (folder / "gone.png").symlink_to(tmp_path / "nowhere")
    assert "pipe.png is a pipe or a device" in program(tool.main, shipped.run, folder / "pipe.png", code=2).stderr
    done = program(tool.main, shipped.run, folder)
    assert [row["file"] for row in csv.DictReader(io.StringIO(done.stdout, newline=""))] == [str(odd)]
    (note,) = done.stderr.splitlines()
    for kind in ("hidden files or folders", "files that are no images", "broken links"):
        assert f"{kind} (1)" in note
    odd.unlink()
    assert "hidden files or folders (1)" in program(tool.main, shipped.run, folder, code=2).stderr


def test_a_diverged_model_predicts_nothing(shipped, program, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(shipped.run, run)
    for factor in (np.nan, 1e30):
        opened = cssl.open(shipped.run)
        model = opened.model
        for weight in model.ema_weights:
            weight.assign(factor * weight)
        tf.train.Checkpoint(**model.checkpoint_items()).write(cssl.open(run).checkpoint)
        for main, flags in ((tool.main, ["--credal"]), (tool.main, ["--json"]), (tool.main, ["--sort=uncertainty"])):
            error = program(main, run, shipped.images / "test", *flags, code=2).stderr
            assert "predicts NaN, or what is no logits: its training diverged" in error
        assert "diverged" in program(export_tool.main, run, "-o", tmp_path / "model", code=2).stderr
        assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_classes_of_one_name(predictions):
    classifier = dataclasses.replace(predictions.classifier, class_names=["cat"] * 10)
    found = dataclasses.replace(predictions, classifier=classifier)
    assert {record["class"] for record in found.records()} == {"cat"}
    with pytest.raises(UserError, match="Two classes have one name"):
        found.records(whole=True)


def test_other_classes_and_sizes_do_not_match(shipped):
    digits = sources.digits()
    part = digits.images[:100], digits.labels[:100], digits.test_images[:20], digits.test_labels[:20]
    names = [f"class {c}" for c in range(10)]
    with pytest.raises(UserError, match="do not match those of the model: class 0, class 1, .* instead of eight, five"):
        cssl.open(shipped.run, data=from_arrays(*part, class_names=names)).evaluate()
    assert cssl.open(shipped.run, data=from_arrays(*part)).evaluate()["accuracy"] >= 0  # unnamed
    larger = [np.repeat(np.repeat(x, 2, 1), 2, 2) if x.ndim == 4 else x for x in part]
    with pytest.raises(UserError, match=r"images of \(32, 32, 3\), the model was trained on images of \(16, 16, 3\)"):
        cssl.open(shipped.run, data=from_arrays(*larger)).evaluate()
    two = [part[0], part[1] % 2, part[2], part[3] % 2]
    with pytest.raises(UserError, match="do not match"):
        cssl.open(shipped.run, data=from_arrays(*two)).evaluate()


def test_numbers_as_names_have_an_order():
    def facts(*names):
        return DataFacts(list(names), (8, 8, 3), (1, 1), False)

    data = from_arrays(np.zeros((3, 8, 8), np.uint8), np.arange(3), np.ones((1, 8, 8), np.uint8), np.zeros(1, int),
                       num_labels=3, valid=0, class_names=["2", "0", "1"])
    with pytest.raises(UserError, match=r"do not match those of the model: 2, 0, 1 instead of 0, 1, 2"):
        experiment.check_fits(facts("0", "1", "2"), data)
    experiment.check_fits(facts("2", "0", "1"), data)


def test_sets_are_calibrated_with_the_runs_own_split(shipped):
    """Others hold out images that it may have trained on."""
    name, _, split = cssl.open(shipped.run).config.data.dataset.rpartition(".")
    other = cssl.open(shipped.run, data=cssl.load(f"{name}.{int(split[0]) + 1}{split[1:]}", shipped.data_dir, 16))
    assert other.evaluate()["accuracy"] >= 0
    found = other.predict(shipped.images / "test")
    with pytest.raises(UserError, match="divided otherwise into labelled, .* Open it with those it was trained on"):
        found.sets(0.5)


def test_finished_runs_keep_what_describes_them(shipped):
    before = (shipped.run / "args/data.json").read_bytes()
    config = cssl.open(shipped.run).config
    assert cssl.train(config).finished and (shipped.run / "args/data.json").read_bytes() == before
    assert config.method is CSSL
