"""Who ends a launcher when trainkit and its guardian are killed together: before there are ranks nobody else could.

A fork of the guardian that holds nothing of the run and sleeps. Once there are ranks their wrappers notice the same
and end them with the grace time; what is left then is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection

from trainkit.runner.supervisor.processes import LINUX, descendants, is_alive, send_signal

LOOK_SECONDS = 1.0
MARGIN_SECONDS = 5.0  # beyond the grace time, for wrappers to notice and to end


def post(ward: int, keepers: Collection[int], grace: float) -> int:
    """The pid of one that kills a process, with all below it, when no keeper is left; 0 where the system has no /proc.

    It ends with its ward. grace: seconds that ranks below have to end by themselves.
    """
    if not LINUX:
        return 0
    pid = os.fork()
    if pid == 0:
        try:
            _keep_watch(ward, keepers, grace)
        finally:
            os._exit(0)
    return pid


def _keep_watch(ward: int, keepers: Collection[int], grace: float) -> None:
    signal.set_wakeup_fd(-1)
    # Held open here, neither trainkit nor other nodes would see that the guardian is gone, and locks would stay.
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            os.close(fd)
    while any(map(is_alive, keepers)):
        if not is_alive(ward):
            return
        time.sleep(LOOK_SECONDS)
    # A wrapper may be ending what its program has left: killed meanwhile, it would leave that to nobody.
    until = time.monotonic() + grace + MARGIN_SECONDS
    while is_alive(ward) and time.monotonic() < until:
        time.sleep(LOOK_SECONDS)
    if is_alive(ward):
        send_signal([ward, *descendants(ward)], signal.SIGKILL)
