"""What every scheduler can be asked: commands, and pure readers of what they answer. Only the client runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

from trainkit.errors import Diagnostic
from trainkit.plan.context import Context
from trainkit.plan.provenance import SourcedJob

Answer = TypeVar("Answer")
State = Literal["queued", "running", "ended", "unknown"]


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


class Scheduler(Protocol):
    """What a module of a scheduler has for planning, and for everyone who looks at a job."""

    def problems(self, context: Context) -> Iterator[Diagnostic]:
        """What is wrong with its section, whatever the cluster says."""

    def job(self, context: Context) -> SourcedJob:
        """What is submitted, by which command, and how it starts on the nodes."""

    def cores(self, context: Context) -> tuple[int, tuple[str, ...]] | None:
        """Processors that the job asks for on each node, and the keys that decide them; None where it asks for none."""

    def state(self, job_id: str) -> Query[JobState]:
        """What it knows of a job."""


class RefusedError(Exception):
    """The scheduler has refused, in its own words."""


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
    ends: float | None = None  # seconds since the epoch, when its time is up
    preempted: bool = False
