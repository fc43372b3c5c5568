"""Who ended a run, and with which exit code: one pure function over what was recorded."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from trainkit.runner.rundir.records import RankRecord
from trainkit.runner.supervisor.signals import signal_name

KILLED = 128 + signal.SIGKILL


class Stop(NamedTuple):
    """The guardian was made to end the run. signal: what trainkit received, None for any other reason."""

    at: float  # seconds since the epoch
    why: str
    signal: int | None = None


class Observed(NamedTuple):
    """Everything that the verdict depends on. Times are seconds since the epoch."""

    launcher: str
    launcher_exit: int | None  # minus the signal; None when it never started
    records: Sequence[RankRecord] = ()
    vanished: Mapping[int, float] = {}  # rank -> when its wrapper ended without finishing its record
    abandoned: Sequence[int] = ()  # ranks that still ran when the launcher ended
    stop: Stop | None = None
    expected_ranks: int = 1
    nodes: int = 1
    preparation: tuple[str, int] | None = None  # title and exit code (minus the signal) of one that failed


class Verdict(NamedTuple):
    """failure: whose failure it was; None for a run that succeeded."""

    exit_code: int
    failure: str | None = None  # program | plan | rank | launcher | preparation | signal | trainkit
    why: str = ""
    rank: int | None = None
    signal: int | None = None


def judge(seen: Observed) -> Verdict:
    """The first cause that applies wins, in the order of the rules below."""
    rules = (_first_failure, _stopped, _preparation, _launcher_killed, _abandoned, _stopped_elsewhere, _launcher_failed)
    for rule in rules:
        if (verdict := rule(seen)) is not None:
            return verdict
    if len(seen.records) >= seen.expected_ranks:
        return Verdict(0)
    why = f"{seen.launcher} exited 0 but only {len(seen.records)} of {seen.expected_ranks} ranks started"
    return Verdict(1, "launcher", why)


def first_failure(records: Sequence[RankRecord], vanished: Mapping[int, float]) -> tuple[float, int] | None:
    """When, and which, the first rank failed by itself, not because it was stopped."""
    failures = [(r.ended, r.rank) for r in records if r.failed and not r.told_to_stop and r.ended is not None]
    return min([*failures, *((at, rank) for rank, at in vanished.items())], default=None)


def _first_failure(seen: Observed) -> Verdict | None:
    first = first_failure(seen.records, seen.vanished)
    if first is None or (seen.stop is not None and first[0] > seen.stop.at):  # the end was under way
        return None
    rank = first[1]
    if rank in seen.vanished:
        return Verdict(KILLED, "rank", f"rank {rank} was killed from outside", rank, signal.SIGKILL)
    record = next(r for r in seen.records if r.rank == rank)
    if record.not_as_planned:
        return Verdict(record.code, "plan", f"rank {rank} does not run what was planned: {record.not_as_planned}", rank)
    if record.message and record.pid == 0:
        how = f"could not start: {record.message}"
    else:
        how = _how(record.exit_code if record.signal is None else -record.signal)
    return Verdict(record.code, "program", f"rank {rank} {how}", rank, record.signal)


def _stopped(seen: Observed) -> Verdict | None:
    if seen.stop is None:
        return None
    if seen.stop.signal is not None:
        return Verdict(128 + seen.stop.signal, "signal", seen.stop.why, signal=seen.stop.signal)
    if seen.abandoned:  # the stop was the answer to the launcher's end
        return None
    return Verdict(KILLED, "trainkit", seen.stop.why)


def _preparation(seen: Observed) -> Verdict | None:
    if seen.preparation is None:
        return None
    title, code = seen.preparation
    return Verdict(code if code >= 0 else 128 - code, "preparation", f"the preparation '{title}' {_how(code)}")


def _launcher_killed(seen: Observed) -> Verdict | None:
    if seen.launcher_exit is None or seen.launcher_exit >= 0:
        return None
    number = -seen.launcher_exit
    why = f"{seen.launcher} was ended from outside by {signal_name(number)}"
    return Verdict(KILLED, "launcher", why, signal=number)


def _abandoned(seen: Observed) -> Verdict | None:
    if not seen.abandoned:
        return None
    ranks = ", ".join(str(rank) for rank in seen.abandoned)
    why = f"{seen.launcher} ended while ranks were still running: {ranks}"
    return Verdict(seen.launcher_exit or KILLED, "launcher", why)


def _stopped_elsewhere(seen: Observed) -> Verdict | None:
    stopped = [record for record in seen.records if record.told_to_stop]
    incomplete = bool(seen.launcher_exit) or any(record.failed for record in stopped)
    # On several nodes a failure elsewhere looks the same from here: the launcher stops this node's ranks.
    if not stopped or not incomplete or seen.nodes > 1:
        return None
    first = min(stopped, key=lambda record: record.ended or float("inf"))
    why = f"{seen.launcher} or rank {first.rank} was stopped from outside"
    return Verdict(KILLED, "rank", why, first.rank)


def _launcher_failed(seen: Observed) -> Verdict | None:
    if not seen.launcher_exit:
        return None
    elsewhere = " (no rank of this node failed by itself)" if seen.nodes > 1 else " and no rank failed"
    why = f"{seen.launcher} exited with code {seen.launcher_exit}{elsewhere}"
    return Verdict(seen.launcher_exit, "launcher", why)


def _how(code: int | None) -> str:
    """code: minus the signal that ended it."""
    return f"was ended by {signal_name(-code)}" if code is not None and code < 0 else f"exited with code {code}"
