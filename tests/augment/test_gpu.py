"""Views on GPUs, of which there is none here: TensorFlow's word for one is made up, and so is what a trial says."""
import json
import os

import pytest
import tensorflow as tf
from helpers import Program

from cssl import CSSL, RunConfig
from libml import experiment
from libml.augment import gpu
from libml.run import Run
from libml.train import Trainer

ABORT = """
import os, sys
print('LLVM ERROR: PTX version 8.5 does not support target sm_120', file=sys.stderr, flush=True)
os.abort()
"""


@pytest.fixture
def with_gpu(monkeypatch):
    """Pretends that there is a GPU of some kind, and that its trial is some program."""
    def pretend(trial: str, capability: tuple[int, int] = (12, 0)) -> None:
        known = {"GPU": ["a GPU"], "CPU": tf.config.list_physical_devices("CPU")}
        monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: known.get(kind, []))
        monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda device: {
            "device_name": "NVIDIA X", "compute_capability": capability})
        monkeypatch.setattr(gpu, "TRIAL", trial)

    return pretend


def test_an_abort_of_xla_is_found_out_once_for_each_kind_of_gpu(with_gpu, tmp_path, monkeypatch):
    file = tmp_path / "new" / "views.json"
    with_gpu(ABORT)
    failure = "SIGABRT: LLVM ERROR: PTX version 8.5 does not support target sm_120"
    assert gpu.xla_failure(file) == failure
    assert json.loads(file.read_text()) == {f"TensorFlow {tf.__version__}; NVIDIA X 12.0": failure}
    with_gpu("pass")
    assert gpu.xla_failure(file) == failure
    with_gpu("pass", capability=(9, 0))
    assert gpu.xla_failure(file) == ""
    monkeypatch.setattr(tf, "__version__", "99.0")
    with_gpu("pass")
    assert gpu.xla_failure(file) == "" and len(json.loads(file.read_text())) == 3


@pytest.mark.parametrize(("trial", "failure"), [
    ("raise MemoryError('CUDA_ERROR_OUT_OF_MEMORY')", "MemoryError: CUDA_ERROR_OUT_OF_MEMORY"),
    ("import time; time.sleep(100)", "no answer in 2 s"), ("raise SystemExit(1)", "no message")])
def test_what_may_pass_is_not_remembered(with_gpu, tmp_path, monkeypatch, trial, failure):
    monkeypatch.setattr(gpu, "TRIAL_SECONDS", 2)
    with_gpu(trial)
    assert gpu.xla_failure(tmp_path / "views.json") == failure
    with_gpu("pass")
    assert gpu.xla_failure(tmp_path / "views.json") == ""


@pytest.mark.parametrize("what", ["libdevice not found at ./libdevice.10.bc", "Couldn't find a suitable ptxas"])
def test_missing_parts_of_cuda_come_with_their_cure(with_gpu, tmp_path, what):
    with_gpu(f"raise RuntimeError({what!r})")
    assert gpu.xla_failure(tmp_path / "views.json") == (
        f"RuntimeError: {what}; pip install 'cssl[gpu]' has what is missing")


@pytest.mark.parametrize("damage", ["{", "[1]", None])
def test_a_cache_that_cannot_be_used_does_not_matter(with_gpu, tmp_path, damage):
    with_gpu("pass")
    (tmp_path / "file").write_text(damage or "")
    assert gpu.xla_failure(tmp_path / "file" / "views.json" if damage is None else tmp_path / "file") == ""


@pytest.mark.slow
def test_the_trial_itself(tmp_path):
    """On this machine's CPU, as there is no GPU: XLA compiles a policy for one image. (How it is started: above.)"""
    process = Program(["-c", gpu.TRIAL], tmp_path)
    assert process.wait() == 0 and not process.output, process.error


def test_kernels_that_only_cpus_have_are_named():
    def function(text, x):
        return tf.strings.length(text), tf.matmul(x, x)

    missing = gpu.cpu_only(function, tf.TensorSpec([2], tf.string), tf.TensorSpec([2, 2]))
    assert missing == ["StringLength"] if tf.test.is_built_with_gpu_support() else "StringLength" in missing


