"""Shell scripts and lines: what they start, its words, and what is around it. Bash itself reads them."""

from __future__ import annotations

import contextlib
import json
import posixpath
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from trainkit.convert.shell.evaluating import CARDS, PREPARES, Found, Script, Started, evaluate
from trainkit.convert.shell.rewriting import END, RANKS, START, WHOLE, UnreadError, is_open, names_in
from trainkit.errors import Origin, UsageError
from trainkit.tools.base.draft import Draft, argv_origin

MOST = 1 << 18  # characters of a script
_PLACEHOLDER = re.compile(r"(?<!<)<[^\W\d_](?:[^<>\n]*[^<>\s])?>")  # which Bash takes for two redirections
_BACKSLASHES = re.compile(r"(?<![\w\\])[\w.]+(?:\\[\w.]+)+\.py\b")
_NO_DEFAULT = re.compile(r"(\$\{oc\.env:\w+),\}")
_PROCESSES = re.compile(r"--nproc[-_]per[-_]node(=|$)")
_NOT_PLAIN = re.compile(r"[$`\\;&|<>(){}*?\[~#!\n\0]")
_ESCAPED = re.compile(r'["\\$`]')
_QUIET = frozenset(
    ["echo", "printf", "date", "hostname", "ls", "nvidia-smi", "sleep", "true", "false", ":", "trap", "wait"]
)


@dataclass(frozen=True, slots=True)
class Open:
    """What a command would have printed. text: as it is written; line: from 1."""

    text: str
    line: int


@dataclass
class OpenParts:
    """What is open in the words of a command, so that it can be named where a setting is made of it."""

    parts: dict[int, Open] = field(default_factory=dict)  # by the number in the mark

    def within(self, text: str) -> list[Open]:
        """What is open in a text."""
        return [self.parts[int(name[1:])] for name in names_in(text) if name.startswith("#")]

    def readable(self, text: str) -> str:
        """A text with each of them as it was written."""
        return re.sub(f"{START}#(\\d+){END}", lambda match: self.parts[int(match[1])].text, text)


@dataclass(frozen=True, slots=True)
class ShellCommand:
    """words: assignments, exported ones too, in front of the command's own. folder: in which it runs, "" for here.

    opened: what in the words is not known. remarks: on what is left out. setup: lines of a job in front of the command,
    as a shell reads them. more: the words of further commands, which may be variants of the first; else they are what
    `several` says.
    """

    words: list[str]
    folder: str
    opened: OpenParts
    remarks: list[str]
    setup: tuple[str, ...] = ()
    more: tuple[list[str], ...] = ()
    several: UsageError | None = None


@dataclass(frozen=True, slots=True)
class Around:
    """Where a text would run. here: absolute folder; environ: the caller's variables; is_folder: of absolute paths."""

    here: str = "/"
    environ: Mapping[str, str] = field(default_factory=dict)
    is_folder: Callable[[str], bool] = posixpath.isabs


def read_shell(
    text: str,
    starts: Callable[[Sequence[str]], bool],
    *,
    path: str = "",
    given: Sequence[str] = (),
    asked: Mapping[str, str] | None = None,
    at_line: int | None = None,
    is_job: bool = False,
    around: Around | None = None,
) -> ShellCommand:
    """The command that a text runs. Raises UsageError where there is none, or more than one.

    starts: whether words are a command that can be imported. path: of the file that holds the text. given: arguments
    that it is called with. asked: variables that the caller sets. at_line: of the command, where there are several.
    is_job: whether it runs in a job, whose modules and variables are set there.
    """
    where = around or Around()
    if not (path or _NOT_PLAIN.search(text)):
        with contextlib.suppress(ValueError):  # a quote that is not closed: Bash's affair
            if starts(words := shlex.split(text)):
                return ShellCommand(words, "", OpenParts(), [])
    script = Script(
        text.replace("\r\n", "\n"), path, tuple(given), dict(asked or {}), where.here, where.environ, starts,
        where.is_folder, is_job,
    )  # fmt: skip
    _refuse_what_is_none(script)
    try:
        found = evaluate(script)
    except UnreadError as error:
        raise _said(script, error) from None
    return _Reading(script, found, at_line).command()


def _refuse_what_is_none(script: Script) -> None:
    place = f"{script.path}: " if script.path else ""
    if "\0" in script.text:
        raise UsageError(f"{place}a NUL byte is in it, so it is no text", hint="save it as UTF-8 text")
    if is_open(script.text):
        raise UsageError(f"{place}private letters of Unicode are in it", hint="leave them out")
    if len(script.text) > MOST:
        what = f"{place}it has more than {MOST:,} characters"
        raise UsageError(what, hint="name a script that starts the program alone")
    script.text = re.sub(r"\\\s*\Z", "", script.text)  # a line that goes on, at the end, goes on with nothing


