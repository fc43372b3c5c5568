"""A script rewritten so that Bash tells what it would start, and marks in its words for what is known only then.

A variable is `START name END`, or `START name DEFAULT text END` where the script has something in its place; what a
command would have printed is `START #number END`. Private letters of Unicode, which no script has.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainkit.distribution import install
from trainkit.errors import UsageError

START, END, DEFAULT, BARE = "\ue000", "\ue001", "\ue002", "\ue003"
# What differs on each machine, and is given to it when it is started.
RANKS = frozenset({"NODE_RANK", "MACHINE_RANK", "SLURM_NODEID", "SLURM_PROCID", "RANK", "GROUP_RANK"})
_MARKED_NAME = re.compile(f"{START}([^{START}{END}{DEFAULT}{BARE}]+)")
WHOLE = re.compile(f"{START}([^{START}{END}{DEFAULT}{BARE}]+)(?:{DEFAULT}([^{START}{END}{{}}]*))?{END}")
EMPTY = re.compile(f"{START}([^{START}{END}{DEFAULT}{BARE}]+)[{DEFAULT}{BARE}]{END}")  # of what is not set: no word
EMPTIES = re.compile(f"(?:{EMPTY.pattern})+")
BROKEN = re.compile(f"^[^{START}]*{END}|{START}[^{END}]*$")  # by blanks in a default


def opening(name: str, default: str | None = None) -> str:
    """What stands for a variable; default: what the script has in place of one that is not set."""
    return f"{START}{name}{END}" if default is None else f"{START}{name}{DEFAULT}{default}{END}"


def names_in(text: str) -> list[str]:
    """The names of what is open in a text, each once; of what is printed its number behind a `#`."""
    return [*dict.fromkeys(_MARKED_NAME.findall(text))]


def is_open(text: str) -> bool:
    """Whether there is anything open in a text, whole or in part."""
    return START in text or END in text


def is_never_empty(text: str) -> bool:
    """Whether a text with something open in it is certainly not empty: a variable that the job or the caller has."""
    left = re.sub(f"{START}[^{END}]*{END}", "", text)
    return bool(left) or re.search(f"{START}(?!ARG\\d|#)[^{DEFAULT}{BARE}{END}]*{END}", text) is not None


Node = Mapping[str, Any]
OWN = frozenset({
    ":", "break", "continue", "declare", "echo", "exit", "export", "false", "getopts", "local", "printf", "pwd",
    "readonly", "return", "set", "shift", "shopt", "true", "typeset", "unset",
})  # fmt: skip
RENAMED = frozenset({  # which a restricted shell, or the programs that it would start, take as theirs
    "PATH", "SHELL", "ENV", "BASH_ENV", "HISTFILE", "PS4", "BASH_SOURCE", "BASH_ARGV0", "LD_PRELOAD", "LD_LIBRARY_PATH",
    "LD_AUDIT", "SHELLOPTS", "BASHOPTS", "DYLD_INSERT_LIBRARIES", "DYLD_LIBRARY_PATH", "PROMPT_COMMAND", "BASH_CMDS",
    "BASH_ALIASES",
})  # fmt: skip
_DIFFERENT = frozenset({
    "$", "!", "RANDOM", "SRANDOM", "BASHPID", "PPID", "EPOCHSECONDS", "EPOCHREALTIME", "SECONDS", "HOSTNAME",
})  # fmt: skip
_BASHS = frozenset({
    "IFS", "OPTIND", "OPTARG", "OPTERR", "REPLY", "PWD", "OLDPWD", "UID", "EUID", "GROUPS", "BASH", "BASH_VERSION",
    "BASH_VERSINFO", "OSTYPE", "MACHTYPE", "HOSTTYPE", "LINENO", "FUNCNAME", "BASH_LINENO", "BASH_SUBSHELL",
    "BASH_REMATCH", "PIPESTATUS", "SHLVL", "_", "DIRSTACK", "COLUMNS", "LINES",
})  # fmt: skip
_NAME = re.compile(r"[A-Za-z_]\w*")
_DIFFERS = re.compile(r"\b(RANDOM|SRANDOM|EPOCHSECONDS|SECONDS|BASHPID|PPID)\b|\$\$")
_DEFAULTS, _FAILS, _INSTEAD = (":-", "-", ":=", "="), (":?", "?"), (":+", "+")
_FOR_FILES = ("-nt", "-ot", "-ef")
# Builtins to which a word that is empty, or open, is not the same as one that is not there.
_COUNT = frozenset({"set", "shift", "break", "continue", "return", "exit", "getopts", "unset", "shopt"})
_NO_FUNCTION = frozenset({"command", "builtin", "eval", "test", "[", "cd", "read"})
_TAKEN = {**dict.fromkeys(("cd", "pushd", "popd"), "__cd"), **dict.fromkeys(("read", "mapfile", "readarray"), "__read")}
_LEFT_OUT = ("xtrace", "verbose", "noexec", "restricted", "monitor", "history")  # options of `set`
_NOT_READ = "`{}` is not read"


class UnreadError(UsageError):
    """A script that is not read. line: from 1, or 0 for all of it."""

    def __init__(self, line: int, what: str, hint: str = "give the command itself") -> None:
        super().__init__(what, hint=hint)
        self.line, self.what, self.hint = line, what, hint


@dataclass(frozen=True, slots=True)
class ExitCode:
    """How the exit code of a command that is not run is used, where something depends on it.

    status: with which it is taken to end; flips: whether it is also tried with the other one.
    """

    status: int = 0
    flips: bool = True


@dataclass(frozen=True, slots=True)
class Site:
    """A place of the script's. within: the substitution that it is in."""

    number: int
    line: int
    text: str
    exit_code: ExitCode | None = None
    background: bool = False
    within: str = ""


