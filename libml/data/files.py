"""A user's images, in folders or listed in a CSV file: which files there are, what suits them. Needs no TensorFlow."""
from __future__ import annotations

import csv
import os
import stat
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import NamedTuple

from libml.errors import OptionError, UserError

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm", ".tif", ".tiff", ".gif"}
MEASURED = 32  # images whose size is looked up
_SPLITS = {"": "train", "train": "train", "training": "train", "unlabeled": "unlabeled", "unlabelled": "unlabeled",
           "test": "test", "valid": "valid", "val": "valid", "validation": "valid"}


class File(NamedTuple):
    """An image file as it was when it was listed."""

    label: str  # "" for none
    path: str
    size: int
    modified: int  # nanoseconds


@dataclass(frozen=True)
class Listing:
    """The image files of a folder or a CSV file."""

    path: Path
    parts: dict[str, list[File]]  # train, unlabeled, test and valid, each in a stable order
    class_names: list[str]
    notes: list[str] = field(default_factory=list)  # one line each, for the user to read

    def __len__(self) -> int:
        return sum(map(len, self.parts.values()))

    def __str__(self) -> str:
        counts = ", ".join(f"{len(part)} {name}" for name, part in self.parts.items() if part)
        return f"{self.path}: {counts} files, shorter side about {self.pixels} pixels"

    @cached_property
    def pixels(self) -> int:
        """The median of the shorter sides of some images, 0 if none can be read."""
        from PIL import Image

        files = [file for part in self.parts.values() for file in part]
        sides = []
        for file in files[::max(1, len(files) // MEASURED)]:
            with suppress(Exception), warnings.catch_warnings():  # unreadable files are told of when all are read
                warnings.simplefilter("ignore")
                with Image.open(file.path) as image:  # reads the header only
                    sides.append(min(image.size))
        return int(median(sides)) if sides else 0


def expand(name: str, path: str) -> Path:
    """Returns a path of the user's with ~ expanded; OptionError if that names nobody."""
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise OptionError(f"{name}={path}: there is no user {expanded.split(os.sep)[0][1:]!r}.")
    return Path(expanded)


def listing(path: Path, is_csv: bool) -> Listing:
    """Returns the files of path/train/<class>, path/unlabeled, path/test/<class>, path/valid/<class>, or of a CSV.

    Reads each folder once and asks once for each file, which is what takes long on a network.
    """
    files = _list_csv(path) if is_csv else _list_folder(path)
    trained = {file.label for file in files.parts["train"]}
    for part in ("test", "valid"):
        unknown = sorted({file.label for file in files.parts[part]} - trained)
        if unknown:
            where, there = (f"the rows of `{part}` in {path}", "those of `train`") if is_csv else (
                str(path / part), str(path / "train"))
            raise UserError(f"Class {unknown[0]!r} has images in {where} but none in {there}. Add training images of "
                            "it, or remove it from the others.")
    return files


# Folders.

def _list_folder(path: Path) -> Listing:
    if not (path / "train").is_dir():
        raise UserError(f"{path} has no folder `train`. Expected {path}/train/<class>/*.png or *.jpg, optionally "
                        f"{path}/unlabeled/** and {path}/test/<class>/*.")
    train, test, valid = (_entries(path / part) for part in ("train", "test", "valid"))

    def by_class(entries: list[os.DirEntry[str]]) -> list[File]:
        return [file for entry in entries if entry.is_dir() for file in _labeled(entry.name, entry.path)]

    parts = {"train": by_class(train), "unlabeled": _labeled("", path / "unlabeled"), "test": by_class(test),
             "valid": by_class(valid)}
    if not parts["train"]:
        raise UserError(f"{path / 'train'} holds no image in class folders. Expected {path}/train/<class>/*.png "
                        "or *.jpg.")
    names = sorted({file.label for file in parts["train"]})
    for entry in train:
        if entry.is_dir() and entry.name not in names:
            raise UserError(f"The class folder {entry.path} holds no image (.png, .jpg). Add some, or remove the "
                            "folder.")
    if len(names) < 2:
        raise UserError(f"{path / 'train'} has one class folder, {names[0]!r}; a classifier needs at least two.")
    loose = [entry.path for entry in [*test, *train, *valid] if _is_image(entry)]
    return Listing(path, parts, names, [f"{len(loose)} images are in no class folder and are not used: "
                                        f"{', '.join(loose[:3])}{', …' * (len(loose) > 3)}"] if loose else [])


def _labeled(label: str, folder: str | Path) -> list[File]:
    return [File(label, entry.path, entry.stat().st_size, entry.stat().st_mtime_ns) for entry in _images(folder)]


def image_files(folder: Path) -> list[Path]:
    """The images below a folder, in the order of their paths; hidden files, which systems leave behind, are none."""
    return [Path(entry.path) for entry in _images(folder)]


def _images(folder: str | Path) -> Iterator[os.DirEntry[str]]:
    for entry in _entries(folder):
        if entry.is_dir(follow_symlinks=False):
            yield from _images(entry.path)
        elif _is_image(entry):
            yield entry


def _is_image(entry: os.DirEntry[str]) -> bool:
    return (os.path.splitext(entry.name)[1].lower() in IMAGE_SUFFIXES and not entry.name.startswith(".")
            and entry.is_file())


def _entries(folder: str | Path) -> list[os.DirEntry[str]]:
    """What a folder holds, by name; nothing if there is none or it is closed to us."""
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError), os.scandir(folder) as entries:
        return sorted(entries, key=lambda entry: entry.name)
    return []


# CSV files.

def _list_csv(path: Path) -> Listing:
    """Reads rows of file, label and perhaps split, in these columns unless a header names others; names of files are
    relative to the CSV file's folder."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not text in UTF-8 ({error.reason} at byte {error.start}). Save it as such.") \
            from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}). Expected a CSV file with rows file,label.") \
            from error
    reader = csv.reader(text.splitlines(keepends=True), strict=True)
    parts: dict[str, list[File]] = {part: [] for part in ("train", "unlabeled", "test", "valid")}
    columns, lines = ["file", "label", "split"], dict[Path, int]()
    try:
        for row in reader:
            cells = [cell.strip() for cell in row]
            if reader.line_num == 1 and "file" in cells:
                if "label" not in cells:
                    raise ValueError(f"the header {','.join(row)[:60]!r} names no column `label`")
                columns = cells if "split" in cells else [*cells, "split"]
                continue
            if not any(cells):
                continue
            values = dict(zip(columns, cells, strict=False))
            if "label" not in values or len(cells) > len(columns):
                raise ValueError(f"{len(cells)} cell{'s'[:len(cells) > 1]} {','.join(row)[:60]!r}; expected "
                                 "file,label or file,label,split, separated by commas")
            name, label, word = values["file"], values["label"], values.get("split", "").lower()
            file = path.parent / name
            if file in lines:
                raise ValueError(f"{name} is in line {lines[file]} already; leave one of them out")
            lines[file] = reader.line_num
            if word not in _SPLITS:
                raise ValueError(f"split {word!r}; expected train, test, valid, or nothing")
            part = _SPLITS[word]
            part = "unlabeled" if part == "train" and not label else part
            if bool(label) == (part == "unlabeled"):
                raise ValueError(f"{name} is to be `{part}` {'with' if label else 'without'} a label; "
                                 f"{'leave the label out' if label else 'give it one'}")
            parts[part].append(_listed(label, file, path.parent))
    except (ValueError, csv.Error) as error:
        raise UserError(f"{path}, line {reader.line_num}: {error}.") from error
    names = {file.label for file in parts["train"]}
    if len(names) < 2:
        raise UserError(f"{path} has {'one class' if names else 'no class'} among its training images"
                        f"{f', {min(names)!r}' if names else ''}; a classifier needs at least two.")
    numbers = all(name.isdecimal() for name in names)
    return Listing(path, parts, sorted(names, key=int if numbers else None))


def _listed(label: str, file: Path, start: Path) -> File:
    with suppress(OSError):
        status = os.stat(file)
        if stat.S_ISREG(status.st_mode):
            return File(label, str(file), status.st_size, status.st_mtime_ns)
    raise ValueError(f"there is no file {str(file)!r}; names are relative to {start}")


# What suits them.

def image_size(pixels: int) -> int:
    """The side, of 32, 64 or 96, to which images of so many pixels are resized: never larger than they are."""
    return max([32, *(side for side in (64, 96) if side <= pixels)])


def batch_size(side: int) -> int:
    """Labelled images per update: with 14 views of unlabelled ones to each, 6 to 8 GB of WRN-28-2 up to 96x96."""
    return next((batch for limit, batch in ((32, 64), (64, 16)) if side <= limit), 8)


FEW = 5000  # images, for which the paper's network and length would be a waste


def presets(files: Listing, side: int | None = None) -> dict[str, float]:
    """Returns size, batch, length and, for few images, a small network with fast averages, where the user says nothing.

    The length is a power of two near 300 epochs at seven unlabelled images to one labelled, from 512 to 65536 kimg;
    for few images 2048 updates, minutes on a CPU.
    """
    side = side or image_size(files.pixels)
    if len(files) < FEW:
        batch = min(32, batch_size(side))
        return {"image_size": side, "batch": batch, "train_kimg": 2.0 * batch, "filters": 16, "repeat": 1, "ema": 0.99,
                "bn_momentum": 0.99}
    kimg = 512
    while kimg < 65536 and kimg * 1.5 * 7 * 1024 < 300 * len(files):
        kimg *= 2
    return {"image_size": side, "batch": batch_size(side), "train_kimg": float(kimg)}
