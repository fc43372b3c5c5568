"""`efficiency`: activation checkpointing and torch.compile, which change what a step costs and not what it computes."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainkit.errors import TrainingError
from trainkit.recipe.schema import Compile, GradientCheckpointing
from trainkit.tools.compile_backends import NOT_FOR_RUNNING, backend_in_use, records_graphs
from trainkit.trainer.metrics.memory_breakdown import watched_block
from trainkit.trainer.models.base import Model
from trainkit.trainer.parallel import STRATEGIES

_ATEN, _PROFILER = torch.ops.aten, torch.ops.profiler
# What selective checkpointing keeps: the operators whose time grows with a width or with the length squared.
KEPT = frozenset(
    {
        _ATEN.mm.default,
        _ATEN.addmm.default,
        _ATEN.bmm.default,
        _ATEN.baddbmm.default,
        _ATEN._scaled_dot_product_flash_attention.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        _ATEN._scaled_dot_product_efficient_attention.default,
        _ATEN._scaled_dot_product_cudnn_attention.default,
    }
)
# FSDP marks its hooks for the profiler, and inside a block passes other ones forward than again in backward, where
# torch takes every operator that it did not meet before for a sign of chance.
_MARKS = (_PROFILER._record_function_enter_new.default, _PROFILER._record_function_exit._RecordFunction)


def checkpoint_blocks(
    blocks: Iterable[nn.Module],
    settings: GradientCheckpointing,
    *,
    dropout: bool,
    compiled: bool = False,
    watched: bool = False,
) -> None:
    """Recompute every n-th block in backward, from the first on: less memory, about a quarter more time, equal bits.

    dropout: of the model. compiled: whether torch.compile follows. watched: whether the account of memory may look into
    the blocks, which are not compiled then.
    """

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE

    # The reentrant kind needs an input that has a gradient, and behind frozen embeddings (LoRA) there is none.
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": dropout}
    if settings.selective:
        SAC_IGNORED_OPS.update(_MARKS)
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)

    def recomputed(block: Any, *args: Any, **kwargs: Any) -> Any:
        # A frame of its own, with the block as an argument: torch.compile takes no frame of torch.utils.checkpoint for
        # the outermost, and one whose code is the same for all blocks once for all.
        def forward(*args: Any, **kwargs: Any) -> Any:
            return type(block).forward(block, *args, **kwargs)

        return checkpoint(forward, *args, **options, **kwargs)

    for block in list(blocks)[:: int(settings.every)]:
        # The block's forward is replaced, not the block: names in checkpoints and the hooks of FSDP and ZeRO stay.
        if compiled:
            block.forward = MethodType(recomputed, block)
            continue
        kept = KEPT if settings.selective else ()
        forward = partial(watched_block, block.forward, kept) if watched else block.forward
        block.forward = partial(checkpoint, forward, **options)


def listed_backends() -> list[str]:
    """What the installed torch lists, less the devices of its own tests."""
    listed = torch.compiler.list_backends(exclude_tags=())
    return [name for name in listed if not any(word in name for word in NOT_FOR_RUNNING)]


def compile_model(model: Model, settings: Compile, strategy: str) -> None:
    """Compile in place, by default block by block: faster steps after a first one that compiles.

    TrainingError without the backend.
    """
    backend, backends = backend_in_use(settings.backend), listed_backends()
    if backend not in backends:
        raise TrainingError(
            f"efficiency.compile.backend: {backend} is not one of the installed torch's backends",
            hint=f"choose one of {', '.join(backends)}",
        )
    options: dict[str, Any] = {"backend": backend, "dynamic": settings.dynamic}
    if settings.mode != "default":
        options["mode"] = settings.mode
    if backend == "inductor" and torch.are_deterministic_algorithms_enabled():
        from torch._inductor import config  # takes seconds

        # It would choose kernels by their time on the device, which differs between runs, and they round otherwise.
        if hasattr(config, "deterministic"):  # since 2.10
            config.deterministic = True
    whole: list[nn.Module] = [model]
    compiled = whole if settings.scope == "model" else list(model.blocks)
    if settings.scope == "auto" and not STRATEGIES[strategy].hooks:  # which stand in the way of a graph of all
        # A CUDA graph reads weights from where they were when it was recorded, so that blocks cannot share one.
        compiled = whole if records_graphs(settings) else compiled or whole
    for module in compiled:
        # Equal blocks have one code, which is compiled once however many they are.
        # Not torch.compile(module), which would prefix the names in checkpoints with `_orig_mod`.
        module.compile(**options)


class CompileClock:
    """Seconds that torch.compile has taken, in forward and backward, apart from those of steps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def listen(self) -> None:
        """Count from now on."""
        from torch._dynamo.callback import on_compile_end, on_compile_start  # takes seconds

        # Whole again at each end; no one reads it while something compiles.
        on_compile_start(lambda *_: self._add(-time.monotonic()))
        on_compile_end(lambda *_: self._add(time.monotonic()))

    def _add(self, seconds: float) -> None:
        self.seconds += seconds
