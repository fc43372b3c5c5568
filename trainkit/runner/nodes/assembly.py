"""How the nodes of a run find one another: where node 0 listens, how the others join it, and what all agree on."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import ipaddress
import os
import resource
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import trainkit
from trainkit.errors import MachineError, TrainkitError
from trainkit.launch_plan.model import Plan, plan_to_json
from trainkit.runner.nodes.connection import MOST, Connection
from trainkit.runner.nodes.control import Neighbour
from trainkit.runner.nodes.roll_call import (
    BACKLOG,
    FIRST_BYTES,
    NODE_0,
    OTHER,
    SAY_SECONDS,
    SEE_SECONDS,
    Report,
    ReportedElsewhereError,
    RollCall,
    Say,
    Start,
    digest_of,
    is_hex,
    is_proof,
    new_nonce,
    proof,
    read_token,
    say_after,
    shared_token,
    token_path,
)
from trainkit.runner.rendezvous import LOWEST_PORT, free_port
from trainkit.runner.rundir.layout import RunLayout
from trainkit.schedulers.base import Place

SPARE = 512  # open files for everything else: logs, locks, ranks, and stray connections to the port


def raise_open_file_limit(nodes: int) -> int:
    """Raise node 0's soft limit of open files, often 1,024, to a connection for each node.

    Returns the limit before, 0 if it was not raised. Raises MachineError if the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = nodes + SPARE
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return 0
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise MachineError(
            f"node 0 of {nodes} nodes needs {needed} open files, for a connection to each, and may have {hard}",
            hint="raise the hard limit on it: ulimit -Hn, or LimitNOFILE of the service that starts the job",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return soft


CONNECT_SECONDS = 3.0
AGAIN_SECONDS, MOST_AGAIN, LONGER = 0.2, 2.0, 1.3  # between attempts: a thousand nodes may be waiting for one
GONE_SECONDS = 30.0  # how long a node 0 that has disconnected may take to come back
ANSWER_SECONDS = 10.0  # for node 0's answer: a listener that does not answer is another program
UNREAD_SECONDS = 60.0  # to find the token of a node 0 that has answered: NFS shows new files late

SHARED = (
    "set output.root to a folder that all nodes share, and start all nodes with the same command in the same folder"
)

ReadToken = Callable[[tuple[str, int]], bytes]  # address of node 0 -> its token; raises OSError


class JoinFailure(NamedTuple):
    """Why node 0 was not joined at an address.

    met: it answered, then disconnected; unread: its token cannot be read.
    """

    why: str
    met: bool = False
    unread: bool = False


def join_node_0(
    mine: Report,
    leaves: Mapping[str, Any],
    where: Iterable[tuple[str, int]],
    read_token: ReadToken,
    seconds: float,
    say: Say,
    ranks: tuple[str, int] | None = None,
) -> tuple[Connection, Start]:
    """Report to node 0, and wait until it lets all nodes start. leaves: of the plan, sent if node 0's plan differs.

    ranks: the address where the ranks meet, if known in advance; a listener there belongs to another run, or to this
    one. Raises MachineError when node 0 does not answer in time, or refuses the run.
    """
    places, began = [*where], time.monotonic()
    host, why, met = _address(places[0]), "", False
    pause, say_at, begun, unread = AGAIN_SECONDS, SAY_SECONDS, 0.0, float("inf")
    while (left := began + seconds - time.monotonic()) > 0:
        failed = list[JoinFailure]()
        for place in places:
            found = _report_to_node_0(mine, leaves, place, read_token, left)
            if not isinstance(found, JoinFailure):
                return found
            failed.append(found)
            why = found.why or why
            if found.met and not met:  # waited for less long than a node 0 that has not started yet
                met, seconds = True, min(seconds, time.monotonic() - began + GONE_SECONDS)
        passed = time.monotonic() - began
        without_token = next((each.why for each in failed if each.unread), None)
        unread = min(unread, passed) if without_token is not None else float("inf")
        if passed - unread > UNREAD_SECONDS:
            raise MachineError(f"{mine.name} cannot join node 0 at {host}: {without_token}", hint=SHARED)
        if passed >= say_at:
            say_at = say_after(say_at)
            begun = (begun or passed) if ranks is not None and _has_listener(ranks) else 0.0
            already = f"ranks of a run already meet at {_address(ranks)}" if ranks is not None and begun else ""
            if begun and passed - begun > GONE_SECONDS:
                hint = "start each node once; or wait for the end of that run"
                raise MachineError(f"{mine.name} came too late, or was started twice: {already}", hint=hint)
            say(f"waiting for node 0 at {host}, {passed:.0f} s ({'; '.join(filter(None, (why, already)))})")
        time.sleep(pause)
        pause = min(pause * LONGER, MOST_AGAIN)
    hint = "see on its console why it ended" if met else "start it first"
    raise MachineError(f"node 0 was not reached at {host} within {seconds:.0f} s: {why}", hint=hint)


def _address(place: tuple[str, int]) -> str:
    return f"{place[0]}:{place[1]}"


def _has_listener(place: tuple[str, int]) -> bool:
    try:
        socket.create_connection(place, CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def _report_to_node_0(
    mine: Report, leaves: Mapping[str, Any], place: tuple[str, int], read_token: ReadToken, seconds: float
) -> tuple[Connection, Start] | JoinFailure:
    """Report on one connection. Raises MachineError if node 0 refuses the run."""
    until = time.monotonic() + seconds
    try:
        line = Connection(socket.create_connection(place, CONNECT_SECONDS))
    except OSError as error:
        return JoinFailure((error.strerror or str(error)).lower())
    if (failed := _unproven(line, place, read_token, until)) is not None:
        line.close()
        return failed
    line.send(asdict(mine))
    message = line.next_message(min(seconds, ANSWER_SECONDS))
    if met := message is not None and ("leaves" in message or "here" in message):
        if "leaves" in message:
            line.send({"leaves": dict(leaves)})
        message = line.next_message(max(0.0, until - time.monotonic()))
    if message is not None and (start := Start.read(message.get("start"))) is not None:
        return line, start
    line.close()
    if message is None:
        return JoinFailure("it has disconnected" if met else "it does not answer", met)
    if "refused" in message:
        raise ReportedElsewhereError(str(message["refused"]), hint=str(message.get("hint", "")))
    return JoinFailure("another run answers there" if "other" in message else "another program answers there")


def _unproven(line: Connection, place: tuple[str, int], read_token: ReadToken, until: float) -> JoinFailure | None:
    """Prove to each other that both sides have the token; None if they have."""
    line.most, nonce = FIRST_BYTES, new_nonce()
    line.send({"nonce": nonce})
    answer = line.next_message(min(until - time.monotonic(), ANSWER_SECONDS))
    if answer is None:
        return JoinFailure("it does not answer")
    if not is_hex(answer.get("nonce")):
        return JoinFailure("another program answers there")
    # Look for the file only now: a network file system caches for a while that a file is missing.
    try:
        token = read_token(place)
    except OSError as error:
        return JoinFailure(
            f"its token cannot be read here: {error.filename}: {(error.strerror or '').lower()}", unread=True
        )
    nonces = (str(answer["nonce"]), nonce)
    if not is_proof(answer.get("proof"), token, NODE_0, nonces):
        return JoinFailure("another run answers there, or a program without the run's token")
    line.send({"proof": proof(token, OTHER, nonces)})
    answer = line.next_message(min(until - time.monotonic(), ANSWER_SECONDS))
    line.most = MOST
    return None if answer == {"proven": True} else JoinFailure("it does not let this node in")


START_SECONDS = 600.0  # for all nodes to come: as long as torchrun waits
HIGHEST_PORT = 65535
CANDIDATES = 8  # ports of node 0 that the others try, if only the job is known
LATER_SECONDS = 15.0  # that the other nodes wait longer than node 0, which can name the missing ones
UNFIT_SECONDS = 20.0  # that a node 0 that cannot run the plan waits, to tell the others
SPAN = 15_000  # ports from the lowest one on, all below those of outgoing connections
# Parts of the plan that may differ between nodes.
OWN_PARTS = ("cards", "downloads", "notices", "resume.reason", "environment.set.OMP_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class Assembly:
    """What all nodes have agreed on, and the connections to the others, which are handed to the guardian.

    open_files: node 0's limit before it was raised for the connections, for the ranks; 0 if it was not raised.
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
    """Meet the other nodes. make: makes the complete run directory on node 0, once all nodes are there.

    folder: of the run's token; empty is output.root.

    Raises MachineError, on every node, when one does not come, planned something else, or does not see the directory.
    """
    leaves, own = comparable_leaves(plan), os.urandom(8).hex()
    host, start_of = os.uname().nodename, place.start or plan.name
    report = Report(place.node, host, start_of, trainkit.__version__, digest_of(leaves), own)
    rendezvous = Rendezvous.of(plan, folder)
    master, _ = node_0_address(rendezvous, place)
    if place.node:
        line, start = _join(report, leaves, rendezvous, place, say, seconds + LATER_SECONDS)
        _confirm(line, start)
        return Assembly(start, (Neighbour(0, master, line.detach()),))
    open_files = raise_open_file_limit(plan.topology.nodes)
    with _roll_call(report, leaves, rendezvous, place, say) as call:
        try:
            call.wait(seconds)
            start = Start("", attempt, master, rendezvous.ranks[1] if rendezvous.ranks else free_port())
            start = start.at(str(make(start).root))
            call.start(start)
        except BaseException as error:  # so that the others do not wait for a node 0 that is gone
            why = str(error) if isinstance(error, Exception) else "it was told to end"
            call.dismiss(f"{report.name} has ended before the start: {why}")
            raise
    return Assembly(start, tuple(call.neighbours()), open_files)


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """How the nodes of a run meet, known before each has a plan. address: `nodes.rendezvous` of the recipe.

    folder: for the run's token, shared by all nodes.
    """

    name: str
    nodes: int
    address: str
    folder: str

    @classmethod
    def of(cls, plan: Plan, folder: str = "") -> Rendezvous:
        """folder: the run directory, if there is one already."""
        return cls(plan.name, plan.topology.nodes, plan.rendezvous, folder or plan.output_root)

    @property
    def ranks(self) -> tuple[str, int] | None:
        """The address where the ranks meet; None if it is decided when all nodes are there."""
        host, _, port = self.address.rpartition(":")
        return (host.strip("[]"), int(port)) if self.address != "auto" else None


def report_unfit(rendezvous: Rendezvous, place: Place, error: TrainkitError, say: Say, seconds: float) -> None:
    """Tell the other nodes that this one cannot run the plan, so that none waits for it. error: why.

    Raises RefusedRunError on node 0; on another node ReportedElsewhereError, if node 0 answers.
    """
    hint, host, start = "; ".join(error.hints), os.uname().nodename, place.start or rendezvous.name
    report = Report(place.node, host, start, trainkit.__version__, "", unfit=str(error), hint=hint)
    if place.node:
        _join(report, {}, rendezvous, place, say, seconds)[0].close()
        return
    with _roll_call(report, {}, rendezvous, place, say) as call:
        call.wait(min(seconds, UNFIT_SECONDS))
        call.refuse("", "")


def _join(
    report: Report, leaves: Mapping[str, Any], rendezvous: Rendezvous, place: Place, say: Say, seconds: float
) -> tuple[Connection, Start]:
    master, ports = node_0_address(rendezvous, place)

    def token(at: tuple[str, int]) -> bytes:
        return read_token(token_path(rendezvous.folder, report.start, at))

    return join_node_0(report, leaves, [(master, port) for port in ports], token, seconds, say, rendezvous.ranks)


@contextlib.contextmanager
def _roll_call(
    report: Report, leaves: Mapping[str, Any], rendezvous: Rendezvous, place: Place, say: Say
) -> Iterator[RollCall]:
    """Node 0's roll call; its listeners and the run's token end with it."""
    master, ports = node_0_address(rendezvous, place)
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(each) for each in listen(master, ports, say)]
        path = token_path(rendezvous.folder, report.start, (master, listeners[0].getsockname()[1]))
        token = stack.enter_context(shared_token(path, say))
        yield RollCall(listeners, token, report, leaves, rendezvous.nodes, say, place.hosts)


def _confirm(line: Connection, start: Start) -> None:
    """Tell node 0 whether this node sees the run directory, and wait for its answer."""
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
        raise ReportedElsewhereError(str(found.get("refused", "node 0 has ended")), hint=str(found.get("hint", "")))


def node_0_address(rendezvous: Rendezvous, place: Place) -> tuple[str, tuple[int, ...]]:
    """The host name of node 0, and the ports at which it may listen for the other nodes. Raises MachineError."""
    if rendezvous.ranks:
        host, port = rendezvous.ranks
        if port == HIGHEST_PORT:
            what = f"the nodes report at the port above that of nodes.rendezvous; {port} has none"
            raise MachineError(what, hint="set nodes.rendezvous to a lower port")
        ports: tuple[int, ...] = (port + 1,)
    elif place.hosts and place.start:
        # Derived from the job and its step, so that two jobs on the same nodes do not meet.
        seed = int.from_bytes(hashlib.sha256(place.start.encode()).digest()[:8])
        host, ports = place.hosts[0], tuple(LOWEST_PORT + (seed + 977 * each) % SPAN for each in range(CANDIDATES))
    else:
        what = f"the plan has {rendezvous.nodes} nodes, and nodes.rendezvous does not say where they meet"
        raise MachineError(what, hint="set nodes.rendezvous to host:port of node 0")
    try:
        host.encode("idna")  # as a look-up would: it fails with the same error
    except UnicodeError as error:
        hint = "each part of a host name between dots has 1 to 63 characters"
        raise MachineError(f"{host} is not a valid host name for node 0", hint=hint) from error
    return host, ports


def listen(host: str, ports: Sequence[int], say: Say) -> list[socket.socket]:
    """Listen where the other nodes look for node 0: at its addresses, on the first of the ports that is free.

    host: as the others call it. If it leads to no address of this machine, listens on all of them, and says so.
    """
    addresses, why = _own_addresses(host)
    for port in ports:
        with contextlib.ExitStack() as begun:
            try:
                found = [begun.enter_context(each) for each in _servers(addresses, port)]
                if not found:
                    reason = why or f"{host} is {', '.join(addresses)}, not an address of this machine"
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
        hint="set nodes.rendezvous to another port; the next higher one is used too",
    )


def _own_addresses(host: str) -> tuple[list[str], str]:
    """The addresses of node 0's name on node 0; or none, and why other nodes would not reach it there."""
    try:
        found = dict.fromkeys(str(each[4][0]) for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
    except OSError as error:
        return [], f"{host} is not known on it ({error.strerror})"
    outside = [each for each in found if not ipaddress.ip_address(each).is_loopback]
    # Debian maps a machine's own name to 127.0.1.1 on that machine (Debian Reference, 5.1.1).
    if not outside and host not in found and host.partition(".")[0] != "localhost":
        return [], f"{host} is {', '.join(found)} on it, which no other machine can reach"
    return outside or [*found], ""


def _servers(addresses: Sequence[str], port: int) -> Iterator[socket.socket]:
    """A listener on each of the addresses that this machine has."""
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            yield socket.create_server((address, port), family=family, backlog=BACKLOG)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL):
                raise


def comparable_leaves(plan: Plan) -> dict[str, Any]:
    """The leaves of a plan that must be the same on all nodes, by their path."""
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
        # trainkit may be installed in another folder on each node.
        yield path, value.replace(sys.prefix, "<environment>") if isinstance(value, str) else value
