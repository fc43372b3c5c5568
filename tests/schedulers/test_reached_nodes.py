"""A node as the submitter sees it over ssh: orders arrive whole, in order and once; what it says is told apart."""

from __future__ import annotations

import json
import select
import threading
import time

import pytest

import trainkit
from trainkit.schedulers.jobs.ssh_nodes import MARK, Node

EACH = 4000
pytestmark = pytest.mark.cli


def test_orders_of_two_threads_arrive_whole_and_once() -> None:
    node = Node(0, "me@host", ["cat"])

    def give(sender: int) -> None:
        for number in range(EACH):
            node.send({"from": sender, "number": number})

    threads = [threading.Thread(target=give, args=(sender,)) for sender in (0, 1)]
    for thread in threads:
        thread.start()
    come, stdout, until = b"", node.process.stdout, time.monotonic() + 30
    assert stdout is not None
    while come.count(b"\n") < 2 * EACH and time.monotonic() < until:
        node.flush()
        if select.select([stdout], [], [], 0.1)[0]:
            come += stdout.read(1 << 16) or b""
    for thread in threads:
        thread.join()
    node.release()
    assert node.process.wait(10) == 0
    found = [json.loads(line) for line in come.splitlines()]
    for sender in (0, 1):
        assert [each["number"] for each in found if each["from"] == sender] == [*range(EACH)]


def test_what_a_node_says_to_people_and_to_the_submitter_is_told_apart() -> None:
    node = Node(1, "me@host", ["true"])
    ready = json.dumps({"ready": True, "version": trainkit.__version__}).encode()
    assert node.take("err", b"a greeting\n") == []
    assert node.take("out", b"of the shell\r\n" + MARK[:4]) == []
    assert not node.ready
    assert node.take("out", MARK[4:] + ready + b"\nwaiting for") == ["a greeting", "of the shell"]
    assert (node.ready, node.begun) == (True, False)
    assert node.take("out", b" node 2\n" + MARK + b'{"begun": true}\n') == ["waiting for node 2"]
    assert (node.begun, node.left) == (True, False)
    assert node.take("err", b"last words") == []
    assert node.take("err", b"") == ["last words"]
    assert node.take("out", MARK + b'{"left": true}\n') == []
    assert node.left
    node.release()
    node.process.wait(10)


def test_a_node_with_another_version_is_refused() -> None:
    node = Node(1, "me@host", ["true"])
    assert node.take("out", MARK + b'{"ready": true, "version": "0.0.0"}\n') == []
    assert not node.ready
    assert f"it has trainkit 0.0.0, and this machine {trainkit.__version__}" in str(node.why_not.what)
    node.release()
    node.process.wait(10)
