"""What is written of a job in its run directory: how it was submitted, and what each attempt began with.

Each file has one writer: `trainkit submit`, then the job itself. All are replaced whole, and read as the records that
they are (runner/rundir/records.py).
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

from trainkit.errors import MachineError
from trainkit.files import (
    hold_lock,
    is_locked,
    load_record,
    make_folder,
    publish,
    publish_or_overwrite,
    read_json,
    read_record,
    remove_file,
)
from trainkit.machine.gpu_locks import user_name
from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.rundir.listing import read_status
from trainkit.runner.rundir.records import Count, Moment, Name, Status
from trainkit.runner.supervisor.processes import ProcessId
from trainkit.schedulers.base import Scheduler
from trainkit.schedulers.registry import SCHEDULERS

SUBMISSION, ATTEMPT, REQUEST = "submission.json", "attempt.json", "asked.json"
SUBMITTER = "submitter.lock"
ONLY_OWN = "only its owner may do that, or root"


class Submission(NamedTuple):
    """How a run was submitted. job: its number; without a queue, of the process that started it, which `process` is.

    argv: the command, for people alone: what is started is made from the recipe. at, host: when and where, as filled in
    when it is written. cluster: where it was submitted to another than the scheduler's own; controller: who answered,
    for several clusters may share their home folders.
    """

    scheduler: Name
    job: str
    argv: tuple[str, ...] = ()
    at: Moment = 0.0
    host: Name = ""
    cluster: Name = ""
    controller: Name = ""
    process: ProcessId | None = None


DAMAGED = Submission("", "")  # in the place of a submission that cannot be read


class Attempt(NamedTuple):
    """A start of the run within a job. step: of the newest checkpoint at its beginning, 0 for none.

    excluded: hosts that the job has been kept off so far. asked: why it was asked to end, where it was queued again.
    """

    number: Count
    job: str
    restarts: Count
    host: Name
    began: Moment
    step: Count
    excluded: tuple[Name, ...] = ()
    asked: str = ""


class Request(NamedTuple):
    """Why a job is to end."""

    why: Name
    at: Moment = 0.0


def write_submission(layout: RunLayout, submission: Submission) -> None:
    """Raises OSError."""
    known = submission._replace(at=submission.at or time.time(), host=submission.host or os.uname().nodename)
    process = known.process._asdict() if known.process else None
    content = json.dumps({**known._asdict(), "process": process}, indent=2) + "\n"
    publish(layout.root / SUBMISSION, content, below=layout.root)


def read_submission(root: Path, *, own: bool = False) -> Submission | None:
    """None for a run that was not submitted; DAMAGED where the file is, or says what no scheduler has ever said.

    own: as for `files.read_whole`.
    """
    try:
        found = load_record(root / SUBMISSION, Submission, own=own, below=root)
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return DAMAGED
    scheduler = SCHEDULERS.get(found.scheduler)
    return found if scheduler is not None and re.fullmatch(scheduler.job_id, found.job, re.ASCII) else DAMAGED


def submitted(root: Path) -> tuple[Scheduler, Submission] | None:
    """To whom a run was submitted, and how; None for one that was not, or where the record is damaged."""
    found = read_submission(root)
    scheduler = SCHEDULERS.get(found.scheduler) if found else None
    return (scheduler, found) if found and scheduler else None


def require_own(layout: RunLayout) -> Submission | None:
    """How a run was submitted, before something is done to it. MachineError for another user's, or a damaged record.

    Whoever may write to a run directory could have anything done otherwise.
    """
    owner = layout.root.stat().st_uid
    if os.geteuid() not in (0, owner):
        raise MachineError(f"{layout.root} is a run of {user_name(owner)}", hint=ONLY_OWN)
    submission = read_submission(layout.root, own=True)
    if submission is DAMAGED:
        what = f"{layout.root / SUBMISSION} is damaged, or another user's: nobody knows which job the run is"
        raise MachineError(what, hint="end the job by the scheduler's own command")
    return submission


def make_attempt(layout: RunLayout, least: int = 1) -> int:
    """Make the folder of the next start, past whatever is there; its number. MachineError where none can be made."""
    number = max(least, 1 + max((int(each.root.name) for each in layout.attempts), default=0))
    folder = layout.root / "attempts"
    try:
        make_folder(folder, below=layout.root)
        while not _is_new(layout, number):
            number += 1
    except OSError as error:
        raise MachineError(f"{folder} takes no folder for this start: {error.strerror}") from error
    return number


def _is_new(layout: RunLayout, number: int) -> bool:
    """Make the folder of a start; whether nothing was there."""
    try:
        return make_folder(layout.attempt(number).root, below=layout.root)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):  # a file, or a link
            return False
        raise


def write_attempt(layout: RunLayout, attempt: Attempt) -> None:
    """Raises OSError."""
    path = layout.attempt(attempt.number).root / ATTEMPT
    publish(path, json.dumps(attempt._asdict(), indent=2) + "\n", below=layout.root)


def read_attempts(layout: RunLayout) -> list[Attempt]:
    """Those so far, in order; what is damaged is left out."""
    found = (read_record(each.root / ATTEMPT, Attempt, below=layout.root) for each in layout.attempts)
    return [each for each in found if each is not None]


def request(layout: RunLayout, why: str) -> None:
    """Write down for the job why it is to end: `cancel`. Raises OSError."""
    content = json.dumps(Request(why, time.time())._asdict()) + "\n"
    publish(layout.root / REQUEST, content, below=layout.root)


def cancel_request(layout: RunLayout) -> None:
    """Remove the request to the job, if there is one. Raises OSError."""
    remove_file(layout.root / REQUEST, below=layout.root)


def pending_request(layout: RunLayout) -> str:
    """Why the job is to end; empty where nobody has requested that."""
    found = read_record(layout.root / REQUEST, Request, below=layout.root)
    return found.why if found else ""


def hold_submitter(layout: RunLayout) -> int:
    """Mark the run as being started by this process, as long as the returned descriptor is open. Raises OSError."""
    return hold_lock(layout.root / SUBMITTER)


def is_being_started(layout: RunLayout) -> bool | None:
    """Whether the trainkit that submits the run lives here and starts its nodes; None where that is not seen."""
    return is_locked(layout.root / SUBMITTER)


def hosts_of(layout: RunLayout, *, own: bool = False) -> tuple[str, ...]:
    """The machines of a run that was started through ssh, node 0 first; none of any other.

    own: as for `files.read_whole`, where one goes there.
    """
    job = read_json(layout.plan, own=own, below=layout.root).get("job")
    hosts = job.get("hosts") if isinstance(job, dict) else None
    known = hosts if isinstance(hosts, list) else ()
    return tuple(each for each in known if isinstance(each, str) and re.fullmatch(r"[\w.@:%+][\w.@:%+-]*", each))


def update_status(layout: RunLayout, **changed: Any) -> None:
    """Change status.json while no guardian writes it: before an attempt, and after it. Raises OSError.

    changed: fields of `Status`.
    """
    known = (read_status(layout) or Status())._replace(**changed)
    content = json.dumps({**known._asdict(), "pids": known.pids._asdict()}, indent=2) + "\n"
    publish_or_overwrite(layout.status, content, flush=True, below=layout.root)
