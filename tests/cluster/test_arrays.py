"""`trainkit submit --variant all`: one array job, a run directory for each variant, each with a life of its own."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.cluster.slurm_jobs import Cluster, Submitted

RECIPE = """
version: 1
name: r
program: {kind: torch, script: program.py, args: [say]}
strategy: {kind: ddp}
devices: {type: cpu}
nodes: {count: 1, processes_per_node: 1}
launcher: {grace_seconds: 5}
cluster: {kind: slurm, time: "10:00", requeue: {warn_seconds: 10}}
variants:
  small: {program: {args: [small]}}
  large: {program: {args: [large]}}
  wide: {program: {args: [wide]}}
"""
# Imports nothing: says what it is told, and waits for a file of that name.
PROGRAM = """
import os, sys, time
print(sys.argv[1], flush=True)
open(f"here-{sys.argv[1]}", "a").write("here ")
while not os.path.exists(f"go-{sys.argv[1]}"):
    time.sleep(0.05)
"""


def write(cluster: Cluster, recipe: str = RECIPE) -> None:
    (cluster.folder / "r.yaml").write_text(recipe)
    (cluster.folder / "program.py").write_text(PROGRAM)


def test_a_task_that_is_queued_again_starts_again_alone(cluster: Cluster) -> None:
    write(cluster)
    shown = cluster.trainkit("submit", "r.yaml", "--variant", "all", "--at-most", "2", "--dry-run")
    assert shown.returncode == 0, shown.stderr
    assert "#SBATCH --array=0-2%2" in shown.stdout
    assert [each in shown.stdout for each in ("variant small", "variant large", "variant wide")] == [True] * 3
    assert not cluster.runs()
    done = cluster.trainkit("submit", "r.yaml", "--variant", "all", "--at-most", "2")
    assert done.returncode == 0, done.stderr
    folders = [Path(each) for each in re.findall(r"run directory: (.*)", done.stdout)]
    numbers = re.findall(r"job (\S+)", done.stdout)
    assert [number.partition("_")[2] for number in numbers] == ["0", "1", "2"]
    assert cluster.runs() == folders
    small, large, wide = (
        Submitted(number, folder / "job.out", cluster, folder) for number, folder in zip(numbers, folders, strict=True)
    )
    for name in ("small", "large"):
        small.until((cluster.folder / f"here-{name}").exists, name, 30)
    assert wide.state("state") == "queued"
    array = small.number.partition("_")[0]
    whole = cluster.trainkit("status", array, "--json")
    assert [each["job"] for each in json.loads(whole.stdout)] == numbers, whole.stderr
    one = cluster.trainkit("checkpoint", array)
    assert (one.returncode, f"name one: {', '.join(numbers)}" in one.stderr) == (2, True), one.stderr
    attached = cluster.trainkit("attach", large.number, "--", "printenv", "SLURM_JOB_ID")
    assert attached.stdout == f"{large.field('JobId')}\n", attached.stderr
    assert cluster.slurm.run("scontrol", "requeue", small.number).returncode == 0
    small.until((cluster.folder / "here-wide").exists, "the third, in the place of the first", 30)
    (cluster.folder / "go-large").touch()
    assert large.end() == 0
    small.start_now()
    small.until(lambda: (cluster.folder / "here-small").read_text() == "here here ", "the second start", 30)
    (cluster.folder / "go-small").touch()
    assert (small.end(), small.code()) == (0, 0)
    cancelled = cluster.trainkit("cancel", array)  # of which two have ended
    assert cancelled.returncode == 0, cancelled.stderr
    assert cancelled.stdout.count("\n") == 1
    assert wide.end() == 143
    assert cluster.trainkit("cancel", array).returncode == 2
    found = [json.loads((folder / "status.json").read_text()) for folder in folders]
    assert [(each["outcome"], each["attempt"]) for each in found] == [("done", 2), ("done", 1), ("cancelled", 1)]
    assert cluster.trainkit("logs", large.number, "--rank", "0").stdout == "large\n"
    followed = cluster.trainkit("logs", array, "--rank", "0", "-f")
    said = zip(folders, ("small\n", "large\n", "wide\n"), strict=True)
    assert followed.stdout == "".join(f"==> {folder} <==\n{text}" for folder, text in said), followed.stderr
    assert followed.returncode == 143
    assert "large" in large.said
    assert "small" not in large.said


def test_variants_that_ask_for_different_jobs_are_no_array(cluster: Cluster) -> None:
    write(cluster, RECIPE.replace("[wide]}", '[wide]}, cluster: {time: "20:00"}'))
    done = cluster.trainkit("submit", "r.yaml", "--variant", "all")
    assert done.returncode == 2
    assert "cluster.time differs between the variants small and wide" in done.stderr
    assert "r.yaml:13:" in done.stderr
    assert not cluster.runs()


def test_variants_that_upload_to_one_repository_are_no_array(cluster: Cluster) -> None:
    recipe = RECIPE.replace("{kind: torch, script: program.py, args: [say]}", "{kind: builtin}").partition("  small")[0]
    asked = "train: {steps: 3}\ncheckpoint: {push_to_hub: ada/r}\nvariants:"
    rates = "  slow: {optimizer: {lr: 1.0e-4}}\n  fast: {optimizer: {lr: 1.0e-3}}\n"
    write(cluster, recipe.replace("variants:", asked) + rates)
    done = cluster.trainkit("submit", "r.yaml", "--variant", "all")
    assert done.returncode == 2, done.stderr
    assert "the variants slow, fast upload to ada/r, one over another" in done.stderr
    assert "r.yaml:11:" in done.stderr
    assert not cluster.runs()
