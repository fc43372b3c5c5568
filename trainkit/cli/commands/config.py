"""How the wizard talks to people: on a terminal, and through plain lines."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
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
from trainkit.cli.disk import Disk, modeline, working_folder, write_file
from trainkit.cli.machines import machine_facts
from trainkit.cli.options import On
from trainkit.cli.pipeline import find_recipe
from trainkit.errors import MachineError, RecipeError, UsageError
from trainkit.files import is_there
from trainkit.recipe.merge import Merge
from trainkit.recipe.paths import absolute
from trainkit.text import wrapped
from trainkit.wizard.question import AnswerError, Base, Choice, Question, View
from trainkit.wizard.recipe_text import ANSWERS, Finished, answers_text, finish
from trainkit.wizard.session import Session, check_given, read_base, read_given

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


_NARROWEST, _WIDEST = 40, 110
OTHER_FILE = "name another file (--output)"
_INTERRUPTED = 130  # as a shell names the end by Ctrl-C


def begin(
    output: str, base: str | None, on: str | None, answers: str | None, given: Sequence[str], *, force: bool
) -> tuple[Session, Job]:
    """The conversation before its first question, with what is answered already, and what it is to write.

    Raises RecipeError or UsageError for what was given.
    """
    disk, cwd = Disk(), working_folder()
    # What this shell adds to every recipe must not become part of one.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TRAINKIT__")}
    recipe = find_recipe(base, disk) if base is not None else None
    if Path(output).is_dir():
        raise UsageError(f"{output or '.'} is a folder", hint=f"name a file: --output {Path(output, 'recipe.yaml')}")
    if recipe is not None and absolute(recipe, cwd) == absolute(output, cwd):
        raise UsageError(f"{output} is what the new recipe is to extend", hint="name another file: --output FILE")
    settings, places = read_given(answers, given, disk, cwd)
    start = read_base(recipe, base or "", disk, cwd, environ) if recipe is not None else Base()
    machine = cache(partial(machine_facts, on))
    if on is not None:
        machine()  # so that an error is shown before the first question
    session = Session(View(machine, disk, cwd, start, settings, (), environ))
    check_given(session.seen(), places)
    again = ["trainkit", "config", *(["--output", output] if output != "recipe.yaml" else [])]
    again += [*(["--from", base] if base else []), *(["--on", on] if on else []), "--answers"]
    return session, Job(Path(output), places, force, shlex.join(again))


@dataclass(frozen=True)
class Job:
    """What is to be written. places: of the given settings; again: the call that goes on with kept answers."""

    target: Path
    places: Merge
    force: bool
    again: str

    def finish(self, session: Session) -> Finished:
        """The recipe and its plan. Raises RecipeError."""
        path = os.path.abspath(self.target)  # noqa: PTH100 - a link stays a link
        return finish(session.view, path, self.places, modeline())


def take_defaults(session: Session, job: Job) -> None:
    """Answer every question with what it proposes, and write. Raises UsageError where one proposes nothing."""
    if is_there(job.target) and not job.force:
        raise UsageError(f"{job.target} exists", hint="give another --output, or --force to replace it")
    while (question := session.question) is not None:
        outcome = session.answer("")
        if isinstance(outcome, AnswerError):
            topic = session.topic
            key = topic.keys[0] if topic else ""
            raise UsageError(f"{question.text} Nothing can be proposed: {outcome.what}", hint=f"add --set {key}=…")
        session = outcome
    write(job.finish(session), job.target, session)


def ask_and_write(session: Session, job: Job) -> int:
    """The conversation; returns the exit code."""
    width = min(max(shutil.get_terminal_size().columns, _NARROWEST), _WIDEST)
    asker = Asker(width)
    if sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM") not in (None, "", "dumb"):
        asker = TerminalAsker(width)
    say(wrapped(GREETING, asker.width, "", ""))
    try:
        while True:
            for reached in converse(session, asker):
                session = reached
            finished = _finished(session, job)
            word = _decide(finished, session, job, asker) if finished else BACK
            if word == BACK:
                session = session.back() or session
            elif word in ("yes", "no"):
                if word == "no":
                    _keep(session, job)
                return 0
            else:
                renamed = replace(job, target=Path(word))
                job = renamed if _finished(session, renamed) else job
    except (KeyboardInterrupt, EOFError) as leaving:
        _keep(session, job)
        if isinstance(leaving, EOFError) and not sys.stdin.isatty():
            hint = "answer all of them, or add --defaults to take what is proposed"
            raise UsageError("the input ended before the last question", hint=hint) from leaving
        return _INTERRUPTED


def _finished(session: Session, job: Job) -> Finished | None:
    """The recipe; None where something is wrong that another answer may correct."""
    try:
        return job.finish(session)
    except RecipeError as error:
        if not session.asked:
            raise
        show_diagnostics(error.diagnostics)
        return None


def _decide(finished: Finished, session: Session, job: Job, asker: Asker) -> str:
    """Show recipe and plan, and write the recipe when the user says so; what they said.

    Where it cannot be written another name may do, so they are asked again and no answer is lost.
    """
    from trainkit.launch_plan.render import table

    show_diagnostics(finished.warnings)
    # Without its first line, which is for editors.
    say(["", finished.text.partition("\n")[2], table.render(finished.plan, asker.width)])
    while True:
        exists = Disk().exists(str(job.target)) and not job.force
        word = confirm(asker, str(job.target), exists, session.asked + 1)
        if word != "yes":
            return word
        try:
            write(finished, job.target, session)
        except (MachineError, UsageError) as error:
            show_diagnostics(error.diagnostics)
        else:
            return word


def write(finished: Finished, target: Path, session: Session) -> None:
    """Write the recipe, whole or not at all, and say what comes next."""
    write_file(target, finished.text, OTHER_FILE)
    facts = session.view.facts
    there = f", on {facts.hostname or facts.origin}" if facts.origin else ""  # which is then not this machine
    write_text(f"{target} is written. Next{there}: trainkit run {shlex.quote(str(target))}\n")
    for notice in finished.plan.blockers:
        write_text(f"Before it can run{there}: {notice.what}: {notice.hint}\n")


def _keep(session: Session, job: Job) -> None:
    """Keep the answers of a user who leaves, and show how to go on."""
    if not session.asked:
        say(["", "Nothing was answered, and nothing is written."])
        return
    name = job.target.with_suffix(".answers.yaml")
    for target in (_free(name), _free(Path(name.name))):  # the working folder where the recipe's cannot be written
        command = f"{job.again} {shlex.quote(str(target))}"
        try:
            write_file(target, answers_text(session.view, command), OTHER_FILE)
        except (MachineError, UsageError):
            continue
        say(["", "No recipe is written. Your answers are kept; go on with:", f"  {command}"])
        return
    say(["", "No recipe is written, and your answers cannot be kept. Go on with --answers and a file of these lines:"])
    say(answers_text(session.view, f"{job.again} FILE").splitlines())


def _free(target: Path) -> Path:
    """The path, or the next one with a number where another file is than answers of an earlier call."""
    numbered = (target.with_name(f"{target.name.removesuffix('.yaml')}-{number}.yaml") for number in count(2))
    return next(path for path in chain((target,), numbered) if not Disk().exists(str(path)) or _holds_answers(path))


def _holds_answers(found: Path) -> bool:
    try:
        return found.read_text(encoding="utf-8", errors="replace").startswith(ANSWERS)
    except OSError:  # a folder, or a file that is not for us to read
        return False


def config(
    *,
    output: Annotated[str, Option("--output", "-o", metavar="FILE", help="The recipe to write.")] = "recipe.yaml",
    base: Annotated[
        str | None, Option("--from", metavar="RECIPE", help="Start from this recipe; the new one extends it.")
    ] = None,
    on: On = None,
    answers: Annotated[
        str | None, Option("--answers", metavar="FILE", help="Answers in YAML, by recipe key; not asked again.")
    ] = None,
    given: Annotated[
        list[str] | None,
        Option("--set", metavar="KEY=VALUE", help="One answer, or any setting; may be repeated."),
    ] = None,
    defaults: Annotated[bool, Option("--defaults", help="Ask nothing: take what is proposed.")] = False,
    force: Annotated[bool, Option("--force", help="Replace an existing file without asking.")] = False,
) -> None:
    """Write a recipe from a few questions, of which this machine and your answers leave as few as possible.

    On a terminal with arrow keys and typing, in a pipe line by line. Leaving with
    Ctrl-C or Ctrl-D (exit code 130) keeps the answers in a file for --answers.

    Example: trainkit config

    Example: trainkit config --on 8xh100

    Example: trainkit config --defaults --set strategy.kind=fsdp --output fsdp.yaml
    """

    session, job = begin(output, base, on, answers, given or (), force=force)
    if defaults:
        take_defaults(session, job)
    else:
        raise typer.Exit(ask_and_write(session, job))
