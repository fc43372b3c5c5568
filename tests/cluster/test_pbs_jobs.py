"""Jobs of a real OpenPBS: submitted, queued again as another job, cancelled, and begun again by PBS itself."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pbs import NUMBER, Pbs, lacking

from tests.cluster.slurm_jobs import losses
from trainkit.files import read_json

NODES = 3
PATIENCE = 120.0
STEPS = 1500
RECIPE = """
version: 1
name: r
program: {kind: torch, script: program.py, args: [WHAT], verify: false}
strategy: {kind: ddp}
devices: {type: cpu}
nodes: {count: 2, processes_per_node: 1}
launcher: {grace_seconds: 5}
cluster: {kind: pbs, time: "00:10:00", requeue: {warn_seconds: 10}}
"""
# Imports nothing: says where each rank is, and ends, or waits, as it is told.
PROGRAM = """
import os, signal, sys, time
rank, what = os.environ["RANK"], sys.argv[1]
print("rank", rank, "of", os.environ["WORLD_SIZE"], "on", os.uname().nodename, flush=True)
asked = []
signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
while what == "wait":
    time.sleep(0.05)
    if asked:
        asked.clear()
        print("rank", rank, "has saved", flush=True)
if what == "fail" and rank == "1":
    sys.exit(7)
if what == "fail":
    time.sleep(60)
"""
TRAINING = """
version: 1
name: r
devices: {type: cpu}
strategy: {kind: ddp}
nodes: {count: 2, processes_per_node: 1}
launcher: {grace_seconds: 8}
batch: {global: 4}
model: {layers: 1, heads: 1, hidden_size: 16}
data: {path: python-stdlib, sequence_length: 32}
train: {steps: STEPS}
logging: {every_steps: 1}
env: {OMP_NUM_THREADS: 1}
env_from: [PASSPHRASE]
cluster:
  kind: pbs
  time: "00:02:00"
  setup: ['export PASSPHRASE=$(cat "$HOME/passphrase")']
  requeue: {warn_seconds: 95, without_progress: 20}  # 25 seconds after the start, of which the start takes its part
"""


@pytest.fixture(scope="session")
def pbs() -> Iterator[Pbs]:
    """Three nodes tk1 to tk3 with four made-up GPUs each, and the login machine tk0."""
    if why := lacking():
        pytest.skip(f"an OpenPBS {why}")
    with tempfile.TemporaryDirectory(prefix="trainkit-pbs-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        started = Pbs(Path(folder) / "cluster")
        try:
            started.up(NODES, 4, tied=True)
            yield started
        finally:
            started.down()
        listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, timeout=60, check=True).stdout
        assert not [line for line in listed.splitlines() if folder in line]


@dataclass(frozen=True)
class Site:
    """The tests' PBS, and a folder of the user that submits, which all nodes share."""

    pbs: Pbs
    folder: Path

    def write(self, recipe: str, what: str = "say") -> None:
        """The recipe r.yaml, and its program."""
        files = {"r.yaml": recipe.replace("WHAT", what), "program.py": PROGRAM}
        for name, content in files.items():
            (self.folder / name).write_text(content)

    def user(self, *words: str, timeout: float = PATIENCE) -> subprocess.CompletedProcess[str]:
        """Run a command on the login machine as the user that submits."""
        argv, environ = self.pbs.argv(*words, cwd=self.folder), self.pbs.environ()
        return subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=timeout, check=False)

    def trainkit(self, *words: str) -> subprocess.CompletedProcess[str]:
        """The same of trainkit."""
        return self.user(sys.executable, "-P", "-m", "trainkit", *words)

    def submit(self, *words: str) -> tuple[Path, str]:
        """Submit r.yaml; the run directory and the job."""
        done = self.trainkit("submit", "r.yaml", *words)
        assert done.returncode == 0, done.stderr
        folder, number = (line.rpartition(" ")[2] for line in done.stdout.splitlines())
        return Path(folder), number

    def status(self, run: Path) -> dict[str, Any]:
        """What `trainkit status` says."""
        done = self.trainkit("status", str(run), "--json")
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def until(self, condition: Callable[[], bool], run: Path, what: str, seconds: float = PATIENCE) -> None:
        """Wait for something; fails with the job's output where it does not come."""
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                shown = self.user("qstat", "-x", "-f").stdout
                heard = [path.read_text() for path in (run / "job.out", run / "pbs.out") if path.exists()]
                pytest.fail(f"{what} did not come in {seconds:.0f} s:\n{shown}\n{heard}")
            time.sleep(0.2)

    def says(self, run: Path, words: str) -> None:
        """Wait until the job's output has some words."""
        self.until(lambda: words in (run / "job.out").read_text(), run, repr(words))

    def logs(self, run: Path, attempt: int = 1) -> list[str]:
        """What each rank has printed."""
        files = [run / "attempts" / str(attempt) / "logs" / f"rank-{rank}.out" for rank in (0, 1)]
        return [path.read_text() if path.exists() else "" for path in files]

    def end(self, run: Path, outcome: str) -> int:
        """Wait for the run's end; its exit code."""

        def over() -> bool:
            status = read_json(run / "status.json")
            return status.get("state") == "ended" and status.get("outcome") is not None

        self.until(over, run, "the outcome")
        status = read_json(run / "status.json")
        assert status["outcome"] == outcome, (status, (run / "job.out").read_text())
        return int(status["exit_code"])

    def left(self) -> list[str]:
        """Processes of the user's on the nodes."""
        names = (name for name in self.pbs.machines.names if name != "tk0")
        shown = [self.pbs.run("ps", "-o", "args", "-u", str(NUMBER), on=name).stdout for name in names]
        return [line for text in shown for line in text.splitlines()[1:]]


