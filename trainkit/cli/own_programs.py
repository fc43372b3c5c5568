"""A program, or a launcher's command, in place of a recipe: the recipe that it means, and what is wrong with it."""

from __future__ import annotations

import ast
import os
import posixpath
import re
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.machinery import all_suffixes
from importlib.util import find_spec
from typing import TYPE_CHECKING

from trainkit.cli.file_system import FileSystem
from trainkit.cli.line import MODULE, PYTHON, is_line
from trainkit.errors import Diagnostic, Origin, RecipeError, UsageError
from trainkit.recipe.paths import absolute
from trainkit.recipe.resolved import MadeRecipe
from trainkit.recipe.secrets import mask_words, secret_arguments

if TYPE_CHECKING:
    from trainkit.recipe.assignment import Assignment
    from trainkit.tools.base.imported_recipe import ImportedRecipe

# A recipe's output.root is where runs lie, and the script's own folder below them; a user who types a folder means it.
OWN_WORDS = ("output_dir",)
PROCESSES = ("nproc_per_node", "num_processes", "num_gpus", "nodes.processes_per_node", "nodes.count")


def made_recipe(
    words: Sequence[str], overrides: Sequence[str], disk: FileSystem, cwd: str
) -> tuple[MadeRecipe, list[Diagnostic]]:
    """The recipe that a command means, and remarks on what is left out or differs.

    words: from the script, `-m`, the shell script or the launcher on. overrides: those in front, which lie on top of
    the recipe; the kind of the program, and how many processes there are, also tell how the command is read.
    Raises UsageError and RecipeError.
    """
    from trainkit.convert.importing import import_words, recipe_text
    from trainkit.tools.base.imported_recipe import ImportContext

    public = _listed(overrides, "program.public")
    _refuse_secrets(words, public)
    shown, is_bare = shlex.join(mask_words(words)), words[0].endswith(PYTHON) or words[0] == MODULE
    argv, more = _command(words, is_bare=is_bare)
    kind = next(iter(_listed(overrides, "program.kind")), None)
    context = ImportContext(disk, cwd, os.environ, public, tuple(filter(None, sys.path)), OWN_WORDS)
    read = import_words(argv, context, posixpath.join(cwd, "recipe.yaml"), program=more, kind=kind)
    draft, text = read.draft, read.text
    if read.draft.variants:
        names = ", ".join(read.draft.variants)
        hint = f"make a recipe of it, and choose one: trainkit import {shown} -o recipe.yaml"
        raise UsageError(f"it starts a program {len(read.draft.variants)} times ({names})", hint=hint)
    if found := list(_wrong(draft.settings, disk, read.folder)):
        raise RecipeError(found)
    if is_bare and (several := _several(overrides)):
        _spread(draft, several)
        text = recipe_text(draft, cwd)
    remarks = [Diagnostic("note", each.rstrip(".")) for each in dict.fromkeys(draft.remarks)]
    return MadeRecipe(shown, text, {key: each.origin for key, each in draft.settings.items()}), remarks


def _listed(overrides: Sequence[str], key: str) -> frozenset[str]:
    """The words that the last override of a key lists, or its one word."""
    given = next((each.partition("=")[2] for each in reversed(overrides) if each.startswith(f"{key}=")), "")
    return frozenset(re.findall(r"[\w.-]+", given))


def _spread(draft: ImportedRecipe, several: Origin) -> None:
    """Several processes where `python` would start one: a replica in each, and as many GPUs."""
    if draft.get("strategy.kind") is None:
        draft.set("strategy.kind", "ddp", several)
    cards = draft.settings.get("devices.select")
    if cards is not None and cards.origin.source == "python":
        draft.forget("devices.select")


def _refuse_secrets(words: Sequence[str], public: Collection[str]) -> None:
    for held in secret_arguments(words).values():
        if held.name not in public:
            what = f"--{held.name}" if held.by == "name" else "a word"
            what += f" is a secret by its {held.by}, written out in the command"
            hint = "export it, if the program reads it from the environment"
            if held.name:
                hint += f"; if it is not a secret, add program.public=[{held.name}] before the program"
            raise UsageError(Diagnostic("error", what, why="plans and run directories are kept and shared", hint=hint))


def _command(words: Sequence[str], *, is_bare: bool) -> tuple[list[str], list[str]]:
    """The words as import takes them, and those of a shell script. is_bare: a script or a module, without a launcher.

    Raises UsageError.
    """
    from trainkit.tools.base.imported_recipe import shell_script

    if is_line(words[0]):
        if words[1:]:
            raise UsageError(f"unexpected argument {words[1]!r}", hint="write it inside the quotes of the line")
    elif script := shell_script(words):
        return script[:1], script[2:] if script[1:2] == ["--"] else script[1:]
    elif list(words) == [MODULE]:
        raise UsageError("-m requires the name of a module", hint="write -m package.module")
    elif is_bare:
        return ["python", *words], []
    return list(words), []


