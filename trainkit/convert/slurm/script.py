"""A batch script's `#SBATCH` lines, and the srun in front of its command."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence

from trainkit.convert.command import first_of_command
from trainkit.convert.shell.marks import is_open
from trainkit.convert.slurm.asked import AS_IT_IS, ONCE, SIZES, TASKS, Batch
from trainkit.convert.slurm.sizes import sizes_of
from trainkit.frameworks.registry import launcher_of
from trainkit.schedulers.slurm_options import MAGIC, directives, options

_PLAIN_SHELL = re.compile(r"#!\s*(/usr)?/bin/(env\s+)?(ba)?sh")
_LOGIN = re.compile(r"\s(-[a-z]*l[a-z]*|--login)\b")
LAUNCHES = ("torch.distributed.", "accelerate.commands.")  # modules that start the ranks themselves
BY_TORCHRUN = (
    "srun starts a process for each rank; trainkit starts torchrun on each node, which sets RANK, LOCAL_RANK and "
    "WORLD_SIZE: a script that reads SLURM_PROCID, SLURM_LOCALID and SLURM_NTASKS must read these."
)


def read_batch(text: str, path: str) -> Batch | None:
    """What a script's `#SBATCH` lines ask for; None where it has none."""
    found = directives(text)
    if not found:
        return None
    batch = Batch(path)
    for option in found:
        if not option.known:
            batch.remarks.append(
                f"line {option.line}: `{option.written}`: Slurm has no such option, so it is left out."
            )
        elif option.name in SIZES or option.name in AS_IT_IS or option.name in ONCE:
            batch.given[option.name] = option
        else:
            batch.others.append(option)
    read = {option.line for option in found}
    batch.remarks += [
        f"line {number}: sbatch reads no #SBATCH line below the first command, so `{line.rstrip()}` is left out."
        for number, line in enumerate(text.splitlines(), 1)
        if line.startswith(MAGIC) and number > max(read)
    ]
    first = text.partition("\n")[0].rstrip()
    if first.startswith("#!") and not _PLAIN_SHELL.fullmatch(first):
        login = (
            " It is a login shell, which reads /etc/profile and ~/.bash_profile first: source them in cluster.setup "
        )
        more = f"{login}where the job needs them." if _LOGIN.search(first) else ""
        batch.remarks.append(f"`{first}` is left out: trainkit's job.sh is started by /bin/bash without options.{more}")
    batch.sizes = sizes_of(batch)
    return batch


def take_srun(batch: Batch, words: Sequence[str]) -> list[str]:
    """A command without its srun, whose options are kept; one process for each card becomes torchrun's."""
    found = next((place for place, word in enumerate(words) if posixpath.basename(word) == "srun"), None)
    if found is None:
        if (batch.sizes.tasks or 1) > 1:
            what = f"`{_shown(batch, 'ntasks-per-node', 'ntasks')}` is left out: no srun starts the tasks, and "
            batch.remarks.append(f"{what}the command in the script runs once.")
        return list(words)
    end = first_of_command(words, found + 1)
    before, command = list(words[:found]), list(words[end:])
    for option in options(words[found + 1 : end]):
        said = option.value or ""
        if is_open(said) or "${oc.env:" in said or not option.known:
            batch.remarks.append(f"`{option.word if option.known else option.name}` of srun is not taken over.")
        elif option.name in SIZES:
            batch.given.setdefault(option.name, option)
            batch.step.append(option)
        else:
            batch.step.append(option)
    batch.sizes = sizes_of(batch, {option.name: option for option in batch.step if option.name.startswith("ntasks")})
    return [*before, *_as_ranks(batch, command)]


def _as_ranks(batch: Batch, command: list[str]) -> list[str]:
    """Python, started by srun once for each rank, as torchrun starts it. Variables may be in front."""
    start = next((place for place, word in enumerate(command) if launcher_of(posixpath.basename(word))), None)
    tasks, nodes = batch.sizes.tasks or 1, batch.sizes.nodes or 1
    if start is None or launcher_of(posixpath.basename(command[start])) != "python" or tasks * nodes == 1:
        if start is not None and tasks > 1 and launcher_of(posixpath.basename(command[start])) != "python":
            what = f"`{_shown(batch, 'ntasks-per-node', 'ntasks')}` is left out: {TASKS}, and "
            batch.remarks.append(f"{what}{command[start]} starts the ranks.")
        return command
    rest, flags = command[start + 1 :], list[str]()
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
        flags.append(rest.pop(0))
    if rest[:1] == ["-m"] and rest[1:2] and rest[1].startswith(LAUNCHES):
        return command
    batch.remarks += [f"`{flag}` of Python is not taken over." for flag in flags if flag != "-u"]
    batch.remarks.append(BY_TORCHRUN)
    several = [f"--nnodes={nodes}"] if nodes > 1 else []
    return [*command[:start], "torchrun", f"--nproc_per_node={tasks}", *several, *rest]


def _shown(batch: Batch, *names: str) -> str:
    return next((batch.given[name].word for name in names if name in batch.given), "")
