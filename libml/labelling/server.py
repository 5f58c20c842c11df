"""The page's server: on this machine alone, for who has the token; images by number, changes as JSON."""
from __future__ import annotations

import hmac
import io
import ipaddress
import json
import os
import re
import secrets
import socket
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
from PIL import Image

from libml.data import sources
from libml.errors import UserError, printable
from libml.labelling import estimate
from libml.labelling.audit import Audit
from libml.labelling.learner import Learner
from libml.labelling.session import NotWritten, Session, checked_class, next_images
from libml.writing import writing

LARGEST = 1 << 20  # bytes of a request's body
AHEAD, PAGE = 12, 60  # images that the page knows of in advance, and those of a grid at a time
SIDES = {"large": 900, "small": 160}  # pixels, at most, of what is sent
IDLE = 30  # seconds that a connection may stand still


class Labelling:
    """What the page asks for and does: a session, its learner, the audit and the end."""

    def __init__(self, session: Session, learner: Learner, *, enough_gain: float = 1.0,
                 enough_accuracy: float | None = None, finish: Callable[[Callable[[str], None]], str] | None = None):
        self.session, self.learner = session, learner
        self.enough = enough_gain, enough_accuracy
        self.audit = Audit(session, learner)
        self._decoding = threading.Semaphore(2)  # an image may take half a gigabyte before it is refused
        self._estimate: tuple[object, dict] = None, {}
        self._finish, self.finishing, self.finished = finish, "", ""
        self.started = secrets.token_hex(4)  # by which a page knows that the numbers of images are others

    def state(self) -> dict:
        """All that the page shows beside images."""
        session, learner = self.session, self.learner
        with session.changed:
            now, known = learner.round, session.all()
            queue = []
            for n in next_images(session, now.ranking if now else [], AHEAD):
                hidden = session.random[n]  # nobody is to be led where accuracy is measured
                guess = None if now is None or hidden else now.guess(n)
                item: dict[str, Any] = {"n": n, "name": session.names[n], "random": hidden}
                if now and guess:
                    row = now.row[n]
                    item |= {"guess": guess[0], "p": guess[1], "alpha": float(now.size[row])}
                queue.append(item)
            labels = {n: decision for n, decision in known.items() if decision.label}
            truth = {n: decision.label for n, decision in labels.items() if decision.by == "random"}
            counts = session.counts()
            answer = {
                "started": self.started, "folder": session.folder.resolve().name,
                "classes": [{"name": name, "count": counts[name]} for name in session.classes],
                "files": len(session.names), "labelled": len(labels), "none": len(known) - len(labels),
                "skipped": len(session.skipped), "unreadable": [[session.names[n], reason] for n, reason in
                                                                list(session.unreadable.items())[:5]],
                "unreadable_count": len(session.unreadable), "queue": queue, "undo": session.undoable,
                "notes": session.notes, "problem": learner.problem, "busy": learner.busy,
                "learned": now.labels if now else 0, "finishing": self.finishing, "finished": self.finished}
        title, done, total = learner.progress or ("", 0, 0)
        basis = learner.points, truth
        if self._estimate[0] != basis:  # it takes longer than all else
            self._estimate = basis, estimate.summary(*basis, *self.enough)
        return answer | {"progress": {"title": title, "done": done, "of": total},
                         "estimate": self._estimate[1] | {"one_class": learner.one_class}}

    def closed(self, shown: str) -> dict:
        """Tells a page that the image which it shows was labelled in another one."""
        n = _number(shown) if shown else -1
        return {"closed": n} if 0 <= n < len(self.session.names) and not self.session.open(n) else {}

    def grid(self, name: str, start: int) -> dict:
        """Unlabelled images that the model takes for one class, the surest first; none of the random part."""
        now, session = self.learner.round, self.session
        if now is None or name not in now.classes:
            return {"items": [], "total": 0}
        with session.changed:
            c, best = now.classes.index(name), now.probabilities.argmax(1)
            rows = (best == c).nonzero()[0]
            rows = [i for i in rows[np.lexsort((-now.probabilities[rows, c], now.size[rows]))]
                    if session.open(int(now.numbers[i])) and not session.random[int(now.numbers[i])]]
            return {"total": len(rows), "items": [
                {"n": int(now.numbers[i]), "name": session.names[int(now.numbers[i])],
                 "p": float(now.probabilities[i, c]), "alpha": float(now.size[i])} for i in rows[start:start + PAGE]]}

    def act(self, request: dict) -> dict:
        """Does what the page asks for, and returns the state after it."""
        session, kind = self.session, request.get("act")
        if kind == "label":
            session.label(self._numbers(request), request.get("label") or "", str(request.get("by"))
                          if request.get("by") in ("order", "grid", "audit") else "order")
        elif kind == "skip":
            for n in self._numbers(request):
                session.skip(n)
        elif kind == "undo":
            return {"undone": session.undo(), **self.state()}
        elif kind == "add":
            session.add_class(str(request.get("name") or ""))
        elif kind == "rename":
            old, new = str(request.get("name")), checked_class(str(request.get("to") or ""))
            with session.changed:
                session.rename_class(old, new)
                self.learner.rename(old, new)
        elif kind == "audit":
            self.audit.start()
        elif kind == "finish":
            self._start_finish()
        else:
            raise UserError(f"The page asked for {str(kind)[:40]!r}, which is not known here.")
        return self.state()

    def _numbers(self, request: dict) -> list[int]:
        """The images that a request names: by name, as numbers are others after the next start."""
        files = request.get("files")
        if not isinstance(files, list) or not all(isinstance(name, str) for name in files):
            raise UserError("The page named no images. Load it again.")
        if gone := [name for name in files if name not in self.session.numbers]:
            raise UserError(f"{gone[0]} is not here any longer; its label was not saved.")
        return [self.session.numbers[name] for name in files]

    def _start_finish(self) -> None:
        """Runs the end in a thread of its own; the learner leaves the processor to it."""
        with self.session.changed:
            if self._finish is None or self.finishing:
                return
            finish, self.finishing, self.finished, self.learner.paused = self._finish, "starting", "", True

        def tell(line: str) -> None:
            self.finishing = line

        def work() -> None:
            try:
                self.finished = finish(tell)
            except Exception as error:  # the page goes on
                self.finished = f"error: {error}"
                print(printable(self.finished), file=sys.stderr, flush=True)
            finally:
                with self.session.changed:
                    self.finishing, self.learner.paused = "", False
                    self.session.changed.notify_all()

        threading.Thread(target=work, daemon=True, name="finish").start()

    def image(self, n: int, side: int) -> tuple[bytes, str]:
        """Returns an image as a browser can show it, upright and no larger than asked for."""
        try:
            path = self.session.path(n)
            if not path.is_file():  # a pipe would never end
                raise OSError("it is gone, or no file")
            with self._decoding, warnings.catch_warnings(), Image.open(path) as image:
                warnings.simplefilter("ignore")
                image.draft("RGB", (side, side))  # JPEG files decode at a fraction of their size
                shown = sources.upright(image)
                shown.thumbnail((side, side))
                out, small = io.BytesIO(), max(shown.size) <= SIDES["small"]
                shown.save(out, "PNG" if small else "JPEG", quality=88)
                return out.getvalue(), "image/png" if small else "image/jpeg"
        except Exception as error:  # Pillow raises many types for damaged files
            reason = (str(error) or type(error).__name__).splitlines()[0][:200]
            self.session.set_unreadable({n: reason})
            raise UserError(f"{self.session.names[n]} cannot be read: {reason}") from error


