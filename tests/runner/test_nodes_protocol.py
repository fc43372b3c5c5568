"""The words between nodes hold against what comes over a network: garbage, halves, strangers, slow readers, many."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainkit.errors import MachineError
from trainkit.runner.nodes import assembly, control, roll_call
from trainkit.runner.nodes import connection as line
from trainkit.runner.nodes.assembly import join_node_0
from trainkit.runner.nodes.connection import Connection, flush_all
from trainkit.runner.nodes.control import Control, Neighbour
from trainkit.runner.nodes.roll_call import SAY_SECONDS, Report, RollCall, Start, digest_of, say_after
from trainkit.runner.report.exit_status import Verdict
from trainkit.runner.supervisor.processes import spawn

SECONDS = 20.0  # for anything that happens at once
LEAVES = {"launcher.kind": "torchrun", "seed": 3}
TOKEN = bytes(range(32))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def report(node: int, process: str = "", host: str = "") -> Report:
    return Report(node, host or f"tk{node}", "77.0", "1.0", digest_of(LEAVES), process or f"process-{node}")


def own_token(_place: tuple[str, int]) -> bytes:
    return TOKEN


def pair() -> tuple[Connection, socket.socket]:
    near, far = socket.socketpair()
    return Connection(near), far


def everything(end: Connection) -> tuple[list[dict[str, object]], bool]:
    """All messages until the other end is gone, and whether it was seen to be."""
    found: list[dict[str, object]] = []
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        messages = end.waiting_messages()
        if messages is None:
            return found, True
        found += messages
    return found, False


@settings(max_examples=40)
@given(st.lists(st.dictionaries(st.text(max_size=9), JSON, max_size=4), max_size=6), st.integers(1, 40))
def test_messages_come_whole_and_in_order_however_they_are_cut(messages: list[dict[str, object]], size: int) -> None:
    near, far = pair()
    data = b"".join(json.dumps(each).encode() + b"\n" for each in messages)
    found: list[dict[str, object]] = []
    with far:
        for start in range(0, len(data), size):
            far.sendall(data[start : start + size])
            found += near.waiting_messages() or []
    near.close()
    assert json.dumps(found) == json.dumps(messages)


@given(st.binary(max_size=300), st.integers(1, 50))
def test_garbage_is_messages_or_the_end_and_never_an_error(data: bytes, size: int) -> None:
    near, far = pair()
    with far, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for start in range(0, len(data), size):
            far.sendall(data[start : start + size])
            near.waiting_messages()
    messages, gone = everything(near)
    near.close()
    assert gone
    assert all(isinstance(each, dict) for each in messages)


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n\r\n", b"[" * 100_000 + b"\n", b"[1]\n", b"\xff\xfe\n", b"1" * 9999]
)
def test_what_no_node_says_ends_the_line(data: bytes) -> None:
    near, far = pair()
    near.most = 5000
    far.sendall(data)
    assert everything(near) == ([], True)
    near.close()
    far.close()


def test_a_reader_that_takes_nothing_holds_nobody_up_and_is_given_up_in_the_end() -> None:
    (slow, _kept), (quick, far) = pair(), pair()
    for each in (slow, quick):
        each.send({"order": "x" * line.MOST_UNSENT})
    assert slow.unsent
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(far.makefile("rb").readline)
        flush_all([slow, quick], 0.3)
        assert len(taken.result(SECONDS)) > line.MOST_UNSENT
    for _ in range(3):
        slow.send({"order": "x" * line.MOST_UNSENT})
    assert everything(slow) == ([], True)


def test_a_descriptor_above_those_that_select_takes_is_read() -> None:
    near, far = socket.socketpair()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip(f"a process may have {hard} files open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    try:
        high = Connection(socket.socket(fileno=fcntl.fcntl(near.detach(), fcntl.F_DUPFD, 1500)))
        far.sendall(b'{"beat": true}\n{"half')
        assert high.next_message(SECONDS) == {"beat": True}
        assert high.next_message(0.01) is None
        high.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Called:
    """A roll call on a port of its own, in a thread."""

    def __init__(self, nodes: int, seconds: float = SECONDS) -> None:
        self.said: list[str] = []
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.place = self.listener.getsockname()[:2]
        self.call = RollCall([self.listener], TOKEN, report(0), LEAVES, nodes, self.said.append)
        self.pool = ThreadPoolExecutor(nodes + 1)
        self.all_here = self.pool.submit(self.call.wait, seconds)

    def stranger(self, data: bytes = b"") -> socket.socket:
        """Something that comes to the port."""
        end = socket.create_connection(self.place, SECONDS)
        end.sendall(data)
        return end

    def proven(self, *messages: dict[str, object]) -> socket.socket:
        """A connection of somebody who has the token, and what he says."""
        end = self.stranger(b'{"nonce": "' + b"ab" * 32 + b'"}\n')
        lines = end.makefile("rb")
        nonces = (json.loads(lines.readline())["nonce"], "ab" * 32)
        end.sendall(json.dumps({"proof": roll_call.proof(TOKEN, roll_call.OTHER, nonces)}).encode() + b"\n")
        assert json.loads(lines.readline()) == {"proven": True}
        for message in messages:
            end.sendall(json.dumps(message).encode() + b"\n")
        return end

    def node(self, number: int, process: str = "") -> Future[tuple[Connection, Start]]:
        """A real node, which reports and waits."""
        return self.pool.submit(self.joined, number, process)

    def until_here(self, number: int, process: str) -> None:
        """Wait until node 0 knows a process as this node."""
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            known = self.call._here.get(number)
            if known is not None and known.report is not None and known.report.process == process:
                return
            time.sleep(0.01)
        pytest.fail(f"node {number} was not seen")

    def joined(self, number: int, process: str = "") -> tuple[Connection, Start]:
        """What it comes to."""
        found = join_node_0(report(number, process), LEAVES, [self.place], own_token, SECONDS, self.said.append)
        found[0].send({"ready": True})
        assert found[0].next_message(SECONDS) == {"go": True}
        return found


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody comes late here."""
    monkeypatch.setattr(roll_call, "LATE_SECONDS", 0.5)


