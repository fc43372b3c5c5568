"""Words of shell text as the shell would make them: quotes, variables, arithmetic, and commands that only make text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from trainkit.convert.shell.output import output
from trainkit.convert.shell.scope import Scope
from trainkit.convert.shell.syntax import arithmetic, line, parse, text
from trainkit.convert.shell.values import Open, Part, Reference, Value, joined, sole, text_of

if TYPE_CHECKING:
    from tree_sitter import Node

_EXPANSION = re.compile(r"\$\{(?P<length>#?)(?P<name>\w+|[@*#?!-])(?:\[(?P<index>[^\]]*)\])?(?P<rest>.*)\}", re.DOTALL)
_WRITE_IT = "write what it comes to"
_OTHERWISE = re.compile(r":?[-=?+]")
_GLOB = re.compile(r"[*?]|\[.*\]")
_ESCAPED = re.compile(r"\\(\n|.)", re.DOTALL)
_ESCAPED_IN_QUOTES = re.compile(r'\\([$`"\\\n])')
_COUNTS__WRITE_IT = "write what it comes to"


def fields(scope: Scope, node: Node) -> list[Value]:
    """The words that a node becomes: several, or none, where a variable without quotes holds several, or none."""
    made: list[Value] = [()]
    is_word = False
    for values, quoted in _segments(scope, node, quoted=False):
        is_word = is_word or (quoted and bool(values))
        for number, value in enumerate(values):
            if number:
                made.append(())
            for part in value:
                first, *others = [part] if quoted or not isinstance(part, str) else re.split(r"\s+", part)
                made[-1] += (first,)
                made += [(other,) for other in others]
    kept = [joined(value) for value in made]
    return [value for value in kept[:-1] if value] + [value for value in kept[-1:] if value or is_word]


def value(scope: Scope, node: Node) -> Value:
    """The one value that a node becomes, as on the right of an assignment."""
    found: list[Part] = []
    for values, _ in _segments(scope, node, quoted=True):
        for number, each in enumerate(values):
            found += [" ", *each] if number else each
    return joined(tuple(found))


def of_text(scope: Scope, written: str) -> Value:
    """The value of a piece of a word."""
    if not re.search(r"[$`'\"\\~]", written):
        return (written,) if written else ()
    words = parse(f"X={written}").children
    return value(scope, words[0].children[-1]) if words and words[0].type == "variable_assignment" else (written,)


Segments = Iterator[tuple[Sequence[Value], bool]]


def _segments(scope: Scope, node: Node, *, quoted: bool) -> Segments:
    """The parts of a word: their values, several for lists, and whether they are kept from splitting."""
    written = text(node)
    match node.type:
        case "string" | "translated_string":
            pieces = list(_pieces(scope, node, written, quoted=True))
            if not pieces or any(values for values, _ in pieces):  # "$@" without arguments is no word
                yield ((),), True
            yield from pieces
        case "concatenation" | "command_name" | "heredoc_body":
            yield from _pieces(scope, node, written, quoted=quoted)
        case "raw_string":
            yield ((written.strip().strip("'"),),), True
        case "ansi_c_string":
            yield ((written.strip()[2:-1].encode().decode("unicode_escape"),),), True
        case "simple_expansion" | "expansion" | "command_substitution" | "arithmetic_expansion":
            lead = written[: len(written) - len(written.lstrip())]  # the tree gives a blank in quotes to what follows
            if lead:
                yield ((lead,),), quoted
            found = _expansion(scope, node, written.strip())
            yield (found if isinstance(found, list) else (found,)), quoted
        case "string_content":
            yield ((_ESCAPED_IN_QUOTES.sub(lambda match: match[1].strip("\n"), written),),), True
        case "process_substitution" | "brace_expression":
            yield ((Open(written, line(node), _WRITE_IT),),), quoted
        case _:
            yield (_plain(node, written, quoted=quoted),), True


def _pieces(scope: Scope, node: Node, written: str, *, quoted: bool) -> Segments:
    """The children of a node, and what is between them."""
    children = [child for child in node.children if text(child).strip() not in ('"', '$"')]
    place, last = node.start_byte, node.end_byte
    raw = written.encode()
    if node.type in ("string", "translated_string"):
        place, last = place + raw.index(b'"') + 1, last - 1
    for child in children:
        if child.start_byte > place:
            yield ((raw[place - node.start_byte : child.start_byte - node.start_byte].decode(errors="replace"),),), True
        yield from _segments(scope, child, quoted=quoted)
        place = child.end_byte
    if last > place:
        rest = raw[place - node.start_byte : last - node.start_byte].decode(errors="replace")
        yield ((_ESCAPED_IN_QUOTES.sub(lambda match: match[1].strip("\n"), rest),),), True


def _plain(node: Node, written: str, *, quoted: bool) -> Value:
    """A word without anything to expand but a home folder and names of files."""
    if written.startswith("~") and (written[1:2] in ("", "/")):
        return (Reference("HOME"), _ESCAPED.sub(r"\1", written[1:]))
    if not quoted and _GLOB.search(written) and "\\" not in written:
        return (Open(written, line(node), "it stands for names of files: write them, or quote it"),)
    return (_ESCAPED.sub(lambda match: match[1].strip("\n"), written),)


def _expansion(scope: Scope, node: Node, written: str) -> Value | list[Value]:
    if node.type == "simple_expansion":
        return scope.variable(written[1:])
    if node.type == "arithmetic_expansion":
        number = arithmetic(node, lambda each: _number(scope, each))
        if number is not None:
            return (str(number),)
        number = arithmetic(node, lambda each: _number(scope, each, by_default=True))
        return (Open(written, line(node), _WRITE_IT, None if number is None else str(number)),)
    if node.type == "command_substitution":
        printed = output(scope, node, fields)
        return (Open(written, line(node), _WRITE_IT),) if printed is None else printed
    found = _parameter(scope, written)
    return (Open(written, line(node), _WRITE_IT),) if found is None else found


def _number(scope: Scope, node: Node, *, by_default: bool = False) -> int | None:
    written = text(node).strip()
    found = scope.variable(written) if node.type == "variable_name" else value(scope, node)
    only = sole(found) if isinstance(found, tuple) else None
    if by_default and isinstance(only, Reference | Open):
        found = (only.otherwise or "",)
    shown = text_of(found) if isinstance(found, tuple) else None
    return int(shown) if shown is not None and re.fullmatch(r"-?\d+", shown.strip()) else None


def _parameter(scope: Scope, written: str) -> Value | list[Value] | None:
    """`${…}`; None where its value is not known."""
    match = _EXPANSION.fullmatch(written)
    if match is None:
        return None
    name, rest, index = match["name"], match["rest"], match["index"]
    found = scope.variable(name)
    if isinstance(found, list):
        if match["length"]:
            return (str(len(found)),)
        if index in ("@", "*", None) and name in ("@", "*"):
            return found
        if index is not None and index.isdigit():
            found = found[int(index)] if int(index) < len(found) else ()
        elif index in ("@", "*") and not rest:
            return found
        else:
            found = found[0] if found else ()
    if match["length"]:
        shown = text_of(found)
        return None if shown is None else (str(len(shown)),)
    if otherwise := _OTHERWISE.match(rest):
        return _otherwise(scope, name, found, otherwise[0], rest[otherwise.end() :])
    return _cut(scope, found, rest) if rest else found


def _otherwise(scope: Scope, name: str, found: Value, how: str, rest: str) -> Value | None:
    """`${NAME:-other}` and its like."""
    shown = text_of(found)
    is_there = scope.is_set(name) and (not how.startswith(":") or shown != "")
    if how[-1] == "+":
        return of_text(scope, rest) if is_there else ()
    if is_there or how[-1] == "?":
        return found
    other = of_text(scope, rest)
    default, only = text_of(other), sole(found)
    if isinstance(only, Reference) and only.otherwise is None and default is not None:
        other = (Reference(only.name, default),) if default else (Reference(only.name, ""),)
    if how[-1] == "=":
        scope.assign(name, other)
    return other


def _cut(scope: Scope, found: Value, rest: str) -> Value | None:
    """`${NAME%pattern}` and its like, for a value that is known."""
    shown = text_of(found)
    how = re.match(r"%%?|##?|//?|:", rest)
    if shown is None or how is None:
        return None
    pattern = text_of(of_text(scope, rest[how.end() :]))
    if pattern is None:
        return None
    if how[0] in ("/", "//"):
        old, _, new = pattern.partition("/")
        return (shown.replace(old, new, 1 if how[0] == "/" else -1),) if not _GLOB.search(old) else None
    if how[0] == ":":
        bounds = [int(each) for each in pattern.split(":") if re.fullmatch(r" ?-?\d+", each)]
        start = bounds[0] if bounds else 0
        return (shown[start : start + bounds[1]] if len(bounds) == 2 else shown[start:],) if bounds else None
    lengths = range(len(shown) + 1)
    for length in lengths if len(how[0]) == 1 else reversed(lengths):
        piece = shown[len(shown) - length :] if how[0][0] == "%" else shown[:length]
        if fnmatchcase(piece, pattern):
            return (shown[: len(shown) - length] if how[0][0] == "%" else shown[length:],)
    return found
