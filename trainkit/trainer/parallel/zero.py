"""Optimizer state, gradients and parameters partitioned over ranks (DeepSpeed ZeRO), with offload to CPU and NVMe."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainkit.errors import TrainingError
from trainkit.trainer.checkpoint.safe_loading import only_data
from trainkit.trainer.metrics.memory_breakdown import state_tensors
from trainkit.trainer.models.adapters import kept_tensors
from trainkit.trainer.models.base import Model
from trainkit.trainer.models.quantized import scales
from trainkit.trainer.optim import build_optimizer
from trainkit.trainer.parallel import Strategy
from trainkit.trainer.parallel.swapping import FOLDER, load_swapped, save_swapped, swap_folder
from trainkit.trainer.settings import Settings, World

TAG = "zero"  # DeepSpeed's name for the folder inside a checkpoint


class Zero(Strategy):
    """A DeepSpeed engine around the model and torch's own optimizer; the planned JSON decides everything else.

    In stage 1 the last micro step reduces, in stages 2 and 3 each one does, a partition at a time.
    """

    def __init__(self, model: Model, settings: Settings, world: World, device: torch.device) -> None:
        deepspeed = import_deepspeed(device, settings.recipe.logging.level)
        model.to(device)
        config = engine_config(settings, model, world)
        # The one that the recipe names, offloaded or not, and not DeepSpeed's: a name means one thing under every
        # strategy. Built before the engine, because it looks at whole parameters.
        optimizer = build_optimizer(model, settings.recipe.optimizer)
        with contextlib.redirect_stdout(io.StringIO()):  # some of its optimizers print memory figures unasked
            if settings.dtype == "fp32" and swaps_parameters(config):
                # Left to itself it swaps in bf16 on a CPU without fp16 kernels (partition_parameters.py, _set_dtype).
                deepspeed.init_distributed()  # it takes the process group that is there
                deepspeed.zero.Init(module=model, config_dict_or_path=config)
            self._engine: Any = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        self.model = self._engine
        self._rank = world.rank
        self._adapts = settings.recipe.peft.kind != "none"
        if self._adapts:  # its own exclude_frozen_parameters keeps the second name of a tied weight
            self._engine.module_state_dict = self._kept_state
        self._swaps = swap_folder(settings) is not None

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add this micro step's gradients; DeepSpeed counts its micro steps by calls of `step`."""
        # The loss is already divided by the tokens of the global batch; by the micro steps it must not be.
        self._engine.backward(loss, scale_wrt_gas=False)
        if not last:
            self._engine.step()

    def update(self, learning_rate: float) -> Tensor | float:
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        self._engine.step()
        norm: Tensor | float = self._engine.get_global_grad_norm()
        return norm

    def skipped_steps(self) -> int:
        return int(self._engine.skipped_steps)

    def held(self) -> Mapping[str, Iterable[Tensor]]:
        """Shards and 32-bit masters by what they are for. Gradients pass through DeepSpeed's own buffers."""
        wrapper = self._engine.optimizer
        masters = getattr(wrapper, "fp32_partitioned_groups_flat", None)  # stage 3
        if masters is None:
            masters = getattr(wrapper, "single_partition_of_fp32_groups", [])  # stages 1 and 2
        return {
            "parameters": [
                *(getattr(each, "ds_tensor", each) for each in self._engine.module.parameters()),
                *scales(self._engine.module),
            ],
            "optimizer_state": [*masters, *state_tensors(wrapper.optimizer)],
        }

    def save(self, folder: Path) -> None:
        """DeepSpeed's own format, one file a rank; trainkit's for what lives in files."""
        if self._swaps:
            save_swapped(self._engine, folder, self._rank)
            return
        # DeepSpeed would make all folders above it as well, through a link too, and hide why it cannot.
        (folder / TAG).mkdir(exist_ok=True)
        # Without the file `latest`, which names a tag: the manifest says what a checkpoint is.
        self._engine.save_checkpoint(str(folder), tag=TAG, save_latest=False, exclude_frozen_parameters=self._adapts)

    def _kept_state(self, *_: object, **__: object) -> dict[str, Tensor]:
        """In place of the engine's module_state_dict, where adapters train: what is frozen is no part of it."""
        return kept_tensors(self._engine.module)

    def save_later(self) -> Callable[..., None]:
        # it writes its files from the tensors that it trains
        raise TrainingError("checkpoint.asynchronous: DeepSpeed saves only while training waits")

    def load(self, folder: Path) -> None:
        if (folder / FOLDER).is_dir():
            load_swapped(self._engine, folder, self._rank)
            return
        if self._swaps:  # DeepSpeed cannot read its own format into such a run
            raise TrainingError(
                f"the checkpoint {folder} was saved by a run that did not swap to NVMe, and this one does",
                hint="set strategy.offload_optimizer and strategy.offload_param to cpu or none",
            )
        with only_data():
            path, _ = self._engine.load_checkpoint(str(folder), tag=TAG, load_module_strict=not self._adapts)
        if path is None:
            raise TrainingError(f"DeepSpeed finds no checkpoint in {folder}")


def engine_config(settings: Settings, model: Model, world: World) -> dict[str, Any]:
    """The planned JSON, with what only the run knows of swapping: its own folder, and the size of the largest shard."""
    if settings.deepspeed is None:
        raise TrainingError("trainer.json names no DeepSpeed configuration, which every zero strategy requires")
    config: dict[str, Any] = json.loads(settings.deepspeed.read_text())
    folder = swap_folder(settings)
    zero = config["zero_optimization"]
    for offload in (zero.get("offload_optimizer", {}), zero.get("offload_param", {})):
        if offload.get("device") == "nvme":
            offload["nvme_path"] = str(folder)
    if swaps_parameters(config):
        # DeepSpeed's five buffers of 10^8 elements would be too small for the largest models and 2 GB for the rest.
        largest = max(math.ceil(parameter.numel() / world.size) for parameter in model.parameters())
        zero["offload_param"].setdefault("buffer_size", largest)
    return config


def swaps_parameters(config: Mapping[str, Any]) -> bool:
    """Whether parameters live in files between uses."""
    return bool(config["zero_optimization"].get("offload_param", {}).get("device") == "nvme")


def import_deepspeed(device: torch.device, level: str) -> Any:
    """Import DeepSpeed without its noise and without the op that it would compile for half a minute at first use."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    # DeepSpeed calls collectives by names that newer torch calls old.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    logging.getLogger("DeepSpeed").setLevel(logging.DEBUG if level == "debug" else logging.ERROR)
    # A shared-memory collective for inference on CPU, of no use here; it also leaves files in /dev/shm.
    # By import_module, because the attribute deepspeed.comm.torch is torch itself.
    vars(importlib.import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None
    return deepspeed
