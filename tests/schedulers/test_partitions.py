"""Time limits of the partitions that a job may start in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan
from trainkit.recipe.resolved import Resolved
from trainkit.recipe.schema import Slurm
from trainkit.schedulers import slurm
from trainkit.schedulers.base import Query
from trainkit.schedulers.jobs import submitting
from trainkit.schedulers.slurm import Slurm as SlurmScheduler

MOST = {"short": "01:00:00", "tiny": "10:00", "long": "7-00:00:00", "open": "UNLIMITED"}
RECIPE = "version: 1\nname: r\ndevices: {type: cpu}\ndata: {kind: random}\ntrain: {steps: 1}\n"


@pytest.mark.parametrize(
    ("partitions", "time", "severity", "said"),
    [
        ("short,long", "2:00:00", "note", "partition short has MaxTime=01:00:00: the job starts in long alone"),
        ("tiny,open,short", "2:00:00", "note", "the job starts in open alone"),
        ("tiny,short", "2:00:00", "error", "tiny has MaxTime=10:00, partition short has MaxTime=01:00:00"),
        ("short", "infinite", "error", "cluster.time is infinite, and partition short has MaxTime=01:00:00"),
        ("short,long", "30:00", "", ""),
    ],
)
def test_a_job_starts_in_any_partition_that_allows_its_time(
    solve: Callable[..., Resolved],
    here: Facts,
    monkeypatch: pytest.MonkeyPatch,
    partitions: str,
    time: str,
    severity: str,
    said: str,
) -> None:
    def answer(query: Query[dict[str, str]], _environ: object) -> dict[str, str]:
        return {"PartitionName": query.argv[-1], "MaxTime": MOST[query.argv[-1]]}

    monkeypatch.setattr(slurm, "ask", answer)
    section = f'{{kind: slurm, partition: "{partitions}", time: "{time}"}}'
    resolved = solve(f"{RECIPE}cluster: {section}\n")
    assert isinstance(resolved.recipe.cluster, Slurm)
    found = [*SlurmScheduler()._limits(resolved.recipe.cluster, resolved, build_plan(resolved, here).plan, {})]
    assert [each.severity for each in found] == ([severity] if severity else [])
    assert all(said in each.what for each in found)


@pytest.mark.parametrize(
    ("words", "options", "refused"),
    [
        ("", set(), True),
        ("--clusters=far", {"--clusters=far"}, False),
        ("-Mfar", {"--clusters=far"}, False),
        ("-Mfar,here", set(), False),  # nobody knows yet which of them it will be
        ("--clusters=all", set(), False),
    ],
)
def test_the_limits_are_those_of_the_cluster_that_the_recipe_names(
    solve: Callable[..., Resolved],
    here: Facts,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: str,
    options: set[str],
    refused: bool,
) -> None:
    """Of the cluster far the partition has no limit, and KillWait is long."""
    asked: list[tuple[str, ...]] = []

    def answer(query: Query[Any], _environ: object) -> Any:
        asked.append(query.argv)
        far = "--clusters=far" in query.argv
        if query.argv[0] == "sbatch":
            return "Slurm would start it"
        if "config" in query.argv:
            return {"KillWait": "9000" if far else "1"}
        return {"PartitionName": "p", "MaxTime": "UNLIMITED" if far else "00:05:00"}

    monkeypatch.setattr(slurm, "ask", answer)
    section = f'{{kind: slurm, time: "1:00:00", sbatch: [{words and repr(words)}], requeue: {{after: []}}}}'
    resolved = solve(f"{RECIPE}cluster: {section}\n")
    found = submitting.dry_run(build_plan(resolved, here).plan, resolved, {}, str(tmp_path))
    assert bool(found.refused) is refused
    assert any("KillWait" in each.what for each in found.remarks) is refused
    of_scontrol = [argv for argv in asked if argv[0] == "scontrol"]
    assert {word for argv in of_scontrol for word in argv if word.startswith("--clusters")} == options
    assert bool(of_scontrol) is (refused or bool(options))
