"""Every command and code block of README and documents runs, in a short version: tiny networks, a few updates."""
import dataclasses
import importlib
import json
import re
import shlex
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from conftest import ROOT
from helpers import code_blocks

import cssl
from libml.data.names import DATASETS
from libml.results import baseline

# What makes a run short; the same as flags and as presets of the digits.
SHORT = {"filters": 4, "repeat": 1, "scales": 1, "batch": 8, "uratio": 2, "augment": "d.d.x", "train_kimg": 0.03125,
         "report_kimg": 0.015625, "save_kimg": 0.015625}
ELSEWHERE = {  # lines that no test can run, and who runs them
    r"bash scripts/(quickstart|test)\.sh": "the first is a run of minutes, the second runs this",
    r"\. \.venv/bin/activate": "brings an environment into a shell",
    r"pip install|nvidia-smi|cssl-doctor": "for GPUs; tests/tools/test_doctor.py",
    r"pip wheel|uvx|pipx|docker|apptainer|sh scripts/containers": "fetches; tests/tools/test_packages.py",
    r"import (wandb|mlflow)": "where they are installed; tests/docs/test_tracking.py",
    r"cssl-label ": "serves until it is stopped; tests/labelling",
    r"sbatch ": "SLURM; tests/devices/test_scale.py runs the scripts",
    r"TF_CONFIG=": "several machines; tests/devices/test_scale.py starts such processes",
    r"python scripts/create_datasets\.py": "downloads; tests/data/test_sources.py has small files",
    r"python scripts/lab/": "minutes to hours; tests/lab",
    r"CosineDecay": "trained for minutes, for a table",
    r"fashion_mnist": "of the same table"}
SHORTER = {  # what stands for what takes long, or is not here
    r"(cifar10|cifar100)\.\d@\d+-\d+": "digits.1@40-1", r"/my/images": "my_images",
    r"--features=keras:MobileNetV2 --train_dir=runs": "--features=pixels --nobaseline --train_dir=runs",
    r"keras:(EfficientNetV2B0|ResNet50V2|MobileNetV2(,alpha=0.5)?)": "keras:MobileNet,alpha=0.25",
    r"--image_size=96": "--image_size=32", r"RunConfig\.of\(CSSL, train_kimg=64\)": "RunConfig.of(CSSL, **SHORT)"}
OWN_TESTS = {"extending.md", "predict_export.md", "api.md"}  # tests/learn/test_api.py, …/test_export.py, test_site.py
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(document: Path) -> list[tuple[str, str]]:
    """The code blocks of a document with their languages, line ends within commands joined."""
    return [(language, code.replace("\\\n", " ")) for language, code in code_blocks(document)]


def shortened(code: str) -> str:
    for pattern, replacement in SHORTER.items():
        code = re.sub(pattern, replacement, code)
    return code


def main_of(words: list[str]):
    """What a command line calls, and its arguments: a method's class, or a tool's main."""
    if words[0] == "python" and words[1] == "-m":
        return cssl.method(words[2].removeprefix("cssl.")), words[3:]
    if words[:2] == ["python", "cssl.py"]:
        return cssl.CSSL, words[2:]
    if words[0] == "python":
        tool = re.search(r"from cssl\.tools import (\w+)", (ROOT / words[1]).read_text())
        return importlib.import_module(f"cssl.tools.{tool[1]}").main, words[2:]
    name = words[0].removeprefix("cssl-")
    return importlib.import_module(f"cssl.tools.{name}").main, words[1:]


def run_line(line: str, program) -> None:
    main, arguments = main_of(shlex.split(line, comments=True))
    if isinstance(main, type) and "--help" not in arguments:
        short = {name: value for name, value in SHORT.items() if not (name == "train_kimg" and "train_steps" in line)}
        if "keras:" in line:
            short |= {"weights": "none", "image_size": 32}
        if re.search("--features=(keras:|pixels)", line):
            short["feature_views"] = "1,1"
        if "flagfile" in line:
            short |= {"dataset": "digits.1@40-1", "train_dir": "experiments"}
        arguments = [*arguments, *(f"--{name}={value}" for name, value in short.items())]
    program(main, *arguments)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder like the repository's root to work in; runs of one document are there for the next."""
    folder = tmp_path_factory.mktemp("root")
    (folder / "scripts").symlink_to(ROOT / "scripts")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(blocks(ROOT / "docs/own_data.md")[0][1], {})  # writes the images that the others name, too
    (folder / "photos").symlink_to(folder / "my_images/unlabeled")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["own_data.md", "README.md", "getting_started.md", "features.md", "pretrained.md",
                                  "reproducing.md", "scale.md", "methods.md", "faq.md", "evidence.md",
                                  "first_gpu_hour.md", "reliability.md", "install.md", "tracking.md", "labelling.md"])
def test_blocks_run(name, place, program, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setitem(DATASETS, "digits", dataclasses.replace(DATASETS["digits"], presets=SHORT))
    monkeypatch.setattr(baseline, "STRENGTHS", baseline.STRENGTHS[2:4])  # of seven, tried in five folds each
    (document,) = [path for path in DOCUMENTS if path.name == name]
    session = {"__name__": "session", "SHORT": SHORT}
    for language, code in blocks(document):
        if language == "python" and not any(re.search(pattern, code) for pattern in ELSEWHERE):
            exec(compile(shortened(code), name, "exec"), session)
        for line in code.splitlines() if language == "bash" else []:
            if line.strip() and not any(re.match(pattern, line) or "fashion" in line for pattern in ELSEWHERE):
                run_line(shortened(line), program)


def test_all_documents_are_tried_and_linked():
    tried = {mark for mark in test_blocks_run.pytestmark[0].args[1]} | OWN_TESTS
    assert {path.name for path in DOCUMENTS} == tried
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for path in (ROOT / "docs").glob("*.md"):
        assert f"(docs/{path.name}" in readme, f"{path.name} is not linked from the README"


def test_pages_begin_with_what_they_are_for():
    for path in (ROOT / "docs").glob("**/*.md"):
        assert re.match(r"# .+\n\nAfter this page you ", path.read_text(encoding="utf-8")), path.name


def test_benchmarks_are_short_and_say_what_the_tables_say():
    text = (ROOT / "BENCHMARKS.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    tables = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs/evidence").glob("*.md"))
    for title in ("Frozen features", "Compiled for, not run on"):
        section = re.search(rf"^## {title}$.*?^(?=## )", text, re.M | re.S)[0]
        rows = [line for line in section.splitlines() if line.startswith("|")]
        figures = re.findall(r"\d+\.\d+", "".join(rows))
        assert len(figures) > 10 and not [figure for figure in figures if figure not in tables]


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "CONTRIBUTING.md", ROOT / "BENCHMARKS.md",
                                      *sorted((ROOT / "docs/evidence").glob("*.md"))], ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (document.parent / target).exists(), target


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plt, "show", lambda: None)
    notebook = json.loads((ROOT / "docs/own_images.ipynb").read_text(encoding="utf-8"))
    session, drawn = {}, 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            code = re.sub(r"^KIMG = \d+", "KIMG = 0.25", "".join(cell["source"]), flags=re.M)
            code = code.replace("filters=16", "filters=4, augment='d.d.x'").replace("scales=3", "scales=1")
            exec(compile(code, "own_images.ipynb", "exec"), session)
            drawn += len(plt.get_fignums())
            plt.close("all")
    assert drawn == sum("display_data" in str(cell.get("outputs")) for cell in notebook["cells"]) == 3
    assert len(session["found"].files) == 1237 and set(session["guess"]) <= set(session["data"].class_names)
