"""What the planner refuses, warns of and remarks on, whatever runs: one list, with those of what the plan chose."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from trainkit.errors import Diagnostic, blocker, note, warning
from trainkit.launch_plan.context import Context, bare_context
from trainkit.launch_plan.model import Device
from trainkit.launch_plan.rules import SHARED, InputRule, PlanRule, incompatible, unreached
from trainkit.lazy import call
from trainkit.machine.facts import at_least
from trainkit.optimizers import ON_DEEPSPEED
from trainkit.planner import copies
from trainkit.planner.container import check_container, mapped
from trainkit.planner.container import notices as container_notices
from trainkit.planner.container import problems as container_problems
from trainkit.planner.dtype import kernel_notices, precision_notices
from trainkit.planner.env import check_environment, order_notices
from trainkit.planner.hub import notices as hub_notices
from trainkit.planner.hub import problems as hub_problems
from trainkit.planner.hub import push_notices
from trainkit.planner.placement import core_notices
from trainkit.planner.requirements import doubtful_releases, missing_packages
from trainkit.recipe.hub_name import meant
from trainkit.recipe.paths import CONFIG, absolute
from trainkit.recipe.resolved import Asked
from trainkit.recipe.schema import StrategyKind, TextData
from trainkit.recipe.schema.fields import schema, tagged_sections
from trainkit.rule import check
from trainkit.schedulers.registry import SCHEDULERS, cores_of_node
from trainkit.text import pluralize
from trainkit.tools.base.own_scripts import several_cards
from trainkit.tools.compile_backends import KEY as BACKEND
from trainkit.tools.compile_backends import gone
from trainkit.tools.registry import LAUNCHERS, PROGRAMS
from trainkit.tools.torch_xla import notices as xla_notices

STRATEGIES: tuple[str, ...] = get_args(StrategyKind)
OF_BUILTIN = tuple(each for each in STRATEGIES if each != "zero0")  # the others are for programs of the user's own
removed_notices = call("trainkit.tools.deepspeed.config:removed_notices")
DEVICES: tuple[Device, ...] = ("cpu", "cuda", "mps")  # of the built-in trainer

INCOMPATIBLE: tuple[PlanRule, ...] = (
    incompatible(
        "strategy.kind",
        lambda c: c.strategy == "single" and c.ranks > 1,
        "`single` is one process on one device: several would train separate copies that never talk to one another",
        "strategy.kind: ddp for several processes, or nodes.processes_per_node: 1",
    ),
    incompatible(
        "nodes.processes_per_node",
        lambda c: c.device == "mps" and c.ranks > 1,
        "MPS takes one process: neither gloo nor nccl can exchange its tensors",
        "nodes.processes_per_node: 1 with strategy.kind: single, or devices.type: cpu",
    ),
    incompatible(
        "strategy.kind",
        lambda c: c.device == "mps" and c.strategy in SHARED,
        "this strategy needs a process group, and neither gloo nor nccl can exchange MPS tensors",
        "strategy.kind: single, or devices.type: cpu",
    ),
    incompatible(
        "devices.select",
        lambda c: c.kind_of_cards == "mig" and c.ranks > 1,
        "NCCL takes two parts of a GPU for one device, and a process sees only the first part that it is shown",
        "one part with nodes.processes_per_node: 1, or whole GPUs",
    ),
    incompatible(
        "devices.select",
        lambda c: c.kind_of_cards == "mig" and c.sees_several,
        "a process sees only the first part of a GPU that it is shown",
        "one part, or whole GPUs",
    ),
    incompatible(
        "devices.select",
        lambda c: c.launcher == "deepspeed" and c.sees_several,
        "the deepspeed launcher starts a process for each GPU that it is given",
        "as many GPUs as nodes.processes_per_node, or launcher.kind: torchrun",
    ),
    incompatible(
        "strategy.kind",
        lambda c: c.kind_of_cards == "mig" and c.strategy in ON_DEEPSPEED,
        "DeepSpeed reads CUDA_VISIBLE_DEVICES as numbers, and parts of a GPU have none",
        "strategy.kind: single",
    ),
    incompatible(
        "nodes.processes_per_node",
        lambda c: c.device == "xla" and c.ranks > 1,
        "torch_xla makes the processes of a TPU itself, inside the script's interpreter (xmp.spawn), so no "
        "launcher can give each its rank",
        "nodes.count: 1 and nodes.processes_per_node: 1, with strategy.kind: fsdp for every chip of the machine; "
        "a script of kind torch that calls xmp.spawn itself is one process too, with strategy.kind: single",
    ),
    incompatible(
        "strategy.kind",
        lambda c: c.device == "xla" and c.strategy in ("ddp", *ON_DEEPSPEED),
        "this strategy is a process for each chip, and a run on XLA is one process",
        "strategy.kind: fsdp with program.kind: hf, or single for one chip",
    ),
    incompatible(
        "precision.dtype",
        lambda c: c.device == "xla" and c.program in ("hf", "accelerate") and c.dtype == "fp16",
        "accelerate ends with an error at fp16 on a TPU",
        "precision.dtype: bf16 or fp32",
    ),
    incompatible(
        "strategy.xla_settings",
        lambda c: c.device != "xla" and getattr(c.recipe.strategy, "xla_settings", None),
        "only torch_xla's FSDP has these settings",
        "devices.type: xla with strategy.version: 1, or leave strategy.xla_settings out",
    ),
    incompatible(
        "batch.micro",
        lambda c: c.program != "builtin" and c.searches_micro,
        "only the built-in trainer looks for the largest micro batch that fits",
        "batch.micro: a number, or left out",
    ),
    incompatible(
        "precision.dtype",
        lambda c: c.strategy in ON_DEEPSPEED and c.device == "cpu" and c.dtype == "fp16",
        "DeepSpeed trains fp16 on a CPU only where oneDNN has fp16 kernels for it",
        "precision.dtype: bf16 or fp32",
    ),
)

# Key of a path that is no setting of its own -> the hint where nothing is there.
OTHER_PATHS = {
    CONFIG: "check the path behind --config; it starts from the working folder",
    "data.include": "name the files in data.include, as '**/*.txt'; files of rows are for data.kind: dataset",
}


def planned_for_another_machine(context: Context) -> Iterator[Diagnostic]:
    """What is said of a machine that is not this one."""
    facts = context.facts
    if facts.origin:
        yield note(f"planned for another machine ({facts.origin}), with torch {facts.packages.get('torch')}")
        absent = [path for key, paths in context.resolved.absent.items() if not _needed_here(key) for path in paths]
        if absent:
            yield note(f"whether that machine has {', '.join(absent)} is not known")


def _needed_here(key: str) -> bool:
    """Whether a plan for another machine reads the path on this one, too."""
    return any(each.here for each in schema().settings.get(key, ()))


def inputs_are_there(context: Context) -> Iterator[Diagnostic]:
    """Paths that the run reads, at which nothing lies on this machine."""
    for key, paths in context.resolved.absent.items():
        section = getattr(context.recipe, key.partition(".")[0], None)
        setting = schema().setting(key, getattr(section, "kind", ""))
        for path in paths if _needed_here(key) or not context.facts.origin else ():
            if mapped(context, path):
                continue
            what, where = f"{key} {path} does not exist on this machine", absolute(path, context.resolved.folder)
            hint = OTHER_PATHS.get(key) or (setting and setting.missing) or f"check {key}, from the working folder"
            remedy = hint if where == path else f"it would be {where}; {hint}"
            if key == "data.include" and isinstance(context.recipe.data, TextData):
                what, remedy = f"data.path {path} holds no file that {context.recipe.data.include!r} matches", hint
            elif named := meant(path) if setting and setting.reads in ("path", "file", "repository") else "":
                remedy = f"for the repository of the Hub write {named}; a revision has a setting of its own"
            yield blocker(what, remedy, key)


def where_nodes_meet(context: Context) -> Iterator[Diagnostic]:
    nodes = context.topology.nodes
    if nodes > 1 and context.recipe.nodes.rendezvous == "auto":
        what = f"the {nodes} nodes meet at the first one of the scheduler's list, where they are started by one"
        yield note(what, "elsewhere set nodes.rendezvous to host:port of node 0")


def steps_before_epochs(context: Context) -> Iterator[Diagnostic]:
    steps, epochs = context.recipe.train.steps, context.recipe.train.epochs
    if steps is not None and epochs is not None:
        what = f"train.epochs {epochs:g} does nothing beside train.steps {steps}"
        yield note(what, "set train.steps=null for passes over the data")


def settings_of_another_kind(context: Context) -> Iterator[Diagnostic]:
    """Settings of a kind that a stronger layer changed: they were meant for something, and now do nothing."""
    keys_by_reason: dict[str, list[str]] = {}
    for key, entries in context.resolved.history.items():
        if entries[-1].dropped and key.partition(".")[0] in tagged_sections():
            keys_by_reason.setdefault(entries[-1].note, []).append(key)
    for reason, keys in keys_by_reason.items():
        yield note(f"{', '.join(keys)} {'is' if len(keys) == 1 else 'are'} {reason}")


def batch_remarks(context: Context) -> Iterator[Diagnostic]:
    batch = context.batch
    if batch.note:
        yield note(batch.note)
    made = context.zero and "strategy.config" not in context.resolved.attachments
    if context.recipe.program.kind == "deepspeed" and made and batch.global_ is None:
        # runtime/config.py: _batch_assertion
        what = "DeepSpeed's engine gets no batch size: it fails unless the script sets one"
        yield warning(what, "set batch.micro, or batch.global")
    if batch.search:
        limit = context.recipe.batch.memory_mib
        bound = f"{limit} MiB (batch.memory_mib)" if limit else "what it has and nine tenths of what is free"
        what = (
            f"batch.micro is auto: before the first step the trainer tries sizes from {batch.search[0]} to "
            f"{batch.search[-1]} on a copy of the model, by doubling, then bisection, and takes the largest with which "
            f"no rank takes more memory than {bound}. Only sizes that divide a rank's {batch.search[-1]} samples come "
            "into question, so that the global batch stays"
        )
        hint = "see metrics.jsonl and summary.json for what it was; this machine remembers it for the same settings"
        yield note(what, hint)


def device_remarks(context: Context) -> Iterator[Diagnostic]:
    """What the device lacks, or could not be asked."""
    facts, device, recipe = context.facts, context.topology.device, context.recipe
    if device != "mps" and (failure := facts.notes.get("gpus")):
        yield warning(f"the NVIDIA driver could not be queried for GPUs ({failure})", "check `nvidia-smi`")
    system, _, version = facts.system.partition(" ")
    # bf16 on MPS came with macOS 14 (https://pytorch.org/docs/stable/amp.html)
    if device == "mps" and context.dtype == "bf16" and system == "macOS" and not at_least(version, "14"):
        yield blocker(f"bf16 on MPS requires macOS 14; this is {facts.system}", "set precision to fp32")
    if device == "cpu" and getattr(recipe.strategy, "offload", False):
        yield note("strategy.offload moves nothing on a CPU: the shards are in its memory already")
    if device == "cpu" and context.launcher == "deepspeed" and facts.gpus:
        what = "the deepspeed launcher shows GPUs to the ranks of a CPU run; the program must leave them alone"
        yield warning(what, "set launcher.kind to torchrun, which hides them")


def ranks_share_cores(context: Context) -> Iterator[Diagnostic]:
    processes, cores = context.processes, cores_of_node(context)[0]
    share = f"share {pluralize(cores, 'CPU core')}"
    if context.topology.device == "cpu" and processes > cores:
        hint = "set nodes.processes_per_node to the number of cores or less"
        yield warning(f"{processes} ranks {share}", hint)


def settings_reach_the_program(asked: Asked) -> Iterator[Diagnostic]:
    """Settings that no argument, file or variable of the program carries."""
    yield from unreached(asked.resolved, PROGRAMS[asked.recipe.program.kind].SUPPORT, asked.recipe.program.kind)


def backend_is_gone(context: Context) -> Iterator[Diagnostic]:
    """The recipe names a backend of torch.compile for a program of the user's own that PyTorch no longer has."""
    settings = context.recipe.efficiency.compile
    if context.program != "builtin" and settings.enabled:
        yield from gone(settings.backend, f"{BACKEND} is {settings.backend}")


