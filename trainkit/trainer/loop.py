"""Requests that arrive as signals, and how ranks agree on them at optimizer steps."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from signal import Signals

import torch
from torch import Tensor

from trainkit.heartbeat import BACKWARD, CHECKPOINT, EXCHANGE, FORWARD, OPTIMIZER
from trainkit.recipe.schema import Recipe
from trainkit.trainer.callbacks import Progress, evaluate, note_idle, report_step, save_checkpoint, tell_idle
from trainkit.trainer.data.loader import timed, training_batches
from trainkit.trainer.data.source import Batch, bounds_of_micro
from trainkit.trainer.distributed import sum_over_ranks
from trainkit.trainer.metrics.mfu import tokens_in
from trainkit.trainer.metrics.writers import Metrics
from trainkit.trainer.optim import casts_kept
from trainkit.trainer.randomness import derived_seed
from trainkit.trainer.setup import Parts

# In the order in which they are obeyed when several arrived.
STOPPING = (signal.SIGTERM, signal.SIGINT)
SAVING = signal.SIGUSR1
WATCHED = (*STOPPING, SAVING)


class Requests:
    """Signals seen by this process. Handlers only take note; a repeated signal is the same request."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def listen(self, *numbers: signal.Signals) -> None:
        """Take over these signals. Until then they end the process at once, as they always do."""
        for number in numbers:
            signal.signal(number, lambda seen, frame: self._seen.add(seen))

    def votes(self) -> list[int]:
        """1 for each watched signal that this rank has seen. Travels with the token counts, in one collective."""
        return [int(number in self._seen) for number in WATCHED]

    def settle(self, votes: Sequence[int] | None = None) -> tuple[signal.Signals | None, bool]:
        """What to do after a step: the signal to stop for, and whether to save.

        votes: those of all ranks, summed; None for what this one has seen by now.
        """
        asked = [number for number, count in zip(WATCHED, votes or self.votes(), strict=True) if count]
        if SAVING in asked:
            # The request is granted, and the next one counts again.
            self._seen.discard(SAVING)
        return next((number for number in STOPPING if number in asked), None), SAVING in asked


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


def train(parts: Parts, first: int, metrics: Metrics, requests: Requests) -> Progress:
    """Run the optimizer steps from `first`, counted from 0, until the last one, a signal, or the end of patience."""
    progress = Progress(first, parts.steps, parts.device)
    if parts.settings.recipe.efficiency.compile.enabled:
        progress.compiling.listen()
    with parts.checkpoints.outlasting_failure():
        take_steps(parts, progress, metrics, requests)
        progress.finish()
        tell_idle(parts, progress)
        parts.heartbeat.set_phase(CHECKPOINT)  # one may still be written in the background
        parts.profiler.finish()
        if parts.steps == 0:  # a run that only evaluates
            evaluate(parts, progress, metrics)
        parts.checkpoints.wait()
    return progress


def take_steps(parts: Parts, progress: Progress, metrics: Metrics, requests: Requests) -> None:
    """The optimizer steps of a run, with what is due after each."""
    parts.profiler.begin()
    parts.heartbeat.begin_step(progress.first)
    with collected_between_steps() as collect:
        # The order of samples is a function of the step; a bookmark only spares a stream the reading up to there.
        for batch in timed(batches(parts, progress.first), progress.waiting):
            parts.heartbeat.set_phase(EXCHANGE)
            # One collective, on the host: the tokens of the global batch, and the signals that any rank has seen.
            counted, idle, *votes = sum_over_ranks([batch.counted, batch.idle, *requests.votes()], parts.world)
            made = optimizer_step(parts, progress.step, batch, counted)
            progress.advance(counted, tokens_in(batch) * parts.world.size, batch.bookmark)
            note_idle(parts, progress, idle)
            parts.heartbeat.step_done(progress.step)
            parts.profiler.step_done()
            collect(progress.step)
            # Several ranks obey only what all of them know of; one rank need not wait for the next step's votes.
            known = votes if parts.world.size > 1 else None
            if follow_up(parts, progress, made, metrics, partial(requests.settle, known)):
                break
            parts.heartbeat.begin_step(progress.step)


