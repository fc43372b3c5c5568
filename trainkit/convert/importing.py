"""Recipes made from commands, shell scripts, batch scripts, notebooks, and files of other tools."""

from __future__ import annotations

import ast
import json
import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Protocol

from trainkit.convert.command import read_command, read_target, starts_program
from trainkit.convert.sbatch import ARRAY_TURN, SbatchScript, put_cluster, read_batch, take_srun
from trainkit.convert.shell import ShellCommand, name_what_is_open, read_shell
from trainkit.convert.shell.evaluating import Script
from trainkit.errors import Diagnostic, RecipeError, UsageError
from trainkit.launch_plan.rules import unreached
from trainkit.machine.facts import Facts, Gpu
from trainkit.planner.build import build_plan
from trainkit.recipe.interpolation import names_in
from trainkit.recipe.layer import ARGUMENTS
from trainkit.recipe.paths import Overlay, absolute, seen_from
from trainkit.recipe.resolve import resolve
from trainkit.recipe.resolved import Request, Resolved
from trainkit.recipe.schema import Recipe
from trainkit.recipe.schema.fields import lies_in, nest, path_keys, schema
from trainkit.recipe.yaml_writer import block, comment, fitted, flow, opening, recipe_name, scalar, shortened
from trainkit.text import GIB
from trainkit.tools import axolotl, llama_factory, torchtune, trl
from trainkit.tools.accelerate import importer as accelerate
from trainkit.tools.base.imported_recipe import (
    SCRIPTS,
    SUFFIXES,
    ForeignFile,
    ImportContext,
    ImportedRecipe,
    argv_origin,
    open_foreign_file,
    script_text,
    shell_script,
)
from trainkit.tools.deepspeed import importer as deepspeed
from trainkit.tools.registry import PROGRAMS

WIDTH = 120
MOST_VARIANTS = 100
# What of a launch is the same in all variants of a recipe that is made of several.
_LAUNCH = ("devices", "nodes", "launcher", "cluster", "container", "strategy.kind", "program.kind", "program.script",
           "program.module", "program.folder")  # fmt: skip
_NUMBER = re.compile(r"(0|[1-9]\d{0,14})(\.\d+)?")  # reaches the program with these very characters
# GPUs of the machines that are tried where the recipe takes as many as there are, the likely ones first.
GPU_COUNTS: tuple[int, ...] = (8, 1, 2, 4, 3, 6, 16)
MOST_GPUS = 4096  # of a machine, as many as a recipe can count
# Notebooks
NOTEBOOK = ".ipynb"
_SHELL_CELLS = ("%%bash", "%%sh", "%%shell", "%%script bash")
_LAUNCHED_INSIDE = re.compile(r"\bnotebook_launcher\s*\(")
_TRAINS = re.compile(r"\b(?:Seq2Seq|SFT|DPO)?Trainer\s*\(|\bAccelerator\s*\(|\bdeepspeed\.initialize\s*\(")
_TO_SCRIPT = "jupyter nbconvert --to script"


class Format(Protocol):
    """What a module for files of one kind offers; both functions are pure.

    COMMAND: what starts the tool itself, in front of a file; empty where a program of the user's reads it.
    """

    COMMAND: str

    def likeness(self, tree: Mapping[str, Any]) -> float:
        """How much of a file is this tool's, from 0, where nothing typical of it is there, to 1."""

    def read(self, draft: ImportedRecipe, context: ImportContext, source: ForeignFile) -> None: ...


FORMATS: dict[str, Format] = {
    "DeepSpeed": deepspeed,
    "LLaMA-Factory": llama_factory,
    "TRL": trl,
    "accelerate": accelerate,
    "axolotl": axolotl,
    "torchtune": torchtune,
}


@dataclass(frozen=True, slots=True)
class ShellOptions:
    """What the caller says of shell text. asked: values of its variables; number: the line with the command."""

    asked: Mapping[str, str] = field(default_factory=dict)
    number: int | None = None


@dataclass(frozen=True, slots=True)
class Imported:
    """A recipe's text, and what it was made of. folder: in which the command runs, absolute."""

    text: str
    draft: ImportedRecipe
    folder: str


