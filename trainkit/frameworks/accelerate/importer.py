"""accelerate's config file, of any age, and the flags of `accelerate launch` above it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainkit.frameworks.accelerate.import_settings import OF_DEEPSPEED, RENAMED, SECTIONS, Telling, Told, flat
from trainkit.frameworks.accelerate.import_sharding import deepspeed, fsdp
from trainkit.frameworks.base.draft import Draft, FlagUse, ImportContext, argv_origin, card
from trainkit.frameworks.base.foreign_file import ForeignFile, open_foreign_file
from trainkit.recipe.yaml.scalars import read_scalar

# Keys whose value in the file accelerate launch never applies, and the values that mean nothing anyway.
NEVER_APPLIED: Mapping[str, tuple[Any, ...]] = {
    "same_network": (True, False),
    "rdzv_backend": ("static",),
    "enable_cpu_affinity": (False,),
    "downcast_bf16": (False, "no"),
    "tpu_use_sudo": (False,),
}
_LAUNCHED = {"max_restarts": "launcher.max_restarts", "num_cpu_threads_per_process": "env.OMP_NUM_THREADS"}
_ELSEWHERE = "trainkit runs on cuda, mps, xla and cpu"
_ALONE = ("NO", "MPS", "XLA", "TPU")  # kinds without processes that accelerate launch would count
_CHIPS = (
    "accelerate launch imports the script and calls its main() once for each chip of the TPU, in processes of its own; "
    "trainkit runs the script as one process on one chip. Every chip is used by Trainer with strategy.kind: fsdp."
)
_KIND_FLAGS = {"multi_gpu": "MULTI_GPU", "use_deepspeed": "DEEPSPEED", "use_fsdp": "FSDP", "tpu": "XLA",
               "use_megatron_lm": "MEGATRON_LM"}  # fmt: skip
_PODS = "it is for pods of several machines, and a run on xla is one process"
_NO_FLAG = (
    "module",
    "no_python",
    "config_file",
    "quiet",
    "use_fsdp",
    "use_deepspeed",
    "multi_gpu",
    "cpu",
    "tpu",
    "use_megatron_lm",
)
_SINGLE = "accelerate starts one process on a CPU, whatever num_processes says; the recipe starts {}."
_UNTOLD = (
    "accelerate does not tell several processes of use_cpu: they take cards where there are some, and form no group "
    "where there are none. The recipe starts {} on the CPU."
)


def recognises(tree: Mapping[str, Any]) -> bool:
    """Whether these are the keys of accelerate's file."""
    return "distributed_type" in tree or "compute_environment" in tree


def read(draft: Draft, context: ImportContext, source: ForeignFile) -> None:
    """Settings of the file alone. What it says of processes counts with any launcher."""
    interpret(Telling(draft, context, flat(source.tree, source.at), bool(source.program)))
    if source.program and draft.get("devices.type") != "xla":
        draft.set("launcher.kind", "accelerate", source.at("distributed_type"))


def launched(draft: Draft, context: ImportContext, given: Sequence[FlagUse]) -> int | None:
    """Settings of `accelerate launch`: its flags win over its file. Returns the processes of each machine."""
    named = {each.name: each for each in given}
    said: dict[str, Told] = {}
    if "config_file" in named:
        source = open_foreign_file(context, named["config_file"].value or "")
        said = flat(source.tree, source.at)
    else:
        draft.remark("accelerate also reads default_config.yaml of the home folder; it is not read here (name it).")
    for each in given:
        if each.name not in _NO_FLAG:
            said[_name(each.name)] = Told(_value(each.value), each.origin, flag=True)
    for flag, kind in _KIND_FLAGS.items():
        if flag in named:
            said["distributed_type"] = Told(kind, named[flag].origin, flag=True)
    if "cpu" in named:
        said["use_cpu"] = Told(True, named["cpu"].origin, flag=True)
    if "distributed_type" not in said:
        alone = "cpu" in named or "use_mps_device" in named
        several = said.get("num_processes", Told(1 if alone else 2, argv_origin("accelerate"))).value != 1
        said["distributed_type"] = Told("MULTI_GPU" if several else "NO", argv_origin("accelerate launch"), flag=True)
    return interpret(Telling(draft, context, said, program=True))


def _name(flag: str) -> str:
    section = next((name for name in SECTIONS if flag.startswith(name.removesuffix("config"))), "")
    if flag in OF_DEEPSPEED:
        section = "deepspeed_config"
    name = f"{section}.{flag}" if section else flag
    return RENAMED.get(name, name)


