"""FSDP2: how far ahead of the computation shards are gathered."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from trainkit.trainer.distributed import process_group
from trainkit.trainer.loop import batches, optimizer_step
from trainkit.trainer.settings import Settings, World
from trainkit.trainer.setup import assemble


@pytest.mark.needs("torch>=2.7")  # before, FSDP2 has no CPU
@pytest.mark.parametrize(("prefetch", "forward"), [(1, []), (3, [1, 2, 3])])
def test_so_many_units_are_gathered_while_a_block_computes(
    prefetch: int, forward: list[int], make_settings: Callable[..., Settings]
) -> None:
    """By itself FSDP2 gathers one unit ahead in backward, and in forward leaves that to the order of the streams."""
    settings = make_settings(strategy={"kind": "fsdp", "prefetch": prefetch}, model={"layers": 5})
    device = torch.device("cpu")
    with process_group(World(), device, needed=True):
        parts = assemble(settings, World(), device)
        batch = next(batches(parts, 0))
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            optimizer_step(parts, 0, batch, batch.counted)
        del parts
    events = sorted(seen.events() or [], key=lambda event: event.time_range.start)
    names = [event.name for event in events]
    assert gathered(names, "forward", 0) == forward
    assert gathered(names, "backward", 4) == [3, 2, 1, 0][:prefetch]


def gathered(names: list[str], direction: str, block: int) -> list[int]:
    """The blocks whose shards are gathered between the beginning of one block's pass and of the next thing's."""
    begun = names.index(f"FSDP::pre_{direction} (blocks.{block})")
    found: list[int] = []
    for name in names[begun + 1 :]:
        if name.startswith(f"FSDP::{direction}_prefetch for blocks."):
            found.append(int(name.rpartition(".")[2]))
        elif name.startswith("FSDP::p"):  # pre_… or post_… of whatever comes next
            break
    return found
