"""A conversation as a value: the next question, the session after an answer, and the way back."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from trainkit.wizard.planner_check import rejections, validated
from trainkit.wizard.question import AnswerError, Question, Topic
from trainkit.wizard.topics import TOPICS
from trainkit.wizard.view import Answer, View


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
        offered = (
            validated(view, topic.keys, question.choices) if topic.planned and question.choices else question.choices
        )
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
        if against := rejections(self.seen(), topic.keys, answer.sets):
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
