"""The tools: what they need to start, how they are installed, and a metric that they learn from its one entry."""
import importlib
import importlib.util
import logging
import re
import runpy

import numpy as np
import pytest
from conftest import ROOT
from helpers import invoke, write_run

import cssl
from cssl import tools
from cssl.tools import data, inspect
from libml.errors import UserError
from libml.results import metrics

RUN = """
import sys
sys.argv[0] = "cssl-" + {tool!r}
from cssl.tools import console
try:
    console()
finally:
    assert not {{"tensorflow", "keras"}} & set(sys.modules), "TensorFlow was imported"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder, [90.0] * 4, stats=True)
    return folder


def test_every_module_is_a_tool():
    assert sorted(path.stem for path in (ROOT / "cssl/tools").glob("*.py") if path.stem != "__init__") == [*tools.TOOLS]


@pytest.mark.parametrize("tool", tools.TOOLS)
def test_help_needs_no_tensorflow(command, tool):
    assert f"    cssl-{tool} " in command("-c", RUN.format(tool=tool), "--help").stdout


@pytest.mark.parametrize(("tool", "arguments", "expected"), [
    ("table", ["RUNS", "--compare=paper"], "10.00"), ("extract", ["RUNS"], "last20 90.0"),
    ("plot", ["curves", "RUNS", "-o", "RUNS/curves"], "curves.png"),
    ("report", ["RUNS", "-o", "RUNS/x.html"], "x.html"),
    ("reproduce", ["--table=barely", "--dry_run", "--train_dir=RUNS"], "python -m cssl.lsmatch")])
def test_reading_needs_no_tensorflow(command, folder, tool, arguments, expected):
    done = command("-c", RUN.format(tool=tool), *(argument.replace("RUNS", str(folder)) for argument in arguments))
    assert expected in done.stdout


@pytest.mark.parametrize(("tool", "arguments"), [
    ("report", ["RUNS", "-o", "OUT/x.html"]), ("plot", ["curves", "RUNS", "-o", "OUT/x.png"]),
    ("reproduce", ["--table=barely", "--slurm=OUT/x.sh"]), ("inspect", ["--dataset=digits.1@40-1", "--png=OUT/x.png"]),
    ("predict", ["TRAINED", "IMAGES/test/one", "--csv=OUT/x.csv", "--all"])])
def test_only_what_a_command_wrote_is_overwritten(program, folder, shipped, tmp_path, tool, arguments):
    main = importlib.import_module(f"cssl.tools.{tool}").main
    for word, place in (("RUNS", folder), ("OUT", tmp_path), ("TRAINED", shipped.run), ("IMAGES", shipped.images)):
        arguments = [argument.replace(word, str(place)) for argument in arguments]
    program(main, *arguments)
    written = sorted(tmp_path.iterdir())
    written[0].chmod(0o600)
    program(main, *arguments)  # once more
    assert written[0].stat().st_mode & 0o777 == 0o600 and sorted(tmp_path.iterdir()) == written
    for theirs in (written[0].read_bytes().replace(b"cssl", b"Cssl")[1:], b"file,label\na.png,1\n"):
        written[-1].write_bytes(theirs)
        assert f"{written[-1]} was not written by this command" in program(main, *arguments, code=2).stderr
        assert written[-1].read_bytes() == theirs


@pytest.mark.parametrize("tool", tools.TOOLS)
@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
def test_every_tool_is_a_program(tool):
    """python -m cssl.tools.TOOL."""
    def main():
        with pytest.raises(SystemExit) as end:
            runpy.run_module(f"cssl.tools.{tool}", run_name="__main__")
        return end.value.code

    assert f"    cssl-{tool} " in invoke(main, "--help").stdout
    done = invoke(main, "--nonsense")
    assert done.code == 2 and re.fullmatch(r"error: .+ \(--help lists the flags\)\n", done.stderr)


@pytest.mark.parametrize("when", ["while it is imported", "while it runs"])
def test_ctrl_c_is_one_word(command, when):
    interrupted = "import signal; signal.raise_signal(signal.SIGINT)"
    if when == "while it is imported":
        program = f"""
import sys
class Finder:
    def find_spec(self, name, *_):
        if name == "cssl.tools.report":
            {interrupted}
sys.meta_path.insert(0, Finder())
"""
    else:
        program = f"""
