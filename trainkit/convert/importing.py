"""Jupyter notebooks: the shell lines in them, and what to do where the training is in a cell."""

from __future__ import annotations

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
from trainkit.convert.sbatch import ARRAY_TURN, Batch, put_cluster, read_batch, take_srun
from trainkit.convert.shell import Around, ShellCommand, name_what_is_open, read_shell
from trainkit.errors import Diagnostic, RecipeError, UsageError
from trainkit.launch_plan.rules import unreached
from trainkit.machine.facts import Facts, Gpu
from trainkit.planner.build import build_plan
from trainkit.recipe.flags import resolve
from trainkit.recipe.interpolation import names_in
from trainkit.recipe.layer import ARGUMENTS
from trainkit.recipe.paths import Overlay, absolute, seen_from
from trainkit.recipe.resolved import Request, Resolved
from trainkit.recipe.schema import Recipe
from trainkit.recipe.schema.fields import lies_in, nest, path_keys, schema
from trainkit.recipe.yaml_writer import block, comment, fitted, flow, opening, recipe_name, scalar, shortened
from trainkit.text import GIB
from trainkit.tools.accelerate import importer as accelerate
from trainkit.tools.base.draft import (
    SCRIPTS,
    SUFFIXES,
    Draft,
    ForeignFile,
    ImportContext,
    argv_origin,
    open_foreign_file,
    script_text,
    shell_script,
)
from trainkit.tools.deepspeed import importer as deepspeed
from trainkit.tools.registry import PROGRAMS

SUFFIX = ".ipynb"
_SHELL_CELLS = ("%%bash", "%%sh", "%%shell", "%%script bash")
_LAUNCHED_INSIDE = re.compile(r"\bnotebook_launcher\s*\(")
_TRAINS = re.compile(r"\b(?:Seq2Seq|SFT|DPO)?Trainer\s*\(|\bAccelerator\s*\(|\bdeepspeed\.initialize\s*\(")
_TO_SCRIPT = "jupyter nbconvert --to script"


def shell_text(text: str, path: str) -> str:
    """The shell text of a notebook: `!` lines and shell cells, each in a shell of its own.

    Raises UsageError where it is none, or has none.
    """
    cells = list(_code(text, path))
    lines = [line for cell in cells for line in _shell(cell)]
    if any(line.startswith("(") for line in lines):
        return "\n".join(lines)
    code = "\n".join(cells)
    if _LAUNCHED_INSIDE.search(code):
        what = f"{path}: notebook_launcher starts processes inside the notebook, which no other process can do"
        hint = (
            f"write the function and its call into a script ({_TO_SCRIPT} {path}), and give its processes to trainkit"
        )
        raise UsageError(what, hint=f"{hint}: trainkit import torchrun --nproc_per_node N SCRIPT.py")
    if _TRAINS.search(code):
        what = f"{path}: the training is in the notebook's own cells, which no launcher can start"
        raise UsageError(what, hint=f"make a script of it: {_TO_SCRIPT} {path}; then trainkit import python SCRIPT.py")
    raise UsageError(f"{path}: no cell starts a training", hint="name the script or the command that does")


def _code(text: str, path: str) -> Iterator[str]:
    try:
        content: Any = json.loads(text)
        for cell in content["cells"]:
            if cell["cell_type"] == "code":
                yield "".join(cell["source"])
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is no Jupyter notebook", hint="check the file") from error


def _shell(cell: str) -> Iterator[str]:
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


# Cards of the machines that are tried where the recipe takes as many as there are, the likely ones first.
CARDS = (8, 1, 2, 4, 3, 6, 16)
MOST = 4096  # cards of a machine, as many as a recipe can count


def refusals(resolved: Resolved) -> tuple[Diagnostic, ...]:
    """What the plan says on the likeliest machine, where it is refused on all; nothing where one could run it."""
    found: tuple[Diagnostic, ...] | None = None
    for facts in _machines(resolved):
        try:
            build_plan(resolved, facts)
        except RecipeError as error:
            found = found or error.diagnostics
        else:
            return ()
    return found or ()


def _machines(resolved: Resolved) -> Iterator[Facts]:
    devices, nodes = resolved.recipe.devices, resolved.recipe.nodes
    select = devices.select
    if devices.type in ("cpu", "mps", "xla") or select == "none":
        yield _machine(())
    elif isinstance(select, list):
        numbers = [int(each) for each in select if str(each).isdecimal()]
        names = {f"card-{number}": number for number in range(min(max(numbers, default=-1) + 1, MOST))}
        yield _machine([*names, *(str(each) for each in select if not str(each).isdecimal())])
    elif isinstance(select, int) or nodes.processes_per_node != "auto":
        count = select if isinstance(select, int) else nodes.processes_per_node
        yield _machine([f"card-{number}" for number in range(int(count))])
    else:
        yield from (_machine([f"card-{number}" for number in range(count)]) for count in CARDS)


