"""What /proc says of a rank's processes: their state, where in the kernel they wait, what they use of the machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from trainkit.decode import Between, Like
from trainkit.runner.rundir.records import Name, Seconds
from trainkit.runner.supervisor.processes import LINUX
from trainkit.runner.watch.timing import where
from trainkit.stamps import PHASES, Collective, Group
from trainkit.text import listed

# Letters of proc(5) that explain why a process does not go on.
STATES: Mapping[str, str] = {"T": "stopped", "t": "stopped by a debugger", "D": "waiting for a disk or a device"}
TICKS = os.sysconf("SC_CLK_TCK")
BUSY = 0.02  # of a core: what uses less is idle but for threads that wake up now and then
FLOW = 1 << 18  # bytes a second from or to a disk: who saves a checkpoint slowly needs no processor for it


class State(NamedTuple):
    """letter: as of proc(5), empty where it is gone or there is no /proc; waits_in: the kernel's function."""

    letter: str = ""
    waits_in: str = ""

    @property
    def in_words(self) -> str:
        """``state T stopped``; empty where it is a common one."""
        return f"state {self.letter} {STATES[self.letter]}" if self.letter in STATES else ""


def state_of(pid: int) -> State:
    """The state of a process now."""
    fields = _stat(pid)
    if not fields:
        return State()
    waits_in = ""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/wchan", encoding="ascii", errors="replace") as file:
        waits_in = file.read().strip()
    return State(fields[0].decode(), "" if waits_in == "0" else waits_in)


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal: by default one ends it."""
    with (
        contextlib.suppress(OSError, ValueError),
        open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file,
    ):
        caught = next((line.split()[1] for line in file if line.startswith("SigCgt:")), "0")
        return bool(int(caught, 16) >> (number - 1) & 1)
    return False


def processor_seconds(pids: Iterable[int]) -> float:
    """That these processes have used so far, with those of theirs that have ended."""
    total = 0
    for pid in pids:
        if fields := _stat(pid):
            total += sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime
    return total / TICKS


def disk_bytes(pids: Iterable[int]) -> int:
    """That these processes have read from disks and written to them so far, as far as this may be known."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/io", encoding="ascii") as file:
            total += sum(int(line.split()[1]) for line in file if line.startswith(("read_bytes", "write_bytes")))
    return total


def _stat(pid: int) -> list[bytes]:
    """The fields of a process's stat file from its state on; none where it is gone."""
    if LINUX:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    return []


class Activity:
    """When a rank last used the processor for more than waking up, or a disk, or wrote output."""

    def __init__(self, now: float, logs: Iterable[str]) -> None:
        self.moved = now
        self._logs = (*logs,)
        self._looked, self._used, self._flowed, self._written = now, 0.0, 0, -1

    def look(self, pids: Iterable[int], now: float, since: float = 0.0) -> None:
        """Look again. pids: of the rank's program and of all that it has started.

        since: of its latest step, which explains what was used before.
        """
        pids, passed = [*pids], now - self._looked
        used, flowed, written = processor_seconds(pids), disk_bytes(pids), sum(map(_size, self._logs))
        # What has ended takes its part along: of the time, where its parent did not wait for it.
        busy = abs(used - self._used) > BUSY * passed or abs(flowed - self._flowed) > FLOW * passed
        if (busy or written != self._written) and self._looked >= since:
            self.moved = now
        self._looked, self._used, self._flowed, self._written = now, used, flowed, written


def _size(path: str) -> int:
    with contextlib.suppress(OSError):
        return os.stat(path).st_size
    return 0


STOPPED = ("T", "t", "D")  # states in which a process cannot go on by itself


class Found(NamedTuple):
    """What was found in one rank. seconds: that it has not moved; phase: None where the program writes no stamps.

    groups: by process group, as its flight recorder says; empty without one. place: the innermost frame of the
    program's own in its main thread, as ``train.py:69 in step``. ended: by itself, with code 0. launcher: its name,
    where it is no rank but what starts them.
    """

    rank: Annotated[int, Between(-1, 1 << 24)]
    host: Name = ""
    pid: Annotated[int, Between(0, 1 << 22)] = 0
    seconds: Seconds = 0.0
    phase: Annotated[int, Between(0, len(PHASES) - 1)] | None = None
    step: int = 0
    letter: Annotated[str, Like("[A-Za-z]?", "a letter")] = ""  # of its state
    waits_in: str = ""  # the kernel's function
    groups: Mapping[str, Group] = {}
    place: str = ""
    ended: bool = False
    launcher: str = ""

    @property
    def name(self) -> str:
        """``rank 1 (tk2, pid 587, state T stopped)``."""
        state = "has ended" if self.ended else State(self.letter).in_words
        facts = [self.host, f"pid {self.pid}" if self.pid else "", state]
        return f"{self.launcher or f'rank {self.rank}'} ({', '.join(filter(None, facts))})"

    @property
    def at(self) -> str:
        """Where its program is; empty where that is not known."""
        if self.place or self.is_stopped or not self.waits_in:
            return f"it is at {self.place}" if self.place else ""
        return f"it waits in {self.waits_in}"

    @property
    def is_rank(self) -> bool:
        """Whether it is a rank that runs."""
        return not self.ended and not self.launcher

    @property
    def is_stopped(self) -> bool:
        """Whether its program cannot go on by itself."""
        return self.letter in STOPPED

    def waits(self) -> Iterator[tuple[str, Collective]]:
        """The collectives that it has joined and that are not over, by group."""
        for group, known in self.groups.items():
            for each in known.waiting:
                yield group, each

    def as_data(self) -> dict[str, Any]:
        """For JSON; `decode` reads it again."""
        return {**self._asdict(), "groups": {name: group._asdict() for name, group in self.groups.items()}}


