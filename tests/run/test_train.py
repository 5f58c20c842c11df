"""The real program on tiny runs: files and tags, stopping and continuing, bad input."""
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from helpers import Program, invoke

from cssl import cli, method, methods
from cssl.cssl import CSSL
from cssl.fixmatch import FixMatch
from libml import experiment
from libml.config import RunConfig
from libml.results.metrics import METRICS
from libml.run import Run, find_runs

TINY = ["--dataset=digits.1@40-1", "--batch=8", "--uratio=2", "--filters=8", "--scales=1", "--report_kimg=0.0625",
        "--save_kimg=0.0625"]
PLAIN = [*TINY, "--augment=d.d.x"]  # without CTAugment, whose graph takes longer to build than all the rest of a run


def only_run(folder) -> Path:
    found = find_runs([folder])
    assert len(found) == 1
    return found[0].path


def start(train_dir, flags):
    return Program(["cssl.py", *flags, "--train_steps=48", f"--train_dir={train_dir}"], train_dir)


def wait_for_reports(process, folder, count, timeout=180):
    """Waits until a run has written so many reports; returns False if it ended before."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if process.poll() is not None:
            return False
        lines = sum(len(path.read_text().splitlines()) for path in Path(folder).rglob("metrics.jsonl"))
        if lines >= count:
            return True
        time.sleep(0.02)
    raise AssertionError(f"no {count} reports within {timeout} s")


def state(run: Path) -> dict[str, bytes]:
    """Every variable of the newest checkpoint, as bytes."""
    reader = tf.train.load_checkpoint(str(run / "tf"))
    return {key: np.asarray(reader.get_tensor(key)).tobytes() for key in reader.get_variable_to_shape_map()
            if "save_counter" not in key and key != "_CHECKPOINTABLE_OBJECT_GRAPH"}


def reports(run: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "images_per_s"} for line in lines]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, program):
    """An undisturbed run of 48 updates, a report every 8."""
    folder = tmp_path_factory.mktemp("finished")
    done = program(CSSL, *TINY, "--train_steps=48", f"--train_dir={folder}")
    return only_run(folder), done.stdout


@pytest.fixture(scope="module")
def plain(tmp_path_factory, program):
    """The same without CTAugment, made in this process."""
    folder = tmp_path_factory.mktemp("plain")
    program(CSSL, *PLAIN, "--train_steps=48", f"--train_dir={folder}")
    return only_run(folder)


def test_output_tells_the_whole_story(finished):
    run, output = finished
    for text in ("CSSL on digits.1@40-1: 40 labelled, 1436 unlabelled, 1 validation, 360 test", "batch=8,",
                 "repeat=1 (preset)", "0.375 kimg = 384 labelled images = 48 updates = 9.6 epochs of the labelled",
                 "0.5 epochs of the unlabelled ones", "weights", f"files: {run}", "time left",
                 "Result (median of the last 6 reports", "tensorboard --logdir", "cssl-report"):
        assert text in output, text
    assert (run / "train.log").read_text().strip() == output.strip()


def test_folder_layout_is_the_originals(finished):
    run, _ = finished
    assert run.parent.name == "CTAugment_depth2_th0.80_decay0.990"
    assert run.parent.parent.name == "digits.d.d.d.1@40-1"
    assert run.name.startswith("CSSL_alpha_bound0.0_archresnet_batch8_")
    config = json.loads((run / "args" / "args.json").read_text())
    assert config["method"] == "CSSL" and config["dataset"] == "digits.1@40-1" and config["ema"] == 0.98
    assert set(json.loads((run / "args" / "environment.json").read_text())) >= {"commit", "tensorflow", "command"}
    for name in ("accuracy", "ece"):
        assert set(json.loads((run / "stats" / f"{name}.json").read_text())) == {"last01", "last10", "last20", "last50"}
    for name in ("predictions.npz", "pseudo_labels.npz", "rates.npy", "rates.json"):
        assert (run / "stats" / name).exists()


def test_tags_are_the_originals_in_both_logs(finished):
    run, _ = finished
    metrics = reports(run)
    assert [report["step"] for report in metrics] == [64, 128, 192, 256, 320, 384]
    tags = {f"{kind}{model}{part}" for kind in ("accuracy", "ece") for model in ("", "/raw")
            for part in ("", "/valid", "/train_labeled")}
    tags |= {"losses/xe", "losses/xeu", "losses/wd", "monitors/lr", "monitors/mask", "monitors/alpha", "metrics/kld",
             "monitors/pseudo_accuracy", "monitors/pseudo_accuracy_masked"}
    assert tags <= set(metrics[0])
    (run / "metrics.jsonl").rename(run / "hidden")  # without it, the event files are read
    try:
        from_events = Run(run).reports
    finally:
        (run / "hidden").rename(run / "metrics.jsonl")
    assert [report["step"] for report in from_events] == [64, 128, 192, 256, 320, 384]
    for tag in tags:
        np.testing.assert_allclose(from_events[-1][tag], metrics[-1][tag], rtol=1e-6)  # events hold float32


def test_result_is_the_median_not_the_best(finished):
    run, output = finished
    values = [report["accuracy"] for report in reports(run)]
    stored = json.loads((run / "stats" / "accuracy.json").read_text())
    assert stored["last20"] == pytest.approx(np.median(values)) and stored["last01"] == pytest.approx(values[-1])
    assert f"accuracy {np.median(values):.2f} %" in output


def test_page_shows_the_rates_of_a_real_run(finished, tmp_path):
    assert invoke("report", finished[0], "-o", tmp_path / "report.html").code == 0
    page = (tmp_path / "report.html").read_text()
    assert "CTAugment rates" in page and "None stored" not in page


def test_finished_run_says_so_and_changes_nothing(finished, program):
    run, _ = finished
    before, metrics = state(run), (run / "metrics.jsonl").read_text()
    done = program(CSSL, *TINY, "--train_steps=48", f"--train_dir={run.parents[2]}")
    assert "This run is finished" in done.stdout and "Result (median" in done.stdout
    assert state(run) == before and (run / "metrics.jsonl").read_text() == metrics


@pytest.mark.slow
def test_killed_at_random_moments_the_run_ends_bit_identical(finished, tmp_path, program):
    """SIGKILL twice, whatever the program is doing, then let it finish."""
    rng = random.Random(os.environ.get("PYTEST_KILL_SEED", "1"))
    for _ in range(2):
        process = start(tmp_path, TINY)
        already = sum(len(path.read_text().splitlines()) for path in tmp_path.rglob("metrics.jsonl"))
        if wait_for_reports(process, tmp_path, already + 1):
            time.sleep(rng.uniform(0, 0.2))  # less than between two of the six reports: two kills leave some to do
        process.kill()
    assert "Continuing from" in program(CSSL, *TINY, "--train_steps=48", f"--train_dir={tmp_path}").stdout
    run, (whole, _) = only_run(tmp_path), finished
    assert reports(run) == reports(whole)
    assert state(run) == state(whole)
    for name in ("accuracy.json", "ece.json"):
        assert (run / "stats" / name).read_text() == (whole / "stats" / name).read_text()
    np.testing.assert_array_equal(np.load(run / "stats" / "rates.npy"), np.load(whole / "stats" / "rates.npy"))


@pytest.mark.slow
def test_signals_save_and_the_next_start_continues_bit_identically(plain, tmp_path, program):
    """SIGTERM, then SIGINT to the process that continued, then to the end."""
    for times, (number, code) in enumerate([(signal.SIGTERM, 143), (signal.SIGINT, 130)]):
        process = start(tmp_path, PLAIN)
        already = sum(len(path.read_text().splitlines()) for path in tmp_path.rglob("metrics.jsonl"))
        assert wait_for_reports(process, tmp_path, already + 1)
        process.send_signal(number)
        assert process.wait() == code, process.error
        assert f"Stopped by {number.name}" in process.output and "Traceback" not in process.output + process.error
        assert ("Continuing from" in process.output) == (times > 0)
    assert "Continuing from" in program(CSSL, *PLAIN, "--train_steps=48", f"--train_dir={tmp_path}").stdout
    run = only_run(tmp_path)
    assert reports(run) == reports(plain) and state(run) == state(plain)


def test_damaged_newest_checkpoint_is_passed_over(plain, tmp_path, program):
    copy = copy_of(plain, tmp_path)
    newest = copy / "tf" / "model.ckpt-384.data-00000-of-00001"
    newest.write_bytes(newest.read_bytes()[:1000])
    done = program(CSSL, *PLAIN, "--train_steps=48", f"--train_dir={tmp_path}")
    assert "model.ckpt-384 is damaged" in done.stdout and "model.ckpt-320" in done.stdout
    assert reports(copy) == reports(plain) and state(copy) == state(plain)


def test_another_configuration_in_the_same_folder_is_refused(finished, program):
    run, _ = finished
    before = state(run)
    flags = [flag for flag in TINY if "report_kimg" not in flag]
    done = program(CSSL, *flags, "--report_kimg=0.125", "--train_steps=48", f"--train_dir={run.parents[2]}", code=2)
    assert "report_kimg=0.0625, this command says report_kimg=0.125" in done.stderr
    assert state(run) == before


def copy_of(run: Path, folder: Path) -> Path:
    subprocess.run(["cp", "-r", str(run.parents[2]) + "/.", str(folder)], check=True)
    return folder / run.relative_to(run.parents[2])


def test_without_its_checkpoints_a_run_is_not_started_anew(finished, tmp_path, program):
    run = copy_of(finished[0], tmp_path)
    before = (run / "metrics.jsonl").read_text()
    for file in (run / "tf").glob("*ckpt*"):
        file.unlink()
    (run / "tf" / "checkpoint").unlink()
    done = program(CSSL, *TINY, "--train_steps=48", f"--train_dir={tmp_path}", code=2)
    assert "has reports up to 0.375 kimg, but no checkpoint" in done.stderr
    assert (run / "metrics.jsonl").read_text() == before and list((run / "tf").glob("events*"))


def test_a_run_is_lengthened_only_within_its_cosine(finished, program):
    run, _ = finished
    done = program(CSSL, *TINY, "--train_steps=96", f"--train_dir={run.parents[2]}", code=2)
    assert "schedule_kimg=0.375, this command says schedule_kimg=0.75" in done.stderr
    assert "needs its final length as --schedule_kimg from the start" in done.stderr


@pytest.mark.slow
def test_means_of_a_report_are_over_the_updates_since_the_last(tmp_path):
    """A run of 12 updates reports at 8 and at its end; lengthened, at 16: the mean of 4, not of 8."""
    flags = ["cssl.py", *PLAIN, "--schedule_kimg=1", f"--train_dir={tmp_path}"]
    for steps in (12, 16):
        assert cli.run(FixMatch, [*flags, f"--train_steps={steps}"]) == 0
    found = {report["step"] // 8: report["monitors/lr"] for report in reports(only_run(tmp_path))}
    rates = 0.03 * np.cos(7 * np.pi / 16 * np.arange(16) * 8 / 1024)
    expected = {8: rates[:8].mean(), 12: rates[8:12].mean(), 16: rates[12:].mean()}
    assert found == pytest.approx(expected, rel=1e-6)


def test_environment_without_git(monkeypatch):
    assert experiment.environment_facts()["commit"]
    monkeypatch.setenv("PATH", "")
    assert experiment.environment_facts()["commit"] == "unknown"


def test_a_commit_is_dirty_if_the_program_has_changed(tmp_path):
    def git(*arguments):
        subprocess.run(["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", *arguments], check=True,
                       stdout=subprocess.PIPE)

    assert experiment.commit_of(tmp_path) == "unknown"
    (tmp_path / "docs").mkdir()
    files = [tmp_path / name for name in ("README.md", "docs/runs.jsonl", "program.py")]
    git("init", "--quiet")
    for file in files:
        file.write_text("first")
    git("add", ".")
    git("commit", "--quiet", "--message=first")
    clean = experiment.commit_of(tmp_path)
    assert len(clean) >= 7
    found = []
    for file in files:
        file.write_text("second")
        found.append(experiment.commit_of(tmp_path))
    assert found == [clean, clean, f"{clean}-dirty"]


def test_eval_ckpt_takes_run_folder_or_file(finished, program):
    run, _ = finished
    last = reports(run)[-1]
    for path in (run, run / "tf", run / "tf" / "model.ckpt-384.index"):
        output = program(FixMatch, f"--eval_ckpt={path}").stdout  # the run knows that it is CSSL
        assert "model.ckpt-384: CSSL on digits.1@40-1, 48 updates" in output
        row = next(line for line in output.splitlines() if line.startswith("test")).split()
        expected = [last[f"{metric}{model}"] for model in ("", "/raw") for metric in METRICS]
        np.testing.assert_allclose([float(x) for x in row[1:]], expected, atol=0.006)  # two decimals are printed


def test_a_loss_that_is_no_number_stops_the_run(program, tmp_path):
    done = program(CSSL, *PLAIN, "--train_steps=200", f"--train_dir={tmp_path}", "--lr=1e12", code=2)
    update = int(re.search(r"The loss is NaN or infinite at update (\d+): .*losses/xe = ", done.stderr)[1])
    assert update <= 200
    assert "Last good checkpoint:" in done.stderr


@pytest.mark.parametrize("flags, message", [
    (["--dataset=digits.1@40"], "Malformed dataset name"),
    (["--dataset=digits.1@40-1", "--augment=d.d"], "labeled.weak.strong"),
    (["--dataset=digits.1@40-1", "--augment=d.d.aa"], "aa"),
    (["--dataset=digits.1@40-1", "--batch=0"], "--batch=0: expected a positive number"),
    (["--dataset=digits.1@40-1", "--confidence=1.5"], "expected a number from 0 to 1"),
    (["--dataset=digits.1@40-1", "--arch=vgg"], "arch"),
    (["--dataset=digits.1@40-1", "--reference=both"], "reference"),
    (["--dataset=digits.1@40-1", "--train_steps=1", "--train_kimg=1"], "both say how long"),
    (["--dataset=digits.1@40-1", "--train_kimg=2", "--schedule_kimg=1"], "shorter than --train_kimg=2.0"),
    (["--dataset=digits.1@40-1", "--p_unlabeled=1,2"], "expected 10 non-negative numbers"),
    (["--batchsize=3"], "Unknown command line flag 'batchsize'"),
    (["something"], "Unexpected argument 'something'"),
    (["--eval_ckpt=/no/such/run"], "No checkpoint at /no/such/run"),
])
def test_bad_flags_are_one_line(flags, message, monkeypatch, capsys, tmp_path):
    """In this process: the way from flags to exit code is the program's own."""
    monkeypatch.setattr(sys, "argv", ["cssl.py", f"--train_dir={tmp_path / 'runs'}", *flags])
    with pytest.raises(SystemExit) as exit_:
        cli.main(CSSL)
    captured = capsys.readouterr()
    assert exit_.value.code == 2 and message in captured.err
    assert len(captured.err.strip().splitlines()) == 1 and not list((tmp_path).rglob("args.json"))


