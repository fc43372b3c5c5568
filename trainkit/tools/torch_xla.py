"""Runs on a TPU through torch_xla: their environment, and the notices on them."""

from __future__ import annotations

from collections.abc import Iterator

from trainkit.distribution import install
from trainkit.errors import Diagnostic, blocker, note
from trainkit.launch_plan.context import Context
from trainkit.launch_plan.provenance import SourcedVariable, variable
from trainkit.recipe.schema import Fsdp
from trainkit.recipe.schema.launching import ON_ACCELERATE

# What the caller's environment would change of a run on XLA.
LEAKS: dict[str, str] = {
    "XLA_USE_SPMD": "makes one device of all chips behind the recipe's back",
    "XLA_USE_BF16": "changes the number format behind the recipe's back",
    "XLA_DOWNCAST_BF16": "changes the number format behind the recipe's back",
}
DOWNCAST = "ACCELERATE_DOWNCAST_BF16"  # which leaves doubles in 32 bits (accelerate, state.py)
# https://github.com/pytorch/xla/blob/master/docs/source/learn/pjrt.md: one chip for one process
ONE_CHIP = {"TPU_PROCESS_BOUNDS": "1,1,1", "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1", "TPU_VISIBLE_CHIPS": "0"}


def on_xla(context: Context) -> bool:
    """Whether the run computes on XLA."""
    return context.topology.device == "xla"


def is_spmd(context: Context) -> bool:
    """Whether one process drives every chip of the machine as one device (FSDP's second version)."""
    strategy = context.recipe.strategy
    return on_xla(context) and isinstance(strategy, Fsdp) and strategy.version == 2


def environment(context: Context) -> Iterator[SourcedVariable]:
    """What torch_xla reads when it is imported, and what keeps libraries from it in other runs."""
    library, kind = context.recipe.program.kind in ON_ACCELERATE, ("devices.type",)
    if not on_xla(context):
        if library and "torch-xla" in context.facts.packages:
            rule = "accelerate and transformers compute on XLA wherever torch_xla is installed, unless this says no"
            yield variable("USE_TORCH_XLA", "0", keys=kind, rule=rule)
        return
    yield variable("PJRT_DEVICE", "TPU", keys=kind, rule="torch_xla's runtime and its device")
    if library:
        yield variable("USE_TORCH_XLA", "1", keys=kind, rule="accelerate and transformers look for torch_xla")
    if library and context.dtype == "bf16":
        name = "XLA_DOWNCAST_BF16" if DOWNCAST in context.recipe.env else "XLA_USE_BF16"
        rule = "accelerate has no autocast on a TPU and sets this instead"
        yield variable(name, "1", keys=("precision.dtype",), rule=rule)
    if is_spmd(context):
        rule = "one process drives all chips, which torch_xla shows it as one device"
        yield variable("XLA_USE_SPMD", "1", keys=("strategy.version",), rule=rule)
    elif library:
        rule = "accelerate counts one process for each chip that it sees, and there is one process"
        for name, value in ONE_CHIP.items():
            yield variable(name, value, keys=("strategy.kind",), rule=rule)


def notices(context: Context) -> Iterator[Diagnostic]:
    """How many chips compute, and which torch_xla that takes."""
    if not on_xla(context):
        return
    if is_spmd(context):
        size = context.batch.micro or "the script's own"
        what = f"the batch of {size} is that of the one process, and SPMD splits it over all chips"
        yield note(what, "set batch.micro to a multiple of the number of chips")
    elif context.recipe.program.kind in ON_ACCELERATE:
        what = "the run uses chip 0 alone; chips of TPU v2 and v3 have two cores, which accelerate counts as processes"
        yield note(what, "strategy.kind: fsdp with program.kind: hf uses every chip of the machine")
    if context.recipe.program.kind in ON_ACCELERATE and context.dtype == "bf16":
        what = "on XLA bf16 is the format of every float: parameters, gradients and the optimizer's state too"
        yield note(what, "torch_xla 2.9 does this with a warning that later ones will not")
    # torch_xla is compiled against one release of torch.
    torch, xla = (context.facts.packages.get(name, "") for name in ("torch", "torch-xla"))
    if torch and xla and torch.split(".")[:2] != xla.split(".")[:2]:
        both = install(context.facts.executable, "torch==2.9.*", "torch_xla[tpu]==2.9.*")
        what = f"torch_xla {xla} is made for torch {'.'.join(xla.split('.')[:2])}, and torch {torch} is installed"
        yield blocker(what, f"install both of one release: {both}")