def _said(script: Script, error: UnreadError) -> UsageError:
    place = f"{script.path}: " if script.path else ""
    lines = script.text.splitlines()
    if found := _PLACEHOLDER.search(lines[error.line - 1] if 0 < error.line <= len(lines) else ""):
        return UsageError(f"{place}{found[0]} is to be replaced", hint="write what it is for, without < and >")
    at = "" if not script.path else f"line {error.line}: " if error.line else ""
    at = at or ("the command " if error.what.startswith("cannot") else "")
    return UsageError(f"{place}{at}{error.what}", hint=error.hint or "check quotes and brackets there")


class _Reading:
    """From what Bash would have started to the command that is imported."""

    def __init__(self, script: Script, found: Found, at_line: int | None) -> None:
        self.script, self.found, self.at_line = script, found, at_line
        self.opened = OpenParts({number: Open(text, line) for number, (line, text) in enumerate(found.text.opened)})
        self.remarks: dict[str, None] = {}
        self.place = f"{script.path}: " if script.path else ""

    def command(self) -> ShellCommand:
        chosen, *more = self.chosen()
        self.say_what_is_around(chosen)
        # What only the job knows is set in the job.
        late = {name for name, value in chosen.exported if self.script.is_job and is_open(value)}
        words, *others = [self.settled(self.words(each, late)) for each in (chosen, *more)]
        used = {int(name[1:]) for word in sum(others, words) for name in names_in(word) if name.startswith("#")}
        self.opened.parts = {number: each for number, each in self.opened.parts.items() if number in used}
        folder = "" if chosen.folder == "." else chosen.folder
        return ShellCommand(
            words, folder, self.opened, [*self.remarks], tuple(self.setup(chosen, late)), tuple(others),
            self.several([chosen, *more]) if more else None,
        )  # fmt: skip

    def words(self, started: Started, late: set[str]) -> list[str]:
        """The words of a command with all that is in front of it."""
        assigned = {word.partition("=")[0] for word in started.words if "=" in word} | late
        front = [f"{name}={value}" for name, value in started.exported if name not in assigned]
        return [*front, *started.front, *started.words]

    def chosen(self) -> list[Started]:
        """The command to import: the only one, or the only one of a launcher; or several that may be its variants."""
        found = [each for each in self.found.started if self.at_line is None or each.line == self.at_line]
        distinct = list({(each.words, each.exported, each.folder): each for each in found}.values())
        launchers = [each for each in distinct if not _is_python(each)]
        chosen = launchers if len(launchers) == 1 else distinct
        if len({each.folder for each in chosen}) > 1:
            raise self.several(chosen)
        if chosen:
            for each in distinct:
                if each not in chosen:
                    self.note(f"`{self.shown(each)}` (line {each.line}) is not taken over.")
            return chosen
        at = f" on line {self.at_line}" if self.at_line else ""
        hint = "give the command itself"
        if unset := [name for name in sorted(self.found.needed) if self.script.known.get(name) is None]:
            hint = f"nothing sets {', '.join(unset)}: give --set {unset[0]}=VALUE"
        elif self.script.path and not self.script.given:
            hint = f"give what it is called with: trainkit import {self.script.path} -- ARGUMENTS, or --set NAME=VALUE"
        raise UsageError(f"{self.place}it starts no program{at} that can be imported", hint=hint)

    def several(self, chosen: Sequence[Started]) -> UsageError:
        """That these are too many."""
        listed = "; ".join(f"line {each.line}: {self.shown(each)}" for each in chosen[:6])
        hint = "choose one with --line NUMBER, or give the command itself"
        if len({each.line for each in chosen}) < len(chosen):
            hint = "it is in a loop: choose a turn with --set NAME=VALUE, or give the command itself"
        return UsageError(f"{self.place}it starts {len(chosen)} programs ({listed})", hint=hint)

    def shown(self, started: Started) -> str:
        return self.opened.readable(" ".join(map(_referring, started.words)))[:80]

    def note(self, remark: str) -> None:
        self.remarks[remark] = None

    def say_what_is_around(self, chosen: Started) -> None:
        script, found = self.script, self.found
        if path := _BACKSLASHES.search(chosen.text):
            what = f"{path[0]} is a path as Windows writes it, and Bash takes the backslashes out"
            raise UsageError(what, hint=f"write {path[0].replace(chr(92), '/')}")
        for remark in found.remarks:
            self.note(remark)
        turn = found.started.index(chosen)
        around = [(place, text) for place, text in found.unread if not script.is_job]
        for place, words in found.other:
            name = words[0].rpartition("/")[2]
            if not (name in _QUIET or (script.is_job and name in PREPARES and place.started <= turn)):
                said = " ".join(map(_referring, words))
                around.append((place, f"| {said}" if name == "tee" else said))
        for place, said in around:
            where = (
                ""
                if said.startswith("| ")
                else " before the command"
                if place.started <= turn
                else " after the command"
            )
            self.note(f"`{self.opened.readable(said)[:100]}`{where} is not taken over.")
        for pattern in sorted(found.text.patterns):
            if pattern in chosen.words:
                self.note(f"{pattern} is taken as it is written: no file here is called like it.")
            elif pattern in chosen.text:
                self.note(f"{pattern} is taken for the files that are here now.")
        if not script.is_job and re.search(r"^#SBATCH", script.text, re.MULTILINE):
            self.note("#SBATCH lines below the first command are not read, as sbatch reads none there.")
        for name, value in script.known.items():
            if name in found.needed:
                is_ = "as it is set here" if value is not None else "as it is here: not set, and so empty"
                shown = f"argument {name[3:]}" if re.fullmatch(r"ARG\d+", name) else name
                self.note(f"{shown} is taken {is_}; --set {name}=VALUE gives another.")
        for name in sorted(found.text.removed & script.environ.keys() - {name for name, _ in chosen.exported}):
            self.note(f"`unset {name}` is not taken over: unset it before the run.")
        if not script.given and script.path and found.text.uses_arguments:
            self.note("$@ is empty here: put the script's arguments behind `--` after its name.")

    def setup(self, chosen: Started, late: set[str]) -> list[str]:
        """Lines that prepare a job, in order, as a shell reads them."""
        if not self.script.is_job:
            return []
        turn = self.found.started.index(chosen)
        lines = [(place.line, " ".join(map(_as_shell, words))) for place, words in self.found.other
                 if words[0] in PREPARES and place.started <= turn]  # fmt: skip
        lines += [(place.line, text) for place, text in self.found.unread if place.started <= turn]
        for name, value in chosen.exported:
            if name in late:
                written = self.found.text.kept.get(name) or _as_shell(value)
                lines.append((self.found.text.lines.get(name, 0), f"export {name}={written}"))
        return [text for _, text in sorted(lines, key=lambda each: each[0])]

    def settled(self, words: Sequence[str]) -> list[str]:
        """Words as a recipe has them."""
        folder = self.found.started[0].folder
        here, back = self.script.here.rstrip("/"), posixpath.relpath(".", folder) if folder != "." else "."
        made = list[str]()
        for before, word in zip(("", *words), words, strict=False):
            text = word
            if _PROCESSES.match(word) or (_PROCESSES.fullmatch(before) and is_open(word[:1])):
                for name in filter(self.counts_cards, names_in(word)):
                    text = text.replace(f"{START}{name}{END}", "gpu")  # as torchrun calls as many as there are
            text = _referring(text, self.settle)
            made.append(re.sub(rf"(?<![\w/.-]){re.escape(here)}(?![\w.-])", back, text) if here else text)
        return made

    def counts_cards(self, name: str) -> bool:
        """Whether what is open is how many cards there are."""
        return name.startswith("#") and CARDS.search(self.opened.parts[int(name[1:])].text) is not None

    def settle(self, name: str) -> str | None:
        if name in RANKS:
            self.note(f"${name} is not taken over: the rank of each machine is given to trainkit run --node-rank.")
            return "0"
        return None


