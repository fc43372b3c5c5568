"""How long the training waits for its data, and what to say when that is long."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

Item = TypeVar("Item")

_SHARE, _SECONDS = 0.2, 1.0  # less than a second is no loss, whatever share of a short run it is


def timed(items: Iterator[Item], waited: Callable[[float], None]) -> Iterator[Item]:
    """The same items; `waited` is told the seconds that each took to arrive."""
    while True:
        began = time.monotonic()
        try:
            item = next(items)
        except StopIteration:
            return
        waited(time.monotonic() - began)
        yield item


def complaint(share: float, seconds: float, workers: int) -> str:
    """A sentence with figures and the remedy, where waiting took long; else "". share: of `seconds` of training."""
    if share <= _SHARE or share * seconds < _SECONDS:
        return ""
    remedy = "set data.workers to 2 or more" if not workers else "set data.workers or data.prefetch_factor higher"
    return (
        f"{share:.0%} of the training went by waiting for data ({share * seconds:.1f} s of {seconds:.1f} s); {remedy}"
    )
