"""Flags that mean several settings, or whose values differ from the recipe's: a reader for each, and their table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import get_args

from trainkit.errors import Diagnostic
from trainkit.flags.flag import Flag, Outcome, Reader, Use, setting_reader
from trainkit.lazy import call
from trainkit.optimizers import OPTIMIZERS
from trainkit.recipe.layers.assignment import Assignment
from trainkit.recipe.layers.layer import ARGUMENTS
from trainkit.recipe.schema.launching import Reporter

PROFILED = 3  # steps: enough to see one that is like another
ONLY_AT_THE_END = 1_000_000_000  # eval.every_steps evaluates at the end in any case
_REPORTERS = get_args(Reporter)
_PROCESSES = "nodes.processes_per_node"


def _dtype(dtype: str) -> Reader:
    def read(use: Use) -> Outcome:
        if use.on:
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
    if not use.on:
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
        return [use.assign("devices.type", device), use.assign(_PROCESSES, "auto")], []
    return setting_reader(_PROCESSES)(use)


def _num_processes(use: Use) -> Outcome:
    """accelerate counts the processes of all machines."""
    assignments, found = setting_reader(_PROCESSES)(use)
    nodes = use.current("nodes.count")
    total = assignments[0].value if assignments else None
    if type(nodes) is not int or nodes <= 1 or type(total) is not int:
        return assignments, found
    if total % nodes:
        hint = f"give a multiple of {nodes}, or --nproc_per_node for each machine"
        return [], [use.error(f"--num_processes {total} is no multiple of nodes.count {nodes}", hint, key=_PROCESSES)]
    return [use.assign(_PROCESSES, total // nodes)], found


def _num_gpus(use: Use) -> Outcome:
    selected, found = setting_reader("devices.select")(use)
    return [*selected, *setting_reader(_PROCESSES)(use)[0]], found


def _optim(use: Use) -> Outcome:
    """HF has two names for some optimizers."""
    name = next((name for name, each in OPTIMIZERS.items() if use.value in each.hf_aliases), use.value)
    return setting_reader("optimizer.name")(replace(use, value=name))


def _optim_args(use: Use) -> Outcome:
    """Each argument is one entry of optimizer.args; those that a file gives besides stay."""
    form = "write it as name=value,name=value, for example momentum=0.9,nesterov=true"
    assignments: list[Assignment] = []
    found: list[Diagnostic] = []
    seen: set[str] = set()
    for part in (use.value or "").split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not name.isidentifier():
            found.append(use.error(f"--optim_args: {part!r} is no argument", form, key="optimizer.args"))
        elif name in seen:
            found.append(use.error(f"--optim_args gives {name} twice", "keep one of the two", key="optimizer.args"))
        else:
            seen.add(name)
            made, problems = setting_reader(f"optimizer.args.{name}")(replace(use, value=value))
            assignments += made
            found += problems
    return assignments, found


def _for_script(use: Use) -> bool:
    """Whether the program is the user's own: its script says what a phase is."""
    return use.current("program.kind") not in (None, "builtin")


def _to_script(use: Use) -> Outcome:
    """The flag as an argument of the program, where these are given by name."""
    args = use.current(ARGUMENTS)
    if args is None or isinstance(args, Mapping):
        return [use.assign(f"{ARGUMENTS}.{use.name}", use.on)], []
    hint = f"write it behind the end of trainkit's own: -- --{use.name}"
    return [], [use.error(f"--{use.name} is for the program, whose arguments are given as a list", hint, key=ARGUMENTS)]


def _do_train(use: Use) -> Outcome:
    """Training is what a run does anyway; only its denial changes something."""
    if _for_script(use):
        return _to_script(use)
    return ([] if use.on else [use.assign("train.steps", 0)]), []


def _do_eval(use: Use) -> Outcome:
    """Alone it evaluates and trains nothing; beside `--do_train` it evaluates after training."""
    if _for_script(use):
        return _to_script(use)
    if not use.on:
        return [], []
    if "do_train" not in use.given:
        return [use.assign("train.steps", 0)], []
    silent = "eval_steps" not in use.given and not use.current("eval.every_steps")
    return ([use.assign("eval.every_steps", ONLY_AT_THE_END)] if silent else []), []


def _do_predict(use: Use) -> Outcome:
    """Alone it predicts the validation samples and trains nothing; beside `--do_train` it does so after training."""
    if not use.on:
        return [use.assign("predict.split", "none")], []
    chosen = use.current("predict.split")
    made = [use.assign("predict.split", chosen if chosen not in (None, "none") else "validation")]
    return made + ([] if "do_train" in use.given else [use.assign("train.steps", 0)]), []


