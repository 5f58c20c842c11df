"""Several devices and several worker processes through the command line, as a user would start them."""
import json
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from helpers import ROOT, Program

from cssl import FixMatch
from libml.run import Run

TINY = ["--dataset=digits.1@40-1", "--filters=4", "--scales=1", "--batch=16", "--uratio=2"]
# A report and a checkpoint every 10 of 80 updates: signals sent after the first report come long before the end.
# Without views, whose graph takes most of the time; three workers show that CTAugment's rates are equal everywhere.
LONG = ["-m", "cssl.cssl", *TINY, "--augment=x.x.x", "--report_kimg=0.15625", "--save_kimg=0.15625",
        "--train_steps=80"]
LOST_SECONDS = 60  # measured: 2 s after a death, 12 s after a standstill, on two busy cores


class Workers:
    """The worker processes of one run over loopback."""

    def __init__(self, count: int, folder: Path, *arguments: str, extra: dict[int, list[str]] | None = None,
                 limit: int | None = None):
        sockets = [socket.socket() for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        addresses = [f"127.0.0.1:{s.getsockname()[1]}" for s in sockets]
        for s in sockets:
            s.close()
        folder.mkdir(parents=True)
        clusters = [{"cluster": {"worker": addresses}, "task": {"type": "worker", "index": i}} for i in range(count)]
        self.processes = [Program([*arguments, *(extra or {}).get(i, [])], folder, limit, TF_CONFIG=json.dumps(cluster))
                          for i, cluster in enumerate(clusters)]

    def output(self, worker: int) -> str:
        return self.processes[worker].output + self.processes[worker].error

    def wait_for(self, pattern: str, seconds: float = 400) -> None:
        """Waits until the chief's output holds a pattern."""
        end = time.monotonic() + seconds
        while not re.search(pattern, self.output(0)):
            assert self.processes[0].poll() is None and time.monotonic() < end, self.output(0) + self.output(1)
            time.sleep(0.05)

    def codes(self, seconds: float = 400) -> list[int]:
        """Waits for the end of all processes; returns their exit codes."""
        end = time.monotonic() + seconds
        return [process.wait(max(0.1, end - time.monotonic())) for process in self.processes]

    def hashes(self) -> list[str]:
        """The hash of the final weights that every worker printed."""
        assert self.codes() == [0] * len(self.processes), "\n".join(map(self.output, range(len(self.processes))))
        return [re.search(rf"worker {i}: weights sha256 (\w+)", self.output(i))[1] for i in range(len(self.processes))]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()


@pytest.fixture
def start(tmp_path):
    """Starts workers; none of them outlives the test."""
    started = []

    def go(count, *arguments, **more):
        started.append(Workers(count, tmp_path / f"output{len(started)}", *arguments, **more))
        return started[-1]

    yield go
    for workers in started:
        workers.kill()


def run_folder(train_dir: Path) -> Path:
    return next(train_dir.rglob("args.json")).parent.parent


@pytest.mark.slow
def test_two_workers_survive_death_and_preemption(start, tmp_path):
    reference = start(2, *LONG, f"--train_dir={tmp_path / 'undisturbed'}")
    first, second = reference.hashes()
    assert first == second
    # The chief alone writes and talks.
    lines = [line for line in reference.output(1).splitlines() if not line.startswith(("Waiting", "E0000", "I0000"))]
    assert len(lines) == 1, reference.output(1)
    folder = run_folder(tmp_path / "undisturbed")
    assert {p.name for p in folder.iterdir()} == {"args", "metrics.jsonl", "stats", "tf", "train.log"}
    assert len(list((folder / "tf").glob("events*"))) == 1
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 8
    assert len(re.findall("Finished", (folder / "train.log").read_text())) == 1

    disturbed = [*LONG, f"--train_dir={tmp_path / 'disturbed'}"]
    killed = start(2, *disturbed)
    killed.wait_for("(?s)accuracy .*accuracy .*\n")  # two reports: the checkpoint that follows the first is whole
    killed.processes[1].send_signal(signal.SIGKILL)
    assert killed.codes(LOST_SECONDS) == [75, -9], killed.output(0)
    assert "error: Worker 0 lost touch with another process" in killed.output(0)
    assert "Traceback" not in killed.output(0)

    stopped = start(2, *disturbed)
    stopped.wait_for("Continuing from .*: [1-9][0-9]* of 80 updates(.*\n)+.*accuracy .*\n")
    stopped.processes[1].send_signal(signal.SIGTERM)  # preemption of one machine
    assert stopped.codes() == [143, 143], stopped.output(0) + stopped.output(1)
    assert re.search("Stopped by SIGTERM after [0-9]+ updates", stopped.output(0))

    assert start(2, *disturbed).hashes() == [first, first]
    assert len((run_folder(tmp_path / "disturbed") / "metrics.jsonl").read_text().splitlines()) == 8


@pytest.mark.slow
def test_three_workers_and_a_dead_chief(start, tmp_path):
    arguments = ["-m", "cssl.fixmatch", *TINY, "--batch=12", "--sync_bn"]
    short = start(3, *arguments, "--adepth=1", "--train_steps=8", f"--train_dir={tmp_path / 'short'}")
    assert len(set(short.hashes())) == 1  # of CTAugment's rates too
    workers = start(3, *arguments, "--augment=x.x.x", "--report_kimg=0.1", "--train_steps=100000",
                    f"--train_dir={tmp_path / 'long'}")
    workers.wait_for("accuracy .*\n")
    workers.processes[0].send_signal(signal.SIGKILL)
    assert workers.codes(LOST_SECONDS) == [-9, 75, 75]
    for worker in (1, 2):
        assert "lost touch with another process" in workers.output(worker)


@pytest.mark.slow
def test_workers_with_different_flags(start, tmp_path):
    workers = start(2, "-m", "cssl.fixmatch", *TINY, f"--train_dir={tmp_path / 'runs'}", extra={1: ["--filters=8"]})
    assert workers.codes() == [2, 2]
    for worker in (0, 1):
        assert "error: Worker 1 was started with other flags than worker 0" in workers.output(worker)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_faults_of_the_chief_end_all_processes_alike(start, tmp_path):
    """A full disk, then, before training, a folder that another process holds: exit code 2 everywhere, as a job that
    fails for good must not be queued again."""
    arguments = [*LONG, "--filters=8", f"--train_dir={tmp_path / 'runs'}"]
    workers = start(2, *arguments, limit=20_000)  # the chief alone writes
    assert workers.codes() == [2, 2], workers.output(0) + workers.output(1)
    assert "Cannot write" in workers.output(0) and "Worker 0 met an error" in workers.output(1)
    with Run(run_folder(tmp_path / "runs")).lock.hold():
        workers = start(2, *arguments)
        assert workers.codes() == [2, 2]
    assert f"is being trained by process {os.getpid()}" in workers.output(0)
    assert "error: Worker 0 met an error that ends the run: see its output." in workers.output(1)


@pytest.mark.slow
def test_run_continues_on_other_devices(tmp_path):
    arguments = ["-m", "cssl.fixmatch", *TINY, "--augment=x.x.x", "--sync_bn", "--schedule_kimg=1",
                 f"--train_dir={tmp_path}"]
    first = Program([*arguments, "--train_steps=4", "--num_devices=2", "--deterministic"], tmp_path)
    assert first.wait() == 0 and "Finished after 4 updates" in first.output, first.error
    second = Program([*arguments, "--train_steps=8", "--num_devices=1"], tmp_path)
    assert second.wait() == 0 and "4 of 8 updates done" in second.output, second.error
    assert "Finished after 8 updates" in second.output
    environment = json.loads((run_folder(tmp_path) / "args" / "environment.json").read_text())
    assert len(environment["devices"]) == 1


def test_errors_come_first(program, tmp_path):
    arguments = [*TINY, f"--train_dir={tmp_path / 'runs'}"]
    done = program(FixMatch, *arguments, "--batch=10", "--num_devices=4", code=2)
    assert "A batch of 10 does not divide over 4 replicas; the nearest that does is 8." in done.stderr
    done = program(FixMatch, *arguments, "--jit", "--sync_bn", "--num_devices=2", code=2)
    assert "--jit cannot compile --sync_bn's communication between 2 replicas; leave it out." in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("script", ["one_node.sh", "several_nodes.sh"])
@pytest.mark.parametrize(("ending", "code", "requeued"), [
    ("exit 0", 0, False), ("exit 2", 2, False), ("exit 75", 0, True), ("while :; do sleep 0.05; done", 0, True)])
def test_job_scripts(script, ending, code, requeued, tmp_path):
    """With stand-ins for SLURM's programs; in the last case the job is preempted: TERM to the script and its step."""
    srun = f"trap 'exit 143' TERM\necho $$ > {tmp_path}/pid\necho \"$@\" > {tmp_path}/args\n{ending}"
    for name, text in {"srun": srun, "scontrol": f"echo $@ > {tmp_path}/requeued"}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7",
                   "SLURM_SUBMIT_DIR": str(ROOT)}
    with subprocess.Popen(["bash", ROOT / "scripts" / "slurm" / script, "-m", "cssl.cssl", "--rerun=a b"],
                          env=environment) as job:
        if "sleep" in ending:
            while not (tmp_path / "args").exists():
                time.sleep(0.02)
            job.send_signal(signal.SIGTERM)
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGTERM)
        assert job.wait(20) == code
    assert (tmp_path / "args").read_text().endswith("python -m cssl.cssl --rerun=a b\n")
    assert (tmp_path / "requeued").exists() == requeued


@pytest.mark.slow
def test_half_precision_and_xla_from_the_command_line(program, tmp_path):
    first = Program(["-m", "cssl.fixmatch", *TINY, "--augment=x.x.x", "--train_steps=3", "--mixed_precision=float16",
                     "--jit", "--p_unlabeled=1,1,1,1,1,1,1,1,1,1", f"--train_dir={tmp_path}"], tmp_path)
    assert first.wait() == 0 and "Finished after 3 updates" in first.output, first.error
    assert re.findall("warning: .*", first.output)[1:] == [  # the first is about float16 on a CPU
        "warning: --p_unlabeled has no effect: FixMatch does not align its predictions."]  # and none about XLA
    folder = run_folder(tmp_path)
    assert "jitTrue" in folder.name and "mixed_precisionfloat16" in folder.name
    report = json.loads((folder / "metrics.jsonl").read_text())
    assert report["monitors/loss_scale"] == 2 ** 15
    done = program(FixMatch, f"--eval_ckpt={folder}")
    assert f"{report['accuracy']:.2f}" in done.stdout
