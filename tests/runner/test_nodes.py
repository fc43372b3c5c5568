"""Several nodes of one run: the roll call, the control line and the one verdict, over real connections."""

from __future__ import annotations

import ipaddress
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from handmade_plans import make_plan

from trainkit.errors import MachineError
from trainkit.files import publish
from trainkit.launch_plan.model import NodeGroup, Plan, Topology
from trainkit.runner.nodes import assembly, control, roll_call
from trainkit.runner.nodes.assembly import (
    Assembly,
    Rendezvous,
    assemble,
    comparable_leaves,
    node_0_address,
    report_unfit,
)
from trainkit.runner.nodes.control import Control, Neighbour, NodeEnd, decide_verdict_of_nodes, has_lost_peer
from trainkit.runner.nodes.roll_call import RefusedRunError, Start
from trainkit.runner.rendezvous import free_port
from trainkit.runner.report.exit_status import Verdict
from trainkit.runner.rundir.layout import RunLayout
from trainkit.schedulers.base import Place

HOST = os.uname().nodename
SECONDS = 20.0  # for anything that happens at once
MISSING = MachineError("card 3 is missing", hint="look for it")


def plan_of(nodes: int, rendezvous: str = "auto") -> Plan:
    topology = Topology("cpu", (NodeGroup(nodes, 1, ("cpu",)),))
    return replace(make_plan(("true",), "runs", ranks=1), topology=topology, rendezvous=rendezvous)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nobody comes late here; output.root is a relative folder."""
    monkeypatch.setattr(roll_call, "LATE_SECONDS", 0.5)
    monkeypatch.chdir(tmp_path)


Meet = Callable[..., list[Future[Assembly]]]


@pytest.fixture
def meet(tmp_path: Path) -> Iterator[Meet]:
    """Assemble nodes in threads: their places, by default all of the plan's; options of one, by its number."""
    said: list[str] = []
    with ThreadPoolExecutor(8) as pool:

        def started(plan: Plan, *nodes: int, seconds: float = SECONDS, **other: Plan) -> list[Future[Assembly]]:
            def make(start: Start) -> RunLayout:
                (tmp_path / "run").mkdir()
                (tmp_path / "run" / "plan.json").write_text("{}")
                return RunLayout(tmp_path / "run")

            def one(place: int) -> Assembly:
                return assemble(other.get(f"plan{place}", plan), Place(place), make, said.append, seconds)

            return [pool.submit(one, each) for each in nodes or range(plan.topology.nodes)]

        started.said = said  # type: ignore[attr-defined]
        yield started


def refusals(found: list[Future[Assembly]]) -> set[str]:
    """What each node was told."""
    return {str(each.exception(SECONDS)) for each in found}


def test_all_nodes_agree_on_run_directory_and_port(meet: Meet, tmp_path: Path) -> None:
    plan = plan_of(3, f"127.0.0.1:{free_port()}")
    found = [each.result(SECONDS) for each in meet(plan)]
    assert {each.start.run_dir for each in found} == {str(tmp_path / "run")}
    assert {each.start.port for each in found} == {int(plan.rendezvous.rpartition(":")[2])}
    assert [[neighbour.node for neighbour in each.neighbours] for each in found] == [[1, 2], [0], [0]]
    for neighbour in (neighbour for each in found for neighbour in each.neighbours):
        socket.close(neighbour.fd)


def test_a_node_that_does_not_come_is_named_and_nothing_is_left(meet: Meet, tmp_path: Path) -> None:
    found = meet(plan_of(3, f"127.0.0.1:{free_port()}"), 0, 2, seconds=3)
    assert any("2 of 3 nodes are here; waiting for node 1" in each for each in refusals(found))
    assert not (tmp_path / "run").exists()


def test_a_node_that_is_there_twice_is_refused_on_all(meet: Meet) -> None:
    found = meet(plan_of(3, f"127.0.0.1:{free_port()}"), 0, 1, 1)
    assert {"was started twice" in each for each in refusals(found)} == {True}


def test_a_node_with_another_plan_is_refused_with_what_differs(meet: Meet) -> None:
    plan = plan_of(2, f"127.0.0.1:{free_port()}")
    found = refusals(meet(plan, plan1=replace(plan, grace_seconds=77.0)))
    assert {"grace_seconds is 77.0" in each for each in found} == {True}


def test_what_each_machine_decides_for_itself_may_differ() -> None:
    plan = plan_of(2)
    groups = (NodeGroup(2, 1, ("GPU-1",)),)
    other = replace(plan, topology=Topology("cpu", groups), resume=replace(plan.resume, reason="another"))
    assert comparable_leaves(plan) == comparable_leaves(other)
    assert comparable_leaves(plan) != comparable_leaves(replace(plan, output_root="elsewhere"))


