"""Every foreign tool by the part that it plays: launchers and program kinds, imported when a plan uses them."""

from __future__ import annotations

from trainkit.frameworks.base.interface import Launcher, Program
from trainkit.lazy import Registry

_HERE = "trainkit.frameworks"
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
        "builtin": f"{_HERE}.builtin",
        "hf": f"{_HERE}.hf_trainer.program",
        "accelerate": f"{_HERE}.accelerate.program",
        "deepspeed": f"{_HERE}.deepspeed.program",
        "torch": f"{_HERE}.torch_script",
    }
)


def launcher_of(command: str) -> str | None:
    """The launcher that a command, or a module behind `python -m`, is; None where it is none."""
    return next((name for name, launcher in LAUNCHERS.items() if launcher.COMMAND.fullmatch(command)), None)
