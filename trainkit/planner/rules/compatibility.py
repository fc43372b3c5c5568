"""Strategy x launcher x program x device: what is refused of a combination, and the table for people."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

from trainkit.frameworks.registry import LAUNCHERS
from trainkit.plan.combination import SHARED, ZERO, Amount, Combination, Refusal
from trainkit.planner.rules import REFUSALS
from trainkit.recipe.schema import StrategyKind

__all__ = [
    "DEVICES",
    "LAUNCHERS",
    "REFUSALS",
    "SHARED",
    "STRATEGIES",
    "ZERO",
    "Amount",
    "Combination",
    "Refusal",
    "Row",
    "refusals",
    "table_rows",
]

STRATEGIES: tuple[str, ...] = get_args(StrategyKind)
DEVICES = ("cpu", "cuda", "mps")


def refusals(combination: Combination) -> tuple[Refusal, ...]:
    """Every corner of the table that the combination lies in; none means that it is sound."""
    rows = (*REFUSALS, *LAUNCHERS[combination.launcher].UNSUPPORTED)
    return tuple(refusal for refusal in rows if refusal.matches(combination))


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table for people: what a strategy can do under a launcher, by device."""

    strategy: str
    launcher: str
    cells: tuple[tuple[str, str], ...]  # (device, `yes` | `one process` | `several processes` | `no`)


def table_rows(program: str = "builtin") -> Iterator[Row]:
    """Strategy x launcher x device for a program, on one node; the README's table is made from this."""
    for strategy in STRATEGIES:
        for launcher in LAUNCHERS:
            yield Row(
                strategy, launcher, tuple((device, _cell(strategy, launcher, program, device)) for device in DEVICES)
            )


def _cell(strategy: str, launcher: str, program: str, device: str) -> str:
    amounts: tuple[Amount, ...] = ("one", "several")
    sound = [amount for amount in amounts if not refusals(Combination(strategy, launcher, program, device, amount))]
    if len(sound) == 2:
        return "yes"
    if not sound:
        return "no"
    return "one process" if sound == ["one"] else "several processes"
