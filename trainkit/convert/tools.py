"""Commands of training tools that start a launcher themselves, as that launcher's own command.

Sources: llamafactory/launcher.py; axolotl/cli/utils/train.py; trl/cli/commands/training.py; lightning/fabric/cli.py.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainkit.errors import RecipeError, UsageError
from trainkit.frameworks.accelerate.launcher import FLAGS as ACCELERATE
from trainkit.frameworks.base.argv_reader import script_flags
from trainkit.frameworks.base.draft import ImportContext
from trainkit.frameworks.base.foreign_file import SUFFIXES, read_mapping
from trainkit.frameworks.base.launcher_flags import find_flag
from trainkit.frameworks.base.python_source import package_folder
from trainkit.frameworks.deepspeed.fields import KINDS
from trainkit.frameworks.deepspeed.imported_base import stage_of
from trainkit.frameworks.hf_trainer.fields import BY_NAME

_YES = ("1", "true", "y", "yes")
# What a tool's own file says of how the work is spread, by its key.
_SPREADS = ("deepspeed", "fsdp", "fsdp_config", "fsdp_version", "tensor_parallel_size", "context_parallel_size")
_OF_LLAMAFACTORY = (
    "FORCE_TORCHRUN", "NNODES", "NPROC_PER_NODE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "RDZV_ID", "MAX_RESTARTS",
    "OPTIM_TORCH",
)  # fmt: skip
_ON_CARDS = "--nproc_per_node=gpu"
# Installed commands that are programs, and start ranks themselves; with the word that makes them train, where they do
# more (torchtune/_cli/tune.py; setup.py of fairseq and of composer).
CONSOLE_SCRIPTS: Mapping[str, str] = {"tune": "run", "fairseq-train": "", "fairseq-hydra-train": "", "composer": ""}
ENV = "/usr/bin/env"  # finds a command in PATH, as a shell does


@dataclass
class Unwrapped:
    """words: the launcher's command; variables: that the tool sets for it; remarks: on what it did besides.

    taken: variables that only the tool reads. kind: of the program, where the tool's own tells. strategy: that the
    program sets up itself, and where it says so.
    """

    words: list[str]
    variables: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    taken: tuple[str, ...] = ()
    kind: str | None = None
    strategy: tuple[str, str] | None = None


def unwrap(words: Sequence[str], variables: Mapping[str, str], context: ImportContext) -> Unwrapped | None:
    """The command that a tool would start, None for words of no such tool. Raises UsageError for what trains nothing.

    variables: those in front of the words, and of the text around them.
    """
    tool = posixpath.basename(words[0]) if words else ""
    if is_console_script(words):
        what = f"{tool} starts its ranks itself: for trainkit it is one process."
        return Unwrapped(["python", *([] if "/" in words[0] else [ENV]), *words], remarks=[what], kind="torch")
    if tool not in TOOLS:
        return None
    made = TOOLS[tool](list(words[1:]), variables, context)
    started = " ".join(made.words[: made.words.index("-m") + 2] if "-m" in made.words else made.words[:2])
    made.remarks.insert(0, f"{tool} starts `{started}` itself; trainkit does that in its place.")
    return made


def is_console_script(words: Sequence[str]) -> bool:
    """Whether words start an installed command that trains."""
    tool = posixpath.basename(words[0]) if words else ""
    return tool in CONSOLE_SCRIPTS and CONSOLE_SCRIPTS[tool] in ("", *words[1:2])


def _llamafactory(words: list[str], variables: Mapping[str, str], context: ImportContext) -> Unwrapped:
    _require(words, ("train",), "llamafactory-cli")
    for name, why in (("USE_RAY", "Ray starts its processes"), ("MIN_NNODES", "the number of nodes may change")):
        if variables.get(name, "0").lower() not in ("0", "false", "no", "n"):
            raise UsageError(f"{name} is set: {why}, and trainkit starts a fixed number", hint=f"leave {name} out")
    program = ["llamafactory.launcher", *words[1:]]
    forced = variables.get("FORCE_TORCHRUN", "0").lower() in _YES
    visible = variables.get("CUDA_VISIBLE_DEVICES")
    made = _with_own_file(Unwrapped([], taken=_OF_LLAMAFACTORY, kind="torch"), words, context)
    if not forced and visible is not None and "," not in visible:
        made.words = ["python", "-m", *program]
        return made
    nodes, each = variables.get("NNODES", "1"), variables.get("NPROC_PER_NODE")
    flags = [_ON_CARDS if each is None else f"--nproc_per_node={each}"]
    if nodes != "1":
        place = variables.get("MASTER_ADDR", "127.0.0.1"), variables.get("MASTER_PORT", "29500")
        flags += [f"--nnodes={nodes}", f"--master_addr={place[0]}", f"--master_port={place[1]}"]
    if "RDZV_ID" in variables:
        flags.append(f"--max_restarts={variables.get('MAX_RESTARTS', '0')}")
    made.words = ["torchrun", *flags, "-m", *program]
    if variables.get("OPTIM_TORCH", "1").lower() in _YES:
        made.variables = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "TORCH_NCCL_AVOID_RECORD_STREAMS": "1"}
    return made


def _axolotl(words: list[str], variables: Mapping[str, str], context: ImportContext) -> Unwrapped:
    _require(words, ("train",), "axolotl")
    end = words.index("--") if "--" in words else len(words)
    own, launch = words[1:end], words[end + 1 :]
    launcher, kept = "accelerate", list[str]()
    for flag in script_flags(own):
        if flag.name == "launcher" and flag.values:
            launcher, kept = flag.values[0], [*kept, *flag.values[1:]]
        elif flag.name in ("num_processes", "main_process_port"):
            launch += flag.words
        elif flag.name in ("no_accelerate", "no_launcher"):
            launcher = "python"
        elif flag.name != "accelerate":
            kept += flag.words
    starts = {"accelerate": ["accelerate", "launch", *launch], "torchrun": ["torchrun", *launch], "python": ["python"]}
    if launcher not in starts:
        raise UsageError(f"axolotl has no launcher {launcher}", hint=f"choose one of: {', '.join(starts)}")
    made = Unwrapped([*starts[launcher], "-m", "axolotl.cli.train", *kept], kind="torch")
    return _with_own_file(made, own, context)


def _trl(words: list[str], variables: Mapping[str, str], context: ImportContext) -> Unwrapped:
    _require(words, ("dpo", "grpo", "kto", "reward", "rloo", "sft"), "trl")
    launch, kept = list[str](), list[str]()
    for flag in script_flags(words[1:]):
        if flag.name == "accelerate_config":
            launch += ["--config_file", _trl_config(" ".join(flag.values), context)]
        elif _is_launchers(flag.name):
            launch += flag.words
        else:
            kept += flag.words
        if flag.name == "config" and flag.values:
            for name, value in _mapping(flag.values[0], context).items():
                if name == "accelerate_config":
                    launch += ["--config_file", _trl_config(str(value), context)]
                elif _is_launchers(name):
                    launch += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return Unwrapped(["accelerate", "launch", *launch, "-m", f"trl.scripts.{words[0]}", *kept], kind="hf")


def _is_launchers(name: str) -> bool:
    """Whether a flag is of `accelerate launch` and not of Trainer."""
    return find_flag(ACCELERATE, name) is not None and name not in BY_NAME


def _trl_config(name: str, context: ImportContext) -> str:
    """The file of a configuration of TRL's own, or of the user's."""
    if name.endswith(SUFFIXES):
        return name
    folder = package_folder(context, "trl")
    file = posixpath.join(folder, "accelerate_configs", f"{name}.yaml")
    if not folder or not context.files.exists(file):
        what = f"--accelerate_config {name} is a file in the package trl, which is not installed here"
        raise UsageError(what, hint="install trl, or name the file itself: --accelerate_config FILE.yaml")
    return file


def _fabric(words: list[str], variables: Mapping[str, str], context: ImportContext) -> Unwrapped:
    _require(words, ("run",), "fabric")
    options = {"accelerator": "", "strategy": "", "devices": "1", "num_nodes": "1", "node_rank": "0",
               "main_address": "127.0.0.1", "main_port": "29400", "precision": ""}  # fmt: skip
    rest = words[1:]
    while rest and rest[0].startswith("-"):
        name, equals, value = rest.pop(0).removeprefix("--").replace("-", "_").partition("=")
        if name not in options or not (equals or rest):
            raise UsageError(f"fabric run has no flag --{name}", hint=f"its flags are: {', '.join(options)}")
        options[name] = value if equals else rest.pop(0)
    set_for = {"ACCELERATOR": "accelerator", "STRATEGY": "strategy", "PRECISION": "precision"}
    made = {f"LT_{name}": options[key] for name, key in set_for.items() if options[key]}
    made |= {"LT_CLI_USED": "1", "LT_DEVICES": options["devices"], "LT_NUM_NODES": options["num_nodes"]}
    count = options["devices"]
    each = "gpu" if count in ("auto", "-1") else str(len(count.strip(",").split(","))) if "," in count else count
    flags = [f"--nproc_per_node={each}"]
    if options["num_nodes"] != "1":
        place = f"--master_addr={options['main_address']}", f"--master_port={options['main_port']}"
        flags += [f"--nnodes={options['num_nodes']}", *place]
    # lightning/fabric/strategies/deepspeed.py: the names that it registers; a bare `deepspeed` is stage 2.
    named = re.sub(r"^deepspeed_stage_(\d).*|^deepspeed$", lambda match: f"zero{match[1] or 2}", options["strategy"])
    strategy = (named, f"--strategy={options['strategy']}") if named in (*KINDS.values(), "fsdp") else None
    return Unwrapped(["torchrun", *flags, *rest], made, kind="torch", strategy=strategy)


TOOLS: Mapping[str, Callable[[list[str], Mapping[str, str], ImportContext], Unwrapped]] = {
    "llamafactory-cli": _llamafactory,
    "lmf": _llamafactory,
    "axolotl": _axolotl,
    "trl": _trl,
    "fabric": _fabric,
}


def _require(words: list[str], commands: Sequence[str], tool: str) -> None:
    if not words or words[0] not in commands:
        shown = f"{tool} {words[0]}" if words else tool
        raise UsageError(f"{shown} starts no training", hint=f"trainkit imports: {tool} {' | '.join(commands)}")


def _with_own_file(made: Unwrapped, words: Sequence[str], context: ImportContext) -> Unwrapped:
    """What the tool's file says of how the work is spread: the program sets that up itself, and the plan says so."""
    for word in (word for word in words if word.endswith(SUFFIXES)):
        said = {name: value for name, value in _mapping(word, context).items() if name in _SPREADS and value}
        if said:
            shown = ", ".join(f"{name} {value}" for name, value in said.items())[:200]
            made.remarks.append(f"{word} says {shown}: the program sets that up itself, on the ranks of this plan.")
        engine = _mapping(str(said.get("deepspeed", "")), context)
        kind = KINDS.get(stage_of(engine)) if engine else "fsdp" if {"fsdp", "fsdp_config"} & said.keys() else None
        if kind:
            made.strategy = kind, word
    return made


def _mapping(path: str, context: ImportContext) -> Mapping[str, Any]:
    """The file as a mapping; nothing where it is not here, which the tool will say."""
    try:
        return read_mapping(context, path, f"file {path}", 1).tree
    except (UsageError, RecipeError):
        return {}
