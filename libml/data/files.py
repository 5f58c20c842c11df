"""A user's images, in folders or listed in a CSV file: which files there are, what suits them. Needs no TensorFlow."""
import collections
import csv
import io
import os
import stat
import unicodedata
import warnings
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import NamedTuple

from libml.errors import OptionError, UserError

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm", ".tif", ".tiff", ".gif"}
PARTS = ("train", "unlabeled", "test", "valid")
NO_CLASS = {"-1", "nan", "none", "null", "na", "n/a", "?", "unlabeled", "unlabelled"}  # by what some programs write
MEASURED = 32  # images whose size is looked up
_SPLITS = {"": "train", "train": "train", "training": "train", "unlabeled": "unlabeled", "unlabelled": "unlabeled",
           "test": "test", "valid": "valid", "val": "valid", "validation": "valid"}


class File(NamedTuple):
    label: str  # "" for none
    path: str
    size: int
    modified: int  # nanoseconds
    node: tuple[int, int]  # the same for all names of one file


@dataclass(frozen=True)
class Listing:
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
    """Returns a path of the user's with ~ expanded; UserError if that names nobody, or is longer than paths can be."""
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise OptionError(f"{name}={path}: there is no user {expanded.split(os.sep)[0][1:]!r}.")
    return checked_length(Path(expanded))


def checked_length(path: Path) -> Path:
    """Returns a path; UserError for one that no file system takes."""
    if "\0" in str(path):
        raise UserError(f"The name {path} has a NUL byte in it, which no file system takes. Leave it out.")
    for name, most in [*((part, 255) for part in path.parts), (str(path), 4095)]:
        size = len(os.fsencode(name))
        if size > most:
            raise UserError(f"The name {name[:60]}… has {size} bytes; file systems take {most}. Use shorter names.")
    return path


def listing(path: Path, is_csv: bool) -> Listing:
    """Returns the files of a folder or a CSV; asks once for each, which is what takes long on a network."""
    files = _list_csv(path) if is_csv else _list_folder(path)
    trained, known = set(files.class_names), dict[tuple[int, int], tuple[str, File]]()
    for part in ("train", "test", "valid"):
        for file in files.parts[part]:
            if file.label not in trained:
                where, there = (f"the rows of `{part}` in {path}", "those of `train`") if is_csv else (
                    str(path / part), str(path / "train"))
                raise UserError(f"Class {file.label!r} has images in {where} but none in {there}. Add training images "
                                "of it, or remove it from the others.")
            first, other = known.setdefault(file.node, (part, file))
            if (first, other.label) != (part, file.label):
                raise UserError(f"{other.path} ({first}, class {other.label!r}) and {file.path} ({part}, class "
                                f"{file.label!r}) are the same file. Leave one of them out.")
    files.notes.extend(_doubts(path, files.class_names))
    return files


def _doubts(path: Path, names: list[str]) -> Iterator[str]:
    """Yields a line for each class that may be none, or another one."""
    alike = collections.defaultdict[str | float, list[str]](list)
    for name in names:
        key: str | float = "".join(letter for letter in unicodedata.normalize("NFKC", name).casefold()
                                   if letter.isprintable() and not letter.isspace())
        if key in NO_CLASS:
            yield (f"{name!r} is a class of {path}, as it is written. If it stands for no class: leave the label empty "
                   "in a CSV file, put the images into the folder `unlabeled` beside `train`.")
        with suppress(ValueError):
            key = float(key)
        alike[key].append(name)
    for same in alike.values():
        if len(same) > 1:
            yield f"{' and '.join(map(ascii, same))} are different classes of {path}. If it is one, use one name."


