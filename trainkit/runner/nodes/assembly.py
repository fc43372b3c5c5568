"""The nodes of a run find one another, agree on what is started, and start together."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import ipaddress
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import trainkit
from trainkit.errors import MachineError, TrainkitError
from trainkit.plan.model import Plan
from trainkit.plan.serialize import plan_to_json
from trainkit.runner.nodes.agreement import Report, Say, Start, ToldError, digest_of
from trainkit.runner.nodes.control import Neighbour
from trainkit.runner.nodes.joining import join
from trainkit.runner.nodes.line import Line
from trainkit.runner.nodes.open_files import allow
from trainkit.runner.nodes.roll_call import BACKLOG, SEE_SECONDS, RollCall
from trainkit.runner.nodes.token import made_token, read_token, token_path
from trainkit.runner.rendezvous import LOWEST_PORT, free_port
from trainkit.runner.rundir.layout import RunLayout
from trainkit.schedulers.place import Place

START_SECONDS = 600.0  # for all nodes to come: as long as torchrun waits
HIGHEST_PORT = 65535
CANDIDATES = 8  # ports of node 0 that others try, where only the job is known
LATER_SECONDS = 15.0  # that others wait beyond node 0, which knows who is missing
UNFIT_SECONDS = 20.0  # that node 0, where it cannot run the plan, waits to tell the others
SPAN = 15_000  # ports from the lowest one on, all below those of outgoing connections
# What a machine decides for itself, and may be different on each node.
OWN_PARTS = ("cards", "downloads", "notices", "resume.reason", "environment.set.OMP_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class Assembly:
    """What all nodes have agreed on, and the connections to the others, which the guardian is to have.

    open_files: the limit that node 0 had before it was raised for these, which the ranks are to have; 0 if it was not.
    """

    start: Start
    neighbours: tuple[Neighbour, ...] = ()
    open_files: int = 0


def assemble(
    plan: Plan,
    place: Place,
    make: Callable[[Start], RunLayout],
    say: Say,
    seconds: float = START_SECONDS,
    attempt: int = 1,
    folder: str = "",
) -> Assembly:
    """Meet the other nodes. make: on node 0, a run directory with everything in it, once all are there.

    folder: where the run's token lies meanwhile; empty is output.root.

    Raises MachineError, on every node, when one does not come, planned something else, or does not see the directory.
    """
    leaves, own = comparable(plan), os.urandom(8).hex()
    host, start_of = os.uname().nodename, place.start or plan.name
    report = Report(place.node, host, start_of, trainkit.__version__, digest_of(leaves), own)
    meeting = Meeting.of(plan, folder)
    master, _ = where(meeting, place)
    if place.node:
        return _started(*_join(report, leaves, meeting, place, say, seconds + LATER_SECONDS), master)
    open_files = allow(plan.topology.nodes)
    with _roll_call(report, leaves, meeting, place, say) as call:
        try:
            call.wait(seconds)
            start = Start("", attempt, master, meeting.ranks[1] if meeting.ranks else free_port())
            start = start.at(str(make(start).root))
            call.start(start)
        except BaseException as error:  # passed on: the others are not to wait for a node 0 that has ended
            why = str(error) if isinstance(error, Exception) else "it was told to end"
            call.dismiss(f"{report.name} has ended before the start: {why}")
            raise
    return Assembly(start, tuple(call.neighbours()), open_files)


@dataclass(frozen=True, slots=True)
class Meeting:
    """What nodes know of their run before each has a plan. rendezvous: as the recipe says it.

    folder: one that all share, for the run's token.
    """

    name: str
    nodes: int
    rendezvous: str
    folder: str

    @classmethod
    def of(cls, plan: Plan, folder: str = "") -> Meeting:
        """That of a plan. folder: the run directory, where there is one already."""
        return cls(plan.name, plan.topology.nodes, plan.rendezvous, folder or plan.output_root)

    @property
    def ranks(self) -> tuple[str, int] | None:
        """Where they are to meet; None where that is decided when all nodes are there."""
        host, _, port = self.rendezvous.rpartition(":")
        return (host.strip("[]"), int(port)) if self.rendezvous != "auto" else None


def report_unfit(meeting: Meeting, place: Place, error: TrainkitError, say: Say, seconds: float) -> None:
    """Tell the other nodes that this one cannot run the plan, so that none waits for it. error: why.

    Raises RefusedRunError on node 0; on another one what node 0 answers, if it does.
    """
    hint, host, start = "; ".join(error.hints), os.uname().nodename, place.start or meeting.name
    report = Report(place.node, host, start, trainkit.__version__, "", unfit=str(error), hint=hint)
    if place.node:
        _join(report, {}, meeting, place, say, seconds)[0].close()
        return
    with _roll_call(report, {}, meeting, place, say) as call:
        call.wait(min(seconds, UNFIT_SECONDS))
        call.refuse("", "")


def _join(
    report: Report, leaves: Mapping[str, Any], meeting: Meeting, place: Place, say: Say, seconds: float
) -> tuple[Line, Start]:
    master, ports = where(meeting, place)

    def token(at: tuple[str, int]) -> bytes:
        return read_token(token_path(meeting.folder, report.start, at))

    return join(report, leaves, [(master, port) for port in ports], token, seconds, say, meeting.ranks)


@contextlib.contextmanager
def _roll_call(
    report: Report, leaves: Mapping[str, Any], meeting: Meeting, place: Place, say: Say
) -> Iterator[RollCall]:
    """Node 0's, with what it listens on and the run's token, both of which end with it."""
    master, ports = where(meeting, place)
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(each) for each in listen(master, ports, say)]
        path = token_path(meeting.folder, report.start, (master, listeners[0].getsockname()[1]))
        token = stack.enter_context(made_token(path, say))
        yield RollCall(listeners, token, report, leaves, meeting.nodes, say, place.hosts)


def _started(line: Line, start: Start, master: str) -> Assembly:
    """What another node than 0 says when it is told to start, and what that comes to."""
    plan = str(RunLayout.of(start.run_dir).plan)
    until = time.monotonic() + SEE_SECONDS / 2
    while not (seen := os.path.exists(plan)) and time.monotonic() < until:
        time.sleep(0.2)
    writable = seen and os.access(start.run_dir, os.W_OK)
    why = "" if writable else f"{'may not write to' if seen else 'does not see'} {start.run_dir}"
    line.send({"why": why} if why else {"ready": True})
    answer = line.next_message(SEE_SECONDS * 2)
    if answer != {"go": True}:
        line.close()
        found = answer or {}
        raise ToldError(str(found.get("refused", "node 0 has ended")), hint=str(found.get("hint", "")))
    return Assembly(start, (Neighbour(0, master, line.detach()),))


def where(meeting: Meeting, place: Place) -> tuple[str, tuple[int, ...]]:
    """The address of node 0, and the ports at which it may be listening for the others."""
    if meeting.ranks:
        return _name(meeting.ranks[0]), (_next(meeting.ranks[1]),)
    if not place.hosts or not place.start:
        raise MachineError(
            f"the plan has {meeting.nodes} nodes, and nodes.rendezvous does not say where they meet",
            hint="set nodes.rendezvous to host:port of node 0",
        )
    # Derived from the job and its step: two jobs on the same nodes do not meet.
    seed = int.from_bytes(hashlib.sha256(place.start.encode()).digest()[:8])
    return _name(place.hosts[0]), tuple(LOWEST_PORT + (seed + 977 * each) % SPAN for each in range(CANDIDATES))


def _name(host: str) -> str:
    """The same, where it can be one."""
    try:
        host.encode("idna")  # as a look-up does, which would end with the same error
    except UnicodeError as error:
        hint = "the parts of a name between its dots have 1 to 63 characters"
        raise MachineError(f"node 0 cannot be called {host}: no name is written so", hint=hint) from error
    return host


def _next(port: int) -> int:
    """The port above, where there is one."""
    if port == HIGHEST_PORT:
        hint = "set nodes.rendezvous to a lower port"
        raise MachineError(f"the nodes report at the port above that of nodes.rendezvous; {port} has none", hint=hint)
    return port + 1


def listen(host: str, ports: Sequence[int], say: Say) -> list[socket.socket]:
    """Listen where the other nodes look for node 0: at its addresses, on the first of the ports that is free.

    host: what the others call it. Where its own addresses are not known by that, all of this machine's, and it is said.
    """
    addresses, why = _own_addresses(host)
    for port in ports:
        with contextlib.ExitStack() as begun:
            try:
                found = [begun.enter_context(each) for each in _listening(addresses, port)]
                if not found:
                    reason = why or f"{host} is {', '.join(addresses)}, which is no address of this machine"
                    say(f"node 0 listens on all addresses of this machine: {reason}")
                    both = socket.has_dualstack_ipv6()
                    family = socket.AF_INET6 if both else socket.AF_INET
                    found = [socket.create_server(("", port), family=family, backlog=BACKLOG, dualstack_ipv6=both)]
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise MachineError(f"port {port} cannot be listened on: {error.strerror}") from error
            else:
                begun.pop_all()
                return found
    raise MachineError(
        f"port {', '.join(map(str, ports))} is taken on this node, where the others are to report",
        hint="set nodes.rendezvous to another port; the next one above is used, too",
    )


def _own_addresses(host: str) -> tuple[list[str], str]:
    """What a name of node 0 means on node 0; else none, and why other nodes would not find it there."""
    try:
        found = dict.fromkeys(str(each[4][0]) for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
    except OSError as error:
        return [], f"{host} is not known on it ({error.strerror})"
    outside = [each for each in found if not ipaddress.ip_address(each).is_loopback]
    # Debian has a machine's own name mean 127.0.1.1 on it (Debian Reference, 5.1.1), and not on others.
    if not outside and host not in found and host.partition(".")[0] != "localhost":
        return [], f"{host} is {', '.join(found)} on it, where no other machine finds it"
    return outside or [*found], ""


def _listening(addresses: Sequence[str], port: int) -> Iterator[socket.socket]:
    """On those of the addresses that this machine has."""
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            yield socket.create_server((address, port), family=family, backlog=BACKLOG)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL):
                raise


def comparable(plan: Plan) -> dict[str, Any]:
    """The leaves of a plan that all nodes must have alike, by their path."""
    data = plan_to_json(plan)
    for command in data["commands"]:
        words = command["argv"]
        if "--cores" in words:
            words[words.index("--cores") + 1] = ""
    for group in data["topology"]["groups"]:
        group["devices"] = len(group["devices"])
    return {path: value for path, value in _leaves(data, "") if not path.startswith(OWN_PARTS)}


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and path.partition(".")[0] != "files":
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path}.{index}")
    else:
        # Each node may have trainkit in a place of its own.
        yield path, value.replace(sys.prefix, "<environment>") if isinstance(value, str) else value
