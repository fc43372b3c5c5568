"""Read accelerate's config file, the flags of `accelerate launch` and its variables into a recipe.

Sources: accelerate, utils/launch.py (prepare_extend_env_parallelism_config) and parallelism_config.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from trainkit.errors import Diagnostic, Origin, UsageError
from trainkit.launch_plan.context import Context
from trainkit.optimizers import ON_DEEPSPEED
from trainkit.recipe.assignment import Assignment
from trainkit.recipe.interpolation import interpolated
from trainkit.recipe.merge import value_at
from trainkit.recipe.paths import absolute
from trainkit.recipe.schema import Fsdp
from trainkit.recipe.yaml_reader import read_scalar
from trainkit.tools.accelerate.fields import OFF, SETTINGS
from trainkit.tools.base import trainer_files
from trainkit.tools.base.fields import Unsupported, by_name
from trainkit.tools.base.fsdp_settings import FIELDS, FIRST_VERSION, read_settings
from trainkit.tools.base.imported_recipe import (
    LAYER,
    ForeignFile,
    ImportContext,
    ImportedFlag,
    ImportedRecipe,
    argv_origin,
    number_cards,
    number_of,
    open_foreign_file,
)
from trainkit.tools.deepspeed.config import leaves
from trainkit.tools.deepspeed.fields import AUTO, FORMATS, ZERO3_INIT
from trainkit.tools.deepspeed.importer import take_apart, use_as_base

SECTION, SWITCH = "parallelism_config", "ACCELERATE_USE_PARALLELISM_CONFIG"
START = "PARALLELISM_CONFIG_"
# What is spread over each dimension of the mesh.
SIZES = {
    "dp_replicate_size": "replicas of the shards (HSDP)",
    "dp_shard_size": "shards",
    "tp_size": "parts of each weight (tensor parallelism)",
    "cp_size": "parts of each sequence (context parallelism)",
    "sp_size": "parts of each sequence (DeepSpeed's sequence parallelism)",
}
_CARRIED = "the mesh of ranks, which only Accelerator() builds; it reads these variables"
_NEEDS = "accelerate builds a mesh under FSDP version 2, DDP and DeepSpeed, over several processes"


def read_mesh(config: ImportedConfig) -> None:
    """What is given of the mesh, as the variables of the ranks; an error where accelerate would not build it."""
    given = config.below(SECTION)
    sizes = {name: given[key] for name in SIZES if (key := f"{SECTION}_{name}") in given}
    for name, each in sizes.items():
        if type(each.value) is not int:
            config.draft.fail(f"{SECTION}_{name} is {each.value!r}", each.origin, "write a whole number")
            return
    widest = next((name for name, each in sizes.items() if each.value > 1), None)
    if widest is None or config.draft.problems:
        return  # one rank in every direction is no mesh
    key = f"{SECTION}.{SECTION}_{widest}"
    if config.by_flag(key) and not config.get("use_parallelism_config"):
        config.used |= {f"{SECTION}.{name}" for name in given}
        config.draft.remark(f"accelerate ignores --{SECTION}_{widest} without --use_parallelism_config.")
        return
    what = f"{SECTION}_{widest} {sizes[widest].value} ({SIZES[widest]})"
    strategy, version = config.draft.get("strategy.kind"), config.draft.get("strategy.version")
    if not config.program:
        hint = "name the script that builds on Accelerator() behind `--`, or use strategy.kind: fsdp alone"
        why = "it needs a mesh of ranks, which the built-in trainer has not"
        config.draft.fail(f"{what} cannot be run by trainkit's own trainer", sizes[widest].origin, hint, why)
        return
    if strategy in (None, "single") or (strategy == "fsdp" and version == 1):
        hint = "set fsdp_version to 2" if strategy == "fsdp" else "use distributed_type FSDP with fsdp_version 2"
        config.draft.fail(f"{what} cannot be run here", sizes[widest].origin, hint, _NEEDS)
        return
    for name, each in given.items():
        config.used.add(f"{SECTION}.{name}")
        variable = f"{START}{name.removeprefix(f'{SECTION}_').upper()}"
        config.draft.set(f"env.{variable}", str(each.value), each.origin)
    config.draft.set(f"env.{SWITCH}", "true", sizes[widest].origin)
    config.draft.reasons.setdefault("env", _CARRIED)


def widths(context: Context) -> dict[str, int]:
    """The ranks in each dimension of the mesh that the variables ask for; empty without a mesh."""
    environment = context.recipe.env
    if str(environment.get(SWITCH, "")).lower() != "true":
        return {}
    sizes = {name: str(environment.get(f"{START}{name.upper()}", "1")) for name in SIZES}
    return {name: int(size) for name, size in sizes.items()} if all(map(str.isdecimal, sizes.values())) else {}


def mesh_problems(context: Context) -> Iterator[Diagnostic]:
    """A mesh that accelerate would refuse when the ranks have started."""
    recipe, numbers = context.recipe, widths(context)
    if not numbers:
        return
    # DeepSpeed divides the ranks by itself (_validate_accelerator).
    ranks, whole = context.topology.world_size, prod(numbers.values())
    if whole not in (1, ranks) and not (context.zero and numbers["sp_size"] > 1):
        shown = " x ".join(f"{name.removesuffix('_size')} {size}" for name, size in numbers.items() if size > 1)
        what = f"the mesh {shown} is {whole} ranks, and the plan has {ranks}"
        hint = f"set nodes.processes_per_node, or the sizes under env, so that both are {ranks}"
        yield context.resolved.error("env", what, hint, at=context.resolved.given(f"env.{SWITCH}"))
    if isinstance(recipe.strategy, Fsdp) and recipe.strategy.version == 1 and whole > 1:
        key = "strategy.version"
        yield context.resolved.error(
            key, "a mesh of ranks needs FSDP version 2", "set strategy.version to 2", why=_NEEDS
        )


BY_NAME = {each.name: each for each in SETTINGS}
# Names that older versions used, and today's.
RENAMED = {alias: each.name for each in SETTINGS for alias in each.aliases}
NOTHING: tuple[Any, ...] = (None, [], {}, "")
FSDP, ZERO = "fsdp_config", "deepspeed_config"
FILE, INIT = f"{ZERO}.deepspeed_config_file", f"{ZERO}.zero3_init_flag"
# What may be given beside a file.
_BESIDE_FILE = ("deepspeed_config_file", "zero3_init_flag", "deepspeed_multinode_launcher")
# Keys that one policy of wrapping reads (accelerate, utils/dataclasses.py: set_auto_wrap_policy).
READ_BY = {
    "fsdp_min_num_params": "SIZE_BASED_WRAP",
    "fsdp_transformer_layer_cls_to_wrap": "TRANSFORMER_BASED_WRAP",
}
_UNSHARDED = "scripts that ask the plugin build no model in shards (zero3_init_flag)"
_NVME = "accelerate never hands NVMe paths to its workers; the recipe's is used"


@dataclass
class ImportedConfig:
    """Everything that accelerate is given. values: by the file's dotted names; used: names that have been understood.

    program: whether a program is named; without one, the recipe is for the built-in trainer.
    """

    draft: ImportedRecipe
    context: ImportContext
    values: dict[str, Assignment]
    program: bool = False
    used: set[str] = field(default_factory=set)

    def get(self, name: str) -> Any:
        """The value under a name, None where there is none; it counts as understood."""
        self.used.add(name)
        return self.values[name].value if name in self.values else None

    def by_flag(self, name: str) -> bool:
        """Whether a flag gives the value: a file's value of some keys is never applied."""
        return name in self.values and self.origin(name).layer == LAYER

    def origin(self, name: str) -> Origin:
        """Where the value under a name is given."""
        return self.values[name].origin

    def below(self, section: str) -> dict[str, Assignment]:
        """What a nested mapping holds, by name."""
        start = f"{section}."
        return {name.removeprefix(start): value for name, value in self.values.items() if name.startswith(start)}

    def take(self, name: str, reason: str = "") -> None:
        """Set what a value means by the table; one that means nothing in a recipe is an error."""
        value = self.get(name)
        settings = {} if value is None else BY_NAME[name].decode(value)
        if isinstance(settings, Unsupported):
            what = f"{name.rpartition('.')[2]} {value} cannot be taken over"
            self.draft.fail(what, self.origin(name), settings.instead, settings.why)
            return
        for key, each in settings.items():
            self.put(name, key, each, reason)

    def put(self, name: str, key: str, value: Any, reason: str = "") -> None:
        """Set a key to what a name means, or note what is wrong with the value."""
        self.used.add(name)
        self.draft.put_checked(Assignment(key, value, self.origin(name)), reason)

    def remark(self, name: str, text: str) -> None:
        """Note something on a value, which with this is understood."""
        self.used.add(name)
        place = "" if self.by_flag(name) else f"{self.origin(name).place}: "
        self.draft.remark(f"{place}{text}")


