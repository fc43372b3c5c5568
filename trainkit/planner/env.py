"""The environment of a rank: threads, allocator, devices, hang watch; and the wrapper that starts its program."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from trainkit.errors import Diagnostic, note
from trainkit.launch_plan.context import Context
from trainkit.launch_plan.model import EnvironmentDiff, HangWatch, Variable
from trainkit.launch_plan.provenance import Source, SourcedVariable, Token, token, variable
from trainkit.lazy import call
from trainkit.machine.capability import VOLTA
from trainkit.machine.selection import ORDER, kind_of_cards
from trainkit.planner.expected import is_verified
from trainkit.recipe.resolved import Resolved
from trainkit.recipe.schema import Image
from trainkit.schedulers.registry import SCHEDULERS, cores_of_node
from trainkit.text import pluralize
from trainkit.tools.compile_backends import records_graphs
from trainkit.tools.containers.engines import environment as caches
from trainkit.tools.registry import LAUNCHERS, PROGRAMS
from trainkit.tools.torch_xla import LEAKS as XLA_LEAKS
from trainkit.tools.torch_xla import environment as xla_environment

HEARTBEAT = "each rank's program reports its step and phase to the hang watch"
RECORDED = "collectives that torch keeps, so that the rank that others wait for can be named"
ENTRIES = 2000  # as torch keeps for NCCL by itself


def hang_watch(context: Context) -> HangWatch:
    """What the plan promises. The plan decides whether a run that hangs is ended; the guardian obeys."""
    asked = context.recipe.hang
    after = None if asked.after_seconds == "auto" else float(asked.after_seconds)
    if asked.then == "auto":
        cluster = context.recipe.cluster
        again = cluster.kind in SCHEDULERS and "hang" in SCHEDULERS[cluster.kind].restarts_after(cluster)
        reason = "a restart is configured" if again else "no restart is configured"
        return HangWatch(after, asked.start_seconds, ends=again, reason=reason)
    return HangWatch(after, asked.start_seconds, ends=asked.then == "end", reason="set by hang.then")


def has_heartbeat(context: Context) -> bool:
    """Whether the program says how far it is: the built-in trainer does, and the hook in programs of the user's own."""
    return context.recipe.program.kind == "builtin" or is_verified(context)


def wrapper(context: Context) -> tuple[Token, ...]:
    """The argv for the rank wrapper."""
    if not has_heartbeat(context):
        return ()
    return (token("--heartbeat", rule=HEARTBEAT), token("yes", rule=HEARTBEAT))


def flight_recorder(context: Context) -> Iterator[SourcedVariable]:
    """What has torch keep its latest collectives, where there are several ranks and somebody who can ask for them."""
    if context.topology.world_size > 1 and has_heartbeat(context) and context.recipe.hang.after_seconds:
        yield variable("TORCH_FR_BUFFER_SIZE", str(ENTRIES), rule=RECORDED)


# Imported where there are several GPUs, which it is about: accelerate's tables take a while.
unlinked = call("trainkit.tools.accelerate.launcher:unlinked")
place_of = call("trainkit.tools.deepspeed.ops:setting_of")

# What a variable does that an outer launcher, a finished job or a shell profile left behind -> its names or prefixes.
LEFT_BEHIND = {
    "describes an outer launcher": "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE NODE_RANK MASTER_ADDR MASTER_PORT",
    # torch/distributed/elastic/agent/server/local_elastic_agent.py
    "describes an outer torchrun": "TORCHELASTIC_* GROUP_RANK GROUP_WORLD_SIZE ROLE_NAME ROLE_RANK ROLE_WORLD_SIZE",
    # deepspeed/launcher/launch.py
    "describes an outer DeepSpeed launcher": "LOCAL_SIZE CROSS_RANK CROSS_SIZE",
    # torch/distributed/argparse_util.py: PET_FOO is the default of --foo
    "gives torchrun's flags other defaults": "PET_*",
    "changes torchrun's time limits": "TORCH_ELASTIC_*",
    # torch/distributed/run.py: config_from_args
    "makes torchrun start another interpreter": "PYTHON_EXEC",
    "configures accelerate behind the recipe's back": "ACCELERATE_* PARALLELISM_CONFIG_* MEGATRON_LM_*",
    "configures accelerate and transformers behind the recipe's back": "FSDP_*",
    "chooses DeepSpeed's device behind the recipe's back": "DS_ACCELERATOR",
}
LEAKS: dict[str, str] = {name: what for what, names in LEFT_BEHIND.items() for name in names.split()}

# On AMD GPUs one variable decides, by ROCm's own numbers; the others would be applied on top of it.
AMD_LEAKS: dict[str, str] = {
    "CUDA_VISIBLE_DEVICES": "would be read beside HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES": "would change what HIP_VISIBLE_DEVICES counts",
}

