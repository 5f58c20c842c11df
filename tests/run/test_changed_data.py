"""A run's images change under it: it goes on with none but those it was trained on, and says what has changed."""
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import cssl
from cssl import CSSL, RunConfig, train
from cssl.tools import predict
from libml.data import sources
from libml.errors import UserError

FLAGS = ["--batch=4", "--uratio=1", "--filters=4", "--repeat=1", "--scales=1", "--augment=d.d.x", "--image_size=16",
         "--report_kimg=0.0078125", "--save_kimg=0.0078125", "--schedule_kimg=1"]  # every two updates


@pytest.fixture(scope="module")
def trained(tmp_path_factory, program) -> tuple[Path, Path]:
    """A folder with pictures of three digits and a run of two updates on them, and a copy of it all."""
    folder, digits = tmp_path_factory.mktemp("trained") / "place", sources.digits()
    for label, name in enumerate(("ant", "bee", "cat")):
        for number, image in enumerate(digits.images[digits.labels == label][:12]):
            file = folder / "pictures" / ("test" if number < 3 else "train") / name / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(file)
    go_on(folder, program, 2)
    shutil.copytree(folder, folder.with_name("copy"))
    return folder, folder.with_name("copy")


@pytest.fixture
def place(trained) -> Path:
    """The folder as it was before any test."""
    folder, copy = trained
    shutil.rmtree(folder)
    shutil.copytree(copy, folder)
    return folder


def go_on(place: Path, program, steps: int, code: int = 0):
    return program(CSSL, f"--dataset=folder:{place / 'pictures'}.1@9-1", f"--data_dir={place / 'data'}",
                   f"--train_dir={place / 'runs'}", f"--train_steps={steps}", *FLAGS, code=code)


def run_of(place: Path) -> Path:
    (args,) = (place / "runs").rglob("args.json")
    return args.parent.parent


def contents(run: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in run.rglob("*") if file.is_file() and file.name != "train.log"}


def swap(pictures: Path) -> None:
    """Two classes change their names, and so their numbers."""
    for part in ("train", "test"):
        (pictures / part / "ant").rename(pictures / part / "x")
        (pictures / part / "bee").rename(pictures / part / "ant")
        (pictures / part / "x").rename(pictures / part / "bee")


def more(pictures: Path) -> None:
    """One more labelled image."""
    image = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
    Image.fromarray(image).save(pictures / "train/cat/new.png")


def another_class(pictures: Path) -> None:
    shutil.copytree(pictures / "train/cat", pictures / "train/dog")


def renamed_class(pictures: Path) -> None:
    for part in ("train", "test"):
        (pictures / part / "cat").rename(pictures / part / "dog")


CHANGES = [(swap, "as many images, but other ones, in other classes, or with other features"),
           (more, "it had 36 images and has 37"),
           (another_class, "its classes were ant, bee, cat and are ant, bee, cat, dog"),
           (renamed_class, "its classes were ant, bee, cat and are ant, bee, dog")]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_a_run_refuses_images_that_have_changed(place, program, change, message):
    """In one line, whether it is finished or not; nothing of it is touched, and it still predicts."""
    run = run_of(place)
    before = contents(run)
    change(place / "pictures")
    for steps in (4, 2):
        error = go_on(place, program, steps, code=2).stderr
        assert message in error and "cannot be read" not in error
        assert "--train_dir or --rerun" in error and "cssl-predict" in error
    if change is not another_class:  # the model's own classes are what is missed first
        assert "cannot be read" not in program(CSSL, f"--eval_ckpt={run}", code=2).stderr
    assert contents(run) == before
    assert "ant" in program(predict.main, run, place / "pictures/test").stdout


def test_evaluating_what_is_there_now_is_to_be_said(place, program):
    run = run_of(place)
    more(place / "pictures")
    error = program(CSSL, f"--eval_ckpt={run}", code=2).stderr
    assert "it had 36 images and has 37" in error and "--dataset=folder:" in error
    name = f"folder:{place / 'pictures'}.1@9-1"
    assert "test" in program(CSSL, f"--eval_ckpt={run}", f"--dataset={name}").stdout
    opened = cssl.open(run)
    with pytest.raises(UserError, match="it had 36 images and has 37"):
        opened.evaluate()
    assert 0 <= opened.evaluate(cssl.load(name, place / "data", 16))["accuracy"] <= 100