def _value(text: str | None) -> Any:
    return True if text is None else text if ":" in text or text == "no" else read_scalar(text)


def interpret(telling: Telling) -> int | None:
    """Everything that is told, as settings; returns the processes of each machine, None for one on each card."""
    kind = telling.get("distributed_type")
    kind = "NO" if kind in (None, False) else str(kind)
    read_kind = _KINDS.get(kind, _unknown_kind)
    telling.get("compute_environment")
    if str(telling.get("compute_environment") or "LOCAL_MACHINE") != "LOCAL_MACHINE":
        hint = "trainkit starts programs on machines that you can log in to"
        telling.draft.fail("a config for Amazon SageMaker", telling.origin("compute_environment"), hint)
        return None
    telling.said.setdefault("distributed_type", Told(kind, argv_origin("accelerate")))
    read_kind(telling)
    _precision(telling)
    processes = _processes(telling, kind)
    for each in (_devices, _compilation, _rest):
        each(telling)
    return processes


def _single(telling: Telling) -> None:
    if telling.get("distributed_type") == "MPS":
        telling.remark("distributed_type", "distributed_type MPS is not valid any more: accelerate finds MPS itself.")
        telling.put("distributed_type", "devices.type", "mps")


def _tpu(telling: Telling) -> None:
    telling.put("distributed_type", "devices.type", "xla")
    telling.remark("distributed_type", _CHIPS)
    downcast = telling.said.get("downcast_bf16")
    if downcast and downcast.flag:
        telling.put("downcast_bf16", "env.ACCELERATE_DOWNCAST_BF16", "true")


def _replicas(telling: Telling) -> None:
    telling.put("distributed_type", "strategy.kind", "ddp")
    if telling.get("distributed_type") == "MULTI_CPU":
        telling.put("distributed_type", "devices.type", "cpu")


def _unknown_kind(telling: Telling) -> None:
    kind = telling.get("distributed_type")
    origin = telling.origin("distributed_type")
    hint = "use MULTI_GPU, FSDP, DEEPSPEED or NO"
    telling.draft.fail(f"distributed_type {kind} cannot be run by trainkit", origin, hint, _ELSEWHERE)


_KINDS: Mapping[str, Callable[[Telling], None]] = {
    "NO": _single,
    "MPS": _single,
    "XLA": _tpu,
    "TPU": _tpu,
    "MULTI_GPU": _replicas,
    "MULTI_CPU": _replicas,
    "FSDP": fsdp,
    "DEEPSPEED": deepspeed,
}


def _precision(telling: Telling) -> None:
    if telling.get("fp16") is True:
        telling.remark("fp16", "fp16 is today mixed_precision: fp16.")
        telling.put("fp16", "precision.dtype", "fp16")
    value = telling.get("mixed_precision")
    if value in (None, False, "no") or telling.draft.get("strategy.config"):
        return
    if value not in ("fp16", "bf16"):
        hint = "write no, fp16 or bf16"
        telling.draft.fail(f"mixed_precision {value} has no value in a recipe", telling.origin("mixed_precision"), hint)
        return
    telling.put("mixed_precision", "precision.dtype", value)


def _processes(telling: Telling, kind: str) -> int | None:
    total, nodes = telling.get("num_processes"), telling.get("num_machines") or 1
    for name, value in (("num_processes", total), ("num_machines", nodes)):
        if value is not None and type(value) is not int:
            telling.draft.fail(f"{name} is {value!r}", telling.origin(name), "write a whole number")
            return None
    if total in (None, -1):
        return 1 if kind in _ALONE else None
    each: int = total // nodes
    if total % nodes:
        telling.remark("num_processes", f"num_processes {total} over {nodes} machines are {each} on each; accelerate "
                                        f"drops the rest without a word.")  # fmt: skip
    if nodes > 1:
        telling.put("num_machines", "nodes.count", nodes)
        _rendezvous(telling)
    if each > 1 and kind in _ALONE:
        telling.remark("num_processes", f"num_processes {total} does nothing under distributed_type {kind}.")
        return 1
    if telling.get("use_cpu") is True and each > 1:
        single = telling.said["use_cpu"].flag or kind == "MULTI_CPU"
        telling.remark("use_cpu", (_SINGLE if single else _UNTOLD).format(each))
    if kind not in _ALONE:
        telling.put("num_processes", "nodes.processes_per_node", each)
    return each


