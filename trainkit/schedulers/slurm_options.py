"""Options of sbatch and srun, read as these commands read them: from `#SBATCH` lines, and from words. Pure.

Source: sbatch(1) and srun(1) of Slurm 22.05 and 24.11; src/common/slurm_opt.c for how a script's lines are split.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MAGIC = "#SBATCH"
# Letter -> name of the option.
SHORT = {
    "A": "account", "a": "array", "b": "begin", "B": "extra-node-info", "c": "cpus-per-task", "C": "constraint",
    "d": "dependency", "D": "chdir", "e": "error", "E": "preserve-env", "F": "nodefile", "G": "gpus", "h": "help",
    "H": "hold", "i": "input", "I": "immediate", "J": "job-name", "k": "no-kill", "K": "kill-on-bad-exit",
    "l": "label", "L": "licenses", "M": "clusters", "m": "distribution", "n": "ntasks", "N": "nodes", "o": "output",
    "O": "overcommit", "p": "partition", "q": "qos", "Q": "quiet", "r": "relative", "s": "oversubscribe",
    "S": "core-spec", "t": "time", "T": "threads", "u": "unbuffered", "v": "verbose", "V": "version",
    "w": "nodelist", "W": "wait", "x": "exclude", "X": "disable-status", "Z": "no-allocate",
}  # fmt: skip
# Those without a value, and those whose value is behind a `=` or not there.
BARE = frozenset({
    "contiguous", "disable-status", "exact", "help", "hold", "ignore-pbs", "label", "multi-prog", "no-allocate",
    "no-requeue", "overcommit", "overlap", "parsable", "preserve-env", "quiet", "reboot", "requeue", "spread-job",
    "test-only", "unbuffered", "usage", "use-min-nodes", "verbose", "version", "whole", "external",
})  # fmt: skip
OPTIONAL = frozenset({
    "exclusive", "get-user-env", "immediate", "kill-on-bad-exit", "nice", "no-kill", "oversubscribe", "propagate",
    "pty", "interactive",
})  # fmt: skip
# Old names of options.
ALIASES = {"share": "oversubscribe", "workdir": "chdir", "tasks": "ntasks", "tasks-per-node": "ntasks-per-node",
           "cpu_bind": "cpu-bind", "mem_bind": "mem-bind"}  # fmt: skip
KNOWN = {
    *SHORT.values(), *BARE, *OPTIONAL, *ALIASES, "accel-bind", "acctg-freq", "batch", "bb", "bbf", "bcast", "bell",
    "cluster-constraint", "comment", "compress", "container", "container-id", "container-image", "container-mounts",
    "container-name",
    "container-workdir", "cores-per-socket", "cpu-bind", "cpu-freq", "cpus-per-gpu", "deadline", "delay-boot",
    "epilog", "export", "export-file", "extra", "gid", "gpu-bind", "gpu-freq", "gpus-per-node", "gpus-per-socket",
    "gpus-per-task", "gres", "gres-flags", "het-group", "hint", "jobid", "mail-type", "mail-user", "mcs-label", "mem",
    "mem-bind", "mem-per-cpu", "mem-per-gpu", "mincpus", "mpi", "network", "nodefile", "ntasks-per-core",
    "ntasks-per-gpu", "ntasks-per-node", "ntasks-per-socket", "open-mode", "power", "prefer", "priority", "profile",
    "prolog", "reservation", "resv-ports", "signal", "slurmd-debug", "sockets-per-node", "switches", "task-epilog",
    "task-prolog", "thread-spec", "threads-per-core", "time-min", "tmp", "tres-bind", "tres-per-task", "uid",
    "wait-all-nodes", "wckey", "wrap", "x11", "stepmgr",
}  # fmt: skip
_QUOTES = ("'", '"')


@dataclass(frozen=True, slots=True)
class Option:
    """name: the long one, or what was written where Slurm has no such option, or where it is no option.

    value: None where it has none. line: of a script, from 1; written: the line, or the words.
    """

    name: str
    value: str | None
    written: str
    line: int = 0
    known: bool = True

    @property
    def word(self) -> str:
        """As one word of a command."""
        return f"--{self.name}" if self.value is None else f"--{self.name}={self.value}"


def directives(text: str) -> list[Option]:
    """The options in a script's `#SBATCH` lines. Only lines above the first command count, as for sbatch."""
    found: list[Option] = []
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        if line.startswith(MAGIC):
            found += options(line_words(line[len(MAGIC) :]), line.rstrip(), number)
        elif line.strip() and not line.lstrip().startswith("#"):
            break
    return found


def options(words: Sequence[str], written: str = "", line: int = 0) -> Iterator[Option]:
    """Words as options, in their order. A word that is none is by itself, and not known."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        shown = written or word
        if re.match(r"--\w", word):
            name, equals, value = word[2:].partition("=")
            name = _full(name)
            if equals or name in BARE or name in OPTIONAL or name not in KNOWN:
                yield Option(name, value if equals else None, shown, line, name in KNOWN)
            else:
                yield Option(name, rest.pop(0) if rest else None, shown, line)
        elif re.match(r"-[A-Za-z]", word):
            yield from _short(word[1:], rest, shown, line)
        else:
            yield Option(word, None, shown, line, known=False)


def _short(letters: str, rest: list[str], written: str, line: int) -> Iterator[Option]:
    """`-N2`, `-N 2`, `-lu`; what follows in the same word is a value where the option takes one."""
    while letters:
        name, letters = SHORT.get(letters[0], f"-{letters[0]}"), letters[1:]
        if name.startswith("-"):
            yield Option(f"{name}{letters}", None, written, line, known=False)
            return
        if name in BARE:
            yield Option(name, None, written, line)
            continue
        value = letters.removeprefix("=") or (None if name in OPTIONAL else rest.pop(0) if rest else None)
        yield Option(name, value, written, line)
        return


def _full(name: str) -> str:
    """An option's name by its beginning, as getopt_long takes it."""
    if name not in KNOWN:
        longer = [each for each in KNOWN if each.startswith(name)]
        name = longer[0] if len(longer) == 1 else name
    return ALIASES.get(name, name)


def line_words(text: str) -> list[str]:
    """The words of a line: quotes and backslashes are as a shell has them, and a `#` without quotes ends the line."""
    words: list[str] = []
    word: str | None = None
    quote, place = "", 0
    while place < len(text):
        letter = text[place]
        if quote:
            if letter == quote:
                quote = ""
            elif letter == "\\" and quote == '"' and text[place + 1 : place + 2] in ('"', "\\"):
                place += 1
                word = (word or "") + text[place]
            else:
                word = (word or "") + letter
        elif letter in _QUOTES:
            quote, word = letter, word or ""
        elif letter == "\\" and place + 1 < len(text):
            place += 1
            word = (word or "") + text[place]
        elif letter == "#":
            break
        elif letter.isspace():
            words += [] if word is None else [word]
            word = None
        else:
            word = (word or "") + letter
        place += 1
    return words if word is None else [*words, word]
