"""Shows what augmentation does, as PNG files.

    cssl-sheets --out sheets                              # handwritten digits
    cssl-sheets --out sheets --dataset cifar10.3@40-1     # any dataset
    cssl-sheets --out sheets --checkpoint RUN/tf          # and the learned rates

ops.png: every operation over its bins; pairs.png: weak and strong views; rates.png: the rates as a heat map, from
--rates FILE.npy or from the checkpoint of a run. Takes about ten seconds.
"""
from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cssl import cli, tools
from libml.datasets import parse_name
from libml.errors import UserError
from libml.lazy import tf

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from libml.augment import Augmenter


def read_rates(rates: str | None, checkpoint: str | None) -> np.ndarray:
    """The learned rates [ops, parameters, bins] from a .npy file or from a checkpoint or its directory."""
    from libml.augment.ctaugment import RATES_SHAPE

    if rates:
        try:
            values = np.load(rates)
        except (OSError, ValueError, EOFError) as error:
            raise UserError(f"--rates={rates}: not a readable .npy file ({error})") from error
    else:
        from libml import experiment

        path, _ = experiment.find_checkpoint(str(checkpoint))
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


def plot_ops(image: np.ndarray) -> Figure:
    """A row per operation, a column per bin of its first parameter, at the middle of the bin."""
    from libml import plots
    from libml.augment import OPS, apply

    rows = []
    for name, op in OPS.items():
        bins = op.bins[0] if op.bins else 1
        params = np.full([bins, max(op.parameters, 1)], 0.5, np.float32)  # rescale: BOX; cutout: in the middle
        params[:, 0] = (np.arange(bins) + 0.5) / bins
        rows.append(apply(name, np.repeat(image[None], bins, 0), params).numpy())
    return plots.plot_images(rows, list(OPS), range(max(map(len, rows))),
                             "CTAugment's operations over the bins of their first parameter")


def plot_pairs(images: np.ndarray, augmenter: Augmenter) -> Figure:
    """For each image a column: the image, its weak view, its strong views under three seeds."""
    from libml import plots
    from libml.augment import to_uint8

    seeds = [tf.constant([0, i]) for i in range(3)]
    rows = [images, augmenter.weak(images, seeds[0]).numpy()]
    rows += [to_uint8(augmenter.strong(images, seed)).numpy() for seed in seeds]
    return plots.plot_images(rows, ["image", "weak", *["strong"] * 3], title=f"--augment={augmenter.spec}")


def main() -> None:
    """Writes the sheets asked for on the command line."""
    parser = tools.parser(__doc__)
    parser.add_argument("--out", default=".", help="directory for the PNG files")
    parser.add_argument("--augment", default="d.d.d", help="labeled.weak.strong, for the pairs")
    parser.add_argument("--dataset", default="digits.1@40-1", help="whose test images to show")
    parser.add_argument("--data_dir", default=cli.default_data_dir(), help="folder of the TFDS datasets")
    parser.add_argument("--image_size", type=int, default=32, help="side of the images of folder datasets")
    parser.add_argument("--images", type=int, default=16, help="images in the sheet of pairs")
    parser.add_argument("--rates", help=".npy file with rates")
    parser.add_argument("--checkpoint", help="checkpoint, or directory with checkpoints, to read the rates from")
    args = parser.parse_args()
    if args.images < 1:
        raise UserError(f"--images={args.images}: expected a positive number.")
    parse_name(args.dataset)  # a wrong name needs no TensorFlow
    cli.start_tensorflow()
    from libml import data, plots
    from libml.augment import OPS, Augmenter

    out = Path(args.out)
    rates = read_rates(args.rates, args.checkpoint) if args.rates or args.checkpoint else None
    dataset = data.load(args.dataset, args.data_dir, args.image_size)
    images = np.asarray(dataset.test_images[:args.images])
    augmenter = Augmenter(args.augment, image_shape=dataset.image_shape, mirror=dataset.mirror, shift=dataset.shift,
                          jit_compile=False)
    if rates is not None and augmenter.spec.strong == "d":
        augmenter.rates.assign(rates)  # strong views as the run drew them
    figures = {"ops": plot_ops(images[0]), "pairs": plot_pairs(images, augmenter)}
    if rates is not None:
        figures["rates"] = plots.plot_rates(rates, list(OPS), [op.bins for op in OPS.values()])
    for name, figure in figures.items():
        print(*plots.save(figure, out / name, ("png",)))


if __name__ == "__main__":
    tools.exit_on_user_error(main)
