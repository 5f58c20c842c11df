"""Real runs, three methods and two seeds, become a table, curves and a report with one command each."""
import csv
import io

import numpy as np
import pytest
from helpers import invoke

import cssl
from libml.run import find_runs

METHODS = ("cssl", "fixmatch", "supervised")


@pytest.fixture(scope="module")
def runs(tmp_path_factory, program):
    """Six small runs, made by the program itself (in this process, to save start-up time)."""
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
    assert len(found) == 6 and all(run.finished and not run.problems for run in found)

    table = command("cssl-table", runs, "--metric=accuracy", "--format=csv").stdout
    rows = {row[0]: row for row in csv.reader(io.StringIO(table)) if row}
    for method in ("CSSL", "FixMatch", "Supervised"):
        values = [run.result("accuracy") for run in found if run.method == method]
        assert len(values) == 2
        mean, std, seeds = map(float, rows[method][1:])
        assert (mean, std, seeds) == (pytest.approx(np.mean(values)), pytest.approx(np.std(values, ddof=1)), 2)

    assert invoke("plot", "curves", runs, "-o", tmp_path / "curves").code == 0
    assert (tmp_path / "curves.png").stat().st_size > 5000 and (tmp_path / "curves.svg").exists()

    assert invoke("report", runs, "-o", tmp_path / "report.html").code == 0
    page = (tmp_path / "report.html").read_text()
    for text in ("CSSL", "FixMatch", "Supervised", "digits.2@40-1", "<img", "--filters=8"):
        assert text in page, text
    assert "http://" not in page.replace("http://www.w3.org", "")

    for kind in ("accuracy", "ece"):
        command(f"scripts/extract_{kind}.py", runs)
        assert len(list(runs.rglob(f"stats/{kind}.json"))) == 6
