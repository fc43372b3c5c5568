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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader

from trainkit.errors import TrainingError
from trainkit.planner.resume import ENGINE_STATE
from trainkit.trainer.checkpoint.pieces import Box, Pieces, boxes_of
from trainkit.trainer.checkpoint.safe_loading import StateReader, only_data
from trainkit.trainer.distributed import gather_from_ranks
from trainkit.trainer.metrics.memory_breakdown import state_tensors
from trainkit.trainer.models.adapters import kept_tensors
from trainkit.trainer.models.base import Model
from trainkit.trainer.models.quantized import is_quantized, packed_parameter, quantize_later, scales
from trainkit.trainer.models.weights import Slices, copy_stretch, gathered, replace_parameters
from trainkit.trainer.optim import DTYPES, build_optimizer
from trainkit.trainer.parallel import Strategy
from trainkit.trainer.parallel.single_and_ddp import STATE, HostCopies, quiet, write_state
from trainkit.trainer.parallel.swapping import FOLDER, load_swapped, save_swapped, swap_folder
from trainkit.trainer.settings import Settings, World

TAG = ENGINE_STATE  # DeepSpeed's word for the folder inside a checkpoint


class Zero(Strategy):
    """A DeepSpeed engine around the model and torch's own optimizer; the planned JSON decides everything else.

    In stage 1 the last micro step reduces, in stages 2 and 3 each one does, a partition at a time.
    """

    def __init__(self, model: Model, settings: Settings, world: World, device: torch.device) -> None:
        deepspeed = import_deepspeed(device, settings.recipe.logging.level)
        config = engine_config(settings, model, world)
        if model.slices is None:
            model.to(device)
        else:
            lend_shapes(model, model.slices, device)
        # The one that the recipe names, offloaded or not, and not DeepSpeed's: a name means one thing under every
        # strategy. Built before the engine, because it looks at whole parameters.
        optimizer = build_optimizer(model, settings.recipe.optimizer)
        names = {each: name for name, each in model.named_parameters()}
        self._groups = [[names[each] for each in group["params"]] for group in optimizer.param_groups]
        self._shapes = {name: each.shape for name, each in model.named_parameters()}
        with contextlib.redirect_stdout(io.StringIO()):  # some of its optimizers print memory figures unasked
            if config["zero_optimization"]["stage"] == 3:
                deepspeed.init_distributed()  # it takes the process group that is there
                partition(model, deepspeed.zero.Init, config, settings.dtype, device)
            self._engine: Any = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        self.model = self._engine
        self._world, self._scales = world, settings.dtype == "fp16"
        self._adapts = settings.recipe.peft.kind != "none"
        if self._adapts:  # its own exclude_frozen_parameters keeps the second name of a tied weight
            self._engine.module_state_dict = self._kept_state
        self._swaps = swap_folder(settings) is not None
        self._copies = HostCopies(keeps=device.type == "cuda")

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
        """As the other strategies do it, or a file for each rank of state that lies in files or that has no rows."""
        if self._swaps:
            save_swapped(self._engine, folder, self._world.rank)
        elif self._has_rows():
            write_state(self._state(), folder)
        else:
            # DeepSpeed would make all folders above it as well, through a link too, and hide why it cannot.
            (folder / TAG).mkdir(exist_ok=True)
            # Without the file `latest`, which names a tag: the manifest says what a checkpoint is.
            self._engine.save_checkpoint(
                str(folder), tag=TAG, save_latest=False, exclude_frozen_parameters=self._adapts
            )

    def _kept_state(self, *_: object, **__: object) -> dict[str, Tensor]:
        """In place of the engine's module_state_dict, where adapters train: what is frozen is no part of it."""
        return kept_tensors(self._engine.module)

    def save_later(self) -> Callable[..., None] | None:
        if self._swaps or not self._has_rows():
            return None
        return partial(write_state, self._copies(self._state()))

    def load(self, folder: Path) -> None:
        if (folder / FOLDER).is_dir():
            load_swapped(self._engine, folder, self._world.rank)
            return
        if self._swaps:  # DeepSpeed cannot read another format into such a run
            raise TrainingError(
                f"the checkpoint {folder} was saved by a run that did not swap to NVMe, and this one does",
                hint="set strategy.offload_optimizer and strategy.offload_param to cpu or none",
            )
        if (folder / STATE).is_dir():
            self._load_state(folder)
            return
        with only_data():
            path, _ = self._engine.load_checkpoint(str(folder), tag=TAG, load_module_strict=not self._adapts)
        if path is None:
            raise TrainingError(f"DeepSpeed finds no checkpoint in {folder}")

    def _fragments(self) -> Iterator[Fragment]:
        """What this rank updates, as stretches of parameters in its flat 32-bit weights."""
        wrapper, names = self._engine.optimizer, {each: name for name, each in self._engine.module.named_parameters()}
        if hasattr(wrapper, "fp32_partitioned_groups_flat"):  # stage 3: a stretch of each parameter
            for group, master in zip(wrapper.fp16_groups, wrapper.fp32_partitioned_groups_flat, strict=True):
                at = 0
                for each in group:
                    length = each.partition_numel()
                    start = self._world.rank * length
                    if start < each.ds_numel:  # the last share is padded
                        yield Fragment(names[each], start, min(length, each.ds_numel - start), master, at)
                    at += length
            return
        masters = [group["params"][0] for group in wrapper.optimizer.param_groups]
        for each, name in names.items():
            if mapped := getattr(each, "_hp_mapping", None):
                place, own = mapped.lp_fragment_address, mapped.get_hp_fragment_address()
                yield Fragment(name, place.start, place.numel, masters[mapped.param_group_index], own.start)

    def _has_rows(self) -> bool:
        """Whether all state of the optimizer is numbers, or tensors with a value for each weight."""
        return all(
            not isinstance(value, Tensor) or value.numel() in (1, master.numel())
            for master, state in self._engine.optimizer.optimizer.state.items()
            for value in state.values()
        )

    def _state(self) -> dict[str, Any]:
        """The content of a checkpoint, as of the other strategies: 32-bit weights, and state by parameters. No copies.

        Called on every rank: all name the same tensors, of which each has some.
        """
        wrapper, module = self._engine.optimizer, self._engine.module
        boxes: dict[tuple[str, str], list[Box]] = {}
        numbers: dict[str, dict[str, Any]] = {}
        formats = {"": torch.float32}  # of the weights, and of state by its name
        for each in self._fragments():
            shape = self._shapes[each.name]
            boxes.setdefault((each.name, ""), []).extend(boxes_of(shape, each.start, each.of(each.master)))
            for key, value in wrapper.optimizer.state.get(each.master, {}).items():
                if isinstance(value, Tensor) and value.numel() == each.master.numel() > 1:
                    formats[key] = value.dtype
                    boxes.setdefault((each.name, key), []).extend(boxes_of(shape, each.start, each.of(value)))
                else:
                    numbers.setdefault(each.name, {})[key] = value
        known = gather_from_ranks((formats, next(iter(numbers.values()), {})), self._world)
        formats = {key: dtype for each, _ in known for key, dtype in each.items()}
        common: dict[str, Any] = next((each for _, each in known if each), {})

        def pieces(name: str, key: str) -> Pieces:
            return Pieces.of(self._shapes[name], formats[key], boxes.get((name, key), ()))

        trained = [name for names in self._groups for name in names]
        of = {each: name for name, each in module.named_parameters()}
        # A tied weight has several names.
        model: dict[str, Tensor] = {
            name: pieces(of[each], "")
            for name, each in module.named_parameters(remove_duplicate=False)
            if of[each] in trained
        }
        model |= {name: each for name, each in kept_tensors(module).items() if name not in model}  # buffers
        state = {
            name: {key: pieces(name, key) for key in formats if key} | common | numbers.get(name, {})
            for name in trained
        }
        groups = [
            {"params": names, **{key: value for key, value in group.items() if key != "params"}}
            for names, group in zip(self._groups, wrapper.param_groups, strict=True)
        ]
        counters = {"scaler": self._scale(), "skipped": self.skipped_steps()}
        return {"model": model, "optimizer": {"state": state, "param_groups": groups}, **counters}

    def _scale(self) -> dict[str, Any]:
        """The loss scale as torch's GradScaler saves its own; empty where losses are not scaled."""
        if not self._scales:
            return {}
        started = torch.amp.GradScaler("cpu").state_dict()
        return {**started, "scale": float(self._engine.optimizer.loss_scaler.cur_scale)}

    def _load_state(self, folder: Path) -> None:
        """Read what any strategy saved on any ranks, each rank its own."""
        wrapper = self._engine.optimizer
        with quiet(), only_data():
            reader = StateReader(folder / STATE)
            self._make_state(reader.read_metadata().state_dict_metadata)
            state = self._state()
            state_dict_loader.load(state, storage_reader=reader)  # in place, but for what is no tensor
        for each in self._fragments():
            for key, value in state["optimizer"]["state"][each.name].items():
                if not isinstance(value, Pieces):
                    wrapper.optimizer.state[each.master][key] = value
        for group, given in zip(wrapper.param_groups, state["optimizer"]["param_groups"], strict=True):
            group.update({key: value for key, value in given.items() if key != "params"})
        if self._scales:
            wrapper.loss_scaler.cur_scale = state["scaler"]["scale"]
        self._engine.skipped_steps = state["skipped"]
        if hasattr(wrapper, "fp32_partitioned_groups_flat"):
            wrapper.checkpoint_event_prologue()
            for index in range(len(wrapper.fp16_groups)):
                wrapper._reassign_or_swap_out_partitioned_parameters(index)
            wrapper.checkpoint_event_epilogue()
        else:
            wrapper.update_lp_params()

    def _make_state(self, saved: Mapping[str, Any]) -> None:
        """Have the optimizer's state, which it makes in its first step, as a checkpoint has it."""
        state = self._engine.optimizer.optimizer.state
        for each in self._fragments():
            own, prefix = state[each.master], f"optimizer.state.{each.name}."
            for key in (name.removeprefix(prefix) for name in saved if name.startswith(prefix)):
                stored = saved[prefix + key]
                if key in own or "." in key:
                    continue
                if getattr(stored, "size", None) == self._shapes[each.name]:
                    own[key] = torch.zeros_like(each.master, dtype=stored.properties.dtype, requires_grad=False)
                else:
                    own[key] = torch.zeros(()) if hasattr(stored, "properties") else None


