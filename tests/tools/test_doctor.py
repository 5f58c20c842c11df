"""The doctor: what it says of a machine, that its checks can fail, and that failures end in lines and exit codes."""
import contextlib
import os
import re
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import tensorflow as tf
from helpers import Program, invoke, strategy_of

from cssl.tools import doctor
from libml.augment import OPS, Augmenter
from libml.devices.machine import fits
from libml.errors import UserError


def test_facts():
    found = dict(line.split(maxsplit=1) for line in doctor.facts("GPUs").splitlines())
    assert list(found) == ["program", "versions", "machine", "system", "vectors", "GPUs", "build"]
    assert f"tensorflow {tf.__version__}" in found["versions"] and found["GPUs"] == "none that TensorFlow can use"


STARTED = ("trajectory", "repeated_steps")  # as processes of their own, with oneDNN as each has it


@pytest.mark.slow
def test_command_line(command, tmp_path, monkeypatch):
    """The checks for which oneDNN does not matter are forked from a process that has TensorFlow already."""
    start = subprocess.run

    def run(words, **options):
        task = re.search(r"child\('(\w+)'", words[-1])
        if not task or task[1] in STARTED:
            return start(words, **options)
        process = Program(words[1:], tmp_path)
        return subprocess.CompletedProcess(words, process.wait(), process.output, process.error)

    monkeypatch.setattr(subprocess, "run", run)
    assert command("cssl-doctor", "--help").stdout.startswith("usage: doctor.py [-h] [--fast]")
    done = invoke("doctor", "--fast")
    assert done.code == 0 and done.stdout.startswith("program   cssl ")
    assert done.stdout.endswith("\nThis machine computes what it should.\n")
    assert [line[:30].rstrip() for line in lines_of(done)] == [
        f"ok    {name}" for name in ("trajectory, CPU:0", "cards, GPUs", "repeated steps, CPU:0", "pillow, CPU:0",
                                     "all reduce, CPUs", "several devices, CPUs")]
    assert "1 different end of 21 equal steps" in done.stdout and "labelled images/s" in done.stdout


@pytest.fixture
def children(monkeypatch):
    """Programs that take the place of the children, by task; the others say at once that all is well."""
    programs = {"facts": ""}

    def program(task, device):
        return [sys.executable, "-S", "-c", programs.get(f"{task} {device}", programs.get(task, "print('nothing')"))]

    monkeypatch.setattr(doctor, "program_of", program)
    return programs


def lines_of(done):
    return [line for line in done.stdout.splitlines() if line.endswith(" s]")]


@pytest.mark.slow
def test_checks_that_end_badly_are_lines_and_an_exit_code(children, monkeypatch):
    """One that says so, one that aborts as C++ does, one that is killed, one that hangs, one with another code: the
    others go on."""
    children["facts"] = "print('GPUs GPU:0 A, GPU:1 B')"
    children["trajectory"] = "print('relative deviations 1'); raise SystemExit(1)"
    children["repeated_steps"] = "import os, sys; print('first\\nF0000 LLVM ERROR', file=sys.stderr); os.abort()"
    children["all_reduce"] = ("import os, sys; print('libdevice not found at ./libdevice.10.bc', file=sys.stderr); "
                              "os.abort()")
    for device in ("CPU:0", "GPU:0", "GPU:1"):
        children[f"pillow {device}"] = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
        children[f"pillow {device} with XLA"] = "raise SystemExit(3)"
    children["pillow GPU:0 with XLA"] = "import time; time.sleep(60)"
    monkeypatch.setattr(doctor, "CHILD_SECONDS", 2)
    done = invoke("doctor")
    expected = {"trajectory, CPU:0": "relative deviations 1"}
    for device in ("CPU:0", "GPU:0", "GPU:1"):
        expected |= {f"repeated steps, {device}": "SIGABRT: F0000 LLVM ERROR",
                     f"pillow, {device}": "SIGSEGV: nothing was said",
                     f"pillow, {device} with XLA": "exit code 3: nothing was said"}
    expected["pillow, GPU:0 with XLA"] = "no answer within 2 s"
    expected["all reduce, GPUs"] = f"SIGABRT: libdevice not found at ./libdevice.10.bc: {doctor.INSTALL}"
    found = {line[6:30].strip(): line[30:].rpartition("  [")[0] for line in lines_of(done) if line[:4] == "FAIL"}
    assert done.code == 1 and found == expected and len(lines_of(done)) == len(expected) + 2
    assert set(re.search(r"\nFailed: (.*)\.\n$", done.stdout)[1].split("; ")) == set(found)


def test_a_machine_without_facts(children):
    children["facts"] = "import os; os.abort()"
    done = invoke("doctor", "--fast")
    assert done.code == 1 and done.stdout.startswith("facts unknown (SIGABRT: nothing was said)\n")
    assert [line.split()[0] for line in lines_of(done)] == ["ok"] * 6 and done.stdout.endswith("\nFailed: facts.\n")


