"""From a command line to a resolved recipe and a plan: what the commands share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.cli.diagnostics import show_diagnostics
from trainkit.cli.file_system import FileSystem, working_folder
from trainkit.cli.line import OwnProgram, own_program, split_line
from trainkit.errors import RecipeError, UsageError
from trainkit.lazy import call

if TYPE_CHECKING:
    import typer

    from trainkit.data.seen import SeenData
    from trainkit.errors import Diagnostic
    from trainkit.foresight.estimate import Measured
    from trainkit.hub.cache import CachedRepo
    from trainkit.launch_plan.context import Context
    from trainkit.launch_plan.model import Foresight, Planned
    from trainkit.machine.facts import Facts
    from trainkit.planner.resume import SavedCheckpoint
    from trainkit.recipe.resolved import MadeRecipe, Request, Resolved
    from trainkit.runner.report.shortage import Shortage
    from trainkit.runner.request import RunRequest
    from trainkit.runner.rundir.layout import RunLayout

# Imported at first use: `check` never plans, and the help of a command resolves nothing.
resolve: Callable[..., Resolved] = call("trainkit.recipe.resolve:resolve")
build_plan: Callable[..., Planned] = call("trainkit.planner.build:build_plan")
described_kind: Callable[..., str] = call("trainkit.cli.own_programs:described_kind")

PROGRAM = ("program.script=", "program.module=")  # settings that make a run without a recipe


def resolve_line(
    context: typer.Context, presets: Sequence[str] | None, variant: str | None = None, *, waits: bool = False
) -> Resolved:
    """Resolve the argv of `run` or `plan`: one recipe (or presets or a program in its place) and overrides.

    waits: with `--wait`, which stands for a setting.
    """
    own = own_program(context)
    recipes, overrides = split_line(context.args, most=0 if own else 1, what="a program" if own else "one recipe")
    if own is None and not recipes and not replaces_recipe(overrides, presets):
        raise no_recipe(f"{context.info_name} RECIPE")
    recipe = own or (recipes[0] if recipes else None)
    overrides = [*overrides, *(["devices.when_busy=wait"] if waits else [])]
    return show_warnings(resolve_request(recipe, overrides, presets, () if own else context.obj, variant))


def no_recipe(usage: str) -> UsageError:
    """The error of a line without a recipe. usage: the command with its arguments."""
    return UsageError("no recipe is named", hint=f"trainkit {usage}; `trainkit ls` shows the shipped ones")


def replaces_recipe(overrides: Sequence[str], presets: Sequence[str] | None) -> bool:
    """Whether a line without a recipe says what to run."""
    return bool(presets) or any(each.startswith((*PROGRAM, "model.path=", "data.path=")) for each in overrides)


def show_warnings(resolved: Resolved) -> Resolved:
    """Write the warnings of a recipe to standard error."""
    show_diagnostics(resolved.warnings)
    return resolved


def resolve_request(
    recipe: str | OwnProgram | None,
    overrides: Sequence[str] = (),
    presets: Sequence[str] | None = None,
    program: Sequence[str] = (),
    variant: str | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    disk: FileSystem | None = None,
) -> Resolved:
    """Resolve what a command line asks for; program: the words after `--`, appended to program.args.

    environ: the caller's variables, of which some are a layer of the recipe. disk: that the files are read from.
    Raises RecipeError with everything that is wrong.
    """
    from trainkit.recipe.resolved import Request

    disk, cwd = disk or FileSystem(), working_folder()
    remarks: list[Diagnostic] = []
    meant: str | MadeRecipe | None = None
    if isinstance(recipe, OwnProgram):
        from trainkit.cli.own_programs import made_recipe, notes_on_words

        meant, remarks = made_recipe(recipe.words, overrides, disk, cwd)
        remarks += notes_on_words(recipe.words, recipe.options)
    elif recipe is not None:
        meant = find_recipe(recipe, disk)
    # Everything that the pure core would otherwise ask the system for.
    request = Request(
        recipe=meant,
        cwd=cwd,
        presets=tuple(presets or ()),
        overrides=tuple(overrides),
        arguments=tuple(program),
        environ=dict(environ),
        variant=variant,
    )
    try:
        resolved = resolve(request, disk, partial(described_kind, disk, cwd))
    except RecipeError as error:
        raise _of_another_tool(request, disk) or error from error
    return replace(resolved, warnings=(*remarks, *resolved.warnings))


def _of_another_tool(request: Request, disk: FileSystem) -> RecipeError | None:
    """The one error of a file that is no recipe but another tool's, in place of one for each of its keys."""
    from trainkit.convert.importing import foreign_recipe
    from trainkit.tools.base.imported_recipe import ImportContext

    if not isinstance(request.recipe, str) or not disk.exists(request.recipe):
        return None
    found = foreign_recipe(ImportContext(disk, request.cwd, request.environ), request.recipe)
    return RecipeError([found]) if found else None


