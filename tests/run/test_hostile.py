"""What a hostile machine and a hostile user do: one line each, nothing lost. Real processes where it matters."""
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import ENVIRONMENT, ROOT
from helpers import Program

from cssl import CSSL, RunConfig, UPSMatch, cli, from_arrays
from cssl.program import exit_on_user_error
from libml import experiment, networks
from libml.data import files, sources
from libml.data.names import parse_name
from libml.devices import distribute
from libml.devices.slurm import slurm_cluster
from libml.errors import UserError
from libml.run import Run, find_runs
from libml.train import Trainer

FLAGS = ["--dataset=digits.1@40-1", "--batch=8", "--uratio=1", "--filters=8", "--scales=1", "--augment=d.d.x",
         "--report_kimg=0.0625", "--save_kimg=0.0625"]


def outcome(capsys, *flags, method=CSSL) -> tuple[int, str]:
    """Exit code and error line of a command, by the program's own way from flags to exit."""
    with pytest.raises(SystemExit) as exit_:
        exit_on_user_error(lambda: cli.run(method, ["cssl.py", *flags]))
    return exit_.value.code or 0, capsys.readouterr().err


def start(train_dir, *flags, **options) -> Program:
    return Program(["cssl.py", *FLAGS, f"--train_dir={train_dir}", *flags], train_dir, **options)


