"""What trainkit asks of the guardian, and the socket between them: one JSON object a line. No secrets."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Spec(NamedTuple):
    """The first message: the whole attempt."""

    run_dir: str
    status: Mapping[str, object]  # what status.json says in every state
    attempt_dir: str
    trainkit_pid: int
    argv: Sequence[str]
    preparations: Sequence[tuple[str, Sequence[str], str]]  # title, argv, path of its lock, or none
    launcher: str
    grace: float
    ranks: int  # expected on this node
    nodes: int
    max_restarts: int
    keeps_stdin: bool  # one rank, started directly
    foreground_group: int | None  # trainkit's process group, when the one rank keeps the terminal
    ignore: Sequence[int]  # signals that stay ignored (nohup)
    node: int = 0
    neighbours: Sequence[tuple[int, str, int]] = ()  # as nodes/control.py has them
    open_files: int = 0  # the soft limit that the ranks are to have; 0: the one that is
    hang: Sequence[float | bool | None] = (0.0,)  # the watch's limits, as watch/timing.py has them; 0 is none
    container: str = ""  # kind of the engine around the launcher; ranks inside need not descend from it
    end: Sequence[str] = ()  # ends the run's containers


class Channel:
    """One end of the socket."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._rest = b""
        self.fileno = end.fileno
        self.close = end.close

    def send(self, message: Mapping[str, object]) -> None:
        """Send, or do nothing where the other end is gone: whoever reads this end sees that too."""
        with contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def say(self, text: str) -> None:
        """Of the guardian: a line for the console."""
        self.send({"event": "said", "text": text})

    def receive(self) -> list[dict[str, Any]] | None:
        """Messages that are complete by now, after waiting for some bytes; None when the other end is gone."""
        data = b""
        with contextlib.suppress(ConnectionResetError):  # it ended before it had read all that we sent
            data = self._socket.recv(65536)
        # JSON writes line breaks inside texts as \n, so that one in the stream always ends a message.
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines] if data else None