def _machine(names: list[str] | tuple[()]) -> Facts:
    """One with cards of these UUIDs, which can do all that cards can."""
    cards = tuple(
        Gpu(index, name, "H100", 80 * GIB, 80 * GIB, compute_capability=(9, 0)) for index, name in enumerate(names)
    )
    return Facts(
        platform="linux",
        machine="x86_64",
        hostname="trial",
        python="3.11",
        executable="python",
        cpu_cores=64,
        memory_total=1024 * GIB,
        gpus=cards,
        mps=True,
        origin="trial",
    )


WIDTH = 120
_NUMBER = re.compile(r"(0|[1-9]\d{0,14})(\.\d+)?")  # reaches the program with these very characters
MOST_VARIANTS = 100
# What of a launch is the same in all variants of a recipe that is made of several.
_LAUNCH = ("devices", "nodes", "launcher", "cluster", "container", "strategy.kind", "program.kind", "program.script",
           "program.module", "program.folder")  # fmt: skip
NO_LENGTH = "the file does not say how long to train: set it"


class Format(Protocol):
    """What a module for files of one kind offers; both functions are pure."""

    def recognises(self, tree: Mapping[str, Any]) -> bool:
        """Whether a file that holds this mapping is of the kind."""

    def read(self, draft: Draft, context: ImportContext, source: ForeignFile) -> None:
        """Settings, remarks and problems out of the file."""


FORMATS: dict[str, Format] = {"accelerate": accelerate, "deepspeed": deepspeed}


@dataclass(frozen=True, slots=True)
class Lines:
    """What the caller says of shell text. asked: values of its variables; number: the line with the command."""

    asked: Mapping[str, str] = field(default_factory=dict)
    number: int | None = None


@dataclass(frozen=True, slots=True)
class Imported:
    """A recipe's text, and what it was made of. folder: in which the command runs, absolute."""

    text: str
    draft: Draft
    folder: str


def is_file(word: str) -> bool:
    """Whether a word names a file to import, and is no command."""
    return word.endswith((*SUFFIXES, *SCRIPTS)) and not is_line(word)


def is_line(word: str) -> bool:
    """Whether one word holds a whole command, or several, as a shell would read them."""
    return any(starts_program(each.split()) for each in re.split(r"[\n;&|]+", word) if len(each.split()) > 1)


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


def import_words(
    words: Sequence[str],
    context: ImportContext,
    target: str,
    *,
    program: Sequence[str] = (),
    kind: str | None = None,
    modeline: str = "",
    lines: Lines | None = None,
) -> Imported:
    """The recipe that a file or a command means.

    target: absolute path at which the recipe will lie. program: script and words for a file that names none.
    kind: of the program. Raises UsageError and RecipeError.
    """
    draft, folder = Draft(), context.cwd
    path = words[0] if len(words) == 1 and is_file(words[0]) else ""
    if path and not path.endswith(SCRIPTS):
        _read_file(draft, context, path, program, kind)
    else:
        folder = _read_words(draft, context, words, program, kind=kind, lines=lines or Lines())
    if draft.problems:
        raise RecipeError(draft.problems)
    text = recipe_text(draft, posixpath.dirname(target), modeline)
    resolved = _resolved(draft, context, target, text)
    while _leave_out(draft, resolved):  # what is lost beside another key shows when that is gone
        text = recipe_text(draft, posixpath.dirname(target), modeline)
        resolved = _resolved(draft, context, target, text)
    return Imported(text, draft, folder)


def _leave_out(draft: Draft, resolved: Resolved) -> bool:
    """Take out what a launcher's file or flags set and what does not reach the program."""
    kind = resolved.recipe.program.kind
    found = [each for each in unreached(resolved, PROGRAMS[kind].SUPPORT, kind) if each.key in draft.settings]
    for each in found:
        setting = draft.settings.pop(each.key)
        for settings in draft.variants.values():
            settings.pop(each.key, None)
        why = f": {each.why}." if each.why else "."
        more = "" if draft.get("program.kind") else " Name the script behind `--` to keep it."
        reason = f" ({draft.reasons.pop(each.key)})" if each.key in draft.reasons else ""
        draft.remark(
            f"{setting.origin.place}: {each.key} {setting.value}{reason} is left out, for it cannot reach a program of "
            f"kind {kind}{why}{more}"
        )
    return bool(found)


