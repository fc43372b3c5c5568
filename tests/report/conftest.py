"""Run directories as runs leave them, without a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.report.made_up_runs import ENDED
from trainkit.launch_plan.model import plan_to_json
from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan
from trainkit.recipe.resolved import Resolved
from trainkit.recipe.yaml_writer import resolved_yaml
from trainkit.runner.report.exit_status import Verdict
from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.rundir.listing import RunInfo, read_run

MakeRun = Callable[..., RunLayout]


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
        layout = RunLayout(tmp_path / "runs" / name / f"20260101-00000{number}-abcdef")
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