def flattened(tree: Mapping[str, Any], at: Callable[[str], Origin]) -> dict[str, Assignment]:
    """The values of a file, by dotted name of today. at: the place of a name."""
    given = [Assignment(name, each, at(name)) for name, each in leaves(tree) if each not in NOTHING]
    return {RENAMED.get(each.key, each.key): each for each in given}


def fsdp(config: ImportedConfig) -> None:
    """Every key of fsdp_config, and what accelerate takes where one is missing."""
    draft, values = config.draft, config.below(FSDP)
    config.used |= {f"{FSDP}.{name}" for name in values}
    if "fsdp_version" in values and values["fsdp_version"].value == 2:
        for name in values.keys() & {f"fsdp_{each}" for each in ("sharding_strategy", *FIRST_VERSION)}:
            config.remark(f"{FSDP}.{name}", f"{name} is ignored with fsdp_version 2, and left out.")
            del values[name]
    offload = values.pop("fsdp_activation_checkpointing_offload", None)
    if offload and offload.value:
        draft.remark("fsdp_activation_checkpointing_offload has no key in a recipe: activations stay on the device.")
    policy = str(values["fsdp_auto_wrap_policy"].value).upper() if "fsdp_auto_wrap_policy" in values else ""
    for name, read_by in READ_BY.items():
        if name in values and policy != read_by:
            place = "" if policy else ", and none is given"
            text = f"{name} is read beside fsdp_auto_wrap_policy {read_by} alone{place}: left out."
            config.remark(f"{FSDP}.{name}", text)
            del values[name]
    kind = config.origin("distributed_type")
    draft.set("strategy.kind", "fsdp", kind)
    words: dict[Any, Any] = {"true": True, "false": False}  # which accelerate reads in quotes too
    tree = {name: words.get(str(each.value).lower(), each.value) for name, each in values.items()}
    assignments, problems = read_settings(tree, by_name(FIELDS), lambda name: values[name].origin, "fsdp_config:")
    draft.put_all(assignments, problems)
    if "fsdp_version" not in values:
        draft.set("strategy.version", 1, kind, "accelerate takes version 1 where fsdp_version is not given")
    if draft.get("strategy.auto_wrap") is None:
        draft.set("strategy.auto_wrap", "none", kind, "accelerate wraps the model as a whole where no policy is given")


