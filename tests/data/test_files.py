"""Own images as they are: folders and CSV files, their splits and presets, every kind of picture, uneven classes."""
import collections
import contextlib
import csv
import fcntl
import hashlib
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios

import numpy as np
import pytest
from conftest import ROOT
from helpers import code_blocks, invoke, plain_held_out, write_run
from PIL import Image
from sklearn.datasets import load_digits

import cssl
from cssl import cli
from cssl.cssl import CSSL
from cssl.fully_supervised import FullySupervised
from cssl.supervised import Supervised
from cssl.tools import inspect, table
from libml import data, experiment
from libml.config import RunConfig
from libml.data import files, names, sources
from libml.errors import UserError

COUNTS = {"ant": 50, "bee": 40, "cow": 35}  # without about a fifth for test, each has 20 and more
TINY = ["--arch=resnet", "--filters=4", "--repeat=1", "--scales=1", "--batch=8", "--augment=d.d.x", "--train_steps=8",
        "--report_kimg=0.03125"]


def write(path, colour, size=(20, 30)):
    """An image of one colour, by which it is known again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((*size, 3), colour, np.uint8)).save(path)


def divided(folder):
    """How many images of each class are for training, validation and test, by the documented rule."""
    found = [(c, file) for c, name in enumerate(COUNTS) for file in sorted((folder / "train" / name).iterdir())]
    labels = np.array([c for c, _ in found])
    hashes = np.array([int.from_bytes(hashlib.blake2b(file.read_bytes(), digest_size=8).digest(), "little")
                       for _, file in found], np.uint64)
    test = plain_held_out(labels.tolist(), hashes, 0.2, [1, 0])
    rest = np.setdiff1d(np.arange(len(labels)), test)
    valid = rest[plain_held_out(labels[rest].tolist(), hashes[rest], 0.1, [1, 1])]
    return tuple(np.bincount(labels[part]).tolist() for part in (np.setdiff1d(rest, valid), valid, test))


def colours(images):
    return {tuple(image[0, 0]) for image in np.asarray(images)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Uneven classes, unlabelled images, no test set; no two images are alike."""
    root = tmp_path_factory.mktemp("own") / "my animals"
    for c, (name, count) in enumerate(COUNTS.items()):
        for i in range(count):
            write(root / "train" / name / f"{i:03}.png", (80 * c, 4 * i, 10))
    for i in range(10):
        write(root / "unlabeled" / f"{i}.png", (7, 5 * i, 200))
    return root


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


# Folders.

def test_a_folder_without_seed_and_counts(folder, cache):
    found = cssl.from_folder(folder, image_size=16, data_dir=cache)
    assert found.name == f"folder:{folder}" and found.image_shape == (16, 16, 3)
    train, valid, test = divided(folder)
    assert np.bincount(found.test_labels).tolist() == test and min(test) >= 1
    assert np.bincount(found.labels[found.valid]).tolist() == valid and min(valid) >= 1
    assert np.bincount(found.labeled_classes).tolist() == train
    parts = [colours(found.images[found.labeled]), colours(found.images[found.valid]), colours(found.test_images),
             colours(found.images[found.labels < 0])]
    assert [len(part) for part in parts] == [sum(train), sum(valid), sum(test), 10]
    assert len(set.union(*parts)) == sum(COUNTS.values()) + 10
    assert len(found.unlabeled) == sum(train) + 10 and not set(found.unlabeled) & set(found.valid)
    assert found.notes == [] and [re.sub(r"^\S+ animals:? ", "", line) for line in found.remarks] == [
        "125 train, 10 unlabeled files, shorter side about 20 pixels",
        f"has no `test` folder: {sum(test)} of its labelled images are held out as test set.",
        f"{sum(valid)} of the labelled training images, about a tenth of every class, are for validation."]
    again = data.load(f"folder:{folder}", cache, 16)
    np.testing.assert_array_equal(found.labeled, again.labeled)


def test_too_few_for_validation_or_parts_of_their_own(tmp_path):
    root = tmp_path / "few"
    for c, name in enumerate(("a", "b")):
        for i in range(4):
            write(root / "train" / name / f"{i}.png", (c, i, 0))
    found = cssl.from_folder(root, data_dir=tmp_path)
    assert found.num_valid == 0 and len(found.labeled) == 6 and len(found.test_labels) == 2
    assert "needs 20 labelled training images of every class, and one has 3." in found.remarks[-1]
    for i, part in enumerate(("test", "valid")):
        write(root / part / "b" / "x.png", (200 + i, 0, 0))
    found = cssl.from_folder(root, data_dir=tmp_path)
    assert colours(found.test_images) == {(200, 0, 0)} and colours(found.images[found.valid]) == {(201, 0, 0)}
    assert len(found.labeled) == 8 and found.test_labels.tolist() == found.labels[found.valid].tolist() == [1]
    named = data.load(f"folder:{root}.1@all-2", tmp_path)  # numbers in the name count, as they always have
    assert named.num_valid == 2 and len(named.labeled) == 6 and (201, 0, 0) not in colours(named.images)
    assert "1 validation images of" in named.notes[-1] and "are not used" in named.notes[-1]


@pytest.mark.parametrize("text, message", [
    ("folder:/x/y.1@40", "Malformed"), ("folder:", "Malformed"), ("csv:a.csv.1@", "Malformed"), ("birds", "Malformed")])
