"""Weights are drawn by name: equal whole or in slices, on any number of ranks, and for any order."""

from __future__ import annotations

import math
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.trainer.conftest import MakeSettings
from trainkit.trainer.models.weights import copy_stretch, drawn
from trainkit.trainer.setup import prepared_model

pytestmark = pytest.mark.torch
SIZES = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 257,
}
GPT2 = {"n_layer": 2, "n_head": 2, "n_embd": 24, "n_positions": 64, "vocab_size": 257}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"layers": 2, "heads": 2, "hidden_size": 18, "moe": {"experts": 3, "top_k": 1}},
    "llama": {"kind": "hf", "architecture": "llama", "config": {**SIZES, "tie_word_embeddings": True}},
    "gpt2": {"kind": "hf", "architecture": "gpt2", "config": GPT2},  # which draws its projections twice
}


def slices_on(rank: int, ranks: int, settings: Any) -> tuple[Any, dict[str, DTensor]]:
    """One rank's model in a made-up world, and its slices."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        # By a name of its own: torch remembers what it has found of a mesh, and takes equal ones for one.
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=(f"{ranks} from {rank}",))
        model = prepared_model(settings, mesh)
        assert model.slices is not None
        named = {name: each for name, each in model.named_parameters() if each in model.slices}
        return model, {name: model.slices.take(each) for name, each in named.items()}
    finally:
        torch.distributed.destroy_process_group()


FROM_5 = pytest.mark.needs("transformers>=5")  # older releases build models whole


@pytest.mark.parametrize("name", ["gpt", *(pytest.param(name, marks=FROM_5) for name in ("llama", "gpt2"))])
def test_slices_of_all_ranks_are_what_one_process_draws(name: str, make_settings: MakeSettings) -> None:
    settings = make_settings(model=MODELS[name])
    whole = dict(prepared_model(settings).named_parameters())
    shares = [slices_on(rank, 3, settings) for rank in range(3)]
    for key, parameter in whole.items():
        rows = torch.cat([slices[key]._local_tensor for _, slices in shares])
        assert torch.equal(rows, parameter), key
        assert all(slices[key]._local_tensor.shape[0] <= -(-parameter.shape[0] // 3) for _, slices in shares)
    model, _ = shares[0]
    assert all(each.is_meta for each in model.parameters())
    assert not any(each.is_meta for each in model.buffers())


@pytest.mark.needs("transformers>=5.10")
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_rank_reads_its_slices_of_a_folder(name: str, make_settings: MakeSettings, tmp_path: Path) -> None:
    drawn_model: Any = prepared_model(make_settings(model=MODELS[name]))
    drawn_model.inner.save_pretrained(tmp_path / "folder")
    settings = make_settings(model={"kind": "hf", "path": str(tmp_path / "folder")}, train={"seed": 5})
    whole = dict(prepared_model(settings).named_parameters())
    shares = [slices_on(rank, 2, settings)[1] for rank in range(2)]
    for key, parameter in drawn_model.named_parameters():
        assert torch.equal(whole[key], parameter)
        assert torch.equal(torch.cat([slices[key]._local_tensor for slices in shares]), parameter), key


@FROM_5
def test_one_process_has_the_fingerprint_of_the_slices(make_settings: MakeSettings) -> None:
    settings = make_settings(model=MODELS["llama"], peft={"kind": "lora", "rank": 2})
    whole = prepared_model(settings)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        assert prepared_model(settings, init_device_mesh("cpu", (1,))).base == whole.base
    finally:
        torch.distributed.destroy_process_group()


def test_what_is_not_set_stays() -> None:
    layer = nn.Linear(3, 2)
    before = layer.bias.detach().clone()
    with drawn(1, "layer", [layer]) as done:
        nn.init.normal_(layer.weight)
    assert done == {layer.weight}
    assert torch.equal(layer.bias, before)


SHAPES = [(8, 3), (10, 3), (2, 5), (1,), (7,)]  # of as many rows as can be divided, more, and too few


def exchange(rank: int, ranks: int, store: str) -> None:
    timeout = timedelta(seconds=60)
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timeout)
    mesh = init_device_mesh("cpu", (ranks,))
    for shape in SHAPES:
        whole = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
        length = -(-whole.numel() // ranks)
        found = torch.full((length,), -1, dtype=torch.bfloat16)
        copy_stretch(distribute_tensor(whole, mesh, [Shard(0)]), length, found, torch.device("cpu"))
        mine = whole.flatten()[rank * length : (rank + 1) * length].bfloat16()
        assert torch.equal(found[: len(mine)], mine), shape
        assert bool((found[len(mine) :] == -1).all()), shape
    torch.distributed.destroy_process_group()


def test_slices_of_rows_become_stretches_of_equal_length(tmp_path: Path) -> None:
    processes: Any = torch.multiprocessing
    # Raises what a rank raised.
    processes.start_processes(exchange, (4, f"file://{tmp_path}/store"), nprocs=4, start_method="fork")
