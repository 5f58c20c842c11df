"""Runs on disk: finding and reading them, damaged and unfinished ones, tables over seeds, the extraction scripts."""
import csv
import importlib
import io
import json
import sys

import numpy as np
import pytest
import tensorflow as tf
from helpers import invoke, write_run

from libml.errors import UserError
from libml.results import tables
from libml.results.metrics import METRICS
from libml.results.paper import Column
from libml.run import Run, find_runs, medians

ERROR = Column("cifar10", 40, "error")


def test_medians():
    values = list(range(60))  # the last n of them are 60 - n … 59
    assert medians(values) == {"last01": 59, "last10": 54.5, "last20": 49.5, "last50": 34.5}
    assert medians([3, 1, 2]) == {"last01": 2, "last10": 2, "last20": 2, "last50": 2}
    assert np.isnan(medians([])["last20"])


def test_find_runs(tmp_path):
    runs = [write_run(tmp_path / "a", [1], dataset=f"svhn.{seed}@40-1") for seed in (1, 2)]
    other = write_run(tmp_path / "b", [1])
    def paths(*places):
        return [run.path for run in find_runs(places)]

    assert paths(tmp_path) == sorted([*runs, other])
    assert paths(runs[0]) == [runs[0]]
    assert paths(f"{tmp_path}/a/*.2@40-1", other, other) == sorted([runs[1], other])
    with pytest.raises(UserError, match="No runs in .*nothing"):
        find_runs([tmp_path / "nothing*"])


@pytest.mark.parametrize(("reports", "train_kimg", "finished"), [(4, 4, True), (3, 4, False), (4, 4.03, True),
                                                                 (4, 4.1, False), (0, 4, False)])
def test_finished(tmp_path, reports, train_kimg, finished):
    # A length of 4.03 kimg is not a whole number of batches of 64; one of 4.1 leaves whole batches undone.
    assert Run(write_run(tmp_path, [50] * reports, train_kimg=train_kimg)).read().finished == finished


def test_a_killed_run(tmp_path):
    path = write_run(tmp_path, [10, 20, 30])
    log = path / "metrics.jsonl"
    whole = log.read_text()
    log.write_text(whole + whole.splitlines()[-1][:25])
    run = Run(path).read()
    assert run.series("accuracy")[1].tolist() == [10, 20, 30]
    assert run.problems == ["metrics.jsonl, line 4 is unreadable"]
    log.write_text(whole.replace('{"step": 2048', '{"step": x'))
    run = Run(path).read()
    assert run.series("accuracy")[1].tolist() == [10, 30]
    assert run.problems == ["metrics.jsonl, line 2 is unreadable"]


def test_repeated_steps(tmp_path):
    path = write_run(tmp_path, [10, 20, 30])
    with open(path / "metrics.jsonl", "a") as file:  # continued from the checkpoint at 1 kimg
        file.write('{"step": 2048, "accuracy": 25}\n{"step": 3072, "accuracy": 35}\n')
    steps, values = Run(path).read().series("accuracy")
    assert steps.tolist() == [1024, 2048, 3072]
    assert values.tolist() == [10, 25, 35]


def write_events(path, pairs):
    with tf.summary.create_file_writer(str(path / "tf")).as_default():
        for step, accuracy in pairs:
            tf.summary.scalar("accuracy", accuracy, step=step)
            tf.summary.histogram("weights", [1.0, 2.0], step=step)


def test_event_files(tmp_path):
    path = write_run(tmp_path, [])
    (path / "metrics.jsonl").unlink()
    assert Run(path).read().problems == ["no reports yet"]
    write_events(path, [(1024, 10.0), (2048, 20.0)])
    run = Run(path).read()
    assert run.reports == [{"step": 1024, "accuracy": 10.0}, {"step": 2048, "accuracy": 20.0}]
    assert not run.problems


