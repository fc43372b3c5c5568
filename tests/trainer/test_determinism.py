"""`train.deterministic`: equal runs are bit-equal, and what cannot be deterministic is an error."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer.training import MakeSettings, parts_of, trained
from trainkit.trainer.data.loader import training_batches
from trainkit.trainer.data.sampler import SampleOrder
from trainkit.trainer.data.source import Batch, Samples


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = before


def test_two_runs_with_workers_and_dropout_are_bit_equal(make_settings: MakeSettings) -> None:
    changes: dict[str, Any] = {
        "train": {"steps": 4, "deterministic": True},
        "model": {"dropout": 0.2},
        "data": {"workers": 2},
        "eval": {"every_steps": 0},
    }
    one, other = trained(make_settings(**changes)), trained(make_settings(**changes))
    assert one.losses == other.losses
    assert all(torch.equal(each, other.weights[name]) for name, each in one.weights.items())
    assert trained(make_settings(**{**changes, "train": {**changes["train"], "seed": 1}})).losses != one.losses


def test_an_operation_without_a_deterministic_form_is_an_error(make_settings: MakeSettings) -> None:
    parts_of(make_settings(train={"steps": 1, "deterministic": True}))
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.benchmark
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        torch.zeros(4).put_(torch.tensor([0, 0]), torch.ones(2), accumulate=False)


@pytest.mark.parametrize("deterministic", [True, False])
def test_what_inductor_compiles_is_deterministic_too(make_settings: MakeSettings, deterministic: bool) -> None:
    from torch._inductor import config

    compiled = {"compile": {"enabled": True}}  # nothing is compiled before the first step
    settings = make_settings(train={"steps": 1, "deterministic": deterministic}, efficiency=compiled)
    with config.patch(deterministic=False):
        parts_of(settings)
        assert config.deterministic is deterministic


def by_chance(indices: Sequence[int]) -> Batch:
    """Samples that a user's own data set would draw, from every generator there is."""
    drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    return Batch({"drawn": torch.tensor(drawn, dtype=torch.float64)}, len(indices))


@pytest.mark.parametrize("source", range(3), ids=["python", "numpy", "torch"])
def test_workers_draw_by_the_seed_of_the_run(make_settings: MakeSettings, source: int) -> None:
    settings = make_settings(data={"workers": 2})

    def drawn(seed: int) -> list[float]:
        found = training_batches(
            Samples(64, by_chance),
            SampleOrder(seed, 64, settings.batch.global_),
            settings.batch,
            0,
            steps=range(4),
            data=settings.recipe.data,
            pin=False,
        )
        return [float(batch.inputs["drawn"][source]) for batch in found]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert len(set(drawn(1))) == 4
