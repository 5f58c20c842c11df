"""Shows what augmentation does, as PNG files.

    cssl-sheets --out sheets                              # handwritten digits
    cssl-sheets --out sheets --dataset cifar10.3@40-1     # any dataset
    cssl-sheets --out sheets --checkpoint RUN/tf          # and the learned rates

ops.png: every operation over its bins, CTAugment's or those of the policy that --augment names; pairs.png: weak and
strong views, and those of labelled images where these have their own; rates.png: the rates as a heat map, from --rates
FILE.npy or from the checkpoint of a run. Takes about ten seconds.
"""
from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cssl import cli, tools
from libml.augment.spec import parse_augment, parse_policy
from libml.data.names import parse_name
from libml.errors import UserError
from libml.lazy import tf
from libml.run import find_checkpoint

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from libml.augment import Augmenter, AutoAugment, RandAugment


def read_rates(rates: str | None, checkpoint: str | None) -> np.ndarray:
    """The learned rates [ops, parameters, bins] from a .npy file or from a checkpoint or its directory."""
    from libml.augment.ctaugment import RATES_SHAPE

    if rates:
        try:
            values = np.load(rates)
        except (OSError, ValueError, EOFError) as error:
            raise UserError(f"--rates={rates}: not a readable .npy file ({error})") from error
        if getattr(values, "shape", None) != RATES_SHAPE or values.dtype.kind != "f" or not (
                (values >= 0) & (values <= 1)).all():
            raise UserError(f"--rates={rates}: not the rates of a run, which are floats from 0 to 1, {RATES_SHAPE}")
        return values
    prefix = find_checkpoint(str(checkpoint))
    try:
        reader = tf.train.load_checkpoint(prefix)
    except (tf.errors.OpError, ValueError) as error:
        raise UserError(f"--checkpoint={checkpoint}: not a readable checkpoint") from error
    for name, shape in reader.get_variable_to_shape_map().items():
        if "rates" in name and tuple(shape) == RATES_SHAPE:
            return reader.get_tensor(name)
    raise UserError(f"--checkpoint={checkpoint}: no CTAugment rates, a variable of shape {RATES_SHAPE}")


def plot_ops(image: np.ndarray, policy: RandAugment | AutoAugment | None = None) -> Figure:
    """A row per operation, a column per bin of its first parameter, at the middle of the bin."""
    from libml.augment import AUTO_OPS, OPS, RAND_OPS, AutoAugment, to_uint8
    from libml.results import plots

    table = (AUTO_OPS if isinstance(policy, AutoAugment) else RAND_OPS) if policy else OPS
    rows = []
    for op in table.values():
        bins = op.bins[0] if op.bins else 1
        params = np.full([bins, max(op.parameters, 1)], 0.5, np.float32)  # rescale: BOX; cutout: in the middle
        params[:, 0] = (np.arange(bins) + 0.5) / bins
        images = np.repeat(image[None], bins, 0)
        if policy:  # on RGBA, where transparent pixels end as grey
            made = op.graph(tf.constant(np.insert(images, 3, 255, axis=3)), params).numpy()
            rows.append(np.where(made[..., 3:] == 0, to_uint8(tf.zeros([])).numpy(), made[..., :3]))
        else:
            rows.append(op.graph(tf.constant(images), params).numpy())
    what = "magnitudes 0 to 15" if policy else "the bins of their first parameter"
    return plots.plot_images(rows, list(table), range(max(map(len, rows))),
                             f"{type(policy).__name__ if policy else 'CTAugment'}'s operations over {what}")


def plot_pairs(images: np.ndarray, augmenter: Augmenter) -> Figure:
    """For each image a column: the image, its weak view, its strong views under three seeds, labelled ones too."""
    from libml.augment import to_uint8
    from libml.results import plots

    seeds, spec = [tf.constant([0, i]) for i in range(3)], augmenter.spec
    rows = {"image": images, "weak": augmenter.weak(images, seeds[0]).numpy()}
    for part, title, there in (("strong", "strong", True), ("labeled", "labelled", spec.labeled_policy),
                               ("labeled_strong", "labelled strong", spec.labeled_strong)):
        for i, seed in enumerate(seeds if there else [], 1):
            rows[f"{title} {i}"] = to_uint8(augmenter.strong(images, seed, part=part)).numpy()
    return plots.plot_images(list(rows.values()), list(rows), title=f"--augment={spec}")


def main() -> None:
    """Writes the sheets asked for on the command line."""
    parser = tools.parser(__doc__)
    parser.add_argument("--out", default=".", help="directory for the PNG files")
    parser.add_argument("--augment", default="d.d.d", help="as in training, for operations and pairs")
    parser.add_argument("--dataset", default="digits.1@40-1", help="whose test images to show")
    parser.add_argument("--data_dir", default=cli.default_data_dir(), help="folder of the TFDS datasets")
    parser.add_argument("--image_size", type=int, default=32, help="side of the images of folder datasets")
    parser.add_argument("--images", type=int, default=16, help="images in the sheet of pairs")
    parser.add_argument("--rates", help=".npy file with rates")
    parser.add_argument("--checkpoint", help="checkpoint, or directory with checkpoints, to read the rates from")
    args = parser.parse_args()
    if args.images < 1:
        raise UserError(f"--images={args.images}: expected a positive number.")
    policies, spec = parse_name(args.dataset).entry.auto_augment, parse_augment(args.augment)
    spec.check_policies(policies)  # a wrong name needs no TensorFlow
    cli.start_tensorflow()
    from libml import data
    from libml.augment import OPS
    from libml.results import plots

    rates = read_rates(args.rates, args.checkpoint) if args.rates or args.checkpoint else None
    dataset = data.load(args.dataset, args.data_dir, args.image_size)
    images = np.asarray(dataset.test_images[:args.images])
    augmenter = dataset.augmenter(args.augment, policies=policies, jit_compile=False)
    if rates is not None and augmenter.learns_rates:
        augmenter.rates.assign(rates)  # strong views as the run drew them
    figures = {"ops": plot_ops(images[0], parse_policy(spec.strong)), "pairs": plot_pairs(images, augmenter)}
    if rates is not None:
        figures["rates"] = plots.plot_rates(rates, list(OPS), [op.bins for op in OPS.values()])
    for name, figure in figures.items():
        print(*plots.save(figure, Path(args.out) / name, ("png",)))


if __name__ == "__main__":
    tools.exit_on_user_error(main)