@pytest.fixture
def called() -> Iterator[Callable[..., Called]]:
    """Begin a roll call; all is closed at the end."""
    begun: list[Called] = []

    def begin(*args: object) -> Called:
        begun.append(Called(*args))  # type: ignore[arg-type]
        return begun[-1]

    yield begin
    for each in begun:
        each.listener.close()
        each.pool.shutdown()


START = Start("/runs/r", 1, "127.0.0.1", 29400)


def finish(call: Called, *nodes: Future[tuple[Connection, Start]]) -> list[Neighbour]:
    """All start; the lines are closed."""
    call.all_here.result(SECONDS)
    call.call.start(START)
    for each in nodes:
        end, start = each.result(SECONDS)
        assert start == START
        end.close()
    found = [*call.call.neighbours()]
    for neighbour in found:
        socket.close(neighbour.fd)
    return found


def test_strangers_hold_up_no_roll_call(called: Callable[..., Called]) -> None:
    call = called(3)
    other = replace(report(1), start="78.0")
    kept = [
        call.stranger(),  # a port scanner
        call.stranger(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
        call.stranger(b'{"node": 1, "ho'),  # half a report
        call.stranger(b'{"node": [], "host": {}, "start": "77.0", "version": 1}\n'),
        call.stranger(b"\x16\x03\x01" + bytes(range(256))),
        call.stranger(b'{"log": 1}\n{"log": 2}\n'),  # two lines of what is no report
        call.stranger(json.dumps(asdict(report(1))).encode() + b"\n"),  # a report without a proof
        call.proven({"log": 1}, {"log": 2}),
        call.proven(asdict(other), asdict(other)),
        call.proven(asdict(other)),  # another job's node
    ]
    answered = kept[-1].makefile("rb").readline()
    assert json.loads(answered) == {"other": "77.0"}
    assert [each.node for each in finish(call, call.node(1), call.node(2))] == [1, 2]
    for each in kept:
        each.close()


def test_too_many_who_say_nothing_make_room_for_nodes(
    called: Callable[..., Called], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roll_call, "MOST_STRANGERS", 4)
    call = called(2)
    kept = [call.stranger() for _ in range(20)]
    assert kept[0].recv(1) == b""  # the oldest were let go
    assert finish(call, call.node(1))
    for each in kept:
        each.close()


def test_who_says_nothing_for_long_is_let_go(called: Callable[..., Called], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_call, "SILENT_SECONDS", 0.2)
    call = called(2)
    assert call.stranger().recv(1) == b""
    assert finish(call, call.node(1))


NONCE = b'{"nonce": "' + b"ab" * 32 + b'"}\n'


@pytest.mark.parametrize("what", ["another token", "node 0's own proof", "an older proof", "a number", "another nonce"])
def test_who_does_not_have_the_token_is_not_listened_to_and_said(called: Callable[..., Called], what: str) -> None:
    call = called(2)
    with call.stranger(NONCE) as earlier, call.stranger(NONCE) as end:
        older, answer = (json.loads(each.makefile("rb").readline()) for each in (earlier, end))
        nonces = (answer["nonce"], "ab" * 32)
        shown: dict[str, object] = {
            "another token": roll_call.proof(bytes(32), roll_call.OTHER, nonces),
            "node 0's own proof": answer["proof"],
            "an older proof": roll_call.proof(TOKEN, roll_call.OTHER, (older["nonce"], "ab" * 32)),
            "a number": 10**30,
            "another nonce": "cd" * 32,
        }
        end.sendall(
            json.dumps({"proof": shown[what]}).encode() + b"\n" + json.dumps(asdict(report(1))).encode() + b"\n"
        )
        assert end.recv(4096) == b""  # no word but the end
    assert "127.0.0.1 connected without the run's token" in call.call._present()
    assert [each.node for each in finish(call, call.node(1))] == [1]


def test_a_node_without_the_token_waits_says_so_and_gives_up(
    called: Callable[..., Called], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(assembly, "UNREAD_SECONDS", 0.5)
    call, missing = called(2), str(tmp_path / ".token-0")
    with pytest.raises(
        MachineError, match=r"node 1 \(tk1\) cannot join node 0 at 127\.0\.0\.1.*no such file"
    ) as refused:
        join_node_0(report(1), LEAVES, [call.place], lambda _: roll_call.read_token(missing), SECONDS, call.said.append)
    assert missing in str(refused.value)
    assert "all nodes share" in refused.value.hints[0]
    assert finish(call, call.node(1))


def test_a_node_tells_nothing_to_a_node_0_that_does_not_have_the_token(called: Callable[..., Called]) -> None:
    call = called(2)
    with socket.create_server(("127.0.0.1", 0)) as false:
        places = [false.getsockname()[:2], call.place]
        found = call.pool.submit(join_node_0, report(1), LEAVES, places, own_token, SECONDS, call.said.append)
        end, _ = false.accept()
        with end, end.makefile("rb") as lines:
            nonce = json.loads(lines.readline())["nonce"]
            forged = roll_call.proof(bytes(32), roll_call.NODE_0, ("cd" * 32, nonce))
            end.sendall(json.dumps({"nonce": "cd" * 32, "proof": forged}).encode() + b"\n")
            assert lines.read() == b""
        assert len(finish(call, found_ready(call, found))) == 1


def found_ready(call: Called, found: Future[tuple[Connection, Start]]) -> Future[tuple[Connection, Start]]:
    """The node of a bare `join_node_0`, once it has said that it is ready."""

    def ready() -> tuple[Connection, Start]:
        found.result(SECONDS)[0].send({"ready": True})
        return found.result()

    return call.pool.submit(ready)


def test_a_thousand_strangers_with_megabytes_keep_no_node_out(called: Callable[..., Called]) -> None:
    call = called(3)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    kept = []
    for number in range(min(1000, hard // 2 - 100)):
        end = call.stranger()
        end.setblocking(False)
        with contextlib.suppress(BlockingIOError, ConnectionError):
            end.send([b"", b"x" * (1 << 20), NONCE, NONCE * 2][number % 4])
        kept.append(end)
    assert [each.node for each in finish(call, call.node(1), call.node(2))] == [1, 2]
    for end in kept:
        end.close()


def test_strangers_without_end_do_not_keep_a_roll_call_from_ending(called: Callable[..., Called]) -> None:
    call, over = called(3, 1.0), threading.Event()

    def come() -> int:
        count = 0
        while not over.is_set():
            with contextlib.suppress(OSError), call.stranger([b"", NONCE, b"{}\n", b"x" * 9999][count % 4]):
                count += 1
        return count

    coming = call.pool.submit(come)
    try:
        assert "after 1 s 1 of 3 nodes are here" in str(call.all_here.exception(SECONDS))
    finally:
        over.set()
    assert coming.result(SECONDS) > 10


def test_more_than_a_proof_takes_is_read_of_nobody_who_has_proved_nothing(called: Callable[..., Called]) -> None:
    call = called(2)
    with call.stranger(b'{"nonce": "' + b"a" * roll_call.FIRST_BYTES) as end:
        assert end.recv(1) == b""
    assert finish(call, call.node(1))


@settings(max_examples=30)
@given(st.dictionaries(st.sampled_from(["node", "host", "start", "version", "digest", "process"]), JSON))
def test_a_report_is_read_or_refused_whatever_its_values_are(message: dict[str, object]) -> None:
    found = Report.read(message)
    if found is not None:
        assert found.node == message["node"]
        assert all(isinstance(value, str) for name, value in asdict(found).items() if name != "node")


def test_a_node_that_comes_again_before_the_start_is_the_same_node(called: Callable[..., Called]) -> None:
    call = called(3)
    first = call.proven(asdict(report(1, "mine")))
    assert json.loads(first.makefile("rb").readline()) == {"here": True}
    # Its network has dropped the connection without a word: node 0 still has the old one.
    again = call.node(1, "mine")
    assert first.recv(1) == b""
    first.close()
    assert len(finish(call, again, call.node(2))) == 2


def test_a_node_that_left_may_come_again_as_another_process(called: Callable[..., Called]) -> None:
    call = called(3)
    with call.proven(asdict(report(1, "before"))) as first:
        assert first.recv(64)
    again = call.node(1, "after")
    call.until_here(1, "after")
    assert len(finish(call, again, call.node(2))) == 2


def test_a_second_process_of_a_node_is_refused_on_all(called: Callable[..., Called]) -> None:
    call = called(3)
    first = call.node(1, "one")
    call.until_here(1, "one")
    second = call.node(1, "two")
    for each in (call.all_here, first, second):
        assert "node 1 (tk1) was started twice: tk1 has the same number" in str(each.exception(SECONDS))


def test_a_node_that_comes_when_the_run_has_begun_is_refused_and_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "SAY_SECONDS", 0.3)
    monkeypatch.setattr(assembly, "GONE_SECONDS", 0.5)
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as ranks, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens here any more
        meeting = ranks.getsockname()
        with pytest.raises(MachineError, match=r"node 1 \(tk1\) came too late, or was started twice") as refused:
            join_node_0(report(1), LEAVES, [closed.getsockname()], own_token, SECONDS, said.append, meeting)
    already = f"ranks of a run already meet at 127.0.0.1:{meeting[1]}"
    assert str(refused.value).endswith(already)
    assert f"(connection refused; {already})" in said[0]


def test_a_node_tells_its_plan_only_where_it_is_another_one(called: Callable[..., Called]) -> None:
    call, sent = called(2), asdict(report(1))
    assert len(json.dumps(sent)) < 300
    asked = call.proven({**sent, "digest": "another"})
    answers = asked.makefile("rb")
    assert json.loads(answers.readline()) == {"leaves": True}
    asked.sendall(json.dumps({"leaves": {**LEAVES, "seed": 4}}).encode() + b"\n")
    why = "node 1 (tk1) has another plan than node 0 (tk0): seed is 4, and 3 there"
    assert json.loads(answers.readline())["refused"] == why
    assert why in str(call.all_here.exception(SECONDS))


def test_a_node_that_says_something_else_than_ready_is_named(called: Callable[..., Called]) -> None:
    call = called(4)
    ends = [call.proven(asdict(report(node))) for node in (1, 2, 3)]
    call.all_here.result(SECONDS)
    ends[0].sendall(b'{"why": "does not see /runs/r"}\n')
    ends[1].sendall(b'{"ready": true}\n')
    ends[2].close()
    with pytest.raises(MachineError, match=r"node 1 does not see /runs/r; node 3 has left"):
        call.call.start(START)
    assert b"node 3 has left" in ends[1].recv(4096)


def test_a_listener_that_never_answers_is_left_for_the_next_port(
    called: Callable[..., Called], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "ANSWER_SECONDS", 0.3)
    call = called(2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        places = [silent.getsockname()[:2], call.place]
        found = call.pool.submit(join_node_0, report(1), LEAVES, places, own_token, SECONDS, call.said.append)
        call.all_here.result(SECONDS)
    assert isinstance(call.call._here[1].report, Report)
    call.call._here[1].line.send({"refused": "enough", "hint": ""})
    assert "enough" in str(found.exception(SECONDS))


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b'{"here": true}\n{"start": 7}\n',
        b'{"start": {"run_dir": 1, "attempt": 1, "master": "", "port": 1}}\n',
        b'{"start": {}}\n',
        b"[]\n",
        b'{"other": "78.0"}\n',
    ],
)
def test_what_answers_and_is_no_node_0_is_left_for_the_next_port(called: Callable[..., Called], answer: bytes) -> None:
    call = called(2)
    with socket.create_server(("127.0.0.1", 0)) as wrong:

        def serve() -> None:
            end, _ = wrong.accept()
            with end:
                end.sendall(answer)
                end.recv(4096)

        call.pool.submit(serve)
        places = [wrong.getsockname()[:2], call.place]
        found = call.pool.submit(join_node_0, report(1), LEAVES, places, own_token, SECONDS, call.said.append)
        call.all_here.result(SECONDS)
    call.call._here[1].line.send({"start": asdict(START)})
    assert found.result(SECONDS)[1] == START


@given(JSON)
def test_a_start_is_read_or_refused_whatever_it_is(said: object) -> None:
    assert Start.read(said) is None
    assert Start.read(asdict(START)) == START


def test_who_waits_says_so_less_and_less_often() -> None:
    times = [SAY_SECONDS]
    while times[-1] < 300:
        times.append(say_after(times[-1]))
    assert times == [5, 10, 20, 40, 80, 140, 200, 260, 320]


class Skewed(threading.local):
    """A clock that every thread has its own of: days before or after those of the others."""

    offset = 0.0

    def monotonic(self) -> float:
        """Seconds since no time that two threads share."""
        return time.monotonic() + self.offset


def run_nodes(nodes: int, ends: dict[int, Verdict], clock: Skewed | None = None) -> dict[int, Verdict]:
    """What each node comes to, from the roll call on: a thread for each, which turns its end as a guardian does."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=nodes)
    place = listener.getsockname()[:2]

    def lived(node: int) -> Verdict:
        if clock:
            clock.offset = 86_400.0 * (node % 7 - 3)
        if node == 0:
            call = RollCall([listener], TOKEN, report(0), LEAVES, nodes, lambda _: None)
            call.wait(SECONDS)
            call.start(START)
            neighbours = {each.node: each for each in call.neighbours()}
        else:
            found, _ = join_node_0(report(node), LEAVES, [place], own_token, SECONDS, lambda _: None)
            found.send({"ready": True})
            assert found.next_message(SECONDS) == {"go": True}
            neighbours = {0: Neighbour(0, "tk0", found.detach())}
        with selectors.DefaultSelector() as selector:
            held = Control(node, neighbours, selector, grace=5.0)

            def wait(seconds: float) -> None:
                selector.select(seconds) if selector.get_map() else time.sleep(seconds)
                held.turn()

            until = time.monotonic() + SECONDS
            while node not in ends and not held.order and time.monotonic() < until:
                wait(0.05)
            told = Verdict(137, "trainkit", held.order) if held.order else Verdict(0)
            return held.settle(ends.get(node, told), consequence=node not in ends, wait=wait)

    with ThreadPoolExecutor(nodes) as pool, listener:
        begun = [pool.submit(lived, node) for node in range(nodes)]
        return {node: each.result(2 * SECONDS) for node, each in enumerate(begun)}


FAILED = Verdict(7, "program", "rank 33 exited with code 7", 33)


def test_fifty_nodes_meet_and_end_with_one_verdict() -> None:
    found = run_nodes(50, {33: FAILED})
    assert {each.exit_code for each in found.values()} == {7}
    assert {each.why for each in found.values()} == {"rank 33 (tk33) exited with code 7"}


def test_clocks_that_differ_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Skewed()
    for module in (control, roll_call, assembly, line):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=time.sleep))
    found = run_nodes(8, {3: Verdict(7, "program", "rank 3 exited with code 7", 3)}, clock)
    assert {each.why for each in found.values()} == {"rank 3 (tk3) exited with code 7"}


@pytest.mark.parametrize(
    "said",
    [
        b"garbage\n",
        b'{"ended": {}}\n',
        b'{"ended": 7}\n',
        b'{"ended": {"exit_code": "7"}}\n',
        b'{"ended": {"x": 1}}\n',
        b'{"post": 7}\n',
        b'{"signal": "USR1"}\n',
    ],
)
def test_a_node_that_says_garbage_is_lost_and_the_run_ends(said: bytes) -> None:
    near, far = socket.socketpair()
    with selectors.DefaultSelector() as selector, far:
        first = Control(0, {1: Neighbour(1, "tk1", near.detach())}, selector, grace=1.0)
        far.sendall(said)
        until = time.monotonic() + SECONDS
        while not first.order and time.monotonic() < until:
            first.turn()
    assert first.order.startswith("node 1 (tk1) was lost")
    assert first.said == [first.order]


def test_a_signal_for_the_ranks_goes_from_node_0_to_the_others_once() -> None:
    near, far = socket.socketpair()
    with selectors.DefaultSelector() as selector, selectors.DefaultSelector() as others:
        first = Control(0, {1: Neighbour(1, "tk1", near.detach())}, selector, grace=1.0)
        second = Control(1, {0: Neighbour(0, "tk0", far.detach())}, others, grace=1.0)
        second.pass_on(signal.SIGUSR1)  # one that was sent to every process of the job
        first.pass_on(signal.SIGUSR1)
        until = time.monotonic() + SECONDS
        while not second.passed_on and time.monotonic() < until:
            second.turn()
        first.turn()
    assert (first.passed_on, second.passed_on) == ([], [signal.SIGUSR1])


def test_a_node_that_reads_nothing_keeps_the_verdict_from_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "SEND_SECONDS", 0.2)
    ends = {node: socket.socketpair() for node in (1, 2, 3)}
    with selectors.DefaultSelector() as selector:
        neighbours = {node: Neighbour(node, f"tk{node}", near.detach()) for node, (near, _) in ends.items()}
        first = Control(0, neighbours, selector, grace=1.0)
        while not first._lines[1].unsent:  # node 1 stands still, and its buffers are full
            first._lines[1].send({"beat": True})
        for _, far in ends.values():
            far.sendall(json.dumps({"ended": Verdict(0)._asdict()}).encode() + b"\n")
        found = first.settle(FAILED, consequence=False, wait=lambda _: first.turn())
    assert found.exit_code == 7
    for node in (2, 3):
        said = [json.loads(each) for each in ends[node][1].makefile("rb").read1().splitlines()]
        assert said[-1] == {"verdict": found._asdict()}


def test_nodes_that_are_lost_together_are_said_in_one_line() -> None:
    ends = {node: socket.socketpair() for node in range(1, 40)}
    with selectors.DefaultSelector() as selector:
        neighbours = {node: Neighbour(node, f"tk{node}", near.detach()) for node, (near, _) in ends.items()}
        first = Control(0, neighbours, selector, grace=1.0)
        for _, far in ends.values():
            far.close()
        first.turn()
    assert len(first.said) == 1
    assert first.said[0].endswith("node 8 (tk8) and 31 more were lost")


def test_the_limit_of_open_files_is_raised_for_the_nodes_and_not_for_the_ranks(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < 4096:
        pytest.skip(f"a process may have {before[1]} files open here")
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
        assert assembly.raise_open_file_limit(100) == 0
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 1024
        assert assembly.raise_open_file_limit(2000) == 1024
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 2000
        with (tmp_path / "out").open("wb") as out:
            streams = (0, out.fileno(), out.fileno())
            pid = spawn(("/bin/sh", "-c", "ulimit -n"), {}, streams, open_files=1024)
            assert os.waitpid(pid, 0)[1] == 0
        assert (tmp_path / "out").read_text() == "1024\n"
        with pytest.raises(MachineError, match=rf"may have {before[1]}"):
            assembly.raise_open_file_limit(before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