class Account(NamedTuple):
    """What is written of a dump: who holds the run up, what was found in each rank, nodes that did not answer."""

    line: str
    ranks: tuple[Found, ...]
    missing: tuple[str, ...]


def describe(rank: Found) -> str:
    """A line about one rank: ``rank 1 (tk2, pid 587): backward of step 14 for 0.3 s, it is at train.py:69 in step``."""
    if rank.ended:
        return rank.name
    seen = "no rank runs" if rank.launcher else where(rank.phase, rank.step) or "it says nothing of itself"
    return ", ".join(filter(None, (f"{rank.name}: {seen} for {rank.seconds:.1f} s", rank.at)))


class Judged(NamedTuple):
    """text: for people. host: of the rank that holds the others up; empty where it is no rank, or nobody knows."""

    text: str
    host: str = ""


def judge(ranks: Sequence[Found], missing: Sequence[str] = ()) -> Judged:
    """The sentence on a run that does not move. missing: nodes that did not answer."""
    silent = f"; {listed(missing)} did not answer" if missing else ""
    text, host = _sentence(ranks)
    return Judged(f"{text}{silent}", host)


def _sentence(found: Sequence[Found]) -> tuple[str, str]:
    launchers = [each for each in found if each.launcher]
    if stopped := [each for each in launchers if each.is_stopped]:
        return _idle(stopped)
    ended, ranks = [each for each in found if each.ended], [each for each in found if each.is_rank]
    seconds = min((each.seconds for each in ranks), default=0.0)
    waiting = [(rank, group, each) for rank in ranks for group, each in _first(rank)]
    if stopped := [each for each in ranks if each.is_stopped]:
        return _behind(stopped, waiting, seconds)
    if by_collectives := _by_collectives(ranks, waiting, seconds):
        return by_collectives
    if ended and waiting:  # the machine of one that has ended is not to blame
        return _behind(ended, waiting, seconds)[0], ""
    if launchers:
        return _idle(launchers)
    if waiting and len({rank.rank for rank, _, _ in waiting}) == len(ranks):
        return _all_wait(waiting, seconds), ""
    return _by_stamps(ranks, seconds) if ranks else ("no rank has answered", "")


def _by_collectives(
    ranks: Sequence[Found], waiting: Sequence[tuple[Found, str, Collective]], seconds: float
) -> tuple[str, str] | None:
    """Who runs, and has not joined what others wait in, or has joined something else."""
    in_group: dict[str, list[tuple[Found, Collective]]] = {}
    for rank, group, each in waiting:
        in_group.setdefault(group, []).append((rank, each))
    held_up = {rank.rank for rank, _, _ in waiting}  # who waits in another group is no culprit
    free = [rank for rank in ranks if rank.rank not in held_up]
    for group, inside in in_group.items():
        first = min(each.number for _, each in inside)
        guilty = [rank for rank in free if _last(rank, group) < first]
        if guilty:
            return _behind(guilty, [(rank, group, each) for rank, each in inside], seconds)
        if differing := _mismatch(inside, group, seconds):
            return differing, ""
    return None


def _idle(launchers: Sequence[Found]) -> tuple[str, str]:
    """Launchers without a rank: none has started, or all have ended."""
    has = "has" if len(launchers) == 1 else "have"
    seconds = min(each.seconds for each in launchers)
    return f"{_names(launchers)} {has} had no rank running for {seconds:.0f} s", launchers[0].host


def _first(rank: Found) -> list[tuple[str, Collective]]:
    """In each group the earliest collective that it waits in."""
    found: dict[str, Collective] = {}
    for group, each in rank.waits():
        if group not in found or each.number < found[group].number:
            found[group] = each
    return [*found.items()]


def _last(rank: Found, group: str) -> float:
    """The number of the last collective that it has joined; one that never joined any is not of the group."""
    known = rank.groups.get(group)
    if known is None:
        return float("inf") if rank.groups else 0
    return known.last