def test_names_that_miss_a_part_are_malformed(text, message):
    with pytest.raises(UserError, match=message):
        names.parse_name(text)


def test_names_of_whole_folders():
    for text in ("folder:/a.b@c/x.y", "csv:labels.csv", "folder:."):
        name = names.parse_name(text)
        assert str(name) == text and name.is_whole and (name.seed, name.labels, name.valid) == (1, None, None)
    assert not names.parse_name("csv:x.csv.2@10-1").is_whole and names.parse_name("csv:x.csv.2@10-1").path == "x.csv"


@pytest.mark.parametrize("kind", ["folder", "csv"])
def test_new_images_move_no_old_one_between_training_and_test(folder, tmp_path, program, kind):
    """Through the command, in a copy that grows: by images of each class, by a class, by images without one."""
    root = tmp_path / "growing"
    shutil.copytree(folder / "train", root / "train")
    place = root if kind == "folder" else root / "labels.csv"

    def test_images():
        if kind == "csv":
            write_csv(place, [(file, file.parent.name) for file in sorted(root.rglob("*.png"), reverse=True)])
        program(inspect.main, f"--dataset={kind}:{place}", f"--data_dir={tmp_path}")  # as a user looks at it
        found = data.load(f"{kind}:{place}", tmp_path)
        return colours(found.test_images), colours(found.images), found.digest

    test, train, digest = test_images()
    assert test_images()[2] == digest
    for c, name in enumerate(COUNTS):
        for i in range(30):
            write(root / "train" / name / f"{2 * i:03}_new.png", (80 * c, 4 * i, 90))
    for i in range(25):
        write(root / "train" / "aaa" / f"{i}.png", (250, 4 * i, 90))
    new_test, new_train, new_digest = test_images()
    assert len(new_test | new_train) == 125 + 90 + 25
    assert test <= new_test and train <= new_train
    assert len(new_test - test) >= 5  # of 115 new ones a fifth
    assert all(digest[name] != new_digest[name] for name in ("classes", "images", "split"))


def test_the_digest_says_what_has_changed(tmp_path):
    root = tmp_path / "few"
    for c, name in enumerate(("a", "b")):
        for i in range(4):
            write(root / "train" / name / f"{i}.png", (c, i, 0))
            write(root / "test" / name / f"{i}.png", (c, i, 9))

    def changed():
        now, (before, *rest) = cssl.from_folder(root, data_dir=tmp_path).digest, digests
        digests[:] = [now, before, *rest]
        return {name for name in now if now[name] != before[name]}

    digests = [cssl.from_folder(root, data_dir=tmp_path).digest]
    assert set(digests[0]) == {"classes", "images", "split"} and changed() == set()
    os.utime(root / "train" / "a" / "0.png", (1, 1))  # the time is no part of it
    assert changed() == set()
    write(root / "test" / "b" / "3.png", (99, 99, 99))  # other contents, nothing else
    assert changed() == {"images"}
    (root / "train" / "b").rename(root / "train" / "c")
    (root / "test" / "b").rename(root / "test" / "c")
    assert changed() == {"classes"}
    write(root / "train" / "a" / "new.png", (7, 7, 7))
    assert changed() == {"images", "split"}
    arrays = [np.zeros((6, 8, 8), np.uint8), np.arange(6) % 2, np.ones((2, 8, 8), np.uint8), np.arange(2)]
    for name in ("", "arrays:x"):
        first, again = (data.from_arrays(*arrays, name=name).digest for _ in range(2))
        other = data.from_arrays(arrays[0] + 1, *arrays[1:], name=name).digest
        assert first == again and {part for part in first if first[part] != other[part]} == {"images"}
    assert data.load("digits.1@40-1").digest != data.load("digits.2@40-1").digest


# CSV files.

def rows_of(folder):
    labelled = [(str(file.relative_to(folder)), name) for name in COUNTS
                for file in sorted((folder / "train" / name).iterdir())]
    return labelled + [(str(file.relative_to(folder)), "") for file in sorted((folder / "unlabeled").iterdir())]


def write_csv(path, rows, encoding="utf-8"):
    with path.open("w", newline="", encoding=encoding) as file:
        csv.writer(file).writerows(rows)
    return path