def test_unwritable_train_dir_is_one_line(program, tmp_path):
    (tmp_path / "file").write_text("")
    done = program(CSSL, *PLAIN, "--train_steps=8", f"--train_dir={tmp_path / 'file'}", code=2)
    assert "Cannot write to" in done.stderr


@pytest.mark.parametrize("module, own", [("cssl", "alpha_bound"), ("fixmatch", "confidence"), ("upsmatch", "conf_p")])
def test_help_shows_the_methods_own_flags_grouped(module, own):
    text = cli.help_text(method(module))
    places = [text.index(word) for word in ("--dataset=digits", "--train_steps", f"--{own}", "data:", "network:",
                                            "training:")]
    assert places == sorted(places)
    assert "tau" in text and "--lr=0.03 " in text
    assert ("alpha_bound" in text) == (module == "cssl")


@pytest.mark.parametrize("name", sorted(methods()))
def test_help_fits_two_screens(name):
    lines = cli.help_text(method(name)).splitlines()
    assert len(lines) <= 100 and max(map(len, lines)) <= 120
    shown = [match[1] for line in lines if (match := re.match(r"  --(?:\[no\])?(\w+)", line))]
    declared = [option for option, field in RunConfig.fields(method(name)).items() if field.metadata["flag"]]
    assert sorted(shown) == sorted([*declared, "train_steps"])


