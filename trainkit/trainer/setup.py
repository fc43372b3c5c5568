"""Build the parts of a run on each rank from its settings, and check that they agree on all ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainkit.errors import TrainingError
from trainkit.heartbeat import DATA, FORWARD, Heartbeat
from trainkit.recipe.schema import Fsdp, HfModel, Recipe
from trainkit.recipe.schema.model import quantized_bits
from trainkit.tasks import task_of
from trainkit.text import join_names, pluralize
from trainkit.trainer.auto_batch import FoundMicroBatch, ModelCopy, find_micro_batch
from trainkit.trainer.checkpoint.manifest import Identity, as_decided, read_manifest
from trainkit.trainer.checkpoint.saving import Checkpoints
from trainkit.trainer.data import SOURCES
from trainkit.trainer.data.loader import Transfer
from trainkit.trainer.data.sampler import SampleOrder, positions_of_rank
from trainkit.trainer.data.source import Lengths, Source, is_writing, tokens_of_sample, widened
from trainkit.trainer.data.vocabulary import fitting_source
from trainkit.trainer.distributed import gather_from_ranks
from trainkit.trainer.metrics.evaluation import Best, Evaluation
from trainkit.trainer.metrics.memory_breakdown import MemoryBreakdown
from trainkit.trainer.metrics.scores import usable_metrics
from trainkit.trainer.metrics.speed import TrainingFlops, training_flops
from trainkit.trainer.models import MODELS
from trainkit.trainer.models.adapters import (
    add_adapters,
    base_fingerprint,
    draw_adapters,
    fingerprint,
    load_adapters,
)
from trainkit.trainer.models.base import Model, Parameters
from trainkit.trainer.models.quantized import compute_in, quantize_without_weights
from trainkit.trainer.models.target import loss_function
from trainkit.trainer.models.weights import Slices, make_whole
from trainkit.trainer.optim import DTYPES, autocast, learning_rate, set_tf32
from trainkit.trainer.parallel import STRATEGIES, Strategy
from trainkit.trainer.parallel.grid import arranged
from trainkit.trainer.perf.efficiency import checkpoint_blocks, compile_model
from trainkit.trainer.perf.offloading import offload_blocks
from trainkit.trainer.perf.profiling import Profiler
from trainkit.trainer.randomness import be_deterministic, seed_generators
from trainkit.trainer.settings import Settings, World


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything that the loop works with, and facts about the run for reports."""

    settings: Settings
    world: World
    device: torch.device
    source: Source
    order: SampleOrder
    steps: int
    model: Model  # as the strategy has it inside its wrapping
    strategy: Strategy
    learning_rate: Callable[[int], float]
    autocast: AbstractContextManager[object]
    evaluation: Evaluation
    eval_autocast: AbstractContextManager[object]
    best: Best
    checkpoints: Checkpoints
    parameters: Parameters
    work: TrainingFlops
    memory: MemoryBreakdown
    profiler: Profiler
    found: FoundMicroBatch | None  # the micro batch, where the recipe left it open
    transfer: Transfer
    heartbeat: Heartbeat  # where this rank says how far it is


