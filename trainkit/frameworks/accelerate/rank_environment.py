"""What `accelerate launch` gives each rank by itself, beside what the plan sets (accelerate, utils/launch.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trainkit.frameworks import torchrun
from trainkit.frameworks.accelerate.fields import SETTINGS
from trainkit.frameworks.accelerate.setting import Setting, distributed_type
from trainkit.frameworks.base.fields import UNSET
from trainkit.frameworks.deepspeed.launcher import by_import
from trainkit.machine.versions import at_least, has
from trainkit.plan.context import Context
from trainkit.plan.provenance import AddedVariable, SourcedVariable, added_variable, variable

RULE = "accelerate launch sets it for every rank, whatever the program"
THREADS_OF_INTEL: Mapping[str, str] = {"KMP_AFFINITY": "granularity=fine,compact,1,0", "KMP_BLOCKTIME": "1"}
# Cards that cannot reach one another directly, and the first driver that knows it (accelerate, utils/environment.py).
UNLINKED, NEW_ENOUGH = "RTX 40", "550.40.07"


def unlinked(context: Context) -> tuple[SourcedVariable, ...]:
    """What Accelerator() demands on cards without direct links, and accelerate launch alone would set."""
    reads = context.launcher == "accelerate" or context.recipe.program.kind in ("hf", "accelerate")
    cards = context.facts.gpus
    if not reads or context.topology.device != "cuda" or len(cards) < 2 or at_least(context.facts.driver, NEW_ENOUGH):
        return ()
    if not any(UNLINKED in card.name for card in cards):
        return ()
    rule = f"accelerate asks for it where {UNLINKED}xx cards have a driver before {NEW_ENOUGH}"
    return tuple(variable(name, "1", rule=rule) for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"))


def alone(context: Context) -> Iterator[AddedVariable]:
    """To a single process that is started directly."""
    yield from _defaults(context, "")
    on_cpu = context.topology.device == "cpu"
    yield added_variable("ACCELERATE_USE_CPU", str(on_cpu), rule=RULE)
    if on_cpu or not has(context.facts, "accelerate sets KMP_* on a CPU only"):
        rule = "accelerate launch binds threads so; only Intel's OpenMP reads it"
        yield from (added_variable(name, value, rule=rule) for name, value in THREADS_OF_INTEL.items())


def several(context: Context) -> Iterator[AddedVariable]:
    """To ranks that it starts with torchrun."""
    yield from torchrun.of_agent(context)
    yield from (added_variable(f"TORCHELASTIC_{name}", rule=torchrun.ITS_OWN) for name in ("RUN_ID", "USE_AGENT_STORE"))
    kind = distributed_type(context)
    if kind == "DEEPSPEED":
        yield from _deepspeed(context)
        return
    yield from _defaults(context, "")
    if kind == "FSDP":
        yield from _defaults(context, "FSDP_")


def _defaults(context: Context, start: str) -> Iterator[AddedVariable]:
    """The defaults of its own flags, for what neither file nor flags set. start: of FSDP's variables, or empty."""
    installed = context.facts.packages.get("accelerate") or "0"
    rule = f"{RULE} under FSDP" if start else RULE
    for each in SETTINGS:
        of_fsdp = each.variable.startswith("FSDP_")
        if each.variable and each.default is not UNSET and of_fsdp is bool(start) and each.known_to(installed):
            yield added_variable(each.variable, each.text(each.default), rule=rule)


def _deepspeed(context: Context) -> Iterator[AddedVariable]:
    names = sorted(each.name.rpartition(".")[2] for each in SETTINGS if _is_about_deepspeed(context, each))
    rule = "the keys of its own file about DeepSpeed"
    yield added_variable("ACCELERATE_CONFIG_DS_FIELDS", ",".join(names), rule=rule)
    yield added_variable("PYTHONPATH", rule="yours, and the working folder after it", yields=True)
    yield from by_import(context)


def _is_about_deepspeed(context: Context, setting: Setting) -> bool:
    in_section = setting.name.startswith("deepspeed_config.") and setting.in_file(context)
    return in_section and setting.encode(context) is not UNSET
