"""A text as it was read: plain values, a position for each, and what was wrong; and how texts may differ."""

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
    root: the path at which the whole text stands.
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
    """A text as read. `values` and `keys` hold positions by dotted path; list elements stand under their index."""

    tree: Any
    values: Mapping[str, Mark]
    keys: Mapping[str, Mark]
    lines: tuple[str, ...]
    errors: tuple[Problem, ...]
    warnings: tuple[Problem, ...]


def printable(line: str) -> str:
    """The line, cut to a length that can be shown, with control characters made visible."""
    return "".join(char if char.isprintable() or char == "\t" else "\ufffd" for char in line[:500])


MAX_DEPTH = 100
MAX_VALUES = 100_000
MAX_ALIASED = 20_000  # values that come into being by `*alias` alone
_FAST_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_LINE_END = re.compile("\r\n|[\r\n\x85\u2028\u2029]")
_PLAIN_TAGS = frozenset({None, "!", "tag:yaml.org,2002:str"})


def compose_bytes(data: bytes, dialect: Dialect = PLAIN) -> Document:
    """Read a file's bytes; a file that cannot be read gives a Document with the error and an empty tree."""
    try:
        text = decode(data)
    except Unreadable as failure:
        line = failure.problem.mark.line
        start = data[: 2**20].decode("utf-8", "replace").splitlines()
        shown = tuple(printable(text) for text in start[:line])
        return Document({}, {}, {}, shown, (failure.problem,), ())
    return compose(text, dialect)


def compose(text: str, dialect: Dialect = PLAIN, *, loader: Any = None) -> Document:
    """Read a text with the given PyYAML loader class (by default the C one where there is one)."""
    composer = _Composer(text, dialect, loader or _FAST_LOADER)
    tree = composer.document()
    # Lines end where YAML says so; `str.splitlines` knows more line ends and would shift the numbers.
    lines = tuple(_LINE_END.split(text))
    return Document(
        {} if tree is None else tree,
        composer.values,
        composer.keys,
        lines,
        tuple(composer.errors),
        tuple(composer.warnings),
    )


