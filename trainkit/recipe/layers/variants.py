"""Variants: named changes to a recipe, each read as a layer of its own with the positions of the file that holds it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

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
    page: Page
    document: Document

    def layer(self, strength: int) -> Layer:
        """The variant as a layer of a recipe."""
        return file_layer(replace(self.page, name=f"variant {self.name}", strength=strength), self.base, self.document)


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
        if wrong := list(_wrong(name, body, document)):
            problems += wrong
            continue
        # A document of its own: the same lines, keys as if its body were the whole recipe.
        tree = {key: value for key, value in (body or {}).items() if key != "description"}
        inner = Document(
            tree, _below(document.values, name), _below(document.keys, name), document.lines, errors=(), warnings=()
        )
        found.append(Variant(name, (body or {}).get("description", ""), base, page, inner))
    return found, problems


def _wrong(name: str, body: object, document: Document) -> Iterator[Problem]:
    key = f"{VARIANTS}.{name}"

    def problem(marks: Mapping[str, Mark], what: str, hint: str, key: str = key) -> Problem:
        # What came in by `<<` has no mark of its own, and gets that of the variants.
        mark = marks.get(key) or marks.get(key.rpartition(".")[0]) or marks.get(VARIANTS, Mark(1, 1))
        return Problem(mark, what, hint=hint, key=key)

    if not re.match(NAME_PATTERN, name):
        hint = "use letters, digits, dashes and underscores, a letter or digit first"
        yield problem(document.keys, f"{name[:60]!r} cannot name a variant", hint)
    elif name == BASE:
        yield problem(document.keys, f"`{BASE}` is the recipe without a variant", "choose another name")
    elif body is not None and not isinstance(body, Mapping):
        yield problem(document.values, f"the variant {name} must be a mapping", _HINT)
    elif isinstance(body, Mapping):
        for word in ("extends", VARIANTS):
            if word in body:
                what = f"a variant has no `{word}`"
                yield problem(document.keys, what, "write the settings themselves", f"{key}.{word}")
        if not isinstance(body.get("description", ""), str):
            what = f"the description of {name} must be a text"
            yield problem(document.values, what, "put it in quotes", f"{key}.description")


def _below(marks: Mapping[str, Mark], name: str) -> dict[str, Mark]:
    prefix = f"{VARIANTS}.{name}."
    return {key.removeprefix(prefix): mark for key, mark in marks.items() if key.startswith(prefix)}
