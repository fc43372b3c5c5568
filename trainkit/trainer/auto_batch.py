"""`batch.micro: auto`: find the largest micro batch that fits by trial steps on a model copy, and remember it."""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import os
import platform
import resource
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from trainkit.errors import TrainingError
from trainkit.files import cache_folder, read_json, write_json
from trainkit.machine.host import available_memory, probe_memory
from trainkit.optimizers import optimizer
from trainkit.planner.fingerprint import memory_digest
from trainkit.trainer.data.source import Batch, targets_at_most
from trainkit.trainer.distributed import gather_from_ranks
from trainkit.trainer.metrics.memory_breakdown import peak_resident, resident, status_bytes
from trainkit.trainer.models.base import Model
from trainkit.trainer.optim import autocast, cached_casts, forget_embeddings
from trainkit.trainer.parallel import Strategy
from trainkit.trainer.perf.heap import keep_out_of_heap, trim_heap
from trainkit.trainer.settings import Settings, World

log = logging.getLogger("trainkit.trainer")
IN_RUN = "micro-batch.json"  # in the run directory
SHARE = 0.9  # share of the free memory: the rest is for later growth, and for other processes
# How torch on a CPU, the C++ library, CUDA, cuBLAS and NCCL report a failed allocation; in lower case.
_OUT_OF_MEMORY = ("can't allocate memory", "bad_alloc", "out of memory", "cublas_status_alloc_failed", "cuda calloc")
# Errors that the size may have caused, or not: cuDNN has no kernel for the available workspace, or none at all; a
# launch has more blocks than a GPU allows, or none.
_PERHAPS = ("cudnn_status_not_supported", "invalid configuration argument")
# Cancels the initial scale of fp16 (torch.amp.GradScaler): otherwise the update is skipped, and takes no memory.
_SLOPE = 2.0**-16


@dataclass(frozen=True, slots=True)
class ModelCopy:
    """A copy of the run's model under its strategy, and this rank's share of the first step."""

    model: Model
    strategy: Strategy
    batch: Batch


MakeCopy = Callable[[], ModelCopy]


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Bytes that a rank's memory may reach: the allocator's on CUDA, resident memory on a CPU."""

    limit: int  # set by the recipe
    available: int  # what the machine has for this rank; beyond it the system kills processes


@dataclass(frozen=True, slots=True)
class TriedMicroBatch:
    """One micro batch that was tried. peak_bytes: the highest of all ranks. why: why it does not fit, "" if it does."""

    micro: int
    fits: bool
    peak_bytes: int
    why: str


@dataclass(frozen=True, slots=True)
class FoundMicroBatch:
    """The micro batch that replaces `auto`, and how it was found."""

    micro: int
    accumulation: int
    source: Literal["searched", "remembered"]
    tried: tuple[TriedMicroBatch, ...]
    limit_bytes: int | None  # the lowest of all ranks; None if nothing was tried
    remembered_in: str | None  # a file; None if none could be written
    seconds: float  # taken by the search


def find_micro_batch(
    settings: Settings, world: World, device: torch.device, make_copy: MakeCopy
) -> tuple[Settings, FoundMicroBatch | None]:
    """The settings with the micro batch filled in, and how it was found; None if the plan already decides it.

    Called on every rank. TrainingError if not even one sample fits.
    """
    if not settings.batch.search:
        return settings, None
    if device.type == "cpu" and may_still_map() is not None:
        # `ulimit` counts the heap with its holes, which differ between runs: keep large tensors out of the heap.
        keep_out_of_heap(1 << 20)
    # All ranks take the same: the remembered value if every rank has one, else the result of a search.
    memory = RememberedMicroBatch(settings, device)
    known: list[int | None] = gather_from_ranks(memory.recall(), world)
    remembered = [micro for micro in known if micro is not None]
    if len(remembered) == world.size:
        micro, place = min(remembered), str(memory.path) if memory.path else None
        found = FoundMicroBatch(micro, settings.batch.search[-1] // micro, "remembered", (), None, place, 0.0)
    else:
        found = _search(settings, world, device, make_copy, memory.path)
    memory.keep(found, world)
    if world.rank == 0:
        log.info("%s", search_summary(found))
    batch = replace(settings.batch, micro=found.micro, accumulation=found.accumulation, search=())
    return replace(settings, batch=batch), found


def _search(
    settings: Settings, world: World, device: torch.device, make_copy: MakeCopy, path: Path | None
) -> FoundMicroBatch:
    began, sizes = time.monotonic(), settings.batch.search
    mine = memory_limit(device, settings.recipe.batch.memory_mib)
    limit: int = min(gather_from_ranks(mine.limit, world))
    trial = Trial(settings, device, mine, make_copy)
    tried: list[TriedMicroBatch] = []

    def fits(micro: int) -> bool:
        # One decision for all ranks: a size that fails on one of them fails.
        attempts: list[tuple[int, str]] = gather_from_ranks(trial.attempt(micro), world)
        failed = [(rank, peak, why) for rank, (peak, why) in enumerate(attempts) if why]
        why = next((f"{why} on rank {rank} ({peak / 2**20:.0f} MiB)" for rank, peak, why in failed), "")
        tried.append(TriedMicroBatch(micro, not failed, max(peak for peak, _ in attempts), why))
        return not failed

    found = largest_fitting(sizes, fits)
    trial.end()
    restart_peak(device)  # the trials must not count in the training's memory
    if found is None:
        raise TrainingError(
            f"batch.micro is auto, and not even a micro batch of {sizes[0]} fits: {tried[0].why}",
            hint="turn on efficiency.gradient_checkpointing, lower data.sequence_length, or use a smaller model",
        )
    seconds = round(time.monotonic() - began, 3)
    return FoundMicroBatch(
        found, sizes[-1] // found, "searched", tuple(tried), limit, str(path) if path else None, seconds
    )


def largest_fitting(sizes: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The largest of ascending sizes that fits, by doubling, then bisection; None if the first does not."""
    # If a size fits, so does every smaller one.
    best, over = -1, len(sizes)  # indices of the largest size known to fit and the smallest known not to
    while over - best > 1:
        doubled = max(best + 1, bisect_right(sizes, 2 * sizes[best]) - 1) if best >= 0 else 0
        place = doubled if over == len(sizes) else (best + over) // 2
        if fits(sizes[place]):
            best = place
        else:
            over = place
    return sizes[best] if best >= 0 else None


