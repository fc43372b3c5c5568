"""Bash as a tree, and the tests and arithmetic in it."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tree_sitter import Node

_COMPARE: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt,
    "-ge": operator.ge, "<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge,
    "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
_ARITHMETIC: Mapping[str, Callable[[int, int], int]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "%": operator.mod, "/": operator.floordiv,
}  # fmt: skip
_ESCAPES = {
    b"a": b"\a", b"b": b"\b", b"e": b"\33", b"E": b"\33", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t",
    b"v": b"\v", b"\\": b"\\", b"'": b"'", b'"': b'"', b"?": b"?",
}  # fmt: skip
_ESCAPE = re.compile(
    rb"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{1,4})|U([0-9a-fA-F]{1,8})|c(.)|(.))", re.DOTALL
)


def parse(text: str) -> Node:
    """The root of the tree of a text; what is no Bash is under nodes of type ERROR."""
    root: Node = _parser().parse(written_bytes(text)).root_node
    return root


def written_bytes(text: str) -> bytes:
    """The bytes of a text; those that were not UTF-8 are what they were."""
    return text.encode(errors="surrogateescape")


@cache
def _parser() -> Any:
    import tree_sitter_bash
    from tree_sitter import Language, Parser

    return Parser(Language(tree_sitter_bash.language()))


def text(node: Node) -> str:
    """The node as it is written."""
    return (node.text or b"").decode(errors="surrogateescape")


def line(node: Node) -> int:
    """The line on which it begins, from 1."""
    return int(node.start_point[0]) + 1


def argument_text(node: Node) -> str:
    """The words of a command as they are written: without assignments in front, and redirections."""
    written, start = node.text or b"", node.start_byte
    pieces, place = [], start
    for child in node.children:
        if child.type == "variable_assignment" or "redirect" in child.type:
            pieces.append(written[place - start : child.start_byte - start])
            place = child.end_byte
    return b" ".join((*pieces, written[place - start :])).decode(errors="surrogateescape")


def error_in(root: Node) -> Node | None:
    """The first place that is no Bash."""
    if not root.has_error:
        return None
    found = (error_in(child) for child in root.children)
    return next((each for each in found if each), root if root.type == "ERROR" or root.is_missing else None)


def arithmetic(node: Node, number: Callable[[Node], int | None]) -> int | None:
    """The value of an expression, None where it has none. number: the value of what is no operation."""
    parts = [child for child in node.children if child.type not in ("$((", "((", "))", "(", ")")]
    if node.type in ("arithmetic_expansion", "parenthesized_expression", "compound_statement"):
        return arithmetic(parts[0], number) if len(parts) == 1 else None
    if node.type != "binary_expression" or len(parts) != 3:
        return number(node)
    left, how, right = arithmetic(parts[0], number), text(parts[1]).strip(), arithmetic(parts[2], number)
    if left is None or right is None or (how in "/%" and not right):
        return None
    if how in _COMPARE:
        return int(_COMPARE[how](left, right))
    return _ARITHMETIC[how](left, right) if how in _ARITHMETIC else None


def condition(node: Node, word: Callable[[Node], str | None]) -> bool | None:
    """What a test comes to, None where that is not known. word: the text of an operand, None where it is not known."""
    # By their types: a command may be named `]`.
    parts = [child for child in node.children if child.type not in ("[", "]", "[[", "]]", "(", ")")]
    match node.type:
        case "test_command" | "parenthesized_expression" if len(parts) == 1:
            return condition(parts[0], word)
        case "negated_command" | "unary_expression" if len(parts) == 2 and text(parts[0]).strip() == "!":
            inner = condition(parts[1], word)
            return None if inner is None else not inner
        case "unary_expression" if len(parts) == 2:
            return _of_one(text(parts[0]).strip(), word(parts[1]))
        case "binary_expression" | "list" if len(parts) == 3 and text(parts[1]).strip() in ("&&", "||", "-a", "-o"):
            left, right = condition(parts[0], word), condition(parts[2], word)
            decides = text(parts[1]).strip() in ("||", "-o")
            if decides in (left, right):
                return decides
            return None if None in (left, right) else not decides
        case "binary_expression" if len(parts) == 3:
            return _of_two(word(parts[0]), text(parts[1]).strip(), word(parts[2]))
        case "word" | "string" | "simple_expansion" | "expansion" | "number":
            found = word(node)
            return None if found is None else bool(found)
    return None


def _of_one(how: str, operand: str | None) -> bool | None:
    if operand is None or how not in ("-z", "-n"):
        return None  # files, and variables by their names
    return bool(operand) is (how == "-n")


def _of_two(left: str | None, how: str, right: str | None) -> bool | None:
    if left is None or right is None:
        return None
    if how in ("=", "==", "!="):
        return (left == right) is (how != "!=")
    try:
        return _COMPARE[how](int(left or 0), int(right or 0)) if how in _COMPARE else None
    except ValueError:
        return None


def escaped(quoted: str) -> str:
    """What Bash makes of the text between ``$'`` and ``'`` (bash(1), QUOTING)."""
    return _ESCAPE.sub(_unescaped, written_bytes(quoted)).decode(errors="surrogateescape")


def _unescaped(match: re.Match[bytes]) -> bytes:
    octal, hexadecimal, short, long, control, letter = match.groups()
    if octal or hexadecimal:
        return bytes([int(octal, 8) & 0xFF if octal else int(hexadecimal, 16)])
    if character := short or long:
        code = int(character, 16)
        return chr(code).encode(errors="surrogatepass") if code < 0x110000 else b"\xff"  # no text, as Bash's bytes
    return bytes([control[0] & 0x1F]) if control else _ESCAPES.get(letter, match[0])
