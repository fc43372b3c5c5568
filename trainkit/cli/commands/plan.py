"""`trainkit plan`: what would be executed, without executing it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainkit.cli.grammar import Invocation
from trainkit.cli.options import Json, On, Presets, Variant
from trainkit.cli.streams import write_script
from trainkit.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from trainkit.plan.model import Plan

NARROWEST = 60  # columns


def plan(
    context: typer.Context,
    *,
    presets: Presets = None,
    variant: Variant = None,
    machine: On = None,
    as_json: Json = False,
    shell: Annotated[
        bool, typer.Option("--shell", help="Print a shell script that runs the plan without trainkit's command line.")
    ] = False,
    diff: Annotated[
        str | None,
        typer.Option("--diff", metavar="OTHER", help="Show what differs from the plan of another recipe or run."),
    ] = None,
    export: Annotated[
        str | None,
        typer.Option("--export", metavar="TOOL", help="Write what accelerate, deepspeed or hf (Trainer) is told."),
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", metavar="FOLDER", help="Where --export writes; one file is printed.")
    ] = None,
) -> None:
    """Show what RECIPE would execute; nothing is started. Exit code 4 means that this machine cannot run it.

    Example: trainkit plan quickstart batch.micro=8 --bf16

    Example: trainkit plan fsdp --on 8xh100

    Example: trainkit plan zero2 --export deepspeed
    """
    from trainkit.cli.machines import machine_facts
    from trainkit.cli.pipeline import plan_words, resolve_line
    from trainkit.plan.render import diff as diff_renderer
    from trainkit.plan.render import shell as shell_renderer
    from trainkit.plan.render import table
    from trainkit.plan.serialize import plan_to_json
    from trainkit.recipe.yaml.writer import resolved_yaml

    if sum((as_json, shell, diff is not None, export is not None)) > 1:
        raise UsageError("--json, --shell, --diff and --export exclude one another", hint="give one of them")
    if output is not None and export is None:
        raise UsageError("--output is where --export writes", hint="add --export accelerate, deepspeed or hf")
    invocation: Invocation = context.obj
    resolved = resolve_line("plan", context.args, presets or (), invocation.program, variant)
    facts = machine_facts(machine)
    planned = plan_words(resolved, facts)
    if as_json:
        sys.stdout.write(json.dumps(plan_to_json(planned.plan), indent=2) + "\n")
    elif shell:
        write_script(shell_renderer.render(planned.plan, resolved_yaml(resolved)))
    elif export is not None:
        from trainkit.cli.exporting import write_export

        write_export(resolved, facts, export, output)
    elif diff is not None:
        sys.stdout.write(diff_renderer.render(other_plan(diff), planned.plan))
    else:
        sys.stdout.write(table.render(planned.plan, _columns(table.WIDTH)))
    if any(notice.severity == "blocker" for notice in planned.plan.notices):
        raise typer.Exit(ExitCode.MACHINE)


def _columns(widest: int) -> int:
    """The terminal's width, up to the page's own; in a pipe or a file, that."""
    return max(min(shutil.get_terminal_size().columns, widest), NARROWEST) if sys.stdout.isatty() else widest


def other_plan(word: str) -> Plan:
    """The plan of a run directory (its plan.json), a plan.json, or a recipe planned for this machine."""
    from trainkit.cli.pipeline import plan_words, resolve_words
    from trainkit.plan.serialize import plan_from_json

    path = Path(word)
    stored = path / "plan.json" if path.is_dir() else path
    if stored.name.endswith(".json") and stored.is_file():
        try:
            data = json.loads(stored.read_text(encoding="utf-8"))
            if not isinstance(data, dict) or "plan_version" not in data:
                raise ValueError("it has no plan_version")
            return plan_from_json(data)
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise UsageError(
                f"{stored} is not a plan of this trainkit: {error}", hint="name a recipe or a run directory"
            ) from error
    return plan_words(resolve_words(word, (), ())).plan
