"""`trainkit doctor`: what is wrong with this machine, with the evidence and the fix."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from trainkit.cli.disk import working_folder
from trainkit.cli.options import Json, Presets, Variant
from trainkit.cli.pipeline import plan_recipe, resolve_line
from trainkit.errors import ExitCode, MachineError

if TYPE_CHECKING:
    from trainkit.doctor.check import Target
    from trainkit.machine.facts import Facts

# Seconds: for cards that a sleeping driver wakes, and for everything but loading and printing.
PROBE_LIMITS = {"gpus": 8.0}
WHOLE = 18.0


def doctor(context: typer.Context, presets: Presets = None, variant: Variant = None, as_json: Json = False) -> None:
    """Examine this machine: packages, CUDA, compilers, network, limits, disks, stale settings. Nothing is changed.

    With a RECIPE, only what its plan needs. Exit code 4 means that there is a problem. Takes less than 20 seconds.

    Example: trainkit doctor

    Example: trainkit doctor quickstart --with strategy/ddp
    """
    from trainkit.doctor.check import this_host
    from trainkit.doctor.commands import Commands, private_environment
    from trainkit.doctor.examine import examine
    from trainkit.doctor.registry import checks_for
    from trainkit.doctor.rendering import as_data, render
    from trainkit.machine.probe import probe

    started = time.monotonic()
    folder = Path(working_folder())
    facts = probe(limits=PROBE_LIMITS)
    target = target_of(context, presets, variant, facts)
    with private_environment() as environ:
        commands = Commands(environ)
        host = this_host(facts, commands, folder, environ)
        left = WHOLE - (time.monotonic() - started)
        results = examine(checks_for(target), host, target, left, commands.close)
    seconds = time.monotonic() - started
    name = target.recipe.name if target.recipe else None
    if as_json:
        sys.stdout.write(json.dumps(as_data(results, name, seconds), indent=2) + "\n")
    else:
        subject = f"what the plan of {name} needs of this machine" if name else "this machine, for any recipe"
        sys.stdout.write(render(results, subject, seconds))
    if any(result.level == "problem" for result in results):
        raise typer.Exit(ExitCode.MACHINE)


def target_of(context: typer.Context, presets: Presets, variant: str | None, facts: Facts) -> Target:
    """The plan of what the line names, on a machine; without a recipe, preset or override, anything."""
    from trainkit.doctor.check import Target
    from trainkit.runner.rendezvous import node_rank

    if not (context.args or presets or variant or context.obj):
        return Target()
    resolved = resolve_line(context, presets, variant)
    plan = plan_recipe(resolved, facts).plan
    rank = 0  # where no scheduler says otherwise: node 0 is the one that listens
    with contextlib.suppress(MachineError):
        rank = node_rank(plan, None, os.environ)
    return Target(plan, resolved.recipe, rank)
