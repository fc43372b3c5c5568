"""Build the plan: every decision in order, then every part written down from these decisions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainkit.data.seen import SeenData
from trainkit.errors import Diagnostic, RecipeError
from trainkit.foresight.estimate import Foresee, by_formula
from trainkit.hub.cache import CachedRepo
from trainkit.launch_plan.context import Context
from trainkit.launch_plan.model import (
    PLAN_VERSION,
    BatchArithmetic,
    Choice,
    Command,
    Notice,
    Plan,
    Planned,
    PlannedFile,
    PlannedGpu,
    Preparation,
    Provenance,
    Variable,
    text,
)
from trainkit.launch_plan.provenance import Source, SourcedFile, SourcedJob, Token, module, texts, token
from trainkit.lazy import call, load
from trainkit.machine.capability import Dtype
from trainkit.machine.facts import Facts
from trainkit.machine.selection import is_simulated
from trainkit.planner import copies, env, expected, room
from trainkit.planner.batch import solve_batch
from trainkit.planner.choose import chosen, chosen_micro, why_chosen
from trainkit.planner.container import facts_in_image, planned, wrapped
from trainkit.planner.container import preparations as prepared
from trainkit.planner.dtype import choose_dtype
from trainkit.planner.env import SETTINGS, overwritten, plan_environment
from trainkit.planner.fingerprint import recipe_digest, training_digest
from trainkit.planner.hub import preparations as hub_preparations
from trainkit.planner.hub import repositories, with_repositories
from trainkit.planner.placement import Placement, core_argv, counted_cards, name_cards, place
from trainkit.planner.resume import ResumeTarget, SavedCheckpoint, choose_resume
from trainkit.planner.rules import compatibility_rules, input_rules, plan_rules
from trainkit.planner.techniques import techniques
from trainkit.planner.training import training
from trainkit.recipe.grid import HYBRID, grid_sizes
from trainkit.recipe.resolved import Asked, Resolved
from trainkit.recipe.schema import Auto, DatasetData, Fsdp, Recipe
from trainkit.recipe.yaml_writer import consistent, recipe_yaml
from trainkit.rule import check
from trainkit.schedulers.registry import SCHEDULERS
from trainkit.text import join_names
from trainkit.tools.builtin.program import SETTINGS as TRAINER_SETTINGS
from trainkit.tools.registry import LAUNCHERS, PROGRAMS, choose_launcher

__all__ = ["SavedCheckpoint", "build_plan", "decide"]

Checkpoints = Sequence[SavedCheckpoint]
builds = call("trainkit.tools.deepspeed.ops:preparations")
WRAPPER = "trainkit.runner.rank keeps each rank's log, exit record and signals; the bare command runs without it"

STRATEGY_REASON = {
    "single": "one process trains on one device",
    "ddp": "each rank holds the whole model; gradients are averaged",
    "fsdp": "parameters, gradients and optimizer state are sharded over the ranks (FSDP2)",
    "zero0": "DeepSpeed's engine holds the whole model on each rank; nothing is partitioned",
    "zero1": "DeepSpeed partitions the optimizer state",
    "zero2": "DeepSpeed partitions optimizer state and gradients",
    "zero3": "DeepSpeed partitions optimizer state, gradients and parameters",
}

OWN_ENGINE = "the script configures DeepSpeed's engine in its own code; the plan starts its ranks, and hands it no file"


def build_plan(
    resolved: Resolved,
    facts: Facts,
    saved: Checkpoints = (),
    own: Checkpoints = (),
    hub: Sequence[CachedRepo] = (),
    *,
    seen: SeenData | None = None,
    preparing: bool = False,
    foresee: Foresee = by_formula,
) -> Planned:
    """The plan for a recipe on a machine. saved, own: checkpoints of earlier runs and of this one, newest first.

    hub: what of the repositories that it names is on the disk; without it nothing is known of them. seen: of the
    data. preparing: the job only prepares the data. foresee: what tells memory and time. Raises RecipeError for what is
    wrong on any machine; what only this machine lacks is a blocker among notices.
    """
    context, launcher, device, found = decide(resolved, facts, saved, own, hub, seen=seen, foresee=foresee)
    found = (*found, *room.room_for_the_run(context, foresee))
    recipe = context.recipe
    environment, environment_sources = plan_environment(context)
    # A checkpoint first: the data is prepared as it was for it.
    first = (*copies.preparations(context), *hub_preparations(context), *data_preparations(context))
    first = (*first, *(builds(context) if context.deepspeed else ()))
    command, command_sources = _command(context, wrapped(context, environment))
    scheduler = SCHEDULERS.get(recipe.cluster.kind)
    job = scheduler.job(_on_one_node(context) if preparing else context) if scheduler else None
    files = _files(context)
    plan = Plan(
        plan_version=PLAN_VERSION,
        **_taken_over(recipe),
        training_digest=context.training_digest,
        training=(*training(context), *room.rows(context.foresight)),
        strategy=_strategy(context),
        launcher=launcher,
        program=Choice(recipe.program.kind, PROGRAMS[recipe.program.kind].reason(context)),
        device=device,
        topology=context.topology,
        cards=_cards(context),
        waits=context.waits,
        batch=context.batch,
        commands=(command,),
        preparations=prepared(context, environment, first),
        **repositories(context),
        container=planned(context, environment),
        environment=environment,
        files=tuple(PlannedFile(file.path, file.content) for file in files),
        resume=context.resume,
        job=job.job if job else None,
        hang=env.hang_watch(context),
        techniques=techniques(context),
        foresight=context.foresight,
        notices=tuple(Notice(each.severity, each.what, each.hint) for each in found if each.severity != "error"),
    )
    return Planned(plan, _provenance(command_sources, job, environment_sources, files))


def data_preparations(context: Context) -> tuple[Preparation, ...]:
    """Rows become token ids once on each node, and a bad one is found before its ranks wait for one another."""
    data = context.recipe.data
    if context.recipe.program.kind != "builtin" or not isinstance(data, DatasetData) or data.streaming:
        return ()
    paths = [data.path] if isinstance(data.path, str) else data.path
    argv = (*texts(module(context, "trainkit.trainer.prepare", keys=("data.path",))), text("--settings"),
            text(Variable.RUN_DIR, f"/{TRAINER_SETTINGS}"))  # fmt: skip
    return (Preparation(f"prepare the data {join_names(list(paths))}", argv),)


def _on_one_node(context: Context) -> Context:
    """The same on one node, and without its GPUs."""
    nodes = context.recipe.nodes.model_copy(update={"count": 1})
    resolved = replace(context.resolved, recipe=context.recipe.model_copy(update={"nodes": nodes}))
    topology = replace(context.topology, device="cpu", groups=(replace(context.topology.groups[0], count=1),))
    return replace(context, resolved=resolved, topology=topology, cards=())


def _taken_over(recipe: Recipe) -> dict[str, Any]:
    """What the plan has from the recipe as it is."""
    return {
        "name": recipe.name,
        "recipe_digest": recipe_digest(recipe),
        "shares_cards": recipe.devices.when_busy == "warn",
        "rendezvous": recipe.nodes.rendezvous,
        "output_root": re.sub("//+", "/", recipe.output.root).rstrip("/") or "/",
        "max_restarts": recipe.launcher.max_restarts,
        "grace_seconds": recipe.launcher.grace_seconds,
    }


def _files(context: Context) -> list[SourcedFile]:
    program = PROGRAMS[context.recipe.program.kind]
    files = [*LAUNCHERS[context.launcher].files(context), *program.files(context), *expected.files(context)]
    if context.recipe.program.reads_recipe:
        # The run directory's recipe has only what was given: on a node it is planned from again.
        files.append(SourcedFile(SETTINGS, recipe_yaml(context.recipe)))
    return sorted(files, key=lambda file: file.path)


def _cards(context: Context) -> tuple[PlannedGpu, ...]:
    return tuple(PlannedGpu(gpu.index, "" if is_simulated(gpu) else gpu.uuid, gpu.name) for gpu in context.cards)


def _provenance(
    words: Sequence[Source], job: SourcedJob | None, environment: Mapping[str, Source], files: Sequence[SourcedFile]
) -> Provenance:
    parts = {f"commands.0.argv.{position}": source for position, source in enumerate(words)}
    parts |= {f"job.{part}": source for part, source in (job.sources if job else {}).items()}
    parts |= {f"environment.{name}": source for name, source in environment.items()}
    parts |= {f"files.{file.path}.{key}": source for file in files for key, source in file.sources.items()}
    keys = {part: source.keys for part, source in parts.items() if source.keys}
    return Provenance(keys, {part: source.rule for part, source in parts.items() if source.rule})


def decide(
    resolved: Resolved,
    facts: Facts,
    saved: Checkpoints = (),
    own: Checkpoints = (),
    hub: Sequence[CachedRepo] = (),
    *,
    seen: SeenData | None = None,
    foresee: Foresee = by_formula,
) -> tuple[Context, Choice, Choice, tuple[Diagnostic, ...]]:
    """Every decision, the launcher and the device with their reasons, and what is to be remarked on them.

    Raises RecipeError with all that can be known at once.
    """
    if isinstance(resolved.recipe.strategy, Auto):

        def plan(settled: Resolved) -> Context:
            return decide(settled, facts, (), (), hub, seen=seen, foresee=lambda _: None)[0]

        resolved = chosen(resolved, plan, foresee)
    facts = replace(facts, executable=getattr(resolved.recipe.cluster, "python", None) or facts.executable)
    inside = facts_in_image(resolved.recipe, facts)
    # In the order of dependence: devices decide launcher and format, ranks the batch, and all of it what is resumed.
    # Collected up to the batch, so that one try shows all that has to be fixed.
    problems = check(
        input_rules(resolved.recipe.program.kind), Asked(resolved, inside.packages, inside.architectures, seen)
    )
    resolved, facts = counted_cards(with_repositories(resolved, hub), facts), inside
    recipe = resolved.recipe
    try:
        placement = place(resolved, facts)
    except RecipeError as error:  # nothing else can be known without it
        raise RecipeError([*problems, *error.diagnostics]) from error
    launcher = choose_launcher(recipe, placement.topology)
    dtype = _dtype(resolved, placement)
    resolved = with_copies(resolved, placement.topology.nodes)
    recipe = resolved.recipe
    alike = grid_sizes(recipe).alike if recipe.program.kind == "builtin" else 1  # ranks that compute the same samples
    batch, impossible = _batch(resolved, max(1, placement.topology.world_size // alike))
    engine = "deepspeed" if recipe.program.kind == "deepspeed" else launcher.kind
    topology = name_cards(placement, engine, recipe.strategy.kind, queued=recipe.cluster.kind != "none")
    context = Context(
        resolved,
        facts,
        topology,
        launcher.kind,
        placement.cards,
        batch,
        dtype,
        hub=hub,
        seen=seen or SeenData(),
        waits=placement.waits,
    )
    if problems := [*problems, *check(compatibility_rules(context), context), *impossible]:
        raise RecipeError(problems)
    # As it is recorded, so that the plan made from that is the same.
    resolved = replace(resolved, recipe=(recipe := consistent(resolved)))
    digest = training_digest(recipe, batch, dtype)
    reader = ResumeTarget(digest, recipe.strategy.kind, topology.world_size, recipe.program.kind)
    resume, notices = choose_resume(resolved, reader, saved, own)
    context = replace(context, resolved=resolved, training_digest=digest, resume=resume)
    if context.batch.search and context.cards:
        context = chosen_micro(context, foresee)
    context = replace(context, foresight=foresee(context))
    found = check(plan_rules(context), context)
    if problems := [each for each in found if each.severity == "error"] or [*overwritten(context)]:
        raise RecipeError(problems)
    return context, launcher, Choice(topology.device, placement.device_reason), (*placement.notices, *notices, *found)


def with_copies(resolved: Resolved, nodes: int) -> Resolved:
    """With what the built-in trainer's hybrid sharding leaves open: a copy of the model on each node.

    It is FSDP2's, whatever version words like `--fsdp hybrid_shard` stand for.
    """
    recipe, asked = resolved.recipe, resolved.recipe.strategy
    if recipe.program.kind != "builtin" or not isinstance(asked, Fsdp) or asked.sharding not in HYBRID:
        return resolved
    decided = asked.model_copy(update={"replicate": asked.replicate or nodes, "version": 2})
    return replace(resolved, recipe=recipe.model_copy(update={"strategy": decided}))


def _batch(resolved: Resolved, ranks: int) -> tuple[BatchArithmetic, Sequence[Diagnostic]]:
    """The solved triangle, or an open one and why it has no solution."""
    try:
        return solve_batch(resolved, ranks), ()
    except RecipeError as error:
        return BatchArithmetic(None, None, None, ranks, None), error.diagnostics


def _dtype(resolved: Resolved, placement: Placement) -> Dtype:
    """The format by the recipe, else by the program's own words, else by DeepSpeed's file of the user's."""
    recipe, device, cards = resolved.recipe, placement.topology.device, placement.cards
    if resolved.given("precision.dtype"):
        return choose_dtype(recipe, device, cards)
    own = load("trainkit.tools.hf.argv_reader:own_format") if recipe.program.kind == "hf" else None
    base = resolved.attachments.get("strategy.config")
    return choose_dtype(recipe, device, cards, base.tree if base else None, own(resolved) if own else None)


