"""Filling in what is known only at run time."""

from __future__ import annotations

from pathlib import Path

import pytest
from handmade_plans import make_plan

from trainkit.errors import ExitCode, MachineError
from trainkit.launch_plan.model import PlannedFile, Preparation, Variable, text
from trainkit.runner.binding import bind, run_values
from trainkit.runner.rundir.create import write_attempt, write_plan
from trainkit.runner.rundir.layout import RunLayout

LAYOUT = RunLayout(Path("/runs/id"))
VALUES = run_values(LAYOUT, 29111, 0, "127.0.0.1", "127.0.0.1")


def test_every_variable_is_replaced_and_nothing_else_is_touched() -> None:
    words = ("prog", "$HOME", "{x}", "a b", text("--at=", Variable.RUN_DIR, "/x"), text(Variable.PORT))
    bound = bind(make_plan(words, "runs"), VALUES, {})
    assert bound.argv[-6:] == ("prog", "$HOME", "{x}", "a b", "--at=/runs/id/x", "29111")
    assert "/runs/id/attempts/1" in bound.argv


def test_node_0_hosts_the_rendezvous_and_no_other_node() -> None:
    plan = make_plan((text(Variable.IS_HOST), text(Variable.NODE_RANK)), "runs")
    elsewhere = run_values(LAYOUT, 29111, 3, "10.0.0.1", "10.0.0.4")
    assert bind(plan, VALUES, {}).argv[-2:] == ("true", "0")
    assert bind(plan, elsewhere, {}).argv[-2:] == ("false", "3")


def test_the_environment_is_the_callers_without_leaks_and_with_what_is_set_and_taken() -> None:
    plan = make_plan(("prog",), "runs", variables={"A": "new"}, unset=("PET_*", "OLD", "TOKEN"), take=("TOKEN",))
    caller = {"HOME": "/home/x", "A": "old", "PET_NNODES": "3", "OLD": "1", "OLDER": "2", "TOKEN": "secret"}
    child = bind(plan, VALUES, caller).environment
    assert child["A"] == "new"
    assert child["TOKEN"] == "secret"
    assert child["OLDER"] == "2"
    assert child["HOME"] == "/home/x"
    assert not {"PET_NNODES", "OLD"} & set(child)


def test_a_missing_variable_is_the_machines_fault_and_every_one_is_named() -> None:
    plan = make_plan(("prog",), "runs", take=("HF_TOKEN", "WANDB_API_KEY"))
    with pytest.raises(MachineError) as caught:
        bind(plan, VALUES, {})
    assert caught.value.exit_code == ExitCode.MACHINE
    assert ["HF_TOKEN" in d.what for d in caught.value.diagnostics] == [True, False]
    assert all(d.key == "env_from" and d.hint for d in caught.value.diagnostics)


def test_files_are_written_and_preparations_are_bound(tmp_path: Path) -> None:
    plan = make_plan(
        ("prog",),
        "runs",
        files=[PlannedFile("deepspeed.json", "{}")],
        preparations=[Preparation("build", (text("make"), text(Variable.RUN_DIR)), "ops")],
    )
    bound = bind(plan, VALUES, {})
    write_plan(RunLayout(tmp_path), plan, "", "")
    write_attempt(RunLayout(tmp_path), 1, plan, bound)
    assert (tmp_path / "deepspeed.json").read_text() == "{}"
    assert bound.preparations == (("build", ("make", "/runs/id"), "ops"),)
