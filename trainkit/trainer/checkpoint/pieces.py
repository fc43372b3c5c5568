"""Parts of a tensor that torch.distributed.checkpoint writes and reads: any rows of it, or any stretch of its values.

torch's own parts are one box for each rank (DTensor). DeepSpeed cuts flat memory wherever a rank's share ends, and a
layer whose output is sorted by heads has its rows elsewhere; both are a few boxes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

Box = tuple[tuple[int, ...], Tensor]  # offsets in the whole tensor, and the values


def boxes_of(shape: Sequence[int], start: int, values: Tensor) -> Iterator[Box]:
    """Boxes of the whole tensor's shape that together are a stretch of its values in memory order, from `start` on."""
    stop = start + values.numel()
    if not values.numel():
        return
    if len(shape) < 2:
        yield (start,) if shape else (), values.view(tuple(shape) and (-1,))
        return
    inner = torch.Size(shape[1:]).numel()
    first, last = -(-start // inner), stop // inner  # whole rows
    if first > last:  # within one row
        yield from ((((last, *at)), box[None]) for at, box in boxes_of(shape[1:], start - last * inner, values))
        return
    head, rows = first * inner - start, (last - first) * inner
    if head:
        for at, box in boxes_of(shape[1:], inner - head, values[:head]):
            yield (first - 1, *at), box[None]
    if rows:
        yield (first, *[0] * (len(shape) - 1)), values[head : head + rows].view(-1, *shape[1:])
    if stop > last * inner:
        for at, box in boxes_of(shape[1:], 0, values[head + rows :]):
            yield (last, *at), box[None]


class Pieces(Tensor):
    """A tensor of which this process has some boxes."""

    boxes: dict[tuple[int, ...], Tensor]

    @staticmethod
    def of(shape: Sequence[int], dtype: torch.dtype, boxes: Sequence[Box]) -> Pieces:
        """The boxes may be none; they are not copied."""
        made = Tensor._make_wrapper_subclass(Pieces, tuple(shape), dtype=dtype, device=torch.device("cpu"))
        made.boxes = dict(boxes)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise TypeError(f"{function} of parts of a tensor")

    def each(self, change: Callable[[Tensor], Tensor]) -> Pieces:
        """The same with other memory."""
        return Pieces.of(self.shape, self.dtype, [(at, change(box)) for at, box in self.boxes.items()])

    # What torch.distributed.checkpoint asks of a tensor in parts (planner_helpers.py: _Checkpointable).

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(at)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(_chunk(at, box), properties, torch.Size(self.shape)),
            )
            for at, box in self.boxes.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(at, box) for at, box in self.boxes.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.boxes[tuple(index.offset or ())]


def _chunk(at: Sequence[int], box: Tensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(at), box.shape)
