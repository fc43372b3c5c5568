"""Gradient clipping by the norm over all parameters and ranks: `train.max_grad_norm`.

Under ZeRO it is DeepSpeed's own, set in its file, for only the engine sees whole gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float | None) -> Tensor:
    """Scale the gradients in place, so that their norm is at most `max_norm`; without one they stay as they are.

    Returns the norm before (Pascanu et al. 2013, algorithm 1). Loss scaling must be undone before.
    """
    # Also where nothing is to be clipped: the metrics line shows the norm, and a run whose gradients are not finite
    # ends by it.
    if max_norm:
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    else:  # the gradients are read and not written
        norm = torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
    # Of sharded gradients (FSDP2) each rank has a share of the sum of squares; this is where the ranks add them up.
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
