"""Ranks in several dimensions: copies of a model, its shards, experts, parts of samples, and of matrices.

Ranks that are near one another exchange the most: those of a matrix's parts are next to one another, then come a
sample's parts or experts, shards, and farthest apart, in other nodes, copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from trainkit.recipe.grid import GridSizes, grid_sizes
from trainkit.recipe.schema import Recipe
from trainkit.trainer.settings import World

Region = tuple[int, int, int]  # along a dimension: where it begins in the part, and in the whole, and its length


@dataclass(frozen=True, slots=True)
class Grid:
    """The groups of a rank, one for each dimension in which the model is divided."""

    sizes: GridSizes
    shards: DeviceMesh  # of a copy, behind the dimension of copies if there are several
    expert_shards: DeviceMesh  # of ranks with the same experts, as `shards`
    experts: Any  # the process group of the ranks that share out a block's experts; None if each has all
    context: Any  # that of the ranks that have the parts of each sample; None if each has all
    tensor: Any  # that of the ranks that share out each matrix; None if each has all
    data: Any  # that of the ranks whose samples are together a batch, on the host; None is all ranks


def arranged(world: World, recipe: Recipe, device: torch.device) -> World:
    """The ranks in the dimensions that a recipe asks for. Called once, on every rank."""
    sizes = grid_sizes(recipe)
    if not sizes.several:
        return world
    shards = world.size // (sizes.copies * sizes.tensor)
    timeout = timedelta(seconds=recipe.hang.collective_seconds)
    whole = _mesh(device, timeout, copies=sizes.copies, shards=shards, tensor=sizes.tensor)
    split, near = whole, max(sizes.experts, sizes.context)
    if near > 1:
        split = _mesh(device, timeout, copies=sizes.copies, shards=shards // near, near=near, tensor=sizes.tensor)
    data = None
    if sizes.alike > 1:
        # Each rank is in one of them: where others make a group, torch has it take part.
        columns = [[*range(place, world.size, sizes.alike)] for place in range(sizes.alike)]
        data, _ = dist.new_subgroups_by_enumeration(columns, timeout, backend="gloo")  # type: ignore[no-untyped-call]
    names = ("copies", "shards") if sizes.copies > 1 else ("shards",)
    grid = Grid(
        sizes,
        shards=whole[names],
        expert_shards=split[names],
        experts=split.get_group("near") if sizes.experts > 1 else None,
        context=split.get_group("near") if sizes.context > 1 else None,
        tensor=whole.get_group("tensor") if sizes.tensor > 1 else None,
        data=data,
    )
    return replace(world, grid=grid)


def _mesh(device: torch.device, timeout: timedelta, **sizes: int) -> DeviceMesh:
    """Ranks in named dimensions, each with a group whose collectives have this timeout."""
    mesh = init_device_mesh(device.type, (*sizes.values(),), mesh_dim_names=(*sizes,))
    for name in sizes:
        _set_pg_timeout(timeout, mesh.get_group(name))  # a mesh is not told one, and takes torch's own
    return mesh


@dataclass(frozen=True, slots=True)
class Cut:
    """Equal parts of a parameter along a dimension, one on each rank of a group, before it is sharded.

    layers: how many layers lie behind one another there, of each of which a part has its share.
    """

    group: Any
    dimension: int
    layers: int = 1

    @property
    def of(self) -> int:
        """How many parts there are."""
        return int(self.group.size())

    def shape(self, whole: Sequence[int]) -> list[int]:
        """The part's."""
        sizes = list(whole)
        sizes[self.dimension] //= self.of
        return sizes

    def regions(self, whole: int, start: int, length: int) -> Iterator[Region]:
        """Where a stretch of the part along the dimension lies in the whole, which is so long."""
        share = whole // (self.layers * self.of)
        stop = start + length
        while start < stop:
            layer, within = divmod(start, share)
            size = min(stop - start, share - within)
            yield start - (stop - length), (layer * self.of + self.group.rank()) * share + within, size
            start += size
