"""From words on a command line to the text of a recipe that `trainkit check` accepts."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from trainkit.convert.command import read_command, read_target, starts
from trainkit.convert.shell import read_shell
from trainkit.convert.writing import recipe_text
from trainkit.errors import Diagnostic, RecipeError, UsageError
from trainkit.flags.resolve import resolve
from trainkit.frameworks.accelerate import importer as accelerate
from trainkit.frameworks.base.draft import Draft, ImportContext
from trainkit.frameworks.base.foreign_file import SCRIPT, SUFFIXES, ForeignFile, open_foreign_file, script_text
from trainkit.frameworks.deepspeed import importer as deepspeed
from trainkit.frameworks.registry import PROGRAMS
from trainkit.plan.support import unreached
from trainkit.recipe.layers.paths import Files, absolute, seen_from
from trainkit.recipe.resolved import Request, Resolved

NO_LENGTH = "the file does not say how long to train: set it"


class Format(Protocol):
    """What a module for files of one kind offers; both functions are pure."""

    def recognises(self, tree: Mapping[str, Any]) -> bool:
        """Whether a file that holds this mapping is of the kind."""

    def read(self, draft: Draft, context: ImportContext, source: ForeignFile) -> None:
        """Settings, remarks and problems out of the file."""


FORMATS: dict[str, Format] = {"accelerate": accelerate, "deepspeed": deepspeed}


@dataclass(frozen=True, slots=True)
class Imported:
    """The recipe's text, and warnings on it."""

    text: str
    warnings: tuple[Diagnostic, ...]


def is_file(word: str) -> bool:
    """Whether a word names a file to import rather than a command, or a whole line of one."""
    return word.endswith((*SUFFIXES, SCRIPT)) and not starts(word.split(maxsplit=1)[0])


def import_words(
    words: Sequence[str],
    context: ImportContext,
    target: str,
    *,
    program: Sequence[str] = (),
    kind: str | None = None,
    schema_uri: str = "",
) -> Imported:
    """The recipe that a file or a command means.

    target: absolute path at which the recipe will lie. program: script and words for a file that names none.
    kind: of the program. Raises UsageError and RecipeError.
    """
    draft = Draft()
    path = words[0] if len(words) == 1 and is_file(words[0]) else ""
    if path and not path.endswith(SCRIPT):
        _read_file(draft, context, path, program, kind)
    else:
        read_command(draft, context, _words(draft, context, words, program), kind)
    if draft.problems:
        raise RecipeError(draft.problems)
    text = recipe_text(draft, posixpath.dirname(target), schema_uri)
    resolved = _resolved(draft, context, target, text)
    if _leave_out(draft, resolved):
        text = recipe_text(draft, posixpath.dirname(target), schema_uri)
        _resolved(draft, context, target, text)
    return Imported(text, _absent(draft, context))


def _leave_out(draft: Draft, resolved: Resolved) -> bool:
    """Take out what a launcher's file or flags set and what does not reach the program."""
    kind = resolved.recipe.program.kind
    found = [each for each in unreached(resolved, PROGRAMS[kind].REACH, kind) if each.key in draft.settings]
    for each in found:
        setting = draft.settings.pop(each.key)
        why = f": {each.why}." if each.why else "."
        more = "" if draft.get("program.kind") else " Name the script behind `--` to keep it."
        reason = f" ({draft.reasons.pop(each.key)})" if each.key in draft.reasons else ""
        draft.remark(
            f"{setting.origin.place}: {each.key} {setting.value}{reason} is left out, for it cannot reach a program of "
            f"kind {kind}{why}{more}"
        )
    return bool(found)


def _words(draft: Draft, context: ImportContext, words: Sequence[str], more: Sequence[str]) -> list[str]:
    """The words of a command; a script, and a line that is one word, are read as a shell would.

    more: words behind `--`, which are the script's arguments, or belong to the command.
    """
    end = ["--", *more] if more else []
    scripts = words[1:] if words[0] in ("sh", "bash") else words
    if len(scripts) == 1 and is_file(scripts[0]) and scripts[0].endswith(SCRIPT):
        made, draft.remarks = read_shell(script_text(context, scripts[0]), scripts[0], more)
        draft.title, end = scripts[0], []
    elif len(words) == 1 and any(character.isspace() for character in words[0]):
        made, draft.remarks = read_shell(words[0])
    else:
        made = list(words)
    return [*made, *end]


def _read_file(draft: Draft, context: ImportContext, path: str, program: Sequence[str], kind: str | None) -> None:
    source = open_foreign_file(context, path, program)
    draft.title = path
    draft.name = posixpath.splitext(posixpath.basename(path))[0]
    found = next((each for each in FORMATS.values() if each.recognises(source.tree)), None)
    if found is None:
        shown = ", ".join(sorted(map(str, source.tree))[:5])
        what = f"{path} is of no known kind ({', '.join(sorted(FORMATS))}); it has {shown}"
        raise UsageError(what, hint="check the file")
    found.read(draft, context, source)
    if program:
        read_target(draft, context, program, kind or draft.get("program.kind"))
    elif draft.get("train.steps") is None:
        draft.set("train.epochs", 1, source.at(""), NO_LENGTH)


class _WrittenFiles:
    """The files as they will be once the recipe is written, and the program is there."""

    def __init__(self, files: Files, written: Mapping[str, str], there: Sequence[str]) -> None:
        self._files, self._written, self._there = files, written, (*there, *written)

    def read(self, path: str) -> bytes:
        """The file's bytes. Raises OSError."""
        return self._written[path].encode() if path in self._written else self._files.read(path)

    def exists(self, path: str) -> bool:
        """Whether there is a file, or will be."""
        return path in self._there or self._files.exists(path)

    def shipped(self) -> Mapping[str, str]:
        """As they are."""
        return self._files.shipped()


def _resolved(draft: Draft, context: ImportContext, target: str, text: str) -> Resolved:
    """The text as trainkit reads it. Raises RecipeError with what `trainkit check` would say, at its place."""
    script = draft.get("program.script")
    files = _WrittenFiles(context.files, {target: text}, [absolute(script, context.cwd)] if script else [])
    try:
        return resolve(Request(recipe=target, cwd=context.cwd), files)
    except RecipeError as error:
        raise RecipeError([_at_source(draft, each) for each in error.diagnostics]) from error


def _at_source(draft: Draft, found: Diagnostic) -> Diagnostic:
    key = found.key
    while key and key not in draft.settings:
        key = key.rpartition(".")[0]
    return replace(found, origin=draft.settings[key].origin if key else None)


def _absent(draft: Draft, context: ImportContext) -> tuple[Diagnostic, ...]:
    script = draft.get("program.script")
    if not script or context.files.exists(absolute(script, context.cwd)):
        return ()
    what = f"there is no file {seen_from(context.cwd, absolute(script, context.cwd))} here"
    hint = "trainkit check will ask for it; a path starts from the folder in which trainkit is called"
    return (Diagnostic("warning", what, "program.script", draft.settings["program.script"].origin, hint=hint),)
