"""What must be installed for a plan to run, as data; what is missing on this machine blocks the run."""

from __future__ import annotations

from dataclasses import dataclass

from trainkit.hardware.versions import at_least
from trainkit.planning.context import Context
from trainkit.planning.plan import Notice

INSTALL = "pip install 'trainkit[train]'"


@dataclass(frozen=True, slots=True)
class Requirement:
    """A package that one choice needs. `of` is the field of the choice, `value` the choices that need it."""

    of: str
    values: tuple[str, ...]
    package: str
    minimum: str


REQUIREMENTS: tuple[Requirement, ...] = (
    Requirement("program", ("builtin",), "torch", "2.6"),
    Requirement("program", ("builtin",), "numpy", "1.26"),
    Requirement("launcher", ("torchrun", "accelerate", "deepspeed"), "torch", "2.6"),
    Requirement("launcher", ("accelerate",), "accelerate", "1.8"),
    Requirement("launcher", ("deepspeed",), "deepspeed", "0.16"),
    Requirement("strategy", ("zero1", "zero2", "zero3"), "deepspeed", "0.16"),
)


def missing_packages(context: Context) -> tuple[Notice, ...]:
    """One blocker for each package that is absent or too old."""
    chosen = {
        "program": context.recipe.program.kind,
        "launcher": context.launcher,
        "strategy": context.recipe.strategy.kind,
    }
    found: dict[str, Notice] = {}
    for requirement in REQUIREMENTS:
        choice = chosen[requirement.of]
        if choice not in requirement.values or requirement.package in found:
            continue
        installed = context.facts.packages.get(requirement.package)
        if at_least(installed, requirement.minimum):
            continue
        state = f"{installed} is installed" if installed else "it is not installed"
        what = f"{requirement.of} {choice} needs {requirement.package} >= {requirement.minimum}; {state}."
        found[requirement.package] = Notice("blocker", what, f"Run: {INSTALL}")
    torch = context.facts.packages.get("torch", "")
    if context.topology.device == "cuda" and torch.endswith("+cpu"):
        what = f"torch {torch} is a build for CPUs, and the run uses CUDA."
        found["torch"] = Notice("blocker", what, "Install a CUDA build of torch, or set devices.type to cpu.")
    return tuple(found.values())
