"""Every foreign tool by the part that it plays: launchers and program kinds, imported when a plan uses them."""

from __future__ import annotations

from trainkit.launch_plan.model import Choice, Topology
from trainkit.lazy import Registry
from trainkit.recipe.schema import Recipe
from trainkit.tools.base.interface import Launcher, Program

_HERE = "trainkit.tools"
LAUNCHERS: Registry[Launcher] = Registry(
    {
        "python": f"{_HERE}.python",
        "torchrun": f"{_HERE}.torchrun",
        "accelerate": f"{_HERE}.accelerate.launcher",
        "deepspeed": f"{_HERE}.deepspeed.launcher",
    }
)
PROGRAMS: Registry[Program] = Registry(
    {
        "builtin": f"{_HERE}.builtin.program",
        "hf": f"{_HERE}.hf.program",
        "accelerate": f"{_HERE}.accelerate.program",
        "deepspeed": f"{_HERE}.deepspeed.program",
        "torch": f"{_HERE}.torch_script",
    }
)


def launcher_of(command: str) -> str | None:
    """The launcher that a command, or a module behind `python -m`, is; None where it is none."""
    return next((name for name, launcher in LAUNCHERS.items() if launcher.COMMAND.fullmatch(command)), None)


def choose_launcher(recipe: Recipe, topology: Topology) -> Choice:
    """As asked for, else the program's own launcher, else `python` for one process and `torchrun` for several."""
    if recipe.launcher.kind != "auto":
        return Choice(recipe.launcher.kind, "launcher.kind asks for it")
    # On a TPU accelerate launch would import the script and start the processes of the chips by itself.
    if recipe.program.kind == "accelerate" and topology.device != "xla":
        return Choice("accelerate", "scripts on Accelerator() are made for it")
    if topology.world_size == 1:
        return Choice("python", "one process needs no launcher")
    return Choice("torchrun", f"{topology.world_size} processes")