def _several(overrides: Sequence[str]) -> Origin | None:
    """The override that asks for several processes, each of which then holds a replica, as torchrun has it."""
    for position, word in enumerate(overrides):
        name, equals, value = word.lstrip("-").replace("-", "_").partition("=")
        shown = word if equals else " ".join(overrides[position : position + 2])
        if name in PROCESSES and (value if equals else shown.rpartition(" ")[2]) != "1":
            return Origin("flag", 0, shown, length=len(shown), text=shown)
    return None


def described_kind(disk: FileSystem, cwd: str, key: str, target: str) -> str:
    """The program.kind of a script or a module, with what tells it. key: program.script or program.module."""
    from trainkit.tools.base.detection import program_kind
    from trainkit.tools.base.imported_recipe import ImportContext

    library = tuple(filter(None, sys.path))
    found = program_kind(ImportContext(disk, cwd, library=library), (target,), module=key == "program.module")
    if not found.by:
        return f"{found.kind} ({target} uses no Trainer with its flags, no Accelerator() and no deepspeed.initialize)"
    used, _, beside = found.by.partition(" in ")  # of a file that it imports
    file = beside or target
    try:
        lines = disk.read(absolute(file, cwd)).decode("utf-8", "replace").splitlines()
    except OSError:  # a module, which lies elsewhere
        lines = []
    name = used.rpartition(".")[2]
    number = next((number for number, line in enumerate(lines, start=1) if name in line), None)
    return f"{found.kind} ({f'{file}:{number}' if number else file} uses {used})"


def notes_on_words(words: Sequence[str], options: Mapping[str, bool]) -> Iterator[Diagnostic]:
    """A note on each word of a program that trainkit would know too: such a word belongs in front of the program.

    options: of the command that is called.
    """
    from trainkit.recipe.schema.fields import schema

    target = next((word for word in words if word.endswith(PYTHON)), words[0])
    if "--" in words[1:] and words[words.index("--") - 1] == target:
        yield Diagnostic("note", f"the `--` after {target} is passed to it too, as with python", hint="leave it out")
    for word in words[1:]:
        name = word.partition("=")[0]
        if word in options or ("=" in word and name.lstrip("-") in schema().settings and "." in name):
            what = f"{word} comes after {target}, so it is passed to it"
            yield Diagnostic("note", what, hint="arguments for trainkit come before the program")


def _wrong(settings: Mapping[str, Assignment], disk: FileSystem, cwd: str) -> Iterator[Diagnostic]:
    """What is wrong with the script or the module itself; a script that is not there is said with the recipe."""
    if script := settings.get("program.script"):
        yield from _wrong_script(str(script.value), script.origin, disk, absolute(str(script.value), cwd))
    module = settings.get("program.module")
    if module and "env.PYTHONPATH" not in settings and (what := _not_found(str(module.value), cwd, disk)):
        hint = f"check the name; a module is looked for from {cwd}, then among the packages of {sys.executable}"
        yield Diagnostic("error", what, "program.module", module.origin, hint=hint)


def _wrong_script(script: str, origin: Origin, disk: FileSystem, path: str) -> Iterator[Diagnostic]:
    if not script.endswith((".py", ".pyw")):
        return
    try:
        ast.parse(disk.read(path))
    except IsADirectoryError:
        if not disk.exists(posixpath.join(path, "__main__.py")):
            yield Diagnostic("error", f"{script} is a folder", "program.script", origin, hint="name the script in it")
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", 0) or 0
        text = (getattr(error, "text", "") or "").rstrip("\n")
        place = Origin("", 0, script, line, getattr(error, "offset", 0) or 1, text=text)
        what = f"{script} is not a program for Python {sys.version_info[0]}.{sys.version_info[1]}"
        reason = getattr(error, "msg", "") or str(error)
        hint = "fix it there, or name another script"
        yield Diagnostic("error", what, "program.script", place, reason, hint)
    except OSError:
        return  # the recipe's own check says so


def _not_found(module: str, cwd: str, disk: FileSystem) -> str:
    """Why Python would find no module of this name to run; empty where it finds one. Nothing is imported."""
    first, *inner = module.split(".")
    folders = _places(first, [cwd], disk)
    if folders is None:
        try:
            spec = find_spec(first)
        except (ImportError, ValueError):  # a name in sys.modules without a spec
            return ""
        if spec is None:
            return f"there is no module {first}"
        # A namespace package keeps its folders to itself until its parents are imported; a plain module has none.
        found = spec.submodule_search_locations
        folders = list(getattr(found, "_path", found) or ())
    name = first
    for part in inner:
        name, inside = f"{name}.{part}", _places(part, folders, disk)
        if inside is None:
            return f"there is no module {name}"
        folders = inside
    if folders and _places("__main__", folders, disk) is None:
        return f"{name} is a package without a __main__ module, so it cannot be run"
    return ""


def _places(name: str, folders: Sequence[str], disk: FileSystem) -> list[str] | None:
    """The folders of the package of this name that lies in one of the folders; none for a module, None for nothing."""
    paths = [posixpath.join(folder, name) for folder in folders]
    for path in paths:
        if disk.exists(posixpath.join(path, "__init__.py")):
            return [path]
        if any(disk.exists(f"{path}{suffix}") for suffix in all_suffixes()):
            return []
    return [path for path in paths if posixpath.isdir(path)] or None
