"""`trainkit bench`: compare a recipe with its variants, by time, throughput, memory and loss."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from trainkit.cli.diagnostics import one_line, show_diagnostics
from trainkit.cli.line import own_program, split_line
from trainkit.cli.options import Json, Presets
from trainkit.cli.pipeline import no_recipe, plan_recipe, resolve_request, run_request, show_warnings
from trainkit.distribution import install
from trainkit.errors import ExitCode, MachineError, RecipeError, UsageError

if TYPE_CHECKING:
    from trainkit.bench import Candidate, Comparison, MemoryKind, Setup
    from trainkit.launch_plan.model import Plan, Planned
    from trainkit.recipe.resolved import Resolved
    from trainkit.runner.request import RunRequest

# A variant that went on from another's checkpoint would measure nothing.
AFRESH = "checkpoint.resume=never"
NO_SAVE = "checkpoint.at_end=false"  # a bench measures, and keeps no model
NO_UPLOAD = "checkpoint.push_to_hub!={}"  # nor is what it has trained for others
NO_COPY = "checkpoint.copy_to=null"


Only = Annotated[str | None, Option("--only", metavar="NAME,NAME", help="Run only these variants, and the base.")]
Output = Annotated[
    Path | None, Option("--output", metavar="FOLDER", help="Folder for table and plot; default: next to the runs.")
]
Jobs = Annotated[
    str,
    Option(
        "--jobs",
        metavar="N|auto",
        help="Runs at once, each on GPUs of its own; auto: as many as the idle GPUs allow. They share processors, "
        "memory and disks, which disturbs their times.",
    ),
]


def bench(
    context: typer.Context,
    *,
    presets: Presets = None,
    only: Only = None,
    no_base: Annotated[bool, Option("--no-base", help="Leave out the recipe without a variant.")] = False,
    repeat: Annotated[int, Option("--repeat", min=1, help="Number of runs of each; the table shows medians.")] = 1,
    jobs: Jobs = "1",
    output: Output = None,
    no_plot: Annotated[bool, Option("--no-plot", help="Draw no plot (plots need matplotlib).")] = False,
    as_json: Json = False,
) -> None:
    """Run RECIPE and each of its variants one after another (or --jobs at once), and compare them.

    Prints a table; writes bench.csv, bench.json, bench.png, bench.svg and report.html. A variant
    that fails becomes a row of the table, and the bench continues. Exit code 1: a variant failed.

    Example: trainkit bench efficiency-table-small --only checkpointing,bf16
    """
    from trainkit.bench import BenchTerminal, as_data, can_plot, draw, render, run_all

    if not no_plot and not can_plot():
        hint = f"{install(sys.executable, 'matplotlib')}, or leave the plot out with --no-plot"
        raise MachineError("the plot needs matplotlib, which is not installed", hint=hint)
    setup, root = prepare(context, presets, only, jobs, with_base=not no_base, repeat=repeat)
    folder = output or root / f"bench-{time.strftime('%Y%m%d-%H%M%S')}"
    console = BenchTerminal(os.environ)
    found, stopped_by = run_all(setup, folder, console)
    if not no_plot and found.rows:
        draw(found, folder)
    sys.stdout.write(json.dumps(as_data(found), indent=2) + "\n" if as_json else render(found))
    write_page(found, folder)
    console.say(f"written to {folder}")
    if stopped_by is not None:
        raise typer.Exit(128 + stopped_by)
    raise typer.Exit(ExitCode.OK if found.complete else ExitCode.FAILED)


def write_page(found: Comparison, folder: Path) -> None:
    """Write report.html: the table, and the first run of each variant beside the others."""
    from trainkit.bench import render
    from trainkit.cli.commands.report import FILE, write_report
    from trainkit.html_report.page import MOST
    from trainkit.runner.rundir.listing import read_run

    runs = {row.name: Path(row.runs[0].run_directory) for row in found.rows if row.runs[0].run_directory}
    if shown := [*runs][:MOST]:
        title = f"Bench of {found.recipe}"
        write_report(
            [read_run(runs[name]) for name in shown], folder / FILE, bench=(title, shown, render(found)), force=True
        )


def prepare(
    context: typer.Context, presets: Presets, only: str | None, jobs: str, *, with_base: bool, repeat: int
) -> tuple[Setup, Path]:
    """Everything that will run, planned before anything does, and the folder of the recipe's runs.

    Raises RecipeError where the recipe or one of its variants is wrong in itself.
    """
    from trainkit.bench import Setup
    from trainkit.machine.probe import probe
    from trainkit.recipe.extends import BASE
    from trainkit.runner.together import in_turn, share_gpus

    if own_program(context):
        hint = "write a recipe with `trainkit import … --output recipe.yaml`, and give it variants"
        raise UsageError("bench compares the variants of a recipe, and a program has none", hint=hint)
    recipes, overrides = split_line(context.args, most=1, what="one recipe")
    if not recipes:
        raise no_recipe("bench RECIPE")
    resolve = partial(_without_upload, recipes[0], (AFRESH, *overrides), presets, context, set[str]())
    base, _ = resolve(None)
    show_warnings(base)
    resolved = {BASE: base} if with_base else {}
    resolved |= {name: resolve(name)[0] for name in chosen(only, base.variants)}
    # The base's warnings have been shown; each variant repeats them.
    added = (each for variant in resolved.values() for each in variant.warnings if each not in base.warnings)
    show_diagnostics(dict.fromkeys(added))
    if not resolved:
        raise UsageError("nothing is left to run", hint="leave out --no-base, or name variants with --only")
    described = {name: base.variants.get(name, "") for name in resolved}
    candidates = [candidate(name, described[name], each) for name, each in resolved.items()]
    # All run on one machine, so the first plan that there is says what kind of memory is measured.
    plan = next((each.request.planned.plan for each in candidates if each.request), None)
    memory: MemoryKind = "gpu" if plan and plan.topology.device == "cuda" else "rss"
    chosen_gpus = any(isinstance(each.recipe.devices.select, list) for each in resolved.values())
    plans = [each.request.planned.plan for each in candidates if each.request]
    at_once, gpus = share_gpus(jobs, plans, len(plans) * repeat, probe, chosen=chosen_gpus, needs_gpus=True)
    for place, each in enumerate(candidates):
        if each.request is None:
            continue
        waiting = in_turn(resolved[each.name].recipe, each.request.planned.plan, alone=gpus is None)
        found, line = resolve(each.name if each.name != BASE else None, *waiting)
        candidates[place] = replace(candidate(each.name, each.description, found) if waiting else each, line=line)
    setup = Setup(base.recipe.name, machine(plan), memory, BASE, candidates, repeat, at_once, gpus)
    return setup, Path(base.recipe.output.root, base.recipe.name)


def _without_upload(  # noqa: PLR0917 - of resolve_request
    recipe: str,
    overrides: Sequence[str],
    presets: Sequence[str] | None,
    context: typer.Context,
    said: set[str],
    variant: str | None,
    *more: str,
) -> tuple[Resolved, tuple[str, ...]]:
    """A recipe or variant that keeps no model and uploads nothing, which is said of each repository.

    And the arguments with which `trainkit run` runs it.
    """
    overrides = (*overrides, *more)
    found = resolve_request(recipe, overrides, presets, context.obj, variant)
    asked = found.recipe.checkpoint
    others = [NO_SAVE] if found.recipe.program.kind == "builtin" and asked.at_end else []
    for place, word in ((asked.push_to_hub.repo, NO_UPLOAD), (asked.copy_to, NO_COPY)):
        if place is not None:
            others.append(word)
            if place not in said:
                sys.stderr.write(one_line(f"note: bench uploads nothing to {place}") + "\n")
                said.add(place)
    if others:
        found = resolve_request(recipe, (*overrides, *others), presets, context.obj, variant)
    presets_used = [word for name in presets or () for word in ("--with", name)]
    options = [*(["--variant", variant] if variant else []), *presets_used]
    own = ["--", *context.obj] if context.obj else []
    return found, (recipe, *overrides, *others, *options, *own)


def chosen(only: str | None, variants: Mapping[str, str]) -> list[str]:
    """The variants to run, in the recipe's order. Raises UsageError for a name that it does not have."""
    from trainkit.recipe.suggestions import did_you_mean

    if not variants:
        raise UsageError("the recipe has no variants to compare", hint="give it some below `variants:`")
    if only is None:
        return list(variants)
    names = [name.strip() for name in only.split(",") if name.strip()]
    for name in names:
        if name not in variants:
            hint = did_you_mean(name, variants, f"its variants are: {', '.join(variants)}")
            raise UsageError(f"the recipe has no variant {name!r}", hint=hint)
    return [name for name in variants if name in names]


def candidate(name: str, description: str, resolved: Resolved) -> Candidate:
    """One recipe, planned; what cannot be planned, or not run here, is refused with the reason."""
    from trainkit.bench import Candidate
    from trainkit.machine.probe import probe

    def request(planned: Planned) -> RunRequest:
        return run_request(planned, resolved, lambda ticket: request(plan_recipe(resolved, probe(ticket=ticket))))

    try:
        planned = plan_recipe(resolved)
    except (RecipeError, MachineError) as error:
        return Candidate(name, description, None, str(error))
    if blockers := planned.plan.blockers:
        return Candidate(name, description, None, "; ".join(notice.what for notice in blockers))
    return Candidate(name, description, request(planned))


def machine(plan: Plan | None) -> str:
    """What the runs used, in words, for the heading of table and plot."""
    from trainkit.machine.probe import probe

    if plan is None or plan.topology.device != "cuda":
        facts = probe()
        return f"{plan.topology.device if plan else 'cpu'} ({facts.cpu_cores} cores, {facts.machine})"
    names = [card.name for card in plan.cards]
    return " + ".join(f"{names.count(name)} \N{MULTIPLICATION SIGN} {name}" for name in dict.fromkeys(names)) or "cuda"
