"""`batch.micro: auto`: the largest micro batch that fits, found by trial steps before the first one, and remembered.

The steps are of a copy of the run's model, so nothing of the training is touched.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import platform
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from trainkit.errors import TrainingError
from trainkit.files import cache_folder, read_json, write_json
from trainkit.machine.probes.host import probe_memory
from trainkit.planner.fingerprint import memory_digest
from trainkit.trainer.distributed import gather_from_ranks
from trainkit.trainer.settings import Settings, World
from trainkit.trainer.trial_steps import MakeCopy, Trial, may_still_map, memory_limit, restart_peak

log = logging.getLogger("trainkit.trainer")
IN_RUN = "micro-batch.json"  # in the run directory
_MMAP_THRESHOLD = -3  # mallopt(3)


@dataclass(frozen=True, slots=True)
class Tried:
    """One micro batch that was tried. peak_bytes: the highest of all ranks. why: "" where it fits."""

    micro: int
    fits: bool
    peak_bytes: int
    why: str


@dataclass(frozen=True, slots=True)
class Found:
    """The micro batch that the recipe left open, and how it was found."""

    micro: int
    accumulation: int
    source: Literal["searched", "remembered"]
    tried: tuple[Tried, ...]
    limit_bytes: int | None  # the least of all ranks; None where nothing was tried
    remembered_in: str | None  # a file; None where none could be written
    seconds: float  # that the search took


def settle_micro_batch(
    settings: Settings, world: World, device: torch.device, make_copy: MakeCopy
) -> tuple[Settings, Found | None]:
    """The settings with the micro batch in them, and how it was found; None where the plan has decided it.

    Called on every rank. TrainingError where not one sample fits.
    """
    if not settings.batch.search:
        return settings, None
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's
    if mallopt and device.type == "cpu" and may_still_map() is not None:
        # Under `ulimit` the heap counts with its holes, which differ from run to run: large tensors stay out of it.
        mallopt(_MMAP_THRESHOLD, 2**20)
    # All ranks take the same: what is remembered if every one of them remembers one, else what a search finds.
    memory = Memory(settings, device)
    known: list[int | None] = gather_from_ranks(memory.recall(), world)
    remembered = [micro for micro in known if micro is not None]
    if len(remembered) == world.size:
        micro, place = min(remembered), str(memory.path) if memory.path else None
        found = Found(micro, settings.batch.search[-1] // micro, "remembered", (), None, place, 0.0)
    else:
        found = _search(settings, world, device, make_copy, memory.path)
    memory.keep(found, world)
    if world.rank == 0:
        log.info("%s", in_words(found))
    batch = replace(settings.batch, micro=found.micro, accumulation=found.accumulation, search=())
    return replace(settings, batch=batch), found


def _search(settings: Settings, world: World, device: torch.device, make_copy: MakeCopy, path: Path | None) -> Found:
    began, sizes = time.monotonic(), settings.batch.search
    mine = memory_limit(device, settings.recipe.batch.memory_mib)
    limit: int = min(gather_from_ranks(mine.limit, world))
    trial = Trial(settings, device, mine, make_copy)
    tried: list[Tried] = []

    def fits(micro: int) -> bool:
        # One decision for all ranks: a size that fails on any of them fails.
        attempts: list[tuple[int, str]] = gather_from_ranks(trial.attempt(micro), world)
        failed = [(rank, peak, why) for rank, (peak, why) in enumerate(attempts) if why]
        why = next((f"{why} on rank {rank} ({peak / 2**20:.0f} MiB)" for rank, peak, why in failed), "")
        tried.append(Tried(micro, not failed, max(peak for peak, _ in attempts), why))
        return not failed

    found = largest_fitting(sizes, fits)
    trial.end()
    restart_peak(device)  # what was tried is none of the training's memory
    if found is None:
        raise TrainingError(
            f"batch.micro is auto, and not even a micro batch of {sizes[0]} fits: {tried[0].why}",
            hint="turn on efficiency.gradient_checkpointing, shorten data.sequence_length, or take a smaller model",
        )
    seconds = round(time.monotonic() - began, 3)
    return Found(found, sizes[-1] // found, "searched", tuple(tried), limit, str(path) if path else None, seconds)


def largest_fitting(sizes: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The largest of ascending sizes that fits, by doubling, then bisection; None where the first does not."""
    # What fits, fits in every smaller size too.
    best, over = -1, len(sizes)  # places of the largest known to fit and the least not to
    while over - best > 1:
        doubled = max(best + 1, bisect_right(sizes, 2 * sizes[best]) - 1) if best >= 0 else 0
        place = doubled if over == len(sizes) else (best + over) // 2
        if fits(sizes[place]):
            best = place
        else:
            over = place
    return sizes[best] if best >= 0 else None


def in_words(found: Found) -> str:
    """One line for the log."""
    what = f"micro batch {found.micro}, accumulation {found.accumulation}"
    if found.source == "remembered":
        return f"{what}: remembered in {found.remembered_in}"
    failed = min((tried for tried in found.tried if not tried.fits), key=lambda tried: tried.micro, default=None)
    beyond = f"{failed.micro} is too large: {failed.why}" if failed else "all that divide the global batch fit"
    kept = f"remembered in {found.remembered_in}" if found.remembered_in else "remembered nowhere but in the run"
    return f"{what}: the largest that fits ({beyond}); {len(found.tried)} tried in {found.seconds:.1f} s, {kept}"


class Memory:
    """What is remembered for one kind of work on one machine, in the run and in the user's cache."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        if device.type == "cuda":
            card = torch.cuda.get_device_properties(device)
            name, size = card.name, card.total_memory
        else:
            name, size = device.type, probe_memory()["memory_total"] or 0
        # All that decides what fits: the settings that do, the host, its device and memory, and torch.
        work = memory_digest(settings.recipe, settings.batch, settings.dtype)
        described = json.dumps([work, platform.node(), name, size, torch.__version__])
        self._key, self._sizes = hashlib.sha256(described.encode()).hexdigest(), settings.batch.search
        folder = cache_folder(os.environ, "micro-batches")
        # None where there is no home.
        self.path = Path(folder, f"{self._key[:32]}.json") if folder else None
        # The run that is resumed may know better: its checkpoint is at <run directory>/checkpoints/<step>.
        resumed = [settings.resume.absolute().parent.parent] if settings.resume else []
        self._runs = [run / IN_RUN for run in (settings.run_dir, *resumed)]

    def recall(self) -> int | None:
        """The micro batch, as the run itself has it, the run that it goes on from, or the cache."""
        files = [*self._runs, *([self.path] if self.path else [])]
        return next((micro for file in files if (micro := self._read(file)) is not None), None)

    def _read(self, file: Path) -> int | None:
        content = read_json(file)  # nothing where the file is torn: it is searched for again
        known = content.get("key") == self._key and content.get("micro") in self._sizes
        return int(content["micro"]) if known else None

    def keep(self, found: Found, world: World) -> None:
        """Write it down, once on each machine and once in the run. A full disk costs a warning, not the run."""
        files = [self.path] if self.path and world.local_rank == 0 else []
        files += [self._runs[0]] if world.rank == 0 else []
        for file in [file for file in files if self._read(file) != found.micro]:
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                write_json(file, {"key": self._key, "micro": found.micro, "found": asdict(found)}, indent=1)
            except OSError as error:
                log.warning("%s cannot be written, the micro batch is searched for again: %s", file, error.strerror)