def test_a_csv_of_a_folder_is_that_folder(folder, cache):
    expected = cssl.from_folder(folder, data_dir=cache)
    rows = rows_of(folder)
    for number, (header, encoding) in enumerate((([], "utf-8"), ([("file", "label")], "utf-8-sig"))):
        path = write_csv(folder / f"labels{number}.csv", header + rows, encoding)
        found = cssl.from_csv(path, data_dir=cache)
        assert found.class_names == expected.class_names and found.num_valid == expected.num_valid
        for name in ("images", "labels", "labeled", "order", "test_images", "test_labels"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
        assert f"has no `test` rows: {sum(divided(folder)[2])} of" in found.remarks[1]


def test_columns_by_name_splits_and_numbers_as_classes(folder, cache, tmp_path):
    files_ = [file for file, _ in rows_of(folder)]
    rows = [("split", "note", "label", "file")]
    rows += [(split, "", label, folder / file) for file, (split, label) in zip(files_, [
        ("train", "10"), ("", "9"), ("TEST", "9"), ("val", "10"), ("train", ""), ("unlabeled", ""), ("", "9")],
        strict=False)]
    found = cssl.from_csv(write_csv(tmp_path / "a, b.csv", rows), data_dir=cache)
    assert found.class_names == ["9", "10"] and found.test_labels.tolist() == [0]
    assert found.labels[found.valid].tolist() == [1] and sorted(found.labeled_classes) == [0, 0, 1]
    assert (found.labels < 0).sum() == 2 and found.remarks[-1] == "1 images of its own are for validation."


@pytest.mark.parametrize("rows, message", [
    ([("a.png",)], r"line 1: 1 cell 'a.png'; expected file,label"),
    ([("a.png", "x"), ("b.png", "y", "train", "z")], "line 2: 4 cells"),
    ([("a.png", "x"), (), ("no.png", "y")], "line 3: there is no file .*no.png.*relative to"),
    ([("file", "label"), ("a.png", "x", "holdout")], "line 2: split 'holdout'; expected train, test, valid"),
    ([("a.png", "x"), ("b.png", "", "test")], "line 2: b.png is to be `test` without a label; give it one"),
    ([("a.png", "x", "unlabeled")], "line 1: a.png is to be `unlabeled` with a label; leave the label out"),
    ([("a.png", "x"), ("a.png", "y")], "line 2: a.png is in line 1 already"),
    ([("file", "name"), ("a.png", "x")], "line 1: the header 'file,name' names no column `label`"),
    ([("file", "label", "label"), ("a.png", "x", "y")], "line 1: the header .* names the column `label` twice"),
    ([("a.png", "x"), ("b.png", "x")], "has one class among its training images, 'x'"),
    ([("a.png", "")], "has no class among"), ([], "has no class among"),
    ([("a.png", "x"), ("b.png", "y"), ("c.png", "z", "test")], "Class 'z' has images in the rows of `test`"),
])
def test_bad_lines_are_named(tmp_path, program, rows, message):
    for name in "abc":
        write(tmp_path / f"{name}.png", 0)
    path = write_csv(tmp_path / "labels.csv", rows)
    done = program(CSSL, f"--dataset=csv:{path}", f"--train_dir={tmp_path / 'runs'}", code=2)
    assert re.search(message, done.stderr), done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_classes_of_equal_numbers_keep_their_numbers(tmp_path, command):
    """In every process, whatever the seed of its strings' hashes; a new name is a new cache."""
    labels = ["1", "01", "001", "٢", "2", "10"]  # the fourth is an Arabic 2
    rows = [(f"{i}.png", label, "train") for i, label in enumerate(labels)]
    for i in range(6):
        write(tmp_path / f"{i}.png", (40 * i, 0, 0))
    write(tmp_path / "t.png", (5, 5, 5))
    path = write_csv(tmp_path / "labels.csv", [*rows, ("t.png", "1", "test")])
    code = (f"import cssl; d = cssl.from_csv({str(path)!r}, data_dir={str(tmp_path)!r}); "
            "shown = f'{d.class_names!a} {d.images[:, 0, 0, 0].tolist()} {d.labels.tolist()}'")
    wanted, here = ["001", "01", "1", "2", "٢", "10"], {}  # by number, then text
    exec(code, here)
    expected = f"{ascii(wanted)} {[40 * i for i in range(6)]} {[wanted.index(label) for label in labels]}"
    seed = 1 if os.environ.get("PYTHONHASHSEED") == "2" else 2
    assert here["shown"] == command("-c", f"{code}; print(shown)", PYTHONHASHSEED=str(seed)).stdout.strip() == expected
    write_csv(path, [*rows[:-1], ("5.png", "A", "train"), ("t.png", "1", "test")])  # no number: other names, same files
    assert cssl.from_csv(path, data_dir=tmp_path).class_names == sorted([*labels[:-1], "A"])


def test_one_file_has_one_label_and_one_part(tmp_path, program):
    """Whatever it is called: beside the CSV file, from elsewhere, in full, through links."""
    place = tmp_path / "csv"
    for i in range(4):
        write(place / f"{i}.png", (i, 0, 0))
    (place / "link.png").symlink_to("0.png")
    (tmp_path / "linked").symlink_to(place)
    rows = [("0.png", "a"), ("1.png", "b"), ("2.png", "a"), ("3.png", "b")]
    for name in ("./0.png", "../csv/0.png", place / "0.png", "link.png", "../linked/0.png"):
        for label, part in (("a", ""), ("b", ""), ("a", "test"), ("", "")):
            path = write_csv(place / "labels.csv", [*rows, (name, label, part)])
            done = program(inspect.main, f"--dataset=csv:{path}", f"--data_dir={tmp_path}", code=2)
            assert f"line 5: {name} is in line 1 already; leave one of them out" in done.stderr
    root = tmp_path / "folder"
    for name in ("a/0", "a/1", "b/0", "b/1"):
        write(root / "train" / f"{name}.png", len(name))
    twice = root / "train" / "a" / "again.png"
    twice.symlink_to("0.png")  # an image that counts twice
    (root / "unlabeled").symlink_to("train/a")
    program(inspect.main, f"--dataset=folder:{root}", f"--data_dir={tmp_path}")
    for other in ("train/b/0.png", "test/a/0.png", "test/b/0.png", "valid/a/0.png"):
        (root / other).parent.mkdir(parents=True, exist_ok=True)
        (root / other).unlink(missing_ok=True)
        (root / other).symlink_to(root / "train" / "a" / "0.png")
        done = program(inspect.main, f"--dataset=folder:{root}", f"--data_dir={tmp_path}", code=2)
        assert "are the same file. Leave one of them out." in done.stderr and str(root / other) in done.stderr
        (root / other).unlink()


def test_a_folder_whose_name_says_a_split_is_not_taken_for_another(folder, cache):
    (folder.parent / f"{folder.name}.1@4-2").symlink_to(folder)
    try:
        with pytest.raises(UserError, match=r"1@4-2 is there, but by its name it is also a split of .* Rename it"):
            cssl.from_folder(folder.parent / f"{folder.name}.1@4-2", data_dir=cache)
    finally:
        (folder.parent / f"{folder.name}.1@4-2").unlink()


@pytest.mark.parametrize("size", [0, -3, 1.5])
def test_images_have_a_size(folder, cache, size):
    with pytest.raises(UserError, match=f"image_size={size}: expected 1 to 4096 pixels"):
        cssl.from_folder(folder, image_size=size, data_dir=cache)


def test_equal_bytes_in_training_and_test_are_counted(tmp_path, program):
    root = tmp_path / "twins"
    for i in range(6):
        for part in ("train", "test"):
            write(root / part / "ab"[i % 2] / f"{part}{i}.png", (i, 0, 0 if i < 4 else len(part)))
    done = program(inspect.main, f"--dataset=folder:{root}", f"--data_dir={tmp_path}")
    assert f"4 of the 6 test images of {root} have the same bytes as training images" in done.stderr
    assert "of two classes" not in done.stderr and "validation images have" not in done.stderr
    shutil.copytree(root / "train", tmp_path / "copy")
    (tmp_path / "copy").rename(root / "train" / "a" / "copy")  # three images of each class, all as class a
    shutil.copytree(root / "train" / "b", root / "unlabeled")
    done = program(inspect.main, f"--dataset=folder:{root}", f"--data_dir={tmp_path}")
    assert f"3 pictures of {root} are training images of two classes, byte for byte, one of them of 'b'" in done.stderr
    shutil.copytree(root / "unlabeled", root / "valid" / "b")
    done = program(inspect.main, f"--dataset=folder:{root}", f"--data_dir={tmp_path}")
    assert "3 of the 3 validation images have the same bytes as training images: validation scores" in done.stderr


@pytest.mark.parametrize(("change", "message"), [
    (lambda root: (root / "test").rename(root / "Test"), "and images other than train/unlabeled/test/valid (1)"),
    (lambda root: (root / "train/a").rename(root / "train/B"), "'B' and 'b' are different classes of"),
    (lambda root: (root / "test").rename(root / "train/unlabeled"), "'unlabeled' is a class of")])
def test_folders_that_may_be_misnamed_are_told_of(tmp_path, change, message):
    root = tmp_path / "pictures"
    for i in range(6):
        write(root / "train" / "ab"[i % 2] / f"{i}.png", (i, 0, 0))
    write(root / "test/b/7.png", (7, 0, 0))
    assert not files.listing(root, False).notes
    change(root)
    (note,) = files.listing(root, False).notes
    assert message in note


@pytest.mark.parametrize(("header", "labels", "message"), [
    ("File,Label", "ab", None), ("file,label,note", "ab", None), ("file,label", ["a", "-1"], "'-1' is a class of"),
    ("file,label", ["1", "1.0"], "'1' and '1.0' are different"), ("file,label", ["é", "e\u0301"], "are different"),
    ("file,label,set", "ab", "The column `set` of .* is not used")])
def test_labels_and_columns_that_may_be_meant_otherwise_are_told_of(tmp_path, header, labels, message):
    for i in range(6):
        write(tmp_path / f"{i}.png", (i, 0, 0))
    rows = [f"{i}.png,{labels[i % 2]},{'test' if i > 3 and 'set' in header else ''}" for i in range(6)]
    (tmp_path / "x.csv").write_text("\n".join([header, *rows]) if header.count(",") > 1 else
                                    "\n".join([header, *(row.rpartition(",")[0] for row in rows)]))
    notes = files.listing(tmp_path / "x.csv", True).notes
    assert len(notes) == bool(message) and (not message or re.search(message, notes[0]))


def test_a_column_split_has_any_case(tmp_path):
    for i in range(6):
        write(tmp_path / f"{i}.png", (i, 0, 0))
    (tmp_path / "x.csv").write_text("".join(["File,Label,Split\n", *(f"{i}.png,{'ab'[i % 2]},{'Test' * (i > 3)}\n"
                                                                   for i in range(6))]))
    found = files.listing(tmp_path / "x.csv", True)
    assert [len(found.parts[part]) for part in ("train", "test")] == [4, 2] and not found.notes


def test_what_the_file_system_refuses_is_not_skipped_for_ever(tmp_path, program, monkeypatch):
    """As a damaged file is: its rights may change, and its name, size and time do not."""
    root = tmp_path / "pictures"
    for i in range(6):
        write(root / "train" / "ab"[i % 2] / f"{i}.png", (i, 0, 0))
    locked = root / "train/a/2.png"
    monkeypatch.setattr(sources, "read_image", lambda file, *size, read=sources.read_image: (
        "Permission denied" if file == str(locked) else read(file, *size)))
    monkeypatch.setattr(sources.cache, "content_hash", lambda file, read=sources.cache.content_hash: (
        0 if file == str(locked) else read(file)))
    flags = f"--dataset=folder:{root}", f"--data_dir={tmp_path / 'data'}"
    assert f"{locked} cannot be read (Permission denied). Make it readable" in program(
        inspect.main, *flags, code=2).stderr
    monkeypatch.undo()
    assert "skipped" not in program(inspect.main, *flags).stderr


def test_hidden_and_linked_files_are_passed_over_and_counted(tmp_path, program):
    root = tmp_path / "pictures"
    for i, name in enumerate(("train/a/0", "train/a/deep/1", "train/b/0", "train/b/1", "test/a/0", "unlabeled/0",
                              "train/.ipynb_checkpoints/0", "train/a/.ipynb_checkpoints/deep/0", "test/.c/0",
                              "unlabeled/.hidden/0", "unlabeled/.1", "train/a/._0", "elsewhere/0")):
        write(root / f"{name}.png", (i, i, i))
    (root / "train" / "a" / "linked").symlink_to(root / "elsewhere")
    (root / "train" / "a" / "lost.png").symlink_to(root / "nothing.png")
    (root / "train" / "a" / "loop.png").symlink_to("loop.png")
    (root / "train" / "loop").symlink_to("loop")
    (root / "train" / "b" / "notes.txt").touch()
    (root / "train" / ".DS_Store").touch()  # of no interest
    (root / "valid").touch()
    done = program(inspect.main, f"--dataset=folder:{root}", f"--data_dir={tmp_path}", "--json")
    facts = json.loads(done.stdout)
    assert facts["class_names"] == ["a", "b"] and facts["class_counts"] == [2, 2]
    assert (facts["num_train"], facts["num_test"]) == (5, 1)
    (line,) = [line for line in done.stderr.splitlines() if "Not used are" in line]
    for kind in ("hidden files or folders (6)", "linked folders (1)", "broken links (3)", "that are no images (1)",
                 "folders that cannot be read (1)"):
        assert kind in line
    assert line.count(str(root)) == 3 and line.endswith(", …")  # the first ones


def test_names_of_classes_are_utf8(tmp_path, program):
    root = tmp_path / "names"
    for name in (b"caf\xe9", b"tea"):
        write(root / "train" / os.fsdecode(name) / "0.png", len(name))
    done = program(CSSL, f"--dataset=folder:{root}", f"--train_dir={tmp_path / 'runs'}", code=2)
    assert "train/caf\\udce9 is not UTF-8. Rename it." in done.stderr and not (tmp_path / "runs").exists()
    (root / "train" / os.fsdecode(b"caf\xe9")).rename(root / "train" / "café")
    write(root / "test" / "tea" / "0.png", 8)
    program(inspect.main, f"--dataset=folder:{root}", f"--data_dir={tmp_path}")


def test_columns_may_be_in_any_order_even_where_a_row_is_short(tmp_path, program):
    write(tmp_path / "a.png", 0)
    path = write_csv(tmp_path / "labels.csv", [("label", "file"), ("x", "a.png"), ("y",)])
    done = program(CSSL, f"--dataset=csv:{path}", code=2)
    assert "line 3: 1 cell 'y'; expected file,label" in done.stderr


@pytest.mark.parametrize("rows, start", [
    ('c.png,"x\nd.png,y\ne.png",', "x"), ('"c.png,x\nd.png,y\ne.png",x,', "c.png,x")])
def test_a_quote_that_swallows_rows_is_named_by_its_line(tmp_path, program, rows, start):
    """What it swallows would be a class of its own, and the rows missing. Other columns may have several lines."""
    for name in "abcde":
        write(tmp_path / f"{name}.png", ord(name))
    path = tmp_path / "labels.csv"
    path.write_text(f'file,label,note\na.png,x,"of two\nlines"\nb.png,y,\n{rows}\n')
    error = program(inspect.main, f"--dataset=csv:{path}", f"--data_dir={tmp_path}", code=2).stderr
    assert f"labels.csv, line 5: '{start}" in error and "goes over several lines" in error


def test_reading_a_csv_shows_how_far_it_is(tmp_path):
    """On a terminal, before anything slow is imported; the last row ends it."""
    for i in range(2000):
        (tmp_path / f"{i}.png").touch()
    path = write_csv(tmp_path / "labels.csv", [*((f"{i}.png", i % 2) for i in range(2000)), ("none.png", 1)])
    ours, theirs = pty.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("4H", 25, 80, 0, 0))  # lines and columns
    code = (f"import sys; from cssl import cli; from cssl.cssl import CSSL; sys.argv = ['x', '--dataset=csv:{path}']\n"
            "try: cli.main(CSSL)\nfinally: assert 'tensorflow' not in sys.modules")
    done = subprocess.run([sys.executable, "-c", code], stderr=theirs, stdout=subprocess.PIPE, cwd=ROOT)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the end
        while part := os.read(ours, 1 << 16):
            shown += part
    os.close(ours)
    assert done.returncode == 2 and "line 2001: there is no file" in shown.decode()
    assert re.search(r"reading labels.csv: +0%.*0/2001", shown.decode()) and b"Traceback" not in shown


