"""Shell scripts and lines: the one program that they start, its words, and what is around it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from trainkit.convert.shell.control import settled
from trainkit.convert.shell.scope import Scope
from trainkit.convert.shell.script import Reader
from trainkit.convert.shell.values import Launch, OpenParts, text_of
from trainkit.errors import Origin, UsageError
from trainkit.frameworks.base.draft import Draft, argv_origin


@dataclass(frozen=True, slots=True)
class ShellCommand:
    """words: assignments, exported ones too, in front of the command's own. folder: in which it runs, "" for here.

    opened: what in the words is not known. remarks: on what is left out. setup: lines of a job in front of the command,
    as a shell reads them.
    """

    words: list[str]
    folder: str
    opened: OpenParts
    remarks: list[str]
    setup: tuple[str, ...] = ()


def read_shell(
    text: str,
    starts: Callable[[Sequence[str]], bool],
    *,
    path: str = "",
    given: Sequence[str] = (),
    asked: Mapping[str, str] | None = None,
    at_line: int | None = None,
    is_job: bool = False,
) -> ShellCommand:
    """The command that a text runs. Raises UsageError where there is none, or more than one.

    starts: whether words are a command that can be imported. path: of the file that holds the text. given: arguments
    that it is called with. asked: variables that the caller sets. at_line: of the command, where there are several.
    is_job: whether it runs in a job, whose modules and variables are set there.
    """
    scope = Scope(path, tuple((word,) for word in given), asked=dict(asked or {}))
    reader = Reader(path, starts, scope, setup=[] if is_job else None)
    try:
        reader.read(text.replace("\r\n", "\n"))
    except RecursionError:
        what = (
            f"{path}: it calls itself, or is nested too deeply" if path else "it calls itself, or is nested too deeply"
        )
        raise UsageError(what, hint="import the command with what it comes to") from None
    launch = _the_one(reader, at_line)
    if not given and path and "$@" in text:
        scope.note("$@ is empty here: put the script's arguments behind `--` after its name.")
    opened = OpenParts()
    assigned = {str(word[0]).partition("=")[0] for word in launch.words if word and "=" in str(word[0])}
    exported = [each for each in launch.exported if each[0] not in assigned]
    late = {name for name, found in exported if is_job and text_of(found) is None}  # only the job knows what they are
    front = [(f"{name}=", *found) for name, found in exported if name not in late]
    setup = [text for name, text in reader.setup or () if not name or name in late]
    words = [opened.word(word) for word in settled([*front, *launch.words], scope.note)]
    return ShellCommand(words, launch.folder, opened, scope.remarks, tuple(setup))


def _the_one(reader: Reader, at_line: int | None) -> Launch:
    """The command to import: the only one, or the only one of a launcher."""
    found = [each for each in reader.found if at_line is None or each.line == at_line]
    distinct = list({each.words: each for each in found}.values())
    launchers = [each for each in distinct if not _is_python(each)]
    chosen = launchers if len(launchers) == 1 else distinct
    if len(chosen) == 1:
        for each in distinct:
            if each is not chosen[0]:
                reader.scope.note(f"`{_shown(each)}` (line {each.line}) is not taken over.")
        return chosen[0]
    place = f"{reader.path}: " if reader.path else ""
    if not chosen:
        at = f" on line {at_line}" if at_line else ""
        hint = "give the command itself"
        if reader.path and not reader.scope.given:
            hint = f"give what it is called with: trainkit import {reader.path} -- ARGUMENTS, or --set NAME=VALUE"
        raise UsageError(f"{place}it starts no program{at} that can be imported", hint=hint)
    listed = "; ".join(f"line {each.line}: {_shown(each)}" for each in chosen[:6])
    hint = "choose one with --line NUMBER, or give the command itself"
    if len({each.line for each in chosen}) < len(chosen):
        hint = "it is in a loop: choose a turn with --set NAME=VALUE, or give the command itself"
    raise UsageError(f"{place}it starts {len(chosen)} programs ({listed})", hint=hint)


def _is_python(launch: Launch) -> bool:
    names = [str(word[0]) for word in launch.words if word]
    return any(name.rpartition("/")[2].startswith("python") for name in names[:3]) and "torch.distributed" not in str(
        names
    )


def _shown(launch: Launch) -> str:
    words = OpenParts()
    return " ".join(words.word(word) for word in launch.words)[:80]


def name_what_is_open(draft: Draft, opened: OpenParts) -> None:
    """Note an error for each setting that holds what only a running shell knows; elsewhere it was of no account."""
    for key, each in draft.settings.items():
        for part in opened.within(json.dumps(each.value, ensure_ascii=False)):
            what = f"{key} is made of {part.text[:100]}, which only a running shell knows (line {part.line})"
            draft.fail(what, argv_origin(part.text), part.hint)
    draft.problems = [
        replace(each, what=opened.readable(each.what), origin=each.origin and _readable(each.origin, opened))
        for each in draft.problems
    ]
    draft.remarks = [opened.readable(each) for each in draft.remarks]
    draft.title = opened.readable(draft.title)


def _readable(origin: Origin, opened: OpenParts) -> Origin:
    shown = opened.readable(origin.text)
    return replace(origin, source=opened.readable(origin.source), text=shown, length=max(len(shown), 1))
