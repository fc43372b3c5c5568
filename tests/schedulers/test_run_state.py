"""What a run is doing, where its own files do not say that it has ended: by what the scheduler knows of its job."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainkit.errors import MachineError
from trainkit.files import hold_lock
from trainkit.recipe.schema import Ssh
from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.rundir.listing import read_run
from trainkit.runner.rundir.records import Status
from trainkit.schedulers.base import JobState, Query, RefusedError, State
from trainkit.schedulers.jobs import following, run_state
from trainkit.schedulers.jobs.records import (
    DAMAGED,
    SUBMISSION,
    SUBMITTER,
    Submission,
    read_submission,
    require_own,
    write_submission,
)
from trainkit.schedulers.jobs.run_state import Jobs, RunState, by_scheduler, prunable, remove_run, state_of
from trainkit.schedulers.registry import SCHEDULERS


def ended(code: int | None = None, **known: str) -> JobState:
    return JobState("ended", exit_code=code, **known)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("scheduler", "known", "job", "word", "why", "code"),
    [
        ("slurm", "queued", JobState("queued", "Priority"), "queued", "Priority", None),
        ("slurm", "requeued", JobState("queued", "BeginTime"), "requeued", "BeginTime", None),
        # Slurm has queued it again before the run could write so.
        ("slurm", "running", JobState("queued", "BeginTime", restarts=1), "requeued", "BeginTime", None),
        ("slurm", "queued", JobState("running"), "starting", "", None),
        ("slurm", "running", JobState("running"), "running", "", None),
        ("kubernetes", "queued", JobState("running"), "running", "", None),
        ("slurm", "running", ended(0), "done", "Slurm: ended", 0),
        ("slurm", "running", ended(7, reason="NonZeroExitCode"), "failed", "Slurm: NonZeroExitCode", 7),
        ("slurm", "running", ended(None, why="cancelled"), "cancelled", "Slurm: cancelled", 143),
        ("slurm", "running", ended(None, why="node_failure"), "node_lost", "Slurm: node failure", 137),
        ("slurm", "running", ended(0, why="time_limit"), "timed_out", "Slurm: time limit", 143),
        ("slurm", "running", ended(125, why="out_of_memory"), "failed", "Slurm: out of memory", 125),
        # Nobody may take for a failure what is only not known.
        ("slurm", "running", JobState("unknown", "no answer"), "unknown", "by its files running; no answer", None),
        ("slurm", "running", JobState("gone", "Invalid job id"), "lost", "Slurm knows job 17 no more", None),
    ],
)
def test_the_state_of_a_run_by_its_files_and_its_scheduler(
    scheduler: str, known: str, job: JobState, word: str, why: str, code: int | None
) -> None:
    found = by_scheduler(RunState(known), job, Submission(scheduler, "17", ()))
    assert (found.word, found.why, found.exit_code) == (word, why, code)


HERE = os.uname().nodename


@pytest.fixture
def run(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path / "runs/a/20260101-000000-aaaaaa")
    layout.root.mkdir(parents=True)
    layout.plan.write_text("{}")
    layout.recipe.write_text("version: 1\n")
    return layout


def write(layout: RunLayout, **status: Any) -> None:
    layout.status.write_text(json.dumps(status))


def test_a_run_whose_lock_may_only_be_read_is_seen_to_run(run: RunLayout) -> None:
    write(run, state="running", host=HERE)
    lock = hold_lock(run.lock)
    run.lock.chmod(0o444)
    try:
        assert state_of(run).word == "running"
        assert prunable([read_run(run.root)], keep=0) == []
    finally:
        os.close(lock)
    assert state_of(run).word == "lost"
    assert [each.layout for each in prunable([read_run(run.root)], keep=0)] == [run]


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ('{"state": "running", "host": "elsewh', "unknown"),  # half written on another host
        ("[]", "unknown"),
        ('{"state": "ended", "exit_code": 1e30}', "unknown"),
        ('{"state": "running", "host": "elsewhere"}', "unknown"),
        ('{"state": "queued"}', "unknown"),  # submitted just now, or by somebody who was killed meanwhile
        ('{"state": "ended", "exit_code": 7}', "failed"),
        ('{"state": "ended", "exit_code": 143, "failure": "submitter"}', "lost"),
    ],
)
def test_what_is_unknown_is_never_removed(run: RunLayout, content: str, word: str) -> None:
    run.status.write_text(content)
    assert state_of(run).word == word
    assert bool(prunable([read_run(run.root)], keep=0)) is (word != "unknown")


def test_a_run_that_is_held_before_its_first_node_begins_is_kept(run: RunLayout) -> None:
    lock = hold_lock(run.root / SUBMITTER)
    try:
        write(run, state="starting", host=HERE)
        assert prunable([read_run(run.root)], keep=0) == []
    finally:
        os.close(lock)


@pytest.mark.parametrize(
    ("status", "word", "code", "why"),
    [
        ({"state": "running", "host": HERE}, "lost", None, "neither trainkit nor its guardian saw the end"),
        ({"state": "running", "host": "gpu1"}, "unknown", None, "by its files running, on gpu1: ask there"),
        ({"state": "starting"}, "lost", None, "neither trainkit nor its guardian saw the end"),
        ({"state": "ended", "exit_code": 0}, "done", 0, ""),
        ({"state": "ended", "exit_code": 7, "failure": "rank"}, "failed", 7, ""),
        ({"state": "ended", "exit_code": 143, "failure": "signal"}, "cancelled", 143, ""),
        ({"state": "ended", "exit_code": 137, "failure": "node"}, "node_lost", 137, ""),
        ({"state": "ended", "exit_code": 4, "failure": "unfit"}, "node_unfit", 4, ""),
    ],
)
def test_a_run_that_was_started_through_ssh_is_known_by_its_files_and_its_locks(
    run: RunLayout, status: dict[str, Any], word: str, code: int | None, why: str
) -> None:
    write_submission(run, Submission("ssh", "77"))
    run.plan.write_text('{"job": {"hosts": ["me@gpu1", "gpu2"]}}')
    write(run, **status)
    found = state_of(run)
    assert (found.word, found.exit_code, found.why, found.job) == (word, code, why, "")
    if status["state"] == "ended":
        return
    assert found.nodes == "gpu1,gpu2"
    for lock in (run.root / SUBMITTER, run.lock):  # who starts it, and then node 0
        held = hold_lock(lock)
        try:
            assert state_of(run).word == status["state"]
        finally:
            os.close(held)


def test_who_waits_for_a_run_of_which_nothing_is_known_is_told_so_once(
    run: RunLayout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_submission(run, Submission("ssh", "77"))
    run.plan.write_text('{"job": {"hosts": ["gpu1"]}}')
    write(run, state="running", host="gpu1")
    monkeypatch.setattr(following, "ASK_SECONDS", 0.0)
    monkeypatch.setattr(following, "LOOK_SECONDS", 0.01)
    looks = iter(range(6))

    def look(layout: RunLayout) -> Status:
        if next(looks, None) is None:  # the machine is back, and the run ends
            return Status(state="ended", exit_code=3)
        return Status(state="running", host="gpu1")

    monkeypatch.setattr(following, "read_status", look)
    assert following.until_end(run, None) == 3
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "the state of the run is unknown: by its files running, on gpu1: ask there"
    assert len(told) == 2


@pytest.mark.parametrize("job", ["-1", "0x1", "--user=root", "-uroot", "77,78", "77_[1-9]", "", "\u0663", "7" * 11])
def test_a_number_that_no_scheduler_gives_is_a_damaged_record(run: RunLayout, job: str) -> None:
    write(run, state="running")
    for scheduler in SCHEDULERS:
        write_submission(run, Submission(scheduler, job))
        assert read_submission(run.root) is DAMAGED
        assert state_of(run).word == "unknown"
        with pytest.raises(MachineError, match="nobody knows which job"):
            require_own(run)
    assert prunable([read_run(run.root)], keep=0) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser gives files away")
def test_another_users_plan_in_ones_own_run_says_nothing_of_what_is_done(
    run: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.plan.write_text('{"job": {"hosts": ["root@elsewhere"]}}')
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setattr(following, "state_of", lambda _: RunState("running", nodes="pod-0"))
    for scheduler, job in (("ssh", "77"), ("kubernetes", "ns/jobset/r")):
        write_submission(run, Submission(scheduler, job))
        for path in (run.root, run.root / SUBMISSION):
            os.chown(path, 12345, -1)
        assert require_own(run) is not DAMAGED
        with pytest.raises(MachineError, match="another user's"):
            if scheduler == "ssh":
                following.attach_command(run, 0, ("id",), lambda _: Ssh(), {}, terminal=False)
            else:
                following.save(run, lambda _: Ssh(), {})
    os.chown(run.plan, 12345, -1)
    write_submission(run, Submission("ssh", "77"))
    os.chown(run.root / SUBMISSION, 12345, -1)
    argv, _ = following.attach_command(run, 0, ("id",), lambda _: Ssh(), {}, terminal=False)
    assert "root@elsewhere" in argv


@pytest.mark.parametrize(
    "content", ["{}", "[]", "null", '"x"', '{"scheduler": "slurm", "job": 7}', '{"scheduler": 1e30}']
)
def test_a_damaged_submission_is_not_that_of_a_run_without_a_job(run: RunLayout, content: str) -> None:
    (run.root / "submission.json").write_text(content)
    write(run, state="ended", exit_code=0)
    assert state_of(run).word == "unknown"


Answers = Callable[..., list[str]]


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """What stands for Slurm: what it has of jobs, in its queue, in its accounts, and who it is."""

    def answers(
        jobs: Mapping[str, JobState] | Exception,
        queue: Mapping[str, State] | Exception,
        past: JobState | None = None,
        name: str = "here",
    ) -> list[str]:
        asked: list[str] = []

        def answer(query: Query[Any]) -> Any:
            asked.append(query.argv[0])
            what = {"squeue": queue, "sacct": past}.get(query.argv[0], name if "config" in query.argv else jobs)
            if what is None or isinstance(what, Exception):
                raise what or RefusedError("Slurm accounting storage is disabled")
            return what

        monkeypatch.setattr(run_state, "ask", answer)
        return asked

    return answers


@pytest.mark.parametrize(
    ("jobs", "queue", "word", "kept"),
    [
        ({"101": JobState("queued", "BeginTime", restarts=1)}, {"101": "queued"}, "requeued", True),
        (MachineError("no answer"), MachineError("no answer"), "unknown", True),
        ({"101": JobState("running", name="other", uid=os.getuid())}, {"101": "running"}, "unknown", True),
        ({"101": JobState("unknown", "Slurm says REVOKED")}, {"101": "unknown"}, "unknown", True),
        ({}, {}, "lost", False),
        ({"101": JobState("ended", exit_code=0)}, {"101": "ended"}, "done", False),
        ({"101": JobState("ended", exit_code=0)}, {}, "done", False),
    ],
)
def test_nothing_that_a_scheduler_still_knows_is_ever_pruned(
    run: RunLayout, slurm: Answers, jobs: Any, queue: Any, word: str, kept: bool
) -> None:
    write(run, state="running", attempt=1)
    (run.root / "attempts" / "1").mkdir(parents=True)
    write_submission(run, Submission("slurm", "101"))
    slurm(jobs, queue)
    assert state_of(run).word == word
    assert bool(prunable([read_run(run.root)], keep=0)) is not kept


LATER = time.time() + 3600


@pytest.mark.parametrize(
    ("jobs", "queue", "word", "kept"),
    [
        ({"101": JobState("queued", "BeginTime")}, {"101": "queued"}, "requeued", True),
        ({"101": JobState("running", started=LATER)}, {"101": "running"}, "starting", True),
        ({"101": JobState("running", started=1.0)}, {"101": "running"}, "failed", True),  # it comes to its end
        ({"101": JobState("queued", name="other")}, {"101": "queued"}, "failed", False),  # the number began again
        ({}, MachineError("no answer"), "failed", True),
        ({"102": JobState("queued")}, {"102": "queued"}, "failed", False),
        ({"101": JobState("ended")}, {"101": "ended"}, "failed", False),
    ],
)
def test_a_run_that_has_ended_may_have_been_queued_again(
    run: RunLayout, slurm: Answers, jobs: Any, queue: Any, word: str, kept: bool
) -> None:
    write(run, state="ended", outcome="failed", exit_code=7, failure="rank", why="it broke")
    write_submission(run, Submission("slurm", "101"))
    slurm(jobs, queue)
    found = state_of(run)
    assert (found.word, found.why, found.exit_code) == (
        (word, "it broke", 7) if word == "failed" else (word, jobs["101"].reason, None)
    )
    assert bool(prunable([read_run(run.root)], keep=0)) is not kept


def test_many_runs_that_have_ended_ask_for_the_queue_once(run: RunLayout, slurm: Answers) -> None:
    write(run, state="ended", outcome="done", exit_code=0)
    asked, jobs = slurm({}, {}), Jobs()
    for number in range(101, 121):
        write_submission(run, Submission("slurm", str(number), controller="here"))
        assert state_of(run, jobs).word == "done"
    assert asked == ["squeue", "scontrol"]


@pytest.mark.parametrize("status", [{"state": "ended", "outcome": "done", "exit_code": 0}, {"state": "running"}])
def test_a_job_of_another_cluster_is_not_gone(run: RunLayout, slurm: Answers, status: dict[str, Any]) -> None:
    write(run, **status)
    write_submission(run, Submission("slurm", "101", controller="there"))
    slurm({}, {}, name="here")
    assert state_of(run).word == ("unknown" if status["state"] == "running" else "done")
    assert prunable([read_run(run.root)], keep=0) == []
    slurm({}, {}, name="there")
    assert prunable([read_run(run.root)], keep=0) != []


def test_a_job_that_has_left_the_queue_is_told_by_the_accounts(run: RunLayout, slurm: Answers) -> None:
    write(run, state="running")
    (run.root / "attempts" / "1").mkdir(parents=True)
    write_submission(run, Submission("slurm", "101"))
    slurm({}, {}, past=JobState("ended", exit_code=9, why="out_of_memory"))
    assert (state_of(run).word, state_of(run).exit_code) == ("failed", 9)
    slurm({}, {}, past=JobState("gone"))
    assert state_of(run).word == "lost"


def test_what_a_run_writes_while_its_job_is_asked_for_says_more(
    run: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(run, state="running", attempt=1)
    write_submission(run, Submission("slurm", "101"))

    def answer(query: Query[Any]) -> Any:
        write(run, state="ended", outcome="timed_out", exit_code=143)
        return {} if query.argv[0] == "scontrol" else JobState("gone")

    monkeypatch.setattr(run_state, "ask", answer)
    assert state_of(run).word == "timed_out"


def test_one_cluster_that_does_not_answer_hides_no_other(run: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(query: Query[Any]) -> Any:
        if "--clusters=gone" in query.argv:
            raise RefusedError("No cluster 'gone' known by database.")
        return {"302": JobState("running")}

    monkeypatch.setattr(run_state, "ask", answer)
    jobs = Jobs()
    assert jobs.state(Submission("slurm", "301", cluster="gone")).state == "unknown"
    assert jobs.state(Submission("slurm", "302")).state == "running"


def test_another_users_run_is_not_pruned(run: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    write(run, state="ended", exit_code=0)
    monkeypatch.setattr(os, "geteuid", lambda: run.root.stat().st_uid + 1)
    assert prunable([read_run(run.root)], keep=0) == []
    assert not remove_run(run)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert prunable([read_run(run.root)], keep=0) != []


def test_an_array_is_asked_for_once_and_who_is_silent_not_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def answer(query: Query[Any]) -> Any:
        asked.append(query.argv)
        if "9" in query.argv:
            raise MachineError("scontrol has not answered in 20 s")
        return {f"101_{task}": JobState("running") for task in range(5)}

    monkeypatch.setattr(run_state, "ask", answer)
    jobs = Jobs()
    assert {jobs.state(Submission("slurm", f"101_{task}")).state for task in range(5)} == {"running"}
    assert {jobs.state(Submission("slurm", "9")).state for _ in range(3)} == {"unknown"}
    assert len(asked) == 2


def test_the_runs_of_a_job_are_in_the_folder_that_the_scheduler_knows(
    run: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = JobState("running", name="a", uid=os.geteuid(), files=(f"{run.root}/job.sh",))
    foreign = replace(known, uid=os.geteuid() + 1)
    monkeypatch.setattr(run_state, "ask", lambda _: {"101": known, "101_3": known, "102": foreign})
    root = run.root.parent.parent
    assert [run_state.root_of_job(each) for each in ("101", "101_3", "102", "-1")] == [root, root, None, None]
