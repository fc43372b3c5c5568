"""Checkpoints: written aside, then checksummed behind the training, and published whole by one rename."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from trainkit.errors import TrainingError, refusal
from trainkit.files import refuse_links, remove_tree
from trainkit.runner.rundir.layout import MANIFEST
from trainkit.runner.rundir.listing import checksum
from trainkit.trainer.checkpoint.manifest import Identity, complete, described_files, flush, generators_file, reason
from trainkit.trainer.checkpoint.pushing import Pushes
from trainkit.trainer.distributed import barrier, gather_from_ranks
from trainkit.trainer.parallel import Strategy
from trainkit.trainer.randomness import generator_states
from trainkit.trainer.settings import Settings, World

log = logging.getLogger("trainkit.trainer")
# torch's words for a file that does not take what it writes say nothing of the reason.
_OF_WRITER = re.compile(r"unexpected pos \d+ vs \d+|PytorchStreamWriter")
PROBE = 1 << 16  # bytes: more than is left in a file's last block


def refused_write(folder: Path) -> str | None:
    """Why a file of a few kilobytes cannot be written into a folder; None where it can."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(PROBE))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return str(error)
    return None


def step_folder(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def _make_scratch(scratch: Path) -> None:
    """A folder beside the checkpoints; in the run directory itself, for a link in its place may lead to another run.

    A run directory that was removed meanwhile is made anew: what the run has learned is not to go with it.
    """
    root = scratch.parent
    root.parent.mkdir(parents=True, exist_ok=True)
    run = os.open(root.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        with suppress(FileExistsError):
            os.mkdir(root.name, dir_fd=run)
        os.mkdir(Path(root.name, scratch.name), dir_fd=run)
    finally:
        os.close(run)


class Checkpoints:
    """Those of a run, in one folder for all ranks. root: None where not all of them can see it.

    The training waits for what the strategy writes, or with `checkpoint.asynchronous` for a copy in memory; a thread
    does the rest: it writes the copy, reads what was written for the checksums, waits for the disk and publishes. At
    most one checkpoint is on its way; the next one, and the end, wait for it.
    """

    def __init__(self, settings: Settings, root: Path | None, identity: Identity, world: World) -> None:
        asked = settings.recipe.checkpoint
        self.root, self.identity, self._keep = root, identity, asked.keep
        self._world, self._later = world, asked.asynchronous
        self._timeout = timedelta(seconds=settings.recipe.hang.collective_seconds)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._on_its_way: Future[object] | None = None
        repo = asked.push_to_hub.repo
        self.pushes = Pushes(settings, repo) if repo is not None and world.rank == 0 else None

    def save(
        self,
        step: int,
        strategy: Strategy,
        *,
        best: Mapping[str, Any] | None = None,
        spared: int | None = None,
        bookmark: str = "",
    ) -> None:
        """Write and publish the checkpoint of a step. Called on every rank.

        best: of the evaluations, for the manifest. spared: the step of a checkpoint that stays with the newest.
        bookmark: of the step's batch, where its data is a stream.
        """
        self.wait()
        if self._world.group is None and dist.is_initialized():
            # The ranks' threads meet in a group of their own, for the training's collectives go on meanwhile.
            self._world = replace(self._world, group=dist.new_group(backend="gloo", timeout=self._timeout))
        content = {"step": step, **asdict(self.identity), "best": best or {}}
        content |= {"stream": bookmark} if bookmark else {}
        put = partial(strategy.save_later(), group=self._world.group) if self._later else strategy.save
        # The generators' states are taken here, before the next step draws from them.
        write = partial(self._write, step, put, generator_states())
        finish = partial(self._finish, content, spared)
        if self._later:
            self._on_its_way = self._thread.submit(lambda: write() and finish())
        elif write():
            self._on_its_way = self._thread.submit(finish)

    def wait(self) -> None:
        """Until nothing is on its way; raises what went wrong with it."""
        pending, self._on_its_way = self._on_its_way, None
        if pending is not None:
            pending.result()

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
            if self.pushes is not None:
                self.pushes.abandon()
            raise

    def _write(self, step: int, put: Callable[[Path], None], generators: bytes) -> bool:
        """A checkpoint's files, aside; False if it is there already. put: writes this rank's state into a folder."""
        assert self.root is not None
        root, world, scratch = self.root, self._world, self._scratch(step)
        with self._explained(step):
            refuse_links(root.parent)
            if any(gather_from_ranks((step_folder(root, step) / MANIFEST).exists(), world)):
                return False
            if world.rank == 0:
                refuse_links(root.parent)  # once more: the ranks have waited for one another
                for leftover in root.glob(".tmp-*"):  # of an attempt that was killed while it wrote
                    remove_tree(leftover)
                _make_scratch(scratch)
            barrier(world)
            # Between the barriers, for no rank writes before the folder is there, and then rank 0 lists what all wrote.
            refuse_links(root.parent)  # and again: DeepSpeed makes every folder that is missing
            put(scratch)
            generators_file(scratch, world.rank).write_bytes(generators)
        return True

    def _finish(self, content: Mapping[str, Any], spared: int | None) -> None:
        """What was written becomes the checkpoint of a manifest, once its checksums are known and the disk has it."""
        world, step = self._world, content["step"]
        with self._explained(step):
            barrier(world)
            files = described_files(self._scratch(step), world, flushed=True)
            if world.rank == 0:
                self._publish(self._scratch(step), {**content, "files": files}, spared)
            barrier(world)
        if self.pushes is not None and self.root is not None:
            self.pushes.saved(step_folder(self.root, step))

    def _scratch(self, step: int) -> Path:
        assert self.root is not None
        return self.root / f".tmp-step-{step:08d}"

    @contextmanager
    def _explained(self, step: int) -> Iterator[None]:
        """TrainingError where a checkpoint cannot be written: why, as this rank sees it. What was begun is removed."""
        try:
            yield
        except (OSError, RuntimeError, CheckpointException) as error:  # torch raises RuntimeError on a full disk
            scratch = self._scratch(step)
            root = scratch.parent
            refused = refused_write(scratch if scratch.exists() else root)
            if refused is None and not isinstance(error, OSError) and (known := refusal(error)):
                # What was begun is left to the rank that failed: another may still be about to finish it.
                what = f"the checkpoint of step {step} is not finished: {known[0]}"
                raise TrainingError(what, hint=known[1]) from error
            free = shutil.disk_usage(root).free / 2**20 if root.exists() else 0
            if not root.parent.is_symlink():  # to somebody else's folder
                shutil.rmtree(scratch, ignore_errors=True)
            why = reason(error) if isinstance(error, OSError) or refused is None else refused
            if refused is None and _OF_WRITER.search(why):  # another rank has made room meanwhile by what it removed
                why = f"the disk did not take what torch wrote: No space left on device, or a fault of the disk ({why})"
            raise TrainingError(
                f"the checkpoint of step {step} cannot be written to {root} ({free:.0f} MiB free): {why}",
                hint="those saved before are whole; make room, or point output.root at another disk",
            ) from error

    def _publish(self, scratch: Path, manifest: Mapping[str, Any], spared: int | None) -> None:
        """Give the folder its name once the disk has everything: a power cut leaves a whole checkpoint or none."""
        final = step_folder(scratch.parent, manifest["step"])
        ranks = range(self._world.size)
        elsewhere = [str(rank) for rank in ranks if not generators_file(scratch, rank).exists()]
        if elsewhere:
            raise TrainingError(
                f"{scratch} is not one folder for all ranks: what {', '.join(elsewhere)} wrote is not there",
                hint="set output.root to a folder that all nodes share",
            )
        (scratch / MANIFEST).write_text(json.dumps({**manifest, "checksum": checksum(manifest)}, indent=1))
        # The other files are flushed already, but not the folders' entries for them.
        for path in (scratch / MANIFEST, *(path for path in scratch.rglob("*") if path.is_dir()), scratch):
            flush(path)
        refuse_links(final.parent.parent)  # once more: writing takes a while
        if final.exists():  # a folder without a manifest: not a checkpoint
            remove_tree(final)
        scratch.rename(final)
        flush(final.parent)  # only now may an older one go
        stays = step_folder(final.parent, spared) if spared is not None else None
        # A link that has taken the folder's place may lead to more disk, or to checkpoints of somebody else.
        removes = self._keep and not final.parent.is_symlink()
        for path in complete(final.parent)[: -self._keep] if removes else []:
            if path != stays:  # renamed before: never half a checkpoint under its own name
                shutil.rmtree(path.rename(path.with_name(f".tmp-old-{path.name}")))
