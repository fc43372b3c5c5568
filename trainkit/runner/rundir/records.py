"""The records in a run directory: the exit record of each rank, and status.json.

Another user with write access to the directory may write anything into it. So a record must be a regular file of
bounded size with valid names and numbers in range, or it is not read at all. And a process that a record names is
proved to be the right one before anything is done to it, see `trainkit/runner/supervisor/processes.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from trainkit.decode import Between, Like
from trainkit.files import names_in, publish, publish_or_overwrite, read_end, read_record
from trainkit.runner.supervisor.processes import Pid, ProcessId, boot_id, started

REMOVED = "the run directory was removed during the run"
SAYS = "trainkit.runner.rank: "  # prefix of a wrapper's own messages
NOT_OBSERVED = "not shown: "  # prefix of the reason why nothing is known of a program
UNSEEN = "no torch optimizer took a step"
END_BYTES = 1 << 16  # bytes read of a launcher's log
DUMPS, ORDERS = "dumps", "orders"  # folders of an attempt: dumps of its ranks; users' requests to the guardian
PACES = "paces.json"  # in an attempt: the ranks' step times
ROOM = 2500  # bytes: fits into the block of 4096 that even a small file occupies
LATEST = 1e11  # seconds since the epoch: what datetime can show
Count = Annotated[int, Between(0, 1 << 53)]
RankKey = Annotated[str, Like("0|[1-9][0-9]{0,7}", "the number of a rank")]
RankNumber = Annotated[int, Between(0, 1 << 24)]
Descriptor = Annotated[int, Between(-1, 1 << 24)]
ExitCode = Annotated[int, Between(0, 255)]
SignalNumber = Annotated[int, Between(1, 64)]
Moment = Annotated[float, Between(0, LATEST)]  # seconds since the epoch
Seconds = Annotated[float, Between(0, 1e12)]
Name = Annotated[str, Like(r"(?!\.)[\w.:%+-]{0,300}", "a name")]  # of a host, perhaps with a port: never a path
Folder = Annotated[str, Like(r"(/[^\0\ud800-\udc7f\udd00-\udfff]*)?", "an absolute path")]
State = Literal["", "queued", "starting", "running", "requeued", "ended"]


class RankRecord(NamedTuple):
    """Written by the wrapper of a rank. Times are seconds since the epoch; `ended` is None while it runs."""

    rank: RankNumber
    local_rank: RankNumber
    host: Name
    wrapper_pid: Pid
    pid: Annotated[int, Between(0, 1 << 22)] = 0  # of the program; 0 before it started
    restart: Count = 0  # how often the launcher has restarted the ranks
    started: Moment = 0.0
    ended: Moment | None = None
    clock: Seconds = 0.0  # its start, later its end, on this host's monotonic clock: the time of day may jump
    exit_code: ExitCode | None = None
    signal: SignalNumber | None = None
    told_to_stop: bool = False  # TERM, INT or HUP reached the wrapper before the program ended
    message: str = ""  # why the program could not be started, or how much output is missing from its log
    unlogged: str = ""  # the end of its standard error that could not be logged
    not_as_planned: str = ""  # how the program differs from the plan
    node: RankNumber = 0
    rendezvous: Name = ""  # MASTER_ADDR_MASTER_PORT of this rank, part of the names of its shared memory
    heartbeat: Descriptor = -1  # the wrapper's descriptor of the heartbeat's page (trainkit/heartbeat.py)
    orders: Descriptor = -1  # the wrapper's descriptor of the pipe for requests to the flight recorder
    wrapper_started: str = ""  # as from `processes.started`

    def opened(self, fd: int) -> str:
        """Path of one of the wrapper's descriptors; empty if it has none."""
        return f"/proc/{self.wrapper_pid}/fd/{fd}" if fd >= 0 else ""

    @property
    def failed(self) -> bool:
        return self.ended is not None and (self.exit_code != 0 or self.signal is not None)

    @property
    def code(self) -> int:
        """The exit code of a shell."""
        return 128 + self.signal if self.signal is not None else (self.exit_code or 0)


class Pids(NamedTuple):
    """The processes of a run on its host. ranks: of the programs, by global rank.

    started: start times of trainkit and its guardian. With boot they prove that a pid still means the same process.
    """

    trainkit: Pid | None = None
    guardian: Pid | None = None
    launcher: Pid | None = None
    ranks: Mapping[str, Annotated[int, Between(0, 1 << 22)]] = {}
    started: Mapping[str, str] = {}
    boot: str = ""

    @classmethod
    def of(
        cls,
        trainkit: int,
        guardian: int | None = None,
        launcher: int | None = None,
        ranks: Mapping[str, int] | None = None,
    ) -> Pids:
        began = {"trainkit": started(trainkit), "guardian": started(guardian) if guardian else ""}
        return cls(trainkit, guardian, launcher, ranks or {}, {k: v for k, v in began.items() if v}, boot_id())

    def process(self, name: Literal["trainkit", "guardian"]) -> ProcessId | None:
        """None if it has not started, or its start time is unknown."""
        pid, began = getattr(self, name), self.started.get(name)
        return ProcessId(pid, began, self.boot) if pid and began else None


