"""The labels of a folder of images: who has which, written to labels.csv before anybody is told so."""
from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from libml.data import files
from libml.devices.lock import Lock
from libml.errors import UserError
from libml.writing import write_text, writing

COLUMNS = ("file", "label", "split", "by")
EVERY = 10  # every so many-th image is one of the random part, which is that part of all
SPLITS = ("train", "test", "valid", "excluded")
NAME = 200  # letters of a class's name, at most
HIDDEN = ".cssl-label"  # a folder for the lock and the classes


class NotWritten(UserError):
    """Labels cannot be written now; nothing has changed, and they may be written later."""


class Decision(NamedTuple):
    """What a person said of an image."""

    label: str  # the class; "" for none of them
    split: str  # of SPLITS
    by: str  # how it came: order, random, grid, audit, read; of one left out, perhaps the split that it had


def place(name: str) -> int:
    """Where an image stands in a random order that follows from its name alone."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


def checked_class(name: str) -> str:
    """Returns the name of a class as a CSV file can hold it; UserError if it cannot."""
    if not name.strip() or len(name) > NAME or not name.strip().isprintable():
        raise UserError(f"A class is called {name[:60]!r}; expected one line of text, up to {NAME} letters.")
    return name.strip()


class Session:
    """The images below a folder and their labels; all that the page does goes through here.

    Images are known by number, in the order of their paths. Every change is in the file when its call returns.
    """

    def __init__(self, folder: Path, classes: Iterable[str] = (), labels: Path | None = None):
        self.folder, self.file = folder, labels or folder / "labels.csv"
        self.changed = threading.Condition(threading.RLock())
        self.notes: list[str] = []
        self.names, self.given = self._find()
        self.numbers = {name: n for n, name in enumerate(self.names)}
        places = [place(name) for name in self.names]
        self.random = [place < (1 << 64) // EVERY for place in places]  # whether it is of the random part
        self.shuffled = sorted(range(len(places)), key=places.__getitem__)
        self.unreadable: dict[int, str] = {}  # number -> reason
        self.skipped: dict[int, None] = {}  # in their order
        self.front: list[int] = []  # to be shown first, as their label was taken back
        self.decided: dict[int, Decision] = {}  # in the order in which they were made
        self._lost: list[list[str]] = []  # rows of files that are gone: they stay
        self._before: list[dict[int, Decision | None]] = []  # what undo brings back
        self._seen: tuple | None = None
        stored = Path(self.folder, HIDDEN, "classes.json")
        known = list[str]()
        with suppress(OSError, ValueError):
            known = [name for name in json.loads(stored.read_text(encoding="utf-8")) if isinstance(name, str)]
        self._read()
        used = [decision.label for decision in [*self.given.values(), *self.decided.values()] if decision.label]
        self.classes = list(dict.fromkeys(map(checked_class, [*classes, *known, *used])))

    def _find(self) -> tuple[list[str], dict[int, Decision]]:
        """Returns the names of all images, and what the layout of docs/own_data.md says of them."""
        if not self.folder.is_dir():
            raise UserError(f"There is no folder {self.folder}: name one with images in it.")
        found, notes = files.image_files(self.folder, {self.file.name, HIDDEN})
        self.notes += notes
        names, odd = list[str](), list[str]()
        for path in found:
            name = path.relative_to(self.folder).as_posix()
            (names if name.isprintable() and name == name.strip() else odd).append(name)
        if odd:
            self.notes.append(f"Not used: {len(odd)} image{'s' * (len(odd) > 1)} whose names a CSV file cannot hold: "
                              f"{odd[0]!r}{', …' * (len(odd) > 1)}")
        if not names:
            raise UserError(f"{self.folder} holds no image ({', '.join(sorted(files.IMAGE_SUFFIXES))}).")
        given: dict[int, Decision] = {}
        if (self.folder / "train").is_dir():
            for n, name in enumerate(names):
                part, *inner = name.split("/")
                if part in ("train", "test", "valid") and len(inner) > 1:
                    given[n] = Decision(checked_class(inner[0]), part, "read")
        return names, given

    def _read(self) -> None:
        """Reads the file of labels, of this program or with the columns file and label."""
        if not self.file.exists():
            with writing(self.file):
                self._seen = None
            return
        try:
            if not self.file.is_file():
                raise OSError("it is no file")
            self._seen = _state(self.file)
            rows = list(csv.reader(io.StringIO(self.file.read_text(encoding="utf-8-sig")), strict=True))
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise UserError(f"{self.file} cannot be read as CSV ({error}). Bring it back, or name another file with "
                            "--labels.") from error
        header = tuple(cell.strip() for cell in rows[0]) if rows else COLUMNS
        if not {"file", "label"} <= set(header) <= set(COLUMNS) or len(set(header)) < len(header):
            raise UserError(f"{self.file} begins with {','.join(header)[:80]!r}; expected the columns "
                            f"{','.join(COLUMNS)} with commas between, of which the last two may be left out. Name "
                            "another file with --labels.")
        for line, row in enumerate(rows[1:], 2):
            cells = dict(zip(header, map(str.strip, row), strict=False))
            name, label, split = (cells.get(key, "") for key in COLUMNS[:3])
            unlabelled = len(row) == len(header) and split in ("", "train", "unlabeled") and name and not label
            if unlabelled or not any(cells.values()):
                continue
            split = split or "train"
            if len(row) != len(header) or split not in SPLITS or bool(label) == (split == "excluded"):
                raise UserError(f"{self.file}, line {line}: {','.join(row)[:80]!r}; expected {','.join(header)} with "
                                f"a split of {', '.join(SPLITS)}, and a label but for the last.")
            if name not in self.numbers:
                self._lost.append([name, label, split, cells.get("by", "")])
            elif self.numbers[name] in self.decided:
                raise UserError(f"{self.file}, line {line}: {name} stands there twice. Leave one of the lines out.")
            else:
                self.decided[self.numbers[name]] = Decision(label, split, cells.get("by", ""))
        if self._lost:
            self.notes.append(f"{len(self._lost)} labelled images are gone, such as {self._lost[0][0]}; their labels "
                              "are kept.")

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keeps other processes away from the folder's labels."""
        with Lock(self.folder / HIDDEN, "labelled", "label another folder").hold():
            self._write()
            self._keep_classes(self.classes)
            yield

    def _write(self) -> None:
        """Writes all labels, whole and on the disk, or nothing."""
        if self.file.exists() and self._seen != _state(self.file):
            raise UserError(f"{self.file} was changed by another program. Start cssl-label again: it reads what is "
                            "there now.")
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerows([COLUMNS, *self._lost])
        writer.writerows([self.names[n], *decision] for n, decision in self.decided.items())
        write_text(self.file, text.getvalue(), durable=True)
        self._seen = _state(self.file)

    def all(self) -> dict[int, Decision]:
        """What is known of every image, by the file first and the folders else."""
        return self.given | self.decided

    def change(self, decisions: dict[int, Decision | None], undoable: bool = True) -> None:
        """Makes decisions, or takes some back; all of them or none."""
        with self.changed:
            before, order = {n: self.decided.get(n) for n in decisions}, dict(self.decided)
            for n, decision in decisions.items():
                self.decided.pop(n, None)
                if decision is not None:
                    self.decided[n] = decision
            try:
                self._write()
            except UserError as error:
                self.decided = order
                raise NotWritten(str(error)) from error
            except BaseException:
                self.decided = order
                raise
            if undoable:
                self._before.append(before)
            for n in decisions:
                self.skipped.pop(n, None)
            self.changed.notify_all()

    def label(self, numbers: Collection[int], label: str, by: str) -> None:
        """Gives images a class, or none of them for "".

        What is for test or validation stays so, also when it was left out between; else the random part is for the
        test, in whatever way its labels come.
        """
        if label and label not in self.classes:
            raise UserError(f"There is no class {label!r}; there are {', '.join(self.classes)[:200]}.")
        with self.changed:
            made = dict[int, Decision | None]()
            for n in numbers:
                first = Decision("", "", "random" if by == "order" and self.random[n] else by)
                before = self.decided.get(n) or self.given.get(n, first)
                split = before.split if before.label else before.by if before.by in SPLITS else (
                    "test" if self.random[n] else "train")
                kept = before.by if label or before.by == "random" or split == "train" else split
                made[n] = Decision(label, split if label else "excluded", kept)
            self.change(made)

    def undo(self) -> list[int]:
        """Takes the last change back; returns whose."""
        if not self._before:
            return []
        self.change(self._before[-1], undoable=False)
        self.front = list(self._before.pop())
        return self.front

    @property
    def undoable(self) -> bool:
        return bool(self._before)

    def skip(self, n: int) -> None:
        with self.changed:
            self._before.append({n: self.decided.get(n)})  # undo shows it again
            self.skipped[n] = self.skipped.pop(n, None)
            self.changed.notify_all()

    def set_unreadable(self, reasons: dict[int, str]) -> None:
        with self.changed:
            self.unreadable |= reasons
            self.changed.notify_all()

    def add_class(self, name: str) -> str:
        with self.changed:
            name = checked_class(name)
            self._keep_classes(list(dict.fromkeys([*self.classes, name])))
            return name

    def rename_class(self, old: str, new: str) -> None:
        """Renames a class, or merges it with the one of that name. What folders say of it becomes a label, too."""
        new = checked_class(new)
        with self.changed:
            if old not in self.classes:
                raise UserError(f"There is no class {old!r}.")
            if new == old:
                return
            self._keep_classes(list(dict.fromkeys([*(new if name == old else name for name in self.classes), old])))
            self.change({n: decision._replace(label=new) for n, decision in self.all().items()
                         if decision.label == old}, undoable=False)
            self._before.clear()  # it would bring the old name back
            self._keep_classes([name for name in self.classes if name != old])

    def _keep_classes(self, classes: Sequence[str]) -> None:
        write_text(self.folder / HIDDEN / "classes.json", json.dumps(list(classes), ensure_ascii=False))
        self.classes = list(classes)

    def open(self, n: int) -> bool:
        """Whether nothing is known of an image."""
        return n not in self.decided and n not in self.given and n not in self.unreadable

    def counts(self) -> dict[str, int]:
        counts = dict.fromkeys(self.classes, 0)
        for decision in self.all().values():
            if decision.label:
                counts[decision.label] += 1
        return counts

    def path(self, n: int) -> Path:
        return self.folder / self.names[n]

    def write_dataset(self, path: Path) -> None:
        """Writes all images as --dataset=csv: reads them. Half of the random part is for validation, where it has
        enough for both."""
        with self.changed:
            known = {n: decision for n, decision in self.all().items() if n not in self.unreadable}
            random = [n for n, decision in known.items() if decision.split == "test" and decision.by == "random"]
            halved = set(random[1::2]) if len(random) >= 20 else set()
            text, start = io.StringIO(), os.path.relpath(self.folder.resolve(), path.parent.resolve())
            writer = csv.writer(text, lineterminator="\n")
            writer.writerow(COLUMNS[:3])
            for n, name in enumerate(self.names):
                label, split, _ = known.get(n, Decision("", "unlabeled", ""))
                if split != "excluded" and n not in self.unreadable:
                    writer.writerow([os.path.join(start, name), label, "valid" if n in halved else split])
            write_text(path, text.getvalue())


def _state(file: Path) -> tuple:
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def next_images(session: Session, ranking: Sequence[int], count: int) -> list[int]:
    """Returns the next images to label: in the order of a ranking, every EVERY-th of the random part, skipped ones
    last."""
    def waiting(numbers: Iterable[int], random: bool) -> Iterator[int]:
        return (n for n in numbers if session.open(n) and n not in session.skipped and session.random[n] == random)

    shuffled = session.shuffled
    parts = waiting([*ranking, *shuffled] if ranking else shuffled, False), waiting(shuffled, True)
    chosen = dict.fromkeys(n for n in session.front if session.open(n) and n not in session.skipped)
    asked = sum(decision.by != "read" for decision in session.decided.values())
    while len(chosen) < count:
        from_random = (asked + len(chosen)) % EVERY == EVERY - 1
        n = next((n for n in parts[from_random] if n not in chosen), None)
        if n is None:
            n = next((n for n in parts[not from_random] if n not in chosen), None)
        if n is None:
            break
        chosen[n] = None
    rest = (n for n in session.skipped if session.open(n))
    return [*chosen, *rest][:count]
