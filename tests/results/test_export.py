"""Exports: plain Keras layers, the SavedModel bit by bit, Pillow's resizing in a graph, calibration, all or nothing."""
import io
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import ENVIRONMENT, ROOT
from helpers import Program, code_blocks
from PIL import Image

import cssl
from cssl import CSSL, RunConfig
from cssl.tools import export as tool
from cssl.tools import predict as predict_tool
from libml import experiment, networks
from libml.data import DataFacts, sources
from libml.errors import UserError
from libml.results import calibration, export, metrics, predict
from libml.run import Run
from libml.writing import LOCK, unfinished

# A program that has never heard of this one: it writes what each file of an export predicts.
STRANGER = """
import json, sys
import numpy as np, tensorflow as tf
folder, images = sys.argv[1], np.load(sys.argv[2])
loaded = tf.saved_model.load(folder + "/saved_model")
found = loaded.signatures["serving_default"](images=tf.constant(images))
found = {"saved_" + name: value.numpy() for name, value in found.items()}
encoded = [open(file, "rb").read() for file in sys.argv[4:]]
found["bytes_logits"] = loaded.signatures["bytes"](bytes=tf.constant(encoded))["logits"].numpy()
found["names"] = loaded.class_names.numpy()
found |= {"keras_" + name: np.asarray(value) for name, value in
          tf.keras.models.load_model(folder + "/model.keras")(images).items()}
interpreter = tf.lite.Interpreter(folder + "/model.tflite")
interpreter.resize_tensor_input(interpreter.get_input_details()[0]["index"], images.shape)
found |= {"tflite_" + name: value for name, value in interpreter.get_signature_runner()(images=images).items()}
assert not {"cssl", "libml"} & set(sys.modules)
np.savez(sys.argv[3], **{name: value.astype("S") if value.dtype == object else value for name, value in found.items()})
"""


@pytest.fixture(scope="module")
def images(shipped) -> np.ndarray:
    return np.stack([np.asarray(Image.open(file)) for file in predict.find_files(shipped.images / "test")[0]])


@pytest.fixture(scope="module")
def described(exported) -> dict:
    return json.loads((exported / "export.json").read_text())


@pytest.fixture
def copied(exported, described, monkeypatch):
    """Exports have the files of the one there is, for tests of where they go: making them takes most of the time."""
    def write(model, classifier, place, origin, calibrated, onnx):
        shutil.copytree(exported, place, dirs_exist_ok=True)
        (place / "export.json").write_text(json.dumps(described | origin | calibrated))
        return described | origin | calibrated

    monkeypatch.setattr(export, "_write", write)


@pytest.mark.parametrize("arch, options", [("resnet", {}), ("resnet", {"repeat": 2, "scales": 1}), ("cnn13", {}),
                                           ("shake", {}), ("mcdropresnet", {"dropout": 0.3})])
def test_plain_layers_compute_the_same(arch, options):
    settings = {"repeat": 1, "scales": 3} | options
    network = networks.build(arch, num_classes=5, image_shape=(15, 16, 3), filters=4, seed=1, **settings)
    rng = np.random.default_rng(0)
    for variable in network.variables:  # nothing is at its initial 0 or 1
        noise = rng.normal(size=variable.shape) * 0.2
        variable.assign(np.abs(variable + noise) + 0.1 if "variance" in variable.name else variable + noise)
    inputs = keras.Input((15, 16, 3))
    plain = keras.Model(inputs, export.plain_logits(network, inputs))
    x = rng.uniform(-1, 1, (3, 15, 16, 3)).astype(np.float32)
    expected = network(x).numpy()
    assert np.ptp(expected) > 0.1
    # Batch normalisation is x * s + (b - m * s) in Keras and (x - m) * s + b here: rounding, relative to the size.
    np.testing.assert_allclose(plain(x), expected, atol=2e-5 * np.abs(expected).max())
    assert all(type(layer).__module__.startswith("keras.") for layer in plain.layers)
    assert networks.count_weights(plain) == networks.count_weights(network)


