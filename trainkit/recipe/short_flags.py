"""Flags with a reader of their own (`SPECIAL`), and how one use of a flag is read and sets recipe keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from trainkit.errors import Diagnostic, Origin
from trainkit.lazy import call
from trainkit.metrics import PREFIX
from trainkit.optimizers import OPTIMIZERS
from trainkit.recipe.assignment import Assignment, read_value
from trainkit.recipe.layer import ARGUMENTS
from trainkit.recipe.paths import FileChecks
from trainkit.recipe.schema.launching import Reporter

ON, OFF = ("true", "1", "yes"), ("false", "0", "no")  # values of a switch


@dataclass(frozen=True)
class ParsedFlag:
    """One flag as it was used. value: its text, None for a bare flag; current: the weaker layers' value at a key."""

    name: str
    value: str | None
    origin: Origin
    cwd: str
    files: FileChecks
    current: Callable[[str], Any]
    given: frozenset[str]  # names of all flags on this command line

    def assign(self, key: str, value: Any) -> Assignment:
        """The assignment of a value to a key, with this flag as origin."""
        return Assignment(key, value, self.origin)

    def error(self, what: str, hint: str, *, why: str = "", key: str = "", origin: Origin | None = None) -> Diagnostic:
        """An error at this flag, or at a place in the file that it names."""
        return Diagnostic("error", what, key, origin or self.origin, why, hint)

    @property
    def on(self) -> bool:
        """Whether a switch is meant to be on: bare, or with a true word."""
        return self.value is None or self.value.lower() in ON


Outcome = tuple[list[Assignment], list[Diagnostic]]
FlagReader = Callable[[ParsedFlag], Outcome]


@dataclass(frozen=True)
class Flag:
    """One named flag.

    usage: `--bf16` is a switch, `--seed SEED` takes a value, `--profile [STEPS]` may take one.
    keys: the recipe keys that it sets. read: what a use of it means.
    """

    usage: str
    keys: tuple[str, ...]
    help: str
    read: FlagReader
    unit: str = ""

    @property
    def name(self) -> str:
        """The name with underscores, without dashes."""
        return self.usage[2:].partition(" ")[0]

    @property
    def takes(self) -> Literal["value", "switch", "optional"]:
        """Whether a value follows."""
        metavar = self.usage.partition(" ")[2]
        return "optional" if metavar.startswith("[") else "value" if metavar else "switch"


def setting_reader(key: str, modifier: str = "") -> FlagReader:
    """Set a key to the flag's value, read as YAML. modifier: that of a dotted override."""

    def read(use: ParsedFlag) -> Outcome:
        value, found = read_value(key, use.value or "", use.origin)
        failed = any(each.severity == "error" for each in found)
        return ([] if failed else [Assignment(key, value, use.origin, modifier)]), found

    return read


def switch_reader(key: str) -> FlagReader:
    """Set a key that is true or false."""
    return lambda use: ([use.assign(key, use.on)], [])


ONLY_AT_THE_END = 1_000_000_000  # eval.every_steps evaluates at the end in any case
_PROCESSES = "nodes.processes_per_node"
_PUSH = "checkpoint.push_to_hub"
_REPORTERS = get_args(Reporter)
# What knows the words of --fsdp and the files of --fsdp_config and --deepspeed; imported for them alone.
_STRATEGY = "trainkit.tools.hf.strategy_flags"


def _reporters(value: Any) -> Mapping[str, Any]:
    names = value if isinstance(value, list) else str(value or "").strip("[]").replace(",", " ").split()
    every = [name for name in _REPORTERS if name != "trackio"]  # for HF "all" is what is installed
    return {"logging.report_to": [] if names == ["none"] else every if names == ["all"] else names}


