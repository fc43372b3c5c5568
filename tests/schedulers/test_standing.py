"""How a run stands: from its summary when it is over, from metrics, heartbeat and result files while it goes on."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainkit.files import hold_lock
from trainkit.heartbeat import STEPS, HeartbeatState
from trainkit.launch_plan.model import Choice, Plan, plan_to_json
from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan
from trainkit.recipe.resolved import Resolved
from trainkit.runner.report.summary import NOT_FINITE
from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.rundir.listing import read_run
from trainkit.runner.watch.heartbeats import RankBeat
from trainkit.schedulers.jobs import standing as standing_module
from trainkit.schedulers.jobs.standing import FIELDS, TEXTS, Standing, standing_of

HERE = os.uname().nodename
START = {"event": "start", "steps": 40, "first_step": 0, "evaluates_every": 10, "samples_per_step": 4}


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    made = RunLayout(tmp_path / "runs/a/20260101-000000-1ceb19")
    made.root.mkdir(parents=True)
    made.plan.write_text(json.dumps({"program": {"kind": "builtin"}, "strategy": {"kind": "ddp"}}))
    made.recipe.write_text("version: 1\n")
    return made


@pytest.fixture
def running(layout: RunLayout) -> Iterator[RunLayout]:
    """A run of this machine that goes on."""
    write(layout, state="running", host=HERE, started=time.time() - 60)
    lock = hold_lock(layout.lock)
    yield layout
    os.close(lock)


@pytest.fixture
def own_plan(layered: Callable[..., Resolved], machine: Callable[..., Facts]) -> Plan:
    """Of a script of the user's own, in batches of 32."""
    plan = build_plan(layered({"name": "a", "program": {"kind": "torch", "script": "train.py"}}), machine(0)).plan
    return replace(plan, batch=replace(plan.batch, global_=32))


def write(layout: RunLayout, **status: Any) -> None:
    layout.status.write_text(json.dumps(status))


def log(layout: RunLayout, *records: dict[str, Any], torn: str = "") -> None:
    layout.metrics.write_text("".join(f"{json.dumps(each)}\n" for each in records) + torn)


def steps(count: int) -> list[dict[str, Any]]:
    more = {"seconds": 2.0, "tokens_per_second": 512.0, "samples_per_second": 2.0, "memory_bytes": 1 << 20}
    return [{"step": step, "loss": 5.0 - step / 10, **more} for step in range(1, count + 1)]


def test_a_running_run_stands_where_its_metrics_are_with_the_time_that_is_left(running: RunLayout) -> None:
    running.summary.write_text('{"steps": 3, "final_loss": 9.0}')  # of an earlier attempt
    evaluated = {"step": 10, "eval_loss": 4.25, "eval_accuracy": 0.5, "eval_seconds": 3.0}
    log(running, START, *steps(10), evaluated, *steps(12)[10:], torn='{"step": 13, "lo')
    found = standing_of(read_run(running.root))
    assert (found.state.title, found.step, found.total, found.loss) == ("running", 12, 40, 3.8)
    assert found.evaluation == ("accuracy", 0.5)
    assert found.left == 28 * 2.0 + 3 * 3.0  # steps, and the three evaluations among them
    assert (found.tokens_per_second, found.samples_per_second, found.memory_bytes) == (512.0, 2.0, 1 << 20)
    assert 59 < (found.duration or 0) < 600
    assert found.where == HERE
    data = json.loads(json.dumps(found.as_data(), allow_nan=False))
    assert (data["short_id"], data["total_steps"], data["seconds_left"]) == ("1ceb19", 40, 65.0)
    assert data["evaluation"] == {"metric": "accuracy", "value": 0.5}


def test_a_run_that_has_ended_stands_as_its_summary_says_and_its_metrics_are_not_opened(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"steps": 12, "total_steps": 40, "final_loss": 2.5, "eval_loss": 3.0, "tokens_per_second": 100.0}
    memory = [{"rank": 0, "rss": 300, "peak_allocated": None}, {"rank": 1, "rss": 400}]
    layout.summary.write_text(json.dumps({**known, "memory": memory}))
    write(layout, state="ended", exit_code=143, failure="signal", started=100.0, ended=160.5)
    monkeypatch.setattr(standing_module, "read_progress", pytest.fail)
    found = standing_of(read_run(layout.root))
    assert (found.state.title, found.step, found.total, found.loss, found.left) == ("cancelled", 12, 40, 2.5, None)
    assert (found.evaluation, found.duration, found.memory_bytes) == (("loss", 3.0), 60.5, 400)


