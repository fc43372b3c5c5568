"""ZeRO-3 state on NVMe: the run's own folder there, and checkpoints of what is in it.

DeepSpeed's own checkpoints leave out part of it, so that no resume is exact: with optimizer state on NVMe its
load_checkpoint restores the swapped tensors and neither the step count of the optimizer nor what is too small to swap;
with parameters there it fails (engine.py and zero/stage3.py of 0.19).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainkit.errors import TrainingError
from trainkit.files import open_regular, remove_tree
from trainkit.planner.resume import SWAPPED_STATE
from trainkit.recipe.schema import Zero3
from trainkit.trainer.checkpoint.safe_loading import only_data
from trainkit.trainer.settings import Settings

PREFIX = "trainkit-"
FOLDER = SWAPPED_STATE  # inside a checkpoint; <rank>.pt and, for each group of parameters, <rank>-<group>.pt
COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


def swap_folder(settings: Settings) -> Path | None:
    """Where this run swaps to; None for a run that does not. Two runs in one folder would read each other's tensors."""
    strategy = settings.recipe.strategy
    if not isinstance(strategy, Zero3) or strategy.nvme_path is None:
        return None
    place = hashlib.sha256(str(settings.run_dir).encode()).hexdigest()[:8]
    return Path(strategy.nvme_path).absolute() / f"{PREFIX}{settings.run_dir.name}-{place}"


@contextlib.contextmanager
def swap_space(settings: Settings) -> Iterator[None]:
    """Hold the folder for this rank; the last to leave removes it. TrainingError when it cannot be made."""
    folder = swap_folder(settings)
    if folder is None:
        yield
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        clear_abandoned(folder.parent)
        held = _lock(folder.with_name(f"{folder.name}.lock"), fcntl.LOCK_SH)
        _make_own(folder)
    except OSError as error:
        what = f"strategy.nvme_path: {error.filename or folder} cannot be used: {error.strerror}"
        raise TrainingError(what, hint="name a folder on a local disk that this user may write to") from error
    try:
        yield
    finally:
        os.close(held)
        clear_abandoned(folder.parent)


def _make_own(folder: Path) -> None:
    """Make the folder, for all ranks; OSError for one that another user, who may guess the name, has put there."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise OSError(errno.EEXIST, "another user's", str(folder))


def clear_abandoned(root: Path) -> None:
    """Remove the swap folders that no living rank holds."""
    # The kernel lets go of a lock however its holder ends.
    for lock_file in root.glob(f"{PREFIX}*.lock"):
        with contextlib.suppress(OSError):  # it is held, has just been removed, or is another user's
            held = _lock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(OSError):
                remove_tree(lock_file.with_suffix(""))
            lock_file.unlink()
            os.close(held)


def _lock(path: Path, operation: int) -> int:
    """Descriptor of the lock file at the path; BlockingIOError if it would have to wait and is not to."""
    # A lock on a file that its holder has unlinked meanwhile locks nothing: then the path names another file.
    while True:
        descriptor = open_regular(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, operation)
            if os.path.samestat(os.fstat(descriptor), path.stat()):  # not removed since it was opened
                return descriptor
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def save_swapped(engine: Any, folder: Path, rank: int) -> None:
    """Write this rank's shards, a group of parameters at a time, as much as is in memory anyway."""
    zero, place = engine.optimizer, folder / FOLDER
    place.mkdir(exist_ok=True)
    zero.checkpoint_event_prologue()
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    for index, group in enumerate(zero.fp16_groups):
        shards = [(names[id(each)], tuple(each.ds_shape), each.partition_numel()) for each in group]
        with _in_memory(zero, index) as master:
            # Clones, for a tensor is saved with the whole buffer that it may be a part of.
            state = zero.optimizer.state.get(master, {}).items()
            state = {name: each.detach().clone() if isinstance(each, Tensor) else each for name, each in state}
            saved = {"master": master.detach().clone(), "state": state, "shards": shards}
            torch.save(saved, place / f"{rank}-{index}.pt")
    rest = {
        "groups": len(zero.fp16_groups),
        "buffers": dict(engine.module.named_buffers()),
        "loss_scaler": zero.loss_scaler,
        "counters": {name: getattr(engine, name) for name in COUNTERS},
    }
    torch.save(rest, place / f"{rank}.pt")
    zero.checkpoint_event_epilogue()


def load_swapped(engine: Any, folder: Path, rank: int) -> None:
    """Read what as many ranks wrote with :func:`save_swapped` into any stage-3 engine; ValueError for another model."""
    zero, place = engine.optimizer, folder / FOLDER
    rest = _read(place / f"{rank}.pt")
    if rest["groups"] != len(zero.fp16_groups):
        raise ValueError(f"{rest['groups']} groups of parameters were saved, and there are {len(zero.fp16_groups)}")
    zero.checkpoint_event_prologue()
    for index in range(rest["groups"]):
        saved = _read(place / f"{rank}-{index}.pt")
        with _in_memory(zero, index) as master:
            master.data.copy_(saved["master"])
            zero.optimizer.state[master] = saved["state"]
            zero._reassign_or_swap_out_partitioned_parameters(index)
    zero.checkpoint_event_epilogue()
    for name, buffer in engine.module.named_buffers():
        buffer.copy_(rest["buffers"][name])
    zero.loss_scaler = rest["loss_scaler"]
    for name in COUNTERS:  # and nothing else that a checkpoint may name
        setattr(engine, name, int(rest["counters"][name]))


def swapped_weights(checkpoint: Path, ranks: int) -> dict[str, Tensor]:
    """The 32-bit weights by name, put together from the shards of all ranks."""
    place, found = checkpoint / FOLDER, {}
    groups = _read(place / "0.pt")["groups"]
    for index in range(groups):
        saved = [_read(place / f"{rank}-{index}.pt") for rank in range(ranks)]
        lengths = [length for _, _, length in saved[0]["shards"]]
        pieces = [each["master"].split(lengths) for each in saved]
        for (name, shape, _), parts in zip(saved[0]["shards"], zip(*pieces, strict=True), strict=True):
            found[name] = torch.cat(parts)[: torch.Size(shape).numel()].view(shape)  # the last shard is padded
    return found


def _read(path: Path) -> Any:
    with only_data():
        return torch.load(path, weights_only=True)


@contextlib.contextmanager
def _in_memory(zero: Any, index: int) -> Iterator[Any]:
    """The 32-bit weights of a group, with their optimizer state, read from their files and written back afterwards."""
    swaps = zero._swappable_optimizer_subgroup(index)
    if swaps:
        zero._optimizer_states_and_gradient_swap_in(index)
    try:
        yield zero.fp32_partitioned_groups_flat[index]
    finally:
        if swaps:
            zero._optimizer_states_and_gradient_swap_out(index)