class Status(NamedTuple):
    """status.json: the state of a run, or who ended it and why; its names are those of `exit_status.Verdict`.

    outcome: what the job of a submitted run does about the end.
    """

    state: State = ""
    run_id: str | None = None
    attempt: Count = 0
    job: str | None = None
    started: Moment | None = None
    ended: Moment | None = None
    exit_code: ExitCode | None = None
    failure: str | None = None
    why: str | None = None
    rank: RankNumber | None = None
    signal: SignalNumber | None = None
    blamed: str | None = None
    node: RankNumber | None = None
    host: Name | None = None
    pids: Pids = Pids()
    survivors: tuple[Pid, ...] = ()
    hang: str | None = None
    outcome: str | None = None


class Observation(NamedTuple):
    """What `trainkit/verify/observe.py` saw in a rank's program; error: why it saw nothing."""

    strategy: str | None = None
    world_size: Count | None = None
    device: str | None = None
    dtype: str | None = None
    differences: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    arguments: Mapping[str, Any] | None = None
    output_dir: Folder = ""
    step: Count | None = None
    error: str = ""

    def as_data(self) -> dict[str, Any]:
        """For the summary: without rare entries if they are empty."""
        seldom = ("warnings", "arguments", "output_dir", "step", "error")
        return {name: value for name, value in self._asdict().items() if value or name not in seldom}


def log_path(attempt_dir: str, rank: int, stream: str) -> str:
    """Output of a global rank; stream is ``out`` or ``err``."""
    return os.path.join(attempt_dir, "logs", f"rank-{rank}.{stream}")


def records_path(attempt_dir: str, node: int) -> str:
    """Folder of the records of a node's ranks: each of thousands of nodes watches only its own."""
    folder = os.path.join(attempt_dir, "ranks")
    return os.path.join(folder, f"node-{node}") if node else folder


def status_path(run_dir: str, attempt_dir: str, node: int) -> str:
    """The file for the run's state by one node's guardian: each file has one writer."""
    return os.path.join(attempt_dir, "nodes", f"{node}.json") if node else os.path.join(run_dir, "status.json")


def launcher_log(attempt_dir: str, node: int) -> str:
    return os.path.join(attempt_dir, "logs", f"node-{node}.launcher.log" if node else "launcher.log")


def observation_path(attempt_dir: str, rank: int) -> str:
    """The file for what the proof saw in a global rank at its first optimizer step."""
    return os.path.join(attempt_dir, "shown", f"rank-{rank}.json")


def read_observations(attempt_dir: str) -> dict[int, Observation]:
    """What the proof saw in each rank, by its number; a damaged file counts as an error."""
    folder, run, found = os.path.join(attempt_dir, "shown"), run_of(attempt_dir), dict[int, Observation]()
    with contextlib.suppress(OSError):  # no rank was observed
        for name in names_in(folder, below=run):
            if number := re.fullmatch(r"rank-(0|[1-9][0-9]{0,7})\.json", name):
                record = read_record(os.path.join(folder, name), Observation, below=run)
                found[int(number[1])] = record or Observation(error=f"{name} is damaged")
    return dict(sorted(found.items()))


def last_of(output: bytes) -> str:
    """The end of an output, short enough that the record can be overwritten in place on a full disk."""
    text = output.decode("utf-8", "replace")
    while len(json.dumps(text)) > ROOM:
        text = text[len(text) // 8 + 1 :]
    return text


def run_of(attempt_dir: str) -> str:
    """The run directory of an attempt. No folder below it may be a link."""
    return os.path.dirname(os.path.dirname(attempt_dir))


def record_path(attempt_dir: str, record: RankRecord) -> str:
    return os.path.join(records_path(attempt_dir, record.node), f"rank-{record.rank}.json")


def write_record(attempt_dir: str, record: RankRecord) -> None:
    """Publish the record; if the rank has ended, even on a full disk. Raises OSError."""
    write = publish if record.ended is None else publish_or_overwrite
    write(record_path(attempt_dir, record), json.dumps(record._asdict()) + "\n", below=run_of(attempt_dir))


def unwritten(attempt_dir: str, node: int = 0) -> str:
    """Why a wrapper could not write its record, from its message in the launcher's log; empty if there is none."""
    message = f"{SAYS}{attempt_dir} cannot be written: ".encode()
    for line in read_end(launcher_log(attempt_dir, node), END_BYTES, below=run_of(attempt_dir)).splitlines():
        if line.startswith(message):
            return line.removeprefix(SAYS.encode()).decode("utf-8", "replace")
    return ""


def read_records(attempt_dir: str, node: int | None = None) -> Iterator[RankRecord]:
    """Every record of the attempt, or of one node, that can be read now. Raises OSError if a folder cannot be read."""
    run = run_of(attempt_dir)
    if node is not None:
        yield from (record for record in _records_in(records_path(attempt_dir, node), run) if record.node == node)
        return
    folder = os.path.join(attempt_dir, "ranks")
    yield from _records_in(folder, run)
    with os.scandir(folder) as entries:
        folders = [e.path for e in entries if e.name.startswith("node-") and e.is_dir(follow_symlinks=False)]
    for each in sorted(folders):
        yield from _records_in(each, run)


def _records_in(folder: str, run: str) -> Iterator[RankRecord]:
    names = (name for name in names_in(folder, below=run) if name.startswith("rank-") and name.endswith(".json"))
    # None: just removed, on a failing disk, being overwritten, or not a record.
    found = (read_record(os.path.join(folder, name), RankRecord, below=run) for name in names)
    yield from (record for record in found if record is not None)