def test_errors_while_tracing_are_named(monkeypatch, capsys):
    @tf.function
    def traced(device):
        raise ValueError("what happened")

    monkeypatch.setattr(doctor, "pillow", traced)
    with pytest.raises(SystemExit, match="^1$"):
        doctor.child("pillow", "GPUs")
    assert capsys.readouterr().out == "ValueError: what happened\n"


def test_success(children):
    done = invoke("doctor")
    assert done.code == 0 and done.stdout.endswith("\nThis machine computes what it should.\n")
    assert len(lines_of(done)) == 7


def test_deviations_from_the_original(monkeypatch):
    golden = dict(np.load(doctor.GOLDEN))
    golden["hist/losses/wd"][3] = np.nan
    monkeypatch.setattr(np, "load", lambda file: golden)
    with pytest.raises(UserError, match=r"\(allowed 0\.0001\), nan \(allowed 0\.005\)$"):
        doctor.trajectory("CPU:0")


def test_steps_that_differ(monkeypatch):
    """Any bit is too much on a CPU; on a GPU, where sums come in any order, it is told."""
    calls = []

    def step(self, batch):
        calls.append(self)
        self.updates.assign_add(len(calls))
        return {"losses/total": tf.constant(0.0)}

    monkeypatch.setattr(doctor.tf, "function", lambda function, **options: function)
    monkeypatch.setattr("cssl.CSSL.train_on_bytes", step)
    monkeypatch.setattr(doctor, "REPEATS", 2)
    with pytest.raises(UserError, match="^3 different ends of 3 equal steps$"):
        doctor.repeated_steps("CPU:0")
    assert doctor.repeated_steps("GPU:0").startswith("3 different ends of 3 equal steps; ")


def test_pixels_that_differ(monkeypatch):
    real = Augmenter.strong_reference

    def wrong(self, images, samples):
        pixels = real(self, images, samples)
        pixels[2, 5, 6] += self.learns_rates
        return pixels

    monkeypatch.setattr(Augmenter, "strong_reference", wrong)
    with pytest.raises(UserError, match=f"^pixels differ in 1 images: 1 after {list(OPS)[2]} and [a-z_]+$"):
        doctor.pillow("CPU:0")


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
    with pytest.raises(UserError, match=re.escape(says)):
        doctor.cards("GPUs")


@pytest.mark.parametrize(("ending", "outcome"), [
    ("exit 6", "nvidia-smi lists none"), ("exit 9", "CalledProcessError: .* exit status 9"),
    ("kill -SEGV $$", "CalledProcessError: .*SIGSEGV")])
def test_a_driver_that_fails_is_said(tmp_path, monkeypatch, capsys, ending, outcome):
    """But for its word that there are no devices, on a machine that has the program alone."""
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nprintf 'sick \\377'\n{ending}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with contextlib.nullcontext() if ending == "exit 6" else pytest.raises(SystemExit):
        doctor.child("cards", "GPUs")
    assert re.match(outcome, capsys.readouterr().out)


BUILT = ["sm_60", "sm_70", "sm_80", "sm_89", "compute_90"]  # TensorFlow 2.21's


def test_which_cards_a_build_knows():
    known = {(6, 0): True, (6, 1): True, (7, 5): True, (8, 0): True, (8, 6): True, (8, 9): True, (9, 0): True,
             (10, 0): False, (12, 0): False, (5, 2): False}
    assert {card: any(fits(*card, kind) for kind in BUILT) for card in known} == known


@pytest.mark.parametrize("check", [doctor.all_reduce, doctor.several_devices])
def test_devices_that_do_not_communicate(monkeypatch, check):
    """Sums that each device keeps to itself are found."""
    monkeypatch.setattr(doctor, "strategy_of", lambda devices, tf32=True: strategy_of(2))
    assert "2 devices" in check("CPUs")
    monkeypatch.setattr(tf.distribute.ReplicaContext, "all_reduce", lambda self, operation, value, **_: value)
    with pytest.raises(UserError, match="are wrong on|differ by at most"):
        check("CPUs")


def test_devices_are_compared_without_tf32(monkeypatch):
    asked = []
    monkeypatch.setattr("libml.devices.distribute.create_strategy", lambda scale, environment: asked.append(scale))
    doctor.strategy_of("CPUs")
    with pytest.raises(AttributeError):  # of the strategy that there is not
        doctor.several_devices("CPUs")
    assert [(scale.num_devices, scale.tf32) for scale in asked] == [(2, True), (2, False)]


def test_sums_of_many_devices_need_little_memory(monkeypatch):
    """Of the host: beside what devices hold, which is the host's here, a few times the numbers of one."""
    monkeypatch.setattr(doctor, "strategy_of", lambda devices: strategy_of(4))
    tracemalloc.start()
    assert "16384 KB over 4 devices" in doctor.all_reduce("CPUs")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < (4 + 4) * 2 ** 24