def test_unreadable_configuration(tmp_path):
    path = write_run(tmp_path, [10])
    (path / "args/args.json").write_text("{")
    run = Run(path).read()
    assert "args.json is unreadable" in run.problems[0]
    grid = tables.summarise([run])
    assert not grid.cells and "args.json" in grid.notes[0]


def test_write_stats(tmp_path):
    path = write_run(tmp_path, [10, 20, 30], [0.3, 0.2, 0.1])
    (path / "stats/ece.json").write_text("old")
    Run(path).write_stats(METRICS)
    for name, last, middle in (("accuracy", 30, 20), ("ece", 0.1, 0.2)):
        assert json.loads((path / f"stats/{name}.json").read_text()) == {
            "last01": last, "last10": middle, "last20": middle, "last50": middle}
    assert sorted(p.name for p in (path / "stats").iterdir()) == ["accuracy.json", "ece.json"]


def cells(folder, **options):
    return tables.summarise(find_runs([folder]), **options)


def test_mean_and_std_over_seeds(tmp_path):
    for seed, last in ((1, 90.0), (2, 94.0), (3, 95.0)):
        write_run(tmp_path, [0, last - 1, last, last + 1], dataset=f"cifar10.{seed}@40-1")  # the median: last - 0.5
    grid = cells(tmp_path)
    found = grid.cells["CSSL", ERROR]
    assert found.mean == pytest.approx(100 - 92.5)
    assert found.std == pytest.approx(7 ** 0.5)  # squares 9, 1, 4 over n - 1
    assert found.seeds == (1, 2, 3)
    assert not grid.notes
    assert cells(tmp_path, tags=["accuracy"]).cells["CSSL", ERROR._replace(metric="accuracy")].mean == \
        pytest.approx(92.5)


def test_nothing_is_dropped_silently(tmp_path):
    write_run(tmp_path, [90] * 4, dataset="cifar10.1@40-1")
    half = write_run(tmp_path, [80] * 2, dataset="cifar10.2@40-1")
    empty = write_run(tmp_path, [], dataset="cifar10.3@40-1")
    grid = cells(tmp_path, expected_seeds=(1, 2, 3, 4, 5))
    assert grid.cells["CSSL", ERROR].seeds == (1,)
    assert np.isnan(grid.cells["CSSL", ERROR].std)
    notes = "\n".join(grid.notes)
    assert f"{half}: unfinished (2 of 4 kimg), left out" in notes
    assert f"{empty}: no reports yet" in notes
    assert "CSSL on cifar10@40: no run of split seed 4-5" in notes
    grid = cells(tmp_path, unfinished=True)
    assert grid.cells["CSSL", ERROR].mean == 15
    assert "included" in "\n".join(grid.notes)


def test_runs_of_one_split_count_once(tmp_path):
    for seed, training_seed, value in ((1, 0, 90), (1, 1, 92), (2, 0, 95)):
        write_run(tmp_path, [value] * 4, dataset=f"cifar10.{seed}@40-1", seed=training_seed)
    grid = cells(tmp_path)
    assert grid.cells["CSSL", ERROR].mean == pytest.approx(100 - (91 + 95) / 2)
    assert "2 runs of split seed 1, counted once by their mean" in grid.notes[0]


def test_rows_name_what_differs_on_the_same_data_only(tmp_path):
    for confidence in (0.8, 0.95):
        write_run(tmp_path, [90] * 4, method="FixMatch", confidence=confidence)
    write_run(tmp_path, [90] * 4, wd=5e-4)
    write_run(tmp_path, [60] * 4, dataset="cifar100.1@400-1", wd=1e-3, filters=128)  # a preset, not a variant
    assert cells(tmp_path).rows == ("CSSL", "FixMatch (confidence=0.8)", "FixMatch (confidence=0.95)")


