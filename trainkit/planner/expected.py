"""What the run expects of a program of the user's own: the rank wrapper compares each rank with it."""

from __future__ import annotations

from trainkit.lazy import load
from trainkit.plan.context import Context
from trainkit.plan.model import Variable
from trainkit.plan.provenance import Source, SourcedFile, Token, json_file, token
from trainkit.recipe.schema.launching import ON_ACCELERATE, OWN_DEFAULTS

EXPECTED = "expected.json"
RULE = "the first optimizer step of each rank is compared with the plan, through a hook on PYTHONPATH"


def is_verified(context: Context) -> bool:
    """Whether the run has to show what is in force."""
    program = context.recipe.program
    return program.kind in ON_ACCELERATE if program.verify == "auto" else program.verify


def wrapper(context: Context) -> tuple[Token, ...]:
    """The argv for the rank wrapper."""
    if not is_verified(context):
        return ()
    keys = ("program.verify",) if context.resolved.given("program.verify") else ()
    return (token("--expect", keys=keys, rule=RULE), token(Variable.RUN_DIR, f"/{EXPECTED}", keys=keys, rule=RULE))


def files(context: Context) -> tuple[SourcedFile, ...]:
    """What the ranks are compared with; null for what is not known."""
    if not is_verified(context):
        return ()
    program, given = context.recipe.program.kind, context.resolved.given("precision.dtype")
    entries: dict[str, tuple[object, Source]] = {
        "strategy": (context.recipe.strategy.kind, Source(("strategy.kind",))),
        "world_size": (context.topology.world_size, Source(("nodes.processes_per_node", "nodes.count"))),
        "device": (context.topology.device, Source(("devices.type",))),
        "dtype": (context.dtype if program in OWN_DEFAULTS and given else None, Source(("precision.dtype",))),
    }
    if program == "hf":
        entries["arguments"] = ({}, Source())  # there even where none is given
        for field, value, source in load("trainkit.frameworks.hf_trainer.program:numbers")(context):
            entries[f"arguments.{field}"] = (value, source)
    return (json_file(EXPECTED, entries),)
