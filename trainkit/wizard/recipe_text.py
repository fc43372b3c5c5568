"""The recipe that the answers make: presets, the settings that differ with their reasons, and its plan."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainkit.errors import Diagnostic, RecipeError
from trainkit.recipe.layer import normalise, read_document
from trainkit.recipe.merge import Merge
from trainkit.recipe.paths import seen_from
from trainkit.recipe.schema import Recipe
from trainkit.recipe.schema.fields import lies_in, nest, schema
from trainkit.recipe.yaml_writer import comment, flow, opening, recipe_name, shortened
from trainkit.text import counted
from trainkit.wizard.planner_check import resolve_text
from trainkit.wizard.question import Settings, View, flatten, same
from trainkit.wizard.session import placed
from trainkit.wizard.topics import TOPICS, described

if TYPE_CHECKING:
    from trainkit.launch_plan.model import Plan

WIDTH = 80
_OWN = ("version", "name")  # lines that every recipe has


def compose(view: View, path: str, modeline: str = "") -> str:
    """The recipe to be written at a path (absolute). modeline: its first line, for editors."""
    name = view.given.get("name") or recipe_name(posixpath.splitext(posixpath.basename(path))[0])
    needed = {key: value for key, value in view.chosen.items() if view.written(key) and key not in _OWN}
    presets = fitting(view, needed)
    in_presets = {key for sets in presets.values() for key in sets}
    reasons, facts = _Reasons(view), view.facts  # each reason is written once, where its first setting is
    found = (described(facts.gpus), "Apple MPS" if facts.mps else "", counted(facts.cpu_cores, "CPU core"))
    made = f"Made by `trainkit config` for {facts.hostname}: {', '.join(filter(None, found))}."
    lines = opening(name, modeline, (made,), WIDTH)
    if base := view.base.path:
        if base.startswith("/"):  # a file is named from the recipe's own folder, a shipped recipe by its name
            base = posixpath.relpath(base, posixpath.dirname(path))
            base = base if base.startswith("../") else f"./{base}"
        lines += ["extends:", *_with_comment(f"  - {flow(base, '')}", "where this recipe starts from", "  ")]
    elif presets:
        lines += ["extends:"]
    for preset, sets in presets.items():
        lines += _with_comment(f"  - {preset}", reasons.take(key for key in sets if key in needed), "  ")
    kept = {key: value for key, value in needed.items() if key not in in_presets}
    for section, value in _in_order(kept):
        keys = [key for key in kept if lies_in(key, (section,))]
        lines += _with_comment(f"{section}: {flow(shortened(value, section), section)}", reasons.take(keys), "")
    said = {*needed, *in_presets, *_OWN}
    if left := [f"{key} {flow(value, key)}" for key, value in view.chosen.items() if key not in said]:
        lines += comment(f"As it would be anyway: {', '.join(left)}.", WIDTH)
    return "".join(f"{line}\n" for line in lines)


class _Reasons:
    """Why each setting is as it is: the reason of the answer that set it, given once."""

    def __init__(self, view: View) -> None:
        self._of = {key: answer.reason for answer in view.answers for key in answer.sets}
        self._of |= dict.fromkeys(view.given, "given")
        # What was given and a question would have offered has the reason of that choice.
        for topic in TOPICS:
            for choice in topic.ask(view).choices if view.given.keys() & {*topic.keys} else ():
                if all(view.get(key) == value for key, value in choice.sets.items()):
                    self._of |= dict.fromkeys(choice.sets.keys() & view.given.keys(), choice.reason)

    def take(self, keys: Iterable[str]) -> str:
        """The reasons of these settings that have not been taken yet."""
        found = dict.fromkeys(reason for key in keys if (reason := self._of.get(key, "")))
        self._of = {key: reason for key, reason in self._of.items() if reason not in found}
        return "; ".join(found)


def _in_order(settings: Settings) -> list[tuple[str, Any]]:
    """The sections as the schema declares them."""
    tree = nest(settings)
    return [(name, tree[name]) for name in Recipe.model_fields if name in tree]


def _with_comment(line: str, reason: str, indent: str) -> Iterator[str]:
    beside = bool(reason) and len(line) + len(reason) + 4 <= WIDTH
    if reason and not beside:
        yield from comment(reason, WIDTH, indent)
    yield f"{line}  # {reason}" if beside else line


ANSWERS = "# Answers of `trainkit config`, written like a recipe."


def answers_text(view: View, command: str) -> str:
    """What has been answered so far, for a later call. command: how to go on."""
    sections = (f"{name}: {flow(value, name)}" for name, value in _in_order(view.chosen))
    return "".join(f"{line}\n" for line in (ANSWERS, f"# Go on with: {command}", *sections))


@dataclass(frozen=True)
class Finished:
    """A recipe that resolves, the plan of it, and its warnings."""

    text: str
    plan: Plan
    warnings: tuple[Diagnostic, ...]


def finish(view: View, path: str, places: Merge, modeline: str = "") -> Finished:
    """Make the recipe to be written at a path (absolute). places: of the settings that were given.

    Raises RecipeError with what is wrong, at the places where it was given.
    """
    from trainkit.planner.build import build_plan

    text = compose(view, path, modeline)
    try:
        resolved = resolve_text(view, text, seen_from(view.cwd, path))
        plan = build_plan(resolved, view.facts).plan
    except RecipeError as error:
        raise RecipeError(placed(error.diagnostics, places)) from error
    return Finished(text, plan, resolved.warnings)


def fitting(view: View, needed: Settings) -> dict[str, Settings]:
    """The fewest shipped presets that set the most of the needed settings, and nothing to another value.

    By name, with everything that each sets by dotted key, in the order of the schema. needed: what must be written.
    """
    agreeing: dict[str, Settings] = {}
    for name, path in view.files.shipped().items():
        if not name.startswith("recipes/"):
            sets = dict(flatten(normalise(read_document(view.files.read(path)).tree, {})))
            if all(same(view.get(key), value) for key, value in sets.items()):
                agreeing[name] = sets
    chosen: dict[str, Settings] = {}
    left = set(needed)
    # Greedy: the presets hardly overlap, so the one that sets the most is part of the smallest selection.
    while useful := [name for name, sets in agreeing.items() if sets.keys() & left]:
        best = max(useful, key=lambda name: (len(agreeing[name].keys() & left), -len(agreeing[name])))
        chosen[best] = agreeing[best]
        left -= agreeing[best].keys()
    order = list(schema().settings)
    return dict(sorted(chosen.items(), key=lambda item: min(map(order.index, item[1]))))
