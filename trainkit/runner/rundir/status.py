"""status.json: the state of a run, or who ended it and why. Written by the guardian, so that it outlives trainkit."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from trainkit.files import publish_or_overwrite
from trainkit.runner.report.exit_status import Verdict


class Attempt(NamedTuple):
    """What status.json says in every state."""

    path: str
    run_id: str
    attempt: int
    started: float  # seconds since the epoch


def write_status(
    attempt: Attempt,
    state: str,
    pids: Mapping[str, object],
    verdict: Verdict | None = None,
    survivors: Sequence[int] = (),
) -> None:
    """Write the file. state: starting, running or ended; with a verdict it has ended.

    failure distinguishes a program's exit code 2, 3 or 4 (`program`) from trainkit's own (`trainkit`).
    """
    outcome = dict.fromkeys(Verdict._fields) if verdict is None else verdict._asdict()
    status = {
        "state": state,
        "run_id": attempt.run_id,
        "attempt": attempt.attempt,
        "started": attempt.started,
        "ended": None if verdict is None else time.time(),
        **outcome,
        "pids": pids,
        "survivors": list(survivors),
    }
    with contextlib.suppress(OSError):  # the run continues, or ends, also where its folder is gone
        # Only the end is worth the wait for the disk.
        publish_or_overwrite(attempt.path, json.dumps(status, indent=2) + "\n", flush=verdict is not None)
