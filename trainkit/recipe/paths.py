"""The files that a recipe names: how they are read, which the plan depends on, and which are absent."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from trainkit.errors import Diagnostic, Origin
from trainkit.recipe.layer import ARGUMENTS, source_text
from trainkit.recipe.merge import Merge
from trainkit.recipe.resolved import Attachment, Entry
from trainkit.recipe.schema import Recipe, Section, TextData
from trainkit.recipe.schema.fields import schema
from trainkit.recipe.schema.launching import program_argv
from trainkit.recipe.yaml_reader import Mark, Problem, compose_bytes

CONFIG = "program.args.config"  # the attachment that the program's own words name
CONFIG_SUFFIXES = (".json", ".yaml", ".yml")


class FileChecks(Protocol):
    """What resolving needs of a file system. Paths are absolute, or relative to the process's working folder."""

    def read(self, path: str) -> bytes:
        """The file's bytes. Raises OSError (FileNotFoundError, IsADirectoryError, PermissionError)."""

    def exists(self, path: str) -> bool:
        """Whether there is a file at the path."""

    def holds(self, folder: str, pattern: str) -> bool:
        """Whether a file in the folder, if it is one, has a path that a glob pattern matches."""

    def shipped(self) -> Mapping[str, str]:
        """Path of each shipped preset and recipe by name (``strategy/fsdp``, ``recipes/quickstart``)."""


@dataclass(frozen=True)
class Overlay:
    """Files with more above them, that are not written yet (content by path), or are taken to be there."""

    below: FileChecks
    written: Mapping[str, str]
    there: Sequence[str] = ()

    def read(self, path: str) -> bytes:
        """The file's bytes. Raises OSError."""
        return self.written[path].encode() if path in self.written else self.below.read(path)

    def exists(self, path: str) -> bool:
        """Whether there is a file, or will be."""
        return path in self.written or path in self.there or self.below.exists(path)

    def holds(self, folder: str, pattern: str) -> bool:
        return self.below.holds(folder, pattern)

    def shipped(self) -> Mapping[str, str]:
        return self.below.shipped()


def absolute(path: str, base: str) -> str:
    """The path from a folder, without `.` and `..`; an absolute one as it is."""
    return posixpath.normpath(posixpath.join(base, path))


def seen_from(cwd: str, path: str) -> str:
    """How an absolute path is shown: from the working folder where it lies below it, else as it is."""
    start = cwd.rstrip("/") + "/"
    return path[len(start) :] if path.startswith(start) else path


def named_config(args: Mapping[str, Any] | Sequence[Any]) -> str | None:
    """The YAML or JSON file behind `--config` in a program's words."""
    words = [*program_argv(args), ""]
    named = [value for word, value in pairwise(words) if word == "--config"]
    named += [word.removeprefix("--config=") for word in words if word.startswith("--config=")]
    return next((each for each in named if each.endswith(CONFIG_SUFFIXES)), None)


def _attach_config(state: Merge, cwd: str, files: FileChecks) -> dict[str, Attachment]:
    """The file of settings that the words of a script on Trainer name, behind `--config` or as the first of them.

    Nothing where it cannot be read: what is not there is reported as absent, and its form is the script's affair.
    """
    args, folder = state.get(ARGUMENTS), state.get("program.folder")
    if state.get("program.kind") != "hf" or not isinstance(args, Mapping | list):
        return {}
    first = next((word for word in program_argv(args)[:1] if word.endswith(CONFIG_SUFFIXES)), None)
    named = named_config(args) or first
    if named is None:
        return {}
    path, origin = (
        absolute(posixpath.join(folder if isinstance(folder, str) else "", named), cwd),
        state.places.get(CONFIG) or state.places.get(ARGUMENTS),
    )
    read = _read(CONFIG, path, seen_from(cwd, path), Entry(named, origin or Origin(ARGUMENTS, 0, named)), files)
    return {CONFIG: read} if isinstance(read, Attachment) else {}


