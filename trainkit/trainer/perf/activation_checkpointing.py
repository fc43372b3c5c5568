"""Activation checkpointing: block activations are recomputed in backward. Less memory, about a quarter more time."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainkit.recipe.schema import GradientCheckpointing
from trainkit.trainer.metrics.watched_memory import watched_block

# What selective checkpointing keeps: the operators whose time grows with a width or with the length squared.
_ATEN = torch.ops.aten
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
_PROFILER = torch.ops.profiler
_MARKS = (_PROFILER._record_function_enter_new.default, _PROFILER._record_function_exit._RecordFunction)


def checkpoint_blocks(
    blocks: Iterable[nn.Module], settings: GradientCheckpointing, *, dropout: bool, watched: bool = False
) -> None:
    """Recompute every n-th block in backward, from the first on; the loss stays bit-equal.

    dropout: of the model. watched: whether the account of memory may look into the blocks, which is not compiled.
    """
    # The reentrant kind needs an input that has a gradient, and behind frozen embeddings (LoRA) there is none.
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": dropout}
    if settings.selective:
        SAC_IGNORED_OPS.update(_MARKS)
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    for block in list(blocks)[:: int(settings.every)]:
        # The block's forward is replaced, not the block: names in checkpoints and the hooks of FSDP and ZeRO stay.
        forward = (
            partial(watched_block, block.forward, KEPT if settings.selective else ()) if watched else block.forward
        )
        block.forward = partial(checkpoint, forward, **options)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