class _Handler(BaseHTTPRequestHandler):
    """One request: who asks is checked before anything else."""

    protocol_version, timeout = "HTTP/1.1", IDLE
    server_version, sys_version = "cssl-label", ""
    server: Server

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _answer(self, handle: Callable[[list[str], dict], tuple[bytes, str]]) -> None:
        try:
            if (refused := self._refusal()):
                self._send(403, json.dumps({"error": refused}).encode(), "application/json")
                return
            parts = urlsplit(self.path)
            token, *path = parts.path.split("/")[1:]
            if not hmac.compare_digest(token.encode(), self.server.token.encode()):
                self._send(404, b'{"error": "Open the address that cssl-label printed."}', "application/json")
                return
            self._send(200, *handle(path, parse_qs(parts.query)))
        except UserError as error:  # what could not be written, the page sends again
            self._send(503 if isinstance(error, NotWritten) else 400, json.dumps({"error": str(error)}).encode(),
                       "application/json")
        except (BrokenPipeError, ConnectionResetError, TimeoutError):
            self.close_connection = True
        except Exception as error:  # of ours: the page goes on
            print(f"error: {self.command} {printable(urlsplit(self.path).path[-60:])}: {type(error).__name__}: "
                  f"{printable(error)[:300]}", file=sys.stderr, flush=True)
            self._send(500, json.dumps({"error": f"{type(error).__name__}: {error}"[:300]}).encode(),
                       "application/json")

    def _refusal(self) -> str:
        """Why a request is not answered, whatever token it has: another site's page may have sent it."""
        host = ""
        with suppress(ValueError):
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        if not is_own_name(host, self.server.local):
            return f"The host {host[:60]!r} is not this machine."
        origin = self.headers.get("Origin")
        if origin is not None and origin != f"http://{self.headers.get('Host')}":
            return "Another page asked for this."
        if self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin") and not (
                self.command == "GET" and self.headers.get("Sec-Fetch-Dest") == "document"):  # a link that was clicked
            return "Another page asked for this."
        return ""

    def _get(self, path: list[str], query: dict) -> tuple[bytes, str]:
        labelling = self.server.labelling
        if path == [""]:
            return self.server.page, "text/html; charset=utf-8"
        if path == ["state"]:
            return _json(labelling.state() | labelling.closed(query.get("n", [""])[0]))
        if path == ["grid"]:
            return _json(labelling.grid(query.get("class", [""])[0], _number(query.get("start", ["0"])[0])))
        if path == ["audit"]:
            return _json(labelling.audit.found())
        if len(path) == 2 and path[0] in SIDES:
            n = _number(path[1])
            if n < len(labelling.session.names):
                return labelling.image(n, SIDES[path[0]])
        raise UserError("There is nothing at this address.")

    def _post(self, path: list[str], query: dict) -> tuple[bytes, str]:
        del query
        size = _number(self.headers.get("Content-Length", ""))
        if path != ["do"] or self.headers.get_content_type() != "application/json" or size > LARGEST:
            self.close_connection = True
            raise UserError(f"Expected JSON of at most {LARGEST} bytes.")
        try:
            request = json.loads(self.rfile.read(size))
        except (ValueError, RecursionError) as error:
            raise UserError(f"The request is no JSON ({error}).") from error
        if not isinstance(request, dict):
            raise UserError("The request is no JSON object.")
        return _json(self.server.labelling.act(request))

    def _send(self, status: int, body: bytes, kind: str) -> None:
        if status != 200:
            self.close_connection = True  # of what was sent along nothing is read
        self.send_response(status)
        for name, value in {
                "Content-Type": kind, "Content-Length": str(len(body)), "Cache-Control": "no-store"
                if not kind.startswith("image") else "private, max-age=3600", "X-Content-Type-Options": "nosniff",
                "Referrer-Policy": "no-referrer", "Cross-Origin-Resource-Policy": "same-origin",
                "X-Frame-Options": "DENY", "Content-Security-Policy":
                "default-src 'none'; img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
                f"frame-ancestors 'none'; script-src 'nonce-{self.server.nonce}'; "
                f"style-src 'nonce-{self.server.nonce}'"}.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Requests are many, and of no interest."""


def _json(answer: dict) -> tuple[bytes, str]:
    return json.dumps(answer, ensure_ascii=False).encode("utf-8", "replace"), "application/json"


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or len(text) > 12:
        raise UserError(f"Expected a number, got {text[:40]!r}.")
    return int(text)


def is_own_name(host: str, local: bool) -> bool:
    """Whether a request's host is an address, which no foreign site can have as its name, or the name of this machine;
    of a `local` server only that of the loopback."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return not local and host == socket.gethostname()
    return address.is_loopback or not local


