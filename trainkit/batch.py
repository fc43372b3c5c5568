"""Batch arithmetic: global = micro x accumulation x ranks, of which any three sides give the fourth."""

from __future__ import annotations

from math import prod
from typing import NamedTuple


class Sides(NamedTuple):
    """Samples per step, samples per rank in one pass, passes, and ranks; None for a side that is not known."""

    global_: int | None = None
    micro: int | None = None
    accumulation: int | None = None
    ranks: int | None = None

    @property
    def factor(self) -> int:
        """The product of the known sides, the global batch apart: what that must be a multiple of."""
        return prod(each for each in self[1:] if each is not None)


def solve(known: Sides) -> Sides | None:
    """The sides, with the one that is missing where three are known; None where no whole number fits the known ones."""
    missing = [name for name, side in known._asdict().items() if side is None]
    if known.global_ is None:
        return known if len(missing) > 1 else known._replace(global_=known.factor)
    whole, rest = divmod(known.global_, known.factor)
    if rest or not (missing or whole == 1):
        return None
    return known._replace(**{missing[0]: whole}) if len(missing) == 1 else known
