"""A rank reads of a checkpoint what it needs of it, however many ranks have saved it."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainkit.trainer.checkpoint import safe_loading
from trainkit.trainer.checkpoint.safe_loading import StateReader, only_data
from trainkit.trainer.parallel.single_and_ddp import quiet

SIZES = {"model.first": (3001, 500), "model.bias": (1003,), "optimizer.state.first": (2000, 700), "model.step": ()}


@contextmanager
def rank_of(rank: int, ranks: int) -> Iterator[DeviceMesh]:
    """This process as one of several ranks, whose others are not there: nothing is exchanged."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield init_device_mesh("cpu", (ranks,))
    finally:
        dist.destroy_process_group()


def sharded(whole: torch.Tensor, mesh: DeviceMesh, axis: int) -> DTensor:
    """This rank's part of a tensor, cut along an axis as FSDP2 cuts along the first."""
    if whole.dim() <= axis:
        return DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parts = whole.chunk(ranks, dim=axis)
    own = parts[rank].contiguous() if rank < len(parts) else whole.narrow(axis, 0, 0)
    return DTensor.from_local(own, mesh, [Shard(axis)], run_check=False, shape=whole.shape, stride=whole.stride())


def values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randn(size, generator=generator) for name, size in SIZES.items()}


def save(folder: Path, ranks: int, axis: int = 0) -> None:
    """What so many ranks write together, by one after the other."""
    plans: list[Any] = []
    states: list[dict[str, Any]] = []
    writer = FileSystemWriter(folder)
    writer.set_up_storage_writer(is_coordinator=True)
    for rank in range(ranks):
        with rank_of(rank, ranks) as mesh:
            states.append({name: sharded(each, mesh, axis) for name, each in values().items()})
            planner = DefaultSavePlanner()
            planner.set_up_planner(states[-1], is_coordinator=True)
            plans.append(planner.create_local_plan())
    plans, metadata = planner.create_global_plan(plans)
    plans = writer.prepare_global_plan(plans)
    written = []
    for rank, plan in enumerate(plans):
        with rank_of(rank, ranks):
            planner.set_up_planner(states[rank], is_coordinator=False)
            written.append(writer.write_data(planner.finish_plan(plan), planner).wait())
    writer.finish(metadata, written)


def bytes_read() -> int:
    """What this process has read from files so far."""
    return int(
        next(line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar")).split()[1]
    )


@pytest.mark.skipif(sys.platform != "linux", reason="counts what /proc counts")
@pytest.mark.parametrize(("saved", "loaded"), [(1, 4), (4, 1), (2, 4), (4, 3)])
def test_a_rank_reads_its_share_alone(saved: int, loaded: int, tmp_path: Path) -> None:
    save(tmp_path, saved)
    for rank in range(loaded):
        with rank_of(rank, loaded) as mesh:
            state = {name: sharded(torch.zeros(size), mesh, 0) for name, size in SIZES.items()}
            share = sum(each.to_local().nbytes for each in state.values())
            reader, before = StateReader(tmp_path), bytes_read()
            with quiet(), only_data():
                state_dict_loader.load(state, storage_reader=reader, no_dist=True)
            read = bytes_read() - before
            for name, whole in values().items():
                assert torch.equal(state[name].to_local(), sharded(whole, mesh, 0).to_local()), name
        assert share <= read <= 1.01 * share + 10_000


@pytest.mark.parametrize(("saved", "axes"), [(3, (0, 1)), (2, (1, 0)), (3, (1, 1))])
def test_pieces_of_any_form_are_put_together(saved: int, axes: tuple[int, int], tmp_path: Path) -> None:
    save(tmp_path, saved, axes[0])
    with rank_of(1, 4) as mesh:
        state = {name: sharded(torch.zeros(size), mesh, axes[1]) for name, size in SIZES.items()}
        with quiet(), only_data():
            state_dict_loader.load(state, storage_reader=StateReader(tmp_path), no_dist=True)
        for name, whole in values().items():
            assert torch.equal(state[name].to_local(), sharded(whole, mesh, axes[1]).to_local()), name


def test_other_formats_and_layouts_are_filled_a_piece_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = values()
    with quiet():
        state_dict_saver.save(dict(whole), checkpoint_id=tmp_path, no_dist=True)
    monkeypatch.setattr(safe_loading, "STAGED", 20_000)
    state = {name: torch.zeros(each.shape, dtype=torch.bfloat16) for name, each in whole.items()}
    turned = torch.zeros(SIZES["model.first"][::-1])
    state["model.first"] = turned.T
    with quiet(), only_data():
        state_dict_loader.load(state, storage_reader=StateReader(tmp_path), no_dist=True)
    for name, each in whole.items():
        assert torch.equal(state[name], each.to(state[name].dtype)), name


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4).T,
        torch.zeros(1).expand(3),
        torch.arange(6.0).to(torch.float8_e5m2),
        torch.nn.Parameter(torch.arange(6.0)),
        torch.ones(6, dtype=torch.complex64),
        torch.arange(10)[3:7],
        torch.zeros(0, 4),
        torch.tensor(True),
    ],
    ids=["transposed", "expanded", "float8", "parameter", "complex", "part", "empty", "number"],
)
def test_tensors_of_every_kind_are_read(tensor: torch.Tensor, tmp_path: Path) -> None:
    with quiet():
        state_dict_saver.save({"x": tensor}, checkpoint_id=tmp_path, no_dist=True)
    state = {"x": torch.zeros(tensor.shape, dtype=tensor.dtype)}
    with quiet(), only_data():
        state_dict_loader.load(state, storage_reader=StateReader(tmp_path), no_dist=True)
    assert torch.equal(state["x"].view(torch.uint8), tensor.detach().contiguous().view(torch.uint8))


def test_metadata_of_another_tensor_and_a_file_that_is_cut_off_are_damage(tmp_path: Path) -> None:
    with quiet():
        state_dict_saver.save({"x": torch.zeros(4, 4), "y": torch.zeros(2)}, checkpoint_id=tmp_path, no_dist=True)
    found = StateReader(tmp_path).read_metadata()
    places = {index.fqn: place for index, place in (found.storage_data or {}).items()}
    places["x"].offset, places["y"].offset = places["y"].offset, places["x"].offset
    places["x"].length, places["y"].length = places["y"].length, places["x"].length
    (tmp_path / ".metadata").write_bytes(pickle.dumps(found))

    def load() -> None:
        with quiet(), only_data():
            state_dict_loader.load({"x": torch.zeros(4, 4)}, storage_reader=StateReader(tmp_path), no_dist=True)

    with pytest.raises(CheckpointException, match="does not fit its tensors"):
        load()
    (file,) = tmp_path.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(CheckpointException, match=r"damaged|shorter"):
        load()
