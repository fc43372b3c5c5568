"""One layer: a tree of values, each with its origin, in the form in which layers are merged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trainkit.errors import Diagnostic, Origin, Severity
from trainkit.recipe.schema.fields import open_keys, schema, short_forms
from trainkit.recipe.secrets import MASK, mask_line, mask_private_keys, secret_keys
from trainkit.recipe.yaml_reader import LONGEST, Dialect, Document, Mark, Problem, compose_bytes
from trainkit.text import strip_control

ARGUMENTS = "program.args"
VARIANTS = "variants"
# Keys of a file that say what it consists of, and are no settings themselves.
_NO_SETTINGS = ("extends", VARIANTS)
# Below these, a plain scalar keeps its characters: `1.10` reaches the program or the environment as `1.10`.
VERBATIM: Mapping[str, tuple[type, ...]] = {"env": (bool, int, float), ARGUMENTS: (int, float)}


def origin_at(origins: Mapping[str, Origin], key: str) -> Origin | None:
    """The origin at the key, or at the nearest key around it."""
    while key:
        if key in origins:
            return origins[key]
        key = key.rpartition(".")[0]
    return None


@dataclass(frozen=True)
class Layer:
    """One source of values. Positions are by dotted key, without the modifiers `+` and `!`.

    base: folder that relative file names in this layer start from.
    """

    name: str
    strength: int
    base: str
    tree: Mapping[str, Any]
    values: Mapping[str, Origin] = field(default_factory=dict)
    keys: Mapping[str, Origin] = field(default_factory=dict)

    def origin(self, key: str) -> Origin | None:
        """Origin of the value at the key, or of the nearest mapping around it."""
        return origin_at(self.values, key)


def read_document(data: bytes) -> Document:
    """Read a recipe file's bytes; a top level that is no mapping is an error in the document."""
    dialect = Dialect(modifiers=True, open=open_keys() | {VARIANTS}, verbatim=VERBATIM, nested=VARIANTS)
    document = compose_bytes(data, dialect)
    if isinstance(document.tree, dict):
        return document
    kind = "a list" if isinstance(document.tree, list) else "a single value"
    problem = Problem(document.values.get("", Mark(1, 1)), f"the recipe is {kind}", hint="write `section: value` lines")
    return replace(document, tree={}, values={}, keys={}, errors=(*document.errors, problem))


@dataclass(frozen=True)
class SourceText:
    """A text that is shown in messages: what layer it is, where it came from, and its lines without secrets."""

    name: str
    strength: int
    source: str
    lines: tuple[str, ...]

    def at(self, mark: Mark) -> Origin:
        """The origin at a mark."""
        text = self.lines[mark.line - 1] if mark.line <= len(self.lines) else ""
        length = max(min(mark.length, len(text) - mark.column + 1), 1)
        return Origin(self.name, self.strength, self.source, mark.line, mark.column, length, text)

    def diagnose(self, severity: Severity, problem: Problem) -> Diagnostic:
        """The diagnostic that a problem in the text becomes."""
        return Diagnostic(severity, problem.what, problem.key, self.at(problem.mark), problem.why, problem.hint)


def source_text(name: str, strength: int, source: str, document: Document) -> SourceText:
    """The page of a document: its lines without secret values, nothing unprintable and no endless line."""
    lines = [mask_line(line[:2000]) for line in mask_private_keys("\n".join(document.lines)).split("\n")]
    for key, _ in secret_keys(document.tree):
        mark = document.values.get(key)
        if mark is None or mark.line > len(lines):
            continue
        line = document.lines[mark.line - 1]
        value = line[mark.column - 1 : mark.column - 1 + mark.length]
        if len(value) > 1:
            lines[mark.line - 1] = lines[mark.line - 1].replace(value, MASK)
        elif lines[mark.line - 1] == line:
            lines[mark.line - 1] = line[: mark.column - 1] + MASK
        if mark.length <= 1:  # over several lines: it goes on to where the next value begins
            following = min((each.line for each in document.values.values() if each.line > mark.line), default=None)
            end = following - 1 if following else len(lines)
            lines[mark.line : end] = [MASK] * (end - mark.line)
    return SourceText(name, strength, source, tuple([strip_control(line[:LONGEST]) for line in lines]))


def file_layer(page: SourceText, base: str, document: Document) -> Layer:
    """The layer that a file makes."""
    values = {key: page.at(mark) for key, mark in document.values.items() if key}
    # The caret under a secret is as long as its mask, so that it does not show the secret's length.
    values |= {key: replace(values[key], length=len(MASK)) for key, _ in secret_keys(document.tree) if key in values}
    keys = {key: page.at(mark) for key, mark in document.keys.items()}
    tree = {key: value for key, value in document.tree.items() if key not in _NO_SETTINGS}
    return Layer(page.name, page.strength, base, normalise(tree, values), values, keys)


def normalise(tree: Mapping[str, Any], values: dict[str, Origin]) -> dict[str, Any]:
    """Write short forms out (`precision: bf16`, with an origin in `values`), leave out empty sections (`batch:`)."""
    written = _write_out(tree, "", values)
    for key, setting in short_forms().items():
        if key in values and f"{key}.{setting}" not in values:
            values[f"{key}.{setting}"] = values[key]
    return written


def _write_out(tree: Mapping[str, Any], prefix: str, values: Mapping[str, Origin]) -> dict[str, Any]:
    written: dict[str, Any] = {}
    for raw, value in tree.items():
        key = f"{prefix}{raw.rstrip('+!') if prefix[:-1] not in open_keys() else raw}"
        if key not in schema().sections:
            written[raw] = value
        elif isinstance(value, Mapping):
            written[raw] = _write_out(value, f"{key}.", values)
        elif value is not None:
            short = short_forms().get(key)
            written[raw] = {short: value} if short and not isinstance(value, list) else value
        elif raw.endswith("!"):
            written[raw] = {}
    return written
