"""Shared by all tests: no GPU, no oneDNN in this process, several logical CPU devices, real data where it is."""
import dataclasses
import functools
import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
ENVIRONMENT = dict(os.environ)  # for programs, which decide about oneDNN themselves

import pytest  # noqa: E402
from helpers import Done, invoke  # noqa: E402

from cssl import cli  # noqa: E402
from cssl.program import exit_on_user_error  # noqa: E402

ROOT = Path(__file__).parent.parent


def pytest_configure(config):
    """Starts TensorFlow before tests import it; not in the process that only hands tests out to others."""
    if config.getoption("dist", "no") != "no":
        return
    cli.start_tensorflow(onednn=False)  # the tests' networks are too narrow for it
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)
    from libml.data.names import DATASETS  # hundreds of tests train on the digits: read once
    DATASETS["digits"] = dataclasses.replace(DATASETS["digits"], load=functools.cache(DATASETS["digits"].load))


def pytest_collection_finish():
    """Looks for garbage seldom, and never among what stays: the graphs of tests made that a tenth of all time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.fixture(scope="session")
def real_data_dir() -> Path:
    """The folder with the real CIFAR-10; tests that need it are skipped where it is absent."""
    folder = cli.default_data_dir()
    if not any((folder / "cifar10").glob("*/dataset_info.json")):
        pytest.skip(f"no CIFAR-10 in {folder}; cssl-data cifar10 puts it there")
    return folder


def checked(done: subprocess.CompletedProcess | Done, found: int, expected: int):
    """Returns what a program left if it ended as expected: with exit code 2, after one line and no traceback."""
    assert found == expected, f"exit code {found}, expected {expected}\n{done.stdout}\n{done.stderr}"
    if expected == 2:
        assert "Traceback" not in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    return done


@pytest.fixture(scope="session")
def command():
    """Runs a Python program of the project, or a tool by its command, as a user would: returns the finished process,
    its output as text."""
    def run(*arguments, code: int = 0, timeout: float = 300, **environment) -> subprocess.CompletedProcess:
        if str(arguments[0]).startswith("cssl-"):
            arguments = "-m", f"cssl.tools.{arguments[0].removeprefix('cssl-')}", *arguments[1:]
        done = subprocess.run([sys.executable, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True,
                              timeout=timeout, env={**ENVIRONMENT, **environment})
        return checked(done, done.returncode, code)

    return run


@pytest.fixture(scope="session")
def program():
    """Runs a method or a tool's main here, from flags to exit code: TensorFlow's start is most of a tiny run."""
    def run(main, *flags, code: int = 0) -> Done:
        def until_exit() -> int:
            with pytest.raises(SystemExit) as exit_:
                cli.main(main) if isinstance(main, type) else exit_on_user_error(main)
            return exit_.value.code or 0

        done = invoke(until_exit, *flags)
        return checked(done, done.code, code)

    return run


@pytest.fixture(scope="session")
def digits():
    """The embedded digits, 40 of them labelled, to be read alone."""
    from libml import data

    return data.load("digits.1@40-1", "/nowhere")


@pytest.fixture
def no_layout(monkeypatch):
    """Figures whose parts may overlap: making room for all takes most of the time of a page."""
    from matplotlib.figure import Figure

    monkeypatch.setattr("libml.results.plots.Figure", lambda layout, **options: Figure(**options))


class Shipped(NamedTuple):
    """A trained run on a folder of images, and that folder."""

    run: Path
    images: Path
    data_dir: Path


@pytest.fixture(scope="session")
def shipped(tmp_path_factory) -> Shipped:
    """A tiny run on PNG files of digits with names for classes, whitened, with 60 validation images: trained once."""
    from PIL import Image

    from cssl import CSSL, RunConfig, train
    from libml.data import sources

    folder, digits = tmp_path_factory.mktemp("shipped"), sources.digits()
    names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    for part, images, labels in (("train", digits.images[:300], digits.labels), ("test", digits.test_images[:60],
                                                                                  digits.test_labels)):
        for number, (image, label) in enumerate(zip(images, labels, strict=False)):
            file = folder / "images" / part / names[label] / f"{number:03d}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(file)
    run = train(RunConfig.of(
        CSSL, dataset=f"folder:{folder / 'images'}.1@60-60", image_size=16, whiten=True, batch=16, uratio=2, filters=4,
        repeat=1, scales=2, augment="d.d.x", ema=0.9, bn_momentum=0.9, alpha_bound=0.05, train_steps=48, report_kimg=4,
        data_dir=str(folder / "data"), train_dir=str(folder / "runs")))
    return Shipped(run.path, folder / "images", folder / "data")


@pytest.fixture(scope="session")
def exported(shipped, tmp_path_factory) -> Path:
    """The run's export."""
    import cssl

    folder = tmp_path_factory.mktemp("exported") / "model"
    cssl.open(shipped.run).export(folder)
    return folder
