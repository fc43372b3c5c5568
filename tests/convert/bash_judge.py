"""What real Bash starts: each program is a recorder that writes down its words, its variables and its folder.

Nothing of trainkit's is used here: this is the other side of a comparison.
"""

from __future__ import annotations

import os
import re
import select
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

RECORDED = (
    "torchrun", "accelerate", "deepspeed", "python", "python3", "srun", "nohup", "env", "nice", "timeout", "sbatch",
    "rm", "mv", "cp", "mkdir", "pip", "ssh", "sleep", "conda", "module", "wandb", "huggingface-cli", "git",
    "scontrol", "tee",
)  # fmt: skip
_RECORDER = """#!/bin/bash
exec {lock}>>"$JUDGE_RECORD"
flock "$lock"
{ printf '%s\\0' @start "$PWD" "${0##*/}" "$@" @variables; /usr/bin/env -0; } >&"$lock"
"""
_OWN = frozenset({"_", "PWD", "OLDPWD", "SHLVL", "PATH", "JUDGE_RECORD", "LC_ALL", "BASH_FUNC_x%%"})


@dataclass(frozen=True)
class Start:
    """One program. folder: from the script's; added, missing: beside the caller's variables."""

    words: tuple[str, ...]
    folder: str
    added: tuple[tuple[str, str], ...] = ()
    missing: tuple[str, ...] = ()


def judged(
    script: str, folder: Path, given: Sequence[str] = (), environ: Mapping[str, str] | None = None, cards: int = 2
) -> list[Start]:
    """What Bash starts of a script in a folder, in order; words of this folder read `@here`. environ: all of it."""
    bin_ = folder.parent / f"{folder.name}.bin"
    bin_.mkdir(exist_ok=True)
    for name in RECORDED:
        (bin_ / name).write_text(_RECORDER)
        (bin_ / name).chmod(0o755)
    (bin_ / "nvidia-smi").write_text("#!/bin/bash\n" + "echo GPU\n" * cards)
    (bin_ / "nvidia-smi").chmod(0o755)
    record = folder.parent / f"{folder.name}.record"
    record.write_bytes(b"")
    (folder / "go.sh").write_text(script)
    own = {**(environ or {}), "PATH": f"{bin_}:/usr/bin:/bin", "JUDGE_RECORD": str(record), "LC_ALL": "C.UTF-8"}
    (folder / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
    for name in ("python", "torchrun"):
        (folder / ".venv" / "bin" / name).write_text(_RECORDER)
        (folder / ".venv" / "bin" / name).chmod(0o755)
    # What runs in the background holds the pipe until it has ended.
    ends, held = os.pipe()
    with subprocess.Popen(
        ["/bin/bash", "go.sh", *given], cwd=folder, env=own, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, pass_fds=(held,),
    ) as process:  # fmt: skip
        os.close(held)
        process.wait(30)
        assert select.select([ends], [], [], 30)[0], "what it has started goes on"
        os.close(ends)

    return [_start(each, folder, own) for each in _parts(record.read_bytes().decode("utf-8", "surrogateescape"))]


def _parts(text: str) -> list[list[str]]:
    return [each.split("\0")[1:-1] for each in text.split("@start")[1:]]


def _start(part: Sequence[str], folder: Path, own: Mapping[str, str]) -> Start:
    middle = len(part) - 1 - part[::-1].index("@variables")
    had = dict(each.split("=", 1) for each in part[middle + 1 :])
    here = re.compile(re.escape(str(folder)))
    words = tuple(here.sub("@here", word) for word in part[1:middle])
    path = {"PATH": had["PATH"].replace(own["PATH"], "$PATH")} if had.get("PATH") != own["PATH"] else {}
    added = {name: value for name, value in had.items() if name not in _OWN and own.get(name) != value} | path
    shown = tuple(sorted((name, here.sub("@here", value)) for name, value in added.items()))
    missing = tuple(sorted(name for name in own if name not in had and name not in _OWN))
    return Start(words, os.path.relpath(part[0], folder), shown, missing)
