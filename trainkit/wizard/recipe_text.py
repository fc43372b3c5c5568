"""The recipe that the answers make: presets, the settings that differ with their reasons, and its plan."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainkit.errors import Diagnostic, RecipeError
from trainkit.recipe.layers.layer import normalise, read_document
from trainkit.recipe.layers.merge import Merge
from trainkit.recipe.layers.paths import Files, seen_from
from trainkit.recipe.schema import Recipe
from trainkit.recipe.schema.fields import schema
from trainkit.recipe.yaml.writer import comment, flow, shortened
from trainkit.text import counted
from trainkit.wizard.planner_check import resolve_text
from trainkit.wizard.prefilled import placed
from trainkit.wizard.question import Settings, flatten, nest, same
from trainkit.wizard.topics import TOPICS
from trainkit.wizard.topics.place import described
from trainkit.wizard.view import View

if TYPE_CHECKING:
    from trainkit.plan.model import Plan

WIDTH = 80
NAME = re.compile(r"[^A-Za-z0-9._-]+")
_OWN = ("version", "name")  # lines that every recipe has


def compose(view: View, path: str, schema_uri: str = "") -> str:
    """The recipe to be written at a path (absolute). schema_uri: where the JSON Schema lies, for editors."""
    stem = NAME.sub("-", posixpath.splitext(posixpath.basename(path))[0]).strip("-._")[:100]
    name = view.given.get("name") or stem or "run"
    effective = {key: view.get(key) for key in schema().settings}
    wanted = {key: value for key, value in view.chosen.items() if view.written(key) and key not in _OWN}
    used = fitting(presets(view.files), wanted, effective)
    kept = {key: value for key, value in wanted.items() if not any(key in each.sets for each in used)}
    used = tuple(sorted(used, key=lambda each: min(map(list(schema().settings).index, each.sets))))
    reasons = _Reasons(view)
    facts = view.facts
    found = (described(facts.gpus), "Apple MPS" if facts.mps else "", counted(facts.cpu_cores, "CPU core"))
    lines = [
        *([f"# yaml-language-server: $schema={schema_uri}"] if schema_uri else []),
        *comment(f"Made by `trainkit config` for {facts.hostname}: {', '.join(filter(None, found))}.", WIDTH),
        "version: 1",
        f"name: {flow(name, 'name')}",
        *_extends(view, path, used, wanted, reasons),
    ]
    for section, value in _in_order(nest(kept)):
        keys = [key for key in kept if key == section or key.startswith(f"{section}.")]
        lines += _with_comment(f"{section}: {flow(shortened(value, section), section)}", reasons.take(keys), "")
    said = {*wanted, *(key for each in used for key in each.sets), *_OWN}
    if left := [f"{key} {flow(value, key)}" for key, value in view.chosen.items() if key not in said]:
        lines += comment(f"As it would be anyway: {', '.join(left)}.", WIDTH)
    return "".join(f"{line}\n" for line in lines)


class _Reasons:
    """Why each setting is as it is: the reason of the answer that set it, given once."""

    def __init__(self, view: View) -> None:
        self._of: dict[str, str] = {}
        self._given: set[str] = set()
        for answer in view.answers:
            self._of.update(dict.fromkeys(answer.sets, answer.reason))
        self._of.update(dict.fromkeys(view.given, "given"))
        self._of.update(_choices_given(view))

    def take(self, keys: Iterable[str]) -> str:
        """The reasons of these settings that have not been given yet."""
        found = [reason for key in keys if (reason := self._of.get(key, "")) and reason not in self._given]
        self._given.update(found)
        return "; ".join(dict.fromkeys(found))


def _choices_given(view: View) -> Iterator[tuple[str, str]]:
    """Settings that were given and that a question would have offered, with the reason of that choice."""
    for topic in TOPICS:
        if not any(key in view.given for key in topic.keys):
            continue
        for choice in topic.ask(view).choices:
            agreeing = [key for key, value in choice.sets.items() if key in view.given and view.given[key] == value]
            if agreeing and all(view.get(key) == value for key, value in choice.sets.items()):
                yield from ((key, choice.reason) for key in agreeing)


def _extends(view: View, path: str, used: Sequence[Preset], wanted: Settings, reasons: _Reasons) -> Iterator[str]:
    if not view.base.path and not used:
        return
    yield "extends:"
    if base := view.base.path:
        if base.startswith("/"):  # a file is named from the recipe's own folder, a shipped recipe by its name
            base = posixpath.relpath(base, posixpath.dirname(path))
            base = base if base.startswith("../") else f"./{base}"
        yield from _with_comment(f"  - {flow(base, '')}", "where this recipe starts from", "  ")
    for preset in used:
        yield from _with_comment(f"  - {preset.name}", reasons.take(key for key in preset.sets if key in wanted), "  ")


def _in_order(tree: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The sections as the schema declares them."""
    return [(name, tree[name]) for name in Recipe.model_fields if name in tree]


def _with_comment(line: str, reason: str, indent: str) -> Iterator[str]:
    if reason and len(line) + len(reason) + 4 <= WIDTH:
        yield f"{line}  # {reason}"
        return
    if reason:
        yield from comment(reason, WIDTH, indent)
    yield line


ANSWERS = "# Answers of `trainkit config`, written like a recipe."


def answers_text(view: View, command: str) -> str:
    """What has been answered so far, for a later call. command: how to go on."""
    sections = (f"{name}: {flow(value, name)}" for name, value in _in_order(nest(view.chosen)))
    lines = [ANSWERS, f"# Go on with: {command}", *sections]
    return "".join(f"{line}\n" for line in lines)


@dataclass(frozen=True)
class Finished:
    """A recipe that resolves, the plan of it, and its warnings."""

    text: str
    plan: Plan
    warnings: tuple[Diagnostic, ...]


def finish(view: View, path: str, places: Merge, schema_uri: str = "") -> Finished:
    """Make the recipe to be written at a path (absolute). places: of the settings that were given.

    Raises RecipeError with what is wrong, at the places where it was given.
    """
    from trainkit.planner.build import build_plan

    text = compose(view, path, schema_uri)
    try:
        resolved = resolve_text(view, text, seen_from(view.cwd, path))
        plan = build_plan(resolved, view.facts).plan
    except RecipeError as error:
        raise RecipeError(placed(error.diagnostics, places)) from error
    return Finished(text, plan, resolved.warnings)


@dataclass(frozen=True)
class Preset:
    """A shipped preset and everything that it sets, by dotted key."""

    name: str
    sets: Settings


def presets(files: Files) -> tuple[Preset, ...]:
    """The shipped presets."""
    return tuple(
        Preset(name, dict(flatten(normalise(read_document(files.read(path)).tree, {}))))
        for name, path in files.shipped().items()
        if not name.startswith("recipes/")
    )


def fitting(offered: tuple[Preset, ...], wanted: Settings, effective: Settings) -> tuple[Preset, ...]:
    """The fewest presets that set the most of the wanted settings, and nothing to another value.

    wanted: settings that must be written; effective: every setting's value in the recipe to be.
    """
    agreeing = [each for each in offered if all(same(effective.get(key), value) for key, value in each.sets.items())]
    chosen: list[Preset] = []
    left = dict(wanted)
    while left:
        useful = [each for each in agreeing if each.sets.keys() & left.keys()]
        if not useful:
            break
        best = max(useful, key=lambda each: (len(each.sets.keys() & left.keys()), -len(each.sets)))
        chosen.append(best)
        left = {key: value for key, value in left.items() if key not in best.sets}
    return tuple(chosen)