def scheduler_problems(context: Context) -> Iterator[Diagnostic]:
    """What the scheduler's own section says wrongly."""
    if scheduler := SCHEDULERS.get(context.recipe.cluster.kind):
        yield from scheduler.problems(context)


INPUT_RULES: tuple[InputRule, ...] = (
    lambda asked: hub_problems(asked.resolved),
    settings_reach_the_program,
    lambda asked: check_environment(asked.resolved),
    lambda asked: check_container(asked.resolved),
)
RULES: tuple[PlanRule, ...] = (
    scheduler_problems,
    container_problems,
    planned_for_another_machine,
    missing_packages,
    lambda c: removed_notices(c) if c.zero else (),
    inputs_are_there,
    hub_notices,
    container_notices,
    where_nodes_meet,
    steps_before_epochs,
    precision_notices,
    kernel_notices,
    doubtful_releases,
    backend_is_gone,
    device_remarks,
    order_notices,
    xla_notices,
    several_cards,
    core_notices,
    ranks_share_cores,
    settings_of_another_kind,
    batch_remarks,
    push_notices,
    copies.notices,
)


def input_rules(kind: str) -> tuple[InputRule, ...]:
    """The rules that are asked before a device is chosen, of a kind of program."""
    return (*INPUT_RULES, *PROGRAMS[kind].INPUT_RULES)


