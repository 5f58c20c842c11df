"""Real runs, two methods and two seeds, become a table, curves and a report with one command each."""
import csv
import io
import signal
import time

import numpy as np
import pytest
from helpers import Program, invoke
from PIL import Image

import cssl
from cssl.tools import export, predict
from libml.run import find_runs

METHODS = ("cssl", "supervised")
SLOWER = """import time
from cssl import {0}, cli
from libml.train import Trainer
save = Trainer.save
Trainer.save = lambda trainer: (save(trainer), time.sleep(0.2))  # leaves the processors to the tools
cli.main({0})
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory, program):
    """Four small runs, made by the program itself (in this process, to save start-up time)."""
    folder = tmp_path_factory.mktemp("runs")
    for module in METHODS:
        for seed in (1, 2):
            program(cssl.method(module), f"--dataset=digits.{seed}@40-1", "--batch=8", "--uratio=2", "--filters=8",
                    "--scales=1", "--augment=d.d.x", "--train_steps=16", "--report_kimg=0.0625",
                    f"--train_dir={folder}")
    return folder


@pytest.mark.slow
def test_runs_become_table_curves_and_report(runs, command, tmp_path):
    found = find_runs([runs])
    assert len(found) == 4 and all(run.finished and not run.problems for run in found)

    table = command("cssl-table", runs, "--metric=accuracy", "--format=csv").stdout
    rows = {row[0]: row for row in csv.reader(io.StringIO(table)) if row}
    for method in ("CSSL", "Supervised"):
        values = [run.result("accuracy") for run in found if run.method == method]
        assert len(values) == 2
        mean, std, seeds = map(float, rows[method][1:])
        assert (mean, std, seeds) == (pytest.approx(np.mean(values)), pytest.approx(np.std(values, ddof=1)), 2)

    assert invoke("plot", "curves", runs, "-o", tmp_path / "curves").code == 0
    assert (tmp_path / "curves.png").stat().st_size > 5000 and (tmp_path / "curves.svg").exists()

    assert invoke("report", runs, "-o", tmp_path / "report.html").code == 0
    page = (tmp_path / "report.html").read_text()
    for text in ("CSSL", "Supervised", "digits.2@40-1", "<img", "--filters=8"):
        assert text in page, text
    assert "http://" not in page.replace("http://www.w3.org", "")

    for kind in ("accuracy", "ece"):
        command(f"scripts/extract_{kind}.py", runs)
        assert len(list(runs.rglob(f"stats/{kind}.json"))) == 4


@pytest.mark.slow
def test_two_methods_train_into_one_folder_and_are_used_meanwhile(tmp_path, program):
    """Checkpoints come and go several times a second; neither the tools nor the runs mind."""
    Image.fromarray(np.arange(768, dtype=np.uint8).reshape(16, 16, 3)).save(tmp_path / "photo.png")
    flags = ["--dataset=digits.1@40-1", "--batch=8", "--uratio=1", "--filters=8", "--scales=1", "--augment=d.d.x",
             "--report_kimg=0.0625", "--save_kimg=0.0625", "--train_steps=100000", f"--train_dir={tmp_path / 'runs'}"]
    training = [Program(["-c", SLOWER.format(method), *flags], tmp_path) for method in ("CSSL", "FixMatch")]
    try:
        end = time.monotonic() + 120
        while len({file.parent for file in tmp_path.rglob("model.ckpt-*.index")}) < 2:
            assert time.monotonic() < end and {process.poll() for process in training} == {None}, training[0].error
            time.sleep(0.02)
        found = find_runs([tmp_path / "runs"])
        assert [run.method for run in found] == ["CSSL", "FixMatch"] and found[0].path.parent == found[1].path.parent
        done = program(predict.main, tmp_path / "runs", tmp_path / "photo.png", code=2)
        assert f"holds 2 runs; name one of them, such as {found[0].path}" in done.stderr
        for run in found:
            lines = program(predict.main, run.path, tmp_path / "photo.png").stdout.splitlines()
            assert len(lines) == 2 and "photo.png" in lines[1]
        program(export.main, found[1].path, "-o", tmp_path / "model")
        table = invoke("table", tmp_path / "runs", "--unfinished").stdout
        assert "| CSSL " in table and "| FixMatch " in table and table.count(": unfinished (") == 2
        assert {process.poll() for process in training} == {None}
    finally:
        for process in training:
            process.send_signal(signal.SIGTERM)
        codes = [process.wait() for process in training]
    assert codes == [143, 143] and not training[0].error + training[1].error
    for run in found:  # no report was lost or doubled meanwhile
        steps = [report["step"] for report in run.read().reports]
        assert steps == list(range(64, 64 * len(steps) + 1, 64)) and len(steps) > 1
        assert not list(run.path.rglob("lock*"))
