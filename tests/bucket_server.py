"""moto's server for S3 on a port of this machine, whose requests a test sees, holds and loses."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:
    from werkzeug.serving import BaseWSGIServer

SECRET = "wJalrXUtnFEMI-bPxRfiCYEXAMPLEKEY-of-a-test"
BUCKET = "bucket"


class Seen(NamedTuple):
    """One request."""

    method: str
    path: str
    query: str
    range: str


class BucketServer:
    """A server with one bucket. requests: all that have come, in order."""

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        self.requests: list[Seen] = []
        self.held = threading.Event()  # one of the lost requests has come
        self._lost: re.Pattern[str] | None = None
        self._released = threading.Event()
        self._app: Callable[..., Iterable[bytes]] = DomainDispatcherApplication(create_backend_app)
        self._server: BaseWSGIServer = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which s3fs finds it."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server.server_port}",
            "AWS_ACCESS_KEY_ID": "AKIA-of-a-test",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def lose(self, pattern: str) -> None:
        """Hold the requests (`PUT /bucket/…`) that match until `release`; they are never carried out."""
        self._released.clear()
        self.held.clear()
        self._lost = re.compile(pattern)

    def refuse(self, pattern: str) -> None:
        """Answer the requests that match with 403, until `release`."""
        self.lose(pattern)
        self._released.set()

    def release(self) -> None:
        """Let all requests through, those that are held unanswered."""
        self._lost = None
        self._released.set()

    def names(self) -> list[str]:
        """The objects in the bucket."""
        return sorted(key.name for key in self._bucket().values())

    def content(self, key: str) -> bytes:
        """The bytes of an object."""
        return bytes(self._bucket()[key].value)

    def written(self) -> list[str]:
        """The keys that were written, in order."""
        return [each.path.removeprefix(f"/{BUCKET}/") for each in self.requests if each.method == "PUT"][1:]

    def close(self) -> None:
        """End it, and forget its objects."""
        from moto.s3.models import s3_backends

        self.release()
        self._server.shutdown()
        self._server.server_close()
        s3_backends.reset()

    def _bucket(self) -> Any:
        from moto.s3.models import s3_backends

        return next(iter(s3_backends.values()))["global"].buckets[BUCKET].keys

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        seen = Seen(
            environ["REQUEST_METHOD"], environ["PATH_INFO"], environ["QUERY_STRING"], environ.get("HTTP_RANGE", "")
        )
        self.requests.append(seen)
        if self._lost is not None and self._lost.search(f"{seen.method} {seen.path}"):
            self.held.set()
            self._released.wait(60)
            start_response("403 Forbidden", [])
            return []
        return self._app(environ, start_response)


@pytest.fixture
def bucket() -> Iterator[BucketServer]:
    """A server with an empty bucket."""
    import urllib.request

    server = BucketServer()
    url = f"{server.environment['AWS_ENDPOINT_URL']}/{BUCKET}"
    urllib.request.urlopen(urllib.request.Request(url, method="PUT")).close()
    yield server
    server.close()
