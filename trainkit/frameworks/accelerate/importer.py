"""accelerate's config file, of any age, and the flags of `accelerate launch` above it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainkit.errors import UsageError
from trainkit.frameworks.accelerate.fields import OFF, SETTINGS
from trainkit.frameworks.accelerate.imported_config import RENAMED, ImportedConfig, deepspeed, flattened, fsdp
from trainkit.frameworks.accelerate.parallelism import read_mesh
from trainkit.frameworks.base.draft import Draft, FlagUse, ImportContext, argv_origin, number_cards, number_of
from trainkit.frameworks.base.foreign_file import ForeignFile, open_foreign_file
from trainkit.optimizers import ON_DEEPSPEED
from trainkit.recipe.layers.assignment import Assignment
from trainkit.recipe.layers.interpolation import interpolated
from trainkit.recipe.layers.paths import absolute
from trainkit.recipe.yaml.scalars import read_scalar

# Nested mappings of the file whose keys have flags that the table does not list one by one.
MPIRUN = tuple(f"{start}mpirun_{name}" for start in ("", "mpirun_config.") for name in ("hostfile", "ccl"))
SECTIONS = ("fsdp_config", "dynamo_config", "fp8_config", "parallelism_config", "megatron_lm_config")
BY_FLAG = {name.rpartition(".")[2]: name for name in (*RENAMED, *(each.name for each in SETTINGS))}
KIND = "distributed_type"
# Flags that say which of the kinds of distributed_type it is.
KIND_FLAGS = {"multi_gpu": "MULTI_GPU", "use_deepspeed": "DEEPSPEED", "use_fsdp": "FSDP", "tpu": "XLA",
              "use_megatron_lm": "MEGATRON_LM"}  # fmt: skip
NOT_IN_FILE = {"module", "no_python", "config_file", "quiet", "cpu", *KIND_FLAGS}
# Kinds of distributed_type that are for something else (accelerate, utils/dataclasses.py: DistributedType).
OTHERS = {
    "MULTI_XPU": "Intel's GPUs (XPU)", "MULTI_NPU": "Huawei's Ascend", "MULTI_MLU": "Cambricon's MLU",
    "MULTI_SDAA": "Tecorigin's SDAA", "MULTI_MUSA": "Moore Threads' GPUs (MUSA)", "MULTI_HPU": "Intel's Gaudi (HPU)",
    "MULTI_NEURON": "AWS Trainium and Inferentia (Neuron)", "MEGATRON_LM": "Megatron-LM's own model and loop",
    "TP": "tensor parallelism as older versions of accelerate had it",
}  # fmt: skip
ALONE = ("NO", "MPS", "XLA", "TPU")  # kinds without processes that accelerate launch would count
_ELSEWHERE = "trainkit runs on cuda, mps, xla and cpu"
_CHIPS = (
    "accelerate launch imports the script and calls its main() once for each chip of the TPU, in processes of its own; "
    "trainkit runs the script as one process on one chip. Every chip is used by Trainer with strategy.kind: fsdp."
)
_PODS = "it is for pods of several machines, and a run on xla is one process"
_SINGLE = "accelerate starts one process on a CPU, whatever num_processes says; the recipe starts {}."
_UNREACHED = (
    "accelerate does not hand use_cpu to several processes: they take cards where there are some, and form no group "
    "where there are none. The recipe starts {} on the CPU."
)


def recognises(tree: Mapping[str, Any]) -> bool:
    """Whether these are the keys of accelerate's file."""
    return "distributed_type" in tree or "compute_environment" in tree


def read(draft: Draft, context: ImportContext, source: ForeignFile) -> None:
    """Settings of the file alone, for the built-in trainer. Its processes count with any launcher."""
    interpret(ImportedConfig(draft, context, flattened(source.tree, source.at)))
    number_cards(draft, context)


def launched(draft: Draft, context: ImportContext, flags: Sequence[FlagUse]) -> int | None:
    """Settings of `accelerate launch`: its flags win over its file. Returns the processes of each machine."""
    named = {each.name: each for each in flags}
    values: dict[str, Assignment] = {}
    source = _config_file(draft, context, named)
    if draft.problems:
        return None
    if source is not None:
        values = flattened(source.tree, source.at)
    for each in flags:
        if each.name not in NOT_IN_FILE:
            text = each.value
            # YAML would read host:port as a number to the base 60, and `no` as false.
            value = True if text is None else text if ":" in text or text == "no" else read_scalar(text)
            # The file's key of today that the flag sets.
            section = next((name for name in SECTIONS if each.name.startswith(name.removesuffix("config"))), "")
            key = BY_FLAG.get(each.name) or (f"{section}.{each.name}" if section else each.name)
            key = RENAMED.get(key, key)
            values[key] = Assignment(key, value, each.origin)
    for flag, kind in KIND_FLAGS.items():
        if flag in named:
            values[KIND] = Assignment(KIND, kind, named[flag].origin)
    if "cpu" in named:
        values["use_cpu"] = Assignment("use_cpu", True, named["cpu"].origin)
    if KIND not in values:
        origin, alone = argv_origin("accelerate launch"), "cpu" in named or "use_mps_device" in named
        # accelerate launch takes every card that it sees, and starts one process where that is one, whatever the
        # number (commands/launch.py: _validate_launch_command); an import that does not know assumes several.
        visible = _visible(draft)
        count = values["num_processes"].value if "num_processes" in values else 1 if alone else visible
        values[KIND] = Assignment(KIND, "NO" if 1 in (count, visible) else "MULTI_GPU", origin)
    return interpret(ImportedConfig(draft, context, values, program=True))


