"""Orders to jobs that end while they are given, are another's by now, or of another cluster. Stand-ins for Slurm."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from trainkit.errors import MachineError, UsageError
from trainkit.recipe.schema import Slurm as Section
from trainkit.recipe.schema.cluster import Cluster
from trainkit.runner.rundir.layout import RunLayout
from trainkit.schedulers.base import Job, Output, Query
from trainkit.schedulers.jobs import following
from trainkit.schedulers.jobs.records import Submission, pending_request, request, write_submission
from trainkit.schedulers.slurm import Slurm

pytestmark = pytest.mark.cli


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("scancel: error: Kill job error on job id 26: Invalid job id specified", UsageError),
        ("scancel: error: Kill job error on job id 26: Job/step already completing or completed", UsageError),
        ("scancel: error: Kill job error on job id 26: Access/permission denied", MachineError),
    ],
)
def test_a_job_that_ends_while_it_is_cancelled_has_ended(
    monkeypatch: pytest.MonkeyPatch, said: str, error: type[Exception]
) -> None:
    def refuse(query: Query[None], _: object) -> None:
        query.read(Output(1, "", said))

    monkeypatch.setattr(following, "ask", refuse)
    with pytest.raises(error):
        following._told(Slurm().cancel(Job("26"), now=True), os.environ)


def no_section(_: RunLayout) -> Cluster:
    raise AssertionError("Slurm ends a job by its number")


SCANCEL = 'echo "$@" >>"$STAND_IN/sent"'


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put commands of a Slurm of the cluster `here` in place. job: what it knows of job 301."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("STAND_IN", str(tmp_path))

    def put(job: str, scancel: str = SCANCEL) -> None:
        config = "echo 'ClusterName             = here'"
        show = f"echo '{job}'" if job else "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
        for name, script in (
            ("scontrol", f'case "$*" in "show config") {config};; *) {show};; esac'),
            ("scancel", scancel),
            ("sacct", "exit 1"),
        ):
            (folder / name).write_text(f"#!/bin/sh\n{script}\n")
            (folder / name).chmod(0o755)

    return put


@pytest.fixture
def run(tmp_path: Path) -> RunLayout:
    """A run of job 301 on another machine."""
    layout = RunLayout(tmp_path / "runs/a/20260101-000000-aaaaaa")
    layout.root.mkdir(parents=True)
    layout.status.write_text(json.dumps({"state": "running", "host": "elsewhere"}))
    write_submission(layout, Submission("slurm", "301", controller="here"))
    return layout


def shown(layout: RunLayout, **changed: str) -> str:
    """Job 301 as scontrol shows it."""
    known = {"JobId": "301", "JobName": "a", "UserId": f"me({os.geteuid()})", "JobState": "RUNNING", "NodeList": "tk1"}
    return " ".join(f"{name}={value}" for name, value in {**known, "Command": f"{layout.root}/x", **changed}.items())


@pytest.mark.parametrize(
    "changed",
    [{"JobName": "b"}, {"UserId": "other(4711)"}, {"Command": "/runs/a/20260102-000000-bbbbbb/job.sh"}],
)
@pytest.mark.parametrize("state", ["RUNNING", "COMPLETED"])
def test_a_job_that_is_anothers_by_now_is_not_ended(
    stand_in: Callable[..., None], run: RunLayout, tmp_path: Path, changed: dict[str, str], state: str
) -> None:
    stand_in(shown(run, JobState=state, **changed))
    with pytest.raises(MachineError, match="job 301 is not that of"):
        following.cancel(run, no_section, now=True, environ=os.environ)
    assert not (tmp_path / "sent").exists()


def test_a_job_that_is_the_runs_is_ended_in_its_cluster(
    stand_in: Callable[..., None], run: RunLayout, tmp_path: Path
) -> None:
    stand_in(shown(run))
    assert following.cancel(run, no_section, now=True, environ=os.environ) == "cancelled job 301"
    write_submission(run, Submission("slurm", "301", cluster="far", controller="here"))
    following.cancel(run, no_section, now=False, environ=os.environ)
    sent = (tmp_path / "sent").read_text().splitlines()
    assert sent == ["301", "--clusters=far --batch --signal=TERM 301"]


@pytest.mark.parametrize("told_before", [False, True])
def test_a_word_that_slurm_would_not_pass_on_is_taken_back(
    stand_in: Callable[..., None], run: RunLayout, told_before: bool
) -> None:
    stand_in(shown(run), scancel="echo 'scancel: error: Access/permission denied' >&2; exit 1")
    if told_before:
        request(run, "cancel")
    with pytest.raises(MachineError, match="denied"):
        following.cancel(run, no_section, now=False, environ=os.environ)
    assert pending_request(run) == ("cancel" if told_before else "")


@pytest.mark.parametrize(("controller", "error"), [("there", MachineError), ("here", UsageError), ("", UsageError)])
def test_a_job_that_another_cluster_does_not_know_has_not_ended(
    stand_in: Callable[..., None], run: RunLayout, controller: str, error: type[Exception]
) -> None:
    write_submission(run, Submission("slurm", "301", controller=controller))
    stand_in("")
    elsewhere = "job 301 was submitted to the cluster there, and here answers here"
    over = r"has ended meanwhile|is lost"
    with pytest.raises(error, match=elsewhere if controller == "there" else over):
        following.cancel(run, no_section, now=False, environ=os.environ)


@pytest.mark.parametrize(
    ("cluster", "controller", "reached"),
    [("", "here", True), ("here", "there", True), ("", "", True), ("far", "here", False)],
)
def test_srun_attaches_to_jobs_of_its_own_cluster_alone(
    stand_in: Callable[..., None], run: RunLayout, cluster: str, controller: str, reached: bool
) -> None:
    write_submission(run, Submission("slurm", "301", cluster=cluster, controller=controller))
    stand_in(shown(run))
    if reached:
        settings = {"SRUN_PARTITION": "p", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "9"}
        known = (run, 0, ["ps", "-e"], lambda _: Section())
        argv, environ = following.attach_command(*known, {**os.environ, **settings}, terminal=False)
        assert argv[:2] + argv[-3:] == ("srun", "--jobid=301", "--nodelist=tk1", "ps", "-e")
        assert environ == {name: value for name, value in os.environ.items() if name not in settings}
        return
    with pytest.raises(MachineError, match="job 301 was submitted to the cluster far, and here answers here") as caught:
        following.attach_command(run, 0, ["ps", "-e"], lambda _: Section(), os.environ, terminal=False)
    again = f"`trainkit attach {run.root} --node=0 -- ps -e`"
    hint = f"Slurm attaches to jobs of its own cluster alone: give {again} where that one answers"
    assert caught.value.hints == (hint,)