def assemble(settings: Settings, world: World, device: torch.device, heartbeat: Heartbeat | None = None) -> Parts:
    """Build every part. TrainingError if that is impossible, or if the ranks do not agree."""
    recipe, kind = settings.recipe, settings.recipe.strategy.kind
    world = arranged(world, recipe, device)
    set_tf32(recipe.precision.tf32)
    if recipe.train.deterministic:
        be_deterministic()
    left = recipe.data.sequence_length == "auto" or task_of(recipe) == "sequence_classification"
    if settings.resume is not None and left:  # as it was before, though the data may have grown
        recipe = as_decided(recipe, read_manifest(settings.resume))
    source = SOURCES[recipe.data.kind](recipe, settings.run_dir)
    recipe = decided(recipe, source)
    settings = replace(settings, recipe=recipe)
    samples = None if source.stream else len(source.train)
    order = SampleOrder(recipe.train.seed, samples, settings.batch.global_, drawn=source.draws)
    steps = number_of_steps(recipe, order)
    settings = replace(settings, recipe=counted(recipe, steps))
    require_agreement(
        settings, source, steps, world
    )  # before the strategy: a rank with another model would hang the others in it
    # Before the first draw: what is tried leaves no trace in the training.
    make_copy = partial(first_step, settings, source, order, world, device)
    settings, found = find_micro_batch(settings, world, device, make_copy)
    model, source = seeded_model(settings, source, world)
    # Parameters and FLOPs are counted before the strategy shards the model.
    parameters, work = Parameters.of(model), training_flops(model, settings, device)
    strategy = STRATEGIES[kind].build(model, settings, world, device)
    evaluation = Evaluation(settings, source.validation, world, device, model=model, encoder=source.encoder)
    known = {"content": source.facts.get("content"), "sequence_length": recipe.data.sequence_length,
             "target_length": getattr(recipe.data, "target_length", None),
             "labels": source.labels.names if source.labels else (),
             "num_labels": model.labels, "chats": source.facts.get("chats")}  # fmt: skip
    data = {name: value for name, value in known.items() if value not in (None, ())}
    identity = Identity(kind, world.size, settings.training_digest, source.encoder.fingerprint, model.base, data)
    heartbeat = heartbeat or Heartbeat()
    if STRATEGIES[kind].hooks:  # the forward pass gathers weights from other ranks, and is no time of this rank's own
        heartbeat.own(DATA, computes=FORWARD)
    return Parts(
        settings=settings,
        world=world,
        device=device,
        source=source,
        order=order,
        steps=steps,
        model=model,
        strategy=strategy,
        learning_rate=learning_rate(recipe.optimizer, recipe.schedule, steps),
        autocast=autocast(settings, settings.dtype, device),
        evaluation=evaluation,
        eval_autocast=autocast(settings, settings.eval_dtype, device),
        best=evaluation.best(),
        checkpoints=Checkpoints(settings, checkpoint_folder(settings, world), identity, world),
        parameters=parameters,
        work=work,
        memory=MemoryBreakdown(recipe),
        profiler=Profiler(recipe.profile, settings.run_dir, device, main=world.rank == 0),
        found=found,
        transfer=Transfer(device),
        heartbeat=heartbeat,
    )


def decided(recipe: Recipe, source: Source) -> Recipe:
    """The recipe with what it leaves to the data: lengths, and the number of labels of a new classifier's head."""
    data, model = recipe.data, recipe.model
    if source.lengths is not None:
        length, target = source.lengths
        changed = {"sequence_length": length} | ({"target_length": target} if hasattr(data, "target_length") else {})
        data = data.model_copy(update=changed)
    if source.labels is not None and isinstance(model, HfModel) and "num_labels" not in model.config:
        from trainkit.trainer.models.hf import has_head

        count = max(2, source.labels.highest + 1, len(source.labels.names))
        if not has_head(model):
            model = model.model_copy(update={"config": {**model.config, "num_labels": count}})
    return recipe.model_copy(update={"data": data, "model": model})


def number_of_steps(recipe: Recipe, order: SampleOrder) -> int:
    """Optimizer steps of the whole run. TrainingError for epochs of a stream."""
    if recipe.train.steps is not None:
        return recipe.train.steps
    if order.samples is None:
        raise TrainingError("train.steps is not set, and the length of streamed data is not known")
    epochs = (recipe.train.epochs or 1.0) * order.samples / order.global_batch  # in steps
    return max(1, math.ceil(epochs))


def counted(recipe: Recipe, steps: int) -> Recipe:
    """The recipe with numbers of steps in place of shares of all steps."""
    sections = {
        name: section.model_copy(update={"every_steps": max(1, math.ceil(round(section.every_steps * steps, 6)))})
        for name, section in (("eval", recipe.eval), ("checkpoint", recipe.checkpoint))
        if 0 < section.every_steps < 1
    }
    return recipe.model_copy(update=sections)


def require_agreement(settings: Settings, source: Source, steps: int, world: World) -> None:
    """TrainingError, the same on every rank, that names what differs from rank 0 and on which ranks."""
    given: list[Mapping[str, object]] = gather_from_ranks(agreed_values(settings, source, steps), world)
    differences = []
    for name, first in given[0].items():
        if others := [rank for rank, each in enumerate(given) if each[name] != first]:
            differences.append(f"{name} is {first} on rank 0, {given[others[0]][name]} on {_ranks(others)}")
    if differences:
        raise TrainingError(
            f"the ranks were not given the same run: {'; '.join(differences)}",
            hint="start every node from the same recipe, data and trainkit",
        )


