"""A submitted run's life: queued, running, queued again, and its end, with what people ask of it meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.cluster.slurm_jobs import Cluster, losses
from trainkit.files import read_json
from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.rundir.listing import checkpoints_of

RECIPE = """
version: 1
name: r
program: {kind: torch, script: program.py, args: [WHAT]}
strategy: {kind: ddp}
devices: {type: cpu}
nodes: {count: 2, processes_per_node: 1}
launcher: {grace_seconds: 5}
cluster: {kind: slurm, time: "10:00", requeue: {warn_seconds: 10}}
"""
# Imports nothing: says where each rank is, and ends, or waits, as it is told.
PROGRAM = """
import os, signal, subprocess, sys, time
rank, what = os.environ["RANK"], sys.argv[1]
print("rank", rank, "of", os.environ["WORLD_SIZE"], "on", os.uname().nodename, flush=True)
if what == "wait":
    asked = []
    signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
    helper = subprocess.Popen(["sleep", "300"])  # a handler is not inherited
    print("rank", rank, "waits", flush=True)
    while True:
        time.sleep(0.05)
        if asked:
            asked.clear()
            try:
                print("the helper has ended", helper.wait(1), flush=True)
            except subprocess.TimeoutExpired:
                print("rank", rank, "has saved, and its helper lives", flush=True)
elif what == "fail" and rank == "1":
    sys.exit(7)
elif what == "fail":
    time.sleep(60)
