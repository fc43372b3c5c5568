"""Strategies of plain PyTorch: the base of all engines, one process, and DDP with a whole model on each rank."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from trainkit.recipe.schema import Ddp as DdpSettings
from trainkit.trainer.checkpoint.pieces import Pieces
from trainkit.trainer.checkpoint.safe_loading import StateReader, only_data
from trainkit.trainer.metrics.memory_breakdown import local, state_tensors
from trainkit.trainer.models.adapters import kept_tensors
from trainkit.trainer.models.base import Model
from trainkit.trainer.models.quantized import scales
from trainkit.trainer.optim import DTYPES, build_optimizer, clip_gradients
from trainkit.trainer.parallel import Strategy
from trainkit.trainer.settings import Settings, World

STATE = "state"  # torch.distributed.checkpoint's folder inside a checkpoint
WORTH_LOCKING = 1 << 16  # bytes


class Engine(Strategy):
    """An optimizer and a loss scaler over a model whose gradients are already reduced when `update` is called."""

    def __init__(self, model: nn.Module, settings: Settings, device: torch.device) -> None:
        self.model = model
        # The model by its own names.
        self._plain: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
        self.optimizer = build_optimizer(model, settings.recipe.optimizer)
        # Only fp16 needs loss scaling, because its gradients underflow; a disabled scaler only steps.
        self._new_scaler = partial(torch.amp.GradScaler, device.type, enabled=settings.dtype == "fp16")
        self.scaler = self._new_scaler()
        # Frozen parameters (LoRA) have no gradients to clip.
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # What is clipped together, and the process groups that have parts of it which no DTensor knows of.
        self._divided: Sequence[tuple[Sequence[nn.Parameter], Any]] = [(self._parameters, None)]
        self._max_norm = settings.recipe.train.max_grad_norm
        self._adapts = settings.recipe.peft.kind != "none"
        self._copies = HostCopies(keeps=device.type == "cuda")
        self._one = torch.ones((), device=device)
        self._skipped: Tensor | int = 0

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def update(self, learning_rate: float) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.scaler.unscale_(self.optimizer)
        norm = clip_gradients(self._divided, self._max_norm)
        before = self.scaler.scale(self._one) if self.scaler.is_enabled() else None
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if before is not None:  # counted on the device: reading it would wait for the step
            self._skipped = self._skipped + (self.scaler.scale(self._one) < before)  # it backs off after a skipped one
        self.optimizer.zero_grad(set_to_none=True)  # so that gradients take no memory in the next forward pass
        return norm

    def abandon_step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.state.clear()  # some tensors may have a part of theirs, and would never get the rest
        self.scaler = self._new_scaler()  # it knows which of its calls in a step were made

    def skipped_steps(self) -> int:
        return int(self._skipped)

    def held(self) -> Mapping[str, Iterable[Tensor]]:
        return {
            "parameters": (*self.model.parameters(), *scales(self.model)),
            "gradients": [parameter.grad for parameter in self._parameters if parameter.grad is not None],
            "optimizer_state": state_tensors(self.optimizer),
        }

    def save(self, folder: Path) -> None:
        """Write the state with torch.distributed.checkpoint, each rank its own shards; of adapters without the base."""
        write_state(self._in_file(self._state(whole=not self._adapts)), folder)

    def save_later(self) -> Callable[..., None]:
        return partial(write_state, self._copies(self._in_file(self._state(whole=not self._adapts))))

    def load(self, folder: Path) -> None:
        with quiet(), only_data():
            reader = StateReader(folder / STATE)
            saved = reader.read_metadata().state_dict_metadata
            frozen = (name for name, each in self._plain.named_parameters() if not each.requires_grad)
            # Older releases saved the frozen weights beside adapters, too.
            whole = not self._adapts or any(f"model.{name}" in saved for name in frozen)
            state = self._state(whole=whole)
            read = self._in_file(state)
            state_dict_loader.load(read, storage_reader=reader)  # in place, each rank its own shards
            state = with_own(read, state)
        if whole:
            model, optimizer = state["model"], state["optimizer"]
            set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        else:
            set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self._skipped = state["skipped"]

    def _in_file(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state as it is in a checkpoint: where that lies otherwise than here, with `Pieces` of the same memory."""
        return state

    def _state(self, *, whole: bool) -> dict[str, Any]:
        """The content of a checkpoint. whole: including frozen weights."""
        model: dict[str, Any]
        if whole:
            model, optimizer = get_state_dict(self.model, self.optimizer)
        else:
            model, optimizer = kept_tensors(self._plain), get_optimizer_state_dict(self.model, self.optimizer)
        counters = {"scaler": self.scaler.state_dict(), "skipped": int(self._skipped)}
        return {"model": model, "optimizer": optimizer, **counters}


