"""The conversation: one question after the other, with `?` and `<`, and how each is written in plain lines."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from trainkit.text import wrapped
from trainkit.wizard.question import AnswerError, Choice, Question
from trainkit.wizard.session import Session

WHY, BACK = "?", "<"
GREETING = "Enter takes what is proposed; ? says more, < goes back, Ctrl-C leaves."
NARROWEST_COLUMN = 12  # of the choices' words


class Asker:
    """Asks in plain lines, with answers from standard input: for pipes and simple terminals."""

    def __init__(self, width: int) -> None:
        self.width = width

    def ask(self, question: Question, number: int) -> str:
        """What was typed: an answer, `?` or `<`; nothing for the default. Raises EOFError at the end of the input."""
        proposed = proposal(question)
        say([head(question, number), *paragraphs(question, self.width)])
        if question.expected:
            begin = "or type" if question.choices else "for example"
            say(wrapped(f"{begin} {question.expected}", self.width, "  ", "  "))
        sys.stdout.write(f"[{proposed}] " if proposed else "> ")
        sys.stdout.flush()
        text = sys.stdin.readline()
        if not sys.stdin.isatty():  # no terminal has echoed the user's own line break
            sys.stdout.write("\n")
        if not text:
            raise EOFError
        return text.strip()


def converse(session: Session, asker: Asker) -> Iterator[Session]:
    """Ask until nothing is left open. Yields the session after each step, so that a caller who is left has the last."""
    while (question := session.question) is not None:
        text = asker.ask(question, session.asked + 1)
        if text == WHY:
            explain(question, asker.width)
        elif text == BACK:
            earlier = session.back()
            if earlier is None:
                say(["  this is the first question"])
            session = earlier or session
            yield session
        elif isinstance(outcome := session.answer(text), AnswerError):
            refuse(outcome, asker.width)
        else:
            answer = outcome.view.answers[-1]
            line = f"{head(question, outcome.asked)} {answer.typed}"
            reason = f"  ({answer.reason})" if answer.reason else ""
            # One line stays of each answered question.
            say([f"{line}{reason}" if len(line) + len(reason) <= asker.width else cut(line, asker.width)])
            session = outcome
            yield session


def confirm(asker: Asker, shown: str, exists: bool, number: int) -> str:
    """Whether the recipe is to be written: `yes`, `no`, `<`, or another file's name."""
    word, note = ("replace", "the file that is there") if exists else ("yes", f"write {shown}")
    keep = Choice("no", "leave without writing it; the answers are kept", {}, "")
    text = f"{shown} exists. Replace it?" if exists else f"Write {shown}?"
    why = ("The recipe is a text file, made to be edited. < goes back to the questions.",)
    default, expected = "no" if exists else "yes", "another file's name, *.yaml"
    question = Question(text, why, (Choice(word, note, {}, ""), keep), default, "", expected)
    while True:
        typed = asker.ask(question, number) or question.default
        found = [choice.word for choice in question.choices if choice.word.startswith(typed.lower())]
        if typed == WHY:
            explain(question, asker.width)
        elif found:
            return "no" if found[0] == "no" else "yes"
        elif typed == BACK or typed.endswith((".yaml", ".yml")):
            return typed
        else:
            hint = f"write {word}, no, or a name.yaml"
            refuse(AnswerError(f"{typed!r} is not an answer", hint=hint), asker.width)


def say(lines: Iterable[str]) -> None:
    """Write lines to standard output."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def explain(question: Question, width: int) -> None:
    """Write what `?` shows."""
    say(line for each in question.why for line in wrapped(each, width, "  ", "    "))
    say(paragraphs(question, width))


def refuse(found: AnswerError, width: int) -> None:
    """Write why an answer is not taken."""
    for label, text in (("no", found.what), ("why", found.why), ("next", found.hint)):
        if text:
            say(wrapped(f"  {label}: {text}", width, "", "      "))


def head(question: Question, number: int) -> str:
    """The question with its number."""
    return f"{number}. {question.text}"


def proposal(question: Question) -> str:
    """The default and where it is from, as shown after a question."""
    return f"{question.default} ({question.source})" if question.default and question.source else question.default


def columns(question: Question) -> int:
    """How wide the words of a question's choices are set."""
    return max(NARROWEST_COLUMN, *(len(choice.word) + 2 for choice in question.choices), 0)


def row(choice: Choice, wide: int) -> str:
    """A choice on one line; wide: columns of its word."""
    if choice.refused:
        return f"{choice.word:<{wide}}cannot be chosen: {choice.refused}"
    return f"{choice.word:<{wide}}{choice.note}{f' [{choice.remark}]' if choice.remark else ''}"


def paragraphs(question: Question, width: int) -> Iterator[str]:
    """The choices, each wrapped behind its word."""
    wide = columns(question)
    for choice in question.choices:
        yield from wrapped(row(choice, wide), width, "  ", " " * (wide + 2))


def cut(text: str, width: int) -> str:
    """The text on one line of this width."""
    return text if len(text) <= width else f"{text[: max(width - 3, 1)]}..."