def wait_for(condition, process, timeout=120) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, process.output + process.error
        time.sleep(0.02)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of 32 updates, made in this process; tests work on copies."""
    folder = tmp_path_factory.mktemp("finished")
    assert cli.run(CSSL, ["cssl.py", *FLAGS, "--train_steps=32", f"--train_dir={folder}"]) == 0
    return folder


@pytest.fixture
def run(finished, tmp_path) -> Path:
    shutil.copytree(finished, tmp_path / "runs")
    return find_runs([tmp_path / "runs"])[0].path


def again(run: Path, steps: int = 32) -> int:
    """The same command on a run folder."""
    return cli.run(CSSL, ["cssl.py", *FLAGS, f"--train_steps={steps}", f"--train_dir={run.parents[2]}"])


def accuracies(run: Path) -> dict[int, float]:
    return {report["step"]: report["accuracy"] for report in Run(run).reports}


# Numbers, names, flags: checked before TensorFlow starts or a folder is made.

@pytest.mark.parametrize("flag", ["train_kimg", "report_kimg", "save_kimg", "schedule_kimg", "lr", "wd", "ema", "ath"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e400"])
def test_no_number_may_be_nan_or_infinite(capsys, tmp_path, flag, value):
    code, error = outcome(capsys, f"--{flag}={value}", f"--train_dir={tmp_path / 'runs'}")
    assert code == 2 and error.startswith(f"error: --{flag}=") and len(error.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("flags, message", [
    (["--dataset=digits.1@00-1"], "asks for no label at all"),
    (["--dataset=digits.1@" + "9" * 5000 + "-1"], "Malformed dataset name"),
    (["--batch=" + "9" * 5000], "batch"),
    (["--seed=18446744073709551616"], "--seed=18446744073709551616: expected a number from 0 to"),
    (["--image_size=1"], "--image_size=1: expected a number from 8 to 4096"),
    (["--train_steps=0"], "--train_steps=0: expected a positive number"),
    (["--train_dir=~nobody_here/x"], "--train_dir=~nobody_here/x: there is no user 'nobody_here'"),
    (["--dataset=folder:~nobody_here/x.1@4-0"], "there is no user 'nobody_here'"),
    (["--rerun=" + "x" * 300], "has 300 bytes; file systems take 255"),
    (["--dataset=folder:/" + "x" * 300 + ".1@4-0"], "file systems take 255"),
    (["--nojit=1"], "jit"),
    (["--train_dir=a\udcffb"], "expected text in UTF-8"),
    (["--train_dir="], "expected a folder"),
    (["--rerun=../.."], "the name of a folder within it"),
    (["--rerun=/tmp/x"], "the name of a folder within it"),
    (["--flagfile=/no/such/file"], "/no/such/file"),
    (["--eval_ckpt=~nobody_here/x"], "there is no user"),
    (["--eval_ckpt=/" + "x" * 300], "x"),
])
def test_bad_input_is_one_line(capsys, tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    code, error = outcome(capsys, *flags)
    assert code == 2 and message in error and len(error.splitlines()) == 1, error
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("flags", [
    ["--scales=16"], ["--scales=1000000000"], ["--repeat=1000000000"], ["--filters=100000000"],
    ["--batch=999999999999999999999"], ["--uratio=100000000"], ["--K=100000000"], ["--arch=cnn13", "--filters=100000"]])
def test_what_cannot_fit_is_refused_with_an_estimate(capsys, tmp_path, flags):
    code, error = outcome(capsys, "--dataset=digits.1@40-1", f"--train_dir={tmp_path / 'runs'}", *flags)
    assert code == 2 and "GB of memory" in error and len(error.splitlines()) == 1, error
    assert not (tmp_path / "runs").exists()


def test_upper_bounds_of_methods_own_numbers():
    with pytest.raises(UserError, match="mc_passes"):
        RunConfig.of(UPSMatch, mc_passes=10 ** 9)


@pytest.mark.parametrize("prior", ["nan," + ",".join("1" * 9), "inf," + ",".join("1" * 9), ",".join("0" * 10)])
def test_a_prior_is_made_of_numbers(capsys, tmp_path, prior):
    code, error = outcome(capsys, *FLAGS, f"--p_unlabeled={prior}", f"--train_dir={tmp_path / 'runs'}")
    assert code == 2 and "expected 10 non-negative numbers" in error and not (tmp_path / "runs").exists()


def test_help_on_a_terminal_that_knows_only_ascii(command):
    assert "--dataset" in command("cssl.py", "--help", PYTHONIOENCODING="ascii").stdout


@pytest.mark.parametrize("environment", [
    {"SLURM_STEP_NUM_TASKS": "abc", "SLURM_STEP_NODELIST": "n[1-2]"},
    {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_PROCID": "-1"},
    {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_JOB_ID": "x"}])
def test_what_slurm_never_says(environment):
    with pytest.raises(UserError, match="expected a whole number, as srun sets it"):
        slurm_cluster(environment)


@pytest.mark.parametrize("cluster, task", [
    ({"worker": "a:1"}, {"type": "worker", "index": 0}), ({"worker": ["a", "b"]}, {"type": "worker", "index": 0}),
    ({"worker": ["a:1", "a:1"]}, {"type": "worker", "index": 0}),
    ({"worker": ["a:1", "b:1"]}, {"type": "ps", "index": 0}),
    ({"worker": ["a:1", "b:1"], "ps": ["c:1"]}, {"type": "worker", "index": 0}),
    ({"worker": ["a:1", "b:1"]}, {"type": "evaluator", "index": 0}),
    ({"worker": ["a:1", "b:1"]}, {"type": "worker", "index": -1}),
    ({"worker": ["a:1", "b:99999"]}, {"type": "worker", "index": 0}), ([], {}), (None, None)])
def test_clusters_that_cannot_work(cluster, task):
    with pytest.raises(UserError, match="TF_CONFIG is not usable"):
        distribute.find_cluster("auto", {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})})


@pytest.mark.parametrize("change, message", [
    (dict(class_names=["one"]), "Got 1 class names for 10 classes"), (dict(num_labels=0), "no label at all"),
    (dict(valid=-1), "valid=-1: expected whole numbers, 0 or more"), (dict(seed=-1), "seed=-1"),
    (dict(labels=np.eye(10, dtype=int)[np.arange(20) % 10]), "one whole number per image"),
    (dict(labels=np.array([str(i % 10) for i in range(20)])), "one whole number per image"),
    (dict(labels=np.arange(20) % 10 + 0.5), "one whole number per image"), (dict(name="cifar10"), "expected arrays")])
def test_arrays_that_make_no_sense(change, message):
    arrays = dict(images=np.zeros((20, 8, 8), np.uint8), labels=np.arange(20) % 10,
                  test_images=np.zeros((10, 8, 8), np.uint8), test_labels=np.arange(10))
    with pytest.raises(UserError, match=message):
        from_arrays(**arrays | change)


def test_bytes_and_floats_are_predicted_alike():
    network = networks.build("resnet", num_classes=4, image_shape=(8, 8, 3), filters=4, repeat=1, seed=0)
    model = CSSL(network, 4)
    images = np.random.RandomState(0).randint(0, 256, (6, 8, 8, 3)).astype(np.uint8)
    floats = images.astype(np.float32) / 127.5 - 1
    np.testing.assert_allclose(model.predict(images, verbose=0), model.predict(floats, verbose=0), atol=1e-5)


# Convolutions that oneDNN gets wrong.

@pytest.mark.slow
def test_networks_that_onednn_gets_wrong_run_without_it(command):
    code = ("import sys; from cssl import CSSL, cli, RunConfig; "
            "cli.start_tensorflow(RunConfig.of(CSSL, filters=int(sys.argv[1])).trusts_onednn); "
            "from libml.devices import distribute; print(distribute.onednn_is_on()); "
            "absent = {'sklearn', 'matplotlib'}; print(absent & set(sys.modules))")
    late = f"{code}; import matplotlib.pyplot, sklearn.datasets"
    assert command("-c", late, "8", TF_ENABLE_ONEDNN_OPTS="1").stdout.split() == ["False", "set()"]
    assert command("-c", code, "32", TF_ENABLE_ONEDNN_OPTS="1").stdout.split() == ["True", "set()"]


def test_a_python_user_is_told_of_onednn(monkeypatch, tmp_path):
    """The decision is made when TensorFlow is imported: afterwards a run is refused, an own network warned about."""
    monkeypatch.setattr(distribute, "onednn_is_on", lambda: True)
    with pytest.raises(UserError, match="filters=8: oneDNN.* Set TF_ENABLE_ONEDNN_OPTS=0"):
        experiment.train(RunConfig.of(CSSL, dataset="digits.1@40-1", filters=8, train_dir=str(tmp_path / "runs")))
    assert not (tmp_path / "runs").exists()

    def own(filters):
        return keras.Sequential([keras.Input((8, 8, 3)), keras.layers.Conv2D(filters, 3), keras.layers.Flatten(),
                                 keras.layers.Dense(4)])

    views = {name: tf.zeros([4, 8, 8, 3]) for name in ("labeled", "weak", "strong")} | {"label": tf.range(4)}
    narrow, wide = CSSL(own(12), 4), CSSL(own(16), 4)
    narrow.predict(np.zeros((1, 8, 8, 3), np.float32), verbose=0)  # no gradients, no warning
    with pytest.warns(UserWarning, match="convolutions with 12 channels: oneDNN"):
        narrow.train_on_views(views)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wide.train_on_views(views)


# Two processes, damaged folders, full disks, lost terminals.

@pytest.mark.slow
def test_two_processes_on_one_run(tmp_path):
    """The second is refused with one line; the first goes on undisturbed."""
    first = start(tmp_path, "--train_steps=100000")
    try:
        wait_for(lambda: any(path.stat().st_size for path in tmp_path.rglob("metrics.jsonl")), first)
        second = start(tmp_path, "--train_steps=100000")
        assert second.wait() == 2 and len(second.error.splitlines()) == 1, second.error
        assert f"is being trained by process {first.pid} on " in second.error
        assert first.poll() is None
    finally:
        first.send_signal(signal.SIGTERM)
        code = first.wait()
    assert code == 143 and "Traceback" not in first.error
    steps = [json.loads(line)["step"] for path in tmp_path.rglob("metrics.jsonl")
             for line in path.read_text().splitlines()]
    assert steps == sorted(set(steps)) and not list(tmp_path.rglob("lock*"))


@pytest.mark.parametrize("damage", ["garbage", "", '{"step": 64}\n', "truncated", "missing"])
def test_damaged_reports_come_back_from_the_events(run, damage, capsys):
    before, log = accuracies(run), run / "metrics.jsonl"
    text = log.read_text()
    if damage == "missing":
        log.unlink()
    else:
        log.write_text(text[:-40] if damage == "truncated" else damage)
    assert again(run) == 0
    assert accuracies(run) == pytest.approx(before, rel=1e-6)  # events hold float32
    assert f"median of the last {len(before)} reports" in capsys.readouterr().out
    assert len(list((run / "tf").glob("events*"))) == 1
    copies = list(run.glob("metrics.jsonl.damaged*"))
    assert [copy.read_text() for copy in copies] == ([] if damage in ("missing", "") else [
        text[:-40] if damage == "truncated" else damage])


def test_a_clock_that_was_put_back(run):
    """All files are ten days younger than now, the event file by its name, too: the run continues as ever."""
    before = accuracies(run)
    folder, future = Run(run), time.time() + 864_000
    for file in (run / "tf").glob(f"{Path(folder.checkpoints()[-1]).name}.*"):
        file.unlink()
    (events,) = (run / "tf").glob("events*")
    later = re.sub(r"tfevents\.\d+", f"tfevents.{int(future)}", events.name)
    events.rename(events.with_name(later))
    for file in run.rglob("*"):
        os.utime(file, (future, future))
    assert again(run) == 0
    assert accuracies(run) == before
    (run / "metrics.jsonl").unlink()
    assert accuracies(run) == pytest.approx(before, rel=1e-6)  # of the events, which are all there, too
    assert len(list((run / "tf").glob("events*"))) == 1


def test_events_of_a_run_whose_name_looks_like_a_pattern(run):
    before, odd = accuracies(run), run.with_name("a[b]*")
    run.rename(odd)
    (odd / "metrics.jsonl").unlink()
    assert accuracies(odd) == pytest.approx(before, rel=1e-6)  # events hold float32


def test_without_reports_and_events_nothing_is_invented(run, capsys):
    (run / "metrics.jsonl").write_text("garbage\n")
    for file in (run / "tf").glob("events*"):
        file.unlink()
    assert again(run) == 0
    output = capsys.readouterr().out
    assert "the reports of this run are lost" in output and "nan" not in output
    assert (run / "metrics.jsonl.damaged").read_text() == "garbage\n"


@pytest.mark.parametrize("text", ["", "garbage", 'model_checkpoint_path: "mod', None])
def test_checkpoints_are_found_whatever_the_list_says(run, text, capsys):
    listing = run / "tf" / "checkpoint"
    listing.unlink() if text is None else listing.write_text(text)
    assert again(run) == 0
    assert "This run is finished: 32 updates" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["index", "data"])
def test_a_checkpoint_that_lacks_a_file_is_named(run, kind, capsys, program):
    older, newest = (Path(path).name for path in Run(run).checkpoints()[-2:])
    (lost,) = (run / "tf").glob(f"{newest}.{kind}*")
    lost.unlink()
    theirs = run / "tf" / "events.out.tfevents.1700000000.host.1.0.v2"
    theirs.write_bytes(b"of a program of the user's")
    line = f"{newest} lacks its {kind} file; {run / 'tf' / older} is used instead"
    assert line in program(CSSL, f"--eval_ckpt={run}").stderr
    assert again(run) == 0
    output = capsys.readouterr().out
    assert line in output and f"Continuing from {run / 'tf' / older}" in output
    assert theirs.exists() and len(list((run / "tf").glob("events*"))) == 2
    assert not Run(run).lost_checkpoint()
    for file in (run / "tf").glob(f"model.ckpt-*.{kind}*"):
        file.unlink()
    assert f"lacks its {kind} file; none is used" in program(CSSL, f"--eval_ckpt={run}", code=2).stderr


@pytest.mark.parametrize("part", ["tf", "stats", "args"])
def test_a_file_where_a_folder_should_be(run, part, capsys):
    shutil.rmtree(run / part)
    (run / part).write_text("")
    code, error = outcome(capsys, *FLAGS, "--train_steps=32", f"--train_dir={run.parents[2]}")
    assert code == 2 and len(error.splitlines()) == 1 and "error: " in error


@pytest.mark.parametrize("text", ["[]", "null", "{", "", '"x"', '{"batch": "many"}'])
def test_a_damaged_configuration(run, text, capsys):
    before = (run / "metrics.jsonl").read_text()
    (run / "args" / "args.json").write_text(text)
    for flags in ([*FLAGS, "--train_steps=32", f"--train_dir={run.parents[2]}"], [f"--eval_ckpt={run}"]):
        code, error = outcome(capsys, *flags)
        assert code == 2 and len(error.splitlines()) == 1, error
    assert (run / "metrics.jsonl").read_text() == before


def test_a_folder_in_which_nothing_was_trained_is_taken_over(tmp_path):
    wrong = cli.configuration(CSSL, ["cssl.py", *FLAGS, "--train_steps=99", f"--train_dir={tmp_path}"])
    Run(wrong.folder()).claim(wrong, {})
    assert cli.run(CSSL, ["cssl.py", *FLAGS, "--train_steps=8", f"--train_dir={tmp_path}"]) == 0


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path):
    """A limit on the size of files stands in for the disk: the checkpoint is the first that does not fit."""
    process = start(tmp_path, "--train_steps=16", limit=20_000)
    assert process.wait() == 2 and len(process.error.splitlines()) == 1, process.error
    assert "Cannot write" in process.error and "Traceback" not in process.output
    run = find_runs([tmp_path])[0].path
    assert not [path for path in run.rglob(".*") if path.is_file()] and not (run / "lock.json").exists()
    process = start(tmp_path, "--train_steps=16")  # there is room again
    assert process.wait() == 0 and len(accuracies(run)) == 2, process.error


@pytest.mark.slow
def test_the_run_folder_goes_away(tmp_path):
    process = start(tmp_path, "--train_steps=100000")
    wait_for(lambda: any(path.stat().st_size for path in tmp_path.rglob("metrics.jsonl")), process)
    shutil.rmtree(next(tmp_path.glob("digits*")), ignore_errors=True)
    assert process.wait() == 2 and len(process.error.splitlines()) == 1, process.error
    assert "Cannot write" in process.error or "was moved or deleted" in process.error


@pytest.mark.slow
def test_a_lost_reader_does_not_end_training(tmp_path):
    """As in `python cssl.py … | head -1`, and when a terminal is closed."""
    process = subprocess.Popen([sys.executable, "cssl.py", *FLAGS, "--train_steps=32", f"--train_dir={tmp_path}"],
                               cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert "CSSL on digits" in process.stdout.readline()
    process.stdout.close()
    process.send_signal(signal.SIGHUP)
    error = process.stderr.read()
    assert process.wait(timeout=120) == 0 and error == ""
    log = next(tmp_path.rglob("train.log")).read_text()
    assert "Finished after 32 updates" in log and "Result (median" in log


def test_evaluation_says_what_it_evaluates(run, capsys):
    code, error = outcome(capsys, f"--eval_ckpt={run}", "--filters=32")
    assert code == 2 and "--filters=32 contradicts" in error and "filters=8" in error
    assert cli.run(CSSL, ["cssl.py", f"--eval_ckpt={run}", "--dataset=digits.2@80-1"]) == 0
    assert "CSSL on digits.2@80-1, 32 updates" in capsys.readouterr().out


@pytest.mark.slow
def test_evaluation_needs_no_gradients_and_so_may_use_onednn(run, command):
    assert "32 updates" in command("cssl.py", f"--eval_ckpt={run}").stdout


def test_a_length_that_is_not_the_papers_is_said(tmp_path):
    """People type 1048576 and mean 2^20 updates; in kimg that is 16 times as much."""
    seen = []
    config = RunConfig.of(CSSL, dataset="digits.1@40-1", train_kimg=1048576, train_dir=str(tmp_path))
    digits = experiment.load(config)
    run = Run(tmp_path, config=config, data=digits, model=experiment.build(config.replace(filters=16), digits))
    trainer = Trainer(run, tf.distribute.get_strategy())
    trainer.log = seen.append
    experiment._announce(trainer)
    assert any("16 times the length of the paper's runs" in line for line in seen)


def test_hidden_and_loose_image_files_are_named(tmp_path):
    for part in ("train/a", "train/b", "unlabeled"):
        (tmp_path / "pictures" / part).mkdir(parents=True)
    pixels = np.random.RandomState(0).randint(0, 256, (9, 9, 3)).astype(np.uint8)
    from PIL import Image

    for name in ("train/a/1", "train/a/2", "train/b/1", "train/b/2", "train/loose", "train/a/.hidden"):
        Image.fromarray(pixels).save(tmp_path / "pictures" / f"{name}.png")
    source = sources.files_source(files.listing(tmp_path / "pictures", is_csv=False), 8, tmp_path / "data", 1)
    assert len(source.labels) + len(source.test_labels) == 4
    note, other, _, twins = source.notes  # of four equal files in two classes, two are for the test
    assert "1 pictures" in other and "of two classes" in other
    assert "images in no class folder (1)" in note and "loose.png" in note
    assert "hidden files or folders (1)" in note and ".hidden.png" in note
    assert "2 of the 2 test images" in twins and "same bytes" in twins


def test_next_commands_can_be_pasted(tmp_path, capsys):
    assert cli.run(CSSL, ["cssl.py", *FLAGS, "--train_steps=8", f"--train_dir={tmp_path / 'my runs'}"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "cssl-table" in line)
    import shlex

    assert Path(shlex.split(line)[1]).is_dir()


@pytest.mark.slow
def test_a_peer_that_never_appears_is_one_line(tmp_path):
    """The wait is TensorFlow's and deaf; another process ends it. Two seconds here instead of ten minutes."""
    code = ("import sys; from cssl import cli; cli.start_tensorflow(); from libml import config; "
            "from libml.devices import distribute; distribute.START_SECONDS = 2; "
            "distribute.create_strategy(config.ScaleOptions(), {'TF_CONFIG': sys.argv[1]})")
    cluster = {"cluster": {"worker": ["127.0.0.1:45671", "127.0.0.1:45672"]}, "task": {"type": "worker", "index": 1}}
    process = Program(["-c", code, json.dumps(cluster)], tmp_path)
    assert process.wait() == -9
    assert "appeared within 2 s" in process.error.splitlines()[-1] and "Traceback" not in process.error