def _referring(word: str, settle: Callable[[str], str | None] = lambda name: None) -> str:
    """A word with references to variables as a recipe has them; what is printed stays a mark."""

    def reference(match: re.Match[str]) -> str:
        name, default = match[1], match[2]
        if name.startswith("#"):
            return match[0]
        if (known := settle(name)) is not None:
            return known
        return f"${{oc.env:{name}}}" if default is None else f"${{oc.env:{name},{default}}}"

    return WHOLE.sub(reference, word)


def _as_shell(word: str) -> str:
    """A word as shell text again."""
    if not is_open(word):
        return shlex.quote(word)

    def reference(match: re.Match[str]) -> str:
        return f"${{{match[1]}:-{match[2]}}}" if match[2] else f"${{{match[1]}}}"

    return '"' + WHOLE.sub(reference, _ESCAPED.sub(r"\\\g<0>", word)) + '"'


def _is_python(started: Started) -> bool:
    names = started.words[:3]
    return any(name.rpartition("/")[2].startswith("python") for name in names) and "torch.distributed" not in str(names)


def name_what_is_open(draft: Draft, opened: OpenParts) -> None:
    """Note an error for each setting that holds what only a running shell knows; elsewhere it was of no account."""
    for key, each in [*draft.settings.items()]:
        if isinstance(each.value, str) and not key.startswith(("env.", "program.args")):
            # A setting that is nothing but a variable needs a value; one that has it in the midst does not.
            whole = _NO_DEFAULT.fullmatch(each.value)
            draft.settings[key] = replace(each, value=_NO_DEFAULT.sub(r"\1}" if whole else r"\1,''}", each.value))
        for part in opened.within(json.dumps(each.value, ensure_ascii=False)):
            what = f"{key} is made of {part.text[:100]}, which only a running shell knows (line {part.line})"
            draft.fail(what, argv_origin(part.text), "put what it comes to in its place")
    draft.problems = [
        replace(each, what=opened.readable(each.what), origin=each.origin and _readable(each.origin, opened))
        for each in draft.problems
    ]
    draft.remarks = [opened.readable(each) for each in draft.remarks]
    draft.title = opened.readable(draft.title)


def _readable(origin: Origin, opened: OpenParts) -> Origin:
    shown = opened.readable(origin.text)
    return replace(origin, source=opened.readable(origin.source), text=shown, length=max(len(shown), 1))