def test_networks_of_keras_layers_and_with_heads_are_copied():
    own = keras.Sequential([keras.Input((8, 8, 3)), keras.layers.Conv2D(4, 3), keras.layers.BatchNormalization(),
                            keras.layers.GlobalMaxPooling2D(), keras.layers.Dense(3)])
    headed = networks.Heads(networks.build("resnet", num_classes=3, image_shape=(8, 8, 3), filters=4, repeat=1,
                                           scales=1, seed=0), {"rotation": 4}, seed=0)
    x = np.random.default_rng(0).uniform(-1, 1, (2, 8, 8, 3)).astype(np.float32)
    for network in (own, headed):
        inputs = keras.Input((8, 8, 3))
        plain = keras.Model(inputs, export.plain_logits(network, inputs))
        np.testing.assert_allclose(plain(x), network(x), atol=1e-5)

    class Strange(keras.Model):
        """Not made of layers that are known here."""

    with pytest.raises(UserError, match="no form of Strange in plain Keras layers"):
        export.plain_logits(Strange(), keras.Input((8, 8, 3)))


@pytest.mark.slow
def test_a_program_without_this_one_loads_it(shipped, exported, described, images, tmp_path):
    np.save(tmp_path / "images.npy", images)
    files = predict.find_files(shipped.images / "test")[0]
    subprocess.run([sys.executable, "-c", STRANGER, exported, tmp_path / "images.npy", tmp_path / "found.npz", *files],
                   check=True, cwd=tmp_path, capture_output=True, timeout=300,
                   env={**ENVIRONMENT, "PYTHONPATH": "", "TF_ENABLE_ONEDNN_OPTS": "0"})
    found = np.load(tmp_path / "found.npz")
    run = cssl.open(shipped.run)
    expected, _ = run.predict(shipped.images / "test").classifier(images, len(images))
    np.testing.assert_array_equal(found["saved_logits"], expected)  # bit by bit, in batches of one size
    np.testing.assert_array_equal(found["bytes_logits"], expected)  # PNG files of the right size
    # Other orders of the same sums; Pillow-free, as the images have the right size.
    np.testing.assert_allclose(found["keras_logits"], expected, atol=2e-5)
    np.testing.assert_allclose(found["tflite_logits"], expected, atol=2e-5)
    assert described["temperature"] != 1
    p = calibration.probabilities(expected, described["temperature"])
    for form in ("saved", "keras", "tflite"):
        np.testing.assert_allclose(found[f"{form}_probabilities"], p, atol=5e-6)
    names = json.loads((exported / "classes.json").read_text())
    assert [name.decode() for name in found["names"]] == names == run.facts.class_names
    assert [name.decode() for name in found["saved_classes"]] == [names[c] for c in expected.argmax(1)]


def test_predict_takes_an_export(shipped, exported, described, program):
    ours, theirs = (place.predict(shipped.images / "test", credal=True) for place in (cssl.open(shipped.run),
                                                                                    cssl.open_export(exported)))
    np.testing.assert_array_equal(theirs.logits, ours.logits)
    np.testing.assert_allclose(theirs.probabilities, calibration.probabilities(ours.logits, described["temperature"]),
                               atol=1e-6)
    assert set(ours.credal) == set(theirs.credal) == {"class", "alpha", "aligned"}
    for name, mine in ours.credal.items():
        np.testing.assert_allclose(mine, theirs.credal[name], atol=1e-6)  # rounding; classes are numbers
    done = program(predict_tool.main, exported, shipped.images / "test", "--coverage=0.9", "--json")
    record = json.loads(done.stdout)[0]
    threshold = np.sort(described["conformity_scores"])[math.ceil(61 * 0.9) - 1]
    names = theirs.classifier.class_names
    assert record["set"] == [names[c] for c in range(10) if 1 - float(theirs.probabilities[0, c]) <= threshold]


def test_the_temperature_is_fitted_on_validation_images(shipped, described):
    data = experiment.load(cssl.open(shipped.run).config)
    classifier = cssl.open(shipped.run).predict(shipped.images / "test").classifier
    for part, (images, labels) in {"valid": (data.images[np.sort(data.valid)], data.labels[np.sort(data.valid)]),
                                   "test": (data.test_images, data.test_labels)}.items():
        logits, _ = classifier(images)
        if part == "valid":
            assert described["temperature"] == pytest.approx(calibration.fit_temperature(logits, labels), rel=1e-9)
            assert described["calibration"].endswith("fitted on 60 validation images")
        for when, t in (("before", 1.0), ("after", described["temperature"])):
            z = logits.astype(np.float64) / t
            p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
            assert described["scores"][part][when] == pytest.approx(metrics.scores(p, labels), rel=1e-9)
    valid = described["scores"]["valid"]
    assert valid["after"]["nll"] < valid["before"]["nll"] and valid["after"]["accuracy"] == valid["before"]["accuracy"]
    assert described["scores"]["test"]["before"]["accuracy"] == pytest.approx(
        cssl.open(shipped.run).evaluate()["accuracy"])


