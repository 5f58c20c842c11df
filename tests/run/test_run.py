"""Run folders: atomic files, recovery of reports, checkpoints by their files."""
import json
import os
import signal
import subprocess
import sys

import pytest
from conftest import ROOT

from cssl.cssl import CSSL
from libml.config import RunConfig
from libml.errors import UserError
from libml.run import Run, find_checkpoint, find_runs, open_run
from libml.writing import check_writable, write_atomically, write_text


def test_a_holder_that_was_taken_over_writes_no_more(tmp_path):
    """It stood still too long, as a suspended machine does, and another one went on."""
    sleeper, other = Run(tmp_path), Run(tmp_path)
    with sleeper.lock.hold():
        (tmp_path / "lock.json").unlink()
        with other.lock.hold():
            token = json.loads((tmp_path / "lock.json").read_text())
            (tmp_path / "lock.json").write_text(json.dumps(token | {"since": "later"}))
            with pytest.raises(UserError, match="was taken over by another process"):
                sleeper.add_report({"step": 64, "accuracy": 1.0})
            with pytest.raises(UserError, match="was taken over"):
                sleeper.keep_checkpoints(1)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_damaged_checkpoints_do_not_push_out_good_ones(tmp_path):
    folder = Run(tmp_path)
    folder.checkpoint_dir.mkdir()
    for number in (64, 128, 192):
        for ending in ("index", "data-00000-of-00001"):
            (folder.checkpoint_dir / f"model.ckpt-{number}.{ending}").write_text("x")
    folder.set_aside([folder.checkpoint_at(192)])
    folder.keep_checkpoints(1)
    assert folder.checkpoints() == [folder.checkpoint_at(128)]


def test_one_damaged_run_does_not_spoil_a_table(tmp_path):
    for name, args, line in (("a", '{"method": "CSSL", "train_kimg": "x"}', ""),
                             ("c", '{"method": "CSSL", "train_kimg": 0}', '{"step": 64, "accuracy": 1}'),
                             ("b", '{"method": "CSSL"}', '{"step": Infinity, "accuracy": 1}')):
        (tmp_path / name / "args").mkdir(parents=True)
        (tmp_path / name / "args" / "args.json").write_text(args)
        (tmp_path / name / "metrics.jsonl").write_text(line + "\n")
    found = find_runs([tmp_path])
    assert [bool(r.problems) for r in found] == [True] * 3 and not any(r.finished for r in found)


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "x.json"
    write_text(path, "old")

    def fail(file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="No space left on device"):
        write_atomically(path, fail)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["x.json"]


@pytest.mark.parametrize(("mask", "mode"), [(0o077, 0o600), (0o002, 0o664)])
def test_new_files_have_the_mode_that_the_user_wants(tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        write_text(tmp_path / "x.json", "new")
    finally:
        os.umask(before)
    assert (tmp_path / "x.json").stat().st_mode & 0o777 == mode


def test_links_stay_and_devices_are_written_into(tmp_path):
    target, link, pipe = tmp_path / "target", tmp_path / "link", tmp_path / "pipe"
    target.write_text("old")
    link.symlink_to(target)
    write_text(link, "new")
    assert link.is_symlink() and target.read_text() == "new"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    check_writable(pipe, b"ours")
    write_text(pipe, "through")
    assert os.read(reader, 100) == b"through" and pipe.is_fifo()
    os.close(reader)
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe", "target"]


def test_linked_runs_are_found_once(tmp_path):
    for name in ("runs/a", "elsewhere/b"):
        (tmp_path / name / "args").mkdir(parents=True)
        (tmp_path / name / "args" / "args.json").write_text('{"method": "CSSL"}')
    (tmp_path / "runs/b").symlink_to(tmp_path / "elsewhere/b")
    (tmp_path / "runs/circle").symlink_to(tmp_path / "runs")
    (tmp_path / "runs/again").symlink_to(tmp_path / "runs/a")
    for places in ([tmp_path / "runs"], [tmp_path / "runs", f"{tmp_path}/elsewhere/../runs", tmp_path / "elsewhere"]):
        assert {run.path.resolve().name for run in find_runs(places)} == {"a", "b"} and len(find_runs(places)) == 2


def test_folders_that_cannot_be_read_are_named(tmp_path, monkeypatch):
    """To root, who may run the tests, no folder is closed."""
    for name in ("a", "closed"):
        (tmp_path / name / "args").mkdir(parents=True)
        (tmp_path / name / "args" / "args.json").write_text('{"method": "CSSL"}')
    real = os.scandir

    def scandir(place):
        if str(place).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(place))
        return real(place)

    monkeypatch.setattr(os, "scandir", scandir)
    assert [run.path.name for run in find_runs([tmp_path])] == ["a", "closed"]


