"""`trainkit run`: plan a recipe, then execute exactly that plan."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from trainkit.cli.diagnostics import show_diagnostics
from trainkit.cli.options import Presets, Variant, Wait
from trainkit.cli.pipeline import plan_recipe, resolve_line, run_request
from trainkit.errors import Diagnostic, MachineError, RecipeError, UsageError
from trainkit.schedulers.base import Allocation, Place
from trainkit.schedulers.registry import place_in, shares_console

if TYPE_CHECKING:
    from trainkit.launch_plan.model import Plan
    from trainkit.machine.facts import Facts
    from trainkit.recipe.resolved import Resolved
    from trainkit.recipe.schema import Recipe
    from trainkit.runner.request import RunRequest


def run(
    context: typer.Context,
    *,
    presets: Presets = None,
    variant: Variant = None,
    node_rank: Annotated[
        int | None,
        Option("--node-rank", min=0, help="This machine's number among several, if no scheduler sets it."),
    ] = None,
    wait: Wait = False,
    detach: Annotated[
        bool, Option("--detach", help="Leave the run to itself and return when it has started; `logs -f` follows it.")
    ] = False,
    # Not an option of `run`: it is taken so that the error can say what is meant.
    machine: Annotated[str | None, Option("--on", hidden=True)] = None,
    # Of a process that `--detach` or the Python API starts: the descriptor on which it says where the run is.
    tell: Annotated[int | None, Option("--tell", hidden=True)] = None,
) -> None:
    """Run RECIPE (a file, a shipped name, or a run directory). Arguments after -- are passed to the program.

    PROGRAM is a Python script, -m and a module, or the command that you start
    it with today: torchrun, accelerate launch, deepspeed, python, perhaps after variable
    assignments. Arguments before it are trainkit's, arguments after it the program's.

    Example: trainkit run quickstart train.steps=50 --bf16

    Example: trainkit run train.py --lr 1e-3

    Example: trainkit run --nproc_per_node 2 train.py --lr 1e-3

    Example: trainkit run torchrun --nproc_per_node 2 train.py --lr 1e-3

    Example: trainkit run recipe.yaml --wait --detach
    """
    if machine is not None:
        raise UsageError(f"a run is on this machine, not on {machine}", hint="`trainkit plan RECIPE --on` plans for it")
    if detach and tell is None:
        from trainkit.cli.detach import start

        raise typer.Exit(start(sys.argv[2:]))
    resolved = resolve_line(context, presets, variant, waits=wait)
    if tell is not None:
        from trainkit.cli.detach import Teller, refuse
        from trainkit.runner.execute import execute

        told = Teller(tell, detached=detach)
        refuse(resolved, detached=detach)
        raise typer.Exit(execute(requested(resolved, node_rank), told))
    run_under_srun(resolved.recipe)
    if node_rank is None and resolved.recipe.nodes.count > 1 and shares_console(os.environ):
        raise typer.Exit(run_beside_others(resolved))
    from trainkit.runner.execute import execute

    raise typer.Exit(execute(requested(resolved, node_rank)))


def run_beside_others(resolved: Resolved) -> int:
    """Run on one node of a step of srun; the exit code. What the nodes refuse is said by node 0, once for all.

    Raises what this machine refuses on node 0, and where node 0 does not answer.
    """
    from trainkit.runner.execute import execute
    from trainkit.runner.nodes.roll_call import ReportedElsewhereError

    try:
        request = requested(resolved, None)
    except (MachineError, RecipeError) as error:
        if is_said_by_node_0(resolved.recipe, error):
            return int(error.exit_code)
        raise
    try:
        return execute(request)
    except ReportedElsewhereError as error:
        return int(error.exit_code)


def is_said_by_node_0(recipe: Recipe, error: MachineError | RecipeError) -> bool:
    """Tell the other nodes why this one cannot run the recipe; whether it is another one, and node 0 says it."""
    from trainkit.runner.nodes.assembly import START_SECONDS, Rendezvous, report_unfit
    from trainkit.runner.nodes.roll_call import ReportedElsewhereError
    from trainkit.schedulers.jobs.job_script import say

    place, nodes = place_in(os.environ), recipe.nodes
    rendezvous = Rendezvous(recipe.name, nodes.count, nodes.rendezvous, recipe.output.root)
    if isinstance(place, Place) and place.node < rendezvous.nodes:
        try:
            report_unfit(rendezvous, place, error, say, START_SECONDS)
        except ReportedElsewhereError:
            return True
        except MachineError:  # node 0's own, which counts less than the error itself; or nobody is there
            return False
    return False


def requested(resolved: Resolved, node_rank: int | None, ticket: int | None = None) -> RunRequest:
    """The recipe, planned for this machine as it is now; called again when another run takes a chosen GPU meanwhile.

    ticket: of the run, when its turn has come after it waited for GPUs. Raises MachineError where the machine cannot
    run it.
    """
    from trainkit.machine.probe import probe

    facts = probe(ticket=ticket)
    planned = plan_recipe(resolved, facts)
    refuse_unfit(planned.plan, resolved.recipe, facts, node_rank, again=ticket is not None)
    return run_request(planned, resolved, lambda ticket: requested(resolved, node_rank, ticket), node_rank)


def run_under_srun(recipe: Recipe) -> None:
    """In the batch script of a job on several nodes: run this command on each of them, and exit with its code."""
    place = place_in(os.environ)
    if isinstance(place, Allocation) and recipe.nodes.count > 1:
        from trainkit.schedulers.jobs.node import run_step

        runs = Path(recipe.output.root).absolute() / recipe.name
        raise typer.Exit(run_step(place, recipe.nodes.count, runs, os.environ))


def refuse_unfit(
    plan: Plan, recipe: Recipe, facts: Facts, given_rank: int | Place | None, *, again: bool = False
) -> None:
    """Show the warnings of the doctor's fast checks. Raises MachineError with all that stops the plan on this machine.

    These are the plan's own blockers and the problems that the checks find. again: the warnings have been shown.
    """
    from trainkit.doctor.check import Target
    from trainkit.doctor.examine import FAST, examine_before_run
    from trainkit.runner.rendezvous import node_place

    target = Target(plan, recipe, node_place(plan, given_rank, os.environ).node)
    found = examine_before_run(FAST, facts, target)
    show_diagnostics(each for each in found if each.severity == "warning" and not again)
    refused = [Diagnostic("error", notice.what, hint=notice.hint) for notice in plan.blockers]
    refused += [each for each in found if each.severity == "error"]
    if refused:
        raise MachineError(refused)
