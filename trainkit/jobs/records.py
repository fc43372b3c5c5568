"""What is written of a job in its run directory: how it was submitted, and what each attempt began with.

Each file has one writer: `trainkit submit`, then the job itself. All are replaced whole.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainkit.files import hold_lock, is_locked, publish, publish_or_overwrite, read_json, refuse_links
from trainkit.runner.rundir.layout import RunLayout

SUBMISSION, ATTEMPT, ASKED = "submission.json", "attempt.json", "asked.json"
HELD = "submitter.lock"


@dataclass(frozen=True, slots=True)
class Submission:
    """How a run was submitted. job: its number; of ssh, the process that holds the run. at: seconds since the epoch;
    host: where.
    """

    scheduler: str
    job: str
    argv: tuple[str, ...]
    at: float = field(default_factory=time.time)
    host: str = field(default_factory=lambda: os.uname().nodename)


@dataclass(frozen=True, slots=True)
class Attempt:
    """A start of the run within a job. step: of the newest checkpoint at its beginning, 0 for none.

    excluded: hosts that the job has been kept off so far. asked: why it was asked to end, by whom.
    """

    number: int
    job: str
    restarts: int
    host: str
    began: float
    step: int
    excluded: tuple[str, ...] = ()


def write_submission(layout: RunLayout, submission: Submission) -> None:
    """Raises OSError."""
    publish(layout.root / SUBMISSION, json.dumps(asdict(submission), indent=2) + "\n")


def read_submission(root: Path) -> Submission | None:
    """None for a run that was not submitted, or where the file is damaged."""
    known = read_json(root / SUBMISSION)
    if not isinstance(known.get("job"), str) or not isinstance(known.get("scheduler"), str):
        return None
    argv, at = known.get("argv"), known.get("at")
    return Submission(
        known["scheduler"],
        known["job"],
        tuple(map(str, argv)) if isinstance(argv, list) else (),
        float(at) if isinstance(at, int | float) else 0.0,
        str(known.get("host") or ""),
    )


def write_attempt(layout: RunLayout, attempt: Attempt) -> None:
    """Raises OSError."""
    publish(layout.attempt(attempt.number).root / ATTEMPT, json.dumps(asdict(attempt), indent=2) + "\n")


def read_attempts(layout: RunLayout) -> list[Attempt]:
    """Those so far, in order; what is damaged is left out."""
    found = []
    for each in layout.attempts:
        known = read_json(each.root / ATTEMPT)
        try:
            known["excluded"] = tuple(known.get("excluded", ()))
            found.append(Attempt(**known))
        except TypeError:
            continue
    return found


def ask(layout: RunLayout, why: str) -> None:
    """Leave word for the job, why it is to end: `cancel`. Raises OSError."""
    publish(layout.root / ASKED, json.dumps({"why": why, "at": time.time()}) + "\n")


def take_back(layout: RunLayout) -> None:
    """Take back the word that was left for the job, if any. Raises OSError."""
    (layout.root / ASKED).unlink(missing_ok=True)


def asked(layout: RunLayout) -> str:
    """Why it was asked to end; empty where it was not."""
    return str(read_json(layout.root / ASKED).get("why") or "")


def hold_submitter(layout: RunLayout) -> int:
    """Mark the run as held by this process, for as long as the returned descriptor is open. Raises OSError."""
    return hold_lock(layout.root / HELD)


def is_held(layout: RunLayout) -> bool:
    """Whether the trainkit that submitted the run lives on this machine and holds it."""
    return is_locked(layout.root / HELD)


def hosts_of(layout: RunLayout) -> tuple[str, ...]:
    """The machines of a run that is held, node 0 first; none where it is not."""
    job = read_json(layout.plan).get("job")
    hosts = job.get("hosts") if isinstance(job, dict) else None
    return tuple(map(str, hosts)) if isinstance(hosts, list) else ()


def update_status(layout: RunLayout, **changed: Any) -> None:
    """Change status.json while no guardian writes it: before an attempt, and after it. Raises OSError."""
    refuse_links(layout.root)
    status: Mapping[str, Any] = {**read_json(layout.status), **changed}
    publish_or_overwrite(layout.status, json.dumps(status, indent=2) + "\n", flush=True)
