"""How a run stands: its state, how far it is, how well it does, and for how long it goes on; for every command."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainkit.decode import finite, whole
from trainkit.errors import MachineError
from trainkit.launch_plan.model import Plan
from trainkit.recipe.secrets import mask_words
from trainkit.runner.report.progress import Progress, read_progress
from trainkit.runner.report.summary import NOT_FINITE, headline, own_results
from trainkit.runner.rundir.listing import RunInfo, read_plan
from trainkit.runner.watch.heartbeats import Heartbeats
from trainkit.schedulers.jobs.run_state import Jobs, RunState, state_of


@dataclass(frozen=True, slots=True)
class Standing:
    """How a run stands at one moment. What is not known is None, as is what is infinite or not a number.

    step, total: the latest step that is done, and the last one. loss: of the latest logged step. diverged: it is not
    finite. evaluation: name and value of the number that decides (`headline`). left: seconds to the end.
    memory_bytes: of rank 0 while it runs, then the peak of the largest rank. phase: of rank 0, on this machine.
    """

    run: RunInfo
    state: RunState
    step: int | None = None
    total: int | None = None
    loss: float | None = None
    diverged: bool = False
    evaluation: tuple[str, float] | None = None
    left: float | None = None
    tokens_per_second: float | None = None
    samples_per_second: float | None = None
    seconds_per_step: float | None = None
    memory_bytes: int | None = None
    phase: str = ""

    @property
    def exit_code(self) -> int | None:
        """Of a run that is over."""
        return self.state.exit_code if self.state.is_over else None

    @property
    def duration(self) -> float | None:
        """Seconds from its start, or latest restart, to its end or to now."""
        started, ended = self.run.started, self.run.ended
        if started is None or (ended is None and self.state.is_over):
            return None
        return max(0.0, (time.time() if ended is None else ended) - started)

    @property
    def where(self) -> str:
        """The nodes of its job, or its host."""
        return self.state.nodes or self.run.host

    def as_data(self) -> dict[str, Any]:
        """For JSON: all of it, without the run's summary."""
        layout, state = self.run.layout, self.state
        name, value = self.evaluation or (None, None)
        return {
            "path": str(layout.root),
            "id": layout.id,
            "short_id": layout.short_id,
            "name": layout.name,
            "state": state.word,
            "why": state.why,
            "exit_code": self.exit_code,
            "source": state.source,
            "at": state.at,
            "job": state.job,
            "nodes": state.nodes,
            "host": self.run.host,
            "attempt": state.attempt,
            "step": self.step,
            "total_steps": self.total,
            "loss": self.loss,
            "diverged": self.diverged,
            "evaluation": None if name is None else {"metric": name, "value": value},
            "seconds_left": self.left,
            "tokens_per_second": self.tokens_per_second,
            "samples_per_second": self.samples_per_second,
            "seconds_per_step": self.seconds_per_step,
            "memory_bytes": self.memory_bytes,
            "phase": self.phase,
            "started": self.run.started,
            "ended": self.run.ended,
            "duration_seconds": self.duration,
            "launched": dict(self.run.launched),
            "argv": mask_words(self.run.argv),
        }


# What lists are filtered and sorted by.
FIELDS: Mapping[str, Callable[[Standing], str | float | None]] = {
    "name": lambda each: each.run.layout.name,
    "state": lambda each: each.state.word,
    "program": lambda each: each.run.launched.get("program", ""),
    "strategy": lambda each: each.run.launched.get("strategy", ""),
    "launcher": lambda each: each.run.launched.get("launcher", ""),
    "host": lambda each: each.where,
    "started": lambda each: each.run.started,
    "duration": lambda each: each.duration,
    "left": lambda each: each.left,
    "steps": lambda each: each.step,
    "loss": lambda each: each.loss,
    "evaluation": lambda each: each.evaluation and each.evaluation[1],
    "exit_code": lambda each: each.exit_code,
}
TEXTS = ("name", "state", "program", "strategy", "launcher", "host")  # the others are numbers


