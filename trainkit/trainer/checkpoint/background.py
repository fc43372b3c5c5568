"""Checkpoints written behind the training: the state is copied at once, and a thread writes and publishes the copy."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch.distributed as dist

from trainkit.trainer.checkpoint import checkpoints
from trainkit.trainer.distributed import TIMEOUT
from trainkit.trainer.metrics.evaluation import Best
from trainkit.trainer.parallel import Strategy
from trainkit.trainer.randomness import generator_states
from trainkit.trainer.settings import World

log = logging.getLogger("trainkit.trainer")


class Background:
    """At most one checkpoint is on its way; the next one waits for it.

    The ranks' threads meet in a process group of their own, for the training's collectives go on meanwhile.
    """

    def __init__(self, world: World) -> None:
        group = dist.new_group(backend="gloo", timeout=TIMEOUT) if dist.is_initialized() else None
        self._world = replace(world, group=group)
        self._thread: Thread | None = None
        self._failure: Exception | None = None

    def save(
        self,
        root: Path,
        step: int,
        identity: checkpoints.Identity,
        strategy: Strategy,
        *,
        keep: int,
        spared: int | None,
        best: Best,
    ) -> None:
        """Begin the checkpoint of a step, as :func:`trainkit.trainer.checkpoint.checkpoints.save` writes it."""
        self.wait()
        write = partial(
            checkpoints.write,
            root,
            checkpoints.manifest(step, identity, best),
            partial(_put, strategy.save_later(), self._world.group),
            pickle.dumps(generator_states()),
            self._world,
            keep=keep,
            spared=spared,
        )
        self._thread = Thread(target=self._run, args=(write,), name="checkpoint")
        self._thread.start()

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is raised again where the training meets it
            self._failure = error

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

    def wait(self) -> None:
        """Until nothing is on its way; raises what went wrong with it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure


def _put(write: Callable[[Path, Any], None], group: Any, folder: Path) -> None:
    write(folder, group)
