"""What a run of a program of the user's own says of it: steps that were counted, and what Trainer wrote."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from handmade_plans import make_plan
from hypothesis import given
from hypothesis import strategies as st

from trainkit.launch_plan.model import Choice, Plan, PlannedFile, Text, Variable, text
from trainkit.planner.expected import EXPECTED
from trainkit.runner.report.exit_status import Verdict
from trainkit.runner.report.gpu_watch import GpuWatch
from trainkit.runner.report.progress import Progress
from trainkit.runner.report.summary import (
    COUNTED_STEPS,
    COUNTED_WITHOUT_EVALUATION,
    LATEST_STEPS,
    STEPS_ALONE,
    WHOLE_TRAINING,
    build_summary,
    by_ranks,
    own_results,
    render_summary,
)
from trainkit.runner.rundir.layout import RunLayout

LOG = [{"loss": 2.5, "step": 2}, {"eval_loss": 1.75, "step": 2}, {"loss": 1.5, "step": 4}, {"train_loss": 2.0}]


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    """A run directory with an attempt."""
    made = RunLayout(tmp_path / "runs/name/20260101-000000-abc")
    made.attempt(1).shown.mkdir(parents=True)
    return made


def plan_of(kind: str, *words: str | Text, batch: int | None = None) -> Plan:
    plan = make_plan(("python", "train.py", *words), "runs", ranks=2)
    return replace(plan, program=Choice(kind, ""), batch=replace(plan.batch, global_=batch))


def write(folder: Path, name: str, content: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(content))


def counted(layout: RunLayout, rank: int = 0, **seen: Any) -> None:
    write(layout.attempt(1).shown, f"steps-rank-{rank}.json", seen)


def test_the_steps_of_the_first_rank_are_told_with_their_time_but_for_the_first(layout: RunLayout) -> None:
    counted(layout, 10, steps=3, seconds=9.0, first_seconds=1.0)
    counted(layout, 9, steps=12, seconds=7.0, first_seconds=2.0)
    assert own_results(plan_of("torch"), layout, 0.0) == {"steps": 12, "step_seconds": 0.5}
    found = own_results(plan_of("accelerate", batch=32), layout, 0.0)
    assert (found["samples_per_second"], found["rates_cover"]) == (64, COUNTED_STEPS)
    assert own_results(plan_of("builtin"), layout, 0.0) == {}
    counted(layout, 9, steps=2, seconds=7.0, first_seconds=7.0)
    assert own_results(plan_of("torch", batch=32), layout, 0.0) == {"steps": 2}
    (layout.attempt(1).shown / "steps-rank-9.json").write_text("{")
    assert own_results(plan_of("torch"), layout, 0.0) == {}


@pytest.mark.parametrize("said", ["seen", "word", "words", "default"])
def test_trainers_files_are_found_where_the_script_writes_them(layout: RunLayout, tmp_path: Path, said: str) -> None:
    place = layout.root / "output" if said == "default" else tmp_path / "elsewhere"
    more: tuple[str | Text, ...] = ()
    if said == "seen":
        write(layout.attempt(1).shown, "rank-0.json", {"output_dir": str(place)})
    elif said == "word":
        more = (f"--output_dir={place}",)
    elif said == "words":
        more, place = ("--output_dir", text(Variable.RUN_DIR, "/here")), layout.root / "here"
    counted(layout, steps=3, seconds=9.0, first_seconds=1.0)
    write(place, "trainer_state.json", {"global_step": 4, "log_history": LOG})
    write(place, "train_results.json", {"train_loss": 2.0, "train_runtime": 8.0, "train_samples_per_second": 16.0})

    assert own_results(plan_of("hf", *more), layout, time.time() - 5) == {
        "steps": 4,
        "step_seconds": 8.0,
        "final_loss": 1.5,
        "eval_loss": 1.75,
        "mean_loss": 2.0,
        "train_seconds": 8.0,
        "samples_per_second": 16.0,
        "rates_cover": WHOLE_TRAINING,
    }
    assert own_results(plan_of("torch", *more), layout, time.time() - 5) == {"steps": 3, "step_seconds": 8.0}


def test_the_newest_checkpoint_tells_of_a_script_that_saves_no_state_of_its_own(layout: RunLayout) -> None:
    output = layout.root / "output"
    for step in (2, 10, 4):
        write(output / f"checkpoint-{step}", "trainer_state.json", {"global_step": step, "log_history": LOG[:1]})
    assert own_results(plan_of("hf"), layout, time.time() - 5) == {"steps": 10, "final_loss": 2.5}
    counted(layout, steps=12, seconds=1.0, first_seconds=1.0)
    assert own_results(plan_of("hf"), layout, time.time() - 5)["steps"] == 12


def test_files_of_an_earlier_run_and_damaged_ones_tell_nothing(layout: RunLayout) -> None:
    output = layout.root / "output"
    write(output, "trainer_state.json", {"global_step": 4, "log_history": LOG})
    write(output, "all_results.json", {"eval_loss": 3.0})
    assert own_results(plan_of("hf"), layout, time.time() - 5)["eval_loss"] == 3.0
    for file in output.iterdir():
        os.utime(file, (1.0, 1.0))
    assert own_results(plan_of("hf"), layout, time.time() - 5) == {}
    write(output, "trainer_state.json", {"global_step": "four", "log_history": [7, {"loss": "low"}, {"loss": True}]})
    write(output, "eval_results.json", ["eval_loss"])
    assert own_results(plan_of("hf"), layout, time.time() - 5) == {}


def ended(layout: RunLayout, kind: str = "builtin", *, verified: bool = False) -> dict[str, Any]:
    """The summary, which can always be written, shown and read again."""
    plan = plan_of(kind)
    plan = replace(plan, files=(PlannedFile(EXPECTED, "{}"),)) if verified else plan
    summary = build_summary(plan, layout, Verdict(0), 9.0, Progress(), GpuWatch((), layout.cards))
    assert "Run directory" in render_summary(json.loads(json.dumps(summary)), layout.root)
    return summary


@pytest.mark.parametrize(
    "result",
    [
        {"steps": 5, "memory": 5, "final_loss": [], "profile": 5}, {"steps": "x"}, {"not_finite": 5},
        {"not_finite": [[]]}, {"memory": [5]}, {"train_seconds": "y"}, [], 10**30,
    ],
)  # fmt: skip
def test_a_damaged_result_is_left_out_and_said(layout: RunLayout, result: object) -> None:
    layout.result.write_text(json.dumps(result))
    summary = ended(layout)
    assert summary["damaged"].startswith("result.json is damaged: ")
    assert (summary["steps"], summary["memory"], summary["reasons"]["steps"]) == (None, None, summary["damaged"])
    assert f"Damaged        {summary['damaged']}" in render_summary(summary, layout.root)


def test_values_of_a_result_that_nobody_can_show_end_nothing(layout: RunLayout) -> None:
    layout.result.write_text('{"steps": 5, "mfu": "x", "peak_flops_per_second": [], "corpus": 5, "best_eval_loss": 1}')
    summary = build_summary(plan_of("builtin"), layout, Verdict(0), 9.0, Progress(), GpuWatch((), layout.cards))
    assert render_summary(summary, layout.root).startswith(f"{layout.summary} is damaged (")


@pytest.mark.parametrize(
    "paces", [{"x": 5}, {"0": 5}, {"0": ["a", 1.0]}, {"0": ["../a", 1.0, 1.0]}, 5, {"9" * 5000: []}]
)
def test_damaged_paces_name_no_straggler(layout: RunLayout, paces: object) -> None:
    write(layout.attempt(1).root, "paces.json", paces)
    assert ended(layout)["stragglers"] == []
    write(layout.attempt(1).root, "paces.json", {"0": ["a", 1.0, 0.1], "1": ["b", 1.0, 0.9]})
    assert [each["rank"] for each in ended(layout)["stragglers"]] == [1]


@pytest.mark.parametrize(
    "account",
    [
        {"strategy": 5},
        {"differences": 5},
        {"world_size": "x"},
        {"output_dir": "a\0b"},
        {"output_dir": "/\ud800"},
        [],
        7,
    ],
)
def test_a_damaged_account_of_a_rank_is_said(layout: RunLayout, account: object) -> None:
    shown = layout.attempt(1).shown
    write(shown, "rank-0.json", account)
    summary = ended(layout, "hf", verified=True)
    assert "In force       not shown: rank-0.json is damaged\n" in render_summary(summary, layout.root)
    write(shown, "rank-0.json", {"strategy": "ddp", "device": "cpu"})  # what is missing is not known
    for name in ("rank-x.json", "rank-01.json", "rank-2.json", "rank-99999999999.json"):  # no ranks of this plan
        write(shown, name, {})
    summary = ended(layout, "hf", verified=True)
    assert [*summary["in_force"]] == ["0"]
    assert "In force       as planned, seen in 1 of 2 ranks: ddp, cpu\n" in render_summary(summary, layout.root)


@pytest.mark.parametrize("kind", ["torch", "deepspeed", "hf"])
def test_of_a_program_in_which_nothing_was_seen_it_is_said(layout: RunLayout, kind: str) -> None:
    summary = ended(layout, kind, verified=True)
    assert summary["in_force"] == {}
    said = "In force       not shown: no torch optimizer took a step\n"
    assert said in render_summary(summary, layout.root)
    assert "In force" not in render_summary(ended(layout, kind), layout.root)


def test_what_is_known_is_shown() -> None:
    summary = {"wall_seconds": 9.0, "strategy": "ddp", "launcher": "torchrun", "world_size": 2, "global_batch": None}
    assert "Ranks          2 (ddp, torchrun)" in render_summary(summary, Path("run"))
    known = {"steps": 12, "step_seconds": 0.512345, "final_loss": 1.5, "mean_loss": 2.0, "eval_loss": 1.75}
    shown = render_summary({**summary, **known}, Path("run"))
    assert "Steps            12 on 2 ranks (ddp, torchrun), 0.512 s each\n" in shown
    assert "Final loss       1.5000\nMean loss        2.0000\nEvaluation loss  1.7500\n" in shown


ACCOUNT = {"strategy": "fsdp", "world_size": 8000, "device": "cuda", "dtype": "bf16", "differences": []}


def ranks_of(name: str) -> list[int]:
    """The ranks that a name like 0-3,7 stands for."""
    ends = [part.split("-") for part in name.split(",")]
    return [rank for each in ends for rank in range(int(each[0]), int(each[-1]) + 1)]


@given(st.dictionaries(st.integers(0, 40).map(str), st.sampled_from([{"a": 1}, {"a": 2}, {}]), min_size=1))
def test_accounts_that_are_equal_stand_once_under_all_their_ranks(accounts: dict[str, Any]) -> None:
    found = by_ranks(accounts)
    assert {str(rank): account for name, account in found.items() for rank in ranks_of(name)} == accounts
    assert len(found) <= 3


def shown(**more: object) -> str:
    summary = {"wall_seconds": 9.0, "strategy": "fsdp", "launcher": "torchrun", "world_size": 8000, "global_batch": 1}
    return render_summary({**summary, **more}, Path("runs/r/1"))


def test_all_ranks_are_counted_where_their_accounts_are_one() -> None:
    accounts = by_ranks({str(rank): ACCOUNT for rank in range(8000)})
    assert [*accounts] == ["0-7999"]
    assert "as planned, seen in 8000 ranks: fsdp, cuda, bf16" in shown(in_force=accounts)
    some = by_ranks({str(rank): ACCOUNT for rank in range(8000) if rank != 5})
    assert "as planned, seen in 7999 of 8000 ranks" in shown(in_force=some)
    assert "as planned, seen in 2 of 8000 ranks" in shown(in_force={"0": ACCOUNT, "1": ACCOUNT})


def test_of_many_ranks_the_highest_and_the_lowest_peak_are_shown() -> None:
    memory = [{"rank": rank, "rss": (100 if rank % 7 else 90) << 20} for rank in range(8000)]
    memory[4321]["rss"] = 200 << 20
    lines = [line for line in shown(memory=memory).splitlines() if "memory" in line]
    assert [line.split("  ")[0] for line in lines] == ["Peak memory, rank 4321 of 8000", "Peak memory, rank 0 of 8000"]
    few = shown(memory=memory[:8])
    assert all(f"Peak memory, rank {rank} " in few for rank in range(8))


def test_the_commands_that_use_the_model_can_be_pasted() -> None:
    done = {"training": {"model": "gpt", "method": "all weights"}, "data": "12 bytes of text", "saved": "checkpoints/1"}
    summary = {"wall_seconds": 9.0, "strategy": "single", "launcher": "python", "world_size": 1, "global_batch": 1}
    lines = render_summary({**summary, **done, "uses": ["generate", "export"]}, Path("/my runs/1")).splitlines()
    assert lines[-2:] == ["Use it   trainkit generate '/my runs/1'", "         trainkit export '/my runs/1' FOLDER"]
    lines = render_summary({**summary, **done, "uses": ["export --trust-code"]}, Path("/r/1")).splitlines()
    assert lines[-1] == "Use it   trainkit export --trust-code /r/1 FOLDER"


@pytest.mark.parametrize("resumed", [0, 100])
def test_the_rate_of_a_trainer_run_is_of_counted_steps_without_the_evaluations_between_them(
    layout: RunLayout, resumed: int
) -> None:
    # Steps 2 to 12 begin within 10 s: two evaluations of a second each are among them, one before, one behind.
    counted(layout, steps=12, seconds=13.0, first_seconds=3.0)
    evaluations = [{"eval_loss": 1.0, "eval_runtime": 1.0, "step": resumed + step} for step in (1, 4, 8, 12)]
    steps = [{"loss": 2.0, "step": resumed + step} for step in range(1, 13)]
    state = {"global_step": resumed + 12, "max_steps": resumed + 12, "log_history": [*steps, *evaluations]}
    write(layout.root / "output", "trainer_state.json", state)
    write(layout.root / "output", "train_results.json", {"train_samples_per_second": 1.0})
    found = own_results(plan_of("hf", batch=32), layout, time.time() - 5)
    assert found["samples_per_second"] == pytest.approx(32 * 10 / 8)
    assert found["step_seconds"] == pytest.approx(0.8)
    assert found["rates_cover"] == COUNTED_WITHOUT_EVALUATION
    write(layout.root / "output", "trainer_state.json", {**state, "max_steps": resumed + 20})  # it was ended before
    found = own_results(plan_of("hf", batch=32), layout, time.time() - 5)
    assert (found["samples_per_second"], found["rates_cover"]) == (32, COUNTED_STEPS)


def test_a_summary_says_what_its_rates_cover_and_keeps_the_latest_evaluation(layout: RunLayout) -> None:
    progress = Progress().take({"event": "start", "steps": 40, "first_step": 0}, 0.0)
    for record in ({"step": 4, "loss": 2.0, "samples_per_second": 3.0}, {"step": 4, "eval_loss": 1.5, "eval_f1": 0.25}):
        progress = progress.take(record, 0.0)
    plan = plan_of("builtin")
    found = build_summary(
        plan, layout, Verdict(1, "program", "it fell"), 1.0, progress, GpuWatch(plan.cards, layout.cards)
    )
    assert (found["steps"], found["total_steps"], found["rates_cover"]) == (4, 40, LATEST_STEPS)
    assert (found["eval_loss"], found["metrics"]) == (1.5, {"f1": 0.25})
    write(
        layout.root, "result.json", {"steps": 40, "samples_per_second": 5.0, "eval_loss": 1.0, "metrics": {"f1": 0.5}}
    )
    found = build_summary(plan, layout, Verdict(0, None, ""), 1.0, progress, GpuWatch(plan.cards, layout.cards))
    assert (found["rates_cover"], found["eval_loss"], found["metrics"]) == (STEPS_ALONE, 1.0, {"f1": 0.5})
