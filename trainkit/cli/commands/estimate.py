"""`trainkit estimate`: what a recipe takes, before anything starts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from trainkit.cli.diagnostics import write_text
from trainkit.cli.file_system import write_file
from trainkit.cli.options import Json, On, Presets, Variant
from trainkit.cli.pipeline import cluster_facts, decide_recipe, measured_here, resolve_line
from trainkit.errors import ExitCode, MachineError, RecipeError, UsageError

if TYPE_CHECKING:
    from trainkit.foresight.estimate import Estimate, Foresee, Tracing
    from trainkit.launch_plan.context import Context
    from trainkit.launch_plan.model import Foresight
    from trainkit.machine.facts import Facts
    from trainkit.planner.changes import Changed
    from trainkit.recipe.resolved import Resolved

    Source = Callable[[Context], Tracing]

Plot = Annotated[Path | None, Option("--plot", metavar="FILE", help="Draw memory over one step, by part, as SVG.")]
Quick = Annotated[bool, Option("--quick", help="Do not trace the model: take what is known of its architecture.")]
Fit = Annotated[
    bool,
    Option(
        "--fit", help="Print the nearest settings with which it fits, as they are typed; nothing if it fits as it is."
    ),
]
Calibration = Annotated[
    bool, Option("--calibration", help="Show what runs on this machine were measured to take, and stop.")
]
ALL = "all"
ANSWER = 4096  # tokens of an answer with its prompt, of which its cache is shown


def estimate(
    context: typer.Context,
    *,
    presets: Presets = None,
    variant: Variant = None,
    machine: On = None,
    quick: Quick = False,
    plot: Plot = None,
    fit: Fit = False,
    calibration: Calibration = False,
    as_json: Json = False,
) -> None:
    """Say what RECIPE takes on each rank: memory by part, time, and what would change it. Exit code 4: it does not fit.

    Nothing starts, and no GPU is needed: the model's own code runs once without memory
    (on PyTorch's meta device). `--on all` ranks the machine profiles, `--variant all`
    shows each variant of the recipe.

    Example: trainkit estimate quickstart

    Example: trainkit estimate gpt-1.3b --on 1x4090

    Example: trainkit estimate gpt-1.3b --on all

    Example: trainkit run gpt-1.3b $(trainkit estimate gpt-1.3b --fit)

    Example: trainkit estimate efficiency-table --variant all --on 1xv100-16gb
    """
    if calibration:
        show_calibration()
        return
    if variant == ALL and machine == ALL:
        raise UsageError("--variant all and --on all are two tables", hint="give one of them")
    with tracing_of(quick=quick) as tracing:
        if machine == ALL:
            table = machines_table(context, presets, variant, tracing)
        elif fit:
            raise typer.Exit(nearest(resolve_line(context, presets, variant), machine, tracing))
        elif variant == ALL:
            table = variants_table(context, presets, machine, tracing)
        else:
            fits = one(resolve_line(context, presets, variant), machine, tracing, plot, as_json=as_json)
            if not fits:
                raise typer.Exit(ExitCode.MACHINE)
            return
    sys.stdout.write(json.dumps([row.as_data() for row in table], indent=2) + "\n" if as_json else rows_as_text(table))


def one(resolved: Resolved, machine: str | None, tracing: Source, plot: Path | None, *, as_json: bool) -> bool:
    """The page of one recipe on one machine; whether it fits."""
    from trainkit.planner.changes import what_if

    found = estimated_plan(resolved, facts_for(machine, resolved), tracing)
    foresight = found.foresight()
    changes = what_if(found.context, foresee_by(tracing))
    if wider := on_enough_nodes(found.context, foresight, tracing):
        changes.append(wider)
    if plot is not None:
        draw(found, plot)
    if as_json:
        show_json(found, changes)
    else:
        show(found, changes)
    return "too large" not in (foresight.verdict, foresight.start_verdict)


def foresee_by(tracing: Source) -> Foresee:
    """Estimates of other plans, from traces of the same source."""
    from trainkit.foresight.estimate import foreseen

    return lambda other: foreseen(other, tracing(other), measured_here(other))


def on_enough_nodes(context: Context, found: Foresight, tracing: Source) -> Changed | None:
    """Where a plan is too large: the same on as many such machines as it fits on."""
    from trainkit.planner.changes import on_more_nodes

    return on_more_nodes(context, foresee_by(tracing)) if found.verdict == "too large" else None


def nearest(resolved: Resolved, machine: str | None, tracing: Source) -> int:
    """Print the settings with which a recipe fits on a machine; the exit code."""
    from trainkit.planner.changes import fits, remedy

    found = estimated_plan(resolved, facts_for(machine, resolved), tracing)
    if fits(found.foresight()):
        return ExitCode.OK
    change = remedy(found.context, foresee_by(tracing))
    if change is None:
        raise MachineError("no settings are known with which it fits", hint="see `trainkit estimate RECIPE --on all`")
    if not change.change.same:
        sys.stderr.write(f"note: these settings change what is trained ({change.change.costs})\n")
    write_text(f"{change.change.words}\n")
    return ExitCode.OK


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a table of machines or of variants. fault: why nothing can be told of it."""

    name: str
    foresight: Foresight | None
    memory: int = 0  # of all GPUs of the machine together
    published: str = ""
    fault: str = ""
    nodes: int = 0  # of such machines, on which it fits where one does not suffice

    def as_data(self) -> dict[str, Any]:
        """For scripts."""
        found = as_data(self.foresight) if self.foresight else {"fault": self.fault}
        return {"name": self.name, **found, **({"fits_on_nodes": self.nodes} if self.nodes else {})}


def machines_table(
    context: typer.Context, presets: list[str] | None, variant: str | None, tracing: Source
) -> list[Row]:
    """The recipe on each machine profile: what fits first, by price where profiles have one, else by size."""
    from trainkit.cli.machines import machine_facts, profiles

    resolved = resolve_line(context, presets, variant)
    found = []
    for name in profiles():
        facts = machine_facts(name)
        if facts.gpus:
            memory = sum(each.memory_total for each in facts.gpus)
            found.append(replace(row_of(name, resolved, facts, tracing), memory=memory))
    return sorted(found, key=lambda row: (not (row.foresight and row.foresight.verdict == "fits"),
                                          (row.foresight and row.foresight.price) or 0.0, row.memory))  # fmt: skip


def variants_table(
    context: typer.Context, presets: list[str] | None, machine: str | None, tracing: Source
) -> list[Row]:
    """The recipe and each of its variants on one machine, beside published figures where there are any."""
    from trainkit.foresight.published import published
    from trainkit.recipe.extends import BASE

    base = resolve_line(context, presets, None)
    names = [None, *base.variants]
    rows = []
    for name in names:
        resolved = base if name is None else resolve_line(context, presets, name)
        row = row_of(name or BASE, resolved, facts_for(machine, resolved), tracing)
        rows.append(replace(row, published=published(base.recipe.name, name or BASE)))
    return rows


def row_of(name: str, resolved: Resolved, facts: Facts, tracing: Source) -> Row:
    """One line; a plan that is refused, or of which nothing can be told, is one too."""
    from trainkit.planner.dtype import kernel_notices, precision_notices
    from trainkit.rule import check

    try:
        found = estimated_plan(resolved, facts, tracing)
        stops = [
            each for each in check((precision_notices, kernel_notices), found.context) if each.severity == "blocker"
        ]
        if stops:
            return Row(name, None, fault=stops[0].what)
        foresight = found.foresight()
        wider = on_enough_nodes(found.context, foresight, tracing)
        return Row(name, foresight, nodes=wider.change.settings["nodes.count"] if wider else 0)
    except (MachineError, RecipeError) as error:
        return Row(name, None, fault=error.diagnostics[0].what)


def rows_as_text(rows: list[Row]) -> str:
    """The table for people."""
    from trainkit.foresight.render import time_in_words
    from trainkit.text import format_memory, table

    published = any(row.published for row in rows)
    cells = [("", "in all", "of", "verdict", "time", *(("published (V100)",) if published else ()))]
    for row in rows:
        found, last = row.foresight, (row.published,) if published else ()
        if found is None:
            cells.append((row.name, "", "", "", row.fault, *last))
        else:
            sizes = format_memory(found.total), format_memory(found.limit)
            verdict = f"{found.verdict}; {row.nodes} of them fit" if row.nodes else found.verdict
            cells.append((row.name, *sizes, verdict, time_in_words(found), *last))
    return table(cells)


def show_calibration() -> None:
    """Each device that runs were measured on: how many, what a process takes beside tensors, how wrong times were."""
    from statistics import median

    from trainkit.foresight.calibration import beside
    from trainkit.foresight.measured import every_measurement
    from trainkit.text import format_memory, table

    cells = [("device", "driver", "torch", "runs", "beside tensors", "step, measured by foreseen")]
    for device, records in every_measurement():
        outside, timed = (
            beside(records),
            [each.seconds / each.foreseen for each in records if each.foreseen and each.seconds],
        )
        cells.append((device["device"], device["driver"], device["torch"], str(len(records)),
                      format_memory(outside) if outside else "", f"{median(timed):.2f}" if timed else ""))  # fmt: skip
    if len(cells) == 1:
        write_text("nothing was measured yet: each run that ends well adds to it\n")
        return
    write_text(table(cells))


def facts_for(machine: str | None, resolved: Resolved) -> Facts:
    """The facts of the machine that is meant."""
    from trainkit.cli.machines import machine_facts

    return machine_facts(machine) if machine else cluster_facts(resolved)


@contextmanager
def tracing_of(*, quick: bool) -> Iterator[Callable[[Context], Tracing]]:
    """Where traces come from: the model's own code, or with `quick` what is known already."""
    from trainkit.foresight.estimate import known_or_formula
    from trainkit.foresight.traces import Traces
    from trainkit.recipe.grid import grid_sizes

    with Traces() as traces:

        def source(context: Context) -> Tracing:
            if quick or grid_sizes(context.recipe).divides_blocks:  # a trace is of whole blocks
                return known_or_formula(context, lambda _: None)
            return lambda wanted: (traces.get(wanted), "traced")

        yield source


def estimated_plan(resolved: Resolved, facts: Facts, tracing: Source) -> Estimate:
    """The estimate of a recipe on a machine. MachineError where nothing can be told."""
    from trainkit.foresight.estimate import estimated, why_not

    context = decide_recipe(resolved, facts)
    if why := why_not(context):
        raise MachineError(f"what this takes cannot be told: {why}", hint="`trainkit plan` shows the rest")
    found = estimated(context, tracing(context), measured_here(context))
    if found is None:
        raise MachineError("what this takes cannot be told from the architecture's sizes", hint="leave --quick out")
    return found


def show(found: Estimate, changes: list[Changed]) -> None:
    """The page."""
    from trainkit.foresight.render import changes_table, page

    context, foresight = found.context, found.foresight()
    batch = context.batch
    cards = f"{context.ranks} x {context.cards[0].name}" if context.cards else f"{context.ranks} x CPU"
    write_text(f"{context.recipe.name}: {context.strategy} on {cards}, {context.dtype}, micro batch {batch.micro}")
    write_text(f" x accumulation {batch.accumulation}\n\n")
    write_text("\n".join(page(foresight)) + f"\n  {found.use().words(ANSWER)}\n")
    if changes:
        write_text("\nWhat would change it, the greatest saving first\n")
        rows = ((each.change.words, each.foresight, each.change.costs) for each in changes)
        write_text(changes_table(foresight, rows))


def show_json(found: Estimate, changes: list[Changed]) -> None:
    """The same as data."""
    data: dict[str, Any] = {**as_data(found.foresight()), "use": asdict(found.use())}
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
