"""Where the guardian's process begins: apart from its terminal's signals, and with the attempt from trainkit."""

from __future__ import annotations

import os
import signal
import socket
from typing import Any, NoReturn

from trainkit.runner.supervisor import cleanup, containers
from trainkit.runner.supervisor.channel import Channel, Spec
from trainkit.runner.supervisor.guardian import Guardian
from trainkit.runner.supervisor.processes import become_subreaper

IGNORED = ("INT", "TERM", "HUP", "QUIT", "TSTP", "TTIN", "TTOU", "USR1", "USR2", "PIPE")


def main(fd: int) -> NoReturn:
    """Entry point: the socket's descriptor; the environment is the ranks', standard streams are the launcher's."""
    for name in IGNORED:
        signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_IGN)
    become_subreaper()
    # Held open by a launcher, the socket would not tell trainkit that its guardian is gone.
    os.set_inheritable(fd, False)
    trainkit = Channel(socket.socket(fileno=fd))
    messages: list[dict[str, Any]] = []
    while not messages:
        received = trainkit.receive()
        if received is None:
            os._exit(1)
        messages += received
    try:
        Guardian(Spec(**messages[0]), trainkit, messages[1:]).run()
    except BaseException:
        containers.end_containers(messages[0].get("end", ()), os.environ)
        cleanup.kill_descendants()  # not even a bug here may leave anything; its traceback is in the launcher's log
        raise
    os._exit(0)