@dataclass
class Rewriter:
    """known: variables that have their value of here. asked: those that the caller sets. given: number of arguments.

    null: descriptor of nothing. strict: what is not set has no value (`set -u`), or may get one from a file that is not
    read. The others are what was found: opened: line and text of what only a running shell knows; kept: variables of
    that; held: in which one an opened is, by its mark; lines: of assignments; patterns: words for names of files;
    removed: variables that it unsets.
    """

    known: set[str]
    asked: Mapping[str, str]
    given: int
    strict: bool = False
    null: int = 0
    sites: list[Site] = field(default_factory=list)
    opened: list[tuple[int, str]] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    held: dict[str, str] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    patterns: set[str] = field(default_factory=set)
    removed: set[str] = field(default_factory=set)
    reads_status: bool = False
    uses_arguments: bool = False

    def rewrite(self, text: str, line: int = 0, *, called: bool = False) -> str:
        """A text for Bash. line: in front of the text; called: whether missing arguments are none of the script's."""
        source = text.encode("utf-8", "surrogateescape")
        tree = _parsed(source, line)
        while quotes := [*_backquoted(tree)]:
            for start, end in reversed(quotes):
                inner = re.sub(rb"\\([\\`$])", rb"\1", source[start + 1 : end - 1])
                source = b"".join((source[:start], b"$(", inner, b")", source[end:]))
            tree = _parsed(source, line)
        walk = _Walk(self, source, line, called=called)
        walk.learn_names(tree)
        walk.statements(tree.get("Stmts"))
        return walk.result().decode("utf-8", "surrogateescape")


def _parsed(source: bytes, line: int) -> Node:
    places = [sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)]  # beside Python, activated or not
    program = shutil.which("shfmt", path=os.pathsep.join(places))
    if program is None:
        raise UnreadError(0, "shfmt parses scripts, and it is not installed", install(sys.executable, "shfmt-py"))
    # The same number of bytes, as UTF-8.
    text = re.sub("[\udc80-\udcff]", "?", source.decode("utf-8", "surrogateescape")).encode()
    argv = [program, "--language-dialect", "bash", "--to-json"]
    done = subprocess.run(argv, input=text, capture_output=True, check=False, timeout=20)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        match = re.match(r"(?:<standard input>:)?(\d+):\d+: (.*)", said)
        raise UnreadError(line + int(match[1] if match else 1), f"cannot be read: {match[2] if match else said}", "")
    tree: Node = json.loads(done.stdout)
    return tree


def _backquoted(node: Any) -> Iterator[tuple[int, int]]:
    """The outermost substitutions in backquotes, in order."""
    if isinstance(node, dict) and node.get("Backquotes"):
        yield _at(node), _to(node)
    elif isinstance(node, (dict, list)):
        for each in node.values() if isinstance(node, dict) else node:
            yield from _backquoted(each)