def deepspeed(config: ImportedConfig) -> None:
    """A DeepSpeed file, or accelerate's own keys for it."""
    (_by_keys if config.get(FILE) is None else _by_file)(config)
    for name in config.below(ZERO):
        if f"{ZERO}.{name}" not in config.used:
            config.remark(f"{ZERO}.{name}", f"{name} has no key in a recipe.")
    if config.get(INIT) is False and config.draft.get("strategy.kind") == "zero3" and config.program:
        config.put(INIT, f"env.{ZERO3_INIT}", "false", _UNSHARDED)
    compiles = config.get("dynamo_config.dynamo_backend") not in OFF
    for name in config.below("dynamo_config") if compiles else ():
        config.remark(f"dynamo_config.{name}", f"accelerate ignores {name} under DeepSpeed.")


def _by_file(config: ImportedConfig) -> None:
    """A base for a script, which makes its own optimizer and schedule; taken apart for the built-in trainer."""
    path = str(config.get(FILE))
    if config.program:
        file = use_as_base(config.draft, config.context, path, config.origin(FILE))
    else:
        file = open_foreign_file(config.context, path)
        take_apart(config.draft, config.context, file)
    if file is None:
        return
    for other in config.below(ZERO):
        if other not in _BESIDE_FILE:
            config.remark(f"{ZERO}.{other}", f"{other} beside a DeepSpeed file is an error in the workers; left out.")
    tree = file.tree  # which has the number format, where it does not leave that to a flag
    if config.get("mixed_precision") in (None, False, "no"):
        return
    if config.by_flag("mixed_precision") and all(value_at(tree, row.name) in (None, AUTO) for row in FORMATS):
        config.put("mixed_precision", "precision.dtype", config.get("mixed_precision"))
    else:
        config.remark("mixed_precision", "mixed_precision beside a DeepSpeed file: the file has the number format.")


