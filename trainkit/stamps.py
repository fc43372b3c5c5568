"""What a rank's program says of itself while it runs: its step, its phase and since when, in a page of memory.

Standard library only, and nothing of trainkit: the hook in a user's program loads this file by its place. The wrapper
of the rank makes the page, anonymous memory that nobody has to remove, and hands over the path at which it is opened;
the guardian reads it there. Behind the page the program's stacks are written when a signal asks for them: Python's
faulthandler does that in C, so that it works also while the program hangs in a call that never returns to Python. The
flight recorder of torch needs a thread, which waits on a pipe and is started only where there are several ranks.
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

VARIABLE = "TRAINKIT_STAMPS"  # path of the page, and that of the pipe for orders
PAGE = 4096  # bytes; what follows is text
MAGIC = 0x314B5454
PHASES = ("start", "data", "exchange", "forward", "backward", "optimizer", "checkpoint", "evaluation", "steps")
START, DATA, EXCHANGE, FORWARD, BACKWARD, OPTIMIZER, CHECKPOINT, EVALUATION, STEPS = range(len(PHASES))
# MAGIC, pid of the program, steps done, phase, and when that was written (seconds of the system's monotonic clock).
HEAD, LONGEST, PACE = struct.Struct("<IIQQd"), struct.Struct("<d"), struct.Struct("<ff")
LONGEST_AT, PACES_AT, PACES = 64, 256, 256  # the longest that each phase took; seconds and own seconds of late steps
JOINED, JOINED_AT = struct.Struct("<Q"), 144  # collectives that the program has joined, as it said last
KEPT = 16  # collectives of a group, the earliest, that a rank is said to wait in
# One that neither people nor libraries send; C libraries keep the first two or three of these for themselves.
ASK = signal.SIGRTMIN + 11 if hasattr(signal, "SIGRTMIN") else None


class Stamps:
    """The writer, in the program. Without a page that anybody reads it costs the same and does nothing.

    orders: path of a pipe; publish: that of trainkit/files.py, which writes what they ask for.
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
        self._optimizer = 0
        self._thread_time: float | None = None  # at the last step of a program's own, where it says something
        self._computed = 0.0  # thread time as the phase began
        self._page[:PAGE] = bytes(PAGE)  # another process of the same rank may have written before
        HEAD.pack_into(self._page, 0, MAGIC, os.getpid(), 0, START, self._at)

    def own(self, *phases: int, computes: int = -1) -> None:
        """Which phases are a rank's own time, for there it waits for no other one.

        computes: one in which it does, so that only the processor time of this thread is its own.
        """
        self._own, self._computes = phases, computes

    def enter(self, phase: int) -> None:
        """A phase begins, or goes on, and the one before is over."""
        now = time.monotonic()
        took, before = now - self._at, self._phase
        if took > self._longest[before]:
            self._longest[before] = took
            self._numbers[LONGEST_AT // 8 + before] = took
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
        """So many steps are done; what follows is told to the others, or to people."""
        self._step = step
        self.enter(EXCHANGE)
        self._note_pace()

    def _note_pace(self) -> None:
        """What the latest step took counts towards the usual time of one."""
        now = self._at
        PACE.pack_into(self._page, PACES_AT + 8 * (self._paced % PACES), now - self._began, self._spent)
        self._paced += 1
        self._began, self._spent = now, 0.0

    def begin_step(self, done: int) -> None:
        """The next step begins with its data. What has passed since the last was no part of one, as an evaluation."""
        self._step = done
        self.enter(DATA)
        self._began, self._spent = self._at, 0.0

    def stepped(self, optimizer: Any) -> None:
        """An optimizer of the program's own takes a step; the first that ever did counts them."""
        if not self._optimizer:
            self._optimizer = id(optimizer)
            with contextlib.suppress(Exception):  # whatever an optimizer of somebody's own may be
                if optimizer.param_groups[0]["params"][0].device.type == "cpu":
                    self._thread_time = time.thread_time()  # waiting for others takes none, off cards
        self.enter(STEPS)
        if id(optimizer) == self._optimizer:
            if self._thread_time is not None:
                used, self._thread_time = self._thread_time, time.thread_time()
                self._spent = self._thread_time - used
            self._step += 1
            if self._step > 1:
                self._note_pace()
            self._began, self._spent = self._at, 0.0

    def note_collectives(self) -> None:
        """Say how many collectives this process has joined, in all its groups, as far as torch's recorder knows."""
        with contextlib.suppress(Exception):  # of a torch that nobody has seen; the program must not notice
            found = [each for dump in _dumps(includeCollectives=False) for each in dump.get("pg_status", {}).values()]
            self._whole_numbers[JOINED_AT // 8] = sum(max(0, each["last_enqueued_collective"]) for each in found)

    def listen(self, *, counts: bool = False) -> None:
        """Be ready for orders to write down what the flight recorder of torch has. Once, where there are others.

        counts: whether to say when asked how many collectives were joined, of a program that tells no phases.
        """
        if self._publish and self._orders and os.environ.get("WORLD_SIZE", "1") != "1":
            import threading

            place, self._orders = self._orders, ""
            with contextlib.suppress(OSError, RuntimeError):  # no thread can be started: there is no such account
                orders = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
                count = self.note_collectives if counts else lambda: None
                given = (orders, count, self._publish)
                threading.Thread(target=_obey, args=given, name="trainkit", daemon=True).start()


def attach(publish: Callable[..., None]) -> Stamps:
    """The page that the rank's wrapper has made, as the environment says; taken out of it, for processes below.

    publish: as for `Stamps`.
    """
    import faulthandler
    import mmap

    place, _, orders = os.environ.pop(VARIABLE, "").partition(os.pathsep)
    if not place:
        return Stamps()
    try:
        fd = os.open(place, os.O_RDWR | os.O_CLOEXEC)
        page = mmap.mmap(fd, PAGE)
    except (OSError, ValueError):  # it is another machine's, or the wrapper has ended
        return Stamps()
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        os.lseek(fd, 0, os.SEEK_END)
        if ASK is not None and signal.getsignal(ASK) == signal.SIG_DFL:
            faulthandler.register(ASK, file=fd, all_threads=True)
    return Stamps(page, orders, publish)


def _obey(orders: int, count: Callable[[], None], publish: Callable[..., None]) -> None:
    """Until the wrapper has ended: each line is the path of a file to write, an empty one asks for the number."""
    mine = os.fstat(orders).st_ino
    with contextlib.suppress(OSError):
        # A program that has closed all descriptors may have given this one's number to something else.
        while os.fstat(orders).st_ino == mine and (line := os.read(orders, PAGE)):
            for path in line.decode("utf-8", "surrogateescape").splitlines():
                write_flight(path, publish) if path else count()


def write_flight(path: str, publish: Callable[..., None]) -> None:
    """Put there what the flight recorder has: an empty object where this torch has none. path: in a run's attempt."""
    try:
        content = json.dumps({"groups": groups_of(_entries())})
    except Exception as error:  # noqa: BLE001 - of a torch that nobody has seen; the program must not notice
        content = json.dumps({"groups": {}, "error": f"{type(error).__name__}: {error}"})
    with contextlib.suppress(OSError):
        publish(path, content, below=path.rpartition("/attempts/")[0])


def _entries() -> list[dict[str, Any]]:
    return [entry for dump in _dumps() for entry in dump.get("entries", [])]


def _dumps(**which: bool) -> list[dict[str, Any]]:
    """What torch's recorders have. which: of it; without includeCollectives it takes a tenth of a millisecond."""
    import pickle

    c10d = sys.modules.get("torch._C._distributed_c10d")
    dumps = [getattr(c10d, name, None) for name in ("_dump_fr_trace", "_dump_nccl_trace")]
    # What torch has just made in this process.
    return [pickle.loads(dump(**which)) for dump in dumps if dump is not None]  # noqa: S301


class Collective(NamedTuple):
    """A collective that a rank waits in. seconds: since it joined; place: the first frame outside torch."""

    number: int
    operation: str
    seconds: float
    place: str


class Group(NamedTuple):
    """What a rank has joined in a process group: the number of its last collective, and those that it waits in."""

    last: int = 0
    waiting: tuple[Collective, ...] = ()


class Flight(NamedTuple):
    """What `write_flight` leaves. groups: by name and backend."""

    groups: Mapping[str, Group] = {}


def groups_of(entries: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By process group and backend: the number of the last collective that this rank joined, and where it waits."""
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
            group["waiting"].append(Collective(number, operation, round(seconds, 1), _place(each.get("frames") or ())))
    for group in found.values():
        group["waiting"] = group["waiting"][:KEPT]
    return found


def _place(frames: Any) -> str:
    own = (each for each in frames if f"{os.sep}torch{os.sep}" not in str(each.get("filename")))
    frame = next(own, None)
    return f"{os.path.basename(str(frame['filename']))}:{frame['line']}" if frame else ""


class Page(NamedTuple):
    """What a page says at one moment."""

    pid: int
    step: int
    phase: int
    at: float  # of the last stamp, on this host's monotonic clock
    longest: tuple[float, ...]  # seconds that each phase has taken at most; 0 for one that was never left
    joined: int = 0  # collectives, as it said when it was asked last


def read_page(data: bytes) -> Page | None:
    """Of the first bytes of a page; None where no program has attached."""
    if len(data) < PACES_AT:
        return None
    magic, pid, step, phase, at = HEAD.unpack_from(data)
    if magic != MAGIC or phase >= len(PHASES):
        return None
    longest = tuple(LONGEST.unpack_from(data, LONGEST_AT + 8 * each)[0] for each in range(len(PHASES)))
    return Page(pid, step, phase, at, longest, JOINED.unpack_from(data, JOINED_AT)[0])


def read_paces(data: bytes) -> list[tuple[float, float]]:
    """Seconds of the latest steps, and those of them that were the rank's own (0 where that is not known)."""
    paces = (PACE.unpack_from(data, PACES_AT + 8 * each) for each in range(PACES))
    return [each for each in paces if each[0] > 0]