"""
TRAINING = """
version: 1
name: r
devices: {type: cpu}
strategy: {kind: KIND}
nodes: {count: 2, processes_per_node: 1}
launcher: {grace_seconds: 8}
batch: {global: 4}
model: {layers: 1, heads: 1, hidden_size: 16}
data: {path: python-stdlib, sequence_length: 32}
train: {steps: 900}
logging: {every_steps: 1}
env: {OMP_NUM_THREADS: 1}  # two processes of one machine would have as many as two of two, and round otherwise
env_from: [PASSPHRASE]
cluster: {kind: slurm, time: "10:00", requeue: {warn_seconds: 10}}
"""


def write(cluster: Cluster, recipe: str, what: str = "say") -> None:
    (cluster.folder / "r.yaml").write_text(recipe.replace("WHAT", what))
    (cluster.folder / "program.py").write_text(PROGRAM)


@pytest.mark.parametrize(("kind", "how"), [("ddp", "time limit"), ("fsdp", "preemption")])
def test_a_job_whose_time_is_up_goes_on_bit_equal_in_the_same_run_directory(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, kind: str, how: str
) -> None:
    monkeypatch.setenv("PASSPHRASE", "hunter2-hunter2")
    write(cluster, TRAINING.replace("KIND", kind))
    # On one machine, and never interrupted.
    words = ["-P", "-m", "trainkit", "run", "r.yaml", "name=whole", "nodes.count=1", "nodes.processes_per_node=2"]
    whole = subprocess.Popen([sys.executable, *words], cwd=cluster.folder, stderr=subprocess.DEVNULL)
    run = cluster.trainkit_submit("r.yaml")
    follower = cluster.start("logs", "r", "-f", "--all")
    run.until(lambda: len(losses(run.folder)) > 5, "the fifth step")
    assert run.state("state") == "running"
    assert "hunter2" not in cluster.slurm.run("scontrol", "show", "job", "-dd", run.number).stdout
    if how == "time limit":  # the other saves when it is asked to end, and only then
        assert cluster.trainkit("checkpoint", run.number).returncode == 0
        run.until(lambda: bool(list(run.folder.glob("checkpoints/step-*"))), "a checkpoint")
    if how == "preemption":
        high = cluster.submit("sleep 1", "-N2", "-p", "high", "-n8", "--ntasks-per-node=4")
        high.code()
    else:
        assert cluster.slurm.run("scancel", "--batch", "--signal=USR1", run.number).returncode == 0
    run.until(lambda: run.state("state") == "requeued", "the queue", 30)
    run.start_now()
    assert run.end() == 0, run.said
    assert (run.state("state"), run.state("attempt"), run.state("exit_code")) == ("done", 2, 0)
    followed = follower.communicate(timeout=30)[0].splitlines()
    assert follower.returncode == 0
    assert {"[0 tk1] gpt with 7,920", "[1 tk2] gpt with 7,920"} <= {line[:22] for line in followed}
    assert [line for line in followed if line.startswith("[0 tk") and "resumed from" in line]
    assert whole.wait(120) == 0
    (reference,) = cluster.runs("whole")
    assert losses(run.folder) == losses(reference)
    assert len(cluster.runs("r")) == 1
    secret = subprocess.run(["grep", "-rl", "hunter2", str(run.folder)], capture_output=True, text=True, check=False)
    assert not secret.stdout


def test_the_exit_code_of_a_program_is_the_jobs_and_it_is_not_queued_again(cluster: Cluster) -> None:
    write(cluster, RECIPE, "fail")
    (cluster.folder / "my env").symlink_to(sys.prefix)
    python = f"cluster.python={cluster.folder}/my env/bin/python"
    done = cluster.trainkit("submit", "r.yaml", "--wait", python)
    assert done.returncode == 7, done.stderr
    shown = json.loads(cluster.trainkit("status", "r", "--json").stdout)
    assert (shown["state"], shown["exit_code"], shown["attempt"]) == ("failed", 7, 1)
    assert shown["why"] == "rank 1 (tk2) exited with code 7"
    # Until somebody has it queued again: then nobody removes the run.
    assert cluster.slurm.run("scontrol", "requeue", shown["job"]).returncode == 0
    shown = json.loads(cluster.trainkit("status", "r", "--json").stdout)
    assert (shown["state"], shown["exit_code"]) == ("requeued", None)
    assert cluster.trainkit("runs", "prune", "--keep", "0", "--yes").stdout.endswith("nothing to remove\n")
    assert cluster.trainkit("cancel", "r").stdout == f"cancelled job {shown['job']}\n"
    assert cluster.trainkit("runs", "prune", "--keep", "0", "--yes").stdout.endswith("removed 1 of 1 runs\n")


def test_a_line_of_setup_that_fails_ends_the_run_by_name(cluster: Cluster) -> None:
    write(cluster, RECIPE.replace("requeue: {", 'setup: ["cd /", "module load cuda"], requeue: {after: [failure], '))
    done = cluster.trainkit("submit", "r.yaml", "--wait")
    assert done.returncode == 4, done.stderr
    shown = json.loads(cluster.trainkit("status", "r", "--json").stdout)
    assert (shown["state"], shown["exit_code"]) == ("failed", 4)
    assert shown["why"] == "cluster.setup line 2 failed with exit code 127: module load cuda"
    run = cluster.runs()[-1]
    assert "module: command not found" in (run / "job.out").read_text()


def test_a_job_without_progress_is_not_queued_for_ever(cluster: Cluster) -> None:
    write(cluster, RECIPE.replace("requeue: {", "requeue: {after: [failure], without_progress: 2, "), "fail")
    run = cluster.trainkit_submit("r.yaml")
    run.until(lambda: run.state("state") == "requeued", "the queue")
    run.start_now()
    assert run.end() == 7
    assert (run.state("state"), run.state("attempt")) == ("no_progress", 2)


def test_a_run_is_cancelled_in_order_or_at_once_and_a_command_can_join_it(cluster: Cluster) -> None:
    write(cluster, RECIPE, "wait")
    run = cluster.trainkit_submit("r.yaml")
    run.until(lambda: "rank 0 of 2" in run.said, "rank 0")
    joined = cluster.trainkit("attach", "r", "--node", "1", "--", "hostname")
    assert joined.stdout == "tk2\n", joined.stderr
    everything = "logs", "r", "--all"
    run.until(lambda: cluster.trainkit(*everything).stdout.count("waits") == 2, "both ranks")
    assert cluster.trainkit("checkpoint", "r").returncode == 0
    run.until(lambda: "helper" in cluster.trainkit(*everything).stdout, "the signal")
    run.until(lambda: cluster.trainkit(*everything).stdout.count("has saved, and its helper lives") == 2, "both", 20)
    assert cluster.trainkit("cancel", "r").returncode == 0
    run.until(lambda: run.field("JobState") == "CANCELLED", "the end", 30)
    assert (run.state("state"), run.state("exit_code")) == ("cancelled", 143)
    assert cluster.left_on_nodes() == []
    again = cluster.trainkit_submit("r.yaml")
    again.until(lambda: "rank 0 of 2" in again.said, "rank 0")
    assert cluster.trainkit("cancel", again.number, "--now").returncode == 0
    again.until(lambda: cluster.left_on_nodes() == [], "an end of all processes", 15)
    again.until(lambda: cluster.trainkit("status", again.number).stdout.startswith("cancelled"), "the state", 30)
    assert cluster.trainkit("cancel", again.number).returncode == 2


def test_a_training_that_is_cancelled_has_a_checkpoint_of_where_it_was(cluster: Cluster) -> None:
    write(cluster, TRAINING.replace("KIND", "ddp").replace("env_from: [PASSPHRASE]\n", ""))
    run = cluster.trainkit_submit("r.yaml", "train.steps=100000")
    run.until(lambda: bool(losses(run.folder)), "a step")
    assert cluster.trainkit("cancel", "r").returncode == 0
    run.until(lambda: run.field("JobState") == "CANCELLED", "the end", 30)
    assert (run.state("state"), run.state("exit_code")) == ("cancelled", 143)
    (saved,) = checkpoints_of(RunLayout(run.folder))
    assert saved.step == max(losses(run.folder))
    assert cluster.left_on_nodes() == []


@pytest.mark.parametrize("when", ["submitted", "starting"])
def test_a_run_that_is_cancelled_before_it_began_is_cancelled(cluster: Cluster, when: str) -> None:
    write(cluster, RECIPE, "wait")
    run = cluster.trainkit_submit("r.yaml")
    if when == "starting":
        run.until(lambda: read_json(run.folder / "status.json").get("state") == "starting", "an attempt")
    cancelled = cluster.trainkit("cancel", "r")
    assert cancelled.returncode == 0, cancelled.stderr
    run.until(lambda: run.field("JobState") not in {"PENDING", "RUNNING", "COMPLETING"}, "the end")
    assert (run.state("state"), run.state("exit_code")) == ("cancelled", 143), run.state("why")


def test_a_cancel_that_did_not_reach_slurm_is_not_taken_up_later(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(cluster, RECIPE, "wait")
    monkeypatch.setenv("SBATCH_TIMELIMIT", "1")  # sbatch(1): it counts more than a line of the script
    monkeypatch.setenv("SBATCH_PARTITION", "high")
    run = cluster.trainkit_submit("r.yaml", "cluster.sbatch=[--hold]")
    assert (run.field("TimeLimit"), run.field("Partition")) == ("00:10:00", "main")
    words = [sys.executable, "-P", "-m", "trainkit", "cancel", "r"]
    environ = {**os.environ, "PATH": str(cluster.folder)}
    failed = subprocess.run(words, cwd=cluster.folder, env=environ, capture_output=True, text=True, check=False)
    assert (failed.returncode, "cannot be started" in failed.stderr) == (4, True), failed.stderr
    assert not (run.folder / "asked.json").exists()
    assert cluster.slurm.run("scancel", run.number).returncode == 0  # by hand, and not by trainkit
    (run.folder / "job.out").unlink()
    assert (run.state("state"), run.state("exit_code")) == ("cancelled", 143)


def between(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    """Have a line of shell run once the real sbatch has taken a job. $1: its script."""
    place, real = cluster.folder / "bin" / "sbatch", shutil.which("sbatch")
    place.parent.mkdir(exist_ok=True)
    place.write_text(f'#!/bin/sh\n[ "$1" != --test-only ] || exec {real} "$@"\n{real} "$@"\nshift\n{line}\n')
    place.chmod(0o755)
    monkeypatch.setenv("PATH", f"{place.parent}:{os.environ['PATH']}")


def test_a_job_is_written_down_or_taken_back_whatever_comes_between(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(cluster, RECIPE)
    between(cluster, monkeypatch, "echo 4; kill -INT $PPID")  # a banner, behind which the queue is asked; and Ctrl-C
    done = cluster.trainkit("submit", "r.yaml", "cluster.sbatch=[--hold]")
    assert done.returncode == 130, done.stderr
    (run,) = cluster.runs()
    assert done.stdout == f"run directory: {run}\njob {read_json(run / 'submission.json')['job']}\n"
    assert f"{run}/job.sh" in cluster.slurm.run("squeue", "-h", "-j", done.stdout.split()[-1], "-o", "%o").stdout
    assert cluster.trainkit("cancel", "r").returncode == 0
    shutil.rmtree(run)
    between(cluster, monkeypatch, 'mkdir "${1%/*}/submission.json"')  # a disk that takes no more
    failed = cluster.trainkit("submit", "r.yaml", "cluster.sbatch=[--hold]")
    assert failed.returncode != 0
    assert not cluster.runs()
    assert cluster.slurm.run("squeue", "--noheader", "--name=r", "--states=pending,running").stdout == ""


def test_what_slurm_would_refuse_stands_at_its_line_of_the_recipe(cluster: Cluster) -> None:
    write(cluster, RECIPE)
    shown = cluster.trainkit("submit", "r.yaml", "--dry-run", "env_from=[NOT_THERE]")
    assert (shown.returncode, "Slurm would start it at" in shown.stderr) == (0, True), shown.stderr
    assert "warning: NOT_THERE is not set in the environment" in shown.stderr
    assert "#SBATCH --nodes=2" in shown.stdout
    assert not cluster.runs()
    both = cluster.trainkit(
        "submit", "r.yaml", "launcher.grace_seconds=60", "cluster.partition=nosuch"
    )  # and a warning
    assert (both.returncode, "invalid partition" in both.stderr) == (2, True)
    for change, place, words in (
        ("cluster.partition=nosuch", "cluster.partition", "invalid partition"),
        ("nodes.count=9", "nodes.count", "Requested node configuration is not available"),
        ('cluster.time="5:00:00"', "cluster.time", "MaxTime=01:00:00"),
        ("cluster.time=90", "cluster.time", "in quotes"),
        ('cluster.memory_per_node="100G"', "cluster.memory_per_node", "for its --mem=100G: Requested node"),
        ("cluster.nodelist=tk1", "cluster.nodelist=tk1: error", "for its --nodelist=tk1"),
        ("cluster.sbatch=[-N3]", "cluster.sbatch", "use nodes.count"),
        (f"output.root={cluster.folder}/a%b", "output.root", "has a %"),
    ):
        refused = cluster.trainkit("submit", "r.yaml", change)
        assert refused.returncode == 2, (change, refused.stderr)
        assert place in refused.stderr, (change, refused.stderr)
        assert words in refused.stderr, (change, refused.stderr)
    (cluster.folder / "bad.yaml").write_text(RECIPE.replace('"10:00"', '"5:00:00"').replace("WHAT", "say"))
    refused = cluster.trainkit("submit", "bad.yaml")
    assert "bad.yaml:9:30" in refused.stderr
    assert not cluster.runs()


def test_a_login_machine_without_gpus_or_slurm_says_what_to_do(cluster: Cluster) -> None:
    write(cluster, RECIPE)
    gpus = cluster.trainkit("submit", "r.yaml", "devices.type=cuda")
    assert (gpus.returncode, "trainkit env facts > FACTS.json" in gpus.stderr) == (4, True), gpus.stderr
    words = [sys.executable, "-P", "-m", "trainkit", "submit", "r.yaml"]
    environ = {**os.environ, "PATH": str(cluster.folder)}
    alone = subprocess.run(words, cwd=cluster.folder, env=environ, capture_output=True, text=True, check=False)
    assert alone.returncode == 4
    assert "cannot be started" in alone.stderr
    assert not cluster.runs()
