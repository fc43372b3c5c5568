"""What the nodes of a run tell one another before the start, and whether it is the same run that they are to start."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainkit.errors import MachineError

SAY_SECONDS = 5.0  # until the first line about who is missing
MOST_DIFFERENCES = 3  # that are named

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Report:
    """What a node says of itself. start: as of `Place`, or the plan's name; version: of trainkit.

    digest: of the plan's leaves, which follow where they are asked for: they are kilobytes, and nodes may be thousands.
    process: another one for each process, so that a node that comes again is told from two.
    unfit: why this machine cannot run the plan; empty where it can. hint: what to do about that.
    """

    node: int
    host: str
    start: str
    version: str
    digest: str
    process: str = ""
    unfit: str = ""
    hint: str = ""

    @property
    def name(self) -> str:
        """As people are told of it."""
        return f"node {self.node} ({self.host})"

    @classmethod
    def read(cls, message: Mapping[str, Any]) -> Report | None:
        """That in a message of any trainkit; None for what is none."""
        node, texts = message.get("node"), [message.get(name, "") for name in cls.__slots__[1:]]
        if not isinstance(node, int) or not message.keys() >= {"host", "start", "version"}:
            return None
        return cls(node, *texts) if all(isinstance(text, str) for text in texts) else None


def digest_of(leaves: Mapping[str, Any]) -> str:
    """Equal for equal leaves."""
    return hashlib.sha256(json.dumps(leaves, sort_keys=True).encode()).hexdigest()


def say_after(seconds: float) -> float:
    """When to say again who is missing, after so many seconds of waiting: 5, 10, 20, 40, 80, then every minute."""
    return min(2 * seconds, seconds + 60)


class RefusedRunError(MachineError):
    """A run that is not started. blamed: the hosts that are to blame, with commas between; empty where all are."""

    def __init__(self, why: str, *, hint: str = "", blamed: str = "") -> None:
        super().__init__(why, hint=hint)
        self.blamed = blamed


class ToldError(RefusedRunError):
    """What node 0 has said to another node: it refuses the run."""


def refusal(first: Report, other: Report, nodes: int) -> str:
    """Why a node may not be of node 0's run, whatever it has planned; empty where it may."""
    if not 0 < other.node < nodes:
        return f"{other.name} is none of the {nodes} nodes of the plan, which are 0 to {nodes - 1}"
    if other.version != first.version:
        return f"{other.name} has trainkit {other.version}, and {first.name} {first.version}"
    if other.unfit:
        return f"{other.name} cannot run the plan: {other.unfit}"
    return ""


def unequal(first: Report, planned: Mapping[str, Any], other: Report, found: Mapping[str, Any]) -> str:
    """What differs between two plans that should be the same."""
    differing = [text for _, text in sorted(_differences(planned, found), key=lambda each: each[0])]
    more = f", and {len(differing) - MOST_DIFFERENCES} more" if len(differing) > MOST_DIFFERENCES else ""
    return f"{other.name} has another plan than {first.name}: {'; '.join(differing[:MOST_DIFFERENCES])}{more}"


def _differences(planned: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """What says little to people has a higher number: words of a command, and digests, which follow from the others."""
    for key in dict.fromkeys((*planned, *found)):
        if planned.get(key) != found.get(key):
            little = 2 if key.endswith("digest") else int(".argv." in key)
            yield little, f"{key} is {found.get(key, 'absent')}, and {planned.get(key, 'absent')} there"


@dataclass(frozen=True, slots=True)
class Start:
    """What node 0 decides for all nodes: the run directory, and address and port at which the ranks meet."""

    run_dir: str
    attempt: int
    master: str
    port: int

    @classmethod
    def read(cls, said: object) -> Start | None:
        """That in a message; None for what is none."""
        if not isinstance(said, dict) or said.keys() != {*cls.__slots__}:
            return None
        texts, numbers = (said["run_dir"], said["master"]), (said["attempt"], said["port"])
        known = all(isinstance(each, str) for each in texts) and all(isinstance(each, int) for each in numbers)
        return cls(**said) if known else None

    def at(self, run_dir: str) -> Start:
        """The same in a run directory."""
        return replace(self, run_dir=run_dir)
