"""`trainkit config`: the wizard's questions on a terminal or through plain lines, and the recipe that it writes."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterable
from functools import cache, partial
from itertools import chain, count
from pathlib import Path
from typing import Annotated, Any

import questionary
import typer
from prompt_toolkit.data_structures import Size
from prompt_toolkit.filters import Condition
from prompt_toolkit.key_binding import KeyBindings, merge_key_bindings
from prompt_toolkit.output import ColorDepth
from prompt_toolkit.output.vt100 import Vt100_Output
from questionary.prompts.common import InquirerControl
from typer import Option

from trainkit.cli.diagnostics import show_diagnostics, write_text
from trainkit.cli.file_system import FileSystem, modeline, working_folder, write_file
from trainkit.cli.machines import machine_facts
from trainkit.cli.options import On
from trainkit.cli.pipeline import find_recipe, look_at_data
from trainkit.errors import Diagnostic, MachineError, RecipeError, UsageError
from trainkit.files import is_there
from trainkit.recipe.merge import Merge
from trainkit.recipe.paths import absolute
from trainkit.text import wrapped
from trainkit.wizard.question import AnswerOption, Base, Question, View
from trainkit.wizard.session import (
    ANSWERS,
    Finished,
    Session,
    answers_text,
    check_given,
    completed,
    finish,
    read_base,
    read_given,
)

WHY, BACK = "?", "<"
GREETING = "Enter accepts the proposal; ? explains, < goes back, Ctrl-C quits."
NARROWEST_COLUMN = 12  # of the choices' words


def say(lines: Iterable[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def cut(text: str, width: int) -> str:
    """The text on one line of this width."""
    return text if len(text) <= width else f"{text[: max(width - 3, 1)]}..."


def proposal(question: Question) -> str:
    """The default and where it is from, as shown after a question."""
    return f"{question.default} ({question.source})" if question.default and question.source else question.default


def rows(question: Question) -> dict[str, str]:
    """Each choice on one line, by its word."""
    wide = column(question)
    lines = {}
    for choice in question.choices:
        note = f"{choice.note}{f' [{choice.remark}]' if choice.remark else ''}"
        refused = f"cannot be chosen: {choice.refused}"
        lines[choice.word] = f"{choice.word:<{wide}}{refused if choice.refused else note}"
    return lines


def column(question: Question) -> int:
    """How wide the words of a question's choices are set."""
    return max(NARROWEST_COLUMN, *(len(choice.word) + 2 for choice in question.choices), 0)


class Asker:
    """Asks in plain lines, with answers from standard input: for pipes and simple terminals."""

    def __init__(self, width: int) -> None:
        self.width = width

    def ask(self, question: Question, number: int) -> str:
        """What was typed: an answer, `?` or `<`; nothing for the default. Raises EOFError at the end of the input."""
        proposed = proposal(question)
        say([f"{number}. {question.text}"])
        self.list_choices(question)
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

    def list_choices(self, question: Question) -> None:
        hanging = " " * (column(question) + 2)
        say(line for row in rows(question).values() for line in wrapped(row, self.width, "  ", hanging))

    def explain(self, question: Question) -> None:
        """Write what `?` shows."""
        say(line for each in question.why for line in wrapped(each, self.width, "  ", "    "))
        self.list_choices(question)

    def refuse(self, found: Diagnostic) -> None:
        """Write why an answer is not taken."""
        for label, text in (("no", found.what), ("why", found.why), ("next", found.hint)):
            if text:
                say(wrapped(f"  {label}: {text}", self.width, "", "      "))


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
        shown: list[Any] = []
        for word, row in rows(question).items():
            line = _Line(cut(row, self.width - 5))
            line.word = word
            shown.append(questionary.Choice(line, word))
        if question.expected:
            shown.append(questionary.Separator(cut(f"or type {question.expected}", self.width - 4)))
        source = f"({question.default}: {question.source})" if question.source else " "
        if len(f"{number}. {question.text}{source}") > self.width - 3:
            source = " "
        if question.default and question.default not in rows(question):
            shown.insert(0, questionary.Choice(question.default, question.default))
        prompt = questionary.select(
            question.text, shown, question.default or None, qmark=f"{number}.", instruction=source, style=_STYLE,
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
            placeholder=cut(shown, self.width - len(f"{number}. {question.text}") - 2), **self.look,
        )  # fmt: skip
        application = prompt.application
        return str(prompt.unsafe_ask())


def _giving(text: str) -> Any:
    return lambda event: event.app.exit(result=text)


_NARROWEST, _WIDEST = 40, 110
OTHER_FILE = "name another file (--output)"
_INTERRUPTED = 130  # as a shell names the end by Ctrl-C


