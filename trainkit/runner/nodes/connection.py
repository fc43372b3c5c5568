"""A connection between two nodes of a run: one JSON object a line, in both directions. Standard library only.

Only `next_message` and `flush_all` wait for the other side, for a bounded time: a node that hangs must not block a
thousand others.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import time
from collections.abc import Iterable, Mapping
from typing import Any

from trainkit.files import parse_json

MOST = 1 << 26  # bytes of a message: a plan is a few kilobytes, and an unknown peer must not fill our memory
MOST_UNSENT = 1 << 20  # bytes buffered for a node that does not read them
CHUNK = 1 << 16
AT_ONCE = 16  # chunks read from one connection before the next gets its turn
SEND_SECONDS = 5.0  # for the last message


class Connection:
    """One end. Messages are objects; anything else ends the connection. most: bytes of a received message."""

    def __init__(self, end: socket.socket, most: int = MOST) -> None:
        end.setblocking(False)
        with contextlib.suppress(OSError):  # not of TCP
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.most = most
        self._socket = end
        self._parts: list[bytes] = []  # of a message that is not complete yet …
        self._size = 0  # … and their bytes
        self._waiting: list[dict[str, Any]] = []
        self._unsent = bytearray()
        self.fileno = end.fileno

    def send(self, message: Mapping[str, object]) -> None:
        """Send as much as the other side reads now, and keep the rest for `flush`.

        A connection with more than MOST_UNSENT bytes unread is given up. That the other side is gone shows when
        reading.
        """
        if len(self._unsent) > MOST_UNSENT:
            self._give_up()
            return
        self._unsent += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send as much of the rest as the other side reads now."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:  # reading this end shows the same
            self._unsent.clear()

    @property
    def unsent(self) -> int:
        """Bytes that are buffered."""
        return len(self._unsent)

    def waiting_messages(self) -> list[dict[str, Any]] | None:
        """The messages that have come, without waiting; None if the other end is gone and all were read."""
        found, self._waiting = self._waiting, []
        try:
            for _ in range(AT_ONCE):
                data = self._socket.recv(CHUNK)
                messages = self._complete(data) if data else None
                if messages is None:
                    self._give_up()
                    return found or None
                found += messages
        except BlockingIOError:
            return found
        except OSError:
            return found or None
        return found

    def next_message(self, seconds: float) -> dict[str, Any] | None:
        """The next message; None if none comes in time, or the other end is gone."""
        until = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            while not self._waiting:
                found = self.waiting_messages()
                left = until - time.monotonic()
                if found is None or (not found and left <= 0):
                    return None
                self._waiting = found
                if not found:
                    selector.modify(self._socket, selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0))
                    selector.select(left)
                    self.flush()
        return self._waiting.pop(0)

    def detach(self) -> int:
        """The connection's descriptor, for another process; messages that were read and not taken are lost."""
        return self._socket.detach()

    def close(self) -> None:
        """End the connection, also for other processes that have it."""
        with contextlib.suppress(OSError):  # the other side has
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _complete(self, data: bytes) -> list[dict[str, Any]] | None:
        """The messages that end in this data; None if one is invalid."""
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = b"".join((*self._parts, lines[0]))
            self._parts, self._size = [], 0
        self._parts.append(rest)
        self._size += len(rest)
        if self._size > self.most or any(len(line) > self.most for line in lines):
            return None
        try:
            messages = [parse_json(line) for line in lines]
        except ValueError:
            return None
        return messages if all(isinstance(each, dict) for each in messages) else None

    def _give_up(self) -> None:
        self._unsent.clear()
        with contextlib.suppress(OSError):  # it is already
            self._socket.shutdown(socket.SHUT_RDWR)


def flush_all(lines: Iterable[Connection], seconds: float) -> None:
    """Send what is buffered for all of them, within one time limit."""
    until = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        for line in lines:
            if line.unsent:
                selector.register(line, selectors.EVENT_WRITE, line)
        while selector.get_map() and (left := until - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                key.data.flush()
                if not key.data.unsent:
                    selector.unregister(key.fileobj)