def test_images_that_came_back_continue(place, program):
    """What counts is what is in the files: not when they were written, nor by whom."""
    swap(place / "pictures")
    go_on(place, program, 4, code=2)
    swap(place / "pictures")
    for file in (place / "pictures").rglob("*.png"):
        file.write_bytes(file.read_bytes())
    assert "Continuing from" in go_on(place, program, 4).stdout


def test_a_run_of_an_older_version_continues(place, program):
    """Its data.json has no digest: another number of classes is still told, in words."""
    file = run_of(place) / "args/data.json"
    stored = json.loads(file.read_text())
    file.write_text(json.dumps({name: value for name, value in stored.items() if name not in (
        "digest", "num_images", "checksum")}))
    another_class(place / "pictures")
    assert "its classes were ant, bee, cat and are ant, bee, cat, dog" in go_on(place, program, 4, code=2).stderr
    shutil.rmtree(place / "pictures/train/dog")
    assert "Continuing from" in go_on(place, program, 4).stdout
    assert json.loads(file.read_text()) == stored


@pytest.mark.parametrize(("damage", "message"), [
    (lambda file: file.unlink(), "data.json is missing"),
    (lambda file: file.write_text(file.read_text().replace("ant", "elk")), "class_names are others than those of"),
    (lambda file: file.write_text(json.dumps(json.loads(file.read_text()) | {"digest": "x"})), "data.json is damaged"),
    (lambda file: file.write_text(json.dumps(json.loads(file.read_text()) | {"image_shape": [32, 32, 3]})),
     "it is not what its checksum says")])
def test_a_run_without_a_true_description_of_its_data_is_refused(place, program, damage, message):
    """Or it would go on with whatever is there now, and predict classes by names that somebody has written."""
    run = run_of(place)
    damage(run / "args/data.json")
    before = contents(run)
    for done in (go_on(place, program, 4, code=2), program(CSSL, f"--eval_ckpt={run}", code=2),
                 program(predict.main, run, place / "pictures/test", code=2)):
        assert message in done.stderr and "Bring it back" in done.stderr
    assert contents(run) == before


def test_named_datasets_and_arrays_are_known_again(tmp_path):
    digits = sources.digits()
    arrays = [digits.images, digits.labels, digits.test_images, digits.test_labels]
    config = RunConfig.of(CSSL, batch=4, uratio=1, filters=4, repeat=1, scales=1, augment="d.d.x", train_steps=1,
                          schedule_kimg=1, train_dir=str(tmp_path))
    run = train(config, cssl.from_arrays(*arrays, num_labels=40, name="arrays:mine"))
    assert set(json.loads(run.facts_file.read_text())["digest"]) == {"classes", "images", "split"}
    arrays[1] = np.where(arrays[1] < 2, 1 - arrays[1], arrays[1])
    with pytest.raises(UserError, match="other ones, in other classes, or with other features"):
        train(config.replace(train_kimg=2 * 4 / 1024), cssl.from_arrays(*arrays, num_labels=40, name="arrays:mine"))


def test_what_a_hook_changes_is_its_own_and_a_result_is_of_some_reports(tmp_path):
    data = cssl.load("digits.1@40-1")
    config = RunConfig.of(cssl.CSSL, dataset="digits.1@40-1", train_dir=str(tmp_path), train_steps=2, batch=4, uratio=1,
                          filters=2, repeat=1, scales=1, augment="d.d.x")
    run = cssl.train(config, data, hooks=[lambda trainer, report: report.clear()])
    assert run.result("accuracy") >= 0
    with pytest.raises(UserError, match="last=0: expected how many"):
        run.result("accuracy", last=0)
    run.facts_file.write_text("")
    with pytest.raises(UserError, match="data.json is damaged"):
        cssl.train(config, data)


@pytest.mark.parametrize(("given", "message"), [
    ({"class_names": set("abcdefghij")}, "class_names is set; expected a list"),
    ({"class_names": [*"abcdefghij", "j"]}, "named in all: 11"), ({"seed": 1.5}, "expected whole numbers")])
def test_names_and_seeds_of_arrays(given, message):
    digits = sources.digits()
    with pytest.raises(UserError, match=message):
        cssl.from_arrays(digits.images, digits.labels, digits.test_images, digits.test_labels, **given)
