"""What stops a plan on this machine, said before anything starts: its own blockers and the doctor's fast checks."""

from __future__ import annotations

import os

from trainkit.cli.diagnostics import show_diagnostics
from trainkit.doctor.before_run import look
from trainkit.doctor.surroundings import Aim
from trainkit.errors import Diagnostic, MachineError
from trainkit.machine.facts import Facts
from trainkit.plan.model import Plan
from trainkit.recipe.schema import Recipe
from trainkit.runner.nodes import node_rank


def refuse_unfit(plan: Plan, recipe: Recipe, facts: Facts, given_rank: int | None) -> None:
    """Say the doctor's warnings. Raises MachineError with all that stops this plan here."""
    found = look(facts, Aim(plan, recipe, node_rank(plan, given_rank, os.environ)))
    show_diagnostics(each for each in found if each.severity == "warning")
    blockers = [notice for notice in plan.notices if notice.severity == "blocker"]
    refused = [Diagnostic("error", notice.what, hint=notice.hint) for notice in blockers]
    refused += [each for each in found if each.severity == "error"]
    if refused:
        raise MachineError(refused)
