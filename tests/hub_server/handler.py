"""A connection to the tests' Hub: who asks, which route answers, how contents are sent, and the faults of both."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.hub_server.repositories import Blob, Commit, Repository

if TYPE_CHECKING:
    from tests.hub_server.server import Hub, User

PIECE = 64 * 1024


Route = tuple[str, str, Callable[..., None]]  # method, pattern of the path, what answers


@dataclass
class Fault:
    """Something that goes wrong for requests whose path matches; `times` counts down, None is for ever."""

    path: str
    method: str = "*"
    times: int | None = 1
    status: int | None = None  # answered in place of anything else: 429, 500, 503
    hangs: bool = False  # no answer comes before the Hub is closed
    cut_after: int | None = None  # bytes of a content, sent or (PUT, POST) received, after which the connection closes
    corrupt: bool = False  # a content of the right size that does not fit its checksum
    bytes_per_second: int | None = None

    def of_content(self) -> bool:
        """Whether it needs a content to spoil; a `status` needs none, or no answer."""
        return self.status is None and not self.hangs


@dataclass
class Request:
    """A request that was answered; `repository` and `file` are of those that ask for a file's content."""

    method: str
    path: str
    user: str | None
    range: str | None = None
    repository: str = ""
    file: str = ""
    status: int = 0
    sent: int = 0  # bytes of the body


