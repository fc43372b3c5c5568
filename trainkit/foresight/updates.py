"""What optimizers keep for each tensor, and what they take while they step."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

FUSED = ("adamw_torch", "adamw_torch_fused", "adamw_apex_fused", "adamw_anyprecision")
BLOCK, SMALL = 256, 4096  # of bitsandbytes: values of a scale, and values from which state is in 8 bits


class Tensor(NamedTuple):
    """A trained tensor as a rank updates it. item: bytes of a value. embedding: whether it is a table of one."""

    shape: tuple[int, ...]
    item: int
    embedding: bool = False

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.size * self.item


def state(optimizer: str, tensor: Tensor, momentum: float = 0.9) -> list[int] | None:
    """Bytes of each tensor of the optimizer's state; None for an optimizer that is not known. momentum: SGD's."""
    if optimizer in FUSED or optimizer == "adamw_torch_foreach":
        extra = [tensor.bytes] if optimizer == "adamw_anyprecision" and tensor.item < 4 else []  # Kahan's sum
        return [tensor.bytes, tensor.bytes, *extra]
    if optimizer == "adamw_bnb_8bit":
        wide = tensor.embedding or tensor.size < SMALL
        return [4 * tensor.size] * 2 if wide else [tensor.size, 4 * -(-tensor.size // BLOCK)] * 2
    if optimizer == "adafactor":
        if len(tensor.shape) < 2:
            return [tensor.bytes]
        rows, columns = prod(tensor.shape[:-1]), prod((*tensor.shape[:-2], tensor.shape[-1]))
        return [rows * tensor.item, columns * tensor.item]
    if optimizer == "adagrad":
        return [tensor.bytes]
    if optimizer == "sgd":
        return [tensor.bytes] if momentum else []
    return None


def temporaries(optimizer: str, groups: Sequence[Sequence[Tensor]], device: str) -> int:
    """Bytes that a step takes beside the state, at its highest. groups: of tensors that are updated together."""
    largest = max((each.bytes for group in groups for each in group), default=0)
    whole = max((sum(each.bytes for each in group) for group in groups), default=0)
    together = device == "cuda"  # PyTorch updates many tensors at once (foreach)
    if optimizer == "adamw_torch_foreach":
        return whole  # the square roots of the second moments
    if optimizer in FUSED:
        return 2 * largest if device == "mps" and optimizer == "adamw_torch" else 0
    if optimizer == "sgd":
        return whole if together else largest  # the gradients with weight decay
    if optimizer == "adagrad":
        return 2 * whole if together else 2 * largest
    return largest  # adafactor's estimate of the second moment
