"""The interface of every model for the trainer: its loss, its blocks, and facts about its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.errors import TrainingError
from trainkit.trainer.models.sample_parts import SampleParts
from trainkit.trainer.models.weights import Slices

Remarks = Sequence[tuple[int, str]]  # messages with their log levels
LossFunction = Callable[[Any, Mapping[str, Tensor]], Tensor]  # (the model's outputs, the inputs of the batch) -> loss


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """How the blocks of a model are divided over ranks, by the last part of the names of their modules.

    columns: linear layers that are divided by outputs, with the number of layers that lie behind one another in each.
    rows: those divided by inputs. entries: what holds divided layers, from what they read to their sum; whatever else
    has parameters in there (norms of single heads) is whole on each rank, and used for its part alone.
    """

    columns: Mapping[str, int]
    rows: Set[str]
    entries: Set[str]


class Model(nn.Module):
    """Called with a batch's inputs by name, returns the loss summed over the counted targets, in nats.

    Auxiliary losses are included, scaled so that division by the counted targets gives their mean.
    """

    blocks: Iterable[nn.Module]  # units of sharding, compilation and activation checkpointing, in order
    tied: tuple[nn.Module, ...]  # modules that share weights: no strategy may wrap them as separate units
    stochastic: bool  # whether training draws random numbers (dropout)
    vocabulary: int | None  # number of token ids; None if it does not read tokens
    labels: int | None = None  # number of classes; None for a model that does not classify
    padding: int | None = None  # the padding id
    told_padding: bool = False  # whether it searches for that id, so that the data must be padded with it
    attention: str  # the implementation in use
    attention_width: int | None = None  # layers x heads x head size; None if that does not give the FLOPs
    routing: tuple[int, int] = (0, 0)  # experts per block, and experts per token
    # Tokens routed to each expert of each block (blocks with experts, experts): in the latest pass,
    # and since the counts were last read.
    load_of_pass: Tensor | None = None
    expert_load: Tensor | None = None
    loss_function: LossFunction | None = None  # replaces the model's own loss
    custom_loss: bool = False  # whether it is a user's function, which may need other inputs
    remarks: Remarks = ()  # about its construction, for the main rank to log
    base: str = ""  # fingerprint of the adapters' base model
    slices: Slices | None = None  # of a model that is divided over ranks: its weights, for the strategy to place
    # Upper bound of the next micro batch's counted targets, if few are counted and the host knows it; else None.
    targets_at_most: int | None = None

    def tensor_plan(self) -> TensorPlan | None:
        """How its blocks are divided over ranks; None where that is not known."""
        return None

    def divide_samples(self, parts: SampleParts) -> None:
        """Compute one part of each sample. TrainingError where that is not known."""
        raise TrainingError("strategy.context: this model computes whole samples", hint="set strategy.context to 1")

    def head(self) -> Sequence[nn.Parameter]:
        """The task's head on top of a pretrained model: it starts untrained, so it is trained beside adapters."""
        return ()

    def shown(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The inputs without targets, with which the model returns logits instead of a loss."""
        return {name: values for name, values in inputs.items() if name not in ("targets", "labels")}

    def join_loss(self) -> None:
        """If possible, let the output layer compute the loss itself. Called after adapters are added."""

    def expect(self, targets_at_most: int | None) -> None:
        """Set the upper bound of the next micro batch's counted targets; None if unknown."""
        if targets_at_most != self.targets_at_most:  # setting an attribute on a module is slow
            self.targets_at_most = targets_at_most

    def keep_load(self) -> None:
        """Add the experts' load of the latest pass to the sum. To be called outside compiled code."""
        load = self.load_of_pass
        if load is not None:
            # The output of a CUDA graph is in the graph's memory, and the next pass overwrites it.
            self.expert_load = load.clone() if self.expert_load is None else self.expert_load.add_(load)
            self.load_of_pass = None

    def idle_parameters(self) -> int:
        """How many trained parameters a token does not use: those of the experts that it is not routed to."""
        experts, taken = self.routing
        trained = [(name, each) for name, each in self.named_parameters() if each.requires_grad]
        stacks = sum(each.numel() for name, each in trained if ".experts." in name)
        return stacks * (experts - taken) // max(1, experts)


def entries(parameter: Tensor) -> int:
    """Number of values in a parameter: 4-bit values are packed, two in a byte (bitsandbytes)."""
    packed = getattr(parameter, "quant_state", None)
    return int(packed.shape.numel()) if packed is not None else parameter.numel()


def is_linear(module: nn.Module) -> bool:
    """Whether it is a linear layer, also one of GPT-2's, which it calls Conv1D."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


@dataclass(frozen=True, slots=True)
class Parameters:
    """Numbers of parameters; tied ones count once. active: the trained ones that a token uses."""

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
    """A module of transformers, or the user's own, with the interface of `Model`."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner: Any = inner.train()
        self.blocks, self.tied = blocks_of(inner), tied_modules(inner)
        self._takes = dict(inspect.signature(inner.forward).parameters)

    def known(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The inputs that the module accepts: a user's own loss may need more."""
        return {name: each for name, each in inputs.items() if name in self._takes} if self.custom_loss else inputs


def cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the saved tensors of a transformers model to a format, like `from_pretrained` with a `dtype`.

    Computed tensors stay in fp32: rotary frequencies in 16 bits would be wrong for late positions.
    """
    computed = [(each, name) for each in model.modules() for name in each._non_persistent_buffers_set]
    before = [each._buffers[name] for each, name in computed]
    model.to(dtype)
    for (each, name), buffer in zip(computed, before, strict=True):
        each._buffers[name] = buffer.float() if buffer is not None and buffer.is_floating_point() else buffer


def blocks_of(inner: Any) -> tuple[nn.Module, ...]:
    """The modules that the model itself declares unsplittable, if they are in a list."""
    names = set(getattr(inner, "_no_split_modules", None) or ())
    lists = [module for module in inner.modules() if isinstance(module, nn.ModuleList)]
    found = tuple(block for each in lists for block in each if type(block).__name__ in names)
    # Without a declaration: the longest list, because blocks are a model's most repeated part.
    return found or tuple(max(lists, key=lambda each: sum(1 for _ in each), default=()))


def tied_modules(inner: nn.Module) -> tuple[nn.Module, ...]:
    """Modules that share a parameter with another module."""
    holders: dict[nn.Parameter, list[nn.Module]] = {}
    for module in inner.modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(parameter, []).append(module)
    return tuple({module: None for shared in holders.values() if len(shared) > 1 for module in shared})