class _Walk:
    """Looks into folders and remembers what it passes over."""

    def __init__(self, expected: Collection[str] = ()):
        self.passed = collections.defaultdict[str, list[str]](list)  # paths by kind
        self.expected = expected  # names of what is passed over without a word

    def __str__(self) -> str:
        paths = [path for found in self.passed.values() for path in found]
        return (f"Not used are {', '.join(f'{kind} ({len(found)})' for kind, found in self.passed.items())}: "
                f"{', '.join(paths[:3])}{', …' * (len(paths) > 3)}")

    def entries(self, folder: str | Path) -> list[os.DirEntry[str]]:
        """What a folder holds that is not hidden, by name; nothing if there is none."""
        try:
            with os.scandir(folder) as found:
                entries = sorted((entry for entry in found if entry.name not in self.expected),
                                 key=lambda entry: entry.name)
        except FileNotFoundError:
            return []
        except OSError:
            self.passed["folders that cannot be read"].append(str(folder))
            return []
        for entry in entries:
            if entry.name.startswith(".") and (_is_image(entry.name) or entry.is_dir(follow_symlinks=False)):
                self.passed["hidden files or folders"].append(entry.path)
        return [entry for entry in entries if not entry.name.startswith(".")]

    def images(self, label: str, folder: str | Path) -> Iterator[File]:
        """The images below a folder, in the order of their paths."""
        for entry in self.entries(folder):
            if entry.is_dir(follow_symlinks=False):
                yield from self.images(label, entry.path)
            elif file := self.image(label, entry):
                yield file

    def image(self, label: str, entry: os.DirEntry[str]) -> File | None:
        """An entry as an image; None if it is something else."""
        try:
            status = entry.stat()
        except OSError:  # to nowhere, to itself, or to where we may not look
            self.passed["broken links"].append(entry.path)
            return None
        if stat.S_ISREG(status.st_mode) and _is_image(entry.name):
            return _file(label, entry.path, status)
        kind = "linked folders" if stat.S_ISDIR(status.st_mode) else "files that are no images"
        self.passed[kind].append(entry.path)
        return None


def _is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES


def _file(label: str, path: str, status: os.stat_result) -> File:
    return File(label, path, status.st_size, status.st_mtime_ns, (status.st_dev, status.st_ino))


def image_files(folder: Path, expected: Collection[str] = ()) -> tuple[list[Path], list[str]]:
    """The images below a folder, in the order of their paths, and perhaps one line about what is passed over, but for
    `expected` names."""
    walk = _Walk(expected)
    found = [Path(file.path) for file in walk.images("", folder)]
    return found, [str(walk)] if walk.passed else []


def _list_folder(path: Path) -> Listing:
    if not (path / "train").is_dir():
        raise UserError(f"{path} has no folder `train`. Expected {path}/train/<class>/*.png or *.jpg, optionally "
                        f"{path}/unlabeled/** and {path}/test/<class>/*.")
    walk = _Walk()
    parts = {part: list[File]() for part in PARTS}
    for part in ("train", "test", "valid"):
        for entry in walk.entries(path / part):
            if not os.path.isdir(entry):
                if walk.image("", entry):
                    walk.passed["images in no class folder"].append(entry.path)
                continue
            try:
                entry.name.encode()
            except UnicodeEncodeError:
                raise UserError(f"The name of the class folder {entry.path} is not UTF-8. Rename it.") from None
            found = list(walk.images(entry.name, entry.path))
            if part == "train" and not found:
                raise UserError(f"The class folder {entry.path} holds no image (.png, .jpg). Add some, or remove the "
                                "folder.")
            parts[part] += found
    parts["unlabeled"] += walk.images("", path / "unlabeled")
    for entry in walk.entries(path):
        if entry.name not in PARTS and (entry.is_dir() or _is_image(entry.name)):
            walk.passed[f"folders and images other than {'/'.join(PARTS)}"].append(entry.path)
    names = sorted({file.label for file in parts["train"]})
    if not names:
        raise UserError(f"{path / 'train'} holds no image in class folders. Expected {path}/train/<class>/*.png "
                        "or *.jpg.")
    if len(names) < 2:
        raise UserError(f"{path / 'train'} has one class folder, {names[0]!r}; a classifier needs at least two.")
    return Listing(path, parts, names, [str(walk)] if walk.passed else [])


