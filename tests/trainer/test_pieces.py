"""Parts of a tensor cover it exactly, and go through torch.distributed.checkpoint as the whole does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import state_dict_loader

from trainkit.trainer.checkpoint.pieces import Pieces, boxes_of
from trainkit.trainer.checkpoint.safe_loading import StateReader
from trainkit.trainer.parallel.single_and_ddp import STATE, quiet, write_state

pytestmark = pytest.mark.torch


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_a_stretch_of_values_is_boxes_of_the_tensor(shape: list[int], data: st.DataObject) -> None:
    whole = torch.arange(torch.Size(shape).numel())
    start = data.draw(st.integers(0, whole.numel()))
    stop = data.draw(st.integers(start, whole.numel()))
    covered = torch.full(shape, -1)
    boxes = list(boxes_of(shape, start, whole[start:stop]))
    assert len(boxes) <= 2 * max(1, len(shape))
    for offsets, box in boxes:
        assert len(offsets) == len(shape)
        part = covered
        for dimension, (offset, size) in enumerate(zip(offsets, box.shape, strict=True)):
            part = part.narrow(dimension, offset, size)
        assert (part == -1).all()
        part.copy_(box)
    expected = torch.where((whole >= start) & (whole < stop), whole, -1).view(shape)
    assert torch.equal(covered, expected)


def test_what_is_saved_in_parts_is_read_whole_and_the_other_way_round(tmp_path: Path) -> None:
    whole = torch.randn(5, 3, 2)
    parts = [*boxes_of(whole.shape, 0, whole.flatten()[:13]), *boxes_of(whole.shape, 13, whole.flatten()[13:])]
    (tmp_path / STATE).mkdir()
    write_state({"model": {"a": Pieces.of(whole.shape, whole.dtype, parts)}}, tmp_path)
    read = {"model": {"a": torch.zeros_like(whole)}}
    mine = torch.zeros(7)
    piece = {"model": {"a": Pieces.of(whole.shape, whole.dtype, list(boxes_of(whole.shape, 11, mine)))}}
    with quiet():
        state_dict_loader.load(read, storage_reader=StateReader(tmp_path / STATE))
        state_dict_loader.load(piece, storage_reader=StateReader(tmp_path / STATE))
    assert torch.equal(read["model"]["a"], whole)
    assert torch.equal(mine, whole.flatten()[11:18])