def _strategy(context: Context) -> Choice:
    """The recipe's strategy, with what it does and who sees to it, and why it was chosen where the plan has chosen."""
    recipe, device = context.recipe, context.topology.device
    if recipe.program.kind == "deepspeed" and not recipe.strategy.kind.startswith("zero"):
        return Choice(recipe.strategy.kind, OWN_ENGINE)
    reason = STRATEGY_REASON[recipe.strategy.kind]
    if isinstance(recipe.strategy, Fsdp) and device == "xla":
        reason = reason.replace("ranks (FSDP2)", "chips (torch_xla's FSDP)")
    elif isinstance(recipe.strategy, Fsdp) and recipe.program.kind == "torch":
        reason = reason.removesuffix(" (FSDP2)")  # whichever the program wraps its model in
    elif isinstance(recipe.strategy, Fsdp) and recipe.strategy.version == 1:
        reason = reason.replace("FSDP2", "FSDP1")
    if recipe.program.kind == "builtin" and (sizes := grid_sizes(recipe)).several:
        reason = f"{reason}: {sizes.words(context.ranks)}"
    why = why_chosen(context.resolved)
    reason = f"{PROGRAMS[recipe.program.kind].STRATEGY_BY}{reason}"
    return Choice(recipe.strategy.kind, f"{reason}; {why}" if why else reason)


def _command(context: Context, container: tuple[Token, ...]) -> tuple[Command, tuple[Source, ...]]:
    """What starts the ranks, with the wrapper that every rank's program runs in. container: the words around it."""
    kind = PROGRAMS[context.recipe.program.kind]
    launcher, program = LAUNCHERS[context.launcher].argv(context), kind.argv(context)
    wrapper: tuple[Token, ...] = (
        *module(context, "trainkit.runner.rank", rule=WRAPPER),
        token("--attempt", rule=WRAPPER),
        token(Variable.ATTEMPT_DIR, rule=WRAPPER),
        token("--grace", rule=WRAPPER),
        token(f"{context.recipe.launcher.grace_seconds:g}", keys=("launcher.grace_seconds",)),
        *(
            (token("--node", rule=WRAPPER), token(Variable.NODE_RANK, rule=WRAPPER))
            if context.topology.nodes > 1
            else ()
        ),
        *core_argv(context),
        *kind.wrapper(context),
        *expected.wrapper(context),
        *env.wrapper(context),
        token("--", rule=WRAPPER),
    )
    sources = tuple(item.source for item in (*container, *launcher, *wrapper, *program))
    return Command(texts(launcher), texts(wrapper), texts(program), texts(container)), sources
