"""The attacks of the campaign `security`, by surface: each from a random generator, on copies of real things."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from security_judge import Attack

from trainkit.cli.boundary import run_command_line
from trainkit.errors import TrainkitError, in_words


@dataclass(frozen=True)
class Lab:
    """Real things, made once: run directories with a checkpoint each, by strategy; folders in transformers' form."""

    runs: Mapping[str, Path]
    model: Path
    adapters: Path


LAB = Lab({}, Path(), Path())  # which the campaign makes at its start


def attack_of(seed: int, surfaces: tuple[str, ...] | None = None) -> Attack:
    """The attack of a seed."""
    draw = random.Random(seed)
    name = draw.choice(surfaces or tuple(SURFACES))
    attack = SURFACES[name](draw)
    attack.surface = name
    return attack


def command(*words: str) -> Callable[[Path], int]:
    """A call of trainkit's command line."""
    return lambda _: run_command_line(list(words))


def answered(call: Callable[[Path], object]) -> Callable[[Path], int]:
    """What fails with an error of trainkit's own has answered."""

    def outcome(folder: Path) -> int:
        try:
            call(folder)
        except TrainkitError as error:
            sys.stderr.write(in_words(error))
            return int(error.exit_code)
        return 0

    return outcome


SURFACES: dict[str, Callable[[random.Random], Attack]] = {}
GRIDS: dict[str, Callable[[], Iterator[Attack]]] = {}  # numbered cases, in order
