"""What a plan can be exported to: one module each, listed in EXPORTS, satisfying the Export protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from trainkit.convert.carried import left
from trainkit.errors import RecipeError
from trainkit.frameworks.accelerate import exporter as accelerate
from trainkit.frameworks.deepspeed import exporter as deepspeed
from trainkit.frameworks.hf_trainer import exporter as hf_trainer
from trainkit.plan.combination import Combination
from trainkit.plan.context import Context
from trainkit.planner.rules.compatibility import refusals


class Export(Protocol):
    """What a module for one tool offers; all functions are pure."""

    def unfit(self, context: Context) -> str:
        """Why the tool cannot be told this plan; empty where it can."""

    def combination(self, context: Context) -> Combination | None:
        """What the tool would start, where that is not what the plan starts."""

    def files(self, context: Context, folder: str) -> dict[str, str]:
        """Content by name. folder: where they will lie, as the files name one another."""

    def notes(self, context: Context) -> tuple[str, ...]:
        """What somebody who uses the files has to do besides."""


EXPORTS: dict[str, Export] = {"accelerate": accelerate, "deepspeed": deepspeed, "hf": hf_trainer}


@dataclass(frozen=True, slots=True)
class Exported:
    """Files by name, the settings that a layer gives and that they do not carry, and what their user has to know."""

    files: dict[str, str]
    left: tuple[str, ...]
    notes: tuple[str, ...] = ()


def unfit(context: Context, name: str) -> str:
    """Why a format has no such files; empty where it has."""
    combination = EXPORTS[name].combination(context)
    why = (each.reason for each in refusals(combination)) if combination else iter(())
    return EXPORTS[name].unfit(context) or next(why, "")


def export(context: Context, name: str, folder: str) -> Exported:
    """The files of a format. Raises RecipeError where it cannot be told this plan."""
    reason = unfit(context, name)
    if reason:
        hint = f"other formats: {', '.join(each for each in EXPORTS if each != name)}"
        raise RecipeError(f"the plan cannot be exported to {name}: {reason}", hint=hint)
    return Exported(EXPORTS[name].files(context, folder), left(context, name), EXPORTS[name].notes(context))