def _nodes(node: Any) -> Iterator[Node]:
    if isinstance(node, dict):
        yield node
    if isinstance(node, (dict, list)):
        for each in node.values() if isinstance(node, dict) else node:
            yield from _nodes(each)


def _at(node: Node) -> int:
    return int(node["Pos"]["Offset"])


def _to(node: Node) -> int:
    return int(node["End"]["Offset"])


def _literal(word: Node | None) -> str | None:
    """The text of a word that is nothing but text."""
    parts = _all(word or {}, "Parts")
    return str(parts[0]["Value"]) if len(parts) == 1 and parts[0]["Type"] == "Lit" else None


def _all(node: Node, key: str) -> Sequence[Node]:
    return node.get(key) or []


def _is_plain(node: Node) -> bool:
    return not any(node.get(each) for each in ("Excl", "Length", "Width", "Index", "Slice", "Repl", "Names", "Exp"))


def _operands(node: Node) -> Iterator[Node]:
    """The words of an arithmetic expression."""
    if node.get("Type") == "Word":
        yield node
    for key in ("X", "Y"):
        if node.get("Type") != "Word" and node.get(key):
            yield from _operands(node[key])


def quoted(text: str) -> str:
    """A text as a word of the shell's."""
    return "'" + text.replace("'", "'\\''") + "'"


@dataclass(frozen=True, slots=True)
class _Use:
    """How a word is used. whole: it is not split. decides: by what is open in it; length: or by whether it is empty."""

    whole: bool = False
    decides: bool = False
    length: bool = False


_WORD, _WHOLE, _DECIDES, _SPLIT = _Use(), _Use(whole=True), _Use(whole=True, decides=True), _Use(decides=True)


