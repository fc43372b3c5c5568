"""`trainkit plan`: show what a recipe would execute, or export it for another tool."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from trainkit.cli.diagnostics import show_diagnostics, write_labelled, write_text
from trainkit.cli.file_system import write_file
from trainkit.cli.options import Json, On, Presets, Variant, Wait
from trainkit.cli.pipeline import cluster_facts, plan_recipe, resolve_line, resolve_request, show_warnings
from trainkit.errors import Diagnostic, ExitCode, UsageError
from trainkit.files import is_there, parse_json, read_whole

if TYPE_CHECKING:
    from trainkit.launch_plan.model import Plan
    from trainkit.machine.facts import Facts
    from trainkit.recipe.resolved import Resolved

NARROWEST = 60  # columns
Shell = Annotated[
    bool, Option("--shell", help="Print a shell script that runs the plan without trainkit's command line.")
]
Diff = Annotated[
    str | None,
    Option("--diff", metavar="OTHER", help="Show the differences from the plan of another recipe or run."),
]
Export = Annotated[
    str | None, Option("--export", metavar="TOOL", help="Export it for accelerate, deepspeed or hf (Trainer).")
]
Output = Annotated[
    str | None,
    Option("--output", metavar="FOLDER", help="Folder or file for --export; by default a single file is printed."),
]


def plan(
    context: typer.Context,
    *,
    presets: Presets = None,
    variant: Variant = None,
    machine: On = None,
    wait: Wait = False,
    as_json: Json = False,
    shell: Shell = False,
    diff: Diff = None,
    export: Export = None,
    output: Output = None,
) -> None:
    """Show what RECIPE, or PROGRAM, would execute, without starting it. Exit code 4: this machine cannot run it.

    PROGRAM is a script, -m and a module, or a launcher's command, as for `run`.

    Example: trainkit plan quickstart batch.micro=8 --bf16

    Example: trainkit plan fsdp --on 8xh100

    Example: trainkit plan zero2 --export deepspeed

    Example: trainkit plan --on 8xh100 torchrun --nproc_per_node 8 train.py
    """
    from trainkit.cli.machines import machine_facts

    if sum((as_json, shell, diff is not None, export is not None)) > 1:
        raise UsageError("--json, --shell, --diff and --export exclude one another", hint="give one of them")
    if output is not None and export is None:
        raise UsageError("--output is for --export", hint="add --export accelerate, deepspeed or hf")
    resolved = resolve_line(context, presets, variant, waits=wait)
    facts = machine_facts(machine) if machine else cluster_facts(resolved)
    planned = plan_recipe(resolved, facts)
    if export is not None:
        write_export(resolved, facts, export, output)
    else:
        other = other_plan(diff, facts) if diff is not None else None
        write_plan(planned.plan, resolved, other, as_json=as_json, shell=shell)
    if planned.plan.blockers:
        raise typer.Exit(ExitCode.MACHINE)


def write_plan(plan: Plan, resolved: Resolved, other: Plan | None, *, as_json: bool, shell: bool) -> None:
    """The plan on standard output: compared with another, as JSON, as a script, or as a page."""
    # Each way to show the plan is imported for itself: starting takes longer than planning.
    if other is not None:
        from trainkit.launch_plan.render import explain

        write_text(explain.render_diff(other, plan))
    elif as_json:
        from trainkit.launch_plan.model import plan_to_json

        sys.stdout.write(json.dumps(plan_to_json(plan), indent=2) + "\n")
    elif shell:
        from trainkit.launch_plan.render import shell as shell_renderer
        from trainkit.recipe.yaml_writer import resolved_yaml

        script = shell_renderer.render(plan, resolved_yaml(resolved))
        sys.stdout.flush()
        sys.stdout.buffer.write(script.encode("utf-8", "surrogateescape"))  # names of files byte for byte
    else:
        from trainkit.launch_plan.render import table

        width = table.WIDTH
        if sys.stdout.isatty():
            width = max(min(shutil.get_terminal_size().columns, width), NARROWEST)
        page = table.render(plan, width)
        write_labelled(page)


def other_plan(word: str, facts: Facts) -> Plan:
    """The plan of a run directory (its plan.json), a plan.json, or a recipe planned for the same machine."""
    from trainkit.launch_plan.model import plan_from_json

    path = Path(word)
    stored = path / "plan.json" if path.is_dir() else path
    if stored.name.endswith(".json") and stored.is_file():
        try:
            data = parse_json(read_whole(stored, links=stored == path))
            if not isinstance(data, dict) or "plan_version" not in data:
                raise ValueError("it has no plan_version")
            return plan_from_json(data)
        except (ValueError, KeyError, TypeError, OSError) as error:
            what = f"{stored} is not a plan of this trainkit: {error}"
            raise UsageError(what, hint="name a recipe or a run directory") from error
    return plan_recipe(show_warnings(resolve_request(word)), facts).plan


def write_export(resolved: Resolved, facts: Facts, tool: str, folder: str | None) -> None:
    """Export the plan of a valid recipe. Raises UsageError where it cannot be written."""
    from trainkit.convert.exporting import EXPORTS, export
    from trainkit.planner.build import decide

    if tool not in EXPORTS:
        raise UsageError(f"there is no export to {tool!r}", hint=f"choose one of: {', '.join(EXPORTS)}")
    # A file of another tool takes the decisions alone, without argv and environment of a plan.
    context, *_ = decide(resolved, facts, ())
    made = export(context, tool, folder or ".")
    if made.left:
        what = f"not supported by {tool}, left out: {', '.join(made.left)}"
        show_diagnostics((Diagnostic("note", what, hint="set them in the program itself, or keep the recipe"),))
    where = "the first line of the file shows the whole command"
    show_diagnostics([Diagnostic("note", each, hint=where) for each in made.notes])
    if folder is not None:
        taken = [name for name in made.files if is_there(Path(folder, name))]
        if taken:
            raise UsageError(f"{Path(folder, taken[0])} exists", hint="give another --output")
        for name, content in made.files.items():
            write_file(Path(folder, name), content, "give another --output")
            write_text(f"{Path(folder, name)}\n")
    elif len(made.files) == 1:
        sys.stdout.write(next(iter(made.files.values())))
    else:
        raise UsageError(f"there are {len(made.files)} files: {', '.join(made.files)}", hint="add --output FOLDER")
