"""The environment diff: what the ranks' environment has that the caller's has not, and the reason for each part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from trainkit.errors import Diagnostic
from trainkit.frameworks.accelerate.rank_environment import unlinked
from trainkit.frameworks.registry import LAUNCHERS, PROGRAMS
from trainkit.frameworks.torch_xla import LEAKS as XLA_LEAKS
from trainkit.frameworks.torch_xla import environment as xla_environment
from trainkit.machine.selection import ORDER
from trainkit.plan.context import Context
from trainkit.plan.model import EnvironmentDiff, Notice, Variable
from trainkit.plan.provenance import Source, SourcedVariable, variable
from trainkit.text import counted

if TYPE_CHECKING:
    from trainkit.recipe.resolved import Resolved

# What an outer launcher, a finished job or a shell profile may have left behind, and what it would do.
LEAKS: dict[str, str] = {
    "PET_*": "gives torchrun's flags other defaults",
    "TORCHELASTIC_*": "describes an outer torchrun",
    "TORCH_ELASTIC_*": "changes torchrun's time limits",
    "RANK": "describes an outer launcher",
    "LOCAL_RANK": "describes an outer launcher",
    "WORLD_SIZE": "describes an outer launcher",
    "LOCAL_WORLD_SIZE": "describes an outer launcher",
    "LOCAL_SIZE": "describes an outer DeepSpeed launcher",
    "CROSS_RANK": "describes an outer DeepSpeed launcher",
    "CROSS_SIZE": "describes an outer DeepSpeed launcher",
    "NODE_RANK": "describes an outer launcher",
    "GROUP_RANK": "describes an outer torchrun",
    "GROUP_WORLD_SIZE": "describes an outer torchrun",
    "ROLE_NAME": "describes an outer torchrun",
    "ROLE_RANK": "describes an outer torchrun",
    "ROLE_WORLD_SIZE": "describes an outer torchrun",
    "MASTER_ADDR": "describes an outer launcher",
    "MASTER_PORT": "describes an outer launcher",
    "ACCELERATE_*": "configures accelerate behind the recipe's back",
    "FSDP_*": "configures accelerate and transformers behind the recipe's back",
    "PARALLELISM_CONFIG_*": "configures accelerate behind the recipe's back",
    "MEGATRON_LM_*": "configures accelerate behind the recipe's back",
    "DS_ACCELERATOR": "chooses DeepSpeed's device behind the recipe's back",
    "PYTHON_EXEC": "makes torchrun start another interpreter",
}

# On AMD cards one variable decides, by ROCm's own numbers; the others would be applied on top of it.
AMD_LEAKS: dict[str, str] = {
    "CUDA_VISIBLE_DEVICES": "would be read beside HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES": "would change what HIP_VISIBLE_DEVICES counts",
}

# Variables that the plan decides; a recipe that sets them under `env` contradicts itself.
DECIDED: dict[str, str] = {
    "CUDA_VISIBLE_DEVICES": "Use devices.select.",
    "HIP_VISIBLE_DEVICES": "Use devices.select.",
    "ROCR_VISIBLE_DEVICES": "Use devices.select.",
    "CUDA_DEVICE_ORDER": "Use devices.order.",
    "DS_ACCELERATOR": "Use devices.type.",
    "USE_TORCH_XLA": "Use devices.type.",
    "XLA_USE_SPMD": "Use strategy.kind and strategy.version.",
    "TRAINKIT_RECIPE": "It names the resolved recipe of the run.",
    **dict.fromkeys(
        ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"), "The launcher sets it; use nodes.processes_per_node."
    ),
    **dict.fromkeys(("MASTER_ADDR", "MASTER_PORT"), "The launcher sets it; use nodes.rendezvous."),
}


def check_environment(resolved: Resolved) -> tuple[Diagnostic, ...]:
    """Variables under `env` or `env_from` that the plan decides."""
    found = []
    for section, names in (("env", tuple(resolved.recipe.env)), ("env_from", tuple(resolved.recipe.env_from))):
        for name in names:
            if name in DECIDED:
                key = f"env.{name}" if section == "env" else "env_from"
                found.append(
                    Diagnostic(
                        "error",
                        f"{section} names {name}, which the plan decides",
                        key=key,
                        origin=resolved.origin(key),
                        hint=DECIDED[name],
                    )
                )
    return tuple(found)


def overwritten(context: Context) -> Iterator[Diagnostic]:
    """Variables of the recipe's that the launcher would set to something else in the ranks."""
    named = {name: f"env.{name}" for name in context.recipe.env} | dict.fromkeys(context.recipe.env_from, "env_from")
    for item in LAUNCHERS[context.launcher].added(context):
        if item.name in named and not item.yields:
            key = named[item.name]
            value = f" to {item.value}" if item.value else ""
            setter = f"launcher {context.launcher} sets{value} in each rank"
            what = f"{key.partition('.')[0]} names {item.name}, which {setter}"
            hint = f"Leave {item.name} out, or choose another launcher.kind."
            yield Diagnostic("error", what, key=key, origin=context.resolved.origin(key), hint=hint)


