"""The planner as the judge of answers: what is known so far is resolved and planned, and read for trouble."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trainkit.errors import Diagnostic, RecipeError
from trainkit.machine.facts import Facts, Gpu
from trainkit.machine.selection import allocation
from trainkit.recipe.layers.paths import Files, absolute
from trainkit.wizard.question import Settings
from trainkit.wizard.view import View

if TYPE_CHECKING:
    from trainkit.plan.model import Plan
    from trainkit.recipe.resolved import Resolved

_TRIAL = ".trial-of-the-wizard.yaml"
# How a blocker begins its advice where installing something is the remedy: such a choice is offered all the same.
_INSTALL = "Run: "
# Programs that train with a strategy of their engine's even in one process, and which stands in until it is asked.
ENGINES: Mapping[str, str] = {"deepspeed": "zero2"}


@dataclass(frozen=True)
class Overlay:
    """A file system with one more file, which is not written yet. Satisfies `recipe.layers.paths.Files`."""

    below: Files
    path: str
    text: str

    def read(self, path: str) -> bytes:
        """The file's bytes."""
        return self.text.encode() if path == self.path else self.below.read(path)

    def exists(self, path: str) -> bool:
        """Whether there is a file at the path."""
        return path == self.path or self.below.exists(path)

    def shipped(self) -> Mapping[str, str]:
        """The shipped files by name."""
        return self.below.shipped()


@dataclass(frozen=True)
class Verdict:
    """What planning says. errors: wrong on any machine; lacks: what this machine lacks; packages: what to install."""

    errors: tuple[Diagnostic, ...] = ()
    lacks: tuple[tuple[str, str], ...] = ()  # what, hint
    packages: tuple[str, ...] = ()
    plan: Plan | None = None


def judge(view: View) -> Verdict:
    """Plan what is known so far. What has not been asked yet and has no default is stood in for."""
    from trainkit.planner.build import build_plan  # not before the first question stands there

    tree = nested({**view.chosen, **_stand_ins(view)})
    extends = {"extends": [view.base.path]} if view.base.path else {}
    text = json.dumps({"version": 1, **extends, **tree})
    try:
        plan = build_plan(resolve_text(view, text, _TRIAL), at_rest(view.facts)).plan
    except RecipeError as error:
        return Verdict(tuple(each for each in error.diagnostics if each.severity == "error"))
    blockers = [(each.what, each.hint) for each in plan.notices if each.severity == "blocker"]
    packages = tuple(what for what, hint in blockers if hint.startswith(_INSTALL))
    return Verdict((), tuple(each for each in blockers if each[0] not in packages), packages, plan)


def cards_of(view: View) -> tuple[Gpu, ...]:
    """The cards that the run would use; all that it may use where the start decides, or too little is known."""
    allowed = allocation(view.facts)
    plan = None if view.get("devices.select") == "free" else judge(view).plan
    used = {card.uuid for card in plan.cards} if plan else set()
    return tuple(gpu for gpu in allowed if gpu.uuid in used) or allowed


def resolve_text(view: View, text: str, name: str) -> Resolved:
    """Resolve a recipe that is not written yet, as if it stood in the working folder under this name."""
    from trainkit.flags.resolve import resolve
    from trainkit.recipe.resolved import Request

    environ = {key: value for key, value in view.environ.items() if not key.startswith("TRAINKIT__")}
    resolved = resolve(Request(name, view.cwd, environ=environ), Overlay(view.files, absolute(name, view.cwd), text))
    # What lies on the disks of another machine is not to be seen from here.
    return replace(resolved, absent={}) if view.facts.origin else resolved


def at_rest(facts: Facts) -> Facts:
    """The machine when nobody uses its cards: a recipe is for other days too."""
    return replace(facts, gpus=tuple(_at_rest(gpu) for gpu in facts.gpus))


def _at_rest(gpu: Gpu) -> Gpu:
    parts = tuple(replace(part, processes=(), held_by=None, memory_free=part.memory_total) for part in gpu.instances)
    return replace(gpu, processes=(), held_by=None, memory_free=gpu.memory_total, instances=parts)


def nested(settings: Settings) -> dict[str, Any]:
    """Settings by dotted key as the tree of a recipe."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        target = tree
        *sections, name = key.split(".")
        for section in sections:
            target = target.setdefault(section, {})
        target[name] = value
    return tree


def _stand_ins(view: View) -> dict[str, Any]:
    return dict(_needed(view))


def _needed(view: View) -> Iterator[tuple[str, Any]]:
    """What the recipe language asks for and no answer has given yet."""
    if view.builtin and view.get("train.steps") is None and view.get("train.epochs") is None:
        yield "train.steps", 1
    if not view.builtin and not view.get("program.script") and not view.get("program.module"):
        yield "program.module", "program"
    if int(view.get("nodes.count")) > 1 and "nodes.rendezvous" not in view.chosen:
        yield "nodes.rendezvous", "host:29500"
    if "nvme" in (view.get(f"strategy.{name}") for name in ("offload_optimizer", "offload_param")):
        yield "strategy.nvme_path", view.get("strategy.nvme_path") or "nvme"
    if view.get("strategy.kind") == "single" and "strategy.kind" not in view.chosen and needs_strategy(view):
        yield "strategy.kind", ENGINES.get(str(view.get("program.kind")), "ddp")


def needs_strategy(view: View) -> bool:
    """Whether `single` will not do: several processes, or a program on an engine."""
    return view.ranks > 1 or view.get("program.kind") in ENGINES