def agreed_values(settings: Settings, source: Source, steps: int) -> Mapping[str, object]:
    """Everything that decides what is trained, and when ranks wait for each other: they must agree on it."""
    recipe, batch = settings.recipe, settings.batch

    def line(section: Any, *names: str) -> str:
        """A section of the recipe, or these settings of it."""
        values = section.model_dump(mode="json").items()
        return " ".join(f"{name}={value}" for name, value in values if not names or name in names)

    return {
        "training settings": settings.training_digest[:12],
        "device": settings.device,
        "strategy": line(recipe.strategy),
        "batch": f"{batch.global_} = {batch.micro} x {batch.accumulation} x {batch.ranks}",
        "total steps": steps,
        "data": f"{source.description}, {len(source.train)} samples, {dict(source.facts)}",
        "evaluation": f"{line(recipe.eval)} eval_micro={batch.eval_micro} {settings.eval_dtype}",
        "metrics that are installed": ", ".join(usable_metrics(recipe)),
        "logging.every_steps": recipe.logging.every_steps,
        "checkpoint": line(recipe.checkpoint, "at_end", "every_steps", "keep_best", "asynchronous", "copy_to"),
        "checkpoint.push_to_hub": line(recipe.checkpoint.push_to_hub),
        "checkpoint to resume": str(settings.resume),
        "predict": line(recipe.predict),
        "sample": line(recipe.sample),
        "adapters in peft.path": fingerprint(recipe.peft)[:32],
    }


def checkpoint_folder(settings: Settings, world: World) -> Path | None:
    """Where every rank saves: the run directory of rank 0. None if not every rank can see it."""
    folder: Path = gather_from_ranks(settings.run_dir, world)[0]
    seen = gather_from_ranks(folder.is_dir(), world)
    if all(seen):
        return folder / "checkpoints"
    # Without checkpoints to write, a run needs no shared folder.
    asked = settings.recipe.checkpoint
    if asked.at_end or asked.every_steps or asked.push_to_hub.repo is not None or asked.copy_to is not None:
        blind = _ranks([rank for rank, sees in enumerate(seen) if not sees])
        raise TrainingError(
            f"checkpoints go to the run directory of rank 0, {folder}, and {blind} cannot see it",
            hint="set output.root to a folder that all nodes share, or checkpoint.at_end to false to save nothing",
        )
    return None