def _visible(draft: Draft) -> int:
    """How many cards the launcher sees, at least 1; 2 where that is not known."""
    cards = draft.get("devices.select")
    known = cards == "none" or (isinstance(cards, list) and not any(map(interpolated, cards)))
    return (1 if cards == "none" else len(cards)) if known else 2


def _config_file(draft: Draft, context: ImportContext, named: Mapping[str, FlagUse]) -> ForeignFile | None:
    """The file that is named, else the one that accelerate launch reads by itself; None where there is none.

    Source: accelerate, commands/config/config_args.py and commands/launch.py (_validate_launch_command).
    """
    if "config_file" in named:
        use = named["config_file"]
        try:
            return open_foreign_file(context, use.value or "")
        except UsageError as error:
            draft.fail(str(error), use.origin, error.diagnostics[0].hint)
            return None
    environ = context.environ
    cache = environ.get("HF_HOME", f"{environ.get('XDG_CACHE_HOME', '~/.cache')}/huggingface")
    path = f"{cache}/accelerate/default_config.yaml".replace("~", environ.get("HOME", "~"), 1)
    if path.startswith("~"):
        draft.remark("accelerate also reads default_config.yaml of the home folder; it is not read here (name it).")
        return None
    if "cpu" in named or not context.files.exists(absolute(path, context.cwd)):
        return None
    draft.remark(f"accelerate launch reads {path} where no --config_file is named: its settings are taken over.")
    return open_foreign_file(context, path)


def interpret(config: ImportedConfig) -> int | None:
    """Everything that is given, as settings; returns the processes of each machine, None for one on each card."""
    kind = config.get(KIND)
    kind = "NO" if kind in (None, False) else str(kind)
    if str(config.get("compute_environment") or "LOCAL_MACHINE") != "LOCAL_MACHINE":
        hint = "write a config for machines that you can log in to"
        config.draft.fail("a config for Amazon SageMaker", config.origin("compute_environment"), hint)
        return None
    config.values.setdefault(KIND, Assignment(KIND, kind, argv_origin("accelerate")))
    _strategy(config, kind)
    if config.get("fp16") is True:
        config.remark("fp16", "fp16 is today mixed_precision: fp16.")
        config.take("fp16")
    if config.get("mixed_precision") is not None and not config.draft.get("strategy.config"):
        config.take("mixed_precision")
    processes = _processes(config, kind)
    for name in ("use_cpu", "use_mps_device", "max_restarts", "num_cpu_threads_per_process", "debug"):
        config.take(name)
    config.take("gpu_ids")
    compiles = config.get("dynamo_config.dynamo_backend") not in OFF
    if compiles and config.draft.get("strategy.kind") not in ON_DEEPSPEED:
        for name in ("backend", "mode", "use_dynamic", "use_regional_compilation"):
            config.take(f"dynamo_config.dynamo_{name}")
        if config.get("dynamo_config.dynamo_use_regional_compilation") is None:
            origin = config.origin("dynamo_config.dynamo_backend")
            reason = "accelerate compiles the model as a whole where use_regional_compilation is not given"
            config.draft.set("efficiency.compile.scope", "model", origin, reason)
    _rest(config)
    return processes


def _strategy(config: ImportedConfig, kind: str) -> None:
    match kind:
        case "NO":
            pass
        case "MPS":
            config.put(KIND, "devices.type", "mps")
            config.remark(KIND, "distributed_type MPS is not valid any more: accelerate finds MPS itself.")
        case "XLA" | "TPU":
            config.put(KIND, "devices.type", "xla")
            config.remark(KIND, _CHIPS)
            if config.by_flag("downcast_bf16"):
                config.take("downcast_bf16")
        case "MULTI_GPU" | "MULTI_CPU":
            config.put(KIND, "strategy.kind", "ddp")
            if kind == "MULTI_CPU":
                config.put(KIND, "devices.type", "cpu")
        case "FSDP":
            fsdp(config)
        case "DEEPSPEED":
            deepspeed(config)
        case _:
            what = f"distributed_type {kind} cannot be run by trainkit"
            why = f"it is for {OTHERS[kind]}; {_ELSEWHERE}" if kind in OTHERS else _ELSEWHERE
            config.draft.fail(what, config.origin(KIND), "use MULTI_GPU, FSDP, DEEPSPEED or NO", why)


