"""Batches on their way to the device: on CUDA beside the computation, on a stream of their own."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Transfer:
    """Moves the inputs of batches to a device.

    The host runs ahead of a card: when it asks for the next batch, the card still computes the step before. A copy on
    the computation's own stream would wait for that; on a second one it is done meanwhile, from page-locked memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inputs on the device; what is launched from now on finds them whole."""
        if self._stream is None:
            return {name: values.to(self._device) for name, values in inputs.items()}
        with torch.cuda.stream(self._stream):
            moved = {name: values.to(self._device, non_blocking=True) for name, values in inputs.items()}
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._stream)
        for values in moved.values():
            # Their memory belongs to the second stream: not to be used again before the computation is done with it.
            values.record_stream(computing)
        return moved