@pytest.mark.parametrize(("stopped_early", "total"), [(False, 12), (True, None)])
def test_a_done_run_of_an_earlier_release_has_come_to_its_last_step(
    layout: RunLayout, stopped_early: bool, total: int | None
) -> None:
    layout.summary.write_text(json.dumps({"steps": 12, "stopped_early": stopped_early}))
    write(layout, state="ended", exit_code=0)
    assert standing_of(read_run(layout.root)).total == total


def test_a_run_whose_end_nobody_saw_stands_where_its_metrics_end(layout: RunLayout) -> None:
    layout.summary.write_text('{"steps": 3, "final_loss": 9.0}')  # of an earlier attempt
    write(layout, state="running", host=HERE, started=100.0)
    log(layout, START, *steps(7))
    found = standing_of(read_run(layout.root))
    assert (found.state.title, found.step, found.total, found.loss) == ("lost", 7, 40, 4.3)
    assert (found.left, found.duration) == (None, None)


def test_a_loss_that_is_no_number_is_told_apart_from_one_that_is_unknown(running: RunLayout) -> None:
    log(running, START, *steps(3), {"step": 4, "loss": None, "seconds": 2.0})
    found = standing_of(read_run(running.root))
    assert (found.step, found.loss, found.diverged) == (4, None, True)
    write(running, state="ended", exit_code=1)
    running.summary.write_text(json.dumps({"steps": 4, "final_loss": None, "reasons": {"final_loss": NOT_FINITE}}))
    assert standing_of(read_run(running.root)).diverged
    running.summary.write_text(json.dumps({"steps": 4, "final_loss": None, "reasons": {"final_loss": "unknown"}}))
    assert not standing_of(read_run(running.root)).diverged


@pytest.mark.parametrize(
    "summary",
    [
        {"steps": -1, "final_loss": "x", "eval_loss": [], "memory": 5, "best_metric": [], "metrics": {"a": {}}},
        {"steps": 1e300, "final_loss": float("nan"), "eval_loss": float("inf"), "memory": [3, {"rss": "x"}]},
        {"steps": 10**400, "final_loss": 10**400, "eval_loss": -(10**400)},
        {"steps": True, "total_steps": 2**60, "tokens_per_second": {}, "metrics": []},
    ],
)
def test_values_that_cannot_be_are_unknown(layout: RunLayout, summary: dict[str, Any]) -> None:
    layout.summary.write_text(json.dumps(summary))
    write(layout, state="ended", exit_code=1)
    found = standing_of(read_run(layout.root))
    assert found == Standing(found.run, found.state)
    json.dumps(found.as_data(), allow_nan=False)


def test_a_program_of_the_users_own_stands_where_its_heartbeat_is(
    running: RunLayout, monkeypatch: pytest.MonkeyPatch, own_plan: Plan
) -> None:
    class Beats:
        """One rank in its seventh step."""

        def __init__(self, *_: object) -> None:
            pass

        def read(self) -> dict[int, RankBeat]:
            return {0: RankBeat(0, HERE, HeartbeatState(1, 7, STEPS, 0.0, ()), [(0.5, 0.1), (0.3, 0.1)])}

        def close(self) -> None:
            pass

    running.attempt(1).root.mkdir(parents=True)
    running.plan.write_text(json.dumps(plan_to_json(own_plan)))
    monkeypatch.setattr(standing_module, "Heartbeats", Beats)
    found = standing_of(read_run(running.root))
    assert (found.step, found.total, found.left, found.loss) == (7, None, None, None)
    assert found.samples_per_second == 32 / 0.4


def test_trainers_loss_and_last_step_are_those_of_its_newest_state(running: RunLayout, own_plan: Plan) -> None:
    running.attempt(1).shown.mkdir(parents=True)
    running.plan.write_text(json.dumps(plan_to_json(replace(own_plan, program=Choice("hf", "")))))
    history = [{"loss": 2.5, "step": 4}, {"eval_loss": 1.75, "step": 4}, {"loss": 1.5, "step": 8}]
    (folder := running.root / "output/checkpoint-8").mkdir(parents=True)
    state = {"global_step": 8, "max_steps": 20, "log_history": history}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    found = standing_of(read_run(running.root))
    assert (found.step, found.total, found.loss, found.evaluation) == (8, 20, 1.5, ("loss", 1.75))


def test_fields_are_texts_or_numbers_of_every_run(layout: RunLayout) -> None:
    write(layout, state="ended", exit_code=0, started=1.0, ended=3.0)
    found = standing_of(read_run(layout.root))
    for name, read in FIELDS.items():
        assert isinstance(read(found), str) is (name in TEXTS), name