def _ranks(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 2, 3 and 12 more``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {join_names([str(rank) for rank in ranks])}"


def first_step(settings: Settings, source: Source, order: SampleOrder, world: World, device: torch.device) -> ModelCopy:
    """A copy of the run's model under its strategy, and this rank's share of the first step, at its longest."""
    model, source = seeded_model(settings, source, world)
    mine = positions_of_rank(settings.batch, world.data.rank)
    batch, data = source.train[order.indices(0, mine.start, mine.stop)], settings.recipe.data
    if is_writing(settings.recipe) and getattr(data, "padding", "") == "longest":
        batch = widened(batch, Lengths.of(data), source.encoder.padding)
    return ModelCopy(model, STRATEGIES[settings.recipe.strategy.kind].build(model, settings, world, device), batch)


def seeded_model(settings: Settings, source: Source, world: World) -> tuple[Model, Source]:
    """The model, and the source as it takes it."""
    mesh = None
    if STRATEGIES[settings.recipe.strategy.kind].divides and settings.recipe.model.kind != "target":
        mesh = init_device_mesh("cpu", (world.size,))
    model = prepared_model(settings, mesh)
    return model, fitting_source(source, model, settings.recipe)


def prepared_model(settings: Settings, mesh: DeviceMesh | None = None) -> Model:
    """The model of a run; see :func:`made_model`."""
    return made_model(settings.recipe, settings.dtype, settings.device, mesh)


def made_model(recipe: Recipe, dtype: str, device: str, mesh: DeviceMesh | None = None) -> Model:
    """The model of the recipe with the techniques that work on it, with the weights of its seed.

    dtype: of the computation. device: where it is; `meta` for a model without weights. mesh: the ranks that its weights
    are divided over, which are then in `slices` for the strategy to place.
    """
    bits, seed = quantized_bits(recipe), recipe.train.seed
    # Before anything knows of ranks; what is drawn by name needs none of it.
    seed_generators(seed)
    model = MODELS[recipe.model.kind](recipe, device=device, mesh=mesh)
    if mesh is not None:
        if recipe.peft.kind == "lora":
            make_whole(model, model.head())  # it is small, and trained beside the adapters
        model.slices = Slices(model)
    if bits and (device == "meta" or mesh is not None):
        quantize_without_weights(model, cast("HfModel", recipe.model))
    model.loss_function, model.custom_loss = loss_function(recipe), recipe.train.loss is not None
    require_blocks(model, recipe)
    if recipe.peft.kind == "lora":
        if device != "meta":
            model.base = base_fingerprint(model)
        add_adapters(model, recipe.peft)
        if device != "meta":
            draw_adapters(model, seed, device)
            if recipe.peft.path is not None:
                load_adapters(model, Path(recipe.peft.path))
    if bits:
        compute_in(model, DTYPES[dtype])
    model.join_loss()
    # In this order: adapters add modules to the blocks, checkpointing replaces the blocks' forward, and torch.compile
    # traces what is there by then.
    if recipe.efficiency.gradient_checkpointing.every:
        checkpoint_blocks(
            model.blocks,
            recipe.efficiency.gradient_checkpointing,
            dropout=model.stochastic,
            compiled=recipe.efficiency.compile.enabled,
            watched=not recipe.efficiency.compile.enabled and device != "meta",
        )
    if recipe.efficiency.offload_activations and device != "meta":
        offload_blocks(model.blocks)
    if recipe.efficiency.compile.enabled:
        compile_model(model, recipe.efficiency.compile, recipe.strategy.kind)
    seed_generators(seed)  # for what follows, however much was drawn
    return model


def require_blocks(model: Model, recipe: Recipe) -> None:
    """TrainingError where a technique works block by block and the model has no list of like modules."""
    if any(True for _ in model.blocks):
        return
    strategy, compiling = recipe.strategy, recipe.efficiency.compile
    by_block = {
        "efficiency.offload_activations": recipe.efficiency.offload_activations,
        "efficiency.gradient_checkpointing": bool(recipe.efficiency.gradient_checkpointing.every),
        "efficiency.compile.scope: blocks": compiling.enabled and compiling.scope == "blocks",
        "strategy.auto_wrap: transformer": isinstance(strategy, Fsdp)
        and strategy.auto_wrap == "transformer"
        and not strategy.wrap_classes,
        "peft": recipe.peft.kind != "none" and not recipe.peft.target_modules,
    }
    for key in [key for key, asked in by_block.items() if asked]:
        what = f"{key} works on the blocks of a model, and this one holds no list of modules (torch.nn.ModuleList)"
        raise TrainingError(what, hint="put its repeated layers in one, or leave the setting out")


def describe(parts: Parts) -> str:
    """One line on what is about to run."""
    settings, count = parts.settings, parts.parameters
    parameters = f"{count.training:,} parameters"
    if count.frozen:
        total = count.training + count.frozen
        parameters = f"{count.training:,} of {total:,} parameters training ({count.training / total:.2%})"
    elif count.active < count.training:
        parameters += f" ({count.active:,} active)"
    if bits := quantized_bits(settings.recipe):
        parameters += f", the blocks' in {bits} bits,"
    model = f"{settings.recipe.model.kind} with {parameters} and {parts.model.attention} attention"
    ranks = f"{pluralize(parts.world.size, 'rank')} ({parts.device.type}, {settings.dtype})"
    return (
        f"{model} on {parts.source.description}, {settings.recipe.strategy.kind} on {ranks}, {parts.steps} steps of "
        f"{settings.batch.global_} samples"
    )


def start_record(parts: Parts, first: int) -> dict[str, Any]:
    """The first line of the metrics: what readers need to make sense of the rest."""
    batch, recipe = parts.settings.batch, parts.settings.recipe
    return {
        "event": "start",
        "time": round(time.time(), 3),
        "steps": parts.steps,
        "first_step": first,
        "evaluates_every": recipe.eval.every_steps,
        "saves_every": recipe.checkpoint.every_steps,
        "world_size": parts.world.size,
        "samples_per_step": batch.global_,
        "tokens_per_step": batch.global_ * tokens_of_sample(recipe),
        "active_parameters": parts.parameters.active,
        "attention": parts.model.attention,
        **facts_of(parts),
    }


def facts_of(parts: Parts) -> dict[str, Any]:
    """What the first line of the metrics and the result share."""
    batch = parts.settings.batch
    return {
        "micro_batch": batch.micro,
        "accumulation": batch.accumulation,
        "micro_search": asdict(parts.found) if parts.found else None,
        "parameters": parts.parameters.training,
        "frozen_parameters": parts.parameters.frozen,
        "flops_per_token": parts.work.flops_per_token,
        "peak_flops_per_second": parts.work.peak,
    }
