"""Nodes and daemons that go away under a submitted run, on a Slurm that no other test uses."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm import Slurm, lacking

from tests.cluster.slurm_jobs import Cluster

RECIPE = """
version: 1
name: r
program: {kind: torch, script: program.py}
strategy: {kind: ddp}
devices: {type: cpu}
nodes: {count: 2, processes_per_node: 1}
launcher: {grace_seconds: 3}
cluster: {kind: slurm, time: "10:00"}
"""
PROGRAM = """
import os, time
print("rank", os.environ["RANK"], "on", os.uname().nodename, flush=True)
while not os.path.exists("go"):
    time.sleep(0.05)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A Slurm of three nodes for one test."""
    if why := lacking():
        pytest.skip(f"a Slurm {why} (apt-get install slurmctld slurmd slurm-client munge iproute2)")
    for name in [name for name in os.environ if name.startswith(("SLURM_", "TRAINKIT_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "r.yaml").write_text(RECIPE)
    (tmp_path / "program.py").write_text(PROGRAM)
    with tempfile.TemporaryDirectory(prefix="trainkit-slurm-", dir="/tmp") as folder:
        slurm = Slurm(Path(folder) / "cluster")
        try:
            slurm.up(3, 4, tied=True)
            yield Cluster(slurm, tmp_path)
        finally:
            slurm.down()


def test_a_node_that_dies_is_left_out_and_the_run_goes_on_without_it(own: Cluster) -> None:
    run = own.trainkit_submit("r.yaml")
    run.until(lambda: "rank 0 on tk1" in run.said, "rank 0")
    own.slurm.machines.down("tk2")
    run.until(lambda: json.loads((run.folder / "status.json").read_text())["state"] == "requeued", "the queue", 40)
    status = json.loads((run.folder / "status.json").read_text())
    assert status["outcome"] == "node_lost"
    assert "node 1 (tk2) was lost" in status["why"]
    run.until(lambda: run.field("ExcNodeList") == "tk2", "the exclusion", 20)
    run.start_now()
    (own.folder / "go").touch()
    assert run.end() == 0
    said = "".join(path.read_text() for path in (run.folder / "attempts/2").rglob("rank-*.out"))
    assert sorted(said.splitlines()) == ["rank 0 on tk1", "rank 1 on tk3"]


def test_a_job_that_is_queued_again_by_hand_goes_on_and_a_silent_controller_is_no_failure(own: Cluster) -> None:
    run = own.trainkit_submit("r.yaml")
    run.until(lambda: "rank 0 on tk1" in run.said, "rank 0")
    assert own.slurm.run("scontrol", "requeue", run.number).returncode == 0
    run.until(lambda: run.state("state") == "requeued", "the queue", 30)
    run.start_now()
    run.until(lambda: run.said.count("rank 0 on tk1") == 2, "rank 0 again")
    own.slurm.stop_controller()
    silent = own.trainkit("status", "r")
    assert (silent.returncode, silent.stdout.startswith("unknown, attempt 2")) == (0, True), silent.stdout
    assert "by its files running" in silent.stdout
    (own.folder / "go").touch()
    run.until(lambda: '"state": "ended"' in (run.folder / "status.json").read_text(), "the end")
    own.slurm.start_controller()
    assert run.end() == 0
    run.until(
        lambda: run.state("state") == "done", "the controller's word on the end"
    )  # it begins with what it knew last
    assert run.state("attempt") == 2


def test_a_run_directory_that_the_nodes_do_not_see_is_named(own: Cluster) -> None:
    done = own.trainkit("submit", "r.yaml", "output.root=/dev/shm/runs", "--wait")
    assert done.returncode == 4
    assert "do its nodes see /dev/shm/runs/r/" in done.stderr
