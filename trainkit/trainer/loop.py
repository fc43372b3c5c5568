"""The training loop, top to bottom: the steps, what is due after each of them, and the end of the run."""

from __future__ import annotations

import gc
import logging
import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from signal import Signals
from typing import Any

import torch
from torch import Tensor

from trainkit.errors import TrainingError, first_line
from trainkit.heartbeat import BACKWARD, CHECKPOINT, EVALUATION, EXCHANGE, FORWARD, OPTIMIZER, PHASES
from trainkit.metrics import LOSS, PREFIX
from trainkit.seeds import derived_seed
from trainkit.text import join_names, pluralize
from trainkit.trainer.auto_batch import why_too_large
from trainkit.trainer.checkpoint.manifest import newest
from trainkit.trainer.checkpoint.uploads import Uploads
from trainkit.trainer.data.loader import training_batches
from trainkit.trainer.data.source import Batch, bounds_of_micro, is_by_token
from trainkit.trainer.distributed import agreed, sum_over_ranks, wait_for
from trainkit.trainer.metrics.memory_breakdown import memory_now
from trainkit.trainer.metrics.speed import STRETCHES, DataWaiting, Totals, TrainingFlops, steady, timed, tokens_in
from trainkit.trainer.metrics.writers import Metrics
from trainkit.trainer.models.base import Model
from trainkit.trainer.optim import SkippedSteps, cached_casts
from trainkit.trainer.perf.efficiency import CompileClock
from trainkit.trainer.settings import World
from trainkit.trainer.setup import Parts

log = logging.getLogger("trainkit.trainer")
# In order of precedence, if several have arrived.
STOPPING = (signal.SIGTERM, signal.SIGINT)
SAVING = signal.SIGUSR1
WATCHED = (*STOPPING, SAVING)
YOUNG_EVERY, ALL_EVERY = 10, 1000  # steps between two garbage collections
POLL = 0.2  # seconds between two polls of an upload


class SignalRequests:
    """Signals received by this process. Handlers only record them; a repeated signal is the same request."""

    def __init__(self, seen: set[int] | None = None) -> None:
        """seen: the set in which another handler has recorded signals so far."""
        self._seen = set() if seen is None else seen

    def listen(self, *numbers: signal.Signals) -> None:
        """Handle these signals. Until then they have their default action."""
        for number in numbers:
            signal.signal(number, lambda seen, frame: self._seen.add(seen))

    def votes(self) -> list[int]:
        """1 for each watched signal that this rank has received. Summed over ranks together with the token counts."""
        return [int(number in self._seen) for number in WATCHED]

    def settle(self, votes: Sequence[int] | None = None) -> tuple[Signals | None, bool]:
        """What to do after a step: the signal to stop for, and whether to save.

        votes: the sum over all ranks; None to use this rank's signals so far.
        """
        asked = [number for number, count in zip(WATCHED, votes or self.votes(), strict=True) if count]
        if SAVING in asked:
            # The request is fulfilled; a new signal counts again.
            self._seen.discard(SAVING)
        return next((number for number in STOPPING if number in asked), None), SAVING in asked


