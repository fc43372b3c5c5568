"""What the wizard writes, as text: questions, reasons, rejections and answers, within the width of the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from trainkit.wizard.question import Answer, Choice, Question, Rejection

GREETING = "Enter takes what is proposed; ? says more, < goes back, Ctrl-C leaves."
WORD = 12  # columns of a choice's word, at least


def head(question: Question, number: int) -> str:
    """The question with its number."""
    return f"{number}. {question.text}"


def proposal(question: Question) -> str:
    """The default and where it is from, as shown after a question."""
    if not question.default:
        return ""
    return f"{question.default} ({question.source})" if question.source else question.default


def columns(question: Question) -> int:
    """How wide the words of a question's choices are set."""
    return max(WORD, *(len(choice.word) + 2 for choice in question.choices), 0)


def row(choice: Choice, wide: int) -> str:
    """A choice on one line; wide: columns of its word."""
    if choice.refused:
        return f"{choice.word:<{wide}}cannot be chosen: {choice.refused}"
    return f"{choice.word:<{wide}}{choice.note}{f' [{choice.remark}]' if choice.remark else ''}"


def cut(text: str, width: int) -> str:
    """The text on one line of this width."""
    return text if len(text) <= width else f"{text[: max(width - 3, 1)]}..."


def listing(question: Question, width: int) -> Iterator[str]:
    """The choices, each wrapped as a paragraph."""
    for choice in question.choices:
        yield from _paragraph(choice, question, width)
    if question.expected:
        yield from wrapped(
            f"or type {question.expected}" if question.choices else f"for example {question.expected}", width
        )


def reasons(question: Question, width: int) -> Iterator[str]:
    """What `?` shows."""
    for each in question.why:
        yield from wrapped(each, width, "  ", "    ")
    for choice in question.choices:
        yield from _paragraph(choice, question, width)


def _paragraph(choice: Choice, question: Question, width: int) -> list[str]:
    wide = columns(question)
    return wrapped(row(choice, wide), width, "  ", " " * (wide + 2))


def rejection(found: Rejection, width: int) -> Iterator[str]:
    """Why an answer is not taken."""
    yield from wrapped(f"  no: {found.what}", width, "", "      ")
    for label, text in (("why", found.why), ("next", found.hint)):
        if text:
            yield from wrapped(f"  {label}: {text}", width, "", "      ")


def answered(number: int, question: Question, answer: Answer, width: int) -> str:
    """One line that stays when a question is answered."""
    line, reason = f"{head(question, number)} {answer.typed}", f"  ({answer.reason})" if answer.reason else ""
    return f"{line}{reason}" if len(line) + len(reason) <= width else cut(line, width)


def wrapped(text: str, width: int, first: str = "  ", rest: str = "  ") -> list[str]:
    """A paragraph of this width."""
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
