"""Runs that others have measured and published, as their software ran them, beside what is foreseen of them.

What is taken to be so of software that is not installed here, each with its source, is named in INFERRED.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainkit.foresight.allocator import replay
from trainkit.foresight.published import V100_BERT
from trainkit.foresight.strategies import Run, Sharded, Whole
from trainkit.foresight.trace import COPIES, Events, Kind, Trace, Wanted
from trainkit.recipe.schema import Fsdp, Recipe
from trainkit.trainer.models.hf import Transformer
from trainkit.trainer.tracing.meter import Meter
from trainkit.trainer.tracing.stand_in import StandIn
from trainkit.trainer.tracing.step import Tracer, parameters_of, traced

MIB, GIB = 2**20, 2**30
CONTEXT = 1343 * MIB  # of CUDA on the guide's V100, as the guide itself measured it
INFERRED = (
    "V100: torch 1.10 saved the input of softmax for backward (pytorch/pytorch#64000, changed in 1.11 by #65242)",
    "V100: gradients stayed between steps: model.zero_grad() of torch before 2.0 filled them with zeros",
    "V100: eager attention and a classifier's loss, as transformers 4.18 had them",
    "V100: the context of 1343 MiB is the guide's own measurement (page: the same guide, `print_gpu_utilization`)",
    "torchtitan: every second matrix product of a block is recomputed, and attention kept (its selective op mode)",
    "torchtitan: the last block stays gathered between forward and backward (its apply_fsdp)",
    "torchtitan: the loss is cross entropy over logits in fp32, and the optimizer is fused AdamW",
)
TITAN = (
    82.4  # GiB reserved: Llama 3 8B, FSDP on 8 H100 of 96 GB, not compiled (torchtitan, benchmarks of December 2024)
)
LLAMA_3_8B: Mapping[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip


_BERT: Mapping[str, Any] = {
    "model": {"kind": "hf", "architecture": "bert", "task": "sequence_classification",
              "config": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
                         "intermediate_size": 4096, "vocab_size": 30522}},
    "data": {"kind": "random", "sequence_length": 512, "high": 30522},
    "precision": {"dtype": "fp32"},
    "efficiency": {"attention": "eager"},
}  # fmt: skip
_CHECKPOINTING: Mapping[str, Any] = {"efficiency": {"attention": "eager", "gradient_checkpointing": {"every": 1}}}
_FP16: Mapping[str, Any] = {"precision": {"dtype": "fp16"}}
_ADAFACTOR: Mapping[str, Any] = {"optimizer": {"name": "adafactor"}}
_EIGHT_BIT: Mapping[str, Any] = {"optimizer": {"name": "adamw_bnb_8bit"}}

# The recipe and the micro batch of each variant.
RECIPES: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "": (4, _BERT),
    "accumulation": (1, _BERT),
    "checkpointing": (1, {**_BERT, **_CHECKPOINTING}),
    "fp16": (4, {**_BERT, **_FP16}),
    "all": (1, {**_BERT, **_CHECKPOINTING, **_FP16}),
    "adafactor": (4, {**_BERT, **_ADAFACTOR}),
    "all-adafactor": (1, {**_BERT, **_CHECKPOINTING, **_FP16, **_ADAFACTOR}),
    "adam-8bit": (4, {**_BERT, **_EIGHT_BIT}),
    "all-8bit": (1, {**_BERT, **_CHECKPOINTING, **_FP16, **_EIGHT_BIT}),
}


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
        micro, settings = RECIPES[name]
        recipe = Recipe.model_validate(settings)
        sections = recipe.model_dump(mode="json", by_alias=True)
        dtype = recipe.precision.dtype
        wanted = Wanted({name: sections[name] for name in ("model", "data", "precision", "efficiency", "strategy")},
                        micro, "cuda", dtype, (7, 0))  # fmt: skip
        trace = traced(wanted, OfThatTime)
        run = Run(accumulation=4 // micro, dtype=dtype, capability=(7, 0), optimizer=recipe.optimizer.name)
        whole = OfTrainer(trace, run)
        whole.start()
        for _ in range(2):
            whole.step(min(3, run.accumulation))
        found[name] = row.mib * MIB, replay(whole.device).peak_reserved + CONTEXT
    return found


class OfTitan(Sharded):
    """torchtitan's FSDP: the last block is not divided again after forward, for backward needs it at once."""

    def _reshard(self, unit: int) -> None:
        if self._backward or unit != len(self._units) - 2:  # the root is one of them
            super()._reshard(unit)


def _every_second_product() -> Any:
    """torchtitan's selective checkpointing of operators (its _apply_ac_to_transformer_block of December 2024)."""
    aten, counts = torch.ops.aten, {False: 0, True: 0}
    kept = (aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_efficient_attention.default)

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator is aten.mm.default:
            counts[context.is_recompute] += 1
        saved = counts[context.is_recompute] % 2 if operator is aten.mm.default else operator in kept
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


def titan_row() -> tuple[int, int]:
    """Published and foreseen bytes of torchtitan's Llama 3 8B: 2 samples of 8192 tokens on each of 8 ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    meter, stand_in = Meter("cuda"), StandIn("cuda", (9, 0), None)
    with torch.device("meta"):
        model = Transformer(LlamaForCausalLM(LlamaConfig(**LLAMA_3_8B))).train()
    held = parameters_of(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    for block in model.blocks:
        forward = stand_in.again(block.forward)
        block.forward = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False,
                                context_fn=_every_second_product)  # fmt: skip
    stand_in.recomputing = partial(setattr, meter, "recomputing")
    tracer = Tracer(model, meter, zero3=False, units=list(model.blocks))
    meter.exclude([*model.parameters(), *model.buffers()])
    ids = {name: torch.zeros((2, 8192), dtype=torch.int64, device="meta") for name in ("tokens", "targets")}
    with stand_in, meter:
        events = tracer.micro_step(ids, stand_in)
    trace = Trace(
        parameters=held,
        modules=tracer.modules,
        buffers=sum(each.numel() * each.element_size() for each in model.buffers()),
        batch=sum(each.numel() * each.element_size() for each in ids.values()),
        sizes=tuple(meter.sizes),
        parts=tuple(meter.parts),
        operators=tuple(meter.operators),
        names=tuple(meter.names),
        gradients=tracer.gradients,
        first=events,
        further=events,
        work=(),
    )
    options = Fsdp(kind="fsdp").model_dump(mode="json")
    run = Run("fsdp", 8, 8, dtype="bf16", optimizer="adamw_torch_fused", options=options)
    sharded = OfTitan(trace, run)
    sharded.start()
    for _ in range(2):
        sharded.step(1)
    return int(TITAN * GIB), replay(sharded.device).peak_reserved