def test_the_place_to_meet_is_the_plans_or_the_jobs() -> None:
    assert node_0_address(Rendezvous.of(plan_of(2, "node-a:29400")), Place(1)) == ("node-a", (29401,))
    assert node_0_address(Rendezvous.of(plan_of(2, "[fe80::1]:29400")), Place(1)) == ("fe80::1", (29401,))
    job = Place(1, 2, ("gpu1", "gpu2"), "77.0.0")
    assert node_0_address(Rendezvous.of(plan_of(2)), job) == node_0_address(
        Rendezvous.of(plan_of(2)), replace(job, node=0)
    )
    assert node_0_address(Rendezvous.of(plan_of(2)), job) != node_0_address(
        Rendezvous.of(plan_of(2)), replace(job, start="78.0.0")
    )
    with pytest.raises(MachineError, match=r"nodes\.rendezvous"):
        node_0_address(Rendezvous.of(plan_of(2)), Place(1))


@pytest.mark.parametrize("rendezvous", ["a..b:29400", f"{'x' * 64}.org:29400", "tk1:65535"])
def test_a_place_that_there_cannot_be_is_refused_at_once(rendezvous: str) -> None:
    for node in (0, 1):
        with pytest.raises(MachineError, match=r"is not a valid host name for node 0|65535 has none"):
            node_0_address(Rendezvous.of(plan_of(2, rendezvous)), Place(node))


def test_a_run_directory_that_another_node_cannot_look_at_is_refused_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "SEE_SECONDS", 0.4)
    plan, said = plan_of(2, f"127.0.0.1:{free_port()}"), list[str]()
    nowhere = RunLayout(Path("/", "x" * 300))
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(assemble, plan, Place(node), lambda _: nowhere, said.append, SECONDS) for node in (0, 1)]
        assert {f"node 1 does not see {nowhere.root}" in each for each in refusals(found)} == {True}


class Node:
    """The control line of one node, turned by a thread as its guardian would."""

    def __init__(self, node: int, neighbours: dict[int, Neighbour]) -> None:
        self.selector = selectors.DefaultSelector()
        self.control = Control(node, neighbours, self.selector, grace=2.0)

    def wait(self, seconds: float) -> None:
        """One turn."""
        self.selector.select(seconds)
        self.control.turn()

    def until(self, condition: Callable[[], object]) -> None:
        """Turn until something is so."""
        give_up = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < give_up
            self.wait(0.05)

    def settle(self, verdict: Verdict, *, consequence: bool = False) -> Verdict:
        """Its end."""
        return self.control.settle(verdict, consequence=consequence, wait=self.wait)


def linked(nodes: int) -> list[Node]:
    """Nodes with connections to node 0."""
    pairs = {node: socket.socketpair() for node in range(1, nodes)}
    first = Node(0, {node: Neighbour(node, f"tk{node}", near.detach()) for node, (near, _) in pairs.items()})
    return [first, *(Node(node, {0: Neighbour(0, "tk0", far.detach())}) for node, (_, far) in pairs.items())]


def settled(nodes: list[Node], *verdicts: Verdict) -> list[Verdict]:
    """What all come to, each ending by itself."""
    with ThreadPoolExecutor(len(nodes)) as pool:
        return [
            each.result(SECONDS) for each in [pool.submit(n.settle, v) for n, v in zip(nodes, verdicts, strict=True)]
        ]


LOST = Verdict(137, "node", "node 1 (tk1) was lost")
FAILED = Verdict(7, "program", "rank 1 exited with code 7", 1)


def test_all_nodes_end_with_one_verdict() -> None:
    assert settled(linked(3), Verdict(0), Verdict(0), Verdict(0)) == [Verdict(0)] * 3
    found = settled(linked(3), Verdict(0), FAILED, Verdict(0))
    assert {each.exit_code for each in found} == {7}
    assert {each.why for each in found} == {"rank 1 (tk1) exited with code 7"}


def test_a_failure_ends_the_others() -> None:
    first, second, third = linked(3)
    second.control.ending("rank 1 failed")
    first.until(lambda: first.control.order)
    third.until(lambda: third.control.order)
    assert first.control.order == third.control.order == "node 1 (tk1): rank 1 failed"


