"""status.json: the state of a run, or who ended it and why. Written by the guardian, so that it outlives trainkit."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping, Sequence

from trainkit.files import publish_or_overwrite
from trainkit.runner.report.exit_status import Verdict


def write_status(
    run_dir: str,
    known: Mapping[str, object],
    state: str,
    pids: Mapping[str, object],
    verdict: Verdict | None = None,
    survivors: Sequence[int] = (),
) -> None:
    """Write the file. known: what it says in every state. state: starting, running or ended, then with a verdict.

    failure distinguishes a program's exit code 2, 3 or 4 (`program`) from trainkit's own (`trainkit`).
    """
    outcome = dict.fromkeys(Verdict._fields) if verdict is None else verdict._asdict()
    ended = None if verdict is None else time.time()
    status = {"state": state, **known, "ended": ended, **outcome, "pids": pids, "survivors": list(survivors)}
    with contextlib.suppress(OSError):  # the run continues, or ends, also where its folder is gone
        content = json.dumps(status, indent=2) + "\n"
        # Only the end is worth the wait for the disk.
        publish_or_overwrite(os.path.join(run_dir, "status.json"), content, flush=verdict is not None)
