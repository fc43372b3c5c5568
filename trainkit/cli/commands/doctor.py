"""`trainkit doctor`: what is wrong with this machine, with the evidence and the fix."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from trainkit.cli.disk import working_folder
from trainkit.cli.options import Json, Presets, Variant
from trainkit.cli.pipeline import Invocation, plan_words, resolve_line, split_words
from trainkit.errors import ExitCode, MachineError

if TYPE_CHECKING:
    from trainkit.doctor.surroundings import Aim
    from trainkit.machine.facts import Facts
    from trainkit.plan.model import Plan

# Seconds: for cards that a sleeping driver wakes, and for everything but loading and printing.
PROBE_LIMITS = {"gpus": 8.0}
WHOLE = 18.0


def doctor(context: typer.Context, presets: Presets = None, variant: Variant = None, as_json: Json = False) -> None:
    """Examine this machine: packages, CUDA, compilers, network, limits, disks, stale settings. Nothing is changed.

    With a RECIPE, only what its plan needs. Exit code 4 means that there is a problem. Takes less than 20 seconds.

    Example: trainkit doctor

    Example: trainkit doctor quickstart --with strategy/ddp
    """
    from trainkit.doctor.all_checks import checks_for
    from trainkit.doctor.commands import Commands
    from trainkit.doctor.examine import examine
    from trainkit.doctor.here import surroundings_here
    from trainkit.doctor.own_environment import own_environment
    from trainkit.doctor.rendering import as_data, render
    from trainkit.machine.probe import probe

    started = time.monotonic()
    folder = Path(working_folder())
    facts = probe(limits=PROBE_LIMITS)
    aim = aim_of(context, presets or (), variant, facts)
    with own_environment() as environ:
        commands = Commands(environ)
        surroundings = surroundings_here(facts, commands, folder, environ)
        left = WHOLE - (time.monotonic() - started)
        findings = examine(checks_for(aim), surroundings, aim, left, commands.close)
    seconds = time.monotonic() - started
    name = aim.recipe.name if aim.recipe else None
    if as_json:
        sys.stdout.write(json.dumps(as_data(findings, name, seconds), indent=2) + "\n")
    else:
        subject = f"what the plan of {name} needs of this machine" if name else "this machine, for any recipe"
        sys.stdout.write(render(findings, subject, seconds))
    if any(finding.level == "problem" for finding in findings):
        raise typer.Exit(ExitCode.MACHINE)


def aim_of(context: typer.Context, presets: Sequence[str], variant: str | None, facts: Facts) -> Aim:
    """The plan of what the line names, on a machine; without a recipe, preset or override, anything."""
    from trainkit.doctor.surroundings import Aim

    invocation: Invocation = context.obj
    line = split_words(context.args, most=1, what="one recipe")
    if not (line.positional or line.overrides or presets or variant or invocation.program):
        return Aim()
    resolved = resolve_line("doctor", context.args, presets, invocation.program, variant)
    plan = plan_words(resolved, facts).plan
    return Aim(plan, resolved.recipe, scheduled_rank(plan))


def scheduled_rank(plan: Plan) -> int:
    """This machine's number as a scheduler tells it; that of node 0, which listens, where none does."""
    from trainkit.runner.nodes import node_rank

    try:
        return node_rank(plan, None, os.environ)
    except MachineError:
        return 0
