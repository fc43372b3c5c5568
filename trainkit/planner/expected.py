"""What the run expects of a program of the user's own: the rank wrapper compares each rank with it."""

from __future__ import annotations

from trainkit.launch_plan.context import Context
from trainkit.launch_plan.model import Variable
from trainkit.launch_plan.provenance import Source, SourcedFile, Token, chosen_at_start, json_file, token
from trainkit.lazy import load
from trainkit.recipe.schema.launching import ON_ACCELERATE, OWN_DEFAULTS
from trainkit.tools.base.own_scripts import is_executable

EXPECTED = "expected.json"
RULE = "the first optimizer step of each rank is compared with the plan, through a hook on PYTHONPATH"


def is_verified(context: Context) -> bool:
    """Whether the run has to show what is in force."""
    program = context.recipe.program
    if program.verify != "auto":
        return program.verify
    return program.kind in ON_ACCELERATE or (program.kind != "builtin" and not is_executable(context))


def ends_run(context: Context) -> bool:
    """Whether a difference ends the run; of a program that sets its strategy up itself it is only said."""
    program = context.recipe.program
    return program.verify is True or program.kind in ON_ACCELERATE


def wrapper(context: Context) -> tuple[Token, ...]:
    """The argv for the rank wrapper."""
    if not is_verified(context):
        return ()
    keys = ("program.verify",) if context.resolved.given("program.verify") else ()
    proof = ("--prove", "yes") if context.recipe.program.verify is True else ()
    return (
        token("--expect", keys=keys, rule=RULE),
        token(Variable.RUN_DIR, f"/{EXPECTED}", keys=keys, rule=RULE),
        *(token(word, keys=keys, rule="where nothing is seen, the run fails") for word in proof),
    )


def files(context: Context) -> tuple[SourcedFile, ...]:
    """What the ranks are compared with; null for what is not known."""
    if not is_verified(context):
        return ()
    program, given = context.recipe.program.kind, context.resolved.given("precision.dtype")
    entries: dict[str, tuple[object, Source]] = {
        "strategy": (_strategies(context), Source(("strategy.kind",))),
        "world_size": (context.topology.world_size, Source(("nodes.processes_per_node", "nodes.count"))),
        "device": (context.topology.device, Source(("devices.type",))),
        "dtype": (context.dtype if program in OWN_DEFAULTS and given else None, Source(("precision.dtype",))),
    }
    if _starts_others(context):
        entries["own_processes"] = (True, Source(rule="what python starts may start processes of its own"))
    if not ends_run(context):
        entries["on_difference"] = ("warn", Source(rule="the strategy is the program's own part"))
    if program == "hf":
        entries["arguments"] = ({}, Source())  # there even where none is given
        for field, value, source in load("trainkit.tools.hf.program:promised")(context):
            entries[f"arguments.{field}"] = (value, source)
        if chosen_at_start(context) or context.recipe.checkpoint.resume != "never":
            entries["resume"] = ({"argument": "--resume_from_checkpoint"}, Source(("checkpoint.resume",)))
    return (json_file(EXPECTED, entries),)


def _starts_others(context: Context) -> bool:
    """Whether the program is free to start further ranks: python alone tells it nothing of any."""
    recipe = context.recipe
    return recipe.program.kind == "torch" and recipe.strategy.kind == "single" and context.launcher == "python"


def _strategies(context: Context) -> str | list[str] | None:
    """The strategy; one process that sees several GPUs may spread its batch over them.

    None where the script configures DeepSpeed's engine in its own code.
    """
    kind = context.recipe.strategy.kind
    if context.deepspeed and not context.zero:
        return None
    return [kind, "dataparallel"] if kind == "single" and context.sees_several else kind
