"""Copies of a state for a checkpoint that is written while training goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from trainkit.trainer.distributed import process_group
from trainkit.trainer.parallel.single_and_ddp import HostCopies
from trainkit.trainer.settings import World


def state(value: float, size: int = 3) -> dict[str, Any]:
    weight = torch.nn.Parameter(torch.full((size,), value))
    return {"model": {"w": weight}, "groups": [{"lr": value, "step": torch.tensor(value)}], "names": ("a", "b")}


@pytest.mark.parametrize("keeps", [True, False])
def test_a_copy_stays_as_it_was_taken(keeps: bool) -> None:
    trained = state(1.0)
    copied = HostCopies(keeps=keeps)(trained)
    with torch.no_grad():
        trained["model"]["w"].add_(1)
        trained["groups"][0]["step"].add_(1)
    assert copied["model"]["w"].tolist() == [1.0, 1.0, 1.0]
    assert not copied["model"]["w"].requires_grad
    assert (copied["groups"][0]["lr"], copied["groups"][0]["step"].item(), copied["names"]) == (1.0, 1.0, ("a", "b"))


@pytest.mark.parametrize("keeps", [True, False])
def test_the_next_copy_is_of_the_state_by_then(keeps: bool) -> None:
    copies = HostCopies(keeps=keeps)
    first = copies(state(1.0))["model"]["w"]
    second = copies(state(2.0))["model"]["w"]
    assert second.tolist() == [2.0, 2.0, 2.0]
    assert (first.data_ptr() == second.data_ptr()) == keeps, "memory is used again where it is kept"
    larger = copies(state(3.0, size=5))["model"]["w"]
    assert larger.tolist() == [3.0] * 5


def test_a_shard_stays_one_of_its_mesh() -> None:
    cpu, copies = torch.device("cpu"), HostCopies(keeps=True)
    with process_group(World(), cpu, needed=True):
        mesh = init_device_mesh("cpu", (1,))
        for value in (1.0, 2.0):
            shard = distribute_tensor(torch.full((4,), value), mesh, [Shard(0)])
            copied = copies({"w": shard})["w"]
            shard.add_(1)
            assert isinstance(copied, DTensor)
            assert (copied.placements, copied.to_local().tolist()) == (shard.placements, [value] * 4)
