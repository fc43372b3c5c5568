"""What the parts of commands and conditions mean, wherever they are in a text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from trainkit.convert.shell.values import Open, Part, Reference, Value, sole, text_of

if TYPE_CHECKING:
    from tree_sitter import Node

_ESCAPED = re.compile(r'["\\$`]')
# What differs on each machine, and is given to it when it is started.
RANKS = frozenset({"NODE_RANK", "MACHINE_RANK", "SLURM_NODEID", "SLURM_PROCID", "RANK", "GROUP_RANK"})

# Commands that train nothing, and need no word.
SILENT = frozenset({
    "set", "true", "wait", "exit", "trap", ":", "return", "shopt", "false", "break", "continue", "let", "read", "echo",
    "printf", "date", "hostname", "pwd", "ls", "nvidia-smi", "test", "[", "sleep",
})  # fmt: skip
# Those that prepare the environment in which a job's command runs.
PREPARES = frozenset({
    "module", "ml", "source", ".", "conda", "mamba", "micromamba", "pyenv", "spack", "ulimit", "umask", "unset", "eval",
    "mkdir", "workon", "uenv", "load",
})  # fmt: skip


def of_array(array: Node) -> str:
    """What is between the brackets of an array, without its comments."""
    written = bytearray(array.text or b"")
    for child in array.children:
        if child.type == "comment":
            start, end = child.start_byte - array.start_byte, child.end_byte - array.start_byte
            written[start:end] = b" " * (end - start)
    return written.decode(errors="surrogateescape")[1:-1]


def defaults(test: str, variables: Mapping[str, Value | list[Value]], before: Container[str]) -> dict[str, Value]:
    """What `if [ -z "$X" ]; then X=other; fi` gives: the environment may have another. before: set above the test."""
    found = {name: text_of(made) for name, made in variables.items() if isinstance(made, tuple) and name not in before}
    return {
        name: (Reference(name, default),)
        for name, default in found.items()
        if default is not None and re.search(rf"-z.*\$\{{?{name}\b", test)
    }


def as_shell(value: Value) -> str:
    """A value as one word of shell text again."""
    plain = text_of(value)
    if plain is not None:
        return shlex.quote(plain)
    parts = (_ESCAPED.sub(r"\\\g<0>", part) if isinstance(part, str) else in_shell(part) for part in value)
    return f'"{"".join(parts)}"'


def in_shell(part: Part) -> str:
    """A part of a value as shell text again."""
    if isinstance(part, Reference):
        return f"${{{part.name}}}" if part.otherwise is None else f"${{{part.name}:-{part.otherwise}}}"
    return part.text if isinstance(part, Open) else part


def inner_text(words: list[Value]) -> Value | None:
    """The text that a command has another shell read."""
    plain = [text_of(word) for word in words]
    shell = next((place for place, word in enumerate(plain) if word in ("bash", "sh", "eval")), None)
    if shell is None:
        return None
    rest, flags = words[shell + 1 :], plain[shell + 1 :]
    if plain[shell] == "eval":
        return tuple(part for number, word in enumerate(rest) for part in ((" ", *word) if number else word))
    for place, flag in enumerate(flags[:-1]):
        if flag and re.fullmatch(r"-[a-z]*c", flag):
            return rest[place + 1]
    return None


def before_the_line(source: bytes, command: Node) -> list[Node]:
    """Assignments on a line of their own, which the grammar takes for the front of the command on the next."""
    name = command.child_by_field_name("name")
    found = [child for child in command.children if child.type == "variable_assignment"]
    between = source[found[-1].end_byte : name.start_byte] if found and name else b""
    return found if b"\n" in between.replace(b"\\\n", b"") else []


def heredoc(source: bytes, statement: Node) -> str | None:
    """The text that `read -d '' NAME <<EOF` reads, in quotes as they are around the EOF; None for other statements."""
    command, redirect = statement.children[0], statement.children[-1]
    marks = {child.type: child for child in redirect.children}
    if not (command.text or b"").startswith(b"read ") or "heredoc_start" not in marks or "heredoc_end" not in marks:
        return None
    start, end = marks["heredoc_start"], marks["heredoc_end"]
    body = source[start.end_byte : end.start_byte].decode(errors="surrogateescape").partition("\n")[2]
    quote = "'" if (start.text or b"")[:1] in (b"'", b'"', b"\\") else '"'
    kept = body.replace("'", "'\\''") if quote == "'" else body.replace('"', '\\"')
    return f"{quote}{kept}{quote}"


def branches(node: Node) -> Iterator[tuple[Node | None, list[Node]]]:
    """The tests of an `if` with their bodies; None for `else`."""
    test: Node | None = None
    body: list[Node] = []
    for child in node.children:
        if child.type in ("elif_clause", "else_clause"):
            if test is not None:
                yield test, body
                test = None
            yield from branches(child) if child.type == "elif_clause" else ((None, list(child.children)),)
        elif child.is_named and test is None and child.type != "comment":
            test = child
        elif child.is_named or child.type == "&":
            body.append(child)
    if test is not None:
        yield test, body


def settled(words: Sequence[Value], note: Callable[[str], None]) -> list[Value]:
    """The words with the first machine's number in place of what differs on each, and what defaults come to."""

    def settle(part: Part) -> Part:
        if isinstance(part, Reference) and part.name in RANKS:
            note(f"${part.name} is not taken over: the rank of each machine is given to trainkit run --node-rank.")
            return "0"
        if isinstance(part, Open) and part.otherwise is not None:
            note(f"`{part.text}` is {part.otherwise} with the defaults, whatever the environment has.")
            return part.otherwise
        return part

    return [tuple(map(settle, word)) for word in words]


def is_new(name: str, found: Value) -> bool:
    """Whether an exported variable says more than what the environment has by itself."""
    only = sole(found)
    return not (isinstance(only, Reference) and only.name == name and only.otherwise is None and name in RANKS)
