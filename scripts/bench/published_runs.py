"""Runs that others have measured and published, as their software ran them, beside what is foreseen of them.

What is taken to be so of software that is not installed here, each with its source, is named in INFERRED.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trainkit.foresight.allocator import replay
from trainkit.foresight.published import V100_BERT
from trainkit.foresight.strategies import Run, Whole
from trainkit.foresight.trace import COPIES, Events, Kind, Wanted
from trainkit.recipe.schema import Recipe
from trainkit.trainer.tracing.stand_in import StandIn
from trainkit.trainer.tracing.step import traced

MIB = 2**20
CONTEXT = 1343 * MIB  # of CUDA on the guide's V100, as the guide itself measured it
INFERRED = (
    "V100: torch 1.10 saved the input of softmax for backward (pytorch/pytorch#64000, changed in 1.11 by #65242)",
    "V100: gradients stayed between steps: model.zero_grad() of torch before 2.0 filled them with zeros",
    "V100: eager attention and a classifier's loss, as transformers 4.18 had them",
    "V100: the context of 1343 MiB is the guide's own measurement (page: the same guide, `print_gpu_utilization`)",
)


class OfThatTime(StandIn):
    """Operators of torch 1.10."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (functional.softmax, torch.softmax, Tensor.softmax):
            value = self._high(args[0]) if self.casting else args[0]
            return _Softmax.apply(value)  # type: ignore[no-untyped-call]
        return super().__torch_function__(func, types, args, kwargs)


class _Softmax(torch.autograd.Function):
    """Over the last dimension, with its input saved beside its result."""

    @staticmethod
    def forward(context: Any, value: Tensor) -> Tensor:
        result = torch._softmax(value, -1, False)
        context.save_for_backward(value, result)
        return result

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        value, result = context.saved_tensors
        return torch._softmax_backward_data(gradient, result, -1, value.dtype)


class OfTrainer(Whole):
    """transformers' Trainer of the time: gradients stay, filled with zeros, and each forward casts its weights anew."""

    def start(self) -> None:
        super().start()
        for storage in self.trace.gradients:
            self.device.take(("kept", storage), self.trace.sizes[storage], self.trace.parts[storage])

    def micro_step(self, events: Events) -> None:
        super().micro_step(self.trace.further)

    def at(self, kind: int, number: int) -> None:
        super().at(kind, number)
        # With checkpointing no graph holds the copies: they end with autocast, and backward makes a block's again.
        ends = Kind.BACKWARD if self.trace.recomputed else Kind.END
        for storage, part in enumerate(self.trace.parts if kind in (Kind.FORWARD, ends) else ()):
            if part == COPIES:
                self.device.drop(storage)
                if kind == Kind.FORWARD:
                    self.device.take(storage, self.trace.sizes[storage], COPIES)


def v100_rows() -> Mapping[str, tuple[int, int]]:
    """By variant of the recipe efficiency-table: published and foreseen bytes."""
    found = {}
    for name, row in V100_BERT.items():
        recipe = Recipe.model_validate(row.recipe)
        sections = recipe.model_dump(mode="json", by_alias=True)
        dtype = recipe.precision.dtype
        wanted = Wanted({name: sections[name] for name in ("model", "data", "precision", "efficiency", "strategy")},
                        row.micro, "cuda", dtype, (7, 0))  # fmt: skip
        trace = traced(wanted, OfThatTime)
        run = Run(accumulation=4 // row.micro, dtype=dtype, capability=(7, 0), optimizer=recipe.optimizer.name)
        whole = OfTrainer(trace, run)
        whole.start()
        for _ in range(2):
            whole.step(min(3, run.accumulation))
        found[name] = row.mib * MIB, replay(whole.device).peak_reserved + CONTEXT
    return found
