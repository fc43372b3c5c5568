"""The draft as the text of a recipe: short, in the schema's order, with a comment where something is not as it was."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping
from typing import Any

from trainkit.frameworks.base.draft import Draft
from trainkit.recipe.layers.assignment import split_key
from trainkit.recipe.layers.layer import ARGUMENTS
from trainkit.recipe.schema import Recipe
from trainkit.recipe.schema.fields import schema
from trainkit.recipe.yaml.writer import block, comment, fitted, flow, shortened

WIDTH = 120
_NUMBER = re.compile(r"(0|[1-9]\d{0,14})(\.\d+)?")  # reaches the program with these very characters
_UNFIT = re.compile(r"[^A-Za-z0-9._-]+")
Tree = dict[str, Any]


def recipe_text(draft: Draft, folder: str, schema_uri: str = "") -> str:
    """The recipe. folder: where it will lie (absolute), from which it names files. schema_uri: for editors."""
    tree: Tree = {}
    for key, each in draft.settings.items():
        declared, value = schema().settings.get(key), each.value
        if declared and declared[0].file and isinstance(value, str):
            value = posixpath.relpath(value, folder)
        section, path = tree, split_key(key)
        for part in path[:-1]:
            section = section.setdefault(part, {})
        section[path[-1]] = value
    head = [f"# yaml-language-server: $schema={schema_uri}"] if schema_uri else []
    for text in (f"Made by `trainkit import` from: {draft.title}", *(f"- {remark}" for remark in draft.remarks)):
        head += comment(text, WIDTH)
    body = (line for name in Recipe.model_fields if name in tree for line in _section(draft, name, tree[name]))
    return "".join(f"{line}\n" for line in (*head, "version: 1", f"name: {flow(recipe_name(draft), 'name')}", *body))


def recipe_name(draft: Draft) -> str:
    """A name for runs, out of the program's or the file's."""
    return _UNFIT.sub("-", draft.name).strip("-._")[:100] or "run"


def _section(draft: Draft, name: str, value: Any) -> Iterator[str]:
    """One section on a line where it fits, with the reasons of its settings; a program and its words below it."""
    reasons = [
        text if name == key or name != "program" else f"{key.partition('.')[2]}: {text}"
        for key, text in draft.reasons.items()
        if (key == name or key.startswith(f"{name}.")) and key in draft.settings
    ]
    for reason in dict.fromkeys(reasons):
        yield from comment(reason, WIDTH)
    if name == "program":
        yield from _program(value)
        return
    yield from fitted(name, shortened(value, name), WIDTH)


def _program(tree: Mapping[str, Any]) -> Iterator[str]:
    yield "program:"
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from block({name: value}, _argument, "program", "  ")
        else:
            leaf = _argument if name == "args" else flow
            yield from fitted(name, value, WIDTH, leaf, key="program", indent="  ")


def _argument(value: Any, _key: str) -> str:
    """One argument: as a plain number where it keeps its characters, else as a text."""
    if isinstance(value, list):
        return f"[{', '.join(_argument(each, ARGUMENTS) for each in value)}]"
    return value if isinstance(value, str) and _NUMBER.fullmatch(value) else flow(value, ARGUMENTS)
