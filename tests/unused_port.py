"""A TCP port for processes that are still to start."""

from __future__ import annotations

import random
import socket


def unused_port() -> int:
    """Nobody listens on it, and the system gives it to no connection: those have the numbers from 32768 on (Linux)."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)  # Hypothesis seeds the common one
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