def _behind(
    guilty: Sequence[Found], waiting: Sequence[tuple[Found, str, Collective]], seconds: float
) -> tuple[str, str]:
    names, one = _names(guilty), len(guilty) == 1
    known = {rank.rank for rank in guilty}
    others = [each for each in waiting if each[0].rank not in known]
    if others:
        _, group, first = min(others, key=lambda each: each[2].number)
        what = f"{'has' if one else 'have'} not joined {first.operation} {first.number} of {_short(group)}"
        at = f" ({first.place})" if first.place else ""
        who = _numbered(rank.rank for rank, name, each in others if (name, each.number) == (group, first.number))
        what = f"{what} for {seconds:.0f} s; {who} there{at}"
    else:
        what = f"{'has' if one else 'have'} not moved for {seconds:.0f} s"
    return _with_place(f"{names} {what}", guilty), guilty[0].host


def _with_place(text: str, guilty: Sequence[Found]) -> str:
    first = guilty[0]
    # Who has joined collectives without a step of an optimizer is past the start-up, and has no phase that says more.
    seen = where(first.phase, first.step) if first.phase or not first.groups else ""
    parts = [each for each in (first.at, f"last seen in {seen}" if seen else "") if each]
    return f"{text}. {', '.join(parts)[:1].upper()}{', '.join(parts)[1:]}" if parts else text


def _mismatch(inside: Sequence[tuple[Found, Collective]], group: str, seconds: float) -> str:
    """Ranks that have joined different collectives under the same number wait for ever."""
    kinds: dict[tuple[int, str], list[tuple[Found, Collective]]] = {}
    for rank, each in inside:
        kinds.setdefault((each.number, each.operation), []).append((rank, each))
    if len(kinds) < 2:
        return ""
    parts = []
    for (number, operation), members in kinds.items():
        at = f" ({members[0][1].place})" if members[0][1].place else ""
        parts.append(f"{_numbered((rank.rank for rank, _ in members), 'is', 'are')} in {operation} {number}{at}")
    return f"the ranks of {_short(group)} have waited in different collectives for {seconds:.0f} s: {'; '.join(parts)}"


def _all_wait(waiting: Sequence[tuple[Found, str, Collective]], seconds: float) -> str:
    """Nobody is missing: what they wait for is not a rank."""
    _, group, first = waiting[0]
    at = f" ({first.place})" if first.place else ""
    what = f"{first.operation} {first.number} of {_short(group)}{at}"
    return f"every rank has been in {what} for {seconds:.0f} s: the network or a device holds it up"


def _by_stamps(ranks: Sequence[Found], seconds: float) -> tuple[str, str]:
    """Without a flight recorder: who has done fewer steps than another holds it up."""
    slowest = min(each.step for each in ranks)
    behind = [each for each in ranks if each.step == slowest]
    if len(behind) < len(ranks):
        return _behind(behind, (), seconds)
    if len(ranks) == 1:
        return _behind(ranks, (), seconds)
    places = [f"rank {each.rank} {each.at.replace('it ', '', 1)}" for each in ranks if each.at]
    phases = dict.fromkeys(filter(None, (where(each.phase, each.step) for each in ranks)))
    seen = f", last seen in {listed([*phases], most=2)}" if phases else ""
    return f"no rank has moved for {seconds:.0f} s{seen}" + (f": {'; '.join(places[:4])}" if places else ""), ""


def _names(ranks: Sequence[Found]) -> str:
    shown = [each.name for each in ranks[:3]]
    return ", ".join(shown) + (f" and {len(ranks) - 3} more ranks" if len(ranks) > 3 else "")


def _numbered(ranks: Iterable[int], one: str = "waits", several: str = "wait") -> str:
    numbers = sorted({*ranks})
    word = "rank" if len(numbers) == 1 else "ranks"
    return f"{word} {listed([*map(str, numbers)])} {one if len(numbers) == 1 else several}"


def _short(group: str) -> str:
    """Without the backend: people know the group."""
    return group.partition(" (")[0]


INSIDE = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ", "<string>")


def own_place(stack: str) -> str:
    """The innermost frame of the program's own in its main thread, from faulthandler's text; else the innermost one.

    faulthandler writes the newest thread first, so the main one is last, each with its innermost frame first.
    """
    threads, frames = stack.split("hread 0x"), list[str]()
    for line in threads[-1].splitlines():
        file, number, name = _frame(line)
        if file:
            frames.append(f"{file}\0{file.rpartition('/')[2]}:{number} in {name}")
    own = (each for each in frames if not any(part in each for part in INSIDE))
    return next(own, frames[0] if frames else "").partition("\0")[2]


def _frame(line: str) -> tuple[str, str, str]:
    before, _, rest = line.partition('"')
    file, _, rest = rest.rpartition('", line ')
    number, _, name = rest.partition(" in ")
    return (file, number, name) if before.strip() == "File" and number.isdecimal() else ("", "", "")