@pytest.fixture
def trainer(tmp_path):
    config = RunConfig.of(CSSL, dataset="digits.1@40-1", filters=4, repeat=1, scales=1, train_dir=str(tmp_path))
    data = experiment.load(config)
    run = Run(config.folder(), config=config, data=data, model=experiment.build(config, data))
    trainer = Trainer(run, tf.distribute.get_strategy())
    trainer.lines = []
    trainer.log = trainer.lines.append
    return trainer


def test_a_gpu_that_xla_does_not_know_gets_single_kernels(with_gpu, trainer, tmp_path):
    """And is told why, what then runs on the CPU, and how to try again."""
    with_gpu(ABORT)
    cache = tmp_path / "views.json"
    trainer.model.augmenter.jit_compile = True
    failure = experiment._try_views(trainer.config, trainer.model, cache)
    assert trainer.model.augmenter.jit_compile is False
    experiment._announce(trainer, failure)
    (line,) = [line for line in trainer.lines if "views: " in line]
    assert line.startswith("  views: by single kernels, without XLA (XLA cannot compile them: SIGABRT: LLVM ERROR: PTX")
    assert f"to try again, --views=xla, or delete {cache})" in line
    assert "; only CPUs have kernels of " in line and "GatherV2" in line


def test_a_gpu_that_xla_knows_gets_compiled_views(with_gpu, trainer, tmp_path):
    with_gpu("pass")
    trainer.model.augmenter.jit_compile = True
    assert experiment._try_views(trainer.config, trainer.model, tmp_path / "views.json") == ""
    experiment._announce(trainer)
    assert "  views: compiled by XLA" in trainer.lines


@pytest.mark.parametrize(("views", "compiled"), [("xla", True), ("kernels", False)])
def test_views_as_the_user_says(with_gpu, trainer, tmp_path, views, compiled):
    """On any device, without a trial."""
    config = trainer.config.replace(views=views)
    assert experiment.build(config, trainer.data).augmenter.jit_compile is compiled
    assert config.folder() == trainer.config.folder()
    with_gpu(ABORT)
    assert experiment.compiles_views(config, (16, 16, 3), 1) is compiled
    trainer.model.augmenter.jit_compile = compiled
    assert experiment._try_views(config, trainer.model, tmp_path / "views.json") == ""
    assert trainer.model.augmenter.jit_compile is compiled and not (tmp_path / "views.json").exists()


A100, RTX = "NVIDIA A100, 81920 MiB, 550.54, 8.0", "NVIDIA GeForce RTX 5090, 32607 MiB, 570.86, 12.0"


@pytest.mark.parametrize(("says", "seen", "environment", "warning"), [
    (f"echo '{A100}'", False, {}, f"{A100}, TensorFlow uses 0: pip install 'cssl[gpu]'"),
    (f"echo '{A100}'", False, None, f"{A100}, TensorFlow uses 0: pip install 'cssl[gpu]'"),
    (f"echo '{RTX}'", True, {}, "sm_89, compute_90: NVIDIA's container of TensorFlow (nvcr.io/nvidia/tensorflow)"),
    (f"echo '{RTX}'", False, {"CUDA_VISIBLE_DEVICES": "-1"}, None), (f"echo '{A100}'", True, {}, None),
    (f"echo '{A100}'; echo '{A100}'", True, {"CUDA_VISIBLE_DEVICES": "1"}, None),
    (f"echo '{A100}'; echo '{A100}'", True, None, None),  # a Python program's variables are not known
    ("exit 9", False, {}, None)])
def test_a_run_names_cards_that_tensorflow_cannot_use(with_gpu, trainer, tmp_path, monkeypatch, says, seen, environment,
                                                      warning):
    """By a driver's program that lists them, with the cure, in one line."""
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{says}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(tf.sysconfig, "get_build_info", lambda: {"cuda_compute_capabilities": ["sm_80", "sm_89",
                                                                                               "compute_90"]})
    if seen:
        with_gpu("pass")
    experiment._announce(trainer, environment=environment)
    found = [line for line in trainer.lines if "nvidia-smi" in line or "kernels for" in line]
    assert len(found) == (warning is not None) and all(line.startswith("warning: ") for line in found)
    assert warning is None or warning in found[0]
