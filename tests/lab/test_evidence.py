"""Paired differences and their intervals, the figures of evidence, and the script that makes it."""
import json
import math
import os
import sys
import time

import evidence
import numpy as np
import pytest
import record
from helpers import invoke, write_run
from scipy import stats

import cssl
from cssl import cli
from libml.config import RunConfig
from libml.errors import UserError
from libml.results import tables
from libml.results.evaluate import credal_coverage
from libml.results.paper import Column
from libml.run import Run, find_runs

ACCURACY = Column("cifar10", 40, "accuracy")


def test_a_paired_difference_is_taken_split_by_split():
    ours, theirs = {1: 10.0, 2: 20.0, 3: 30.0}, {2: 18.0, 3: 27.0, 4: 0.0}
    found = tables.paired_difference(ours, theirs)
    assert found.differences == (2.0, 3.0) and found.mean == 2.5 and found.interval(1) == "-3.9 to +8.9"
    clear = {1: 2.0, 2: 2.1, 3: 1.9}
    assert tables.paired_difference(clear, dict.fromkeys(clear, 0.0)).verdict == "yes"
    assert tables.paired_difference(dict.fromkeys(clear, 0.0), clear).verdict == "no"
    assert tables.paired_difference({1: 1.0, 2: -1.0}, {1: 0.0, 2: 0.0}).verdict == "undecided"
    one = tables.paired_difference({1: 1.0}, {1: 0.0})
    assert one.mean == 1 and math.isnan(one.low) and one.verdict == "undecided" and one.interval(2) == "–"
    assert math.isnan(tables.paired_difference({1: 1.0}, {2: 0.0}).mean)


def test_the_interval_is_students():
    values = [0.3, -0.1, 0.8, 0.4, 1.5]
    found = tables.paired_difference(dict(enumerate(values)), dict.fromkeys(range(5), 0.0))
    expected = stats.t.interval(0.95, 4, np.mean(values), stats.sem(values))
    np.testing.assert_allclose([found.low, found.high], expected, rtol=1e-6)  # differences have nine digits


def test_the_interval_has_its_level_for_normal_differences():
    rng, covered = np.random.default_rng(0), 0
    for values in rng.normal(1, 2, (4000, 5)):
        found = tables.paired_difference(dict(enumerate(values)), dict.fromkeys(range(5), 0.0))
        covered += found.low < 1 < found.high
    assert covered / 4000 == pytest.approx(0.95, abs=0.015)  # its own deviation is 0.0034


