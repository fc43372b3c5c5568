"""Batches on their way to the device: on CUDA beside the computation, on a stream of their own."""

from __future__ import annotations

import multiprocessing.util
import os
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from trainkit.errors import TrainingError
from trainkit.files import room_for_sockets
from trainkit.launch_plan.model import SolvedBatch
from trainkit.recipe.schema import Data
from trainkit.trainer.data.sampler import SampleOrder, positions_of_rank
from trainkit.trainer.data.source import Batch, Samples
from trainkit.trainer.randomness import derived_seed


class Transfer:
    """Moves the inputs of batches to a device.

    The host runs ahead of a GPU: when it asks for the next batch, the GPU still computes the step before. A copy on
    the computation's own stream would wait for that; on a second one it is done meanwhile, from page-locked memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inputs on the device; what is launched from now on finds them whole."""
        if self._stream is None:
            return {name: values.to(self._device) for name, values in inputs.items()}
        with torch.cuda.stream(self._stream):
            moved = {name: values.to(self._device, non_blocking=True) for name, values in inputs.items()}
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._stream)
        for values in moved.values():
            # Their memory belongs to the second stream: not to be used again before the computation is done with it.
            values.record_stream(computing)
        return moved


def training_batches(
    samples: Samples, order: SampleOrder, batch: SolvedBatch, rank: int, *, steps: range, data: Data, pin: bool
) -> Iterator[Batch]:
    """One batch of micro x accumulation samples for each step. TrainingError for a sample that cannot be read."""
    positions, pinned = positions_of_rank(batch, rank), pin and data.pin_memory
    draws = (order.indices(step, positions.start, positions.stop) for step in steps)
    if not data.workers and not pinned:  # torch's loader would only add its own time to each step
        yield from (samples[draw] for draw in draws)
        return
    if data.workers:
        require_shared_memory(data.workers)
        _place_sockets()
    # One iterator serves the whole run, so workers start once and persist, and stay ahead over the end of an epoch.
    loader: DataLoader[Any] = DataLoader(
        cast("Dataset[Any]", Samples(len(samples), partial(_guarded, samples))),
        sampler=draws,
        batch_size=None,  # the sampler already hands over whole lists
        pin_memory=pinned,
        worker_init_fn=_obey_signals,
        # Of its own: the workers' seeds come from it, and the training's generator should not depend on workers.
        generator=torch.Generator().manual_seed(derived_seed(order.seed, "workers", rank, steps.start)),
        num_workers=data.workers,
        prefetch_factor=data.prefetch_factor,
    )
    for found in loader:
        if isinstance(found, TrainingError):
            raise found
        yield found


def require_shared_memory(workers: int) -> None:
    """TrainingError where processes can share no memory: torch's loader would end in a traceback of its own."""
    try:
        torch.multiprocessing.get_context().Lock()
    except OSError as error:
        why = f"shared memory (/dev/shm) cannot be used: {error.strerror}"
        what = f"data.workers is {workers}, and no worker can start: {why}"
        raise TrainingError(what, hint="let this user write to /dev/shm, or set data.workers to 0") from error


def _place_sockets() -> None:
    """Have multiprocessing put its sockets into a system folder where the temporary one leaves them no room.

    Raises TrainingError where there is none: workers would wait for ever.
    """
    folder = tempfile.gettempdir()
    if room_for_sockets(folder) >= 0:
        return
    other = next((each for each in ("/tmp", "/var/tmp") if os.access(each, os.W_OK | os.X_OK)), None)  # noqa: S108
    if other is None:
        what = f"the path of the temporary folder leaves no room for the sockets of loader processes: {folder}"
        raise TrainingError(what, hint="set TMPDIR under env to a shorter folder, or data.workers to 0")
    tempfile.tempdir = other
    try:
        multiprocessing.util.get_temp_dir()  # once for all, in the processes that come from this one, too
    finally:
        tempfile.tempdir = folder


def _guarded(samples: Samples, indices: Sequence[int]) -> Any:
    """Errors that name their cause, as values: raised in a worker, they would arrive with its traceback."""
    try:
        return samples[indices]
    except TrainingError as error:
        return error


def _obey_signals(worker: int) -> None:
    """A worker ends on SIGTERM."""
    # It inherits handlers that only take note, and it has nothing to save.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # A scheduler may send it to every process of a job; by default it would end the worker.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the trainer decides
