"""The job of `trainkit data --prepare`: one node without GPUs for each share of the files, and no run on it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from trainkit.launch_plan.model import Plan, text
from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan
from trainkit.recipe.resolved import Resolved
from trainkit.schedulers.jobs.submitting import preparing_script

Solve = Callable[..., Resolved]
Machine = Callable[..., Facts]


def planned(solve: Solve, machine: Machine, **section: object) -> Plan:
    given = "version: 1\nname: r\ntrain: {steps: 1}\ndata: {kind: dataset, path: /d/a.jsonl}\ndevices: {type: cuda}\n"
    given += f"nodes: {{count: 4}}\nstrategy: {{kind: ddp}}\ncluster: {json.dumps(section)}\n"
    return build_plan(solve(given), machine(2), preparing=True).plan


def script(plan: Plan, stem: str, count: int) -> list[str]:
    argv = next(each.argv for each in plan.preparations)
    return preparing_script(plan, (*argv, text("--share")), {"A": "b c"}, stem, count).splitlines()


def test_a_share_of_slurm_is_a_task_without_gpus(solve: Solve, machine: Machine) -> None:
    lines = script(planned(solve, machine, kind="slurm", time="10:00", cpus_per_node=8), "/r uns/x", 3)
    assert lines[:2] == ["#!/bin/bash", "#SBATCH --array=0-2"]
    for each in ("--nodes=1", "--cpus-per-task=8", "--time=10:00", "--output='/r uns/x'-%a/job.out"):
        assert f"#SBATCH {each}" in lines
    assert not [each for each in lines if "gpu" in each or "job batch" in each]
    assert lines[-4:-1] == ["export A='b c'", "trainkit_folder='/r uns/x'-$SLURM_ARRAY_TASK_ID", "trap '' USR1 USR2"]
    assert lines[-1].startswith("exec ")
    assert lines[-1].endswith('-P -m trainkit.trainer.prepare --settings "$trainkit_folder"/trainer.json --share')


def test_a_share_of_pbs_is_a_chunk_without_gpus(solve: Solve, machine: Machine) -> None:
    plan = planned(solve, machine, kind="pbs", cpus_per_node=8)
    lines = script(plan, "/runs/x", 2)
    assert "#PBS -l select=1:ncpus=8:mpiprocs=1" in lines
    assert "#PBS -o /runs/x-^array_index^/pbs.out" in lines
    assert lines[-3] == "trainkit_folder=/runs/x-$PBS_ARRAY_INDEX"
    alone = script(plan, "/runs/x", 1)  # PBS has no array of one
    assert "#PBS -o /runs/x-0/pbs.out" in alone
    assert not [each for each in alone if "ARRAY" in each.upper()]


@pytest.mark.cli
@pytest.mark.parametrize(("setup", "code", "said"), [("export B=2", 0, "b c 2"), ("false", 1, "line 1 failed")])
def test_a_set_up_that_fails_ends_the_task(
    setup: str, code: int, said: str, solve: Solve, machine: Machine, tmp_path: Path
) -> None:
    plan = planned(solve, machine, kind="slurm", setup=[setup])
    made = preparing_script(plan, (text("/bin/sh"), text("-c"), text("echo $A $B")), {"A": "b c"}, "/x", 1)
    (tmp_path / "job.sh").write_text(made)
    done = subprocess.run(["bash", str(tmp_path / "job.sh")], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, said in done.stdout + done.stderr) == (code, True), done
