"""Runs from Python: the same folder and bits as the command line, hooks, and what a user adds from outside."""
import json
import os
import re
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import ENVIRONMENT, ROOT
from helpers import invoke

import cssl
from cssl import CSSL, FixMatch, RunConfig, SSLModel, cli, from_arrays, option, train
from libml import experiment
from libml.data import sources
from libml.data.names import DATASETS, Dataset
from libml.errors import UserError
from libml.learn import losses
from libml.learn.step import LossOutput, UnlabeledLoss
from libml.results.metrics import METRICS, Metric

GOLDEN = Path(__file__).parents[1] / "golden"
TINY = dict(dataset="digits.1@40-1", batch=8, uratio=2, filters=8, scales=1, augment="d.d.x", report_kimg=0.0625,
            save_kimg=0.0625)


def variables(run) -> dict[str, np.ndarray]:
    """Every variable of the newest checkpoint."""
    reader = tf.train.load_checkpoint(str(run / "tf"))
    return {key: reader.get_tensor(key) for key in reader.get_variable_to_shape_map()
            if "save_counter" not in key and key != "_CHECKPOINTABLE_OBJECT_GRAPH"}


def reports(run) -> list[dict]:
    return [{key: value for key, value in json.loads(line).items() if key != "images_per_s"}
            for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_python_and_the_command_line_make_the_same_run(tmp_path):
    result = train(RunConfig.of(CSSL, **TINY, train_steps=16, train_dir=str(tmp_path / "python")))
    flags = [f"--{name}={value}" for name, value in TINY.items()]
    assert cli.run(CSSL, ["cssl.py", *flags, "--train_steps=16", f"--train_dir={tmp_path / 'flags'}"]) == 0
    ours, theirs = result.path, next((tmp_path / "flags").glob("*/*/*"))
    assert ours.relative_to(tmp_path / "python") == theirs.relative_to(tmp_path / "flags")
    assert reports(ours) == reports(theirs)
    for name, value in variables(ours).items():
        np.testing.assert_array_equal(value, variables(theirs)[name], err_msg=name)
    assert "CSSL" in invoke("table", tmp_path / "python").stdout
    scores = cssl.open(ours).evaluate()
    last = result.reports[-1]
    reported = {tag: value for tag, value in scores.items() if "/class/" not in tag}
    assert {tag: last[tag] for tag in reported} == pytest.approx(reported, rel=1e-6)
    assert {"nll", "brier/raw", "nll/train_labeled"} <= set(scores)


def test_arrays_are_trained_on_and_found_by_the_tables(tmp_path):
    digits = sources.digits()
    data = from_arrays(digits.images, digits.labels, digits.test_images, digits.test_labels, num_labels=40,
                       mirror=False, name="arrays:mine")
    config = RunConfig.of(FixMatch, batch=8, uratio=2, filters=8, repeat=1, augment="d.d.x", report_kimg=0.0625,
                          train_steps=8, train_dir=str(tmp_path))
    result = train(config, data)
    assert result.path.parts[-3] == "arrays:mine.d.d.x.1@40-1"
    assert "scales2" in result.path.name  # of 16 pixels
    assert "arrays:mine, 40 labels" in invoke("table", tmp_path).stdout
    assert cssl.open(result.path, data=data).evaluate()["accuracy"] == result.reports[-1]["accuracy"]
    with pytest.raises(UserError, match="arrays of a Python program"):
        cssl.open(result.path).evaluate()
    stored = RunConfig.from_json(FixMatch, json.loads(result.args.read_text()))
    assert stored.with_data(data) == stored  # nothing falls back to a default


@pytest.mark.slow
def test_a_continued_run_keeps_its_statistics(tmp_path):
    """A version before computed others: they stay, for whitening and in data.json."""
    config = RunConfig.of(CSSL, **TINY, whiten=True, train_kimg=1.0, schedule_kimg=1.0, train_dir=str(tmp_path))
    first = train(config.replace(train_kimg=0.0625))
    file = first.facts_file
    facts = json.loads(file.read_text()) | {"image_statistics": [[0.25, 0.5, 0.75], [1.5, 1.25, 2.0]]}
    del facts["checksum"]
    file.write_text(json.dumps(facts))
    second = train(config.replace(train_kimg=0.125))
    np.testing.assert_array_equal(second.model.image_statistics, [[0.25, 0.5, 0.75], [1.5, 1.25, 2.0]])
    kept = json.loads(file.read_text())
    assert kept == kept | facts


def test_the_same_images_from_python_have_the_same_folder():
    config = RunConfig.of(CSSL, dataset="digits.1@40-1")
    assert config.with_data(cssl.load("digits.1@40-1", "")).folder() == config.folder()
    images, labels = np.zeros((20, 8, 8), np.uint8), np.arange(20) % 4
    few, other = (from_arrays(images + k, labels, images[:4], labels[:4], num_labels=4, valid=0) for k in range(2))
    assert few.name != other.name  # runs on other arrays are other runs
    with pytest.raises(UserError, match="uses all labels, but .* has 4 of them"):
        RunConfig.of(cssl.FullySupervised).with_data(few)


@pytest.mark.slow
def test_hooks_and_keras_callbacks_are_called_at_reports(tmp_path):
    seen = []

    class Recorder(keras.callbacks.Callback):
        """Stops the run at its second report."""

        def on_train_begin(self, logs=None):
            seen.append("begin")

        def on_epoch_end(self, epoch, logs=None):
            seen.append((epoch, logs["accuracy"]))
            self.model.stop_training = epoch == 1

        def on_train_end(self, logs=None):
            seen.append("end")

    config = RunConfig.of(CSSL, **TINY, train_steps=32, train_dir=str(tmp_path))
    result = train(config, hooks=[lambda trainer, report: seen.append((trainer.updates, report["step"])), Recorder()])
    accuracies = [report["accuracy"] for report in result.reports]
    assert seen == ["begin", (8, 64), (0, accuracies[0]), (16, 128), (1, accuracies[1]), "end"]
    assert "Stopped by a callback after 16 of 32 updates" in (result.path / "train.log").read_text()
    assert train(config).reports[-1]["step"] == 256  # the same run goes on


class Bank(SSLModel):
    """A method from outside: remembers the last prediction for every unlabelled image, and how often it was seen."""

    class Options(SSLModel.Options):
        """Its own option."""

        memory: float = option(0.5, "weight of the remembered prediction", low=0, high=1, named=True)

    def initial_state(self):
        """A distribution and a counter per unlabelled image."""
        return {"bank": np.full((self.num_unlabeled, self.num_classes), 1 / self.num_classes, np.float32),
                "seen": np.zeros(self.num_unlabeled, np.int32)}

    def unlabeled_loss(self, weak, strong, views, step):
        """Cross-entropy with the mean of remembered and present prediction."""
        index, q = views["unlabeled_index"], tf.stop_gradient(tf.nn.softmax(weak))
        target = self.options.memory * tf.gather(step.state["bank"], index) + (1 - self.options.memory) * q
        everywhere = step.gather(index)[:, None]
        state = {"bank": tf.tensor_scatter_nd_update(step.state["bank"], everywhere, step.gather(q)),
                 "seen": tf.tensor_scatter_nd_add(step.state["seen"], everywhere,
                                                  tf.ones([everywhere.shape[0]], tf.int32))}
        return UnlabeledLoss(losses.soft_cross_entropy(strong, target), tf.ones(weak.shape[0]), state=state)


@pytest.mark.slow
def test_dataset_method_metric_and_hook_from_outside_the_package(tmp_path, monkeypatch):
    """Registered nowhere but in the user's own program: flags, folder, checkpoint, log, tables know them."""
    def patterns() -> sources.Source:
        rng = np.random.RandomState(0)
        labels = np.arange(60) % 3
        images = (rng.randint(0, 60, (60, 64, 64, 3)) + 90 * labels[:, None, None, None]).astype(np.uint8)
        return sources.Source(images, labels, images[:12], labels[:12], ["a", "b", "c"])

    monkeypatch.setitem(DATASETS, "patterns", Dataset(64, load=patterns, presets={"filters": 8, "repeat": 1}))
    monkeypatch.setitem(METRICS, "top2", Metric("top2", "top-2", 2, lambda p, y: 100 * float(
        np.mean([label in np.argsort(row)[-2:] for row, label in zip(p, y, strict=True)])), "%"))
    seen = []
    argv = ["own.py", "--dataset=patterns.1@6-0", "--batch=4", "--uratio=2", "--memory=0.25", "--augment=d.d.x",
            "--report_kimg=0.015625", "--train_steps=8", f"--train_dir={tmp_path}"]
    config = cli.configuration(Bank, argv)
    result = train(config, hooks=[lambda trainer, report: seen.append(report["top2"])])
    assert config.network.scales == 4 and "_memory0.25" in result.path.name and len(seen) == 2
    assert set(json.loads((result.path / "stats" / "top2.json").read_text())) >= {"last20"}
    table = invoke("table", tmp_path, "--metric=top2,nll").stdout
    assert "top-2 %" in table and f"{np.median(seen):.2f}" in table
    state = variables(result.path)
    counts = state["state_seen/.ATTRIBUTES/VARIABLE_VALUE"]
    assert counts.dtype == np.int32 and counts.sum() == 8 * 8 and len(counts) == 60
    assert (counts > 0).tolist() == (np.ptp(state["state_bank/.ATTRIBUTES/VARIABLE_VALUE"], 1) > 0).tolist()
    scores = cssl.open(result.path, method_class=Bank).evaluate()
    assert scores["top2"] == seen[-1]


def this_machine() -> str:
    """What decides about the order of sums: processor, cores, TensorFlow."""
    try:
        facts = dict(re.findall(r"^(model name|flags)\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M))
    except OSError:
        return "?"
    vectors = "AVX-512" if "avx512f" in facts.get("flags", "").split() else "AVX2"
    return f"{facts.get('model name')}, {vectors}, {os.cpu_count()} cores, TensorFlow {tf.__version__}"


OLDER = {"955b3a5": [], "8671eba": ["--alpha_bound=0.05"]}  # commits, and flags of the runs that they began


@pytest.fixture(scope="module")
def continued(tmp_path_factory, command):
    """The folders of the runs that older versions began, each continued to its end; by a program, with oneDNN, as they
    were. One for all, as its start takes longest."""
    folders, lines = {commit: tmp_path_factory.mktemp(commit) for commit in OLDER}, []
    for commit, folder in folders.items():
        with zipfile.ZipFile(GOLDEN / f"run_{commit}_begun.zip") as archive:
            archive.extractall(folder)
        lines.append(["cssl.py", "--dataset=digits.1@40-1", "--batch=8", "--uratio=2", "--scales=2",
                      "--report_kimg=0.0625", "--save_kimg=0.0625", "--schedule_kimg=0.1875", "--train_steps=24",
                      f"--train_dir={folder}", *OLDER[commit]])
    command("-c", f"from cssl import CSSL, cli\nfor line in {lines!r}:\n    assert cli.run(CSSL, line) == 0")
    return folders


@pytest.mark.slow
@pytest.mark.parametrize("commit", OLDER)
def test_a_run_of_an_older_version_is_continued_evaluated_and_tabulated(commit, continued, program):
    """Made by that commit, which went on to the recorded end; on a machine of the same kind, to the same bits.

    Elsewhere sums have another order, which 16 updates of so small a net amplify: 0.003 in the weights was seen.
    """
    folder = continued[commit]
    (run,) = folder.glob("*/*/*")  # the same folder name
    assert "Continuing from" in (run / "train.log").read_text()
    wanted = np.load(GOLDEN / f"run_{commit}_end.npz")
    same_machine = str(wanted["where"]) == this_machine() and not {"ONEDNN_MAX_CPU_ISA", "TF_ENABLE_ONEDNN_OPTS"} & set(
        ENVIRONMENT)
    found = variables(run)
    assert {name.replace("/", "|") for name in found} == set(wanted.files) - {"metrics", "where"}
    for name, value in found.items():
        expected = wanted[name.replace("/", "|")]
        assert value.dtype == expected.dtype and value.shape == expected.shape
        if same_machine:
            np.testing.assert_array_equal(value, expected, err_msg=name)
        elif name.startswith(("weights", "ema")):
            np.testing.assert_allclose(value, expected, atol=2e-2, err_msg=name)
    before = [json.loads(line) for line in str(wanted["metrics"]).splitlines()]
    after = reports(run)
    assert [report["step"] for report in after] == [report["step"] for report in before]
    for old, new in zip(before, after, strict=True):
        assert set(old) - {"images_per_s"} <= set(new)
        assert new["losses/total"] == pytest.approx(old["losses/total"], rel=0 if same_machine else 2e-2)
    assert "digits, 40 labels, error %" in invoke("table", folder).stdout
    assert "24 updates" in program(CSSL, f"--eval_ckpt={run}").stdout


def test_a_method_need_not_log_a_labelled_loss(tmp_path):
    class Silent(SSLModel):
        """Logs nothing of its own."""

        uses_unlabeled = False

        def compute_losses(self, views, step):
            return LossOutput(self.labeled_cross_entropy(views, step), {})

    config = RunConfig.of(Silent, **{**TINY, "uratio": 1}, train_steps=8, train_dir=str(tmp_path))
    run = train(config)
    assert "losses/xe" not in run.reports[-1]
    assert f"total {run.reports[-1]['losses/total']:.4f}" in run.log_file.read_text()


def test_a_platform_without_hangup_signals_trains(tmp_path, monkeypatch, program):
    monkeypatch.delattr(signal, "SIGHUP")  # as on Windows
    flags = [f"--{name}={value}" for name, value in TINY.items()]
    assert "Finished after 1 updates" in program(CSSL, *flags, "--train_steps=1", f"--train_dir={tmp_path}").stdout


def test_import_is_cheap_and_clean():
    """No TensorFlow, no variable of the environment, no file descriptor."""
    code = """
import os, sys
before = dict(os.environ), sorted(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else None
import cssl
from cssl import CSSL, FixMatch, RunConfig
RunConfig.of(CSSL, dataset="digits.1@40-1")
after = dict(os.environ), sorted(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else None
assert before == after
heavy = {"tensorflow", "keras", "matplotlib", "PIL", "sklearn", "scipy", "tensorflow_datasets"} & set(sys.modules)
assert not heavy, heavy
assert {"CSSL", "FixMatch", "train", "open", "RunConfig"} <= set(dir(cssl)) and cssl.__version__
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_help_needs_no_tensorflow(command):
    code = "import sys; from cssl import cli; cli.run(__import__('cssl').CSSL, ['x', '--help']); " \
           "assert 'tensorflow' not in sys.modules"
    assert "--alpha_bound" in command("-c", code).stdout


def test_another_libml_is_named(tmp_path):
    """FixMatch's README tells users to put its clone, with a libml of its own, on PYTHONPATH."""
    (tmp_path / "libml").mkdir()
    (tmp_path / "libml" / "__init__.py").write_text("")
    for arguments in (["-m", "cssl.fixmatch", "--help"], ["-c", "import cssl"]):
        done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=tmp_path,
                              env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": ""})
        assert done.returncode == (2 if arguments[0] == "-m" else 1)
        assert f"Another package named libml, in {tmp_path}," in done.stderr.splitlines()[-1]
        assert arguments[0] == "-c" or len(done.stderr.splitlines()) == 1


def test_a_helper_module_is_no_method():
    assert "program" not in cssl.methods().values() and "cli" not in cssl.methods().values()
    assert cssl.methods()["FixMatchDA"] == "fixmatch_da" and len(cssl.methods()) >= 15
    with pytest.raises(UserError, match="no method 'program'"):
        cssl.method("program")
    with pytest.raises(AttributeError):
        cssl.nothing  # noqa: B018


def test_mirroring_is_left_out_on_request_and_where_the_dataset_forbids_it():
    images, labels = np.zeros((20, 16, 16, 3), np.uint8), np.arange(20) % 2
    data = from_arrays(images, labels, images, labels, name="arrays:mirrors")
    for mirror, given in ((True, {}), (False, {"mirror": False})):
        config = RunConfig.of(CSSL, filters=4, repeat=1, scales=1, **given).with_data(data)
        assert experiment.load(config, data).mirror is mirror
        assert ("mirrorFalse" in config.folder().name) is not mirror
    config = RunConfig.of(CSSL, dataset="digits.1@40-1")
    assert not experiment.load(config).mirror


@pytest.mark.parametrize(("settings", "compiled"), [
    ({"dataset": "digits.1@40-1", "train_steps": 200}, False), ({"dataset": "digits.1@40-1"}, True),
    ({"dataset": "cifar10.1@40-1"}, True), ({"dataset": "cifar10.1@40-1", "train_steps": 100}, False)])
def test_long_runs_compile_their_views(settings, compiled):
    config = RunConfig.of(CSSL, **settings)
    shape = (config.dataset.entry.width, config.dataset.entry.width, 3)
    assert experiment.compiles_views(config, shape, 1) == (compiled or bool(tf.config.list_physical_devices("GPU")))
