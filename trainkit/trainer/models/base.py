"""What every model offers to the trainer: its loss, its blocks, and facts about its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Remarks = Sequence[tuple[int, str]]  # messages, each with its level of logging
LossFunction = Callable[[Any, Mapping[str, Tensor]], Tensor]  # of what a model gives, and the inputs of the batch


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
    told_padding: bool = False  # whether it looks for that id, so that the data must be filled up with it
    attention: str  # the implementation that is really used
    attention_width: int | None = None  # layers x heads x size of a head; None where that does not give the FLOPs
    routing: tuple[int, int] = (0, 0)  # experts of a block, and how many of them a token takes
    # Tokens that each expert of each block got (blocks with experts, experts): in the latest pass, as the pass left it,
    # and since it was last read.
    load_of_pass: Tensor | None = None
    expert_load: Tensor | None = None
    loss_function: LossFunction | None = None  # in place of the model's own
    custom_loss: bool = False  # whether that is a function of the user's, which may take other inputs
    remarks: Remarks = ()  # on how it was made, for the main rank to log
    base: str = ""  # fingerprint of what adapters were put beside
    # Counted targets of the next micro batch at most, where few are counted and the host knows how many; else None.
    targets_at_most: int | None = None

    def head(self) -> Sequence[nn.Parameter]:
        """What is on top of a trained model for the task at hand: it starts untrained, so it trains beside adapters."""
        return ()

    def shown(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The inputs with which the model gives logits and no loss: they do not hold what it is to tell."""
        return {name: values for name, values in inputs.items() if name not in ("targets", "labels")}

    def join_loss(self) -> None:
        """Where it can, have the output layer give the loss by itself. Called once adapters are in place."""

    def expect(self, targets_at_most: int | None) -> None:
        """Say of the next micro batch how many of its targets count at most; None where nobody knows."""
        if targets_at_most != self.targets_at_most:  # it is slow to set something on a module
            self.targets_at_most = targets_at_most

    def keep_load(self) -> None:
        """Add the experts' load of the pass just done to the sum. To be called outside of what is compiled."""
        load = self.load_of_pass
        if load is not None:
            # What comes out of a CUDA graph lies in the graph's own memory, and the next pass writes over it.
            self.expert_load = load.clone() if self.expert_load is None else self.expert_load.add_(load)
            self.load_of_pass = None

    def idle_parameters(self) -> int:
        """How many parameters that train a token does not go through: those of experts that are not its own."""
        experts, taken = self.routing
        trained = [(name, each) for name, each in self.named_parameters() if each.requires_grad]
        stacks = sum(each.numel() for name, each in trained if ".experts." in name)
        return stacks * (experts - taken) // max(1, experts)


def entries(parameter: Tensor) -> int:
    """Numbers in a parameter: those that are quantised to 4 bits are packed, two in a byte (bitsandbytes)."""
    packed = getattr(parameter, "quant_state", None)
    return int(packed.shape.numel()) if packed is not None else parameter.numel()


def is_linear(module: nn.Module) -> bool:
    """Whether it is a linear layer, also one of GPT-2's, which it calls Conv1D."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


@dataclass(frozen=True, slots=True)
class Parameters:
    """Numbers of parameters; tied ones count once. active: of the training ones, those that a token goes through."""

    training: int
    frozen: int
    active: int

    @classmethod
    def of(cls, model: Model) -> Parameters:
        """To be counted before a strategy shards the model."""
        every = [(entries(each), each.requires_grad) for each in model.parameters()]
        training = sum(size for size, trains in every if trains)
        return cls(training, sum(size for size, _ in every) - training, training - model.idle_parameters())


class Wrapped(Model):
    """A module from elsewhere, of transformers or the user's own, as a model of ours."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner: Any = inner.train()
        self.blocks, self.tied = blocks_of(inner), tied_modules(inner)
        self._takes = dict(inspect.signature(inner.forward).parameters)

    def known(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What the module is given: a loss of the user's own may need inputs that the module does not take."""
        return {name: each for name, each in inputs.items() if name in self._takes} if self.custom_loss else inputs


def cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast what is saved of a model of transformers to a format, as its `from_pretrained` with a `dtype` does.

    What it computes at the start is in fp32: rotary frequencies in 16 bits would turn late positions anywhere.
    """
    computed = [(each, name) for each in model.modules() for name in each._non_persistent_buffers_set]
    before = [each._buffers[name] for each, name in computed]
    model.to(dtype)
    for (each, name), buffer in zip(computed, before, strict=True):
        each._buffers[name] = buffer.float() if buffer is not None and buffer.is_floating_point() else buffer


def blocks_of(inner: Any) -> tuple[nn.Module, ...]:
    """The modules that must not be split over devices, as the model itself says, where they are in a list."""
    names = set(getattr(inner, "_no_split_modules", None) or ())
    lists = [module for module in inner.modules() if isinstance(module, nn.ModuleList)]
    found = tuple(block for each in lists for block in each if type(block).__name__ in names)
    # Without such names: the longest list, for a model repeats its blocks more often than anything else.
    return found or tuple(max(lists, key=lambda each: sum(1 for _ in each), default=()))


def tied_modules(inner: nn.Module) -> tuple[nn.Module, ...]:
    """Modules that hold a parameter which another one holds too."""
    holders: dict[nn.Parameter, list[nn.Module]] = {}
    for module in inner.modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(parameter, []).append(module)
    return tuple({module: None for shared in holders.values() if len(shared) > 1 for module in shared})