@pytest.mark.slow
def test_cifar10_with_a_small_net(real_data_dir, command, tmp_path):
    """50 updates on real images: the labelled loss must fall below that of guessing, ln 10."""
    # 16 filters: oneDNN computes them right, and fast.
    command("cssl.py", "--dataset=cifar10.3@250-1", "--batch=16", "--uratio=2", "--filters=16", "--scales=2",
            "--repeat=1", "--ema=0.9", "--bn_momentum=0.9", "--augment=d.d.x", "--train_steps=50",
            "--report_kimg=0.78125", f"--train_dir={tmp_path}", f"--data_dir={real_data_dir}")
    last = reports(only_run(tmp_path))[-1]
    assert last["step"] == 800 and last["losses/xe"] < 2.25 and last["accuracy"] > 15


@pytest.mark.slow
def test_recomputing_from_the_command_line(program, tmp_path):
    """A run may continue with --recompute, on networks that have blocks; others are refused in one line."""
    tiny = ["--dataset=digits.1@40-1", "--filters=16", "--scales=1", "--batch=4", "--uratio=1", "--augment=d.d.x",
            "--schedule_kimg=1", f"--train_dir={tmp_path}"]
    program(CSSL, *tiny, "--train_steps=1")
    done = program(CSSL, *tiny, "--train_steps=2", "--recompute")
    assert "Continuing from" in done.stdout and "recompute=True" in done.stdout
    done = program(CSSL, *tiny, "--train_steps=1", "--arch=cnn13", "--recompute", code=2)
    assert done.stderr.count("\n") == 1 and "cnn13 has no residual blocks to compute again" in done.stderr
