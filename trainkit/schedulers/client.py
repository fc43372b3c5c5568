"""The one place that runs a scheduler's commands."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

from trainkit.errors import MachineError
from trainkit.schedulers.base import Answer, NoAnswerError, Output, Query, RefusedError

SECONDS = 20.0  # a controller that has not answered by then is taken for one that does not


def ask(query: Query[Answer], environ: Mapping[str, str] | None = None, seconds: float = SECONDS) -> Answer:
    """Run the command and read what it prints.

    Raises RefusedError in the scheduler's own words, MachineError where the command is missing, and NoAnswerError.
    """
    tool, env = query.argv[0], query.environ(os.environ if environ is None else environ)
    try:
        done = subprocess.run(
            query.argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, check=False
        )
    except OSError as error:
        hint = f"run trainkit where {tool} is, as on a login node of the cluster"
        raise MachineError(f"{tool} cannot be started: {(error.strerror or str(error)).lower()}", hint=hint) from error
    except subprocess.TimeoutExpired as error:
        what = f"{tool} has not answered in {seconds:g} s"
        raise NoAnswerError(what, hint="see whether its server runs") from error
    out, err = (each.decode("utf-8", "replace") for each in (done.stdout, done.stderr))
    return query.read(Output(done.returncode, out, err))


def answer_or(query: Query[Answer], otherwise: Answer, environ: Mapping[str, str] | None = None) -> Answer:
    """The answer; something else where there is none."""
    try:
        return ask(query, environ)
    except (MachineError, RefusedError):
        return otherwise
