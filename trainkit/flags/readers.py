"""Flags that mean several settings, or whose words differ from the recipe's: one function each, one table of all."""

from __future__ import annotations

from trainkit.flags.flag import Flag, Outcome, Reader, Use, setting_reader, switched_on
from trainkit.flags.optimizer import optim, optim_args
from trainkit.lazy import call


def _dtype(dtype: str) -> Reader:
    def read(use: Use) -> Outcome:
        if switched_on(use):
            return [use.assign("precision.dtype", dtype)], []
        # `--bf16=false` takes bf16 back, and leaves fp16 alone.
        return ([use.assign("precision.dtype", "fp32")] if use.current("precision.dtype") == dtype else []), []

    return read


def _compile(key: str) -> Reader:
    """Naming a backend or a mode asks for compilation, as it does in HF's TrainingArguments."""
    inner = setting_reader(key)

    def read(use: Use) -> Outcome:
        assignments, found = inner(use)
        switch = [] if "torch_compile" in use.given else [use.assign("efficiency.compile.enabled", True)]
        return [*switch, *assignments], found

    return read


def _gradient_checkpointing(use: Use) -> Outcome:
    """The bare switch leaves a file's choice of blocks as it is."""
    key = "efficiency.gradient_checkpointing.every"
    if not switched_on(use):
        selective = key.replace(".every", ".selective")
        return [use.assign(key, False), *([use.assign(selective, False)] if use.current(selective) else [])], []
    return ([] if use.current(key) else [use.assign(key, True)]), []


def _epochs(use: Use) -> Outcome:
    """Epochs asked for on the command line are not beaten by steps in a file."""
    assignments, found = setting_reader("train.epochs")(use)
    if "max_steps" not in use.given and use.current("train.steps") is not None:
        assignments.append(use.assign("train.steps", None))
    return assignments, found


def _max_steps(use: Use) -> Outcome:
    """-1 is HF's word for no limit."""
    return ([use.assign("train.steps", None)], []) if use.value == "-1" else setting_reader("train.steps")(use)


def _resume(use: Use) -> Outcome:
    word = {"true": "auto", "false": "never"}.get((use.value or "").lower(), use.value)
    return [use.assign("checkpoint.resume", word)], []


_REPORTERS = ("tensorboard", "wandb")


def _report_to(use: Use) -> Outcome:
    words = (use.value or "").strip("[]").replace(",", " ").split()
    value = {"none": [], "all": list(_REPORTERS)}.get(words[0] if len(words) == 1 else "", words)
    for word in value:
        if word not in _REPORTERS:
            hint = f"write {', '.join(_REPORTERS)} or none; metrics.jsonl is always written, for any other tool to read"
            return [], [use.error(f"--report_to does not know {word!r}", hint, key="logging.report_to")]
    return [use.assign("logging.report_to", value)], []


def _processes_per_node(use: Use) -> Outcome:
    if use.value in ("gpu", "cpu"):
        device = {"gpu": "cuda", "cpu": "cpu"}[use.value]
        return [use.assign("devices.type", device), use.assign("nodes.processes_per_node", "auto")], []
    return setting_reader("nodes.processes_per_node")(use)


