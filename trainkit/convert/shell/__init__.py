"""Shell scripts and lines: what they start, its words, and what is around it. Bash itself reads them."""

from __future__ import annotations

import contextlib
import json
import posixpath
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from trainkit.convert.shell.evaluating import COUNTS_GPUS, PREPARES, EvaluatedScript, Script, Step, evaluate
from trainkit.convert.shell.rewriting import END, RANKS, START, WHOLE, UnreadError, is_open, names_in
from trainkit.errors import UsageError
from trainkit.tools.base.imported_recipe import ImportedRecipe, argv_origin

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


@dataclass
class OpenParts:
    """What the commands in a command's words would have printed. parts: line and text, by the number in the mark."""

    parts: dict[int, tuple[int, str]] = field(default_factory=dict)

    def readable(self, text: str) -> str:
        """A text with each of them as it was written."""
        return re.sub(f"{START}#(\\d+){END}", lambda match: self.parts[int(match[1])][1], text)


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


def read_shell(script: Script, at_line: int | None = None) -> ShellCommand:
    """The command that a script runs. Raises UsageError where there is none, or more than one that are no variants.

    at_line: of the command, where there are several.
    """
    if not (script.path or _NOT_PLAIN.search(script.text)):
        with contextlib.suppress(ValueError):  # a quote that is not closed: Bash's affair
            if script.is_program(words := shlex.split(script.text)):
                return ShellCommand(words, "", OpenParts(), [])
    place = f"{script.path}: " if script.path else ""
    if "\0" in script.text:
        raise UsageError(f"{place}it has a NUL byte, so it is not text", hint="save it as UTF-8 text")
    if is_open(script.text):
        raise UsageError(f"{place}private letters of Unicode are in it", hint="leave them out")
    if len(script.text) > MOST:
        what = f"{place}it has more than {MOST:,} characters"
        raise UsageError(what, hint="name a script that starts the program alone")
    text = re.sub(r"\\\s*\Z", "", script.text.replace("\r\n", "\n"))  # a line that goes on at the end: with nothing
    script = replace(script, text=text)
    try:
        found = evaluate(script)
    except UnreadError as error:
        lines = text.splitlines()
        if template := _PLACEHOLDER.search(lines[error.line - 1] if 0 < error.line <= len(lines) else ""):
            what = f"{place}{template[0]} is to be replaced"
            raise UsageError(what, hint="write what it is for, without < and >") from None
        at = f"line {error.line}: " if script.path and error.line else ""
        at = at or ("the command " if error.what.startswith("cannot") and not script.path else "")
        raise UsageError(f"{place}{at}{error.what}", hint=error.hint or "check quotes and brackets there") from None
    return _Reading(script, found, at_line).command()


