"""`trainkit data --prepare` on a cluster: an array job over the files, whose last task puts them together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.slurm_jobs import Cluster, Job
from trainkit.trainer.prepare import main

RECIPE = """
version: 1
name: r
devices: {type: cpu}
strategy: {kind: ddp}
train: {steps: 1}
nodes: {count: 2, processes_per_node: 1}
data: {kind: dataset, path: [a.jsonl, b.jsonl, c.jsonl], tokenizer: bytes}
cluster: {kind: slurm, time: "5:00", setup: ["export SAID=x"]}
env: {GREETING: "two words"}
"""


def rows(folder: Path, name: str, count: int) -> None:
    text = "".join(json.dumps({"text": f"{name} {number}" * 9}) + "\n" for number in range(count))
    (folder / f"{name}.jsonl").write_text(text)


def test_the_tasks_of_an_array_prepare_the_files_and_the_last_one_all_of_them(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = cluster.folder
    (folder / "r.yaml").write_text(RECIPE)
    for name, count in (("a", 40), ("b", 1), ("c", 30)):
        rows(folder, name, count)
    done = cluster.trainkit("data", "r.yaml", "--prepare", "--tasks", "2", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["tasks"], said["files"]) == (2, 3)
    assert said["cache"] == str(folder / ".cache/trainkit/prepared")
    jobs = [
        Job(f"{said['job']}_{number}", Path(said["folder"], f"task-{number}", "job.out"), cluster) for number in (0, 1)
    ]
    assert [each.code() for each in jobs] == [0, 0], [each.said for each in jobs]
    script = Path(said["folder"], "task-0", "job.sh").read_text()
    assert "#SBATCH --nodes=1\n" in script
    assert "export GREETING='two words'\n" in script
    shares = [json.loads(each.output.with_name("share.json").read_text())["files"] for each in jobs]
    assert [[Path(each).name for each in files] for files in shares] == [["a.jsonl", "c.jsonl"], ["b.jsonl"]]
    assert any("71 texts" in each.said for each in jobs), [each.said for each in jobs]
    assert len([*Path(said["cache"]).glob("*/meta.json")]) == 4
    assert not [*Path(said["cache"]).glob(".shared-*")]
    assert not cluster.runs() or cluster.trainkit("runs", "list", "--json").stdout.strip() == "[]"
    again = str(jobs[0].output.with_name("trainer.json"))  # as on a node that does not see the cache
    assert main(["--settings", again, "--share"]) == 2
    assert "does not see" in capsys.readouterr().err
    shown = cluster.trainkit("data", "r.yaml", "cluster={kind: none}", "nodes.count=1", "--json")
    assert json.loads(shown.stdout)["rows"] == 71, shown.stderr
    (folder / "b.jsonl").write_text("no JSON\n")
    done = cluster.trainkit("data", "r.yaml", "--prepare")
    assert done.returncode == 0, done.stderr
    number, text = done.stdout.split()[1].rstrip(":"), done.stdout
    bad = Job(f"{number}_1", Path(text.partition("output in ")[2].split("*")[0] + "1", "job.out"), cluster)
    assert bad.code() == 2
    assert "b.jsonl:1 is not JSON" in bad.said
