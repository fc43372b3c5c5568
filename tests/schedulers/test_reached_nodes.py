"""Orders to a node over ssh's standard input: whole, in order and once, whichever thread gives them."""

from __future__ import annotations

import json
import select
import threading
import time

import pytest

from trainkit.schedulers.jobs.ssh_supervisor import Node

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
