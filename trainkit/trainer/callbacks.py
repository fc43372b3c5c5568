"""How far a run has come, and what is done at certain steps: a metrics line, an evaluation, a checkpoint."""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainkit.errors import TrainingError
from trainkit.heartbeat import CHECKPOINT, EVALUATION
from trainkit.text import counted
from trainkit.trainer.distributed import sum_over_ranks, wait_for
from trainkit.trainer.metrics.memory_breakdown import memory_now
from trainkit.trainer.metrics.mfu import Work
from trainkit.trainer.metrics.pace import STRETCHES, Totals, Waiting, steady
from trainkit.trainer.metrics.writers import Metrics
from trainkit.trainer.models.base import Model
from trainkit.trainer.optim import SkippedSteps
from trainkit.trainer.perf.compiling import CompileClock
from trainkit.trainer.settings import World
from trainkit.trainer.setup import Parts

log = logging.getLogger("trainkit.trainer")


class Progress:
    """Steps done, and the time that they took, of this attempt."""

    def __init__(self, first: int, steps: int, device: torch.device) -> None:
        self.first = self.step = first
        self.steps = steps
        self.step_tokens = 0  # of the latest step
        self.bookmark = ""  # of its batch
        self.idle = 0  # samples so far of which nothing was predicted
        self.loss: float | None = None
        self.eval_loss: float | None = None
        self.lowest = False  # whether the latest step was evaluated, and better than all before
        self.stopped_early = False
        self.stopped_by: signal.Signals | None = None
        self.skipped = SkippedSteps()
        self.compiling = CompileClock()
        self.waiting = Waiting.on(device)
        self.aside_seconds = 0.0  # in evaluation and saving
        self._device = device
        self._tokens = self._computed = 0
        self._line = self._totals()
        self._marks = [self._line]
        self._end: Totals | None = None

    def _totals(self) -> Totals:
        waited, compiled = self.waiting.seconds, self.compiling.seconds
        counts = (self.step, self._tokens, self._computed)
        return Totals(time.monotonic(), *counts, waited, compiled, self.aside_seconds)

    def advance(self, counted: int, computed: int, bookmark: str = "") -> None:
        """One more optimizer step is on its way. computed: tokens through the model. bookmark: of its batch."""
        self.waiting.step_launched()
        self.step += 1
        self.step_tokens, self.bookmark = counted, bookmark
        self.lowest = False
        self._tokens += counted
        self._computed += computed
        if self.step - self.first in STRETCHES:
            wait_for(self._device)
            self._marks.append(self._totals())

    def finish(self) -> None:
        """The last step is on its way."""
        wait_for(self._device)
        self._end = self._totals()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, time is not that of steps."""
        wait_for(self._device)  # what is still to be done of the steps before belongs to them
        before = self._totals()
        yield
        wait_for(self._device)
        between = self._totals().since(before)
        self.aside_seconds += between.clock - between.compiled

    def is_due(self, every: int) -> bool:
        """Whether something done every so many steps, and at the end, is due now; 0 means never."""
        return every > 0 and (self.step % every == 0 or self.step == self.steps)

    def elapsed(self) -> float:
        """Seconds since the first step began."""
        return time.monotonic() - self._marks[0].clock

    def speed(self, global_batch: int, work: Work, ranks: int) -> dict[str, float]:
        """Seconds and rates since the last call, without compiling, evaluation and saving."""
        before, self._line = self._line, self._totals()
        since = self._line.since(before)
        known = {name: rate for name, rate in since.rates(global_batch, work, ranks).items() if rate is not None}
        share = round(since.waited / since.training, 4)
        return {"seconds": round(since.training, 6), **known, "data_wait_share": share}

    def steady_speed(self, global_batch: int, work: Work, ranks: int) -> dict[str, Any]:
        """The same rates of the run, without its first steps where it has enough others; and from which step on."""
        end = self._end or self._totals()
        begin = steady(self._marks, end)
        return {**end.since(begin).rates(global_batch, work, ranks), "rates_from_step": begin.steps + 1}


def report_step(parts: Parts, progress: Progress, loss: Tensor, norm: Tensor | float, metrics: Metrics) -> None:
    """A metrics line for the step just done. TrainingError as of :func:`refuse_lost_run`."""
    progress.loss = sum_over_ranks([float(loss)], parts.world)[0] / max(1, progress.step_tokens)
    record = {
        "step": progress.step,
        "loss": progress.loss,
        "learning_rate": parts.learning_rate(progress.step - 1),
        "grad_norm": float(norm),
        **progress.speed(parts.settings.batch.global_, parts.work, parts.world.size),
        "elapsed": round(progress.elapsed(), 6),
        "memory_bytes": memory_now(parts.device),
        **expert_use(parts.model, parts.world),
    }
    if parts.settings.recipe.efficiency.compile.enabled:
        record["compile_seconds"] = round(progress.compiling.seconds, 3)
    if parts.settings.dtype == "fp16":
        record["skipped_steps"] = parts.strategy.skipped_steps()
    metrics.write(record)
    progress.skipped.note(progress.step, record.get("skipped_steps", 0))
    log.debug("step %d loss %.4f", progress.step, progress.loss)
    refuse_lost_run(parts, progress.step, progress.loss, norm)


def note_idle(parts: Parts, progress: Progress, idle: int) -> None:
    """Count the samples of a step of which nothing is predicted, and tell of the first ones."""
    if idle and not progress.idle and parts.world.rank == 0:
        why = "its prompt fills data.sequence_length, or it is one token"
        log.warning("warning: of %s of step %d nothing is predicted: %s", counted(idle, "sample"), progress.step, why)
    progress.idle += idle


def tell_idle(parts: Parts, progress: Progress) -> None:
    """Say how many samples of a run nothing was predicted of: without packing a stream leaves them in."""
    if progress.idle and parts.world.rank == 0:
        samples = (progress.step - progress.first) * parts.settings.batch.global_
        what = "warning: of %d of %d samples nothing was predicted: set data.sequence_length higher"
        log.warning(what, progress.idle, samples)


def expert_use(model: Model, world: World) -> dict[str, Any]:
    """Use of the experts since the line before, for the metrics; empty for a dense model. Called on every rank."""
    load, model.expert_load = model.expert_load, None
    if load is None:
        return {}
    blocks, experts = load.shape
    counts = sum_over_ranks(load.flatten().tolist(), world)
    rows = [counts[block * experts : (block + 1) * experts] for block in range(blocks)]
    shares = [[round(count / max(1, sum(row)), 6) for count in row] for row in rows]
    # The shares of each block with experts; the largest share over the mean share in the least even block, 1 is even.
    return {"expert_imbalance": round(max(map(max, shares)) * experts, 6), "expert_shares": shares}


def refuse_lost_run(parts: Parts, step: int, loss: float, norm: Tensor | float) -> None:
    """TrainingError when loss or gradients are not finite, and so the weights: no later step repairs that."""
    if parts.settings.dtype == "fp16":  # loss scaling skips such a step, and the next may be sound again
        return
    for what, value in (("loss", loss), ("norm of the gradients", float(norm))):
        if not math.isfinite(value):
            raise TrainingError(f"the {what} is {value} at step {step}", hint="lower optimizer.lr, or see the data")


def evaluate(parts: Parts, progress: Progress, metrics: Metrics) -> None:
    """Loss on the validation samples, as a metrics line of its own."""
    with progress.aside():
        began = time.monotonic()
        progress.eval_loss = parts.evaluation.loss(
            parts.strategy, parts.eval_autocast, partial(parts.heartbeat.set_phase, EVALUATION)
        )
        seconds = round(time.monotonic() - began, 6)
    progress.lowest = parts.best.note(progress.step, progress.eval_loss)
    metrics.write({"step": progress.step, "eval_loss": progress.eval_loss, "eval_seconds": seconds})


def save_checkpoint(parts: Parts, progress: Progress, loss: Tensor, norm: Tensor | float) -> None:
    """Save after the step just done. TrainingError as of :func:`refuse_lost_run`: the last good one must stay."""
    if parts.checkpoints.root is None:
        log.warning("no checkpoint is saved: not every rank can see the run directory of rank 0")
        return
    mean = sum_over_ranks([float(loss)], parts.world)[0] / max(1, progress.step_tokens)
    if not math.isfinite(mean) and parts.settings.dtype == "fp16":
        # The step may be one of those that loss scaling skips: the run goes on, without a checkpoint of it.
        if parts.world.rank == 0:
            what = "no checkpoint is saved after step %d: its loss is %s, and so may its weights be"
            log.warning(what, progress.step, mean)
        return
    refuse_lost_run(parts, progress.step, mean, norm)
    parts.heartbeat.set_phase(CHECKPOINT)
    spared = parts.best.step if parts.settings.recipe.checkpoint.keep_best else None
    with progress.aside():
        parts.checkpoints.save(
            progress.step, parts.strategy, best=asdict(parts.best), spared=spared, bookmark=progress.bookmark
        )
