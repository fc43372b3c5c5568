"""`trainkit doctor`: what is wrong with this machine, with the evidence and the fix."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from trainkit.cli.diagnostics import write_labelled
from trainkit.cli.file_system import working_folder
from trainkit.cli.line import own_program
from trainkit.cli.options import Json, Presets, Variant
from trainkit.cli.pipeline import plan_recipe, resolve_line
from trainkit.errors import ExitCode, MachineError
from trainkit.text import pluralize, wrapped

if TYPE_CHECKING:
    from trainkit.doctor.check import CheckResult, Finding, Target
    from trainkit.machine.facts import Facts

# Seconds: for GPUs that a sleeping driver wakes, and for everything but loading and printing.
PROBE_LIMITS = {"gpus": 8.0}
WHOLE = 18.0
WIDTH = 80
INDENT = 9
DOCTOR_VERSION = 1
QUIET = frozenset({"ok", "skipped"})  # their evidence is in the JSON only


def doctor(context: typer.Context, presets: Presets = None, variant: Variant = None, as_json: Json = False) -> None:
    """Check this machine: packages, CUDA, compilers, network, limits, disks, stale settings. Nothing is changed.

    With a RECIPE, check only what its plan needs. Exit code 4: there is a problem. Takes less than 20 seconds.

    Example: trainkit doctor

    Example: trainkit doctor quickstart --with strategy/ddp
    """
    from trainkit.doctor.check import Commands, private_environment, this_host
    from trainkit.doctor.examine import checks_for, examine
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
        write_labelled(render(results, subject, seconds))
    if any(result.level == "problem" for result in results):
        raise typer.Exit(ExitCode.MACHINE)


def target_of(context: typer.Context, presets: Presets, variant: str | None, facts: Facts) -> Target:
    """The plan of what the line names, on a machine; without a recipe, preset or override, anything."""
    from trainkit.doctor.check import Target
    from trainkit.runner.rendezvous import node_place

    if not (context.args or presets or variant or context.obj or own_program(context)):
        return Target()
    resolved = resolve_line(context, presets, variant)
    plan = plan_recipe(resolved, facts).plan
    rank = 0  # where no scheduler says otherwise: node 0 is the one that listens
    with contextlib.suppress(MachineError):
        rank = node_place(plan, None, os.environ).node
    return Target(plan, resolved.recipe, rank)


def render(results: Sequence[CheckResult], subject: str, seconds: float) -> str:
    """A line for each check that is fine, evidence and fix for each that is not; what was skipped, by its reason."""
    from trainkit.doctor.check import LEVELS

    lines = [f"Doctor: {subject}", ""]
    skipped: dict[str, list[str]] = {}
    for result in results:
        first, *more = sorted(result.findings, key=lambda finding: -LEVELS.index(finding.level))
        if result.level == "skipped":
            skipped.setdefault(result.findings[0].what, []).append(result.title)
            continue
        lines += _finding(f"{result.level:<{INDENT}}{result.title}: ", first)
        for finding in more:
            if finding.level not in QUIET or result.level == "ok":
                label = "" if finding.level == result.level else f"{finding.level}: "
                lines += _finding(" " * INDENT + label, finding)
    for why, titles in skipped.items():
        lines += wrapped(f"{'skipped':<{INDENT}}{', '.join(titles)}: {why}", WIDTH, "", " " * INDENT)
    levels = [result.level for result in results]
    counts = [
        pluralize(levels.count(level), level, "" if level in QUIET else "s")
        for level in reversed(LEVELS)
        if level in levels
    ]
    lines += ["", f"{pluralize(len(results), 'check')} in {seconds:.1f} s: {', '.join(counts)}"]
    return "".join(f"{line}\n" for line in lines)


def _finding(label: str, finding: Finding) -> Iterator[str]:
    yield from wrapped(label + finding.what, WIDTH, "", " " * INDENT)
    for line in finding.evidence if finding.level not in QUIET else ():
        yield from wrapped(f"{' ' * INDENT}| {line}", WIDTH, "", " " * (INDENT + 4))
    for number, line in enumerate(finding.fix):
        # never wrapped: it is there to be pasted
        yield f"{' ' * INDENT}{'fix:' if number == 0 else '    '} {line}"


def as_data(results: Sequence[CheckResult], recipe: str | None, seconds: float) -> dict[str, Any]:
    from trainkit.doctor.check import worst

    return {
        "doctor_version": DOCTOR_VERSION,
        "recipe": recipe,
        "level": worst(result.level for result in results),
        "seconds": round(seconds, 3),
        "checks": [
            {
                "name": result.name,
                "title": result.title,
                "level": result.level,
                "seconds": round(result.seconds, 3),
                "verdicts": [asdict(each) for each in result.findings],
            }
            for result in results
        ],
    }
