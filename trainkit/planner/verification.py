"""What the plan promises of a program of the user's own, for the rank wrapper to have it shown."""

from __future__ import annotations

import json

from trainkit.lazy import load
from trainkit.plan.context import Context
from trainkit.plan.model import Variable
from trainkit.plan.provenance import Source, SourcedFile, Token, token

EXPECTED = "expected.json"
RULE = "the first optimizer step of each rank is compared with the plan, through a hook on PYTHONPATH"
BY_DEFAULT = ("hf", "accelerate")  # kinds whose libraries set the strategy up themselves
TOLD = ("hf", "accelerate", "deepspeed")  # kinds that are told which number format to use


def is_verified(context: Context) -> bool:
    """Whether the run has to show what is in force."""
    program = context.recipe.program
    return program.kind in BY_DEFAULT if program.verify == "auto" else program.verify


def wrapper(context: Context) -> tuple[Token, ...]:
    """Words for the rank wrapper."""
    if not is_verified(context):
        return ()
    keys = ("program.verify",) if context.resolved.given("program.verify") else ()
    return (token("--expect", keys=keys, rule=RULE), token(Variable.RUN_DIR, f"/{EXPECTED}", keys=keys, rule=RULE))


def files(context: Context) -> tuple[SourcedFile, ...]:
    """What the ranks are compared with; null for what is not promised."""
    if not is_verified(context):
        return ()
    dtype = context.dtype if context.recipe.program.kind in TOLD and context.resolved.given("precision.dtype") else None
    expected: dict[str, object] = {
        "strategy": context.recipe.strategy.kind,
        "world_size": context.topology.world_size,
        "device": context.topology.device,
        "dtype": dtype,
    }
    sources = {
        "strategy": Source(("strategy.kind",)),
        "world_size": Source(("nodes.processes_per_node", "nodes.count")),
        "device": Source(("devices.type",)),
        "dtype": Source(("precision.dtype",)),
    }
    if context.recipe.program.kind == "hf":
        told = list(load("trainkit.frameworks.hf_trainer.program:numbers")(context))
        expected["arguments"] = {field: value for field, value, _ in told}
        sources |= {f"arguments.{field}": source for field, _, source in told}
    return (SourcedFile(EXPECTED, json.dumps(expected, indent=2) + "\n", sources),)
