"""What the planner says of the answers so far, and of each choice before it is taken: a plan without a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trainkit.errors import Diagnostic, RecipeError
from trainkit.machine.facts import Gpu
from trainkit.machine.selection import allocation
from trainkit.recipe.paths import Overlay, absolute
from trainkit.recipe.schema.fields import nest, schema
from trainkit.recipe.validate import choices, takes_switch
from trainkit.wizard.question import AnswerError, Choice, View

if TYPE_CHECKING:
    from trainkit.launch_plan.model import Notice, Plan
    from trainkit.recipe.resolved import Resolved

_NAME = ".answers-so-far.yaml"
# Programs that train with their engine's strategy even in one process, and which is assumed until it is asked.
ENGINES: Mapping[str, str] = {"deepspeed": "zero2"}
# Programs that get nothing of the recipe but their processes: planning warns of settings, and refuses none.
UNCONFIGURED = frozenset({"torch"})


@dataclass(frozen=True)
class PlannerResult:
    """errors: wrong on any machine; missing: what this machine lacks; packages: what to install."""

    errors: tuple[Diagnostic, ...] = ()
    missing: tuple[Notice, ...] = ()
    packages: tuple[str, ...] = ()
    plan: Plan | None = None

    def against(self, before: PlannerResult, later: frozenset[str]) -> list[AnswerError]:
        """What is wrong or missing now and was not before, except where a later question settles it."""
        known = {(each.key, each.why or each.what) for each in before.errors}
        new = [each for each in self.errors if (each.key, each.why or each.what) not in known]
        errors = [AnswerError(each.what, each.hint, each.why) for each in new if each.key not in later]
        return errors + [AnswerError(each.what, each.hint) for each in self.missing if each not in before.missing]


def check(view: View) -> PlannerResult:
    """Plan what is known so far, with a stand-in for what has no default and is not answered yet."""
    from trainkit.planner.build import build_plan  # after the first question is shown: it takes time

    extends = {"extends": [view.base.path]} if view.base.path else {}
    text = json.dumps({"version": 1, **extends, **nest({**view.chosen, **dict(_stand_ins(view))})})
    # The machine with all its cards free: a recipe is for other days too.
    free: dict[str, Any] = {"processes": (), "held_by": None}
    idle = []
    for gpu in view.facts.gpus:
        parts = tuple(replace(part, **free, memory_free=part.memory_total) for part in gpu.instances)
        idle.append(replace(gpu, **free, memory_free=gpu.memory_total, instances=parts))
    try:
        plan = build_plan(resolve_text(view, text, _NAME), replace(view.facts, gpus=tuple(idle))).plan
    except RecipeError as error:
        return PlannerResult(tuple(each for each in error.diagnostics if each.severity == "error"))
    # A choice for which only a package is missing is offered all the same.
    missing = tuple(each for each in plan.blockers if not each.installs)
    return PlannerResult((), missing, tuple(each.what for each in plan.blockers if each.installs), plan)


def resolve_text(view: View, text: str, name: str) -> Resolved:
    """Resolve a recipe that is not written yet, as a file of this name in the working folder."""
    from trainkit.recipe.resolve import resolve
    from trainkit.recipe.resolved import Request

    files = Overlay(view.files, {absolute(name, view.cwd): text})
    resolved = resolve(Request(name, view.cwd, environ=view.environ), files)
    # Which files another machine has cannot be seen from here.
    return replace(resolved, absent={}) if view.facts.origin else resolved


def _stand_ins(view: View) -> Iterator[tuple[str, Any]]:
    """Settings that a recipe must have and that no answer has given yet."""
    if view.builtin and view.get("train.steps") is None and view.get("train.epochs") is None:
        yield "train.steps", 1
    if not view.builtin and not view.get("program.script") and not view.get("program.module"):
        yield "program.module", "program"
    # An address that no one looks up while planning.
    if int(view.get("nodes.count")) > 1 and "nodes.rendezvous" not in view.chosen:
        yield "nodes.rendezvous", "host:29500"
    if "nvme" in (view.get(f"strategy.{name}") for name in ("offload_optimizer", "offload_param")):
        yield "strategy.nvme_path", view.get("strategy.nvme_path") or "nvme"
    # `single` is the schema's default and would refuse several ranks before the strategy is asked about.
    if view.get("strategy.kind") == "single" and "strategy.kind" not in view.chosen and needs_strategy(view):
        yield "strategy.kind", ENGINES.get(str(view.get("program.kind")), "ddp")


def needs_strategy(view: View) -> bool:
    """Whether `single` is not enough: several processes, or a program on an engine."""
    return view.ranks > 1 or view.get("program.kind") in ENGINES


def used_cards(view: View) -> tuple[Gpu, ...]:
    """The cards that the run would use; all that it may use where that is decided at the start, or not known yet."""
    allowed = allocation(view.facts)
    plan = None if view.get("devices.select") == "free" else check(view).plan
    used = {card.uuid for card in plan.cards} if plan else set()
    return tuple(gpu for gpu in allowed if gpu.uuid in used) or allowed


def reaches(view: View, key: str) -> bool:
    """Whether the program would see the setting: whether planning accepts a value that is not its default."""
    if view.builtin or view.get("program.kind") in UNCONFIGURED:
        return view.builtin
    setting = schema().setting(key, view.kind(key.rpartition(".")[0]))
    assert setting is not None, key
    # Any value but the default shows it: a default that cannot be passed on is no error.
    literals = [each for each in choices(setting.annotation) if each not in ("auto", setting.default)]
    switch = takes_switch(setting) or isinstance(setting.default, bool)
    sample = literals[0] if literals else True if switch else 8
    return not any(each.key == key for each in check(view.supposing({key: sample})).errors)


def validated(view: View, keys: Sequence[str], offered: Iterable[Choice]) -> tuple[Choice, ...]:
    """The choices with what the planner says of each: those that can be taken, then those that cannot.

    keys: settings of the topic that offers them.
    """
    before = check(view)
    found = []
    for choice in offered:
        result = check(view.supposing(choice.sets))
        against = result.against(before, view.pending - {*keys})
        refused = (against[0].why or against[0].what) if against else ""
        remark = next((each for each in result.packages if each not in before.packages), "")
        found.append(replace(choice, refused=refused, remark=remark))
    return tuple(sorted(found, key=lambda choice: bool(choice.refused)))
