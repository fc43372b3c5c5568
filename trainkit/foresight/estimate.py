"""An estimate: what a plan takes on each rank, and whether that fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainkit.data.formats import packing_of
from trainkit.foresight.strategies import Run
from trainkit.foresight.trace import Wanted
from trainkit.launch_plan.context import Context
from trainkit.recipe.schema import Recipe
from trainkit.tasks import CAUSAL, task_of

MIB, GIB = 2**20, 2**30
# What a process takes on a GPU before torch allocates anything: CUDA's context, kernels, libraries. It differs by card
# and driver; measured ones take its place.
CONTEXT = 520 * MIB
SOFTWARE = ("torch", "transformers", "peft", "bitsandbytes")  # whose versions a trace depends on
# Sections of a recipe that a trace depends on.
SECTIONS = ("model", "data", "precision", "efficiency", "peft", "strategy")


def wanted_of(context: Context, micro: int | None = None) -> Wanted:
    """The trace that a plan's estimate is made from. micro: another micro batch than the plan's."""
    recipe, card = settled(context), context.cards[0] if context.cards else None
    sections = recipe.model_dump(mode="json", by_alias=True)
    given = {name: sections[name] for name in SECTIONS}
    if recipe.train.loss is not None:
        given["train"] = {"loss": recipe.train.loss, "loss_reduction": recipe.train.loss_reduction}
    if given["strategy"]["kind"] in ("single", "ddp"):  # they differ in nothing that a model sees
        given["strategy"] = {"kind": "single"}
    elif given["strategy"]["kind"] in ("zero1", "zero2"):
        given["strategy"] = {"kind": "zero1"}
    elif given["strategy"]["kind"] == "zero3":
        given["strategy"] = {"kind": "zero3"}
    packed = recipe.data.kind == "dataset" and packing_of(recipe, context.model_type) == "isolated"
    padded = recipe.data.kind == "dataset" and task_of(recipe) != CAUSAL
    versions = {name: context.facts.packages[name] for name in SOFTWARE if name in context.facts.packages}
    return Wanted(
        recipe=given,
        micro=micro or context.batch.micro or 1,
        device="cuda" if context.cards else "cpu",
        dtype=context.dtype,
        capability=card.compute_capability if card else (0, 0),
        packed=packed,
        padded=padded,
        software=versions,
    )


def settled(context: Context) -> Recipe:
    """The recipe with a length of samples where it leaves that to data which nobody has prepared yet."""
    recipe, data = context.recipe, context.recipe.data
    if getattr(data, "sequence_length", None) != "auto":
        return recipe
    length = context.seen.length or LENGTH
    changed = {"sequence_length": length}
    if getattr(data, "target_length", None) == "auto":
        changed["target_length"] = length
    return recipe.model_copy(update={"data": data.model_copy(update=changed)})


LENGTH = 2048  # tokens of a sample, where the data decide it and have not been prepared


def run_of(context: Context, deepspeed: Mapping[str, Any] | None = None) -> Run:
    """What of a plan decides a rank's memory. deepspeed: the planned settings of its engine."""
    recipe, card = context.recipe, context.cards[0] if context.cards else None
    return Run(
        strategy=recipe.strategy.kind,
        ranks=context.ranks,
        local=context.processes,
        accumulation=context.batch.accumulation or 1,
        dtype=context.dtype,
        weights=recipe.precision.weights,
        device="cuda" if context.cards else "cpu",
        capability=card.compute_capability if card else (0, 0),
        optimizer=recipe.optimizer.name,
        momentum=recipe.optimizer.beta1,
        options=recipe.strategy.model_dump(mode="json"),
        deepspeed=deepspeed or {},
    )
