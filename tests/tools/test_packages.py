"""What users install: built, put into an empty environment, and run away from the repository."""
import os
import re
import shutil
import site
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import ENVIRONMENT, ROOT

import cssl

BUILD = """
import sys
sys.modules.update(dict.fromkeys(sys.argv[2:]))  # a build has setuptools, and none of the dependencies
from setuptools import build_meta
for build in sys.argv[1].split(","):
    getattr(build_meta, build)("dist")
"""
DEPENDENCIES = ["absl", "keras", "matplotlib", "numpy", "PIL", "scipy", "tensorflow", "tqdm"]
CONTAINERS = ROOT / "scripts/containers"


def run(*command, cwd: Path, code: int = 0, **environment: str) -> subprocess.CompletedProcess:
    """Runs a program that finds nothing of the repository."""
    outside = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONPATH"}
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, timeout=300,
                          env=outside | environment)
    assert done.returncode == code, done.stdout + done.stderr
    return done


class Packages(NamedTuple):
    """A folder with the wheel, the wheel, and the source distribution."""

    house: Path
    wheel: Path
    sdist: Path


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> Packages:
    source = tmp_path_factory.mktemp("source")
    for name in ("cssl", "libml"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run(sys.executable, "-c", BUILD, "build_sdist,build_wheel", *DEPENDENCIES, cwd=source)
    (wheel,), (sdist,) = (source / "dist").glob("*.whl"), (source / "dist").glob("*.tar.gz")
    house = tmp_path_factory.mktemp("house")
    return Packages(house, Path(shutil.move(wheel, house)), sdist)


@pytest.fixture(scope="module")
def programs(packages, tmp_path_factory) -> Path:
    """The commands of an environment with this wheel, installed as containers do, and its dependencies."""
    place = tmp_path_factory.mktemp("environment")
    venv.create(place, with_pip=False)
    programs = place / "bin"
    run("sh", CONTAINERS / "install.sh", packages.house, "gpu", cwd=place, PIP_NO_DEPS="1", PIP_NO_INDEX="1",
        PIP_PYTHON=str(programs / "python"), PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    (packages_folder,) = place.glob("lib/python*/site-packages")
    # Folders that a .pth file names are searched, but not for .pth files: an editable install of cssl is not seen.
    (packages_folder / "dependencies.pth").write_text("\n".join(
        path for path in sys.path if path in {*site.getsitepackages(), site.getusersitepackages()}) + "\n")
    return programs


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_source_distribution_makes_the_same_wheel(packages, tmp_path):
    with tarfile.open(packages.sdist) as archive:
        archive.extractall(tmp_path)
    (source,) = tmp_path.iterdir()
    run(sys.executable, "-c", BUILD, "build_wheel", *DEPENDENCIES, cwd=source)
    (wheel,) = source.glob("dist/*.whl")
    assert wheel.name == packages.wheel.name and contents(wheel) == contents(packages.wheel)


def test_the_wheel_says_what_it_is(packages):
    files = contents(packages.wheel)
    info = f"cssl-{cssl.__version__}.dist-info"
    about = Parser().parsestr(files[f"{info}/METADATA"].decode())
    assert about["Version"] == cssl.__version__ == re.search(r"^version: (.*)", (ROOT / "CITATION.cff").read_text(),
                                                              re.M)[1]
    assert {"gpu", "test"} <= set(about.get_all("Provides-Extra"))
    commands = set(re.findall(r"^([\w-]+) =", files[f"{info}/entry_points.txt"].decode(), re.M))
    page = (ROOT / "docs/install.md").read_text()
    named = re.findall(r"^(?:uvx --from|pipx run --spec) \. ([\w-]+)", page, re.M)
    assert len(named) == 2 and set(named) <= commands
    assert not {name for name in files if not name.startswith(("cssl/", "libml/", info))}


def test_documents_name_the_oldest_python():
    oldest = re.search(r'python_requires=">=([\d.]+)"', (ROOT / "setup.py").read_text())[1]
    for name in ("README.md", "docs/install.md", "docs/getting_started.md"):
        assert set(re.findall(r"Python ([\d.]+) or newer", (ROOT / name).read_text(encoding="utf-8"))) <= {oldest}, name


@pytest.mark.slow
def test_the_quick_start_needs_no_repository(programs, tmp_path):
    where = run(programs / "python", "-c", "import cssl, libml; print(cssl.__file__, libml.__file__)", cwd=tmp_path)
    assert all(path.startswith(str(programs.parent)) for path in where.stdout.split())
    done = run(programs / "cssl", "--dataset=digits.1@40-1", "--filters=4", "--repeat=1", "--scales=1", "--batch=8",
               "--uratio=2", "--augment=d.d.x", "--train_steps=8", cwd=tmp_path)
    assert "Result (median" in done.stdout
    assert "| CSSL " in run(programs / "cssl-table", "experiments", cwd=tmp_path).stdout
    run(programs / "cssl-report", "experiments", "-o", "report.html", cwd=tmp_path)
    assert "CSSL" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("wheels", [[], ["cssl-1-py3-none-any.whl", "cssl-2-py3-none-any.whl"]])
def test_containers_want_one_wheel(wheels, tmp_path):
    for name in wheels:
        (tmp_path / name).touch()
    done = run("sh", CONTAINERS / "install.sh", tmp_path, cwd=tmp_path, code=2)
    assert done.stderr.count("\n") == 1 and "expected one wheel of cssl" in done.stderr


def test_containers_agree():
    """With each other, with setup.py and with what is in the repository; neither is built here."""
    docker, apptainer = ((CONTAINERS / name).read_text() for name in ("Dockerfile", "cssl.def"))
    base = re.search(r"^FROM (python:3\.(\d+)-slim)$", docker, re.M)
    setup = (ROOT / "setup.py").read_text()
    assert re.search(r"^From: (.*)", apptainer, re.M)[1] == base[1]
    assert int(base[2]) >= int(re.search(r'python_requires=">=3\.(\d+)"', setup)[1])
    extra = re.search(r"^ARG EXTRA=(\w+)$", docker, re.M)[1]
    assert f"    EXTRA={extra}\n" in apptainer and f'"{extra}": [' in setup
    brought = dict(re.findall(r"source=([\w./]+),target=(/[\w.]+)", docker))
    assert brought == dict(re.findall(r"^    ([\w./]+) (/[\w.]+)$", apptainer, re.M))
    assert all((ROOT / path).exists() for path in set(brought) - {"wheels"})  # made by `pip wheel`
    for text, argument in (docker, "$EXTRA"), (apptainer, "{{ EXTRA }}"):
        assert f'    sh /install.sh /wheels "{argument}"\n' in text
    for path in re.findall(r"scripts/containers/[\w.]+", (ROOT / "docs/install.md").read_text()):
        assert (ROOT / path).exists(), path
