"""A conversation as a value: what is given, the next question, an answer, the way back, the recipe in the end."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from trainkit.errors import Diagnostic, Origin, RecipeError, UsageError
from trainkit.recipe.extends import Sources
from trainkit.recipe.flags import override_layers
from trainkit.recipe.interpolation import interpolated
from trainkit.recipe.layer import VARIANTS, Layer, normalise, read_document
from trainkit.recipe.merge import Merge, merge
from trainkit.recipe.paths import FileChecks, absolute, seen_from
from trainkit.recipe.schema import Recipe
from trainkit.recipe.schema.fields import defaults, lies_in, nest, schema, tagged_sections
from trainkit.recipe.validate import likely_kind, unknown_keys, validate_layer
from trainkit.recipe.yaml_writer import comment, flow, opening, recipe_name, shortened
from trainkit.text import pluralize
from trainkit.wizard.fine_tuning import kinds_of_given, unasked
from trainkit.wizard.question import (
    Answer,
    Base,
    Question,
    Settings,
    Topic,
    View,
    flatten,
    resolve_text,
    same,
)
from trainkit.wizard.topics import TOPICS, describe_gpus

if TYPE_CHECKING:
    from trainkit.launch_plan.model import Plan


@dataclass(frozen=True)
class Session:
    """A view, and what was answered before one went back: by topic, the default when it is asked again."""

    view: View
    before: dict[str, str] = field(default_factory=dict)

    @property
    def asked(self) -> int:
        """How many questions have been answered."""
        return len(self.view.answers)

    @cached_property
    def left(self) -> list[Topic]:
        """The topics that are neither answered, by an answer to another one neither, nor given."""
        done = {answer.topic for answer in self.view.answers}
        settled = self.view.given.keys() | {key for answer in self.view.answers for key in answer.sets}
        return [each for each in TOPICS if each.name not in done and not settled & {*each.keys}]

    @cached_property
    def seen(self) -> View:
        """The view as the next question sees it: with the settings that are still to be asked about."""
        return replace(self.view, pending=frozenset(key for topic in self.left for key in topic.keys))

    @cached_property
    def topic(self) -> Topic | None:
        """What is to be asked next; None at the end."""
        return next((topic for topic in self.left if topic.is_open(self.seen)), None)

    @cached_property
    def question(self) -> Question | None:
        return self.topic.ask(self.seen, self.before.get(self.topic.name)) if self.topic else None

    def answer(self, text: str) -> Session | Diagnostic:
        """The session with the answer, or why it is not accepted. An empty text means the default."""
        topic, question, view = self.topic, self.question, self.seen
        assert topic is not None and question is not None
        typed = text.strip() or question.default
        if not typed:
            return Diagnostic("error", "an answer is required here", hint=f"for example: {question.expected}")
        try:
            answer = _read(topic, question, view, typed)
        except UsageError as error:
            return error.diagnostics[0]
        if against := view.supposing(answer.sets).outcome.against(view.outcome, view.pending - {*topic.keys}):
            return against[0]
        return Session(replace(self.view, answers=(*self.view.answers, answer)), self.before)

    def back(self) -> Session | None:
        """The session before the last answer; None where there is nothing to go back to."""
        if not self.view.answers:
            return None
        *kept, last = self.view.answers
        return Session(replace(self.view, answers=tuple(kept)), {**self.before, last.topic: last.typed})


def _read(topic: Topic, question: Question, view: View, typed: str) -> Answer:
    if typed == question.default and question.source == view.base.name and view.base.path:
        return Answer(topic.name, typed, {}, "")  # the recipe extends the base, which says it already
    begun = [choice for choice in question.choices if choice.word.startswith(typed.lower())]
    found = [choice for choice in begun if choice.word == typed.lower()] or begun
    if len(found) == 1:
        choice = found[0]
        if choice.refused:
            what = f"{choice.word} cannot be chosen here: {choice.refused}"
            raise UsageError(what, hint="choose another, or go back with <")
        return Answer(topic.name, choice.word, choice.sets, choice.reason)
    if found and not question.expected:
        what = f"{typed!r} is short for {' and '.join(each.word for each in found)}"
        raise UsageError(what, hint="type one more letter")
    sets, reason = topic.read(view, typed)
    return Answer(topic.name, typed, sets, reason)


def read_given(answers: str | None, overrides: Sequence[str], files: FileChecks, cwd: str) -> tuple[Settings, Merge]:
    """The settings of a file of answers (written like a recipe) and of `key=value` overrides, which win.

    Also the places of both. Raises RecipeError with all errors that do not depend on the answers.
    """
    sources = Sources(files, cwd)
    if answers is not None:
        sources.add_recipe(answers)
    flags, found = override_layers(overrides, len(sources.layers), cwd, files, lambda key: None)
    layers = [*sources.layers, *flags]
    state = merge(layers)
    found = [*sources.errors, *found, *state.errors]
    for name, (given, *_) in sources.variants.items():  # nothing is dropped silently
        origin = Origin(f"file {given.page.source}", 0, given.page.source)
        hint = "start from the file with --from, which keeps its variants, or write them into the new recipe"
        what = f"the variant {name!r} is not an answer"
        found.append(Diagnostic("error", what, f"{VARIANTS}.{name}", origin, hint=hint))
    for layer in layers:
        found += _wrong(layer, state)
    wrong = [each for each in found if each.severity == "error"]
    if wrong:
        raise RecipeError(wrong)
    return dict(flatten(state.tree)), state


def _wrong(layer: Layer, state: Merge) -> Iterator[Diagnostic]:
    yield from unknown_keys(layer)
    # A kind that is not given may come from the base or an answer.
    given = {section: (state.get(f"{section}.kind"), state.get(section)) for section in tagged_sections()}
    kinds = {name: kind if isinstance(kind, str) else likely_kind(name, kept) for name, (kind, kept) in given.items()}
    yield from validate_layer(layer, kinds, interpolated)
    hint = "write the whole value; a list or a mapping of the base is changed in the recipe itself"
    for key in _modified(layer.tree):
        what = f"`{key}` changes a value that is not known here"
        yield Diagnostic("error", what, key[:-1], layer.origin(key[:-1]), hint=hint)


def _modified(tree: Any, prefix: str = "") -> Iterator[str]:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if name[-1:] in ("+", "!"):  # they append to, or replace, what a weaker layer says
            yield key
        elif isinstance(value, dict) and key in schema().sections:
            yield from _modified(value, f"{key}.")


def read_base(recipe: str, name: str, files: FileChecks, cwd: str, environ: dict[str, str]) -> Base:
    """The recipe to start from, which must be valid by itself. recipe: a path, or the name of a shipped one.

    Raises RecipeError.
    """
    from trainkit.recipe.resolve import resolve
    from trainkit.recipe.resolved import Request

    resolved = resolve(Request(recipe, cwd, environ=environ), files)
    kinds = {section: getattr(resolved.recipe, section).kind for section in tagged_sections()}
    values = {**dict(flatten(defaults(kinds))), **dict(flatten(resolved.tree))}
    path = absolute(recipe, cwd)
    shipped = (known for known, place in files.shipped().items() if recipe == known or path == place)
    return Base(next(shipped, path), name, values)


def placed(found: Sequence[Diagnostic], state: Merge) -> tuple[Diagnostic, ...]:
    """Diagnostics of the finished recipe at the places where the settings were given, for those that were."""
    return tuple(replace(each, origin=state.places.get(each.key, each.origin)) for each in found)


def completed(view: View) -> View:
    """The view with what follows from files that are given."""
    return replace(view, given={**kinds_of_given(view), **view.given})


def check_given(view: View, places: Merge) -> None:
    """Raise RecipeError where the given settings cannot go together, whatever the answers will be."""
    # Planning takes longer than the first question may, so only where there is something to check.
    wrong = [each for each in view.outcome.errors if each.key in view.given] if view.given else []
    if wrong:
        raise RecipeError(placed(wrong, places))


WIDTH = 80
_OWN = ("version", "name")  # lines that every recipe has


def compose(view: View, path: str, modeline: str = "") -> str:
    """The recipe to be written at a path (absolute). modeline: its first line, for editors."""
    view = replace(view, answers=(*view.answers, *unasked(view)))
    name = view.given.get("name") or recipe_name(posixpath.splitext(posixpath.basename(path))[0])
    needed = {key: value for key, value in view.chosen.items() if view.written(key) and key not in _OWN}
    presets = fitting(view, needed)
    in_presets = {key for sets in presets.values() for key in sets}
    reasons, facts = _reasons(view), view.facts

    def commented(line: str, keys: Iterable[str], indent: str = "") -> Iterator[str]:
        """A line with the reasons of these settings; each reason is written once, where its first setting is."""
        found = dict.fromkeys(reason for key in keys if (reason := reasons.get(key, "")))
        reasons.update({key: "" for key, reason in reasons.items() if reason in found})
        reason = "; ".join(found)
        beside = bool(reason) and len(line) + len(reason) + 4 <= WIDTH
        if reason and not beside:
            yield from comment(reason, WIDTH, indent)
        yield f"{line}  # {reason}" if beside else line

    found = (describe_gpus(facts.gpus), "Apple MPS" if facts.mps else "", pluralize(facts.cpu_cores, "CPU core"))
    made = f"Made by `trainkit config` for {facts.hostname}: {', '.join(filter(None, found))}."
    lines = opening(name, modeline, (made,), WIDTH)
    if view.base.path or presets:
        lines += ["extends:"]
    if base := view.base.path:
        if base.startswith("/"):  # a file is named from the recipe's own folder, a shipped recipe by its name
            base = posixpath.relpath(base, posixpath.dirname(path))
            base = base if base.startswith("../") else f"./{base}"
        lines += [f"  - {flow(base, '')}  # where this recipe starts from"]
    for preset, sets in presets.items():
        lines += commented(f"  - {preset}", (key for key in sets if key in needed), "  ")
    kept = {key: value for key, value in needed.items() if key not in in_presets}
    for section, value in _in_order(kept):
        keys = [key for key in kept if lies_in(key, (section,))]
        lines += commented(f"{section}: {flow(shortened(value, section), section)}", keys)
    said = {*needed, *in_presets, *_OWN}
    if left := [f"{key} {flow(value, key)}" for key, value in view.chosen.items() if key not in said]:
        lines += comment(f"As it would be anyway: {', '.join(left)}.", WIDTH)
    return "".join(f"{line}\n" for line in lines)


def _reasons(view: View) -> dict[str, str]:
    """Why each setting is as it is: the reason of the answer that set it."""
    reasons = {key: answer.reason for answer in view.answers for key in answer.sets}
    reasons |= dict.fromkeys(view.given, "given")
    # What was given and a question would have offered has the reason of that choice.
    for topic in TOPICS:
        for choice in topic.offers(view) if view.given.keys() & {*topic.keys} else ():
            if view.agrees(choice.sets):
                reasons |= dict.fromkeys(choice.sets.keys() & view.given.keys(), choice.reason)
    return reasons


def _in_order(settings: Settings) -> list[tuple[str, Any]]:
    """The sections as the schema declares them."""
    tree = nest(settings)
    return [(name, tree[name]) for name in Recipe.model_fields if name in tree]


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
        plan = build_plan(resolved, view.facts, seen=view.look(resolved) if view.look else None).plan
    except RecipeError as error:
        raise RecipeError(placed(error.diagnostics, places)) from error
    return Finished(text, plan, resolved.warnings)
