"""The record of a micro step that estimates are made from: which memory comes and goes, and the work that is done."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from math import prod
from typing import Any

from trainkit.decode import decode

VERSION = 1  # of what is kept in the user's cache

# Parts of a rank's memory, in the order in which they are shown.
PARTS = ("parameters", "gradients", "optimizer state", "activations", "16-bit copies", "loss", "batch",
         "communication", "temporaries")  # fmt: skip
PARAMETERS, GRADIENTS, STATE, ACTIVATIONS, COPIES, LOSS, BATCH, COMMUNICATION, TEMPORARIES = range(len(PARTS))


class Kind(IntEnum):
    """What an event says, and what its number is."""

    TAKE = 0  # storage
    FREE = 1  # storage
    FORWARD = 2  # begins
    BACKWARD = 3  # begins
    END = 4  # of the micro step
    ENTER = 5  # module: its forward begins, or is repeated
    LEAVE = 6  # module
    REACH = 7  # module: the gradient of its output is there
    AFTER = 8  # module: the gradient of its input is there
    READY = 9  # parameter: its gradient has been added


Events = tuple[int, ...]  # one after the other, each a :class:`Kind` and its number


def pairs(events: Events) -> Iterator[tuple[int, int]]:
    """Each event as (kind, number)."""
    return zip(events[::2], events[1::2], strict=True)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter; tied ones count once. item: bytes of a value. scales: bytes beside the values (quantised).

    parts: over how many ranks a matrix is divided, of which this is one part. sharers: over how many a stack of experts
    is shared out, of which these are one rank's.
    """

    name: str
    shape: tuple[int, ...]
    item: float
    trained: bool = True
    embedding: bool = False
    scales: int = 0
    parts: int = 1
    sharers: int = 1

    @property
    def of(self) -> int:
        """How many such tensors are the whole one."""
        return self.parts * self.sharers

    def share(self, ranks: int) -> tuple[int, ...]:
        """The shape of what the first of so many ranks has of it: rows, or a part of the width of each expert."""
        first, *rest = self.shape or (1,)
        if self.sharers > 1 and rest[0] % ranks == 0:  # trainkit/trainer/parallel/fsdp.py
            return first, rest[0] // ranks, *rest[1:]
        return -(-first // ranks), *rest

    @property
    def size(self) -> int:
        """Number of values."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return int(self.size * self.item) + self.scales


@dataclass(frozen=True, slots=True)
class Module:
    """A module with parameters of its own, or a unit of sharding. own, all: numbers of parameters."""

    name: str
    own: tuple[int, ...]
    all: tuple[int, ...]
    unit: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    """Operators that are alike: how many in a micro step, and of each FLOPs, bytes read and written, and format."""

    count: int
    flops: float
    bytes: float
    format: str = "fp32"


@dataclass(frozen=True, slots=True)
class Trace:
    """One micro step on a whole model.

    batch, buffers: bytes of one micro batch, and of what belongs to the model and is no parameter. sizes, parts,
    operators: of each storage; operators are numbers of `names`. gradients: storage -> parameter. first: the events of
    a micro step that finds no gradients; further: of one that adds to them.
    """

    parameters: tuple[Parameter, ...]
    modules: tuple[Module, ...]
    buffers: int
    batch: int
    sizes: tuple[int, ...]
    parts: tuple[int, ...]
    operators: tuple[int, ...]
    names: tuple[str, ...]
    gradients: Mapping[int, int]
    first: Events
    further: Events
    work: tuple[Work, ...]
    recomputed: float = 0.0  # FLOPs of what checkpointing computes again

    @property
    def trained(self) -> Sequence[Parameter]:
        return [each for each in self.parameters if each.trained]

    @property
    def size(self) -> int:
        """Number of values of all parameters."""
        return sum(each.size for each in self.parameters)

    @property
    def flops(self) -> float:
        """Of a micro step, recomputation included."""
        return sum(each.count * each.flops for each in self.work)

    def to_json(self) -> dict[str, Any]:
        """Builtins only; :meth:`from_json` gives an equal value back."""
        made = {name: [asdict(each) for each in getattr(self, name)] for name in _RECORDS}
        flat = {name: list(getattr(self, name)) for name in _LISTS}
        return {
            "version": VERSION,
            "buffers": self.buffers,
            "batch": self.batch,
            "recomputed": self.recomputed,
            "gradients": [list(pair) for pair in self.gradients.items()],
            **flat,
            **made,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Trace:
        """The inverse of :meth:`to_json`. ValueError for what another version of trainkit wrote."""
        if data.get("version") != VERSION:
            raise ValueError(f"a trace of version {data.get('version')!r}, and this trainkit reads {VERSION}")
        flat = {name: tuple(data[name]) for name in _LISTS}
        made = {name: tuple(decode(kind, each) for each in data[name]) for name, kind in _RECORDS.items()}
        numbers = {name: data[name] for name in ("buffers", "batch", "recomputed")}
        gradients: Any = dict(data["gradients"])
        return cls(gradients=gradients, **numbers, **flat, **made)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a trace is made of: as much of a recipe as it depends on, and what a plan decides.

    micro: samples of a micro batch. device: `cuda` or `cpu`. capability: of the GPU; 8.0 for all later ones, whose
    attention kernels do not differ here. dtype: of the computation. packed: whether samples hold several texts.
    padded: whether a mask says what is padding. software: versions by package.
    """

    recipe: Mapping[str, Any]
    micro: int
    device: str
    dtype: str
    capability: tuple[int, int] = (9, 0)
    packed: bool = False
    padded: bool = False
    software: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """SHA-256 of all of it."""
        text = json.dumps([VERSION, asdict(self)], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


_LISTS = ("sizes", "parts", "operators", "names", "first", "further")
_RECORDS: Mapping[str, type] = {"parameters": Parameter, "modules": Module, "work": Work}
