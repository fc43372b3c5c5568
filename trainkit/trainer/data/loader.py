"""Load batches and copy them to the device: on CUDA in a separate stream, in parallel with the computation."""

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
from trainkit.seeds import derived_seed
from trainkit.trainer.data.sampler import SampleOrder, positions_of_rank
from trainkit.trainer.data.source import Batch, Samples


class Transfer:
    """Moves the inputs of batches to a device.

    The host runs ahead of a GPU: when it asks for the next batch, the GPU still computes the previous step. A copy on
    the computation's stream would wait for that; in a second stream it runs in parallel, from page-locked memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inputs on the device; kernels launched from now on wait until they are complete."""
        if self._stream is None:
            return {name: values.to(self._device) for name, values in inputs.items()}
        with torch.cuda.stream(self._stream):
            moved = {name: values.to(self._device, non_blocking=True) for name, values in inputs.items()}
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._stream)
        for values in moved.values():
            # Their memory belongs to the second stream and must not be reused before the computation has finished with
            # it.
            values.record_stream(computing)
        return moved


def training_batches(
    samples: Samples, order: SampleOrder, batch: SolvedBatch, rank: int, *, steps: range, data: Data, pin: bool
) -> Iterator[Batch]:
    """One batch of micro x accumulation samples per step. TrainingError for a sample that cannot be read."""
    positions, pinned = positions_of_rank(batch, rank), pin and data.pin_memory
    draws = (order.indices(step, positions.start, positions.stop) for step in steps)
    if not data.workers and not pinned:  # torch's loader would only add overhead to each step
        yield from (samples[draw] for draw in draws)
        return
    if data.workers:
        require_shared_memory(data.workers)
        _place_sockets()
    # One iterator serves the whole run: workers start once, and prefetch across the end of an epoch.
    loader: DataLoader[Any] = DataLoader(
        cast("Dataset[Any]", Samples(len(samples), partial(_guarded, samples))),
        sampler=draws,
        batch_size=None,  # the sampler already yields whole lists
        pin_memory=pinned,
        worker_init_fn=_obey_signals,
        # A separate generator for the workers' seeds: the training's generator must not depend on workers.
        generator=torch.Generator().manual_seed(derived_seed(order.seed, "workers", rank, steps.start)),
        num_workers=data.workers,
        prefetch_factor=data.prefetch_factor,
    )
    for found in loader:
        if isinstance(found, TrainingError):
            raise found
        yield found


def require_shared_memory(workers: int) -> None:
    """TrainingError if processes cannot share memory: torch's loader would end in a traceback."""
    try:
        torch.multiprocessing.get_context().Lock()
    except OSError as error:
        why = f"shared memory (/dev/shm) cannot be used: {error.strerror}"
        what = f"data.workers is {workers}, and no worker can start: {why}"
        raise TrainingError(what, hint="allow this user to write to /dev/shm, or set data.workers to 0") from error


def _place_sockets() -> None:
    """Have multiprocessing create its sockets in a system folder if the temporary folder's path is too long for them.

    Raises TrainingError if there is none: workers would wait for ever.
    """
    folder = tempfile.gettempdir()
    if room_for_sockets(folder) >= 0:
        return
    other = next((each for each in ("/tmp", "/var/tmp") if os.access(each, os.W_OK | os.X_OK)), None)  # noqa: S108
    if other is None:
        what = f"the path of the temporary folder is too long for the sockets of loader processes: {folder}"
        raise TrainingError(what, hint="set TMPDIR under env to a shorter folder, or data.workers to 0")
    tempfile.tempdir = other
    try:
        multiprocessing.util.get_temp_dir()  # set once; child processes inherit it
    finally:
        tempfile.tempdir = folder


def _guarded(samples: Samples, indices: Sequence[int]) -> Any:
    """Return errors as values: raised in a worker, they would arrive with its traceback."""
    try:
        return samples[indices]
    except TrainingError as error:
        return error


def _obey_signals(worker: int) -> None:
    """A worker ends on SIGTERM."""
    # It inherits handlers that only record the signal, and it has nothing to save.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # A scheduler may send it to every process of a job; its default action would end the worker.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the trainer decides
