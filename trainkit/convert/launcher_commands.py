"""Commands that start programs: how each is recognised, and what its flags say, as one table."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from trainkit.convert.launcher_flags import ACCELERATE, DEEPSPEED, TORCHRUN
from trainkit.frameworks.accelerate.importer import launched
from trainkit.frameworks.base.argv_reader import parse_flags
from trainkit.frameworks.base.draft import Draft, FlagUse, ImportContext, argv_origin, card, read_flag


@dataclass
class Start:
    """What a launcher's part of a command says besides settings.

    processes: on each machine, None where the launcher takes as many as there are cards.
    words: from the script's name on. module, python: whether that is a module, and whether Python runs it.
    local_rank: whether the launcher puts `--local_rank=N` before the program's words.
    """

    launcher: str
    words: list[str] = field(default_factory=list)
    processes: int | None = 1
    module: bool = False
    python: bool = True
    local_rank: bool = False


_RANK = re.compile(r"--local[-_]rank=\$\{local_rank\}")  # which torchrun fills in
Reader = Callable[[Draft, ImportContext, Start, Sequence[str]], None]


def torchrun(draft: Draft, context: ImportContext, start: Start, words: Sequence[str]) -> None:
    """`torchrun`, `python -m torch.distributed.run` and the older `python -m torch.distributed.launch`."""
    given, start.words = parse_flags(draft, TORCHRUN, words)
    draft.set("launcher.kind", "torchrun", argv_origin("torchrun"))
    named = {each.name: each for each in given}
    _nodes(draft, named.get("nnodes"))
    _processes(draft, context, start, named.get("nproc_per_node"))
    _number(draft, named.get("max_restarts"), "launcher.max_restarts")
    if draft.get("nodes.count"):
        _rendezvous(draft, named)
    start.words = [word.replace("$$", "$") for word in start.words]  # torchrun's way to write a dollar sign
    start.local_rank = any(map(_RANK.fullmatch, start.words))
    start.words = [word for word in start.words if not _RANK.fullmatch(word)]
    start.module, start.python = "module" in named, "no_python" not in named
    said = {"nnodes", "nproc_per_node", "max_restarts", "module", "no_python", "standalone", "use_env"}
    if draft.get("nodes.count"):
        said |= {"rdzv_endpoint", "master_addr", "master_port"}
    _left(draft, given, said)


def torch_launch(draft: Draft, context: ImportContext, start: Start, words: Sequence[str]) -> None:
    """The launcher before torchrun: it also puts `--local-rank=N` before the program's words."""
    torchrun(draft, context, start, words)
    if "use_env" not in {word.removeprefix("--").replace("-", "_") for word in words[: -len(start.words) or None]}:
        start.local_rank = True


def deepspeed(draft: Draft, context: ImportContext, start: Start, words: Sequence[str]) -> None:
    """DeepSpeed's launcher."""
    given, start.words = parse_flags(draft, DEEPSPEED, words)
    named = {"num_gpus" if each.name == "num_accelerators" else each.name: each for each in given}
    draft.set("launcher.kind", "deepspeed", argv_origin("deepspeed"))
    start.processes = None
    if "include" in named:
        _included(draft, start, named["include"])
    if "num_gpus" in named:
        _cards(draft, context, start, named["num_gpus"])
    _number(draft, named.get("num_nodes"), "nodes.count")
    if draft.get("nodes.count") == 1:
        del draft.settings["nodes.count"]
    if draft.get("nodes.count"):
        _over_ssh(draft, named)
    if "exclude" in named or "hostfile" in named:
        draft.remark(
            "Hosts and cards that --hostfile and --exclude choose are not known here: set nodes and devices.select."
        )
    start.module, start.python = "module" in named, "no_python" not in named
    if "no_local_rank" not in named:
        draft.remark(
            "deepspeed adds --local_rank=N to the program's words, and trainkit sets LOCAL_RANK in the environment; "
            "a script that wants the flag gets it with program.local_rank: true and launcher.kind: torchrun."
        )
    met = {"master_addr", "master_port"} if draft.get("nodes.rendezvous") else set()
    _left(
        draft,
        given,
        met
        | {"include", "num_gpus", "num_accelerators", "num_nodes", "exclude", "hostfile", "module", "no_python"}
        | {"no_local_rank"},
    )


def _over_ssh(draft: Draft, named: Mapping[str, FlagUse]) -> None:
    """Several nodes, which DeepSpeed's launcher reaches by ssh, and trainkit by being started on each."""
    draft.set("launcher.kind", "torchrun", argv_origin("deepspeed"), "on several nodes, one torchrun on each")
    _rendezvous(draft, named)
    draft.remark("deepspeed starts the other nodes by ssh; trainkit run is started on each, with --node-rank N.")