def test_a_node_that_is_gone_is_named_and_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = linked(3)
    second.control._lines[0].close()
    first.until(lambda: first.control.said)
    assert first.control.said == ["node 1 (tk1) was lost"]
    third.until(lambda: third.control.order)
    monkeypatch.setattr(control, "LOST_AT_END_SECONDS", -1.0)
    third.until(lambda: third.control.said)
    assert third.control.said[0].startswith("node 0 (tk0) was lost: no heartbeat")


def test_a_node_that_joins_late_hears_what_it_has_missed() -> None:
    first, second = linked(2)
    first.control.ending("trainkit received SIGTERM")
    second.control._lines[0].waiting_messages()  # read by its trainkit, just before the guardian had the line
    second.wait(0)
    first.wait(0.2)
    second.until(lambda: second.control.order)
    assert second.control.order == "trainkit received SIGTERM"


def test_a_node_that_stood_still_itself_has_lost_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """As all of a job does that is suspended and resumed."""
    first, _second = linked(2)
    first.wait(0)
    for name in ("_turned", "_beat"):
        monkeypatch.setattr(first.control, name, -100.0)
    monkeypatch.setattr(first.control, "_heard", {1: -100.0})
    first.wait(0)
    assert not first.control.said
    monkeypatch.setattr(first.control, "_heard", {1: -100.0})
    first.wait(0)
    assert first.control.said == ["node 1 (tk1) was lost: no heartbeat for 30 s"]


def test_a_node_that_fell_silent_before_the_order_to_end_is_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    first, _second = linked(2)
    heard = time.monotonic() - control.LOST_AT_END_SECONDS - 1
    monkeypatch.setattr(first.control, "_heard", {1: heard})
    told = Verdict(143, "signal", "trainkit received SIGTERM", signal=15)
    found = first.settle(told)
    assert (found.exit_code, found.failure, found.node) == (137, "node", 1)


def test_another_node_speaks_where_the_first_one_has_no_trainkit_any_more() -> None:
    first, second, third = linked(3)
    first.control.alone = True
    settled([first, second, third], Verdict(137, "trainkit", "trainkit was killed"), Verdict(0), Verdict(0))
    assert f"the run failed: trainkit was killed (node 0, {HOST})" in second.control.said
    assert not any("the run failed" in each for each in third.control.said)


def test_a_node_that_has_ended_says_so_again_to_who_goes_on_for_node_0s_guardian() -> None:
    first, second = linked(2)
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(second.settle, Verdict(0))
        first.until(lambda: first.control._ends)
        first.control._ends.clear()  # the guardian is gone, with all that it knew
        found = first.settle(Verdict(137, "guardian", "its guardian process was killed", signal=9))
        assert ended.result(SECONDS) == found
    assert found.why == f"its guardian process was killed (node 0, {HOST})"


def end(node: int, at: float, verdict: Verdict, *, consequence: bool = False) -> NodeEnd:
    return NodeEnd(node, f"tk{node}", at, verdict, consequence)


@pytest.mark.parametrize(
    ("ends", "code", "why"),
    [
        ([end(0, 1, Verdict(0)), end(1, 2, FAILED)], 7, "rank 1 (tk1) exited with code 7"),
        (
            [end(0, 1, Verdict(1, "program", "rank 0 exited with code 1", 0), consequence=True), end(1, 2, FAILED)],
            7, "rank 1 (tk1)",
        ),
        ([end(0, 1, Verdict(1, "launcher", "torchrun exited with code 1")), end(1, 9, FAILED)], 7, "rank 1 (tk1)"),
        ([end(0, 5, Verdict(3, "program", "rank 0 exited with code 3", 0)), end(1, 6, FAILED)], 3, "rank 0 (tk0)"),
        ([end(0, 5, Verdict(143, "signal", "trainkit received SIGTERM", signal=15))], 143, "SIGTERM (node 0, tk0)"),
        (
            [end(0, 1, Verdict(137, "launcher", "torchrun or rank 0 was stopped", 0)), end(1, 2, FAILED)],
            7, "rank 1 (tk1)",
        ),
        (
            [end(0, 5, Verdict(0)), end(1, 3, LOST), end(2, 4, LOST)],
            137, "node 0 (tk0) has lost all other nodes",
        ),
    ],
)  # fmt: skip
def test_the_first_cause_counts_and_no_consequence(ends: list[NodeEnd], code: int, why: str) -> None:
    found = decide_verdict_of_nodes(ends)
    assert found.exit_code == code
    assert why in found.why


