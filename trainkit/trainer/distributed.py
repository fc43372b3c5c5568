"""The process group, and the few values that ranks exchange outside a strategy."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from trainkit.errors import TrainingError
from trainkit.recipe.schema.launching import Hang
from trainkit.trainer.settings import World

Number = TypeVar("Number", int, float)


def device_of(kind: str, world: World) -> torch.device:
    """The device of this rank. TrainingError if torch cannot use the GPU."""
    if kind != "cuda":
        return torch.device(kind)
    # The plan sets CUDA_VISIBLE_DEVICES to the node's GPUs, in the order of its ranks.
    seen = torch.cuda.device_count()
    if world.local_rank >= seen:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise TrainingError(
            f"local rank {world.local_rank} needs a GPU of its own, and torch {torch.__version__} sees {seen} here "
            f"(CUDA_VISIBLE_DEVICES={shown})",
            hint="compare with nvidia-smi; a CPU build of torch sees none",
        )
    device = torch.device("cuda", world.local_rank)
    torch.cuda.set_device(device)
    return device


def wait_for(device: torch.device) -> None:
    """Wait until a device has finished all its work. Not in every step: then the host could not run ahead of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


@contextmanager
def process_group(
    world: World, device: torch.device, *, needed: bool, seconds: int = Hang().collective_seconds
) -> Iterator[None]:
    """Open a process group, and close it afterwards: gloo on CPU, NCCL for CUDA tensors. needed: even for one rank.

    seconds: timeout of a collective, so that a lost rank ends the run instead of hanging it.
    """
    if world.size == 1 and not needed:
        yield
        return
    options: dict[str, Any] = {"backend": "gloo"}
    if device.type == "cuda":
        # gloo carries token counts and signals, which are on the host, so that no GPU stream is waited for.
        options = {"backend": "cpu:gloo,cuda:nccl", "device_id": device}
    if world.size == 1:
        # FSDP and DeepSpeed need a group even for one rank; a single rank needs no server.
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
    dist.init_process_group(timeout=timedelta(seconds=seconds), **options)
    yield
    # The holders of the group (DDP's reducer, DeepSpeed's engine) must be freed before it. Freed later, it waits for
    # gloo's thread, which may wait for the interpreter's lock, and now and then a rank hangs at its end. After a
    # failure the traceback still references them, so the group is left to the end of the process.
    gc.collect()
    dist.destroy_process_group()


def sum_over_ranks(values: Sequence[Number], world: World) -> list[Number]:
    """Element-wise sum of host numbers over all ranks, in 64 bits; no device is synchronised."""
    if world.size == 1:
        return list(values)
    # On the host, so that gloo sums it: NCCL takes only GPU tensors.
    total = torch.tensor(values, dtype=torch.float64 if isinstance(values[0], float) else torch.int64)
    dist.all_reduce(total, group=world.group)
    found: list[Number] = total.tolist()
    return found


def gather_from_ranks(value: Any, world: World) -> list[Any]:
    """Every rank's value, in rank order, on every rank."""
    if world.size == 1:
        return [value]
    values: list[Any] = [None] * world.size
    dist.all_gather_object(values, value, group=world.group)
    return values


def agreed(value: Any, world: World) -> Any:
    """Rank 0's value, where groups of ranks compute the same one each: its last bits may differ, and decide."""
    return value if world.data is world else gather_from_ranks(value, world)[0]


def barrier(world: World) -> None:
    """Wait for every rank."""
    sum_over_ranks([0], world)
