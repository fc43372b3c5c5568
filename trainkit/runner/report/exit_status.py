"""Who ended a run, and with which exit code: one pure function over the records.

Its verdict is written to status.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from trainkit.files import publish_or_overwrite
from trainkit.runner.rundir.records import NOT_OBSERVED, Pids, RankRecord, status_path
from trainkit.runner.supervisor.channel import Spec
from trainkit.runner.supervisor.processes import STOP, signal_name

# As a shell exits after KILL; also for ends without an exit code.
KILLED = 128 + signal.SIGKILL
HANGED = 124  # as timeout(1) exits
TRAINKIT_KILLED = "trainkit was killed"
UNRECORDED = "its record could not be written"


class Stop(NamedTuple):
    """The order to end the run. signal: the one that trainkit received, None for any other reason."""

    at: float  # on this host's monotonic clock
    why: str
    signal: int | None = None
    failure: str = (
        "trainkit"  # as in Verdict, if there is no signal; submitter: the submitting process is gone, hence the signal
    )
    blamed: str = ""  # as in Verdict


class Evidence(NamedTuple):
    """Everything that the verdict depends on. Times are seconds of this host's monotonic clock."""

    launcher: str
    launcher_exit: int | None  # minus the signal; None when it never started
    records: Sequence[RankRecord] = ()
    vanished: Mapping[int, float] = {}  # rank -> when its wrapper ended without finishing its record
    abandoned: Sequence[int] = ()  # ranks that still ran when the launcher ended
    stop: Stop | None = None
    expected_ranks: int = 1
    nodes: int = 1
    preparation: tuple[str, int] | None = None  # title and exit code (minus the signal) of one that failed
    memory_kills: int = 0  # processes that this machine's kernel has killed during the run, because memory ran out
    records_lost: str = ""  # why the ranks' records could not be written; empty if they could
    container: str = ""  # kind of the container engine


class Verdict(NamedTuple):
    """failure: None for a run that succeeded; else program, plan, rank, launcher, preparation, signal, submitter,
    guardian, trainkit, node or hang.
    """

    exit_code: int
    failure: str | None = None
    why: str = ""
    rank: int | None = None
    signal: int | None = None
    blamed: str = ""  # the host, if the machine has failed
    node: int = 0  # whose failure it was


# An engine exits with these codes if it could not start the container or its command (docker run's
# documentation; podman has the same).
NOT_STARTED = (125, 126, 127, 255)
UNFIT = 4  # trainkit's own code: this machine cannot run the plan


def decide_verdict(seen: Evidence) -> Verdict:
    """Who ended the run. A container that does not start counts as a requirement that this machine does not meet."""
    verdict = _first_cause(seen)
    if not seen.container or seen.records or verdict.failure not in ("launcher", "preparation"):
        return verdict
    if verdict.exit_code not in NOT_STARTED:
        return verdict
    why = f"{seen.container} could not start the container (exit code {verdict.exit_code})"
    return verdict._replace(exit_code=UNFIT, why=why)


def _first_cause(seen: Evidence) -> Verdict:
    """The first rule that applies decides, in the order of these lines."""
    first, stop = first_failure(seen.records, seen.vanished), seen.stop
    if first is not None and (stop is None or first[0] <= stop.at):  # later failures are consequences of the stop
        told = any(_signal_from_outside(each) for each in seen.records if each.rank == first[1])
        if not (told and stop and stop.signal):  # unless the same signal has reached the rank first
            return _stopped_before(first, seen) or _rank_failed(first[1], seen)
    if stop is not None and stop.signal is not None:
        whose = "submitter" if stop.failure == "submitter" else "signal"
        return Verdict(128 + stop.signal, whose, stop.why, signal=stop.signal)
    if stop is not None and not seen.abandoned:  # unless the launcher's end was the reason for the stop
        why = stop.why + (_by_kernel(seen) if stop.why == TRAINKIT_KILLED else "")
        return Verdict(HANGED if stop.failure == "hang" else KILLED, stop.failure, why, blamed=stop.blamed)
    if seen.preparation is not None:
        title, code = seen.preparation
        return Verdict(code if code >= 0 else 128 - code, "preparation", f"the preparation '{title}' {_how(code)}")
    return _launcher_failed(seen)


def _signal_from_outside(record: RankRecord) -> int:
    """The signal from outside that ended the rank, by its wait status or by a shell's exit code; 0 for none.

    A fault (SIGSEGV, SIGABRT) is not counted: it is the rank's own. 128 + n of the others is trainkit's exit code when
    it has received the signal itself.
    """
    return next((int(each) for each in STOP if each == record.signal or 128 + each == record.exit_code), 0)


def first_failure(records: Sequence[RankRecord], vanished: Mapping[int, float]) -> tuple[float, int] | None:
    """When, and which, the first rank failed by itself, not because it was stopped."""
    failures = [(r.clock, r.rank) for r in records if r.failed and not r.told_to_stop]
    return min([*failures, *((at, rank) for rank, at in vanished.items())], default=None)


def _stopped_before(first: tuple[float, int], seen: Evidence) -> Verdict | None:
    """If a rank was stopped before any failed, it was from outside: a launcher stops ranks only after a failure."""
    restarts = {each.rank: each.restart for each in seen.records}
    # Of a rank that was stopped again before it could register, the record is of the launcher's start before.
    ends = [each for each in seen.records if each.failed and each.restart >= restarts.get(first[1], 0)]
    stopped = [(each.clock, each.rank) for each in ends if each.told_to_stop]
    earliest = min(stopped, default=first)
    if seen.nodes > 1 or earliest >= first:
        return None
    return Verdict(KILLED, "rank", f"rank {earliest[1]} was stopped from outside", earliest[1])