def find_recipe(word: str, disk: FileSystem) -> str:
    """The path that a recipe word means: a file, a run directory (its recipe.yaml), a shipped recipe, or a run's id."""
    if not word:
        raise UsageError("the name of the recipe is empty", hint="name a recipe file, or a shipped one (`trainkit ls`)")
    if os.path.isdir(word):  # noqa: PTH112 - False, no error, for what is no name of a file
        inside = str(Path(word, "recipe.yaml"))
        if not disk.exists(inside):
            hint = "name a recipe file, a run directory (`trainkit runs list` shows them), or a script"
            raise UsageError(f"{word} is a folder without a recipe.yaml", hint=hint)
        if os.path.islink(inside):  # noqa: PTH114 - as above; somebody else may have made the folder
            what = f"{inside} is a link, and no run directory has one"
            raise UsageError(what, hint="name the file that it leads to, if you trust it")
        return inside
    if disk.exists(word):
        return word
    if shipped := disk.shipped().get(f"recipes/{word}"):
        return shipped
    run = _run_of_id(word)
    return find_recipe(run, disk) if run else word


def _run_of_id(word: str) -> str:
    """The directory of the run with this id or short id, in `runs` or where this user has had runs; empty for none."""
    from trainkit.runner.rundir.create import remembered_roots
    from trainkit.runner.rundir.listing import ID, runs_of_id

    roots = ("runs", *remembered_roots(os.environ)) if ID.fullmatch(word) else ()
    return next((str(run.layout.root) for root in roots for run in runs_of_id(word, root)), "")


def plan_recipe(
    resolved: Resolved, facts: Facts | None = None, run: RunLayout | None = None, *, preparing: bool = False
) -> Planned:
    """Plan a resolved recipe for this machine, with the checkpoints that earlier runs of its name left.

    facts: of this machine, where they are known already. run: that goes on, whose own checkpoints come first.
    preparing: its job only prepares the data.
    """
    from trainkit.machine.probe import probe

    recipe, resume = resolved.recipe, resolved.recipe.checkpoint.resume
    earlier: list[SavedCheckpoint] = []
    if resume != "never":  # else the reader of run directories is not even imported
        from trainkit.runner.rundir.listing import named_checkpoint, saved_checkpoints, trainer_checkpoints

        saved = trainer_checkpoints if recipe.program.kind == "hf" else saved_checkpoints
        if resume == "auto":
            earlier = saved(recipe.output.root, recipe.name, damaged=True)
            if recipe.checkpoint.copy_to is not None and recipe.program.kind == "builtin":
                from trainkit.runner.rundir.elsewhere import copied_checkpoints

                earlier += copied_checkpoints(recipe.checkpoint.copy_to, recipe.name, recipe.output.root)
                earlier.sort(key=lambda each: (each.run, each.step), reverse=True)  # of equal ones this machine's first
        elif recipe.program.kind != "hf":  # Trainer looks into a named folder by itself
            earlier = named_checkpoint(resume, damaged=True)
    own: list[SavedCheckpoint] = []
    if run is not None:
        from trainkit.runner.rundir.listing import own_checkpoints

        own = own_checkpoints(run, recipe.program.kind)
    hub = on_hub(resolved)
    facts = asked_facts(resolved, facts or probe())
    seen = look_at_data(resolved, hub)
    made = with_described(resolved, hub)
    return build_plan(made, facts, earlier, own, hub, seen=seen, preparing=preparing, foresee=foreseen_here)


