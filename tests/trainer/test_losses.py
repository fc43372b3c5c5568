"""The loss of an output layer without its whole logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from trainkit.trainer.models import losses
from trainkit.trainer.models.losses import linear_cross_entropy

ROWS, WIDTH, VOCABULARY, AT_A_TIME = 37, 4, 211, 10
Layer = tuple[Tensor, Tensor, Tensor | None]


@pytest.fixture
def chunked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten rows of logits at a time, however few there are."""
    monkeypatch.setattr(losses, "FEW", 0)
    monkeypatch.setattr(losses, "AT_A_TIME", {"cpu": AT_A_TIME * VOCABULARY})


def layer_and_targets(*, bias: bool = True, counted: int = 30) -> tuple[Layer, Tensor]:
    draw = torch.Generator().manual_seed(1)
    shapes = [(1, ROWS, WIDTH), (VOCABULARY, WIDTH), *([(VOCABULARY,)] if bias else [])]
    parts = [torch.randn(shape, generator=draw).requires_grad_() for shape in shapes]
    targets = torch.randint(VOCABULARY, (1, ROWS), generator=draw)
    targets[0, torch.randperm(ROWS, generator=draw)[counted:]] = -100
    return (parts[0], parts[1], parts[2] if bias else None), targets


def whole(layer: Layer, targets: Tensor) -> Tensor:
    hidden, weight, bias = layer
    logits = functional.linear(hidden, weight, bias).flatten(0, 1).float()
    return functional.cross_entropy(logits, targets.flatten(), reduction="sum")


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def gradients(layer: Layer) -> list[Tensor]:
    found = [each.grad for each in layer if each is not None and each.grad is not None]
    for each in layer:
        if each is not None:
            each.grad = None
    return found


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("at_most", [None, 30, 34])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradients_are_those_of_whole_logits(dtype: torch.dtype, at_most: int | None, bias: bool) -> None:
    layer, targets = layer_and_targets(bias=bias)
    found, slopes = [], []
    for ours in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            found.append(linear_cross_entropy(layer, targets, at_most) if ours else whole(layer, targets))
        backward(found[-1] / 7)
        slopes.append(gradients(layer))
    close = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=0)
    assert [each.dtype for each in slopes[1]] == [each.dtype for each in slopes[0]]
    for slope, expected in zip(slopes[1], slopes[0], strict=True):
        torch.testing.assert_close(slope, expected, rtol=close, atol=close)


@contextmanager
def largest_tensor() -> Iterator[list[int]]:
    """Elements of the largest tensor that any operation gives meanwhile."""
    found = [0]

    class Look(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = function(*args, **(kwargs or {}))
            sizes = [each.numel() for each in (given if isinstance(given, tuple) else (given,)) if _is_tensor(each)]
            found[0] = max([found[0], *sizes])
            return given

    with Look():  # type: ignore[no-untyped-call]
        yield found


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize(("loss", "most"), [(whole, ROWS * VOCABULARY), (None, AT_A_TIME * VOCABULARY)])
def test_no_more_rows_of_logits_are_there_at_a_time(loss: Callable[[Layer, Tensor], Tensor] | None, most: int) -> None:
    layer, targets = layer_and_targets()
    with largest_tensor() as elements:
        backward(loss(layer, targets) if loss else linear_cross_entropy(layer, targets))
    assert elements == [most]


@pytest.mark.usefixtures("chunked")
def test_for_targets_that_do_not_count_there_are_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "AT_A_TIME", {"cpu": ROWS * VOCABULARY})
    layer, targets = layer_and_targets(counted=4)
    with largest_tensor() as elements:
        linear_cross_entropy(layer, targets, at_most=6)
    assert elements == [6 * VOCABULARY]


@pytest.mark.usefixtures("chunked")
def test_what_backward_has_used_up_cannot_be_used_again() -> None:
    layer, targets = layer_and_targets()
    loss = linear_cross_entropy(layer, targets)
    backward(loss)
    with pytest.raises(RuntimeError, match="second time"):
        backward(loss)


@pytest.mark.usefixtures("chunked")
def test_without_gradients_none_are_made() -> None:
    layer, targets = layer_and_targets()
    with torch.no_grad():
        found = linear_cross_entropy(layer, targets)
        torch.testing.assert_close(found, whole(layer, targets), rtol=1e-6, atol=0)
    frozen: Layer = (layer[0], layer[1].detach(), None)
    backward(linear_cross_entropy(frozen, targets))
    assert frozen[0].grad is not None and frozen[1].grad is None


def test_few_logits_are_made_whole_and_so_are_those_of_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, targets = layer_and_targets()
    assert torch.equal(linear_cross_entropy(layer, targets), whole(layer, targets))
    monkeypatch.setattr(losses, "FEW", 0)
    with torch.autocast("cpu", dtype=torch.float16), largest_tensor() as elements:
        linear_cross_entropy(layer, targets)
    assert elements == [ROWS * VOCABULARY]


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("at_most", [None, 34])
def test_the_compiler_takes_it_as_one_graph(at_most: int | None) -> None:
    layer, targets = layer_and_targets()
    backward(linear_cross_entropy(layer, targets, at_most))
    expected = gradients(layer)
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    backward(compiled(layer, targets, at_most))
    for slope, each in zip(gradients(layer), expected, strict=True):
        torch.testing.assert_close(slope, each, rtol=1e-5, atol=1e-5)
