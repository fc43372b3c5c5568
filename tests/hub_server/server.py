"""A small Hub on the loopback address, for the real huggingface_hub: `hub` is one for a test.

It answers what huggingface_hub 2.4 asks for (its hf_api, file_download, lfs and _commit_api), with the statuses and
headers of huggingface.co: repositories and trees, files by redirect (small ones on the same host, LFS ones at a CDN of
another origin, which wants no token), uploads through LFS and commits. It has no Xet: `environment` turns that off.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.hub_server.handler import Fault, Faults, HubHandler, Request, Route
from tests.hub_server.repositories import Blob, Repository, files_of
from tests.hub_server.routes import CDN, HUB

TOKEN = "hf_" + "w" * 34  # writes as `ada`
READER = "hf_" + "r" * 34  # only reads, as `rob`


@dataclass(frozen=True)
class User:
    """Whose token it is, and whether it may write."""

    name: str
    write: bool


class Hub:
    """The server: `add` gives it repositories, `fail` makes it fail, `downloads` and `requests` say what was asked."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.users = {TOKEN: User("ada", write=True), READER: User("rob", write=False)}
        self.stored: dict[str, Blob] = {}  # LFS contents that no commit has yet, by sha256
        self.requests: list[Request] = []
        self.faults = Faults()
        self.lock = threading.RLock()
        self.closing = threading.Event()
        self._servers = [serve(self, HUB), serve(self, CDN, wants_token=False)]
        self.url, self.cdn = (f"http://127.0.0.1:{server.server_port}" for server in self._servers)

    def close(self) -> None:
        """Answer nothing more: from here on, connections are refused."""
        self.closing.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()

    @property
    def environment(self) -> dict[str, str]:
        """What sends huggingface_hub here, with an empty cache of the test's own and without a token."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(self.home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "NO_PROXY": "127.0.0.1",
        }

    def add(
        self,
        name: str,
        files: Path | Mapping[str, bytes | str],
        *,
        kind: str = "model",
        private: bool = False,
        gated: bool = False,
        readers: tuple[str, ...] = (),
    ) -> Repository:
        """A repository of a folder's files, or of contents by name, in its first commit.

        A private one is its owner's; a gated one opens to its owner and to `readers`, by the users' names.
        """
        repository = Repository(name, kind, private=private, gated=gated, readers=set(readers))
        repository.commit(files_of(files), "first commit")
        self.repositories[kind, name] = repository
        return repository

    def fail(self, path: str, **fault: object) -> None:
        """Go wrong for requests whose path (with `*`) fits; the words are those of `Fault`."""
        self.faults.add(Fault(path, **fault))  # type: ignore[arg-type]

    def repository(self, name: str, kind: str = "model") -> Repository:
        """A repository that was added or created."""
        return self.repositories[kind, name]

    def contents(self, name: str, file: str) -> list[Request]:
        """The requests that got the content of a file, or a part of it."""
        with self.lock:
            found = [request for request in self.requests if (request.repository, request.file) == (name, file)]
        return [request for request in found if request.method == "GET" and request.status in (200, 206)]

    def downloads(self, name: str, file: str) -> int:
        """How often the content of a file, or a part of it, was got."""
        return len(self.contents(name, file))

    def sent(self, name: str, file: str) -> int:
        """Bytes of a file's content that were sent, over all requests."""
        return sum(request.sent for request in self.contents(name, file))


def serve(hub: Hub, routes: Sequence[Route], *, wants_token: bool = True) -> ThreadingHTTPServer:
    """A server of `routes` on a free port, in a thread of its own."""
    handler = type("Handler", (HubHandler,), {"hub": hub, "routes": routes, "wants_token": wants_token})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    return server


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """A Hub of the test's own, empty at first."""
    server = Hub(tmp_path / "hf")
    yield server
    server.close()