class TrainingProgress:
    """Steps done in this attempt, and the time they took."""

    def __init__(self, first: int, steps: int, device: torch.device) -> None:
        self.first = self.step = first
        self.steps = steps
        self.step_tokens = 0  # of the latest step
        self.loader_state = ""  # of its batch
        self.targetless = self.cut = self.left_out = 0  # samples and texts of a stream so far, as of a `Batch`
        self.loss: float | None = None
        self.first_loss: float | None = None  # of this attempt, as of the first evaluation
        self.eval_loss: float | None = None
        self.first_eval_loss: float | None = None
        self.metrics: dict[str, float] = {}  # of the latest evaluation, beside its loss
        self.first_metrics: dict[str, float] = {}
        self.improved = False  # whether the latest step was evaluated, and was the best so far
        self.stopped_early = False
        self.stopped_by: Signals | None = None
        self.skipped = SkippedSteps()
        self.compiling = CompileClock()
        self.waiting = DataWaiting.on(device)
        self.aside_seconds = 0.0  # seconds of evaluation and saving
        self._device = device
        self._tokens = self._computed = 0
        self._line = self._totals()
        self._phases = [0.0] * len(PHASES)
        self._marks = [self._line]
        self._end: Totals | None = None

    def lost(self) -> dict[str, int]:
        """What of a stream's texts was not trained on in this attempt, by cause."""
        counts = {"cut": self.cut, "left_out": self.left_out, "targetless": self.targetless}
        return {name: count for name, count in counts.items() if count}

    def _totals(self) -> Totals:
        waited, compiled = self.waiting.seconds, self.compiling.seconds
        counts = (self.step, self._tokens, self._computed)
        return Totals(time.monotonic(), *counts, waited, compiled, self.aside_seconds)

    def advance(self, targets: int, computed: int, loader_state: str = "", *, by_token: bool = True) -> None:
        """One more optimizer step has been launched. computed: tokens through the model. loader_state: of its batch.

        by_token: whether its targets are tokens, and not whole samples.
        """
        self.waiting.step_launched()
        self.step += 1
        self.step_tokens, self.loader_state = targets, loader_state
        self.improved = False
        self._tokens += targets if by_token else 0
        self._computed += computed
        if self.step - self.first in STRETCHES:
            wait_for(self._device)
            self._marks.append(self._totals())

    def finish(self) -> None:
        """The last step has been launched."""
        wait_for(self._device)
        self._end = self._totals()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Time spent in this context is not counted as step time."""
        wait_for(self._device)  # the remaining work of earlier steps still counts as theirs
        before = self._totals()
        yield
        wait_for(self._device)
        between = self._totals().since(before)
        self.aside_seconds += between.clock - between.compiled

    def is_due(self, every: float) -> bool:
        """Whether something that is due every so many steps, and at the end, is due now; 0 means never."""
        return every > 0 and (self.step % every == 0 or self.step == self.steps)

    def elapsed(self) -> float:
        """Seconds since the first step began."""
        return time.monotonic() - self._marks[0].clock

    def speed(self, global_batch: int, work: TrainingFlops, ranks: int) -> dict[str, float]:
        """Seconds and rates since the last call, without compilation, evaluation and saving."""
        before, self._line = self._line, self._totals()
        since = self._line.since(before)
        known = {name: rate for name, rate in since.rates(global_batch, work, ranks).items() if rate is not None}
        share = round(since.waited / since.training, 4)
        return {"seconds": round(since.training, 6), **known, "data_wait_share": share}

    def phases(self, totals: Sequence[float]) -> dict[str, float]:
        """Seconds of each phase since the last call, by its name; totals: of a heartbeat, as the host sees them."""
        before, self._phases = self._phases, [*totals]
        spent = zip(PHASES, self._phases, before, strict=True)
        return {name: round(now - then, 6) for name, now, then in spent if now > then}

    def steady_speed(self, global_batch: int, work: TrainingFlops, ranks: int) -> dict[str, Any]:
        """The rates of the run without its first steps, if there are enough others; and the step they start at."""
        end = self._end or self._totals()
        begin = steady(self._marks, end)
        return {**end.since(begin).rates(global_batch, work, ranks), "rates_from_step": begin.steps + 1}


def train(parts: Parts, first: int, metrics: Metrics, requests: SignalRequests) -> TrainingProgress:
    """Run the optimizer steps from `first`, counted from 0, to the last one, a signal, or early stopping."""
    progress = TrainingProgress(first, parts.steps, parts.device)
    if parts.settings.recipe.efficiency.compile.enabled:
        progress.compiling.listen()
    with parts.checkpoints.outlasting_failure():
        take_steps(parts, progress, metrics, requests)
        progress.finish()
        samples = (progress.step - progress.first) * parts.settings.batch.global_
        for count, what in (
            (progress.targetless, "%d of %d samples had no target to predict"),  # without packing, a stream keeps them
            (progress.cut, "%d texts in %d samples were cut"),
            (progress.left_out, "%d texts beside %d samples were left out, for they have nothing to learn within one"),
        ):
            if count and parts.world.rank == 0:
                log.warning(f"warning: {what}: set data.sequence_length higher", count, samples)
        parts.heartbeat.set_phase(CHECKPOINT)  # a checkpoint may still be written in the background
        parts.profiler.finish()
        if parts.steps == 0:  # a run with 0 steps only evaluates
            evaluate(parts, progress, metrics)
        parts.checkpoints.wait()
    return progress


def take_steps(parts: Parts, progress: TrainingProgress, metrics: Metrics, requests: SignalRequests) -> None:
    """Take the optimizer steps, each followed by what is due: a metrics line, an evaluation, a checkpoint."""
    recipe, data = parts.settings.recipe, parts.world.data
    uploads = recipe.checkpoint.push_to_hub.repo is not None or recipe.checkpoint.copy_to is not None
    parts.profiler.begin()
    parts.heartbeat.begin_step(progress.first)
    with collected_between_steps() as collect:
        # The order of samples is a function of the step; a loader_state only saves a stream from reading up to it.
        for batch in timed(batches(parts, progress.first), progress.waiting):
            parts.heartbeat.set_phase(EXCHANGE)
            # One collective, on the host: the token counts of the global batch, and the signals of all ranks.
            *counts, stop, end, save = sum_over_ranks(
                [batch.counted, batch.targetless, batch.cut, batch.left_out, *requests.votes()], parts.world
            )
            # Ranks that share out matrices or samples count the same ones.
            targets, targetless, cut, left_out = (each * data.size // parts.world.size for each in counts)
            loss, norm = optimizer_step(parts, progress.step, batch, targets)
            computed = tokens_in(batch) * data.size
            progress.advance(targets, computed, batch.loader_state, by_token=is_by_token(batch.inputs))
            if targetless and not progress.targetless and parts.world.rank == 0:
                why = "the prompt fills data.sequence_length, or the sample is a single token"
                what = "warning: %s of step %d without a target to predict: %s"
                log.warning(what, pluralize(targetless, "sample"), progress.step, why)
            progress.targetless += targetless
            progress.cut += cut
            progress.left_out += left_out
            parts.heartbeat.step_done(progress.step)
            parts.profiler.step_done()
            collect(progress.step)

            if progress.step == progress.first + 1 or progress.is_due(recipe.logging.every_steps):
                report_step(parts, progress, loss, norm, metrics)
            if progress.is_due(recipe.eval.every_steps):
                evaluate(parts, progress, metrics)
                # Needs no collective: all ranks have measured the same.
                progress.stopped_early = 0 < recipe.eval.patience <= parts.best.since
            # Several ranks act only on signals that all know of; a single rank need not wait for the next step's votes.
            progress.stopped_by, asked = requests.settle((stop, end, save) if parts.world.size > 1 else None)
            stopped, early = progress.stopped_by is not None, progress.stopped_early
            # A run that ends before its last step saves, so that a requeued job resumes from there.
            requeued = stopped and recipe.cluster.kind != "none"
            ends = stopped or early or progress.step == progress.steps
            saves = requeued or (ends and (recipe.checkpoint.every_steps > 0 or recipe.checkpoint.at_end))
            # The upload at the end needs a checkpoint.
            saves = saves or (uploads and ends and not stopped)
            best = progress.improved and recipe.checkpoint.keep_best
            if asked or best or saves or progress.is_due(recipe.checkpoint.every_steps):
                save_checkpoint(parts, progress, loss, norm, last=ends)
            if stopped or early:
                break
            parts.heartbeat.begin_step(progress.step)


@contextmanager
def collected_between_steps() -> Iterator[Callable[[int], None]]:
    """In this context garbage is collected only by the yielded function, called after each step with its number."""

    def collect(step: int) -> None:
        if step % ALL_EVERY == 0:
            gc.collect()
        elif step % YOUNG_EVERY == 0:
            gc.collect(1)

    was_on = gc.isenabled()
    gc.collect()
    gc.freeze()  # existing objects stay: no need to scan them again
    gc.disable()
    try:
        yield collect
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()


def batches(parts: Parts, first: int) -> Iterator[Batch]:
    """This rank's share of every global batch from step `first` on."""
    settings = parts.settings
    return training_batches(
        parts.source.train,
        parts.order,
        settings.batch,
        parts.world.data.rank,
        steps=range(first, parts.steps),
        data=settings.recipe.data,
        pin=parts.device.type == "cuda",
    )