class Faults:
    """The faults in force, taken in their order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[Fault] = []

    def add(self, fault: Fault) -> None:
        with self._lock:
            self._waiting.append(fault)

    def clear(self) -> None:
        """From here on all goes well."""
        with self._lock:
            self._waiting.clear()

    def take(self, method: str, path: str, *, of_content: bool) -> Fault | None:
        """The first fault for this request, counted down."""
        with self._lock:
            for fault in self._waiting:
                fits = fault.method in ("*", method) and fnmatchcase(path, fault.path)
                if fits and fault.of_content() == of_content:
                    if fault.times is not None:
                        fault.times -= 1
                    if fault.times == 0:
                        self._waiting.remove(fault)
                    return fault
        return None


class Refusal(Exception):
    """An answer that says no, as huggingface.co says it."""

    def __init__(self, status: int, message: str, code: str = "", **headers: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.headers = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {}), **headers}


class HubHandler(BaseHTTPRequestHandler):
    """One connection: finds the route, and sends what it answers."""

    hub: Hub
    routes: Sequence[Route]
    wants_token = True
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: `hub.requests` keeps them."""

    def answer(self) -> None:
        """Answer one request, of any method."""
        self.query = parse_qs(urlsplit(self.path).query)
        path = urlsplit(self.path).path
        self.request_kept = Request(self.command, path, user=None, range=self.headers.get("Range"))
        with self.hub.lock:
            self.hub.requests.append(self.request_kept)
        try:
            self.body = self.received(path)
            self.route(path)
        except Refusal as no:
            self.send_json({"error": no.message}, no.status, no.headers)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    do_GET = do_HEAD = do_POST = do_PUT = answer

    def route(self, path: str) -> None:
        if fault := self.hub.faults.take(self.command, path, of_content=False):
            if fault.hangs:
                self.hub.closing.wait()
                raise ConnectionResetError
            assert fault.status is not None
            raise Refusal(fault.status, "Too many requests" if fault.status == 429 else "Something went wrong")
        self.user = self.authenticated()
        self.request_kept.user = self.user.name if self.user else None
        method = "GET" if self.command == "HEAD" else self.command
        for wanted, pattern, function in self.routes:
            if wanted == method and (found := re.fullmatch(pattern, path)):
                function(self, **{name: unquote(text or "") for name, text in found.groupdict().items()})
                return
        raise Refusal(404, f"Cannot {self.command} {path}")

    def authenticated(self) -> User | None:
        told = self.headers.get("Authorization")
        if told is None:
            return None
        if not self.wants_token:
            raise Refusal(400, "Only one auth mechanism allowed")
        user = self.hub.users.get(told.removeprefix("Bearer "))
        if user is None:
            raise Refusal(401, "Invalid credentials in Authorization header")
        return user

    def received(self, path: str) -> bytes:
        """The request's body, with the faults that are in force."""
        uploads = self.command in ("POST", "PUT")
        fault = (self.hub.faults.take(self.command, path, of_content=True) if uploads else None) or Fault("")
        body = bytearray()
        for piece in self.pieces():
            body += piece
            if fault.cut_after is not None and len(body) >= fault.cut_after:
                self.close_connection = True
                raise ConnectionResetError
            if fault.bytes_per_second and self.hub.closing.wait(len(piece) / fault.bytes_per_second):
                raise ConnectionResetError
        return bytes(body)

    def pieces(self) -> Iterator[bytes]:
        """What the body brings; without a length when httpx sends a file that it reads."""
        chunked = self.headers.get("Transfer-Encoding") == "chunked"
        while size := int(self.rfile.readline(), 16) if chunked else int(self.headers.get("Content-Length") or 0):
            for at in range(0, size, PIECE):
                yield self.rfile.read(min(PIECE, size - at))
            if not chunked:
                return
            self.rfile.readline()
        if chunked:
            self.rfile.readline()

    def json(self) -> Any:
        return json.loads(self.body)

    def send_json(self, value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        self.send(json.dumps(value).encode(), status, {"Content-Type": "application/json", **(headers or {})})

    def send(self, body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        self.request_kept.status = status
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_content(self, held: Blob, headers: Mapping[str, str]) -> None:
        """A file's content, or the range that was asked for, with the faults that are in force."""
        size, start, stop = len(held.content), 0, len(held.content)
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.request_kept.range or "")
        if asked:
            start, stop = int(asked[1]), min(int(asked[2] or size - 1) + 1, size)
            if start >= size:
                raise Refusal(416, "Requested range not satisfiable", **{"Content-Range": f"bytes */{size}"})
        self.request_kept.status = 206 if asked else 200
        self.send_response(self.request_kept.status)
        told = {"ETag": f'"{held.etag}"', "Accept-Ranges": "bytes", **headers}
        told |= {"Content-Range": f"bytes {start}-{stop - 1}/{size}"} if asked else {}
        for name, value in {**told, "Content-Length": str(stop - start)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            fault = self.hub.faults.take(self.command, self.request_kept.path, of_content=True)
            self.send_pieces(held.content[start:stop], fault or Fault(""))

    def send_pieces(self, content: bytes, fault: Fault) -> None:
        if fault.corrupt:
            content = bytes([content[0] ^ 255]) + content[1:]
        end = len(content) if fault.cut_after is None else fault.cut_after
        piece = min(PIECE, max(1, fault.bytes_per_second // 10)) if fault.bytes_per_second else PIECE
        for at in range(0, end, piece):
            part = content[at : min(at + piece, end)]
            self.request_kept.sent += len(part)
            self.wfile.write(part)
            if fault.bytes_per_second and self.hub.closing.wait(len(part) / fault.bytes_per_second):
                break
        self.close_connection = self.close_connection or end < len(content)

    def repository(self, kind: str, name: str) -> Repository:
        """A repository that this user may know of; 401 without a token, as for one that is not there."""
        found = self.hub.repositories.get((kind, name))
        if found is None or (found.private and not owns(self.user, found)):
            if self.user is None:
                raise Refusal(401, "Invalid username or password.", "RepoNotFound")
            raise Refusal(404, "Repository not found", "RepoNotFound")
        return found

    def commit_of(self, repository: Repository, revision: str) -> Commit:
        commit = repository.at(revision)
        if commit is None:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit

    def admitted(self, repository: Repository) -> None:
        """Whether this user may read the files of a gated repository."""
        if not repository.gated or owns(self.user, repository):
            return
        told = f"Access to {repository.kind} {repository.name} is restricted"
        if self.user is None:
            raise Refusal(401, f"{told}. You must have access to it and be authenticated to access it.", "GatedRepo")
        if self.user.name not in repository.readers:
            raise Refusal(403, f"{told} and you are not in the authorized list.", "GatedRepo")

    def writable(self, kind: str, name: str) -> Repository:
        repository = self.repository(kind, name)
        if self.user is None:
            raise Refusal(401, "Invalid username or password.")
        if not (self.user.write and owns(self.user, repository)):
            raise Refusal(403, "Authorization error. You don't have the rights to write to this repository")
        return repository


def owns(user: User | None, repository: Repository) -> bool:
    """Whether a user's repository it is: there are no organizations here."""
    return user is not None and repository.name.split("/")[0] == user.name
