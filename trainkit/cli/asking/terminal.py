"""Questions on a terminal, through questionary: arrow keys and typing, `?` and `<` at any time."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any

import questionary
from prompt_toolkit.data_structures import Size
from prompt_toolkit.filters import Condition
from prompt_toolkit.key_binding import KeyBindings, merge_key_bindings
from prompt_toolkit.output import ColorDepth
from prompt_toolkit.output.vt100 import Vt100_Output
from questionary.prompts.common import InquirerControl

from trainkit.cli.asking.conversation import BACK, WHY, Asker, columns, cut, head, proposal, row
from trainkit.wizard.question import Question

_STYLE = questionary.Style(
    [("qmark", ""), ("question", "bold"), ("instruction", ""), ("pointer", "bold"), ("highlighted", "bold")]
)


class _Line(str):
    """A choice's line, which typing finds by the choice's word alone."""

    word: str

    def lower(self) -> str:
        """What questionary's filter looks into."""
        return self.word


class TerminalAsker(Asker):
    """Asks with lists and lines that are edited in place."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        # No cursor position requests: terminals that never answer them would get a warning.
        size = shutil.get_terminal_size
        output = Vt100_Output(
            sys.stdout, lambda: Size(size().lines, size().columns), os.environ.get("TERM"), enable_cpr=False
        )
        colours = ColorDepth.DEPTH_1_BIT if os.environ.get("NO_COLOR") else None
        self.look: dict[str, Any] = {"output": output, "color_depth": colours, "erase_when_done": True}

    def ask(self, question: Question, number: int) -> str:
        """One answer as typed or chosen. Raises KeyboardInterrupt and EOFError for Ctrl-C and Ctrl-D."""
        return self._select(question, number) if question.choices else self._type(question, number)

    def _select(self, question: Question, number: int) -> str:
        rows: list[Any] = []
        for choice in question.choices:
            line = _Line(cut(row(choice, columns(question)), self.width - 5))
            line.word = choice.word
            rows.append(questionary.Choice(line, choice.word))
        if question.expected:
            rows.append(questionary.Separator(cut(f"or type {question.expected}", self.width - 4)))
        source = f"({question.default}: {question.source})" if question.source else " "
        if len(source) + len(head(question, number)) > self.width - 3:
            source = " "
        if question.default and question.default not in {choice.word for choice in question.choices}:
            rows.insert(0, questionary.Choice(question.default, question.default))
        prompt = questionary.select(
            question.text, rows, question.default or None, qmark=f"{number}.", instruction=source, style=_STYLE,
            use_search_filter=True, use_jk_keys=False, **self.look,
        )  # fmt: skip
        application = prompt.application
        control = next(each for each in application.layout.find_all_controls() if isinstance(each, InquirerControl))
        own = KeyBindings()
        # Eager: questionary gives these keys another meaning, or filters the list by them.
        own.add("c-d", eager=True)(lambda event: event.app.exit(exception=EOFError))  # as it leaves a line
        for key in (WHY, BACK):
            own.add(key, eager=True)(_giving(key))

        @own.add("enter", eager=True)
        def _accept(event: Any) -> None:
            typed, pointed = control.search_filter or "", str(control.get_pointed_at().value)
            meant = not typed or (control.found_in_search and (pointed.startswith(typed) or not question.expected))
            event.app.exit(result=pointed if meant else typed)

        application.key_bindings = merge_key_bindings([application.key_bindings or KeyBindings(), own])
        return str(prompt.unsafe_ask())

    def _type(self, question: Question, number: int) -> str:
        bindings, application = KeyBindings(), None
        empty = Condition(lambda: application is not None and not application.current_buffer.text)
        for key in (WHY, BACK):
            bindings.add(key, filter=empty, eager=True)(_giving(key))
        shown = proposal(question) or f"for example {question.expected}"
        prompt = questionary.text(
            question.text, qmark=f"{number}.", style=_STYLE, key_bindings=bindings,
            placeholder=cut(shown, self.width - len(head(question, number)) - 2), **self.look,
        )  # fmt: skip
        application = prompt.application
        return str(prompt.unsafe_ask())


def _giving(text: str) -> Any:
    return lambda event: event.app.exit(result=text)
