"""cssl-label and cssl-audit at the command line."""
import csv
import io
import json
import socket

import pytest
from PIL import Image

from cssl.tools import audit, label
from libml.data import sources
from libml.labelling.session import Session


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A folder of 80 digits, in folders by their class, with a wrong one, a twin, a blank one and one that is none."""
    folder, data = tmp_path_factory.mktemp("label") / "digits", sources.digits()
    for k in range(80):
        to = folder / "zero one two three four five six seven eight nine".split()[data.labels[k]] / f"{k:03}.png"
        to.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(data.images[k]).save(to)
    Image.new("RGB", (16, 16), (9, 9, 9)).save(folder / "blank.png")
    Image.fromarray(data.images[0]).save(folder / "twin.png")
    (folder / "none.png").write_bytes(b"nothing")
    return folder


def flags(digits, *more):
    return [digits, "--features=pixels", f"--data_dir={digits.parent / 'data'}", *more]


@pytest.mark.parametrize("arguments, message", [
    (["nowhere"], "There is no folder nowhere"), (["empty"], "holds no image"),
    (["one", "--port=70000"], "Cannot serve"), (["one", "--features=vgg"], "--features=vgg"),
    (["one", "--features=keras:Nothing"], "Nothing"), (["one", "--classes=a\nb"], "one line of text"),
    (["one", "--read=none.json"], "none.json cannot be read"), (["one", "--finish"], "needs two classes"),
    (["one", "--enough_gain=nan"], "got 'nan', expected a number from 0 to 100"),
    (["one", "--enough_accuracy=101"], "got '101'"), (["one", "--image_size=0"], "--image_size=0"),
    (["one", "--order=best"], "invalid choice"), (["one", "--labels=bad.csv"], "bad.csv begins with")])
def test_bad_input_is_one_line(program, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "one").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "one" / "a.png")
    (tmp_path / "bad.csv").write_text("a,b\n")
    assert message in program(label.main, *arguments, code=2).stderr
    assert (tmp_path / "bad.csv").read_text() == "a,b\n" and not (tmp_path / "one_model").exists()


def test_a_taken_port_is_one_line(program, digits):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = program(label.main, *flags(digits, f"--port={taken.getsockname()[1]}"), code=2)
    assert "Take another port" in done.stderr


def test_a_class_without_labels_to_train_on_is_told_before_anything_is_made(program, tmp_path):
    for name in "abc":
        (tmp_path / "own").mkdir(exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "own" / f"{name}.png")
    (tmp_path / "own" / "labels.csv").write_text("file,label,split\na.png,cat,\nb.png,dog,\nc.png,owl,test\n")
    assert "'owl' has labels for measuring alone" in program(label.main, tmp_path / "own", "--finish", code=2).stderr
    assert not (tmp_path / "own_model").exists()


def test_labels_are_read_and_written_without_the_page(program, digits, tmp_path):
    done = program(label.main, *flags(digits, f"--read={digits}", f"--write={tmp_path / 'tasks.json'}",
                                      f"--labels={tmp_path / 'labels.csv'}"))
    assert f"80 labels from {digits}" in done.stdout and "80 labels in" in done.stdout
    tasks = json.loads((tmp_path / "tasks.json").read_text())
    assert len(tasks) == 82 and sum("annotations" in task for task in tasks) == 80  # one cannot be read
    names = {"blank.png", "twin.png"}
    predicted = {task["data"]["image"].split("=")[1] for task in tasks if "predictions" in task}
    assert predicted == {name for name in names if not Session(digits).random[Session(digits).numbers[name]]} != set()


def test_the_audit_finds_what_was_hidden(program, digits, tmp_path):
    labels = tmp_path / "labels.csv"
    program(label.main, *flags(digits, f"--read={digits}", f"--write={tmp_path / 'tree'}", f"--labels={labels}"))
    done = program(audit.main, *flags(digits, f"--labels={labels}"))
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    found = {(row["file"], row["kind"]) for row in rows}
    assert {("none.png", "unreadable"), ("blank.png", "blank")} <= found
    twin = next(row for row in rows if row["kind"] == "duplicate" and float(row["score"]) < 1e-6)
    assert "twin.png" in (twin["file"], twin["other"])
    assert "83 images" in done.stderr and "1 unreadable" in done.stderr
    file = tmp_path / "found.csv"
    program(audit.main, *flags(digits, f"--labels={labels}", f"--csv={file}"))
    assert file.read_text() == done.stdout
    file.write_text("mine")
    assert "was not written by this command" in program(audit.main, *flags(digits, f"--csv={file}"), code=2).stderr
