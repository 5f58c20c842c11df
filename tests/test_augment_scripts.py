"""The augmentation scripts run as users run them."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import tensorflow as tf
from fake_runs import invoke

from libml.augment import Augmenter
from libml.errors import UserError

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.append(str(SCRIPTS))


def run(script: str, *args: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(SCRIPTS / script), *args], capture_output=True, text=True, timeout=300)


def test_sheets_from_a_checkpoint(tmp_path):
    augmenter = Augmenter("d.d.d", image_shape=(32, 32, 3), mirror=False, shift=4, jit_compile=False)
    augmenter.rates.assign(augmenter.rates * 0.9)
    tf.train.Checkpoint(augmenter=augmenter).save(str(tmp_path / "run" / "model"))
    done = run("show_augment.py", "--out", str(tmp_path / "sheets"), "--checkpoint", str(tmp_path / "run"),
               "--images", "3")
    assert done.returncode == 0, done.stderr
    for name in ("ops.png", "pairs.png", "rates.png"):
        picture = matplotlib.image.imread(tmp_path / "sheets" / name)
        assert min(picture.shape[:2]) > 200 and picture.std() > 0.1  # something is drawn


def test_sheet_errors(tmp_path):
    show_augment = importlib.import_module("show_augment")
    np.save(tmp_path / "wrong.npy", np.ones(3))
    tf.train.Checkpoint(other=tf.Variable(1.0)).write(str(tmp_path / "other"))
    with pytest.raises(UserError, match="no checkpoint in this directory"):
        show_augment.read_rates(None, str(tmp_path))
    with pytest.raises(UserError, match="no CTAugment rates"):
        show_augment.read_rates(None, str(tmp_path / "other"))
    with pytest.raises(UserError, match=r"rates of shape \(3,\)"):
        show_augment.read_rates(str(tmp_path / "wrong.npy"), None)
    (tmp_path / "text.npy").write_text("rates")
    for name in ("none.npy", "text.npy"):
        with pytest.raises(UserError, match="not a readable .npy file"):
            show_augment.read_rates(str(tmp_path / name), None)
    with pytest.raises(UserError, match="not a readable checkpoint"):
        show_augment.read_rates(None, str(tmp_path / "none"))
    for flags, message in ((["--images=0"], "expected a positive number"),
                           ([f"--out={tmp_path / 'text.npy'}"], "not a folder"),
                           (["--dataset=cifar11.1@40-1"], "Unknown dataset")):
        with pytest.raises(UserError, match=message):
            invoke("show_augment", *flags)


def test_benchmark_prints_json():
    done = run("bench_augment.py", "--json", "--images", "8", "--size", "16", "--rounds", "1", "--no_ops")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert {"pillow_images_per_s", "graph_images_per_s", "ratio", "threads", "op_us_per_image"} <= set(result)
    assert result["threads"] == 1 and result["graph_images_per_s"] > 0
    assert result["ratio"] == pytest.approx(result["graph_images_per_s"] / result["pillow_images_per_s"], abs=0.01)