@dataclass(frozen=True, slots=True)
class Fragment:
    """A stretch of a parameter's values, from `start` on, and where it lies in flat 32-bit weights."""

    name: str
    start: int
    length: int
    master: Tensor
    at: int

    def of(self, flat: Tensor) -> Tensor:
        """This stretch of the weights, or of state beside them."""
        return flat.detach().view(-1).narrow(0, self.at, self.length)


def lend_shapes(model: Model, slices: Slices, device: torch.device) -> None:
    """Give each parameter without values one, which it has everywhere: what looks at shapes finds them.

    The rest of the model goes to the device. Weights that will be quantised stay as they are.
    """

    def lent(parameter: nn.Parameter) -> nn.Parameter:
        if parameter not in slices:
            parameter.data = parameter.data.to(device)
            return parameter
        if hasattr(parameter, "quant_state"):
            return parameter
        value = torch.zeros(1, dtype=parameter.dtype, device=device).expand(parameter.shape)
        made = nn.Parameter(value, requires_grad=parameter.requires_grad)
        slices.follow(parameter, made)
        return made

    replace_parameters(model, lent)
    for module in model.modules():
        for name, each in module._buffers.items():
            if each is not None:
                module._buffers[name] = each.to(device)


@torch.no_grad()
def partition(model: Model, init: Any, config: Mapping[str, Any], dtype: str, device: torch.device) -> None:
    """Divide a model's parameters, one module after the other.

    A slice of rows becomes DeepSpeed's partition without its values ever being whole anywhere; room for the whole is
    on the device for that moment alone. init: DeepSpeed's class. dtype: of the computation, and so of the parameters.
    """
    slices: dict[nn.Parameter, Any] = {}

    class Init(init):  # type: ignore[misc]
        """Where there are slices, DeepSpeed's would broadcast rank 0's values."""

        def _zero_init_param(self, param: Any) -> None:
            if param not in slices:
                super()._zero_init_param(param)
                return
            self._convert_to_deepspeed_param(param)
            param.partition()
            copy_stretch(slices.pop(param), param.ds_tensor.ds_numel, param.ds_tensor, device)

    for module in reversed(list(model.modules())):  # what is inside a module before itself
        mine = {name: each for name, each in module._parameters.items() if each is not None}
        for name, each in mine.items():
            if hasattr(each, "ds_id"):  # it is tied, and divided already
                continue
            kind = DTYPES[dtype] if each.is_floating_point() else None
            if model.slices is None or each not in model.slices:
                each.data = each.data.to(device, kind)
            elif is_quantized(module):
                whole = gathered(model.slices.take(each), device.type)
                module._parameters[name] = packed_parameter(module, quantize_later(module, whole, device))
            elif swaps_parameters(config):  # the partition is in its file before it could be filled
                each.data = gathered(model.slices.take(each), device.type).to(device, kind)
            else:
                slices[each] = model.slices.take(each)
                each.data = torch.empty(each.shape, dtype=kind or each.dtype, device=device)
        if mine:
            Init(module=module, config_dict_or_path=config)


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
