"""Variants: named changes to a recipe, each read as a layer of its own with the positions of the file that holds it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainkit.recipe.layers.layer import VARIANTS, Layer, Page, file_layer
from trainkit.recipe.yaml.reader import Document
from trainkit.recipe.yaml.syntax import Mark, Problem

# What the rows of a comparison call the recipe without any variant.
BASE = "base"
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,59}$"
_HINT = "write `NAME: {section: {setting: value}}` lines below `variants:`"


@dataclass(frozen=True)
class Variant:
    """What one file says of a variant. base: the folder that relative file names in it start from."""

    name: str
    description: str
    base: str
    source: str
    lines: tuple[str, ...]
    document: Document

    def layer(self, strength: int) -> Layer:
        """The variant as a layer of a recipe."""
        return file_layer(Page(f"variant {self.name}", strength, self.source, self.lines), self.base, self.document)


def read_variants(document: Document, page: Page, base: str) -> tuple[list[Variant], list[Problem]]:
    """The variants that a file gives, in its order, and what is wrong with how they are written."""
    given = document.tree.get(VARIANTS)
    if given is None:
        return [], []
    if not isinstance(given, Mapping):
        return [], [Problem(document.values[VARIANTS], "`variants` must be a mapping", hint=_HINT, key=VARIANTS)]
    found: list[Variant] = []
    problems: list[Problem] = []
    for name, body in given.items():
        wrong = list(_wrong(name, body, document))
        problems += wrong
        if not wrong:
            inner = _inner(document, name, body or {})
            description = (body or {}).get("description", "")
            found.append(Variant(name, description, base, page.source, page.lines, inner))
    return found, problems


def _wrong(name: str, body: object, document: Document) -> Iterator[Problem]:
    key = f"{VARIANTS}.{name}"
    if not re.match(NAME_PATTERN, name):
        hint = "use letters, digits, dashes and underscores, a letter or digit first"
        yield Problem(_mark(document.keys, key), f"{name[:60]!r} cannot name a variant", hint=hint, key=key)
    elif name == BASE:
        hint = "choose another name"
        yield Problem(_mark(document.keys, key), f"`{BASE}` is the recipe without a variant", hint=hint, key=key)
    elif body is not None and not isinstance(body, Mapping):
        yield Problem(_mark(document.values, key), f"the variant {name} must be a mapping", hint=_HINT, key=key)
    elif isinstance(body, Mapping):
        for word in ("extends", VARIANTS):
            if word in body:
                hint = "write the settings themselves"
                where = _mark(document.keys, f"{key}.{word}")
                yield Problem(where, f"a variant has no `{word}`", hint=hint, key=f"{key}.{word}")
        if not isinstance(body.get("description", ""), str):
            where = _mark(document.values, f"{key}.description")
            what = f"the description of {name} must be a text"
            yield Problem(where, what, hint="put it in quotes", key=f"{key}.description")


def _mark(marks: Mapping[str, Mark], key: str) -> Mark:
    """The mark at the key; what came in by `<<` has none of its own, and gets that of the variants."""
    return marks.get(key) or marks.get(key.rpartition(".")[0]) or marks.get(VARIANTS, Mark(1, 1))


def _inner(document: Document, name: str, body: Mapping[str, Any]) -> Document:
    """The variant as a document of its own: the same lines, keys as if its body were the whole recipe."""
    prefix = f"{VARIANTS}.{name}."
    values = {key.removeprefix(prefix): mark for key, mark in document.values.items() if key.startswith(prefix)}
    keys = {key.removeprefix(prefix): mark for key, mark in document.keys.items() if key.startswith(prefix)}
    tree = {key: value for key, value in body.items() if key != "description"}
    return Document(tree, values, keys, document.lines, (), ())
