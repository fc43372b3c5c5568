"""What every model offers to the trainer, besides being called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

Remarks = Sequence[tuple[int, str]]  # what is to be said, with its level of logging


class Model(nn.Module):
    """Called with the inputs of a batch by name, it gives the loss summed over the counted targets, in nats.

    Auxiliary losses are part of the sum, scaled so that the division by the counted targets leaves their mean.
    """

    blocks: Iterable[nn.Module]  # units of sharding, compilation and activation checkpointing, in order
    tied: tuple[nn.Module, ...]  # modules that share weights: no strategy may hide them in a unit of their own
    stochastic: bool  # whether training draws random numbers (dropout)
    vocabulary: int | None  # how many token ids it knows; None where it reads no tokens
    labels: int | None = None  # of how many it chooses one for each sample; None for a model that does not
    padding: int | None = None  # the id that it knows to be no text
    attention: str  # the implementation that is really used
    attention_width: int | None = None  # layers x heads x size of a head; None where that does not tell the work
    # Tokens that each expert of each block got since it was last asked for (blocks with experts, experts).
    expert_load: Tensor | None = None
    # Gives the loss out of what the model gives and the inputs of the batch, in place of the model's own.
    judge: Callable[[Any, Mapping[str, Tensor]], Tensor] | None = None
    remarks: Remarks = ()  # on how it was made, for the main rank to say
    own_loss: bool = False  # whether the judge is a function of the user's, and may want inputs that the model does not

    def head(self) -> Sequence[nn.Parameter]:
        """What stands on top of a trained model for the task at hand: it starts anew, so it trains beside adapters."""
        return ()

    def idle_parameters(self) -> int:
        """How many parameters that train a token does not go through: those of experts that are not its own."""
        return 0