class _Reading:
    """From what Bash would have started to the command that is imported."""

    def __init__(self, script: Script, found: EvaluatedScript, at_line: int | None) -> None:
        self.script, self.found, self.at_line = script, found, at_line
        self.opened = OpenParts(dict(enumerate(found.text.opened)))
        self.remarks: dict[str, None] = {}
        self.place = f"{script.path}: " if script.path else ""

    def command(self) -> ShellCommand:
        chosen, *more = self.chosen()
        self.say_what_is_around(chosen)
        # What only the job knows is set in the job.
        late = {name for name, value in chosen.exported if self.script.is_job and is_open(value)}
        words, *others = [self.settled(each, late) for each in (chosen, *more)]
        used = {int(name[1:]) for word in sum(others, words) for name in names_in(word) if name.startswith("#")}
        self.opened.parts = {number: each for number, each in self.opened.parts.items() if number in used}
        folder = "" if chosen.folder == "." else chosen.folder
        several = self.several([chosen, *more]) if more else None
        setup = tuple(self.setup(chosen, late)) if self.script.is_job else ()
        return ShellCommand(words, folder, self.opened, [*self.remarks], setup, tuple(others), several)

    def chosen(self) -> list[Step]:
        """The command to import: the only one, or the only one of a launcher; or several that may be its variants."""
        found = [each for each in self.found.started if self.at_line is None or each.line == self.at_line]
        distinct = list({each.what: each for each in found}.values())
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
        if unset := sorted(name for name, value in self.found.known.items() if value is None):
            hint = f"nothing sets {', '.join(unset)}: give --set {unset[0]}=VALUE"
        elif self.script.path and not self.script.given:
            hint = f"give what it is called with: trainkit import {self.script.path} -- ARGUMENTS, or --set NAME=VALUE"
        raise UsageError(f"{self.place}it starts no program{at} that can be imported", hint=hint)

    def several(self, chosen: Sequence[Step]) -> UsageError:
        """That these are too many."""
        listed = "; ".join(f"line {each.line}: {self.shown(each)}" for each in chosen[:6])
        hint = "choose one with --line NUMBER, or give the command itself"
        if len({each.line for each in chosen}) < len(chosen):
            hint = "it is in a loop: choose a turn with --set NAME=VALUE, or give the command itself"
        return UsageError(f"{self.place}it starts {len(chosen)} programs ({listed})", hint=hint)

    def shown(self, started: Step) -> str:
        return self.opened.readable(" ".join(map(_referring, started.words)))[:80]

    def note(self, remark: str) -> None:
        self.remarks[remark] = None

    def say_what_is_around(self, chosen: Step) -> None:
        script, found = self.script, self.found
        if path := _BACKSLASHES.search(chosen.text):
            what = f"{path[0]} is a path as Windows writes it, and Bash takes the backslashes out"
            raise UsageError(what, hint=f"write {path[0].replace(chr(92), '/')}")
        self.remarks |= found.remarks
        turn = found.steps.index(chosen)
        for place, step in enumerate(found.steps):
            name = step.words[0].rpartition("/")[2] if step.words else ""
            prepares = script.is_job and (not step.words or (name in PREPARES and place < turn))
            if step.starts or prepares or name in _QUIET:
                continue
            said = " ".join(map(_referring, step.words)) or step.text
            said = f"`{self.opened.readable(f'| {said}' if name == 'tee' else said)[:100]}`"
            where = "" if name == "tee" else " before the command" if place < turn else " after the command"
            self.note(f"{said}{where} is not taken over.")
        for pattern in sorted(found.text.patterns):
            if pattern in chosen.words:
                self.note(f"{pattern} is taken as it is written: no file here is called like it.")
            elif pattern in chosen.text:
                self.note(f"{pattern} is taken for the files that are here now.")
        if not script.is_job and re.search(r"^#SBATCH", script.text, re.MULTILINE):
            self.note("#SBATCH lines below the first command are not read, as sbatch reads none there.")
        for name, value in found.known.items():
            is_ = "as it is set here" if value is not None else "as it is here: not set, and so empty"
            shown = f"argument {name[3:]}" if re.fullmatch(r"ARG\d+", name) else name
            self.note(f"{shown} is taken {is_}; --set {name}=VALUE gives another.")
        for name in sorted(found.text.removed & script.environ.keys() - {name for name, _ in chosen.exported}):
            self.note(f"`unset {name}` is not taken over: unset it before the run.")
        if not script.given and script.path and found.text.uses_arguments:
            self.note("$@ is empty here: put the script's arguments behind `--` after its name.")

    def setup(self, chosen: Step, late: set[str]) -> list[str]:
        """Lines that prepare a job, in order, as a shell reads them."""
        before, text = self.found.steps[: self.found.steps.index(chosen)], self.found.text
        lines = [
            (each.line, " ".join(map(_as_shell, each.words)))
            for each in before
            if each.words[:1] and each.words[0] in PREPARES
        ]
        lines += [(each.line, each.text) for each in before if not each.words]
        for name, value in chosen.exported:
            if name in late:
                lines.append((text.lines.get(name, 0), f"export {name}={text.kept.get(name) or _as_shell(value)}"))
        return [text for _, text in sorted(lines, key=lambda each: each[0])]

    def settled(self, started: Step, late: set[str]) -> list[str]:
        """The words of a command with all that is in front of it, as a recipe has them."""
        assigned = {word.partition("=")[0] for word in started.words if "=" in word} | late
        front = [f"{name}={value}" for name, value in started.exported if name not in assigned]
        words = [*front, *started.front, *started.words]
        folder = self.found.started[0].folder
        here, back = self.script.here.rstrip("/"), posixpath.relpath(".", folder) if folder != "." else "."
        made = list[str]()
        for before, word in zip(("", *words), words, strict=False):
            text = word
            if _PROCESSES.match(word) or (_PROCESSES.fullmatch(before) and is_open(word[:1])):
                for name in names_in(word):
                    if name.startswith("#") and COUNTS_GPUS.search(self.opened.parts[int(name[1:])][1]):
                        text = text.replace(f"{START}{name}{END}", "gpu")  # as torchrun calls as many as there are
            text = _referring(text, self.settle)
            made.append(re.sub(rf"(?<![\w/.-]){re.escape(here)}(?![\w.-])", back, text) if here else text)
        return made

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


def _is_python(started: Step) -> bool:
    names = started.words[:3]
    return any(name.rpartition("/")[2].startswith("python") for name in names) and "torch.distributed" not in str(names)


def name_what_is_open(draft: ImportedRecipe, opened: OpenParts) -> None:
    """Note an error for each setting that holds what only a running shell knows; elsewhere it was of no account."""
    for key, each in [*draft.settings.items()]:
        if isinstance(each.value, str) and not key.startswith(("env.", "program.args")):
            # A setting that is nothing but a variable needs a value; one that has it in the midst does not.
            whole = _NO_DEFAULT.fullmatch(each.value)
            draft.settings[key] = replace(each, value=_NO_DEFAULT.sub(r"\1}" if whole else r"\1,''}", each.value))
        for name in names_in(json.dumps(each.value, ensure_ascii=False)):
            if name.startswith("#"):
                line, text = opened.parts[int(name[1:])]
                what = f"{key} is made of {text[:100]}, which only a running shell knows (line {line})"
                draft.fail(what, argv_origin(text), "put what it comes to in its place")
    for place, problem in enumerate(draft.problems):
        origin = problem.origin
        if origin:
            shown = opened.readable(origin.text)
            source = opened.readable(origin.source)
            origin = replace(origin, source=source, text=shown, length=max(len(shown), 1))
        draft.problems[place] = replace(problem, what=opened.readable(problem.what), origin=origin)
    draft.remarks = [opened.readable(each) for each in draft.remarks]
    draft.title = opened.readable(draft.title)
