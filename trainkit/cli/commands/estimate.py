"""`trainkit estimate`: what a recipe takes, before anything starts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from trainkit.cli.diagnostics import write_text
from trainkit.cli.file_system import write_file
from trainkit.cli.options import Json, On, Presets, Variant
from trainkit.cli.pipeline import cluster_facts, decide_recipe, resolve_line
from trainkit.errors import ExitCode, MachineError, UsageError

if TYPE_CHECKING:
    from trainkit.foresight.estimate import Estimate, Tracing
    from trainkit.launch_plan.model import Foresight
    from trainkit.machine.facts import Facts
    from trainkit.planner.changes import Changed
    from trainkit.recipe.resolved import Resolved

Plot = Annotated[Path | None, Option("--plot", metavar="FILE", help="Draw memory over one step, by part, as SVG.")]
Quick = Annotated[bool, Option("--quick", help="Do not trace the model: take what is known of its architecture.")]
ALL = "all"


def estimate(
    context: typer.Context,
    *,
    presets: Presets = None,
    variant: Variant = None,
    machine: On = None,
    quick: Quick = False,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Say what RECIPE takes on each rank: memory by part, time, and what would change it. Exit code 4: it does not fit.

    Nothing starts, and no GPU is needed: the model's own code runs once without memory
    (on PyTorch's meta device). `--on all` ranks the machine profiles, `--variant all`
    shows each variant of the recipe.

    Example: trainkit estimate quickstart

    Example: trainkit estimate gpt-1.3b --on 1x4090

    Example: trainkit estimate gpt-1.3b --on all

    Example: trainkit estimate efficiency-table --variant all --on 1xv100-16gb
    """
    with tracing_of(quick=quick) as tracing:
        resolved = resolve_line(context, presets, None if variant == ALL else variant)
        facts = facts_for(machine, resolved)
        found = estimated_plan(resolved, facts, tracing)
        changes = changes_of(found, tracing)
        if plot is not None:
            draw(found, plot)
        if as_json:
            show_json(found, changes)
        else:
            show(found, changes)
    if found.foresight().verdict == "too large":
        raise typer.Exit(ExitCode.MACHINE)


def facts_for(machine: str | None, resolved: Resolved) -> Facts:
    """The facts of the machine that is meant."""
    from trainkit.cli.machines import machine_facts

    return machine_facts(machine) if machine else cluster_facts(resolved)


@contextmanager
def tracing_of(*, quick: bool) -> Iterator[Tracing]:
    """Where traces come from: the model's own code, or with `quick` its architecture's sizes alone."""
    from trainkit.foresight.traces import Traces

    with Traces() as traces:
        yield lambda wanted: (traces.get(wanted), "traced")


def estimated_plan(resolved: Resolved, facts: Facts, tracing: Tracing) -> Estimate:
    """The estimate of a recipe on a machine. MachineError where nothing can be told."""
    from trainkit.foresight.estimate import estimated, why_not

    context = decide_recipe(resolved, facts)
    if why := why_not(context):
        raise MachineError(f"what this takes cannot be told: {why}", hint="`trainkit plan` shows the rest")
    found = estimated(context, tracing)
    if found is None:
        raise MachineError("what this takes cannot be told from the architecture's sizes", hint="leave --quick out")
    return found


def changes_of(found: Estimate, tracing: Tracing) -> list[Changed]:
    """What other settings would come to."""
    from trainkit.planner.changes import what_if

    return what_if(found.context, tracing)


def show(found: Estimate, changes: list[Changed]) -> None:
    """The page."""
    from trainkit.foresight.render import changes_table, page

    context, foresight = found.context, found.foresight()
    batch = context.batch
    cards = f"{context.ranks} x {context.cards[0].name}" if context.cards else f"{context.ranks} x CPU"
    write_text(f"{context.recipe.name}: {context.strategy} on {cards}, {context.dtype}, micro batch {batch.micro}")
    write_text(f" x accumulation {batch.accumulation}\n\n")
    write_text("\n".join(page(foresight)) + "\n")
    if changes:
        write_text("\nWhat would change it, the greatest saving first\n")
        rows = ((each.change.words, each.foresight, each.change.costs) for each in changes)
        write_text(changes_table(foresight, rows))


def show_json(found: Estimate, changes: list[Changed]) -> None:
    """The same as data."""
    data: dict[str, Any] = as_data(found.foresight())
    data["changes"] = [
        {"settings": dict(each.change.settings), "same_numbers": each.change.same, **as_data(each.foresight)}
        for each in changes
    ]
    sys.stdout.write(json.dumps(data, indent=2) + "\n")


def as_data(found: Foresight) -> dict[str, Any]:
    """An estimate for scripts: bytes and seconds."""
    return {**asdict(found), "parts": dict(found.parts), "headroom": found.headroom}


def draw(found: Estimate, path: Path) -> None:
    """The picture of a step."""
    from trainkit.foresight.estimate import limit_of
    from trainkit.foresight.render import picture

    if path.suffix != ".svg":
        raise UsageError(f"--plot writes SVG, and {path} does not end in .svg", hint=f"name it {path.stem}.svg")
    context = found.context
    write_file(
        path, picture(found.strategy.device, limit_of(context) - found.outside, context.recipe.name), "name another"
    )
