"""The draft as the text of a recipe: short, in the schema's order, with a comment where something is not as it was."""

from __future__ import annotations

import posixpath
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from trainkit.frameworks.base.draft import Draft
from trainkit.recipe.layers.assignment import split_key
from trainkit.recipe.layers.layer import ARGUMENTS
from trainkit.recipe.schema import Recipe
from trainkit.recipe.schema.fields import schema, short_forms
from trainkit.recipe.yaml.writer import flow, scalar

WIDTH = 120
_NUMBER = re.compile(r"(0|[1-9]\d{0,14})(\.\d+)?")  # reaches the program with these very characters
_UNFIT = re.compile(r"[^A-Za-z0-9._-]+")
Tree = dict[str, Any]


def recipe_text(draft: Draft, folder: str, schema_uri: str = "") -> str:
    """The recipe. folder: where it will lie (absolute), from which it names files. schema_uri: for editors."""
    tree: Tree = {}
    for key, each in draft.settings.items():
        value = posixpath.relpath(each.value, folder) if _names_file(key, each.value) else each.value
        _place(tree, split_key(key), value)
    head = [*([f"# yaml-language-server: $schema={schema_uri}"] if schema_uri else []), *_head(draft)]
    body = (line for name in Recipe.model_fields if name in tree for line in _section(draft, name, tree[name]))
    return "".join(f"{line}\n" for line in (*head, "version: 1", f"name: {flow(recipe_name(draft), 'name')}", *body))


def recipe_name(draft: Draft) -> str:
    """A name for runs, out of the program's or the file's."""
    return _UNFIT.sub("-", draft.name).strip("-._")[:100] or "run"


def _names_file(key: str, value: Any) -> bool:
    declared = schema().settings.get(key)
    return bool(declared and declared[0].file and isinstance(value, str))


def _place(tree: Tree, path: list[str], value: Any) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = value


def _head(draft: Draft) -> Iterator[str]:
    yield from _comment(f"Made by `trainkit import` from: {draft.title}", "")
    for remark in draft.remarks:
        yield from _comment(f"- {remark}", "")


def _section(draft: Draft, name: str, value: Any) -> Iterator[str]:
    """One section on a line where it fits, with the reasons of its settings; a program and its words below it."""
    reasons = [
        text if name == key or name != "program" else f"{key.partition('.')[2]}: {text}"
        for key, text in draft.reasons.items()
        if (key == name or key.startswith(f"{name}.")) and key in draft.settings
    ]
    for reason in dict.fromkeys(reasons):
        yield from _comment(reason, "")
    if name == "program":
        yield from _program(value)
        return
    line = f"{name}: {flow(_short(value, name), name)}"
    if len(line) <= WIDTH or not isinstance(value, Mapping):
        yield line
        return
    yield f"{name}:"
    for inner, below in value.items():
        yield f"  {scalar(inner)}: {flow(_short(below, f'{name}.{inner}'), f'{name}.{inner}')}"


def _program(tree: Mapping[str, Any]) -> Iterator[str]:
    yield "program:"
    for name, value in tree.items():
        if name != "args":
            yield f"  {name}: {flow(value, f'program.{name}')}"
        elif isinstance(value, Mapping):
            yield "  args:"
            yield from (f"    {scalar(inner)}: {_word(below)}" for inner, below in value.items())
        else:
            yield from _list("  args: ", [_word(each) for each in value])


def _list(lead: str, words: list[str]) -> Iterator[str]:
    line = f"{lead}[{', '.join(words)}]"
    if len(line) <= WIDTH:
        yield line
        return
    yield lead.rstrip()
    yield from (f"    - {word}" for word in words)


def _word(value: Any) -> str:
    """One argument: as a plain number where it keeps its characters, else as a text."""
    if isinstance(value, list):
        return f"[{', '.join(_word(each) for each in value)}]"
    return value if isinstance(value, str) and _NUMBER.fullmatch(value) else flow(value, ARGUMENTS)


def _short(value: Any, key: str) -> Any:
    """Sections whose one setting is the one that they stand for are written as this value."""
    if not isinstance(value, Mapping) or key in schema().settings:
        return value
    if set(value) == {short_forms().get(key)}:
        return next(iter(value.values()))
    return {name: _short(below, f"{key}.{name}") for name, below in value.items()}


def _comment(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}#   ",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
