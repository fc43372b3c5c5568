"""A node of a run that another machine holds over standard input: what comes over it are orders, its end is the end.

The values of variables that the recipe takes from the submitter's environment come over it too, so that they stand in
no command line and no file. Nothing of it is echoed: there is no terminal.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
import threading
import time
from collections.abc import Iterator

import trainkit
from trainkit.errors import MachineError
from trainkit.files import parse_json
from trainkit.jobs.records import read_submission
from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.supervisor.processes import PASSED_ON, end_self

MARK = b"\x1etrainkit-node "  # before the one line that is for the submitter, and not for people
SILENT_SECONDS = 300.0  # without a beat, for a submitter whose machine is gone or asleep
SEE_SECONDS = 10.0  # for the run directory to be seen: NFS shows new files late
CHUNK = 1 << 16
MOST = 1 << 24  # bytes of a line
GONE = 128 + signal.SIGTERM


def hold_input(layout: RunLayout) -> None:
    """Say that this node is there, take the variables, and from then on obey what comes; ends where nothing comes.

    Raises SystemExit when the submitter is gone, or this machine does not see the run directory.
    """
    orders = os.dup(0)  # which no child inherits
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    until = time.monotonic() + SEE_SECONDS
    while not layout.plan.exists():
        if time.monotonic() > until:
            _tell({"refused": f"it does not see {layout.root}"})
            raise SystemExit(4)
        time.sleep(0.2)
    if not os.access(layout.root, os.W_OK):
        _tell({"refused": f"it may not write to {layout.root}"})
        raise SystemExit(4)
    _tell({"ready": True, "host": os.uname().nodename, "version": trainkit.__version__})
    held_by = read_submission(layout.root)
    come = Orders(orders)
    lines = iter(come)
    first = next(lines, None)
    if first is None:
        raise SystemExit(GONE)
    values = parse_json(first).get("environ")
    if not isinstance(values, dict):
        raise MachineError("what holds this node is no trainkit submit")
    os.environ.update({str(name): str(value) for name, value in values.items()})
    host = held_by.host if held_by else "another machine"
    threading.Thread(target=_obey, args=(lines, come, host), daemon=True).start()


def _tell(what: dict[str, object]) -> None:
    sys.stdout.buffer.write(MARK + json.dumps(what).encode() + b"\n")
    sys.stdout.buffer.flush()


class Orders:
    """Lines as they come, to the end of the input, or of our patience. silent: whether it was patience that ended."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.silent = False

    def __iter__(self) -> Iterator[bytes]:
        rest = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._fd, selectors.EVENT_READ)
            while selector.select(SILENT_SECONDS):
                data = os.read(self._fd, CHUNK)
                *lines, rest = (rest + data).split(b"\n")
                yield from lines
                if not data or len(rest) > MOST:
                    return
        self.silent = True


def _obey(lines: Iterator[bytes], orders: Orders, host: str) -> None:
    for line in lines:
        number = parse_json(line).get("signal")
        # One that only asks for a checkpoint would end what has not begun.
        if isinstance(number, int) and (number not in PASSED_ON or signal.getsignal(number) != signal.SIG_DFL):
            os.kill(os.getpid(), number)
    held_by = f"trainkit on {host}, which held the run,"
    silent = f"nothing was heard for {SILENT_SECONDS:.0f} s of {held_by} so that it ends"
    end_self(silent if orders.silent else f"{held_by} is gone, or out of reach")