@pytest.fixture
def site(pbs: Pbs, request: pytest.FixtureRequest) -> Site:
    """The cluster, for one test, once the jobs of an earlier one have left the nodes."""
    end = time.monotonic() + PATIENCE
    while pbs.free() < NODES and time.monotonic() < end:
        time.sleep(0.2)
    folder = pbs.home / re.sub(r"\W+", "-", request.node.name)
    folder.mkdir()
    os.chown(folder, NUMBER, NUMBER)
    return Site(pbs, folder)


def test_a_job_runs_on_all_nodes_and_its_exit_code_is_the_runs(site: Site) -> None:
    site.write(RECIPE)
    shown = site.trainkit("submit", "r.yaml", "--dry-run")
    assert "#PBS -l select=2:ncpus=1:mpiprocs=1" in shown.stdout
    assert not (site.folder / "runs").exists()
    done = site.trainkit("submit", "r.yaml", "--wait")
    assert done.returncode == 0, done.stderr
    (run,) = (site.folder / "runs" / "r").iterdir()
    assert site.logs(run) == ["rank 0 of 2 on tk1\n", "rank 1 of 2 on tk2\n"]
    assert "the run failed" not in (run / "job.out").read_text()
    site.write(RECIPE, "fail")
    done = site.trainkit("submit", "r.yaml", "--wait")
    assert done.returncode == 7, done.stderr
    site.until(lambda: not site.left(), run, "the end of all processes")


def test_what_the_queue_would_never_start_is_refused_at_its_line(site: Site) -> None:
    site.write(RECIPE)
    for word, said in (("cluster.time=02:00:00", "resources_max.walltime = 01:00:00"), ("cluster.queue=no", "Unknown")):
        refused = site.trainkit("submit", "r.yaml", word)
        assert refused.returncode == 2, refused.stderr
        assert word.partition("=")[0] in refused.stderr
        assert said in refused.stderr
    refused = site.trainkit("submit", "r.yaml", "cluster.resources={nosuch: 1}")
    assert "cluster.resources" in refused.stderr, refused.stderr
    assert "Unknown resource: nosuch" in refused.stderr
    assert not list((site.folder / "runs").glob("r/*"))


def test_a_job_whose_time_is_up_goes_on_as_another_job_in_the_same_run_directory(site: Site) -> None:
    (site.folder.parent / "passphrase").write_text("hunter2-hunter2")
    site.write(TRAINING.replace("STEPS", str(STEPS)))
    run, first = site.submit()
    site.until(lambda: len(losses(run)) == STEPS, run, "the last step", 5 * PATIENCE)
    assert site.end(run, "done") == 0
    submission, status = read_json(run / "submission.json"), read_json(run / "status.json")
    assert submission["job"] != first
    assert submission["host"] == "tk0"
    assert status["attempt"] > 1
    assert [*losses(run)] == [*range(1, STEPS + 1)]
    assert "hunter2" not in "".join(path.read_text() for path in (run / "job.sh", run / "env.txt", run / "job.out"))
    shown = site.user("qstat", "-x", "-f", first).stdout
    assert "hunter2" not in shown


