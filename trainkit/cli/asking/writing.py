"""From the first question to the file: the conversation, the plan, the recipe, and answers kept for a later call."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, count
from pathlib import Path

from trainkit.cli.asking.conversation import BACK, GREETING, Asker, confirm, converse, say
from trainkit.cli.diagnostics import show_diagnostics, write_text
from trainkit.cli.disk import Disk, modeline, working_folder, write_file
from trainkit.cli.machines import machine_facts
from trainkit.cli.pipeline import find_recipe
from trainkit.errors import MachineError, RecipeError, UsageError
from trainkit.files import is_there
from trainkit.recipe.layers.merge import Merge
from trainkit.recipe.layers.paths import absolute
from trainkit.text import wrapped
from trainkit.wizard.question import AnswerError, Base, View
from trainkit.wizard.recipe_text import ANSWERS, Finished, answers_text, finish
from trainkit.wizard.session import Session, check_given, read_base, read_given

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
        from trainkit.cli.asking.terminal import TerminalAsker

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
    from trainkit.plan.render import table

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
