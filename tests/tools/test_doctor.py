"""The doctor: what it says of a machine, that its checks can fail, and that failures end in lines and exit codes."""
import json
import os
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from helpers import invoke, strategy_of

from cssl.tools import doctor
from libml.augment import OPS, Augmenter

FACTS = ["program", "versions", "CPU", "GPUs", "nvidia-smi", "oneDNN", "build", "memory", "disk", "datasets"]


def test_facts(tmp_path, monkeypatch):
    (tmp_path / "cifar100" / "1.0.0").mkdir(parents=True)
    (tmp_path / "cifar100" / "1.0.0" / "dataset_info.json").touch()
    found = doctor.facts(str(tmp_path / "not" / "there"), str(tmp_path))
    assert list(found) == FACTS
    assert not [fact for fact in found.values() if fact.startswith("unknown")]
    assert f"tensorflow {tf.__version__}" in found["versions"] and found["oneDNN"] == "off"
    assert found["datasets"] == f"cifar100, digits in {tmp_path}"
    monkeypatch.setattr(doctor, "_cpu", lambda: [][0])
    assert doctor.facts(str(tmp_path), str(tmp_path))["CPU"] == "unknown (IndexError: list index out of range)"


@pytest.mark.slow
def test_command_line(command, tmp_path):
    done = command("cssl-doctor", "--fast", "--json", f"--train_dir={tmp_path}", f"--data_dir={tmp_path}")
    found = json.loads(done.stdout)
    assert found["ok"] and found["facts"]["datasets"] == f"digits in {tmp_path}"
    assert {check["name"]: check["result"] for check in found["checks"]} == {
        "trajectory of the original program, CPU:0": "ok", "cards, GPUs": "ok", "repeated steps, CPU:0": "ok",
        "Pillow, CPU:0": "ok", "all-reduce, CPUs": "ok", "several devices, CPUs": "ok", "speed, CPU:0": "ok"}
    lines = done.stderr.splitlines()  # as they are printed without --json
    assert [line.split()[0] for line in lines if line.endswith(" s]")] == ["ok"] * 7
    start = f"{'ok':<6}{'repeated steps, CPU:0':<44}0 of 30 repeats differ"
    assert any(line.startswith(start) for line in lines)


@pytest.fixture
def children(monkeypatch):
    """Programs that take the place of the children, by task; the others say at once that all is well."""
    programs = {"facts": "print('[true, \"{}\"]')"}

    def program(task, *arguments):
        return [sys.executable, "-S", "-c", programs.get(task, "print('[true, \"nothing\"]')")]

    monkeypatch.setattr(doctor, "program_of", program)
    return programs


def lines_of(done):
    return [line for line in done.stdout.splitlines() if line.endswith(" s]")]


@pytest.mark.slow
def test_checks_that_end_badly_are_lines_and_an_exit_code(children, monkeypatch):
    """One that says so, one that aborts as C++ does, one that is killed, one that hangs: the others go on."""
    children["facts"] = """print('[true, "{\\\\"GPUs\\\\": \\\\"GPU:0 A, GPU:1 B\\\\"}"]')"""
    children["trajectory of the original program"] = "print('[false, \"relative deviations 1\"]')"
    children["repeated steps"] = "import os, sys; print('first\\nF0000 LLVM ERROR', file=sys.stderr); os.abort()"
    children["Pillow"] = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    children["all-reduce"] = ("import os, sys; print('libdevice not found at ./libdevice.10.bc', file=sys.stderr); "
                              "os.abort()")
    children["Pillow with XLA"] = "import time; time.sleep(60)"
    monkeypatch.setattr(doctor, "CHILD_SECONDS", 2)
    done = invoke("doctor")
    expected = {"trajectory of the original program, CPU:0": "relative deviations 1"}
    for device in ("CPU:0", "GPU:0", "GPU:1"):
        expected |= {f"repeated steps, {device}": "SIGABRT: F0000 LLVM ERROR",
                     f"Pillow, {device}": "SIGSEGV: nothing was said",
                     f"Pillow with XLA, {device}": "no answer within 2 s"}
    expected["all-reduce, GPUs"] = f"SIGABRT: libdevice not found at ./libdevice.10.bc: {doctor.INSTALL}"
    found = {line[6:50].strip(): line[50:].rpartition("  [")[0] for line in lines_of(done) if line[:4] == "FAIL"}
    assert done.code == 1 and found == expected and len(lines_of(done)) == len(expected) + 5
    assert f"\nFailed: {'; '.join(found)}.\n" in done.stdout


