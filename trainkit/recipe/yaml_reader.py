"""Parse YAML: from bytes to a tree in which every value has its position, with errors in plain words."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml

from trainkit.text import strip_control

# Far above any recipe: a data file that is named by mistake is refused before it is parsed.
MAX_BYTES = 4 * 1024 * 1024


class Mark(NamedTuple):
    """A stretch of text: 1-based line and column, and how many characters of the line it covers."""

    line: int
    column: int
    length: int = 1


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong (or, as a warning, surprising) in one text, before it is known which layer the text is."""

    mark: Mark
    what: str
    why: str = ""
    hint: str = ""
    key: str = ""


class Unreadable(Exception):  # noqa: N818 - carries a Problem between the reading stages and never leaves recipe/
    """The text cannot be read any further."""

    def __init__(self, mark: Mark, what: str, hint: str) -> None:
        super().__init__(what)
        self.problem = Problem(mark, what, hint=hint)


def decode(data: bytes) -> str:
    """The text of a file. Raises Unreadable for too many bytes, NUL bytes, and bytes that are not UTF-8."""
    if len(data) > MAX_BYTES:
        what = f"the file has {len(data):,} bytes; at most {MAX_BYTES:,} are read"
        raise Unreadable(Mark(1, 1), what, "keep data in files of its own and name them: a recipe holds settings")
    if b"\0" in data:
        mark = _mark_of_byte(data, data.index(b"\0"))
        what = "the file holds a NUL byte, so it is not a text file in UTF-8"
        raise Unreadable(mark, what, "save it as UTF-8 text (UTF-16 is not read)")
    try:
        # Editors on Windows put a byte order mark in front.
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        offset = error.start + (3 if data.startswith(b"\xef\xbb\xbf") else 0)
        what = f"byte 0x{data[offset]:02x} is not valid UTF-8"
        raise Unreadable(_mark_of_byte(data, offset), what, "save the file as UTF-8") from error


def _mark_of_byte(data: bytes, offset: int) -> Mark:
    start = data.rfind(b"\n", 0, offset) + 1
    return Mark(data.count(b"\n", 0, offset) + 1, len(data[start:offset].decode("utf-8", "replace")) + 1)


# What the C and the pure parser say, what it means, and what to do. The first match counts.
_COMPLAINTS: tuple[tuple[str, str, str], ...] = (
    (
        r"could not find expected ':'|expected key|expected <block end>, but found '<(?:scalar|block mapping start)",
        "this line is no `key: value`",
        "check the indentation and the colon; put a text with special characters in quotes",
    ),
    (
        r"mapping values are not allowed",
        "a `:` is where no mapping can begin",
        "check the indentation here and one line above; put a text that contains `: ` in quotes",
    ),
    (r"unexpected end of stream", "a quoted text is never closed", "add the closing quote"),
    (r"',' or '\]'", "a `[` list is not closed, or a comma is missing in it", "add `]` or `,`"),
    (r"',' or '\}'", "a `{` mapping is not closed, or a comma is missing in it", "add `}` or `,`"),
    (
        r"'-' indicator|expected <block end>, but found '\?'",
        "a list ends here without going back in indentation",
        "indent this line like the list's dashes, or less",
    ),
    (r"document start", "text follows after the end of the recipe", "remove the surplus bracket or text"),
    (r"cannot start any token", "this character cannot start a value", "put the text in quotes"),
    (
        r"unknown escape character",
        "an unknown escape in a text in double quotes",
        "write `\\\\` for a backslash, or use single quotes",
    ),
    (
        r"expected (?:the )?node content",
        "a value is missing here, or a bracket is surplus",
        "add the value, or remove the bracket",
    ),
    (r"[Yy][Aa][Mm][Ll] document|directive", "a `%` directive that is not read", "remove the line"),
)


def complaint(error: yaml.YAMLError, text: str) -> Problem:
    """What a YAML parser's error means, at its position."""
    if isinstance(error, yaml.reader.ReaderError):
        return _control_character(text)
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = str(getattr(error, "problem", None) or error)
    where = Mark(mark.line + 1, mark.column + 1) if mark else Mark(1, 1)
    lines = text.splitlines()
    line = lines[where.line - 1] if where.line <= len(lines) else ""
    if "cannot start any token" in problem and line[where.column - 1 : where.column] == "\t":
        return Problem(where, "a tab is used for indentation", hint="replace each tab by two spaces")
    context = getattr(error, "context_mark", None)
    if where.line > len(lines) and context is not None:
        # The end of the file is a poor place to point at; the bracket or quote that is still open is the right one.
        where = Mark(context.line + 1, context.column + 1)
    for pattern, what, hint in _COMPLAINTS:
        if re.search(pattern, problem):
            return Problem(where, what, why=f"the YAML parser says: {problem}", hint=hint)
    hint = "check brackets, quotes and indentation around here"
    return Problem(where, f"this is not valid YAML: {problem}", hint=hint)


