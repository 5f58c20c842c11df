"""The augmentation scripts run as users run them."""

import matplotlib.image
import numpy as np
import pytest
import tensorflow as tf
from helpers import invoke
from test_augment_ops import pillow_apply

from cssl.tools import sheets
from libml.augment import RAND_OPS, Augmenter
from libml.errors import UserError
from libml.results import plots


@pytest.mark.slow
def test_sheets_from_a_checkpoint(command, tmp_path):
    augmenter = Augmenter("d.d.d", image_shape=(32, 32, 3), mirror=False, shift=4, jit_compile=False)
    augmenter.rates.assign(augmenter.rates * 0.9)
    tf.train.Checkpoint(augmenter=augmenter).save(str(tmp_path / "run" / "model"))
    names = ("ops.png", "pairs.png", "rates.png")
    done = command("cssl-sheets", "--out", tmp_path / "sheets", "--checkpoint", tmp_path / "run",
                   "--images=3")
    assert done.stdout.split() == [str(tmp_path / "sheets" / name) for name in names]
    for name in names:
        picture = matplotlib.image.imread(tmp_path / "sheets" / name)
        assert min(picture.shape[:2]) > 200 and picture.std() > 0.1  # something is drawn


def test_sheets_of_policies(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(plots, "plot_images", lambda rows, names, columns=(), title="": drawn.update(
        {title: (rows, names)}) or plots.panels(1, 1, 3, 3)[0])
    invoke("sheets", "--out", tmp_path, "--augment=rac4.x.d.r1_12_50", "--images=2")
    (rows, names), (views, kinds) = drawn.values()
    assert names == list(RAND_OPS) and all(len(row) == 16 for row in rows)
    turned = rows[names.index("Rotate")][9]
    expected = pillow_apply("Rotate", np.insert(rows[0][:1], 3, 255, axis=3), [[9.5 / 16, 0.5]])[0]
    np.testing.assert_array_equal(turned, np.where(expected[..., 3:] == 0, 128, expected[..., :3]))  # 0 in [-1, 1]
    assert (expected[..., 3] == 0).any()
    assert kinds == ["image", "weak", *(f"{part} {i}" for part in ("strong", "labelled", "labelled strong")
                                        for i in (1, 2, 3))]
    assert list(drawn)[1] == "--augment=rac4.x.d.r1_12_50" and (tmp_path / "pairs.png").exists()
    with pytest.raises(UserError, match="AutoAugment has policies for cifar10"):
        invoke("sheets", "--augment=d.d.aa")


def test_sheet_errors(tmp_path):
    from libml.augment.ctaugment import RATES_SHAPE

    for name, array in {"shape": np.ones(3), "text": np.full(RATES_SHAPE, "x"), "numbers": np.full(RATES_SHAPE, np.nan),
                        "range": np.full(RATES_SHAPE, 1.5)}.items():
        np.save(tmp_path / f"{name}.npy", array)
        with pytest.raises(UserError, match="not the rates of a run"):
            sheets.read_rates(str(tmp_path / f"{name}.npy"), None)
    np.savez(tmp_path / "several.npz", np.ones(RATES_SHAPE))
    with pytest.raises(UserError, match="not the rates of a run"):
        sheets.read_rates(str(tmp_path / "several.npz"), None)
    tf.train.Checkpoint(other=tf.Variable(1.0)).write(str(tmp_path / "other"))
    (tmp_path / "empty").mkdir()
    for place in ("empty", "none"):
        with pytest.raises(UserError, match="No checkpoint at"):
            sheets.read_rates(None, str(tmp_path / place))
    with pytest.raises(UserError, match="no CTAugment rates"):
        sheets.read_rates(None, str(tmp_path / "other"))
    (tmp_path / "text.npy").write_text("rates")
    for name in ("none.npy", "text.npy"):
        with pytest.raises(UserError, match="not a readable .npy file"):
            sheets.read_rates(str(tmp_path / name), None)
    (tmp_path / "damaged.index").write_text("")
    with pytest.raises(UserError, match="not a readable checkpoint"):
        sheets.read_rates(None, str(tmp_path / "damaged"))
    for flags, message in ((["--images=0"], "expected a positive number"),
                           ([f"--out={tmp_path / 'text.npy'}"], "Cannot write"),
                           (["--dataset=cifar11.1@40-1"], "Unknown dataset")):
        with pytest.raises(UserError, match=message):
            invoke("sheets", *flags)
