"""Ranks that begin with torch imported: each is forked from a server that a test worker starts once.

To import torch, and what the trainer uses of it, takes a rank longer than most of these runs take to train. The tests
of `trainkit run` have ranks that begin as they do for users.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import strategy_runs

# What a rank would import in any case, or soon; not DeepSpeed, transformers or peft, whose presence others look at.
_IMPORTED = (
    "trainkit.trainer.loop",
    "trainkit.trainer.setup",
    "trainkit.trainer.parallel.fsdp",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch._dynamo",
)
_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(list(_IMPORTED))


class WarmRank:
    """A rank, with as much of `subprocess.Popen` as the runs of strategies use."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        """Start it. command: what an interpreter is given, ``-m MODULE …`` or ``SCRIPT …``."""
        self.args = (sys.executable, *command)
        self._process: ForkServerProcess = _server.Process(
            target=_become, args=(tuple(command), dict(environ), str(log), str(Path.cwd()))
        )
        self._process.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        """Its exit code, or the signal that ended it, negative; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The same."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended. TimeoutError after so many seconds."""
        self._process.join(timeout)
        if self.returncode is None:
            raise TimeoutError(f"{self.args} still runs after {timeout} s")
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send TERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send KILL."""
        self.send_signal(signal.SIGKILL)


def _become(command: Sequence[str], environ: Mapping[str, str], log: str, folder: str) -> None:
    """In the new process: what the interpreter would do with this command line."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    multiprocessing.set_start_method(None, force=True)  # loader processes start as in any other process
    module = command[0] == "-m"
    searched = environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [folder if module else str(Path(command[0]).parent), *filter(None, searched)]
    sys.argv = list(command[1:] if module else command)
    if module:
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(command[0], run_name="__main__")


start_ranks = partial(strategy_runs.start_ranks, start=WarmRank)
run_case = partial(strategy_runs.run_case, start=WarmRank)