def standing_of(run: RunInfo, jobs: Jobs | None = None) -> Standing:
    """How a run stands now. jobs: what was asked of the schedulers before.

    The figures of a run that is over are those of its summary; of any other they are read from its metrics, and from
    its heartbeat if it runs on this machine.
    """
    standing = Standing(run, state_of(run.layout, jobs))
    if standing.state.is_over and run.summary and standing.state.word != "lost":  # that would be an earlier start's
        return _ended(standing)
    if standing.state.word == "queued":
        return standing
    return _by_metrics(standing)


def _ended(standing: Standing) -> Standing:
    summary = standing.run.summary
    step, total = whole(summary.get("steps")), whole(summary.get("total_steps"))
    if total is None and standing.state.word == "done" and not summary.get("stopped_early"):
        total = step
    ranks, reasons = summary.get("memory"), summary.get("reasons")
    ranks = [each for each in ranks if isinstance(each, Mapping)] if isinstance(ranks, list) else []
    used = [each.get("peak_allocated") or each.get("rss") for each in ranks]
    return replace(
        standing,
        step=step,
        total=total,
        loss=finite(summary.get("final_loss")),
        diverged=isinstance(reasons, Mapping) and reasons.get("final_loss") == NOT_FINITE,
        evaluation=_evaluation(summary),
        tokens_per_second=finite(summary.get("tokens_per_second")),
        samples_per_second=finite(summary.get("samples_per_second")),
        seconds_per_step=finite(summary.get("step_seconds")),
        memory_bytes=max((each for each in map(whole, used) if each is not None), default=None),
    )


def _by_metrics(standing: Standing) -> Standing:
    layout, is_running = standing.run.layout, standing.state.word == "running"
    progress, own, plan = read_progress(layout.metrics), dict[str, Any](), None
    if progress.total is None and standing.run.launched.get("program") != "builtin":
        plan, own = _own_program(standing)
        steps = whole(own.get("steps")) or 0
        progress = replace(progress, total=whole(own.get("total_steps")), step=max(progress.step, steps))
    if is_running:
        progress = _with_heartbeat(progress, standing)
    latest, evaluated = progress.latest or {}, dict(progress.evaluation)
    samples = latest.get("samples_per_second") or own.get("samples_per_second")
    if is_running and plan and plan.batch.global_ and progress.seconds_per_step:
        samples = plan.batch.global_ / progress.seconds_per_step
    return replace(
        standing,
        step=progress.step if progress.step or progress.total is not None else None,
        total=progress.total,
        loss=finite(latest.get("loss", own.get("final_loss"))),
        diverged="loss" in latest and latest["loss"] is None,  # as the trainer logs it
        evaluation=_evaluation({"eval_loss": evaluated.pop("loss", own.get("eval_loss")), "metrics": evaluated}),
        left=finite(progress.remaining(0.0)) if is_running else None,
        tokens_per_second=finite(latest.get("tokens_per_second")),
        samples_per_second=finite(samples),
        seconds_per_step=finite(progress.seconds_per_step),
        memory_bytes=whole(latest.get("memory_bytes")),
        phase=progress.phase,
    )


def _own_program(standing: Standing) -> tuple[Plan | None, dict[str, Any]]:
    """The plan of a program that writes no metrics of trainkit's, and what its own result files say so far."""
    layout = standing.run.layout
    try:
        plan = read_plan(layout)
    except MachineError:
        return None, {}
    return plan, own_results(plan, layout, standing.run.started or 0.0)


def _with_heartbeat(progress: Progress, standing: Standing) -> Progress:
    """The progress as rank 0's heartbeat has it, where the run is on this machine."""
    for attempt in standing.run.layout.attempts[-1:]:
        with contextlib.closing(Heartbeats(attempt, {0})) as beats:
            for beat in beats.read().values():
                progress = progress.beat(beat, 0.0)
    return progress


def _evaluation(summary: Mapping[str, Any]) -> tuple[str, float] | None:
    with contextlib.suppress(OverflowError):  # an integer of hundreds of digits
        name, value = headline(summary) or ("", None)
        return None if finite(value) is None else (name, float(value or 0))
    return None