def most_alike(tree: Mapping[str, Any]) -> str:
    """The tool whose file this is by its keys; empty where it is none's."""
    alike = {name: each.likeness(tree) for name, each in FORMATS.items()}
    found = max(alike, key=alike.__getitem__)
    return found if alike[found] else ""


def foreign_recipe(context: ImportContext, path: str) -> Diagnostic | None:
    """What is wrong with a file of another tool that is named as a recipe; None for a recipe, with mistakes or not."""
    try:
        source = open_foreign_file(context, path)
    except (UsageError, RecipeError):
        return None
    tool = "" if "version" in source.tree and "name" in source.tree else most_alike(source.tree)
    if not tool:
        return None
    shown = shlex.quote(path)
    hint = f"trainkit import {shown} -o recipe.yaml"
    if command := FORMATS[tool].COMMAND:
        hint += f"; or launch {tool} itself: trainkit run {command} {shown}"
    return Diagnostic("error", f"{path} is a file of {tool}, and no recipe", origin=source.at(""), hint=hint)


def is_file(word: str) -> bool:
    """Whether a word names a file to import, and is no command."""
    return word.endswith((*SUFFIXES, *SCRIPTS)) and not is_line(word)


def is_line(word: str) -> bool:
    """Whether one word holds a whole command, or several, as a shell would read them."""
    return any(starts_program(each.split()) for each in re.split(r"[\n;&|]+", word) if len(each.split()) > 1)


def import_words(
    words: Sequence[str],
    context: ImportContext,
    target: str,
    *,
    program: Sequence[str] = (),
    kind: str | None = None,
    modeline: str = "",
    lines: ShellOptions | None = None,
) -> Imported:
    """The recipe that a file or a command means.

    target: absolute path at which the recipe will lie. program: script and words for a file that names none.
    kind: of the program. Raises UsageError and RecipeError.
    """
    draft, folder = ImportedRecipe(), context.cwd
    path = words[0] if len(words) == 1 and is_file(words[0]) else ""
    if path and not path.endswith(SCRIPTS):
        _read_file(draft, context, path, program, kind)
    else:
        folder = _read_words(draft, context, words, program, kind=kind, lines=lines or ShellOptions())
    if draft.problems:
        raise RecipeError(draft.problems)
    while True:  # what is lost beside another key shows when that is gone
        text = recipe_text(draft, posixpath.dirname(target), modeline)
        resolved = _resolved(draft, context, target, text)
        reached_by = resolved.recipe.program.kind
        found = unreached(resolved, PROGRAMS[reached_by].SUPPORT, reached_by)
        lost = [each for each in found if each.key in draft.settings]
        if not lost:
            return Imported(text, draft, folder)
        for each in lost:  # set by a launcher's file or flags
            setting = draft.settings.pop(each.key)
            for settings in draft.variants.values():
                settings.pop(each.key, None)
            reason = f" ({draft.reasons.pop(each.key)})" if each.key in draft.reasons else ""
            more = "" if draft.get("program.kind") else " Name the script behind `--` to keep it."
            draft.remark(
                f"{setting.origin.place}: {each.key} {setting.value}{reason} is left out, for it cannot reach a "
                f"program of kind {reached_by}{f': {each.why}' if each.why else ''}.{more}"
            )


def check_import(read: Imported, context: ImportContext, target: str) -> list[Diagnostic]:
    """Warnings on what was read; the context and the target are those that it was read with. Raises RecipeError."""
    # What a variable holds is known only when the recipe is used.
    if not names_in(read.text):
        resolved = _resolved(read.draft, context, target, read.text)
        if refused := refusals(resolved):
            raise RecipeError([_placed(read.draft, each, target) for each in refused])
    script = read.draft.get("program.script")
    if not script or context.files.exists(absolute(script, read.folder)):
        return []
    what = f"there is no file {seen_from(context.cwd, absolute(script, read.folder))} here"
    hint = "trainkit check will ask for it; a path starts from the folder in which trainkit is called"
    return [Diagnostic("warning", what, "program.script", read.draft.settings["program.script"].origin, hint=hint)]