# Settings that a value of HF's means where it is not the recipe's own: for flags, and for the fields of that name.
HF_VALUES: Mapping[str, Callable[[Any], Mapping[str, Any]]] = {
    "max_steps": lambda value: {"train.steps": None if value == -1 else value},
    "optim": lambda value: {
        "optimizer.name": next((name for name, each in OPTIMIZERS.items() if value in each.hf_aliases), value)
    },
    "lr_scheduler_type": lambda value: {"schedule.name": "wsd" if value == "warmup_stable_decay" else value},
    "report_to": _reporters,
    "metric_for_best_model": lambda value: {"eval.best_metric": str(value).removeprefix(PREFIX)},
    "hub_strategy": lambda value: {f"{_PUSH}.strategy": "all" if value == "all_checkpoints" else value},
    "resume_from_checkpoint": lambda value: {
        "checkpoint.resume": {"true": "auto", "false": "never"}.get(str(value).lower(), value)
    },
    # Naming a backend or a mode switches compilation on in Trainer.
    "torch_compile_backend": lambda value: {"efficiency.compile.enabled": True, "efficiency.compile.backend": value},
    "torch_compile_mode": lambda value: {"efficiency.compile.enabled": True, "efficiency.compile.mode": value},
}


def _by_value(key: str) -> FlagReader:
    """Set a key, and what goes with it, to what HF's value of the flag means."""

    def read(use: ParsedFlag) -> Outcome:
        assignments, found = setting_reader(key)(use)
        settings = HF_VALUES[use.name](assignments[0].value) if assignments else {}
        # What a flag only implies gives way to the flag that says it.
        said = [each for each in settings if each == key or "torch_compile" not in use.given]
        return [use.assign(each, settings[each]) for each in said], found

    return read


SPECIAL = [
    Flag(
        '--fsdp ["WORDS"]',
        ("strategy.kind", "strategy.sharding", "strategy.auto_wrap", "strategy.offload"),
        "Shard with FSDP2. Values: full_shard or shard_grad_op, auto_wrap, offload.",
        call(f"{_STRATEGY}:fsdp"),
    ),
    Flag(
        "--fsdp_config FILE",
        ("strategy",),
        "A JSON or YAML file with HF's FSDP settings.",
        call(f"{_STRATEGY}:fsdp_config"),
    ),
    Flag(
        "--deepspeed FILE",
        ("strategy.kind", "strategy.config"),
        "A DeepSpeed JSON file: its ZeRO stage is the strategy, and it is the base of the generated file.",
        call(f"{_STRATEGY}:deepspeed"),
    ),
    Flag(
        "--torch_compile_backend BACKEND",
        ("efficiency.compile.backend", "efficiency.compile.enabled"),
        "Compile with this backend.",
        _by_value("efficiency.compile.backend"),
    ),
    Flag(
        "--torch_compile_mode MODE",
        ("efficiency.compile.mode", "efficiency.compile.enabled"),
        "Compile in this mode.",
        _by_value("efficiency.compile.mode"),
    ),
    Flag(
        "--optim NAME|pkg.mod:Class",
        ("optimizer.name",),
        "Optimizer: a name as in optimizer.name, or a class by its import path.",
        _by_value("optimizer.name"),
    ),
    Flag(
        "--lr_scheduler_type NAME",
        ("schedule.name",),
        "Shape of the learning rate after warm-up, as in schedule.name; `warmup_stable_decay` is wsd.",
        _by_value("schedule.name"),
    ),
    Flag(
        "--metric_for_best_model METRIC",
        ("eval.best_metric",),
        "What decides which evaluation is the best: loss, or a metric.",
        _by_value("eval.best_metric"),
    ),
    Flag("--max_steps STEPS", ("train.steps",), "Optimizer steps; -1 for no limit.", _by_value("train.steps"), "steps"),
    Flag(
        "--resume_from_checkpoint true|false|PATH",
        ("checkpoint.resume",),
        "true: the newest complete checkpoint of an earlier run of this name; false: none; or a path.",
        _by_value("checkpoint.resume"),
    ),
    Flag(
        "--hub_strategy end|every_save|checkpoint|all",
        (f"{_PUSH}.strategy",),
        "What is uploaded to the Hub, and when: values of checkpoint.push_to_hub.strategy; all_checkpoints is all.",
        _by_value(f"{_PUSH}.strategy"),
    ),
]


def _flag(usage: str, *keys: str, unit: str = "") -> Callable[[FlagReader], FlagReader]:
    """Declare a flag by its reader, whose docstring is the flag's help."""

    def declare(read: FlagReader) -> FlagReader:
        SPECIAL.append(Flag(usage, keys, " ".join((read.__doc__ or "").split()), read, unit))
        return read

    return declare


def _dtype(use: ParsedFlag) -> Outcome:
    if use.on:
        return [use.assign("precision.dtype", use.name)], []
    # `--bf16=false` takes bf16 back, and leaves fp16 alone.
    return ([use.assign("precision.dtype", "fp32")] if use.current("precision.dtype") == use.name else []), []


