"""Shows what is in a dataset: shapes, classes, the labelled images, as text, JSON or a contact sheet.

    python scripts/inspect_dataset.py --dataset=cifar10.3@40-1 [--json] [--png=labelled.png]

JSON: one object with labeled_indices (sorted), unlabeled_indices (all training images in the order of the unlabelled
stream, the first num_valid of them being the validation set), num_valid, num_test, num_classes, class_counts (training
images per class), labeled_class_counts, class_names, image_shape.
"""
import argparse
import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from cssl import cli
from libml import data
from libml.errors import UserError


def describe(dataset: data.SSLData) -> dict:
    """Returns the JSON object of a dataset."""
    def counts(labels: np.ndarray) -> list[int]:
        return np.bincount(labels[labels >= 0], minlength=dataset.num_classes).tolist()

    return {
        "dataset": dataset.name,
        "image_shape": list(dataset.image_shape),
        "num_train": len(dataset.labels),
        "num_labeled": len(dataset.labeled),
        "num_unlabeled": len(dataset.unlabeled),
        "num_valid": dataset.num_valid,
        "num_test": len(dataset.test_labels),
        "num_classes": dataset.num_classes,
        "class_names": dataset.class_names,
        "class_counts": counts(dataset.labels),
        "labeled_class_counts": counts(dataset.labeled_classes),
        "valid_class_counts": counts(dataset.labels[dataset.valid]),
        "test_class_counts": counts(dataset.test_labels),
        "labeled_indices": sorted(dataset.labeled.tolist()),
        "unlabeled_indices": dataset.order.tolist(),
    }


def contact_sheet(dataset: data.SSLData, most_per_class: int = 25) -> Image.Image:
    """Draws the labelled images, one row per class."""
    height, width, _ = dataset.image_shape
    scale = max(1, 64 // width)
    cell_width, cell_height, margin = width * scale + 2, height * scale + 2, 110
    columns = min(most_per_class, int(np.bincount(dataset.labeled_classes).max()))
    sheet = Image.new("RGB", (margin + columns * cell_width, dataset.num_classes * cell_height), "white")
    draw = ImageDraw.Draw(sheet)
    for c, name in enumerate(dataset.class_names):
        draw.text((4, c * cell_height + cell_height // 2 - 6), name[:16], fill="black")
        for column, index in enumerate(np.sort(dataset.labeled[dataset.labeled_classes == c])[:columns]):
            picture = Image.fromarray(np.asarray(dataset.images[index])).resize((width * scale, height * scale), 0)
            sheet.paste(picture, (margin + column * cell_width, c * cell_height))
    return sheet


def main() -> None:
    """Prints or draws the dataset named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", required=True, help=data.GRAMMAR)
    parser.add_argument("--data_dir", type=Path, default=cli.default_data_dir(), help="default: %(default)s")
    parser.add_argument("--image_size", type=int, default=32, help="side to which folder images are resized")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--png", type=Path, help="write a contact sheet of the labelled images")
    args = parser.parse_args()
    dataset = data.load(args.dataset, args.data_dir, args.image_size)
    for note in dataset.notes:
        print(f"warning: {note}", file=sys.stderr)
    facts = describe(dataset)
    if args.json:
        print(json.dumps(facts))
    else:
        size = "x".join(map(str, facts["image_shape"]))
        print(f"{facts['dataset']}: {facts['num_train']} training images of {size}, {facts['num_classes']} classes")
        print(f"  labelled {facts['num_labeled']}, unlabelled {facts['num_unlabeled']} (the labelled ones included), "
              f"validation {facts['num_valid']}, test {facts['num_test']}")
        print(f"  {'class':<20}{'train':>8}{'labelled':>10}{'valid':>8}{'test':>8}")
        columns = (facts["class_counts"], facts["labeled_class_counts"], facts["valid_class_counts"],
                   facts["test_class_counts"])
        for name, *numbers in zip(facts["class_names"], *columns, strict=True):
            print("  {:<20}{:>8}{:>10}{:>8}{:>8}".format(name, *numbers))
    if args.png:
        try:
            contact_sheet(dataset).save(args.png)
        except (OSError, ValueError) as error:
            raise UserError(f"Cannot write the contact sheet to {args.png} ({error}). "
                            "Name a writable .png file.") from error
        print(f"contact sheet: {args.png}", file=sys.stderr)


if __name__ == "__main__":
    cli.guarded(main)
