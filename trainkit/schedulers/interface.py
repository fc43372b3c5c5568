"""What every scheduler can be asked: commands, and pure readers of what they answer. Only the client runs them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

from trainkit.errors import Diagnostic, MachineError
from trainkit.plan.context import Context
from trainkit.plan.provenance import SourcedJob

Answer = TypeVar("Answer")
State = Literal["queued", "running", "ended", "unknown", "gone"]
# <timestamp>-<id> of a run directory; behind it comes the number of a task of an array.
_RUN_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}")


@dataclass(frozen=True, slots=True)
class Output:
    """What a command has said. code: its exit code."""

    code: int
    out: str
    err: str

    @property
    def words(self) -> str:
        """What it says of a failure, in one line."""
        lines = [line.strip() for line in (self.err or self.out).splitlines() if line.strip()]
        return "; ".join(dict.fromkeys(lines))


@dataclass(frozen=True, slots=True)
class Query(Generic[Answer]):
    """A command for the scheduler, and the reader of what it says. The reader raises RefusedError."""

    argv: tuple[str, ...]
    read: Callable[[Output], Answer]


@dataclass(frozen=True, slots=True)
class Job:
    """A job that was submitted. cluster: of several that one scheduler's commands reach; empty for their own."""

    id: str
    cluster: str = ""


class Scheduler(Protocol):
    """What a module of a scheduler has for planning, and for everyone who looks at a job."""

    JOB_ID: str  # pattern of a job's number, with ASCII digits

    def problems(self, context: Context) -> Iterator[Diagnostic]:
        """What is wrong with its section, whatever the cluster says."""

    def job(self, context: Context) -> SourcedJob:
        """What is submitted, by which command, and how it starts on the nodes."""

    def cores(self, context: Context) -> tuple[int, tuple[str, ...]] | None:
        """Processors that the job asks for on each node, and the keys that decide them; None where it asks for none."""

    def states(self, job: Job) -> Query[dict[str, JobState]]:
        """What it knows of a job, and of the other tasks of its array, by their numbers; nothing of what is gone."""

    def queue(self, job: Job, uid: int) -> Query[Mapping[str, State]] | None:
        """The jobs of a user that it has still, by their numbers; None where a job that has ended is never begun again.

        job: one of them, which says on which cluster.
        """

    def past(self, job: Job) -> Query[JobState] | None:
        """What it knows of a job that is gone; None where it keeps no accounts."""

    def controller(self) -> Query[str] | None:
        """Who answers, where several that count jobs for themselves may be asked from one home folder."""


class RefusedError(Exception):
    """The scheduler has refused, in its own words."""


class NoAnswerError(MachineError):
    """A command has said nothing in time, or nothing that can be read: nobody knows what it has done."""


@dataclass(frozen=True, slots=True)
class JobState:
    """What a scheduler knows of a job. reason: why it waits, or how it ended, in the scheduler's words.

    why: of the ends that are not the program's: cancelled, time limit, preemption, a failed node.
    """

    state: State
    reason: str = ""
    nodes: str = ""  # in the scheduler's short form
    restarts: int = 0
    exit_code: int | None = None
    why: Literal["", "cancelled", "time_limit", "preemption", "node_failure", "out_of_memory"] = ""
    started: float | None = None  # seconds since the epoch, as the next
    ends: float | None = None  # when its time is up
    preempted: bool = False
    # Whose it is, as far as the scheduler says: its name, its user by number and in words, the files that it names.
    name: str = ""
    uid: int | None = None
    user: str = ""
    files: tuple[str, ...] = ()

    def is_of(self, run_id: str, name: str, uid: int | None) -> bool:
        """Whether it may be the job of a run: numbers begin again, and another cluster counts for itself."""
        found = _RUN_ID.match(run_id)
        return (
            self.name in ("", name)
            and (self.uid is None or uid is None or self.uid == uid)
            and (not self.files or any((found[0] if found else run_id) in each for each in self.files))
        )