SPECIAL.append(Flag("--bf16", ("precision.dtype",), "Compute in bfloat16.", _dtype))
SPECIAL.append(Flag("--fp16", ("precision.dtype",), "Compute in float16, with loss scaling.", _dtype))


@_flag("--gradient_checkpointing", "efficiency.gradient_checkpointing.every")
def _gradient_checkpointing(use: ParsedFlag) -> Outcome:
    """Recompute block activations in backward: less memory, about a quarter more time."""
    key = "efficiency.gradient_checkpointing.every"
    if not use.on:
        selective = key.replace(".every", ".selective")
        return [use.assign(key, False), *([use.assign(selective, False)] if use.current(selective) else [])], []
    # The bare switch leaves a file's choice of blocks as it is.
    return ([] if use.current(key) else [use.assign(key, True)]), []


@_flag("--num_train_epochs EPOCHS", "train.epochs")
def _epochs(use: ParsedFlag) -> Outcome:
    """Passes over the data; replaces a file's train.steps."""
    assignments, found = setting_reader("train.epochs")(use)
    on_line = use.current("--train.steps")
    if "max_steps" not in use.given and not on_line and use.current("train.steps") is not None:
        assignments.append(use.assign("train.steps", None))
    return assignments, found


@_flag(f"--report_to none|{'|'.join(_REPORTERS)}", "logging.report_to")
def _report_to(use: ParsedFlag) -> Outcome:
    """Where metrics go in addition to metrics.jsonl; none for nowhere else."""
    assignments, found = _by_value("logging.report_to")(use)
    if unknown := [each for made in assignments for each in made.value if each not in _REPORTERS]:
        hint = f"write {', '.join(_REPORTERS)} or none; metrics.jsonl is always written, for any other tool to read"
        return [], [use.error(f"--report_to does not know {unknown[0]!r}", hint, key="logging.report_to")]
    return assignments, found


@_flag("--push_to_hub", f"{_PUSH}.repo")
def _push_to_hub(use: ParsedFlag) -> Outcome:
    """Upload to the repository of --hub_model_id, or of the recipe; `false` uploads nothing."""
    key = f"{_PUSH}.repo"
    if not use.on:
        return [use.assign(key, None)], []
    if "hub_model_id" in use.given or use.current(key):
        return [], []
    return [], [use.error("--push_to_hub names no repository", "add --hub_model_id owner/name", key=key)]


@_flag("--nproc_per_node N|auto|gpu|cpu", _PROCESSES)
def _processes_per_node(use: ParsedFlag) -> Outcome:
    """Processes per machine (torchrun's flag)."""
    if use.value in ("gpu", "cpu"):
        device = {"gpu": "cuda", "cpu": "cpu"}[use.value]
        return [use.assign("devices.type", device), use.assign(_PROCESSES, "auto")], []
    return setting_reader(_PROCESSES)(use)


