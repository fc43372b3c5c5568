"""The decisions of a plan, in order: topology, launcher, soundness, number format, batch, resuming."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from trainkit.errors import Diagnostic, RecipeError
from trainkit.frameworks.registry import PROGRAMS
from trainkit.machine.facts import Facts
from trainkit.plan.context import Context
from trainkit.plan.model import Choice, Notice, Topology
from trainkit.plan.support import unreached
from trainkit.planner.batch import solve_batch
from trainkit.planner.dtype import choose_dtype
from trainkit.planner.env import check_environment, overwritten
from trainkit.planner.fingerprint import training_digest
from trainkit.planner.placement import Placement, kind_of_cards, name_cards, place
from trainkit.planner.resume import Reader, SavedCheckpoint, choose_resume
from trainkit.planner.rules.compatibility import Amount, Combination, refusals
from trainkit.recipe.schema import Recipe
from trainkit.text import counted

if TYPE_CHECKING:
    from trainkit.recipe.resolved import Resolved

T = TypeVar("T")


def decide(
    resolved: Resolved, facts: Facts, saved: Sequence[SavedCheckpoint]
) -> tuple[Context, Choice, Choice, tuple[Notice, ...]]:
    """Every decision, the launcher and the device with their reasons, and what the decisions have to say.

    Raises RecipeError with all that can be known at once.
    """
    recipe = resolved.recipe
    program = PROGRAMS[recipe.program.kind]
    problems = [*program.check(resolved), *unreached(resolved, program.REACH, recipe.program.kind)]
    problems += check_environment(resolved)
    placement = _attempt(problems, lambda: place(resolved, facts))
    if placement is None:
        raise RecipeError(problems)
    launcher = choose_launcher(resolved, placement.topology)
    base = None if resolved.given("precision.dtype") else resolved.attachments.get("strategy.config")
    dtype = choose_dtype(recipe, placement.topology.device, placement.cards, base.tree if base else None)
    problems += unsound(resolved, placement, launcher.kind, dtype)
    batch = _attempt(problems, lambda: solve_batch(resolved, placement.topology.world_size))
    if problems or batch is None:
        raise RecipeError(problems)
    topology = name_cards(placement, launcher.kind, recipe.strategy.kind)
    digest = training_digest(recipe, batch, dtype)
    reader = Reader(digest, recipe.strategy.kind, topology.world_size, recipe.program.kind)
    resume, remarks = choose_resume(resolved, reader, saved)
    context = Context(resolved, facts, topology, launcher.kind, placement.cards, batch, dtype, digest, resume)
    if found := program.problems(context) or tuple(overwritten(context)):
        raise RecipeError(found)
    device = Choice(topology.device, placement.device_reason)
    return context, launcher, device, placement.notices + remarks


def choose_launcher(resolved: Resolved, topology: Topology) -> Choice:
    """The launcher that was asked for, else the program's own, `python` for one process and `torchrun` for several."""
    wanted = resolved.recipe.launcher.kind
    if wanted != "auto":
        return Choice(wanted, "launcher.kind asks for it")
    if resolved.recipe.program.kind == "accelerate" and topology.device != "xla":
        return Choice("accelerate", "scripts on Accelerator() are made for it")
    if topology.world_size == 1:
        return Choice("python", "one process needs no launcher")
    return Choice("torchrun", f"{topology.world_size} processes")


def unsound(resolved: Resolved, placement: Placement, launcher: str, dtype: str) -> list[Diagnostic]:
    """What the table of combinations says against this one."""
    recipe, topology = resolved.recipe, placement.topology
    indices = [gpu.index for gpu in placement.cards]
    combination = Combination(
        strategy=recipe.strategy.kind,
        launcher=launcher,
        program=recipe.program.kind,
        device=topology.device,
        ranks=_amount(topology.world_size),
        nodes=_amount(topology.nodes),
        dtype=dtype,
        eval_dtype="same" if recipe.precision.eval in ("same", dtype) else "other",
        recompute="selective" if recipe.efficiency.gradient_checkpointing.selective else "whole",
        restarts="yes" if recipe.launcher.max_restarts else "no",
        order="ascending" if indices == sorted(indices) else "other",
        cards=kind_of_cards(placement.cards),
        saving="asynchronous" if recipe.checkpoint.asynchronous else "waited for",
        optimizer=recipe.optimizer.name,
        weights=recipe.precision.weights,
        compiled=recipe.efficiency.compile.scope if recipe.efficiency.compile.enabled else "no",
        adapters="dora" if recipe.peft.dora else recipe.peft.kind,
        swapping="nvme" if getattr(recipe.strategy, "nvme_path", None) else "no",
        attention=recipe.efficiency.attention,
        model=recipe.model.kind,
        micro="searched" if _searches(recipe) else "given",
        local_rank="passed" if recipe.program.local_rank else "in the environment",
        xla_settings="given" if getattr(recipe.strategy, "xla_settings", None) else "none",
    )
    ranks = counted(topology.world_size, "process", "es")
    what = f"strategy {combination.strategy} with launcher {launcher}, {ranks} on {topology.device}, {dtype}"
    return [
        Diagnostic(
            "error",
            f"this combination is not sound: {what}",
            key=refusal.key,
            origin=resolved.origin(refusal.key),
            why=f"{refusal.reason[0].upper()}{refusal.reason[1:]}.",
            hint=f"Nearest sound choice: {refusal.instead}.",
        )
        for refusal in refusals(combination)
    ]


def _searches(recipe: Recipe) -> bool:
    """Whether the micro batch is left to the trainer; with `accumulation` given it follows from the triangle."""
    return recipe.batch.micro == "auto" and recipe.batch.accumulation == "auto"


def _amount(number: int) -> Amount:
    return "one" if number == 1 else "several"


def _attempt(problems: list[Diagnostic], step: Callable[[], T]) -> T | None:
    """The step's result; None, and its diagnostics among the problems, where it fails."""
    try:
        return step()
    except RecipeError as error:
        problems += error.diagnostics
        return None