def test_a_run_saves_and_ends_when_it_is_asked(site: Site) -> None:
    site.write(RECIPE, "wait")
    run, job = site.submit()
    site.until(lambda: all(site.logs(run)), run, "both ranks")
    assert site.status(run)["state"] == "running"
    assert site.trainkit("status", job.partition(".")[0]).returncode == 0
    done = site.trainkit("checkpoint", str(run))
    assert done.returncode == 0, done.stderr
    site.until(lambda: all("has saved" in each for each in site.logs(run)), run, "what both ranks save")
    attached = site.trainkit("attach", str(run), "--node", "1", "--", "hostname")  # no sshd runs there
    assert "tk2" in attached.stderr
    done = site.trainkit("cancel", job)
    assert done.returncode == 0, done.stderr
    assert "its program gets SIGTERM, and may save first" in done.stdout
    assert site.end(run, "cancelled") == 143
    site.until(lambda: not site.left(), run, "the end of all processes")
    assert site.status(run)["state"] == "cancelled"


def test_a_run_is_killed_at_once_and_taken_out_of_the_queue(site: Site) -> None:
    site.write(RECIPE, "wait")
    run, _ = site.submit()
    site.until(lambda: all(site.logs(run)), run, "both ranks")
    waiting, _ = site.submit("nodes.count=3", "cluster.cpus_per_node=4")
    assert site.status(waiting)["state"] == "queued"
    for each in (waiting, run):
        done = site.trainkit("cancel", str(each), "--now")
        assert done.returncode == 0, done.stderr
        site.until(lambda each=each: site.status(each)["state"] == "cancelled", each, "the end")  # type: ignore[misc]
    site.until(lambda: not site.left(), run, "the end of all processes", 30)


def test_who_deletes_the_job_by_qdel_has_cancelled_the_run(site: Site) -> None:
    site.write(RECIPE, "wait")
    run, job = site.submit()
    site.until(lambda: all(site.logs(run)), run, "both ranks")
    assert site.user("qdel", job).returncode == 0
    assert site.end(run, "cancelled") == 143
    site.until(lambda: not site.left(), run, "the end of all processes")


def test_a_job_that_pbs_begins_again_goes_on_in_the_same_run_directory(site: Site) -> None:
    site.write(RECIPE, "wait")
    run, job = site.submit()
    site.until(lambda: all(site.logs(run)), run, "both ranks")
    assert site.pbs.run("qrerun", job).returncode == 0
    site.until(lambda: all(site.logs(run, 2)), run, "both ranks again")
    assert site.status(run)["attempt"] == 2
    assert read_json(run / "submission.json")["job"] == job
    assert "the scheduler has queued it again" in (run / "job.out").read_text()
    site.trainkit("cancel", str(run), "--now")
    site.until(lambda: not site.left(), run, "the end of all processes")


def test_tasks_of_an_array_have_a_run_directory_each(site: Site) -> None:
    site.write(RECIPE + "variants: {a: {name: r}, b: {name: r}, c: {name: r}}\n")
    done = site.trainkit("submit", "r.yaml", "--variant", "all", "--at-most", "2", "nodes.count=1", "--wait")
    assert done.returncode == 0, done.stderr
    runs = sorted((site.folder / "runs" / "r").iterdir())
    assert len(runs) == 3
    jobs = [read_json(run / "submission.json")["job"] for run in runs]
    assert [job.partition("[")[2].partition(".")[0] for job in jobs] == ["0]", "1]", "2]"]
    assert [read_json(run / "status.json")["outcome"] for run in runs] == ["done"] * 3
    shown = site.trainkit("status", jobs[0].partition("[")[0])
    assert shown.stdout.count("done") == 3, shown.stderr


@pytest.mark.parametrize(("lost", "by"), [("tk1", "PBS itself"), ("tk2", "another job")])
def test_a_run_goes_on_without_a_node_that_is_lost(site: Site, lost: str, by: str) -> None:
    """PBS begins a job again whose first node is gone. Of another one node 0 knows, and submits the job again."""
    site.write(RECIPE, "wait")
    run, job = site.submit()
    site.until(lambda: all(site.logs(run)), run, "both ranks")
    site.pbs.machines.down(lost)
    try:
        site.until(lambda: all(site.logs(run, 2)), run, "both ranks again", 3 * PATIENCE)
        assert lost not in "".join(site.logs(run, 2))
        assert (read_json(run / "submission.json")["job"] == job) is (by == "PBS itself")
        site.trainkit("cancel", str(run), "--now")
    finally:
        site.pbs.again(lost, tied=True)
