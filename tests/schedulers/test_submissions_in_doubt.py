"""Jobs whose scheduler took them and did not say so: late, noisy, silent, or dead. Stand-ins for sbatch and kubectl."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from trainkit.errors import MachineError, RecipeError
from trainkit.files import read_json
from trainkit.launch_plan.model import Plan
from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan
from trainkit.recipe.resolved import Resolved
from trainkit.runner.rundir.layout import RunLayout
from trainkit.schedulers import slurm
from trainkit.schedulers.base import NoAnswerError
from trainkit.schedulers.jobs import submitting
from trainkit.schedulers.jobs.records import Submission, read_submission
from trainkit.schedulers.jobs.submitting import Task, submit_array

pytestmark = pytest.mark.cli

RECIPE = """
version: 1
name: r
devices: {type: cpu}
data: {kind: random}
train: {steps: 1}
cluster: CLUSTER
output: {root: ROOT}
"""
SLURM = "{kind: slurm}"
PODS = '{kind: kubernetes, image: i, namespace: team, volumes: ["shared:FOLDER"]}'
TAKE = 'for script; do :; done; echo "17|$script" >"$STAND_IN/queue"'  # the last word of sbatch
SQUEUE = 'cat "$STAND_IN/queue" 2>/dev/null; exit 0'
SILENT_QUEUE = "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put shell scripts in the place of commands, by their names."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("STAND_IN", str(tmp_path))
    monkeypatch.setattr(slurm, "SUBMIT_SECONDS", 5.0)
    monkeypatch.setattr(slurm, "LATE_SECONDS", 0.5)
    monkeypatch.setattr(slurm, "LOOK_SECONDS", 0.1)

    def put(**scripts: str) -> None:
        for name, script in scripts.items():
            (folder / name).write_text(f"#!/bin/sh\n{script}\n")
            (folder / name).chmod(0o755)

    put(scontrol="echo 'ClusterName             = here'")
    return put


@pytest.fixture
def planned(solve: Callable[..., Resolved], here: Facts, tmp_path: Path) -> Callable[[str], Task]:
    """The plan of the recipe for a cluster."""

    def plan(cluster: str) -> Task:
        folder = str(tmp_path / "runs")
        resolved = solve(RECIPE.replace("CLUSTER", cluster.replace("FOLDER", folder)).replace("ROOT", folder))
        return Task("a", resolved, build_plan(resolved, here))

    return plan


def submitted(plan: Plan) -> tuple[RunLayout, str]:
    return (known := stored(plan))[0], known[1].job


def stored(plan: Plan) -> tuple[RunLayout, Submission]:
    layout, submission = submitting.submit(plan, "version: 1\n", "#!/bin/sh\n", os.environ)
    found = read_submission(layout.root)
    assert found is not None
    assert found._replace(at=0.0, host="") == submission
    assert found.at > 0
    return layout, submission


def runs(folder: Path) -> list[Path]:
    return [*(folder / "runs").glob("r/*")]


@pytest.mark.parametrize(
    "sbatch",
    [
        "echo Welcome; echo 17; echo 'sbatch: lua: your job will start soon'",
        f"{TAKE}; echo 20 messages; echo 2026; echo 17",  # a line that is a number by itself
        f"{TAKE}",
        f"{TAKE}; kill -9 $$",
        f"{TAKE}; echo 'KeyError: 3' >&2; exit 1",
        f"{TAKE}; echo 'sbatch: error: Batch job submission failed: Socket timed out' >&2; exit 1",
        f"(sleep 0.3; {TAKE}) & exec sleep 60",
    ],
    ids=["noisy", "several numbers", "silent", "dies", "fails", "times out", "late"],
)
def test_a_job_that_slurm_took_is_the_submission_whatever_sbatch_says(
    stand_in: Callable[..., None],
    planned: Callable[[str], Task],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sbatch: str,
) -> None:
    if sbatch.endswith("sleep 60"):
        monkeypatch.setattr(slurm, "SUBMIT_SECONDS", 0.2)
        monkeypatch.setattr(slurm, "LATE_SECONDS", 30.0)
    stand_in(sbatch=sbatch, squeue=SQUEUE)
    layout, job = submitted(planned(SLURM).plan)
    assert (job, runs(tmp_path)) == ("17", [layout.root])


@pytest.mark.parametrize(
    ("sbatch", "cluster"), [("echo 17", ""), ("echo '17;far'", "far"), (TAKE, ""), (f"{TAKE}; exit 1", "far")]
)
def test_the_cluster_that_has_the_job_and_the_one_that_answers_are_written_down(
    stand_in: Callable[..., None], planned: Callable[[str], Task], sbatch: str, cluster: str
) -> None:
    stand_in(sbatch=sbatch, squeue=f"echo 'CLUSTER: near'; echo 'CLUSTER: {cluster}'; {SQUEUE}" if cluster else SQUEUE)
    task = planned(SLURM)
    found = stored(task.plan)[1]
    assert (found.job, found.cluster, found.controller) == ("17", cluster, "here")
    made = submit_array([task, task], None, lambda _: ("version: 1\n", "#!/bin/sh\n"), os.environ)
    assert [(each.job, each.cluster) for _, each in made] == [("17_0", cluster), ("17_1", cluster)]


def test_tasks_of_an_array_are_found_too(
    stand_in: Callable[..., None], planned: Callable[[str], Task], tmp_path: Path
) -> None:
    stand_in(sbatch=TAKE, squeue=SQUEUE)
    task = planned(SLURM)
    made = submit_array([task, task], None, lambda _: ("version: 1\n", "#!/bin/sh\n"), os.environ)
    assert [submission.job for _, submission in made] == ["17_0", "17_1"]
    stand_in(sbatch="exit 0", squeue=SILENT_QUEUE)
    with pytest.raises(NoAnswerError):
        submit_array([task, task], None, lambda _: ("version: 1\n", "#!/bin/sh\n"), os.environ)
    assert len(runs(tmp_path)) == 4


@pytest.mark.parametrize("condition", ["--all", "--states=all"])
def test_a_job_of_a_hidden_partition_and_one_that_has_ended_at_once_are_found(
    stand_in: Callable[..., None], planned: Callable[[str], Task], condition: str
) -> None:
    stand_in(sbatch=TAKE, squeue=f'case " $* " in *" {condition} "*) {SQUEUE};; esac')
    assert submitted(planned(SLURM).plan)[1] == "17"


@pytest.mark.parametrize("array", [False, True])
def test_a_job_that_cannot_be_written_down_is_taken_back(
    stand_in: Callable[..., None],
    planned: Callable[[str], Task],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    array: bool,
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    stand_in(sbatch="echo '17;far'", scancel='echo "$@" >>"$STAND_IN/cancelled"')
    monkeypatch.setattr(submitting, "write_submission", full)
    task = planned(SLURM)
    with pytest.raises(OSError, match="no space left"):
        if array:
            submit_array([task, task], None, lambda _: ("version: 1\n", "#!/bin/sh\n"), os.environ)
        else:
            submitted(task.plan)
    assert (tmp_path / "cancelled").read_text() == "--clusters=far 17\n"
    assert not runs(tmp_path)


def test_what_slurm_has_not_taken_leaves_nothing(
    stand_in: Callable[..., None], planned: Callable[[str], Task], tmp_path: Path
) -> None:
    stand_in(sbatch="echo hello", squeue=SQUEUE)
    with pytest.raises(MachineError, match="does not say the job's number: hello, and Slurm has no such job"):
        submitted(planned(SLURM).plan)
    for queue in (SQUEUE, SILENT_QUEUE):  # sbatch's refusal is an answer
        stand_in(sbatch="echo 'sbatch: error: invalid partition specified: x' >&2; exit 1", squeue=queue)
        with pytest.raises(RecipeError, match="Slurm refuses the job: sbatch: error: invalid partition"):
            submitted(planned(SLURM).plan)
    assert not runs(tmp_path)


FAILED = "sbatch: error: Batch job submission failed: "


@pytest.mark.parametrize(
    "reason",
    [
        "Invalid account or account/partition combination specified",
        "User's group not permitted to use this partition",
        "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
        "Requested node configuration is not available",
        "Access/permission denied",
        "Node count specification invalid",
        "System submissions disabled",
    ],
)
def test_a_refusal_of_slurms_is_one_whether_or_not_the_queue_answers(
    stand_in: Callable[..., None], planned: Callable[[str], Task], tmp_path: Path, reason: str
) -> None:
    stand_in(sbatch=f'echo "{FAILED}{reason}" >&2; exit 1', squeue=SILENT_QUEUE)
    with pytest.raises(RecipeError, match=r"Slurm refuses the job: sbatch: error: Batch job submission failed"):
        submitted(planned(SLURM).plan)
    assert not runs(tmp_path)


@pytest.mark.parametrize(
    "sbatch",
    [
        TAKE,
        "echo 101; echo note >&2; exit 1",
        f"echo 101; echo '{FAILED}Requested nodes are busy' >&2; exit 1",
        "echo 0",  # no job has that number
        "echo 12345678901",
        "echo 'KeyError: invalid limit' >&2; exit 1",  # not sbatch's own words
        f"echo 'sbatch: error: RPC limit exceeded 1 times'; echo '{FAILED}Message receive failure' >&2; exit 1",
        *(
            f"echo '{FAILED}{reason}' >&2; exit 1"
            for reason in (
                "Message receive failure",
                "Connection reset by peer",
                "Transport endpoint is not connected",
                "Unexpected message received",
                "Zero Bytes were transmitted or received",
                "Unable to contact slurm controller (receive failure)",
                "Invalid authentication credential",
                "Protocol authentication error",
                "Unspecified error",
                "what no Slurm has said so far",
            )
        ),
    ],
)
def test_where_nobody_knows_the_run_directory_stays(
    stand_in: Callable[..., None], planned: Callable[[str], Task], tmp_path: Path, sbatch: str
) -> None:
    stand_in(sbatch=sbatch, squeue=SILENT_QUEUE)
    with pytest.raises(NoAnswerError, match="Unable to contact") as caught:
        submitted(planned(SLURM).plan)
    (run,) = runs(tmp_path)
    assert str(run) in str(caught.value)
    assert (caught.value.exit_code, caught.value.hints) == (
        4,
        ("`squeue --name=r` tells whether it has; if not, remove that folder",),
    )
    assert (run / "plan.json").exists()
    assert read_json(run / "status.json")["state"] == "queued"


TIMED_OUT = "Unable to connect to the server: net/http: TLS handshake timeout"
EXISTS = 'echo \'{"items": [{"kind": "JobSet", "spec": {}}]}\''


@pytest.mark.parametrize(
    ("create", "get", "kept"),
    [
        (f"echo '{TIMED_OUT}' >&2; exit 1", EXISTS, "found"),
        ("exit 0", EXISTS, "found"),
        (f"echo '{TIMED_OUT}' >&2; exit 1", "echo '{\"items\": []}'", ""),
        (f"echo '{TIMED_OUT}' >&2; exit 1", f"echo '{TIMED_OUT}' >&2; exit 1", "in doubt"),
        ("echo 'error: quota' >&2; exit 1", EXISTS, "refused"),
    ],
)
def test_pods_that_were_made_late_are_found_by_their_label(
    stand_in: Callable[..., None],
    planned: Callable[[str], Task],
    tmp_path: Path,
    create: str,
    get: str,
    kept: str,
) -> None:
    stand_in(kubectl=f'case $1 in create) {create};; get) {get};; delete) echo "$@" >>"$STAND_IN/deleted";; esac')
    plan = planned(PODS).plan
    if kept == "found":
        layout, job = submitted(plan)
        assert job == f"team/jobset/r-{layout.id}"
        return
    error = {"": "there is no team/jobset/r-", "in doubt": "is not known", "refused": "Kubernetes refuses"}[kept]
    with pytest.raises((MachineError, RecipeError), match=error):
        submitted(plan)
    assert (tmp_path / "deleted").exists() == (kept != "in doubt")
    assert len(runs(tmp_path)) == (kept == "in doubt")
    if kept:
        assert [read_submission(run) is not None for run in runs(tmp_path)] == [True] * (kept == "in doubt")