def refusals(resolved: Resolved) -> tuple[Diagnostic, ...]:
    """What the plan says on the likeliest machine, where it is refused on all; nothing where one could run it."""
    found: tuple[Diagnostic, ...] = ()
    for uuids in _machines(resolved):
        gpus = tuple(
            Gpu(index, each, "H100", 80 * GIB, 80 * GIB, compute_capability=(9, 0)) for index, each in enumerate(uuids)
        )
        facts = Facts(
            platform="linux", machine="x86_64", hostname="trial", python="3.11", executable="python", cpu_cores=64,
            memory_total=1024 * GIB, gpus=gpus, mps=True, origin="trial",
        )  # fmt: skip
        try:
            build_plan(resolved, facts)
        except RecipeError as error:
            found = found or error.diagnostics
        else:
            return ()
    return found


def _machines(resolved: Resolved) -> Iterator[list[str]]:
    """The UUIDs of the GPUs of each machine to try."""
    devices, processes = resolved.recipe.devices, resolved.recipe.nodes.processes_per_node
    select, counts = devices.select, GPU_COUNTS
    if devices.type in ("cpu", "mps", "xla") or select == "none":
        counts = (0,)
    elif isinstance(select, list):
        words = [str(each) for each in select]
        highest = max((int(each) for each in words if each.isdecimal()), default=-1)
        indexed = [f"card-{number}" for number in range(min(highest + 1, MOST_GPUS))]
        yield [*indexed, *(each for each in words if not each.isdecimal())]
        return
    elif isinstance(select, int) or processes != "auto":
        counts = (int(select if isinstance(select, int) else processes),)
    for count in counts:
        yield [f"card-{number}" for number in range(count)]


def _read_file(
    draft: ImportedRecipe, context: ImportContext, path: str, program: Sequence[str], kind: str | None
) -> None:
    source = open_foreign_file(context, path, program)
    draft.title = path
    draft.name = posixpath.splitext(posixpath.basename(path))[0]
    tool = most_alike(source.tree)
    if not tool:
        shown = ", ".join(sorted(map(str, source.tree))[:5])
        what = f"{path} is of no known kind ({', '.join(sorted(FORMATS))}); it has {shown}"
        hint = "launch the program that reads it, as trainkit run COMMAND, or write a recipe: trainkit config"
        raise UsageError(what, hint=hint)
    found = FORMATS[tool]
    if found is accelerate and program:  # as the command that names the file
        read_command(draft, context, ["accelerate", "launch", "--config_file", path, *program], kind)
        draft.title = path
        return
    found.read(draft, context, source)
    if program:
        read_target(draft, context, program, kind or draft.get("program.kind"))
    elif draft.get("train.steps") is None and draft.get("train.epochs") is None:
        draft.set("train.epochs", 1, source.at(""), "the file does not say how long to train: set it")


def _read_words(
    draft: ImportedRecipe,
    context: ImportContext,
    words: Sequence[str],
    more: Sequence[str],
    *,
    kind: str | None,
    lines: ShellOptions,
) -> str:
    """Import a command; a script, and a line that is one word, are read as a shell would. The folder it runs in.

    more: words behind `--`, which are the script's arguments, or belong to the command.
    """
    end = ["--", *more] if more else []
    batch: SbatchScript | None = None
    scripts = shell_script(words) if len(words) > 1 or not starts_program(words[0].split()) else []
    around = Script(
        words[0], starts_program, asked=lines.asked, here=context.cwd, environ=context.environ,
        is_folder=context.files.exists,
    )  # fmt: skip
    if scripts:
        draft.title, end = scripts[0], []
        batch, shell = _read_script(replace(around, path=scripts[0], given=[*scripts[1:], *more]), context, lines)
    elif len(words) == 1 and any(character.isspace() for character in words[0]):
        shell, end = read_shell(around, lines.number), list(more)
    else:
        read_command(draft, context, [*words, *end], kind)
        return context.cwd
    draft.remarks = shell.remarks
    inside = replace(context, cwd=absolute(shell.folder, context.cwd))

    def read(draft: ImportedRecipe, batch: SbatchScript | None, words: Sequence[str]) -> ImportedRecipe:
        command = take_srun(batch, words) if batch else words
        read_command(draft, inside, [*command, *end], kind, [*words, *end])
        if shell.folder:
            _start_in(draft, shell.folder, context.cwd)
        return draft

    turns = (
        [read(ImportedRecipe(), deepcopy(batch), each) for each in (shell.words, *shell.more)] if shell.several else []
    )
    read(draft, batch, shell.words)
    if batch:
        put_cluster(batch, draft, shell.setup)
    for each in (draft, *turns):
        name_what_is_open(each, shell.opened)
    if shell.several:
        _put_variants(draft, turns, shell.several)
    return inside.cwd


