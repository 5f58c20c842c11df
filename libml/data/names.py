"""What is known of a dataset without its images: the grammar of names, and one entry per dataset."""
import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from libml.errors import UserError

if TYPE_CHECKING:
    from libml.data.sources import Source

GRAMMAR = ("expected <dataset>.<seed>@<labels>-<valid>, such as cifar10.3@40-1 or folder:PATH.1@all-100, where "
           "<labels> is a number or `all`; or folder:PATH or csv:FILE alone")


@dataclass(frozen=True)
class Dataset:
    width: int = 32  # in pixels, to which smaller images are padded; decides how many stages a network has
    mirror: bool = True  # whether a mirrored image keeps its class (house numbers and digits do not)
    presets: Mapping[str, float] = field(default_factory=dict)  # options where the user says nothing
    tfds_name: str = ""  # in TensorFlow Datasets
    train_splits: tuple[str, ...] = ("train",)  # of the TFDS dataset, one after the other
    relabel: Callable[[np.ndarray], np.ndarray] | None = None  # from TFDS's classes to those of the original program
    equal_classes: bool = False  # STL-10: unlabelled images hide the true shares of the classes, which are equal
    load: "Callable[[], Source] | None" = None  # makes the images of a dataset that is not in TFDS
    auto_augment: str = ""  # the dataset on which AutoAugment's policies for it were found, "" for none


_SVHN = Dataset(tfds_name="svhn_cropped", mirror=False, relabel=lambda digit: (digit - 1) % 10, auto_augment="svhn")

DATASETS: dict[str, Dataset] = {
    "cifar10": Dataset(tfds_name="cifar10", auto_augment="cifar10"),
    "cifar100": Dataset(tfds_name="cifar100", presets={"filters": 128, "wd": 0.001}, auto_augment="cifar10"),
    "svhn": replace(_SVHN, train_splits=("train", "extra")),
    "svhn_noextra": _SVHN,
    "stl10": Dataset(96, tfds_name="stl10", train_splits=("train", "unlabelled"), equal_classes=True),
    "fashion_mnist": Dataset(tfds_name="fashion_mnist"),
    # A small net and fast averages: minutes on a CPU.
    "digits": Dataset(16, mirror=False, load=lambda: importlib.import_module("libml.data.sources").digits(), presets={
        "filters": 16, "repeat": 1, "scales": 3, "batch": 32, "ema": 0.98, "bn_momentum": 0.98, "train_kimg": 30.0,
        "report_kimg": 0.5, "save_kimg": 5.0, "keep_ckpt": 2, "warmup_kimg": 4.0}),
}


@dataclass(frozen=True)
class DatasetName:
    """The fields of a name such as cifar10.3@40-1, or of own images alone: all labels, a split that suits them."""

    dataset: str
    seed: int
    labels: int | None  # None for `all`
    valid: int | None  # None where the data decide

    def __str__(self) -> str:
        if self.is_whole:
            return self.dataset
        return f"{self.dataset}.{self.seed}@{'all' if self.labels is None else self.labels}-{self.valid}"

    @property
    def path(self) -> str:
        """The folder or CSV file of a user's images, "" for other datasets."""
        kind, _, path = self.dataset.partition(":")
        return path if kind in ("folder", "csv") else ""

    @property
    def is_csv(self) -> bool:
        return self.dataset.startswith("csv:")

    @property
    def is_whole(self) -> bool:
        return self.valid is None

    @property
    def is_arrays(self) -> bool:
        return self.dataset.split(":")[0] == "arrays"

    @property
    def entry(self) -> Dataset:
        """What is known of the dataset: of a user's images, nothing."""
        return DATASETS.get(self.dataset, Dataset())


def parse_name(text: str) -> DatasetName:
    """Parses what GRAMMAR says; the dataset's name may itself hold dots and slashes (folder:PATH)."""
    match = re.fullmatch(r"(?P<dataset>.+)\.(?P<seed>\d{1,18})@(?P<labels>\d{1,18}|all)-(?P<valid>\d{1,18})", text)
    if not match and re.match("(folder|csv):.", text) and not re.search(r"\.\d+@[^/]*$", text):
        return DatasetName(text, 1, None, None)
    if not match:
        raise UserError(f"Malformed dataset name {text!r}: {GRAMMAR}.")
    labels = None if match["labels"] == "all" else int(match["labels"])
    name = DatasetName(match["dataset"], int(match["seed"]), labels, int(match["valid"]))
    if name.dataset not in DATASETS and not name.path and not name.is_arrays:
        raise UserError(f"Unknown dataset {name.dataset!r} in {text!r}; there are {', '.join(DATASETS)}, folder:PATH, "
                        "csv:FILE.")
    if name.seed >= 2 ** 32:
        raise UserError(f"Split seed {name.seed} in {text!r} is too large; expected 0 to {2 ** 32 - 1}.")
    if labels == 0:
        raise UserError(f"{text!r} asks for no label at all; expected at least 1, or `all`.")
    return name
