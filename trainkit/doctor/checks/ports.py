"""Whether the port where the ranks meet is free, and whether there are ports enough for their connections."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Iterator

from trainkit.doctor.surroundings import Aim, Surroundings
from trainkit.doctor.verdict import Level, Verdict, ok
from trainkit.errors import MachineError
from trainkit.runner.ports import free_port

TITLE = "ports"
LIMIT = 3.0
FAST = True

RANGE = "/proc/sys/net/ipv4/ip_local_port_range"
FEW, FEWEST = 1000, 50  # ranks of one machine connect to each other pairwise, for every process group anew


def needs(aim: Aim) -> str:
    """A single process meets nobody."""
    alone = aim.plan is not None and aim.plan.topology.world_size == 1 and aim.plan.rendezvous == "auto"
    return "one process meets nobody" if alone else ""


def run(surroundings: Surroundings, aim: Aim) -> list[Verdict]:
    """What is taken or scarce, else which port would be used."""
    found = [*_rendezvous(surroundings, aim), *_range(surroundings)]
    if any(verdict.level == "problem" for verdict in found):
        return found
    try:
        fine = ok(f"port {free_port()} is one that is free")
    except MachineError as error:
        fine = Verdict("problem", str(error), (), ("ss -ltnp      # who listens",))
    return [*found, fine]


def _rendezvous(surroundings: Surroundings, aim: Aim) -> Iterator[Verdict]:
    """The recipe's own port, where node 0 is this machine."""
    if aim.plan is None or aim.plan.rendezvous == "auto" or aim.node_rank != 0:
        return
    host, _, text = aim.plan.rendezvous.rpartition(":")
    port = int(text)
    if is_here(host.strip("[]"), surroundings.facts.hostname) and (why := taken(port)):
        look = (
            f"ss -ltnp 'sport = :{port}'      # who listens there",
            f"trainkit run RECIPE nodes.rendezvous={host}:PORT",
        )
        yield Verdict("problem", f"port {port} of nodes.rendezvous cannot be used: {why}", (aim.plan.rendezvous,), look)
    first, last = _bounds(surroundings)
    if first <= port <= last:
        what = "an outgoing connection may be given the rendezvous port before it is used"
        evidence = (f"nodes.rendezvous {aim.plan.rendezvous}", f"{surroundings.under(RANGE)}: {first} to {last}")
        lower = f"trainkit run RECIPE nodes.rendezvous={host}:{max(first - 1000, 1024)}"
        yield Verdict("note", what, evidence, (lower,))


def is_here(host: str, own_name: str) -> bool:
    """Whether a host is this machine, as far as can be told without asking a name service."""
    if host in ("localhost", own_name):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True


def taken(port: int) -> str:
    """Why a port cannot be listened on; empty where it can."""
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):  # noqa: S104  only looked at
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a finished run's leftover does no harm
                probe.bind((address, port))
        except OSError as error:
            if family == socket.AF_INET or error.errno == errno.EADDRINUSE:  # other errors mean: no IPv6 here
                return (error.strerror or str(error)).lower()
    return ""


def _bounds(surroundings: Surroundings) -> tuple[int, int]:
    """The range from which outgoing connections are numbered; Linux's default where it cannot be read."""
    try:
        first, last = surroundings.under(RANGE).read_text().split()
        return int(first), int(last)
    except (OSError, ValueError):
        return 32768, 60999


def _range(surroundings: Surroundings) -> Iterator[Verdict]:
    first, last = _bounds(surroundings)
    if last - first < FEW:
        fix = ('sudo sysctl -w net.ipv4.ip_local_port_range="32768 60999"',)
        evidence = (f"{surroundings.under(RANGE)}: {first} to {last}",)
        level: Level = "problem" if last - first < FEWEST else "warning"
        yield Verdict(level, f"only {max(last - first + 1, 0)} ports for outgoing connections", evidence, fix)