class Conversation:
    """From the first question to a written file. Nothing that was answered is lost when the user leaves.

    target: what is to be written; places: of the given settings; again: the call that goes on with kept answers.
    """

    def __init__(self, session: Session, target: Path, places: Merge, again: str, *, force: bool) -> None:
        self.session, self.target, self.places, self.again, self.force = session, target, places, again, force
        width = min(max(shutil.get_terminal_size().columns, _NARROWEST), _WIDEST)
        on_terminal = sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM") not in (None, "", "dumb")
        self.asker = TerminalAsker(width) if on_terminal else Asker(width)

    def take_defaults(self) -> None:
        """Answer every question with what it proposes, and write. Raises UsageError where one proposes nothing."""
        if is_there(self.target) and not self.force:
            raise UsageError(f"{self.target} exists", hint="give another --output, or --force to replace it")
        while (question := self.session.question) is not None:
            outcome = self.session.answer("")
            if isinstance(outcome, Diagnostic):
                key = self.session.topic.keys[0] if self.session.topic else ""
                raise UsageError(
                    f"{question.text} There is nothing to propose: {outcome.what}", hint=f"add --set {key}=…"
                )
            self.session = outcome
        self.write(self.finish(self.target))

    def ask(self) -> int:
        """Ask, show, write; returns the exit code."""
        say(wrapped(GREETING, self.asker.width, "", ""))
        try:
            while True:
                self.ask_all()
                finished = self.finished(self.target)
                word = self.decide(finished) if finished else BACK
                if word == BACK:
                    self.session = self.session.back() or self.session
                elif word in ("yes", "no"):
                    if word == "no":
                        self.keep()
                    return 0
                elif self.finished(Path(word)):
                    self.target = Path(word)
        except (KeyboardInterrupt, EOFError) as leaving:
            self.keep()
            if isinstance(leaving, EOFError) and not sys.stdin.isatty():
                hint = "answer all questions, or add --defaults to accept the proposals"
                raise UsageError("the input ended before the last question", hint=hint) from leaving
            return _INTERRUPTED

    def ask_all(self) -> None:
        """Ask until nothing is left open."""
        while (question := self.session.question) is not None:
            text = self.asker.ask(question, self.session.asked + 1)
            if text == WHY:
                self.asker.explain(question)
            elif text == BACK:
                if (earlier := self.session.back()) is None:
                    say(["  this is the first question"])
                self.session = earlier or self.session
            elif isinstance(outcome := self.session.answer(text), Diagnostic):
                self.asker.refuse(outcome)
            else:
                self.session, answer = outcome, outcome.view.answers[-1]
                line = f"{outcome.asked}. {question.text} {answer.typed}"
                reason = f"  ({answer.reason})" if answer.reason else ""
                # One line stays of each answered question.
                width = self.asker.width
                say([f"{line}{reason}" if len(line) + len(reason) <= width else cut(line, width)])

    def finish(self, target: Path) -> Finished:
        """The recipe for a file, and its plan. Raises RecipeError."""
        path = os.path.abspath(target)  # noqa: PTH100 - a link stays a link
        return finish(self.session.view, path, self.places, modeline())

    def finished(self, target: Path) -> Finished | None:
        """The same; None where something is wrong that another answer may correct."""
        try:
            return self.finish(target)
        except RecipeError as error:
            if not self.session.asked:
                raise
            show_diagnostics(error.diagnostics)
            return None

    def decide(self, finished: Finished) -> str:
        """Show recipe and plan, and write the recipe when the user says so.

        Returns `yes`, `no`, `<`, or another file's name, which is asked for again where this one cannot be written.
        """
        from trainkit.launch_plan.render import table

        show_diagnostics(finished.warnings)
        # Without its first line, which is for editors.
        say(["", finished.text.partition("\n")[2], table.render(finished.plan, self.asker.width)])
        exists = FileSystem().exists(str(self.target)) and not self.force
        yes, note = ("replace", "the existing file") if exists else ("yes", f"write {self.target}")
        question = Question(
            f"{self.target} exists. Replace it?" if exists else f"Write {self.target}?",
            ("The recipe is a text file that you can edit. < goes back to the questions.",),
            (
                AnswerOption(yes, note, {}, ""),
                AnswerOption("no", "quit without writing it; the answers are saved", {}, ""),
            ),
            "no" if exists else "yes",
            expected="another file's name, *.yaml",
        )
        while True:
            typed = self.asker.ask(question, self.session.asked + 1) or question.default
            word = next((each.word for each in question.choices if each.word.startswith(typed.lower())), "")
            if typed == WHY:
                self.asker.explain(question)
            elif word == yes:
                try:
                    self.write(finished)
                except (MachineError, UsageError) as error:
                    show_diagnostics(error.diagnostics)
                else:
                    return "yes"
            elif word == "no" or typed == BACK or typed.endswith((".yaml", ".yml")):
                return word or typed
            else:
                hint = f"write {yes}, no, or a name.yaml"
                self.asker.refuse(Diagnostic("error", f"{typed!r} is not an answer", hint=hint))

    def write(self, finished: Finished) -> None:
        """Write the recipe, whole or not at all, and say what comes next."""
        write_file(self.target, finished.text, OTHER_FILE)
        facts = self.session.view.facts
        there = f", on {facts.hostname or facts.origin}" if facts.origin else ""  # which is then not this machine
        write_text(f"{self.target} is written. Next{there}: trainkit run {shlex.quote(str(self.target))}\n")
        for notice in finished.plan.blockers:
            write_text(f"Before it can run{there}: {notice.what}: {notice.hint}\n")

    def keep(self) -> None:
        """Keep the answers of a user who leaves, and show how to go on."""
        if not self.session.asked:
            say(["", "There are no answers, and nothing is written."])
            return
        name = self.target.with_suffix(".answers.yaml")
        for target in (_free(name), _free(Path(name.name))):  # the working folder, where the recipe's is read-only
            command = f"{self.again} {shlex.quote(str(target))}"
            try:
                write_file(target, answers_text(self.session.view, command), OTHER_FILE)
            except (MachineError, UsageError):
                continue
            say(["", "No recipe is written. Your answers are saved; continue with:", f"  {command}"])
            return
        how = "Continue with --answers and a file with these lines:"
        say(["", f"No recipe is written, and your answers cannot be saved. {how}"])
        say(answers_text(self.session.view, f"{self.again} FILE").splitlines())


