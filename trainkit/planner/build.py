"""Build the plan: every decision in order, then every part written down from these decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from trainkit.frameworks.registry import LAUNCHERS, PROGRAMS
from trainkit.machine.facts import Facts
from trainkit.machine.occupancy import is_made_up
from trainkit.plan.context import Context
from trainkit.plan.interpreter import module
from trainkit.plan.model import PLAN_VERSION, Card, Choice, Command, Plan, Planned, PlannedFile, Provenance, Variable
from trainkit.plan.provenance import Source, SourcedFile, Token, texts, token
from trainkit.planner import verification
from trainkit.planner.decisions import decide
from trainkit.planner.env import plan_environment
from trainkit.planner.fingerprint import recipe_digest
from trainkit.planner.notices import remarks
from trainkit.planner.numa import core_words
from trainkit.planner.resume import SavedCheckpoint
from trainkit.planner.techniques import techniques_in_force
from trainkit.recipe.schema import Fsdp, Recipe

if TYPE_CHECKING:
    from trainkit.recipe.resolved import Resolved

__all__ = ["SavedCheckpoint", "build_plan"]

STRATEGY_REASON = {
    "single": "one process trains on one device",
    "ddp": "each rank holds the whole model; gradients are averaged",
    "fsdp": "parameters, gradients and optimizer state are sharded over the ranks (FSDP2)",
    "zero1": "DeepSpeed partitions the optimizer state",
    "zero2": "DeepSpeed partitions optimizer state and gradients",
    "zero3": "DeepSpeed partitions optimizer state, gradients and parameters",
}
# Kind of program -> who sees to the strategy there; the built-in trainer does by itself.
DONE_BY = {
    "hf": "done by Trainer, which is told: ",
    "accelerate": "done by Accelerator(), which is told: ",
    "deepspeed": "done by DeepSpeed, which is told in its file: ",
    "torch": "your program's own part: ",
}


def build_plan(resolved: Resolved, facts: Facts, saved: Sequence[SavedCheckpoint] = ()) -> Planned:
    """The plan for a recipe on a machine. saved: complete checkpoints of earlier runs of this name, newest first.

    Raises RecipeError for what is wrong on any machine; what only this machine lacks is a blocker among the notices.
    """
    context, launcher, device, notices = decide(resolved, facts, saved)
    recipe, program = context.recipe, PROGRAMS[context.recipe.program.kind]
    command, command_sources = _command(context)
    environment, environment_sources = plan_environment(context)
    files = LAUNCHERS[context.launcher].files(context) + program.files(context) + verification.files(context)
    plan = Plan(
        plan_version=PLAN_VERSION,
        name=recipe.name,
        recipe_digest=recipe_digest(recipe),
        training_digest=context.training_digest,
        strategy=Choice(recipe.strategy.kind, _strategy_reason(recipe, context.topology.device)),
        launcher=launcher,
        program=Choice(recipe.program.kind, program.reason(context)),
        device=device,
        topology=context.topology,
        batch=context.batch,
        commands=(command,),
        preparations=program.preparations(context),
        environment=environment,
        files=tuple(PlannedFile(file.path, file.content) for file in sorted(files, key=lambda file: file.path)),
        resume=context.resume,
        output_root=recipe.output.root,
        max_restarts=recipe.launcher.max_restarts,
        grace_seconds=recipe.launcher.grace_seconds,
        techniques=techniques_in_force(context),
        notices=notices + remarks(context),
        cards=tuple(Card(gpu.index, "" if is_made_up(gpu) else gpu.uuid, gpu.name) for gpu in context.cards),
        shares_cards=recipe.devices.when_busy == "warn",
        rendezvous=recipe.nodes.rendezvous,
    )
    return Planned(plan, _provenance(command_sources, environment_sources, files))


def _strategy_reason(recipe: Recipe, device: str) -> str:
    reason = STRATEGY_REASON[recipe.strategy.kind]
    if isinstance(recipe.strategy, Fsdp) and device == "xla":
        reason = reason.replace("ranks (FSDP2)", "chips (torch_xla's FSDP)")
    elif isinstance(recipe.strategy, Fsdp) and recipe.strategy.version == 1:
        reason = reason.replace("FSDP2", "FSDP1")
    return f"{DONE_BY.get(recipe.program.kind, '')}{reason}"


def _command(context: Context) -> tuple[Command, tuple[Source, ...]]:
    launcher = LAUNCHERS[context.launcher].argv(context)
    kind = PROGRAMS[context.recipe.program.kind]
    wrapper = _wrapper(context, kind.wrapper(context) + verification.wrapper(context))
    program = kind.argv(context)
    sources = tuple(item.source for item in (*launcher, *wrapper, *program))
    return Command(texts(launcher), texts(wrapper), texts(program)), sources


def _wrapper(context: Context, more: tuple[Token, ...]) -> tuple[Token, ...]:
    rule = "trainkit.runner.rank keeps each rank's log, exit record and signals; the bare command runs without it"
    return (
        *module(context, "trainkit.runner.rank", rule=rule),
        token("--attempt", rule=rule),
        token(Variable.ATTEMPT_DIR, rule=rule),
        token("--grace", rule=rule),
        token(f"{context.recipe.launcher.grace_seconds:g}", keys=("launcher.grace_seconds",)),
        *core_words(context),
        *more,
        token("--", rule=rule),
    )


def _provenance(
    command: Sequence[Source], environment: Mapping[str, Source], files: Sequence[SourcedFile]
) -> Provenance:
    parts: dict[str, Source] = {f"commands.0.argv.{position}": source for position, source in enumerate(command)}
    parts |= {f"environment.{name}": source for name, source in environment.items()}
    parts |= {f"files.{file.path}.{key}": source for file in files for key, source in file.sources.items()}
    keys = {part: source.keys for part, source in parts.items() if source.keys}
    return Provenance(keys, {part: source.rule for part, source in parts.items() if source.rule})
