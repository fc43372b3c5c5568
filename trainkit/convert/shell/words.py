"""Words of shell text as the shell would make them: quotes, variables, arithmetic, and commands that only make text.

Words are read from the text itself, for the grammar that gives the statements takes some of them apart in the wrong
place (`${A}b$C/d`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from trainkit.convert.shell.output import output
from trainkit.convert.shell.scope import Scope
from trainkit.convert.shell.syntax import arithmetic, escaped, parse, text
from trainkit.convert.shell.values import MOST, Open, Part, Reference, Value, joined, refuse_endless, sole, text_of

if TYPE_CHECKING:
    from tree_sitter import Node

_EXPANSION = re.compile(
    r"(?P<length>#?)(?P<name>\w+|[@*#?!-])(?:\[(?P<index>[^\]]*)\])?(?P<rest>.*)", re.DOTALL | re.ASCII
)
_SIMPLE = re.compile(r"\$([A-Za-z_]\w*|[0-9@*#?!$-])", re.ASCII)
_OTHERWISE = re.compile(r":?[-=?+]")
_GLOB = re.compile(r"[*?]|\[.*\]")
_ANY_TEXT = re.compile(r"[*?]")
_CONTINUED = re.compile(r"\\\n")
_HOME = re.compile(r"~(?=/|$|\s)")
_WRITE_IT = "write what it comes to"
_SEVERAL = "it stands for several words, or names of files: write them, or quote it"
MOST_BRACES = 64  # in a word
_BRACES = re.compile(r"\{([^{}]*,[^{}]*|-?\d+\.\.-?\d+)\}")
_OF_THE_RUNNING_SHELL = ("RANDOM", "SECONDS", "PPID", "$", "!", "?", "-")
_CLOSING = {"(": ")", "{": "}"}


def fields(scope: Scope, written: str, line: int) -> list[Value]:
    """The words of a piece of a command: a variable without quotes may make several, or none.

    line: of the piece, from 1.
    """
    reader = _Words(scope, written, line)
    while reader.place < len(written):
        reader.step()
    reader.end_word()
    return reader.words


def value(scope: Scope, written: str, line: int) -> Value:
    """The one value that a word is, as on the right of an assignment: nothing is split, and no names of files."""
    reader = _Words(scope, written, line, splits=False)
    while reader.place < len(written):
        reader.step()
    return joined(tuple(reader.parts))


def first_word(written: str) -> str:
    """A text up to the first blank or separator that is not quoted."""
    reader = _Words(Scope(), written, 0, splits=False)
    while reader.place < len(written) and written[reader.place] not in " \t\n;&|)":
        reader.step()
    return written[: reader.place]


@dataclass
class _Words:
    """Reads words one step at a time. parts: of the word that is being read; is_word: even where they are empty.

    bare: what is in the word without quotes, where `*` stands for names of files. splits: whether blanks end words.
    """

    scope: Scope
    text: str
    line: int
    splits: bool = True
    place: int = 0
    words: list[Value] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    is_word: bool = False
    bare: str = ""

    def step(self) -> None:
        """Read one letter, or one quoted or expanded piece."""
        letter, start = self.text[self.place], self.place
        if letter in " \t\n" and self.splits:
            self.place += 1
            self.end_word()
        elif letter == "'":
            self._take(self._until("'"), quoted=True)
        elif letter == '"':
            self._double()
        elif self.text.startswith("$'", start):
            self.place += 1
            self._take(escaped(self._until("'", escapes=True)), quoted=True)
        elif self.text.startswith('$"', start):
            self.place += 1
        elif letter in "$`":
            self._expand(quoted=not self.splits)
        elif letter == "\\":
            self._take(self.text[start + 1 : start + 2].strip("\n"), quoted=self.text[start + 1 : start + 2] != "\n")
            self.place += 2
        elif letter == "~" and not self.parts and _HOME.match(self.text, start):
            self.parts.append(Reference("HOME"))
            self.place += 1
        else:
            self.bare += letter
            self._take(letter)
            self.place += 1

    def end_word(self) -> None:
        """The word is over."""
        made = joined(tuple(self.parts))
        several = _BRACES.search(self.bare) if self.splits else None
        if several and made == (self.bare,):
            self.words += [(each,) for each in braces(self.bare)]
        elif self.splits and not several and _GLOB.search(self.bare) and not _ANY_TEXT.search(self.bare):
            shown = "".join(map(str, made))
            self.scope.note(f"{shown} is taken as it is written, as Bash does where no file has such a name.")
            self.words.append(made)
        elif self.splits and (several or _GLOB.search(self.bare)):
            self.words.append((Open("".join(map(str, made)), self.line, _SEVERAL),))
        elif made or self.is_word:
            self.words.append(made)
        self.parts, self.is_word, self.bare = [], False, ""

    def _take(self, piece: str, *, quoted: bool = False) -> None:
        self.parts.append(piece)
        self.is_word = self.is_word or quoted

    def _until(self, quote: str, *, escapes: bool = False) -> str:
        """The text up to the closing quote, which is read too."""
        start = self.place = self.place + 1
        while self.place < len(self.text) and self.text[self.place] != quote:
            self.place += 2 if escapes and self.text[self.place] == "\\" else 1
        self.place += 1
        return self.text[start : self.place - 1]

    def _double(self) -> None:
        """Text in double quotes: variables have their values, and nothing is split."""
        self.place += 1
        before, listed = len(self.parts), False
        while self.place < len(self.text) and self.text[self.place] != '"':
            letter = self.text[self.place]
            if letter in "$`":
                listed = self._expand(quoted=True) or listed
            elif letter == "\\" and self.text[self.place + 1 : self.place + 2] in ('"', "\\", "$", "`", "\n"):
                self._take(self.text[self.place + 1].strip("\n"))
                self.place += 2
            else:
                self._take(letter)
                self.place += 1
        self.place += 1
        # "$@" without arguments is no word
        self.is_word = self.is_word or not listed or len(self.parts) > before

    def _expand(self, *, quoted: bool) -> bool:
        """A variable, or the output of commands; whether it is a list."""
        start, opening = self.place, self.text[self.place : self.place + 2]
        if self.text[start] == "`":
            inner = self._until("`", escapes=True)
            found: Value | list[Value] = self._output(inner, self.text[start : self.place])
        elif self.text.startswith("$((", start) and (end := self._balanced(start + 1)) and self.text[end - 2] == ")":
            self.place = end
            found = self._arithmetic(self.text[start:end])
        elif opening in ("$(", "${"):
            self.place = end = self._balanced(start + 1)
            inner, written = self.text[start + 2 : end - 1], self.text[start:end]
            found = self._output(inner, written) if opening == "$(" else self._parameter(inner, written)
        elif match := _SIMPLE.match(self.text, start):
            self.place = match.end()
            found = self._variable(match[1])
            if isinstance(found, list) and match[1] not in ("@", "*"):
                found = found[0] if found else ()  # of an array the first element
        else:
            self.place += 1
            self._take("$")
            return False
        if isinstance(found, list) and quoted and self.text[start : self.place].rstrip("]}").endswith("*"):
            between = self.scope.separators()[:1]
            found = tuple(part for number, each in enumerate(found) for part in ((between, *each) if number else each))
        for number, each in enumerate(found if isinstance(found, list) else [found]):
            if number:
                self._next()
            self._put(each, quoted=quoted or not self.splits)
        return isinstance(found, list)

    def _next(self) -> None:
        if self.splits:
            self.is_word = True
            self.end_word()
            self.is_word = True
        else:
            self._take(" ")

    def _put(self, made: Value, *, quoted: bool) -> None:
        for each in made:
            part = each
            if not quoted and isinstance(part, Reference) and len((part.otherwise or "").split()) > 1:
                self.scope.note(f"${part.name} is taken to be {part.otherwise!r}, its default, which is several words.")
                part = str(part.otherwise)
            pieces = [part] if quoted or not isinstance(part, str) else self.scope.split(part)
            for number, piece in enumerate(pieces):
                if number:
                    self.end_word()
                self.parts.append(piece)

    def _balanced(self, start: int) -> int:
        """The place behind the bracket that closes the one at a place."""
        waiting, place = [_CLOSING[self.text[start]]], start + 1
        while place < len(self.text) and waiting:
            letter = self.text[place]
            if letter == "\\":
                place += 1
            elif letter == "'" and waiting[-1] != "}":
                place = self.text.find("'", place + 1) if "'" in self.text[place + 1 :] else place
            elif letter in _CLOSING and (letter == "(" or self.text[place - 1] == "$"):
                waiting.append(_CLOSING[letter])
            elif letter == waiting[-1]:
                waiting.pop()
            place += 1
        return place

    def _variable(self, name: str) -> Value | list[Value]:
        return self._open(f"${name}") if name in _OF_THE_RUNNING_SHELL else self.scope.variable(name)

    def _open(self, written: str, otherwise: str | None = None) -> Value:
        return (Open(written, self.line, _WRITE_IT, otherwise),)

    def _output(self, inner: str, written: str) -> Value:
        printed = output(self.scope, parse(inner), lambda scope, piece: fields(scope, piece, self.line))
        return self._open(written) if printed is None else printed

    def _arithmetic(self, written: str) -> Value:
        command = parse(f"x {written}").children
        node = command[0].children[-1] if command else None
        if node is None or node.type != "arithmetic_expansion":
            return self._open(written)
        found = arithmetic(node, lambda each: self._number(each, by_default=False))
        if found is not None:
            return (str(found),)
        found = arithmetic(node, lambda each: self._number(each, by_default=True))
        return self._open(written, None if found is None else str(found))

    def _number(self, node: Node, *, by_default: bool) -> int | None:
        written = text(node).strip()
        found = self.scope.variable(written) if node.type == "variable_name" else value(self.scope, written, self.line)
        only = sole(found) if isinstance(found, tuple) else None
        if by_default and isinstance(only, Reference | Open):
            found = (only.otherwise or "",)
        shown = text_of(found) if isinstance(found, tuple) else None
        return int(shown) if shown is not None and re.fullmatch(r"-?\d+", shown.strip()) else None

    def _parameter(self, inner: str, written: str) -> Value | list[Value]:
        """`${…}`."""
        match = _EXPANSION.fullmatch(inner)
        if match is None:
            return self._open(written)
        rest, index = match["rest"], match["index"]
        found = self._variable(match["name"])
        if isinstance(found, list):
            if match["length"] and (index or match["name"]) in ("@", "*"):
                return (str(len(found)),)
            if (index or match["name"]) in ("@", "*") and not rest:
                return found
            place = int(index) if index and index.isdecimal() else 0
            found = found[place] if place < len(found) else ()
        if match["length"]:
            shown = text_of(found)
            return self._open(written) if shown is None else (str(len(shown)),)
        if otherwise := _OTHERWISE.match(rest):
            return self._otherwise(match["name"], found, otherwise[0], rest[otherwise.end() :])
        cut = self._cut(found, rest) if rest else found
        return self._open(written) if cut is None else cut

    def _otherwise(self, name: str, found: Value, how: str, rest: str) -> Value:
        """`${NAME:-other}` and its like."""
        is_there = self.scope.is_set(name) and (not how.startswith(":") or text_of(found) != "")
        if how[-1] == "+":
            return value(self.scope, rest, self.line) if is_there else ()
        if is_there or how[-1] == "?":
            return found
        other = value(self.scope, rest, self.line)
        default, only = text_of(other), sole(found)
        if isinstance(only, Reference) and only.otherwise is None and default is not None:
            other = (Reference(only.name, default),)
        if how[-1] == "=":
            self.scope.assign(name, other)
        return other

    def _cut(self, found: Value, rest: str) -> Value | None:
        """`${NAME%pattern}` and its like, for a value that is known."""
        shown = text_of(found)
        how = re.match(r"%%?|##?|//?|:", rest)
        pattern = text_of(value(self.scope, rest[how.end() :], self.line)) if how else None
        if shown is None or how is None or pattern is None:
            return None
        if how[0] in ("/", "//"):
            old, _, new = pattern.partition("/")
            return (shown.replace(old, new, 1 if how[0] == "/" else -1),) if not _GLOB.search(old) else None
        if how[0] == ":":
            bounds = [int(each) for each in pattern.split(":") if re.fullmatch(r" ?-?\d+", each)]
            start = bounds[0] if bounds else 0
            return (shown[start : start + bounds[1]] if len(bounds) == 2 else shown[start:],) if bounds else None
        return (_without(shown, how[0], pattern),)


def braces(word: str) -> list[str]:
    """`a{b,c}` and `{1..3}` as the words that they stand for."""
    match = _BRACES.search(word)
    if match is None:
        return [word]
    refuse_endless(MOST + 1 if word.count("{") > MOST_BRACES else 0, word)
    if "," in match[1]:
        inner = match[1].split(",")
    else:
        first, last = map(int, match[1].split(".."))
        step = 1 if last >= first else -1
        refuse_endless(abs(last - first), word)
        inner = [str(number) for number in range(first, last + step, step)]
    found: list[str] = []
    for each in inner:
        found += braces(f"{word[: match.start()]}{each}{word[match.end() :]}")
        refuse_endless(len(found), word)
    return found


def _without(shown: str, how: str, pattern: str) -> str:
    """A text without what a pattern fits at its begin (`#`) or end (`%`), the most of it where the sign is doubled."""
    lengths = range(len(shown) + 1)
    for length in lengths if len(how) == 1 else reversed(lengths):
        piece = shown[len(shown) - length :] if how[0] == "%" else shown[:length]
        if fnmatchcase(piece, pattern):
            return shown[: len(shown) - length] if how[0] == "%" else shown[length:]
    return shown
