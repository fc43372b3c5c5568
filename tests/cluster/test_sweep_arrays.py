"""`trainkit sweep --submit`: the trials of a grid as one array job, whose results the same line takes."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest

from tests.cluster.slurm_jobs import Cluster, Submitted

pytest.importorskip("optuna")

RECIPE = """
version: 1
name: r
program: {kind: torch, script: program.py, reads_recipe: true}
strategy: {kind: ddp}
devices: {type: cpu}
nodes: {count: 1, processes_per_node: 1}
launcher: {grace_seconds: 5}
cluster: {kind: slurm, time: "10:00", requeue: {warn_seconds: 10}}
"""
PROGRAM = """
import json, os, pathlib, re, sys
recipe = pathlib.Path(os.environ["TRAINKIT_RECIPE"])
rate = float(re.search(r"lr: (\\S+)", recipe.read_text())[1])
if rate == 3:
    sys.exit("ValueError: three")
(recipe.parent / "metrics.jsonl").write_text(json.dumps({"step": 1, "eval_loss": rate}) + "\\n")
"""


def is_over(job: Submitted) -> bool:
    return job.state("state") in ("done", "failed")


def test_the_trials_of_a_grid_are_an_array_and_the_same_line_takes_their_results(cluster: Cluster) -> None:
    (cluster.folder / "r.yaml").write_text(RECIPE)
    (cluster.folder / "program.py").write_text(PROGRAM)
    line = ("sweep", "r.yaml", "optimizer.lr=2,1,3", "--output", "found", "--submit", "--jobs", "2")
    done = cluster.trainkit(*line)
    assert done.returncode == 0, done.stderr
    folders = [Path(each) for each in re.findall(r"run directory: (.*)", done.stdout)]
    numbers = re.findall(r"job (\S+)", done.stdout)
    assert cluster.runs() == folders
    assert [number.partition("_")[2] for number in numbers] == ["0", "1", "2"]
    for number, folder in zip(numbers, folders, strict=True):
        job = Submitted(number, folder / "job.out", cluster, folder)
        job.until(partial(is_over, job), "the end", 60)
    here = cluster.trainkit(*line[:5])
    assert here.returncode == 2
    assert "3 trials of this sweep were submitted as jobs" in here.stderr
    # What has failed is submitted again, alone.
    (cluster.folder / "program.py").write_text(PROGRAM.replace("rate == 3", "False"))
    again = cluster.trainkit(*line)
    assert again.returncode == 0, again.stderr
    shown = cluster.trainkit("sweep", "found", "--show", "--json")
    trials = json.loads(shown.stdout)["trials_made"]
    assert [(each["number"], each["state"], each["value"]) for each in trials[:2]] == [
        (1, "done", 1.0),
        (0, "done", 2.0),
    ]
    assert "lr: 1" in (cluster.folder / "found/best.yaml").read_text()


def test_settings_of_the_job_cannot_vary_in_an_array(cluster: Cluster) -> None:
    (cluster.folder / "r.yaml").write_text(RECIPE)
    (cluster.folder / "program.py").write_text(PROGRAM)
    done = cluster.trainkit("sweep", "r.yaml", "nodes.processes_per_node=1,2", "--output", "found", "--submit")
    assert done.returncode == 2
    assert "the tasks of an array have one job script, and nodes.processes_per_node differs" in done.stderr
    assert not cluster.runs()