def _control_character(text: str) -> Problem:
    found = yaml.reader.Reader.NON_PRINTABLE.search(text)  # by which it was refused; a copy takes 3 ms to compile
    if found is None:
        return Problem(Mark(1, 1), "the file holds characters that YAML does not allow", hint="save it as UTF-8 text")
    line = text.count("\n", 0, found.start()) + 1
    column = found.start() - (text.rfind("\n", 0, found.start()) + 1) + 1
    what = f"character U+{ord(found.group()):04X} is not allowed in YAML"
    hint = "remove it; in a text in double quotes it can be written as an escape"
    return Problem(Mark(line, column), what, hint=hint)


Scalar = str | int | float | bool | None

_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_WORDS = {
    **dict.fromkeys(("true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON"), True),
    **dict.fromkeys(("false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF"), False),
}
_TRUE_FALSE = frozenset({"true", "True", "TRUE", "false", "False", "FALSE"})
# Longer digit strings are no setting of anything, and turning them into numbers costs quadratic time.
_MAX_DIGITS = 400


def _sexagesimal(text: str) -> int | float:
    sign = -1 if text.startswith("-") else 1
    total: float = 0
    for part in text.lstrip("+-").replace("_", "").split(":"):
        total = total * 60 + (float(part) if "." in part else int(part))
    return sign * total


def _integer(base: int) -> Callable[[str], int]:
    return lambda text: int(text.replace("_", ""), base)


# YAML 1.1 requires a dot and a signed exponent; `3e-4` is a number to everybody else.
_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?")
_SPECIAL_FLOATS = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
# The first match counts: what begins with a zero is octal to YAML 1.1 (010 is 8), a lone 0 is not.
_NUMBERS: tuple[tuple[re.Pattern[str], Callable[[str], int | float]], ...] = (
    (re.compile(r"[-+]?(?:0|[1-9][0-9_]*)"), _integer(10)),
    (re.compile(r"[-+]?0[0-7_]+"), _integer(8)),
    (_FLOAT, lambda text: float(text.replace("_", ""))),
    (re.compile(r"[-+]?0x[0-9a-fA-F_]*[0-9a-fA-F][0-9a-fA-F_]*"), _integer(16)),
    (re.compile(r"[-+]?0b[01_]*[01][01_]*"), _integer(2)),
    (re.compile(r"[-+]?[1-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?"), _sexagesimal),
    (_SPECIAL_FLOATS, lambda text: float(text.replace(".", ""))),
)  # fmt: skip
# Most scalars are words: the patterns are tried only on what may be a number.
_NUMBER_START = frozenset("-+.0123456789")


def read_scalar(text: str) -> Scalar:
    """The value of a plain (unquoted) scalar. Dates stay text. ValueError for a number of absurd length."""
    if text in _NULL:
        return None
    if text in _WORDS:
        return _WORDS[text]
    if text[0] in _NUMBER_START:
        for pattern, convert in _NUMBERS:
            if pattern.fullmatch(text):
                if len(text) > _MAX_DIGITS:
                    raise ValueError(f"a number of {len(text)} characters")
                return convert(text)
    return text


def trap(text: str, value: Scalar) -> tuple[str, str] | None:
    """What a reader of this plain scalar may not expect, and what to write instead; None where there is no surprise."""
    if isinstance(value, bool):
        if text in _TRUE_FALSE:
            return None
        word = "true" if value else "false"
        return f"`{text}` is read as {word}", f'write {word}, or "{text}" in quotes if the word is meant'
    if isinstance(value, (int, float)) and ":" in text:
        return f"`{text}` is read as the number {value} (base 60)", f'write "{text}" in quotes, or the number itself'
    if isinstance(value, int) and re.match(r"[-+]*0[0-7_]", text):
        hint = f'write {text.lstrip("+-0") or "0"}, or "{text}" in quotes if the digits are meant'
        return f"`{text}` is read as the number {value} (base 8)", hint
    return None


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


LONGEST = 500  # characters of a line that is shown
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
        shown = tuple(strip_control(text[:LONGEST]) for text in start[:line])
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