def test_a_machine_without_facts(children):
    children["facts"] = "import os; os.abort()"
    done = invoke("doctor", "--fast")
    assert done.code == 1 and done.stdout.startswith("facts       unknown (SIGABRT: nothing was said)\n")
    assert [line.split()[0] for line in lines_of(done)] == ["ok"] * 7 and done.stdout.endswith("\nFailed: facts.\n")


def test_errors_while_tracing_are_named(monkeypatch, capsys):
    @tf.function
    def traced(device):
        raise ValueError("what happened")

    monkeypatch.setitem(doctor.CHECKS, "Pillow", traced)
    doctor.child("Pillow", "CPU:0")
    assert json.loads(capsys.readouterr().out) == [False, "ValueError: what happened"]


def test_success(children):
    done = invoke("doctor")
    assert done.code == 0 and done.stdout.endswith("\nThis machine computes what it should.\n")
    assert len(lines_of(done)) == 8


def test_deviations_from_the_original(monkeypatch):
    monkeypatch.setattr(doctor, "trajectory_deviations", lambda: [1e-7, 1e-7, 1e-7, np.nan])
    with pytest.raises(doctor.Failed, match=r"1\.0e-07 \(allowed 0\.0001\), nan \(allowed 0\.005\)$"):
        doctor.trajectory("CPU:0")


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


def test_a_step_is_computed_where_it_should():
    model, step = doctor.small_step("CPU:1")
    assert {variable.device[-5:] for variable in tf.nest.flatten(model.checkpoint_items())} == {"CPU:1"}
    devices = {node.device[-5:] for node in step.get_concrete_function().graph.get_operations()
               if node.type in ("Conv2D", "MatMul", "AssignVariableOp")}
    assert devices == {"CPU:1"}


@pytest.mark.parametrize(("card", "says"), [
    ("NVIDIA A100-SXM4-80GB, 8.0", "NVIDIA A100-SXM4-80GB, 8.0, TensorFlow uses 0: pip install 'cssl[gpu]'"),
    ("NVIDIA GeForce RTX 5090, 12.0", "nvcr.io/nvidia/tensorflow")])
@pytest.mark.parametrize("visible", ["", "0"])  # SLURM names them
def test_cards_that_tensorflow_cannot_use(tmp_path, monkeypatch, card, says, visible):
    """By a driver's program that lists one: TensorFlow sees none here, and its build knows what it was built for."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{card}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    if "5090" in card:  # and it is used
        monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: ["GPU:0"])
        monkeypatch.setattr(tf.sysconfig, "get_build_info", lambda: {"cuda_compute_capabilities": BUILT})
    elif visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    else:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(doctor.Failed, match=re.escape(says)):
        doctor.cards("GPUs")


@pytest.mark.parametrize(("ending", "outcome"), [
    ("exit 6", True), ("exit 9", "CalledProcessError: .* exit status 9"),
    ("kill -SEGV $$", "CalledProcessError: .*SIGSEGV")])
def test_a_driver_that_fails_is_said(tmp_path, monkeypatch, capsys, ending, outcome):
    """But for its word that there are no devices, on a machine that has the program alone."""
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nprintf 'sick \\377'\n{ending}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    doctor.child("cards", "GPUs")
    well, said = json.loads(capsys.readouterr().out)
    assert well == (outcome is True) and re.match("0 listed" if well else outcome, said)


BUILT = ["sm_60", "sm_70", "sm_80", "sm_89", "compute_90"]  # TensorFlow 2.21's


def test_which_cards_a_build_knows():
    known = {(6, 0): True, (6, 1): True, (7, 5): True, (8, 0): True, (8, 6): True, (8, 9): True, (9, 0): True,
             (10, 0): False, (12, 0): False, (5, 2): False}
    assert {card: any(doctor.fits(*card, kind) for kind in BUILT) for card in known} == known


@pytest.mark.parametrize("check", [doctor.all_reduce, doctor.several_devices])
def test_devices_that_do_not_communicate(monkeypatch, check):
    """Sums that each device keeps to itself are found."""
    monkeypatch.setattr(doctor, "strategy_of", lambda devices: strategy_of(2))
    assert "2 devices" in check("CPUs")
    monkeypatch.setattr(tf.distribute.ReplicaContext, "all_reduce", lambda self, operation, value, **_: value)
    with pytest.raises(doctor.Failed, match="are wrong on|differ by at most"):
        check("CPUs")