def _free(target: Path) -> Path:
    """The path, or the next one with a number where another file is than answers of an earlier call."""
    numbered = (target.with_name(f"{target.name.removesuffix('.yaml')}-{number}.yaml") for number in count(2))
    return next(
        path for path in chain((target,), numbered) if not FileSystem().exists(str(path)) or _holds_answers(path)
    )


def _holds_answers(found: Path) -> bool:
    try:
        return found.read_text(encoding="utf-8", errors="replace").startswith(ANSWERS)
    except OSError:  # a folder, or a file that is not for us to read
        return False


def config(
    *,
    output: Annotated[str, Option("--output", "-o", metavar="FILE", help="The recipe to write.")] = "recipe.yaml",
    base: Annotated[str | None, Option("--from", metavar="RECIPE", help="Base recipe; the new one extends it.")] = None,
    on: On = None,
    answers: Annotated[
        str | None,
        Option(
            "--answers", metavar="FILE", help="File with answers in YAML, by recipe key; these questions are skipped."
        ),
    ] = None,
    given: Annotated[
        list[str] | None,
        Option("--set", metavar="KEY=VALUE", help="An answer, or any setting; may be repeated."),
    ] = None,
    defaults: Annotated[bool, Option("--defaults", help="Ask nothing: accept all proposals.")] = False,
    force: Annotated[bool, Option("--force", help="Replace an existing file without asking.")] = False,
) -> None:
    """Write a recipe from a few questions; this machine and your answers keep them as few as possible.

    On a terminal use arrow keys or type; in a pipe answer line by line. Quitting with
    Ctrl-C or Ctrl-D (exit code 130) saves the answers to a file for --answers.

    Example: trainkit config

    Example: trainkit config --on 8xh100

    Example: trainkit config --defaults --set strategy.kind=fsdp --output fsdp.yaml
    """
    disk, cwd = FileSystem(), working_folder()
    # What this shell adds to every recipe must not become part of one.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TRAINKIT__")}
    recipe = find_recipe(base, disk) if base is not None else None
    if Path(output).is_dir():
        raise UsageError(f"{output or '.'} is a folder", hint=f"name a file: --output {Path(output, 'recipe.yaml')}")
    if recipe is not None and absolute(recipe, cwd) == absolute(output, cwd):
        raise UsageError(f"{output} is the recipe to extend", hint="name another file: --output FILE")
    settings, places = read_given(answers, given or (), disk, cwd)
    start = read_base(recipe, base or "", disk, cwd, environ) if recipe is not None else Base()
    machine = cache(partial(machine_facts, on))
    if on is not None:
        machine()  # so that an error is shown before the first question
    session = Session(completed(View(machine, disk, cwd, start, settings, (), environ, look_at_data)))
    check_given(session.seen, places)
    again = ["trainkit", "config", *(["--output", output] if output != "recipe.yaml" else [])]
    again += [*(["--from", base] if base else []), *(["--on", on] if on else []), "--answers"]
    conversation = Conversation(session, Path(output), places, shlex.join(again), force=force)
    if defaults:
        conversation.take_defaults()
    else:
        raise typer.Exit(conversation.ask())
