"""`python`: one process, started directly."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from trainkit.launch_plan.context import Context
from trainkit.launch_plan.model import Variable
from trainkit.launch_plan.provenance import SourcedVariable, variable
from trainkit.launch_plan.rules import incompatible
from trainkit.recipe.schema.launching import ON_ACCELERATE
from trainkit.tools.base.imported_recipe import ImportContext, ImportedRecipe, argv_origin
from trainkit.tools.base.interface import NEVER_RESTARTS, LauncherCommand, nothing, unchanged
from trainkit.tools.registry import LAUNCHERS, launcher_of

HELP = "starts one process"
COMMAND = re.compile(r"python(\d+(\.\d+)*)?(\.exe)?|.*\.py")
REQUIRES: Mapping[str, str] = {}
INCOMPATIBLE = (
    incompatible(
        "launcher.kind",
        lambda c: c.ranks > 1,
        "`python` starts one process",
        "launcher.kind: torchrun",
    ),
    NEVER_RESTARTS,
)
argv = files = added = nothing
escape = unchanged
# The interpreter's own flags of one letter, without a value and with one.
SWITCHES, VALUES = frozenset("BEIOPRbdiqsSuvx"), frozenset("WX")

ALONE = "one process is rank 0 of 1; a launcher would say so"


def local_rank(context: Context) -> str:
    return "0"


def shell_words(context: Context, folder: str) -> tuple[str, ...]:
    return ("python",)


def read(draft: ImportedRecipe, context: ImportContext, argv: Sequence[str]) -> LauncherCommand:
    """Import Python's own flags, up to a script or `-m module`, which may be a launcher's."""
    if argv[0].endswith(".py"):
        return LauncherCommand("python", list(argv))
    rest = list(argv[1:])
    while rest and rest[0].startswith("-"):
        flag = rest.pop(0)
        if flag == "-m" and rest:
            launcher = launcher_of(rest[0])
            if launcher not in (None, "python"):
                return LAUNCHERS[launcher].read(draft, context, rest)
            return LauncherCommand("python", rest, module=True)
        if flag[1:2] in VALUES:
            flag = f"{flag} {rest.pop(0)}" if len(flag) == 2 and rest else flag
        elif not set(flag[1:]) <= SWITCHES:
            draft.fail(f"python {flag} starts no script", argv_origin(flag), "name the script, or -m module")
            return LauncherCommand("python")
        draft.remark(f"python {flag} is not taken over: ranks start without it.")
    return LauncherCommand("python", rest)


def environment(context: Context) -> tuple[SourcedVariable, ...]:
    """The rank environment of a single process; none where a program would take it for a launcher's.

    Libraries wrap the model in DDP where they find it, scripts test RANK, and those that start processes of their own
    wait for others.
    """
    apart = context.recipe.strategy.kind == "single" or context.topology.device == "xla"
    if apart and context.recipe.program.kind in (*ON_ACCELERATE, "torch"):
        return ()
    # What init_process_group() reads where it is given no address (env://), and torchrun would set.
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    port = "a free port of this machine, so that a process group can be formed"
    return (
        *(variable(name, value, rule=ALONE) for name, value in place.items()),
        variable("MASTER_PORT", Variable.PORT, rule=port),
    )
