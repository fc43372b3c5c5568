"""What goes wrong on demand at the tests' Hub, and what it keeps of each request."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from fnmatch import fnmatchcase


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
