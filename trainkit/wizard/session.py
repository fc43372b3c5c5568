"""A conversation as a value: what is given before it, the next question, the session after an answer, the way back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from trainkit.errors import Diagnostic, Origin, RecipeError
from trainkit.recipe.extends import Sources
from trainkit.recipe.flags import override_layers
from trainkit.recipe.interpolation import interpolated
from trainkit.recipe.layer import VARIANTS, Layer
from trainkit.recipe.merge import Merge, merge
from trainkit.recipe.paths import Files, absolute
from trainkit.recipe.schema.fields import defaults, schema, tagged_sections
from trainkit.recipe.validate import likely_kind, unknown_keys, validate_layer
from trainkit.wizard.planner_check import check, validated
from trainkit.wizard.question import Answer, AnswerError, Base, Question, Settings, Topic, View, flatten
from trainkit.wizard.topics import TOPICS


@dataclass(frozen=True)
class Session:
    """A view, and what was answered before one went back: by topic, the default when it is asked again."""

    view: View
    before: dict[str, str] = field(default_factory=dict)

    @property
    def asked(self) -> int:
        """How many questions have been answered."""
        return len(self.view.answers)

    @property
    def left(self) -> list[Topic]:
        """The topics that are neither answered nor given."""
        done = {answer.topic for answer in self.view.answers}
        return [each for each in TOPICS if each.name not in done and not self.view.given.keys() & {*each.keys}]

    def seen(self) -> View:
        """The view as the next question sees it: with the settings that are still to be asked about."""
        return replace(self.view, pending=frozenset(key for topic in self.left for key in topic.keys))

    @cached_property
    def topic(self) -> Topic | None:
        """What is to be asked next; None at the end."""
        return next((topic for topic in self.left if topic.open(self.view)), None)

    @cached_property
    def question(self) -> Question | None:
        """The next question; None at the end."""
        topic, view = self.topic, self.seen()
        if topic is None:
            return None
        question = topic.ask(view)
        offered = question.choices
        if topic.planned and offered:
            offered = validated(view, topic.keys, offered)
        free = {choice.word: not choice.refused for choice in offered}
        default, source = question.default, question.source
        # An answer from before one went back is proposed again, while it can still be given.
        last = self.before.get(topic.name)
        if last is not None and free.get(last, bool(question.expected)):
            default, source = last, "your last answer"
        elif not free.get(default, True):
            default, source = next((word for word in free if free[word]), ""), ""
        settings = {key: view.declared(key) for key in topic.explains or topic.keys}
        explained = (f"{key}: {setting.description}" for key, setting in settings.items() if setting)
        why = (*question.why, *explained)
        return replace(question, topic=topic.name, why=why, choices=offered, default=default, source=source)

    def answer(self, text: str) -> Session | AnswerError:
        """The session with the answer, or why it is not accepted. An empty text means the default."""
        topic, question = self.topic, self.question
        assert topic is not None and question is not None
        typed = text.strip() or question.default
        if not typed:
            return AnswerError("an answer is required here", f"for example: {question.expected}")
        try:
            answer = _read(topic, question, self.seen(), typed)
        except AnswerError as error:
            return error
        view = self.seen()
        if against := check(view.supposing(answer.sets)).against(check(view), view.pending - {*topic.keys}):
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
            raise AnswerError(what, "choose another, or go back with <")
        return Answer(topic.name, choice.word, choice.sets, choice.reason)
    if found and not question.expected:
        raise AnswerError(f"{typed!r} is short for {' and '.join(each.word for each in found)}", "type one more letter")
    sets, reason = topic.read(view, typed)
    return Answer(topic.name, typed, sets, reason)


def read_given(answers: str | None, overrides: Sequence[str], files: Files, cwd: str) -> tuple[Settings, Merge]:
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


def read_base(recipe: str, name: str, files: Files, cwd: str, environ: dict[str, str]) -> Base:
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


def check_given(view: View, places: Merge) -> None:
    """Raise RecipeError where the given settings cannot go together, whatever the answers will be."""
    # Planning takes longer than the first question may, so only where there is something to check.
    wrong = [each for each in check(view).errors if each.key in view.given] if view.given else []
    if wrong:
        raise RecipeError(placed(wrong, places))
