"""The one place that runs a scheduler's commands."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from typing import TypeVar

from trainkit.errors import MachineError
from trainkit.schedulers.interface import Output, Query, RefusedError

SECONDS = 20.0  # a controller that has not answered by then is taken for one that does not
Answer = TypeVar("Answer")


def ask(query: Query[Answer], environ: Mapping[str, str] | None = None, seconds: float = SECONDS) -> Answer:
    """Run the command and read what it says.

    Raises RefusedError in the scheduler's own words, and MachineError where the command is missing or does not end.
    """
    tool = query.argv[0]
    try:
        done = subprocess.run(
            query.argv, env=environ, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, check=False
        )
    except OSError as error:
        hint = f"run trainkit where {tool} is, as on a login node of the cluster"
        raise MachineError(f"{tool} cannot be started: {(error.strerror or str(error)).lower()}", hint=hint) from error
    except subprocess.TimeoutExpired as error:
        raise MachineError(f"{tool} has not answered in {seconds:.0f} s", hint="see whether its server runs") from error
    out, err = (each.decode("utf-8", "replace") for each in (done.stdout, done.stderr))
    return query.read(Output(done.returncode, out, err))


def answer_or(query: Query[Answer], otherwise: Answer, environ: Mapping[str, str] | None = None) -> Answer:
    """The answer; something else where there is none."""
    try:
        return ask(query, environ)
    except (MachineError, RefusedError):
        return otherwise
