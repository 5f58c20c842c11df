"""Draws what augmentation does, as PNG files.

    python scripts/show_augment.py --out sheets                              # handwritten digits
    python scripts/show_augment.py --out sheets --dataset cifar10.3@40-1     # any dataset
    python scripts/show_augment.py --out sheets --checkpoint RUN/tf          # and the learned rates

ops.png: every operation over its bins; pairs.png: weak and strong views; rates.png: the rates as a heat map, from
--rates FILE.npy or from the checkpoint of a run. Takes about ten seconds.
"""

import argparse
from pathlib import Path

from cssl import cli  # isort: skip (it sets TensorFlow's environment: before the import)

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf

from libml import data
from libml.augment import OPS, Augmenter, apply, to_uint8
from libml.augment.ctaugment import BINS, RATES_SHAPE
from libml.errors import UserError


def read_rates(rates: str | None, checkpoint: str | None) -> np.ndarray:
    """The learned rates [ops, parameters, bins] from a .npy file or from a checkpoint or its directory."""
    if rates:
        try:
            values = np.load(rates)
        except (OSError, ValueError, EOFError) as error:
            raise UserError(f"--rates={rates}: not a readable .npy file ({error})") from error
    else:
        path = tf.train.latest_checkpoint(checkpoint) if Path(checkpoint).is_dir() else checkpoint
        if path is None:
            raise UserError(f"--checkpoint={checkpoint}: no checkpoint in this directory")
        try:
            reader = tf.train.load_checkpoint(path)
        except (tf.errors.OpError, ValueError) as error:
            raise UserError(f"--checkpoint={checkpoint}: not a readable checkpoint") from error
        shapes = reader.get_variable_to_shape_map()
        names = [name for name, shape in shapes.items() if "rates" in name and tuple(shape) == RATES_SHAPE]
        if not names:
            raise UserError(f"--checkpoint={checkpoint}: no CTAugment rates, a variable of shape {RATES_SHAPE}")
        values = reader.get_tensor(names[0])
    if values.shape != RATES_SHAPE:
        raise UserError(f"rates of shape {values.shape}, expected {RATES_SHAPE}")
    return values


def tile(rows: list[np.ndarray], gap: int = 2) -> np.ndarray:
    """One picture of rows of images [n, H, W, 3], white where a row is shorter."""
    height, width = rows[0].shape[1:3]
    sheet = np.full([len(rows) * (height + gap), max(map(len, rows)) * (width + gap), 3], 255, np.uint8)
    for r, row in enumerate(rows):
        for c, image in enumerate(row):
            y, x = r * (height + gap), c * (width + gap)
            sheet[y : y + height, x : x + width] = image
    return sheet


def draw_ops(image: np.ndarray, path: Path) -> None:
    """A row per operation, a column per bin of its first parameter, at the middle of the bin."""
    rows = []
    for name, op in OPS.items():
        bins = op.bins[0] if op.bins else 1
        params = np.full([bins, max(op.parameters, 1)], 0.5, np.float32)  # rescale: BOX; cutout: in the middle
        params[:, 0] = (np.arange(bins) + 0.5) / bins
        rows.append(apply(name, np.repeat(image[None], bins, 0), params).numpy())
    sheet = tile(rows)
    figure, axes = plt.subplots(figsize=(11, 11 * sheet.shape[0] / sheet.shape[1]), layout="constrained")
    axes.imshow(sheet, interpolation="nearest")
    step = sheet.shape[0] / len(rows)
    axes.set_yticks(np.arange(len(rows)) * step + step / 2, list(OPS))
    axes.set_xticks(np.arange(17) * step + step / 2, range(17))
    axes.set_title("CTAugment's operations over the bins of their first parameter")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_pairs(images: np.ndarray, augmenter: Augmenter, path: Path) -> None:
    """For each image a column: the image, its weak view, its strong views under three seeds."""
    seeds = [tf.constant([0, i]) for i in range(3)]
    rows = [images, augmenter.weak(images, seeds[0]).numpy()]
    rows += [to_uint8(augmenter.strong(images, seed)).numpy() for seed in seeds]
    sheet = tile(rows)
    figure, axes = plt.subplots(figsize=(14, 14 * sheet.shape[0] / sheet.shape[1] + 0.5), layout="constrained")
    axes.imshow(sheet, interpolation="nearest")
    step = sheet.shape[0] / len(rows)
    axes.set_yticks(np.arange(len(rows)) * step + step / 2, ["image", "weak"] + ["strong"] * 3)
    axes.set_xticks([])
    axes.set_title(f"weak and strong views, --augment={augmenter.spec}")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_rates(rates: np.ndarray, path: Path) -> None:
    """A row per learned parameter, a column per bin; what an operation has no bin for stays white."""
    labels, rows = [], []
    for i, (name, op) in enumerate(OPS.items()):
        for column, bins in enumerate(op.bins):
            labels.append(name if column == 0 else f"{name}, method")
            rows.append(np.where(np.arange(rates.shape[-1]) < bins, rates[i, column], np.nan))
    figure, axes = plt.subplots(figsize=(9, 7), layout="constrained")
    picture = axes.imshow(np.stack(rows), aspect="auto", cmap="viridis", vmin=min(0.8, np.nanmin(rows)), vmax=1.0)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_xticks(range(BINS.max()))
    axes.set_xlabel("bin")
    axes.set_title("CTAugment's rates")
    figure.colorbar(picture, label="rate")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    """Parses the command line and draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=".", help="directory for the PNG files")
    parser.add_argument("--augment", default="d.d.d", help="labeled.weak.strong, for the pairs")
    parser.add_argument("--dataset", default="digits.1@40-1", help="whose test images to draw")
    parser.add_argument("--data_dir", default=cli.default_data_dir(), help="folder of the TFDS datasets")
    parser.add_argument("--image_size", type=int, default=32, help="side of the images of folder datasets")
    parser.add_argument("--images", type=int, default=16, help="images in the sheet of pairs")
    parser.add_argument("--rates", help=".npy file with rates")
    parser.add_argument("--checkpoint", help="checkpoint, or directory with checkpoints, to read the rates from")
    args = parser.parse_args()
    if args.images < 1:
        raise UserError(f"--images={args.images}: expected a positive number.")
    out = Path(args.out)
    rates = read_rates(args.rates, args.checkpoint) if args.rates or args.checkpoint else None
    dataset = data.load(args.dataset, args.data_dir, args.image_size)
    images = np.asarray(dataset.test_images[:args.images])
    augmenter = Augmenter(args.augment, image_shape=dataset.image_shape, mirror=dataset.mirror, shift=dataset.shift,
                          jit_compile=False)
    if rates is not None and augmenter.uses_probe:
        augmenter.rates.assign(rates)  # strong views as the run drew them
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out={out}: not a folder that can be written to ({error.strerror}).") from error
    draw_ops(images[0], out / "ops.png")
    draw_pairs(images, augmenter, out / "pairs.png")
    written = ["ops.png", "pairs.png"]
    if rates is not None:
        draw_rates(rates, out / "rates.png")
        written.append("rates.png")
    print("\n".join(str(out / name) for name in written))


if __name__ == "__main__":
    cli.guarded(main)
