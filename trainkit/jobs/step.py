"""The step that `trainkit run` starts in a batch script of several nodes: what this process is told, they are told.

srun itself would be no good ear: of TERM it dies, and Slurm kills all of its processes at once, without a checkpoint.
Nor is the step: a signal to it reaches every process, also the program's helpers, which may end of it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from trainkit.errors import MachineError
from trainkit.jobs.batch import NOTHING_RUNS, say, signal_node_0
from trainkit.runner.rundir.layout import RunLayout, subfolders
from trainkit.runner.rundir.listing import read_status
from trainkit.runner.supervisor.processes import PASSED_ON, STOP, handled, signal_name
from trainkit.schedulers import slurm
from trainkit.schedulers.client import answer_or
from trainkit.schedulers.place import Allocation, start_of

LOOK_SECONDS = 0.2
START_SECONDS = 30.0  # for Slurm to know a step that has just been started


def run_step(place: Allocation, nodes: int, runs: Path, environ: Mapping[str, str]) -> int:
    """Start this command once on each node of the allocation, and wait for its end; srun's exit code.

    runs: the folder in which node 0 makes the run directory.

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
                _pass_on(received.pop(0), place.job, name, environ, step, runs=runs)
            time.sleep(LOOK_SECONDS)
    return step.returncode if step.returncode >= 0 else 128 - step.returncode


def _pass_on(
    number: int, job: str, name: str, environ: Mapping[str, str], step: subprocess.Popen[bytes], *, runs: Path
) -> None:
    """Signal node 0's trainkit, once Slurm knows the step. Before there is a run, the step is told to end."""
    until = time.monotonic() + START_SECONDS
    while step.poll() is None and time.monotonic() < until:
        known = answer_or(slurm.steps(job), {}, environ)
        if name in known:
            start = start_of(job, known[name].rpartition(".")[2], environ)
            if not _tell_node_0(number, job, start, runs, environ):
                if number in PASSED_ON:
                    say(NOTHING_RUNS)
                else:
                    word = signal_name(number).removeprefix("SIG")
                    answer_or(slurm.send(known[name], word, script=False), None, environ)
            return
        time.sleep(LOOK_SECONDS)
    if number not in PASSED_ON:
        with contextlib.suppress(ProcessLookupError):
            step.send_signal(signal.SIGTERM)


def _tell_node_0(number: int, job: str, start: str, runs: Path, environ: Mapping[str, str]) -> bool:
    """Signal the trainkit of node 0 of the run of a start; whether there is one. It may be on another host."""
    for folder in sorted(subfolders(runs), reverse=True):
        layout = RunLayout(folder)
        status = read_status(layout)
        if status is None or status.job != start or status.state == "ended" or status.host is None:
            continue
        if status.host == os.uname().nodename:
            return signal_node_0(layout, number)
        words = (sys.executable, "-P", "-m", "trainkit", "job", "signal", str(folder), str(number))
        return answer_or(slurm.beside(job, status.host, words), otherwise=False, environ=environ)
    return False
