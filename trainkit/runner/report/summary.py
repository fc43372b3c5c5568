"""summary.json: the account of a finished run, from its plan, its verdict and what the trainer measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainkit.files import read_json
from trainkit.plan.model import Plan
from trainkit.planner.expected import EXPECTED
from trainkit.runner.report.card_watch import CardWatch
from trainkit.runner.report.exit_status import Verdict
from trainkit.runner.report.progress_line import Progress
from trainkit.runner.rundir.layout import RunLayout

UNTRAINED = "the run was asked for 0 steps: it only evaluated"
FOREIGN = "only the built-in trainer reports it; this run executed a program of its own"
ELSEWHERE = "rank 0 reports it, in the run directory of its node"
NO_STEP = "no step was left to run"
NOT_FINITE = "it is infinite or no number"
UNFINISHED = "the run ended before the trainer could report it"
# In every summary: null where it is not known, and then `reasons` says why.
REPORTED = ("steps", "final_loss", "eval_loss", "train_seconds", "samples_per_second", "tokens_per_second", "memory")


def build_summary(
    plan: Plan,
    layout: RunLayout,
    verdict: Verdict,
    seconds: float,
    progress: Progress,
    watch: CardWatch,
    has_rank_0: bool = True,
) -> dict[str, Any]:
    """Everything that is known at the end. Times are seconds, memory is bytes."""
    result = read_json(layout.result)
    known: dict[str, Any] = {**_so_far(progress), **result}
    not_finite = result.pop("not_finite", ())
    # An evaluation that was not asked for needs no reason.
    missing = [name for name in REPORTED if known.get(name) is None and not (result and name == "eval_loss")]
    return {
        **result,
        "exit_code": verdict.exit_code,
        "failure": verdict.failure,
        "why": verdict.why,
        **{name: known.get(name) for name in REPORTED},
        "reasons": dict.fromkeys(missing, _reason(plan, has_rank_0, result)) | dict.fromkeys(not_finite, NOT_FINITE),
        "wall_seconds": round(seconds, 3),
        "gpu_memory_occupied": dict(watch.peak) or None,
        "gpu_utilization": dict(watch.utilization) or None,
        "name": plan.name,
        "strategy": plan.strategy.kind,
        "launcher": plan.launcher.kind,
        "program": plan.program.kind,
        "device": plan.topology.device,
        "world_size": plan.topology.world_size,
        "global_batch": plan.batch.global_,
        **_in_force(plan, layout),
        "training_digest": plan.training_digest,
        "recipe_digest": plan.recipe_digest,
    }


def _in_force(plan: Plan, layout: RunLayout) -> dict[str, Any]:
    """What the ranks of this node were seen to run, where the plan promises to look."""
    if all(file.path != EXPECTED for file in plan.files):
        return {}
    files = sorted(layout.attempts[-1].shown.glob("rank-*.json")) if layout.attempts else []
    return {"in_force": {file.stem.removeprefix("rank-"): read_json(file) for file in files}}


def _reason(plan: Plan, has_rank_0: bool, result: Mapping[str, Any]) -> str:
    if plan.program.kind != "builtin":
        return FOREIGN
    if not has_rank_0:
        return ELSEWHERE
    if not result:
        return UNFINISHED
    return NO_STEP if result.get("steps") else UNTRAINED


def _so_far(progress: Progress) -> dict[str, Any]:
    """What the metrics of an unfinished run say."""
    latest = progress.latest
    if latest is None:
        return {}
    rates = {name: latest.get(name) for name in ("samples_per_second", "tokens_per_second")}
    return {
        "steps": progress.step,
        "final_loss": latest.get("loss"),
        "train_seconds": latest.get("elapsed"),
        **rates,
    }
