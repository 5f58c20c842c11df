"""TFDS's real builders on small files in the original formats; folders of images; the cache."""
import errno
import json
import os
import pickle
import shutil
import subprocess
import sys
from functools import partial
from unittest import mock

import numpy as np
import pytest
from conftest import ROOT
from helpers import Program
from PIL import Image
from sklearn.datasets import load_digits

from cssl.tools import data as create
from cssl.tools import inspect
from libml import data
from libml.data import cache, names, sources
from libml.errors import UserError
from libml.writing import LOCK


def prepare(name, data_dir, resolve):
    """Runs TFDS's own builder on local files."""
    import tensorflow_datasets as tfds

    with mock.patch.object(tfds.download.DownloadManager, "download_and_extract", lambda self, urls: resolve(urls)), \
            mock.patch.object(tfds.download.DownloadManager, "download", lambda self, urls: resolve(urls)):
        tfds.builder(name, data_dir=data_dir).download_and_prepare()


def random_images(count, size, seed):
    return np.random.RandomState(seed).randint(0, 256, (count, size, size, 3)).astype(np.uint8)


@pytest.fixture(scope="module")
def cifar100(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cifar100")
    (folder / "cifar-100-binary").mkdir()
    stored = {}
    for part, count in (("train", 300), ("test", 100)):
        images, labels = random_images(count, 32, 1), np.random.RandomState(2).permutation(np.arange(count) % 100)
        planes = images.transpose(0, 3, 1, 2).reshape(count, -1)
        rows = np.concatenate([(labels // 5)[:, None], labels[:, None], planes], 1).astype(np.uint8)
        rows.tofile(folder / "cifar-100-binary" / f"{part}.bin")
        stored[part] = images, labels
    for kind, count in (("coarse", 20), ("fine", 100)):
        names = "\n".join(f"{kind}{i}" for i in range(count)) + "\n"
        (folder / "cifar-100-binary" / f"{kind}_label_names.txt").write_text(names)
    prepare("cifar100", folder / "tfds", lambda url: str(folder))
    return folder / "tfds", stored


def test_cifar100_in_canonical_order_with_fine_labels(cifar100):
    folder, stored = cifar100
    dataset = data.load("cifar100.0@100-1", folder)
    np.testing.assert_array_equal(dataset.images, stored["train"][0])
    np.testing.assert_array_equal(dataset.labels, stored["train"][1])
    np.testing.assert_array_equal(dataset.test_images, stored["test"][0])
    np.testing.assert_array_equal(dataset.test_labels, stored["test"][1])
    assert dataset.num_classes == 100 and dataset.class_names[7] == "fine7"
    assert sorted(dataset.labeled_classes.tolist()) == list(range(100))
    assert dataset.mirror and dataset.augmenter().shift == 4


@pytest.mark.parametrize("damage", [lambda file: file.unlink(), lambda file: file.write_bytes(file.read_bytes()[:-9])])
def test_damaged_tfds_files_are_one_clear_line(cifar100, tmp_path, damage):
    shutil.copytree(cifar100[0], tmp_path / "copy", ignore=shutil.ignore_patterns("*cssl_cache*"))
    damage(next((tmp_path / "copy").rglob("*train.tfrecord*")))
    with pytest.raises(UserError, match="The files of cifar100.* cannot be read .*Prepare it again") as caught:
        data.load("cifar100.0@100-1", tmp_path / "copy")
    assert "\n" not in str(caught.value) and not list((tmp_path / "copy").rglob("*cssl_cache*"))


@pytest.fixture(scope="module")
def svhn(tmp_path_factory):
    from scipy.io import savemat

    folder = tmp_path_factory.mktemp("svhn")
    stored = {}
    for part, count in (("train", 120), ("test", 40), ("extra", 200)):
        images = random_images(count, 32, len(part))
        digits = np.random.RandomState(3).randint(1, 11, count)  # the files say 10 for the digit 0
        savemat(folder / f"{part}_32x32.mat", {"X": images.transpose(1, 2, 3, 0), "y": digits[:, None]})
        stored[part] = images, digits
    prepare("svhn_cropped", folder / "tfds", lambda urls: {part: str(folder / f"{part}_32x32.mat") for part in urls})
    return folder / "tfds", stored


def test_svhn_numbers_classes_as_the_original_and_appends_extra(svhn):
    folder, stored = svhn
    dataset = data.load("svhn.1@40-1", folder)
    np.testing.assert_array_equal(dataset.images, np.concatenate([stored["train"][0], stored["extra"][0]]))
    digits = np.concatenate([stored["train"][1], stored["extra"][1]])
    np.testing.assert_array_equal(dataset.labels, digits - 1)  # digit d is class d - 1, the digit 0 (stored 10) class 9
    np.testing.assert_array_equal(dataset.test_labels, stored["test"][1] - 1)
    assert not dataset.mirror


def test_svhn_noextra_is_the_train_file_alone(svhn):
    folder, stored = svhn
    dataset = data.load("svhn_noextra.1@40-1", folder)
    np.testing.assert_array_equal(dataset.images, stored["train"][0])
    np.testing.assert_array_equal(dataset.labels, stored["train"][1] - 1)


@pytest.fixture(scope="module")
def stl10(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stl10")
    files = folder / "tfds" / "downloads" / "extracted" / "archive" / "stl10_binary"  # where TFDS unpacks it
    files.mkdir(parents=True)
    stored = {}
    for part, count in (("train", 1100), ("test", 20), ("unlabeled", 60)):
        images = random_images(count, 96, len(part))
        labels = np.random.RandomState(4).permutation(np.arange(count) % 10)
        images.transpose(0, 3, 2, 1).tofile(files / f"{part}_X.bin")
        if part != "unlabeled":
            (labels + 1).astype(np.uint8).tofile(files / f"{part}_y.bin")
        stored[part] = images, labels
    (files / "class_names.txt").write_text("".join(f"name{i}\n" for i in range(10)))
    folds = np.stack([np.random.RandomState(i).permutation(1100)[:1000] for i in range(10)])
    (files / "fold_indices.txt").write_text("".join(" ".join(map(str, fold)) + " \n" for fold in folds))
    prepare("stl10", folder / "tfds", lambda url: str(files.parent))
    return folder / "tfds", stored, folds


def test_stl10_has_its_unlabelled_split_after_train(stl10):
    folder, stored, _ = stl10
    dataset = data.load("stl10.0@40-1", folder)
    np.testing.assert_array_equal(dataset.images[:1100], stored["train"][0])
    np.testing.assert_array_equal(dataset.images[1100:], stored["unlabeled"][0])
    np.testing.assert_array_equal(dataset.labels[:1100], stored["train"][1])
    assert set(dataset.labels[1100:]) == {-1}
    assert dataset.augmenter().shift == 12 and dataset.class_names[3] == "name3"
    assert sorted(dataset.order.tolist()) == list(range(1160))
    assert np.bincount(dataset.labels[dataset.order[:1000]]).tolist() == [100] * 10  # equal shares, all of known class


@pytest.mark.parametrize("fold", [0, 9])
def test_stl10_with_1000_labels_uses_its_own_folds(stl10, fold):
    folder, _, folds = stl10
    assert data.load(f"stl10.{fold}@1000-1", folder).labeled.tolist() == folds[fold].tolist()


def test_stl10_refuses_a_fold_that_does_not_exist(stl10):
    with pytest.raises(UserError, match="folds 0 to 9"):
        data.load("stl10.10@1000-1", stl10[0])


def test_stl10_all_means_all_that_have_a_label(stl10):
    assert data.load("stl10.1@all-1", stl10[0]).labeled.tolist() == list(range(1100))


def test_fashion_mnist_is_padded_and_has_three_equal_channels(tmp_path):
    from tensorflow_datasets.image_classification import mnist

    stored, files = {}, {}
    for part, count in (("train", 300), ("test", 100)):
        images = np.random.RandomState(count).randint(0, 256, (count, 28, 28)).astype(np.uint8)
        labels = np.random.RandomState(5).permutation(np.arange(count) % 10).astype(np.uint8)
        stored[part] = images, labels
        for kind, header, array in (("data", 16, images), ("labels", 8, labels)):
            files[f"{part}_{kind}"] = str(tmp_path / f"{part}_{kind}")
            (tmp_path / f"{part}_{kind}").write_bytes(bytes(header) + array.tobytes())
    with mock.patch.object(mnist, "_TRAIN_EXAMPLES", 300), mock.patch.object(mnist, "_TEST_EXAMPLES", 100):
        prepare("fashion_mnist", tmp_path, lambda urls: {key: files[key] for key in urls})
    dataset = data.load("fashion_mnist.1@40-1", tmp_path)
    assert dataset.image_shape == (32, 32, 3)
    for channel in range(3):
        np.testing.assert_array_equal(dataset.images[:, 2:30, 2:30, channel], stored["train"][0])
    assert not np.asarray(dataset.images)[:, [0, 1, 30, 31]].any()
    assert not np.asarray(dataset.images)[:, :, [0, 1, 30, 31]].any()
    np.testing.assert_array_equal(dataset.labels, stored["train"][1])
    np.testing.assert_array_equal(dataset.test_labels, stored["test"][1])


def test_digits_are_embedded():
    dataset = data.load("digits.1@40-1", "/nowhere")
    assert dataset.images.shape == (1437, 16, 16, 3) and dataset.test_images.shape == (360, 16, 16, 3)
    assert not dataset.mirror and dataset.augmenter().shift == 2
    assert np.bincount(dataset.labeled_classes).tolist() == [4] * 10
    assert (dataset.images[..., 0] == dataset.images[..., 2]).all()
    bunch, test = load_digits(), np.arange(1797) % 5 == 0
    np.testing.assert_array_equal(dataset.labels, bunch.target[~test])
    np.testing.assert_array_equal(dataset.test_labels, bunch.target[test])
    for images, drawn in ((dataset.images, bunch.images[~test]), (dataset.test_images, bunch.images[test])):
        wanted = [Image.fromarray(np.uint8(np.round(levels * 255 / 16))).resize((16, 16)) for levels in drawn]
        np.testing.assert_array_equal(images[..., 0], np.stack(wanted))


# The cache.

def test_second_load_reads_the_cache_alone(cifar100):
    folder, stored = cifar100
    data.load("cifar100.0@100-1", folder)
    with mock.patch.object(sources, "_decode_tfds", side_effect=AssertionError("decoded again")):
        dataset = data.load("cifar100.3@200-1", folder)
    assert isinstance(dataset.images, np.memmap)


def test_interrupted_write_is_never_read(tmp_path):
    def interrupted(writer):
        writer.create("images", (10, 4), np.uint8)[:5] = 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), cache.opened(tmp_path / "cache", interrupted):
        pass
    assert list(tmp_path.iterdir()) == []


def test_two_writers_do_not_disturb_each_other(tmp_path):
    def slow(writer):
        with cache.opened(tmp_path / "cache", lambda other: other.add("a", np.arange(3))):
            pass
        writer.add("a", np.arange(3))

    with cache.opened(tmp_path / "cache", slow) as (arrays, _):
        assert arrays["a"].tolist() == [0, 1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


WRITER = """
import sys, time
from pathlib import Path
import numpy as np
from libml.data import cache

def build(writer):
    writer.create("images", (100, 4), np.uint8)
    print("writing", flush=True)
    time.sleep(600)

with cache.opened(Path(sys.argv[1]), build):
    pass
"""


def test_what_killed_writers_left_is_swept_when_the_next_one_writes(folder, tmp_path, program):
    """And only that: not what a living process writes, nor a folder that has no lock of ours."""
    place = tmp_path / "data" / "folders"
    with subprocess.Popen([sys.executable, "-c", WRITER, place / "cssl_cache-1-x"], stdout=subprocess.PIPE, text=True,
                          cwd=ROOT) as writer:
        try:
            assert writer.stdout.readline() == "writing\n"
            (living,) = place.glob(".*-unfinished-*")
            for name in ("dead", "theirs"):
                (place / f".c-unfinished-{name}").mkdir()
            (place / ".c-unfinished-dead" / LOCK).touch()
            arguments = f"--dataset=folder:{folder}", f"--data_dir={tmp_path / 'data'}"
            program(inspect.main, *arguments)
            assert {path.name for path in place.glob(".*")} == {living.name, ".c-unfinished-theirs"}
        finally:
            writer.kill()
    program(inspect.main, *arguments)
    assert living.exists()  # nothing was written
    program(inspect.main, *arguments, "--image_size=8")
    assert [path.name for path in place.glob(".*")] == [".c-unfinished-theirs"]


@pytest.mark.slow
def test_two_processes_decode_one_folder_at_once(folder, tmp_path):
    command = ["-m", "cssl.tools.inspect", f"--dataset=folder:{folder}", f"--data_dir={tmp_path / 'd'}", "--json"]
    first, second = (Program(command, tmp_path) for _ in range(2))
    assert (first.wait(), second.wait()) == (0, 0), first.error + second.error
    assert first.output == second.output and json.loads(first.output)
    (only,) = (tmp_path / "d" / "folders").iterdir()
    assert sorted(path.name for path in only.iterdir() if path.suffix != ".npy") == [cache.CONTENTS]


def test_caches_of_earlier_states_are_named_with_their_size(folder, tmp_path, program, monkeypatch):
    def shown(*flags, path=folder):
        done = program(inspect.main, f"--dataset=folder:{path}", f"--data_dir={tmp_path}", *flags)
        return [line for line in done.stderr.splitlines() if "as it was before" in line]

    monkeypatch.chdir(folder / "train")
    assert shown(path="..") == shown() == []  # one folder, one cache

    assert shown("--image_size=100") == shown("--image_size=64") == []  # another size is no earlier state
    (before,) = [path for path in (tmp_path / "folders").iterdir()
                 if np.load(path / "images.npy", mmap_mode="r").shape[1] == 100]
    save(folder / "train" / "cat" / "new.png", np.zeros((5, 5, 3), np.uint8))
    for _ in range(2):
        (line,) = shown("--image_size=100")
        assert line.endswith(f" take 0.7 MB and may be deleted if no run uses them: {before}")  # 22 * 30,000 B
    shutil.rmtree(before)
    assert shown("--image_size=100") == []


def test_a_full_disk_is_one_line_and_leaves_nothing(folder, tmp_path, program):
    arguments = f"--dataset=folder:{folder}", f"--data_dir={tmp_path / 'data'}", "--image_size=200"
    limited = Program(["-m", "cssl.tools.inspect", *arguments], tmp_path, limit=10 ** 6)
    assert limited.wait() == 2 and len(limited.error.splitlines()) == 1, limited.error
    assert "room for the decoded images" in limited.error and "(File too large)" in limited.error
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch.object(os, "posix_fallocate", side_effect=full):
        done = program(inspect.main, *arguments, code=2)
    assert "No space left on device" in done.stderr
    with mock.patch.object(shutil, "disk_usage", lambda path: mock.Mock(free=10 ** 6)):  # known before it is tried
        done = program(inspect.main, *arguments, code=2)
    assert "No space left on device" in done.stderr and list((tmp_path / "data" / "folders").iterdir()) == []


def test_a_folder_with_a_long_name_has_a_cache(folder, tmp_path, program):
    """Of 250 bytes of 255 that a name may have."""
    long = folder.rename(folder.parent / ("x" * 10 + "é" * 120))
    program(inspect.main, f"--dataset=folder:{long}", f"--data_dir={tmp_path}")


@pytest.mark.parametrize("damage", ["truncate", "remove", "contents"])
def test_damaged_cache_is_one_clear_line(tmp_path, damage):
    folder = tmp_path / "cache"
    with cache.opened(folder, lambda writer: writer.add("a", np.arange(1000))):
        pass
    if damage == "truncate":
        (folder / "a.npy").write_bytes((folder / "a.npy").read_bytes()[:-1])
    elif damage == "remove":
        (folder / "a.npy").unlink()
    else:
        (folder / cache.CONTENTS).write_text("{")
    with pytest.raises(UserError, match="damaged.*Delete that folder"), cache.opened(folder, pytest.fail):
        pass


@pytest.mark.parametrize("change", [{"meta": {}}, {"meta": []}, {"meta": {"notes": 5}}, {"files": {}}, {"files": 5}])
def test_a_cache_that_lacks_something_is_one_clear_line(folder, tmp_path, program, change):
    arguments = f"--dataset=folder:{folder}", f"--data_dir={tmp_path}"
    program(inspect.main, *arguments)
    (contents,) = (tmp_path / "folders").glob("*/contents.json")
    stored = json.loads(contents.read_text())
    contents.write_text(json.dumps(stored | {"meta": stored["meta"] | {"num_valid": 1}}))
    assert "contents.json is not what its checksum says" in program(inspect.main, *arguments, code=2).stderr
    del stored["checksum"]  # as of older versions
    contents.write_text(json.dumps(stored | change))
    assert "is damaged" in program(inspect.main, *arguments, code=2).stderr


def test_images_of_the_cache_that_were_overwritten_are_told(folder, tmp_path, program):
    """Of the same size. A copy, whose files have other times, is as good, and so is a cache of older versions."""
    arguments = f"--dataset=folder:{folder}", f"--data_dir={tmp_path}"
    program(inspect.main, *arguments)
    (images,) = (tmp_path / "folders").glob("*/images.npy")
    os.utime(images, (0, 0))
    program(inspect.main, *arguments)
    pixels = np.load(images, mmap_mode="r+")
    pixels[0] = 255 - pixels[0]
    pixels.flush()
    os.utime(images, (1, 1))
    error = program(inspect.main, *arguments, code=2).stderr
    assert "is damaged (images.npy has changed since it was written)" in error and "Delete that folder" in error
    contents = images.with_name(cache.CONTENTS)
    contents.write_text(json.dumps({name: value for name, value in json.loads(contents.read_text()).items()
                                    if name != "written"}))
    program(inspect.main, *arguments)


def test_unwritable_cache_folder_is_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("")
    with (pytest.raises(UserError, match="Cannot write .*the decoded images.*--data_dir"),
          cache.opened(tmp_path / "file" / "cache", lambda writer: None)):
        pass


# Folders.

def save(path, image, mode=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.fromarray(image)
    (picture.convert(mode) if mode else picture).save(path)


@pytest.fixture
def folder(tmp_path):
    """Two classes of ten images each, in several sizes, modes and formats."""
    root = tmp_path / "my.images@home"
    rng = np.random.RandomState(0)
    for c, name in enumerate(("cat", "dog")):
        for i in range(10):
            image = np.full((20 + i, 30, 3), 100 * c + i, np.uint8)
            mode, suffix = [(None, "png"), ("L", "png"), ("RGBA", "png"), (None, "jpg"), ("P", "PNG")][i % 5]
            save(root / "train" / name / f"{i}.{suffix}", image, mode)
    save(root / "unlabeled" / "deep" / "a.png", rng.randint(0, 256, (8, 8, 3)).astype(np.uint8))
    save(root / "train" / "dog" / "sixteen.png", np.full((9, 9), 25600, np.uint16))
    return root


def test_folder_with_a_held_out_fifth(folder, tmp_path):
    dataset = data.load(f"folder:{folder}.1@4-1", tmp_path, image_size=24)
    assert dataset.image_shape == (24, 24, 3) and dataset.class_names == ["cat", "dog"]
    held = len(dataset.test_labels)
    assert (np.bincount(dataset.test_labels) > 0).tolist() == [True, True] and held <= 13
    assert len(dataset.labels) == 21 - held + 1 and (dataset.labels == -1).sum() == 1
    assert np.bincount(dataset.labeled_classes).tolist() == [2, 2]
    assert any("no `test` folder" in note for note in dataset.notes)
    cats = np.asarray(dataset.images)[dataset.labels == 0]
    assert cats.max() < 60  # class 0 is dark in every mode; a palette rounds to multiples of 51
    everything = np.concatenate([dataset.images, dataset.test_images])
    assert (everything == 100).all(axis=(1, 2, 3)).sum() == 2  # dog 0 and the 16-bit image: 25600 >> 8 = 100
    whole = data.load(f"folder:{folder}.1@all-1", tmp_path, image_size=24)
    assert whole.labeled.size == 21 - held - 1  # one for validation


def test_folder_with_its_own_test_set(folder, tmp_path):
    save(folder / "test" / "dog" / "x.png", np.zeros((5, 5, 3), np.uint8))
    dataset = data.load(f"folder:{folder}.1@all-2", tmp_path)
    assert len(dataset.labeled) == 19 and dataset.test_labels.tolist() == [1] and dataset.image_shape == (32, 32, 3)
    assert (dataset.labels[dataset.valid] >= 0).all()
    for labels in ("all", 15, 19):
        dataset = data.load(f"folder:{folder}.3@{labels}-2", tmp_path)
        assert not set(dataset.labeled) & set(dataset.valid) and not dataset.notes
    with pytest.raises(UserError, match="asks for 20 labels, but .* has 19 labelled training images besides"):
        data.load(f"folder:{folder}.3@20-2", tmp_path)


def test_photographs_are_put_upright(folder, tmp_path):
    image = np.zeros((16, 32, 3), np.uint8)
    image[:, :16] = 200  # bright on the left as stored; the camera was turned: shown, it is bright on top
    picture, exif = Image.fromarray(image), Image.Exif()
    exif[0x0112] = 6
    picture.save(folder / "train" / "cat" / "photograph.png", exif=exif)
    save(folder / "test" / "cat" / "x.png", np.zeros((5, 5, 3), np.uint8))
    images = np.asarray(data.load(f"folder:{folder}.1@all-0", tmp_path).images)
    shown = next(pixels for pixels in images if pixels.max() == 200 and pixels.min() == 0)
    assert (shown[:12] == 200).all() and (shown[-12:] == 0).all()


def test_changed_folder_is_decoded_again(folder, tmp_path):
    before = data.load(f"folder:{folder}.1@all-1", tmp_path)
    save(folder / "train" / "cat" / "new.png", np.zeros((5, 5, 3), np.uint8))
    after = data.load(f"folder:{folder}.1@all-1", tmp_path)
    assert len(after.labels) + len(after.test_labels) == len(before.labels) + len(before.test_labels) + 1


def test_unreadable_files_are_listed_and_skipped(folder, tmp_path):
    (folder / "train" / "cat" / "broken.png").write_bytes(b"not an image")
    for _ in range(2):  # decoded and from the cache
        dataset = data.load(f"folder:{folder}.1@all-1", tmp_path)
        note = next(note for note in dataset.notes if "unreadable" in note)
        assert note.startswith("1 unreadable") and "broken.png" in note


@pytest.mark.parametrize("spoil, message", [
    (lambda root: (root / "train" / "empty").mkdir(), "empty holds no image"),
    (lambda root: save(root / "test" / "bird" / "a.png", np.zeros((4, 4, 3), np.uint8)), "'bird' has images in"),
    (lambda root: (root / "train").rename(root / "training"), "has no folder `train`"),
    (lambda root: shutil.rmtree(root / "train" / "cat"), "has one class folder, 'dog'"),
    (lambda root: ((root / "train" / "bad").mkdir(), (root / "train" / "bad" / "a.png").write_bytes(b"x")),
     "no readable image of class 'bad'"),
])
def test_folder_errors_are_one_clear_line(folder, tmp_path, spoil, message):
    spoil(folder)
    with pytest.raises(UserError, match=message) as caught:
        data.load(f"folder:{folder}.1@2-1", tmp_path)
    assert "\n" not in str(caught.value)


# The command line.

@pytest.mark.parametrize("name, message", [
    ("cifar11.1@40-1", "Unknown dataset 'cifar11'"),
    ("cifar10@40", "Malformed dataset name 'cifar10@40'"),
    ("digits.1@2000-1", "asks for 2000 labels, but digits has 1437"),
    ("digits.1@0-1", "no label at all"),
    ("digits.1@40-1437", "leave some for training"),
    ("cifar10.1@40-1", "cssl-data cifar10"),
    ("folder:/no/such/folder.1@40-1", "has no folder `train`"),
])
def test_bad_names_exit_with_2_and_one_line(program, tmp_path, name, message):
    done = program(inspect.main, f"--dataset={name}", f"--data_dir={tmp_path}", code=2)
    assert message in done.stderr and done.stdout == ""


@pytest.mark.slow
def test_fewer_labels_than_classes_is_a_warning(command):
    done = command("scripts/inspect_dataset.py", "--dataset=digits.1@3-0", "--json")
    assert "fewer labels (3) than classes (10)" in done.stderr
    assert len(json.loads(done.stdout)["labeled_indices"]) == 3


@pytest.mark.slow
def test_create_datasets_is_safe_to_repeat(command, program, cifar100):
    folder, _ = cifar100
    for run in (partial(command, "scripts/create_datasets.py"), partial(program, create.main)):
        done = run("cifar100", f"--data_dir={folder}")
        assert "300 training and 100 test images" in done.stdout and str(folder) in done.stdout
    done = program(create.main, "imagenet", code=2)
    assert "Unknown dataset 'imagenet'" in done.stderr


def test_names_survive_pickling_and_printing():
    name = names.parse_name("folder:/a.b@c/x.y.2@all-7")
    assert (name.dataset, name.seed, name.labels, name.valid) == ("folder:/a.b@c/x.y", 2, None, 7)
    assert names.parse_name(str(name)) == name == pickle.loads(pickle.dumps(name))
