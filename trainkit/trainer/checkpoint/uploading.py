"""The end of a run waits until what is to be on the Hub is there."""

from __future__ import annotations

import logging
import time
from signal import Signals

from trainkit.errors import TrainingError
from trainkit.heartbeat import CHECKPOINT
from trainkit.text import listed
from trainkit.trainer.callbacks import Progress
from trainkit.trainer.checkpoint.manifest import newest
from trainkit.trainer.distributed import sum_over_ranks
from trainkit.trainer.loop import Requests
from trainkit.trainer.setup import Parts

log = logging.getLogger("trainkit.trainer")
POLL = 0.2  # seconds


def finish_pushes(parts: Parts, progress: Progress, requests: Requests) -> Signals | None:
    """Wait on all ranks until rank 0 has uploaded what the recipe asks for; the signal that ended the run or this.

    TrainingError for what could not be uploaded.
    """
    pushes, stop = parts.checkpoints.pushes, progress.stopped_by
    if parts.settings.recipe.checkpoint.push_to_hub.repo is None:
        return stop
    if pushes is not None and stop is None:
        root, resumed = parts.checkpoints.root, parts.settings.resume
        last = newest(root) if root is not None else None
        if last is None and resumed is not None and 0 < parts.steps <= progress.first:
            last = resumed  # of another run, whose upload may have failed: nothing is left to train
        if last is not None:
            pushes.finish(last)
        elif progress.step > progress.first:
            raise TrainingError(f"nothing can be uploaded to {pushes.repo}: the run has saved no checkpoint")
        else:
            log.warning("warning: nothing is uploaded to %s: the run has trained nothing", pushes.repo)
        if waiting := pushes.unfinished():
            log.info("the end waits for the upload of %s to %s", listed(waiting), pushes.repo)
    while stop is None:
        # In short steps: a collective that waits has an end, and signals are seen by all ranks.
        busy, *votes = sum_over_ranks([int(pushes is not None and pushes.is_busy()), *requests.votes()], parts.world)
        if not busy:
            break
        stop, _ = requests.settle(votes)
        parts.heartbeat.set_phase(CHECKPOINT)
        time.sleep(POLL)
    if pushes is not None:
        pushes.close() if stop is None else pushes.abandon()
    return stop
