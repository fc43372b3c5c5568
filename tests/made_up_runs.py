"""Run directories as runs leave them, without a run, and what the built-in trainer logs, without training."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from trainkit.launch_plan.model import plan_to_json
from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan
from trainkit.recipe.resolved import Resolved
from trainkit.recipe.yaml_writer import resolved_yaml
from trainkit.runner.report.exit_status import Verdict
from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.rundir.listing import RunInfo, read_run

MakeRun = Callable[..., RunLayout]
ENDED = 1795973856.0


def records(steps: int, loss: Callable[[int], float | None], every: int = 0) -> Iterator[dict[str, Any]]:
    """What the built-in trainer logs: each step, and every so many an evaluation."""
    yield {"event": "start", "time": ENDED - 60, "steps": steps, "first_step": 0, "world_size": 1}
    for step in range(1, steps + 1):
        phases = {"data": 0.001, "forward": 0.02, "backward": 0.03, "optimizer": 0.01}
        rates = {"samples_per_second": 60.0, "tokens_per_second": 7000.0, "memory_bytes": 2**30 + step}
        own = {"loss": loss(step), "learning_rate": 0.003, "grad_norm": 1 + step % 7, "seconds": 0.061}
        yield {"step": step, **own, **rates, "elapsed": step * 0.061, "data_wait_share": 0.02, "phases": phases}
        if every and step % every == 0:
            yield {"step": step, "eval_loss": loss(step), "eval_accuracy": step / steps, "eval_seconds": 0.5}


@pytest.fixture
def make_run(tmp_path: Path, layered: Callable[..., Resolved], machine: Callable[..., Facts]) -> MakeRun:
    """`make_run("name", [records…], recipe={…}, summary={…}, verdict={…})` writes a run that has ended."""

    def make(
        name: str,
        metrics: Iterable[Mapping[str, Any]] = (),
        *,
        recipe: Mapping[str, Any] | None = None,
        summary: Mapping[str, Any] | None = None,
        verdict: Mapping[str, Any] | None = None,
        number: int = 1,
    ) -> RunLayout:
        layout = RunLayout(tmp_path / "runs" / name / f"20260101-00000{number}-abcde{number}")
        (layout.attempt(1).logs).mkdir(parents=True)
        layout.attempt(1).ranks.mkdir()
        resolved = layered({"name": "made-up", "devices": {"type": "cpu"}}, recipe or {})
        layout.plan.write_text(json.dumps(plan_to_json(build_plan(resolved, machine()).plan)))
        layout.recipe.write_text(resolved_yaml(resolved))
        layout.environment.write_text("RANK=0\nHF_TOKEN=***\n")
        layout.metrics.write_text("".join(f"{json.dumps(record)}\n" for record in metrics))
        layout.summary.write_text(json.dumps(summary or {}))
        end = Verdict(**{"exit_code": 0, "failure": None, "why": "", **(verdict or {})})
        status = {"state": "ended", "attempt": 1, "started": ENDED - 70, "ended": ENDED, **end._asdict()}
        layout.status.write_text(json.dumps(status))
        return layout

    return make


@pytest.fixture
def info() -> Callable[[RunLayout], RunInfo]:
    """What the commands know of a run."""
    return lambda layout: read_run(layout.root)
