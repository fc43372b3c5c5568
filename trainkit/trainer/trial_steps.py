"""Steps of a copy of the run's model, to see whether a micro batch fits, and the memory that they may take."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trainkit.errors import TrainingError
from trainkit.machine.probes.host import available_memory
from trainkit.optimizers import optimizer
from trainkit.trainer.data.source import Batch, targets_at_most
from trainkit.trainer.metrics.memory_breakdown import peak_resident, resident, status_bytes
from trainkit.trainer.models.base import Model
from trainkit.trainer.optim.mixed_precision import autocast, casts_kept
from trainkit.trainer.optim.optimizers import forget_embeddings
from trainkit.trainer.parallel import Strategy
from trainkit.trainer.settings import Settings

SHARE = 0.9  # of what is free: the rest is for what grows later, and for others
_CLEAR = Path("/proc/self/clear_refs")
# What a failed allocation is called, by torch on a CPU, the C++ library, CUDA, cuBLAS and NCCL; in small letters.
_OUT_OF_MEMORY = ("can't allocate memory", "bad_alloc", "out of memory", "cublas_status_alloc_failed", "cuda calloc")
# What may be the size, or may not: cuDNN has no kernel that does with the workspace to be had, or none at all; a launch
# has more blocks than a card takes, or none.
_PERHAPS = ("cudnn_status_not_supported", "invalid configuration argument")
# Undoes the scale that fp16 begins with (torch.amp.GradScaler): an update that is skipped would take no memory.
_SLOPE = 2.0**-16


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of the run's model, as it is inside its strategy, and this rank's share of the first step."""

    model: Model
    strategy: Strategy
    batch: Batch


MakeCopy = Callable[[], Copy]


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Bytes that a rank's memory may reach: the allocator's on CUDA, resident on a CPU."""

    limit: int  # as the recipe has it
    available: int  # what the machine has for this rank; beyond it the system ends processes


class Trial:
    """Tries micro batches with the first samples of the run, the way that accumulation takes them."""

    def __init__(self, settings: Settings, device: torch.device, memory: MemoryLimit, make_copy: MakeCopy) -> None:
        self._settings, self._device, self._memory, self._make_copy = settings, device, memory, make_copy
        self._copy: Copy | None = None
        self._inputs: dict[str, Tensor] = {}  # on the device
        self._whole = False  # whether the copy has its optimizer state, and nothing else, as between two steps
        self._known: list[tuple[int, int]] = []  # micro batches that fitted, with their peaks in bytes; 0 is at rest

    def attempt(self, micro: int) -> tuple[int, str]:
        """Take a step with a micro batch; its peak in bytes, expected or seen, and why it does not fit, or ""."""
        least = self._settings.batch.search[0]
        try:
            # No collective but for the making of the copy: a rank may run out of memory by itself.
            if self._copy is None:
                self._copy = self._make_copy()
                self._inputs = self._copy.batch.on(self._device)
            if not self._whole:
                self._step(self._copy, least)  # from now on optimizer state is there
                self._whole = True
                give_back(self._device)
                self._known = [(0, resident()), *(known for known in self._known if known[0])]
            expected = self._expected(micro)
            if expected > self._memory.available and self._device.type == "cpu":  # would end processes, not fail
                return expected, "expected to take more than there is, and not tried"
            restart_peak(self._device)
            self._step(self._copy, micro)
            used = peak(self._device)
        except (RuntimeError, MemoryError) as error:
            why = too_large(error, certain=micro > least)
            if not why:
                raise
            used = peak(self._device)
        else:
            why = "more than the limit" if used > self._memory.limit else ""
            self._known += [] if why else [(micro, used)]
            return used, why
        self._make_good()  # only now: what was computed was held by the error
        return used, why

    def end(self) -> None:
        """Let go of the copy."""
        self._copy, self._inputs, self._whole = None, {}, False
        if optimizer(self._settings.recipe.optimizer.name).embeddings_in_32_bit:
            forget_embeddings()
        gc.collect()
        give_back(self._device)

    def _make_good(self) -> None:
        """After a step that has failed midway; the copy stays, for to draw another one takes a large model minutes."""
        self._whole = False
        if self._copy is not None:
            self._copy.strategy.abandon_step()
        gc.collect()
        give_back(self._device)

    def _step(self, copy: Copy, micro: int) -> None:
        """An update after two micro steps, if there are as many: from the second on gradients take memory too."""
        settings, strategy = self._settings, copy.strategy
        share, slope = settings.batch.search[-1], _SLOPE / max(1, copy.batch.counted)
        with casts_kept():
            for start in range(0, min(share, 2 * micro), micro):
                here = slice(start, start + micro)
                copy.model.expect(targets_at_most({name: each[here] for name, each in copy.batch.inputs.items()}))
                with strategy.micro_step(last=False):
                    with autocast(settings, settings.dtype, self._device):
                        loss = strategy.model(**{name: values[here] for name, values in self._inputs.items()})
                    strategy.backward(loss * slope, last=False)
        strategy.update(settings.recipe.optimizer.lr)

    def _expected(self, micro: int) -> int:
        """The peak from those of smaller ones, for activations grow with the batch; 0 before there is one."""
        points = sorted(self._known)[-2:]
        if len(points) < 2:
            return 0
        (less, low), (more, high) = points
        return high + max(0, high - low) * (micro - more) // (more - less)


def too_large(error: Exception, *, certain: bool) -> str:
    """Why a step of that size does not fit; "" for an error that says something else.

    certain: whether a smaller one has fitted, so that it can only be the size where an error may be of that.
    """
    text = str(error)
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(each in text.lower() for each in _OUT_OF_MEMORY):
        return "out of memory"
    if certain and any(each in text.lower() for each in _PERHAPS):
        return f"more than a kernel takes ({text.splitlines()[0]})"
    return ""


def memory_limit(device: torch.device, asked_mib: int | None, environ: Mapping[str, str] = os.environ) -> MemoryLimit:
    """The limit of this rank. asked_mib: MiB that the recipe allows it, None for :data:`SHARE` of what is free."""
    if device.type == "cuda":
        used, free = torch.cuda.memory_reserved(device), torch.cuda.mem_get_info(device)[0]
    else:
        # The ranks of one machine share the memory of its CPU.
        used, free = resident(), available_memory() // max(1, int(environ.get("LOCAL_WORLD_SIZE", "1")))
        if (left := may_still_map()) is not None:
            free = min(free, left)
    return MemoryLimit(asked_mib * 2**20 if asked_mib else used + int(SHARE * free), used + free)


def may_still_map() -> int | None:
    """Bytes that `ulimit -v` and `ulimit -d` leave to this process; None where there is no such limit."""
    left = []
    for name, kind in (("VmSize", resource.RLIMIT_AS), ("VmData", resource.RLIMIT_DATA)):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY and (mapped := status_bytes(name)):
            left.append(limit - mapped[name])
    return min(left, default=None)


def give_back(device: torch.device) -> None:
    """Let the system have what is free inside this process: CUDA's allocator and glibc's keep it for later use."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # malloc_trim(3); other C libraries have none
        trim(0)


def restart_peak(device: torch.device) -> None:
    """Forget the peak so far. TrainingError where the system cannot."""
    give_back(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        _CLEAR.write_text("5")  # resets the peak of the resident set (proc(5))
    except OSError as error:
        raise TrainingError(
            f"batch.micro is auto, and this system cannot reset its memory peak ({_CLEAR}: {error.strerror})",
            hint="set batch.micro to a number",
        ) from error


def peak(device: torch.device) -> int:
    """Bytes at the highest since :func:`restart_peak`."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else peak_resident()