def test_what_an_export_says_of_itself(shipped, described):
    assert described["method"] == "CSSL" and described["updates"] == 48 and described["image_shape"] == [16, 16, 3]
    assert described["run"] == str(shipped.run.resolve()) and described["commit"]
    differences = described["largest_difference_of_a_probability"]
    assert set(differences) == {"saved_model", "model.keras", "model.tflite"}
    assert all(0 <= value < 1e-5 for value in differences.values())


def test_an_export_is_replaced_whole_or_not_at_all(shipped, exported, described, program, tmp_path):
    target = tmp_path / "model"
    target.mkdir()
    for name, text in (("thesis.tex", "do not lose me"), ("export.json", '{"name": "of something else"}')):
        (target / name).write_text(text)
        assert f"is no export (it holds {name})" in program(tool.main, shipped.run, "-o", target, "--force",
                                                            code=2).stderr
        assert [path.name for path in target.iterdir()] == [name] and [path.name for path in
                                                                       tmp_path.iterdir()] == ["model"]
        (target / name).unlink()
    assert "holds an export already. --force" in program(tool.main, shipped.run, "-o", exported, code=2).stderr
    assert "is no export (it holds" in program(tool.main, shipped.run, "-o", shipped.run, "--force", code=2).stderr
    target.rmdir()
    shutil.copytree(exported, target)
    (target / "saved_model/notes.txt").write_text("do not lose me")
    assert "(it holds notes.txt)" in program(tool.main, shipped.run, "-o", target, "--force", code=2).stderr
    (target / "saved_model/notes.txt").unlink()
    kept = shipped.images.with_name("elsewhere")
    shipped.images.rename(kept)  # the export of a run whose dataset is gone is not calibrated, and says so
    try:
        (tmp_path / "link").symlink_to(target)
        done = program(tool.main, shipped.run, "-o", tmp_path / "link", "--force")
    finally:
        kept.rename(shipped.images)
    assert "temperature 1, not calibrated: " in done.stdout and str(tmp_path / "link") in done.stdout
    again = json.loads((target / "export.json").read_text())
    assert again["temperature"] == 1 and again["scores"] == {} and again["class_names"] == described["class_names"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "model"]  # nothing is left behind
    ours, theirs = (place.predict(kept.with_name("images") / "test") for place in (cssl.open(shipped.run),
                                                                                   cssl.open_export(target)))
    np.testing.assert_array_equal(theirs.probabilities, ours.probabilities)  # with temperature 1, bit by bit
    with pytest.raises(UserError, match="need 9 validation images .* there are 0"):
        theirs.sets(0.9)


@pytest.mark.parametrize("force", [False, True])
def test_what_appears_while_an_export_is_made_is_not_lost(shipped, exported, copied, program, tmp_path, monkeypatch,
                                                         force):
    target = tmp_path / "model"
    if force:
        shutil.copytree(exported, target)
    real = export._write

    def meanwhile(*arguments):
        target.mkdir(exist_ok=True)
        (target / "thesis.tex").write_text("do not lose me")
        return real(*arguments)

    monkeypatch.setattr(export, "_write", meanwhile)
    error = program(tool.main, shipped.run, "-o", target, *["--force"][:force], code=2).stderr
    assert "is no export (it holds thesis.tex): nothing is overwritten" in error
    assert (target / "thesis.tex").read_text() == "do not lose me"
    assert [path.name for path in tmp_path.iterdir()] == ["model"] and (target / "export.json").exists() is force


