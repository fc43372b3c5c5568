"""Where the ranks meet: this node's rank, the address of node 0, a free port."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from trainkit.errors import MachineError
from trainkit.launch_plan.model import Plan
from trainkit.schedulers.base import Place
from trainkit.schedulers.registry import NODE_RANKS, place_in

LOOPBACK = "127.0.0.1"
LOWEST_PORT = 15000
TRIES = 200


def node_place(plan: Plan, given: int | Place | None, environ: Mapping[str, str]) -> Place:
    """Which node of the plan this one is, as given or by the scheduler's variables. Raises MachineError if unknown."""
    nodes, found = plan.topology.nodes, place_in(environ)
    if nodes == 1:
        return Place(0)
    if isinstance(given, Place):
        found = given
    elif given is not None:
        found = replace(found, node=given) if isinstance(found, Place) else Place(given)
    if not isinstance(found, Place):
        raise MachineError(
            f"the plan has {nodes} nodes, and it is unknown which of them this one is",
            hint=f"pass --node-rank N, or start under a scheduler that sets one of {', '.join(NODE_RANKS)}",
        )
    if not 0 <= found.node < nodes:
        raise MachineError(
            f"node rank {found.node} does not fit a plan of {nodes} nodes",
            hint=f"node ranks are 0 to {nodes - 1}; nodes.count says how many nodes there are",
        )
    return found


def group_of(plan: Plan, rank: int) -> int:
    """Index of a node's group: nodes are numbered through all groups in order."""
    groups = [index for index, group in enumerate(plan.topology.groups) for _ in range(group.count)]
    return groups[rank]


def free_port() -> int:
    """A TCP port without a listener. Raises MachineError if none is found."""
    try:
        ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        ephemeral = 0
    # Below the range of outgoing connections, none of which can get the port before the launcher takes it. The range
    # starts at 32768 on Linux by default, at 49152 on macOS.
    highest = (ephemeral if ephemeral > LOWEST_PORT + 1000 else 32768) - 1
    choice = random.SystemRandom()
    for _ in range(TRIES):
        port = choice.randint(LOWEST_PORT, highest)
        if not why_port_is_taken(port):
            return port
    raise MachineError(
        f"no free TCP port between {LOWEST_PORT} and {highest} was found",
        hint="end a program that listens there, or set a port with nodes.rendezvous=host:port",
    )


def why_port_is_taken(port: int) -> str:
    """Why a port cannot be listened on; empty if it can."""
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):  # noqa: S104  only tried
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                # As torch's store does, so that a finished run's connections in TIME_WAIT do not block the port
                # (socket(7)).
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((address, port))
        except OSError as error:
            if family == socket.AF_INET or error.errno == errno.EADDRINUSE:  # other errors mean: no IPv6 here
                return (error.strerror or str(error)).lower()
    return ""


def local_address(master: str, nodes: int) -> str:
    """This machine's address on the route to node 0. Raises MachineError if node 0's name is unknown."""
    if nodes == 1:
        return LOOPBACK
    try:
        # Port 9 discards (RFC 863), and nothing is ever sent there.
        family, _, _, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # a datagram socket sends nothing: the kernel only chooses the route
            return str(probe.getsockname()[0])
    except OSError as error:
        raise MachineError(
            f"the name of node 0, {master}, cannot be resolved: {error.strerror or error}",
            hint="check nodes.rendezvous and this machine's name resolution",
        ) from error
