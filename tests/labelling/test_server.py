"""The page's server: what it answers, to whom, and that nothing else gets in or out."""
import http.client
import json
import os
import stat
import threading
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import round_of
from PIL import Image

from libml.errors import UserError
from libml.labelling.estimate import Point
from libml.labelling.learner import Learner
from libml.labelling.server import LARGEST, Labelling, Server, is_own_name
from libml.labelling.session import Session


@pytest.fixture
def session(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    for k in range(40):
        Image.new("RGB", (8, 8), (k * 6, 0, 0)).save(folder / f"{k:02}.png")
    Image.new("L", (2000, 1000)).save(folder / "large.jpg")
    Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8) * 900).save(folder / "deep.tif")
    (folder / "broken.png").write_bytes(b"\x89PNG nothing")
    (folder / "<img src=x onerror=alert(1)>.png").write_bytes((folder / "00.png").read_bytes())
    return Session(folder, ["cat", "dog"])


@pytest.fixture
def served(session):
    learner = SimpleNamespace(round=None, points=[], progress=None, problem="", busy=False, one_class=None, heads=None,
                              paused=False)
    learner.rename = partial(Learner.rename, learner)
    server = Server(Labelling(session, learner, finish=lambda tell: "finished"))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def ask(server: Server, path: str, body: object = None, method: str = "", token: str | None = None, **headers):
    """Returns status, headers and body of an answer; JSON is read."""
    port = server.server_address[1]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    if raw is not None:
        headers = {"Content-Type": "application/json"} | headers
    try:
        connection.request(method or ("GET" if raw is None else "POST"),
                           f"/{server.token if token is None else token}/{path}", raw,
                           {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        content = answer.read()
    finally:
        connection.close()
    is_json = answer.headers["Content-Type"] == "application/json"
    return answer.status, answer.headers, json.loads(content) if is_json else content


def test_a_label_is_in_the_file_when_it_is_answered(served, session):
    n = ask(served, "state")[2]["queue"][0]["n"]
    status, _, state = ask(served, "do", {"act": "label", "files": [session.names[n]], "label": "cat", "by": "order"})
    assert status == 200 and state["labelled"] == 1 and n not in [item["n"] for item in state["queue"]]
    assert session.file.read_text().splitlines()[1] == f"{session.names[n]},cat,train,order"
    assert ask(served, "do", {"act": "undo"})[2]["queue"][0]["n"] == n
    assert len(session.file.read_text().splitlines()) == 1


def test_classes_and_skips(served):
    state = ask(served, "do", {"act": "add", "name": "bird"})[2]
    assert [entry["name"] for entry in state["classes"]] == ["cat", "dog", "bird"]
    state = ask(served, "do", {"act": "rename", "name": "bird", "to": "owl"})[2]
    assert [entry["name"] for entry in state["classes"]] == ["cat", "dog", "owl"]
    first = state["queue"][0]["name"]
    assert ask(served, "do", {"act": "skip", "files": [first]})[2]["queue"][0]["name"] != first


def test_suggestions_but_not_where_accuracy_is_measured(served, session):
    served.labelling.learner.round = now = round_of(session)
    queue = ask(served, "state")[2]["queue"]
    assert [item["n"] for item in queue[:5]] == now.ranking[:5]
    assert {item["random"] for item in queue} == {True, False}
    for item in queue:
        assert ("guess" in item) != item["random"]
    items = ask(served, "grid?class=cat")[2]["items"]
    assert items and all(item["n"] % 2 == 0 and not session.random[item["n"]] for item in items)
    assert [item["alpha"] for item in items] == sorted(item["alpha"] for item in items)  # the unsure last
    names = [item["name"] for item in items[1:]]
    ask(served, "do", {"act": "label", "files": names, "label": "cat", "by": "grid"})
    assert [item["n"] for item in ask(served, "grid?class=cat")[2]["items"]] == [items[0]["n"]]
    assert ask(served, "grid?class=unknown")[2]["total"] == 0


def test_pictures_are_served_by_number_upright_and_small(served, session):
    for name, kind in (("00.png", "image/png"), ("large.jpg", "image/jpeg"), ("deep.tif", "image/png")):
        status, headers, body = ask(served, f"large/{session.numbers[name]}")
        assert (status, headers["Content-Type"]) == (200, kind) and len(body) == int(headers["Content-Length"])
    status, headers, body = ask(served, f"small/{session.numbers['large.jpg']}")
    (session.folder / "shown").write_bytes(body)
    with Image.open(session.folder / "shown") as shown:
        assert shown.size == (160, 80)
    number = session.numbers["broken.png"]
    status, _, answer = ask(served, f"large/{number}")
    assert status == 400 and "broken.png cannot be read" in answer["error"] and not session.open(number)
    (session.folder / "01.png").unlink()
    assert ask(served, f"large/{session.numbers['01.png']}")[0] == 400
    state = ask(served, "state")[2]
    assert state["unreadable_count"] == 2 and not {number, session.numbers["01.png"]} & {
        item["n"] for item in state["queue"]}


def test_a_pipe_in_the_place_of_an_image_is_left_out(served, session):
    (session.folder / "02.png").unlink()
    os.mkfifo(session.folder / "02.png")
    assert "no file" in ask(served, f"large/{session.numbers['02.png']}")[2]["error"]


def test_a_page_hears_that_its_image_was_labelled_in_another(served, session):
    n = ask(served, "state")[2]["queue"][0]["n"]
    assert "closed" not in ask(served, f"state?n={n}")[2]
    session.label([n], "cat", "order")
    assert ask(served, f"state?n={n}")[2]["closed"] == n


def test_a_renamed_class_is_suggested_and_measured_by_its_new_name(served, session):
    learner = served.labelling.learner
    learner.round, learner.points = round_of(session), [Point(10, {0: "cat", 1: "dog"}, {0: "cat", 1: "cat"})]
    ask(served, "do", {"act": "rename", "name": "cat", "to": " lion "})
    assert learner.round.classes == ["lion", "dog"]
    assert learner.points[0].predicted == {0: "lion", 1: "dog"} and set(learner.points[0].alone.values()) == {"lion"}
    state = ask(served, "do", {"act": "rename", "name": "dog", "to": "lion"})[2]
    assert learner.round.classes == ["lion"] and np.allclose(learner.round.probabilities, 1)  # sums of two halves
    assert {item.get("guess", "lion") for item in state["queue"]} == {"lion"}


def test_the_next_start_has_the_same_address_so_that_an_open_page_goes_on(served, tmp_path):
    file = tmp_path / "address.json"
    with Server(served.labelling, address=file) as first:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        with Server(served.labelling, address=file) as other:  # the port is taken meanwhile
            assert other.token == first.token and other.server_address != first.server_address
        file.write_text(json.dumps([first.token, first.server_address[1]]))
    with Server(served.labelling, address=file) as second:
        assert second.address == first.address and second.nonce != first.nonce
    file.chmod(0o644)  # others may have read it
    with Server(served.labelling, address=file) as third:
        assert third.token != first.token


@pytest.mark.parametrize("text", ["", "[]", '["x", 80]', '[1, 2]', '["aaaaaaaaaaaaaaaaaaaaaa", 1e9]', "{}"])
def test_a_damaged_address_is_made_anew(served, tmp_path, text):
    file = tmp_path / "address.json"
    file.touch(0o600)
    file.write_text(text)
    with Server(served.labelling, address=file) as server:
        assert json.loads(file.read_text()) == [server.token, server.server_address[1]] and len(server.token) == 22


@pytest.mark.parametrize("path", ["large/999999", "large/-1", "large/..%2f..%2fetc%2fpasswd", "../../etc/passwd",
                                  "large/00.png", "nothing", "large/1/2", "large/%D9%A3", "grid?start=x"])
def test_there_is_nothing_else(served, path):
    status, _, answer = ask(served, path)
    assert status in (400, 404) and answer["error"]


@pytest.mark.parametrize("headers", [
    {"Host": "evil.example"}, {"Host": "evil.example:80"}, {"Host": ""}, {"Host": "192.168.1.7"}, {"Host": "[::ffff"},
    {"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec_Fetch_Site": "cross-site"},
    {"Sec_Fetch_Site": "same-site"}])
@pytest.mark.parametrize("body", [None, {"act": "label", "files": ["00.png"], "label": "cat"}])
def test_other_pages_and_other_names_are_refused(served, session, headers, body):
    """A page of another site that has learned the token, by its own name or by one that resolves to this machine."""
    status, answered, answer = ask(served, "state" if body is None else "do", body, **headers)
    assert status == 403 and not session.decided and "queue" not in answer
    assert "Access-Control-Allow-Origin" not in answered


def test_its_own_page_is_answered(served):
    own = f"http://127.0.0.1:{served.server_address[1]}"
    assert ask(served, "do", {"act": "undo"}, Origin=own, Sec_Fetch_Site="same-origin")[0] == 200
    assert ask(served, "", Sec_Fetch_Site="cross-site", Sec_Fetch_Dest="document")[0] == 200  # a link to it
    status, headers, page = ask(served, "")
    assert status == 200 and served.nonce.encode() in page and b"NONCE" not in page
    assert "default-src 'none'" in headers["Content-Security-Policy"] and headers["X-Frame-Options"] == "DENY"
    assert b"http://" not in page.replace(b"http://www.w3.org/2000/svg", b"") and b"https://" not in page


@pytest.mark.parametrize("token", ["", "x", "a" * 5000, "%00", "%C3%A9"])
def test_without_the_token_nothing_is_told(served, token):
    status, _, answer = ask(served, "state", token=token)
    assert status == 404 and answer == {"error": "Open the address that cssl-label printed."}


@pytest.mark.parametrize("body", [
    b"", b"{", b"[]", b"[" * 100_000, {"act": "none such"}, {"act": "label", "files": ["gone.png"], "label": "cat"},
    {"act": "label", "files": [1], "label": "cat"}, {"act": "label", "files": "00.png", "label": "cat"},
    {"act": "label", "files": ["../images/00.png"], "label": "cat"},
    {"act": "label", "files": ["00.png"], "label": "no such class"}, {"act": "add", "name": "a\nb"},
    {"act": "rename", "name": "no such", "to": "cat"}])
def test_requests_that_make_no_sense_change_nothing(served, session, body):
    status, _, answer = ask(served, "do", body)
    assert status == 400 and answer["error"] and not session.decided and session.classes == ["cat", "dog"]


def test_bodies_are_limited_and_of_one_type(served):
    assert ask(served, "do", b"{}", Content_Type="text/plain")[0] == 400  # what a form of another site can send
    assert ask(served, "do", b"{}", Content_Length=str(LARGEST + 1))[0] == 400
    assert ask(served, "do", b"{}", Content_Length="many")[0] == 400
    assert ask(served, "state", method="DELETE")[0] == 501


def test_a_full_disk_is_told_and_the_label_can_be_sent_again(served, session, monkeypatch):
    from libml.labelling import session as sessions

    def full(*_, **__):
        raise UserError("Cannot write labels.csv (No space left on device).")

    monkeypatch.setattr(sessions, "write_text", full)
    status, _, answer = ask(served, "do", {"act": "label", "files": ["00.png"], "label": "cat"})
    assert status == 503 and "No space left" in answer["error"] and not session.decided
    monkeypatch.undo()
    assert ask(served, "do", {"act": "label", "files": ["00.png"], "label": "cat"})[2]["labelled"] == 1


@pytest.mark.parametrize("host, local, own", [
    ("localhost", True, True), ("127.0.0.1", True, True), ("127.9.9.9", True, True), ("::1", True, True),
    ("10.0.0.7", True, False), ("10.0.0.7", False, True), ("evil.example", True, False), ("evil.example", False, False),
    ("127.0.0.1.evil.example", True, False), ("", True, False)])
def test_which_hosts_are_this_machine(host, local, own):
    assert is_own_name(host, local) == own


def test_a_port_that_is_taken_is_one_line(served, session):
    with pytest.raises(UserError, match="Cannot serve at --host=127.0.0.1 --port="):
        Server(served.labelling, port=served.server_address[1])
    with pytest.raises(UserError, match="Cannot serve at --host=nowhere.invalid"):
        Server(served.labelling, host="nowhere.invalid")


def test_finishing_is_told(served):
    ask(served, "do", {"act": "finish"})
    for _ in range(200):
        state = ask(served, "state")[2]
        if state["finished"]:
            break
    assert state["finished"] == "finished" and not state["finishing"] and not served.labelling.learner.paused


def test_a_failure_to_finish_is_told_and_labelling_goes_on(served, capsys):
    def fails(tell):
        raise RuntimeError("no such luck")

    served.labelling._finish = fails
    ask(served, "do", {"act": "finish"})
    for _ in range(200):
        state = ask(served, "state")[2]
        if not state["finishing"]:
            break
    assert state["finished"] == "error: no such luck" and not served.labelling.learner.paused
    assert "no such luck" in capsys.readouterr().err
