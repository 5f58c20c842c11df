"""Shows what is in a dataset: shapes, classes, the labelled images, as text, JSON or a contact sheet.

    cssl-inspect --dataset=cifar10.3@40-1 [--json] [--png=labelled.png]

JSON: one object with labeled_indices (sorted), unlabeled_indices (all training images in the order of the unlabelled
stream, the first num_valid of them being the validation set), num_valid, num_test, num_classes, class_counts (training
images per class), labeled_class_counts, class_names, image_shape.
"""
import json
import sys
from pathlib import Path

import numpy as np

from cssl import cli, tools
from libml.data.names import GRAMMAR, parse_name
from libml.errors import printable
from libml.writing import figure_files


def main() -> None:
    parser = tools.parser(__doc__)
    parser.add_argument("--dataset", required=True, help=GRAMMAR)
    parser.add_argument("--data_dir", type=Path, default=cli.default_data_dir(), help="default: %(default)s")
    parser.add_argument("--image_size", type=int, help="side to which own images are resized")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--png", type=Path, help="write a contact sheet of the labelled images")
    args = parser.parse_args()
    parse_name(args.dataset)  # a wrong name needs no TensorFlow
    if args.png:
        figure_files(args.png, ("png",))
    cli.start_tensorflow()
    from libml import data

    dataset = data.load(args.dataset, args.data_dir, args.image_size)
    for remark in (*(f"warning: {note}" for note in dataset.notes), *dataset.remarks):
        print(printable(remark), file=sys.stderr)
    parts = {"": dataset.labels, "labeled_": dataset.labeled_classes, "valid_": dataset.labels[dataset.valid],
             "test_": dataset.test_labels}
    counts = {f"{part}class_counts": np.bincount(labels[labels >= 0], minlength=dataset.num_classes).tolist()
              for part, labels in parts.items()}
    facts = {"dataset": dataset.name, "image_shape": list(dataset.image_shape), "num_train": len(dataset.labels),
             "num_labeled": len(dataset.labeled), "num_unlabeled": len(dataset.unlabeled),
             "num_valid": dataset.num_valid, "num_test": len(dataset.test_labels), "num_classes": dataset.num_classes,
             "class_names": dataset.class_names, **counts, "labeled_indices": sorted(dataset.labeled.tolist()),
             "unlabeled_indices": dataset.order.tolist()}
    if args.json:
        print(json.dumps(facts))
    else:
        size, name = "x".join(map(str, facts["image_shape"])), printable(facts["dataset"])
        print(f"{name}: {facts['num_train']} training images of {size}, {facts['num_classes']} classes\n"
              f"  labelled {facts['num_labeled']}, unlabelled {facts['num_unlabeled']} (the labelled ones included), "
              f"validation {facts['num_valid']}, test {facts['num_test']}")
        columns = [facts[name] for name in ("class_names", "class_counts", "labeled_class_counts",
                                            "valid_class_counts", "test_class_counts")]
        for name, *cells in (("class", "train", "labelled", "valid", "test"), *zip(*columns, strict=True)):
            print("  {:<20}{:>8}{:>10}{:>8}{:>8}".format(printable(name), *cells))
    if args.png:
        from libml.results import plots

        rows = [np.asarray(dataset.images[np.sort(dataset.labeled[dataset.labeled_classes == number])[:25]])
                for number in range(dataset.num_classes)]  # 25 of a class at most
        for path in plots.save(plots.plot_images(rows, dataset.class_names), args.png, ("png",)):
            print(f"contact sheet: {path}", file=sys.stderr)


if __name__ == "__main__":
    tools.exit_on_user_error(main)
