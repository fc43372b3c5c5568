"""Harmless programs that a script makes text with: they run, with options that are known to write and start nothing."""

from __future__ import annotations

import os
import re
import resource
import select
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence

MOST, SECONDS = 1 << 18, 5.0  # bytes of an output
CPU_SECONDS, MEMORY = 3, 512 << 20
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
            preexec_fn=limited,  # noqa: PLW1509 - no thread is about
        ) as process:  # fmt: skip
            assert process.stdout is not None
            found, until = bytearray(), time.monotonic() + SECONDS
            while select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
                part = os.read(process.stdout.fileno(), 1 << 16)
                found += part
                if not part or len(found) > MOST:
                    break
            else:
                part = b"-"
            if part:
                process.kill()
                raise OverflowError
    if process.returncode < 0:
        raise OverflowError
    return process.returncode, found.decode("utf-8", "surrogateescape")


def limited() -> None:
    """Of a process that reads a script: nothing is written, and it ends."""
    for number, limit in ((resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(number, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
