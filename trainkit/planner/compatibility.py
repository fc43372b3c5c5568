"""Strategy x launcher x program x device: what is refused of a combination, and the table for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

from trainkit.errors import Diagnostic
from trainkit.frameworks.registry import LAUNCHERS
from trainkit.machine.facts import Gpu
from trainkit.plan.combination import Amount, Combination, Refusal
from trainkit.plan.model import BatchArithmetic, Topology
from trainkit.planner.advice.compile_backends import records_graphs
from trainkit.planner.placement import Placement, kind_of_cards
from trainkit.planner.refusals import REFUSALS
from trainkit.recipe.resolved import Resolved
from trainkit.recipe.schema import Recipe, StrategyKind
from trainkit.recipe.schema.model import quantized_bits
from trainkit.text import counted

STRATEGIES: tuple[str, ...] = get_args(StrategyKind)
OF_BUILTIN = tuple(each for each in STRATEGIES if each != "zero0")  # the others are for programs of the user's own
DEVICES = ("cpu", "cuda", "mps")  # of the built-in trainer


def refusals(combination: Combination) -> tuple[Refusal, ...]:
    """Every refusal that a combination meets, those of its launcher included; none means that it can run."""
    rows = (*REFUSALS, *LAUNCHERS[combination.launcher].UNSUPPORTED)
    return tuple(refusal for refusal in rows if refusal.matches(combination))


def unsupported(
    resolved: Resolved, placement: Placement, launcher: str, dtype: str, batch: BatchArithmetic | None
) -> list[Diagnostic]:
    """An error for each reason why the recipe's choices cannot run together. batch: None where it has no solution."""
    topology = placement.topology
    passes: Amount = "several" if batch and (batch.accumulation or 1) > 1 else "one"
    combination = replace(_combination(resolved.recipe, topology, placement.cards, launcher, dtype), passes=passes)
    ranks = counted(topology.world_size, "process", "es")
    what = f"strategy {combination.strategy} with launcher {launcher}, {ranks} on {topology.device}, {dtype}"
    return [
        resolved.error(
            refusal.key,
            f"unsupported combination: {what}",
            f"closest supported choice: {refusal.instead}",
            why=refusal.reason,
        )
        for refusal in refusals(combination)
    ]


def _combination(recipe: Recipe, topology: Topology, cards: Sequence[Gpu], launcher: str, dtype: str) -> Combination:
    """What the table of refusals is asked about."""
    indices = [gpu.index for gpu in cards]
    return Combination(
        strategy=recipe.strategy.kind,
        launcher=launcher,
        program=recipe.program.kind,
        device=topology.device,
        ranks="one" if topology.world_size == 1 else "several",
        nodes="one" if topology.nodes == 1 else "several",
        dtype=dtype,
        eval_dtype="same" if recipe.precision.eval in ("same", dtype) else "other",
        evaluates=dtype if recipe.precision.eval == "same" else recipe.precision.eval,
        recompute="selective" if recipe.efficiency.gradient_checkpointing.selective else "whole",
        restarts="yes" if recipe.launcher.max_restarts else "no",
        order="ascending" if indices == sorted(indices) else "other",
        cards=kind_of_cards(cards),
        seen="one" if len(topology.groups[0].devices) == topology.groups[0].processes else "several",
        total="open" if recipe.batch.global_ == "auto" else "given",
        saving="asynchronous" if recipe.checkpoint.asynchronous else "waited for",
        optimizer=recipe.optimizer.name,
        weights=recipe.precision.weights,
        compiled=recipe.efficiency.compile.scope if recipe.efficiency.compile.enabled else "no",
        graphs="recorded" if topology.device == "cuda" and records_graphs(recipe.efficiency.compile) else "none",
        adapters="dora" if recipe.peft.dora else recipe.peft.kind,
        quantized=str(quantized_bits(recipe)),
        swapping="nvme" if getattr(recipe.strategy, "nvme_path", None) else "no",
        attention=recipe.efficiency.attention,
        model=recipe.model.kind,
        # with `accumulation` given, `micro: auto` follows from the triangle
        micro="searched" if recipe.batch.micro == recipe.batch.accumulation == "auto" else "given",
        xla_settings="given" if getattr(recipe.strategy, "xla_settings", None) else "none",
    )


def table_cells() -> dict[tuple[str, str], dict[str, str]]:
    """The table for people: by strategy and launcher what the built-in trainer can do on each device of one node."""
    answers = {(): "no", ("one",): "one process", ("several",): "several processes", ("one", "several"): "yes"}
    amounts: tuple[Amount, ...] = get_args(Amount)

    def cell(strategy: str, launcher: str, device: str) -> str:
        asked = {amount: Combination(strategy, launcher, "builtin", device, amount) for amount in amounts}
        return answers[tuple(amount for amount, combination in asked.items() if not refusals(combination))]

    return {
        (strategy, launcher): {device: cell(strategy, launcher, device) for device in DEVICES}
        for strategy in OF_BUILTIN
        for launcher in LAUNCHERS
    }
