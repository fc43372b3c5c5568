"""`python`: one process, started directly."""

from __future__ import annotations

from trainkit.plan.context import Context
from trainkit.plan.model import Variable
from trainkit.plan.provenance import AddedVariable, SourcedFile, SourcedVariable, Token, variable

ALONE = "one process is rank 0 of 1; a launcher would say so"
# Programs whose libraries wrap the model in DDP as soon as there is a LOCAL_RANK (accelerate, state.py).
FORM_GROUPS = ("hf", "accelerate")


def argv(context: Context) -> tuple[Token, ...]:
    """Nothing stands before the program."""
    return ()


def files(context: Context) -> tuple[SourcedFile, ...]:
    """None."""
    return ()


def environment(context: Context) -> tuple[SourcedVariable, ...]:
    """The rank environment that a launcher would set."""
    return alone(context)


def added(context: Context) -> tuple[AddedVariable, ...]:
    """None."""
    return ()


def escape(word: str, context: Context) -> str:
    """Words reach the program as they are."""
    return word


def local_rank(context: Context) -> str:
    """There is one."""
    return "0"


def alone(context: Context) -> tuple[SourcedVariable, ...]:
    """The rank environment of a single process; none where libraries would take it for a wish for DDP."""
    apart = context.recipe.strategy.kind == "single" or context.topology.device == "xla"
    if apart and context.recipe.program.kind in FORM_GROUPS:
        return ()
    return (
        variable("RANK", "0", rule=ALONE),
        variable("LOCAL_RANK", "0", rule=ALONE),
        variable("WORLD_SIZE", "1", rule=ALONE),
        variable("LOCAL_WORLD_SIZE", "1", rule=ALONE),
        variable("MASTER_ADDR", "127.0.0.1", rule=ALONE),
        variable(
            "MASTER_PORT", Variable.PORT, rule="a free port of this machine, so that a process group can be formed"
        ),
    )
