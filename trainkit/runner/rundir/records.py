"""What a run directory says of a run: the exit record of each rank, and the state of the whole.

Whoever may write to the directory may write anything into it, so that a record is read as what it is or not at all: a
regular file of bounded size, numbers in their range, names that are names. What is done because of a record is proved
first, see `trainkit/runner/supervisor/processes.py`.
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

REMOVED = "the run directory was removed while it ran"
SAYS = "trainkit.runner.rank: "  # what a wrapper's own words begin with
NOT_SHOWN = "not shown: "  # what follows says why it is not known what a program runs
UNSEEN = "no step of an optimizer of torch was seen"
END_BYTES = 1 << 16  # of a launcher's log
DUMPS, ORDERS = "dumps", "orders"  # folders of an attempt: what hanging ranks were doing; what people ask of a run
PACES = "paces.json"  # in an attempt: how fast the ranks were
ROOM = 2500  # bytes, of the block of 4096 that even a small file has


LATEST = 1e11  # seconds since the epoch: what datetime can show
Count = Annotated[int, Between(0, 1 << 53)]
RankKey = Annotated[str, Like("0|[1-9][0-9]{0,7}", "the number of a rank")]
RankNumber = Annotated[int, Between(0, 1 << 24)]
Descriptor = Annotated[int, Between(-1, 1 << 24)]
ExitCode = Annotated[int, Between(0, 255)]
SignalNumber = Annotated[int, Between(1, 64)]
Moment = Annotated[float, Between(0, LATEST)]  # seconds since the epoch
Seconds = Annotated[float, Between(0, 1e12)]
Name = Annotated[str, Like(r"(?!\.)[\w.:%+-]{0,300}", "a name")]  # of a host, of a port behind it: never a path
Folder = Annotated[str, Like(r"(/[^\0\ud800-\udc7f\udd00-\udfff]*)?", "an absolute path")]
State = Literal["", "queued", "starting", "running", "requeued", "ended"]


class RankRecord(NamedTuple):
    """What a wrapper knows of its rank. Times are seconds since the epoch; `ended` is None while it runs."""

    rank: RankNumber
    local_rank: RankNumber
    host: Name
    wrapper_pid: Pid
    pid: Annotated[int, Between(0, 1 << 22)] = 0  # of the program; 0 before it started
    restart: Count = 0  # how often the launcher had restarted the ranks before
    started: Moment = 0.0
    ended: Moment | None = None
    clock: Seconds = 0.0  # of its end too, on this host's monotonic clock: the time of day may jump meanwhile
    exit_code: ExitCode | None = None
    signal: SignalNumber | None = None
    told_to_stop: bool = False  # TERM, INT or HUP reached the wrapper before the program ended
    message: str = ""  # why the program could not be started, or what its log lacks
    unlogged: str = ""  # the last of its errors that its log did not take
    not_as_planned: str = ""  # what the program was seen to do otherwise than the plan says
    node: RankNumber = 0  # of several
    rendezvous: Name = ""  # MASTER_ADDR_MASTER_PORT as this rank saw them: names its shared memory
    stamps: Descriptor = -1  # of the wrapper's: the page in which the program says how far it is (trainkit/stamps.py)
    orders: Descriptor = -1  # of the wrapper's: the pipe by which its flight recorder is asked
    wrapper_started: str = ""  # as `processes.started` says it

    def opened(self, fd: int) -> str:
        """Path of one of the wrapper's descriptors; empty where it has none."""
        return f"/proc/{self.wrapper_pid}/fd/{fd}" if fd >= 0 else ""

    @property
    def failed(self) -> bool:
        """Whether the program ended in any way but exit code 0."""
        return self.ended is not None and (self.exit_code != 0 or self.signal is not None)

    @property
    def code(self) -> int:
        """The exit code a shell would show."""
        return 128 + self.signal if self.signal is not None else (self.exit_code or 0)


class Pids(NamedTuple):
    """The processes of a run on its host. ranks: of the programs, by global rank.

    started: of trainkit and of its guardian, with boot, so that they are known when their numbers are given again.
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
        """Those of processes of this machine."""
        began = {"trainkit": started(trainkit), "guardian": started(guardian) if guardian else ""}
        return cls(trainkit, guardian, launcher, ranks or {}, {k: v for k, v in began.items() if v}, boot_id())

    def process(self, name: Literal["trainkit", "guardian"]) -> ProcessId | None:
        """One of them; None where it has not started, or nothing says when."""
        pid, began = getattr(self, name), self.started.get(name)
        return ProcessId(pid, began, self.boot) if pid and began else None


class Status(NamedTuple):
    """status.json: the state of a run, or who ended it and why. What it is called, as in `exit_status.Verdict`.

    outcome: of a submitted run, what its job makes of the end.
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


