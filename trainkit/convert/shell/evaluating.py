"""What a shell script starts: Bash itself runs it, rewritten so that every program is told to trainkit and not started.

Harmless text tools alone run, with options that are known to write and start nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import posixpath
import re
import resource
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

from trainkit.convert.shell.rewriting import (
    BARE,
    BROKEN,
    DEFAULT,
    EMPTIES,
    EMPTY,
    END,
    RENAMED,
    START,
    ExitCode,
    Rewriter,
    Site,
    UnreadError,
    is_never_empty,
    is_open,
    names_in,
    opening,
    quoted,
)

SECONDS, MOST_ANSWERS, MOST_BYTES, MOST_ROUNDS, MOST_FILE = 10.0, 20_000, 4 << 20, 30, 1 << 18
CPU_SECONDS, MEMORY = 3, 512 << 20
HIGH = 100  # descriptors of ours, above those that scripts use
# What prepares the environment in which a job's command runs.
PREPARES = frozenset({
    "module", "ml", "conda", "mamba", "micromamba", "pyenv", "spack", "ulimit", "umask", "mkdir", "workon", "uenv",
    "load",
})  # fmt: skip
# Commands whose output nobody reads.
SILENT = PREPARES | frozenset({
    "rmdir", "rm", "mv", "cp", "ln", "touch", "chmod", "chown", "pip", "pip3", "apt", "apt-get", "sudo", "trap", "hash",
    "alias", "unalias", "sleep", "sync", "tee", "disown", "jobs", "bg", "fg", "times", "clear", "reset", "stty",
    "install", "git", "tar", "unzip", "gzip", "kill", "pkill",
})  # fmt: skip
COUNTS_GPUS = re.compile(r"nvidia-smi\b.*\|\s*(wc -l|grep -c)|torch\.cuda\.device_count\(\)", re.DOTALL)
_STARTERS = frozenset({"srun", "nohup", "env", "setsid", "stdbuf", "nice"})
_SHELLS_OWN = frozenset({"PWD", "OLDPWD", "SHLVL", "TERM", "_"})
_LATER = frozenset({"xargs", "find", "parallel", "trap"})
_LOGINS = frozenset({"activate", "conda.sh", ".bashrc", ".bash_profile", ".profile"})
_NO_NUMBER = re.compile(r"syntax error|value too great|division by 0|invalid arithmetic", re.IGNORECASE)
_NO_MEMORY = re.compile(r"maximum function nesting|annot allocate|failed to allocate")
_SEVERAL = re.compile(r"[\s*?\[]")
_NAME = re.compile(r"[A-Za-z_]\w*")
_NESTED = re.compile(f"{DEFAULT}[^{END}]*[{{}}{DEFAULT}{START}]")  # a default within a default, or with braces
# What changes no file that it names; what makes or removes each; and what writes the last alone.
_READERS = PREPARES | {"ls", "du", "df", "stat", "file", "diff", "cmp", "md5sum", "sha256sum", "less", "nvidia-smi",
                       "sleep", "date", "hostname", "kill", "trap", "wait", "pip", "pip3"}  # fmt: skip
_WRITERS = frozenset({"rm", "rmdir", "mv", "sed", "sort", "perl", "truncate", "patch", "tar", "unzip"})
_COPIERS = frozenset({"cp", "ln", "install", "rsync"})
_OF_PATTERNS = re.compile(r"(\$\{[^}]*\}|\$\(.*\)|\$\w+|\*|\?|\[[^]]*\])")
_ENDLESS = "it does not end, or comes to more than is read"
_REFUSED = {
    "typed": "`{}` waits for somebody who types",
    "deep": "it calls itself, or is nested too deeply",
    "glob": "`{}` is found in another folder than where the script starts",
    "void": "`{}` is not set",
    "indirect": "`{}` is not read",
}
Answer = tuple[object, str]  # exit code, text


@dataclass(frozen=True, slots=True)
class Script:
    """A text to read, and where it would run. is_program: whether words are a command that can be imported.

    path: of the file that holds the text. given: arguments that it is called with. asked: variables that the caller
    sets. here: absolute folder. environ: the caller's variables. is_folder: of absolute paths. is_job: whether it runs
    in a job, whose modules and variables are set there.
    """

    text: str
    is_program: Callable[[Sequence[str]], bool]
    path: str = ""
    given: Sequence[str] = ()
    asked: Mapping[str, str] = field(default_factory=dict)
    here: str = "/"
    environ: Mapping[str, str] = field(default_factory=dict)
    is_folder: Callable[[str], bool] = posixpath.isabs
    is_job: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """A command of the script's; without words a file that it sources, and that is not read. text: as it is written.

    starts: whether it is a program to import. Of one: exported: what it gets beside the caller's environment; folder:
    from here; front: words of srun's around a text that another shell reads.
    """

    line: int
    text: str
    words: tuple[str, ...] = ()
    starts: bool = False
    exported: tuple[tuple[str, str], ...] = ()
    folder: str = ""
    front: tuple[str, ...] = ()

    @property
    def what(self) -> tuple[object, ...]:
        """What makes two the same."""
        return self.words, self.exported, self.folder


@dataclass
class EvaluatedScript:
    """steps: in their order. text: what it was made of. known: variables of the caller's that decide something.

    uncertain: sites of commands on whose exit code something depends.
    """

    text: Rewriter
    known: Mapping[str, str | None]
    steps: list[Step] = field(default_factory=list)
    remarks: dict[str, None] = field(default_factory=dict)
    uncertain: set[int] = field(default_factory=set)

    @property
    def started(self) -> list[Step]:
        """The programs that can be imported."""
        return [each for each in self.steps if each.starts]


class _NeededError(Exception):
    """Something open decides."""

    def __init__(self, names: Sequence[str], line: int) -> None:
        super().__init__(names)
        self.names, self.line = names, line


def evaluate(script: Script) -> EvaluatedScript:
    """What the script starts. Raises UnreadError where that is not certain.

    A variable of the caller's stays open until it decides something; then the script is evaluated again with its value.
    """
    known: dict[str, str | None] = {  # one that makes several words has to be known
        name: value
        for name, value in script.environ.items()
        if _SEVERAL.search(value) and name not in script.asked and re.search(rf"\$\{{?{re.escape(name)}\b", script.text)
    }
    decides, strict = set[str](), False
    for _ in range(MOST_ROUNDS):
        rewriter = Rewriter({*known}, script.asked, len(script.given), strict=strict)
        try:
            found = _Bash(script, rewriter, known).run()
        except _NeededError as need:
            for name in need.names:
                _refuse_what_is_known_late(script, rewriter, known, need.line, name)
                known[name] = script.environ.get(name)
            decides |= {*need.names}
            continue
        if not strict and any(not each.words for each in found.steps):
            strict = True  # a file that is not read may set whatever is not set
            continue
        usual = {each.what for each in found.started}
        for site in sorted(found.uncertain):  # nothing else may start where a command fails that was not run
            at = rewriter.sites[site]
            if at.exit_code and not at.exit_code.flips:  # it may never end
                continue
            what = f"what it starts depends on how `{at.text[:80]}` ends"
            again = Rewriter({*known}, script.asked, len(script.given), strict=strict)
            try:
                other = _Bash(script, again, known, site).run()
            except _NeededError:
                raise UnreadError(at.line, what) from None
            if not {each.what for each in other.started} <= usual:
                raise UnreadError(at.line, what)
        found.known = {name: value for name, value in known.items() if name in decides}
        return found
    raise UnreadError(0, "what it starts depends on too many variables")


def _refuse_what_is_known_late(
    script: Script, rewriter: Rewriter, known: Mapping[str, str | None], line: int, name: str
) -> None:
    if name.startswith("#"):
        shown, held = rewriter.opened[int(name[1:])][1], rewriter.held.get(name)
        what = f"what it starts depends on `{shown[:80]}`, which only a running shell knows"
        raise UnreadError(line, what, f"give it: --set {held}=VALUE" if held else "give the command itself")
    of_job = name.startswith("SLURM") and name not in script.environ
    if of_job or name in known or name in rewriter.kept:
        raise UnreadError(line, f"what it starts depends on {name}", f"give it: --set {name}=VALUE")


class _Bash:
    """One evaluation. failing: the site of the command that ends otherwise than usual."""

    def __init__(
        self, script: Script, rewriter: Rewriter, known: Mapping[str, str | None], failing: int | None = None
    ) -> None:
        self.script, self.rewriter, self.known, self.failing = script, rewriter, known, failing
        self.found = EvaluatedScript(rewriter, known)
        self.printed: dict[int, int] = {}
        self.changes: list[_Change] = []
        self.errors = bytearray()

    def run(self) -> EvaluatedScript:
        """Evaluate. Raises UnreadError and _NeededError."""
        bash = shutil.which("bash")
        if bash is None:
            raise UnreadError(0, "Bash reads scripts, and there is none", "install bash, or give the command itself")
        with tempfile.TemporaryDirectory(prefix="trainkit-script-") as name, contextlib.ExitStack() as held:
            scratch = Path(name)
            (scratch / "empty").mkdir()
            os.mkfifo(scratch / "lock")

            def high(descriptor: int) -> int:
                made = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, HIGH)
                os.close(descriptor)
                held.callback(_close, made)
                return made

            null, lock = high(os.open(os.devnull, os.O_RDWR)), high(os.open(scratch / "lock", os.O_RDWR))
            os.write(lock, b"x")
            told, tell = map(high, os.pipe())
            answers, answer = map(high, os.pipe())
            errors, error = map(high, os.pipe())
            self.rewriter.null = null
            rewritten = self.rewriter.rewrite(self.script.text)  # first: it learns which variables need their values
            prelude = self.prelude({"null": null, "lock": lock, "told": tell, "answers": answers})
            for file, text in (("script", rewritten), ("prelude", prelude)):
                (scratch / file).write_text(text, encoding="utf-8", errors="surrogateescape")
            process = subprocess.Popen(
                [bash, "--norc", "--noprofile", str(scratch / "script"), *self.script.given],
                stdin=null,
                stdout=null,
                stderr=error,
                pass_fds=(null, lock, tell, answers),
                start_new_session=True,
                preexec_fn=_limit,  # noqa: PLW1509 - no thread is about
                cwd=self.script.here if Path(self.script.here).is_dir() else scratch / "empty",
                env={"PATH": str(scratch / "empty"), "BASH_ENV": str(scratch / "prelude"), "LC_ALL": "C.UTF-8"},
            )
            try:
                _close(tell)
                _close(error)
                self.serve(told, answer, errors)
                until = time.monotonic() + 1.0  # it is not reaped, so that its number stays its own
                while not os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG):
                    if time.monotonic() > until:
                        break
                    time.sleep(0.001)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        said = self.errors.decode(errors="replace")
        for line in said.splitlines():
            if is_open(line) and _NO_NUMBER.search(line):
                raise _NeededError(names_in(line), 0)
        if process.returncode < 0 or _NO_MEMORY.search(said):
            raise UnreadError(0, _ENDLESS)
        return self.found

    def prelude(self, descriptors: Mapping[str, int]) -> str:
        """What the script runs under: the functions, the caller's variables, and the restriction."""
        script = self.script
        functions = files("trainkit.convert.shell").joinpath("prelude.sh").read_text(encoding="utf-8")
        for name, number in descriptors.items():
            functions = functions.replace(f"@{name}", str(number))
        names = ["PATH", *(each for each in script.environ if each not in ("PWD", "SHLVL", "_", "HOME")), *script.asked]
        own = {"PWD": script.here, "__start": script.here, "__0": script.path or "bash", "__BASH_SOURCE": script.path}
        known = {name: script.environ.get(name) for name in self.rewriter.known} | {**self.known}
        taken = {name: value for name, value in known.items() if value is not None}
        values = {**own, "HOME": opening("HOME"), **taken, **script.asked}
        renamed = {name: f"__{name}" for name in RENAMED}
        lines = [
            functions,
            "declare +x PWD SHLVL LC_ALL PATH OLDPWD",
            f"declare -x {' '.join(renamed.get(name, name) for name in filter(_NAME.fullmatch, dict.fromkeys(names)))}",
            *(f"{renamed.get(name, name)}={quoted(values[name])}" for name in filter(_NAME.fullmatch, values)),
            "readonly -f " + " ".join(re.findall(r"^(\w+)\(\)", functions, re.MULTILINE)),
            "set -r",
        ]
        return "\n".join([*lines, ""])

    def serve(self, told: int, answer: int, errors: int) -> None:
        """Answer until nobody is left who could ask."""
        until, events, size, buffer = time.monotonic() + SECONDS, 0, 0, b""
        words: list[str] = []
        while True:
            ready = select.select([told, errors], [], [], max(0.0, until - time.monotonic()))[0]
            read = os.read(told, 1 << 16) if told in ready else b""
            if errors in ready and len(self.errors) < MOST_BYTES:
                self.errors += os.read(errors, 1 << 16)
            if told in ready and not read:
                while select.select([errors], [], [], 0)[0] and (more := os.read(errors, 1 << 16)):
                    self.errors += more[: MOST_BYTES - len(self.errors)]
                return
            size += len(read)
            if not ready or size > MOST_BYTES or events > MOST_ANSWERS:
                raise UnreadError(0, _ENDLESS)
            *whole, buffer = (buffer + read).split(b"\0")
            for word in whole:
                words.append(word.decode("utf-8", "surrogateescape"))
                if not words[0].isdecimal():
                    raise UnreadError(0, "it writes where it must not")
                if len(words) > int(words[0]):
                    code, text = self.answer(words[1:])
                    os.write(answer, f"{code}\0{text}\0".encode("utf-8", "surrogateescape"))
                    words, events = [], events + 1

    def answer(self, words: Sequence[str]) -> Answer:
        """To what is told or asked: a word for what it is, a site, and more."""
        if words == ["old"]:
            what = "this Bash is older than 4.4, and reads scripts otherwise"
            raise UnreadError(0, what, "install bash 4.4 or newer")
        answer = getattr(self, f"on_{words[0]}", None) if words else None
        if answer is None or not words[1:] or not words[1].isdecimal() or int(words[1]) >= len(self.rewriter.sites):
            raise UnreadError(0, "it writes where it must not")
        result: Answer = answer(self.rewriter.sites[int(words[1])], *words[2:])
        return result

    def on_need(self, at: Site, text: str) -> Answer:
        """What is open in a text decides."""
        raise _NeededError(names_in(text), at.line)

    def on_length(self, at: Site, text: str) -> Answer:
        """Whether a text is empty decides."""
        return (0, "") if is_never_empty(text) else self.on_need(at, text)

    def on_refuse(self, at: Site, why: str) -> Answer:
        raise UnreadError(at.line, _REFUSED[why].format(at.text[:80]))

    def on_open(self, at: Site, name: str) -> Answer:
        """A variable by a name that another one holds, and that nothing sets."""
        if not _NAME.fullmatch(name) or name in self.known:
            return 0, ""
        return self.on_need(at, opening(name))

    def on_again(self, at: Site, text: str) -> Answer:
        """A text that the shell reads, rewritten; one that a command would have printed stays unread."""
        if not is_open(text):
            return 0, self.rewritten(text, at.line - 1, called=True)
        if not all(name.startswith("#") for name in names_in(text)):
            return self.on_need(at, text)
        self.found.steps.append(Step(at.line, at.text))
        return 0, ":"

    def on_source(self, at: Site, folder: str, path: str, *more: str) -> Answer:
        """A file that the shell reads, rewritten. What changes the shell of a person is left to that."""
        is_login = posixpath.basename(path) in _LOGINS
        if is_open(path) and not is_login:
            self.on_need(at, path)
        if more and not is_login:
            raise UnreadError(at.line, f"`{at.text[:80]}` is not read: it has arguments")
        self.on_seen(at, folder, path)
        if is_login or (found := self.inside(folder, path)) is None:
            self.found.steps.append(Step(at.line, at.text))
            return 0, ":"
        return 0, self.rewritten(found.read_text(encoding="utf-8", errors="surrogateescape"), at.line - 1)

    def rewritten(self, text: str, line: int, *, called: bool = False) -> str:
        """A text that is met on the way, for Bash. Raises _NeededError for what it unsets of the caller's variables."""
        known = {*self.rewriter.known}
        made = self.rewriter.rewrite(text, line, called=called)
        if unset := sorted(name for name in self.rewriter.known - known if name in self.script.environ):
            raise _NeededError(unset, line)
        return made

    def on_file(self, at: Site, folder: str, path: str) -> Answer:
        """A file that the script reads."""
        self.on_seen(at, folder, path)
        if (found := self.inside(folder, path)) is None:
            raise UnreadError(at.line, f"it reads {path}, which is not a file here")
        return 0, str(found)

    def on_script(self, at: Site, place: str, folder: str, path: str) -> Answer:
        """A script that the script starts, if it is here. place: 1 where it is no word of a shell's."""
        if not path or is_open(path):
            return 1, ""
        self.on_seen(at, folder, path)
        found = self.inside(folder, path)
        if found is None or (place == "1" and not os.access(found, os.X_OK)):
            return 1, ""
        return 0, found.read_text(encoding="utf-8", errors="surrogateescape")

    def on_wrote(self, at: Site, folder: str, *paths: str) -> Answer:
        """A file that the script writes, and does not."""
        self.change(at, folder, paths, below=False)
        self.found.remarks[f"`{at.text[:100]}` is not taken over."] = None
        return 0, ""

    def on_keep(self, at: Site, name: str, text: str, status: str) -> Answer:
        """The value of a variable: one that holds what a command would have printed is open by its own name."""
        printed = [each for each in names_in(text) if each.startswith("#")]
        self.rewriter.held |= dict.fromkeys(printed, name)
        if all(COUNTS_GPUS.search(self.rewriter.opened[int(each[1:])][1]) for each in printed):
            return status, text
        written = at.text.partition("=")[2]
        self.rewriter.kept[name] = written
        remark = f"{name} is what `{written[:100]}` comes to where the text runs: export it before the run."
        self.found.remarks[remark] = None
        return status, opening(name)

    def on_home(self, at: Site) -> Answer:
        """`cd` without a folder."""
        if " " in at.text:
            raise UnreadError(at.line, f"`{at.text[:80]}` goes to a folder that is not set")
        return 0, ""

    def on_cd(self, at: Site, folder: str, to: str) -> Answer:
        """A folder that is here, that the script makes, or that another machine may have."""
        path = posixpath.normpath(posixpath.join(folder, to))
        made = any(posixpath.basename(path) in word for each in self.found.steps for word in each.words)
        elsewhere = posixpath.relpath(path, self.script.here).startswith("..")
        if not (made or elsewhere or self.script.is_folder(path)):
            raise UnreadError(at.line, f"`{at.text[:80]}`: there is no folder {path} here")
        return 0, path

    def on_which(self, _: Site, __: str, *names: str) -> Answer:
        """`command -v`."""
        found = [each for name in names if (each := shutil.which(name))]
        return int(len(found) < len(names)), "".join(f"{each}\n" for each in found)

    def inside(self, folder: str, path: str) -> Path | None:
        """A regular file at or below the folder in which the script is started."""
        start = Path(self.script.here).resolve()
        found = (start / folder / path).resolve()
        return found if found.is_file() and found.is_relative_to(start) and found.stat().st_size <= MOST_FILE else None

    def is_absent(self, folder: str, path: str) -> bool:
        """Whether a path below the folder in which the script is started has nothing, in a folder that is there."""
        start = Path(self.script.here).resolve()
        found = start / folder / path
        return found.parent.resolve().is_relative_to(start) and found.parent.is_dir() and not os.path.lexists(found)

    # Commands

    def on_run(self, at: Site, folder: str, count: str, fronts: str, *rest: str) -> Answer:
        """A command that the script would start. rest: its words, those of srun around it, and exported variables."""
        end, front_end = int(count), int(count) + int(fronts)
        words, front, exported = rest[:end], rest[end:front_end], rest[front_end:]
        name = posixpath.basename(words[0])
        if name.startswith("-"):
            what = f"it begins with {name}: is a backslash missing at the end of the line before it?"
            raise UnreadError(at.line, what, "end that line with a backslash")
        for place, (word, flag) in enumerate(pairwise(words[:-1])):  # `bash -c TEXT`, which srun and the like start
            if name in _STARTERS and posixpath.basename(word) in ("bash", "sh") and re.fullmatch(r"-[a-z]*c", flag):
                return "inner", str(place)
        if is_tool(words):
            with contextlib.suppress(ValueError):  # options that are not known to be harmless
                return ("in", "") if reads_input(words) else self.on_input(at, folder, None, *words)
        self.change_by(at, folder, words)
        behind = range(1, len(words))
        if self.script.is_program(words):
            self.start(at, folder, words, front, exported)
        elif name in _LATER and any(self.script.is_program(" ".join(words[each:]).split()) for each in behind):
            raise UnreadError(at.line, f"`{at.text[:80]}` starts a program later, or for each thing that it finds")
        elif not at.within:  # what is printed counts, and is named where it does
            self.found.steps.append(Step(at.line, at.text, words))
        prints = name not in SILENT or (bool(at.within) and name != "trap")
        return self.unknown(at, prints=prints, certain=name == "mkdir" and _can_make(folder, words))

    def start(self, at: Site, folder: str, words: Sequence[str], front: Sequence[str], exported: Sequence[str]) -> None:
        """Keep a program. What is not set and stands alone is no word, but for the value of a flag."""
        for before, word in zip(("", *words), words, strict=False):
            direct = BARE in word or any(re.search(rf'"\$\{{?{each}\b', at.text) for each in names_in(word))
            alone = EMPTIES.fullmatch(word) and not (before.startswith("-") and "=" not in before and direct)
            if alone or BROKEN.search(word) or _NESTED.search(word):
                raise _NeededError(names_in(word), at.line)
        empty = (word.replace(f"{BARE}{END}", END if EMPTY.fullmatch(word) else f"{DEFAULT}{END}") for word in words)
        kept, order = list[tuple[str, str]](), [*self.rewriter.lines]  # as it is written
        for name, _, value in (each.removeprefix("__").partition("=") for each in exported):
            inherited = self.script.environ.get(name), self.script.asked.get(name)
            if name not in _SHELLS_OWN and value not in inherited:
                kept.append((name, value))
        kept.sort(key=lambda each: order.index(each[0]) if each[0] in order else len(order))
        where = posixpath.relpath(folder, self.script.here)
        self.found.steps.append(Step(at.line, at.text, tuple(empty), True, tuple(kept), where, tuple(front)))
        if at.background:
            self.found.remarks["`&` is not taken over: trainkit run stays in front until the run ends."] = None

    def unknown(self, at: Site, *, prints: bool = True, certain: bool = False) -> Answer:
        """What a command that is not run would have answered. certain: that it succeeds."""
        if not certain and (at.exit_code or self.rewriter.reads_status):
            self.found.uncertain.add(at.number)
        status = int(not certain and (at.exit_code or ExitCode()).status != int(at.number == self.failing))
        if not prints:
            return status, ""
        if at.number not in self.printed:
            self.rewriter.opened.append((at.line, at.within or at.text))
            self.printed[at.number] = len(self.rewriter.opened) - 1
        return status, opening(f"#{self.printed[at.number]}")

    def on_input(self, at: Site, folder: str, text: str | None, *words: str) -> Answer:
        """What a harmless program prints. text: its standard input."""
        if names := names_in("\0".join((*words, text or ""))):
            if not any(each.startswith(("#", "SLURM")) for each in names):
                raise _NeededError(names, at.line)
            return self.unknown(at)
        try:
            read = files_of(words)
            if words[0] == "ls":
                is_certain = self.can_list(folder, read)
            else:
                looks = words[1:] if words[0] in ("readlink", "realpath") else ()
                is_certain = not any(self.changed(folder, each) for each in (*looks, *read))
                # As for `[ -f FILE ]`, a file that is not here is none where only the exit code counts.
                counts = bool(at.exit_code) and not at.within
                is_certain = is_certain and all(
                    self.inside(folder, each) or (counts and self.is_absent(folder, each)) for each in read
                )
            if not is_certain:
                return self.unknown(at)
            status, printed = output(words, text, folder if Path(folder).is_dir() else "/")
            return self.unknown(at) if words[0] in ("sed", "awk") and status else (status, printed)
        except OverflowError:
            raise UnreadError(at.line, f"`{at.text[:80]}`: {_ENDLESS}") from None
        except FileNotFoundError:  # the program
            return self.unknown(at)
        except (ValueError, OSError):
            raise UnreadError(at.line, f"`{at.text[:80]}` is not read") from None

    # What the script would have changed

    def on_seen(self, at: Site, folder: str, path: str) -> Answer:
        """The whole of a path on which something depends. Raises UnreadError where the script has changed it."""
        if command := self.changed(folder, path):
            raise UnreadError(at.line, f"`{at.text[:80]}` depends on what `{command[:80]}` makes of {path}")
        return 0, posixpath.join(folder, path)

    def on_glob(self, at: Site) -> Answer:
        """A pattern for names of files, of which the script may have made more, or fewer."""
        pieces = _OF_PATTERNS.split(at.text.replace('"', "").replace("'", ""))
        pattern = "".join(".*" if place % 2 else re.escape(each) for place, each in enumerate(pieces))
        for each in self.changes:
            path = posixpath.relpath(each.path, self.script.here)
            if re.fullmatch(pattern, path) or (each.below and pieces[0].startswith(f"{path}/")):
                raise UnreadError(at.line, f"`{at.text[:80]}` depends on what `{each.text[:80]}` makes of it")
        return 0, ""

    def changed(self, folder: str, path: str) -> str | None:
        """The command of the script's that would have changed a path."""
        whole = posixpath.normpath(posixpath.join(folder, path))
        for each in self.changes:
            inside = each.below and re.match(f"{each.pattern}/", whole)
            above = each.path.startswith(f"{whole}/") and not os.path.lexists(whole)
            if inside or above or re.fullmatch(each.pattern, whole):
                return each.text
        return None

    def can_list(self, folder: str, paths: Sequence[str]) -> bool:
        """Whether what is in folders is known: they are here, and the script changes nothing in them."""
        start = Path(self.script.here).resolve()
        for each in paths or (".",):
            whole = posixpath.normpath(posixpath.join(folder, each))
            within = any(change.path.startswith(f"{whole}/") for change in self.changes)
            if within or not Path(whole).resolve().is_relative_to(start) or self.changed(folder, each):
                return False
        return True

    def change(self, at: Site, folder: str, paths: Iterable[str], *, below: bool = True) -> None:
        """Paths that the script would make, change or remove. below: with all that is in them."""
        for each in paths:
            path = posixpath.normpath(posixpath.join(folder, each))
            pattern = ".*".join(map(re.escape, re.split(f"{START}[^{END}]*{END}", path)))
            self.changes += [] if path.startswith("/dev/") else [_Change(path, pattern, below, at.text)]

    def change_by(self, at: Site, folder: str, words: Sequence[str]) -> None:
        """What a command that is not run may change: whatever it names, if nothing else is known of it."""
        name, named = posixpath.basename(words[0]), [each for each in words[1:] if not each.startswith("-")]

        def those_without(check: Callable[[str], bool]) -> list[str]:
            return [each for each in named if each and not check(posixpath.join(folder, each))]

        if name == "mkdir":
            self.change(at, folder, those_without(os.path.isdir), below=False)
        elif name == "touch":
            self.change(at, folder, those_without(os.path.exists), below=False)
        elif name in _COPIERS and not any(each.startswith("-t") for each in words):
            self.change(at, folder, named[-1:])
        elif name in _WRITERS:
            self.change(at, folder, named)
        elif name not in _READERS:  # it may make whatever it names
            named = named[1:] if name in ("bash", "sh") else named
            named += [each.partition("=")[2] for each in words[1:] if each.startswith("-") and "=" in each]
            named += [posixpath.basename(each).removesuffix(".git") for each in named if ":" in each]
            self.change(at, folder, those_without(os.path.isfile))


