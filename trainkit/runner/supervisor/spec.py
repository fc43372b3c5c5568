"""What trainkit asks of the guardian: one message, the first on their socket. No secrets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Preparation(NamedTuple):
    """A command to run before the launcher, alone on this machine under its lock."""

    title: str
    argv: Sequence[str]
    lock: str  # path


class Spec(NamedTuple):
    """What trainkit asks for: the first message on the socket."""

    status: Sequence[Any]  # an Attempt
    attempt_dir: str
    trainkit_pid: int
    argv: Sequence[str]
    preparations: Sequence[Sequence[Any]]
    launcher: str
    grace: float
    ranks: int  # expected on this node
    nodes: int
    max_restarts: int
    foreground_group: int | None  # trainkit's process group, when the one rank keeps the terminal
    ignore: Sequence[int]  # signals that stay ignored (nohup)
