"""Labels of a folder: in the file before the call returns, whatever ends the process then."""
import csv
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import ROOT
from helpers import make_images

from libml.data import files
from libml.errors import UserError
from libml.labelling import session as sessions
from libml.labelling.session import EVERY, Session, next_images


@pytest.fixture
def folder(tmp_path):
    return make_images(tmp_path / "images", [f"{k:03}.png" for k in range(60)])


def rows(session: Session) -> list[list[str]]:
    return list(csv.reader(session.file.read_text(encoding="utf-8").splitlines()))


def test_labels_stand_in_the_file_in_their_order_and_come_back(folder):
    session = Session(folder, ["cat", "dog"])
    session.label([5], "dog", "order")
    session.label([3, 4], "cat", "grid")
    session.label([7], "", "order")
    assert [row[:2] for row in rows(session)] == [["file", "label"], ["005.png", "dog"], ["003.png", "cat"],
                                                  ["004.png", "cat"], ["007.png", ""]]
    again = Session(folder)
    assert again.decided == session.decided and list(again.decided) == list(session.decided)
    assert again.classes == ["dog", "cat"] and again.counts() == {"dog": 1, "cat": 2}


def test_undo_takes_back_what_one_key_did(folder):
    session = Session(folder, ["cat", "dog"])
    session.label([5], "dog", "order")
    session.label([5], "cat", "audit")
    session.label([3, 4], "cat", "grid")
    assert session.undo() == [3, 4] and set(session.decided) == {5}
    assert session.undo() == [5] and session.decided[5].label == "dog"
    assert session.undo() == [5] and not session.decided and len(rows(session)) == 1
    assert session.undo() == [] and not session.undoable
    assert next_images(session, [], 1) == [5]  # what was taken back is asked for again


def test_every_tenth_image_is_of_the_random_part_and_for_the_test(tmp_path):
    session = Session(make_images(tmp_path / "many", [f"{k:04}.png" for k in range(400)]), ["cat", "dog"])
    ranking = [n for n in range(400) if not session.random[n]]
    for _ in range(50):
        n, = next_images(session, ranking, 1)
        session.label([n], "cat", "order")
    decisions = list(session.decided.items())
    assert [decision.by == "random" for _, decision in decisions] == [k % EVERY == EVERY - 1 for k in range(50)]
    assert all(session.random[n] and decision.split == "test" for n, decision in decisions if decision.by == "random")
    assert [n for n, decision in decisions if decision.by == "order"] == ranking[:45]  # the order is kept
    # The part is a tenth, by the name alone: 5 standard deviations of a binomial of 400.
    assert abs(sum(session.random) - 40) < 5 * (400 * 0.09) ** 0.5
    grown = Session(make_images(tmp_path / "many", ["more/new.png"]), ["cat"])
    assert all(grown.random[grown.numbers[name]] == session.random[n] for n, name in enumerate(session.names))


def test_skipped_images_come_back_last(folder):
    session = Session(folder, ["cat"])
    first, second = next_images(session, [], 2)
    session.skip(first)
    assert next_images(session, [], 60)[0] == second and next_images(session, [], 60)[-1] == first
    session.label([n for n in range(60) if n != first], "cat", "grid")
    assert next_images(session, [], 5) == [first]


def test_undo_shows_a_skipped_image_again_and_takes_no_label(folder):
    session = Session(folder, ["cat"])
    first, second = next_images(session, [], 2)
    session.label([first], "cat", "order")
    session.skip(second)
    assert session.undo() == [second] == next_images(session, [], 1) and set(session.decided) == {first}
    session.skip(second)  # what undo brought back can be skipped, too
    assert next_images(session, [], 1) != [second]
    assert session.undo() == [second] and session.undo() == [first] and not session.undoable


def test_all_that_an_undo_took_back_comes_first(folder):
    session = Session(folder, ["cat"])
    session.label(range(20, 50), "cat", "grid")
    session.undo()
    for n in range(20, 50):
        assert next_images(session, [], 12)[0] == n
        session.label([n], "cat", "order")


def test_nothing_of_the_random_part_is_ever_for_training(tmp_path):
    """Whatever is done in whatever order, and after each start; the folders and rows of the user say otherwise at
    will."""
    session = Session(make_images(tmp_path / "many", [f"{k:04}.png" for k in range(80)]), ["cat", "dog"])
    part = {n for n, random in enumerate(session.random) if random}
    rng = np.random.default_rng(0)
    for k in range(300):
        name, n = str(rng.choice(session.classes)), int(rng.choice([*part, *range(80)]))
        act = rng.integers(6)
        if act < 3:
            session.label([n], name, ("order", "grid", "audit")[act])
        elif act == 3:
            session.label([n], "", "audit")
        elif act == 4:
            session.undo()
        else:
            session.rename_class(name, f"{name[:3]}{k}")
        assert not [m for m in part if m in session.decided and session.decided[m].split == "train"]
        if k % 50 == 49:
            assert {n for n, decision in session.decided.items() if decision.by == "random"} <= part
            session = Session(session.folder)
    assert part & session.decided.keys()