@dataclass(frozen=True, slots=True)
class _Change:
    """A path that the script changes, as it is, and as a pattern where it is open; below: with all in it."""

    path: str
    pattern: str
    below: bool
    text: str


def _can_make(folder: str, words: Sequence[str]) -> bool:
    """Whether `mkdir` succeeds."""
    for each in words[1:]:
        path = Path(folder, each)
        parents = [*path.parents] if "-p" in words else [path.parent]
        above = next((each for each in parents if each.exists()), None)
        if each.startswith("-"):
            if each != "-p":
                return False
        elif path.is_dir():
            if "-p" not in words:
                return False
        elif path.exists() or above is None or not os.access(above, os.W_OK) or not above.is_dir():
            return False
    return not is_open(" ".join(words))


def _close(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        os.close(descriptor)


def _limit() -> None:
    """Of a process that reads a script: nothing is written, and it ends."""
    for number, limit in ((resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(number, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))


# Harmless programs

MOST_OUTPUT, TOOL_SECONDS = 1 << 18, 5.0  # bytes
_LINES = r"-[qvz]+|-\d+|-[nc]-?\+?\d+|-[nc]|--(lines|bytes)=[-+]?\d+"
# The options of each, whole words; those that end in a letter of _SEPARATE have their value in the next word.
TOOLS: Mapping[str, str] = {
    "dirname": "-z",
    "basename": "-[az]+|-s.*",
    "seq": r"-w|-[sf].*",
    "expr": "",
    "realpath": "-[emLPsqz]+|--no-symlinks|--relative-to=.*",
    "readlink": "-[efmnqsvz]+",
    "tr": "-[cCdst]+",
    "wc": "-[clmwL]+",
    "cut": "-[sz]*[bcdf].*|-[sz]+|--complement|--(delimiter|fields)=.*",
    "head": _LINES,
    "tail": _LINES,
    "sort": "-[bdfghinrRsuVzM]+|-[bdfghinrRsuVzM]*[kt].*|--(reverse|unique|numeric-sort|version-sort)",
    "uniq": "-[cdiuz]+",
    "rev": "",
    "tac": "",
    "paste": "-[sz]+|-[sz]*d.*",
    "cat": "-[AbeEnstTuv]+",
    "grep": "-[EFGPcivwxhHlLnoqs]+|-[EFGPcivwxhHlLnoqs]*[eABCm].*|--(count|only-matching)",
    "sed": "-[nEruz]+|-[nEruz]*e.*",
    "awk": "-[Fv].*",
    "bc": "-[lqs]+",
    "ls": "-[1AadrStv]+",
    "xargs": "-[0rt]+|-[dnL].*",  # without a command: echo
    "getopt": "-[oln].*|-[aqQTu]+|--(options|longoptions|long|name|quiet|alternative)(=.*)?",
}
_SEPARATE = {"basename": "s", "seq": "sf", "cut": "bcdf", "head": "nc", "tail": "nc", "sort": "kt", "paste": "d",
             "grep": "eABCm", "sed": "e", "awk": "Fv", "getopt": "oln", "xargs": "dnL"}  # fmt: skip
_NO_INPUT = ("dirname", "basename", "seq", "expr", "realpath", "readlink", "getopt")
_OF_ITS_OWN = {"grep": 1, "sed": 1, "awk": 1, "tr": 2}  # operands in front of files; tr has none of these
_ECHOES = re.compile(r"(-[0rt]+ |-[dnL] ?\S+ )*")
_STARTS = {  # what in a program's text may write or start something; sed has a sandbox
    "awk": re.compile(r"[|>@]|\b(system|getline|close|fflush|ENVIRON|ARGV)\b"),
}


def is_tool(words: Sequence[str]) -> bool:
    """Whether a call is one of these; xargs where it is given no command."""
    return words[0] in TOOLS and (words[0] != "xargs" or bool(_ECHOES.fullmatch(" ".join((*words[1:], "")))))


def reads_input(words: Sequence[str]) -> bool:
    """Whether a call reads standard input."""
    return words[0] not in (*_NO_INPUT, "ls") and not files_of(words)


def files_of(words: Sequence[str]) -> list[str]:
    """The files that a call reads. Raises ValueError for what is not known to be harmless."""
    name, operands, texts, rest = words[0], list[str](), list[str](), [*words[1:]]
    while rest:
        word = rest.pop(0)
        if word == "--":
            operands += rest
            break
        if not re.match(r"-.", word) or name == "expr" or (name == "seq" and re.fullmatch(r"-[\d.]+", word)):
            operands.append(word)
        elif not re.fullmatch(TOOLS[name], word):
            raise ValueError(word)
        elif found := re.fullmatch(f"-[^-{_SEPARATE.get(name, '-')}]*([{_SEPARATE.get(name, '-')}])(.*)", word):
            value = found[2] or (rest.pop(0) if rest else "")
            texts += [value] if found[1] == "e" else []
    if name in _NO_INPUT:
        return []
    own = 0 if texts else _OF_ITS_OWN.get(name, 0)
    if name in _STARTS and any(map(_STARTS[name].search, texts or operands[:1])):
        raise ValueError("it may write, or start a program")
    if name == "uniq" and len(operands) > 1:  # the second is written
        raise ValueError(operands[1])
    return [each for each in operands[own:] if each != "-"]


def output(words: Sequence[str], text: str | None, folder: str) -> tuple[int, str]:
    """Status and output of a call. text: its standard input. Raises OSError; OverflowError where it does not end."""
    argv = [words[0], *(["--sandbox"] if words[0] == "sed" else []), *words[1:]]
    environ = {"PATH": os.defpath, "LC_ALL": "C.UTF-8"}
    with tempfile.TemporaryFile() as given:
        given.write((text or "").encode("utf-8", "surrogateescape"))
        given.seek(0)
        with subprocess.Popen(
            argv, stdin=given, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=folder, env=environ,
            preexec_fn=_limit,  # noqa: PLW1509 - no thread is about
        ) as process:  # fmt: skip
            assert process.stdout is not None
            found, until = bytearray(), time.monotonic() + TOOL_SECONDS
            while select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
                part = os.read(process.stdout.fileno(), 1 << 16)
                found += part
                if not part or len(found) > MOST_OUTPUT:
                    break
            else:
                part = b"-"
            if part:
                process.kill()
                raise OverflowError
    if process.returncode < 0:
        raise OverflowError
    return process.returncode, found.decode("utf-8", "surrogateescape")
