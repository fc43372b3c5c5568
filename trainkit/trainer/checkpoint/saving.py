"""Checkpoints: written to a temporary folder, checksummed in the background, and published by one rename."""

from __future__ import annotations

import json
import logging
import os
import platform
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
from trainkit.machine.host import available_memory
from trainkit.runner.rundir.layout import MANIFEST
from trainkit.runner.rundir.listing import checksum
from trainkit.text import format_memory
from trainkit.trainer.checkpoint.manifest import Identity, complete, described_files, flush, generators_file, reason
from trainkit.trainer.checkpoint.uploads import Copies, HubUploads, Uploads
from trainkit.trainer.distributed import barrier, gather_from_ranks
from trainkit.trainer.metrics.memory_breakdown import local
from trainkit.trainer.parallel import Strategy
from trainkit.trainer.randomness import generator_states
from trainkit.trainer.settings import Settings, World

log = logging.getLogger("trainkit.trainer")
# torch's messages for a failed write do not give the reason.
_OF_WRITER = re.compile(r"unexpected pos \d+ vs \d+|PytorchStreamWriter")
SHARE = 0.8  # of the machine's free memory that copies of the state may take
PROBE = 1 << 16  # bytes: more than fits into the rest of a file's last block


def refused_write(folder: Path) -> str | None:
    """Why a file of a few kilobytes cannot be written into a folder; None if it can."""
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
    """Create a temporary folder beside the checkpoints; in the run directory itself, never through a link.

    A run directory that was removed during the run is created again, so that the trained weights are not lost.
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
    """The checkpoints of a run, in one folder for all ranks. root: None if not all ranks can see it.

    Training waits for a copy in the machine's memory, or where there is too little of it while the strategy writes
    (`checkpoint.asynchronous`). A thread does the rest: it writes the copy, computes the checksums from the files,
    waits for the disk and publishes. At most one checkpoint is in progress; the next one, and the end, wait for it.
    """

    def __init__(self, settings: Settings, root: Path | None, identity: Identity, world: World) -> None:
        asked = settings.recipe.checkpoint
        self.root, self.identity, self._keep = root, identity, asked.keep
        self._world, self._later = world, asked.asynchronous
        self._timeout = timedelta(seconds=settings.recipe.hang.collective_seconds)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._on_its_way: Future[object] | None = None
        self.reporters: Mapping[str, str] = {}  # ids of the runs elsewhere that get the metrics, by reporter
        self.uploads: list[Uploads] = []  # on rank 0
        if world.rank == 0:
            self.uploads += [HubUploads(settings, repo)] if (repo := asked.push_to_hub.repo) is not None else []
            self.uploads += [Copies(settings, address)] if (address := asked.copy_to) is not None else []

    def save(
        self,
        step: int,
        strategy: Strategy,
        *,
        best: Mapping[str, Any] | None = None,
        spared: int | None = None,
        loader_state: str = "",
        last: bool = False,
    ) -> None:
        """Write and publish the checkpoint of a step. Called on every rank.

        best: of the evaluations, for the manifest. spared: the step of a checkpoint that is kept beside the newest.
        loader_state: of the step's batch, if the data is a stream. last: whether no step follows, which a copy of the
        state would let go on.
        """
        if self._world.rank == 0 and self._on_its_way is not None and not self._on_its_way.done():
            log.info("training waits for the checkpoint before that of step %d, which is still being written", step)
        self.wait()
        if self._world.group is None and dist.is_initialized():
            # The threads use a separate process group, because the training's collectives go on at the same time.
            self._world = replace(self._world, group=dist.new_group(backend="gloo", timeout=self._timeout))
        content = {"step": step, **asdict(self.identity), "best": best or {}}
        content["folder"] = os.getcwd()  # noqa: PTH109 - from which the run's relative paths start
        content |= {"stream": loader_state} if loader_state else {}
        content |= {"reporters": dict(self.reporters)} if self.reporters else {}
        if self._later is None and not last:
            self._later = self._holds_copy(strategy)
        later = strategy.save_later() if self._later and not last else None
        put = strategy.save if later is None else partial(later, group=self._world.group)
        # The generators' states are copied here, before the next step draws from them.
        write = partial(self._write, step, put, generator_states())
        finish = partial(self._finish, content, spared)
        if later is not None:
            self._on_its_way = self._thread.submit(lambda: write() and finish())
        elif write():
            self._on_its_way = self._thread.submit(finish)

    def _holds_copy(self, strategy: Strategy) -> bool:
        """Whether the memory of every machine holds the copies of its ranks, with room to spare; the same on all."""
        held = strategy.held()
        size = sum(local(each).nbytes for part in ("parameters", "optimizer_state") for each in held.get(part, ()))
        known = gather_from_ranks((platform.node(), size), self._world)
        copies, free = sum(each for node, each in known if node == platform.node()), available_memory()
        if copies > SHARE * free and self._world.local_rank == 0:
            what = "checkpoints are written while training waits: %s for copies do not fit in %s of free memory"
            log.info(what, format_memory(copies), format_memory(free))
        return all(gather_from_ranks(copies <= SHARE * free, self._world))

    def wait(self) -> None:
        """Wait until no checkpoint is in progress; raises its error."""
        pending, self._on_its_way = self._on_its_way, None
        if pending is not None:
            pending.result()

    @contextmanager
    def outlasting_failure(self) -> Iterator[None]:
        """If the block fails, the checkpoint in progress is still finished: it belongs to an earlier, sound step."""
        try:
            yield
        except Exception:
            try:
                self.wait()
            except Exception as error:  # noqa: BLE001 - the run has failed of something else
                log.warning("the checkpoint in progress is lost too: %s", error)
            for uploads in self.uploads:
                uploads.abandon()
            raise

    def _write(self, step: int, put: Callable[[Path], None], generators: bytes) -> bool:
        """Write a checkpoint's files to the temporary folder; False if it exists already.

        put: writes this rank's state.
        """
        assert self.root is not None
        root, world, scratch = self.root, self._world, self._scratch(step)
        with self._explained(step):
            refuse_links(root.parent)
            if any(gather_from_ranks((step_folder(root, step) / MANIFEST).exists(), world)):
                return False
            if world.rank == 0:
                refuse_links(root.parent)  # once more, because the ranks have waited for one another
                for leftover in root.glob(".tmp-*"):  # left by an attempt that was killed while writing
                    remove_tree(leftover)
                _make_scratch(scratch)
            barrier(world)
            # Between barriers: no rank writes before the folder exists, and rank 0 lists the files after all have
            # written.
            refuse_links(root.parent)  # again, because DeepSpeed creates every missing folder
            put(scratch)
            generators_file(scratch, world.rank).write_bytes(generators)
        return True

    def _finish(self, content: Mapping[str, Any], spared: int | None) -> None:
        """Turn the written files into a checkpoint: checksums, wait for the disk, manifest, publish."""
        world, step = self._world, content["step"]
        with self._explained(step):
            barrier(world)
            files = described_files(self._scratch(step), world, flushed=True)
            if world.rank == 0:
                self._publish(self._scratch(step), {**content, "files": files}, spared)
            barrier(world)
        assert self.root is not None
        for uploads in self.uploads:
            uploads.saved(step_folder(self.root, step))

    def _scratch(self, step: int) -> Path:
        assert self.root is not None
        return self.root / f".tmp-step-{step:08d}"

    @contextmanager
    def _explained(self, step: int) -> Iterator[None]:
        """Turn a failed write into a TrainingError with this rank's reason, and remove the incomplete files."""
        try:
            yield
        except (OSError, RuntimeError, CheckpointException) as error:  # torch raises RuntimeError on a full disk
            scratch = self._scratch(step)
            root = scratch.parent
            refused = refused_write(scratch if scratch.exists() else root)
            if refused is None and not isinstance(error, OSError) and (known := refusal(error)):
                # The failed rank removes the incomplete files: another may still be finishing its part.
                what = f"the checkpoint of step {step} is not finished: {known[0]}"
                raise TrainingError(what, hint=known[1]) from error
            free = shutil.disk_usage(root).free / 2**20 if root.exists() else 0
            if not root.parent.is_symlink():  # to another run's folder
                shutil.rmtree(scratch, ignore_errors=True)
            why = reason(error) if isinstance(error, OSError) or refused is None else refused
            if refused is None and _OF_WRITER.search(why):  # another rank has just freed space by removing its files
                why = f"torch's write failed: No space left on device, or a disk error ({why})"
            raise TrainingError(
                f"the checkpoint of step {step} cannot be written to {root} ({free:.0f} MiB free): {why}",
                hint="earlier checkpoints are intact; free space, or set output.root to another disk",
            ) from error

    def _publish(self, scratch: Path, manifest: Mapping[str, Any], spared: int | None) -> None:
        """Rename the folder once everything is on disk: after a power cut there is a complete checkpoint or none."""
        final = step_folder(scratch.parent, manifest["step"])
        ranks = range(self._world.size)
        elsewhere = [str(rank) for rank in ranks if not generators_file(scratch, rank).exists()]
        if elsewhere:
            raise TrainingError(
                f"{scratch} is not one folder for all ranks: the files of {', '.join(elsewhere)} are missing",
                hint="set output.root to a folder that all nodes share",
            )
        (scratch / MANIFEST).write_text(json.dumps({**manifest, "checksum": checksum(manifest)}, indent=1))
        # The other files are flushed already, but not the folders' entries.
        for path in (scratch / MANIFEST, *(path for path in scratch.rglob("*") if path.is_dir()), scratch):
            flush(path)
        refuse_links(final.parent.parent)  # again, because writing takes a while
        if final.exists():  # a folder without a manifest is not a checkpoint
            remove_tree(final)
        scratch.rename(final)
        flush(final.parent)  # only now may an older one be removed
        stays = step_folder(final.parent, spared) if spared is not None else None
        # The folder may be a link by now: to another disk, or to another run's checkpoints.
        removes = self._keep and not final.parent.is_symlink()
        for path in complete(final.parent)[: -self._keep] if removes else []:
            if path != stays:  # renamed first, so that an incomplete folder never has a checkpoint's name
                shutil.rmtree(path.rename(path.with_name(f".tmp-old-{path.name}")))