def asked_facts(resolved: Resolved, facts: Facts) -> Facts:
    """The facts with what only some recipes ask a machine for."""
    recipe = resolved.recipe
    if recipe.efficiency.compile.enabled and facts.torch and not facts.origin:
        from trainkit.machine.host import compile_backends
        from trainkit.tools.compile_backends import EVERYWHERE, backend_in_use

        if backend_in_use(recipe.efficiency.compile.backend) not in EVERYWHERE:
            facts = replace(facts, torch=replace(facts.torch, backends=compile_backends()))
    if recipe.program.kind == "builtin" and recipe.model.kind == "hf" and not facts.origin:
        from trainkit.machine.host import transformers_architectures

        facts = replace(facts, architectures=transformers_architectures())
    return facts


def decide_recipe(resolved: Resolved, facts: Facts) -> Context:
    """The decisions of a plan alone, without what earlier runs have left."""
    from trainkit.planner.build import decide

    hub = on_hub(resolved)
    seen = look_at_data(resolved, hub)
    made = with_described(resolved, hub)
    context, *_ = decide(made, asked_facts(resolved, facts), (), (), hub, seen=seen, foresee=foreseen_here)
    return context


def look_at_data(resolved: Resolved, hub: Sequence[CachedRepo] = ()) -> SeenData:
    """What the heads of a recipe's files say; of a repository those that are in the cache."""
    recipe = resolved.recipe
    tokenizer = getattr(recipe.data, "tokenizer", None)
    if recipe.data.kind != "dataset" and recipe.model.kind != "hf" and tokenizer is None:
        from trainkit.data.seen import SeenData

        return SeenData()
    from trainkit.data.look import look
    from trainkit.hub.references import with_values
    from trainkit.recipe.paths import absolute

    folders = {repo.ref.key: repo.folder for repo in hub if repo.whole}
    return look(with_values(recipe, folders), partial(absolute, base=resolved.folder), os.environ)


def on_hub(resolved: Resolved) -> tuple[CachedRepo, ...]:
    """What of the repositories that a recipe names is on this disk, and what the Hub says of the rest.

    Raises RecipeError for what it does not have.
    """
    from trainkit.hub.references import repo_refs

    refs = repo_refs(resolved.recipe, resolved.absent)
    if not refs:
        return ()
    from trainkit.hub.lookup import HubClient, look_up

    env, kept = resolved.recipe.env, resolved.recipe.env_from
    of_run = {**os.environ, **{name: str(value) for name, value in env.items() if name not in kept}}
    client = HubClient.of(of_run)
    found: list[CachedRepo] = []
    wrong: list[Diagnostic] = []
    commits: dict[tuple[str, str, str], str] = {}  # of a repository that is named twice, the same for both
    for ref in refs:
        same = (ref.kind, ref.name, ref.revision)
        try:
            found.append(look_up(replace(ref, commit=commits.get(same, "")), client))
        except UsageError as error:
            wrong += [resolved.error(each.key, each.what, each.hint) for each in error.diagnostics]
        else:
            commits.setdefault(same, found[-1].ref.commit)
    if wrong:
        raise RecipeError(wrong)
    return tuple(found)