def _read_script(
    script: Script, context: ImportContext, lines: ShellOptions
) -> tuple[SbatchScript | None, ShellCommand]:
    """What a shell script asks a cluster for, if it does, and its command."""
    text = script_text(context, script.path)
    if script.path.endswith(NOTEBOOK):
        text = shell_text(text, script.path)
    batch = read_batch(text, script.path)
    asked = {**(batch.variables if batch else {}), **lines.asked}
    script = replace(script, text=text, asked=asked, is_job=batch is not None)
    turns = batch.turns if batch and ARRAY_TURN in text and ARRAY_TURN not in lines.asked else []
    if not turns:
        return batch, read_shell(script, lines.number)
    first, *more = (read_shell(replace(script, asked={**asked, ARRAY_TURN: turn}), lines.number) for turn in turns)
    if others := tuple(each.words for each in more if each.words != first.words):
        what = f"{script.path}: the tasks of its array start different programs"
        several = UsageError(what, hint=f"choose: --set {ARRAY_TURN}={turns[0]}")
        first = replace(first, more=others, several=several)
    return batch, first


def _start_in(draft: ImportedRecipe, folder: str, cwd: str) -> None:
    """Have the program start in a folder; paths in the recipe's own settings are seen from the caller's."""
    if draft.get("container.kind"):
        what = f"the command starts a container in the folder {folder}, from which its words for folders start"
        raise UsageError(what, hint="go there, and import it there")
    for key in path_keys():
        value = draft.get(key)
        if isinstance(value, str) and not key.startswith("program.") and value not in schema().settings[key][0].words:
            draft.settings[key] = replace(draft.settings[key], value=posixpath.join(folder, value))
    path = absolute(folder, cwd)
    elsewhere = posixpath.commonpath((path, cwd)) == "/"  # which is the same from everywhere
    draft.set("program.folder", path if elsewhere else folder, argv_origin(f"cd {folder}"))


def _put_variants(draft: ImportedRecipe, read: Sequence[ImportedRecipe], several: UsageError) -> None:
    """Make variants of commands that differ in what the program is told alone. Raises `several` for others."""
    turns = []
    for other in read:  # the settings by key, and arguments by name
        told = {key: each.value for key, each in other.settings.items()}
        if isinstance(told.get(ARGUMENTS), Mapping):
            told |= {f"{ARGUMENTS}.{name}": value for name, value in told.pop(ARGUMENTS).items()}
        turns.append(told)
    keys = [key for key in dict.fromkeys(chain(*turns)) if len({str(turn.get(key)) for turn in turns}) > 1]
    alike = all(key in turn for key in keys for turn in turns if not key.startswith(f"{ARGUMENTS}."))
    if not keys or not alike or len(turns) > MOST_VARIANTS or any(lies_in(key, _LAUNCH) for key in keys):
        raise several
    draft.problems += [each for other in read[1:] for each in other.problems]
    named = [key for key in keys if not key.startswith("env.")] or keys
    for turn in turns:
        said = "_".join(f"{key.rpartition('.')[2]}-{turn[key]}" for key in named if turn.get(key) is not None)
        name = re.sub(r"[^A-Za-z0-9_]+", "-", said).strip("-_")[:50] or "none"
        if name in draft.variants:
            name = f"{name}-{len(draft.variants) + 1}"
        draft.variants[name] = {key: turn.get(key) for key in keys}
    draft.remark(f"It starts the program {len(turns)} times: choose one with --variant, or all with trainkit submit.")


