"""What a run leaves at its end: `result.json`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from trainkit.files import refuse_links, write_json
from trainkit.trainer.callbacks import Progress
from trainkit.trainer.distributed import gather_from_ranks
from trainkit.trainer.metrics.memory_breakdown import memory_record
from trainkit.trainer.metrics.predictions import generate
from trainkit.trainer.metrics.writers import finite
from trainkit.trainer.setup import Parts, facts_of

log = logging.getLogger("trainkit.trainer")


def result(parts: Parts, progress: Progress) -> dict[str, Any]:
    """The facts of a finished or stopped run. Called on every rank; times are seconds, entropy is in nats per token.

    aside_seconds: of train_seconds, those in which the run evaluated and saved.
    """
    settings, seconds = parts.settings, progress.elapsed()
    samples = (progress.step - progress.first) * settings.batch.global_
    stopped = progress.stopped_by
    recipe = settings.recipe
    peaks = memory_record(parts.device, parts.world)
    anatomy = parts.memory.record(parts.strategy, peaks["peak_allocated"] or peaks["rss"])
    losses = {"final_loss": progress.loss, "eval_loss": progress.eval_loss}
    return {
        "steps": progress.step,
        "first_step": progress.first,
        **{name: finite(loss) for name, loss in losses.items()},
        "not_finite": [name for name, loss in losses.items() if loss is not None and finite(loss) is None],
        "train_seconds": round(seconds, 6),
        "compile_seconds": round(progress.compiling.seconds, 3) if recipe.efficiency.compile.enabled else None,
        "samples": samples,
        "best_eval_loss": parts.best.loss,
        "best_step": parts.best.step if parts.best.loss is not None else None,
        "stopped_early": progress.stopped_early,
        "aside_seconds": round(progress.aside_seconds, 6),
        # of steps alone, without the first ones; `mfu` too
        **progress.steady_speed(settings.batch.global_, parts.work, parts.world.size),
        "profile": parts.profiler.report,
        # of the rank that waited longest: the others wait for it in turn
        "data_wait_share": round(max(gather_from_ranks(progress.waiting.seconds, parts.world)) / seconds, 4),
        "memory": gather_from_ranks({**peaks, "anatomy": anatomy}, parts.world),
        "corpus": dict(parts.source.facts),
        "skipped_steps": parts.strategy.skipped_steps(),
        "stopped_by": stopped.name if stopped else None,
        **facts_of(parts),
        # A run that a signal has stopped has no time for it.
        "sample": "" if stopped else generate(parts),
    }


def write_result(path: Path, content: dict[str, Any]) -> None:
    """Write the result, whole or not at all. On a full disk a warning takes its place: the training itself is done."""
    try:
        refuse_links(path.parent)
        write_json(path, content, indent=1)
    except OSError as error:
        log.warning("%s cannot be written: %s", path, error.strerror)
