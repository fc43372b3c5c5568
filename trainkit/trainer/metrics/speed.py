"""How fast a run trains, its model FLOPs utilisation (MFU), and how long it waited for data."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from trainkit.machine.accelerators import Format, peak
from trainkit.trainer.data.source import Batch, sample_length
from trainkit.trainer.models.base import Model, entries
from trainkit.trainer.settings import Settings

TOKENS = ("tokens", "input_ids")  # the names of model inputs that hold tokens


@dataclass(frozen=True, slots=True)
class TrainingFlops:
    """The FLOPs of training per token, and the peak rate; None if unknown."""

    flops_per_token: float | None  # forward and backward
    peak: float | None  # peak operations a second of one rank's GPU in the computation's format

    def share(self, tokens_per_second: float, ranks: int) -> float | None:
        """Model FLOPs utilisation (MFU) of all ranks: PaLM (Chowdhery et al. 2022), appendix B."""
        # Recomputed activations do not count as the model's work: gradient checkpointing lowers MFU.
        if self.flops_per_token is None or self.peak is None:
            return None
        return round(tokens_per_second * self.flops_per_token / (self.peak * ranks), 4)


def training_flops(model: Model, settings: Settings, device: torch.device) -> TrainingFlops:
    """To be called before a strategy shards the model. A GPU is probed only if the run uses one."""
    flops = flops_per_token(model, sample_length(settings.recipe))
    if device.type != "cuda":
        return TrainingFlops(flops, None)
    # Data sheets give a peak per unit: fp32 products may run on the tensor cores as TF32.
    tf32 = settings.dtype == "fp32" and torch.backends.cuda.matmul.allow_tf32
    used: Format = "tf32" if tf32 else "fp32" if settings.dtype == "fp32" else "16 bits"
    return TrainingFlops(flops, peak(torch.cuda.get_device_name(device), used))


def flops_per_token(model: Model, sequence_length: int) -> float | None:
    """6 N + 12 L H Q T (PaLM, appendix B), for tokens in samples of `sequence_length` = T; L H Q: `attention_width`."""
    # N: entries of the matrices that a token is multiplied with: no lookup tables, no biases, and only the experts
    # that it is routed to. For frozen ones no gradient is computed: 4 instead of 6.
    if model.attention_width is None:
        return None
    # A lookup costs no product; a table tied to the output layer is multiplied there.
    tables = {
        parameter
        for module in model.modules()
        if isinstance(module, nn.Embedding) and module not in model.tied
        for parameter in module.parameters(recurse=False)
    }
    used = [parameter for parameter in model.parameters() if parameter.dim() > 1 and parameter not in tables]
    training = sum(entries(parameter) for parameter in used if parameter.requires_grad)
    frozen = sum(entries(parameter) for parameter in used) - training
    idle = model.idle_parameters()
    products = 6 * training + 4 * frozen - (6 if training > idle else 4) * idle
    return float(products + 12 * model.attention_width * sequence_length)


def tokens_in(batch: Batch) -> int:
    """Tokens of a batch that go through the model, with padding; 0 if its inputs are not tokens."""
    return batch.written + sum(values.numel() for name, values in batch.inputs.items() if name in TOKENS)


# Marks are set after these numbers of steps: the first step allocates and tunes, and so do some later ones,
# such as those that record CUDA graphs.
STRETCHES = (1, 5)


class Totals(NamedTuple):
    """Totals since the start of an attempt, at one moment; seconds, and tokens over all ranks."""

    clock: float
    steps: int = 0
    tokens: int = 0  # predicted ones
    computed: int = 0  # tokens that went through the model, predicted or not
    waited: float = 0.0  # for data
    compiled: float = 0.0
    aside: float = 0.0  # evaluation and saving

    def since(self, before: Totals) -> Totals:
        """The difference from earlier totals."""
        apart: list[Any] = [late - early for late, early in zip(self, before, strict=True)]
        return Totals(*apart)

    @property
    def training(self) -> float:
        """Seconds of steps."""
        return max(self.clock - self.compiled - self.aside, 1e-9)

    def rates(self, global_batch: int, work: TrainingFlops, ranks: int) -> dict[str, Any]:
        """Rates of the steps; tokens are None for samples that are predicted as a whole, MFU if unknown."""
        return {
            "samples_per_second": round(self.steps * global_batch / self.training, 3),
            "tokens_per_second": round(self.tokens / self.training, 1) if self.tokens or not self.steps else None,
            "mfu": work.share(self.computed / self.training, ranks),
        }


def steady(marks: Sequence[Totals], end: Totals) -> Totals:
    """The latest mark with at least as many steps after it as before it. marks: the first one is at the start."""
    return next(
        mark for mark in reversed(marks) if mark is marks[0] or end.steps - mark.steps >= mark.steps - marks[0].steps
    )


class DataWaiting:
    """Seconds for which the device was idle because the next batch was not ready.

    A GPU keeps working while the host waits. Two events, which nothing waits for, measure its idle time: one
    after the work of a step, one when the next batch is ready.
    """

    def __init__(self, event: Callable[[], Any] | None, clock: Callable[[], float] = time.monotonic) -> None:
        """event: creates an event timed on the GPU; None for a device that computes while the host waits."""
        self._event, self._clock = event, clock
        self._seconds = self._began = 0.0
        self._launched: Any = None  # the event after the latest step
        self._open: deque[tuple[Any, Any, float]] = deque()  # both events, and the host's seconds between them

    @classmethod
    def on(cls, device: torch.device) -> DataWaiting:
        """The measurement for a device."""
        return cls(partial(torch.cuda.Event, enable_timing=True) if device.type == "cuda" else None)

    def begin(self) -> None:
        """The next batch is requested."""
        self._began = self._clock()

    def end(self) -> None:
        """The batch is ready."""
        waited = self._clock() - self._began
        if self._event is None or self._launched is None:  # before the first step a GPU is idle anyway
            self._seconds += waited
            return
        come = self._event()
        come.record()
        self._open.append((self._launched, come, waited))
        self._settle()

    def step_launched(self) -> None:
        """All work of a step has been launched."""
        if self._event is not None:
            self._launched = self._event()
            self._launched.record()

    @property
    def seconds(self) -> float:
        """The seconds known so far: a GPU may not have reached the latest step."""
        self._settle()
        return self._seconds

    def _settle(self) -> None:
        while self._open and self._open[0][1].query():
            launched, come, waited = self._open.popleft()
            # Idle time before the batch was requested is not caused by missing data.
            self._seconds += min(waited, launched.elapsed_time(come) / 1000)


Item = TypeVar("Item")


def timed(items: Iterator[Item], waiting: DataWaiting) -> Iterator[Item]:
    """The same items; `waiting` is notified when each is requested and when it is ready."""
    while True:
        waiting.begin()
        try:
            item = next(items)
        except StopIteration:
            return
        waiting.end()
        yield item


def slow_data_warning(share: float, seconds: float, workers: int, *, packed: bool = False) -> str:
    """A warning with figures and the remedy if waiting took long, else "". share: of `seconds` of training.

    packed: every loader process tokenises the whole stream, so that a second one does not help.
    """
    waited = share * seconds
    if share <= 0.2 or waited < 1.0:  # less than a second does not matter in any run
        return ""
    remedy = "set data.workers to 2 or more" if not workers else "set data.workers or data.prefetch_factor higher"
    if packed:
        ready = "let rows hold token ids (input_ids), or set data.packing: none"
        remedy = ready if workers else "set data.workers to 1"
    return f"{share:.0%} of the training time was spent waiting for data ({waited:.1f} s of {seconds:.1f} s); {remedy}"