def search_summary(found: FoundMicroBatch) -> str:
    """One line for the log."""
    what = f"micro batch {found.micro}, accumulation {found.accumulation}"
    if found.source == "remembered":
        return f"{what}: remembered in {found.remembered_in}"
    failed = min((tried for tried in found.tried if not tried.fits), key=lambda tried: tried.micro, default=None)
    beyond = f"{failed.micro} is too large: {failed.why}" if failed else "all that divide the global batch fit"
    kept = f"remembered in {found.remembered_in}" if found.remembered_in else "remembered nowhere but in the run"
    return f"{what}: the largest that fits ({beyond}); {len(found.tried)} tried in {found.seconds:.1f} s, {kept}"


class Trial:
    """Tries micro batches on the first samples of the run, in the order in which accumulation takes them."""

    def __init__(self, settings: Settings, device: torch.device, memory: MemoryLimit, make_copy: MakeCopy) -> None:
        self._settings, self._device, self._memory, self._make_copy = settings, device, memory, make_copy
        self._copy: ModelCopy | None = None
        self._inputs: dict[str, Tensor] = {}  # on the device
        # whether the copy is in the state between two steps: with optimizer state, and nothing else
        self._whole = False
        # micro batches that fitted, with their peaks in bytes; 0 stands for the peak at rest
        self._known: list[tuple[int, int]] = []

    def attempt(self, micro: int) -> tuple[int, str]:
        """Try a step with a micro batch; its peak in bytes (expected or measured), and why it does not fit, or ""."""
        least = self._settings.batch.search[0]
        try:
            # No collective after the copy is built: one rank alone may run out of memory.
            if self._copy is None:
                self._copy = self._make_copy()
                self._inputs = self._copy.batch.on(self._device)
            if not self._whole:
                self._step(self._copy, least)  # from now on optimizer state is there
                self._whole = True
                give_back(self._device)
                self._known = [(0, resident()), *(known for known in self._known if known[0])]
            expected = self._expected(micro)
            if expected > self._memory.available and self._device.type == "cpu":  # the system would kill processes
                return expected, "not tried: it is expected to need more than is available"
            restart_peak(self._device)
            self._step(self._copy, micro)
            used = peak(self._device)
        except (RuntimeError, MemoryError) as error:
            why = why_too_large(error, certain=micro > least)
            if not why:
                raise
            used = peak(self._device)
        else:
            why = "more than the limit" if used > self._memory.limit else ""
            self._known += [] if why else [(micro, used)]
            return used, why
        # Only now, because the error held the results. The copy is kept: building another takes minutes for a large
        # model.
        self._whole = False
        if self._copy is not None:
            self._copy.strategy.abandon_step()
        gc.collect()
        give_back(self._device)
        return used, why

    def end(self) -> None:
        """Free the copy."""
        self._copy, self._inputs, self._whole = None, {}, False
        if optimizer(self._settings.recipe.optimizer.name).embeddings_in_32_bit:
            forget_embeddings()
        gc.collect()
        give_back(self._device)

    def _step(self, copy: ModelCopy, micro: int) -> None:
        """An update after two micro steps, if there are two: from the second on, gradients take memory too."""
        settings, strategy = self._settings, copy.strategy
        share, slope = settings.batch.search[-1], _SLOPE / max(1, copy.batch.counted)
        with cached_casts():
            for start in range(0, min(share, 2 * micro), micro):
                here = slice(start, start + micro)
                copy.model.expect(targets_at_most({name: each[here] for name, each in copy.batch.inputs.items()}))
                with strategy.micro_step(last=False):
                    with autocast(settings, settings.dtype, self._device):
                        loss = strategy.model(**{name: values[here] for name, values in self._inputs.items()})
                    strategy.backward(loss * slope, last=False)
        strategy.update(settings.recipe.optimizer.lr)

    def _expected(self, micro: int) -> int:
        """The peak extrapolated from smaller batches, since activations grow with the batch; 0 without any."""
        points = sorted(self._known)[-2:]
        if len(points) < 2:
            return 0
        (less, low), (more, high) = points
        return high + max(0, high - low) * (micro - more) // (more - less)