def compatibility_rules(context: Context) -> tuple[PlanRule, ...]:
    """The choices that cannot run together: in any plan, under its launcher, and with its kind of program."""
    return (*INCOMPATIBLE, *LAUNCHERS[context.launcher].INCOMPATIBLE, *PROGRAMS[context.program].INCOMPATIBLE)


def plan_rules(context: Context) -> tuple[PlanRule, ...]:
    """The rules of a plan whose choices can run together: those of every plan, and of its kind of program."""
    return (*RULES, *PROGRAMS[context.program].RULES)


def refusals(context: Context) -> list[Diagnostic]:
    """Why the choices of a plan cannot run together; nothing where they can."""
    return check(compatibility_rules(context), context)


def table_cells() -> dict[tuple[str, str], dict[str, str]]:
    """The table for people: by strategy and launcher what the built-in trainer can do on each device of one node."""
    answers = {(): "no", (1,): "one process", (2,): "several processes", (1, 2): "yes"}

    def cell(strategy: str, launcher: str, device: Device) -> str:
        runs = (ranks for ranks in (1, 2) if not refusals(bare_context(strategy, launcher, "builtin", device, ranks)))
        return answers[tuple(runs)]

    return {
        (strategy, launcher): {device: cell(strategy, launcher, device) for device in DEVICES}
        for strategy in OF_BUILTIN
        for launcher in LAUNCHERS
    }