def _processes(config: ImportedConfig, kind: str) -> int | None:
    total, nodes = config.get("num_processes"), config.get("num_machines") or 1
    if interpolated(total) and nodes == 1 and kind not in ALONE:
        config.put("num_processes", "nodes.processes_per_node", total)
        return number_of(total)
    for name, value in (("num_processes", total), ("num_machines", nodes)):
        if interpolated(value):
            hint = "give its value with --set NAME=VALUE"
            what = f"{name} is {value}, which decides the processes of each machine"
            config.draft.fail(what, config.origin(name), hint)
            return None
        if value is not None and type(value) is not int:
            config.draft.fail(f"{name} is {value!r}", config.origin(name), "write a whole number")
            return None
    if total in (None, -1):
        return 1 if kind in ALONE else None
    # num_processes counts the processes of all machines, where torchrun and a recipe count those of each.
    each: int = total // nodes
    if total % nodes:
        text = f"num_processes {total} over {nodes} machines are {each} on each; accelerate drops the rest silently."
        config.remark("num_processes", text)
    if nodes > 1:
        config.take("num_machines")
        host, port = config.get("main_process_ip"), config.get("main_process_port")
        if host is not None:
            config.put("main_process_ip", "nodes.rendezvous", f"{host}:{port or 29500}")
        config.draft.remark("The rank of each machine is given when it is started: trainkit run --node-rank N.")
    if kind in ALONE:
        if each > 1:
            text = f"num_processes {total} does nothing under distributed_type {kind}."
            config.remark("num_processes", text)
        return 1
    if config.get("use_cpu") is True and each > 1:
        single = config.by_flag("use_cpu") or kind == "MULTI_CPU"
        config.remark("use_cpu", (_SINGLE if single else _UNREACHED).format(each))
    config.put("num_processes", "nodes.processes_per_node", each)
    return each


def _mpirun(config: ImportedConfig) -> None:
    """mpirun, which accelerate calls on a CPU alone (utils/launch.py: prepare_simple_launcher_cmd_env)."""
    names = [name for name in MPIRUN if config.get(name) is not None]
    hosts = next((name for name in names if name.endswith("mpirun_hostfile")), None)
    if hosts is None:
        return
    what = f"mpirun_hostfile {config.get(hosts)}"
    alone = (config.by_flag("use_cpu") and config.get("use_cpu")) or config.get(KIND) in (*ALONE, "MULTI_CPU")
    if not alone:
        config.remark(hosts, f"{what} is not taken over: accelerate reads it on a CPU alone.")
        return
    why = "accelerate would start the ranks by mpirun on the hosts of that file, and trainkit starts each machine's own"
    hint = "leave it out; start trainkit on each host, with nodes.count and nodes.rendezvous for several"
    config.draft.fail(f"{what} cannot be taken over", config.origin(hosts), hint, why)


def _rest(config: ImportedConfig) -> None:
    """What the file sets in vain, meshes, of which trainkit builds shards alone, and what has no key in a recipe."""
    for setting in SETTINGS:
        value = config.get(setting.name) if setting.idle is not None else None
        if value and value not in (setting.idle or ()) and not config.by_flag(setting.name):
            text = f"{setting.name} {value} in the file is never applied by accelerate launch."
            config.remark(setting.name, text)
    if config.by_flag("enable_cpu_affinity"):
        config.take("enable_cpu_affinity")
    config.used |= {"machine_rank", "main_process_ip", "use_parallelism_config"}
    if "main_process_port" not in config.used and config.get("main_process_port") not in (None, 0):
        config.remark("main_process_port", "main_process_port is not taken over: each run has a free port.")
    if config.get("main_training_function") != "main":
        config.used.discard("main_training_function")
    _mpirun(config)
    if config.get("tp_size") not in (None, 1):
        hint = "write parallelism_config_tp_size, with FSDP version 2"
        what = f"tp_size {config.get('tp_size')} is tensor parallelism as older versions of accelerate had it"
        config.draft.fail(what, config.origin("tp_size"), hint)
    read_mesh(config)
    strategy = config.draft.get("strategy.kind") or "single"
    for name, given in config.values.items():
        if name in config.used or given.value is False:
            continue
        section, _, inner = name.rpartition(".")
        unused = section in ("fsdp_config", "deepspeed_config") and f"strategy {strategy} does not use it"
        unused = unused or (name.startswith("tpu_") and _PODS) or "a recipe has no such key"
        config.remark(name, f"{inner} {given.value} is not taken over: {unused}.")
