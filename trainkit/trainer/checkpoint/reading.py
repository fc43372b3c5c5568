"""The values of a trained model, read one tensor at a time: from a checkpoint, and from the base of its adapters."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Mapping, Set
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from trainkit.recipe.schema import HfModel, Recipe
from trainkit.trainer.checkpoint.safe_loading import StateReader, only_data
from trainkit.trainer.models.adapters import OWN, add_adapters, kept_tensors, taken_out
from trainkit.trainer.models.base import Model
from trainkit.trainer.models.folder import FolderWeights
from trainkit.trainer.models.quantized import quantizable, rounded_weight
from trainkit.trainer.optim import DTYPES
from trainkit.trainer.parallel.single_and_ddp import STATE, quiet
from trainkit.trainer.parallel.swapping import FOLDER, swapped_weights
from trainkit.trainer.parallel.zero import TAG, import_deepspeed

MASTER = "single_partition_of_fp32_groups"  # DeepSpeed's 32-bit weights at stages 1 and 2
_SHARD = re.compile(r"zero_pp_rank_(\d+)_")  # DeepSpeed's file of a rank


class Weights(Protocol):
    """Tensors by the names of a model's state_dict."""

    @property
    def names(self) -> Set[str]:
        """Those that there are."""

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """A tensor, on the CPU; its floating-point values in a format."""


class HeldWeights:
    """Tensors in memory, or in files that are mapped to it."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        """tensors: or what gives one by `contiguous`, as DeepSpeed's do."""
        self._tensors, self.names = tensors, tensors.keys()

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        return in_format(self._tensors[name].contiguous(), dtype)


class StateWeights:
    """What torch.distributed.checkpoint has saved of a model, put together from all ranks' pieces."""

    def __init__(self, folder: Path) -> None:
        """UnpicklingError for metadata that is not plain data."""
        self._reader = StateReader(folder)
        saved = self._reader.read_metadata().state_dict_metadata.items()
        named = ((name.removeprefix("model."), each) for name, each in saved if name.startswith("model."))
        self._saved = {name: each for name, each in named if isinstance(each, TensorStorageMetadata)}
        self.names = self._saved.keys()

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        saved = self._saved[name]
        own = saved.properties.dtype
        found = torch.empty(saved.size, dtype=dtype if own.is_floating_point else own)
        with quiet(), only_data():
            state_dict_loader.load({"model": {name: found}}, storage_reader=self._reader)
        return found


def in_format(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The same with its floating-point values in a format."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def saved_weights(checkpoint: Path, ranks: int) -> Weights:
    """What `ranks` ranks have saved of their model. UnpicklingError for more than plain data."""
    if (checkpoint / STATE).is_dir():
        return StateWeights(checkpoint / STATE)
    import_deepspeed(torch.device("cpu"), "warning")
    with only_data():
        swapped = (checkpoint / FOLDER).is_dir()
        return HeldWeights(swapped_weights(checkpoint, ranks) if swapped else zero_weights(checkpoint))


def zero_weights(checkpoint: Path) -> Mapping[str, Any]:
    """Every parameter and buffer by its name, in 32 bits, assembled from DeepSpeed's own files, which are mapped.

    Of stage 3 each is put together by its method `contiguous`, of the others all are, at once.
    """
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint, get_model_state_files

    # Memory-mapped: the optimizer state in the same files is several times larger than the weights, and is not needed.
    read = partial(torch.load, map_location="cpu", mmap=True, weights_only=True)
    numbered = ((_SHARD.search(path.name), path) for path in (checkpoint / TAG).glob("*_optim_states.pt"))
    shards = sorted((int(number[1]), path) for number, path in numbered if number)  # by rank
    saved = [read(path)["optimizer_state_dict"] for _, path in shards]
    module = read(get_model_state_files(str(checkpoint / TAG))[0])
    if all("zero_stage" not in state for state in saved):
        return {**module["module"], **_joined(saved, module)}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        weights = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint), tag=TAG, lazy_mode=True)
    # At stage 1, DeepSpeed (engine.py, save_frozen_param) keeps frozen parameters only in the full module's state.
    return {**module["module"], **weights} if saved[0]["zero_stage"] == 1 else weights