def test_time_left_is_not_that_of_compiling():
    from libml.train import _Clock

    clock = _Clock(images_per_update=8)
    clock.add(1, 60.0, 1)  # the first call compiles
    clock.started -= 2.0  # two seconds of ten updates since then
    clock.add(10, 2.0, 10)
    rate, left = clock.report(updates_left=100)
    assert rate == pytest.approx(40) and left == pytest.approx(20, rel=0.05)


def test_names_are_parsed_in_reasonable_time():
    started = time.perf_counter()
    with pytest.raises(UserError):
        parse_name("." * 20_000 + "@")
    assert time.perf_counter() - started < 10 and math.isfinite(started)


def test_memory_of_logical_devices_cannot_be_changed_late():
    with pytest.raises(UserError, match="used TensorFlow before"):
        distribute.create_strategy(RunConfig.of(CSSL, num_devices=64).scale)
    assert tf.distribute.get_strategy() is not None


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", "2>&-", ">&-"])
def test_closed_streams_become_no_files(tmp_path, closed):
    """Or what libraries say to a terminal would stand in a checkpoint, and a progress bar would end the run."""
    code = ("import sys; from tqdm import tqdm; from cssl import program; program.exit_on_user_error(lambda: "
            f"[print(1), sys.stderr.write('x'), [*tqdm([1])], open({str(tmp_path / 'x')!r}, 'w').fileno()][-1])")
    done = subprocess.run(["bash", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, code], cwd=ROOT)
    assert done.returncode >= 3 and done.returncode != 120  # the number of a file that is opened then
