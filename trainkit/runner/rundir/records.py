"""A rank's exit record: written by its wrapper, read by the guardian and by people."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from typing import NamedTuple

from trainkit.files import open_regular, parse_json, publish, publish_or_overwrite, read_whole, refuse_links

REMOVED = "the run directory was removed while it ran"
SAYS = "trainkit.runner.rank: "  # what a wrapper's own words begin with
END_BYTES = 1 << 16  # of a launcher's log
DUMPS, ORDERS = "dumps", "orders"  # folders of an attempt: what hanging ranks were doing; what people ask of a run
PACES = "paces.json"  # in an attempt: how fast the ranks were
ROOM = 2500  # bytes, of the block of 4096 that even a small file has


class RankRecord(NamedTuple):
    """What a wrapper knows of its rank. Times are seconds since the epoch; `ended` is None while it runs."""

    rank: int
    local_rank: int
    host: str
    wrapper_pid: int
    pid: int = 0  # of the program; 0 before it started
    restart: int = 0  # how often the launcher had restarted the ranks before
    started: float = 0.0
    ended: float | None = None
    clock: float = 0.0  # of its end too, on this host's monotonic clock: the time of day may jump meanwhile
    exit_code: int | None = None
    signal: int | None = None
    told_to_stop: bool = False  # TERM, INT or HUP reached the wrapper before the program ended
    message: str = ""  # why the program could not be started, or what its log lacks
    unlogged: str = ""  # the last of its errors that its log did not take
    not_as_planned: str = ""  # what the program was seen to do otherwise than the plan says
    node: int = 0  # of several
    rendezvous: str = ""  # MASTER_ADDR_MASTER_PORT as this rank saw them: names its shared memory
    stamps: str = ""  # path at which the page is opened in which the program says how far it is (trainkit/stamps.py)
    orders: str = ""  # path of the pipe by which its flight recorder is asked

    @property
    def failed(self) -> bool:
        """Whether the program ended in any way but exit code 0."""
        return self.ended is not None and (self.exit_code != 0 or self.signal is not None)

    @property
    def code(self) -> int:
        """The exit code a shell would show."""
        return 128 + self.signal if self.signal is not None else (self.exit_code or 0)


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


def last_of(output: bytes) -> str:
    """The end of an output, so short that a record with it can be written in the old one's place on a full disk."""
    text = output.decode("utf-8", "replace")
    while len(json.dumps(text)) > ROOM:
        text = text[len(text) // 8 + 1 :]
    return text


def refuse_replaced(attempt_dir: str) -> None:
    """OSError where a link is in the place of the run directory, or of a folder down to the attempt's records."""
    attempts = os.path.dirname(attempt_dir)
    refuse_links(
        os.path.dirname(attempts), attempts, attempt_dir, *(f"{attempt_dir}/{name}" for name in ("logs", "ranks"))
    )


def write_record(attempt_dir: str, record: RankRecord) -> None:
    """Put the record in place, whole; that of an ended rank also where the disk is full by now. Raises OSError."""
    refuse_replaced(attempt_dir)
    folder = records_path(attempt_dir, record.node)
    refuse_links(folder)
    write = publish if record.ended is None else publish_or_overwrite
    write(os.path.join(folder, f"rank-{record.rank}.json"), json.dumps(record._asdict()) + "\n")


def unwritten(attempt_dir: str, node: int = 0) -> str:
    """Why a wrapper could not write its record, as it says where the launcher writes; empty where none has said so."""
    said = f"{SAYS}{attempt_dir} cannot be written: ".encode()
    with (
        contextlib.suppress(OSError),
        os.fdopen(open_regular(launcher_log(attempt_dir, node)), "rb") as file,
    ):
        file.seek(max(0, file.seek(0, os.SEEK_END) - END_BYTES))
        for line in file.read().splitlines():
            if line.startswith(said):
                return line.removeprefix(SAYS.encode()).decode("utf-8", "replace")
    return ""


def read_records(attempt_dir: str, node: int | None = None) -> Iterator[RankRecord]:
    """Every record of the attempt, or of one node in it, that can be read now. Raises OSError where a folder cannot."""
    if node is not None:
        refuse_links(folder := records_path(attempt_dir, node))
        yield from (record for record in _records_in(folder) if record.node == node)
        return
    folder = os.path.join(attempt_dir, "ranks")
    yield from _records_in(folder)
    with os.scandir(folder) as entries:
        folders = [e.path for e in entries if e.name.startswith("node-") and e.is_dir(follow_symlinks=False)]
    for each in sorted(folders):
        yield from _records_in(each)


def _records_in(folder: str) -> Iterator[RankRecord]:
    for name in sorted(os.listdir(folder)):
        if name.startswith("rank-") and name.endswith(".json"):
            with contextlib.suppress(OSError, ValueError):  # gone meanwhile, on a failing disk, or being overwritten
                known = parse_json(read_whole(os.path.join(folder, name)))
                yield RankRecord(**{key: known[key] for key in RankRecord._fields if key in known})
