"""What optimizers keep for each tensor, and what they take while they step."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from trainkit.foresight.trace import Parameter
from trainkit.optimizers import is_hidden_matrix
from trainkit.optimizers import optimizer as known

BLOCK, SMALL = 256, 4096  # of bitsandbytes: values of a scale, and values from which state is in 8 bits


class Tensor(NamedTuple):
    """A trained tensor as a rank updates it. item: bytes of a value. embedding: whether it is a table of one.

    hidden: whether it is a matrix of a block. rows: of all ranks together, where this one has some of them; else 0.
    """

    shape: tuple[int, ...]
    item: int
    embedding: bool = False
    hidden: bool = False
    rows: int = 0

    @classmethod
    def of(cls, parameter: Parameter, ranks: int = 1) -> Tensor:
        """A parameter's, or the share of it that one of the ranks has, by rows."""
        rows = (parameter.shape or (1,))[0]
        shape = parameter.share(ranks) if ranks > 1 else parameter.shape
        hidden = is_hidden_matrix(parameter.name, len(parameter.shape), embedding=parameter.embedding)
        return cls(shape, int(parameter.item), parameter.embedding, hidden, rows if ranks > 1 else 0)

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.size * self.item


def state(optimizer: str, tensor: Tensor, momentum: float = 0.9) -> list[int] | None:
    """Bytes of each tensor of the optimizer's state; None for an optimizer that is not known. momentum: SGD's."""
    kept = known(optimizer)
    if kept.keeps == "moments":
        extra = [tensor.bytes] if kept.keeps_rounding and tensor.item < 4 else []  # Kahan's sum
        return [tensor.bytes, tensor.bytes, *extra]
    if kept.keeps == "8-bit moments":
        wide = tensor.embedding or tensor.size < SMALL
        return [4 * tensor.size] * 2 if wide else [tensor.size, 4 * -(-tensor.size // BLOCK)] * 2
    if kept.keeps == "factors":
        if len(tensor.shape) < 2:
            return [tensor.bytes]
        rows, columns = prod(tensor.shape[:-1]), prod((*tensor.shape[:-2], tensor.shape[-1]))
        return [rows * tensor.item, columns * tensor.item]
    if kept.keeps == "squares":
        return [tensor.bytes]
    if kept.keeps == "momentum":
        return [tensor.bytes] if momentum else []
    if kept.keeps == "momentum of matrices":
        return [tensor.bytes] if tensor.hidden else [tensor.bytes, tensor.bytes]
    return None


def _orthogonalizing(matrix: Tensor) -> int:
    """Bytes beside a matrix while Muon computes its update (torch/optim/_muon.py; trainkit/trainer/muon.py).

    The direction in its format; in bf16 what is iterated, before and after a step, and two products of the short side
    with itself; of a sharded one the whole direction, its momentum and the update in fp32 besides.
    """
    rows, columns = matrix.rows or matrix.shape[0], matrix.shape[1]
    size, short = rows * columns, min(rows, columns)
    gathered = 12 * size if matrix.rows else 0
    return matrix.bytes + gathered + 2 * (2 * size + 2 * short * short)


def orthogonalizing_flops(tensors: Sequence[Tensor], steps: int = 5) -> float:
    """Operations of Muon's iterations: three products in each, of a matrix and of its short side's (its paper)."""
    found = 0.0
    for each in (each for each in tensors if each.hidden):
        short, long = sorted((each.rows or each.shape[0], each.shape[1]))
        found += steps * (4.0 * short * short * long + 2.0 * short**3)
    return found


def temporaries(optimizer: str, groups: Sequence[Sequence[Tensor]], device: str) -> int:
    """Bytes that a step takes beside the state, at its highest. groups: of tensors that are updated together."""
    largest = max((each.bytes for group in groups for each in group), default=0)
    whole = max((sum(each.bytes for each in group) for group in groups), default=0)
    kept, many = known(optimizer), device == "cuda"  # where PyTorch updates many tensors at once (foreach)
    if kept.together:
        return whole  # the square roots of the second moments
    if kept.at_once:
        return 2 * largest if device == "mps" and not kept.fixed else 0
    if kept.keeps == "momentum":
        return whole if many else largest  # the gradients with weight decay
    if kept.keeps == "momentum of matrices":
        return max((_orthogonalizing(each) for group in groups for each in group if each.hidden), default=0)
    if kept.keeps == "squares":
        return 2 * whole if many else 2 * largest
    return largest  # an estimate of the second moment
