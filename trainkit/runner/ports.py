"""A free TCP port for the ranks' rendezvous."""

from __future__ import annotations

import errno
import random
import socket
from pathlib import Path

from trainkit.errors import MachineError

LOWEST = 15000
TRIES = 200


def free_port() -> int:
    """A port without a listener, and that no outgoing connection will be given before the launcher takes it.

    So it lies below the range from which the kernel numbers outgoing connections. Raises MachineError if none is found.
    """
    highest = _first_ephemeral() - 1
    choice = random.SystemRandom()
    for _ in range(TRIES):
        port = choice.randint(LOWEST, highest)
        if _is_free(port):
            return port
    raise MachineError(
        f"no free TCP port between {LOWEST} and {highest} was found",
        hint="end what listens there, or name one with nodes.rendezvous=host:port",
    )


def _first_ephemeral() -> int:
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        first = 32768  # Linux's default; macOS and the IANA start at 49152
    return first if first > LOWEST + 1000 else 32768


def _is_free(port: int) -> bool:
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):  # noqa: S104  only tried
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind((address, port))
        except OSError as error:
            if family == socket.AF_INET or error.errno == errno.EADDRINUSE:  # other errors mean: no IPv6 here
                return False
    return True