def _profile(use: Use) -> Outcome:
    """The bare flag watches a few steps, or as many as a file says."""
    if use.value is not None:
        return setting_reader("profile.steps")(use)
    return ([] if use.current("profile.steps") else [use.assign("profile.steps", PROFILED)]), []


# What knows the words of --fsdp and the files of --fsdp_config and --deepspeed.
_STRATEGY = "trainkit.frameworks.hf_trainer.strategy_flags"


def _flag(usage: str, keys: str, help_: str, read: Reader, unit: str = "") -> Flag:
    return Flag(usage, tuple(keys.split()), help_, read, unit)


SPECIAL = (
    _flag("--bf16", "precision.dtype", "Compute in bfloat16.", _dtype("bf16")),
    _flag("--fp16", "precision.dtype", "Compute in float16, with loss scaling.", _dtype("fp16")),
    _flag(
        '--fsdp ["WORDS"]',
        "strategy.kind strategy.sharding strategy.auto_wrap strategy.offload",
        "Shard with FSDP2. Words: full_shard or shard_grad_op, auto_wrap, offload.",
        call(f"{_STRATEGY}:fsdp"),
    ),
    _flag(
        "--fsdp_config FILE",
        "strategy",
        "A JSON or YAML file with HF's FSDP settings.",
        call(f"{_STRATEGY}:fsdp_config"),
    ),
    _flag(
        "--deepspeed FILE",
        "strategy.kind strategy.config",
        "A DeepSpeed JSON file: its ZeRO stage is the strategy, and it is the base of the generated file.",
        call(f"{_STRATEGY}:deepspeed"),
    ),
    _flag(
        "--torch_compile_backend BACKEND",
        "efficiency.compile.backend efficiency.compile.enabled",
        "Compile with this backend.",
        _compile("efficiency.compile.backend"),
    ),
    _flag(
        "--torch_compile_mode MODE",
        "efficiency.compile.mode efficiency.compile.enabled",
        "Compile in this mode.",
        _compile("efficiency.compile.mode"),
    ),
    _flag(
        "--gradient_checkpointing",
        "efficiency.gradient_checkpointing.every",
        "Recompute block activations in backward: less memory, about a quarter more time.",
        _gradient_checkpointing,
    ),
    _flag(
        "--optim NAME|pkg.mod:Class",
        "optimizer.name",
        "Optimizer: a name as in optimizer.name, or a class by its import path.",
        _optim,
    ),
    _flag(
        "--optim_args NAME=VALUE,...",
        "optimizer.args",
        "Further arguments of the optimizer's class, as name=value,name=value.",
        _optim_args,
    ),
    _flag("--num_train_epochs EPOCHS", "train.epochs", "Passes over the data; replaces a file's train.steps.", _epochs),
    _flag("--max_steps STEPS", "train.steps", "Optimizer steps; -1 for no limit.", _max_steps, "steps"),
    _flag(
        "--resume_from_checkpoint true|false|PATH",
        "checkpoint.resume",
        "true: the newest complete checkpoint of an earlier run of this name; false: none; or a path.",
        _resume,
    ),
    _flag(
        f"--report_to none|{'|'.join(_REPORTERS)}",
        "logging.report_to",
        "Where metrics go besides metrics.jsonl; none for nowhere else.",
        _report_to,
    ),
    _flag(
        "--nproc_per_node N|auto|gpu|cpu",
        "nodes.processes_per_node",
        "Processes on each machine (torchrun's flag).",
        _processes_per_node,
    ),
    _flag(
        "--num_processes N",
        "nodes.processes_per_node",
        "Processes over all machines (accelerate's flag).",
        _num_processes,
    ),
    _flag(
        "--num_gpus N",
        "devices.select nodes.processes_per_node",
        "GPUs, and a process on each (deepspeed's flag).",
        _num_gpus,
    ),
    _flag(
        "--do_train",
        "train.steps program.args",
        "Train, which is the default; `false` trains nothing. A script of your own gets the flag itself.",
        _do_train,
    ),
    _flag(
        "--do_eval",
        "train.steps eval.every_steps program.args",
        "Evaluate and train nothing; with --do_train, evaluate after training (at least). A script of your own gets "
        "the flag itself.",
        _do_eval,
    ),
    _flag(
        "--do_predict",
        "train.steps predict.split",
        "Predict (the validation samples, unless predict.split says others) and train nothing; with --do_train, "
        "predict after training.",
        _do_predict,
    ),
    _flag(
        "--profile [STEPS]",
        "profile.steps",
        f"Profile some steps with torch.profiler ({PROFILED} where no number is given): time by groups of operators, "
        "and a trace file.",
        _profile,
        "steps",
    ),
)