def optimizer_step(parts: Parts, step: int, batch: Batch, targets: int) -> tuple[Tensor, Tensor | float]:
    """All micro steps and the update; this rank's summed loss and the gradient norm. targets: of the global batch."""
    strategy = parts.strategy
    # Gradients are shares of the global batch's mean. DDP, FSDP and ZeRO average gradients over the ranks, which
    # is undone here, so that the update uses the mean over the tokens of the global batch.
    share = parts.world.data.size / max(1, targets)
    total = torch.zeros((), device=parts.device)
    micro_batches, bounds = split_micro(batch, parts), bounds_of_micro(batch, parts.settings.batch.micro)
    with cached_casts():
        for index, (inputs, at_most) in enumerate(zip(micro_batches, bounds, strict=False)):
            last = index + 1 == len(micro_batches)
            seed_dropout(parts, step, index)
            parts.model.expect(at_most)
            with strategy.micro_step(last=last):
                parts.heartbeat.set_phase(FORWARD)
                with parts.profiler.phase("forward"), parts.autocast, parts.memory.micro_step():
                    loss = strategy.model(**inputs)
                parts.model.keep_load()
                parts.model.expect(None)
                parts.heartbeat.set_phase(BACKWARD)
                with parts.profiler.phase("backward"):
                    strategy.backward(loss * share, last=last)
            total += loss.detach()
            # With it goes what layers keep beside autograd's own (bitsandbytes), before the next forward pass.
            del loss
    parts.heartbeat.set_phase(OPTIMIZER)
    with parts.memory.update(strategy):
        # Both stay on the device: reading them would wait for it.
        return total, strategy.update(parts.learning_rate(step))


