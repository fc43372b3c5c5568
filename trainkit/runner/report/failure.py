"""What a user reads when a run has failed: who, how, the last lines, where the rest is, what to do."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from trainkit.files import is_there, read_json
from trainkit.refusals import refusal_in
from trainkit.runner.report.causes import by_trace, causes_of
from trainkit.runner.report.exit_status import KILLED, Verdict
from trainkit.runner.report.progress import last_lines
from trainkit.runner.rundir.checkpoints import checkpoints_of
from trainkit.runner.rundir.layout import AttemptLayout, RunLayout
from trainkit.runner.rundir.records import REMOVED, SAYS, RankRecord, read_records, read_shown
from trainkit.text import counted, listed

LINES = 20
_TRACEBACK = "Traceback (most recent call last)"
_PLACE = '  File "'  # the first line below it
_MARK = re.compile(r"^\[rank\d+\]:? ?")  # which torch puts in front of each line
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")
# Exit code of a failed rank -> what to look at. 128+n is signal n.
HINTS: dict[int, str] = {
    126: "make the program executable (chmod +x FILE); a Python script's name must end in .py",
    127: "check the program's path, which is relative to the folder where trainkit was started",
    132: "an illegal instruction: a library was built for another processor",
    134: "the program aborted: a C++ library or CUDA found an error; its message is above",
    135: "a bus error: shared memory (/dev/shm) may be full; lower data.workers or enlarge it",
    137: "something outside the run sent KILL: often the kernel, when memory ran out (see dmesg)",
    139: "a segmentation fault in a compiled library; PYTHONFAULTHANDLER=1 under env shows where",
}
LOST_NODE = "see whether that machine is up and reachable; nothing on the others failed by itself"
NOT_AS_PLANNED = (
    "plan what the program does, or make it do what is planned. Only the first optimizer of torch's that steps is "
    "looked at: where there is none, or that is not the model's, set program.verify to false"
)


def describe_failure(verdict: Verdict, attempt: AttemptLayout, shown_rank: int | None) -> str:
    """A few lines for standard error. shown_rank: whose output the user has seen already."""
    attempt = replace(attempt, node=verdict.node)
    outcome = "was ended" if verdict.failure in ("signal", "submitter") else "failed"
    failed = _failed(attempt)
    alike = _alike(verdict.rank, attempt, failed) if verdict.rank is not None else []
    lines = [f"the run {outcome}: {_why(verdict, failed, shown_rank)}", *_others(verdict, failed, alike, shown_rank)]
    if verdict.failure == "program" and verdict.exit_code in (2, 3, 4):  # trainkit's own codes too: say whose it is
        lines.append(f"exit code {verdict.exit_code} is the program's own")
    log = _log(verdict, attempt)
    end = last_lines(log, LINES) if log is not None else []
    # What the user has just read on the terminal is not repeated.
    killed = verdict.failure == "launcher" and verdict.exit_code == KILLED  # what it wrote last is not why
    if end and shown_rank not in alike and not killed:
        lines += [f"the last lines of {log}:", *(f"  | {line}" for line in end)]
    elif log is not None:
        lines.append(f"its log: {log}")
    if unlogged := _unlogged(verdict.rank, failed):
        lines += ["what it said last, and its log did not take:", *(f"  | {line}" for line in unlogged)]
    # Of a wrapper that could not write into the run directory, and so has left nothing else.
    refused = [line for line in last_lines(attempt.launcher_log) if line.startswith(SAYS)]
    said = [*lines, verdict.why]
    lines += [each for each in dict.fromkeys(refused) if not any(each.partition(": ")[2] in line for line in said)]
    shown_end, hint = "\n".join([*end, *unlogged, *refused]), NOT_AS_PLANNED if verdict.failure == "plan" else ""
    if verdict.failure in ("program", "rank", "launcher", "preparation"):
        hint = by_trace(shown_end) or _hint(verdict)
    # A launcher fails of what it meets first, and then of its own clean-up.
    if verdict.failure == "launcher" and (met := refusal_in(last_lines(attempt.launcher_log))):
        lines, hint = [*lines, f"what {attempt.launcher_log.name} shows first: {met[0]}"], by_trace(shown_end) or met[1]
    if verdict.failure == "node":
        hint = LOST_NODE
    if verdict.failure == "plan":
        lines += [f"most likely: {cause}" for cause in causes_of(verdict.why, RunLayout(attempt.root.parent.parent))]
    if hint:
        lines.append(f"next: {hint}")
    return "\n".join([*lines, *_to_go_on(RunLayout(attempt.root.parent.parent))])


def _to_go_on(run: RunLayout) -> Iterator[str]:
    """How to continue, where there is a checkpoint; a job that is queued again goes on by itself, and says so."""
    if not read_json(run.status).get("job") and (saved := checkpoints_of(run)):
        again = "the same command with --resume_from_checkpoint true"
        yield f"next: to continue after step {saved[0].step}, run {again}"


def _hint(verdict: Verdict) -> str:
    """What to look at for this exit code; nothing more where the reason says which signal came from outside."""
    killed = verdict.signal == signal.SIGKILL or (verdict.failure == "program" and verdict.signal is None)
    other = verdict.exit_code == KILLED and not killed
    return "" if other else HINTS.get(verdict.exit_code, "")


def _why(verdict: Verdict, failed: Sequence[RankRecord], shown_rank: int | None) -> str:
    """The reason; where the rank that was shown has given the same one by itself, only whose it is."""
    given = {each.rank: each.not_as_planned for each in failed} if verdict.failure == "plan" else {}
    said = given.get(shown_rank) if shown_rank is not None else None
    if said and verdict.why.endswith(f": {said}"):
        return f"{verdict.why.removesuffix(f': {said}')}, as is said above"
    return verdict.why


def _others(verdict: Verdict, failed: Sequence[RankRecord], alike: Sequence[int], shown_rank: int | None) -> list[str]:
    """What is to be said of the other ranks that failed by themselves: they are counted, and not quoted."""
    if verdict.failure != "program" or verdict.rank is None:
        return []
    found, same = list[str](), set(alike)
    if len(alike) > 1:
        found.append(f"{len(alike)} ranks failed alike: {listed([*map(str, alike)])}")
    others = [each.rank for each in failed if not each.told_to_stop and each.rank not in same]
    if others:
        above = f" (the output above is that of rank {shown_rank})" if shown_rank in others else ""
        shown = f"{listed([*map(str, others)])}{above}"
        found.append(f"{counted(len(others), 'rank')} failed after it, in another way: {shown}")
    return found


def _failed(attempt: AttemptLayout) -> list[RankRecord]:
    """The ranks that did not end well, of all nodes that write into this directory."""
    with contextlib.suppress(OSError):  # the run directory was removed meanwhile, or its disk fails
        return sorted((each for each in read_records(str(attempt.root)) if each.failed), key=lambda each: each.rank)
    return []


def _unlogged(rank: int | None, failed: Sequence[RankRecord]) -> list[str]:
    """The end of a rank's errors that its log did not take."""
    return [line for each in failed if each.rank == rank for line in each.unlogged.splitlines()]


