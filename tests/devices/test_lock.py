"""The lock of a folder: who holds it, who takes it over, and when; with real processes."""
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from conftest import ROOT

from libml.devices import lock
from libml.devices.lock import Lock
from libml.errors import UserError

HOLD = """
import sys, time
from pathlib import Path
from libml.devices.lock import Lock
with Lock(Path(sys.argv[1])).hold():
    print("held", flush=True)
    time.sleep(60)
"""


def hold(folder) -> subprocess.Popen:
    """A real process that holds the lock of a folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_process_is_refused_and_told_who_holds_the_folder(tmp_path):
    process = hold(tmp_path)
    try:
        with pytest.raises(UserError, match=f"is being trained by process {process.pid} on .* since 20"):
            with Lock(tmp_path).hold():
                pass
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_lock_of_a_dead_process_is_taken_over(tmp_path, number):
    process = hold(tmp_path)
    process.send_signal(number)
    process.wait()
    assert (tmp_path / "lock.json").exists()
    with Lock(tmp_path).hold():
        assert json.loads((tmp_path / "lock.json").read_text())["process"] == os.getpid()
    assert os.listdir(tmp_path) == []


def test_a_reused_process_number_is_not_the_holder(tmp_path):
    with Lock(tmp_path).hold():
        token = json.loads((tmp_path / "lock.json").read_text())
    (tmp_path / "lock.json").write_text(json.dumps(token | {"started": "1"}))  # this process's number, another start
    with Lock(tmp_path).hold():
        pass


def elsewhere(tmp_path) -> str:
    return json.dumps({"process": 1, "started": "1", "machine": "another", "host": "node7", "since": "2026-01-01"})


def test_a_living_process_of_another_machine_is_respected(tmp_path, monkeypatch):
    """It cannot be seen from here, but its lock is renewed."""
    monkeypatch.setattr(lock, "SILENT_SECONDS", 20)
    file = tmp_path / "lock.json"
    file.write_text(elsewhere(tmp_path))
    timer = threading.Timer(0.7, lambda: os.utime(file, (1, 1)))
    timer.start()
    with pytest.raises(UserError, match="process 1 on node7 since 2026-01-01"):
        with Lock(tmp_path).hold():
            pass


@pytest.mark.parametrize("text", [None, "", "{", "[1]"])
def test_a_silent_lock_of_another_machine_or_a_damaged_one_is_taken_over(tmp_path, monkeypatch, text):
    monkeypatch.setattr(lock, "SILENT_SECONDS", 0.2)
    (tmp_path / "lock.json").write_text(elsewhere(tmp_path) if text is None else text)
    with Lock(tmp_path).hold():
        assert json.loads((tmp_path / "lock.json").read_text())["process"] == os.getpid()


def test_a_full_disk_holds_no_lock_and_waits_for_nobody(tmp_path):
    """As with a limit of no bytes at all for files."""
    code = ("import resource, sys; from pathlib import Path; from libml.devices.lock import Lock\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
            "with Lock(Path(sys.argv[1])).hold(): pass")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], cwd=ROOT, capture_output=True, text=True,
                          timeout=60)
    assert "Cannot write to" in done.stderr and os.listdir(tmp_path / "run") == []


def test_a_lock_that_is_no_file(tmp_path):
    (tmp_path / "lock.json").mkdir()
    with pytest.raises(UserError, match="is not a file"):
        with Lock(tmp_path).hold():
            pass


def test_the_lock_is_renewed(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.05)
    with Lock(tmp_path).hold():
        os.utime(tmp_path / "lock.json", (1, 1))
        deadline = time.monotonic() + 20
        while (tmp_path / "lock.json").stat().st_mtime < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize("attempt", range(10))  # a race: one attempt shows little
def test_of_many_that_take_over_a_stale_lock_one_at_a_time_holds_it(tmp_path, attempt):
    """Threads of one process stand in for processes: the lock knows no difference until it asks who is alive."""
    (tmp_path / "lock.json").write_text(json.dumps({"machine": lock._machine(), "process": 0, "started": "0"}))
    inside, most, entered = 0, 0, 0

    def work():
        nonlocal inside, most, entered
        try:
            with Lock(tmp_path).hold():
                inside += 1
                most, entered = max(most, inside), entered + 1
                time.sleep(0.05)
                inside -= 1
        except UserError:
            pass

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1 and entered >= 1