@pytest.mark.slow
@pytest.mark.parametrize("empty", [False, True])
def test_two_exports_into_one_folder(shipped, copied, program, tmp_path, monkeypatch, empty):
    real, target = export._write, tmp_path / "model"
    if empty:
        target.mkdir()

    def another_is_faster(*arguments):
        monkeypatch.setattr(export, "_write", real)
        cssl.open(shipped.run).export(target, temperature=np.float32(2))
        return real(*arguments)

    monkeypatch.setattr(export, "_write", another_is_faster)
    assert "holds an export already" in program(tool.main, shipped.run, "-o", target, code=2).stderr
    assert json.loads((target / "export.json").read_text())["temperature"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    if empty:
        return  # there is an export from here on, whatever was there before
    monkeypatch.setattr(export, "_write", another_is_faster)
    with pytest.raises(UserError, match="holds an export already"):  # the faster one's, who has no --force
        cssl.open(shipped.run).export(target, force=True)


@pytest.mark.slow
@pytest.mark.parametrize("instant", ["written", "aside"])
def test_a_killed_export_loses_nothing_and_is_swept(shipped, exported, copied, program, tmp_path, tmp_path_factory,
                                                    instant):
    """Killed when its files are written, and between the two renames of --force."""
    target = tmp_path / "model"
    shutil.copytree(exported, target)
    before = (target / "export.json").read_bytes()
    kill = "lambda *arguments: os.kill(os.getpid(), 9)"
    code = f"""import os, shutil, cssl
from libml.results import export
export._write = lambda *arguments: shutil.copytree({str(exported)!r}, arguments[2], dirs_exist_ok=True)
"""
    if instant == "written":
        code += f"export._move = {kill}\n"
    else:
        code += f"""real = export.check_target
export.check_target = lambda folder, force: ({kill})() if '-old-' in str(folder) else real(folder, force)
"""
    code += f"cssl.open({str(shipped.run)!r}).export({str(target)!r}, force=True)"
    process = Program(["-c", code], tmp_path_factory.mktemp("output"))
    assert process.wait() == -9, process.error
    left = [path.name for path in tmp_path.iterdir() if path.name != "model"]
    assert len(left) == (1 if instant == "written" else 2) and left[0].startswith(".model-")
    assert target.exists() is (instant == "written")
    assert "holds an export already" in program(tool.main, shipped.run, "-o", target, code=2).stderr
    assert (target / "export.json").read_bytes() == before
    program(tool.main, shipped.run, "-o", target, "--force")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_only_dead_writers_leftovers_are_swept(tmp_path):
    """A lock belongs to a handle: two writers of this process are as two processes."""
    with unfinished(tmp_path / "model") as first:
        (first / "half").write_text("of one that is being written")
        for name in ("dead", "theirs"):
            (tmp_path / f".model-unfinished-{name}").mkdir()
        (tmp_path / ".model-unfinished-dead" / LOCK).touch()
        with unfinished(tmp_path / "other") as second:
            assert {path.name for path in tmp_path.iterdir()} == {
                first.parent.name, second.parent.name, ".model-unfinished-theirs"}
            assert (first / "half").exists()
    assert [path.name for path in tmp_path.iterdir()] == [".model-unfinished-theirs"]


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_the_older_export_stays(shipped, exported, tmp_path, tmp_path_factory):
    """A process may write files of at most 100 KiB, which the SavedModel's graph is larger than."""
    target = tmp_path / "model"
    shutil.copytree(exported, target)
    before = {path: path.read_bytes() for path in target.rglob("*") if path.is_file()}
    process = Program(["-m", "cssl.tools.export", shipped.run, "-o", target, "--force"],
                      tmp_path_factory.mktemp("output"), limit=102_400)
    assert process.wait() == 2, process.error
    assert f"Cannot write {target} (" in process.error and "Traceback" not in process.error
    assert {path: path.read_bytes() for path in target.rglob("*") if path.is_file()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_run_that_trains_is_read_at_its_newest_checkpoint(shipped, copied, tmp_path, monkeypatch):
    """Training with --keep_ckpt=1 replaces the checkpoint while predict and export build the network."""
    run = tmp_path / "run"
    shutil.copytree(shipped.run, run)
    expected = cssl.open(run).predict(shipped.images / "test").logits
    real = experiment.build

    def meanwhile(*arguments):
        for file in (run / "tf").glob("model.ckpt-768.*"):
            file.rename(file.with_name(file.name.replace("768", "9999")))
        monkeypatch.setattr(experiment, "build", real)
        return real(*arguments)

    monkeypatch.setattr(experiment, "build", meanwhile)
    opened = cssl.open(run)
    np.testing.assert_array_equal(opened.predict(shipped.images / "test").logits, expected)
    assert opened.export(tmp_path / "model")["checkpoint"] == str(run / "tf/model.ckpt-9999")
    named = cssl.open(run / "tf/model.ckpt-9999.index")
    next((run / "tf").glob("*.index")).unlink()
    with pytest.raises(UserError, match="model.ckpt-9999 cannot be read"):
        named.predict(shipped.images / "test")


def test_what_fit_trained_predicts_files_and_is_exported(shipped, tmp_path):
    run = cssl.open(shipped.run)
    model, data = run.model, run.data
    weights = [v.numpy() for v in model.network.trainable_variables]
    ours = model.predict_files(shipped.images / "test", data, credal=True)
    theirs = run.predict(shipped.images / "test", credal=True)
    assert ours.classes == theirs.classes and ours.files == theirs.files
    np.testing.assert_array_equal(ours.credal["alpha"], theirs.credal["alpha"])
    described = model.export(tmp_path / "model", data)
    assert described["method"] == "CSSL" and described["calibration"].endswith("fitted on 60 validation images")
    again = cssl.open_export(tmp_path / "model").predict(shipped.images / "test")
    np.testing.assert_array_equal(again.logits, ours.logits)
    for variable, before in zip(model.network.trainable_variables, weights, strict=True):
        np.testing.assert_array_equal(variable, before)  # training may go on


def test_a_difference_is_not_written(shipped, tmp_path, monkeypatch):
    real = export.plain_model
    monkeypatch.setattr(export, "plain_model", lambda model, shape, temperature: real(model, shape, 5 * temperature))
    with pytest.raises(UserError, match="model.keras differs from the run by 0"):
        cssl.open(shipped.run).export(tmp_path / "model", temperature=1.0)
    assert not list(tmp_path.iterdir())


def test_bad_input_is_one_line(shipped, exported, described, program, tmp_path):
    def error(*arguments, main=tool.main):
        return program(main, *arguments, code=2).stderr

    new = tmp_path / "new"
    assert "No checkpoint at" in error(tmp_path, "-o", new)
    assert "argument --temperature: invalid float value: 'warm'" in error(shipped.run, "-o", new, "--temperature=warm")
    for wrong in ("0", "-1", "nan", "inf"):
        assert "expected 0.05 to 20" in error(shipped.run, "-o", new, f"--temperature={wrong}")
    assert "pip install tf2onnx" in error(shipped.run, "-o", new, "--onnx")
    assert "Cannot write" in error(shipped.run, "-o", "/proc/model")
    for name in ("[a]", "back\\slash"):
        assert "TensorFlow reads as a pattern" in error(shipped.run, "-o", tmp_path / name)
    (tmp_path / "loop").symlink_to("loop")
    assert "Cannot write" in error(shipped.run, "-o", tmp_path / "loop")
    assert not new.exists()


def test_a_damaged_export_is_one_line(shipped, exported, described, program, tmp_path):
    broken = tmp_path / "broken"

    def error(damage) -> str:
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(exported, broken)
        damage()
        line, = program(predict_tool.main, broken, shipped.images, code=2).stderr.splitlines()[-1:]
        assert line.startswith("error: ")
        return line

    def edited(**changes):
        return lambda: (broken / "export.json").write_text(json.dumps(described | changes))

    facts, model = broken / "export.json", broken / "saved_model/saved_model.pb"
    weights = broken / "saved_model/variables/variables.data-00000-of-00001"
    for text in ("", "{", "{}", "[]", "null", '"text"', "\x00\xff", json.dumps(described)[:300]):
        assert "cannot be read" in error(lambda text=text: facts.write_bytes(text.encode("latin1")))
    for scores in ([-1.0], [2.0], [float("nan")], "much", [[0.5]], None, {}, ["a"], [1e999]):
        assert "cannot be read" in error(edited(conformity_scores=scores))
    for name in ("classes.json", "saved_model/saved_model.pb", "saved_model/variables/variables.index"):
        assert "cannot be read" in error((broken / name).unlink)
    for file in (model, weights):
        assert "cannot be read" in error(lambda file=file: os.truncate(file, file.stat().st_size // 2))
        assert "cannot be read" in error(lambda file=file: file.write_bytes(b""))
    assert "cannot be read" in error(lambda: model.write_bytes(bytes(1000)))
    flipped = bytearray((exported / "saved_model/variables" / weights.name).read_bytes())
    flipped[len(flipped) // 2] ^= 255
    assert "cannot be read" in error(lambda: weights.write_bytes(flipped))
    assert "cannot be read" in error(lambda: shutil.rmtree(broken / "saved_model"))
    names = described["class_names"]
    for changes in ({"class_names": ["cat", "dog"]}, {"class_names": names[::-1]}, {"class_names": 3},
                    {"class_names": [*names[:-1], 5]}, {"image_shape": [32, 32, 3]}, {"image_shape": 3},
                    {"image_shape": [16, 16]}, {"image_shape": ["16", "16", "3"]}):
        assert "they do not match" in error(edited(**changes))
    assert "is not what its checksum says" in error(edited(conformity_scores=[0.5]))
    for text in (json.dumps(names[::-1]), "[]", "{}", "7"):
        assert "they do not match" in error(lambda text=text: (broken / "classes.json").write_text(text))


def test_a_saved_model_that_gives_what_is_none_is_one_line(shipped, exported, program, tmp_path):
    broken, model, spec = tmp_path / "broken", tf.Module(), tf.TensorSpec([None, 16, 16, 3], tf.uint8, name="images")
    model.class_names = tf.Variable(json.loads((exported / "classes.json").read_text()))

    def error(credal: dict = None, **outputs) -> str:  # constants of one image, repeated
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(exported, broken)
        shutil.rmtree(broken / "saved_model")
        signatures = {name: tf.function(lambda images, made=made: {
            key: tf.repeat(tf.constant([value]), tf.shape(images)[0], 0) for key, value in made.items()},
            input_signature=[spec]) for name, made in {"images": outputs, "credal": credal}.items() if made}
        tf.saved_model.save(model, str(broken / "saved_model"), signatures=signatures)
        return program(predict_tool.main, broken, shipped.images / "test", *["--credal"] * bool(credal), code=2).stderr

    flat, uniform = [0.0] * 10, [0.1] * 10
    for wrong, outputs in {
            "logits": {"logits": [0.0] * 3, "probabilities": uniform},
            "probabilities": {"logits": flat, "probabilities": [7.0] * 10},
            "alpha": {"logits": flat, "probabilities": uniform, "credal": {"class": 3, "alpha": 7.0}},
            "class": {"logits": flat, "probabilities": uniform, "credal": {"class": 33, "alpha": 0.5}},
            "possibility": {"logits": flat, "probabilities": uniform, "credal": {"possibility": [np.nan] * 10}},
            }.items():
        assert f"predicts NaN, or what is no {wrong}: " in error(**outputs)
    assert "other outputs than logits and probabilities" in error(p=uniform)


def test_half_precision_is_exported_in_float32(tmp_path):
    config = RunConfig.of(CSSL, dataset="digits.1@40-1", filters=4, repeat=1, scales=1, mixed_precision="float16",
                          augment="d.d.x", train_dir=str(tmp_path))
    facts = DataFacts([str(c) for c in range(10)], (16, 16, 3), (40, 1337), False)
    model = experiment.build(config, facts)
    folder = Run(tmp_path / "run")
    folder.claim(config, {}, facts.to_dict())
    tf.train.Checkpoint(**model.checkpoint_items()).write(folder.checkpoint_at(0))
    single = experiment.restore(Run(folder.path, config=config), config.replace(mixed_precision="off"))
    x = np.random.default_rng(0).uniform(-1, 1, (4, 16, 16, 3)).astype(np.float32)
    inputs = keras.Input((16, 16, 3))
    with export.averaged(single):
        expected = keras.Model(inputs, export.plain_logits(model.network, inputs))(x)  # the same weights, in float32
    np.testing.assert_allclose(single.infer(x), expected, atol=1e-5)
    assert 1e-5 < np.abs(model.infer(x) - expected).max() < 0.1  # half precision is seen, and is no other model
    assert {layer.compute_dtype for layer in single.network.blocks} == {"float32"}


@pytest.mark.slow
def test_the_document_runs_as_written(shipped, program, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, place in {"RUN": shipped.run, "photos": shipped.images / "test",
                        "photo.png": predict.find_files(shipped.images)[0][0]}.items():
        Path(name).symlink_to(place)
    blocks = code_blocks(ROOT / "docs/predict_export.md")
    mains = {"cssl-predict": predict_tool.main, "cssl-export": tool.main}
    for language, block in blocks:
        if language == "python":
            exec(compile(block, "docs/predict_export.md", "exec"), {})
        else:
            for line in block.splitlines():
                command, *arguments = shlex.split(line)
                assert program(mains[command], *arguments)
    assert Path("predictions.csv").read_text().startswith("file,class,probability\nphotos/")
    assert len(blocks) == 6
    assert {path.name for path in Path("model").iterdir()} == {
        "saved_model", "model.keras", "model.tflite", "classes.json", "export.json"}


# Resizing as Pillow does it.

def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


@pytest.fixture(scope="module")
def resize():
    spec = [tf.TensorSpec([None, None, 3], tf.uint8)]
    return {size: tf.function(lambda x, size=size: export.resize_as_pillow(x, *size), input_signature=spec)
            for size in ((16, 16), (12, 20))}


@pytest.mark.parametrize("extent", [1, 2, 5, 11, 15, 16, 17, 31, 33, 64, 100, 237])
def test_one_axis_is_pillows_bit_by_bit(resize, extent):
    wide, tall = noise(16, extent), noise(extent, 16)
    for image in (wide, tall):
        np.testing.assert_array_equal(resize[16, 16](image), sources.resize(Image.fromarray(image), 16))


@pytest.mark.parametrize("height, width", [(16, 16), (12, 20), (7, 9), (40, 30), (30, 40), (90, 17), (240, 320)])
def test_both_axes_are_two_of_pillows_passes(resize, height, width):
    image = noise(height, width)
    for (to_height, to_width), function in resize.items():
        # Columns first. Since version 13 Pillow chooses which axis comes first, so it is asked for one at a time.
        pillow = Image.fromarray(image).resize((to_width, height), Image.Resampling.BICUBIC)
        pillow = pillow.resize((to_width, to_height), Image.Resampling.BICUBIC)
        np.testing.assert_array_equal(function(image), np.asarray(pillow))


@pytest.mark.parametrize("kind", ["grey", "colour", "alpha", "palette", "16 bits", "jpeg", "grey jpeg", "fine jpeg"])
def test_files_decode_as_pillow_decodes_them(kind):
    image = Image.fromarray(noise(6, 7)).resize((16, 16), Image.Resampling.BICUBIC)
    modes = {"grey": "L", "alpha": "RGBA", "palette": "P", "grey jpeg": "L"}
    image = image.convert(modes.get(kind, "RGB"))
    if kind == "16 bits":
        image = Image.fromarray(np.random.default_rng(0).integers(0, 65536, (16, 16)).astype(np.uint16))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG" if "jpeg" in kind else "PNG", **({"quality": 98, "subsampling": 0} if "fine" in kind
                                                               else {}))
    with Image.open(io.BytesIO(buffer.getvalue())) as stored:
        expected = sources.resize(stored, 16)
    np.testing.assert_array_equal(export.decode(tf.constant(buffer.getvalue()), 16, 16), expected)


@pytest.mark.parametrize("arch", [
    "keras:MobileNetV2,alpha=0.35", "keras:VGG16",
    pytest.param("keras:DenseNet121", marks=pytest.mark.slow)])
def test_ready_networks_as_plain_layers(arch):
    """One of each kind of preprocessing: to [-1, 1]; BGR without means; by means and deviations."""
    network = networks.build(arch, num_classes=4, image_shape=(20, 20, 3), input_size=32, seed=0)
    x = np.random.default_rng(0).uniform(-1, 1, (2, 20, 20, 3)).astype(np.float32)
    inputs = keras.Input((20, 20, 3))
    plain = keras.Model(inputs, export.plain_logits(network, inputs))
    assert not any(type(layer).__module__.startswith("libml") for layer in plain.layers)
    np.testing.assert_allclose(plain(x), network(x), rtol=1e-4, atol=1e-4)  # other sums, through up to 120 layers


def test_networks_with_parts_that_only_train():
    """The student of two networks, the classifier beside decoders."""
    network = networks.build("resnet", num_classes=4, image_shape=(8, 8, 3), filters=4, repeat=1, scales=2, seed=0)
    x = np.random.default_rng(0).uniform(-1, 1, (2, 8, 8, 3)).astype(np.float32)
    for whole in (networks.TeacherAndStudent(network, network.twin(1)),
                  networks.Decoders(network, {"turn": 2}, seed=0)):
        inputs = keras.Input((8, 8, 3))
        np.testing.assert_allclose(keras.Model(inputs, export.plain_logits(whole, inputs))(x), network(x), atol=1e-5)