def why_too_large(error: Exception, *, certain: bool) -> str:
    """Why a step of that size does not fit; "" for an error with another cause.

    certain: whether a smaller batch has fitted: then an ambiguous error can only be due to the size.
    """
    text = str(error)
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(each in text.lower() for each in _OUT_OF_MEMORY):
        return "out of memory"
    if certain and any(each in text.lower() for each in _PERHAPS):
        return f"more than a kernel takes ({text.splitlines()[0]})"
    return ""


def memory_limit(device: torch.device, asked_mib: int | None, environ: Mapping[str, str] = os.environ) -> MemoryLimit:
    """The limit of this rank. asked_mib: MiB that the recipe allows it, None for :data:`SHARE` of the free memory."""
    if device.type == "cuda":
        used, free = torch.cuda.memory_reserved(device), torch.cuda.mem_get_info(device)[0]
    else:
        # The ranks of one machine share its main memory.
        used, free = resident(), available_memory() // max(1, int(environ.get("LOCAL_WORLD_SIZE", "1")))
        if (left := may_still_map()) is not None:
            free = min(free, left)
    return MemoryLimit(asked_mib * 2**20 if asked_mib else used + int(SHARE * free), used + free)


def may_still_map() -> int | None:
    """Bytes that `ulimit -v` and `ulimit -d` leave to this process; None without such a limit."""
    left = []
    for name, kind in (("VmSize", resource.RLIMIT_AS), ("VmData", resource.RLIMIT_DATA)):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY and (mapped := status_bytes(name)):
            left.append(limit - mapped[name])
    return min(left, default=None)


def give_back(device: torch.device) -> None:
    """Return this process's free memory to the system: CUDA's allocator and glibc's keep it otherwise."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        trim_heap()


def restart_peak(device: torch.device) -> None:
    """Reset the memory peak. TrainingError if the system cannot."""
    give_back(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    clear = Path("/proc/self/clear_refs")
    try:
        clear.write_text("5")  # resets the peak resident set size (proc(5))
    except OSError as error:
        what = f"batch.micro is auto, and this system cannot reset its memory peak ({clear}: {error.strerror})"
        raise TrainingError(what, hint="set batch.micro to a number") from error


def peak(device: torch.device) -> int:
    """The peak in bytes since :func:`restart_peak`."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else peak_resident()


class RememberedMicroBatch:
    """The micro batch found earlier for the same work on the same machine, kept in the run and in the user's cache."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        if device.type == "cuda":
            gpu = torch.cuda.get_device_properties(device)
            name, size = gpu.name, gpu.total_memory
        else:
            name, size = device.type, probe_memory()["memory_total"] or 0
        # The key is everything that decides what fits: settings, host, device, memory, and torch.
        work = memory_digest(settings.recipe, settings.batch, settings.dtype)
        described = json.dumps([work, platform.node(), name, size, torch.__version__])
        self._key, self._sizes = hashlib.sha256(described.encode()).hexdigest(), settings.batch.search
        folder = cache_folder(os.environ, "micro-batches")
        # None without a home.
        self.path = Path(folder, f"{self._key[:32]}.json") if folder else None
        # A resumed run's own value comes first: its checkpoint is at <run directory>/checkpoints/<step>.
        resumed = [settings.resume.absolute().parent.parent] if settings.resume else []
        self._runs = [run / IN_RUN for run in (settings.run_dir, *resumed)]

    def recall(self) -> int | None:
        """The micro batch from the run itself, from the run that it resumes, or from the cache."""
        files = [*self._runs, *([self.path] if self.path else [])]
        return next((micro for file in files if (micro := self._read(file)) is not None), None)

    def _read(self, file: Path) -> int | None:
        content = read_json(file)  # nothing if the file is incomplete: the search is repeated
        known = content.get("key") == self._key and content.get("micro") in self._sizes
        return int(content["micro"]) if known else None

    def keep(self, found: FoundMicroBatch, world: World) -> None:
        """Save it, once per machine and once in the run. A full disk gives a warning and does not end the run."""
        files = [self.path] if self.path and world.local_rank == 0 else []
        files += [self._runs[0]] if world.rank == 0 else []
        for file in [file for file in files if self._read(file) != found.micro]:
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                write_json(file, {"key": self._key, "micro": found.micro, "found": asdict(found)}, indent=1)
            except OSError as error:
                log.warning(
                    "%s cannot be written, so the micro batch will be searched for again: %s", file, error.strerror
                )