@pytest.fixture
def compared(tmp_path):
    """CSSL and FixMatch on three splits, 2, 3 and 4 points apart at the end, the other way round at the start."""
    for seed in (1, 2, 3):
        for method, end, start in (("CSSL", 90.0 + seed, 20.0), ("FixMatch", 89.0, 25.0)):
            run = write_run(tmp_path / "experiments", [start, 50, 60, end], [0.2, 0.2, 0.2, 0.1 if method == "CSSL" else
                                                                            0.1 - 0.01 * seed],
                            method=method, dataset=f"cifar10.{seed}@40-1", stats=True)
            if method == "CSSL":
                lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
                for number, line in enumerate(lines, 1):
                    line["credal"] |= {"truth": 0.2 * number, "upper": 0.2 * number + 0.1}
                    line["monitors/pseudo_accuracy"] = 0.2 * number
                (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "experiments"


def test_tables_against_a_row(compared):
    done = invoke("table", compared, "--metric=accuracy", "--against=FixMatch", "--last=1")
    row = next(line for line in done.stdout.splitlines() if line.startswith("| CSSL"))
    assert [cell.strip() for cell in row.split("|")[2:-1]] == [
        "cifar10, 40 labels, accuracy %", "+3.00", "+0.52 to +5.48", "3", "3"]
    done = invoke("table", compared, "--metric=accuracy", "--last=2")
    assert "76.00 ± 0.50 (3)" in done.stdout  # median of 60 and 91, 92, 93
    with pytest.raises(UserError, match="no row 'VAT': there are CSSL, FixMatch"):
        invoke("table", compared, "--against=VAT")
    with pytest.raises(UserError, match="--last=0 is out of range"):
        invoke("table", compared, "--last=0")
    with pytest.raises(UserError, match="give one of them"):
        invoke("table", compared, "--against=CSSL", "--compare=paper")


def test_forest_and_credal_figures(compared):
    grid = tables.summarise(find_runs([compared]), ("accuracy", "ece"), last=1)
    figure = evidence.forest(tables.differences(grid, "CSSL"), "CSSL")
    left, right = figure.axes
    splits, interval, mean = (line.get_xdata() for line in left.lines[:3])
    assert list(splits) == [-2, -3, -4] and list(mean) == [-3]
    np.testing.assert_allclose(interval, [-5.484, -0.516], atol=1e-3)  # 3 ± 4.303 / sqrt(3)
    np.testing.assert_allclose(right.lines[0].get_xdata(), [-0.01, -0.02, -0.03])
    left, middle, right = evidence.credal_validity([run for run in find_runs([compared]) if run.method == "CSSL"]).axes
    assert [line.get_label() for line in left.lines] == ["mean alpha", "error of pseudo-labels"]
    np.testing.assert_allclose(left.lines[0].get_ydata(), [1 / 2, 1 / 3, 1 / 4, 1 / 5])
    np.testing.assert_allclose(left.lines[1].get_ydata(), [0.8, 0.6, 0.4, 0.2])
    np.testing.assert_allclose(middle.lines[1].get_ydata(), [0.3, 0.5, 0.7, 0.9])
    arrays = find_runs([compared])[0].arrays("pseudo_labels", ("class", "alpha", "labels"))
    known = arrays["labels"] >= 0
    promised, hits = 1 - arrays["alpha"][known], (arrays["class"] == arrays["labels"])[known]
    points = {round(float(line.get_xdata()[0]), 5): float(line.get_ydata()[0]) for line in right.lines[:-1]}
    for low in np.arange(10) / 10:  # all runs have the same arrays
        here = (promised >= low) & (promised < low + 0.1)
        if here.any():
            assert points[round(float(promised[here].mean()), 5)] == pytest.approx(hits[here].mean())


def test_credal_sets_in_numbers(compared):
    runs = [run for run in find_runs([compared]) if run.method == "CSSL"]
    header, half, end = evidence.credal_table(runs)  # of 4 kimg, reports at 1, 2, 3 and 4: none at an eighth
    assert half == ["cifar10", "0.5", "0.333 to 0.333", "0.600 to 0.600", "0.400 to 0.400"]
    assert end == ["cifar10", "1", "0.200 to 0.200", "0.200 to 0.200", "0.800 to 0.800"]
    arrays = runs[0].arrays("pseudo_labels", ("class", "alpha", "labels"))  # the same in all runs
    known = arrays["labels"] >= 0
    sure = float(np.median(1 - arrays["alpha"][known]))
    here = known & (1 - arrays["alpha"] >= sure)
    _, line = evidence.promise_table(runs, sure)
    assert line == ["cifar10", f"{3 * here.sum()} of {3 * known.sum()}", f"{(1 - arrays['alpha'][here]).mean():.3f}",
                    f"{(arrays['class'] == arrays['labels'])[here].mean():.3f}"]
    assert 0 < here.sum() < known.sum()
    assert len(evidence.promise_table(runs, 1.1)) == 1  # nothing is as sure


def test_coverage_of_credal_sets():
    y, alpha, labels = np.array([0, 1, 2, 2, 0]), np.array([0.1, 0.4, 1.0, 0.2, 0.9]), np.array([0, 0, 0, 1, -1])
    # The last is unknown; the third is the set of all distributions.
    found = credal_coverage(y, alpha, labels)
    assert found == pytest.approx({"truth": 2 / 4, "upper": (1 + 0.4 + 1 + 0.2) / 4})
    assert credal_coverage(y, alpha, np.full(5, -1)) == {}


def test_claims(compared):
    grid = tables.summarise(find_runs([compared]), evidence.TAGS, last=1)
    _, few, calibrated = evidence.claims_table([grid])  # reports at 1, 2, 3 and 4 of 4 kimg: none at an eighth
    assert few[1:] == ["cifar10, 40 labels", "FixMatch", "+3.00", "+0.52 to +5.48", "3 of 3", "yes"]
    assert calibrated[1:] == ["cifar10, 40 labels", "FixMatch", "-0.020", "-0.045 to +0.005", "0 of 3",
                              "undecided"]


def test_claims_at_the_start(tmp_path):
    for seed in (1, 2):
        for method, start in (("CSSL", 30.0 + seed), ("FixMatch", 25.0)):
            write_run(tmp_path, [start, *[50] * 7], method=method, dataset=f"cifar10.{seed}@40-1", train_kimg=8)
    claims = evidence.claims_table([tables.summarise(find_runs([tmp_path]), evidence.TAGS, last=1)])
    assert claims[-1] == ["faster at the start (accuracy at 0.125 of the length)", "cifar10, 40 labels", "FixMatch",
                          "+6.50", "+0.15 to +12.85", "2 of 2", "yes"]


def test_claims_are_listed_one_after_the_other_over_all_datasets(compared):
    runs = find_runs([compared])
    grids = [tables.summarise([run for run in runs if run.method in methods], evidence.TAGS, last=1)
             for methods in (("CSSL", "FixMatch"), ("CSSL",), ("FixMatch",), ("CSSL", "FixMatch"))]
    lines = evidence.claims_table(grids)  # where one of the two is missing there is nothing to answer
    assert [line[0] for line in lines[1:]] == [evidence.CLAIMS[0][0]] * 2 + [evidence.CLAIMS[1][0]] * 2


def test_the_start_is_the_first_report_from_an_eighth_on(tmp_path):
    write_run(tmp_path, [float(kimg) for kimg in range(1, 32)], method="CSSL", dataset="cifar10.1@40-1", train_kimg=31)
    write_run(tmp_path, [float(kimg) for kimg in range(1, 5)], method="CSSL", dataset="cifar10.2@40-1", train_kimg=4)
    long, short = (evidence.values_of(tables.summarise([run], evidence.TAGS), "CSSL", "start")
                   for run in find_runs([tmp_path]))
    assert long == {1: 4}  # 3.875 kimg
    assert np.isnan(short[2])  # 1 kimg is twice an eighth


def test_equal_results_are_no_answer():
    close = tables.paired_difference({1: 0.1 + 0.2, 2: 0.1 + 0.2}, {1: 0.3, 2: 0.3})
    assert close.differences == (0, 0) and close.verdict == "undecided"


def test_the_originals_numbers_beside_ours(tmp_path):
    for method, accuracy in (("CSSL", 38.0), ("CSSL", 37.0), ("CSSL", 37.5), ("FixMatch", 30.0)):
        write_run(tmp_path, [accuracy] * 64, [0.1] * 64, method=method, dataset="cifar10.3@250-1", train_kimg=64)
    lines = evidence.curves_table(find_runs([tmp_path]))
    assert lines[1] == ["CSSL", "32", "accuracy %", "37.9", "37.50", "37.00 to 38.00", "3", "yes"]
    assert lines[2] == ["CSSL", "32", "ECE", "0.155", "0.100", "0.100 to 0.100", "3", "no"]
    assert lines[5][-2:] == ["1", "–"]  # one run has no spread
    assert len(lines) == 1 + 8
    figure = evidence.curves_figure(find_runs([tmp_path]))
    assert any(list(line.get_xdata()) == [32, 56] for line in figure.axes[0].lines)


def config_of(job):
    """Returns the configuration of a run's command."""
    return cli.configuration(cssl.method(job.method), job.arguments()[1:])


def test_jobs_are_commands_that_the_program_takes(tmp_path):
    for name, part in evidence.PARTS.items():
        jobs = part.jobs(tmp_path)
        configs = [config_of(job) for job in jobs]  # raises for what no method takes
        assert len({config.folder() for config in configs}) == len(jobs), name
    assert len(evidence.PARTS["cifar10"].jobs(tmp_path)) == 5 * len(evidence.ROWS)
    for job in evidence.PARTS["fashion_mnist"].jobs(tmp_path):
        values = config_of(job).values()
        assert evidence.START * values["train_kimg"] % values["report_kimg"] == 0  # there is a report at the start
    assert {*evidence.BEST_LATER} <= {*evidence.LATER}


def placed(folder, root):
    """Moves the runs of a folder to where their configurations put them, in a part's folder below a root."""
    for run in find_runs([folder]):
        stored = run.settings | {"train_dir": str(root / "part")}
        place = RunConfig.from_json(cssl.method(run.method), stored).folder()
        place.parent.mkdir(parents=True, exist_ok=True)
        run.path.rename(place)
    return find_runs([root])


def test_a_record_gives_back_what_tables_and_figures_show(compared, tmp_path):
    file, elsewhere, root = tmp_path / "runs.jsonl", tmp_path / "elsewhere", tmp_path / "root"
    write_run(compared, [100 * count / 360 for count in (341, 343, 344, 346)], method="LSMatch")
    runs = placed(compared, root)
    record.save(runs[:4], root, file)
    first = file.read_text()
    record.save(runs, root, file)
    assert len(file.read_text().splitlines()) == 7 and set(first.splitlines()) <= set(file.read_text().splitlines())
    assert str(tmp_path) not in file.read_text()
    record.restore(file, elsewhere)
    record.restore(file, elsewhere)
    again = find_runs([elsewhere])
    assert len(again) == 7
    for ours, theirs in zip(runs, again, strict=True):
        assert theirs.path.relative_to(elsewhere) == ours.path.relative_to(root) and not theirs.problems
        assert theirs.settings == ours.settings and theirs.finished
        assert theirs.described("args/environment.json")["commit"] == "0123abcd"
        for tag in ("accuracy", "ece", "monitors/alpha"):
            for mine, restored in zip(ours.series(tag), theirs.series(tag), strict=True):
                # Five digits are kept, of accuracies twelve.
                np.testing.assert_allclose(restored, mine, rtol=1e-11 if tag == "accuracy" else 1e-4)
    found, wanted = (evidence.credal_validity([run for run in which if run.method == "CSSL"]).axes
                     for which in (again, runs))
    for axis, other in zip(found, wanted, strict=True):
        for line, expected in zip(axis.lines, other.lines, strict=True):
            np.testing.assert_allclose(line.get_xydata(), expected.get_xydata(), rtol=1e-4)


def test_a_record_keeps_how_long_a_run_took(tmp_path):
    write_run(tmp_path / "run", [50.0] * 4)
    (run,) = placed(tmp_path / "run", tmp_path / "here")
    begun = time.mktime((2026, 1, 1, 0, 0, 0, 0, 0, -1))
    os.utime(run.report_file, (begun + 90, begun + 90))
    record.save([run], tmp_path / "here", tmp_path / "runs.jsonl")
    record.restore(tmp_path / "runs.jsonl", tmp_path / "there")
    assert record.seconds(find_runs([tmp_path / "there"])[0]) == 90


@pytest.fixture
def benchmarks(tmp_path, monkeypatch):
    """A document with a place for the tables of several parts; figures, record and one with a part's are beside it."""
    file, figures = tmp_path / "BENCHMARKS.md", tmp_path / "figures"
    figures.mkdir()
    for path, name in (file, "claims"), (figures / "images.md", "digits"):
        path.write_text(f"before\n<!-- begin: scripts/lab/evidence.py {name} -->\nold {name}\n"
                        f"<!-- end: scripts/lab/evidence.py {name} -->\nafter\n")
    monkeypatch.setattr(evidence, "BENCHMARKS", file)
    monkeypatch.setattr(evidence, "FIGURES", figures)
    monkeypatch.setattr(evidence, "RECORD", tmp_path / "figures" / "runs.jsonl")
    return file


def write_finished(job):
    """Writes the folder of a finished run."""
    config = config_of(job)
    folder = Run(config.folder())
    folder.claim(config, {"commit": "0123abc", "machine": "a CPU", "started": "2026-01-01 00:00:00"})
    with folder.lock.hold():
        folder.add_report({"step": int(config.training.train_kimg * 1024), "accuracy": 91.0, "ece": 0.1, "nll": 0.5})


def test_a_record_finds_runs_wherever_weights_and_images_lie(tmp_path, monkeypatch):
    """The names of their folders tell where that is."""
    file = tmp_path / "runs.jsonl"
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        monkeypatch.chdir(tmp_path / place)
        root = tmp_path / place / "runs"
        jobs = [evidence.PARTS[f"features_{part}"].jobs(root, {"weights": "w.h5"})[0] for part in ("40", "resnet50")]
        if place == "here":
            for job in jobs:
                write_finished(job)
        else:
            record.restore(file, root)
        found = [job.finished() for job in jobs]
        record.save(found, root, file)
        assert len(file.read_text().splitlines()) == 2
        assert tmp_path.as_posix() not in file.read_text()


def test_claims_come_first_and_a_run_is_recorded_when_it_ends(tmp_path, monkeypatch, benchmarks):
    """In place of training, runs made before are moved to where the series looks for them; one fails."""
    rows = ("LSMatch", {}), (evidence.LABELS_ALONE, {}), ("CSSL", {})
    part = evidence.Part("methods", ("digits.1@40-1",), rows, {})
    monkeypatch.setattr(evidence, "PARTS", {"digits": part})
    for job in part.jobs(tmp_path / "made"):
        write_finished(job)
    evidence.RECORD.write_text("")
    program, log = tmp_path / "python", tmp_path / "log"
    program.write_text(f"""#!/bin/bash
echo "$2 $(wc -l < {evidence.RECORD})" >> {log}
[ "$2" != cssl.lsmatch ] || exit 1
cd {tmp_path}/made
name=${{2#cssl.}}
found=$(find . -ipath "*/$name""_*" -prune)
mkdir -p {tmp_path}/runs/$(dirname "$found")
mv "$found" {tmp_path}/runs/"$found"
""")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    done = invoke(evidence.main, "--write", f"--train_dir={tmp_path / 'runs'}")
    assert done.code == 1 and "failed: python -m cssl.lsmatch" in done.stderr
    assert log.read_text().splitlines() == ["cssl.cssl 0", "cssl.supervised 1", "cssl.lsmatch 2"]
    assert len(evidence.RECORD.read_text().splitlines()) == 2
    assert "91.00 (1)" in (tmp_path / "figures/images.md").read_text()


def test_all_methods_beside_each_other(tmp_path):
    for seed in (1, 2):
        for method, accuracy in (("CSSL", 90.0), ("Supervised", 80.0)):
            write_run(tmp_path, [accuracy + seed] * 4, method=method, dataset=f"digits.{seed}@40-1",
                      reported={"images_per_s": 100.0 * seed, "nll": 0.5, "brier": 0.2, "balanced_accuracy": 85.0})
    spreading = [dict.fromkeys(("accuracy", "ece", "nll", "brier", "balanced_accuracy"), 85.0)]
    _, *lines = evidence.methods_table(find_runs([tmp_path]), spreading)
    assert lines == [
        ["CSSL", "91.50 ± 0.71", "+10.00", "0.100 ± 0.000", "0.500 ± 0.000", "0.200 ± 0.000", "85.00 ± 0.00", "150",
         "2"],
        [evidence.SPREADING, "85.00", "–", "85.000", "85.000", "85.000", "85.00", "–", "1"],  # of one split
        ["Supervised", "81.50 ± 0.71", "+0.00", "0.100 ± 0.000", "0.500 ± 0.000", "0.200 ± 0.000", "85.00 ± 0.00",
         "150", "2"]]


def test_methods_on_features_beside_logistic_regression(tmp_path):
    for seed in (1, 2):
        for method, accuracy in (("CSSL", 60.0 + seed), ("FixMatch", 59.0)):
            run = write_run(tmp_path, [accuracy] * 4, [0.1 * seed] * 4, method=method, dataset=f"cifar10.{seed}@40-1")
            regression = {"labels_alone": 50.0 + 2 * seed}
            if method == "CSSL" and seed == 1:
                regression["labels_alone_scores"] = {"accuracy": 52.0, "ece": 0.3, "nll": 1.25}
            (run / "stats/baseline.json").write_text(json.dumps(regression))
    fewer = write_run(tmp_path, [40.0] * 4, method="C2S2L", dataset="cifar10.2@40-1", calibration=0.25)
    (fewer / "stats/baseline.json").write_text(json.dumps({"labels_alone": 10.0}))  # of the other labels
    header, *lines = evidence.features_table(find_runs([tmp_path]))
    assert header[4:] == ["accuracy %, minus CSSL's", "ECE, minus CSSL's", "NLL, minus CSSL's",
                          "accuracy %, minus logistic regression's", "splits"]
    # Students of two numbers: their mean, and 12.706 times half of what they are apart.
    assert lines == [
        ["CSSL", "61.50 ± 0.71", "0.150 ± 0.071", "–", "–", "–", "–", "+8.50 (+2.15 to +14.85)", "2"],
        ["FixMatch", "59.00 ± 0.00", "0.150 ± 0.071", "–", "-2.50 (-8.85 to +3.85)", "+0.000 (+0.000 to +0.000)", "–",
         "+6.00 (-6.71 to +18.71)", "2"],
        ["logistic regression", "53.00 ± 1.41", "0.300", "1.250", "-8.50 (-14.85 to -2.15)", "+0.200 (–)", "–", "–",
         "2"],
        ["C2S2L", "40.00", "0.100", "–", "-22.00 (–)", "-0.100 (–)", "–", "-14.00 (–)", "1"]]


def test_label_spreading_knows_the_digits():
    (found,) = evidence.label_spreading(("digits.1@40-1",))
    assert 85 < found["accuracy"] < 100 and found["nll"] > 0


def test_every_table_has_one_place():
    pages = "".join(path.read_text(encoding="utf-8") for path in (evidence.BENCHMARKS, *evidence.FIGURES.glob("*.md")))
    for name in {*evidence.PARTS, *evidence.TOGETHER, "best"}:
        for which in "begin", "end":
            assert pages.count(f"<!-- {which}: scripts/lab/evidence.py {name} -->") == 1, name


def test_the_best_methods_see_few_labels():
    head = ["method", "accuracy %", "images/s", "runs"]
    lines = [["FullySupervised", "99", "1", "5"], ["CSSL", "97", "2", "5"], [evidence.SPREADING, "92", "–", "5"],
             ["Supervised", "87", "3", "5"]]
    assert evidence.best_table([head, *lines], 2) == [head[:2], ["CSSL", "97"], [evidence.SPREADING, "92"]]


def test_filter_and_further_flags(tmp_path):
    done = invoke(evidence.main, "--report", "--parts=methods", "--filter=cssl.fully_supervised",
                  f"--train_dir={tmp_path}", "--", "--train_kimg=1")
    assert done.stdout == "Nothing is finished yet.\n"
    jobs = evidence.PARTS["methods"].jobs(tmp_path, {"train_kimg": "1"})
    assert len(jobs) == 5 * len(cssl.methods()) and all("--train_kimg=1" in str(job) for job in jobs)
    assert [dict(job.flags)["seed"] for job in jobs if job.method == "FullySupervised"] == [1, 2, 3, 4, 5]


def test_the_script_reports_and_writes(tmp_path, benchmarks):
    for job in evidence.PARTS["digits"].jobs(tmp_path)[:2]:
        write_finished(job)
    flags = "--report", "--write", f"--train_dir={tmp_path}"
    done = invoke(evidence.main, *flags, "--parts=digits")
    assert "2 runs; commit 0123abc; a CPU" in done.stdout and "91.00 (1)" in done.stdout
    page = tmp_path / "figures/images.md"
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "91.00 (1)" in text and "old" not in text
    assert "better calibrated" in done.stdout  # but what is said of three parts together stays as it was
    assert "old claims" in benchmarks.read_text() and not (tmp_path / "figures/forest.png").exists()
    invoke(evidence.main, *flags, "--parts=digits,fashion_mnist,cifar10")
    assert "old claims" not in benchmarks.read_text() and (tmp_path / "figures/forest.png").exists()
    page.write_text(text.replace("end: scripts/lab/evidence.py digits", ""))
    with pytest.raises(UserError, match="no place for digits: expected the lines <!-- begin"):
        invoke(evidence.main, *flags, "--parts=digits")
    # Elsewhere the recorded run counts as finished, and says the same; asked for by name only.
    elsewhere = tmp_path / "elsewhere"
    done = invoke(evidence.main, "--report", f"--train_dir={elsewhere}")
    assert done.stdout == "Nothing is finished yet.\n"
    done = invoke(evidence.main, "--report", "--recorded", f"--train_dir={elsewhere}")
    assert "2 runs; commit 0123abc; a CPU" in done.stdout and "91.00 (1)" in done.stdout
    with pytest.raises(UserError, match="Unknown --parts=mnist"):
        invoke(evidence.main, "--parts=mnist")
