"""Steps of a run on a copy of its model, to see what memory they take; nothing of the training is touched."""

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
from trainkit.machine.probes.memory import available
from trainkit.optimizers import optimizer
from trainkit.trainer.metrics.memory_breakdown import peak_resident, resident, status_bytes
from trainkit.trainer.optim.mixed_precision import autocast
from trainkit.trainer.optim.optimizer import forget_embeddings
from trainkit.trainer.parallel import Strategy
from trainkit.trainer.settings import Settings

SHARE = 0.9  # of what is free: the rest is for what grows later, and for others
_CLEAR = Path("/proc/self/clear_refs")
_OUT_OF_MEMORY = ("can't allocate memory", "bad_alloc", "out of memory")
# A copy of the run's model under its strategy, and the inputs of this rank's share of the first step.
MakeCopy = Callable[[], tuple[Strategy, dict[str, Tensor]]]


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Bytes that a rank's memory may reach: the allocator's on CUDA, resident on a CPU.

    limit: as the recipe has it. available: what the machine has for this rank; beyond it the system ends processes.
    """

    limit: int
    available: int


class Trial:
    """Tries micro batches with the first samples of the run, the way that accumulation takes them.

    Attempts hold no collective but for the making of a copy: a rank may run out of memory by itself, and then all of
    them call :meth:`start_over`.
    """

    def __init__(self, settings: Settings, device: torch.device, memory: MemoryLimit, make_copy: MakeCopy) -> None:
        self._settings, self._device, self._memory, self._make_copy = settings, device, memory, make_copy
        self._strategy: Strategy | None = None
        self._inputs: dict[str, Tensor] = {}
        self._known: list[tuple[int, int]] = []  # micro batches that fitted, with their peaks in bytes; 0 is at rest

    def attempt(self, micro: int) -> tuple[int, str]:
        """Take a step with a micro batch, unless it is expected to take more than there is.

        Returns the peak in bytes, the expected one where it was not tried, and why the micro batch does not fit, or "".
        """
        try:
            if self._strategy is None:
                self._strategy, self._inputs = self._make_copy()
                self._step(self._strategy, self._settings.batch.search[0])  # from now on optimizer state is there
                give_back(self._device)
                self._known = [(0, resident()), *(known for known in self._known if known[0])]
            expected = self._expected(micro)
            if expected > self._memory.available and self._device.type == "cpu":  # would end processes, not fail
                return expected, "expected to take more than there is, and not tried"
            restart_peak(self._device)
            self._step(self._strategy, micro)
        except (RuntimeError, MemoryError) as error:
            # torch has a class of its own for CUDA only: elsewhere the message tells
            known = isinstance(error, MemoryError | torch.OutOfMemoryError)
            if not known and not any(text in str(error) for text in _OUT_OF_MEMORY):
                raise
            return peak(self._device), "out of memory"
        used = peak(self._device)
        if used > self._memory.limit:
            return used, "more than the limit"
        self._known.append((micro, used))
        return used, ""

    def start_over(self) -> None:
        """Let go of the copy. Another one is made for the next attempt: the old one may have failed in mid-step."""
        self._strategy, self._inputs = None, {}
        if optimizer(self._settings.recipe.optimizer.name).embeddings_in_32_bit:
            forget_embeddings()
        gc.collect()
        give_back(self._device)

    def _step(self, strategy: Strategy, micro: int) -> None:
        """An update after two micro steps, if there are as many: from the second on there are gradients besides."""
        settings = self._settings
        share = settings.batch.search[-1]
        for start in range(0, min(share, 2 * micro), micro):
            inputs = {name: values[start : start + micro] for name, values in self._inputs.items()}
            with strategy.micro_step(last=False):
                with autocast(settings, settings.dtype, self._device):
                    loss = strategy.model(**inputs)
                strategy.backward(loss / share, last=False)
        strategy.update(settings.recipe.optimizer.lr)

    def _expected(self, micro: int) -> int:
        """The peak from those of smaller ones, for activations grow with the batch; 0 before there is one."""
        points = sorted(self._known)[-2:]
        if len(points) < 2:
            return 0
        (less, low), (more, high) = points
        return high + max(0, high - low) * (micro - more) // (more - less)


def memory_limit(device: torch.device, asked_mib: int | None, environ: Mapping[str, str] = os.environ) -> MemoryLimit:
    """The limit of this rank. asked_mib: MiB that the recipe allows it, None for :data:`SHARE` of what is free.

    The ranks of one machine share the memory of its CPU.
    """
    if device.type == "cuda":
        used, free = torch.cuda.memory_reserved(device), torch.cuda.mem_get_info(device)[0]
    else:
        used, free = resident(), available() // max(1, int(environ.get("LOCAL_WORLD_SIZE", "1")))
        # what the process may still map, under `ulimit -v` and `ulimit -d`
        for name, kind in (("VmSize", resource.RLIMIT_AS), ("VmData", resource.RLIMIT_DATA)):
            limit = resource.getrlimit(kind)[0]
            if limit != resource.RLIM_INFINITY and (mapped := status_bytes(name)):
                free = min(free, limit - mapped[name])
    return MemoryLimit(asked_mib * 2**20 if asked_mib else used + int(SHARE * free), used + free)


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
