"""`torch`: the user's script or module, which reads only the rank environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from trainkit.errors import Diagnostic
from trainkit.frameworks.base import own_scripts
from trainkit.frameworks.base.program import Detection, all_own, nothing
from trainkit.plan.context import Context
from trainkit.plan.model import Notice
from trainkit.plan.provenance import Token
from trainkit.plan.support import LAUNCHED, Reach, Table

if TYPE_CHECKING:
    from trainkit.recipe.resolved import Resolved

REQUIRES: Mapping[str, str] = {}
DETECTION = Detection()
read = all_own
problems = wrapper = files = environment = preparations = nothing
REACH: Table = {
    **LAUNCHED,
    "": Reach("the file that TRAINKIT_RECIPE names"),
    "checkpoint.resume": Reach(
        why="Which folder holds a checkpoint of the program's own is not known.",
        instead="Pass the checkpoint in program.args, and leave checkpoint.resume out.",
        anyway=("never",),
    ),
}


def check(resolved: Resolved) -> tuple[Diagnostic, ...]:
    """Exactly one of script and module must be given."""
    return own_scripts.check_target(resolved)


def reason(context: Context) -> str:
    """For people."""
    return own_scripts.described(context)


def argv(context: Context) -> tuple[Token, ...]:
    """Interpreter, script or module, and the arguments word for word."""
    return own_scripts.command(context, own_scripts.own_argv(context))


def notices(context: Context) -> tuple[Notice, ...]:
    """Settings do not reach a script by themselves."""
    what = "Settings of the recipe reach this program only through its arguments and the file named by TRAINKIT_RECIPE."
    return (Notice("note", what),)