def test_unreadable_csv_files_are_one_line(tmp_path):
    (tmp_path / "bad.csv").write_bytes(b"a.png,\xff\n")
    (tmp_path / "open.csv").write_text('"a.png,x\n')
    os.mkfifo(tmp_path / "pipe.csv")
    for name, message in (("bad.csv", "not text in UTF-8"), ("none.csv", "cannot be read"),
                          ("pipe.csv", "cannot be read .it is no file"), ("", "cannot be read .it is no file"),
                          ("open.csv", "line 1: unexpected end of data")):
        with pytest.raises(UserError, match=message):
            files.listing(tmp_path / name, is_csv=True)


# Every kind of picture.

GREY = np.arange(6 * 4, dtype=np.uint8).reshape(6, 4) * 10
RGB = np.stack([GREY, GREY[::-1], GREY[:, ::-1]], -1)
TURNED = Image.Exif()
TURNED[0x0112] = 6  # shown, the stored rows are columns from right to left


@pytest.mark.parametrize("name, picture, options, expected", [
    ("rgb.png", Image.fromarray(RGB), {}, RGB),
    ("grey.png", Image.fromarray(GREY), {}, np.stack([GREY] * 3, -1)),
    ("grey_alpha.png", Image.merge("LA", [Image.fromarray(GREY)] * 2), {}, np.stack([GREY] * 3, -1)),
    ("rgba.png", Image.fromarray(np.concatenate([RGB, GREY[..., None]], -1)), {}, RGB),
    ("bits.png", Image.fromarray(GREY > 100), {}, np.stack([255 * (GREY > 100)] * 3, -1)),
    ("palette.png", Image.fromarray(GREY).convert("P"), {}, np.stack([GREY] * 3, -1)),
    ("palette.gif", Image.fromarray(GREY).convert("P"), {}, np.stack([GREY] * 3, -1)),
    ("transparent.png", Image.fromarray(GREY).convert("P"), {"transparency": 0}, np.stack([GREY] * 3, -1)),
    ("sixteen.png", Image.fromarray(GREY.astype(np.uint16) * 257), {}, np.stack([GREY] * 3, -1)),
    ("sixteen.tif", Image.fromarray(GREY.astype(np.uint16) * 257), {}, np.stack([GREY] * 3, -1)),
    ("sixteen.ppm", Image.fromarray(GREY.astype(np.int32) * 257), {}, np.stack([GREY] * 3, -1)),
    ("big_endian.tif", Image.fromarray(GREY.astype(">u2") * 257), {}, np.stack([GREY] * 3, -1)),
    ("whole.tif", Image.fromarray(GREY.astype(np.int32) * 257), {}, np.stack([GREY] * 3, -1)),
    ("floats.tif", Image.fromarray(GREY.astype(np.float32) / 255), {}, np.stack([GREY] * 3, -1)),
    ("black.tif", Image.fromarray(np.zeros((6, 4), np.float32)), {}, np.zeros((6, 4, 3))),
    ("black.png", Image.fromarray(np.zeros((6, 4), np.uint16)), {}, np.zeros((6, 4, 3))),
    ("turned.png", Image.fromarray(RGB), {"exif": TURNED}, np.rot90(RGB, -1)),
    ("turned.webp", Image.fromarray(RGB), {"exif": TURNED, "lossless": True}, np.rot90(RGB, -1)),
])
def test_every_kind_of_picture(tmp_path, name, picture, options, expected):
    picture.save(tmp_path / name, **options)
    found = sources.read_image(tmp_path / name, 12, 12)
    wanted = Image.fromarray(expected.astype(np.uint8)).resize((12, 12), Image.Resampling.BICUBIC)  # not square before
    assert found.shape == (12, 12, 3) and found.dtype == np.uint8
    np.testing.assert_array_equal(found, np.asarray(wanted))


