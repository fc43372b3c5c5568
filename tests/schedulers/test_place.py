"""Which node of a job this is, by variables that were recorded in jobs of Slurm 22.05."""

from __future__ import annotations

import pytest

from trainkit.errors import MachineError
from trainkit.schedulers.base import Allocation, Place
from trainkit.schedulers.registry import place_in

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "tk[1-2]"}
BATCH = {**JOB, "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_TASKS_PER_NODE": "1(x2)"}
STEP = {
    **JOB, "SLURM_NODEID": "1", "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "tk[1-2]",
}  # fmt: skip


def test_a_step_says_which_node_it_is_on_and_who_the_others_are() -> None:
    assert place_in(STEP) == Place(1, 2, ("tk1", "tk2"), "7.0.0")
    assert place_in({**STEP, "SLURM_RESTART_COUNT": "2", "SLURM_STEP_ID": "1"}) == Place(1, 2, ("tk1", "tk2"), "7.1.2")


@pytest.mark.parametrize("step", [{}, {"SLURM_STEP_ID": "4294967290"}, {"SLURM_STEP_ID": "4294967291"}])
def test_the_batch_script_and_the_shell_of_salloc_are_no_node(step: dict[str, str]) -> None:
    assert place_in({**BATCH, **step}) == Allocation(2, "7", "slurm")


def test_several_processes_on_a_node_are_refused_with_the_way_out() -> None:
    with pytest.raises(MachineError, match=r"4 processes on 2 nodes") as raised:
        place_in({**STEP, "SLURM_STEP_NUM_TASKS": "4"})
    assert "--ntasks-per-node=1" in raised.value.diagnostics[0].hint


@pytest.mark.parametrize("name", ["JOB_COMPLETION_INDEX", "PBS_NODENUM", "NODE_RANK"])
def test_other_schedulers_say_the_number_alone(name: str) -> None:
    assert place_in({name: "3"}) == Place(3)


def test_outside_of_any_job_there_is_no_place() -> None:
    assert place_in({"HOME": "/root", "NODE_RANK": "first"}) is None


def test_a_step_of_part_of_the_allocation_counts_its_own_nodes() -> None:
    part = {
        **STEP,
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_STEP_NODELIST": "tk2",
        "SLURM_NODEID": "0",
    }
    assert place_in(part) == Place(0, 1, ("tk2",), "7.0.0")
