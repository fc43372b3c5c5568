"""Python's search for cyclic garbage, between steps instead of in the middle of one.

Left to itself it runs whenever enough objects were made, on each rank in another step, and all ranks wait for the one
that is at it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

YOUNG_EVERY, ALL_EVERY = 10, 1000  # steps


@contextmanager
def collected_between_steps() -> Iterator[Callable[[int], None]]:
    """Inside, garbage is collected by calls alone: what is given is to be called with the number of each step done."""
    was_on = gc.isenabled()
    gc.collect()
    gc.freeze()  # what is there stays: nobody need look through it again
    gc.disable()
    try:
        yield _collect
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()


def _collect(step: int) -> None:
    if step % ALL_EVERY == 0:
        gc.collect()
    elif step % YOUNG_EVERY == 0:
        gc.collect(1)
