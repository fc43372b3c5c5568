"""The socket between trainkit and the guardian: one JSON object a line, the first one describes the attempt.

No secrets.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Spec(NamedTuple):
    """The first message: everything about the attempt."""

    run_dir: str
    status: Mapping[str, object]  # entries of status.json in every state
    attempt_dir: str
    trainkit_pid: int
    argv: Sequence[str]
    preparations: Sequence[tuple[str, Sequence[str], str]]  # title, argv, path of its lock, or none
    launcher: str
    grace: float
    ranks: int  # expected on this node
    nodes: int
    max_restarts: int
    keeps_stdin: bool  # a single rank, started without a launcher
    foreground_group: int | None  # trainkit's process group, if the single rank keeps the terminal
    ignore: Sequence[int]  # signals that stay ignored (nohup)
    node: int = 0
    neighbours: Sequence[tuple[int, str, int]] = ()  # as nodes/control.py has them
    open_files: int = 0  # soft limit for the ranks; 0 keeps the current one
    hang: Sequence[float | bool | None] = (0.0,)  # `Limits` of watch/timing.py; 0 is no watch
    container: str = ""  # kind of the container engine; ranks in a container need not descend from the launcher
    end: Sequence[str] = ()  # command that ends the run's containers


class Channel:
    """One end of the socket."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._rest = b""
        self.fileno = end.fileno
        self.close = end.close

    def send(self, message: Mapping[str, object]) -> None:
        """Send, or do nothing if the other end is gone: reading this end shows that."""
        with contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def say(self, text: str) -> None:
        """A line from the guardian for the console."""
        self.send({"event": "said", "text": text})

    def receive(self) -> list[dict[str, Any]] | None:
        """Wait for bytes; the complete messages, None if the other end is gone."""
        data = b""
        with contextlib.suppress(ConnectionResetError):  # the other process ended before it had read everything
            data = self._socket.recv(65536)
        # JSON writes line breaks inside texts as \n, so that one in the stream always ends a message.
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines] if data else None
