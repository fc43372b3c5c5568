"""Optimizers and their parameter groups."""

from __future__ import annotations

import pytest
import torch

from trainkit.recipe.schema import GptModel, Optimizer
from trainkit.train.models.gpt import Gpt
from trainkit.train.optimizers import OPTIMIZERS, build_optimizer, parameter_groups


@pytest.fixture
def model() -> Gpt:
    return Gpt(GptModel(layers=1, heads=2, hidden_size=8), sequence_length=4)


def test_matrices_decay_and_norms_and_biases_do_not(model: Gpt) -> None:
    decayed, others = parameter_groups(model.parameters(), 0.1)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert all("norm" in names[id(p)] or names[id(p)].endswith("bias") for p in others["params"])
    assert not any("norm" in names[id(p)] or names[id(p)].endswith("bias") for p in decayed["params"])
    assert len(decayed["params"]) + len(others["params"]) == len(names)


@pytest.mark.parametrize(("name", "state_bytes"), [(name, 4 if name == "sgd" else 8) for name in OPTIMIZERS])
def test_state_takes_as_many_bytes_per_parameter_as_its_kind_says(name: str, state_bytes: int, model: Gpt) -> None:
    optimizer = build_optimizer(model.parameters(), Optimizer.model_validate({"name": name}))
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    model(tokens, tokens).backward()
    optimizer.step()
    held = sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim()
    )
    assert held == state_bytes * sum(parameter.numel() for parameter in model.parameters())


def test_the_three_forms_of_adamw_agree(model: Gpt) -> None:
    start = {name: value.clone() for name, value in model.state_dict().items()}
    tokens = torch.arange(4)[None]
    ends = []
    for name in ("adamw_torch", "adamw_torch_fused", "adamw_torch_foreach"):
        model.load_state_dict(start)
        # A large eps: keys' biases have no gradient but rounding noise, which a small one would blow up.
        settings = Optimizer.model_validate({"name": name, "lr": 1e-2, "eps": 1e-3})
        optimizer = build_optimizer(model.parameters(), settings)
        for _ in range(3):
            optimizer.zero_grad()
            model(tokens, tokens).backward()
            optimizer.step()
        ends.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert torch.allclose(ends[0], ends[1], atol=1e-6)
    assert torch.allclose(ends[0], ends[2], atol=1e-6)
