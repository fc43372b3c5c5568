"""The bytes that advice on memory counts for a block of the native model, against what autograd keeps of one."""

from __future__ import annotations

import pytest
import torch

from trainkit.tools.builtin.memory import INPUT, KEPT
from trainkit.trainer.models.gpt import Block

WIDTH, TOKENS = 256, 512


@pytest.mark.parametrize("mixed", [True, False])
def test_a_block_keeps_as_many_bytes_for_backward_as_are_counted(mixed: bool) -> None:
    block, kept = Block(WIDTH, 4, 0.0, fused=True), {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no other takes its place
        return tensor

    x = torch.randn(4, TOKENS // 4, WIDTH, requires_grad=True)
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed),
    ):
        block(x)
    weights = {parameter.numel() for parameter in block.parameters()}  # also their 16-bit copies: of the same sizes
    found = [each for each in kept.values() if each.numel() not in weights]
    size = sum(each.untyped_storage().nbytes() for each in found) / TOKENS / WIDTH
    assert size == pytest.approx(KEPT[mixed], rel=0.01)
    assert x.element_size() == INPUT