def _num_processes(use: Use) -> Outcome:
    """accelerate counts the processes of all machines."""
    assignments, found = setting_reader("nodes.processes_per_node")(use)
    nodes = use.current("nodes.count")
    total = assignments[0].value if assignments else None
    if type(nodes) is not int or nodes <= 1 or type(total) is not int:
        return assignments, found
    if total % nodes:
        hint = f"give a multiple of {nodes}, or --nproc_per_node for each machine"
        return [], [
            use.error(
                f"--num_processes {total} does not divide over nodes.count {nodes}",
                hint,
                key="nodes.processes_per_node",
            )
        ]
    return [use.assign("nodes.processes_per_node", total // nodes)], found


def _num_gpus(use: Use) -> Outcome:
    selected, found = setting_reader("devices.select")(use)
    return [*selected, *setting_reader("nodes.processes_per_node")(use)[0]], found


# Who knows the words of --fsdp and the files of --fsdp_config and --deepspeed.
_STRATEGY = "trainkit.frameworks.hf_trainer.strategy_flags"

SPECIAL = (
    Flag("bf16", "switch", ("precision.dtype",), "Compute in bfloat16.", _dtype("bf16")),
    Flag("fp16", "switch", ("precision.dtype",), "Compute in float16, with loss scaling.", _dtype("fp16")),
    Flag(
        "fsdp",
        "optional",
        ("strategy.kind", "strategy.sharding", "strategy.auto_wrap", "strategy.offload"),
        "Shard with FSDP2. Words: full_shard or shard_grad_op, auto_wrap, offload.",
        call(f"{_STRATEGY}:fsdp"),
        metavar='"WORDS"',
    ),
    Flag(
        "fsdp_config",
        "value",
        ("strategy",),
        "A JSON or YAML file with HF's FSDP settings.",
        call(f"{_STRATEGY}:fsdp_config"),
        metavar="FILE",
    ),
    Flag(
        "deepspeed",
        "value",
        ("strategy.kind", "strategy.config"),
        "A DeepSpeed JSON file: its ZeRO stage is the strategy, and it is the base of the generated file.",
        call(f"{_STRATEGY}:deepspeed"),
        metavar="FILE",
    ),
    Flag(
        "torch_compile_backend",
        "value",
        ("efficiency.compile.backend", "efficiency.compile.enabled"),
        "Compile with this backend.",
        _compile("efficiency.compile.backend"),
        metavar="BACKEND",
    ),
    Flag(
        "torch_compile_mode",
        "value",
        ("efficiency.compile.mode", "efficiency.compile.enabled"),
        "Compile in this mode.",
        _compile("efficiency.compile.mode"),
        metavar="MODE",
    ),
    Flag(
        "gradient_checkpointing",
        "switch",
        ("efficiency.gradient_checkpointing.every",),
        "Recompute block activations in backward: less memory, about a quarter more time.",
        _gradient_checkpointing,
    ),
    Flag(
        "optim",
        "value",
        ("optimizer.name",),
        "Optimizer: a name as in optimizer.name, or a class by its import path.",
        optim,
        metavar="NAME|pkg.mod:Class",
    ),
    Flag(
        "optim_args",
        "value",
        ("optimizer.args",),
        "Further arguments of the optimizer's class, as name=value,name=value.",
        optim_args,
        metavar="NAME=VALUE,...",
    ),
    Flag(
        "num_train_epochs",
        "value",
        ("train.epochs",),
        "Passes over the data; replaces a file's train.steps.",
        _epochs,
        metavar="EPOCHS",
    ),
    Flag("max_steps", "value", ("train.steps",), "Optimizer steps; -1 for no limit.", _max_steps, "steps", "STEPS"),
    Flag(
        "resume_from_checkpoint",
        "value",
        ("checkpoint.resume",),
        "true: the newest complete checkpoint of an earlier run of this name; false: none; or a path.",
        _resume,
        metavar="true|false|PATH",
    ),
    Flag(
        "report_to",
        "value",
        ("logging.report_to",),
        "Where metrics go besides metrics.jsonl; none for nowhere else.",
        _report_to,
        metavar="none|tensorboard|wandb",
    ),
    Flag(
        "nproc_per_node",
        "value",
        ("nodes.processes_per_node",),
        "Processes on each machine (torchrun's flag).",
        _processes_per_node,
        metavar="N|auto|gpu|cpu",
    ),
    Flag(
        "num_processes",
        "value",
        ("nodes.processes_per_node",),
        "Processes over all machines (accelerate's flag).",
        _num_processes,
        metavar="N",
    ),
    Flag(
        "num_gpus",
        "value",
        ("devices.select", "nodes.processes_per_node"),
        "Cards, and a process on each (deepspeed's flag).",
        _num_gpus,
        metavar="N",
    ),
)