@pytest.mark.parametrize("levels, message", [
    (GREY.astype(np.float32), "its values go from 0 to 230; expected floats of 0 to 1"),
    (GREY / np.float32(127.5) - 1, "from -1 to 0.80"), (GREY + np.float32(np.nan), "from nan to nan"),
    (GREY.astype(np.uint16), "from 0 to 230; expected .*or whole numbers of 8 or 16 bits"),
    (GREY.astype(np.int32), "from 0 to 230"), (GREY.astype(np.int32) * 10 ** 6, "from 0 to 2.3e"),
    (GREY.astype(np.int32) - 500, "from -500 to -270")])
def test_numbers_of_unknown_scale_are_named_and_not_black(tmp_path, program, levels, message):
    root = tmp_path / "floats"
    for i, name in enumerate(("a/0", "b/0", "a/1", "b/1")):
        write(root / "train" / f"{name}.png", i)
    for i in range(5):
        Image.fromarray(levels).save(root / "train" / "a" / f"odd{i}.tif")
    done = program(inspect.main, f"--dataset=folder:{root}", f"--data_dir={tmp_path}", "--json")
    (line,) = [line for line in done.stderr.splitlines() if "unreadable" in line]
    assert "5 unreadable image files were skipped" in line and re.search(rf"odd0.tif \(.*{message}", line)
    assert line.endswith(", …") and line.count("odd") == 3
    assert json.loads(done.stdout)["num_train"] + json.loads(done.stdout)["num_test"] == 4


