"""`batch.micro: auto`: the largest micro batch that fits, found before the first step and remembered."""

from __future__ import annotations

import dataclasses
import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from trainkit.errors import TrainingError
from trainkit.trainer.auto_batch.remembered import Memory
from trainkit.trainer.auto_batch.trial import Attempt, Rehearsal, restart_peak, room
from trainkit.trainer.distributed import gather_from_ranks
from trainkit.trainer.outset import Outset
from trainkit.trainer.settings import Settings

log = logging.getLogger("trainkit.trainer")


@dataclass(frozen=True, slots=True)
class Trial:
    """One micro batch that was tried. peak_bytes: the highest of all ranks. why: "" where it fits."""

    micro: int
    fits: bool
    peak_bytes: int
    why: str


@dataclass(frozen=True, slots=True)
class Found:
    """The micro batch that the recipe left open, and how it was found.

    limit_bytes: the least of all ranks, null where nothing was tried. remembered_in: a file; null where none could be
    written. seconds: that the search took.
    """

    micro: int
    accumulation: int
    source: Literal["searched", "remembered"]
    tried: tuple[Trial, ...]
    limit_bytes: int | None
    remembered_in: str | None
    seconds: float

    def record(self) -> dict[str, Any]:
        """For metrics.jsonl and result.json."""
        return asdict(self)


def settle_micro_batch(outset: Outset) -> tuple[Settings, Found | None]:
    """The settings with the micro batch in them, and how it was found; None where the plan has decided it.

    Called on every rank. All take the same: what is remembered if every rank remembers one, else what a search finds.
    TrainingError where not one sample fits.
    """
    settings, world = outset.settings, outset.world
    if not settings.batch.search:
        return settings, None
    memory = Memory.of(settings, outset.device)
    known: list[int | None] = gather_from_ranks(memory.recall(), world)
    remembered = [micro for micro in known if micro is not None]
    if len(remembered) == world.size:
        micro = min(remembered)
        path = str(memory.path) if memory.path else None
        found = Found(micro, settings.batch.search[-1] // micro, "remembered", (), None, path, 0.0)
    else:
        found = _search(outset, memory)
    memory.keep(found.micro, found.record(), world)
    if world.rank == 0:
        log.info("%s", in_words(found))
    batch = replace(settings.batch, micro=found.micro, accumulation=found.accumulation, search=())
    return dataclasses.replace(settings, batch=batch), found


def _search(outset: Outset, memory: Memory) -> Found:
    began, sizes, world = time.monotonic(), outset.settings.batch.search, outset.world
    mine = room(outset.device, outset.settings.recipe.batch.memory_mib)
    limit: int = min(gather_from_ranks(mine.limit, world))
    rehearsal = Rehearsal(outset, mine)
    tried: list[Trial] = []

    def fits(micro: int) -> bool:
        attempts: list[Attempt] = gather_from_ranks(rehearsal.attempt(micro), world)
        tried.append(_judged(micro, attempts))
        if not tried[-1].fits:
            rehearsal.start_over()
        return tried[-1].fits

    micro = largest_fitting(sizes, fits)
    rehearsal.start_over()
    restart_peak(outset.device)  # what was tried is none of the training's memory
    if micro is None:
        raise TrainingError(
            f"batch.micro is auto, and not even a micro batch of {sizes[0]} fits: {tried[0].why}",
            hint="turn on efficiency.gradient_checkpointing, shorten data.sequence_length, or take a smaller model",
        )
    path = str(memory.path) if memory.path else None
    seconds = round(time.monotonic() - began, 3)
    return Found(micro, sizes[-1] // micro, "searched", tuple(tried), limit, path, seconds)


def largest_fitting(sizes: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The largest of ascending sizes that fits, by doubling, then bisection; None where the first does not.

    fits: what fits, fits in every smaller size too.
    """
    best, over, place = -1, len(sizes), 0  # best and over: places of the largest known to fit and the least not to
    while place < over:
        if not fits(sizes[place]):
            over = place
            break
        best, place = place, max(place + 1, bisect_right(sizes, 2 * sizes[place]) - 1)
    while over - best > 1:
        middle = (best + over) // 2
        if fits(sizes[middle]):
            best = middle
        else:
            over = middle
    return sizes[best] if best >= 0 else None


def _judged(micro: int, attempts: Sequence[Attempt]) -> Trial:
    """One decision for all ranks: a size that fails on any of them fails."""
    failed = next((rank for rank, attempt in enumerate(attempts) if attempt.why), None)
    why = ""
    if failed is not None:
        why = f"{attempts[failed].why} on rank {failed} ({attempts[failed].peak / 2**20:.0f} MiB)"
    return Trial(micro, failed is None, max(attempt.peak for attempt in attempts), why)


def in_words(found: Found) -> str:
    """One line for the log."""
    what = f"micro batch {found.micro}, accumulation {found.accumulation}"
    if found.source == "remembered":
        return f"{what}: remembered in {found.remembered_in}"
    failed = min((trial for trial in found.tried if not trial.fits), key=lambda trial: trial.micro, default=None)
    beyond = f"{failed.micro} is too large: {failed.why}" if failed else "all that divide the global batch fit"
    kept = f"remembered in {found.remembered_in}" if found.remembered_in else "remembered nowhere but in the run"
    return f"{what}: the largest that fits ({beyond}); {len(found.tried)} tried in {found.seconds:.1f} s, {kept}"
