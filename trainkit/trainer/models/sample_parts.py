"""Context parallelism: each rank of a group computes one part of every sample.

Only attention looks at other parts: keys and values are gathered there, as of Llama 3 (arXiv:2407.21783, section
3.3.2), and so need little memory beside queries and everything else where heads share them. torch's own ring
(torch.distributed.tensor.experimental) has no attention for a CPU, and none with a mask, which texts side by side need.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.nn import functional

from trainkit.data.encode import IGNORE_INDEX


@dataclass(frozen=True, slots=True)
class SampleParts:
    """The part of this rank. group: the ranks that share each sample, in the order of its parts."""

    group: Any

    def own(self, values: Tensor, filler: int = 0) -> Tensor:
        """(batch, sequence) -> this rank's part; behind the end it is filled up."""
        of, length = self.group.size(), values.shape[1]
        share = -(-length // of)
        filled = functional.pad(values, (0, share * of - length), value=filler)
        return filled[:, self.group.rank() * share :][:, :share]

    def own_targets(self, targets: Tensor) -> Tensor:
        """The same of targets; what fills up is not counted."""
        return self.own(targets, IGNORE_INDEX)

    def mask(self, length: int, position_ids: Tensor | None, device: torch.device) -> Tensor:
        """(batch or 1, 1, part, sequence): where a token of this part may look. Each text of a sample sees itself."""
        places = torch.arange(length, device=device)[None]
        mine = self.own(places, length)[..., None]
        everywhere = self._filled(length, device)
        seen = everywhere <= mine
        if position_ids is not None:
            text = (position_ids == 0).cumsum(-1)
            seen = seen & (
                self.own(text, -1)[..., None] == functional.pad(text, (0, everywhere.numel() - length)).unsqueeze(1)
            )
        # What fills up looks at itself, for a softmax over nothing is no number.
        return (seen | (everywhere == mine)).unsqueeze(1)

    def _filled(self, length: int, device: torch.device) -> Tensor:
        of = self.group.size()
        return torch.arange(-(-length // of) * of, device=device)

    def gathered(self, parts: Tensor, dimension: int = 2) -> Tensor:
        """All ranks' parts along a dimension; the gradient of each is the sum of what all ranks have for it."""
        made = collectives.all_gather_tensor_autograd(parts.contiguous(), dimension, self.group)
        return cast("Tensor", collectives.wait_tensor(made))  # type: ignore[no-untyped-call]

    def summed(self, loss: Tensor) -> Tensor:
        """The loss of whole samples, from those of the parts; gradients are those of each part, once for each rank."""
        return cast("Tensor", _Sum.apply(loss, self.group))  # type: ignore[no-untyped-call]


class _Sum(torch.autograd.Function):
    """A sum that each rank has, so that its gradient is the sum of theirs."""

    @staticmethod
    def forward(context: Any, loss: Tensor, group: Any) -> Tensor:
        context.ranks = group.size()
        made = collectives.all_reduce(loss, "sum", group)
        return cast("Tensor", collectives.wait_tensor(made))  # type: ignore[no-untyped-call]

    @staticmethod
    def backward(context: Any, slope: Tensor) -> tuple[Tensor, None]:
        return slope * context.ranks, None  # which is the same number on each