def _rendezvous(telling: Telling) -> None:
    host, port = telling.get("main_process_ip"), telling.get("main_process_port")
    if host is not None:
        telling.put("main_process_ip", "nodes.rendezvous", f"{host}:{port or 29500}")
    telling.draft.remark("The rank of each machine is given when it is started: trainkit run --node-rank N.")


def _devices(telling: Telling) -> None:
    if telling.get("use_cpu") is True:
        telling.put("use_cpu", "devices.type", "cpu")
    if telling.get("use_mps_device") is True:
        telling.put("use_mps_device", "devices.type", "mps")
    ids = telling.get("gpu_ids")
    if ids not in (None, "all"):
        chosen = [card(each.strip()) for each in str(ids).split(",") if each.strip()]
        telling.put("gpu_ids", "devices.select", chosen)
        reason = "as CUDA numbers cards where CUDA_DEVICE_ORDER is not set, which accelerate does not set"
        telling.put("gpu_ids", "devices.order", "fastest", reason)


def _compilation(telling: Telling) -> None:
    backend = telling.get("dynamo_config.dynamo_backend")
    if backend in (None, False, "no", "NO") or telling.draft.get("strategy.kind") in ("zero1", "zero2", "zero3"):
        return
    name, key = "dynamo_config.dynamo_backend", "efficiency.compile"
    telling.put(name, f"{key}.enabled", True)
    telling.put(name, f"{key}.backend", str(backend).lower())
    if telling.get("dynamo_config.dynamo_mode") is not None:
        telling.put("dynamo_config.dynamo_mode", f"{key}.mode", telling.get("dynamo_config.dynamo_mode"))
    if telling.get("dynamo_config.dynamo_use_dynamic") is not None:
        telling.put(
            "dynamo_config.dynamo_use_dynamic", f"{key}.dynamic", telling.get("dynamo_config.dynamo_use_dynamic")
        )
    blocks = telling.get("dynamo_config.dynamo_use_regional_compilation")
    if blocks is not None:
        telling.put("dynamo_config.dynamo_use_regional_compilation", f"{key}.scope", "blocks" if blocks else "model")


def _meshes(telling: Telling) -> None:
    """Sizes of a mesh, of which trainkit builds shards alone."""
    for name, told in telling.below("parallelism_config").items():
        key = f"parallelism_config.{name}"
        if not name.endswith("_size") or told.value in (1, "1", -1) or "dp_shard" in name:
            continue
        hint = "leave it out, and spread the model by strategy.kind: fsdp alone"
        telling.read.add(key)
        telling.draft.fail(
            f"{name} {told.value} cannot be run by trainkit", told.origin, hint, "it needs a mesh of ranks"
        )


def _rest(telling: Telling) -> None:
    """What a launcher needs, what the file says in vain, and what has no key in a recipe."""
    for name, idle in NEVER_APPLIED.items():
        value = telling.get(name)
        if value is not None and value not in idle and not telling.said[name].flag:
            telling.remark(name, f"{name} {value} in the file is never applied by accelerate launch.")
    for name, key in (
        ("max_restarts", "launcher.max_restarts"),
        ("num_cpu_threads_per_process", "env.OMP_NUM_THREADS"),
    ):
        if telling.get(name) is not None:
            telling.put(name, key, telling.get(name))
    if telling.get("enable_cpu_affinity") is True and telling.said["enable_cpu_affinity"].flag:
        telling.put("enable_cpu_affinity", "launcher.numa_binding", "node")
    telling.read |= {"machine_rank", "main_process_ip", "use_parallelism_config"}
    if "main_process_port" not in telling.read and telling.get("main_process_port") not in (None, 0):
        telling.remark("main_process_port", "main_process_port is not taken over: each run has a free port.")
    _meshes(telling)
    if telling.get("main_training_function") != "main":
        telling.read.discard("main_training_function")
    ours = telling.draft.get("strategy.kind")
    for name, told in telling.said.items():
        if name in telling.read or told.value is False:
            continue
        section, _, inner = name.rpartition(".")
        unused = section in ("fsdp_config", "deepspeed_config") and f"strategy {ours or 'single'} does not use it"
        unused = unused or (name.startswith("tpu_") and _PODS) or "a recipe has no such key"
        telling.remark(name, f"{inner or name} {told.value} is not taken over: {unused}.")


__all__ = ["interpret", "launched", "read", "recognises"]