# The whole recipe, for a program that reads it: in the run directory's own only what was given is written.
SETTINGS = "settings.yaml"

RANK_BY_RANK = "rank i of a node uses the i-th"

# Of a rank on a GPU. Its operators on the CPU are short (drawing samples, a copy of a checkpoint), and beyond some
# threads they take longer to wake up than to compute.
MOST_THREADS = 16
# A part of a GPU that a hypervisor gives to a machine, whose profile is the end of its name (NVIDIA vGPU user guide).
_VIRTUAL = re.compile(r"^GRID |-\d+[ABCQ]$")

# Variables that the plan decides -> what to do instead of setting them under `env`.
DECIDED: dict[str, str] = {
    **dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"), "use devices.select"),
    "CUDA_DEVICE_ORDER": "use devices.order",
    **dict.fromkeys(("DS_ACCELERATOR", "USE_TORCH_XLA"), "use devices.type"),
    "XLA_USE_SPMD": "use strategy.kind and strategy.version",
    "TRAINKIT_RECIPE": "leave it out: it names the resolved recipe of the run",
    **dict.fromkeys(
        ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"), "use nodes.processes_per_node; the launcher sets it"
    ),
    **dict.fromkeys(("MASTER_ADDR", "MASTER_PORT"), "use nodes.rendezvous; the launcher sets it"),
}


def check_environment(resolved: Resolved) -> list[Diagnostic]:
    """An error for each variable under `env` or `env_from` that the plan decides."""
    return [
        resolved.error(key, f"{key.partition('.')[0]} names {name}, which the plan decides", DECIDED[name])
        for name, key in resolved.named_variables()
        if name in DECIDED
    ]


def overwritten(context: Context) -> Iterator[Diagnostic]:
    """Variables of the recipe's that the launcher would set to something else in the ranks."""
    added = {item.name: item for item in LAUNCHERS[context.launcher].added(context) if not item.yields}
    for name, key in context.resolved.named_variables():
        if name in added:
            value = f" to {added[name].value}" if added[name].value.parts else ""
            what = f"{key.partition('.')[0]} names {name}, which launcher {context.launcher} sets{value} in each rank"
            yield context.resolved.error(key, what, f"leave {name} out, or choose another launcher.kind")


def plan_environment(context: Context) -> tuple[EnvironmentDiff, Mapping[str, Source]]:
    """The diff, and what made each variable of it.

    Later variables win over earlier ones of the same name, and the caller's, where env_from names it, over all.
    """
    variables = (
        # From the general to the particular: what the recipe names itself wins.
        *_defaults(context),
        *_devices(context),
        *flight_recorder(context),
        *xla_environment(context),
        *(unlinked(context) if len(context.facts.gpus) > 1 else ()),
        *LAUNCHERS[context.launcher].environment(context),
        *PROGRAMS[context.recipe.program.kind].environment(context),
        *(caches(context) if isinstance(context.recipe.container, Image) else ()),
        *(variable(name, str(value), keys=(f"env.{name}",)) for name, value in context.recipe.env.items()),
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
        added=tuple((name, item.value if item.value.parts else None) for name, item in sorted(added.items())),
    )
    return diff, sources


def _defaults(context: Context) -> Iterator[SourcedVariable]:
    recipe = context.recipe
    yield _threads(context)
    yield variable("PYTHONUNBUFFERED", "1", rule="a rank's output appears when it is written, also after a crash")
    rule = "the resolved recipe, for programs that read it"
    file = SETTINGS if recipe.program.reads_recipe else "recipe.yaml"
    yield variable("TRAINKIT_RECIPE", Variable.RUN_DIR, f"/{file}", rule=rule)
    if recipe.program.kind != "builtin":
        return
    if recipe.train.deterministic and context.topology.device == "cuda":
        # cuBLAS reads its workspace setting when it starts, so the trainer could set it too late.
        rule = (
            "cuBLAS gives equal results only with workspaces of its own for each stream "
            "(cuBLAS, results reproducibility)"
        )
        yield variable("CUBLAS_WORKSPACE_CONFIG", ":4096:8", keys=("train.deterministic",), rule=rule)
    yield from _allocator(context)
    # The model comes from a folder or from the recipe; `env` may say otherwise for the user's code.
    if recipe.model.kind == "hf" and recipe.checkpoint.push_to_hub.repo is None:
        yield variable("HF_HUB_OFFLINE", "1", keys=("model.kind",), rule="what is fetched comes before")


