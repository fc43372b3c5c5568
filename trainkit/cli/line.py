"""The arguments of a command line: trainkit's own, and where a program's or a launcher's command begins."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING

from trainkit.cli.file_system import FileSystem
from trainkit.errors import UsageError

if TYPE_CHECKING:
    import typer

PYTHON = (".py", ".pyw", ".pyc", ".pyz")  # a word that ends so is a program
MODULE = "-m"  # and what follows this one
OWN_PROGRAM = "trainkit.own_program"  # where a command's context keeps it
_RECIPES = (".yaml", ".yml", ".json")
_ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)=")


@dataclass(frozen=True, slots=True)
class OwnProgram:
    """A program, or the command of a launcher, that stands for a recipe.

    words: from the script, `-m` or the launcher on. options: of trainkit's command, each with whether it is a switch.
    """

    words: tuple[str, ...]
    options: Mapping[str, bool]


def split_line(argv: Sequence[str], *, most: int, what: str) -> tuple[list[str], list[str]]:
    """Positional arguments and overrides, each in their order.

    most: how many positional ones the command takes; what: their names, for the message of the UsageError.
    """
    positional, overrides = _overrides().split_overrides(argv)
    if len(positional) > most:
        hint = f"this command takes {what}; write overrides as key=value, the program's arguments after `--`"
        raise UsageError(f"unexpected argument {positional[most]!r}", hint=hint)
    return positional, overrides


def program_at(words: Sequence[str], options: Mapping[str, bool]) -> int:
    """Where a program, or the command of a launcher, begins; the number of words where there is none.

    options: the command's own, each with whether it is a switch. The words before are trainkit's, and what follows is
    the program's, as Python and torchrun have it.
    """
    position = 0
    while position < len(words):
        word = words[position]
        if begins_program(words[position:]):
            return position
        if (name := word.partition("=")[0]) in options:
            position += 1 if options[name] or "=" in word else 2
        elif word.startswith("--"):
            position += _overrides().width(words[position:], begins_program)
        elif "=" in word or _is_key(word):  # what `explain` is asked for may stand in front
            position += 1
        else:
            break
    return len(words)


def begins_program(words: Sequence[str]) -> bool:
    """Whether a script, `-m`, a shell script or a launcher's command is the first of the words."""
    word = words[0]
    if is_line(word) or word == MODULE:
        return True
    if word.startswith("-") or word.endswith(_RECIPES) or f"recipes/{word}" in FileSystem().shipped():
        return False
    assigned = _ASSIGNMENT.match(word)
    if "=" in word and (not assigned or _is_key(assigned["name"])):
        return False
    # Only now, for the tables of the launchers take time to load.
    from trainkit.convert.command import starts_program
    from trainkit.tools.base.imported_recipe import SCRIPTS, shell_script

    if assigned:
        return starts_program(words)
    is_run = FileSystem().exists(os.path.join(word, "recipe.yaml"))  # noqa: PTH118 - a folder may be named like a launcher
    if word.endswith((*PYTHON, *SCRIPTS)) or shell_script(words):
        return True
    return starts_program(words) and not is_run


def is_line(word: str) -> bool:
    """Whether a word is a whole line of shell text with a command in it, quoted as one."""
    parts = word.split()
    if len(parts) < 2 or FileSystem().exists(word):
        return False
    from trainkit.convert.command import starts
    from trainkit.tools.base.imported_recipe import shell_script

    return any(map(starts, parts[:-1])) or shell_script([word]) not in ([], [word])


def own_program(context: typer.Context) -> OwnProgram | None:
    """The program in place of a recipe, with the words behind `--`; None where there is a recipe."""
    found: OwnProgram | None = context.meta.get(OWN_PROGRAM)
    if found is None or not context.obj:
        return found
    return replace(found, words=(*found.words, "--", *context.obj))


def _is_key(word: str) -> bool:
    """Whether a word is a key of the recipe, or one of its sections."""
    _overrides()
    from trainkit.recipe.schema.fields import open_keys, schema

    return word in schema().settings or word in schema().sections or word in open_keys()


def _overrides() -> ModuleType:
    """The module that reads overrides; with it the recipe's schema is built."""
    from trainkit.recipe import flags

    return flags
