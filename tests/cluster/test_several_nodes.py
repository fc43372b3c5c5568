"""`trainkit run` on several nodes of a Slurm job: one run, one console, one end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.slurm_jobs import Cluster, losses
from trainkit.files import read_json
from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.rundir.listing import checkpoints_of

# Trains nothing and imports nothing: says where each rank is, and waits or ends as it is told.
PROGRAM = """
import json, os, signal, sys, time
rank, what = os.environ["RANK"], sys.argv[1]
print("rank", rank, "of", os.environ["WORLD_SIZE"], "on", os.uname().nodename, flush=True)
if what == "wait":
    open(f"here-{rank}", "w").close()
    while not os.path.exists("go"):
        time.sleep(0.05)
elif what == "fail" and rank == "1":
    sys.exit(7)
elif what == "fail":
    time.sleep(60)
"""
# Saves when it is asked to, has a helper that knows nothing of that, and says in the end how the helper is.
HELPED = """
import os, signal, subprocess, time
rank = os.environ["RANK"]
signal.signal(signal.SIGUSR1, lambda *_: open(f"saved-{rank}", "w").close())
helper = subprocess.Popen(["sleep", "100"])
open(f"here-{rank}", "w").close()
while not os.path.exists("go"):
    time.sleep(0.05)
print("helper", helper.poll(), flush=True)
helper.kill()
"""
KINDS = ("torchrun", "accelerate")
RECIPE = """
version: 1
name: r
program: {kind: torch, script: program.py, args: [ARG]}
strategy: {kind: ddp}
devices: {type: cpu}
nodes: {count: 2, processes_per_node: 1}
launcher: {grace_seconds: 5}
"""
TINY = """
version: 1
name: r
devices: {type: cpu}
strategy: {kind: ddp}
nodes: {count: 2, processes_per_node: 1}
batch: {global: 4}
model: {layers: 1, heads: 1, hidden_size: 16}
data: {path: python-stdlib, sequence_length: 32}
train: {steps: STEPS}
checkpoint: {every_steps: 100000}
"""


def write(folder: Path, recipe: str) -> None:
    (folder / "r.yaml").write_text(recipe)
    (folder / "program.py").write_text(PROGRAM)


def test_the_batch_script_starts_one_run_on_all_nodes(cluster: Cluster) -> None:
    write(cluster.folder, RECIPE.replace("ARG", "say"))
    job = cluster.submit("trainkit run r.yaml", "-N2")
    assert job.code() == 0, job.said
    (run,) = cluster.runs()
    said = [(run / "attempts" / "1" / "logs" / f"rank-{rank}.out").read_text() for rank in (0, 1)]
    # Global rank 0 is on node 0: c10d would sort the addresses 10.77.0.9 and 10.77.0.10 as text.
    assert said == ["rank 0 of 2 on tk1\n", "rank 1 of 2 on tk2\n"]
    assert job.said.count("run directory:") == 1
    assert job.said.count("rank 0 of 2") == 1
    plan = json.loads((run / "plan.json").read_text())
    assert "--rdzv-backend=static" in plan["commands"][0]["argv"]


def test_two_runs_on_the_same_nodes_do_not_meet_and_other_launchers_number_ranks_alike(cluster: Cluster) -> None:
    write(cluster.folder, RECIPE.replace("ARG", "say"))
    words = ("-N2", "-n2", "--nodelist=tk1,tk2", "--cpus-per-task=1")
    jobs = [cluster.submit(f"trainkit run r.yaml name={kind} launcher.kind={kind}", *words) for kind in KINDS]
    assert [job.code() for job in jobs] == [0, 0], "".join(job.said for job in jobs)
    for kind in KINDS:
        (run,) = cluster.runs(kind)
        said = [(run / "attempts" / "1" / "logs" / f"rank-{rank}.out").read_text() for rank in (0, 1)]
        assert said == ["rank 0 of 2 on tk1\n", "rank 1 of 2 on tk2\n"]


def test_several_tasks_on_a_node_are_refused_at_once(cluster: Cluster) -> None:
    write(cluster.folder, RECIPE.replace("ARG", "say"))
    job = cluster.submit(f"srun {sys.executable} -P -m trainkit run r.yaml", "-N2", "--ntasks-per-node=2")
    assert job.code(30) == 4
    assert "--ntasks-per-node=1" in job.said
    assert not cluster.runs()


def test_more_nodes_than_the_job_has_are_refused(cluster: Cluster) -> None:
    write(cluster.folder, RECIPE.replace("ARG", "say"))
    job = cluster.submit("trainkit run r.yaml nodes.count=3", "-N2")
    assert job.code(30) == 4
    assert "the plan has 3 nodes, and job" in job.said


def test_what_the_nodes_refuse_is_said_once(cluster: Cluster) -> None:
    write(cluster.folder, RECIPE.replace("ARG", "say"))
    everywhere = cluster.submit("trainkit run r.yaml devices.type=cuda", "-N2")
    # What node 1 alone cannot do: nobody waits for it.
    one = f'[ $SLURM_NODEID = 0 ] || set devices.type=cuda; exec {sys.executable} -P -m trainkit run r.yaml "$@"'
    (cluster.folder / "one.sh").write_text(one)
    alone = cluster.submit("srun --ntasks-per-node=1 --kill-on-bad-exit=0 sh one.sh", "-N2")
    assert (everywhere.code(), alone.code(60)) == (4, 4), everywhere.said + alone.said
    assert everywhere.said.count("error: not on this machine: 1 GPU is requested") == 1, everywhere.said
    assert alone.said.count("not on this machine: 1 GPU is requested") == 1, alone.said
    assert "error: node 1 (tk" in alone.said
    assert not cluster.runs()


def test_the_rank_that_failed_is_named_by_its_host_and_its_code_is_the_jobs(cluster: Cluster) -> None:
    write(cluster.folder, RECIPE.replace("ARG", "fail"))
    job = cluster.submit("trainkit run r.yaml", "-N2")
    assert job.code() == 7, job.said
    assert "rank 1 (tk2) exited with code 7" in job.said
    status = cluster.status()
    assert (status["exit_code"], status["why"]) == (7, "rank 1 (tk2) exited with code 7")


def test_a_signal_to_every_process_of_the_job_saves_a_checkpoint_and_training_goes_on(cluster: Cluster) -> None:
    write(cluster.folder, TINY.replace("STEPS", "60"))
    job = cluster.submit("trainkit run r.yaml", "-N2")

    def steps() -> int:
        files = [run / "metrics.jsonl" for run in cluster.runs()]
        return sum(len(file.read_text().splitlines()) for file in files if file.exists())

    job.until(lambda: steps() > 0, "a step")
    assert cluster.slurm.run("scancel", "--signal=USR1", job.number).returncode == 0
    assert job.code() == 0, job.said
    (run,) = cluster.runs()
    saved = sorted(each.step for each in checkpoints_of(RunLayout(run)))
    assert saved
    assert saved[0] < 60
    assert read_json(run / "summary.json")["steps"] == 60


# Node 0 is on the host of the batch script; and on another, for a step of one's own has all processors of that one.
@pytest.mark.parametrize(("before", "nodes"), [("", "-N2"), ("srun -N1 -n1 --nodelist=tk1 sleep 100 & sleep 2", "-N3")])
def test_a_signal_that_the_batch_script_passes_on_reaches_the_ranks_and_no_helper_of_theirs(
    cluster: Cluster, before: str, nodes: str
) -> None:
    write(cluster.folder, RECIPE.replace("ARG", "x"))
    (cluster.folder / "program.py").write_text(HELPED)
    run = f"{sys.executable} -P -m trainkit run r.yaml &\nP=$!\ntrap 'kill -USR1 $P' USR1"
    job = cluster.submit(f"{before}\n{run}\nwait $P; wait $P; C=$?; kill %1; exit $C", nodes)

    def there(name: str) -> bool:
        return all((cluster.folder / f"{name}-{rank}").exists() for rank in (0, 1))

    job.until(lambda: there("here"), "both ranks")
    assert cluster.status()["host"] == ("tk2" if before else "tk1")
    assert cluster.slurm.run("scancel", "--batch", "--signal=USR1", job.number).returncode == 0
    job.until(lambda: there("saved"), "what they save")
    (cluster.folder / "go").touch()
    assert job.code() == 0, job.said
    logs = cluster.runs()[-1] / "attempts" / "1" / "logs"
    assert [(logs / f"rank-{rank}.out").read_text() for rank in (0, 1)] == ["helper None\n", "helper None\n"]


def test_a_batch_script_that_is_told_to_end_ends_the_run_with_a_checkpoint(cluster: Cluster) -> None:
    write(cluster.folder, TINY.replace("STEPS", "5000"))
    script = f"{sys.executable} -P -m trainkit run r.yaml &\ntrap 'kill -TERM $!' TERM\nwait $!; wait $!; exit $?"
    job = cluster.submit(script, "-N2")
    job.until(lambda: any((run / "metrics.jsonl").exists() for run in cluster.runs()), "a step")
    assert cluster.slurm.run("scancel", "--batch", "--signal=TERM", job.number).returncode == 0
    assert job.code() == 143, job.said
    (run,) = cluster.runs()
    assert checkpoints_of(RunLayout(run))


def test_sharded_states_and_another_launcher_train_as_on_one_machine(cluster: Cluster) -> None:
    # One thread each: two processes of one machine would have as many as two of two, and round otherwise.
    write(cluster.folder, TINY.replace("STEPS", "20") + "env: {OMP_NUM_THREADS: 1}\n")
    ways = {"zero2": "strategy.kind=zero2", "accelerate": "launcher.kind=accelerate"}
    one = "nodes.count=1 nodes.processes_per_node=2"
    words = {name: f"run r.yaml name={name} {way}".split() for name, way in ways.items()}
    job = cluster.submit("\n".join(f"trainkit {' '.join(words[name])} || exit" for name in ways), "-N2")
    for name in ways:
        argv = [sys.executable, "-P", "-m", "trainkit", *words[name], f"name={name}-here", *one.split()]
        subprocess.run(argv, cwd=cluster.folder, check=True, capture_output=True, timeout=300)
    assert job.code() == 0, job.said
    for name in ways:
        (there,), (here,) = cluster.runs(name), cluster.runs(f"{name}-here")
        assert losses(there) == losses(here)
        assert losses(there).keys() >= {10, 20}
