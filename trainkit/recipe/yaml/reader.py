"""From YAML (or JSON) text to plain values with positions, in one pass over the parse events."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from trainkit.recipe.yaml.scalars import read_scalar, trap
from trainkit.recipe.yaml.syntax import Mark, Problem, Unreadable, complaint, decode


@dataclass(frozen=True)
class Dialect:
    """What a text may contain beyond plain YAML, by dotted path.

    modifiers: whether `name+` and `name!` address `name`.
    open: paths of mappings whose keys are the user's own words, taken literally.
    verbatim: paths below which plain scalars of the given types keep the characters as written (`1.10`).
    root: the path of the whole text.
    nested: path of a mapping each of whose entries is such a text again, with paths of its own.
    """

    root: str = ""
    modifiers: bool = False
    open: frozenset[str] = frozenset()
    verbatim: Mapping[str, tuple[type, ...]] = field(default_factory=dict)
    nested: str = ""

    def inner(self, path: str) -> str:
        """The path as the innermost text that it lies in counts it."""
        if self.nested and path.startswith(f"{self.nested}."):
            return path.removeprefix(f"{self.nested}.").partition(".")[2]
        return path


PLAIN = Dialect()


@dataclass(frozen=True)
class Document:
    """A text as read. `values` and `keys` hold positions by dotted path; list elements are under their index."""

    tree: Any
    values: Mapping[str, Mark]
    keys: Mapping[str, Mark]
    lines: tuple[str, ...]
    errors: tuple[Problem, ...]
    warnings: tuple[Problem, ...]


def printable(line: str) -> str:
    """The line, cut to a length that can be shown, with control characters made visible."""
    return "".join(char if char.isprintable() or char == "\t" else "\ufffd" for char in line[:500])


# Bounds far above any recipe: a small file must not take minutes, or all memory, to be refused.
MAX_DEPTH = 32  # of twice as many, a key's and its value's, Python's stack and OmegaConf can still make a config
MAX_VALUES = 100_000
MAX_ALIASED = 20_000  # values that come into being by `*alias` alone
_FAST_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
NO_TEXT, WRITE_TEXT = "the text is not UTF-8", "write it in UTF-8"
_LINE_END = re.compile("\r\n|[\r\n\x85\u2028\u2029]")
# None and "!" are what the parser gives where the text names no tag.
_COLLECTION_TAGS = frozenset({None, "!", "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"})
_PLAIN_TAGS = frozenset({*_COLLECTION_TAGS, "tag:yaml.org,2002:str"})


def compose_bytes(data: bytes, dialect: Dialect = PLAIN) -> Document:
    """Read a file's bytes; a file that cannot be read gives a Document with the error and an empty tree."""
    try:
        text = decode(data)
    except Unreadable as failure:
        line = failure.problem.mark.line
        # Of what is no text nothing is shown: a recipe may name /proc/self/environ.
        start = [] if b"\0" in data else data[: 2**20].decode("utf-8", "replace").splitlines()
        shown = tuple(printable(text) for text in start[:line])
        return Document({}, {}, {}, shown, (failure.problem,), ())
    return compose(text, dialect)