def _list_csv(path: Path) -> Listing:
    """Reads rows of file (relative to the CSV file's folder), label and perhaps split, or as a header names them."""
    from tqdm import tqdm

    try:
        if path.exists() and not path.is_file():
            raise OSError(0, "it is no file, which can be read again when a run goes on")
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not text in UTF-8 ({error.reason} at byte {error.start}). Save it as such.") \
            from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}). Expected a CSV file with rows file,label.") \
            from error
    parts = {part: list[File]() for part in PARTS}
    columns, lines, line = ["file", "label", "split"], dict[tuple[int, int], int](), 1
    further, with_test = dict[int, str](), set[str]()  # columns that are not used and name parts, such as the test
    with tqdm(io.StringIO(text), f"reading {path.name}", text.count("\n"), leave=False, unit="row",
              disable=None) as bar:
        reader = csv.reader(bar, strict=True)
        try:
            for row in reader:
                cells = [cell.strip() for cell in row]
                if line == 1 and "file" in (header := [cell.lower() for cell in cells]):
                    cells = header
                    if "label" not in cells:
                        raise ValueError(f"the header {','.join(row)[:60]!r} names no column `label`")
                    if twice := [name for name in ("file", "label", "split") if cells.count(name) > 1]:
                        raise ValueError(f"the header {','.join(row)[:60]!r} names the column `{twice[0]}` twice")
                    columns = cells if "split" in cells else [*cells, "split"]
                    further = {i: name for i, name in enumerate(cells) if name not in ("file", "label", "split")}
                elif any(cells) and (found := _row(cells, columns, path.parent)):
                    part, file = found
                    if lines.setdefault(file.node, line) != line:
                        raise ValueError(f"{cells[columns.index('file')]} is in line {lines[file.node]} already; leave "
                                         "one of them out")
                    parts[part].append(file)
                    further = {i: name for i, name in further.items() if "".join(cells[i:i + 1]).lower() in _SPLITS}
                    with_test |= {name for i, name in further.items() if "".join(cells[i:i + 1]).lower() == "test"}
                line = reader.line_num + 1  # where the next row begins
        except (ValueError, csv.Error) as error:
            raise UserError(f"{path}, line {line}: {error}.") from error
    names = {file.label for file in parts["train"]}
    if len(names) < 2:
        raise UserError(f"{path} has {'one class' if names else 'no class'} among its training images"
                        f"{f', {min(names)!r}' if names else ''}; a classifier needs at least two.")
    numbers = all(name.isdecimal() and len(name) < 19 for name in names)
    return Listing(path, parts, sorted(names, key=lambda name: (int(name) if numbers else 0, name)), [
        f"The column `{name}` of {path} is not used. If it says which images are for the test, call it `split`."
        for name in further.values() if name in with_test])


def _row(cells: list[str], columns: list[str], start: Path) -> tuple[str, File] | None:
    """Returns what a row is for and its file, None for an excluded one; ValueError says what is wrong."""
    values = dict(zip(columns, cells, strict=False))
    if "label" not in values or "file" not in values or len(cells) > len(columns):
        raise ValueError(f"{len(cells)} cell{'s'[:len(cells) > 1]} {','.join(cells)[:60]!r}; expected "
                         "file,label or file,label,split, separated by commas")
    name, label, word = values["file"], values["label"], values.get("split", "").lower()
    for cell in (name, label):
        if "\n" in cell:
            raise ValueError(f"{cell[:60]!r} goes over several lines; expected a row in each: close the quote that is "
                             "opened here, or leave it out")
    if word == "excluded":
        return None
    if word not in _SPLITS:
        raise ValueError(f"split {word!r}; expected train, test, valid, excluded, or nothing")
    part = "unlabeled" if _SPLITS[word] == "train" and not label else _SPLITS[word]
    if bool(label) == (part == "unlabeled"):
        raise ValueError(f"{name} is to be `{part}` {'with' if label else 'without'} a label; "
                         f"{'leave the label out' if label else 'give it one'}")
    path = os.path.join(start, name)
    with suppress(OSError, ValueError):
        status = os.stat(path)
        if stat.S_ISREG(status.st_mode):
            return part, _file(label, path, status)
    raise ValueError(f"there is no file {path!r}; names are relative to {start}")


FEW = 5000  # images, for which the paper's network and length would be a waste


def image_size(pixels: int) -> int:
    """The side, of 32, 64 or 96, to which images of so many pixels are resized: never larger than they are."""
    return max([32, *(side for side in (64, 96) if side <= pixels)])


def batch_size(side: int) -> int:
    """Labelled images per update: with 14 views of unlabelled ones to each, 6 to 8 GB of WRN-28-2 up to 96x96."""
    return next((batch for limit, batch in ((32, 64), (64, 16)) if side <= limit), 8)


def presets(files: Listing, side: int | None = None) -> dict[str, float | str]:
    """Returns size, batch and length: a power of two near 300 epochs at seven unlabelled images to one labelled; for
    few images 2048 updates, minutes on a CPU, of a small network with fast averages."""
    side = side or image_size(files.pixels)
    if len(files) < FEW:
        batch = min(32, batch_size(side))
        return {"image_size": side, "mixed_precision": "auto", "batch": batch, "train_kimg": 2.0 * batch, "filters": 16,
                "repeat": 1, "ema": 0.99, "bn_momentum": 0.99}
    kimg = 512
    while kimg < 65536 and kimg * 1.5 * 7 * 1024 < 300 * len(files):
        kimg *= 2
    return {"image_size": side, "mixed_precision": "auto", "batch": batch_size(side), "train_kimg": float(kimg)}