def test_devices_make_no_row_but_the_validation_set_does(tmp_path):
    write_run(tmp_path, [90] * 4, dataset="cifar10.1@40-1", num_devices=4, strategy="mirrored")
    write_run(tmp_path, [92] * 4, dataset="cifar10.2@40-1", num_devices=0, strategy="auto")
    assert cells(tmp_path).cells["CSSL", ERROR].seeds == (1, 2)
    path = write_run(tmp_path, [50] * 4, dataset="cifar10.1@40-5000", num_devices=0)
    lines = [json.loads(line) | {"accuracy/valid": 77.0} for line in (path / "metrics.jsonl").read_text().splitlines()]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert cells(tmp_path).rows == ("CSSL (valid=1)", "CSSL (valid=5000)")
    assert "| 77.00 (1)" in invoke("table", path, "--metric=accuracy/valid").stdout
    assert "valid 5000 instead of 1" in invoke("table", path, "--compare=paper").stdout


def test_comparison(tmp_path):
    for seed, error in ((1, 7.0), (2, 9.0)):
        write_run(tmp_path, [100 - error] * 64, dataset=f"cifar10.{seed}@40-1", train_kimg=64)
    line, = tables.compare_with_paper(cells(tmp_path))
    assert line.difference == pytest.approx(8.0 - 6.5)
    assert line.within is True  # the paper's std is 0.90
    assert line.deviations == "train_kimg 64 instead of 65536"
    line, = tables.compare_with_paper(cells(tmp_path, tags=["accuracy"]))
    assert (line.theirs.mean, line.difference) == (93.5, pytest.approx(-1.5))
    line, = tables.compare_with_paper(cells(tmp_path), ("ablation",))
    assert line.within is False  # 6.92 ± 0.34
    line, = tables.compare_with_paper(cells(tmp_path, tags=["ece"]))
    assert line.theirs.mean == 0.032


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for method, accuracy in (("CSSL", 93.0), ("FixMatch", 88.0)):
        for seed in (1, 2):
            write_run(folder, [accuracy + seed] * 4, method=method, dataset=f"cifar10.{seed}@40-1")
    write_run(folder, [50.0], method="LSMatch", dataset="svhn.1@40-1")
    return folder


def test_extraction_scripts(command, folder):
    done = invoke("extract", folder / "cifar10*", folder / "svhn*")
    assert len(done.stdout.splitlines()) == 5
    assert "unfinished: 1 of 4 kimg" in done.stdout
    ece = command("scripts/extract_ece.py", folder)
    for path in (run.path for run in find_runs([folder])):
        assert json.loads((path / "stats/accuracy.json").read_text()) == \
            medians(Run(path).series("accuracy")[1])
        assert json.loads((path / "stats/ece.json").read_text())["last20"] == 0.1
        assert str(path) in ece.stdout


def test_extraction_from_event_files_and_without_numbers(tmp_path):
    path = write_run(tmp_path, [])
    (path / "metrics.jsonl").unlink()
    done = invoke("extract", path)
    assert done.code == 1 and "no accuracy to extract" in done.stderr
    write_events(path, [(1024, 10.0), (2048, 20.0)])
    assert invoke("extract", path).code == 0
    assert json.loads((path / "stats/accuracy.json").read_text())["last20"] == 15


def test_extraction_goes_on_where_a_folder_cannot_be_written(tmp_path):
    path, other = (write_run(tmp_path, [10, 20], dataset=f"svhn.{seed}@40-1") for seed in (1, 2))
    (path / "stats").rmdir()
    (path / "stats").write_text("no folder")
    done = invoke("extract", tmp_path)
    assert done.code == 1 and f"warning: {path}: Cannot write" in done.stderr and str(other) in done.stdout
    assert json.loads((other / "stats/accuracy.json").read_text())["last01"] == 20


