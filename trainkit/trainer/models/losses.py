"""Cross-entropy of a linear output layer without its whole logits: a few rows at a time, gradients with them.

With a vocabulary of 50,000 the logits of a batch and their gradient are often the largest tensors of a step. Softmax
and its gradient need one row at a time, so that forward can make a few rows of logits, take from them the loss and the
gradients of what they were made of, and forget them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from trainkit.data.encode import IGNORE_INDEX
from trainkit.trainer.tracing.stand_in import autocast_format, device_type, without_autocast

# Logits below this are computed whole, in one kernel each.
FEW = 1 << 22
# Elements of logits that are there at a time: enough rows to keep products large, on a CPU few enough for its caches.
AT_A_TIME = {"cuda": 1 << 27, "cpu": 1 << 23}


def linear_cross_entropy(
    layer: tuple[Tensor, Tensor, Tensor | None], targets: Tensor, at_most: int | None = None
) -> Tensor:
    """Cross-entropy in nats of the logits `hidden @ weight.T + bias`, summed over targets that are not -100.

    layer: hidden (…, width), weight (vocabulary, width) and bias (vocabulary); targets: (…). at_most: how many targets
    are not -100 at most, where the host knows it: logits are made for as many rows alone. Products are in the format
    of the autocast around it, or else of `hidden`; softmax and sums in fp32, as of logits that are cast to fp32.
    """
    hidden, weight, bias = layer
    rows, targets = hidden.flatten(0, -2), targets.flatten()
    asked = autocast_format(hidden) or rows.dtype
    large = rows.shape[0] * weight.shape[0] > FEW
    if large and at_most is not None:
        rows, targets = _counted(rows, targets, at_most)
    # Gradients of fp16 are scaled before they are rounded, by a scale that forward does not know.
    if not large or asked == torch.float16:
        logits = functional.linear(rows, weight, bias)
        return functional.cross_entropy(in_32_bits(logits), targets, ignore_index=IGNORE_INDEX, reduction="sum")
    with without_autocast(hidden):
        cast = [each if each is None else each.to(asked) for each in (rows, weight, bias)]
        loss: Tensor = _Chunked.apply(*cast, targets)  # type: ignore[no-untyped-call]
    return loss


def in_32_bits(values: Tensor) -> Tensor:
    """The same in 32 bits at least."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _counted(rows: Tensor, targets: Tensor, at_most: int) -> tuple[Tensor, Tensor]:
    """Rows with the targets that count, and some that do not where these are fewer."""
    # Of a size that the host knows, or it would have to wait for the device.
    places = torch.nonzero_static(targets != IGNORE_INDEX, size=at_most)[:, 0]
    spare, places = places < 0, places.clamp(min=0)
    return rows[places], targets[places].masked_fill(spare, IGNORE_INDEX)


class _Chunked(torch.autograd.Function):
    """The loss; its gradients are made in forward, for a gradient of 1, and only scaled in backward."""

    @staticmethod
    def forward(context: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
        """Targets below 0 are not counted."""
        wanted = context.needs_input_grad
        for_hidden = torch.empty_like(hidden) if wanted[0] else None
        # Sums over chunks, so in fp32 whatever the products are in.
        for_weight = torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None
        for_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and wanted[2] else None
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        size = max(1, AT_A_TIME.get(device_type(hidden), FEW) // weight.shape[0])
        for first in range(0, hidden.shape[0], size):
            rows, truth = hidden[first : first + size], targets[first : first + size]
            shares = functional.linear(rows, weight, bias).log_softmax(dim=-1, dtype=torch.float32)
            counts, place = truth >= 0, truth.clamp(min=0)[:, None]
            loss -= (shares.gather(1, place)[:, 0] * counts).sum()
            if not any(wanted):
                continue
            # The slope of a row's loss by its logits is softmax, less 1 at the target; nothing where none is counted.
            slope = shares.exp_().scatter_add_(1, place, torch.full_like(place, -1, dtype=torch.float32))
            slope = slope.mul_(counts[:, None]).to(weight.dtype)
            if for_hidden is not None:
                torch.mm(slope, weight, out=for_hidden[first : first + size])
            if for_weight is not None:
                _add_product(for_weight, slope.T, rows)
            if for_bias is not None:
                for_bias += slope.sum(dim=0, dtype=torch.float32)
        context.save_for_backward(for_hidden, for_weight, for_bias)
        context.dtype = weight.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(context: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        # In place: torch refuses a second backward, for what was saved is freed with the first.
        made = [each if each is None else each.mul_(slope).to(context.dtype) for each in context.saved_tensors]
        return (*made, None)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a product to an fp32 sum, in place where the formats are one."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
