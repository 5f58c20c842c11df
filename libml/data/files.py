"""Own images, in folders or listed in a CSV file: which files there are and what suits them. Needs no TensorFlow."""
from __future__ import annotations

import csv
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median

from libml.errors import OptionError, UserError

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm", ".tif", ".tiff", ".gif"}
MEASURED = 32  # images whose size is looked up
_COLUMNS = {"file": {"file", "filename", "file_name", "filepath", "path", "image", "image_path"},
            "label": {"label", "labels", "class", "category"}, "split": {"split", "part", "set", "subset"}}
_SPLITS = {"": "train", "train": "train", "training": "train", "unlabeled": "unlabeled", "unlabelled": "unlabeled",
           "test": "test", "valid": "valid", "val": "valid", "validation": "valid"}


@dataclass(frozen=True)
class Listing:
    """Files by part (train, unlabeled, test, valid), each with its class, "" for none.

    Attributes:
        path: of the folder or CSV file.
        parts: (class, file) pairs in a stable order.
        class_names: sorted.
        notes: one line each, for the user to read.
    """

    path: Path
    parts: dict[str, list[tuple[str, Path]]]
    class_names: list[str]
    notes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return sum(map(len, self.parts.values()))

    @cached_property
    def pixels(self) -> int:
        """The median of the shorter sides of some images, 0 if none can be read."""
        from PIL import Image

        every = [file for part in self.parts.values() for _, file in part]
        found = []
        for file in every[::max(1, len(every) // MEASURED)]:
            try:
                with warnings.catch_warnings(), Image.open(file) as image:  # reads the header only
                    warnings.simplefilter("ignore")
                    found.append(min(image.size))
            except Exception:  # unreadable files are told of when all are read
                continue
        return int(median(found)) if found else 0


def expand(name: str, path: str) -> Path:
    """Returns a path of the user's with ~ expanded; OptionError if that names nobody."""
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise OptionError(f"{name}={path}: there is no user {expanded.split(os.sep)[0][1:]!r}.")
    return Path(expanded)


def listing(path: Path, is_csv: bool) -> Listing:
    """Returns the files of path/train/<class>, path/unlabeled, path/test/<class>, path/valid/<class>, or of a CSV."""
    found = _list_csv(path) if is_csv else _list_folder(path)
    trained = {name for name, _ in found.parts["train"]}
    for part in ("test", "valid"):
        unknown = sorted({name for name, _ in found.parts[part]} - trained)
        if unknown:
            where, there = (f"the rows of `{part}` in {path}", "those of `train`") if is_csv else (
                str(path / part), str(path / "train"))
            raise UserError(f"Class {unknown[0]!r} has images in {where} but none in {there}. Add training images of "
                            "it, or remove it from the others.")
    return found


# Folders.

def _list_folder(path: Path) -> Listing:
    if not (path / "train").is_dir():
        raise UserError(f"{path} has no folder `train`. Expected {path}/train/<class>/*.png or *.jpg, optionally "
                        f"{path}/unlabeled/** and {path}/test/<class>/*.")

    def by_class(part: str) -> list[tuple[str, Path]]:
        if not (path / part).is_dir():
            return []
        classes = sorted(entry for entry in (path / part).iterdir() if entry.is_dir())
        return [(entry.name, file) for entry in classes for file in image_files(entry)]

    parts = {"train": by_class("train"), "unlabeled": [("", file) for file in image_files(path / "unlabeled")],
             "test": by_class("test"), "valid": by_class("valid")}
    if not parts["train"]:
        raise UserError(f"{path / 'train'} holds no image in class folders. Expected {path}/train/<class>/*.png "
                        "or *.jpg.")
    names = sorted({name for name, _ in parts["train"]})
    for entry in sorted((path / "train").iterdir()):
        if entry.is_dir() and entry.name not in names:
            raise UserError(f"The class folder {entry} holds no image (.png, .jpg). Add some, or remove the folder.")
    if len(names) < 2:
        raise UserError(f"{path / 'train'} has one class folder, {names[0]!r}; a classifier needs at least two.")
    loose = sorted(str(file) for part in ("train", "test", "valid") for file in path.glob(f"{part}/*")
                   if _is_image(file))
    return Listing(path, parts, names, [f"{len(loose)} images are in no class folder and are not used: "
                                        f"{some(loose)}"] if loose else [])


def _is_image(file: Path) -> bool:
    return file.suffix.lower() in IMAGE_SUFFIXES and not file.name.startswith(".") and file.is_file()


def image_files(folder: Path) -> list[Path]:
    """The images below a folder; hidden files, which systems leave behind, are none."""
    return sorted(filter(_is_image, folder.rglob("*")))


def some(names: list[str]) -> str:
    """The first three of many names."""
    return f"{', '.join(names[:3])}{', …' if len(names) > 3 else ''}"


# CSV files.

def _list_csv(path: Path) -> Listing:
    """Reads rows of file, label and perhaps split, with or without a header; the file's folder is where names start."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not text in UTF-8 ({error.reason} at byte {error.start}). Save it as such.") \
            from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}). Expected a CSV file with rows file,label.") \
            from error
    reader = csv.reader(text.splitlines(keepends=True), strict=True)
    parts: dict[str, list[tuple[str, Path]]] = {part: [] for part in ("train", "unlabeled", "test", "valid")}
    columns, seen = {"file": 0, "label": 1, "split": 2}, dict[Path, int]()
    try:
        for row in reader:
            line, cells = reader.line_num, [cell.strip() for cell in row]
            if not any(cells):
                continue
            if not seen and (header := _header(cells)):
                columns = header
                continue
            if len(cells) <= max(columns["file"], columns["label"]) or len(cells) > 3 and columns["split"] == 2:
                raise ValueError(f"{len(cells)} cell{'s'[:len(cells) > 1]} {','.join(row)[:60]!r}; expected "
                                 "file,label or file,label,split, separated by commas")
            name, label = cells[columns["file"]], cells[columns["label"]]
            word = cells[columns["split"]] if len(cells) > columns["split"] else ""
            file = path.parent / name
            if not name or not file.is_file():
                raise ValueError(f"there is no file {str(file)!r}; names are relative to {path.parent}")
            if word.lower() not in _SPLITS:
                raise ValueError(f"split {word!r}; expected train, test, valid, or nothing")
            part = _SPLITS[word.lower()]
            part = "unlabeled" if part == "train" and not label else part
            if bool(label) == (part == "unlabeled"):
                raise ValueError(f"{name} is to be `{part}` {'with' if label else 'without'} a label; "
                                 f"{'leave the label out' if label else 'give it one'}")
            if file in seen:
                raise ValueError(f"{name} is in line {seen[file]} already; leave one of them out")
            seen[file] = line
            parts[part].append((label, file))
    except (ValueError, csv.Error) as error:
        raise UserError(f"{path}, line {reader.line_num}: {error}.") from error
    names = {name for name, _ in parts["train"]}
    if len(names) < 2:
        raise UserError(f"{path} has {'one class' if names else 'no class'} among its training images"
                        f"{f', {min(names)!r}' if names else ''}; a classifier needs at least two.")
    numbers = all(name.isdecimal() for name in names)
    return Listing(path, parts, sorted(names, key=int if numbers else None))


def _header(cells: list[str]) -> dict[str, int] | None:
    """Where the columns are, if these cells name them."""
    words = [cell.lower() for cell in cells]
    found = {name: next((i for i, word in enumerate(words) if word in known), -1) for name, known in _COLUMNS.items()}
    if found["file"] < 0:
        return None
    if found["label"] < 0:
        raise ValueError(f"the header {','.join(cells)[:60]!r} names no column `label`")
    return found if found["split"] >= 0 else {**found, "split": len(cells)}


# What suits them.

def image_size(pixels: int) -> int:
    """The side, of 32, 64 or 96, to which images of so many pixels are resized: never larger than they are."""
    return max([32, *(side for side in (64, 96) if side <= pixels)])


def batch_size(side: int) -> int:
    """Labelled images per update: with 14 views of unlabelled ones to each, 6 to 8 GB of WRN-28-2 up to 96x96."""
    return next((batch for limit, batch in ((32, 64), (64, 16)) if side <= limit), 8)


def grid(kimg: float) -> dict[str, float]:
    """Reports, checkpoints and ramps of a run of this length: 64 reports, of which the last 20 make the result."""
    return {"report_kimg": kimg / 64, "save_kimg": kimg / 64, "keep_ckpt": 5, "warmup_kimg": kimg / 64}


FEW = 5000  # images, for which the paper's network and length would be a waste


def presets(found: Listing, side: int | None = None) -> dict[str, float]:
    """Returns size, batch, length and, for few images, a small network with fast averages, where the user says nothing.

    The length is a power of two near 300 epochs at seven unlabelled images to one labelled, from 512 to 65536 kimg;
    for few images 2048 updates, minutes on a CPU.
    """
    side = side or image_size(found.pixels)
    if len(found) < FEW:
        batch = min(32, batch_size(side))
        return {"image_size": side, "batch": batch, "train_kimg": 2.0 * batch, "filters": 16, "repeat": 1, "ema": 0.99,
                "bn_momentum": 0.99}
    kimg = 512
    while kimg < 65536 and kimg * 1.5 * 7 * 1024 < 300 * len(found):
        kimg *= 2
    return {"image_size": side, "batch": batch_size(side), "train_kimg": float(kimg)}


def describe(found: Listing) -> str:
    """Says what was found."""
    counts: Iterable[str] = (f"{len(part)} {name}" for name, part in found.parts.items() if part)
    return f"{found.path}: {', '.join(counts)} files, shorter side about {found.pixels} pixels"