@_flag("--num_processes N", _PROCESSES)
def _num_processes(use: ParsedFlag) -> Outcome:
    """Processes over all machines (accelerate's flag)."""
    assignments, found = setting_reader(_PROCESSES)(use)
    nodes = use.current("nodes.count")
    total = assignments[0].value if assignments else None
    if type(nodes) is not int or nodes <= 1 or type(total) is not int:
        return assignments, found
    if total % nodes:
        hint = f"give a multiple of {nodes}, or --nproc_per_node for each machine"
        return [], [
            use.error(f"--num_processes {total} is not a multiple of nodes.count {nodes}", hint, key=_PROCESSES)
        ]
    return [use.assign(_PROCESSES, total // nodes)], found


@_flag("--num_gpus N", "devices.select", _PROCESSES)
def _num_gpus(use: ParsedFlag) -> Outcome:
    """Number of GPUs, with one process on each (deepspeed's flag)."""
    selected, found = setting_reader("devices.select")(use)
    return [*selected, *setting_reader(_PROCESSES)(use)[0]], found


@_flag("--optim_args NAME=VALUE,...", "optimizer.args")
def _optim_args(use: ParsedFlag) -> Outcome:
    """Further arguments of the optimizer's class, as name=value,name=value."""
    form = "write it as name=value,name=value, for example momentum=0.9,nesterov=true"
    assignments: list[Assignment] = []
    found: list[Diagnostic] = []
    seen: set[str] = set()
    # Each argument is one entry of optimizer.args; those that a file gives besides stay.
    for part in (use.value or "").split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not name.isidentifier():
            found.append(use.error(f"--optim_args: {part!r} is not an argument", form, key="optimizer.args"))
        elif name in seen:
            found.append(use.error(f"--optim_args gives {name} twice", "keep one of the two", key="optimizer.args"))
        else:
            seen.add(name)
            made, problems = setting_reader(f"optimizer.args.{name}")(replace(use, value=value))
            assignments += made
            found += problems
    return assignments, found


def _to_script(use: ParsedFlag, value: Any) -> Outcome | None:
    """The flag as an argument of the user's own program, whose script says what it means; None for the built-in."""
    if use.current("program.kind") in (None, "builtin"):
        return None
    args = use.current(ARGUMENTS)
    if args is None or isinstance(args, Mapping):
        return [use.assign(f"{ARGUMENTS}.{use.name}", value)], []
    hint = f"write it after trainkit's own arguments: -- --{use.name}"
    return [], [use.error(f"--{use.name} is for the program, whose arguments are given as a list", hint, key=ARGUMENTS)]


def _to_trainer(use: ParsedFlag) -> Outcome | None:
    """What a recipe has no word for, as an argument of a script on Trainer; None for any other program."""
    return _to_script(use, use.value) if use.current("program.kind") == "hf" else None


# How often, by HF's words: the key, and what Trainer takes where no number is given.
_EVERY = {"eval": "eval.every_steps", "save": "checkpoint.every_steps", "logging": "logging.every_steps"}
_TRAINERS_STEPS = 500


def _how_often(use: ParsedFlag) -> Outcome:
    what = use.name.partition("_")[0].replace("evaluation", "eval")
    key, steps = _EVERY[what], f"{what}_steps"
    best = "checkpoint.keep_best"
    if use.value == "no" and what != "logging":
        also = [use.assign(best, False)] if what == "save" and use.current(best) else []
        if what == "save" and use.current("program.kind") in (None, "builtin"):
            also.append(use.assign("checkpoint.at_end", False))
        return [use.assign(key, 0), *also], []
    if use.value == "best" and what == "save":
        return [use.assign(best, True)], []
    if use.value != "steps":
        what, hint = f"--{use.name} {use.value}: a recipe counts in steps", f"write --{steps} N"
        return _to_trainer(use) or ([], [use.error(what, f"{hint}; a script of yours reads it behind `--`", key=key)])
    # Trainer evaluates as often as it logs.
    logged = (use.current("--logging_steps") or use.current("logging.every_steps")) if what == "eval" else None
    silent = steps not in use.given and not use.current(key)
    return ([use.assign(key, int(logged or _TRAINERS_STEPS))] if silent and str(logged or 0).isdecimal() else []), []


def _on_cpu(use: ParsedFlag) -> Outcome:
    """Compute on the CPU; `false` undoes that."""
    if use.on:
        return [use.assign("devices.type", "cpu")], []
    return ([use.assign("devices.type", "auto")] if use.current("devices.type") == "cpu" else []), []


for _name, _words in {
    "eval": "no|steps",
    "evaluation": "no|steps",
    "save": "no|steps|best",
    "logging": "steps",
}.items():
    _key = _EVERY[_name.replace("evaluation", "eval")]
    _help = f"Like Trainer's: every --{_name.replace('evaluation', 'eval')}_steps steps, by default {_TRAINERS_STEPS}. "
    _help += "Other values are for scripts on Trainer, which get the flag itself."
    SPECIAL.append(Flag(f"--{_name}_strategy {_words}", (_key, ARGUMENTS), _help, _how_often))
SPECIAL += (Flag(f"--{_name}", ("devices.type",), "Compute on the CPU.", _on_cpu) for _name in ("use_cpu", "no_cuda"))
SPECIAL += (
    Flag(f"--{_name} {_words}", ("strategy",), "As in `accelerate launch`.", call(f"{_STRATEGY}:of_accelerate"))
    for _name, _words in {
        "fsdp_sharding_strategy": "NAME|1..5", "fsdp_auto_wrap_policy": "POLICY", "fsdp_min_num_params": "N",
        "fsdp_transformer_layer_cls_to_wrap": "CLASSES", "fsdp_state_dict_type": "TYPE", "fsdp_version": "1|2",
        "fsdp_backward_prefetch": "NAME", "fsdp_forward_prefetch": "true|false", "fsdp_use_orig_params": "true|false",
        "fsdp_offload_params": "true|false", "fsdp_sync_module_states": "true|false",
        "fsdp_cpu_ram_efficient_loading": "true|false", "fsdp_activation_checkpointing": "true|false",
        "fsdp_reshard_after_forward": "true|false|NAME",
    }.items()
)  # fmt: skip


@_flag("--use_fsdp", "strategy.kind")
def _use_fsdp(use: ParsedFlag) -> Outcome:
    """Shard with FSDP2 (accelerate's switch)."""
    if use.on:
        return [use.assign("strategy.kind", "fsdp")], []
    return [], [use.error("--use_fsdp takes no value", "name the strategy: strategy.kind=ddp", key="strategy.kind")]


@_flag("--mixed_precision no|bf16|fp16", "precision.dtype")
def _mixed_precision(use: ParsedFlag) -> Outcome:
    """Number format (accelerate's flag)."""
    return setting_reader("precision.dtype")(replace(use, value="fp32" if use.value == "no" else use.value))


@_flag("--warmup_ratio SHARE", "schedule.warmup_steps", ARGUMENTS)
def _warmup_ratio(use: ParsedFlag) -> Outcome:
    """Share of the steps for linear warm-up, rounded up like Trainer does (TrainingArguments.get_warmup_steps). A
    script on Trainer gets the flag itself if the steps are not set."""
    key, steps = "schedule.warmup_steps", use.current("--max_steps") or use.current("--train.steps")
    if steps is None and "num_train_epochs" not in use.given:  # which replaces the steps of a file
        steps = use.current("train.steps")
    try:
        share = float(use.value or "")
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        return [], [use.error(f"--warmup_ratio {use.value} is not a share", "write a number from 0 to 1", key=key)]
    if str(steps).isdecimal():
        return [use.assign(key, math.ceil(int(str(steps)) * share))], []
    return _to_trainer(use) or ([use.assign(key, share if share < 1 else 1)], [])


@_flag("--overwrite_output_dir")
def _overwrite(use: ParsedFlag) -> Outcome:
    """No effect: each run has its own folder."""
    return [], []


@_flag("--do_train", "train.steps", ARGUMENTS)
def _do_train(use: ParsedFlag) -> Outcome:
    """Train, which is the default; `false` trains nothing. Your own script gets the flag itself."""
    return _to_script(use, use.on) or (([] if use.on else [use.assign("train.steps", 0)]), [])


@_flag("--do_eval", "train.steps", "eval.every_steps", ARGUMENTS)
def _do_eval(use: ParsedFlag) -> Outcome:
    """Evaluate without training; with --do_train, evaluate (at least) after training. Your own script gets
    the flag itself."""
    if (outcome := _to_script(use, use.on)) or not use.on:
        return outcome or ([], [])
    if "do_train" not in use.given:
        return [use.assign("train.steps", 0)], []
    silent = "eval_steps" not in use.given and not use.current("eval.every_steps")
    return ([use.assign("eval.every_steps", ONLY_AT_THE_END)] if silent else []), []


@_flag("--do_predict", "train.steps", "predict.split")
def _do_predict(use: ParsedFlag) -> Outcome:
    """Predict (the validation samples, or those of predict.split) without training; with --do_train, predict
    after training."""
    if not use.on:
        return [use.assign("predict.split", "none")], []
    chosen = use.current("predict.split")
    made = [use.assign("predict.split", chosen if chosen not in (None, "none") else "validation")]
    return made + ([] if "do_train" in use.given else [use.assign("train.steps", 0)]), []


@_flag("--profile [STEPS]", "profile.steps", unit="steps")
def _profile(use: ParsedFlag) -> Outcome:
    """Profile some steps with torch.profiler (3 by default): time by groups of operators, and a trace
    file."""
    if use.value is not None:
        return setting_reader("profile.steps")(use)
    few = 3  # as the help says: enough to see one that is like another
    return ([] if use.current("profile.steps") else [use.assign("profile.steps", few)]), []
