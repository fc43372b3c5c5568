"""Number formats: autocast, loss scaling for fp16, and the tf32 switch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from trainkit.errors import TrainingError
from trainkit.trainer.parallel import STRATEGIES
from trainkit.trainer.settings import Settings

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(settings: Settings, dtype: str, device: torch.device) -> AbstractContextManager[object]:
    """Context of one forward pass: fp32 weights stay, matrix products run in `dtype`."""
    recipe = settings.recipe
    # A strategy that casts (FSDP, ZeRO) has 16-bit weights inside, so that autocast would only cast once more.
    if dtype == "fp32" or STRATEGIES[recipe.strategy.kind].casts or recipe.precision.weights != "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[dtype])


@contextmanager
def casts_kept() -> Iterator[None]:
    """Inside, autocast keeps the 16-bit copies of the weights from one forward pass to the next.

    For passes between which the weights stay as they are: the micro steps of one step.
    """
    # torch forgets them when the outermost autocast ends, and this is around it. It is none itself, for backward, which
    # is inside, computes in the formats of forward by itself (torch.amp: no autocast around backward).
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


def check_precision(settings: Settings) -> None:
    """TrainingError for what planning refuses, should a settings file come from elsewhere."""
    kind = settings.recipe.strategy.kind
    if kind.startswith("zero") and settings.dtype == "fp16" and settings.device == "cpu":
        raise TrainingError(f"{kind} cannot train fp16 on a CPU")
    if STRATEGIES[kind].casts and settings.eval_dtype != settings.dtype:
        raise TrainingError(f"{kind} cannot evaluate in {settings.eval_dtype} what it trains in {settings.dtype}")
    if settings.recipe.precision.weights == "bf16" and (settings.dtype != "bf16" or kind.startswith("zero")):
        raise TrainingError(f"{kind} cannot keep bf16 weights and train in {settings.dtype}")


class SkippedSteps:
    """Watches how many updates fp16 loss scaling skips: some at the start are usual, one after another are the end."""

    PATIENCE = 24  # the scale starts at 2**16 and each skip halves it: by then it is below what any sound loss needs

    def __init__(self) -> None:
        self._step = self._total = self._in_a_row = 0

    def note(self, step: int, total: int) -> None:
        """Take the skips up to a step. TrainingError when all of the latest steps were skipped."""
        fresh, steps = total - self._total, step - self._step
        self._in_a_row = self._in_a_row + fresh if fresh == steps else 0
        self._step, self._total = step, total
        if self._in_a_row >= self.PATIENCE:
            raise TrainingError(
                f"fp16 has skipped the {self._in_a_row} steps up to step {step}: loss or gradients are not finite "
                "at any scale",
                hint="set precision to bf16, which has the range of fp32, or to fp32",
            )


def set_tf32(enabled: bool | None) -> None:
    """TensorFloat-32 for matrix products and convolutions on CUDA; None leaves PyTorch's defaults."""
    # By default convolutions use it and matrix products do not (torch 1.12 and later).
    if enabled is not None:
        torch.backends.cuda.matmul.allow_tf32 = enabled
        torch.backends.cudnn.allow_tf32 = enabled
