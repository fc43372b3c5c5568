"""Weights in safetensors files of a size, written one tensor at a time, as transformers names and lists them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor

from trainkit.files import read_json, write_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9  # of weights in a file
_INDEX_BYTES = 1 << 28  # as many as a million tensors have
# The names of formats in a file's header (https://huggingface.co/docs/safetensors, "Format").
_FORMATS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class Shards:
    """Files that hold no more than a size, but for a tensor that is larger and has one to itself.

    Each begins as a header that says where every tensor will be, so that tensors may come in any order.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, Tensor], size: int, metadata: Mapping[str, str]) -> None:
        """tensors: shapes and formats by name, on the meta device. size: in bytes."""
        self._folder, self._left = folder, {*tensors}
        self._places: dict[str, tuple[str, int, Tensor]] = {}  # file, first byte, and what comes there
        groups = _grouped(tensors, size)
        for number, names in enumerate(groups, start=1):
            file = WEIGHTS if len(groups) == 1 else f"model-{number:05}-of-{len(groups):05}.safetensors"
            self._begin(file, {name: tensors[name] for name in names}, metadata)
        if len(groups) > 1:
            total = sum(each.nbytes for each in tensors.values())
            files = {name: file for name, (file, _, _) in sorted(self._places.items())}
            write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": files})

    def _begin(self, file: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        # As safetensors itself: the widest first, so that each begins at a multiple of its own width, then by name.
        ordered = sorted(tensors.items(), key=lambda each: (-each[1].dtype.itemsize, each[0]))
        ends = [0]
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        for name, tensor in ordered:
            ends.append(ends[-1] + tensor.nbytes)
            header[name] = {
                "dtype": _FORMATS[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [ends[-2], ends[-1]],
            }
        content = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        content += b" " * (-len(content) % 8)
        (self._folder / file).write_bytes(len(content).to_bytes(8, "little") + content)
        for (name, tensor), start in zip(ordered, ends[:-1], strict=True):
            self._places[name] = (file, 8 + len(content) + start, tensor)

    def write(self, name: str, tensor: Tensor) -> None:
        """Put a tensor into its place. ValueError where it is another one than was announced."""
        file, start, announced = self._places[name]
        if (tensor.shape, tensor.dtype) != (announced.shape, announced.dtype):
            raise ValueError(f"{name} is {tensor.dtype} of {list(tensor.shape)}, and not {announced}")
        content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        with (self._folder / file).open("r+b") as target:
            target.seek(start)
            target.write(memoryview(cast("Any", content)))
        self._left.discard(name)

    def finish(self) -> None:
        """ValueError where a tensor has not been written."""
        if self._left:
            raise ValueError(f"{', '.join(sorted(self._left)[:3])} is not there")


def _grouped(tensors: Mapping[str, Tensor], size: int) -> list[list[str]]:
    """Names file by file, in their order (huggingface_hub, split_state_dict_into_shards_factory)."""
    groups: list[list[str]] = []
    current, held = list[str](), math.inf
    for name, tensor in tensors.items():
        if tensor.nbytes > size:
            groups.append([name])
            continue
        if held + tensor.nbytes > size:
            current, held = [], 0
            groups.append(current)
        current.append(name)
        held += tensor.nbytes
    return groups or [[]]


def weight_files(folder: Path) -> dict[str, Path] | None:
    """The file of each tensor of a folder of safetensors, by name; None where it has none."""
    if (folder / WEIGHTS).is_file():
        with safe_open(folder / WEIGHTS, "pt") as tensors:
            return dict.fromkeys(tensors.keys(), folder / WEIGHTS)
    files = read_json(folder / INDEX, _INDEX_BYTES).get("weight_map")
    return {name: folder / file for name, file in files.items()} if files else None
