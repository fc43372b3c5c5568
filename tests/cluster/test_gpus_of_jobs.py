"""The GPUs that Slurm gives a job are those that its ranks use. They are made up; Slurm gives them for real."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.slurm_jobs import Cluster
from tests.made_up_cards import card, environments

RECIPE = """
version: 1
name: r
program: {kind: torch, script: program.py, verify: false}
strategy: {kind: ddp}
devices: {type: cuda}
nodes: {processes_per_node: 2}
cluster: {kind: slurm, machine: facts.json, time: "10:00", nodelist: tk1, cpus_per_node: 1}
"""
PROGRAM = """
import os, time
print(os.environ["CUDA_VISIBLE_DEVICES"], os.environ["SLURM_STEP_GPUS"], flush=True)
while len(os.listdir("here")) < 2:
    open(os.path.join("here", os.environ["SLURM_JOB_ID"]), "w").close()
    time.sleep(0.05)
"""


@pytest.fixture
def with_gpus(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """The cluster's four GPUs, as NVIDIA's library would tell of them."""
    root = Path(__file__).parents[2]
    for name, value in environments(tmp_path, {"PYTHONPATH": str(root)})(*map(card, range(4))).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "here").mkdir()
    (tmp_path / "facts.json").write_text(cluster.trainkit("env", "facts").stdout)
    (tmp_path / "r.yaml").write_text(RECIPE)
    return cluster


def test_two_jobs_on_a_node_have_the_gpus_that_slurm_gave_each(with_gpus: Cluster) -> None:
    jobs = [with_gpus.trainkit_submit("r.yaml") for _ in range(2)]
    assert [job.end() for job in jobs] == [0, 0], jobs[0].said + jobs[1].said
    said = {(job.folder / "attempts/1/logs/rank-0.out").read_text().splitlines()[0] for job in jobs}
    assert said == {"0,1 0,1", "2,3 2,3"}


def twice_the_gpus(file: Path) -> None:
    """Of a node with four make one with eight."""
    facts = json.loads(file.read_text())
    facts["gpus"] += [{**each, "index": 4 + each["index"], "uuid": f"{each['uuid']}-b"} for each in facts["gpus"]]
    file.write_text(json.dumps(facts))


def test_more_gpus_than_any_node_has_are_refused_by_slurm(with_gpus: Cluster, tmp_path: Path) -> None:
    twice_the_gpus(tmp_path / "facts.json")
    refused = with_gpus.trainkit("submit", "r.yaml", "nodes.processes_per_node=8")
    assert refused.returncode == 2, refused.stderr
    assert "nodes.processes_per_node" in refused.stderr
    assert "Requested node configuration is not available" in refused.stderr
    assert not with_gpus.runs()


def test_a_node_with_fewer_gpus_than_planned_starts_nothing(with_gpus: Cluster, tmp_path: Path) -> None:
    twice_the_gpus(tmp_path / "facts.json")
    # A cluster that gives whole nodes: Slurm is asked for no GPUs, and so does not know better.
    job = with_gpus.trainkit_submit("r.yaml", "nodes.processes_per_node=8", "cluster.gpus=none")
    assert job.end() == 4, job.said
    assert "tk1: not on this machine: 8 GPUs are requested, 4 available" in job.said, job.said
    assert not list(job.folder.rglob("rank-0.out"))
