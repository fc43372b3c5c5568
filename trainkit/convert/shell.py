"""Shell text that starts one program: its words as the shell would make them, and what is around the command."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from trainkit.errors import UsageError

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_ASSIGNMENT = re.compile(rf"({_NAME})=(.*)", re.DOTALL)
_EXPANSION = re.compile(rf"\$(?:({_NAME})|\{{({_NAME})(?:(:?[-?])([^}}]*))?\}})")
_ARGUMENT = re.compile(r"\$(?:([1-9])|\{([1-9])\})")
_ALL = re.compile(r"\$[@*]|\"\$@\"")
_LONE_DOLLAR = re.compile(r"\$(?=[ \t\n\"'/=,.])")
_ESCAPED = re.compile(r'\\([$`"\\\n])')  # within double quotes
_BLANK = re.compile(r"(?:[ \t]|\\\n)+")
_COMMENT = re.compile(r"#[^\n]*")
_REDIRECTION = re.compile(r"\d*(?:&>>?|[<>]{1,3}(?:&\d*-?)?)")
_SEPARATOR = re.compile(r"&&|\|\|?&?|;;?|&|\n")
# Words that prepare something and start no training; they are named.
_AROUND = frozenset({
    "set", "echo", "mkdir", "source", ".", "conda", "mamba", "module", "ulimit", "date", "hostname", "nvidia-smi",
    "pwd", "which", "sleep", "wait", "exit", "unset", "trap", "true", "umask", "printf", "touch", "rm", "cp", "ln",
    "ls", "pip", "df", "free",
})  # fmt: skip
_SILENT = ("set", "true", "wait", "exit")  # which concern no program
_FOLDERS = ("cd", "pushd", "popd")
_CONTROL = frozenset({
    "if", "then", "else", "elif", "fi", "for", "while", "until", "do", "done", "case", "esac", "function", "select",
    "{", "}", "[", "[[", "!",
})  # fmt: skip
# What differs on each machine, and is given to it when it is started.
_RANKS = frozenset({"NODE_RANK", "MACHINE_RANK", "SLURM_NODEID", "SLURM_PROCID", "RANK", "GROUP_RANK"})
_PLAIN = "give the command itself, without quotes around the whole, so that your shell fills it in"


@dataclass
class _Reader:
    """The text, and what has been read of it. given: the script's own arguments.

    known: variables with a value; exported: those that the command gets.
    """

    text: str
    path: str
    given: tuple[str, ...] = ()
    place: int = 0
    known: dict[str, str] = field(default_factory=dict)
    exported: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    found: list[list[str]] = field(default_factory=list)

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """What follows of this form, which is then read."""
        if match := pattern.match(self.text, self.place):
            self.place = match.end()
        return match

    def fail(self, what: str, hint: str) -> UsageError:
        """The error that something cannot be known without the shell."""
        return UsageError(f"{self.path}: {what}" if self.path else f"the command cannot be read: {what}", hint=hint)

    def note(self, text: str) -> None:
        """Keep a remark, once."""
        if text not in self.remarks:
            self.remarks.append(text)


def read_shell(text: str, path: str = "", given: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """The words of the one command, exported variables in front, and remarks on what is left out.

    path: of the file that holds the text. given: the arguments that it is called with. Raises UsageError where there
    is no command, or more than one, or where a word is not known without running the text.
    """
    # Two ends of line: a backslash at the end of the text takes the first.
    reader = _Reader(text.replace("\r\n", "\n") + "\n\n", path, tuple(given))
    for words in _commands(reader):
        _take(reader, words)
    if len(reader.found) != 1:
        names = ", ".join(words[0] for words in reader.found[:4])
        shown = f" ({names})" if names else ""
        raise reader.fail(f"it holds {len(reader.found)} commands{shown}, not one", "give the command itself")
    assigned = {match[1] for word in reader.found[0] if (match := _ASSIGNMENT.fullmatch(word))}
    front = [f"{name}={value}" for name, value in reader.exported.items() if name not in assigned]
    return [*front, *reader.found[0]], reader.remarks


def _take(reader: _Reader, words: list[str]) -> None:
    """One command: an assignment, something around the program, or the program."""
    name = words[0]
    matches = [_ASSIGNMENT.fullmatch(word) for word in (words[1:] if name == "export" else words)]
    if name == "export" or all(matches):
        pairs = {match[1]: match[2] for match in matches if match}
        reader.known |= pairs
        if name == "export":
            reader.exported |= pairs | {word: reader.known[word] for word in words[1:] if word in reader.known}
    elif name in _CONTROL:
        raise reader.fail(f"`{name}` is more than a plain command", "give the command itself")
    elif name in _FOLDERS:
        hint = f"go there yourself (`{' '.join(words)}`), and import the command that follows"
        raise reader.fail(f"`{' '.join(words)}` changes the folder that paths start from", hint)
    elif name in _AROUND and name not in _SILENT:
        where = "after" if reader.found else "before"
        reader.note(f"`{' '.join(words)[:100]}` {where} the command is not taken over.")
    elif name not in _SILENT:
        reader.found.append(words)


def _commands(reader: _Reader) -> Iterator[list[str]]:
    """The words of each simple command; redirections, and what it is piped into, are named and left out."""
    words: list[str] = []
    piped = False
    while reader.place < len(reader.text):
        if reader.take(_BLANK):
            continue
        if match := reader.take(_COMMENT):
            if match[0].startswith("#SBATCH"):
                reader.note("#SBATCH lines are not read: see cluster, nodes and devices.select in the recipe.")
        elif match := reader.take(_REDIRECTION):
            target = "" if "&" in match[0][1:] else " ".join(_word(reader))
            reader.note(f"`{match[0]}{target}` is not taken over: each rank's output is kept in the run folder.")
        elif match := reader.take(_SEPARATOR):
            if words and piped:
                said = f"`| {' '.join(words)[:100]}` is not taken over"
                reader.note(f"{said}: each rank's output is kept in the run folder.")
            elif words:
                yield words
            if match[0] == "&":
                reader.note("`&` is not taken over: trainkit run stays in front until the run ends.")
            words, piped = [], match[0] in ("|", "|&")
        else:
            words += _word(reader)


def _word(reader: _Reader) -> list[str]:
    """The next word; several, or none, where a variable without quotes holds several, or none."""
    reader.take(_BLANK)
    fields, open_ = [""], False  # open_: whether the last field is a word even when it is empty
    while (letter := reader.text[reader.place]) not in " \t\n;&|<>":
        if reader.take(_ALL):  # word for word, the first behind what is in front of them
            if not reader.given:
                reader.note("$@ is empty here: put the script's arguments behind `--` after its name.")
            first, *others = reader.given or ("",)
            fields[-1:] = [fields[-1] + first, *others]
        elif letter in "'\"":
            fields[-1] += _quoted(reader, letter)
            open_ = True
        elif letter == "$":
            first, *others = re.split(r"\s+", _expanded(reader))
            fields[-1:] = [fields[-1] + first, *others]
        elif letter in "()`":
            raise reader.fail(f"`{letter}` runs another command", _PLAIN)
        elif letter in "*?":
            raise reader.fail(f"{letter} stands for names of files that only the shell knows", f"quote it, or {_PLAIN}")
        elif letter == "~" and fields == [""] and not open_:
            raise reader.fail("~ stands for your home folder", f"write the folder, or {_PLAIN}")
        else:
            reader.place += 1
            if letter == "\\":  # the letter behind it as it is, or the next line
                letter = reader.text[reader.place].strip("\n")
                reader.place += 1
            fields[-1] += letter
    return [word for word in fields[:-1] if word] + [word for word in fields[-1:] if word or open_]


def _quoted(reader: _Reader, quote: str) -> str:
    """The text between quotes; within double ones variables have their values."""
    reader.place += 1
    made = ""
    while reader.place < len(reader.text):
        letter = reader.text[reader.place]
        if letter == quote:
            reader.place += 1
            return made
        if quote == '"' and letter == "$":
            made += _expanded(reader)
        elif quote == '"' and letter == "`":
            raise reader.fail("` runs another command", _PLAIN)
        elif quote == '"' and (match := reader.take(_ESCAPED)):
            made += match[1].strip("\n")
        else:
            made += letter
            reader.place += 1
    raise reader.fail("a quote has no end", "check its quotes")


def _expanded(reader: _Reader) -> str:
    """The value of the variable that begins here."""
    if match := reader.take(_ARGUMENT):
        number = int(match[1] or match[2])
        if number > len(reader.given):
            hint = f"call it with its arguments: trainkit import {reader.path} -- …"
            raise reader.fail(f"{match[0]} is argument {number} of the script, and it has {len(reader.given)}", hint)
        return reader.given[number - 1]
    if reader.take(_LONE_DOLLAR):
        return "$"
    match = reader.take(_EXPANSION)
    if match is None:
        what = f"{reader.text[reader.place : reader.place + 2]} is known only where the shell runs"
        raise reader.fail(what, _PLAIN)
    name, how, other = match[1] or match[2], match[3] or "", match[4] or ""
    if reader.known.get(name) or (name in reader.known and not how.startswith(":")):
        return reader.known[name]
    if how.endswith("-") and "$" not in other:
        return other
    if name in _RANKS:
        reader.note(f"${name} is not taken over: the rank of each machine is given to trainkit run --node-rank.")
        return "0"
    raise reader.fail(f"${name} has a value only where the shell runs", f"write its value, or {_PLAIN}")