def test_table_formats(folder):
    markdown = invoke("table", folder).stdout
    assert "| CSSL     | 5.50 ± 0.71 (2)" in markdown
    assert "LSMatch" in markdown and "unfinished (1 of 4 kimg)" in markdown
    latex = invoke("table", folder, "--format=latex", "--metric=accuracy,ece").stdout
    assert r"FixMatch & 89.50 $\pm$ 0.71 (2) & 0.100 $\pm$ 0.000 (2) \\" in latex
    assert [line[0] for line in latex.splitlines() if "unfinished" in line] == ["%"]
    done = invoke("table", folder, "--format=csv", "--seeds=1-3")
    header, cssl, fixmatch = csv.reader(io.StringIO(done.stdout))
    assert header == ["method", *(f"cifar10, 40 labels, error %, {part}" for part in ("mean", "std", "seeds"))]
    assert (float(cssl[1]), float(fixmatch[1]), cssl[3]) == (5.5, 10.5, "2")
    assert "no run of split seed 3" in done.stderr and "unfinished" in done.stderr


def test_table_beside_the_paper(command, folder):
    lines = command("cssl-table", folder, "--compare=paper").stdout.splitlines()
    cssl = [part.strip() for part in next(line for line in lines if line.startswith("| CSSL")).split("|")]
    assert cssl[3:9] == ["2", "5.50 ± 0.71", "6.50 ± 0.90", "-1.00", "yes", "results: CSSL (CTA)"]
    assert cssl[9] == "train_kimg 4 instead of 65536"


def test_missing_seeds_are_ranges(folder):
    done = invoke("table", folder / "cifar10*", "--seeds=1-10000,0,20000")
    assert "- CSSL on cifar10@40: no run of split seed 0, 3-10000, 20000\n" in done.stdout
    assert "seed 5, 7-8\n" in invoke("table", folder / "cifar10*", "--seeds=1,2,5,8,7").stdout


@pytest.mark.parametrize(("flag", "message"), [("--metric=loss", "expected error, accuracy, ece, nll, brier, "),
                                               *((f"--seeds={text}", "expected seeds such as 1-5") for text in
                                                 ("one", "", "5-1", "1-", "1,,2", "1-10001", "-1", "1--3", "1-9" * 99)),
                                               ("--table=barely", "belongs to --compare=paper"),
                                               ("--against=", "There is no row ''")])
def test_bad_table_arguments(folder, flag, message):
    with pytest.raises(UserError, match=message):
        invoke("table", folder, flag)


def on_terminal(monkeypatch):
    """Makes what tests call believe that it prints to a terminal."""
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(io, "StringIO", Terminal)


def test_names_do_not_command_terminals(tmp_path, monkeypatch):
    hostile = "\x1b[2J\rx\n$\\frac$"
    path = write_run(tmp_path / hostile, [50.0] * 4, dataset=f"{hostile}.1@40-1")
    whole = invoke("table", path, "--format=csv").stdout
    assert list(csv.reader(io.StringIO(whole)))[0][1] == f"{hostile}.1@40-1, all labels, error %, mean"  # exact
    write_run(tmp_path / hostile, [50.0], method=hostile)
    on_terminal(monkeypatch)
    for arguments in (("table",), ("table", "--format=csv"), ("table", "--format=latex"), ("table", "--compare=paper"),
                      ("extract",), ("plot", "curves", "-o", tmp_path / hostile / "x")):
        tool, *flags = arguments
        done = invoke(tool, *flags[:1], tmp_path, *flags[1:]) if tool == "plot" else invoke(tool, tmp_path, *flags)
        assert "\\x1b[2J\\rx\\n" in done.stdout, arguments
        assert not {"\x1b", "\r"} & set(done.stdout + done.stderr), arguments


def test_a_closed_output_is_no_error(folder, monkeypatch):
    for tool, *flags in (("table", "--format=csv"), ("table",), ("extract",)):
        monkeypatch.setattr(sys, "argv", ["program", str(folder / "cifar10*"), *flags])
        monkeypatch.setattr(sys, "stdout", None)  # as Python has it after `>&-`
        assert not importlib.import_module(f"cssl.tools.{tool}").main()


def test_no_runs(command, tmp_path):
    assert "No runs in" in command("scripts/extract_ece.py", tmp_path / "none", code=2).stderr
