"""`torch`: the user's script or module, which reads only the rank environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trainkit.errors import Diagnostic, note
from trainkit.launch_plan.context import Context
from trainkit.launch_plan.rules import LAUNCHED, OWN_CHECKPOINT, InputRule, PlanRule, Table, unsupported
from trainkit.tools.base import own_scripts
from trainkit.tools.base.interface import Detection, all_own, nothing

REQUIRES: Mapping[str, str] = {}
STRATEGY_BY = "your program's own part: "
DETECTION = Detection()
_OWN_PART, _PASS = "the strategy is the program's own part", "pass what it takes in program.args"
reason, argv, read = own_scripts.own_program_line, own_scripts.argv, all_own
wrapper = files = environment = nothing
INCOMPATIBLE: tuple[PlanRule, ...] = ()
INPUT_RULES: tuple[InputRule, ...] = ()
SUPPORT: Table = {
    **LAUNCHED,
    "": unsupported(
        "a plain program is told its rank and its arguments, and nothing else",
        "pass what the program takes in program.args; one that reads the file which TRAINKIT_RECIPE names says so with "
        "program.reads_recipe: true",
    ),
    # which the preset for CPUs says, where it makes no difference
    "data.pin_memory": unsupported("the program makes its own DataLoader", "pass what it takes in program.args", False),
    "hang.collective_seconds": unsupported(
        "the program makes its own process group", "pass it to init_process_group as timeout, and leave it out here"
    ),
    # as the presets of strategies say them: the strategy is the program's own part, and they describe it
    "strategy.sharding": unsupported(_OWN_PART, _PASS, "full_shard", "shard_grad_op"),
    "strategy.auto_wrap": unsupported(_OWN_PART, _PASS, "transformer"),
    "strategy.offload": unsupported(_OWN_PART, _PASS, True),
    **dict.fromkeys(("strategy.offload_optimizer", "strategy.offload_param"), unsupported(_OWN_PART, _PASS, "cpu")),
    "checkpoint.resume": OWN_CHECKPOINT,
}


def notices(context: Context) -> Iterator[Diagnostic]:
    """How settings reach a script, where they do, and what it decides by itself."""
    if context.recipe.program.reads_recipe:
        what = "settings of the recipe reach this program through its arguments and the file that TRAINKIT_RECIPE names"
        yield note(what)
    yield from own_scripts.made_strategy(context)


RULES: tuple[PlanRule, ...] = (notices,)
