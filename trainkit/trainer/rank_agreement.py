"""What the ranks must have in common before the first step: on several nodes recipes, data and folders may differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainkit.errors import TrainingError
from trainkit.text import counted, listed
from trainkit.trainer.data.source import Source
from trainkit.trainer.distributed import gather_from_ranks
from trainkit.trainer.models.adapters import fingerprint
from trainkit.trainer.settings import Settings, World

Terms = Mapping[str, object]


def check_world(settings: Settings, world: World) -> None:
    """TrainingError unless as many ranks run as were planned: the batch would be another one, unseen."""
    if settings.batch.ranks != world.size:
        raise TrainingError(
            f"the plan is for {counted(settings.batch.ranks, 'rank')}, and the launcher started {world.size}",
            hint="plan again, with nodes.count and nodes.processes_per_node as they are to be",
        )


def agree(settings: Settings, source: Source, steps: int, world: World) -> None:
    """TrainingError, the same on every rank, that names what differs from rank 0 and on which ranks."""
    given: list[Terms] = gather_from_ranks(terms(settings, source, steps), world)
    differences = []
    for name, first in given[0].items():
        if others := [rank for rank, each in enumerate(given) if each[name] != first]:
            differences.append(f"{name} is {first} on rank 0, {given[others[0]][name]} on {_named(others)}")
    if differences:
        raise TrainingError(
            f"the ranks were not given the same run: {'; '.join(differences)}",
            hint="start every node from the same recipe, data and trainkit",
        )


def terms(settings: Settings, source: Source, steps: int) -> Terms:
    """All that decides what is trained, and when the ranks wait for each other: they would hang, or mix two runs up."""
    recipe, batch = settings.recipe, settings.batch
    return {
        "training settings": settings.training_digest[:12],
        "device": settings.device,
        "strategy": _words(recipe.strategy),
        "batch": f"{batch.global_} = {batch.micro} x {batch.accumulation} x {batch.ranks}",
        "total steps": steps,
        "data": f"{source.description}, {len(source.train)} samples, {dict(source.facts)}",
        "evaluation": f"{_words(recipe.eval)} eval_micro={batch.eval_micro} {settings.eval_dtype}",
        "logging.every_steps": recipe.logging.every_steps,
        "checkpoint": _words(recipe.checkpoint, "every_steps", "keep_best", "asynchronous"),
        "checkpoint.push_to_hub": _words(recipe.checkpoint.push_to_hub),
        "checkpoint to resume": str(settings.resume),
        "predict": _words(recipe.predict),
        "sample": _words(recipe.sample),
        "adapters in peft.path": fingerprint(recipe.peft)[:32],
    }


def checkpoint_folder(settings: Settings, world: World) -> Path | None:
    """Where every rank of the run saves: the run directory of rank 0. None where not every rank can see that."""
    folder: Path = gather_from_ranks(settings.run_dir, world)[0]
    seen = gather_from_ranks(folder.is_dir(), world)
    if all(seen):
        return folder / "checkpoints"
    # Without checkpoints to write, a run needs no shared folder.
    if settings.recipe.checkpoint.every_steps or settings.recipe.checkpoint.push_to_hub.repo is not None:
        blind = [rank for rank, sees in enumerate(seen) if not sees]
        raise TrainingError(
            f"checkpoints go to the run directory of rank 0, {folder}, and {_named(blind)} cannot see it",
            hint="set output.root to a folder that all nodes share, or checkpoint.every_steps to 0 without push_to_hub",
        )
    return None


def _named(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 2, 3 and 12 more``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed([str(rank) for rank in ranks])}"


def _words(section: Any, *names: str) -> str:
    """A section of the recipe, or these settings of it, in one line."""
    values = section.model_dump(mode="json").items()
    return " ".join(f"{name}={value}" for name, value in values if not names or name in names)
