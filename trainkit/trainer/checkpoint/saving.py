"""Checkpoints: written aside, checksummed, published whole by one rename; at once, or behind the training."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from trainkit.errors import TrainingError
from trainkit.trainer.checkpoint.loading import (
    MANIFEST,
    Identity,
    complete,
    described_files,
    flush,
    generators_file,
    reason,
)
from trainkit.trainer.distributed import TIMEOUT, barrier, gather_from_ranks
from trainkit.trainer.parallel import Strategy
from trainkit.trainer.randomness import generator_states
from trainkit.trainer.settings import World

log = logging.getLogger("trainkit.trainer")


def step_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return root / f"step-{step:08d}"


class Checkpoints:
    """Those of a run, in one folder for all ranks. root: None where not all of them can see it.

    asynchronous: the state is copied at once, and a thread writes and publishes the copy. At most one checkpoint is on
    its way; the next one waits for it. The ranks' threads meet in a process group of their own, for the training's
    collectives go on meanwhile. keep: how many of the newest stay, 0 for all.
    """

    def __init__(
        self, root: Path | None, identity: Identity, world: World, *, keep: int, asynchronous: bool = False
    ) -> None:
        self.root, self.identity, self._keep, self._asynchronous = root, identity, keep, asynchronous
        own_group = asynchronous and dist.is_initialized()
        self._world = replace(world, group=dist.new_group(backend="gloo", timeout=TIMEOUT)) if own_group else world
        self._thread: Thread | None = None
        self._failure: Exception | None = None

    def save(
        self, step: int, strategy: Strategy, *, best: Mapping[str, Any] | None = None, spared: int | None = None
    ) -> None:
        """Write and publish the checkpoint of a step, as :func:`write` does. Called on every rank.

        best: of the evaluations, for the manifest. spared: the step of a checkpoint that stays besides the newest.
        """
        assert self.root is not None
        self.wait()
        content = {
            "step": step,
            "training_digest": self.identity.training_digest,
            "tokenizer": self.identity.tokenizer,
            "world_size": self.identity.world_size,
            "strategy": self.identity.strategy,
            "best": best or {},
        }
        put = partial(strategy.save_later(), group=self._world.group) if self._asynchronous else strategy.save
        later = partial(write, self.root, content, put, generator_states(), self._world, keep=self._keep, spared=spared)
        if not self._asynchronous:
            later()
            return
        self._thread = Thread(target=self._run, args=(later,), name="checkpoint")
        self._thread.start()

    def _run(self, later: Callable[[], None]) -> None:
        try:
            later()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is raised again where the training meets it
            self._failure = error

    def wait(self) -> None:
        """Until nothing is on its way; raises what went wrong with it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    @contextmanager
    def outlasting_failure(self) -> Iterator[None]:
        """When what is inside fails, the checkpoint on its way is still finished: it is of a sound step before."""
        try:
            yield
        except Exception:
            try:
                self.wait()
            except Exception as error:  # noqa: BLE001 - the run has failed of something else
                log.warning("the checkpoint on its way is lost too: %s", error)
            raise


def write(
    root: Path,
    content: Mapping[str, Any],
    put: Callable[[Path], None],
    generators: bytes,
    world: World,
    *,
    keep: int,
    spared: int | None,
) -> None:
    """Write and publish a checkpoint. Called on every rank; does nothing if it is there already.

    content: its manifest. put: writes this rank's state into a folder. generators: the states of this rank's.

    TrainingError when it cannot be written; what was saved before stays as it is.
    """
    step = content["step"]
    final, scratch = step_folder(root, step), root / f".tmp-step-{step:08d}"
    if any(gather_from_ranks((final / MANIFEST).exists(), world)):
        return
    try:
        if world.rank == 0:
            _make_room(root, scratch)
        barrier(world)
        put(scratch)
        generators_file(scratch, world.rank).write_bytes(generators)
        barrier(world)
        files = _flushed_files(scratch, world)
        if world.rank == 0:
            _publish(scratch, final, {**content, "files": files})
            _prune(root, keep, spared)
        barrier(world)
    except (OSError, RuntimeError, CheckpointException) as error:  # torch's writers raise RuntimeError on a full disk
        free = shutil.disk_usage(root).free / 2**20 if root.exists() else 0
        shutil.rmtree(scratch, ignore_errors=True)
        raise TrainingError(
            f"the checkpoint of step {step} cannot be written to {root} ({free:.0f} MiB free): {reason(error)}",
            hint="those saved before are whole; make room, or point output.root at another disk",
        ) from error


def _make_room(root: Path, scratch: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for leftover in root.glob(".tmp-*"):  # of an attempt that was killed while it wrote
        shutil.rmtree(leftover)
    scratch.mkdir()


def _flushed_files(folder: Path, world: World) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every file, once all of them are safe from a power cut."""
    if world.rank == 0:
        elsewhere = [rank for rank in range(world.size) if not generators_file(folder, rank).exists()]
        if elsewhere:
            raise TrainingError(
                f"{folder} is not one folder for all ranks: what {', '.join(map(str, elsewhere))} wrote is not there",
                hint="set output.root to a folder that all nodes share",
            )
    files = described_files(folder, world, flushed=True)
    if world.rank == 0:
        for inner in [path for path in folder.rglob("*") if path.is_dir()]:
            flush(inner)
    return files


def _publish(scratch: Path, final: Path, manifest: Mapping[str, Any]) -> None:
    (scratch / MANIFEST).write_text(json.dumps(manifest, indent=1))
    flush(scratch / MANIFEST)
    flush(scratch)
    if final.exists():  # a folder without a manifest: not a checkpoint
        shutil.rmtree(final)
    scratch.rename(final)
    flush(final.parent)  # only now may an older one go


def _prune(root: Path, keep: int, spared: int | None) -> None:
    stays = step_folder(root, spared) if spared is not None else None
    for path in [path for path in complete(root)[:-keep] if path != stays] if keep else []:
        doomed = path.rename(path.with_name(f".tmp-old-{path.name}"))  # never half a checkpoint under its own name
        shutil.rmtree(doomed)
