"""Number formats: `auto` resolved for the chosen device, and what that device cannot do."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from trainkit.frameworks.deepspeed.fields import formats, leaves_open
from trainkit.machine.facts import Gpu
from trainkit.optimizers import optimizer
from trainkit.plan.context import Context, Dtype
from trainkit.plan.model import Notice
from trainkit.planner.advice.card_kernels import named
from trainkit.recipe.schema import Recipe

LOW: tuple[Dtype, ...] = ("bf16", "fp16")
VOLTA = (7, 0)  # first compute capability with tensor cores, for fp16
AMPERE = (8, 0)  # first compute capability with bf16 and tf32 units (CUDA C programming guide, arithmetic instructions)
# Cards of Turing's small chips, TU116 and TU117, which have 7.5 and no tensor cores (NVIDIA Turing GPU architecture).
_SMALL_TURING = re.compile(r"GTX 16\d\d|\bMX[45]50\b|\bT(400|500|550|600|1000|1200|2000)\b")


def choose_dtype(
    recipe: Recipe, device: str, cards: Sequence[Gpu], in_file: object = None, own: Dtype | None = None
) -> Dtype:
    """The format of forward and backward; `auto` is what the cards are fast at, and fp32 off CUDA.

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
    return fast_format(cards) if device == "cuda" else "fp32"


def fast_format(cards: Sequence[Gpu]) -> Dtype:
    """bf16 where every card has units for it, else fp16 where every card has tensor cores, else fp32."""
    if cards and all(gpu.compute_capability >= AMPERE for gpu in cards):
        return "bf16"
    return "fp16" if cards and all(map(has_tensor_cores, cards)) else "fp32"


def has_tensor_cores(gpu: Gpu) -> bool:
    """Whether a card computes 16-bit products on units of their own. Of AMD's, the ones that PyTorch runs on have."""
    return gpu.vendor == "amd" or (gpu.compute_capability >= VOLTA and not _SMALL_TURING.search(gpu.name))


def precision_notices(context: Context) -> Iterator[Notice]:
    """What the chosen cards lack for the chosen formats, and settings that do nothing or little on this device."""
    precision, device, dtype = context.recipe.precision, context.topology.device, context.dtype
    old = next((gpu for gpu in context.cards if gpu.compute_capability < AMPERE), None)
    if old is not None:
        has = f"requires compute capability 8.0; {named(old)}"
        if dtype == "bf16":
            yield Notice("blocker", f"bf16 {has}", f"set precision to {fast_format(context.cards)}")
        elif precision.eval == "bf16":
            yield Notice("blocker", f"precision.eval bf16 {has}", "set precision.eval to same")
        if precision.tf32:
            yield Notice("blocker", f"tf32 {has}", "leave precision.tf32 out")
        if dtype == "fp16" and precision.dtype == "auto":
            what = f"precision auto is fp16 here, for {old.name} has no bf16: the loss is scaled"
            hint = "set precision to fp32 where many steps are skipped because they overflow"
            yield Notice("note", what, hint)
    yield from _speed(context)
    if precision.tf32 is not None and device != "cuda":
        yield Notice("warning", f"precision.tf32 does nothing on {device}", "leave it out: only CUDA cards have it")
    if dtype == "fp16" and device == "cpu":
        yield Notice("warning", "fp16 on a CPU is slower than fp32", "set precision to fp32 or bf16")
    # bf16 has 8 bits of mantissa: an update below 1/512 of a weight leaves it as it is.
    builtin, name = context.recipe.program.kind == "builtin", context.recipe.optimizer.name
    if builtin and precision.weights == "bf16" and not optimizer(name).keeps_rounding:
        what = f"precision.weights bf16 rounds small updates of {name} away: training may not progress"
        yield Notice("warning", what, "set optimizer.name to adamw_anyprecision, which keeps what rounding loses")


def _speed(context: Context) -> Iterator[Notice]:
    """Formats in which the chosen cards are slower than they could be. What the recipe asks for in words is meant."""
    precision, cards = context.recipe.precision, context.cards
    plain = next((gpu for gpu in cards if not has_tensor_cores(gpu)), None)
    if plain is not None and context.dtype == "fp16":
        what = f"{plain.name} has no tensor cores: fp16 saves memory there, and is hardly faster than fp32, or slower"
        yield Notice("note", what, "set precision to fp32 where it fits")
    asked = context.resolved.given("precision.dtype") is not None or precision.tf32 is not None
    faster = fast_format(cards)
    if context.recipe.program.kind == "builtin" and context.dtype == "fp32" != faster and not asked:
        what = (
            f"no format is asked for, so {cards[0].name} computes in fp32; it computes {faster} several times as fast"
        )
        yield Notice("note", what, "set precision to auto, or to fp32 where that is meant")