def _read_words(
    draft: Draft,
    context: ImportContext,
    words: Sequence[str],
    more: Sequence[str],
    *,
    kind: str | None,
    lines: Lines,
) -> str:
    """Import a command; a script, and a line that is one word, are read as a shell would. The folder it runs in.

    more: words behind `--`, which are the script's arguments, or belong to the command.
    """
    end = ["--", *more] if more else []
    batch: Batch | None = None
    scripts = shell_script(words) if len(words) > 1 or not starts_program(words[0].split()) else []
    if scripts:
        draft.title, end = scripts[0], []
        batch, shell = _read_script(context, scripts[0], [*scripts[1:], *more], lines)
    elif len(words) == 1 and any(character.isspace() for character in words[0]):
        shell = read_shell(
            words[0],
            starts_program,
            asked=lines.asked,
            at_line=lines.number,
            around=Around(context.cwd, context.environ, context.files.exists),
        )
        end = list(more)
    else:
        read_command(draft, context, [*words, *end], kind)
        return context.cwd
    draft.remarks = shell.remarks
    inside = replace(context, cwd=absolute(shell.folder, context.cwd))

    def read(draft: Draft, batch: Batch | None, words: Sequence[str]) -> Draft:
        command = take_srun(batch, words) if batch else words
        read_command(draft, inside, [*command, *end], kind, [*words, *end])
        if shell.folder:
            _start_in(draft, shell.folder, context.cwd)
        return draft

    turns = [read(Draft(), deepcopy(batch), each) for each in (shell.words, *shell.more)] if shell.several else []
    read(draft, batch, shell.words)
    if batch:
        put_cluster(batch, draft, shell.setup)
    for each in (draft, *turns):
        name_what_is_open(each, shell.opened)
    if shell.several:
        _put_variants(draft, turns, shell.several)
    return inside.cwd


def _start_in(draft: Draft, folder: str, cwd: str) -> None:
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


def _put_variants(draft: Draft, read: Sequence[Draft], several: UsageError) -> None:
    """Make variants of commands that differ in what the program is told alone. Raises `several` for others."""
    turns = [dict(_told(each)) for each in read]
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


def _told(draft: Draft) -> Iterator[tuple[str, Any]]:
    """The settings by key, and arguments by name."""
    for key, each in draft.settings.items():
        if key == ARGUMENTS and isinstance(each.value, Mapping):
            yield from ((f"{key}.{name}", value) for name, value in each.value.items())
        else:
            yield key, each.value


def _read_script(
    context: ImportContext, path: str, given: Sequence[str], lines: Lines
) -> tuple[Batch | None, ShellCommand]:
    """What a shell script asks a cluster for, if it does, and its command. given: its arguments."""
    text = script_text(context, path)
    if path.endswith(SUFFIX):
        text = shell_text(text, path)
    batch = read_batch(text, path)
    asked = {**(batch.variables if batch else {}), **lines.asked}
    around = Around(context.cwd, context.environ, context.files.exists)
    turns = batch.turns if batch and ARRAY_TURN in text and ARRAY_TURN not in lines.asked else [None]
    first, *more = [
        read_shell(
            text, starts_program, path=path, given=given, asked=asked if turn is None else {**asked, ARRAY_TURN: turn},
            at_line=lines.number, is_job=batch is not None, around=around,
        )
        for turn in turns
    ]  # fmt: skip
    if others := [each.words for each in more if each.words != first.words]:
        several = UsageError(
            f"{path}: the tasks of its array start different programs", hint=f"choose: --set {ARRAY_TURN}={turns[0]}"
        )
        first = replace(first, more=tuple(others), several=several)
    return batch, first


def _read_file(draft: Draft, context: ImportContext, path: str, program: Sequence[str], kind: str | None) -> None:
    source = open_foreign_file(context, path, program)
    draft.title = path
    draft.name = posixpath.splitext(posixpath.basename(path))[0]
    found = next((each for each in FORMATS.values() if each.recognises(source.tree)), None)
    if found is None:
        shown = ", ".join(sorted(map(str, source.tree))[:5])
        what = f"{path} is of no known kind ({', '.join(sorted(FORMATS))}); it has {shown}"
        raise UsageError(what, hint="check the file")
    if found is accelerate and program:  # as the command that names the file
        read_command(draft, context, ["accelerate", "launch", "--config_file", path, *program], kind)
        draft.title = path
        return
    found.read(draft, context, source)
    if program:
        read_target(draft, context, program, kind or draft.get("program.kind"))
    elif draft.get("train.steps") is None:
        draft.set("train.epochs", 1, source.at(""), NO_LENGTH)


def _resolved(draft: Draft, context: ImportContext, target: str, text: str) -> Resolved:
    """The text as trainkit reads it. Raises RecipeError with what `trainkit check` would say, at its place."""
    script, folder = draft.get("program.script"), absolute(draft.get("program.folder") or "", context.cwd)
    files = Overlay(context.files, {target: text}, [absolute(script, folder)] if script else [])
    environ = dict.fromkeys(names_in(text), "1")  # a number, a text and a name: what is really there shows in time
    try:
        return resolve(Request(recipe=target, cwd=context.cwd, environ=environ), files)
    except RecipeError as error:
        raise RecipeError([_placed(draft, each, target) for each in error.diagnostics]) from error


def _placed(draft: Draft, found: Diagnostic, target: str) -> Diagnostic:
    """An error of the recipe's at the place in the source that made it; one of a file that it names stays there."""
    if found.origin and absolute(found.origin.source, "/") != target and found.key == "strategy.config":
        return found
    key = found.key
    while key and key not in draft.settings:
        key = key.rpartition(".")[0]
    return replace(found, origin=draft.settings[key].origin if key else None)


def recipe_text(draft: Draft, folder: str, modeline: str = "") -> str:
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


def _section(draft: Draft, name: str, value: Any) -> Iterator[str]:
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