def _threads(context: Context) -> SourcedVariable:
    """Of operators on the CPU, in each rank."""
    cores, keys = cores_of_node(context)
    threads = max(cores // context.processes, 1)
    share = f"{pluralize(cores, 'core')} / {pluralize(context.processes, 'rank')}"
    # What is offloaded is updated on the CPU, with all the cores that there are.
    offloaded = context.deepspeed and place_of(context, "offload_optimizer") in ("cpu", "nvme")
    offloaded = offloaded or bool(getattr(context.recipe.strategy, "offload", False))
    if context.topology.device == "cuda" and threads > MOST_THREADS and not offloaded:
        threads = MOST_THREADS
        share += (
            f", and at most {MOST_THREADS} on GPUs: a rank's work on the CPU is short, and more threads slow it down"
        )
    rule = f"{share}; launchers differ in their defaults"
    return variable("OMP_NUM_THREADS", str(threads), keys=keys, rule=rule)


ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # of which torch reads the first that is there
GROWING = "expandable_segments:True"


def segments_grow(context: Context) -> bool:
    """Whether the segments of torch's allocator grow on GPUs: as somebody has told it, or by the plan."""
    env = context.recipe.env
    told = next((str(env[name]) for name in ALLOCATOR if name in env), context.facts.allocator or "")
    return GROWING in told or any(True for _ in _allocator(context))


def _allocator(context: Context) -> Iterator[SourcedVariable]:
    """Segments that grow, for the built-in trainer, unless somebody tells torch's allocator something else."""
    recipe, facts = context.recipe, context.facts
    told = any(name in recipe.env or name in recipe.env_from for name in ALLOCATOR)
    told = told or (facts.allocator is not None and not isinstance(recipe.container, Image))
    # They are made of the driver's virtual memory management. Not known to work with it: other systems than Linux,
    # parts of GPUs, AMD's, and torch's recording of CUDA graphs.
    known = kind_of_cards(context.cards) == "nvidia" and facts.platform == "linux" and "microsoft" not in facts.kernel
    cards = [gpu for gpu in context.cards if gpu.compute_capability >= VOLTA and not _VIRTUAL.search(gpu.name)]
    if recipe.program.kind != "builtin" or told or not known or not cards or len(cards) < len(context.cards):
        return
    if not records_graphs(recipe.efficiency.compile):
        # The old name, which every release reads: 2.9 takes it from no other (pytorch/pytorch, issue 183387).
        rule = "memory that the allocator holds grows in place, so that sizes that vary leave no gaps that nothing fits"
        yield variable(ALLOCATOR[0], GROWING, keys=("devices.type",), rule=rule)


def _devices(context: Context) -> Iterator[SourcedVariable]:
    device, keys = context.topology.device, ("devices.type",)
    if device == "cuda":
        cards, order, keys = ",".join(context.devices), context.recipe.devices.order, ("devices.select",)
        if _amd(context):
            rule = f"{RANK_BY_RANK}, as ROCm counts"
            yield variable("HIP_VISIBLE_DEVICES", cards, keys=keys, rule=rule)
            return
        name, rule = ORDER[order]
        if order == "fastest" and all(each.isdecimal() for each in context.devices):
            name = ORDER["pci"][0]
            rule = "the GPUs are in the order of devices.order, by numbers that have one meaning"
        yield variable("CUDA_DEVICE_ORDER", name, keys=("devices.order",), rule=rule)
        uses = "every rank of a node sees them all, in this order" if context.sees_several else RANK_BY_RANK
        yield variable("CUDA_VISIBLE_DEVICES", cards, keys=keys, rule=uses)
        return
    # The deepspeed launcher writes its own slots there, on a CPU too.
    if context.facts.gpus and context.launcher != "deepspeed":
        rule = f"a run on {'the CPU' if device == 'cpu' else device} uses no GPU"
        yield variable("CUDA_VISIBLE_DEVICES", "", keys=keys, rule=rule)
        if _amd(context):
            yield variable("HIP_VISIBLE_DEVICES", "", keys=keys, rule=rule)
    if device == "cpu" and (context.deepspeed or context.launcher == "deepspeed"):
        yield variable("DS_ACCELERATOR", "cpu", keys=keys, rule="DeepSpeed would guess its device")
    if device == "mps":
        rule = "operators that MPS lacks run on the CPU instead of ending the run"
        yield variable("PYTORCH_ENABLE_MPS_FALLBACK", "1", keys=keys, rule=rule)


def _amd(context: Context) -> bool:
    return any(gpu.vendor == "amd" for gpu in context.facts.gpus)


def order_notices(context: Context) -> Iterator[Diagnostic]:
    """A counting order that the caller exported and the plan replaces."""
    exported = context.facts.device_order
    chosen = next((str(each.value) for each in _devices(context) if each.name == "CUDA_DEVICE_ORDER"), None)
    if chosen and exported not in {None, ORDER[context.recipe.devices.order][0]}:
        yield note(f"the plan replaces CUDA_DEVICE_ORDER={exported} of your environment by {chosen}")
