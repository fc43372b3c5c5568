"""Shell text read without running it: which programs it starts, with which words, variables and folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from trainkit.convert.shell import control
from trainkit.convert.shell.control import as_shell, branches, inner_text
from trainkit.convert.shell.scope import Scope
from trainkit.convert.shell.syntax import argument_text, condition, error_in, line, parse, text, written_bytes
from trainkit.convert.shell.values import Launch, Open, Reference, Value, refuse_endless, text_of
from trainkit.convert.shell.words import fields, first_word, value
from trainkit.errors import UsageError

if TYPE_CHECKING:
    from tree_sitter import Node

MOST_TURNS = 200  # of a loop
_PLACEHOLDER = re.compile(r"(?<!<)<[^\W\d_](?:[^<>\n]*[^<>\s])?>")  # which Bash takes for two redirections
_BACKSLASHES = re.compile(r"(?<![\w\\])[\w.]+(?:\\[\w.]+)+\.py\b")
MOST = 1 << 18  # characters of a script; the grammar takes up to 3 s over as many
_NO_TEST = ("command", "pipeline", "redirected_statement")


@dataclass
class Reader:
    """What has been found. starts: whether a command, by its words, starts a program that can be imported.

    setup: of a job, what prepares its environment: names of exported variables, "" for commands, and shell text.
    """

    path: str
    starts: Callable[[Sequence[str]], bool]
    scope: Scope
    found: list[Launch] = field(default_factory=list)
    functions: dict[str, Node] = field(default_factory=dict)
    first_line: int = 0  # of a text within the text
    source: bytes = b""  # what is being read
    setup: list[tuple[str, str]] | None = None
    statements: int = 0  # read so far; functions and loops may make a few lines many

    def read(self, written: str) -> None:
        """Walk a text. Raises UsageError where it is no Bash."""
        if "\0" in written:  # which Bash would leave out, and its grammar takes for ever over
            raise self._error("a NUL byte is in it, so it is no text", "save it as UTF-8 text")
        if len(written) > MOST:
            raise self._error(f"it has more than {MOST:,} characters", "name a script that starts the program alone")
        written = re.sub(r"\\\s*\Z", "", written)  # a line that goes on, at the end, goes on with nothing
        root, self.source = parse(written), written_bytes(written)
        if wrong := error_in(root):
            self._refuse_placeholders(written)
            shown = text(wrong).strip().splitlines()
            at = f"line {line(wrong)}{f', at `{shown[0][:60]}`' if shown else ''}"
            what = f"{at} cannot be read" if self.path else f"the command cannot be read{at.partition(',')[2]}"
            raise self._error(what, "check quotes and brackets there")
        self.read_all(root.children)

    def _refuse_placeholders(self, written: str) -> None:
        if found := _PLACEHOLDER.search(written):
            raise self._error(f"{found[0]} is to be replaced", "write what it is for, without < and >")

    def _error(self, what: str, hint: str) -> UsageError:
        return UsageError(f"{self.path}: {what}" if self.path else what, hint=hint)

    def read_all(self, nodes: Sequence[Node]) -> None:
        """Statements one after the other."""
        for node in nodes:
            self._statement(node)

    def _statement(self, node: Node) -> None:
        self.statements += 1
        refuse_endless(self.statements, text(node))
        if read := _STATEMENTS.get(node.type):
            read(self, node)
        elif node.type == "comment" and text(node).startswith("#SBATCH") and self.setup is None:
            self.scope.note("#SBATCH lines below the first command are not read, as sbatch reads none there.")
        elif node.type == "&":
            self.scope.note("`&` is not taken over: trainkit run stays in front until the run ends.")

    def _subshell(self, node: Node) -> None:
        with self._inner():
            self.read_all(node.children)

    def _function_is(self, node: Node) -> None:
        self.functions[text(node.child_by_field_name("name") or node)] = node

    @contextmanager
    def _inner(self, **changes: object) -> Iterator[None]:
        """Changes of variables and folder within do not last."""
        outer = self.scope
        self.scope = replace(outer, variables=dict(outer.variables), exported=dict(outer.exported), **changes)  # type: ignore[arg-type]
        try:
            yield
        finally:
            self.scope = outer

    def _assign(self, node: Node) -> None:
        if node.type != "variable_assignment" or node.children[0].type != "variable_name":
            return
        name, right = node.children[0], node.children[-1]
        added = any(child.type == "+=" for child in node.children)
        old = self.scope.variables.get(text(name), ())
        if right.type == "array":
            listed = fields(self.scope, control.of_array(right), self._line(node))
            self.scope.assign(text(name), [*old, *listed] if added and isinstance(old, list) else listed)
            return
        written = self._assigned(node)
        made = value(self.scope, written, self._line(node))
        self.scope.assign(text(name), (*old, *made) if added and isinstance(old, tuple) else made, written)
        if isinstance(old, list) and not added:  # of an array the first element
            self.scope.assign(text(name), [self.scope.variables[text(name)], *old[1:]])  # type: ignore[list-item]

    def _assigned(self, node: Node) -> str:
        """What is behind the equals sign; the grammar ends it too early after some expansions."""
        return first_word(self.source[node.start_byte :].decode(errors="surrogateescape").partition("=")[2])

    def _line(self, node: Node) -> int:
        return line(node) + self.first_line

    def _declare(self, node: Node) -> None:
        for child in node.children[1:]:
            is_set = child.type == "variable_assignment"
            made = value(self.scope, self._assigned(child), self._line(child)) if is_set else ()
            self._assign(child)
            name = text(child.children[0] if is_set else child)
            if text(node.children[0]) == "export" and re.fullmatch(r"\w+", name):
                self.scope.exported[name] = None
                if self.setup is not None and not self.found:
                    self.setup.append((name, f"export {name}={as_shell(made or (Reference(name),))}"))

    def _list(self, node: Node) -> bool | None:
        """`a && b`, `a || b`: a test decides, and any other command is taken to succeed. Whether it holds."""
        first, how, second = node.children[0], text(node.children[1]).strip(), node.children[2]
        known = self._succeeds(first)
        if known is None:
            self._default(first, [second])
            return None
        return self._succeeds(second) if known is (how == "&&") else known

    def _succeeds(self, node: Node) -> bool | None:
        if node.type == "list":
            return self._list(node)
        if node.type in ("test_command", "negated_command") or self._is_test(node):
            return self._holds(node)
        self._statement(node)
        return True

    def _pipeline(self, node: Node) -> None:
        first, *others = (child for child in node.children if child.is_named)
        self._statement(first)
        if self._starts_something(first):
            for other in others:
                self.scope.note(f"`| {text(other)[:100]}` is not taken over: the run folder keeps each rank's output.")

    def _redirected(self, node: Node) -> None:
        self._refuse_placeholders(text(node))
        if (body := control.heredoc(self.source, node)) is not None:
            name = text(node.children[0]).split()[-1]
            self.scope.assign(name, value(self.scope, body, self._line(node)), name)
            return
        self._statement(node.children[0])
        if self._starts_something(node.children[0]):
            for each in node.children[1:]:
                shown = text(each)[:100]
                if "redirect" in each.type and not shown.endswith(("&1", "&2")):
                    self.scope.note(f"`{shown}` is not taken over: the run folder keeps each rank's output.")

    def _starts_something(self, node: Node) -> bool:
        return bool(self.found) and self.found[-1].line == self._line(node)

    def _holds(self, node: Node) -> bool | None:
        """What a condition comes to: variables that nothing sets, and arguments that are missing, are empty."""

        def word(operand: Node) -> str | None:
            made = value(self.scope, text(operand).strip(), self._line(operand))
            shown = ["" if isinstance(part, Reference) else part for part in made]
            if any(isinstance(part, Open) for part in shown):
                return None
            return "".join(map(str, shown))

        if node.type in _NO_TEST and not self._is_test(node):
            return None
        if self._is_test(node):
            shown = text(node).strip().removeprefix("test")
            found = parse(f"[ {shown} ]").children
            return condition(found[0], word) if found else None
        return condition(node, word)

    def _is_test(self, node: Node) -> bool:
        return node.type == "command" and text(node).startswith("test ")

    def _default(self, test: Node, body: Sequence[Node]) -> None:
        """A body behind a test that is not known is left out, and named if it would matter."""
        before = len(self.found)
        with self._inner(remarks=[]):
            self.read_all(body)
            changed = any(each != self.scope.variables.get(name) for name, each in self.scope.variables.items())
        found = self.found[before:]
        del self.found[before:]
        if found or changed:
            self.scope.note(f"`{text(test)[:80]}` is taken not to hold (line {self._line(test)}).")

    def _if(self, node: Node) -> None:
        for test, body in branches(node):
            known = True if test is None else self._holds(test)
            if test is not None and known is None:
                self._default(test, body)
            elif known and not any(text(node).startswith(("exit", "return")) for node in body):
                self._branch(test, body)
                return

    def _branch(self, test: Node | None, body: Sequence[Node]) -> None:
        """`if [ -z "$X" ]; then X=other; fi` gives a default: the environment may have another."""
        before = dict(self.scope.variables)
        self.read_all(body)
        if test is not None:
            self.scope.variables |= control.defaults(text(test), self.scope.variables, before)

    def _for(self, node: Node) -> None:
        words = [child for child in node.children if child.is_named]
        name, body = text(words[0]), next((child for child in words if child.type == "do_group"), None)
        asked = self.scope.asked.get(name)
        written = " ".join(text(child) for child in words[1:] if child is not body)
        listed = fields(self.scope, written, self._line(node))
        for each in [(asked,)] if asked is not None else listed[:MOST_TURNS]:
            self.scope.assign(name, each, text(node).splitlines()[0])
            self.read_all(body.children if body else ())

    def _while(self, node: Node) -> None:
        test, body = (child for child in node.children if child.is_named)
        turns = 0
        while self._holds(test) and turns < MOST_TURNS:
            self.read_all(body.children)
            turns += 1
        if self._holds(test) is None:
            self._default(test, body.children)

    def _case(self, node: Node) -> None:
        subject = text_of(value(self.scope, text(node.children[1]).strip(), self._line(node)))
        for item in (child for child in node.children if child.type == "case_item"):
            end = next(place for place, child in enumerate(item.children) if child.type == ")")
            patterns = [text(child).strip("\"'") for child in item.children[:end] if child.is_named]
            if subject is None:
                self._default(node.children[1], item.children[end + 1 :])
            elif any(fnmatchcase(subject, pattern) for pattern in patterns):
                self.read_all(item.children[end + 1 :])
                return

    def _command(self, node: Node) -> None:
        name = node.child_by_field_name("name")
        before = name.prev_sibling if name else None
        if before and name and before.end_byte == name.start_byte:  # `X=${A}b$C/d`: the grammar sees a command `C/d`
            self._assign(before)
            return
        above = control.before_the_line(self.source, node)
        for each in above:
            self._assign(each)
        words = fields(self.scope, argument_text(node), self._line(node))
        front = [
            (f"{text(child.children[0])}=", *value(self.scope, self._assigned(child), self._line(child)))
            for child in node.children
            if child.type == "variable_assignment" and child not in above
        ]
        if words:
            self._run(tuple(front), words, node)

    def _run(self, front: tuple[Value, ...], words: list[Value], node: Node) -> None:
        name = text_of(words[0]) or ""
        plain = [text_of(word) or "" for word in words]
        if name in self.functions:
            with self._function(tuple(words[1:])):
                self._statement(self.functions[name].children[-1])
        elif name in ("cd", "pushd"):
            self.scope.go(plain[1] if len(plain) > 1 else "", text(node))
        elif name == "shift":
            count = int(plain[1]) if plain[1:] and plain[1].isdecimal() else 1
            self.scope.given = self.scope.given[count:]
        elif name == "set" and "--" in plain:
            self.scope.given = tuple(words[plain.index("--") + 1 :])
        elif self.setup is not None and name == "eval" and text_of(words[-1]) is None:  # as conda's hook
            self.setup.append(("", text(node)))
        elif (inner := inner_text(words)) is not None:
            srun = words[: words.index(inner) - 2] if name.endswith("srun") else []
            self._text_within(inner, (*front, *srun), node)
        elif name.startswith("-"):
            before = self._line(node)
            what = f"line {before} begins with {name}: is a backslash missing at the end of the line before it?"
            raise self._error(what, "end that line with a backslash")
        elif self.starts(plain):
            if path := _BACKSLASHES.search(argument_text(node)):
                what = f"{path[0]} is a path as Windows writes it, and Bash takes the backslashes out"
                raise self._error(what, f"write {path[0].replace(chr(92), '/')}")
            kept = tuple(
                (each, found)
                for each in self.scope.exported
                if isinstance(found := self.scope.variable(each), tuple) and control.is_new(each, found)
            )
            self.found.append(Launch((*front, *words), kept, self.scope.folder, self._line(node)))
        elif self.setup is not None and not self.found and name in control.PREPARES:
            self.setup.append(("", " ".join(map(as_shell, words))))
        elif name and name not in control.SILENT:
            where = "after" if self.found else "before"
            self.scope.note(f"`{' '.join(text(node).split())[:100]}` {where} the command is not taken over.")

    @contextmanager
    def _function(self, arguments: tuple[Value, ...]) -> Iterator[None]:
        """A function's arguments are its own, and what it sets lasts."""
        outer = self.scope.given, self.scope.called
        self.scope.given, self.scope.called = arguments, True
        try:
            yield
        finally:
            self.scope.given, self.scope.called = outer

    def _text_within(self, inner: Value, front: tuple[Value, ...], node: Node) -> None:
        """`bash -c TEXT`, `eval TEXT`: the text is read like the rest."""
        written = text_of(inner)
        if written is None:
            written = "".join(map(control.in_shell, inner))
        outer, self.first_line = (self.first_line, self.source), self._line(node) - 1
        before = len(self.found)
        self.read(written)
        self.first_line, self.source = outer
        self.found[before:] = [replace(each, words=(*front, *each.words)) for each in self.found[before:]]


_INSIDE = ("variable_assignments", "negated_command", "compound_statement", "do_group", "else_clause")
_STATEMENTS: Mapping[str, Callable[[Reader, Node], object]] = {
    "variable_assignment": Reader._assign,
    "declaration_command": Reader._declare,
    "unset_command": lambda reader, node: [reader.scope.variables.pop(text(each), None) for each in node.children[1:]],
    "command": Reader._command,
    "list": Reader._list,
    "pipeline": Reader._pipeline,
    "redirected_statement": Reader._redirected,
    "subshell": Reader._subshell,
    "if_statement": Reader._if,
    "for_statement": Reader._for,
    "while_statement": Reader._while,
    "case_statement": Reader._case,
    "function_definition": Reader._function_is,
    **dict.fromkeys(_INSIDE, lambda reader, node: reader.read_all(node.children)),
}