def with_described(resolved: Resolved, hub: Sequence[CachedRepo]) -> Resolved:
    """The recipe with what the small files of the Hub's model and tokenizer say, which were fetched to look them up."""
    if not hub:
        return resolved
    from trainkit.hub.lookup import CacheDisk
    from trainkit.recipe.described import CONFIG, has_template, read_adapters, read_config

    described, disk = resolved.described, CacheDisk()
    for repo in hub:
        listed = None if repo.obstacle else repo.sizes
        if repo.ref.key == "model.path" and repo.folder:
            model, fault = read_config(repo.folder, disk.read)
            described = replace(described, model=model, fault=None if listed is None or CONFIG in listed else fault)
        if repo.ref.key == "peft.path" and listed is not None:
            found, misfit = read_adapters(repo.folder, disk.read)
            described = replace(described, adapters=found, misfit=misfit)
        if repo.ref.key == "data.tokenizer" and listed is not None:
            there = {f"{repo.folder}/{part}" for name in listed for part in (name, name.partition("/")[0])}
            described = replace(described, chats=has_template(repo.folder, disk.read, there.__contains__))
    return replace(resolved, described=described)


def cluster_facts(resolved: Resolved) -> Facts:
    """What the nodes have that a job will run on, as far as the recipe says; else what this machine has."""
    from trainkit.cli.machines import machine_facts

    try:
        facts = machine_facts(getattr(resolved.recipe.cluster, "machine", None))
    except UsageError as error:
        found = [resolved.error("cluster.machine", each.what, each.hint) for each in error.diagnostics]
        raise RecipeError(found) from error
    return replace(facts, executable=sys.executable)


def run_request(
    planned: Planned, resolved: Resolved, again: Callable[[int | None], RunRequest], node_rank: int | None = None
) -> RunRequest:
    """What the runner executes. again: plans once more, as in `RunRequest`; node_rank: as given."""
    from trainkit.hub.references import pinned
    from trainkit.launch_plan.render import shell
    from trainkit.recipe.yaml_writer import resolved_yaml
    from trainkit.runner.request import RunRequest
    from trainkit.schedulers.base import Place
    from trainkit.schedulers.registry import place_in

    # Pinned, so that the run directory's recipe means the same files for ever.
    text = resolved_yaml(replace(resolved, recipe=pinned(resolved.recipe, planned.plan.repositories)))
    place, script = place_in(os.environ), shell.render(planned.plan, text)
    job = place.start if isinstance(place, Place) else ""
    told = partial(answer_shortage, resolved)
    return RunRequest(planned, text, script, dict(os.environ), node_rank, again=again, job=job, answer=told)


def answer_shortage(resolved: Resolved, lacking: Shortage) -> Iterator[str]:
    """What to change in a recipe whose run has run out of memory."""
    from trainkit.machine.probe import probe
    from trainkit.planner.room import answer

    return answer(decide_recipe(resolved, probe()), lacking, foreseen_here, room_at)


def foreseen_here(context: Context) -> Foresight | None:
    """The estimate of a plan: by a trace of the model, where one was made before, else by the architecture's sizes."""
    from trainkit.foresight.estimate import digest_of, foreseen, known_or_formula, wanted_of, why_not
    from trainkit.foresight.traces import Traces, kept_foresight

    if why_not(context):
        return None
    traces, measured = Traces(), measured_here(context)
    digest = digest_of(context, measured, traced=traces.has(wanted_of(context)))
    return kept_foresight(digest, lambda: foreseen(context, known_or_formula(context, traces.known), measured))


def room_at(context: Context, wanted: int, moment: str) -> tuple[int, int] | None:
    """Bytes for tensors that there are at least and at most, where a request of so many was refused in a moment."""
    from trainkit.foresight.estimate import estimated, known_or_formula
    from trainkit.foresight.traces import Traces

    found = estimated(context, known_or_formula(context, Traces().known), measured_here(context))
    return found.strategy.device.room(wanted, moment) if found else None


def measured_here(context: Context) -> Measured:
    """What runs on the same device were measured to take."""
    from trainkit.foresight.calibration import beside
    from trainkit.foresight.estimate import Measured
    from trainkit.foresight.measured import device_of, measurements

    records = measurements(device_of(context.facts, context.cards[0].name if context.cards else ""))
    return Measured(tuple(records), beside(records))
