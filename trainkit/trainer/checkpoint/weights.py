"""The whole weights of a checkpoint, whichever strategy saved it, on the CPU and without a process group."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader

from trainkit.trainer.checkpoint.safe_loading import only_data
from trainkit.trainer.parallel.native import STATE, quiet
from trainkit.trainer.parallel.swapping import FOLDER, swapped_weights
from trainkit.trainer.parallel.zero import TAG, import_deepspeed

MASTER = "single_partition_of_fp32_groups"


def load_weights(model: nn.Module, checkpoint: Path, ranks: int) -> None:
    """Fill a model with what `ranks` ranks saved.

    Raises RuntimeError, ValueError or KeyError for a checkpoint that is of another model, and UnpicklingError for one
    that holds more than data.
    """
    if (checkpoint / STATE).is_dir():
        weights = model.state_dict()
        with quiet(), only_data(checkpoint / STATE):  # torch puts the shards together itself
            state_dict_loader.load({"model": weights}, checkpoint_id=checkpoint / STATE, no_dist=True)
    else:
        import_deepspeed(torch.device("cpu"), "warning")
        with only_data():
            swapped = (checkpoint / FOLDER).is_dir()
            weights = swapped_weights(checkpoint, ranks) if swapped else dict(zero_weights(checkpoint))
    model.load_state_dict(weights)


def zero_weights(checkpoint: Path) -> Mapping[str, Tensor]:
    """Every parameter and buffer by its name, in 32 bits, put together from DeepSpeed's own files."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint, get_model_state_files

    saved = [_read(path)["optimizer_state_dict"] for path in _shards(checkpoint / TAG)]
    module = _read(Path(get_model_state_files(str(checkpoint / TAG))[0]))
    if all("zero_stage" not in state for state in saved):
        return {**module["module"], **_joined(saved, module)}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        weights = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint), tag=TAG)
    # At stage 1, DeepSpeed (engine.py, save_frozen_param) keeps what is frozen in the whole module alone.
    return {**module["module"], **weights} if saved[0]["zero_stage"] == 1 else weights


def _joined(saved: list[Mapping[str, Any]], module: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """What DeepSpeed's reader takes for no checkpoint of ZeRO: stage 1 in bf16, whose optimizer is another class.

    runtime/bf16_optimizer.py, state_dict: each rank has its slice of each flat group of parameters, which follow one
    another in the order of `param_shapes`.
    """
    weights: dict[str, Tensor] = {}
    for group, shapes in enumerate(module["param_shapes"]):
        flat, offset = torch.cat([state[MASTER][group] for state in saved]), 0
        for name, shape in shapes.items():
            weights[name] = flat.narrow(0, offset, shape.numel()).view(shape)
            offset += shape.numel()
    for twin, name in module["shared_params"].items():
        weights[twin] = weights[name]
    return weights


def _shards(folder: Path) -> list[Path]:
    """The files of the ranks, in their order."""
    found = {re.search(r"zero_pp_rank_(\d+)_", path.name): path for path in folder.glob("*_optim_states.pt")}
    return [path for _, path in sorted((int(number[1]), path) for number, path in found.items() if number)]


def _read(path: Path) -> Any:
    return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
