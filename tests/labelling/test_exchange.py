"""Labels from and for other programs: trees of folders, Label Studio's JSON."""
import json
import os

import pytest
from helpers import make_images, round_of

from libml.errors import UserError
from libml.labelling import exchange
from libml.labelling.session import Session


@pytest.fixture
def session(tmp_path):
    names = [f"cat/{k}.png" for k in range(4)] + [f"dog/{k}.png" for k in range(4)] + ["other.png"]
    return Session(make_images(tmp_path / "images", names))


def test_a_tree_is_read_where_the_images_are(session):
    assert exchange.read(session, session.folder) == 8
    assert session.counts() == {"cat": 4, "dog": 4} and len(session.decided) == 8
    assert all(decision == (session.names[n].split("/")[0], "test" if session.random[n] else "train", "read")
               for n, decision in session.decided.items())
    assert exchange.read(session, session.folder) == 0  # what has a label keeps it


def test_a_written_tree_reads_back(session, tmp_path):
    exchange.read(session, session.folder)
    session.label([session.numbers["cat/0.png"]], "dog", "audit")
    assert exchange.write(session, tmp_path / "tree", None) == 8
    assert sorted(os.listdir(tmp_path / "tree")) == ["cat", "dog"] and len(os.listdir(tmp_path / "tree/dog")) == 5
    assert (tmp_path / "tree/dog/cat_0.png").read_bytes() == (session.folder / "cat/0.png").read_bytes()
    with pytest.raises(UserError, match="is there already"):
        exchange.write(session, tmp_path / "tree", None)
    labels = {session.names[n]: decision.label for n, decision in session.decided.items()}
    session.file.unlink()
    again = Session(session.folder)
    assert exchange.read(again, tmp_path / "tree") == 8
    assert {again.names[n]: decision.label for n, decision in again.decided.items()} == labels


def test_two_copies_of_one_name_are_refused_before_any_is_made(tmp_path):
    session = Session(make_images(tmp_path / "images", ["a/b.png", "a_b.png"]), ["cat"])
    session.label([0, 1], "cat", "order")
    with pytest.raises(UserError, match="a/b.png and a_b.png would have the same name"):
        exchange.write(session, tmp_path / "tree")
    assert not (tmp_path / "tree").exists()


def test_odd_names_survive_label_studios_addresses(tmp_path):
    names = ["a+b c.png", "d&e=f.png", "50%25.png", "#1.png", "<b>ü?.png", "d/x y.png"]
    session = Session(make_images(tmp_path / "images", names), ["cat"])
    session.label(range(6), "cat", "order")
    exchange.write(session, tmp_path / "tasks.json")
    session.file.unlink()
    assert exchange.read(Session(session.folder), tmp_path / "tasks.json") == 6


def test_a_class_that_is_no_folder_name_writes_nothing_outside(session, tmp_path):
    session.add_class("../../up")
    session.label([0], "../../up", "order")
    with pytest.raises(UserError, match="cannot be the name of a folder"):
        exchange.write(session, tmp_path / "deep/er/tree", None)
    assert not (tmp_path / "up").exists()


def test_label_studios_json_reads_back(session, tmp_path):
    exchange.read(session, session.folder)
    session.label([session.numbers["other.png"]], "", "order")
    file = tmp_path / "tasks.json"
    assert exchange.write(session, file, None) == 8
    session.file.unlink()
    again = Session(session.folder)
    assert exchange.read(again, file) == 8 and again.counts() == {"cat": 4, "dog": 4}
    with pytest.raises(UserError, match="would be overwritten"):
        exchange.write(session, file, None)


def test_what_label_studio_exports_is_understood(session, tmp_path):
    def task(image, *choices, **more):
        return {"data": {"image": image}, "annotations": [
            {"result": [{"type": "choices", "value": {"choices": [choice]}}], **more} for choice in choices]}

    file = tmp_path / "tasks.json"
    file.write_text(json.dumps([
        task("/data/local-files/?d=images/cat/0.png", "cat"), task("https://host/upload/1/dog/0.png?x=1", "cat", "dog"),
        task("/data/upload/other.png", "dog", was_cancelled=True), task("0.png", "cat"), task("gone.png", "cat"),
        {"data": {"image": "cat/1.png"}}]))
    assert exchange.read(session, file) == 2  # one was cancelled, one may be two images, one is none here
    assert {session.names[n]: decision.label for n, decision in session.decided.items()} == {
        "cat/0.png": "cat", "dog/0.png": "dog"}


@pytest.mark.parametrize("text", ["", "{}", "[1]", '[{"data": 3}]', "[[]]", '[{"data": {}, "annotations": [{}]}]'])
def test_other_json_is_one_line(session, tmp_path, text):
    file = tmp_path / "tasks.json"
    file.write_text(text)
    with pytest.raises(UserError, match="Label Studio's JSON|has no label"):
        exchange.read(session, file)
    assert not session.decided


def test_predictions_go_along_in_their_order(session, tmp_path):
    now = round_of(session)
    exchange.write(session, tmp_path / "tasks.json", now)
    tasks = json.loads((tmp_path / "tasks.json").read_text())
    assert [task["data"]["image"].split("=")[1] for task in tasks[:len(now.ranking)]] == [
        session.names[n] for n in now.ranking]
    assert all(("predictions" in task) != session.random[session.numbers[task["data"]["image"].split("=")[1]]]
               for task in tasks)  # nobody is led where accuracy is measured
    result = tasks[0]["predictions"][0]
    assert result["result"][0]["value"]["choices"] == [now.guess(now.ranking[0])[0]] and 0.5 <= result["score"] <= 1
