"""The conversation: one question after the other, with `?` and `<`, up to the plan and whether to write the recipe."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Protocol

from trainkit.cli.asking import page
from trainkit.wizard.question import Choice, Question, Rejection
from trainkit.wizard.session import Session

WHY, BACK = "?", "<"


class Asker(Protocol):
    """Asks one question and returns what was typed: an answer, `?` or `<`; nothing for the default."""

    width: int

    def ask(self, question: Question, number: int) -> str:
        """Raises KeyboardInterrupt or EOFError when the user leaves."""


class LineAsker:
    """Asks in plain lines, with answers from standard input: for pipes and simple terminals."""

    def __init__(self, width: int) -> None:
        self.width = width

    def ask(self, question: Question, number: int) -> str:
        """One typed line. Raises EOFError at the end of the input."""
        proposed = page.proposal(question)
        say([page.head(question, number), *page.listing(question, self.width)])
        sys.stdout.write(f"[{proposed}] " if proposed else "> ")
        sys.stdout.flush()
        text = sys.stdin.readline()
        if not sys.stdin.isatty():
            sys.stdout.write("\n")
        if not text:
            raise EOFError
        return text.strip()


def say(lines: Iterable[str]) -> None:
    """Write lines to standard output."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def converse(session: Session, asker: Asker) -> Iterator[Session]:
    """Ask until nothing is left open. Yields the session after each step, so that a caller who is left has the last."""
    while (question := session.question()) is not None:
        text = asker.ask(question, session.asked + 1)
        if text == WHY:
            say(page.reasons(question, asker.width))
        elif text == BACK:
            earlier = session.back()
            if earlier is None:
                say(["  this is the first question"])
            session = earlier or session
            yield session
        elif isinstance(outcome := session.answer(text), Rejection):
            say(page.rejection(outcome, asker.width))
        else:
            say([page.answered(outcome.asked, question, outcome.view.answers[-1], asker.width)])
            session = outcome
            yield session


def confirm(asker: Asker, shown: str, exists: bool, number: int) -> str:
    """Whether the recipe is to be written: `yes`, `no`, `<`, or another file's name."""
    word, note = ("replace", "the file that is there") if exists else ("yes", f"write {shown}")
    keep = Choice("no", "leave without writing it; the answers are kept", {}, "")
    text = f"{shown} exists. Replace it?" if exists else f"Write {shown}?"
    why = ("The recipe is a text file, made to be edited. < goes back to the questions.",)
    default = "no" if exists else "yes"
    question = Question(
        "write", text, why, (Choice(word, note, {}, ""), keep), default, "", "another file's name, *.yaml"
    )
    while True:
        typed = asker.ask(question, number) or question.default
        found = [choice.word for choice in question.choices if choice.word.startswith(typed.lower())]
        if typed == WHY:
            say(page.reasons(question, asker.width))
        elif found:
            return "no" if found[0] == "no" else "yes"
        elif typed == BACK or typed.endswith((".yaml", ".yml")):
            return typed
        else:
            hint = f"write {word}, no, or a name.yaml"
            say(page.rejection(Rejection(f"{typed!r} is not an answer", hint=hint), asker.width))