def _alike(rank: int, attempt: AttemptLayout, failed: Sequence[RankRecord]) -> list[int]:
    """The ranks whose last words are those of this one, but for numbers; the rank itself is among them.

    A launcher stops the others when it sees the first one fail, so these may have been told to stop meanwhile: one that
    was ended by a signal has failed alike only where it has said why.
    """
    unlogged = {each.rank: each.unlogged for each in failed}
    words = last_words(attempt, rank, unlogged.get(rank, ""))
    says_why = bool(words) and words[0].startswith(_PLACE)
    ended = [each.rank for each in failed if words and (each.signal is None or says_why)]
    return sorted({rank, *(each for each in ended if last_words(attempt, each, unlogged[each]) == words)})


def last_words(attempt: AttemptLayout, rank: int, unlogged: str = "") -> tuple[str, ...]:
    """The end of a rank's errors without what differs from rank to rank: its last traceback, else its last lines."""
    lines = [_MARK.sub("", line) for line in (*last_lines(attempt.log(rank, "err")), *unlogged.splitlines())]
    starts = [position for position, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    if starts:
        block = lines[starts[-1] + 1 :]
        end = next((position for position, line in enumerate(block) if line[:1].strip()), len(block))
        lines = block[: end + 1]
    return tuple(_NUMBER.sub("0", line) for line in lines[-LINES:])


def remarks(attempt: AttemptLayout, verdict: Verdict) -> list[str]:
    """What the wrappers recorded of ranks that ran, however they ended, and why a run was not as planned."""
    try:
        records = list(read_records(str(attempt.root)))
    except OSError:  # the run directory was removed meanwhile, or its disk fails
        gone = False
        with contextlib.suppress(OSError):  # a closed folder may be there
            gone = not is_there(attempt.ranks) and REMOVED not in verdict.why
        return [f"warning: {REMOVED}: what it had written before is gone"] if gone else []
    found = [f"rank {record.rank}: {record.message}" for record in records if record.message and record.pid]
    accounts = read_shown(str(attempt.root)).values()
    warned = next(("; ".join(each.warnings) for each in accounts if each.warnings), "")
    causes = causes_of(warned, RunLayout(attempt.root.parent.parent)) if warned else ()
    return found + [f"most likely: {cause}" for cause in causes]


def _log(verdict: Verdict, attempt: AttemptLayout) -> Path | None:
    if verdict.failure in ("program", "rank") and verdict.rank is not None:
        logs = [attempt.log(verdict.rank, stream) for stream in ("err", "out")]
        return next((log for log in logs if last_lines(log, 1)), None)
    if verdict.failure == "launcher":
        return attempt.launcher_log
    return attempt.preparation_log if verdict.failure == "preparation" else None
