"""Build the plan: every decision in order, then every part written down from these decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainkit.errors import Diagnostic, RecipeError
from trainkit.hardware.facts import Facts
from trainkit.planning.batch import solve_batch
from trainkit.planning.compatibility import Amount, Combination, refusals
from trainkit.planning.context import Context
from trainkit.planning.digest import recipe_digest, training_digest
from trainkit.planning.environment import check_environment, plan_environment
from trainkit.planning.launchers import LAUNCHERS
from trainkit.planning.plan import (
    PLAN_VERSION,
    Choice,
    Command,
    Notice,
    Plan,
    PlannedFile,
    Provenance,
    Topology,
    Variable,
)
from trainkit.planning.precision import choose_dtype, precision_notices
from trainkit.planning.programs import PROGRAMS
from trainkit.planning.requirements import missing_packages
from trainkit.planning.resume import SavedCheckpoint, choose_resume
from trainkit.planning.sourced import Source, SourcedFile, Token, texts, token
from trainkit.planning.topology import Placement, name_cards, place

if TYPE_CHECKING:
    from trainkit.recipe.resolved import Resolved

__all__ = ["Planned", "SavedCheckpoint", "build_plan"]

STRATEGY_REASON = {
    "single": "one process trains on one device",
    "ddp": "each rank holds the whole model; gradients are averaged",
    "fsdp": "parameters, gradients and optimizer state are sharded over the ranks (FSDP2)",
    "zero1": "DeepSpeed partitions the optimizer state",
    "zero2": "DeepSpeed partitions optimizer state and gradients",
    "zero3": "DeepSpeed partitions optimizer state, gradients and parameters",
}


@dataclass(frozen=True)
class Planned:
    """A plan and, beside it, what made each part of it."""

    plan: Plan
    provenance: Provenance


def build_plan(resolved: Resolved, facts: Facts, saved: Sequence[SavedCheckpoint] = ()) -> Planned:
    """The plan for a recipe on a machine. saved: complete checkpoints of earlier runs of this name, newest first.

    Raises RecipeError for what is wrong on any machine; what only this machine lacks is a blocker among the notices.
    """
    recipe = resolved.recipe
    program = PROGRAMS[recipe.program.kind]
    _raise(program.check(resolved) + check_environment(resolved))

    placement = place(resolved, facts)
    launcher = choose_launcher(resolved, placement.topology)
    dtype = choose_dtype(recipe, placement.topology.device, placement.cards)
    _refuse_unsound(resolved, placement, launcher.kind, dtype)
    topology = name_cards(placement, launcher.kind, recipe.strategy.kind)
    batch = solve_batch(resolved, topology.world_size)
    digest = training_digest(recipe, batch, dtype)
    resume, resume_notices = choose_resume(resolved, digest, saved)

    context = Context(resolved, facts, topology, launcher.kind, placement.cards, batch, dtype, digest, resume)
    command, command_sources = _command(context)
    environment, environment_sources = plan_environment(context)
    files = LAUNCHERS[launcher.kind].files(context) + program.files(context)
    plan = Plan(
        plan_version=PLAN_VERSION,
        name=recipe.name,
        recipe_digest=recipe_digest(recipe),
        training_digest=digest,
        strategy=Choice(recipe.strategy.kind, STRATEGY_REASON[recipe.strategy.kind]),
        launcher=launcher,
        program=Choice(recipe.program.kind, program.reason(context)),
        topology=topology,
        batch=batch,
        commands=(command,),
        preparations=program.preparations(context),
        environment=environment,
        files=tuple(PlannedFile(file.path, file.content) for file in sorted(files, key=lambda file: file.path)),
        resume=resume,
        output_root=recipe.output.root,
        max_restarts=recipe.launcher.max_restarts,
        grace_seconds=recipe.launcher.grace_seconds,
        notices=_notices(context, placement) + resume_notices,
        rendezvous=recipe.nodes.rendezvous,
    )
    return Planned(plan, _provenance(command_sources, environment_sources, files))


def choose_launcher(resolved: Resolved, topology: Topology) -> Choice:
    """The launcher that was asked for, else `python` for one process and `torchrun` for several."""
    wanted = resolved.recipe.launcher.kind
    if wanted != "auto":
        return Choice(wanted, "launcher.kind asks for it")
    if topology.world_size == 1:
        return Choice("python", "one process needs no launcher")
    return Choice("torchrun", f"{topology.world_size} processes")


def _refuse_unsound(resolved: Resolved, placement: Placement, launcher: str, dtype: str) -> None:
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
        restarts="yes" if recipe.launcher.max_restarts else "no",
        order="ascending" if indices == sorted(indices) else "other",
    )
    found = refusals(combination)
    ranks = f"{topology.world_size} {'process' if topology.world_size == 1 else 'processes'}"
    what = f"strategy {combination.strategy} with launcher {launcher}, {ranks} on {topology.device}, {dtype}"
    _raise(
        tuple(
            Diagnostic(
                "error",
                f"this combination is not sound: {what}",
                key=refusal.key,
                origin=resolved.origin(refusal.key),
                why=f"{refusal.reason[0].upper()}{refusal.reason[1:]}.",
                hint=f"Nearest sound choice: {refusal.instead}.",
            )
            for refusal in found
        )
    )


def _amount(number: int) -> Amount:
    return "one" if number == 1 else "several"


def _command(context: Context) -> tuple[Command, tuple[Source, ...]]:
    launcher = LAUNCHERS[context.launcher].argv(context)
    wrapper = _wrapper(context)
    program = PROGRAMS[context.recipe.program.kind].argv(context)
    sources = tuple(item.source for item in (*launcher, *wrapper, *program))
    return Command(texts(launcher), texts(wrapper), texts(program)), sources


def _wrapper(context: Context) -> tuple[Token, ...]:
    rule = "trainkit.rank keeps each rank's log, exit record and signals; the bare command runs without it"
    return (
        token(context.facts.executable, rule=rule),
        token("-m", rule=rule),
        token("trainkit.rank", rule=rule),
        token("--attempt", rule=rule),
        token(Variable.ATTEMPT_DIR, rule=rule),
        token("--grace", rule=rule),
        token(f"{context.recipe.launcher.grace_seconds:g}", keys=("launcher.grace_seconds",)),
        token("--", rule=rule),
    )


def _notices(context: Context, placement: Placement) -> tuple[Notice, ...]:
    recipe, device = context.recipe, context.topology.device
    notices = [
        *placement.notices,
        *missing_packages(context),
        *precision_notices(recipe, device, context.dtype, context.cards),
        *PROGRAMS[recipe.program.kind].notices(context),
    ]
    if context.topology.nodes > 1 and recipe.nodes.rendezvous == "auto":
        what = f"{context.topology.nodes} nodes need a place to meet, and nodes.rendezvous does not name one."
        notices.append(Notice("blocker", what, "Set nodes.rendezvous to host:port of node 0."))
    if context.batch.note:
        notices.append(Notice("note", f"{context.batch.note}."))
    if device == "cpu" and context.processes > context.facts.cpu_cores:
        what = f"{context.processes} ranks share {context.facts.cpu_cores} CPU cores."
        notices.append(Notice("warning", what, "Set nodes.processes_per_node to the number of cores or less."))
    return tuple(notices)


def _provenance(
    command: Sequence[Source], environment: Mapping[str, Source], files: Sequence[SourcedFile]
) -> Provenance:
    parts: dict[str, Source] = {f"commands.0.argv.{position}": source for position, source in enumerate(command)}
    parts |= {f"environment.{name}": source for name, source in environment.items()}
    parts |= {f"files.{file.path}.{key}": source for file in files for key, source in file.sources.items()}
    keys = {part: source.keys for part, source in parts.items() if source.keys}
    return Provenance(keys, {part: source.rule for part, source in parts.items() if source.rule})


def _raise(diagnostics: tuple[Diagnostic, ...]) -> None:
    if diagnostics:
        raise RecipeError(diagnostics)