def test_what_is_for_the_test_stays_so_when_it_was_left_out_between(tmp_path):
    session = Session(make_images(tmp_path / "own", ["train/cat/1.png", "test/cat/2.png", "test/cat/3.png"]))
    before = session.all()
    for n in range(3):
        session.label([n], "", "audit")
    session = Session(session.folder)
    for n in range(3):
        assert session.decided[n].split == "excluded"
        session.label([n], "cat", "audit")
    assert [session.decided[n].split for n in range(3)] == [before[n].split for n in range(3)]


def test_classes_are_renamed_and_merged(folder):
    session = Session(folder, ["cat", "dog"])
    session.label([1], "cat", "order")
    session.label([2], "dog", "order")
    session.rename_class("cat", "tiger")
    assert session.classes == ["tiger", "dog"] and session.decided[1].label == "tiger"
    session.rename_class("dog", "tiger")
    assert session.classes == ["tiger"] and session.counts() == {"tiger": 2}
    session.rename_class("tiger", "tiger")
    assert session.classes == ["tiger"]
    session.add_class(" lion ")
    assert Session(folder).classes == ["tiger", "lion"]  # a class without labels is kept, too
    with Session(folder, ["owl"]).hold():
        pass
    assert Session(folder).classes == ["owl", "tiger", "lion"]


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "\x1b[31m", "x" * 300])
def test_a_class_needs_a_name_that_a_row_can_hold(folder, name):
    session = Session(folder)
    with pytest.raises(UserError, match="one line of text"):
        session.add_class(name)


def test_the_layout_of_own_data_counts(tmp_path):
    names = ["train/cat/1.png", "train/dog/2.png", "test/cat/3.png", "unlabeled/4.png", "unlabeled/5.png"]
    session = Session(make_images(tmp_path / "own", names))
    known = {session.names[n]: (decision.label, decision.split) for n, decision in session.all().items()}
    assert known == {"train/cat/1.png": ("cat", "train"), "train/dog/2.png": ("dog", "train"),
                     "test/cat/3.png": ("cat", "test")}
    assert sorted(session.names[n] for n in next_images(session, [], 9)) == ["unlabeled/4.png", "unlabeled/5.png"]
    session.label([session.numbers["train/cat/1.png"]], "dog", "audit")
    assert session.all()[session.numbers["train/cat/1.png"]] == ("dog", "train", "read")


def test_the_dataset_is_what_runs_read(folder):
    session = Session(folder, ["cat", "dog"])
    (folder / "dataset.csv").write_text("mine")
    rest = [n for n in range(60) if not session.random[n]]
    session.label(rest[:2], "cat", "grid")
    session.label(rest[2:4], "dog", "grid")
    session.label([rest[4]], "", "order")
    session.unreadable[rest[5]] = "broken"
    path = folder.with_name("elsewhere") / "dataset.csv"
    session.write_dataset(path)
    listing = files.listing(path, is_csv=True)
    assert {name: len(part) for name, part in listing.parts.items()} == {"train": 4, "unlabeled": 54, "test": 0,
                                                                         "valid": 0}
    read = files.listing(session.file, is_csv=True)  # what is excluded is so there, too
    assert [os.path.basename(file.path) for file in read.parts["train"]] == [session.names[n] for n in rest[:4]]
    assert (folder / "dataset.csv").read_text() == "mine"


def test_enough_random_images_are_halved_for_validation(tmp_path):
    session = Session(make_images(tmp_path / "many", [f"{k:04}.png" for k in range(300)]), ["cat", "dog"])
    held = [n for n in range(300) if session.random[n]][:20]
    for k, n in enumerate(held):
        session.label([n], ["cat", "dog"][k % 2], "order")
    session.label([n for n in range(300) if not session.random[n]][:9], "cat", "grid")
    session.label([n for n in range(300) if not session.random[n]][9:12], "dog", "grid")
    session.write_dataset(tmp_path / "dataset.csv")
    parts = files.listing(tmp_path / "dataset.csv", is_csv=True).parts
    assert (len(parts["train"]), len(parts["test"]), len(parts["valid"])) == (12, 10, 10)


def test_names_that_a_row_cannot_hold_are_left_out_and_told(tmp_path):
    folder = make_images(tmp_path / "odd", ["a.png", "b\n.png", " c.png", "<img onerror=x>.png", "d,\"e\".png"])
    session = Session(folder, ["cat"])
    assert session.names == ["<img onerror=x>.png", "a.png", "d,\"e\".png"]
    assert "Not used: 2 images whose names a CSV file cannot hold" in session.notes[0]
    session.label([2], "cat", "order")
    assert Session(folder).decided == session.decided


