"""How far a run has come, and what is done at certain steps: a metrics line, an evaluation, a checkpoint."""

from __future__ import annotations

import logging
import math
import signal
import time
from functools import partial

from torch import Tensor

from trainkit.errors import TrainingError
from trainkit.trainer.checkpoint import checkpoints
from trainkit.trainer.distributed import gather_from_ranks, sum_float_over_ranks
from trainkit.trainer.metrics.expert_use import expert_use
from trainkit.trainer.metrics.flops import Work
from trainkit.trainer.metrics.memory import memory_now
from trainkit.trainer.metrics.writers import Metrics
from trainkit.trainer.optim.precision import SkippedSteps
from trainkit.trainer.perf.compiling import CompileClock
from trainkit.trainer.setup import Parts

log = logging.getLogger("trainkit.trainer")


class Progress:
    """Steps done, with the clock and the tokens (predicted ones, over all ranks) of this attempt."""

    def __init__(self, first: int, steps: int) -> None:
        self.first = self.step = first
        self.steps = steps
        self.tokens = 0  # since the start
        self.computed = 0  # tokens that went through the model since the start
        self.step_tokens = 0  # of the latest step
        self.loss: float | None = None
        self.eval_loss: float | None = None
        self.lowest = False  # whether the latest step was evaluated, and better than all before
        self.stopped_early = False
        self.stopped_by: signal.Signals | None = None
        self.skipped = SkippedSteps()
        self.compiling = CompileClock()
        self.waited = 0.0  # seconds for data, since the start
        self._started = self._line_at = time.monotonic()
        self._line_step, self._line_tokens, self._line_computed, self._line_waited = first, 0, 0, 0.0
        self._line_compiled = 0.0

    def advance(self, counted: int, computed: int) -> None:
        """One more optimizer step is done. computed: tokens that went through the model, predicted or not."""
        self.step += 1
        self.step_tokens = counted
        self.lowest = False
        self.tokens += counted
        self.computed += computed

    def wait(self, seconds: float) -> None:
        """A batch took so long to arrive."""
        self.waited += seconds

    def is_due(self, every: int) -> bool:
        """Whether something done every so many steps, and at the end, is due now; 0 means never."""
        return every > 0 and (self.step % every == 0 or self.step == self.steps)

    def elapsed(self) -> float:
        """Seconds since the first step began."""
        return time.monotonic() - self._started

    def speed(self, global_batch: int, work: Work, ranks: int) -> dict[str, float]:
        """Seconds and rates since the last call, without the time of compiling."""
        now = time.monotonic()
        seconds = max(now - self._line_at - (self.compiling.seconds - self._line_compiled), 1e-9)
        self._line_compiled = self.compiling.seconds
        samples, tokens = (self.step - self._line_step) * global_batch, self.tokens - self._line_tokens
        waited = self.waited - self._line_waited
        share = work.share((self.computed - self._line_computed) / seconds, ranks)
        self._line_computed = self.computed
        self._line_at, self._line_step, self._line_tokens, self._line_waited = now, self.step, self.tokens, self.waited
        return {
            "seconds": round(seconds, 6),
            "samples_per_second": round(samples / seconds, 3),
            "tokens_per_second": round(tokens / seconds, 1),
            "data_wait_share": round(waited / seconds, 4),
            **({} if share is None else {"mfu": share}),
        }


def report_step(parts: Parts, progress: Progress, loss: Tensor, norm: Tensor | float, metrics: Metrics) -> None:
    """A metrics line for the step just done. TrainingError as of :func:`refuse_lost_run`."""
    progress.loss = sum_float_over_ranks(float(loss), parts.world) / max(1, progress.step_tokens)
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
    if parts.settings.dtype == "fp16":
        progress.skipped.note(progress.step, parts.strategy.skipped_steps())
    log.debug("step %d loss %.4f", progress.step, progress.loss)
    refuse_lost_run(parts, progress.step, progress.loss, norm)


def refuse_lost_run(parts: Parts, step: int, loss: float, norm: Tensor | float) -> None:
    """TrainingError when loss or gradients are no numbers, and so the weights by now: no later step can mend that."""
    if parts.settings.dtype == "fp16":  # loss scaling skips such a step, and the next may be sound again
        return
    for what, value in (("loss", loss), ("norm of the gradients", float(norm))):
        if not math.isfinite(value):
            raise TrainingError(f"the {what} is {value} at step {step}", hint="lower optimizer.lr, or see the data")


def evaluate(parts: Parts, progress: Progress, metrics: Metrics) -> None:
    """Loss on the validation samples, as a metrics line of its own."""
    began = time.monotonic()
    progress.eval_loss = parts.evaluation.loss(parts.strategy, parts.eval_autocast)
    seconds = round(time.monotonic() - began, 6)
    progress.lowest = parts.best.note(progress.step, progress.eval_loss)
    metrics.write({"step": progress.step, "eval_loss": progress.eval_loss, "eval_seconds": seconds})


def out_of_patience(parts: Parts) -> bool:
    """Whether the latest evaluations bring nothing new. All ranks say the same: they have the same losses."""
    patience = parts.settings.recipe.eval.patience
    return 0 < patience <= parts.best.since


def identity(parts: Parts) -> checkpoints.Identity:
    """What this run's checkpoints say of it."""
    settings = parts.settings
    return checkpoints.Identity(
        settings.recipe.strategy.kind,
        parts.world.size,
        settings.training_digest,
        parts.source.encoder.fingerprint,
    )


def save_checkpoint(parts: Parts, progress: Progress, loss: Tensor, norm: Tensor | float) -> None:
    """Save after the step just done. TrainingError as of :func:`refuse_lost_run`: the last good one must stay.

    In fp16 such a step may be one of those that are skipped, and the run goes on: there is no checkpoint of it.
    """
    if parts.checkpoints is None:
        log.warning("no checkpoint is saved: not every rank can see the run directory of rank 0")
        return
    mean = sum_float_over_ranks(float(loss), parts.world) / max(1, progress.step_tokens)
    if not math.isfinite(mean) and parts.settings.dtype == "fp16":
        if parts.world.rank == 0:
            what = "no checkpoint is saved after step %d: its loss is %s, and so may its weights be"
            log.warning(what, progress.step, mean)
        return
    refuse_lost_run(parts, progress.step, mean, norm)
    asked = parts.settings.recipe.checkpoint
    save = parts.background.save if parts.background else partial(checkpoints.save, world=parts.world)
    save(
        parts.checkpoints,
        progress.step,
        identity(parts),
        parts.strategy,
        keep=asked.keep,
        spared=parts.best.step if asked.keep_best else None,
        best=parts.best,
    )


def resume(parts: Parts, *, restarted: bool) -> int:
    """Load the checkpoint that this run starts from, if any, and return the steps that are already done.

    After an elastic restart it is this run's own newest one; before it has one, what the plan says.
    """
    folder = parts.settings.resume
    if restarted and parts.checkpoints is not None:
        # One rank looks for all: a shared folder may not look the same to every node at once.
        folder = gather_from_ranks(checkpoints.newest(parts.checkpoints), parts.world)[0] or folder
    if folder is None:
        return 0
    step = checkpoints.load(folder, identity(parts), parts.strategy, parts.world, parts.best)
    log.info("resumed from %s after step %d, %s", folder, step, checkpoints.saved_by(folder))
    if step >= parts.steps > 0:
        log.warning(
            "nothing is left to train: the run has %d steps, and the checkpoint stands at %d", parts.steps, step
        )
    return step
