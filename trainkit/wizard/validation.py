"""Choices and answers validated by the planner before they are accepted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from trainkit.wizard.planner_check import PlannerResult, check
from trainkit.wizard.question import Choice, Rejection
from trainkit.wizard.settings import Settings
from trainkit.wizard.view import View


def validated(view: View, keys: Sequence[str], offered: Iterable[Choice]) -> tuple[Choice, ...]:
    """The choices with what the planner says of each: those that can be taken, then those that cannot.

    keys: settings of the topic that offers them.
    """
    before = check(view)
    found = []
    for choice in offered:
        result = check(view.supposing(choice.sets))
        against = _rejections(result, before, view.pending - {*keys})
        new = [each for each in result.packages if each not in before.packages]
        refused = (against[0].why or against[0].what) if against else ""
        found.append(replace(choice, refused=refused, remark=new[0] if new else ""))
    return tuple(sorted(found, key=lambda choice: bool(choice.refused)))


def rejections(view: View, keys: Sequence[str], sets: Settings) -> list[Rejection]:
    """What the planner has against an answer that sets these values. keys: settings of its own topic."""
    return _rejections(check(view.supposing(sets)), check(view), view.pending - {*keys})


def _rejections(result: PlannerResult, before: PlannerResult, later: frozenset[str]) -> list[Rejection]:
    """What is wrong or missing now and was not before, except where a later question settles it."""
    known = {(each.key, each.why or each.what) for each in before.errors}
    errors = [
        Rejection(each.what, each.why, each.hint)
        for each in result.errors
        if each.key not in later and (each.key, each.why or each.what) not in known
    ]
    return errors + [Rejection(what, hint=hint) for what, hint in result.missing if (what, hint) not in before.missing]