def split_micro(batch: Batch, parts: Parts) -> list[dict[str, Tensor]]:
    """The micro batches of a rank's share, on its device."""
    inputs = parts.transfer(batch.inputs)
    split = [torch.split(values, parts.settings.batch.micro) for values in inputs.values()]
    return [dict(zip(inputs, values, strict=True)) for values in zip(*split, strict=True)]


def seed_dropout(parts: Parts, step: int, index: int) -> None:
    """Seed the dropout masks of a micro step's samples; without dropout nothing is drawn."""
    if parts.model.stochastic:
        batch = parts.settings.batch
        # By position in the global batch, not by rank: samples get the same masks on any number of ranks.
        position = (parts.world.data.rank * batch.accumulation + index) * batch.micro
        torch.manual_seed(derived_seed(parts.settings.recipe.train.seed, "dropout", step, position))


def report_step(parts: Parts, progress: TrainingProgress, loss: Tensor, norm: Tensor | float, metrics: Metrics) -> None:
    """A metrics line for the step just done. TrainingError as of :func:`refuse_lost_run`."""
    progress.loss = agreed(sum_over_ranks([float(loss)], parts.world.data)[0], parts.world) / max(
        1, progress.step_tokens
    )
    if progress.first_loss is None:
        progress.first_loss = progress.loss
    record = {
        "step": progress.step,
        "loss": progress.loss,
        "learning_rate": parts.learning_rate(progress.step - 1),
        "grad_norm": float(norm),
        **progress.speed(parts.settings.batch.global_, parts.work, parts.world.size),
        "elapsed": round(progress.elapsed(), 6),
        "memory_bytes": memory_now(parts.device),
        "phases": progress.phases(parts.heartbeat.totals),
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


def expert_use(model: Model, world: World) -> dict[str, Any]:
    """Expert usage since the previous line, for the metrics; empty for a dense model. Called on every rank."""
    load, model.expert_load = model.expert_load, None
    if load is None:
        return {}
    blocks, experts = load.shape
    counts = sum_over_ranks(load.flatten().tolist(), world)
    rows = [counts[block * experts : (block + 1) * experts] for block in range(blocks)]
    shares = [[round(count / max(1, sum(row)), 6) for count in row] for row in rows]
    # Shares of tokens per block with experts; then, in the least even block, the largest share over the mean share: 1
    # is even.
    return {"expert_imbalance": round(max(map(max, shares)) * experts, 6), "expert_shares": shares}


def refuse_lost_run(parts: Parts, step: int, loss: float, norm: Tensor | float) -> None:
    """TrainingError if loss or gradients are not finite, and so the weights, and no later step repairs that."""
    if parts.settings.dtype == "fp16":  # loss scaling skips such a step, and the next may be finite again
        return
    for what, value in (("loss", loss), ("norm of the gradients", float(norm))):
        if not math.isfinite(value):
            raise TrainingError(f"the {what} is {value} at step {step}", hint="lower optimizer.lr, or check the data")


def evaluate(parts: Parts, progress: TrainingProgress, metrics: Metrics) -> None:
    """Loss and metrics on the validation samples, as a line of their own. TrainingError where memory runs out."""
    with progress.aside():
        began = time.monotonic()
        tell = partial(parts.heartbeat.set_phase, EVALUATION)
        try:
            found = parts.evaluation.measured(parts.strategy, parts.eval_autocast, tell)
        except (RuntimeError, MemoryError) as error:
            if not why_too_large(error, certain=False):
                raise
            size, writes = parts.settings.batch.eval_micro, parts.evaluation.writes
            what = f"memory ran out in an evaluation, in a pass of {pluralize(size, 'sample')} of a rank"
            lower = f"batch.eval_micro (it is {size})" if size > 1 else "data.sequence_length"
            raise TrainingError(
                f"{what}: {first_line(error)}", hint=f"lower {lower}{', or eval.tokens' if writes else ''}"
            ) from error
        seconds = round(time.monotonic() - began, 6)
    found = agreed(found, parts.world)
    progress.improved = parts.best.note(progress.step, parts.evaluation.decisive(found))
    progress.eval_loss = found.pop(LOSS)
    progress.metrics = found
    if progress.first_eval_loss is None:
        progress.first_eval_loss, progress.first_metrics = progress.eval_loss, found
    named = {f"{PREFIX}{name}": value for name, value in found.items()}
    metrics.write({"step": progress.step, "eval_loss": progress.eval_loss, **named, "eval_seconds": seconds})


def save_checkpoint(
    parts: Parts, progress: TrainingProgress, loss: Tensor, norm: Tensor | float, *, last: bool
) -> None:
    """Save after the step just done. last: whether no other follows.

    TrainingError as of :func:`refuse_lost_run`: the last good one must stay.
    """
    if parts.checkpoints.root is None:
        log.warning("no checkpoint is saved: not every rank can see the run directory of rank 0")
        return
    mean = agreed(sum_over_ranks([float(loss)], parts.world.data)[0], parts.world) / max(1, progress.step_tokens)
    if not math.isfinite(mean) and parts.settings.dtype == "fp16":
        # Loss scaling may skip this step: the run goes on, without a checkpoint of the step.
        if parts.world.rank == 0:
            what = "no checkpoint is saved after step %d: its loss is %s, and so may its weights be"
            log.warning(what, progress.step, mean)
        return
    refuse_lost_run(parts, progress.step, mean, norm)
    parts.heartbeat.set_phase(CHECKPOINT)
    spared = parts.best.step if parts.settings.recipe.checkpoint.keep_best else None
    with progress.aside():
        parts.checkpoints.save(
            progress.step,
            parts.strategy,
            best=asdict(parts.best),
            spared=spared,
            loader_state=progress.loader_state,
            last=last,
        )


def finish_uploads(parts: Parts, progress: TrainingProgress, requests: SignalRequests) -> Signals | None:
    """Wait on all ranks until rank 0 has finished its uploads; returns the signal that ended the run or this wait.

    TrainingError for what could not be uploaded.
    """
    asked, uploads, stop = parts.settings.recipe.checkpoint, parts.checkpoints.uploads, progress.stopped_by
    if asked.push_to_hub.repo is None and asked.copy_to is None:
        return stop
    for each in uploads if stop is None else ():
        upload_last(parts, progress, each)
    while stop is None:
        # In short waits: no collective times out, and all ranks see signals.
        busy, *votes = sum_over_ranks([int(any(each.is_busy() for each in uploads)), *requests.votes()], parts.world)
        if not busy:
            break
        stop, _ = requests.settle(votes)
        parts.heartbeat.set_phase(CHECKPOINT)
        time.sleep(POLL)
    failures: list[TrainingError] = []
    for each in uploads:
        try:
            each.close() if stop is None else each.abandon()
        except TrainingError as error:  # the others are closed, too
            failures.append(error)
    if failures:
        raise TrainingError(diagnostic for error in failures for diagnostic in error.diagnostics)
    return stop


def upload_last(parts: Parts, progress: TrainingProgress, uploads: Uploads) -> None:
    """Queue the last checkpoint. TrainingError if a run that has trained has saved none."""
    root, resumed = parts.checkpoints.root, parts.settings.resume
    last = newest(root) if root is not None else None
    if uploads.TAKES_RESUMED and last is None and resumed is not None and 0 < parts.steps <= progress.first:
        last = resumed  # no step was left to train: the checkpoint is another run's, whose upload may have failed
    if last is not None:
        uploads.finish(last)
    elif progress.step > progress.first:
        raise TrainingError(f"nothing can be uploaded to {uploads.place}: the run has saved no checkpoint")
    else:
        log.warning("warning: nothing is uploaded to %s: the run has trained nothing", uploads.place)
    if waiting := uploads.unfinished():
        log.info("waiting for the upload of %s to %s", join_names(waiting), uploads.place)
