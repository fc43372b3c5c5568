"""Activations that wait on the host: the same bits, parameters left alone, and a bound on what is on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from trainkit.recipe.schema import GptModel, GradientCheckpointing
from trainkit.trainer.models.gpt import Gpt
from trainkit.trainer.perf import offloading
from trainkit.trainer.perf.efficiency import checkpoint_blocks
from trainkit.trainer.perf.offloading import offload_blocks

TOKENS = torch.arange(24)[None]


def model(recomputed: dict[str, Any], *, offloads: bool) -> Gpt:
    torch.manual_seed(0)
    made = Gpt(GptModel(layers=3, heads=2, hidden_size=32), sequence_length=32)
    if recomputed:
        checkpoint_blocks(made.blocks, GradientCheckpointing.model_validate(recomputed), dropout=False)
    if offloads:
        offload_blocks(made.blocks, smallest=1024)
    return made


def trained(made: Gpt, dtype: torch.dtype) -> list[Tensor]:
    """The losses of two passes, and the gradients, which add up."""
    found = []
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = made(TOKENS, TOKENS)
        loss.backward()
        found.append(loss.detach())
    return [*found, *(each.grad for each in made.parameters() if each.grad is not None)]


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What goes to the host, as copies that do not share memory with what they are of."""
    found: list[Tensor] = []
    to_host = offloading._Store._to_host

    def noted(store: Any, tensor: Tensor) -> Tensor:
        host = to_host(store, tensor)
        assert host.data_ptr() != tensor.data_ptr()
        assert torch.equal(host, tensor)
        found.append(host)
        return host

    monkeypatch.setattr(offloading._Store, "_to_host", noted)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recomputed", [{}, {"every": True}, {"every": 2}, {"every": True, "selective": True}])
def test_offloading_changes_no_bit(recomputed: dict[str, Any], dtype: torch.dtype, moved: list[Tensor]) -> None:
    plain = trained(model(recomputed, offloads=False), dtype)
    assert not moved
    offloaded = trained(model(recomputed, offloads=True), dtype)
    assert moved
    assert all(map(torch.equal, plain, offloaded))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_and_their_copies_in_16_bits_stay(dtype: torch.dtype, moved: list[Tensor]) -> None:
    made = model({}, offloads=True)
    trained(made, dtype)
    weights = {tuple(each.shape) for block in made.blocks for each in block.parameters() if each.dim() == 2}
    shapes = {tuple(each.shape) for each in moved}
    assert not shapes & (weights | {shape[::-1] for shape in weights})


def test_with_checkpointing_the_inputs_of_blocks_are_what_moves(moved: list[Tensor]) -> None:
    made = model({"every": True}, offloads=True)
    made(TOKENS, TOKENS).backward()
    assert [tuple(each.shape) for each in moved] == [(1, 24, 32)] * 3


def test_a_tensor_that_several_operators_save_is_copied_once(moved: list[Tensor]) -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.exp()
            return (y * y.sin() + y.cos()) * y.view(2, 4).exp().view(8)

    block = Twice()
    offload_blocks([block], smallest=1)
    x = torch.randn(8, requires_grad=True)
    saved: list[Tensor] = []

    def noted(each: Tensor) -> Tensor:
        saved.append(each)
        return each

    with saved_tensors_hooks(noted, lambda each: each):
        Twice()(x)
    block(x).sum().backward()
    assert len(moved) == len({each.data_ptr() for each in saved}) < len(saved)


def test_small_tensors_stay(moved: list[Tensor]) -> None:
    torch.manual_seed(0)
    made = Gpt(GptModel(layers=1, heads=2, hidden_size=32), sequence_length=32)
    offload_blocks(made.blocks)
    made(TOKENS, TOKENS).backward()
    assert not moved