def is_text(text: str) -> bool:
    """Whether it is UTF-8: words of a command line and variables may be any bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def compose(text: str, dialect: Dialect = PLAIN, *, loader: Any = None) -> Document:
    """Read a text with the given PyYAML loader class (by default the C one where there is one)."""
    if not is_text(text):
        return Document({}, {}, {}, (), (Problem(Mark(1, 1), NO_TEXT, hint=WRITE_TEXT),), ())
    composer = _Composer(text, dialect, loader or _FAST_LOADER)
    tree = composer.document()
    errors, warnings = tuple(composer.errors), tuple(composer.warnings)
    # Lines end where YAML says so; `str.splitlines` knows more line ends and would shift the numbers.
    lines = tuple(_LINE_END.split(text))
    return Document({} if tree is None else tree, composer.values, composer.keys, lines, errors, warnings)


class _Composer:
    """The state of one pass over a text."""

    def __init__(self, text: str, dialect: Dialect, loader: Any) -> None:
        self.text, self.dialect = text, dialect
        # Events, not nodes: they come as they are parsed, so that the bounds stop a file before it is in memory.
        self.events: Iterator[Any] = yaml.parse(text, Loader=loader)
        self.values: dict[str, Mark] = {}
        self.keys: dict[str, Mark] = {}
        self.errors: list[Problem] = []
        self.warnings: list[Problem] = []
        self.anchors: dict[str, tuple[Any, int]] = {}
        self.open_anchors: set[str] = set()
        self.count = self.aliased = 0

    def document(self) -> Any:
        """The one document's value; an empty mapping where the text cannot be read or is empty."""
        try:
            next(self.events)
            if isinstance(next(self.events), yaml.StreamEndEvent):
                return {}
            tree = self._value(next(self.events), self.dialect.root, 0)
            next(self.events)
            following = next(self.events)
            if not isinstance(following, yaml.StreamEndEvent):
                hint = "keep one recipe per file, without `---` between"
                self._error(following, "a second document begins here", hint)
            return tree
        except Unreadable as failure:
            self.errors.append(failure.problem)
        except yaml.YAMLError as error:
            self.errors.append(complaint(error, self.text))
        return {}

    def _value(self, event: Any, path: str, depth: int, listed: bool = False) -> Any:
        self.count += 1
        if self.count > MAX_VALUES:
            raise Unreadable(_mark(event), f"more than {MAX_VALUES:,} values", "a recipe holds settings, not data")
        self.values.setdefault(path, _mark(event))
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event)
        before = self.count
        anchor = event.anchor
        if anchor:
            self.open_anchors.add(anchor)
        if isinstance(event, yaml.ScalarEvent):
            value = self._scalar(event, path, listed)
        elif depth >= MAX_DEPTH:
            what = f"brackets or mappings nested more than {MAX_DEPTH} deep"
            raise Unreadable(_mark(event), what, "a recipe is a few levels deep")
        else:
            self._refuse_tag(event, _COLLECTION_TAGS)
            read = self._mapping if isinstance(event, yaml.MappingStartEvent) else self._sequence
            value = read(path, depth)
        if anchor:
            self.open_anchors.discard(anchor)
            self.anchors[anchor] = (value, self.count - before + 1)
        return value

    def _alias(self, event: Any) -> Any:
        name, mark = event.anchor, _mark(event)
        if name in self.open_anchors:
            raise Unreadable(mark, f"`*{name}` refers to a value that contains it", "write the value out")
        if name not in self.anchors:
            hint = f"define it with `&{name}`, or put the text in quotes"
            raise Unreadable(mark, f"`*{name}` is defined nowhere above", hint)
        value, size = self.anchors[name]
        self.aliased += size
        self.count += size
        if self.aliased > MAX_ALIASED:
            raise Unreadable(mark, f"aliases expand to more than {MAX_ALIASED:,} values", "write the values out")
        # A value of its own at each place: interpolation and paths change the tree where it is.
        return copy.deepcopy(value)

    def _refuse_tag(self, event: Any, allowed: frozenset[str | None]) -> None:
        if event.tag not in allowed:
            shown = str(event.tag).replace("tag:yaml.org,2002:", "!!")
            why = "a recipe holds plain values and runs no code"
            self._error(event, f"the tag `{shown}` is not read", "remove the tag", why)

    def _scalar(self, event: Any, path: str, listed: bool) -> Any:
        self._refuse_tag(event, _PLAIN_TAGS)
        if not event.implicit[0] or event.style:
            return event.value
        text: str = event.value
        try:
            value = read_scalar(text)
        except ValueError as error:
            self._error(event, f"{error} is too long", "put it in quotes if it is a text", key=path)
            return None
        inner = self.dialect.inner(path)
        kept = next((types for prefix, types in self.dialect.verbatim.items() if inner.startswith(f"{prefix}.")), ())
        if value is not None and (type(value) in kept or (listed and kept)):
            return text
        surprise = trap(text, value)
        if surprise:
            self.warnings.append(Problem(_mark(event), surprise[0], "YAML 1.1 reads it so", surprise[1], key=path))
        return value

    def _sequence(self, path: str, depth: int) -> list[Any]:
        items: list[Any] = []
        for event in self.events:
            if isinstance(event, yaml.SequenceEndEvent):
                break
            items.append(self._value(event, _join(path, str(len(items))), depth + 1, True))
        return items

    def _mapping(self, path: str, depth: int) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        merged: list[dict[str, Any]] = []
        seen: dict[str, Mark] = {}
        for event in self.events:
            if isinstance(event, yaml.MappingEndEvent):
                break
            key = self._key(event, path)
            modified = self.dialect.modifiers and key and key[-1] in "+!" and not self._is_literal(path)
            addressed = "?" if key is None else key[:-1] if modified else key
            below = _join(path, addressed)
            if addressed in seen and key is not None:
                why = f"it is in line {seen[addressed].line} too"
                self._error(event, f"`{addressed}` is given twice", "keep one of the two", why, below)
            elif key is not None:
                seen[addressed] = self.keys[below] = _mark(event)
            value = self._value(next(self.events), below, depth + 1)
            if key == "<<":
                sources = value if isinstance(value, list) else [value]
                if all(isinstance(source, dict) for source in sources):
                    merged += sources
                else:
                    self._error(event, "`<<` requires a mapping, or a list of mappings", "write `<<: *anchor`")
            elif key is not None:
                mapping[key] = value
        for source in merged:  # keys of the mapping itself win, then those of the first `<<`
            for key, value in source.items():
                mapping.setdefault(key, value)
        return mapping

    def _key(self, event: Any, path: str) -> str | None:
        """The key's text; None for a key that is none, whose value is read and thrown away."""
        hint = "write a plain word; put it in quotes if it is meant as a text"
        if not isinstance(event, yaml.ScalarEvent):
            depth, end = int(isinstance(event, yaml.CollectionStartEvent)), event
            while depth:  # read past it
                end = next(self.events)
                depth += isinstance(end, yaml.CollectionStartEvent) - isinstance(end, yaml.CollectionEndEvent)
            self._error(event, "a key must be a text, not a list, a mapping or an alias", hint)
            return None
        self._refuse_tag(event, _PLAIN_TAGS)
        text: str = event.value
        if self._is_literal(path):
            return text
        name = text.rstrip("+!")
        if self.dialect.modifiers and len(text) - len(name) > 1:
            hint = f"write `{name}`, `{name}+` to append to a list, or `{name}!` to replace a whole mapping"
            self._error(event, f"`{text[:40]}` ends in an unknown modifier", hint, key=_join(path, name))
            return None
        if event.implicit[0] and not event.style and text not in ("<<", "="):
            try:
                value = read_scalar(text)
            except ValueError:
                value = None
            if not isinstance(value, str):
                kind = "nothing" if value is None else "true or false" if isinstance(value, bool) else "a number"
                what = f"the key `{text[:40]}` is read as {kind}, and a key must be a text"
                self._error(event, what, f'write "{text[:40]}" in quotes')
                return None
        return text

    def _is_literal(self, path: str) -> bool:
        """Whether the keys of the mapping at the path are the user's own words."""
        return self.dialect.inner(path) in self.dialect.open

    def _error(self, event: Any, what: str, hint: str, why: str = "", key: str = "") -> None:
        self.errors.append(Problem(_mark(event), what, why, hint, key))


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _mark(event: Any) -> Mark:
    start, end = event.start_mark, event.end_mark
    length = end.column - start.column if end.line == start.line else 1
    return Mark(start.line + 1, start.column + 1, max(length, 1))
