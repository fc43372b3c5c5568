"""`torch`: the user's script or module, which reads only the rank environment."""

from __future__ import annotations

from collections.abc import Mapping

from trainkit.frameworks.base import own_scripts
from trainkit.frameworks.base.interface import Detection, all_own, nothing
from trainkit.plan.context import Context
from trainkit.plan.model import Notice
from trainkit.plan.support import LAUNCHED, OWN_CHECKPOINT, Reach, Table

REQUIRES: Mapping[str, str] = {}
STRATEGY_BY = "your program's own part: "
DETECTION = Detection()
reason, argv, read = own_scripts.described, own_scripts.argv, all_own
problems = wrapper = files = environment = nothing
REACH: Table = {
    **LAUNCHED,
    "": Reach("the file that TRAINKIT_RECIPE names"),
    "checkpoint.resume": OWN_CHECKPOINT,
}


def notices(context: Context) -> tuple[Notice, ...]:
    """Settings do not reach a script by themselves."""
    what = "settings of the recipe reach this program only through its arguments and the file named by TRAINKIT_RECIPE"
    return (Notice("note", what),)
