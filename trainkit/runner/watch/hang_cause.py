"""Which rank blocks a run that does not move: rules over a dump of all its ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from trainkit.decode import Between, Like
from trainkit.heartbeat import PHASES, Collective, Group
from trainkit.runner.rundir.records import Name, Seconds
from trainkit.runner.watch.activity import STOPPED, State
from trainkit.runner.watch.timing import where
from trainkit.text import join_names

# Paths of frames that are not the program's own.
INSIDE = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ", "<string>")


class DumpedRank(NamedTuple):
    """The dump of one rank. seconds: since it last moved; phase: None for a program without a heartbeat.

    groups: by process group, from its flight recorder; empty without one. place: the innermost frame of the program's
    own code in its main thread, as ``train.py:69 in step``. ended: by itself, with code 0. launcher: the launcher's
    name, if this is the launcher and not a rank.
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
        """Where its program is; empty if unknown."""
        if self.place or self.is_stopped or not self.waits_in:
            return f"it is at {self.place}" if self.place else ""
        return f"it waits in {self.waits_in}"

    @property
    def is_rank(self) -> bool:
        """Whether it is a rank that runs."""
        return not self.ended and not self.launcher

    @property
    def is_stopped(self) -> bool:
        return self.letter in STOPPED

    def waits(self) -> Iterator[tuple[str, Collective]]:
        """In each group the earliest collective that it has joined and that has not completed."""
        for group, known in self.groups.items():
            if known.waiting:
                yield group, min(known.waiting, key=lambda each: each.number)

    def as_data(self) -> dict[str, Any]:
        return {**self._asdict(), "groups": {name: group._asdict() for name, group in self.groups.items()}}


class DumpFile(NamedTuple):
    """The file of a dump: the text of `hang_cause`, the dump of each rank, the nodes that did not answer."""

    line: str
    ranks: tuple[DumpedRank, ...]
    missing: tuple[str, ...]


def describe(rank: DumpedRank) -> str:
    """One line: ``rank 1 (tk2, pid 587): backward of step 14 for 0.3 s, it is at train.py:69 in step``."""
    if rank.ended:
        return rank.name
    seen = "no rank runs" if rank.launcher else where(rank.phase, rank.step) or "it reports no phase"
    return ", ".join(filter(None, (f"{rank.name}: {seen} for {rank.seconds:.1f} s", rank.at)))


class HangCause(NamedTuple):
    """text: for the user. host: of the rank that blocks the others; empty if it is not a rank, or unknown."""

    text: str
    host: str = ""


def hang_cause(ranks: Sequence[DumpedRank], missing: Sequence[str] = ()) -> HangCause:
    """Why a run does not move. missing: nodes that did not answer."""
    silent = f"; {join_names(missing)} did not answer" if missing else ""
    text, host = _sentence(ranks)
    return HangCause(f"{text}{silent}", host)


def _sentence(found: Sequence[DumpedRank]) -> tuple[str, str]:
    launchers = [each for each in found if each.launcher]
    if stopped := [each for each in launchers if each.is_stopped]:
        return _idle(stopped)
    ended, ranks = [each for each in found if each.ended], [each for each in found if each.is_rank]
    seconds = min((each.seconds for each in ranks), default=0.0)
    waiting = [(rank, group, each) for rank in ranks for group, each in rank.waits()]
    if stopped := [each for each in ranks if each.is_stopped]:
        return _behind(stopped, waiting, seconds)
    if by_collectives := _by_collectives(ranks, waiting, seconds):
        return by_collectives
    if ended and waiting:  # the host of a rank that has ended is not to blame
        return _behind(ended, waiting, seconds)[0], ""
    if launchers:
        return _idle(launchers)
    if waiting and len({rank.rank for rank, _, _ in waiting}) == len(ranks):
        return _all_wait(waiting, seconds), ""
    return _by_stamps(ranks, seconds) if ranks else ("no rank has answered", "")


def _by_collectives(
    ranks: Sequence[DumpedRank], waiting: Sequence[tuple[DumpedRank, str, Collective]], seconds: float
) -> tuple[str, str] | None:
    """Running ranks that have not joined the collective in which others wait, or have joined a different one."""

    def last(rank: DumpedRank, group: str) -> float:
        """The number of its last collective in a group; a rank that never joined any does not belong to the group."""
        known = rank.groups.get(group)
        if known is None:
            return float("inf") if rank.groups else 0
        return known.last

    in_group: dict[str, list[tuple[DumpedRank, Collective]]] = {}
    for rank, group, each in waiting:
        in_group.setdefault(group, []).append((rank, each))
    blocked = {rank.rank for rank, _, _ in waiting}  # a rank that waits in another group is not the cause
    free = [rank for rank in ranks if rank.rank not in blocked]
    for group, inside in in_group.items():
        first = min(each.number for _, each in inside)
        if guilty := [rank for rank in free if last(rank, group) < first]:
            return _behind(guilty, [(rank, group, each) for rank, each in inside], seconds)
        if differing := _mismatch(inside, group, seconds):
            return differing, ""
    return None


