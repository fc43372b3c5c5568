"""A file to import: its values, and the place of each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainkit.errors import Origin, RecipeError, UsageError
from trainkit.frameworks.base.draft import ImportContext
from trainkit.recipe.layers.environment_references import REFERENCE
from trainkit.recipe.layers.layer import Page, page
from trainkit.recipe.layers.paths import absolute
from trainkit.recipe.yaml.reader import compose_bytes
from trainkit.recipe.yaml.syntax import MAX_BYTES, Mark

SUFFIXES = (".json", ".yaml", ".yml")
SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch", ".ipynb")  # files with shell text that holds a command
_SHELLS = ("bash", "sh")
_PLAIN = re.compile(r"[\w./=:,@+-]+(?: +[\w./=:,@+-]+)*")  # words that a shell takes as they stand


def shell_script(words: Sequence[str]) -> list[str]:
    """The shell script that the words are, or that a shell starts, and its arguments; empty where there is none.

    words: may be one that holds them all, as a quoted line does.
    """
    parts = words[0].split() if len(words) == 1 and _PLAIN.fullmatch(words[0]) else list(words)
    named = parts[1:] if parts[0] in _SHELLS else parts if parts[0].endswith(SCRIPTS) else list(words)
    return named if named and named[0].endswith(SCRIPTS) else []


@dataclass(frozen=True)
class ForeignFile:
    """A mapping read from a file. path: as the user named it; program: a script and its words, where one is named."""

    path: str
    tree: Mapping[str, Any]
    values: Mapping[str, Mark]
    page: Page
    program: tuple[str, ...] = ()

    def at(self, key: str) -> Origin:
        """The place of the value at a dotted key, or of the nearest mapping around it."""
        while key and key not in self.values:
            key = key.rpartition(".")[0]
        return self.page.at(self.values.get(key, Mark(1, 1)))


def open_foreign_file(context: ImportContext, path: str, program: Sequence[str] = ()) -> ForeignFile:
    """Read a file to import. Raises UsageError where there is none, and RecipeError for what cannot be read."""
    file = read_mapping(context, path, f"file {path}", 1)
    if not file.tree:
        raise UsageError(f"{path} holds no mapping", hint="name a DeepSpeed JSON file or an accelerate config")
    return replace(file, program=tuple(program))


def read_mapping(context: ImportContext, path: str, layer: str, strength: int) -> ForeignFile:
    """A JSON or YAML file as a part of a layer. Raises UsageError and RecipeError."""
    document = compose_bytes(_read(context, path))
    text = page(layer, strength, path, document)
    if document.errors:
        raise RecipeError([text.diagnose("error", each) for each in document.errors])
    if not isinstance(document.tree, Mapping):
        raise UsageError(f"{path} holds no mapping", hint="write a JSON object or YAML mapping")
    return ForeignFile(path, document.tree, document.values, text)


def script_text(context: ImportContext, path: str) -> str:
    """A shell script, in which bytes that are not UTF-8 stay known. Raises UsageError where there is none."""
    content = _read(context, path)
    if len(content) > MAX_BYTES:  # it has been read no further
        raise UsageError(f"{path} has more than {MAX_BYTES:,} bytes", hint="name a script that starts the program")
    return content.decode("utf-8", "surrogateescape")


def _read(context: ImportContext, path: str) -> bytes:
    if reference := REFERENCE.fullmatch(path):
        if reference[2] is None:
            raise UsageError(f"the file is {path}, and nothing sets {reference[1]}", hint="give --set NAME=VALUE")
        path = reference[2]
    try:
        return context.files.read(absolute(path, context.cwd))
    except OSError as error:
        reason = "there is no file" if isinstance(error, FileNotFoundError) else "cannot read"
        raise UsageError(f"{reason} {path}", hint="check the path; it starts from the current folder") from error