def with_own(read: Any, state: Any) -> Any:
    """What was read, with the state's own tensors in place of their pieces, which were read in place."""
    if isinstance(read, dict):
        return {key: with_own(each, state.get(key)) for key, each in read.items()}
    return state if isinstance(read, Pieces) else read


class Single(Engine):
    """One process, one device: the model as it is."""

    def __init__(self, model: Model, settings: Settings, world: World, device: torch.device) -> None:
        super().__init__(model.to(device), settings, device)


class Ddp(Engine):
    """DistributedDataParallel, with one all-reduce for each optimizer step."""

    def __init__(self, model: Model, settings: Settings, world: World, device: torch.device) -> None:
        asked = cast("DdpSettings", settings.recipe.strategy)
        self._replica = DistributedDataParallel(
            model.to(device),
            device_ids=[device.index] if device.type == "cuda" else None,
            bucket_cap_mb=asked.bucket_mb,
            find_unused_parameters=asked.find_unused_parameters,
            gradient_as_bucket_view=True,  # gradients are not held twice
        )
        if asked.reduce_dtype == "same" and settings.dtype != "fp32":
            dtype = DTYPES[settings.dtype]
            # A lambda, for DDP reads annotations and takes none that are text.
            self._replica.register_comm_hook(None, lambda _, bucket: averaged(bucket, dtype, world.size))
        super().__init__(self._replica, settings, device)

    def micro_step(self, *, last: bool) -> AbstractContextManager[object]:
        """Gradients are averaged in the last micro step only."""
        return nullcontext() if last else self._replica.no_sync()


def averaged(bucket: Any, dtype: torch.dtype, ranks: int) -> Any:
    """The mean of a bucket of DDP's gradients over the ranks, exchanged in a format; a future, as its hooks give."""
    # torch's own for bf16 (bf16_compress_hook) is for NCCL alone.
    sent = bucket.buffer().to(dtype).div_(ranks)
    work = dist.all_reduce(sent, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: bucket.buffer().copy_(future.value()[0]))


def write_state(state: dict[str, Any], folder: Path, group: Any = None) -> None:
    """Write a nest of tensors and values below a checkpoint's folder, each rank its own parts. Called on every rank."""
    writer = _Writer(folder / STATE)
    writer.fs = _Folder()
    with quiet():
        state_dict_saver.save(state, storage_writer=writer, process_group=group)


class _Writer(FileSystemWriter):
    """torch's writer, without the local folder's path in its metadata: a checkpoint may be uploaded to the Hub."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)


class _Folder(FileSystem):
    """torch's file system, which must not create parent folders again: a link may have replaced one."""

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        Path(path).mkdir(exist_ok=True)


def quiet() -> warnings.catch_warnings[None]:
    """torch warns that one process saves alone, which is what is meant."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)


class HostCopies:
    """Copies a nest of mappings and lists, with the tensors in it.

    keeps: whether the copies' memory is kept for the next time, page-locked where it is copied to from a GPU: fresh
    pages cost more than the copy, and from a GPU to pages that may move everything is copied twice. Whoever has the
    last copies must be done with them by then.
    """

    def __init__(self, *, keeps: bool) -> None:
        self._keeps = keeps
        self._kept: dict[tuple[object, ...], Tensor] = {}

    def __call__(self, state: Any) -> Any:
        """The copy, finished."""
        made = self._copied(state, ())
        if self._keeps and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.current_stream().synchronize()
        return made

    def _copied(self, value: Any, place: tuple[object, ...]) -> Any:
        # Copies also of what is on the host already: counters of steps, and all that is offloaded, train on.
        if isinstance(value, Pieces):
            numbers = iter(range(len(value.boxes)))
            return value.each(lambda box: self._tensor(box, (*place, next(numbers))))
        if isinstance(value, Tensor):
            return self._tensor(value.detach(), place)
        if isinstance(value, dict):
            return {key: self._copied(each, (*place, key)) for key, each in value.items()}
        if isinstance(value, list):
            return [self._copied(each, (*place, index)) for index, each in enumerate(value)]
        return value

    def _tensor(self, value: Tensor, place: tuple[object, ...]) -> Tensor:
        kept = self._kept.get(place)
        if kept is not None and (kept.shape, kept.dtype) == (value.shape, value.dtype):
            local(kept).copy_(local(value), non_blocking=True)
            return kept
        made = value.to("cpu", copy=True)
        if self._keeps:
            if value.is_cuda and made.nbytes >= WORTH_LOCKING:
                made = page_locked(made)
            self._kept[place] = made
        return made


def page_locked(tensor: Tensor) -> Tensor:
    """The same in page-locked memory, or as it is where the system gives none."""
    try:
        locked = local(tensor).pin_memory()
    except RuntimeError:  # a limit of the system: the copies are slower, and as right
        return tensor
    if isinstance(tensor, DTensor):
        tensor._local_tensor = locked  # no constructor takes shards of a mesh of GPUs that are on the host
        return tensor
    return locked