def _idle(launchers: Sequence[DumpedRank]) -> tuple[str, str]:
    """Launchers without a running rank: none has started yet, or all have ended."""
    has = "has" if len(launchers) == 1 else "have"
    seconds = min(each.seconds for each in launchers)
    return f"{_names(launchers)} {has} had no rank running for {seconds:.0f} s", launchers[0].host


def _behind(
    guilty: Sequence[DumpedRank], waiting: Sequence[tuple[DumpedRank, str, Collective]], seconds: float
) -> tuple[str, str]:
    has, one = "has" if len(guilty) == 1 else "have", guilty[0]
    known = {rank.rank for rank in guilty}
    others = [each for each in waiting if each[0].rank not in known]
    if others:
        _, group, first = min(others, key=lambda each: each[2].number)
        at = f" ({first.place})" if first.place else ""
        who = _numbered(rank.rank for rank, name, each in others if (name, each.number) == (group, first.number))
        what = f"not joined {first.operation} {first.number} of {_short(group)} for {seconds:.0f} s; {who} there{at}"
    else:
        what = f"not moved for {seconds:.0f} s"
    # A rank that has joined collectives without an optimizer step is past its start-up, in an unknown phase.
    seen = where(one.phase, one.step) if one.phase or not one.groups else ""
    place = ", ".join(filter(None, (one.at, f"last seen in {seen}" if seen else "")))
    return f"{_names(guilty)} {has} {what}" + (f". {place[:1].upper()}{place[1:]}" if place else ""), one.host


def _mismatch(inside: Sequence[tuple[DumpedRank, Collective]], group: str, seconds: float) -> str:
    """Ranks that have joined different collectives under the same number wait for ever."""
    kinds: dict[tuple[int, str], list[tuple[DumpedRank, Collective]]] = {}
    for rank, each in inside:
        kinds.setdefault((each.number, each.operation), []).append((rank, each))
    if len(kinds) < 2:
        return ""
    parts = []
    for (number, operation), members in kinds.items():
        at = f" ({members[0][1].place})" if members[0][1].place else ""
        parts.append(f"{_numbered((rank.rank for rank, _ in members), 'is', 'are')} in {operation} {number}{at}")
    return f"the ranks of {_short(group)} have waited in different collectives for {seconds:.0f} s: {'; '.join(parts)}"


def _all_wait(waiting: Sequence[tuple[DumpedRank, str, Collective]], seconds: float) -> str:
    """Every rank has joined the same collective."""
    _, group, first = waiting[0]
    at = f" ({first.place})" if first.place else ""
    what = f"{first.operation} {first.number} of {_short(group)}{at}"
    return f"every rank has been in {what} for {seconds:.0f} s: the network or a device blocks it"


def _by_stamps(ranks: Sequence[DumpedRank], seconds: float) -> tuple[str, str]:
    """Without flight records: a rank that has made fewer steps than another one blocks it."""
    slowest = min(each.step for each in ranks)
    behind = [each for each in ranks if each.step == slowest]
    if len(behind) < len(ranks) or len(ranks) == 1:
        return _behind(behind, (), seconds)
    places = [f"rank {each.rank} {each.at.replace('it ', '', 1)}" for each in ranks if each.at]
    phases = dict.fromkeys(filter(None, (where(each.phase, each.step) for each in ranks)))
    seen = f", last seen in {join_names([*phases], most=2)}" if phases else ""
    return f"no rank has moved for {seconds:.0f} s{seen}" + (f": {'; '.join(places[:4])}" if places else ""), ""


def _names(ranks: Sequence[DumpedRank]) -> str:
    shown = [each.name for each in ranks[:3]]
    return ", ".join(shown) + (f" and {len(ranks) - 3} more ranks" if len(ranks) > 3 else "")


def _numbered(ranks: Iterable[int], one: str = "waits", several: str = "wait") -> str:
    numbers = sorted({*ranks})
    word = "rank" if len(numbers) == 1 else "ranks"
    return f"{word} {join_names([*map(str, numbers)])} {one if len(numbers) == 1 else several}"


def _short(group: str) -> str:
    """Without the backend."""
    return group.partition(" (")[0]


def innermost_own_frame(stack: str) -> str:
    """The innermost frame of the program's own code in its main thread, by faulthandler's text; else the innermost.

    faulthandler prints the newest thread first, so the main one comes last; each thread begins with its innermost
    frame.
    """
    threads, frames = stack.split("hread 0x"), list[str]()
    for line in threads[-1].splitlines():
        before, _, rest = line.partition('"')
        file, _, rest = rest.rpartition('", line ')
        number, _, name = rest.partition(" in ")
        if file and before.strip() == "File" and number.isdecimal():
            frames.append(f"{file}\0{file.rpartition('/')[2]}:{number} in {name}")
    own = (each for each in frames if not any(part in each for part in INSIDE))
    return next(own, frames[0] if frames else "").partition("\0")[2]