@pytest.mark.parametrize("line", ['{"step": -64, "accuracy": 1}', f'{{"step": {10 ** 400}, "accuracy": 1}}',
                                  f'{{"step": 64, "accuracy": {10 ** 400}}}', '{"step": 64, "accuracy": 6666}',
                                  '{"step": 64, "accuracy": 66, "ece": -0.1}', '{"step": NaN, "accuracy": 1}'])
def test_numbers_that_cannot_be_are_damage(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text('{"step": 32, "accuracy": 50}\n' + line)
    run = Run(tmp_path).read()
    assert [report["step"] for report in run.reports] == [32]
    assert "metrics.jsonl, line 2 is unreadable" in run.problems


def test_claim_refuses_another_configuration_only_where_something_was_trained(tmp_path):
    config = RunConfig.of(CSSL, dataset="digits.1@40-1", train_dir=str(tmp_path))
    folder = Run(config.folder())
    folder.claim(config, {})
    other = config.replace(report_kimg=1.0)
    folder.claim(other, {})  # nothing is lost
    folder.add_report({"step": 64, "accuracy": 10.0, "ece": 0.1})
    with pytest.raises(UserError, match="holds a run with report_kimg=1.0, this command says report_kimg=0.5"):
        folder.claim(config, {})
    for damage in ("[]", "null", "{", ""):
        folder.args.write_text(damage)
        with pytest.raises(UserError, match="not readable"):
            folder.claim(config, {})


def test_checkpoints_are_found_by_their_files(tmp_path):
    folder = Run(tmp_path)
    folder.checkpoint_dir.mkdir()
    for number in (64, 1024, 128, 256):
        for ending in ("index", "data-00000-of-00001"):
            (folder.checkpoint_dir / f"model.ckpt-{number}.{ending}").write_text("x")
    (folder.checkpoint_dir / "model.ckpt-512.index").write_text("its data is missing")
    (folder.checkpoint_dir / "checkpoint").write_text("garbage")
    copy = folder.checkpoint_dir / "model.ckpt-64.index.mine"
    copy.touch()
    assert [os.path.basename(path) for path in folder.checkpoints()] == [
        "model.ckpt-64", "model.ckpt-128", "model.ckpt-256", "model.ckpt-1024"]
    folder.keep_checkpoints(2)
    import tensorflow as tf

    assert tf.train.latest_checkpoint(str(folder.checkpoint_dir)) == folder.checkpoint_at(1024)
    assert folder.checkpoints() == [folder.checkpoint_at(256), folder.checkpoint_at(1024)]
    assert copy.exists() and not copy.with_suffix("").exists()


def test_what_a_killed_writer_left_is_swept(tmp_path):
    code = ("import os, signal, sys; from pathlib import Path; from libml.writing import write_atomically\n"
            "write_atomically(Path(sys.argv[1]), lambda file: os.kill(os.getpid(), signal.SIGKILL))")
    config = RunConfig.of(CSSL, dataset="digits.1@40-1", train_dir=str(tmp_path))
    folder = Run(config.folder())
    targets = [folder.args, folder.stats / "predictions.npz", folder.report_file]
    for target in targets:
        assert subprocess.run([sys.executable, "-c", code, target], cwd=ROOT).returncode == -signal.SIGKILL
    kept = [folder.stats / ".hidden", folder.stats / ".notes-20240131"]
    for file in kept:
        file.touch()
    folder.checkpoint_dir.mkdir()
    (folder.checkpoint_dir / "model.ckpt-8.data-00000-of-00001.tempstate1234567").touch()
    assert len([file for file in folder.path.rglob(".*") if file.is_file()]) == len(targets) + 2
    folder.claim(config, {})
    assert [file for file in folder.path.rglob("*") if file.is_file() and file not in
            (folder.args, folder.environment_file)] == kept


def test_a_folder_above_a_single_run_stands_for_it(tmp_path):
    def add(name):
        folder = Run(tmp_path / name / "digits" / "CSSL")
        for file in (folder.args, *(folder.checkpoint_dir / f"model.ckpt-8.{end}" for end in
                                    ("index", "data-00000-of-00001"))):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("{}")
        return folder

    first = add("a")
    assert find_checkpoint(str(tmp_path)) == str(first.checkpoint_dir / "model.ckpt-8")
    assert open_run(str(tmp_path)).path == first.path
    add("b")
    with pytest.raises(UserError, match=f"holds 2 runs; name one of them, such as {first.path}"):
        find_checkpoint(str(tmp_path))