def test_labels_of_images_that_are_gone_are_kept(folder):
    session = Session(folder, ["cat"])
    session.label([0], "cat", "order")
    session.label([1], "cat", "order")
    (folder / "000.png").unlink()
    later = Session(folder)
    assert list(later.decided) == [0] and later.names[0] == "001.png" and "1 labelled images are gone" in later.notes[0]
    later.label([1], "cat", "order")
    assert [row[0] for row in rows(later)] == ["file", "000.png", "001.png", "002.png"]


def test_a_file_that_somebody_else_changed_is_not_overwritten(folder):
    session = Session(folder, ["cat"])
    session.label([0], "cat", "order")
    text = session.file.read_text() + "001.png,cat,train,order\n"
    session.file.write_text(text)
    with pytest.raises(UserError, match="changed by another program"):
        session.label([2], "cat", "order")
    assert session.file.read_text() == text and set(session.decided) == {0}
    assert set(Session(folder).decided) == {0, 1}


def test_a_file_that_a_spreadsheet_has_saved_is_read(folder):
    text = "\ufefffile,label,split,by\r\n000.png,cat,train,order\r\n,,,\r\n001.png,dog,test,random\r\n,,,\r\n"
    (folder / "labels.csv").write_bytes(text.encode())
    session = Session(folder)
    assert session.decided == {0: ("cat", "train", "order"), 1: ("dog", "test", "random")}


def test_a_pipe_is_no_file_of_labels(folder):
    os.mkfifo(folder / "labels.csv")
    with pytest.raises(UserError, match="it is no file"):
        Session(folder)


def test_folders_whose_names_have_blanks_around_are_classes(tmp_path):
    session = Session(make_images(tmp_path / "own", ["train/ cat/1.png", "train/dog /2.png", "excluded/dog/3.png"]))
    assert session.counts() == {"cat": 1, "dog": 1}


@pytest.mark.parametrize("text, message", [
    ("a,b\n1,2\n", "begins with 'a,b'"), ("file,label,colour\n", "begins with"), ("file,label\n000.png\n", "line 2"),
    ("file,label,split\n000.png,cat,holdout\n", "line 2"), ("file,label,split\n000.png,cat,excluded\n", "line 2"),
    ("file,label\n000.png,cat\n000.png,dog\n", "stands there twice"), ('file,label\n"000.png,cat\n', "as CSV"),
    ("file,label\n000.png,\xff\n".encode("latin-1"), "as CSV")])
def test_a_file_that_is_not_ours_is_refused_untouched(folder, text, message):
    file = folder / "labels.csv"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    before = file.read_bytes()
    with pytest.raises(UserError, match=message):
        Session(folder)
    assert file.read_bytes() == before


def test_a_label_that_cannot_be_written_is_not_kept(folder, monkeypatch):
    session = Session(folder, ["cat"])
    session.label([0], "cat", "order")

    def full(*_, **__):
        raise UserError("Cannot write: no space left on device")

    monkeypatch.setattr(sessions, "write_text", full)
    with pytest.raises(UserError, match="no space"):
        session.label([1], "cat", "order")
    assert set(session.decided) == {0} and set(Session(folder).decided) == {0}


LABEL = """
import sys
from pathlib import Path
from libml.labelling.session import Session, next_images
session = Session(Path(sys.argv[1]), ["cat", "dog"])
with session.hold():
    print("held", flush=True)
    k = len(session.decided)
    while images := next_images(session, [], 1):
        session.label(images, "cat" if k % 3 else "dog", "order")
        if k % 7 == 6:
            print("undone", session.undo()[0], flush=True)
            session.label(images, "dog", "order")
        print(images[0], session.decided[images[0]].label, flush=True)
        k += 1
"""


@pytest.mark.slow
def test_what_was_acknowledged_survives_kills(tmp_path):
    """Killed at five moments: every label that was told of is in the file, which is whole."""
    folder = make_images(tmp_path / "images", [f"{k:04}.png" for k in range(4000)])
    told: dict[str, str] = {}
    for k in range(5):
        process = subprocess.Popen([sys.executable, "-c", LABEL, str(folder)], cwd=ROOT, stdout=subprocess.PIPE,
                                   text=True)
        assert process.stdout.readline() == "held\n"
        time.sleep(0.11 + 0.077 * k)
        process.send_signal(signal.SIGKILL)
        lines = process.communicate()[0].splitlines()
        told |= dict(line.split() for line in lines if line[0].isdigit() and len(line.split()) == 2)
        session = Session(folder)
        kept = {str(n): decision.label for n, decision in session.decided.items()}
        assert told.items() <= kept.items()
        assert len(kept) <= len(told) + k + 1  # of each kill, at most one that was written and not told of
    assert len(told) > 20


def test_two_processes_are_refused(folder):
    process = subprocess.Popen([sys.executable, "-c", LABEL.replace("while", "import time; time.sleep(60)\n    while"),
                                str(folder)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="is being labelled by process"):
            with Session(folder).hold():
                pass
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
