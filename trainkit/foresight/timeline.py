"""A rank's memory over time: what is taken and given back, the highest moment, and what was there at that moment."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from trainkit.foresight.trace import PARTS


@dataclass(slots=True)
class Timeline:
    """Bytes taken and given back, in order. `host` is the same for the memory of the machine, on a GPU.

    changes: (identity, bytes; 0 gives it back); of each identity its `part`, `stream` and `operator`. moments: where in
    `changes` each begins.
    """

    changes: list[tuple[int, int]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    part: list[int] = field(default_factory=list)
    stream: list[int] = field(default_factory=list)
    operator: list[str] = field(default_factory=list)
    moments: list[tuple[int, str]] = field(default_factory=list)
    now: int = 0
    peak: int = 0
    peak_at: int = 0  # number of changes until then
    _held: dict[Hashable, int] = field(default_factory=dict)

    def take(self, name: Hashable, size: int, part: int, stream: int = 0, operator: str = "") -> None:
        """Take memory under a name; what has the name gives its own back before."""
        self.drop(name)
        if size <= 0:
            return
        identity = len(self.sizes)
        self.sizes.append(size)
        self.part.append(part)
        self.stream.append(stream)
        self.operator.append(operator)
        self._held[name] = identity
        self.changes.append((identity, size))
        self.now += size
        if self.now > self.peak:
            self.peak, self.peak_at = self.now, len(self.changes)

    def drop(self, name: Hashable) -> None:
        """Give back what has the name, if anything has."""
        identity = self._held.pop(name, None)
        if identity is not None:
            self.changes.append((identity, 0))
            self.now -= self.sizes[identity]

    def rename(self, name: Hashable, new: Hashable) -> None:
        """Give what has the name another one, if anything has."""
        if self.holds(name):
            self.drop(new)
            self._held[new] = self._held.pop(name)

    def settled(self) -> Timeline:
        """What is held, as if nothing else had ever been: another timeline."""
        made = Timeline()
        for name, identity in self._held.items():
            details = self.part[identity], self.stream[identity], self.operator[identity]
            made.take(name, self.sizes[identity], *details)
        return made

    def holds(self, name: Hashable) -> bool:
        return name in self._held

    def begin(self, moment: str) -> None:
        """What follows belongs to this moment."""
        self.moments.append((len(self.changes), moment))

    def parts(self) -> dict[str, int]:
        """Bytes of each part at the peak."""
        found = [0] * len(PARTS)
        for identity, size in self.changes[: self.peak_at]:
            found[self.part[identity]] += size or -self.sizes[identity]
        return {name: size for name, size in zip(PARTS, found, strict=True) if size}

    def left(self) -> dict[str, int]:
        """Bytes of each part of what is held now."""
        found = [0] * len(PARTS)
        for identity in self._held.values():
            found[self.part[identity]] += self.sizes[identity]
        return {name: size for name, size in zip(PARTS, found, strict=True) if size}

    def room(self, size: int, moment: str) -> tuple[int, int] | None:
        """Bytes that there are at least and at most, where a request of about so many in a moment was refused.

        All that had been in use until then was granted, and the request took more: at least by the first such request,
        at most by the last. None where there is none. moment: empty for any. A message rounds what it tells, and an
        allocator what it asks for: 2 % are allowed.
        """
        begins = dict(self.moments)
        now, most, place = 0, 0, "start"
        least = None
        for number, (identity, taken) in enumerate(self.changes):
            place = begins.get(number, place)
            now += taken or -self.sizes[identity]
            if now <= most:
                continue
            if moment in ("", place) and abs(taken - size) <= max(0.02 * size, 512):
                least, upper = most if least is None else least, now
            most = now
        return (least, upper) if least is not None else None

    @property
    def peak_moment(self) -> str:
        """The moment of the peak: `forward`, `backward`, `update`."""
        return next((name for begin, name in reversed(self.moments) if begin < self.peak_at), "start")

    @property
    def peak_operator(self) -> str:
        """What took the last memory of the peak."""
        return self.operator[self.changes[self.peak_at - 1][0]] if self.peak_at else ""
