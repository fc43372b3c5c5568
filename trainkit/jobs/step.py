"""The step that `trainkit run` starts in a batch script of several nodes: what this process is told, they are told.

srun itself would be no good ear: of TERM it dies, and Slurm kills all of its processes at once, without a checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from types import FrameType

from trainkit.errors import MachineError
from trainkit.runner.supervisor.processes import PASSED_ON, STOP, handled, signal_name
from trainkit.schedulers import slurm
from trainkit.schedulers.client import answer_or
from trainkit.schedulers.place import Allocation

LOOK_SECONDS = 0.2
START_SECONDS = 30.0  # for Slurm to know a step that has just been started


def run_step(place: Allocation, nodes: int, environ: Mapping[str, str]) -> int:
    """Start this command once on each node of the allocation, and wait for its end; srun's exit code.

    Raises MachineError where the allocation has fewer nodes, or there is no srun.
    """
    name = f"trainkit-{os.getpid()}"
    again = (sys.executable, "-P", "-m", "trainkit", *sys.argv[1:])
    argv = slurm.step(place, nodes, environ, name, again)
    received: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    with handled((*STOP, *PASSED_ON), note):
        try:
            # In a session of its own: a terminal's Ctrl-C is not for srun, which would end the step in its own way.
            step = subprocess.Popen(argv, start_new_session=True)
        except OSError as error:
            raise MachineError(f"srun cannot be started: {error.strerror}", hint="is Slurm on PATH here?") from error
        while step.poll() is None:
            while received:
                _pass_on(received.pop(0), place.job, name, environ, step)
            time.sleep(LOOK_SECONDS)
    return step.returncode if step.returncode >= 0 else 128 - step.returncode


def _pass_on(number: int, job: str, name: str, environ: Mapping[str, str], step: subprocess.Popen[bytes]) -> None:
    """Send a signal to every process of the step, once Slurm knows it."""
    until = time.monotonic() + START_SECONDS
    while step.poll() is None and time.monotonic() < until:
        known = answer_or(slurm.steps(job), {}, environ)
        if name in known:
            signal_word = signal_name(number).removeprefix("SIG")
            answer_or(slurm.send(known[name], signal_word, script=False), None, environ)
            return
        time.sleep(LOOK_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        step.send_signal(signal.SIGTERM)
