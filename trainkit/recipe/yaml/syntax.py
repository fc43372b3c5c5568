"""From bytes to text: what is refused before YAML is looked at, and what YAML's own complaints mean in plain words."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

import yaml

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
