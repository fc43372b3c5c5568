"""The heartbeat of a rank's program: its step, its phase and since when, in a page of memory.

Standard library only, without imports of trainkit: the hook in a user's program loads this file by its path. The rank's
wrapper makes the page, anonymous memory that needs no removal, and passes its path on; the guardian reads it there.
Behind the page the program's stacks are written on a signal: Python's faulthandler does that in C, so that it works
also while the program hangs in a call that never returns to Python. The flight recorder of torch needs a thread, which
waits on a pipe and is started only if there are several ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

VARIABLE = "TRAINKIT_HEARTBEAT"  # paths of the page and of the pipe for orders
PAGE = 4096  # bytes; behind it is text
MAGIC = 0x314B5454
PHASES = ("start", "data", "exchange", "forward", "backward", "optimizer", "checkpoint", "evaluation", "steps")
START, DATA, EXCHANGE, FORWARD, BACKWARD, OPTIMIZER, CHECKPOINT, EVALUATION, STEPS = range(len(PHASES))
# MAGIC, pid of the program, steps done, phase, and when it was written (seconds of the system's monotonic clock).
HEAD, PACE = struct.Struct("<IIQQd"), struct.Struct("<ff")
LONGEST_AT, PACES_AT, PACES = 64, 256, 256  # longest times of phases; seconds and own seconds of the latest steps
JOINED, JOINED_AT = struct.Struct("<Q"), 144  # collectives that the program has joined, by its last answer
TOTALS_AT = 152  # seconds of each phase so far
KEPT = 16  # the earliest collectives of a group in which a rank waits
# A signal that neither people nor libraries send; C libraries keep the first two or three of these for themselves.
ASK = signal.SIGRTMIN + 11 if hasattr(signal, "SIGRTMIN") else None


class Heartbeat:
    """Writes the page, in the program. Without a page it writes into memory of its own.

    orders: path of the pipe for orders; publish: of trainkit/files.py, writes the answers.
    """

    def __init__(self, page: Any = None, orders: str = "", publish: Callable[..., None] | None = None) -> None:
        self._page: Any = page if page is not None else bytearray(PAGE)
        self._orders, self._publish = orders, publish
        whole = memoryview(self._page)
        self._whole_numbers, self._numbers = whole.cast("Q"), whole.cast("d")  # faster than to pack
        self._own: tuple[int, ...] = (DATA, FORWARD)
        self._computes = -1
        self._phase, self._step, self._at = START, 0, time.monotonic()
        self._began, self._spent, self._paced = self._at, 0.0, 0
        self._longest = [0.0] * len(PHASES)
        self.totals = [0.0] * len(PHASES)  # seconds that each phase has taken so far, as this host sees it
        self._optimizer = 0
        self._thread_time: float | None = None  # at the last step of the program's own optimizer, on a CPU
        self._computed = 0.0  # thread time as the phase began
        self._page[:PAGE] = bytes(PAGE)  # another process of the same rank may have written before
        HEAD.pack_into(self._page, 0, MAGIC, os.getpid(), 0, START, self._at)

    def own(self, *phases: int, computes: int = -1) -> None:
        """Set the phases without waiting for other ranks, which are the rank's own time.

        computes: a phase with waiting, of which only the processor time of this thread is its own.
        """
        self._own, self._computes = phases, computes

    def set_phase(self, phase: int) -> None:
        """A phase begins, or goes on."""
        now = time.monotonic()
        took, before = now - self._at, self._phase
        if took > self._longest[before]:
            self._longest[before] = took
            self._numbers[LONGEST_AT // 8 + before] = took
        self.totals[before] = self._numbers[TOTALS_AT // 8 + before] = self.totals[before] + took
        if before in self._own:
            self._spent += took
        if before == self._computes:
            self._spent += time.thread_time() - self._computed
        if phase == self._computes:
            self._computed = time.thread_time()
        self._phase, self._at = phase, now
        numbers = self._whole_numbers
        numbers[1], numbers[2], self._numbers[3] = self._step, phase, now

    def step_done(self, step: int) -> None:
        """So many steps are done; the exchange with other ranks follows."""
        self._step = step
        self.set_phase(EXCHANGE)
        self._note_pace()

    def _note_pace(self) -> None:
        now = self._at
        PACE.pack_into(self._page, PACES_AT + 8 * (self._paced % PACES), now - self._began, self._spent)
        self._paced += 1
        self._began, self._spent = now, 0.0

    def begin_step(self, done: int) -> None:
        """The next step begins. The time since the last one, as of an evaluation, belongs to no step."""
        self._step = done
        self.set_phase(DATA)
        self._began, self._spent = self._at, 0.0

    def stepped(self, optimizer: Any) -> None:
        """An optimizer of the program takes a step; the first one that ever did counts them."""
        if not self._optimizer:
            self._optimizer = id(optimizer)
            with contextlib.suppress(Exception):  # of an unknown optimizer
                if optimizer.param_groups[0]["params"][0].device.type == "cpu":
                    self._thread_time = time.thread_time()  # waiting for others takes none, without a GPU
        self.set_phase(STEPS)
        if id(optimizer) == self._optimizer:
            if self._thread_time is not None:
                used, self._thread_time = self._thread_time, time.thread_time()
                self._spent = self._thread_time - used
            self._step += 1
            if self._step > 1:
                self._note_pace()
            self._began, self._spent = self._at, 0.0

    def note_collectives(self) -> None:
        """Write how many collectives this process has joined in all its groups, by torch's recorder."""
        with contextlib.suppress(Exception):  # of an unknown torch; the program must not notice
            found = [each for dump in _dumps(includeCollectives=False) for each in dump.get("pg_status", {}).values()]
            self._whole_numbers[JOINED_AT // 8] = sum(max(0, each["last_enqueued_collective"]) for each in found)

    def listen(self, *, counts: bool = False) -> None:
        """Start the thread for orders to write the content of torch's flight recorder, if there are other ranks.

        counts: whether to answer how many collectives were joined, for a program without phases.
        """
        if self._publish and self._orders and os.environ.get("WORLD_SIZE", "1") != "1":
            import threading

            path, self._orders = self._orders, ""
            with contextlib.suppress(OSError, RuntimeError):  # no thread can be started: there will be no answers
                orders = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                count = self.note_collectives if counts else lambda: None
                given = (orders, count, self._publish)
                threading.Thread(target=_obey, args=given, name="trainkit", daemon=True).start()


def attach(publish: Callable[..., None]) -> Heartbeat:
    """Open the page of the rank's wrapper by the environment, and remove the variable, for child processes.

    publish: as for `Heartbeat`.
    """
    import faulthandler
    import mmap

    path, _, orders = os.environ.pop(VARIABLE, "").partition(os.pathsep)
    if not path:
        return Heartbeat()
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        page = mmap.mmap(fd, PAGE)
    except (OSError, ValueError):  # it is another machine's, or the wrapper has ended
        return Heartbeat()
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        os.lseek(fd, 0, os.SEEK_END)
        if ASK is not None and signal.getsignal(ASK) == signal.SIG_DFL:
            faulthandler.register(ASK, file=fd, all_threads=True)
    return Heartbeat(page, orders, publish)


def _obey(orders: int, count: Callable[[], None], publish: Callable[..., None]) -> None:
    """Obey until the wrapper has ended: each line is the path of a file to write, an empty one asks for the number."""
    mine = os.fstat(orders).st_ino
    with contextlib.suppress(OSError):
        # A program that has closed all descriptors may have given this one's number to something else.
        while os.fstat(orders).st_ino == mine and (line := os.read(orders, PAGE)):
            for path in line.decode("utf-8", "surrogateescape").splitlines():
                write_flight_record(path, publish) if path else count()


def write_flight_record(path: str, publish: Callable[..., None]) -> None:
    """Write the content of the flight recorder, empty if this torch has none. path: in a run's attempt."""
    try:
        entries = [entry for dump in _dumps() for entry in dump.get("entries", [])]
        content = json.dumps({"groups": groups_of(entries)})
    except Exception as error:  # noqa: BLE001 - of an unknown torch; the program must not notice
        content = json.dumps({"groups": {}, "error": f"{type(error).__name__}: {error}"})
    with contextlib.suppress(OSError):
        publish(path, content, below=path.rpartition("/attempts/")[0])


def _dumps(**which: bool) -> list[dict[str, Any]]:
    """The content of torch's recorders. which: without includeCollectives it takes a tenth of a millisecond."""
    import pickle

    c10d = sys.modules.get("torch._C._distributed_c10d")
    dumps = [getattr(c10d, name, None) for name in ("_dump_fr_trace", "_dump_nccl_trace")]
    # torch has just made these pickles in this process.
    return [pickle.loads(dump(**which)) for dump in dumps if dump is not None]  # noqa: S301


class Collective(NamedTuple):
    """A collective in which a rank waits. seconds: since it joined; place: the first frame outside torch."""

    number: int
    operation: str
    seconds: float
    place: str


class Group(NamedTuple):
    """A rank in a process group. last: number of its last collective; waiting: collectives in which it waits."""

    last: int = 0
    waiting: tuple[Collective, ...] = ()


class FlightRecord(NamedTuple):
    """The file of `write_flight_record`. groups: by name and backend."""

    groups: Mapping[str, Group] = {}


def groups_of(entries: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The entries as `Group`s by process group and backend."""
    found: dict[str, dict[str, Any]] = {}
    for each in entries:
        if each.get("is_p2p"):
            continue
        backend, _, operation = str(each.get("profiling_name", "")).partition(":")
        name, text = (each.get("process_group") or ("", ""))[:2]
        group = found.setdefault(f"{text or name} ({backend})", {"last": 0, "waiting": []})
        number = int(each.get("collective_seq_id", each.get("seq_id", 0)))
        group["last"] = max(group["last"], number)
        if not each.get("retired") and each.get("state") != "completed":
            seconds = max(0.0, time.time() - each.get("time_created_ns", 0) / 1e9)
            frames = each.get("frames") or ()
            own = next((each for each in frames if f"{os.sep}torch{os.sep}" not in str(each.get("filename"))), None)
            place = f"{os.path.basename(str(own['filename']))}:{own['line']}" if own else ""
            group["waiting"].append(Collective(number, operation, round(seconds, 1), place))
    for group in found.values():
        group["waiting"] = group["waiting"][:KEPT]
    return found


class HeartbeatState(NamedTuple):
    """The heartbeat at one moment."""

    pid: int
    step: int
    phase: int
    at: float  # when it was written, by this host's monotonic clock
    longest: tuple[float, ...]  # the most seconds that each phase has taken; 0 for one that has never ended
    joined: int = 0  # collectives, by its last answer
    totals: tuple[float, ...] = ()  # seconds that each phase has taken so far, without the present one


def read_heartbeat(data: bytes) -> HeartbeatState | None:
    """The heartbeat in the bytes of a page; None if no program has attached."""
    if len(data) < PACES_AT:
        return None
    magic, pid, step, phase, at = HEAD.unpack_from(data)
    if magic != MAGIC or phase >= len(PHASES):
        return None
    longest, totals = (struct.unpack_from(f"<{len(PHASES)}d", data, start) for start in (LONGEST_AT, TOTALS_AT))
    return HeartbeatState(pid, step, phase, at, longest, JOINED.unpack_from(data, JOINED_AT)[0], totals)


def read_paces(data: bytes) -> list[tuple[float, float]]:
    """Seconds of the latest steps, and the rank's own part of them (0 if unknown); none where there is no page."""
    paces = (PACE.unpack_from(data, PACES_AT + 8 * each) for each in range(PACES if data else 0))
    return [each for each in paces if each[0] > 0]
