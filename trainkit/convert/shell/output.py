"""What commands print that only make text: `$(basename x)`, `$(nvidia-smi -L | wc -l)`."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING

from trainkit.convert.shell.scope import Scope
from trainkit.convert.shell.syntax import argument_text, arithmetic, parse, text
from trainkit.convert.shell.values import Reference, Value, joined, refuse_endless, sole, text_of

if TYPE_CHECKING:
    from tree_sitter import Node

    Fields = Callable[[Scope, str], list[Value]]

CARDS = "gpu"  # as torchrun calls as many as there are
_COUNTS_CARDS = re.compile(r"nvidia-smi\b.*\|\s*(wc -l|grep -c)|torch\.cuda\.device_count\(\)", re.DOTALL)
_FILTERS = ("tr", "wc", "head", "cut")


def output(scope: Scope, node: Node, fields: Fields) -> Value | None:
    """What the commands of a substitution print; None where only a running shell knows. fields: the words of a text."""
    if _COUNTS_CARDS.search(text(node)):
        return (CARDS,)
    inner, printed = copy(scope), Value()
    for statement in (child for child in node.children if child.is_named):
        found = _output(inner, statement, fields)
        if found is None:
            return None
        printed = found
    return printed


def _output(scope: Scope, node: Node, fields: Fields) -> Value | None:
    if node.type == "list":  # `cd x && pwd`
        found: Value | None = ()
        for child in (child for child in node.children if child.is_named):
            found = _output(scope, child, fields)
            if found is None:
                return None
        return found
    if node.type == "redirected_statement":
        return _output(scope, node.children[0], fields)
    if node.type == "pipeline":
        first, *others = (child for child in node.children if child.is_named)
        found = _output(scope, first, fields)
        for other in others:
            plain = [text_of(each) for each in fields(scope, argument_text(other))]
            found = None if found is None or None in plain else _filtered(found, [str(word) for word in plain])
        return found
    if node.type != "command":
        return None
    words = fields(scope, argument_text(node))
    return _printed(scope, words) if words else ()


def _printed(scope: Scope, words: list[Value]) -> Value | None:
    """What a command prints; None where only a running shell knows."""
    name, arguments = text_of(words[0]), words[1:]
    plain = [text_of(each) for each in arguments if not str(text_of(each)).startswith("-")]
    match name:
        case "pwd":
            return (scope.folder or ".",)
        case "cd" if plain and plain[0] is not None:
            scope.folder = posixpath.normpath(posixpath.join(scope.folder, plain[0]))
            return ()
        case "echo" | "printf":
            shown = [part for number, each in enumerate(arguments) for part in ((" ", *each) if number else each)]
            return None if name == "printf" and len(arguments) > 1 else joined(tuple(shown))
        case "dirname" | "basename" | "realpath" | "readlink" if plain and plain[0] is not None:
            path = plain[0]
            if name == "dirname":
                return (posixpath.dirname(path) or ".",)
            ending = plain[1] or "" if name == "basename" and len(plain) > 1 else ""
            return (posixpath.basename(path).removesuffix(ending) if name == "basename" else path,)
        case "expr" if None not in plain:
            return _computed(" ".join(str(text_of(each)) for each in arguments))
        case "seq" if all(each and each.isdecimal() for each in plain):
            numbers = [int(each or 0) for each in plain]
            start, end = (1, *numbers)[-2:] if len(numbers) < 3 else (numbers[0], numbers[2])
            step = numbers[1] if len(numbers) == 3 else 1
            if step == 0:
                return None
            refuse_endless((end - start) // step, "seq")
            return (" ".join(map(str, range(start, end + 1, step))),)
    return None


def _computed(expression: str) -> Value | None:
    """Of numbers alone."""
    (command,) = parse(f"x $(({expression}))").children or (None,)
    if command is None or command.children[-1].type != "arithmetic_expansion":
        return None
    found = arithmetic(command.children[-1], lambda node: int(text(node)) if text(node).isdecimal() else None)
    return None if found is None else (str(found),)


def _filtered(found: Value, words: list[str]) -> Value | None:
    """A text behind one of the commands that count, cut or replace."""
    shown = text_of(found)
    if shown is None or words[0] not in _FILTERS:
        only = sole(found)
        counts = isinstance(only, Reference) and only.name == "CUDA_VISIBLE_DEVICES" and words[0] in ("tr", "wc")
        return found if counts and words[0] == "tr" else (CARDS,) if counts else None
    match words:
        case ["tr", old, new]:
            return (shown.replace(old, new.replace("\\n", "\n")),)
        case ["wc", "-l"]:
            return (str(len(shown.splitlines())),)
        case ["wc", "-w"]:
            return (str(len(shown.split())),)
        case ["head", *how] if how in (["-n", "1"], ["-n1"], ["-1"]):
            return (shown.splitlines()[0] if shown else "",)
        case ["cut", *how]:
            flags = shlex.join(how)
            match = re.fullmatch(r"'?-d ?'?(.)'? -f ?(\d+)", flags)
            pieces = shown.split(match[1]) if match else []
            return (pieces[int(match[2]) - 1],) if match and int(match[2]) <= len(pieces) else None
    return None
