"""What Slurm's commands print, read. Text that has been the same since Slurm 17; its JSON differs by release."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from itertools import islice

from trainkit.schedulers.base import Job, JobState, NoAnswerError, Output, RefusedError, State

_FIELD = re.compile(r"(?:^|\s)([A-Za-z][A-Za-z0-9/:_]*)=")
_START = re.compile(r"Job (\d+) to start at (\S+) using (\d+) processors on nodes (\S+) in partition (\S+)")
NUMBER = r"[1-9][0-9]{0,9}"  # of a job
_SUBMITTED = re.compile(rf"({NUMBER})(?:;([\w.-]+))?")  # behind the number the cluster, where there are several
_TIME = re.compile(r"(?:(\d+)-)?(\d+(?::\d+){0,2})")
_SETTING = re.compile(r"^(\w+)\s*=\s*(.*?)\s*$", re.MULTILINE)
# Slurm's "Job State Codes". Whatever was queued again, or waits for its nodes to boot, is still to run.
STATES: dict[str, State] = {
    **dict.fromkeys(("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "CONFIGURING"), "queued"),
    **dict.fromkeys(("POWER_UP_NODE", "EXPEDITING", "RESV_DEL_HOLD", "LAUNCH_FAILED", "RECONFIG_FAIL"), "queued"),
    **dict.fromkeys(("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"), "running"),
    **dict.fromkeys(
        ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "DEADLINE"), "ended"
    ),
    "OUT_OF_MEMORY": "ended",
}  # none of REVOKED: the job runs on, on another cluster of the federation
WHY = {
    "CANCELLED": "cancelled",
    "TIMEOUT": "time_limit",
    "DEADLINE": "time_limit",
    "PREEMPTED": "preemption",
    "NODE_FAIL": "node_failure",
    "BOOT_FAIL": "node_failure",
    "OUT_OF_MEMORY": "out_of_memory",
}
# sbatch's last words where it or the controller refuses the job (slurm_errno.c, "slurmctld error codes"). Whatever else
# it says may mean that the controller has the job, and that the reply was lost: that of authentication, too.
_REFUSAL = re.compile(
    r"invalid (?!authentication|argument)|(?:request|specification) invalid|unrecognized option|not permitted|denied|"
    r"limit|disabled|not available|down state|requested|required|no partition|no eligible",
    re.IGNORECASE,
)
MOST_TASKS = 100_000  # of an array
UNLIMITED = ("UNLIMITED", "INFINITE", "NONE", "N/A", "NOT_SET")


def fields(line: str) -> dict[str, str]:
    """``Key=Value Key=Value``, as `scontrol -o` prints it; values may have spaces."""
    found = [*_FIELD.finditer(line)]
    ends = [*(match.start() for match in found[1:]), len(line)]
    return {match[1]: line[match.end() : end].strip() for match, end in zip(found, ends, strict=False)}


def submitted(output: Output) -> Job:
    """The job, of `sbatch --parsable`, among what a login shell or a plugin of the site may say as well.

    RefusedError where it certainly has none, NoAnswerError where it may have one, and does not say which.
    """
    lines = [line.strip() for line in output.out.splitlines()]
    found = [Job(match[1], match[2] or "") for line in lines if (match := _SUBMITTED.fullmatch(line))]
    if output.code == 0 and len(found) == 1:
        return found[0]
    _, by_sbatch, last = output.words.rpartition("sbatch: ")
    if output.code > 0 and by_sbatch and _REFUSAL.search(last) and not found:
        raise RefusedError(output.words)
    said = "; ".join(filter(None, (*lines, output.words if output.err.strip() else ""))) or "nothing"
    how = f" (exit code {output.code})" if output.code else ""
    raise NoAnswerError(f"sbatch does not say the job's number{how}: {said}")


def in_queue(output: Output, script: str) -> Job | None:
    """The job that has a script, of `squeue --format='%F|%o'`; None for none. Of several clusters each has a title."""
    if output.code:
        raise RefusedError(output.words)
    cluster = ""
    for line in output.out.splitlines():
        number, _, command = line.strip().partition("|")
        if re.fullmatch(NUMBER, number) and command == script:
            return Job(number, cluster)
        if number.startswith("CLUSTER: "):
            cluster = number.removeprefix("CLUSTER: ")
    return None


def queue(output: Output) -> Mapping[str, State]:
    """Of `squeue --array --format='%i|%T'`: the states of jobs by their numbers."""
    if output.code:
        raise RefusedError(output.words)
    pairs = (line.strip().partition("|") for line in output.out.splitlines())
    return {number: STATES.get(word, "unknown") for number, bar, word in pairs if bar}


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
    return _job(fields(output.out.splitlines()[0] if output.out.strip() else ""))


def job_states(output: Output) -> dict[str, JobState]:
    """The same of a job and of all tasks of an array, by their numbers. Raises RefusedError where Slurm is silent."""
    if output.code:
        if "Invalid job id" in output.words:  # which it knows no more
            return {}
        raise RefusedError(output.words)
    found: dict[str, JobState] = {}
    for line in output.out.splitlines():
        known = fields(line)
        state, array = _job(known), known.get("ArrayJobId", "")
        if "..." in known.get("ArrayTaskId", ""):
            raise RefusedError("scontrol names only some of the array's tasks that wait")
        found[known.get("JobId", "")] = state
        for task in _tasks(known.get("ArrayTaskId", "")) if array.isdecimal() else ():
            found[f"{array}_{task}"] = state
    return found


def _tasks(text: str) -> Iterator[int]:
    """The tasks of ``7``, or of those that wait: ``3,5-9%2``, or ``1-9:2``."""
    for first, last, step in re.findall(r"(\d{1,9})(?:-(\d{1,9}))?(?::(\d{1,9}))?", text.partition("%")[0]):
        yield from islice(range(int(first), int(last or first) + 1, int(step or 1) or 1), MOST_TASKS)


def _job(known: Mapping[str, str]) -> JobState:
    word = known.get("JobState", "").partition(" ")[0]
    state = STATES.get(word, "unknown")
    code, _, number = (amount(each) for each in known.get("ExitCode", "0:0").partition(":"))
    ended = int(128 + number) if number else None if code is None else int(code)
    reason = known.get("Reason", "")
    user = re.fullmatch(r"(.*)\((\d+)\)", known.get("UserId", ""))
    return JobState(
        state,
        reason=f"Slurm says {word}" if word and state == "unknown" else "" if reason == "None" else reason,
        nodes=known.get("NodeList", "").replace("(null)", ""),
        restarts=int(amount(known.get("Restarts", "")) or 0),
        exit_code=ended if state == "ended" else None,
        started=_moment(known.get("StartTime", "")),
        ends=_moment(known.get("EndTime", "")),
        preempted=_moment(known.get("PreemptTime", "")) is not None,
        why=WHY.get(word, ""),  # type: ignore[arg-type]
        name=known.get("JobName", ""),
        uid=int(user[2]) if user else None,
        user=user[1] if user else "",
        files=tuple(known[each] for each in ("Command", "StdOut", "SubmitLine") if each in known),
    )


PAST = ("State", "ExitCode", "UID", "User", "NodeList", "JobName", "SubmitLine")  # of sacct(1)


def past_job(output: Output) -> JobState:
    """Of `sacct --parsable2` with the columns above: a job that has left the queue; gone where it is not known."""
    line = next((each for each in output.out.splitlines() if each.strip()), "")
    if output.code or line.count("|") < len(PAST) - 1:
        return JobState("gone")
    known = dict(zip(PAST, line.split("|", len(PAST) - 1), strict=True))
    return _job({**known, "JobState": known["State"], "UserId": f"{known['User']}({known['UID']})"})


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
    except (ValueError, OverflowError):
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
    match = re.match(r"[0-9]{1,18}", text)
    return float(match[0]) if match else None