class _Walk:
    """One text: its edits, and where it is."""

    def __init__(self, rewriter: Rewriter, source: bytes, line: int, *, called: bool) -> None:
        self.rewriter, self.source, self.line = rewriter, source, line
        self.openers: dict[int, list[str]] = {}
        self.closers: dict[int, list[str]] = {}
        self.cuts: dict[int, tuple[int, str]] = {}
        self.called = called
        self.exit_code: ExitCode | None = None
        self.background = False
        self.within = ""

    def opens(self, node: Node, text: str) -> None:
        self.openers.setdefault(_at(node), []).append(text)

    def closes(self, node: Node, text: str) -> None:
        self.closers.setdefault(_to(node), []).append(text)

    def replaces(self, node: Node, text: str) -> None:
        self.cuts[_at(node)] = _to(node), text

    def result(self) -> bytes:
        made, place = bytearray(), 0
        for stop in sorted({*self.openers, *self.closers, *self.cuts, len(self.source)}):
            if stop < place:  # within what is cut
                continue
            made += self.source[place:stop]
            place, cut = self.cuts.get(stop, (stop, ""))
            text = "".join((*self.closers.get(stop, ()), *self.openers.get(stop, ()), cut))
            made += text.encode("utf-8", "surrogateescape")
        return bytes(made)

    def text(self, node: Node) -> str:
        return self.source[_at(node) : _to(node)].decode("utf-8", "surrogateescape")

    def line_of(self, node: Node) -> int:
        return self.line + int(node["Pos"]["Line"])

    def site(self, node: Node, *, command: bool = False) -> int:
        shown = " ".join(self.text(node).split())
        code = self.exit_code if command else None
        sites, back = self.rewriter.sites, command and self.background
        sites.append(Site(len(sites), self.line_of(node), shown, code, back, self.within))
        return sites[-1].number

    def unread(self, node: Node, what: str = _NOT_READ) -> UnreadError:
        return UnreadError(self.line_of(node), what.format(self.text(node)[:60]))

    def learn_names(self, tree: Node) -> None:
        """What the text takes away or makes its own is known: it is not the environment's."""
        known = self.rewriter.known
        for node in _nodes(tree):
            words = [_literal(each) or "" for each in _all(node, "Args")]
            if node.get("Type") == "CallExpr" and words[:1] == ["unset"]:
                known |= {*filter(_NAME.fullmatch, words[1:])}
                self.rewriter.removed |= known & {*words}
            elif node.get("Type") == "CallExpr" and words[:1] == ["set"]:
                self.rewriter.strict |= any(re.fullmatch(r"-[a-z]*u[a-z]*|nounset", each) for each in words[1:])
            elif node.get("Type") == "DeclClause" and node["Variant"]["Value"] in ("local", "declare", "typeset"):
                known |= {
                    each["Name"]["Value"] for each in _all(node, "Args") if each.get("Naked") and each.get("Name")
                }

    # Statements

    def statements(self, nodes: Sequence[Node] | None, code: ExitCode | None = None) -> None:
        outer = self.exit_code
        self.exit_code = code or outer
        for node in nodes or ():
            self.statement(node)
        self.exit_code = outer

    def apart(self, nodes: Sequence[Node] | None, within: str = "") -> None:
        """Statements whose exit codes decide nothing of what is around them."""
        outer, self.exit_code, self.within = (self.exit_code, self.within), None, self.within or within
        for node in nodes or ():
            self.statement(node)
        self.exit_code, self.within = outer

    def statement(self, node: Node) -> None:
        outer = self.exit_code, self.background
        self.background |= bool(node.get("Background"))
        if node.get("Negated") and self.exit_code and not self.exit_code.flips:
            self.exit_code = ExitCode(1 - self.exit_code.status, flips=False)
        if node.get("Coprocess"):
            raise self.unread(node)
        if node.get("Background"):  # in a shell of its own, and one after the other: the order is as it is written
            end = node["Semicolon"]["Offset"]
            self.opens(node, "( ")
            self.cuts[end] = end + 1, ");"
        for each in _all(node, "Redirs"):
            self.redirection(each)
        if command := node.get("Cmd"):
            self.command(command)
        self.exit_code, self.background = outer

    def command(self, node: Node) -> None:
        match node["Type"]:
            case "CallExpr":
                self.call(node)
            case "DeclClause":
                for each in _all(node, "Args"):
                    self.assignment(each)
            case "Block" | "Subshell":
                self.statements(node.get("Stmts"))
            case "TimeClause":
                self.statements([node["Stmt"]] if node.get("Stmt") else ())
            case "IfClause":
                branch: Node | None = node
                while branch:
                    self.statements(branch.get("Cond"), ExitCode())
                    self.statements(branch.get("Then"))
                    branch = branch.get("Else")
            case "WhileClause":
                self.statements(node.get("Cond"), ExitCode(int(not node.get("Until")), flips=False))
                self.statements(node.get("Do"))
            case "ForClause":
                self.for_each(node)
            case "CaseClause":
                self.word(node["Word"], _DECIDES)
                for item in _all(node, "Items"):
                    for each in _all(item, "Patterns"):
                        self.word(each, _DECIDES)
                    self.statements(item.get("Stmts"))
            case "BinaryCmd":
                if node["Op"] in ("&&", "||"):
                    self.statements([node["X"]], self.exit_code or ExitCode())
                else:
                    self.apart([node["X"]])
                self.statement(node["Y"])
            case "FuncDecl":
                name = node["Name"]["Value"]
                if name.startswith("__") or name in OWN or name in _NO_FUNCTION:
                    raise self.unread(node["Name"], "a function of the name {} is not read")
                outer, self.called = self.called, True
                self.apart([node["Body"]])
                self.called = outer
            case "ArithmCmd" | "LetClause":
                for each in [node["X"]] if node.get("X") else node["Exprs"]:
                    self.arithmetic(each)
            case "TestClause":
                self.test(node)
            case _:
                raise self.unread(node)

    def redirection(self, node: Node) -> None:
        number, operator, word = (node.get("N") or {}).get("Value", ""), node["Op"], node.get("Word") or {}
        if number.startswith("{") or len(number) > 2 or operator == "<>":
            raise self.unread(node)
        if operator in ("<<", "<<-"):
            if node.get("Hdoc"):
                self.word(node["Hdoc"], _WHOLE)
        elif operator == "<<<" or (operator == "<" and word["Parts"][0].get("Type") == "ProcSubst"):
            self.word(word, _WHOLE)
        elif operator in (">&", "<&") and re.fullmatch(r"\d{1,2}-?|-", self.text(word)):
            pass
        elif operator == "<":
            self.cuts[node["OpPos"]["Offset"]] = _at(word), f'< "$(__file {self.site(node)} '
            self.word(word, _WHOLE)
            self.closes(word, ')"')
        elif operator == "<&":
            raise self.unread(node)
        else:
            # Errors are read; what is written beside them goes nowhere.
            start = _at(node) if number == "2" else node["OpPos"]["Offset"]
            front = str(self.rewriter.null) if number == "2" else ""
            self.cuts[start] = _at(word), f"{front}>&$(__wrote {self.site(node)} "
            self.word(word, _WHOLE)
            self.closes(word, ")")

    def call(self, node: Node) -> None:
        for each in _all(node, "Assigns"):
            self.assignment(each)
        words = _all(node, "Args")
        if not words:
            return
        name, first, last = _literal(words[0]), words[0], words[-1]
        counted = name in _COUNT or (name == "printf" and (self.within or " -v" in self.text(node)))
        for each in words[1:] if name == "[" else words:
            self.word(each, _SPLIT if counted else _WORD)
        if name in OWN or (name == "exec" and len(words) == 1):
            if name == "set":
                self.options(words[1:])
            elif name == "shopt" and any(_literal(each) == "expand_aliases" for each in words):
                raise self.unread(node, "`{}`: aliases are not read")
            return
        site = self.site(node, command=True)
        if name == "eval" or (name in ("source", ".") and len(words) > 1):
            asked = "__again" if name == "eval" else "__source"
            self.replaces(first, f'eval "$({asked} {site}')
            self.closes(last, ')"')
        elif name in ("source", ".") or (name in ("mapfile", "readarray") and " -C" in self.text(node)):
            raise self.unread(node)
        else:
            self.opens(first, f"{_TAKEN.get(str(name), '__call')} {site} ")

    def options(self, words: Sequence[Node]) -> None:
        """Those of `set` that would print or stop what is told are left out."""
        for place, each in enumerate(words):
            text = _literal(each) or ""
            if not re.fullmatch(r"[-+][A-Za-z]+", text):
                break
            if text[1:] == "o":
                if _literal(words[place + 1] if place + 1 < len(words) else None) in _LEFT_OUT:
                    self.cuts[_at(words[place + 1])] = _to(words[place + 1]), "braceexpand"
                break
            self.replaces(each, text[0] + (re.sub("[xvrnm]", "", text[1:]) or "B"))

    def assignment(self, node: Node) -> None:
        if not node.get("Name"):  # an option, or a word that makes assignments
            if node.get("Value"):
                self.word(node["Value"], _WHOLE if _literal(node["Value"]) else _SPLIT)
            return
        name, value = node["Name"]["Value"], node.get("Value")
        self.rewriter.lines[name] = self.line_of(node)
        if name in self.rewriter.asked and not node.get("Naked"):
            self.replaces(node, f"{name}={quoted(self.rewriter.asked[name])}")
            return
        if name in RENAMED:
            self.opens(node["Name"], "__")
        if node.get("Index"):
            self.arithmetic(node["Index"], index=True)
        for each in _all(node.get("Array") or {}, "Elems"):
            if each.get("Index"):
                self.arithmetic(each["Index"], index=True)
            if each.get("Value"):
                self.word(each["Value"])
        if node.get("Append") and self.is_open(name):
            own = f"$(__own {self.site(node)} {'__' if name in RENAMED else ''}{name} {name})"
            for each in [value] if value else _all(node.get("Array") or {}, "Elems")[:1]:
                self.opens(each, own)
        if value is not None:
            self.value(node, name, value)

    def value(self, node: Node, name: str, value: Node) -> None:
        """What a variable is assigned."""
        parts = _all(value, "Parts")
        if len(parts) == 1 and parts[0]["Type"] == "DblQuoted":
            parts = _all(parts[0], "Parts")
        only = parts[0] if len(parts) == 1 and parts[0]["Type"] == "ParamExp" else None
        if only and _is_plain(only) and self.is_missing(only["Param"]["Value"]):  # it is open by the better name
            mark = "" if name in self.rewriter.known else opening(name)
            self.replaces(value, f"${{{only['Param']['Value']}-{mark}}}")
            return
        kept = any(each.get("Type") == "CmdSubst" or self.differs(each) for each in _nodes(value))
        if kept and not node.get("Append") and not node.get("Index"):
            self.opens(value, "$(__v=")
            self.word(value, _WHOLE)
            self.closes(value, f'; __keep {self.site(node)} {name} "$__v" $?)')
        else:
            self.word(value, _WHOLE)

    def for_each(self, node: Node) -> None:
        loop = node["Loop"]
        if node.get("Select"):
            raise self.unread(node, "`select` waits for somebody who chooses")
        items, asked = _all(loop, "Items"), self.rewriter.asked.get((loop.get("Name") or {}).get("Value", ""))
        if items and asked is not None:
            self.cuts[_at(items[0])] = _to(items[-1]), quoted(asked)
        else:
            for each in items:
                self.word(each, _SPLIT)
        for part in ("Init", "Cond", "Post"):
            if loop.get(part):
                self.arithmetic(loop[part])
        self.statements(node.get("Do"))

    # Tests and numbers

    def test(self, node: Node) -> None:
        """What is in `[[ ]]`."""
        operator = node.get("Op")
        match node["Type"]:
            case "BinaryTest" if operator in _FOR_FILES:
                self.path(node["X"])
                self.path(node["Y"])
            case "BinaryTest":
                self.test(node["X"])
                self.test(node["Y"])
            case "UnaryTest" if operator in ("-z", "-n"):
                self.word(node["X"], _Use(whole=True, decides=True, length=True))
            case "UnaryTest" if operator in ("-v", "-R"):
                name = _literal(node["X"]) or ""
                if self.is_open(name):
                    need = f'$(__need {self.site(node)} "${{{name}+}}${{{name}-{opening(name)}}}")'
                    self.opens(node["X"], need)
            case "UnaryTest" if operator in ("!", "-o", "-t"):
                self.test(node["X"])
            case "UnaryTest":
                self.path(node["X"])
            case "ParenTest" | "TestClause":
                self.test(node["X"])
            case _:
                self.word(node, _DECIDES)

    def path(self, word: Node) -> None:
        """A file's name in a test, seen from the folder in which the script is by then."""
        self.opens(word, '"$(__v=')
        self.word(word, _WHOLE)
        self.closes(word, f'; __abs {self.site(word)} "$__v")"')

    def arithmetic(self, node: Node, *, index: bool = False) -> None:
        """An expression: what is open in it must be known. An index may be a word, of an associative array."""
        words = [*_operands(node)]
        names = dict.fromkeys(name for each in words if (name := _literal(each)) and _NAME.fullmatch(name))
        marks = (opening(name, "") if self.is_open(name) and not index else "" for name in names)
        for each in words:
            self.word(each, _DECIDES)
        if names:
            values = "".join(f"${{{name}-{mark}}}" for name, mark in zip(names, marks, strict=True))
            self.opens(node, f'$(__need {self.site(node)} "{values}")')

    # Words

    def word(self, node: Node, use: _Use = _WORD) -> None:
        parts = _all(node, "Parts")
        if not use.whole and any(each["Type"] == "Lit" and re.search(r"(?<!\\)[*?[]", each["Value"]) for each in parts):
            self.opens(node, f"$(__globbed {self.site(node)})")
            self.rewriter.patterns.add(self.text(node))
        for each in parts:
            self.part(each, use, alone=len(parts) == 1 and not use.whole)

    def part(self, part: Node, use: _Use, *, alone: bool = False) -> None:
        match part["Type"]:
            case "DblQuoted":
                for each in _all(part, "Parts"):
                    self.part(each, use)
            case "ParamExp":
                self.parameter(part, use, alone=alone)
            case "CmdSubst" if part.get("TempFile") or part.get("ReplyVar"):
                raise self.unread(part)
            case "CmdSubst":
                if use.decides:
                    self.opens(part, f'$(__see {self.site(part)} "')
                self.apart(part.get("Stmts"), self.text(part))
                if use.decides:
                    self.closes(part, '")')
            case "ArithmExp" if self.differs(part):
                self.only_when_running(part)
            case "ArithmExp":
                self.arithmetic(part["X"])
            case "ProcSubst" if part["Op"] == "<(":
                self.apart(part.get("Stmts"))
            case "ProcSubst":
                raise self.unread(part)

    def differs(self, node: Node) -> bool:
        """Whether it is another in each run."""
        if node.get("Type") == "ParamExp":
            return node["Param"]["Value"] in _DIFFERENT and not node.get("Length")
        return node.get("Type") == "ArithmExp" and _DIFFERS.search(self.text(node)) is not None

    def only_when_running(self, node: Node) -> None:
        self.rewriter.opened.append((self.line_of(node), self.text(node)))
        self.replaces(node, opening(f"#{len(self.rewriter.opened) - 1}"))

    def is_missing(self, name: str) -> bool:
        """Whether it is an argument that the script was not given."""
        is_one = name.isdecimal() and int(name) > self.rewriter.given and not self.called
        return is_one and f"ARG{name}" not in self.rewriter.known

    def is_open(self, name: str) -> bool:
        """Whether it may be the environment's."""
        ours = name in self.rewriter.known or name in self.rewriter.asked or name in _BASHS or name.startswith("__")
        return self.is_missing(name) or (bool(_NAME.fullmatch(name)) and not ours)

    def parameter(self, node: Node, use: _Use, *, alone: bool) -> None:
        """`$NAME`, and all that stands between `${` and `}`."""
        name, operator = node["Param"]["Value"], (node.get("Exp") or {}).get("Op", "")
        self.rewriter.reads_status |= name in ("?", "PIPESTATUS")
        self.rewriter.uses_arguments |= name in ("@", "*", "#") and not self.called
        if self.differs(node):
            self.only_when_running(node)
            return
        shown = f"__{name}" if name in RENAMED or name == "0" else name
        if shown != name:
            self.replaces(node["Param"], shown if not node.get("Short") else f"{{{shown}}}")
        if node.get("Names"):
            return
        opens, called = self.is_open(name), f"ARG{name}" if name.isdecimal() else name
        mark = opening(called) if self.rewriter.strict or name.isdecimal() else opening(called, "")
        value = "$*" if name in ("@", "*") else f"${{{shown}-{mark if opens else ''}}}"
        if index := node.get("Index"):
            if _literal(index) not in ("@", "*"):
                self.arithmetic(index, index=True)
            value, opens = f"${{{shown}[*]-}}", False
        need = f'$({"__need_length" if use.length else "__need"} {self.site(node)} "{value}")'
        if node.get("Excl") and name != "#" and not index:
            if not _is_plain({**node, "Excl": False}):
                raise self.unread(node)
            self.replaces(node, f'$(__of {self.site(node)} "{value}")')
        elif _is_plain(node) or (index and not use.decides):
            if use.decides and name not in ("#", "?", "-", "_"):
                self.opens(node, need)
            elif opens:
                bare = alone and not self.rewriter.strict and not name.isdecimal()
                self.replaces(node, f"${{{shown}-{START}{called}{BARE}{END}}}" if bare else value)
            elif index:
                self.inside(node)
        elif opens and not use.decides and operator in _DEFAULTS:
            self.default(node, shown, called, use)
        elif opens and operator in _FAILS:
            check = f'$(__void {self.site(node)} "${{{shown}-u}}")' if ":" in operator else ""
            self.replaces(node, f"{check}${{{shown}-{opening(called)}}}")
        else:
            if operator in _INSTEAD:
                tested = value if ":" in operator else f"${{{shown}+}}{value if opens else ''}"
                self.opens(node, f'$(__need_length {self.site(node)} "{tested}")')
            elif operator == "@" and self.text(node).endswith("@P}"):
                raise self.unread(node)
            elif (operator not in (*_DEFAULTS, *_FAILS) or use.decides) and not (node.get("Length") and value == "$*"):
                self.opens(node, need)
            self.inside(node)

    def default(self, node: Node, shown: str, called: str, use: _Use) -> None:
        """`${NAME:-word}`: open, with the word where the environment has nothing."""
        word = node["Exp"].get("Word")
        first, last = f"{START}{called}{DEFAULT}", END
        if ":" in node["Exp"]["Op"]:  # an empty one of the script's own is none of the environment's
            first, last = f"${{{shown}-{first}}}", f"${{{shown}-{last}}}"
        if word is None:
            self.openers.setdefault(_to(node) - 1, []).append(first + last)
            return
        self.opens(word, first)
        for each in _all(word, "Parts"):
            self.part(each, _Use(whole=use.whole))
        self.closes(word, last)

    def inside(self, node: Node) -> None:
        """The words between the braces."""
        expansion, replaced, slice_ = node.get("Exp") or {}, node.get("Repl") or {}, node.get("Slice") or {}
        if expansion.get("Word"):
            is_pattern = expansion["Op"] not in (*_DEFAULTS, *_FAILS, *_INSTEAD)
            self.word(expansion["Word"], _Use(whole=True, decides=is_pattern))
        for each in (replaced.get("Orig"), replaced.get("With")):
            if each:
                self.word(each, _DECIDES)
        for each in (slice_.get("Offset"), slice_.get("Length")):
            if each:
                self.arithmetic(each)
