"""Number formats: autocast, loss scaling for fp16, and the tf32 switch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from trainkit.errors import TrainingError
from trainkit.train.settings import Settings

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# These strategies cast the weights themselves, for training and evaluation alike, and need no autocast.
CASTING_STRATEGIES = ("fsdp", "zero1", "zero2", "zero3")


def autocast(strategy: str, dtype: str, device: torch.device) -> AbstractContextManager[object]:
    """Context of one forward pass; weights stay fp32, matrix products run in `dtype`."""
    if dtype == "fp32" or strategy in CASTING_STRATEGIES:
        return nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[dtype])


def check_precision(settings: Settings) -> None:
    """TrainingError for what planning refuses, should a settings file come from elsewhere."""
    kind = settings.recipe.strategy.kind
    if kind.startswith("zero") and settings.dtype == "fp16" and settings.device == "cpu":
        raise TrainingError(f"{kind} cannot train fp16 on a CPU")
    if kind in CASTING_STRATEGIES and settings.eval_dtype != settings.dtype:
        raise TrainingError(f"{kind} cannot evaluate in {settings.eval_dtype} what it trains in {settings.dtype}")


def gradient_scaler(dtype: str, device: torch.device) -> torch.amp.GradScaler:
    """Loss scaling; it does nothing unless the format is fp16, whose gradients would underflow."""
    return torch.amp.GradScaler(device.type, enabled=dtype == "fp16")


def set_tf32(enabled: bool | None) -> None:
    """TensorFloat-32 for matrix products and convolutions on CUDA; None leaves PyTorch's defaults."""
    if enabled is not None:
        torch.backends.cuda.matmul.allow_tf32 = enabled
        torch.backends.cudnn.allow_tf32 = enabled