def test_a_signal_to_all_nodes_is_said_of_none() -> None:
    told = Verdict(143, "signal", "trainkit received SIGTERM", signal=15)
    others = Verdict(137, "trainkit", "node 1 (tk1): trainkit received SIGTERM")
    found = decide_verdict_of_nodes([NodeEnd(0, "tk0", 2, others, True, 15), NodeEnd(1, "tk1", 1, told, received=15)])
    assert (found.exit_code, found.why) == (143, "trainkit received SIGTERM")


NETWORK = "what():  NCCL error: remote process exited or there was a network error"
FRAMES = "\nframe #3: c10d::ProcessGroupNCCL::Watchdog::run()" * 200


@pytest.mark.parametrize(
    ("line", "number", "lost"),
    [
        ("RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:3190", None, True),
        ("torch.distributed.DistBackendError: NCCL error: ncclRemoteError: A call failed possibly due to", None, True),
        ("ValueError: the label 7 is none of 3", None, False),
        (NETWORK, None, True),
        (NETWORK + FRAMES, signal.SIGABRT, True),  # its library aborts it
        (NETWORK + FRAMES, signal.SIGSEGV, False),
    ],
)
def test_words_of_a_lost_peer_are_known(tmp_path: Path, line: str, number: int | None, lost: bool) -> None:
    log = tmp_path / "rank-1.err"
    log.write_text(f"Traceback (most recent call last):\n{line}")
    assert has_lost_peer(Verdict(134, "program", "rank 1 ended", 1, number), str(log)) == lost
    assert not has_lost_peer(Verdict(1, "launcher", "torchrun exited with code 1"), str(log))


def test_a_node_whose_machine_cannot_run_the_plan_is_named_and_blamed_on_all() -> None:
    plan = plan_of(2, f"127.0.0.1:{free_port()}")
    said: list[str] = []
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(assemble, plan, Place(0), lambda start: RunLayout(Path("/nowhere")), said.append, SECONDS)
        second = pool.submit(report_unfit, Rendezvous.of(plan), Place(1), MISSING, said.append, SECONDS)
        errors = [first.exception(SECONDS), second.exception(SECONDS)]
    assert all("cannot run the plan: card 3 is missing" in str(each) for each in errors)
    assert all(isinstance(each, MachineError) and each.hints == ("look for it",) for each in errors)
    assert isinstance(errors[0], RefusedRunError)
    assert errors[0].blamed == socket.gethostname()


def test_node_0_tells_the_others_that_its_own_machine_cannot_run_the_plan() -> None:
    plan = plan_of(2, f"127.0.0.1:{free_port()}")
    said: list[str] = []
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(report_unfit, Rendezvous.of(plan), Place(0), MISSING, said.append, SECONDS)
        second = pool.submit(assemble, plan, Place(1), lambda start: RunLayout(Path("/nowhere")), said.append, SECONDS)
        errors = [first.exception(SECONDS), second.exception(SECONDS)]
    assert all("node 0 (" in str(each) and "card 3 is missing" in str(each) for each in errors)


def addresses(host: str, *ports: int) -> tuple[list[str], str]:
    """Where node 0 listens, and what it says of that."""
    said: list[str] = []
    listeners = assembly.listen(host, ports or (free_port(),), said.append)
    found = [str(each.getsockname()[0]) for each in listeners]
    for each in listeners:
        each.close()
    return found, " ".join(said)


