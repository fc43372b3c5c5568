"""Slurm's short form of host names: ``gpu[01-03,7]-[a,b],login``. What `scontrol show hostnames` writes out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

MOST = 100_000  # hosts; a range of more is no list of a cluster's nodes
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\],]+)")
_RANGE = re.compile(r"(\d+)-(\d+)")


def expand(text: str) -> tuple[str, ...]:
    """Every host, in the order of the list. ValueError for what is no such list, or one of more than 100,000 hosts."""
    found: list[str] = []
    for entry in _entries(text):
        choices = [[*_choices(inner)] if inner or whole.startswith("[") else [whole] for whole, inner in _pieces(entry)]
        size = 1
        for each in choices:
            size *= len(each)
        if len(found) + size > MOST:
            raise ValueError(f"more than {MOST:,} hosts")
        found += ["".join(parts) for parts in product(*choices)]
    return tuple(found)


def _entries(text: str) -> Iterator[str]:
    """The parts between commas that are in no brackets."""
    depth, begin = 0, 0
    for position, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise ValueError(f"{text!r} is no list of hosts")
        if character == "," and depth == 0:
            yield text[begin:position]
            begin = position + 1
    if depth:
        raise ValueError(f"{text!r} is no list of hosts")
    if text:
        yield text[begin:]


def _pieces(entry: str) -> Iterator[tuple[str, str]]:
    """The brackets of an entry and what is around them: whole, and what is inside of brackets."""
    end = 0
    for match in _PIECE.finditer(entry):
        if match.start() != end:
            break
        end = match.end()
        yield match[0], match[1] or ""
    if end != len(entry) or not entry:
        raise ValueError(f"{entry!r} is no host, nor several")


def _choices(inner: str) -> Iterator[str]:
    for each in inner.split(","):
        if match := _RANGE.fullmatch(each):
            first, last = int(match[1]), int(match[2])
            if not first <= last < first + MOST:
                raise ValueError(f"{each} is no range")
            yield from (str(number).zfill(len(match[1])) for number in range(first, last + 1))
        elif each:
            yield each
        else:
            raise ValueError(f"[{inner}] has an empty part")