class _Composer:
    """The state of one pass over a text."""

    def __init__(self, text: str, dialect: Dialect, loader: Any) -> None:
        self.text, self.dialect = text, dialect
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
            return self._document()
        except Unreadable as failure:
            self.errors.append(failure.problem)
        except yaml.YAMLError as error:
            self.errors.append(complaint(error, self.text))
        return {}

    def _document(self) -> Any:
        next(self.events)
        if isinstance(next(self.events), yaml.StreamEndEvent):
            return {}
        tree = self._value(next(self.events), self.dialect.root, 0)
        next(self.events)
        following = next(self.events)
        if not isinstance(following, yaml.StreamEndEvent):
            self.errors.append(
                Problem(
                    _mark(following),
                    "a second document begins here",
                    hint="keep one recipe per file, without `---` between",
                )
            )
        return tree

    def _value(self, event: Any, path: str, depth: int, listed: bool = False) -> Any:
        self.count += 1
        if self.count > MAX_VALUES:
            raise Unreadable(
                Problem(_mark(event), f"more than {MAX_VALUES:,} values", hint="a recipe holds settings, not data")
            )
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
            raise Unreadable(
                Problem(
                    _mark(event),
                    f"brackets or mappings nested more than {MAX_DEPTH} deep",
                    hint="a recipe is a few levels deep",
                )
            )
        else:
            self._refuse_tag(event)
            value = (
                self._mapping(path, depth) if isinstance(event, yaml.MappingStartEvent) else self._sequence(path, depth)
            )
        if anchor:
            self.open_anchors.discard(anchor)
            self.anchors[anchor] = (value, self.count - before + 1)
        return value

    def _alias(self, event: Any) -> Any:
        if event.anchor in self.open_anchors:
            raise Unreadable(
                Problem(
                    _mark(event), f"`*{event.anchor}` refers to a value that contains it", hint="write the value out"
                )
            )
        if event.anchor not in self.anchors:
            raise Unreadable(
                Problem(
                    _mark(event),
                    f"`*{event.anchor}` is defined nowhere above",
                    hint=f"define it with `&{event.anchor}`, or put the text in quotes",
                )
            )
        value, size = self.anchors[event.anchor]
        self.aliased += size
        self.count += size
        if self.aliased > MAX_ALIASED:
            raise Unreadable(
                Problem(
                    _mark(event), f"aliases expand to more than {MAX_ALIASED:,} values", hint="write the values out"
                )
            )
        return copy.deepcopy(value)

    def _refuse_tag(self, event: Any, allowed: frozenset[str | None] = frozenset({None, "!"})) -> None:
        if event.tag in allowed or event.tag in ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"):
            return
        shown = str(event.tag).replace("tag:yaml.org,2002:", "!!")
        self.errors.append(
            Problem(
                _mark(event),
                f"the tag `{shown}` is not read",
                why="a recipe holds plain values and runs no code",
                hint="remove the tag",
            )
        )

    def _scalar(self, event: Any, path: str, listed: bool) -> Any:
        self._refuse_tag(event, _PLAIN_TAGS)
        if not event.implicit[0] or event.style:
            return event.value
        text: str = event.value
        try:
            value = read_scalar(text)
        except ValueError as error:
            self.errors.append(
                Problem(_mark(event), f"{error} is too long", hint="put it in quotes if it is a text", key=path)
            )
            return None
        if self._keeps_characters(path, value, listed):
            return text
        surprise = trap(text, value)
        if surprise:
            self.warnings.append(Problem(_mark(event), surprise[0], "YAML 1.1 reads it so", surprise[1], key=path))
        return value

    def _keeps_characters(self, path: str, value: object, listed: bool) -> bool:
        inner = self.dialect.inner(path)
        for prefix, types in self.dialect.verbatim.items():
            if inner.startswith(prefix + "."):
                return value is not None and (listed or type(value) in types)
        return False

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
            addressed = self._address(key, path)
            below = _join(path, addressed)
            if addressed in seen and key is not None:
                self.errors.append(
                    Problem(
                        _mark(event),
                        f"`{addressed}` is given twice",
                        f"it stands in line {seen[addressed].line} too",
                        "keep one of the two",
                        below,
                    )
                )
            elif key is not None:
                seen[addressed] = self.keys[below] = _mark(event)
            value = self._value(next(self.events), below, depth + 1)
            if key == "<<":
                merged += self._merge_key(event, value)
            elif key is not None:
                mapping[key] = value
        for source in merged:
            for key, value in source.items():
                mapping.setdefault(key, value)
        return mapping

    def _key(self, event: Any, path: str) -> str | None:
        """The key's text; None for a key that is none, whose value is read and thrown away."""
        hint = "write a plain word; put it in quotes if it is meant as a text"
        if not isinstance(event, yaml.ScalarEvent):
            self._skip(event)
            self.errors.append(
                Problem(_mark(event), "a key must be a text, not a list, a mapping or an alias", hint=hint)
            )
            return None
        self._refuse_tag(event, _PLAIN_TAGS)
        text: str = event.value
        plain = event.implicit[0] and not event.style
        if plain and text not in ("<<", "=") and self.dialect.inner(path) not in self.dialect.open:
            try:
                value = read_scalar(text)
            except ValueError:
                value = None
            if not isinstance(value, str):
                kind = "nothing" if value is None else "true or false" if isinstance(value, bool) else "a number"
                self.errors.append(
                    Problem(
                        _mark(event),
                        f"the key `{text[:40]}` is read as {kind}, and a key must be a text",
                        hint=f'write "{text[:40]}" in quotes',
                    )
                )
                return None
        return text

    def _skip(self, event: Any) -> None:
        """Read past the value that the event begins."""
        depth = int(isinstance(event, yaml.CollectionStartEvent))
        while depth:
            event = next(self.events)
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)

    def _address(self, key: str | None, path: str) -> str:
        if key is None:
            return "?"
        if self.dialect.modifiers and key[-1:] in ("+", "!") and self.dialect.inner(path) not in self.dialect.open:
            return key[:-1]
        return key

    def _merge_key(self, event: Any, value: Any) -> list[dict[str, Any]]:
        sources = value if isinstance(value, list) else [value]
        if not all(isinstance(source, dict) for source in sources):
            self.errors.append(
                Problem(_mark(event), "`<<` wants a mapping, or a list of mappings", hint="write `<<: *anchor`")
            )
            return []
        return sources


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _mark(event: Any) -> Mark:
    start, end = event.start_mark, event.end_mark
    length = end.column - start.column if end.line == start.line else 1
    return Mark(start.line + 1, start.column + 1, max(length, 1))