def _rank_failed(rank: int, seen: Evidence) -> Verdict:
    # Python's own exit codes, and 0 from most launchers, show that the rank was not killed.
    lost = seen.records_lost or (UNRECORDED if seen.launcher == "python" or _all_succeeded(seen) else "")
    if rank in seen.vanished and lost and seen.launcher_exit is not None and seen.launcher_exit >= 0:
        return _unrecorded(rank, seen.launcher, seen.launcher_exit, lost)
    if rank in seen.vanished:
        why = f"rank {rank} was killed from outside{_by_kernel(seen)}"
        return Verdict(KILLED, "rank", why, rank, signal.SIGKILL)
    record = next(r for r in seen.records if r.rank == rank)
    if record.not_as_planned:
        how = f"rank {rank} does not run what was planned: {record.not_as_planned}"
        if record.not_as_planned.startswith(NOT_OBSERVED):
            how = f"what rank {rank} runs is {record.not_as_planned}"
        return Verdict(record.code, "plan", how, rank)
    if record.message and record.pid == 0:
        how = f"could not start: {record.message}"
    else:
        how = _how(record.exit_code if record.signal is None else -record.signal)
        how += _by_kernel(seen) if record.signal == signal.SIGKILL else ""
    if number := _signal_from_outside(record):
        how += "" if record.signal else f": it received {signal_name(number)}, which trainkit did not send"
        return Verdict(KILLED, "program", f"rank {rank} {how}", rank, number)
    return Verdict(record.code, "program", f"rank {rank} {how}", rank, record.signal)


def _unrecorded(rank: int, launcher: str, code: int, lost: str) -> Verdict:
    """The exit code is the launcher's, or the program's own if Python is the launcher."""
    if not code:
        return Verdict(0)
    if launcher == "python":
        return Verdict(code, "program", f"rank {rank} {_how(code)}; {lost}", rank)
    return Verdict(code, "rank", f"{launcher} {_how(code)}; {lost}, so the ranks' exit codes are unknown")


def _launcher_failed(seen: Evidence) -> Verdict:
    """The verdict from the launcher's end if no rank failed by itself; also success."""
    launcher, code = seen.launcher, seen.launcher_exit or 0
    if code < 0:
        why = f"{launcher} was ended from outside by {signal_name(-code)}"
        why += _by_kernel(seen) if code == -signal.SIGKILL else ""
        return Verdict(KILLED, "launcher", why, signal=-code)
    if seen.abandoned:
        ranks = ", ".join(str(rank) for rank in seen.abandoned)
        return Verdict(code or KILLED, "launcher", f"{launcher} ended while ranks were still running: {ranks}")
    if code and seen.records_lost and len(seen.records) < seen.expected_ranks:  # a rank that could not register
        return Verdict(code, "launcher", f"{launcher} exited with code {code}; {seen.records_lost}")
    stopped = [record for record in seen.records if record.told_to_stop]
    if stopped and (code or any(record.failed for record in stopped)):
        rank = min(stopped, key=lambda record: record.clock or float("inf")).rank
        # On several nodes a failure elsewhere looks the same from here; as the launcher's failure this one ranks behind
        # it.
        whose = "rank" if seen.nodes == 1 else "launcher"
        return Verdict(KILLED, whose, f"{launcher} or rank {rank} was stopped from outside", rank)
    if code:
        elsewhere = " (no rank of this node failed by itself)" if seen.nodes > 1 else " and no rank failed"
        known = f"; {seen.records_lost}" if seen.records_lost else elsewhere
        return Verdict(code, "launcher", f"{launcher} exited with code {code}{known}")
    if len(seen.records) < seen.expected_ranks and not (seen.records_lost and _all_succeeded(seen)):
        why = f"{launcher} exited 0 but only {len(seen.records)} of {seen.expected_ranks} ranks started"
        return Verdict(1, "launcher", why)
    return Verdict(0)


def _all_succeeded(seen: Evidence) -> bool:
    """By the launcher's exit code, but deepspeed also exits 0 when its inner launcher is killed."""
    return seen.launcher_exit == 0 and seen.launcher != "deepspeed"


def _by_kernel(seen: Evidence) -> str:
    """The likely sender of a KILL from outside."""
    if not seen.memory_kills:
        return ""
    return ", most likely by the kernel, which has killed processes during the run because memory ran out"


def _how(code: int | None) -> str:
    """code: minus the signal that ended it."""
    return f"was ended by {signal_name(-code)}" if code is not None and code < 0 else f"exited with code {code}"


def write_status(
    spec: Spec,
    state: str,
    pids: Pids,
    verdict: Verdict | None = None,
    survivors: Sequence[int] = (),
    *,
    hang: str = "",
    why: str = "",
) -> None:
    """Write status.json: the state of a run, or who ended it and why.

    state: starting, running or ended, then with a verdict. hang: the rank that blocks the run, while it does not move.
    why: why the run is ending, in case no process is left to write the verdict. `failure` tells the exit codes 2, 3
    and 4 of a program (`program`) from trainkit's own (`trainkit`).
    """
    outcome = {**dict.fromkeys(Verdict._fields), "why": why or None} if verdict is None else verdict._asdict()
    ended = None if verdict is None else time.time()
    place = {"host": os.uname().nodename, "pids": pids._asdict(), "survivors": list(survivors)}
    status = {"state": state, **spec.status, "ended": ended, **outcome, **place, "hang": hang or None}
    with contextlib.suppress(OSError):  # the run continues, or ends, even without its folder
        path, content = status_path(spec.run_dir, spec.attempt_dir, spec.node), json.dumps(status, indent=2) + "\n"
        # Only the final state is worth waiting for the disk.
        publish_or_overwrite(path, content, flush=verdict is not None, below=spec.run_dir)