def test_print_colours(tmp_path):
    """CMYK, which has no exact RGB: white and black stay so, whatever JPEG does between."""
    ink = np.zeros((16, 32, 4), np.uint8)
    ink[:, 16:, 3] = 255
    Image.fromarray(ink, "CMYK").save(tmp_path / "print.jpg", quality=95)
    found = sources.read_image(tmp_path / "print.jpg", 16, 16)
    assert found[:, :6].min() > 240 and found[:, 10:].max() < 15


# Presets.

@pytest.mark.parametrize("pixels, count, side, batch, kimg", [
    (20, 5000, 32, 64, 512), (63, 6000, 32, 64, 512), (64, 20_000, 64, 16, 1024), (1000, 50_000, 96, 8, 2048),
    (96, 10_000_000, 96, 8, 65536)])
def test_presets_by_size_and_number(pixels, count, side, batch, kimg):
    found = files.Listing("x", {"train": [("a", "x")] * (count // 2), "unlabeled": [("", "x")] * (count // 2)}, ["a"])
    found.__dict__["pixels"] = pixels
    assert files.presets(found) == {"image_size": side, "mixed_precision": "auto", "batch": batch, "train_kimg": kimg}
    assert 300 * count / 7168 / 1.5 <= kimg or kimg == 65536  # at least 200 epochs
    assert files.presets(found, 224)["batch"] == 8


@pytest.mark.parametrize("pixels, side, batch", [(20, 32, 32), (64, 64, 16), (500, 96, 8)])
def test_few_images_get_a_small_network_and_a_short_run(pixels, side, batch):
    found = files.Listing("x", {"train": [("a", "x")] * 100, "unlabeled": [("", "x")] * 4899}, ["a"])
    found.__dict__["pixels"] = pixels
    assert files.presets(found) == {"image_size": side, "batch": batch, "train_kimg": 2048 * batch / 1024,
                                    "filters": 16, "repeat": 1, "ema": 0.99, "bn_momentum": 0.99,
                                    "mixed_precision": "auto"}


def test_presets_enter_where_the_name_says_nothing_else(folder, tmp_path):
    config = RunConfig.of(CSSL, dataset=f"folder:{folder}", lr=0.1)
    values = config.values()
    assert {name: values[name] for name in config.presets if name != "warmup_kimg"} == {
        "image_size": 32, "batch": 32, "train_kimg": 64.0, "report_kimg": 1.0, "save_kimg": 1.0, "keep_ckpt": 5,
        "filters": 16, "repeat": 1, "ema": 0.99, "bn_momentum": 0.99, "mixed_precision": "auto"}
    given = RunConfig.of(CSSL, dataset=f"folder:{folder}", image_size=48, train_steps=640)
    assert given.options.batch == 16 and given.network.scales == 4
    assert (given.training.train_kimg, given.training.report_kimg) == (10.0, 10 / 64)
    assert RunConfig.of(CSSL, dataset=f"folder:{folder}.1@all-7").presets == frozenset()
    assert RunConfig.of(FullySupervised, dataset=f"folder:{folder}").data.dataset == f"folder:{folder}"
    with pytest.raises(UserError, match="has no folder `train`"):
        RunConfig.of(CSSL, dataset=f"folder:{tmp_path}")


def test_run_folders_of_own_images_are_short_and_safe(folder):
    write_csv(folder / "labels.csv", rows_of(folder))
    for text, start in ((f"folder:{folder}", "folder-my animals-"), (f"csv:{folder}/labels.csv", "csv-labels.csv-")):
        name = RunConfig.of(CSSL, dataset=text).folder().parts[-3]
        assert re.fullmatch(re.escape(start) + "[0-9a-f]{8}" + re.escape(".d.d.d.1@all-auto"), name)


def test_inspect_says_what_was_done(folder, cache, program):
    done = program(inspect.main, f"--dataset=folder:{folder}", f"--data_dir={cache}")
    _, valid, test = map(sum, divided(folder))
    assert "32x32x3, 3 classes" in done.stdout and f"validation {valid}, test {test}" in done.stdout
    assert "a tenth of every class" in done.stderr and "warning" not in done.stderr


# Uneven classes, in a run.

@pytest.fixture(scope="module")
def run(folder, cache, tmp_path_factory, program):
    """A short run on the whole folder: what it printed and where it is."""
    place = tmp_path_factory.mktemp("runs")
    done = program(Supervised, f"--dataset=folder:{folder}", f"--data_dir={cache}", f"--train_dir={place}", *TINY)
    (path,) = place.glob("*/*/*")
    return done.stdout, path


def test_the_announcement_says_what_was_done(run, folder):
    shown, path = run
    train, valid, test = map(sum, divided(folder))
    assert (f"{train} labelled, {train + 10} unlabelled, {valid} validation, {test} test images of 32x32x3, 3 classes"
            in shown)
    assert "  data: " in shown and "held out as test set" in shown and "image_size=32 (preset)" in shown
    assert "warning" not in shown and path.parts[-3].startswith("folder-my animals-")


def test_each_class_is_evaluated(run, cache, program):
    _, path = run
    report = json.loads((path / "metrics.jsonl").read_text().splitlines()[-1])
    with np.load(path / "stats" / "predictions.npz") as stored:
        hits, labels = stored["probabilities"].argmax(1) == stored["labels"], stored["labels"]
    expected = {name: 100 * hits[labels == c].mean() for c, name in enumerate(COUNTS)}
    scores = cssl.open(path, data_dir=str(cache)).evaluate()
    assert {name: scores[f"accuracy/class/{name}"] for name in COUNTS} == pytest.approx(expected, abs=1e-9)
    for found in (scores, report):
        assert found["balanced_accuracy"] == pytest.approx(np.mean(list(expected.values())), abs=1e-9)
    assert {"balanced_accuracy/raw", "balanced_accuracy/valid"} <= set(report)
    shown = program(Supervised, f"--eval_ckpt={path}", f"--data_dir={cache}").stdout.splitlines()
    lines = [line.split() for line in shown[shown.index("test accuracy by class, worst first:") + 1:]]
    assert {line[0]: (float(line[1]), int(line[4])) for line in lines} == {
        name: (pytest.approx(expected[name], abs=0.005), int((labels == c).sum())) for c, name in enumerate(COUNTS)}
    assert [float(line[1]) for line in lines] == sorted(float(line[1]) for line in lines)
    assert json.loads((path / "stats" / "balanced_accuracy.json").read_text())["last01"] == report["balanced_accuracy"]


def test_runs_from_before_balanced_accuracy_are_read(run, tmp_path):
    _, path = run
    write_run(tmp_path, [50.0, 60.0], train_kimg=2)
    old = invoke("table", tmp_path, "--metric=accuracy,balanced_accuracy").stdout
    assert "55.00" in old and "balanced" not in old.splitlines()[0]
    assert "balanced accuracy %" in invoke("table", path, "--metric=balanced_accuracy").stdout


def test_the_prior_of_the_labels(folder, cache):
    found = cssl.from_folder(folder, image_size=16, data_dir=cache)
    counts = np.array(divided(folder)[0]) + 1
    config = RunConfig.of(CSSL, dataset=found.name, filters=4, repeat=1, scales=1, p_unlabeled="labels")
    model = experiment.build(config.with_data(found), found)
    np.testing.assert_allclose(model.class_prior, counts / counts.sum(), rtol=1e-6)  # float32
    with pytest.raises(ValueError, match="p_unlabeled is 'label'; expected 3"):
        experiment.build(config.replace(p_unlabeled="label").with_data(found), found)


def test_data_at_hand_keep_their_presets(folder, cache):
    found = cssl.from_folder(folder, image_size=16, data_dir=cache)
    config = RunConfig.of(CSSL).with_data(found)
    assert (config.data.image_size, config.training.train_kimg, config.options.batch) == (16, 64.0, 32)
    assert RunConfig.of(CSSL, train_steps=4).with_data(found).training.train_kimg == 0.25


# As few questions to the file system as can be.

@pytest.mark.parametrize("kind", ["folder", "csv"])
def test_folders_and_files_are_looked_at_once(folder, tmp_path, monkeypatch, kind):
    """From a path alone to presets, folder, images and a run's configuration for images at hand."""
    path = write_csv(folder / "once.csv", rows_of(folder)) if kind == "csv" else folder
    asked = collections.Counter()

    def counted(function):
        def count(place, *arguments, **options):
            asked[str(place)] += 1  # or an open folder's number
            return function(place, *arguments, **options)

        return count

    monkeypatch.setattr(os, "scandir", counted(os.scandir))
    monkeypatch.setattr(os, "stat", counted(os.stat))
    config = RunConfig.of(CSSL, dataset=f"{kind}:{path}", data_dir=str(tmp_path))
    config.folder()
    found = experiment.load(config)
    config.with_data(found)
    ours = {place: count for place, count in asked.items() if place.startswith(str(folder / "train"))}
    if kind == "csv":
        assert len(ours) == sum(COUNTS.values()) and set(ours.values()) == {1}
    else:  # a folder's entries bring what is asked of files; `train` itself is asked for, too
        assert ours.pop(str(folder / "train")) <= 2
        assert ours == {str(folder / "train" / name): 1 for name in COUNTS}


def test_a_listing_belongs_to_its_dataset(folder, tmp_path):
    config = RunConfig.of(CSSL, dataset=f"folder:{folder}")
    assert config.replace(seed=1).listing is config.listing is not None
    assert config.replace(dataset="digits.1@40-1").listing is None
    assert RunConfig.from_json(CSSL, json.loads(config.to_json())) == config


# The documents.

def blocks(document, language):
    return [code for found, code in code_blocks(ROOT / "docs" / document) if found == language]


@pytest.mark.slow
def test_the_document_runs_as_written(tmp_path, monkeypatch, program):
    """In order, in an empty folder; only training is cut short."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))  # where decoded images are kept by default
    monkeypatch.delenv("ML_DATA", raising=False)
    example, api = blocks("own_data.md", "python")
    exec(example, {})
    assert len(list(tmp_path.glob("my_images/train/*/*.png"))) == 400
    short = "train_steps=2, filters=4, repeat=1, scales=1, batch=4, uratio=1, augment='d.d.x'"
    exec(api.replace("train_kimg=64", short), found := {})
    assert 10 <= found["data"].num_valid <= 60 and len(load_digits().target) - 400 == (found["data"].labels < 0).sum()
    assert 0 <= found["scores"]["balanced_accuracy"] <= 100
    for line in "".join(blocks("own_data.md", "bash")).splitlines():
        check_command(line.split(), program)


def check_command(words, program):
    """Runs a tool of the documents; of a method, only looks at its flags."""
    tools = {"scripts/inspect_dataset.py": inspect.main, "cssl-table": table.main}
    words = words[words[0] == "python":]
    if words[0] == "-m":
        cli.configuration(cssl.method(words[1].removeprefix("cssl.")), words[1:])
    else:
        program(tools[words[0]], *words[1:])


def test_commands_about_pretrained_networks(folder, tmp_path, monkeypatch, program):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_images").symlink_to(folder)
    lines = "".join(blocks("pretrained.md", "bash")).splitlines()
    assert len(lines) == 4
    for line in lines:
        check_command(line.split(), program)
    (program_text,) = blocks("pretrained.md", "python")
    compile(program_text, "pretrained.md", "exec")
