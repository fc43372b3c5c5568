"""The conversation: one question after the other, with `?` and `<`, up to the plan and the word to write it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Protocol

from trainkit.cli.asking import page
from trainkit.wizard.question import Choice, Question, Rejection
from trainkit.wizard.session import Session

WHY, BACK = "?", "<"


class Asker(Protocol):
    """Puts one question and returns what was typed: an answer, `?` or `<`; nothing for the default."""

    width: int

    def ask(self, question: Question, number: int) -> str:
        """Raises KeyboardInterrupt or EOFError when the user leaves."""
        ...


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
            continue
        if text == BACK:
            earlier = session.back()
            if earlier is None:
                say(["  this is the first question"])
            session = earlier or session
            yield session
            continue
        outcome = session.answer(text)
        if isinstance(outcome, Rejection):
            say(page.rejection(outcome, asker.width))
            continue
        say([page.answered(outcome.asked, question, outcome.view.answers[-1], asker.width)])
        session = outcome
        yield session


def confirm(asker: Asker, shown: str, exists: bool, number: int) -> str:
    """Whether the recipe is to be written: `yes`, `no`, `<`, or another file's name."""
    word, note = ("replace", "the file that is there") if exists else ("yes", "")
    choices = (
        Choice(word, note or f"write {shown}", {}, ""),
        Choice("no", "leave without writing it; the answers are kept", {}, ""),
    )
    text = f"{shown} exists. Replace it?" if exists else f"Write {shown}?"
    why = ("The recipe is a text file, made to be edited. < goes back to the questions.",)
    question = Question("write", text, why, choices, "no" if exists else "yes", "", "another file's name, *.yaml")
    while True:
        typed = asker.ask(question, number) or question.default
        found = [choice.word for choice in choices if choice.word.startswith(typed.lower())]
        if typed == WHY:
            say(page.reasons(question, asker.width))
        elif typed == BACK:
            return BACK
        elif found:
            return "no" if found[0] == "no" else "yes"
        elif typed.endswith((".yaml", ".yml")):
            return typed
        else:
            say(
                page.rejection(
                    Rejection(f"{typed!r} is not an answer", hint=f"write {word}, no, or a name.yaml"), asker.width
                )
            )