def plan_environment(context: Context) -> tuple[EnvironmentDiff, Mapping[str, Source]]:
    """The diff, and what made each variable of it.

    Later variables win over earlier ones of the same name, and the caller's, where env_from names it, over all.
    """
    variables = (
        *_defaults(context),
        *_devices(context),
        *xla_environment(context),
        *_determinism(context),
        *_hub(context),
        *unlinked(context),
        *LAUNCHERS[context.launcher].environment(context),
        *PROGRAMS[context.recipe.program.kind].environment(context),
        *_recipe(context),
    )
    chosen = {item.name: item for item in variables if item.name not in context.recipe.env_from}
    sources = {item.name: item.source for item in chosen.values()}
    sources |= {name: Source(("env_from",)) for name in context.recipe.env_from}
    given = {*chosen, *context.recipe.env_from}
    added = {item.name: item for item in LAUNCHERS[context.launcher].added(context) if item.name not in given}
    device = context.topology.device
    leaks = LEAKS | (AMD_LEAKS if device == "cuda" and _amd(context) else {}) | (XLA_LEAKS if device == "xla" else {})
    sources |= {name: Source(rule=f"not handed on: it {why}") for name, why in leaks.items() if name not in sources}
    for name, item in added.items():
        instead = f"; yours is {sources[name].rule}" if name in leaks else ""
        sources[name] = Source(item.source.keys, f"{item.source.rule}{instead}")
    diff = EnvironmentDiff(
        set=tuple((name, chosen[name].value) for name in sorted(chosen)),
        unset=tuple(sorted(leaks)),
        take=tuple(sorted(set(context.recipe.env_from))),
        added=tuple((name, added[name].value) for name in sorted(added)),
    )
    return diff, sources


def _defaults(context: Context) -> tuple[SourcedVariable, ...]:
    cores = context.facts.cpu_cores
    threads = max(cores // context.processes, 1)
    share = f"{counted(cores, 'core')} / {counted(context.processes, 'rank')}; launchers differ in their defaults"
    return (
        variable("OMP_NUM_THREADS", str(threads), rule=share),
        variable("PYTHONUNBUFFERED", "1", rule="a rank's output appears when it is written, also after a crash"),
        variable(
            "TRAINKIT_RECIPE",
            Variable.RUN_DIR,
            "/recipe.yaml",
            rule="the resolved recipe, for programs that want to read it",
        ),
    )


def _devices(context: Context) -> tuple[SourcedVariable, ...]:
    if context.topology.device == "cuda":
        return _cards(context)
    variables = []
    if (
        context.facts.gpus and context.launcher != "deepspeed"
    ):  # whose launcher writes its own slots there, on a CPU too
        rule = f"a run on {'the CPU' if context.topology.device == 'cpu' else context.topology.device} touches no card"
        names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES") if _amd(context) else ("CUDA_VISIBLE_DEVICES",)
        variables += [variable(name, "", keys=("devices.type",), rule=rule) for name in names]
    if context.topology.device == "cpu" and (context.zero or context.launcher == "deepspeed"):
        variables.append(
            variable("DS_ACCELERATOR", "cpu", keys=("devices.type",), rule="DeepSpeed would guess its device")
        )
    if context.topology.device == "mps":
        rule = "operators that MPS lacks run on the CPU instead of ending the run"
        variables.append(variable("PYTORCH_ENABLE_MPS_FALLBACK", "1", keys=("devices.type",), rule=rule))
    return tuple(variables)


def _cards(context: Context) -> tuple[SourcedVariable, ...]:
    cards = ",".join(context.devices)
    if _amd(context):
        rule = "rank i of a node uses the i-th, as ROCm counts"
        return (variable("HIP_VISIBLE_DEVICES", cards, keys=("devices.select",), rule=rule),)
    name, rule = ORDER[context.recipe.devices.order]
    if context.recipe.devices.order == "fastest" and all(device.isdecimal() for device in context.devices):
        name, rule = ORDER["pci"][0], "the cards stand in the order of devices.order, by numbers that have one meaning"
    return (
        variable("CUDA_DEVICE_ORDER", name, keys=("devices.order",), rule=rule),
        variable("CUDA_VISIBLE_DEVICES", cards, keys=("devices.select",), rule="rank i of a node uses the i-th"),
    )


def _amd(context: Context) -> bool:
    return any(gpu.vendor == "amd" for gpu in context.facts.gpus)


def order_notices(context: Context) -> Iterator[Notice]:
    """A counting order that the caller exported and the plan replaces."""
    told = context.facts.device_order
    chosen = next((str(each.value) for each in _devices(context) if each.name == "CUDA_DEVICE_ORDER"), None)
    if chosen and told not in {None, chosen}:
        yield Notice("note", f"The plan replaces the CUDA_DEVICE_ORDER={told} of your environment by {chosen}.")


def _determinism(context: Context) -> tuple[SourcedVariable, ...]:
    """cuBLAS reads its workspace setting when it starts, so the trainer could set it too late."""
    recipe = context.recipe
    if not recipe.train.deterministic or recipe.program.kind != "builtin" or context.topology.device != "cuda":
        return ()
    rule = (
        "cuBLAS gives equal results only with workspaces of its own for each stream (cuBLAS, results reproducibility)"
    )
    return (variable("CUBLAS_WORKSPACE_CONFIG", ":4096:8", keys=("train.deterministic",), rule=rule),)


def _hub(context: Context) -> tuple[SourcedVariable, ...]:
    """A model comes from a folder or from the recipe; `env` may say otherwise for code that the recipe names."""
    if context.recipe.program.kind != "builtin" or context.recipe.model.kind != "hf":
        return ()
    return (variable("HF_HUB_OFFLINE", "1", keys=("model.kind",), rule="nothing is downloaded in silence"),)


def _recipe(context: Context) -> tuple[SourcedVariable, ...]:
    return tuple(variable(name, str(value), keys=(f"env.{name}",)) for name, value in context.recipe.env.items())
