"""The commands for a cluster that pages of docs/ print, as printed, on a real Slurm."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from tests.cluster.slurm_jobs import Cluster, Submitted, losses

DOCS = Path(__file__).parents[2] / "docs"
# What the page's job has of a real cluster, as the tests' has it: a model of seconds, on two nodes without GPUs.
TINY = (
    *("--variant", "tiny", "name=llama-70b-full", "checkpoint.resume=auto", "nodes.processes_per_node=1"),
    *("cluster.machine=null", "cluster.partition=main", "cluster.time=10:00", "cluster.setup=[]"),
)


def lines(page: str) -> list[list[str]]:
    """The words of each command that a page prints for Slurm."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh slurm\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    found = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]
    assert {program for program, *_ in found} == {"trainkit"}
    return [words for _, *words in found]


def test_every_command_of_the_page_runs(cluster: Cluster) -> None:
    commands = lines("clusters")
    assert len(commands) >= 5
    for words in commands:
        small = ["model.hidden_size=16", "model.layers=1", "model.heads=1", "data.sequence_length=32", "eval.batches=1"]
        done = cluster.trainkit(*words, *(small if words[0] == "submit" else ()))
        assert done.returncode == 0, f"{words}\n{done.stderr}"
    assert cluster.runs("quickstart")


def test_slurm_takes_a_job_of_64_gpus_and_a_small_one_of_the_same_recipe_goes_on_with_fewer_nodes(
    cluster: Cluster,
) -> None:
    page = (DOCS / "outgrowing.md").read_text(encoding="utf-8")
    (recipe,) = re.findall(r"^<!-- file slurm.yaml -->\n```yaml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (cluster.folder / "slurm.yaml").write_text(recipe)
    dry, whole, status, logs, fewer = lines("outgrowing")
    done = cluster.trainkit(*dry)
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith(" on big[1-8] (partition gpu)\n")
    first = cluster.trainkit_submit(*whole[1:], *TINY, "nodes.count=2")
    for words in (status, logs):
        done = cluster.trainkit(*words)
        assert done.returncode == 0, f"{words}\n{done.stderr}"
    assert first.end() == 0
    assert ranks_of(first) == 2
    second = cluster.trainkit_submit(
        *fewer[1:], *TINY, "nodes.count=1", "efficiency.offload_activations=false", "train.steps=9"
    )
    assert second.end() == 0
    assert ranks_of(second) == 1
    assert [*losses(first.folder)] == [1, 2, 3, 4, 5, 6]
    assert [*losses(second.folder)] == [7, 8, 9]


def ranks_of(job: Submitted) -> int:
    """How many ranks a run was planned with."""
    return int(json.loads((job.folder / "plan.json").read_text())["topology"]["world_size"])