def shell_text(text: str, path: str) -> str:
    """The shell text of a notebook: `!` lines and shell cells, each in a shell of its own.

    Raises UsageError where it is none, or has none.
    """
    try:
        content: Any = json.loads(text)
        cells = ["".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is not a Jupyter notebook", hint="check the file") from error
    lines = [line for cell in cells for line in _shell_lines(cell)]
    if any(line.startswith("(") for line in lines):
        return "\n".join(lines)
    code = "\n".join(cells)
    if _LAUNCHED_INSIDE.search(code):
        what = f"{path}: notebook_launcher starts processes inside the notebook, which no other process can do"
        call, why = _call_in_python(code)
        script = f"a script of the function and its call ({_TO_SCRIPT} {path}), for trainkit import torchrun SCRIPT.py"
        if call:
            raise UsageError(what, hint=f"in its place, in the notebook: {call}; or make {script}")
        raise UsageError(Diagnostic("error", what, why=why, hint=f"make {script}"))
    if _TRAINS.search(code):
        what = f"{path}: the training is in the notebook's own cells, which no launcher can start"
        raise UsageError(what, hint=f"make a script of it: {_TO_SCRIPT} {path}; then trainkit import python SCRIPT.py")
    raise UsageError(f"{path}: no cell starts a training", hint="name the script or the command that does")


def _call_in_python(code: str) -> tuple[str, str]:
    """What starts the processes of a `notebook_launcher(f, args, …)` from Python with trainkit; or why it is not told.

    code: of a notebook's cells. The arguments are those of accelerate 1.15 (accelerate/launchers.py).
    """
    python = "\n".join("pass" if re.match(r"\s*[%!]", line) else line for line in code.splitlines())
    try:
        calls = [each for each in ast.walk(ast.parse(python)) if isinstance(each, ast.Call)]
    except SyntaxError as error:
        return "", f"its cells are no Python that can be read here: {error.msg}"
    found = [each for each in calls if ast.unparse(each.func).rpartition(".")[2] == "notebook_launcher"]
    if len(found) != 1:
        return "", f"it calls notebook_launcher {len(found)} times"
    names = ("function", "args", "num_processes", "mixed_precision")
    given = dict(zip(names, found[0].args, strict=False))
    given |= {each.arg or "**": each.value for each in found[0].keywords}
    words = {name: ast.unparse(value) for name, value in given.items()}
    function, args = words.pop("function", ""), words.pop("args", "")
    ranks, precision = words.pop("num_processes", ""), words.pop("mixed_precision", "'no'").strip("'\"")
    if not function or words or len(found[0].args) > len(names):
        return "", f"of its call `{', '.join(words) or 'the function'}` is not read"
    if not ranks:
        return "", "its call leaves num_processes to the machine"
    parts = [function, '"program.kind=accelerate"']
    parts += [f'"precision.dtype={precision}"'] if precision != "no" else []
    parts += [f"args={args}"] if args not in ("", "()") else []
    return f"trainkit.run_function({', '.join([*parts, f'ranks={ranks}'])}).wait()", ""


def _shell_lines(cell: str) -> Iterator[str]:
    """The shell's part of a cell, and what lasts beyond it: variables, and the folder."""
    first, _, rest = cell.lstrip().partition("\n")
    if first.startswith(_SHELL_CELLS):
        yield f"(\n{rest}\n)"
        return
    lines = iter(cell.splitlines())
    for line in lines:
        bare = line.strip()
        if bare.startswith("!"):
            while bare.endswith("\\"):
                bare += f"\n{next(lines, '').strip()}"
            yield f"({bare[1:]}\n)"
        elif found := re.match(r"%(?:set_)?env\s+(\w+)[=\s]\s*(.*)", bare):
            yield f"export {found[1]}={shlex.quote(found[2])}"
        elif found := re.match(r"%cd\s+(.*)", bare):
            yield f"cd {found[1]}"
        elif found := re.match(r"os\.chdir\((['\"])(.*)\1\)", bare):
            yield f"cd {shlex.quote(found[2])}"
        elif found := re.match(r"os\.environ\[(['\"])(\w+)\1\]\s*=\s*(?:(['\"])(.*)\3|(.*))", bare):
            # What Python makes is known to nobody here, as what a command prints.
            value = shlex.quote(found[4]) if found[3] else f'"$(python -c {shlex.quote(found[5])})"'
            yield f"export {found[2]}={value}"


def _resolved(draft: ImportedRecipe, context: ImportContext, target: str, text: str) -> Resolved:
    """The text as trainkit reads it. Raises RecipeError with what `trainkit check` would say, at its place."""
    script, folder = draft.get("program.script"), absolute(draft.get("program.folder") or "", context.cwd)
    files = Overlay(context.files, {target: text}, [absolute(script, folder)] if script else [])
    environ = dict.fromkeys(names_in(text), "1")  # a number, a text and a name: what is really there shows in time
    try:
        return resolve(Request(recipe=target, cwd=context.cwd, environ=environ), files)
    except RecipeError as error:
        raise RecipeError([_placed(draft, each, target) for each in error.diagnostics]) from error


def _placed(draft: ImportedRecipe, found: Diagnostic, target: str) -> Diagnostic:
    """An error of the recipe's at the place in the source that made it; one of a file that it names stays there."""
    if found.origin and absolute(found.origin.source, "/") != target and found.key == "strategy.config":
        return found
    key = found.key
    while key and key not in draft.settings:
        key = key.rpartition(".")[0]
    return replace(found, origin=draft.settings[key].origin if key else None)


def recipe_text(draft: ImportedRecipe, folder: str, modeline: str = "") -> str:
    """The recipe. folder: where it will lie (absolute), from which it names files."""
    settings = {key: each.value for key, each in draft.settings.items()}
    for key, value in settings.items():
        declared = schema().settings.get(key)
        if declared and declared[0].reads == "content" and isinstance(value, str):
            settings[key] = posixpath.relpath(value, folder)
    tree = nest(settings)
    noted = (f"- {remark}" for remark in dict.fromkeys(draft.remarks))
    remarks = (f"Made by `trainkit import` from: {draft.title}", *noted)
    body = [line for name in Recipe.model_fields if name in tree for line in _section(draft, name, tree[name])]
    if draft.variants:
        body.append("variants:")
        for name, each in draft.variants.items():
            body += fitted(name, nest(each), WIDTH, _in_variant, indent="  ")
    return "".join(f"{line}\n" for line in (*opening(recipe_name(draft.name), modeline, remarks, WIDTH), *body))


def _section(draft: ImportedRecipe, name: str, value: Any) -> Iterator[str]:
    """One section on a line where it fits, with the reasons of its settings; a program and its words below it."""
    reasons = [
        text if name == key or name != "program" else f"{key.partition('.')[2]}: {text}"
        for key, text in draft.reasons.items()
        if lies_in(key, (name,)) and key in draft.settings
    ]
    for reason in dict.fromkeys(reasons):
        yield from comment(reason, WIDTH)
    if name != "program":
        yield from fitted(name, shortened(value, name), WIDTH)
        return
    yield "program:"
    for part, each in sorted(value.items(), key=lambda item: item[0] == "args"):
        if isinstance(each, Mapping):
            yield from block({part: each}, _argument, "program", "  ")
        else:
            yield from fitted(part, each, WIDTH, _argument if part == "args" else flow, key="program", indent="  ")


def _argument(value: Any, _key: str) -> str:
    """One argument: as a plain number where it keeps its characters, else as a text."""
    if isinstance(value, list):
        return f"[{', '.join(_argument(each, ARGUMENTS) for each in value)}]"
    return value if isinstance(value, str) and _NUMBER.fullmatch(value) else flow(value, ARGUMENTS)


def _in_variant(value: Any, key: str) -> str:
    """A value below the name of a variant."""
    if isinstance(value, Mapping):
        inner = (f"{scalar(name)}: {_in_variant(each, f'{key}.{name}')}" for name, each in value.items())
        return f"{{{', '.join(inner)}}}"
    below = key.partition(".")[2]
    return _argument(value, below) if lies_in(below, (ARGUMENTS,)) else flow(value, below)