import sys
from cssl.tools import report
def find_runs(*_):
    {interrupted}
report.find_runs = find_runs
"""
    program += "sys.argv[0] = 'cssl-report'\nfrom cssl.tools import console\nconsole()"
    done = command("-c", program, "x", code=130)
    assert (done.stdout, done.stderr) == ("", "stopped\n")


def test_inspect_looks_first_whether_it_can_write(tmp_path, program):
    done = program(inspect.main, "--dataset=digits.1@40-1", f"--png={tmp_path}", code=2)
    assert done.stdout == "" and "is a folder: name a file in it" in done.stderr


def test_a_download_that_fails_is_one_line(tmp_path, program, monkeypatch):
    """TFDS passes on what its downloader raises; what the downloader says meanwhile is left out."""
    def fail(*_, **__):
        logging.getLogger("urllib3.connectionpool").warning("Retrying")
        raise ConnectionError("no route\nto the host")

    monkeypatch.setattr("tensorflow_datasets.builder", fail)
    done = program(data.main, "fashion_mnist", f"--data_dir={tmp_path}", code=2)
    assert "could not be downloaded" in done.stderr and "(no route)" in done.stderr


def test_names_of_the_original_are_launchers(command, folder):
    program = ("import runpy, sys; sys.argv[0] = 'scripts/extract_accuracy.py'\ntry:\n    runpy.run_path(sys.argv[0])\n"
               "finally:\n    assert 'tensorflow' not in sys.modules")
    assert "last20" in command("-c", program, folder).stdout
    assert {path.stem for path in (ROOT / "scripts").glob("*.py")} == {
        "create_datasets", "inspect_dataset", "extract_accuracy", "extract_ece"}  # all else is a command


def test_what_is_installed(monkeypatch):
    given = {}
    monkeypatch.setattr("setuptools.setup", lambda **options: given.update(options))
    spec = importlib.util.spec_from_file_location("setup", ROOT / "setup.py")
    monkeypatch.chdir(ROOT)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    commands = dict(entry.split(" = ") for entry in given["entry_points"]["console_scripts"])
    assert {name for name, target in commands.items() if target == "cssl.tools:console"} == {
        "cssl-data", "cssl-inspect", "cssl-table", "cssl-extract", "cssl-plot", "cssl-report", "cssl-reproduce",
        "cssl-doctor", "cssl-predict", "cssl-export", "cssl-label", "cssl-audit"}
    assert {"cssl", "cssl-fixmatch", "cssl-mean-teacher"} <= set(commands) and len(commands) == len(cssl.methods()) + 12
    assert given["version"] == cssl.__version__ and "cssl.tools" in given["packages"]
    assert [path for package in given["packages"] for path in (ROOT / package.replace(".", "/")).iterdir()
            if path.is_file() and path.suffix != ".py"
            and not any(map(path.match, given["package_data"].get(package, ())))] == []


def test_a_metric_is_one_entry(tmp_path, monkeypatch):
    def top2(probabilities, labels):
        return 100 * float(np.mean([y in np.argsort(p)[-2:] for p, y in zip(probabilities, labels, strict=True)]))

    monkeypatch.setitem(metrics.METRICS, "top2", metrics.Metric("top2", "top-2 accuracy", 1, top2, "%"))
    probabilities, labels = np.array([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]]), np.array([1, 2])
    scores = metrics.scores(probabilities, labels, "/valid")
    assert scores["top2/valid"] == 50
    write_run(tmp_path, [90.0] * 4, stats=True, reported={"top2": 98.76, **scores})
    table = invoke("table", tmp_path, "--metric=error,top2,top2/valid,nll/valid").stdout
    assert "40 labels, top-2 accuracy % " in table and "98.8 (1)" in table
    assert "validation top-2 accuracy % " in table and "50.0 (1)" in table and "validation NLL" in table
    invoke("plot", "curves", tmp_path, "--tags=top2", "-o", tmp_path / "curves")
    assert (tmp_path / "curves.png").exists()
    assert "last20 98.76" in invoke("extract", tmp_path, "--metric=top2").stdout
    invoke("report", tmp_path, "-o", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "<td>top-2 accuracy %</td><td>98.8</td>" in page
    with pytest.raises(UserError, match="invalid choice: 'top3'"):
        invoke("extract", tmp_path, "--metric=top3")
