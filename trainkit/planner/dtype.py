"""Number formats: `auto` resolved for the chosen device, and what that device cannot do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainkit.frameworks.deepspeed.fields import formats, leaves_open
from trainkit.machine.facts import Gpu
from trainkit.optimizers import optimizer
from trainkit.plan.context import Context, Dtype
from trainkit.plan.model import Notice
from trainkit.recipe.schema import Recipe

LOW: tuple[Dtype, ...] = ("bf16", "fp16")
VOLTA = (7, 0)  # first compute capability with tensor cores, for fp16
AMPERE = (8, 0)  # first compute capability with bf16 and tf32 units (CUDA C programming guide, arithmetic instructions)


def choose_dtype(
    recipe: Recipe, device: str, cards: Sequence[Gpu], in_file: object = None, own: Dtype | None = None
) -> Dtype:
    """The format of forward and backward; `auto` is bf16 where every card has units for it, else fp32.

    in_file: a DeepSpeed file of the user's, and own: what the program's own words say, where no layer gives a format.
    """
    if own:
        return own
    for dtype in LOW:
        if dtype in formats(in_file):
            return dtype
    if in_file is not None and recipe.program.kind != "builtin" and not leaves_open(in_file):
        return "fp32"  # DeepSpeed's, whatever the cards have
    if recipe.precision.dtype != "auto":
        return recipe.precision.dtype
    if recipe.program.kind in ("accelerate", "torch"):  # nothing is decided in the script's stead
        return "fp32"
    # Off CUDA the facts do not tell which formats have units; an emulated one would be slower than fp32.
    return "bf16" if device == "cuda" and cards and all(gpu.compute_capability >= AMPERE for gpu in cards) else "fp32"


def precision_notices(context: Context) -> Iterator[Notice]:
    """What the chosen cards lack for the chosen formats, and settings that do nothing or little on this device."""
    precision, device, dtype = context.recipe.precision, context.topology.device, context.dtype
    old = next((gpu for gpu in context.cards if gpu.compute_capability < AMPERE), None)
    if old is not None:
        has = f"requires compute capability 8.0; {old.name} has {'.'.join(map(str, old.compute_capability))}"
        if dtype == "bf16":
            yield Notice("blocker", f"bf16 {has}", "set precision to fp16")
        elif precision.eval == "bf16":
            yield Notice("blocker", f"precision.eval bf16 {has}", "set precision.eval to same")
        if precision.tf32:
            yield Notice("blocker", f"tf32 {has}", "leave precision.tf32 out")
        unused = dtype == "fp32" and precision.dtype == "auto" and context.recipe.program.kind == "builtin"
        if unused and old.compute_capability >= VOLTA:
            what = f"precision auto is fp32 here, for {old.name} has no bf16; it computes fp16 several times as fast"
            yield Notice("note", what, "set precision to fp16, which scales the loss")
    if precision.tf32 is not None and device != "cuda":
        yield Notice("warning", f"precision.tf32 does nothing on {device}", "leave it out: only CUDA cards have it")
    if dtype == "fp16" and device == "cpu":
        yield Notice("warning", "fp16 on a CPU is slower than fp32", "set precision to fp32 or bf16")
    # bf16 has 8 bits of mantissa: an update below 1/512 of a weight leaves it as it is.
    builtin, name = context.recipe.program.kind == "builtin", context.recipe.optimizer.name
    if builtin and precision.weights == "bf16" and not optimizer(name).keeps_rounding:
        what = f"precision.weights bf16 rounds small updates of {name} away: training may not progress"
        yield Notice("warning", what, "set optimizer.name to adamw_anyprecision, which keeps what rounding loses")