def _joined(saved: list[Mapping[str, Any]], module: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """Weights of ZeRO stage 1 in bf16, which uses another optimizer class: DeepSpeed's own reader refuses that."""
    # runtime/bf16_optimizer.py, state_dict: each rank has a slice of each flat group of parameters, which follow one
    # another in the order of `param_shapes`.
    weights: dict[str, Tensor] = {}
    for group, shapes in enumerate(module["param_shapes"]):
        flat, offset = torch.cat([state[MASTER][group] for state in saved]), 0
        for name, shape in shapes.items():
            weights[name] = flat.narrow(0, offset, shape.numel()).view(shape)
            offset += shape.numel()
    for twin, name in module["shared_params"].items():
        weights[twin] = weights[name]
    return weights


class MergedWeights:
    """A model of transformers with its adapters merged in, layer by layer; its base is read from the folder.

    ValueError where the checkpoint lacks an adapter.
    """

    def __init__(self, model: Model, recipe: Recipe, base: FolderWeights, saved: Weights) -> None:
        """model: on the meta device; it is left without adapters."""
        assert isinstance(recipe.model, HfModel)
        inner: Any = model.inner
        self._base, self._saved, self._asked = base, saved, recipe.model.quantize
        self._own, self._declared = DTYPES[recipe.precision.weights], getattr(inner.config, "dtype", None)
        self._plain = dict(model.named_modules())
        bits = self._asked.bits
        self._quantized = {OWN + name for name in quantizable(inner)} if bits else set()
        names = model.state_dict().keys()
        add_adapters(model, recipe.peft)
        if lacking := kept_tensors(model).keys() - saved.names:
            raise ValueError(f"it lacks {', '.join(sorted(lacking)[:3])}")
        self._layers = taken_out(model)
        self._latest: tuple[str, Mapping[str, Tensor]] = ("", {})
        self.names = {
            name for name in names if name in saved.names or name in base.names or self._wrapped(name) in saved.names
        }

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        place, _, kind = name.rpartition(".")
        if place not in self._layers:
            return self._before(name, name, dtype)
        if self._latest[0] != place:
            self._latest = (place, self._merged(place))
        return in_format(self._latest[1][kind], dtype)

    def _wrapped(self, name: str) -> str:
        """A name as it is in a layer with adapters."""
        place, _, kind = name.rpartition(".")
        return f"{place}.base_layer.{kind}"

    def _merged(self, place: str) -> Mapping[str, Tensor]:
        """The tensors of a layer, in 32 bits."""
        layer, inside = self._layers[place], "base_layer."
        values = {
            name: self._before(f"{place}.{name.removeprefix(inside)}", f"{place}.{name}", torch.float32)
            for name in layer.state_dict()
        }
        layer.load_state_dict(values, assign=True)
        with torch.no_grad():
            layer.merge()
        found = {name: each.detach() for name, each in layer.get_base_layer().state_dict().items()}
        layer.to("meta")
        layer.merged_adapters.clear()
        return found

    def _before(self, name: str, saved: str, dtype: torch.dtype) -> Tensor:
        """A tensor before the merge, in a format. saved: its name in the checkpoint."""
        if saved in self._saved.names:  # trained; or frozen, which older releases saved, too
            return self._saved.read(saved, dtype)
        place, _, kind = name.rpartition(".")
        found = self._base.read(name)
        if place in self._quantized and kind == "weight":
            # quantised from the format in which transformers reads it
            found = rounded_weight(self._plain[place], found.to(self._declared or found.dtype), self._asked)
        elif self._own != torch.float32:  # else every value stays what it is
            found = in_format(found, self._own)
        return in_format(found, dtype)
