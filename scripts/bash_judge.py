"""What real Bash starts: each program is a recorder that writes down its words, its variables and its folder.

Nothing of trainkit's is used here: this is the other side of a comparison.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

RECORDED = (
    "torchrun", "accelerate", "accelerate-launch", "deepspeed", "python", "python3", "trl", "axolotl", "lmf",
    "fabric", "llamafactory-cli", "srun", "sbatch", "mpirun", "docker", "podman", "apptainer", "singularity", "nohup",
    "env", "nice", "timeout", "sudo", "uv", "poetry", "conda", "module", "rm", "mv", "cp", "ln", "mkdir", "touch",
    "chmod", "pip", "git", "ssh", "scp", "rsync", "curl", "wget", "apt-get", "sleep", "wandb", "huggingface-cli",
    "hf", "scontrol", "tee", "tmux",
)  # fmt: skip
_RECORDER = """#!/bin/bash
exec {lock}>>"$JUDGE_RECORD"
flock "$lock"
[[ "$*" != *device_count* ]] || echo "$JUDGE_CARDS"
if [[ ${0##*/} == @(mkdir|touch) && " $*" != *@(..| /)* ]]; then "/bin/${0##*/}" "$@" || code=$?; fi
{ printf '%s\\0' @start "$PWD" "${0##*/}" "$@" @variables; /usr/bin/env -0; } >&"$lock"
exit "${code-0}"
"""
_OWN = frozenset({"_", "PWD", "OLDPWD", "SHLVL", "PATH", "JUDGE_RECORD", "JUDGE_CARDS", "FUNCNEST", "LC_ALL"})


@dataclass(frozen=True)
class Start:
    """One program. folder: from the one in which it is started; added, missing: beside the caller's variables."""

    words: tuple[str, ...]
    folder: str
    added: tuple[tuple[str, str], ...] = ()
    missing: tuple[str, ...] = ()


def judged(words: Sequence[str], folder: Path, environ: Mapping[str, str] | None = None, cards: int = 2) -> list[Start]:
    """What `bash WORDS` starts in a folder, in order; words of this folder read `@here`. environ: all that it gets."""
    bin_ = folder.parent / f"{folder.name}.bin"
    for place, names in {bin_: RECORDED, folder / ".venv" / "bin": ("python", "torchrun")}.items():
        place.mkdir(parents=True, exist_ok=True)
        for name in names:
            (place / name).write_text(_RECORDER)
            (place / name).chmod(0o755)
    (bin_ / "nvidia-smi").write_text("#!/bin/bash\n" + "echo GPU\n" * cards)
    (bin_ / "nvidia-smi").chmod(0o755)
    here = folder.parent / f"{folder.name}.copy"  # in which the script may write
    shutil.rmtree(here, ignore_errors=True)
    shutil.copytree(folder, here, symlinks=True)
    record = folder.parent / f"{folder.name}.record"
    record.write_bytes(b"")
    own = {**(environ or {}), "PATH": f"{bin_}:/usr/bin:/bin", "JUDGE_RECORD": str(record), "LC_ALL": "C.UTF-8"}
    own["JUDGE_CARDS"] = str(cards)
    own["FUNCNEST"] = "50"  # a function that calls itself in a subshell would fill the machine with processes
    # What runs in the background holds the pipe until it has ended.
    ends, held = os.pipe()
    with subprocess.Popen(
        ["/bin/bash", *words], cwd=here, env=own, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, pass_fds=(held,),
    ) as process:  # fmt: skip
        os.close(held)
        process.wait(30)
        if not select.select([ends], [], [], 30)[0]:
            raise TimeoutError(f"what bash {' '.join(words)} has started goes on")
        os.close(ends)
    text = record.read_bytes().decode("utf-8", "surrogateescape")
    return [_start(each.split("\0")[1:-1], here, own) for each in text.split("@start")[1:]]


def _start(part: Sequence[str], folder: Path, own: Mapping[str, str]) -> Start:
    middle = len(part) - 1 - part[::-1].index("@variables")
    had = dict(each.split("=", 1) for each in part[middle + 1 :])
    here = re.compile(re.escape(str(folder)))
    path = {"PATH": had["PATH"].replace(own["PATH"], "$PATH")} if had.get("PATH") != own["PATH"] else {}
    added = {name: value for name, value in had.items() if name not in _OWN and own.get(name) != value} | path
    shown = tuple(sorted((name, here.sub("@here", value)) for name, value in added.items()))
    missing = tuple(sorted(name for name in own if name not in had and name not in _OWN))
    return Start(
        tuple(here.sub("@here", word) for word in part[1:middle]), os.path.relpath(part[0], folder), shown, missing
    )