def known_as(monkeypatch: pytest.MonkeyPatch, *known: str) -> None:
    """Every name means these addresses."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", (each, 0)) for each in known])


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", *(["::1"] if socket.has_dualstack_ipv6() else [])])
def test_node_0_listens_only_where_the_others_look_for_it(host: str) -> None:
    found, said = addresses(host)
    assert not said
    assert {each in ("127.0.0.1", "::1") for each in found} == {True}


def test_node_0_listens_on_each_of_its_addresses_that_its_name_means(monkeypatch: pytest.MonkeyPatch) -> None:
    known_as(monkeypatch, "127.0.0.2", "192.0.2.7", "127.0.0.3")  # one is another machine's (RFC 5737)
    monkeypatch.setattr(ipaddress, "ip_address", lambda _: SimpleNamespace(is_loopback=False))
    assert addresses("tk1") == (["127.0.0.2", "127.0.0.3"], "")


@pytest.mark.parametrize(
    ("known", "why"),
    [
        (("127.0.1.1",), "tk1 is 127.0.1.1 on it, which no other machine can reach"),
        (("192.0.2.7",), "tk1 is 192.0.2.7, not an address of this machine"),
    ],
)
def test_node_0_says_that_it_listens_everywhere_where_its_address_is_not_known(
    monkeypatch: pytest.MonkeyPatch, known: tuple[str, ...], why: str
) -> None:
    known_as(monkeypatch, *known)
    found, said = addresses("tk1")
    assert found in (["::"], ["0.0.0.0"])
    assert said == f"node 0 listens on all addresses of this machine: {why}"


def test_a_name_that_node_0_does_not_know_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert "tk1 is not known on it (Name or service not known)" in addresses("tk1")[1]


def test_node_0_takes_the_next_port_where_one_is_taken_on_any_of_its_addresses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        free = free_port()
        listeners = assembly.listen("127.0.0.1", (other.getsockname()[1], free), lambda _: None)
        assert [each.getsockname()[1] for each in listeners] == [free]
        for each in listeners:
            each.close()


def test_the_token_is_the_users_alone_and_gone_when_all_have_met(tmp_path: Path) -> None:
    path, said = roll_call.token_path(str(tmp_path / "runs"), "demo", ("tk1", 29401)), list[str]()
    with roll_call.shared_token(path, said.append) as made:
        assert roll_call.read_token(path) == made
        assert Path(path).stat().st_mode & 0o777 == 0o600
        assert len({roll_call.token_path("runs", "demo", each) for each in (("tk1", 1), ("tk1", 2), ("tk2", 1))}) == 3
    assert not Path(path).exists()
    assert not said


def test_a_start_that_is_refused_leaves_no_folder_that_its_token_made(tmp_path: Path) -> None:
    path = roll_call.token_path(str(tmp_path / "mine" / "runs"), "demo", ("tk1", 29401))
    (tmp_path / "mine").mkdir()
    with pytest.raises(KeyboardInterrupt), roll_call.shared_token(path, lambda _: None):
        raise KeyboardInterrupt
    assert not list((tmp_path / "mine").iterdir())
    with pytest.raises(KeyboardInterrupt), roll_call.shared_token(path, lambda _: None):
        (tmp_path / "mine" / "runs" / "another").touch()
        raise KeyboardInterrupt
    assert [each.name for each in (tmp_path / "mine" / "runs").iterdir()] == ["another"]


def test_a_token_that_another_user_may_have_put_there_is_not_read(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("ab" * 32)
    link.symlink_to(real)
    with pytest.raises(OSError, match="not a regular file"):
        roll_call.read_token(str(link))
    real.write_text("ab" * 31)
    with pytest.raises(OSError, match="it is not a token"):
        roll_call.read_token(str(real))
    if os.geteuid():
        pytest.skip("only root can give a file to another user")
    real.write_text("ab" * 32)
    os.chown(real, 12345, -1)
    with pytest.raises(PermissionError, match="it belongs to another user"):
        roll_call.read_token(str(real))
    os.chown(tmp_path, 12345, -1)  # a server that calls everybody so
    assert roll_call.read_token(str(real)) == bytes.fromhex("ab" * 32)


def test_a_folder_that_keeps_nothing_private_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def published(path: str, content: str, *, mode: int) -> None:
        assert mode == 0o600
        Path(path).write_text(content)
        Path(path).chmod(0o777)  # as some file systems show every file

    monkeypatch.setattr(roll_call, "publish", published)
    said: list[str] = []
    with roll_call.shared_token(str(tmp_path / ".token-1"), said.append):
        assert "cannot be made private" in said[0]


def test_a_token_that_cannot_be_written_is_refused_with_its_folder(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    made = roll_call.shared_token(str(tmp_path / "runs" / ".token-1"), lambda _: None)
    with pytest.raises(MachineError, match="the run's token, which lets other nodes in, cannot be written to"), made:
        pytest.fail("there is a token")


def test_nodes_that_do_not_share_a_folder_say_so(meet: Meet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "UNREAD_SECONDS", 0.5)
    plan = plan_of(2, f"127.0.0.1:{free_port()}")
    first, second = meet(plan, plan1=replace(plan, output_root=str(tmp_path / "another")), seconds=4)
    assert "its token cannot be read here" in str(second.exception(SECONDS))
    assert "waiting for node 1; 127.0.0.1 connected without the run's token" in str(first.exception(SECONDS))


def test_the_token_stands_in_no_file_and_is_not_left(
    meet: Meet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def noted(path: str, content: str, *, mode: int) -> None:
        made.append(content)
        publish(path, content, mode=mode)

    monkeypatch.setattr(roll_call, "publish", noted)
    for each in meet(plan_of(2, f"127.0.0.1:{free_port()}")):
        socket.close(each.result(SECONDS).neighbours[0].fd)
    assert [len(each) for each in made] == [64]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if made[0] in path.read_text() or path.name.startswith(".token")]