def attach(
    state: Merge, bases: Mapping[int, str], cwd: str, files: FileChecks
) -> tuple[dict[str, Attachment], list[Diagnostic]]:
    """Read every file that the merged tree names in a setting that is declared with ``reads="content"``.

    bases: folder that relative paths of a layer start from, by the layer's strength. The tree gets absolute paths.
    """
    attachments: dict[str, Attachment] = {}
    found: list[Diagnostic] = []
    for key, declared in schema().settings.items():
        if declared[0].reads != "content":
            continue
        value = state.get(key)
        if not isinstance(value, str) or not value:
            continue
        entry = state.history[key][-1]
        path = absolute(value, bases[entry.origin.strength])
        read = _read(key, path, seen_from(cwd, path), entry, files)
        if isinstance(read, Attachment):
            attachments[key] = read
        else:
            found += read
        # Absolute, so that the plan means the same file whatever folder it is started from.
        section, _, name = key.rpartition(".")
        state.get(section)[name] = path
        state.history[key][-1] = Entry(path, entry.origin, entry.note)
    return attachments | _attach_config(state, cwd, files), found


def _read(key: str, path: str, shown: str, entry: Entry, files: FileChecks) -> Attachment | list[Diagnostic]:
    origin = entry.origin
    try:
        document = compose_bytes(files.read(path))
    except OSError as error:
        reason = "there is no file" if isinstance(error, FileNotFoundError) else f"{error.strerror or 'cannot read'}:"
        why = f"it would be {path}" if path != str(entry.value) else ""
        hint = "check the path; it starts from the file that names it"
        return [Diagnostic("error", f"{key}: {reason} {shown}", key, origin, why, hint)]
    text = source_text(f"{key} {shown}", origin.strength, shown, document)
    problems = list(document.errors)
    if not problems and not isinstance(document.tree, Mapping):
        problems.append(Problem(Mark(1, 1), f"{key} requires a file with a mapping", hint="write a JSON object"))
    if problems:
        return [text.diagnose("error", each) for each in problems]
    return Attachment(path, document.tree, {name: text.at(mark) for name, mark in document.values.items() if name})


def script_source(recipe: Recipe, files: FileChecks, absolute: Callable[[str], str]) -> str:
    """The text of the program's script; empty where there is none that can be read."""
    script = recipe.program.script
    if script is None or not script.endswith(".py"):
        return ""
    try:
        return files.read(absolute(recipe.program.seen(script))).decode("utf-8", "replace")
    except OSError:  # what is not there is reported as absent
        return ""


def named_paths(section: Section, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """(key, path, what lies there) of every path that a section and those in it name, read off the declarations.

    Paths of a list of sections, as `data.mix`, go by the key of the list.
    """
    for name, info in type(section).model_fields.items():
        key, value = f"{prefix}{info.alias or name}", getattr(section, name)
        declared = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
        reads, words = str(declared.get("reads", "")), declared.get("words")
        if isinstance(value, Section):
            yield from named_paths(value, f"{key}.")
        elif isinstance(value, list) and value and isinstance(value[0], Section):
            inner = (each for member in value if member.is_read for each in named_paths(member))
            yield from ((key, path, lies) for _, path, lies in inner)
        elif reads:
            paths = value if isinstance(value, list) else [value]
            known = words if isinstance(words, list) else []
            yield from ((key, path, reads) for path in paths if path and path not in known)


def inputs(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """(key, path) of everything that the run reads; paths start from the working folder.

    Of a program of the user's own nothing is known but how it is started. Attached files have been read already.
    """
    for key, path, lies in named_paths(recipe):
        section = key.partition(".")[0]
        if lies in ("content", "output") or (section == "program") == (recipe.program.kind == "builtin"):
            continue
        if recipe.program.kind == "builtin" or section in ("program", "checkpoint"):
            yield key, recipe.program.seen(path) if key == "program.script" else path
    if recipe.program.kind == "hf" and (config := named_config(recipe.program.args)):
        yield CONFIG, recipe.program.seen(config)


def absent_inputs(recipe: Recipe, files: FileChecks, absolute: Callable[[str], str]) -> dict[str, tuple[str, ...]]:
    """The paths without a file that the run will read, by setting. absolute: from the working folder.

    Of `data.include` the folders that hold no file of the pattern.
    """
    absent: dict[str, list[str]] = {}
    for key, path in inputs(recipe):
        if not files.exists(absolute(path)):
            absent.setdefault(key, []).append(path)
    if recipe.program.kind == "builtin" and isinstance(data := recipe.data, TextData):
        for key, folder, _ in named_paths(data, "data."):
            if key == "data.path" and not files.holds(absolute(folder), data.include):
                absent.setdefault("data.include", []).append(folder)
    return {key: tuple(paths) for key, paths in absent.items()}
