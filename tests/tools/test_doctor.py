"""The doctor: what it says of a machine, that its checks can fail, and that failures end in lines and exit codes."""
import json
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from helpers import invoke

from cssl.tools import doctor
from libml.augment import OPS, Augmenter
from libml.data import cache, sources


def test_facts(tmp_path, monkeypatch):
    found = doctor.facts(tmp_path / "not" / "there", tmp_path)
    assert list(found) == ["program", "versions", "CPU", "devices", "oneDNN", "build", "disk", "memory",
                           "datasets"]
    assert not [fact for fact in found.values() if fact.startswith("unknown")]
    assert f"TensorFlow {tf.__version__}" in found["versions"] and found["oneDNN"].startswith("off")
    assert found["datasets"] == f"none in {tmp_path}; digits (embedded)"
    monkeypatch.setattr(doctor, "_cpu", lambda: [][0])
    assert doctor.facts(tmp_path, tmp_path)["CPU"] == "unknown (IndexError: list index out of range)"


def test_datasets(tmp_path):
    for name in ("cifar10", "cifar100", "stl10"):
        (tmp_path / name / "1.0.0").mkdir(parents=True)
        (tmp_path / name / "1.0.0" / "dataset_info.json").touch()
    for name in ("cifar10", "cifar100"):
        cache.write(sources.cache_folder(name, tmp_path / name / "1.0.0"),
                    lambda writer: writer.add("images", np.zeros(3)))
    next(tmp_path.rglob("*-cifar100/images.npy")).write_bytes(b"")
    assert doctor._datasets(tmp_path).startswith("cifar10 (decoded), cifar100 (cache damaged), stl10 (not decoded yet)")


@pytest.mark.slow
def test_command_line(command, tmp_path):
    done = command("cssl-doctor", "--fast", "--json", f"--train_dir={tmp_path}", f"--data_dir={tmp_path}")
    found = json.loads(done.stdout)
    assert found["ok"] and found["facts"]["datasets"].startswith(f"none in {tmp_path}")
    assert {check["name"]: check["result"] for check in found["checks"]} == {
        "trajectory of the original program": "ok", "repeated steps, CPU:0": "ok", "Pillow, CPU:0": "ok",
        "Pillow, CPU:0 with XLA": "skipped", "GPU": "skipped"}
    lines = done.stderr.splitlines()  # as they are printed without --json
    assert [line.split()[0] for line in lines if line.endswith(" s]")] == [check["result"] for check in found["checks"]]
    assert any(line.startswith("ok      repeated steps, CPU:0               0 of 30 repeats differ") for line in lines)


@pytest.fixture
def quick(monkeypatch):
    """Checks that take no time, but for those a test puts back."""
    def fake(*arguments):
        return "nothing"

    real = dict(vars(doctor))
    for name in ("trajectory", "repeated_steps", "pillow"):
        monkeypatch.setattr(doctor, name, fake)
    return real


@pytest.mark.slow
def test_failures_are_lines_and_an_exit_code(quick, monkeypatch):
    def broken(device):
        raise ValueError("first line\nsecond line")

    monkeypatch.setattr(doctor, "repeated_steps", broken)
    monkeypatch.setattr(doctor, "trajectory", quick["trajectory"])
    monkeypatch.setattr(doctor, "TOLERANCES", (1e-5, 1e-5, 1e-4, 0.0))
    done = invoke("doctor")
    lines = [line for line in done.stdout.splitlines() if line.endswith(" s]")]
    assert done.code == 1 and "2 of 5 checks failed" in done.stdout and "second line" not in done.stdout
    assert lines[0].startswith("FAIL    trajectory of the original program  relative deviations ")
    assert "(allowed 1e-05, 1e-05, 0.0001, 0)" in lines[0]
    assert lines[1].startswith("FAIL    repeated steps, CPU:0               ValueError: first line  [")
    assert [line.split()[0] for line in lines[2:]] == ["ok"] * 2 + ["skipped"]


def test_errors_while_tracing_are_named():
    @tf.function
    def traced():
        raise ValueError("what happened")

    assert doctor.run_check("x", traced).measured == "ValueError: what happened"


def test_success(quick):
    done = invoke("doctor")
    assert done.code == 0 and done.stdout.endswith("\nThis machine computes what it should.\n")


def test_interrupt(quick, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "pillow", interrupted)
    done = invoke("doctor", "--json")
    assert (done.code, done.stdout) == (130, "") and done.stderr.endswith("stopped\n")


@pytest.mark.parametrize(("device", "noise", "failed"), [
    ("CPU:0", 0, False), ("CPU:0", 1e-7, True), ("GPU:0", 1e-4, False), ("GPU:0", 1e-2, True), ("GPU:0", np.nan, True)])
def test_steps_that_differ(monkeypatch, device, noise, failed):
    """A step that adds another number each time: any difference is too much on a CPU, one of 1e-3 on a GPU."""
    weights, calls = tf.Variable([1.0, 10.0]), []

    def step():
        calls.append(noise)  # the first call traces, the second is what the third is compared with
        weights.assign_add([1.0 + 10 * sum(calls[2:]), 0.0])
        return tf.constant(0.0)

    model = SimpleNamespace(checkpoint_items=lambda: {"weights": weights})
    monkeypatch.setattr(doctor, "small_step", lambda device: (model, step))
    monkeypatch.setattr(doctor, "REPEATS", 2)
    if failed:
        with pytest.raises(doctor.Failed, match="1 of 2 repeats differ"):
            doctor.repeated_steps(device)
    else:
        assert doctor.repeated_steps(device).startswith(f"{int(noise > 0)} of 2 repeats differ")


def test_pixels_that_differ(monkeypatch):
    real = Augmenter.strong_reference

    def wrong(self, images, samples):
        pixels = real(self, images, samples)
        pixels[2, 5, 6] += self.learns_rates
        return pixels

    monkeypatch.setattr(Augmenter, "strong_reference", wrong)
    with pytest.raises(doctor.Failed, match=f"^pixels differ in 1 images: 1 after {list(OPS)[2]} and [a-z_]+$"):
        doctor.pillow("CPU:0", False)


@pytest.mark.parametrize("check", [doctor.repeated_steps, lambda device: doctor.pillow(device, False)])
def test_a_device_that_is_not_there(check):
    with pytest.raises(doctor.Failed, match="^TensorFlow cannot use GPU:7; it has CPU:0"):
        check("GPU:7")
