"""What Slurm's commands print, read. Text that has been the same since Slurm 17; its JSON differs by release."""

from __future__ import annotations

import re
from datetime import datetime

from trainkit.schedulers.interface import JobState, Output, RefusedError, State

_FIELD = re.compile(r"(?:^|\s)([A-Za-z][A-Za-z0-9/:_]*)=")
_START = re.compile(r"Job (\d+) to start at (\S+) using (\d+) processors on nodes (\S+) in partition (\S+)")
_TIME = re.compile(r"(?:(\d+)-)?(\d+(?::\d+){0,2})")
_SETTING = re.compile(r"^(\w+)\s*=\s*(.*?)\s*$", re.MULTILINE)
# squeue(1), JOB STATE CODES.
STATES: dict[str, State] = {
    **dict.fromkeys(("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "CONFIGURING"), "queued"),
    **dict.fromkeys(("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"), "running"),
    **dict.fromkeys(
        ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "DEADLINE"), "ended"
    ),
    "OUT_OF_MEMORY": "ended",
    "REVOKED": "ended",
}
WHY = {
    "CANCELLED": "cancelled",
    "TIMEOUT": "time_limit",
    "DEADLINE": "time_limit",
    "PREEMPTED": "preemption",
    "NODE_FAIL": "node_failure",
    "BOOT_FAIL": "node_failure",
    "OUT_OF_MEMORY": "out_of_memory",
}
UNLIMITED = ("UNLIMITED", "INFINITE", "NONE", "N/A", "NOT_SET")


def fields(line: str) -> dict[str, str]:
    """``Key=Value Key=Value``, as `scontrol -o` prints it; values may have spaces."""
    found = [*_FIELD.finditer(line)]
    ends = [*(match.start() for match in found[1:]), len(line)]
    return {match[1]: line[match.end() : end].strip() for match, end in zip(found, ends, strict=False)}


def submitted(output: Output) -> str:
    """The job's number, of `sbatch --parsable`."""
    if output.code:
        raise RefusedError(output.words)
    number = output.out.strip().partition(";")[0]  # behind it the cluster, where there are several
    if not number.isdecimal():
        raise RefusedError(f"sbatch does not say the job's number: {output.out.strip() or 'nothing'}")
    return number


def nothing(output: Output) -> None:
    """Of commands that print nothing when they have done it."""
    if output.code:
        raise RefusedError(output.words)


def steps(output: Output) -> dict[str, str]:
    """Of `squeue --steps --format='%i|%j'`: the steps by their names."""
    if output.code:
        raise RefusedError(output.words)
    pairs = (line.strip().partition("|") for line in output.out.splitlines())
    return {name: number for number, _, name in pairs if name}


def rehearsed(output: Output) -> str:
    """When and where Slurm would start it, of `sbatch --test-only`."""
    if output.code:
        raise RefusedError(output.words.removeprefix("allocation failure: "))
    match = _START.search(output.err + output.out)
    return f"Slurm would start it at {match[2]} on {match[4]} (partition {match[5]})" if match else ""


def job_state(output: Output) -> JobState:
    """Of `scontrol show job -o`. Unknown where Slurm does not answer, and where it knows the job no more."""
    if output.code:
        return JobState("unknown", output.words)
    known = fields(output.out.splitlines()[0] if output.out.strip() else "")
    word = known.get("JobState", "")
    state = STATES.get(word, "unknown")
    code, _, number = known.get("ExitCode", "0:0").partition(":")
    ended = 128 + int(number) if number.isdecimal() and int(number) else int(code) if code.isdecimal() else None
    reason = known.get("Reason", "")
    return JobState(
        state,
        reason="" if reason == "None" else reason,
        nodes=known.get("NodeList", "").replace("(null)", ""),
        restarts=int(known.get("Restarts", "0") or 0),
        exit_code=ended if state == "ended" else None,
        ends=_moment(known.get("EndTime", "")),
        preempted=_moment(known.get("PreemptTime", "")) is not None,
        why=WHY.get(word, ""),  # type: ignore[arg-type]
    )


def job_number(output: Output) -> str:
    """Of `scontrol show job -o`: the number that is the job's alone, also of a task of an array."""
    if output.code:
        raise RefusedError(output.words)
    found = fields(output.out.splitlines()[0] if output.out.strip() else "").get("JobId", "")
    if not found.isdecimal():
        raise RefusedError(f"scontrol does not say the job's number: {output.out.strip()[:100] or 'nothing'}")
    return found


def _moment(text: str) -> float | None:
    """Seconds since the epoch of a local time as Slurm prints it; None for `Unknown` and `None`."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def partition(output: Output) -> dict[str, str]:
    """The limits of a partition, of `scontrol show partition -o`; of several the default one."""
    if output.code:
        raise RefusedError(output.words)
    found = [fields(line) for line in output.out.splitlines() if line.strip()]
    chosen = (each for each in found if len(found) == 1 or each.get("Default") == "YES")
    return next(chosen, {})


def configuration(output: Output) -> dict[str, str]:
    """Slurm's settings, of `scontrol show config`."""
    if output.code:
        raise RefusedError(output.words)
    return dict(_SETTING.findall(output.out))


def seconds(text: str) -> float | None:
    """A time limit of Slurm's (``1-12:00:00``, ``90:00``, ``30``, in minutes) in seconds; None for no limit.

    sbatch(1): minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes and with seconds.
    ValueError for anything else.
    """
    if text.upper() in UNLIMITED:
        return None
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no time of Slurm's")
    days, parts = match[1], [int(part) for part in match[2].split(":")]
    # Behind days the first part is hours; else one part is minutes, and of two the last is seconds.
    hours, minutes, last = [*parts, 0, 0][:3] if days or len(parts) == 3 else [0, *parts, 0][:3]
    return float(((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + last)


def amount(text: str) -> float | None:
    """The number of a setting such as ``30 sec``; None where there is none."""
    match = re.match(r"\d+", text)
    return float(match[0]) if match else None
