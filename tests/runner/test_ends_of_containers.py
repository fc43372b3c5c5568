"""What is made of an engine's words when it is to end containers."""

from __future__ import annotations

import os
import selectors
import socket

import pytest

from trainkit.runner.nodes import control
from trainkit.runner.nodes.control import Control, Neighbour
from trainkit.runner.supervisor.cleanup import end_containers

NAMES = ("trainkit-r-1", "trainkit-r-1-prepare")
DENIED = "Error response from daemon: cannot remove container trainkit-r-1: permission denied"
ABSENT = "Error: No such container: {}"  # docker 20.10; newer ones end with 0


@pytest.mark.parametrize(
    ("lines", "left"),
    [
        ([ABSENT.format(NAMES[0]), ABSENT.format(NAMES[1])], False),
        ([NAMES[0], ABSENT.format(NAMES[1])], False),
        (["removal of container trainkit-r-1 is already in progress", ABSENT.format(NAMES[1])], False),
        ([DENIED, ABSENT.format(NAMES[1])], True),
        ([DENIED], True),
        ([], True),
    ],
)
def test_a_container_that_stays_is_told_from_one_that_is_gone(lines: list[str], left: bool) -> None:
    script = "".join(f"echo '{line}'\n" for line in lines) + "exit 1"
    said = end_containers(("sh", "-c", script, *NAMES), os.environ)
    assert (DENIED in said or "exit code 1" in said) == left, said
    assert bool(said) == left


def test_an_engine_that_is_not_there_is_named() -> None:
    assert end_containers(("/absent/docker", "rm", *NAMES), os.environ).startswith("/absent/docker cannot be started")
    assert end_containers((), os.environ) == ""


def test_other_nodes_hear_of_this_one_while_its_engine_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "BEAT_SECONDS", 0.2)
    near, far = socket.socketpair()
    own = Control(1, {0: Neighbour(0, "tk0", near.detach())}, selectors.DefaultSelector(), grace=1.0)
    assert end_containers(("sleep", "1"), os.environ, own.turn) == ""
    far.setblocking(False)
    assert far.recv(4096).count(b'{"beat": true}') > 2
    far.close()
