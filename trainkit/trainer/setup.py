"""Put the parts of a run together, in the order that keeps it reproducible."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainkit.trainer.auto_batch.search import Found, settle_micro_batch
from trainkit.trainer.checkpoint.background import Background
from trainkit.trainer.data.sampler import Order
from trainkit.trainer.data.source import Source
from trainkit.trainer.data import SOURCES
from trainkit.trainer.metrics.evaluation import Best, Evaluation
from trainkit.trainer.metrics.flops import Work, work_of
from trainkit.trainer.metrics.memory import Anatomy
from trainkit.trainer.models import Model, count_parameters
from trainkit.trainer.models.prepared import check_vocabulary, fitting_source, prepared_model
from trainkit.trainer.optim.precision import autocast, check_precision, set_tf32
from trainkit.trainer.optim.schedules import learning_rate
from trainkit.trainer.outset import Outset
from trainkit.trainer.parallel import STRATEGIES, Strategy
from trainkit.trainer.perf.profiling import Profiler
from trainkit.trainer.randomness import be_deterministic, seed_generators
from trainkit.trainer.rank_agreement import agree, checkpoint_folder
from trainkit.trainer.settings import Settings, World

__all__ = ["Parts", "assemble", "check_vocabulary", "describe", "prepared_model", "start_record", "total_steps"]


@dataclass(frozen=True, slots=True)
class Parts:
    """All that the loop works with."""

    settings: Settings
    world: World
    device: torch.device
    source: Source
    order: Order
    steps: int
    parameters: int  # that train
    frozen_parameters: int
    stochastic: bool  # whether the model draws random numbers in training
    active_parameters: int  # of those, what one token goes through
    model: Model  # as the strategy has it inside its wrapping
    strategy: Strategy
    learning_rate: Callable[[int], float]
    autocast: AbstractContextManager[object]
    evaluation: Evaluation
    eval_autocast: AbstractContextManager[object]
    best: Best
    background: Background | None  # None where training waits for its checkpoints
    anatomy: Anatomy
    checkpoints: Path | None  # one folder for all ranks; None where not all of them can see it
    work: Work
    profiler: Profiler
    found: Found | None  # the micro batch, where the recipe left it open


def assemble(settings: Settings, world: World, device: torch.device) -> Parts:
    """Build every part. TrainingError when the recipe asks for what cannot be, or the ranks do not agree on it."""
    recipe, kind = settings.recipe, settings.recipe.strategy.kind
    check_precision(settings)
    set_tf32(recipe.precision.tf32)
    if recipe.train.deterministic:
        be_deterministic()
    source = SOURCES[recipe.data.kind](recipe, settings.run_dir)
    order = Order(recipe.train.seed, len(source.train), settings.batch.global_)
    steps = total_steps(settings, order)
    agree(settings, source, steps, world)  # before the strategy: a rank with another model would hang the others in it
    # Before the first draw: what is tried leaves no trace in the training.
    settings, found = settle_micro_batch(Outset(settings, source, order, world, device))
    # Weights are drawn on the CPU from the seed alone, before anything knows of ranks: all start from the same.
    seed_generators(recipe.train.seed)
    model = prepared_model(settings)
    source = fitting_source(source, model, recipe)
    parameters, work = count_parameters(model), work_of(model, settings, device)
    return Parts(
        settings=settings,
        world=world,
        device=device,
        source=source,
        order=order,
        steps=steps,
        parameters=parameters,
        frozen_parameters=sum(each.numel() for each in model.parameters()) - parameters,
        stochastic=model.stochastic,
        active_parameters=parameters - model.idle_parameters(),
        model=model,
        strategy=STRATEGIES[kind](model, settings, world, device),
        learning_rate=learning_rate(recipe.optimizer, recipe.schedule, steps),
        autocast=autocast(settings, settings.dtype, device),
        evaluation=_evaluation(settings, source, world, device),
        eval_autocast=autocast(settings, settings.eval_dtype, device),
        best=Best(),
        background=Background(world) if recipe.checkpoint.asynchronous else None,
        anatomy=Anatomy(compiled=recipe.efficiency.compile.enabled),
        checkpoints=checkpoint_folder(settings, world),
        work=work,
        profiler=Profiler(recipe.profile, settings.run_dir, device, main=world.rank == 0),
        found=found,
    )


def total_steps(settings: Settings, order: Order) -> int:
    """Optimizer steps of the whole run: as asked, or as many as the epochs take."""
    train = settings.recipe.train
    if train.steps is not None:
        return train.steps
    return max(1, math.ceil((train.epochs or 1.0) * order.samples / order.global_batch))


def _evaluation(settings: Settings, source: Source, world: World, device: torch.device) -> Evaluation:
    recipe = settings.recipe
    return Evaluation.of(
        source.validation,
        seed=recipe.train.seed,
        batches=recipe.eval.batches,
        micro=settings.batch.eval_micro,
        world=world,
        device=device,
    )


def describe(parts: Parts) -> str:
    """One line on what is about to run."""
    settings, world = parts.settings, parts.world
    ranks = "1 rank" if world.size == 1 else f"{world.size} ranks"
    parameters = f"{parts.parameters:,} parameters"
    if parts.frozen_parameters:
        total = parts.parameters + parts.frozen_parameters
        parameters = f"{parts.parameters:,} of {total:,} parameters training ({parts.parameters / total:.2%})"
    elif parts.active_parameters < parts.parameters:
        parameters += f" ({parts.active_parameters:,} active)"
    model = f"{settings.recipe.model.kind} with {parameters} and {parts.model.attention} attention"
    return (
        f"{model} on {parts.source.description}, "
        f"{settings.recipe.strategy.kind} on {ranks} ({parts.device.type}, {settings.dtype}), {parts.steps} steps of "
        f"{settings.batch.global_} samples"
    )


def start_record(parts: Parts, first: int) -> dict[str, Any]:
    """The first line of the metrics: what readers need to make sense of the rest."""
    batch = parts.settings.batch
    return {
        "event": "start",
        "steps": parts.steps,
        "first_step": first,
        "world_size": parts.world.size,
        "samples_per_step": batch.global_,
        "micro_batch": batch.micro,
        "accumulation": batch.accumulation,
        "micro_search": parts.found.record() if parts.found else None,
        "tokens_per_step": batch.global_ * parts.settings.recipe.data.sequence_length,
        "parameters": parts.parameters,
        "active_parameters": parts.active_parameters,
        "frozen_parameters": parts.frozen_parameters,
        "attention": parts.model.attention,
        "flops_per_token": parts.work.flops_per_token,
        "peak_flops_per_second": parts.work.peak,
    }