class Shown(NamedTuple):
    """What the program of a rank was seen to run, by `trainkit/verify/observe.py`; error: why that is not known."""

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
        """For the summary: without what few accounts have, where this one has it not."""
        seldom = ("warnings", "arguments", "output_dir", "step", "error")
        return {name: value for name, value in self._asdict().items() if value or name not in seldom}


def log_path(attempt_dir: str, rank: int, stream: str) -> str:
    """Path of the output of a global rank; stream is ``out`` or ``err``."""
    return os.path.join(attempt_dir, "logs", f"rank-{rank}.{stream}")


def records_path(attempt_dir: str, node: int) -> str:
    """Folder of the records of a node's ranks: of thousands of nodes each watches its own alone."""
    folder = os.path.join(attempt_dir, "ranks")
    return os.path.join(folder, f"node-{node}") if node else folder


def status_path(run_dir: str, attempt_dir: str, node: int) -> str:
    """Where the guardian of a node writes the state of the run: each file has one writer."""
    return os.path.join(attempt_dir, "nodes", f"{node}.json") if node else os.path.join(run_dir, "status.json")


def launcher_log(attempt_dir: str, node: int) -> str:
    """Path of the output of a node's launcher."""
    return os.path.join(attempt_dir, "logs", f"node-{node}.launcher.log" if node else "launcher.log")


def shown_path(attempt_dir: str, rank: int) -> str:
    """Where the program of a global rank leaves what was seen at its first optimizer step."""
    return os.path.join(attempt_dir, "shown", f"rank-{rank}.json")


def read_shown(attempt_dir: str) -> dict[int, Shown]:
    """What was seen in each rank, by its number; of a damaged account that it is damaged."""
    folder, run, found = os.path.join(attempt_dir, "shown"), run_of(attempt_dir), dict[int, Shown]()
    with contextlib.suppress(OSError):  # none has left an account
        for name in names_in(folder, below=run):
            if number := re.fullmatch(r"rank-(0|[1-9][0-9]{0,7})\.json", name):
                record = read_record(os.path.join(folder, name), Shown, below=run)
                found[int(number[1])] = record or Shown(error=f"{name} is damaged")
    return dict(sorted(found.items()))


def last_of(output: bytes) -> str:
    """The end of an output, so short that a record with it can be written in the old one's place on a full disk."""
    text = output.decode("utf-8", "replace")
    while len(json.dumps(text)) > ROOM:
        text = text[len(text) // 8 + 1 :]
    return text


def run_of(attempt_dir: str) -> str:
    """The run directory of an attempt: no folder below it may be a link."""
    return os.path.dirname(os.path.dirname(attempt_dir))


def record_path(attempt_dir: str, record: RankRecord) -> str:
    """Where the record of a rank is, of whatever start."""
    return os.path.join(records_path(attempt_dir, record.node), f"rank-{record.rank}.json")


def write_record(attempt_dir: str, record: RankRecord) -> None:
    """Put the record in place, whole; that of an ended rank also where the disk is full by now. Raises OSError."""
    write = publish if record.ended is None else publish_or_overwrite
    write(record_path(attempt_dir, record), json.dumps(record._asdict()) + "\n", below=run_of(attempt_dir))


def unwritten(attempt_dir: str, node: int = 0) -> str:
    """Why a wrapper could not write its record, as it says where the launcher writes; empty where none has said so."""
    message = f"{SAYS}{attempt_dir} cannot be written: ".encode()
    for line in read_end(launcher_log(attempt_dir, node), END_BYTES, below=run_of(attempt_dir)).splitlines():
        if line.startswith(message):
            return line.removeprefix(SAYS.encode()).decode("utf-8", "replace")
    return ""


def read_records(attempt_dir: str, node: int | None = None) -> Iterator[RankRecord]:
    """Every record of the attempt, or of one node in it, that can be read now. Raises OSError where a folder cannot."""
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
    # None: gone meanwhile, on a failing disk, being overwritten, or no record.
    found = (read_record(os.path.join(folder, name), RankRecord, below=run) for name in names)
    yield from (record for record in found if record is not None)
