"""Number formats: `auto` resolved for the chosen device, and what that device cannot do."""

from __future__ import annotations

from collections.abc import Sequence

from trainkit.hardware.facts import Gpu
from trainkit.planning.context import Dtype
from trainkit.planning.plan import Notice
from trainkit.recipe.schema import Recipe

AMPERE = (8, 0)  # first compute capability with bf16 and tf32 units (CUDA C programming guide, arithmetic instructions)


def choose_dtype(recipe: Recipe, device: str, cards: Sequence[Gpu]) -> Dtype:
    """The format of forward and backward; `auto` is bf16 where every card has units for it, else fp32."""
    wanted = recipe.precision.dtype
    if wanted != "auto":
        return wanted
    return "bf16" if device == "cuda" and cards and all(gpu.compute_capability >= AMPERE for gpu in cards) else "fp32"


def precision_notices(recipe: Recipe, device: str, dtype: Dtype, cards: Sequence[Gpu]) -> tuple[Notice, ...]:
    """What the chosen cards lack for the chosen formats, and settings that do nothing on this device."""
    notices = []
    old = [gpu for gpu in cards if gpu.compute_capability < AMPERE]
    if dtype == "bf16" and old:
        notices.append(
            Notice(
                "blocker",
                f"bf16 needs compute capability 8.0; {old[0].name} has {_capability(old[0])}.",
                "Set precision to fp16.",
            )
        )
    if recipe.precision.tf32 and old:
        notices.append(
            Notice(
                "blocker",
                f"tf32 needs compute capability 8.0; {old[0].name} has {_capability(old[0])}.",
                "Leave precision.tf32 out.",
            )
        )
    if recipe.precision.tf32 is not None and device != "cuda":
        notices.append(Notice("warning", f"precision.tf32 does nothing on {device}.", "It is a format of CUDA cards."))
    if dtype == "fp16" and device == "cpu":
        notices.append(Notice("warning", "fp16 on a CPU is slower than fp32.", "Set precision to fp32 or bf16."))
    return tuple(notices)


def _capability(gpu: Gpu) -> str:
    return ".".join(str(number) for number in gpu.compute_capability)
