"""Context parallelism: each rank of a group computes one part of every sample.

Only attention looks at other parts: keys and values are gathered there, as of Llama 3 (arXiv:2407.21783, section
3.3.2), so that beside them a rank keeps its part alone. torch's own ring (torch.distributed.tensor.experimental) has no
attention for a CPU, and none with a mask, which texts side by side need.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from trainkit.data.encode import IGNORE_INDEX


@dataclass(frozen=True, slots=True)
class SampleParts:
    """The part of this rank. group: the ranks that share each sample, in the order of its parts."""

    group: Any

    def share(self, length: int) -> int:
        """How long a part of a sample is; behind its end it is filled up."""
        return -(-length // int(self.group.size()))

    def own(self, values: Tensor, filler: int = 0) -> Tensor:
        """(batch, sequence) -> this rank's part."""
        share = self.share(values.shape[1])
        filled = functional.pad(values, (0, share * self.group.size() - values.shape[1]), value=filler)
        return filled[:, self.group.rank() * share :][:, :share]

    def own_targets(self, targets: Tensor) -> Tensor:
        """The same of targets; what fills up is not counted."""
        return self.own(targets, IGNORE_INDEX)

    def mask(self, length: int, position_ids: Tensor | None) -> Tensor | None:
        """(batch, 1, part, sequence): where a token of this part may look, in samples of several texts; else None.

        To be called before the blocks, in each forward pass.
        """
        if position_ids is None:
            _later(self.share(length), self._seen(length))  # it cannot be made inside a block that is computed again
            return None
        text = (position_ids == 0).cumsum(-1)
        filled = functional.pad(text, (0, self.share(text.shape[1]) * self.group.size() - text.shape[1]))
        everywhere = torch.arange(filled.shape[1], device=text.device)
        mine = self.own(everywhere[None])[..., None]
        seen = (everywhere <= mine) & (self.own(filled)[..., None] == filled[:, None])
        return seen.unsqueeze(1)

    def attended(self, keys: Tensor, values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values (batch, heads, part, width) of all that this part's tokens see, and the mask for them."""
        share, keys, values = keys.shape[2], self.gathered(keys), self.gathered(values)
        if mask is not None:
            return keys, values, mask
        seen = self._seen(keys.shape[2])
        return keys[:, :, :seen], values[:, :, :seen], _later(share, seen)

    def _seen(self, length: int) -> int:
        """How many tokens the last one of this part sees."""
        return (int(self.group.rank()) + 1) * self.share(length)

    def gathered(self, part: Tensor, dimension: int = 2) -> Tensor:
        """All ranks' parts along a dimension; the gradient of each is the sum of what all ranks have for it."""
        return cast("Tensor", _Gather.apply(part, self.group, dimension))  # type: ignore[no-untyped-call]

    def summed(self, loss: Tensor) -> Tensor:
        """The loss of whole samples, from those of the parts."""
        return cast("Tensor", _Sum.apply(loss, self.group))  # type: ignore[no-untyped-call]


@lru_cache(maxsize=64)
def _later(share: int, seen: int) -> Tensor:
    """What hides later tokens from the last of those that are seen, without memory where there is flash attention."""
    return cast("Tensor", causal_lower_right(share, seen))


# Names of collectives that torch 2.13 gives; earlier releases know the others alone.
_gather_into = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_into = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, part: Tensor, group: Any, dimension: int) -> Tensor:
        context.group, context.dimension = group, dimension
        made = part.new_empty(group.size() * part.shape[0], *part.shape[1:])
        _gather_into(made, part.contiguous(), group=group)
        return torch.cat(made.chunk(group.size()), dimension)

    @staticmethod
    def backward(context: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        parts = torch.cat(slope.chunk(context.group.size(), context.dimension))
        made = parts.new_empty(parts.shape[0] // context.group.size(), *parts.shape[1:])
        _reduce_into(made, parts, group=context.group)
        return made, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, loss: Tensor, group: Any) -> Tensor:
        context.ranks = group.size()
        made = loss.clone()
        dist.all_reduce(made, group=group)
        return made

    @staticmethod
    def backward(context: Any, slope: Tensor) -> tuple[Tensor, None]:
        # A sum that each rank has: its gradient is the sum of theirs, which are one number.
        return slope * context.ranks, None
