"""A run on two nodes that hangs names the rank and its host, and what all were doing, before it ends or goes on."""

from __future__ import annotations

from tests.cluster.slurm_jobs import Cluster
from tests.cluster.test_several_nodes import TINY
from trainkit.files import read_json

SLOW = """
import os, sys, time
for second in range(4):
    time.sleep(1.5)
    print("rank", os.environ["RANK"], "says", second, flush=True)
"""
RECIPE = """
version: 1
name: r
program: {kind: torch, script: program.py, verify: false}
strategy: {kind: ddp}
devices: {type: cpu}
nodes: {count: 2, processes_per_node: 1}
hang: {after_seconds: 3, then: end}
"""


def test_a_stopped_rank_is_named_with_its_host_and_the_run_goes_on_without_it(cluster: Cluster) -> None:
    words = f"{TINY}hang: {{after_seconds: 5}}\nlauncher: {{grace_seconds: 4}}\nlogging: {{every_steps: 1}}\n"
    (cluster.folder / "r.yaml").write_text(words.replace("STEPS", "150") + 'cluster: {kind: slurm, time: "10:00"}\n')
    run = cluster.trainkit_submit("r.yaml")

    def step() -> int:
        file = run.folder / "metrics.jsonl"
        return file.read_text().count("\n") if file.exists() else 0

    run.until(lambda: step() > 5, "a step")
    attempt = run.folder / "attempts" / "1"
    (record,) = (attempt / "ranks").rglob("rank-1.json")
    stopped = read_json(record)["pid"]
    # Its number is that of tk2's own process table.
    done = cluster.slurm.run("kill", "-STOP", str(stopped), on="tk2")
    assert done.returncode == 0, done.stderr
    run.says("hang: ", 20)
    line = next(line for line in run.said.splitlines() if line.startswith("hang: "))
    assert line.startswith(f"hang: rank 1 (tk2, pid {stopped}, state T stopped) has not joined all_reduce ")
    assert "; rank 0 waits there (" in line
    run.until(lambda: run.state("state") == "requeued", "the queue", 60)
    assert "train" in (attempt / "dumps" / "rank-0.stack").read_text()
    assert "a stopped process cannot answer" in (attempt / "dumps" / "rank-1.stack").read_text()
    assert [each["host"] for each in read_json(attempt / "dumps" / "hang.json")["ranks"]] == ["tk1", "tk2"]
    run.start_now()
    assert run.end() == 0, run.said
    assert (run.state("state"), run.state("attempt")) == ("done", 2)
    hosts = {read_json(each)["host"] for each in (run.folder / "attempts" / "2" / "ranks").rglob("rank-*.json")}
    assert hosts == {"tk1", "tk3"}


def test_a_slow_run_that_says_something_is_no_hang(cluster: Cluster) -> None:
    (cluster.folder / "r.yaml").write_text(RECIPE)
    (cluster.folder / "program.py").write_text(SLOW)
    job = cluster.submit("trainkit run r.yaml", "-N2")
    assert job.code() == 0, job.said
    assert "hang" not in job.said
    assert cluster.status()["hang"] is None
