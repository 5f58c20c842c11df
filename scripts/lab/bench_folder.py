"""What unlabelled images are worth: a folder of PNG files with 100 labels, trained with them and without, 5 times.

    python scripts/lab/bench_folder.py [--folder=bench_folder] [--seeds=5] [--train_kimg=16]

Fashion-MNIST as a user's folder: for each seed 10 labelled images per class are drawn for train/<class>, 10,000 others
go to unlabeled/, the first 2,000 of the test set to test/<class>. CSSL trains on all of them, `supervised` on the
labelled ones alone, with the same small network, length and averages. Continues where it was stopped; about 25 minutes
on two cores. The settings were fixed before the first run; no test image decided anything.
"""
import argparse
from pathlib import Path

import numpy as np
from PIL import Image

from cssl import CSSL, RunConfig, Supervised, cli
from cssl.program import exit_on_user_error
from libml.errors import UserError
from libml.results import tables
from libml.run import write_atomically

UNLABELED, TEST, PER_CLASS = 10_000, 2_000, 10
SETTINGS = dict(image_size=32, filters=16, repeat=1, scales=3, batch=32, ema=0.99, bn_momentum=0.99, keep_ckpt=1)


def write_folder(folder: Path, seed: int, data) -> None:
    """Writes the images of a seed, each with its class's name as folder; what is there already stays."""
    order = np.random.RandomState(seed).permutation(len(data.labels))
    labels = data.labels[order]
    ranks = np.array([np.sum(labels[:i] == labels[i]) for i in range(1000)])  # 10 of each class are among the first
    chosen = order[:1000][ranks < PER_CLASS]
    rest = np.setdiff1d(order, chosen, assume_unique=True)
    unlabeled = np.random.RandomState(seed).permutation(rest)[:UNLABELED]
    parts = [(data.images, chosen, data.labels, "train/{}"), (data.images, unlabeled, data.labels, "unlabeled"),
             (data.test_images, np.arange(TEST), data.test_labels, "test/{}")]
    for images, indices, classes, place in parts:
        for i in indices:
            name = data.class_names[classes[i]].replace("/", "-")
            file = folder / place.format(name) / f"{i:05}.png"
            if not file.exists():
                picture = Image.fromarray(np.asarray(images[i]))
                write_atomically(file, lambda stream, picture=picture: picture.save(stream, "PNG"))


def main() -> None:
    """Does what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("bench_folder"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--train_kimg", type=float, default=16.0)
    parser.add_argument("--data_dir", default="")
    args = parser.parse_args()
    if args.seeds < 1:
        raise UserError(f"--seeds={args.seeds}: expected 1 or more.")
    cli.start_tensorflow()
    import cssl
    from libml.experiment import train

    source = cssl.load("fashion_mnist.0@all-0", args.data_dir or cli.default_data_dir())
    rows = []
    for seed in range(1, args.seeds + 1):
        folder = args.folder / f"seed{seed}"
        write_folder(folder, seed, source)
        row = []
        for method in (Supervised, CSSL):
            config = RunConfig.of(method, dataset=f"folder:{folder}", train_kimg=args.train_kimg,
                                  report_kimg=args.train_kimg / 32, save_kimg=args.train_kimg / 8,
                                  train_dir=str(args.folder / "runs"), data_dir=str(args.folder / "decoded"),
                                  **SETTINGS)
            run = train(config).run
            row.append([run.result(metric) for metric in ("accuracy", "ece")])
        rows.append(row)
    found = np.array(rows)  # [seeds, methods, metrics]
    lines = [["", "accuracy %", "ECE"]]
    for name, values in (("labels alone", found[:, 0]), ("with unlabelled images (CSSL)", found[:, 1]),
                         ("difference, paired", found[:, 1] - found[:, 0])):
        lines.append([name, *("{:.{}f} ± {:.{}f}".format(*sum(zip(tables.mean_and_std(column), (digits, digits),
                                                                strict=True), ()))
                              for column, digits in zip(values.T, (2, 3), strict=True))])
    print(f"\n{args.seeds} seeds, {args.train_kimg:g} kimg\n\n{tables.markdown(lines)}")


if __name__ == "__main__":
    exit_on_user_error(main)