def _kept(address: Path) -> tuple[str, int] | None:
    """The token and port of the last start, if nobody else can know them."""
    with suppress(OSError, ValueError, TypeError):
        token, port = json.loads(address.read_text())
        if not address.stat().st_mode & 0o077 and re.fullmatch(r"[\w-]{22}", token, re.ASCII) and 0 < port < 1 << 16:
            return token, int(port)
    return None


class Server(ThreadingHTTPServer):
    """Serves the page of a labelling until `shutdown`."""

    daemon_threads = True

    def __init__(self, labelling: Labelling, host: str = "127.0.0.1", port: int = 0, address: Path | None = None):
        """Serves at the address that the file tells, where it can: a page that is open goes on after the next start."""
        self.labelling = labelling
        self.token, self.nonce = secrets.token_urlsafe(16), secrets.token_urlsafe(16)
        kept = _kept(address) if address else None
        if kept:
            self.token = kept[0]
        self.page = resources.files("libml.labelling").joinpath("page.html").read_text(encoding="utf-8").replace(
            "NONCE", self.nonce).encode()
        try:
            self.local = host == "localhost" or ipaddress.ip_address(host).is_loopback
            self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            try:
                super().__init__((host, port or (kept[1] if kept else 0)), _Handler)
            except OSError:
                if port or not kept:
                    raise
                super().__init__((host, 0), _Handler)  # another one has that port now
        except (OSError, ValueError, OverflowError) as error:
            raise UserError(f"Cannot serve at --host={host} --port={port} ({error}). Take another port, or 0 for any "
                            "free one.") from error
        if address:
            with writing(address):
                address.parent.mkdir(exist_ok=True)
                address.unlink(missing_ok=True)
                with open(os.open(address, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                    json.dump([self.token, self.server_address[1]], file)

    @property
    def address(self) -> str:
        host = "127.0.0.1" if self.server_address[0] in ("0.0.0.0", "::") else str(self.server_address[0])
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_address[1]}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that broke is none of the user's concern."""