def accelerate(draft: Draft, context: ImportContext, start: Start, words: Sequence[str]) -> None:
    """`accelerate launch`, with its config file where one is named."""
    given, start.words = parse_flags(draft, ACCELERATE, words)
    if draft.problems:
        return
    start.processes = launched(draft, context, given)
    draft.set("launcher.kind", "accelerate", argv_origin("accelerate launch"))
    named = {each.name for each in given}
    start.module, start.python = "module" in named, "no_python" not in named


def _nodes(draft: Draft, given: FlagUse | None) -> None:
    if given is None or given.value in (None, "1", "1:1"):
        return
    least, _, most = (given.value or "").partition(":")
    if not least.isdecimal() or most not in ("", least):
        why = "trainkit starts a fixed number of nodes"
        draft.fail(f"--nnodes {given.value} cannot be taken over", given.origin, "write one number", why)
        return
    draft.set("nodes.count", int(least), given.origin)


def _processes(draft: Draft, context: ImportContext, start: Start, given: FlagUse | None) -> None:
    if given is None:
        return
    assignments, problems = read_flag(draft, context, given)
    draft.problems += problems
    for each in assignments:
        draft.put(each)
    count = next((each.value for each in assignments if each.key == "nodes.processes_per_node"), None)
    start.processes = count if isinstance(count, int) else None
    if count in (1, "auto"):
        draft.settings.pop("nodes.processes_per_node", None)


def _number(draft: Draft, given: FlagUse | None, key: str) -> None:
    if given is None:
        return
    if not (given.value or "").isdecimal():
        draft.fail(f"--{given.name} {given.value} is no number", given.origin, "write a whole number")
        return
    draft.set(key, int(given.value or ""), given.origin)


def _rendezvous(draft: Draft, named: Mapping[str, FlagUse]) -> None:
    endpoint, host = named.get("rdzv_endpoint"), named.get("master_addr")
    if endpoint is not None:
        value = endpoint.value or ""
        draft.set("nodes.rendezvous", value if ":" in value else f"{value}:29400", endpoint.origin)
    elif host is not None:
        port = named["master_port"].value if "master_port" in named else "29500"
        draft.set("nodes.rendezvous", f"{host.value}:{port}", host.origin)


def _included(draft: Draft, start: Start, given: FlagUse) -> None:
    host, _, cards = (given.value or "").partition(":")
    if not cards and host in ("localhost", "127.0.0.1"):
        return  # all of its cards
    if "@" in (given.value or "") or host not in ("localhost", "127.0.0.1"):
        draft.fail(
            f"--include {given.value} names cards of other hosts",
            given.origin,
            "write localhost:0,1, or set nodes and devices.select in the recipe",
        )
        return
    chosen = [card(each) for each in cards.split(",")]
    draft.set("devices.select", chosen, given.origin)
    draft.set("devices.order", "fastest", given.origin, "as CUDA numbers cards where CUDA_DEVICE_ORDER is not set")
    start.processes = len(chosen)


def _cards(draft: Draft, context: ImportContext, start: Start, given: FlagUse) -> None:
    chosen = draft.get("devices.select")
    assignments, problems = read_flag(draft, context, replace(given, name="num_gpus"))
    draft.problems += problems
    if problems:
        return
    start.processes = int(given.value or "1")
    if isinstance(chosen, list):
        first = ",".join(map(str, range(start.processes)))
        draft.remark(
            f"deepspeed --num_gpus {given.value} ignores CUDA_VISIBLE_DEVICES and runs on cards {first}; "
            f"the recipe takes those that the variable names."
        )
        draft.set("nodes.processes_per_node", start.processes, given.origin)
        return
    for each in assignments:
        draft.put(each)


def _left(draft: Draft, given: Sequence[FlagUse], said: set[str]) -> None:
    """Flags without a recipe key, by name."""
    left = [each.origin.text for each in given if each.name not in said]
    if left:
        draft.remark(f"Not taken over, for the plan chooses it for each run: {', '.join(left)}.")


# By the words that name a launcher, behind `python -m` or as a command.
LAUNCHERS: Mapping[str, tuple[str, Reader]] = {
    "torchrun": ("torchrun", torchrun),
    "torch.distributed.run": ("torchrun", torchrun),
    "torch.distributed.launch": ("torchrun", torch_launch),
    "deepspeed": ("deepspeed", deepspeed),
    "accelerate": ("accelerate", accelerate),
    "accelerate-launch": ("accelerate", accelerate),
    "accelerate.commands.launch": ("accelerate", accelerate),
    "deepspeed.launcher.runner": ("deepspeed", deepspeed),
}


def command_name(word: str) -> str:
    """The command that a word names, without its folder."""
    return posixpath.basename(word)