def _by_keys(config: ImportedConfig) -> None:
    if config.get(f"{ZERO}.zero_stage") is None:
        reason = "accelerate takes ZeRO stage 2 where zero_stage is not given"
        config.put("distributed_type", "strategy.kind", "zero2", reason)
    config.take(f"{ZERO}.zero_stage")
    kind = config.draft.get("strategy.kind")
    if config.draft.problems:
        return
    stage = int(kind.removeprefix("zero"))
    if not (stage or config.program):
        reason = "the built-in trainer has plain data parallelism in place of stage 0"
        config.draft.set("strategy.kind", "ddp", config.draft.settings["strategy.kind"].origin, reason)
    config.take(f"{ZERO}.gradient_accumulation_steps")
    config.take(f"{ZERO}.gradient_clipping")
    _offload(config, "optimizer", stage, 1)
    _offload(config, "param", stage, 3)
    for name in ("zero3_init_flag", "zero3_save_16bit_model"):
        if config.get(f"{ZERO}.{name}") is True and stage != 3:
            text = f"{name} needs ZeRO stage 3, and the stage is {stage}: it does nothing, and is left out."
            config.remark(f"{ZERO}.{name}", text)
        elif name == "zero3_save_16bit_model":
            config.take(f"{ZERO}.{name}")
    if config.get(f"{ZERO}.deepspeed_multinode_launcher") not in (None, "standard", "pdsh"):
        config.used.discard(f"{ZERO}.deepspeed_multinode_launcher")


def _offload(config: ImportedConfig, place: str, stage: int, least: int) -> None:
    """Where a state is kept. least: the first stage that can move it."""
    name, path = f"{ZERO}.offload_{place}_device", f"{ZERO}.offload_{place}_nvme_path"
    device, _ = config.get(name), config.get(path)
    if device not in (None, "none") and stage < least:
        needs = f"{least} or more" if least < 3 else str(least)
        text = f"offload_{place}_device {device} needs ZeRO stage {needs}, and the stage is {stage}: it does nothing, "
        config.remark(name, f"{text}and is left out.")
        return
    config.take(name)
    if device == "nvme":
        config.take(path, _NVME)


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
    "accelerate does not hand use_cpu to several processes: they take GPUs where there are some, and form no group "
    "where there are none. The recipe starts {} on the CPU."
)


COMMAND = ""  # a program reads the file


def likeness(tree: Mapping[str, Any]) -> float:
    """The share of keys that are accelerate's."""
    known = {name.partition(".")[0] for name in (*BY_NAME, *RENAMED, *BY_FLAG, *SECTIONS, *MPIRUN, *NOT_IN_FILE)}
    return trainer_files.likeness(tree, known, ("distributed_type", "compute_environment"), 1)


def read(draft: ImportedRecipe, context: ImportContext, source: ForeignFile) -> None:
    """Settings of the file alone, for the built-in trainer. Its processes count with any launcher."""
    interpret(ImportedConfig(draft, context, flattened(source.tree, source.at)))
    number_cards(draft, context)


def launched(draft: ImportedRecipe, context: ImportContext, flags: Sequence[ImportedFlag]) -> int | None:
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
        # accelerate launch takes every GPU that it sees, and starts one process where that is one, whatever the
        # number (commands/launch.py: _validate_launch_command); an import that does not know assumes several.
        visible = _visible(draft)
        count = values["num_processes"].value if "num_processes" in values else 1 if alone else visible
        values[KIND] = Assignment(KIND, "NO" if 1 in (count, visible) else "MULTI_GPU", origin)
    return interpret(ImportedConfig(draft, context, values, program=True))


def _visible(draft: ImportedRecipe) -> int:
    """How many GPUs the launcher sees, at least 1; 2 where that is not known."""
    cards = draft.get("devices.select")
    known = cards == "none" or (isinstance(cards, list) and not any(map(interpolated, cards)))
    return (1 if cards == "none" else len(cards)) if known else 2


def _config_file(
    draft: ImportedRecipe, context: ImportContext, named: Mapping[str, ImportedFlag]
) -> ForeignFile | None:
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
    """Everything that is given, as settings; returns the processes of each machine, None for one on each GPU."""
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
