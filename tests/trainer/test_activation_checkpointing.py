"""Activation checkpointing: the same bits with less memory, in the order that the choices promise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from trainkit.recipe.schema import Recipe
from trainkit.trainer.data.source import sample_length
from trainkit.trainer.randomness import seed_generators
from trainkit.trainer.settings import Settings
from trainkit.trainer.setup import prepared_model

MakeSettings = Callable[..., Settings]
MODEL = {"layers": 4, "dropout": 0.1}
EVERY_CHOICE: dict[str, Any] = {
    "whole": True,
    "every second": {"every": 2},
    "selective": {"every": 1, "selective": True},
    "every third, selective": {"every": 3, "selective": True},
}


class Held(TorchDispatchMode):
    """Bytes of what operators have made and something still holds."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]
        return out

    def bytes(self) -> int:
        return sum(size for reference, size in self._made.values() if not reference.expired())


def forward_backward(settings: Settings) -> tuple[float, int, list[torch.Tensor]]:
    """The loss, the bytes held between forward and backward, and the gradients."""
    seed_generators(0)
    model = prepared_model(settings)
    tokens = torch.randint(0, 256, (4, sample_length(settings.recipe)))
    with Held() as held:
        loss = model(tokens, tokens)
        size = held.bytes()
    loss.backward()
    return loss.item(), size, [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("choice", EVERY_CHOICE)
def test_recomputing_changes_no_bit_of_loss_or_gradient(choice: str, make_settings: MakeSettings) -> None:
    loss, _, gradients = forward_backward(make_settings(model=MODEL))
    settings = make_settings(model=MODEL, efficiency={"gradient_checkpointing": EVERY_CHOICE[choice]})
    again, _, others = forward_backward(settings)
    assert again == loss
    assert all(torch.equal(one, other) for one, other in zip(gradients, others, strict=True))


def test_the_more_is_recomputed_the_less_is_held(make_settings: MakeSettings) -> None:
    def held(choice: Any) -> int:
        return forward_backward(make_settings(model=MODEL, efficiency={"gradient_checkpointing": choice}))[1]

    nothing, selective, whole = held(False), held({"every": 1, "selective": True}), held(True)
    assert whole < 0.5 * selective < 0.45 * nothing
    # With four blocks of one shape, every second one saves half of what all save.
    assert held({"every": 2}) == pytest.approx((nothing + whole) / 2, rel=0.02)
    assert held({"every": 9}) == pytest.approx(nothing - (nothing - whole) / 4, rel=0.02)


@pytest.mark.parametrize("choice", [True, {"every": 1, "selective": True}])
def test_compiled_blocks_can_recompute_too(choice: Any, make_settings: MakeSettings) -> None:
    loss, _, gradients = forward_backward(make_settings())
    both = {"gradient_checkpointing": choice, "compile": {"enabled": True, "backend": "aot_eager"}}
    again, _, others = forward_backward(make_settings(efficiency=both))
    assert again == pytest.approx(loss, rel=1e-6)
    for one, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_selective_without_blocks_is_refused() -> None:
    with pytest.raises(ValidationError, match="every is false"):
        Recipe.model_validate({"efficiency": {"gradient_checkpointing": {"selective": True}}})
