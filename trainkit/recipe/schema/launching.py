"""Recipe sections that say what is started, where, and by whom: program, devices, nodes, launcher, output, logging."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Field

from trainkit.recipe.schema.base import Section, setting

Scalar = str | int | float | bool | None
Reporter = Literal["tensorboard", "wandb", "trackio"]
# Programs that keep their own defaults: what a recipe leaves out is not given to them.
OWN_DEFAULTS = ("hf", "accelerate", "deepspeed")
# Programs on accelerate's PartialState, Trainer's included: as soon as there is a LOCAL_RANK it sets the strategy up by
# itself, and wherever torch_xla can be imported it computes on XLA (accelerate, state.py: _prepare_backend).
ON_ACCELERATE = ("hf", "accelerate")
_PORT = r"(?:[1-9]\d{0,3}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d{2}|655[0-2]\d|6553[0-5])"  # 1 to 65535


# Why there is no number of nodes that may change while a run goes on, as torchrun's --nnodes=2:4, and what to do.
NO_RANGE = (
    (
        "with another number of ranks the generators are seeded anew and the global batch is cut otherwise: no plan "
        "would hold for the whole run, and its losses would depend on when nodes came and went"
    ),
    "write one number; a job that loses a node is queued again and goes on without it (cluster.requeue)",
)


class Program(Section):
    """The program that the processes execute."""

    kind: Literal["builtin", "hf", "accelerate", "deepspeed", "torch"] = setting(
        "builtin",
        "`builtin`: trainkit's own trainer. `hf`: your script on transformers' Trainer, whose arguments the recipe's "
        "settings become. `accelerate`: your script on `Accelerator()`, whose environment and config file they become. "
        "`deepspeed`: your script that calls deepspeed.initialize, which gets them in --deepspeed_config. "
        "`torch`: your script or module, which reads only the rank environment.",
    )
    folder: str | None = setting(
        None,
        "Folder in which your program starts, relative to the caller's working folder; program.script, and paths in "
        "program.args, are relative to it. Other paths are not.",
        reads="folder",
        missing="check the path; it starts from the working folder",
    )
    script: str | None = setting(
        None,
        "Path of the script to run, relative to program.folder, or to the caller's working folder. A name that ends in "
        ".py (.pyw, .pyc, .pyz) is run by the interpreter; any other file, such as a shell script, is executed.",
        reads="file",
        missing="put your copy into the working folder, or name it: program.script=PATH",
        here=True,
    )
    module: str | None = setting(None, "Dotted name of the module to run instead of a script.")
    args: dict[str, Scalar | list[Scalar]] | list[str] = setting(
        [],
        "Arguments for the program. A list is passed unchanged; in a mapping `key: value` becomes "
        "`--key value`, `true` a bare `--key`, `false` and `null` nothing, a list `--key a b`.",
        lines=True,
    )
    local_rank: bool | Literal["--local-rank"] = setting(
        False,
        "Also pass `--local_rank=N` to each rank, for scripts that do not read it from the environment; "
        "`--local-rank` is the spelling of torch.distributed.launch since torch 2.0.",
    )
    public: list[str] = setting(
        [],
        "Names under env and program.args that look like a secret (`sort_key`) but whose values are not, so that "
        "they are allowed in the recipe.",
    )
    reads_recipe: bool = setting(
        False,
        "Your program reads the file in TRAINKIT_RECIPE, so that all settings reach it.",
    )
    verify: bool | Literal["auto"] = setting(
        "auto",
        "End the run when the first optimizer step shows another strategy, world size, device or number format than "
        "planned, or (`hf`) other values in TrainingArguments; `auto` does so for programs whose "
        "libraries set up the strategy (`hf`, `accelerate`), and warns for other Python programs. With `true` a "
        "run of which nothing could be seen has failed.",
    )

    def seen(self, path: str) -> str:
        """A path of the program's as seen from the caller's working folder."""
        return posixpath.join(self.folder or "", path)


class Devices(Section):
    """Which accelerators the run uses."""

    type: Literal["auto", "cuda", "mps", "cpu", "xla"] = setting(
        "auto",
        "Kind of device; `auto` takes CUDA, else MPS, else CPU. `xla` is a TPU through torch_xla, for your own "
        "scripts: one process, over every chip of the machine with `strategy.kind: fsdp`.",
    )
    select: Literal["auto", "all", "free", "none"] | Annotated[int, Field(ge=1, le=4096)] | list[int | str] = setting(
        "auto",
        "Which GPUs: `auto` (as many as the strategy needs), `all`, `free` (idle ones: as many as "
        "nodes.processes_per_node says), `none`, a count, or a list of indices, UUIDs, prefixes of these or MIG ids in "
        "rank order. "
        "Becomes CUDA_VISIBLE_DEVICES.",
    )
    order: Literal["auto", "pci", "fastest"] = setting(
        "auto",
        "How GPUs are numbered and selected: `pci` like nvidia-smi, `fastest` with the fastest first, like CUDA by "
        "default. `auto` follows an exported CUDA_DEVICE_ORDER; else it is `fastest` for your own program, "
        "as CUDA numbers them, and `pci` for trainkit's own trainer and for a list of GPUs. Becomes "
        "CUDA_DEVICE_ORDER.",
    )
    when_busy: Literal["refuse", "warn", "wait"] = setting(
        "refuse",
        "What happens if a selected GPU is in use: the run is refused, starts with a warning, or waits until it is "
        "free (also `trainkit run --wait`), after the runs that came before it. A run that waits takes any GPUs that "
        "are free, as many as `select` says, unless it lists them.",
    )
    idle_below: int = setting(
        1024,
        "A GPU counts as idle while less of its memory than this is used for computing; a desktop's share is not "
        "counted.",
        unit="MiB",
        ge=1,
    )


class Nodes(Section):
    """How many machines, and how many processes on each."""

    count: int = setting(1, "Number of machines.", ge=1, le=100_000)
    processes_per_node: Literal["auto"] | Annotated[int, Field(ge=1, le=4096)] = setting(
        "auto",
        "Processes per machine; `auto` is one for `single`, else one per selected GPU, and two on a CPU (one of "
        "your own program with `devices.select: all`). With fewer processes than GPUs, every process of your own "
        "program sees all GPUs.",
    )
    rendezvous: str = setting(
        "auto",
        "`host:port` of node 0, where the nodes meet; `auto` is a free local port on one machine.",
        pattern=rf"^(auto|([^\s:]+|\[[0-9a-fA-F:]+\]):{_PORT})$",
        expects="`auto` or host:port with a port from 1 to 65535",
    )


class Launcher(Section):
    """Who starts the processes."""

    kind: Literal["auto", "python", "torchrun", "accelerate", "deepspeed"] = setting(
        "auto", "`auto` is `python` for one process and `torchrun` for several; `accelerate` for programs of that kind."
    )
    max_restarts: int = setting(
        0, "How often the launcher restarts all ranks after a failure (torchrun and accelerate).", ge=0
    )
    grace_seconds: float = setting(
        30.0, "Time between TERM and KILL when a run is ended.", unit="seconds", ge=0, le=86_400
    )
    numa_binding: Literal["none", "node"] = setting(
        "none",
        "`node` keeps each rank, under any launcher, on the cores next to its GPU (Linux; without GPUs ranks are "
        "spread over the NUMA nodes).",
    )


class Hang(Section):
    """When a run counts as hanging, and what happens then."""

    after_seconds: Literal["auto"] | Annotated[float, Field(ge=0, le=10**6)] = setting(
        "auto",
        "How long all ranks may be idle before a hang is reported: which rank blocks the run, and where, with "
        "the stacks "
        "of all. `auto` is the longest of two minutes, 20 median steps, and three times the longest duration "
        "of the same "
        "phase (such as a checkpoint); 0 disables the watch.",
        unit="seconds",
    )
    start_seconds: float = setting(
        1800.0,
        "The same before the first step, and for phases that have not finished once in this run: a first "
        "checkpoint, a first "
        "forward pass that compiles.",
        unit="seconds",
        gt=0,
        le=10**6,
    )
    then: Literal["auto", "report", "end"] = setting(
        "auto",
        "What happens after the report: `report` keeps waiting, `end` ends the run with exit code 124; `auto` "
        "is `report` "
        "unless a restart is configured.",
    )
    collective_seconds: int = setting(
        600,
        "Timeout of a collective: how long a rank may wait for the others before torch fails, and with it the run.",
        unit="seconds",
        flag="ddp_timeout",
        ge=1,
        le=10**9,  # people write 180000000 for "never"
    )


class Output(Section):
    """Where runs write their files."""

    root: str = setting(
        "runs",
        "Folder of run directories; a run gets `<root>/<name>/<timestamp>-<id>/`.",
        flag="output_dir",
        reads="output",
        pattern=r"\S",
        expects="a folder",
    )


class Logging(Section):
    """What is logged, by which rank, and how often."""

    level: Literal["debug", "info", "warning", "error", "critical"] = setting(
        "info", "Log level of the main rank.", flag="log_level"
    )
    replica_level: Literal["debug", "info", "warning", "error", "critical"] = setting(
        "warning", "Log level of every other rank.", flag="log_level_replica"
    )
    each_node: bool = setting(
        True, "Whether the first rank of each node counts as a main rank.", flag="log_on_each_node"
    )
    every_steps: int = setting(
        10, "Write a metrics line every so many optimizer steps.", unit="steps", ge=1, flag="logging_steps"
    )
    report_to: list[Reporter] = setting(
        [],
        "Where metrics go in addition to metrics.jsonl, which is always written: `tensorboard`, `wandb` "
        "(Weights & Biases, by wandb's own login and settings), `trackio` (on this machine).",
        flag="report_to",
    )


def argument(args: Mapping[str, Any] | Sequence[Any], name: str) -> str | None:
    """The value of the last `--name VALUE` or `--name=VALUE` in `program.args`; None without one."""
    argv = program_argv(args)
    found = [after for word, after in pairwise(argv) if word == f"--{name}"]
    found += [word.partition("=")[2] for word in argv if word.startswith(f"--{name}=")]
    return found[-1] if found else None


def program_argv(args: Mapping[str, Any] | Sequence[Any]) -> list[str]:
    """`program.args` as the program gets them: a list as it is, a mapping as flags (see `Program.args`)."""
    if not isinstance(args, Mapping):
        return [str(each) for each in args]
    argv: list[str] = []
    for name, value in args.items():
        if value is None or value is False:
            continue
        argv.append(f"--{name}")
        if value is not True:
            argv += [str(each) for each in (value if isinstance(value, list) else [value])]
    return argv