def follow_up(
    parts: Parts,
    progress: Progress,
    made: tuple[Tensor, Tensor | float],
    metrics: Metrics,
    settle: Callable[[], tuple[Signals | None, bool]],
) -> bool:
    """What is due after a step: a line, an evaluation, a checkpoint. made: its loss and norm. Whether the run ends."""
    recipe, (loss, norm) = parts.settings.recipe, made
    if progress.step == progress.first + 1 or progress.is_due(recipe.logging.every_steps):
        report_step(parts, progress, loss, norm, metrics)
    if progress.is_due(recipe.eval.every_steps):
        evaluate(parts, progress, metrics)
        # No collective is needed: all ranks have the same evaluation loss.
        progress.stopped_early = 0 < recipe.eval.patience <= parts.best.since
    progress.stopped_by, save = settle()
    stopped = progress.stopped_by is not None
    ends = saves_at_end(recipe, stopped=stopped, early=progress.stopped_early)
    # What goes to the Hub at the end is a checkpoint.
    ends = ends or (recipe.checkpoint.push_to_hub.repo is not None and progress.step == progress.steps)
    best = progress.lowest and recipe.checkpoint.keep_best
    if save or best or ends or progress.is_due(recipe.checkpoint.every_steps):
        save_checkpoint(parts, progress, loss, norm)
    return stopped or progress.stopped_early


def saves_at_end(recipe: Recipe, *, stopped: bool, early: bool) -> bool:
    """Whether a run saves where it ends before its last step; a job that is queued again goes on from there."""
    checkpoint = recipe.checkpoint
    if early and checkpoint.push_to_hub.repo is not None:
        return True
    return (stopped and recipe.cluster.kind != "none") or ((stopped or early) and checkpoint.every_steps > 0)


def batches(parts: Parts, first: int) -> Iterator[Batch]:
    """This rank's share of every global batch from step `first` on."""
    settings = parts.settings
    return training_batches(
        parts.source.train,
        parts.order,
        settings.batch,
        parts.world.rank,
        steps=range(first, parts.steps),
        data=settings.recipe.data,
        pin=parts.device.type == "cuda",
    )


def optimizer_step(parts: Parts, step: int, batch: Batch, counted: int) -> tuple[Tensor, Tensor | float]:
    """All micro steps and the update; this rank's summed loss and the norm. counted: targets of the global batch."""
    strategy = parts.strategy
    # Gradients are shares of the global batch's mean. DDP, FSDP and ZeRO average over the ranks what they reduce, which
    # is undone here, so that the update is the mean over the tokens of the global batch.
    share = parts.world.size / max(1, counted)
    total = torch.zeros((), device=parts.device)
    micro_batches, bounds = split_micro(batch, parts), bounds_of_micro(batch, parts.settings.batch.micro)
    with casts_kept():
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
    parts.heartbeat.set_phase(OPTIMIZER)
    with parts.memory.update(strategy):
        # Both are left on the device: reading them would wait for it.
        return total, strategy.update(parts.learning_rate(step))


def split_micro(batch: Batch, parts: Parts) -> list[dict[str, Tensor]]:
    """The micro batches of a rank's share, on its device."""
    inputs = parts.transfer(batch.inputs)
    split = [torch.split(values, parts.settings.batch.micro) for values in inputs.values()]
    return [dict(zip(inputs, values, strict=True)) for values in zip(*split, strict=True)]


def seed_dropout(parts: Parts, step: int, index: int) -> None:
    """Give the samples of a micro step their dropout masks; without dropout there is nothing to draw."""
    if parts.model.stochastic:
        batch = parts.settings.batch
        # The position in the global batch, not the rank: the same samples get the same masks on any number of ranks.
        position = (parts.world.rank * batch.accumulation + index) * batch.micro
        torch.manual_seed(derived_seed(parts.settings.recipe.train.seed, "dropout", step, position))
