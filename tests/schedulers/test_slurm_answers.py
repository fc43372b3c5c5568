"""What Slurm 22.05 has printed, and what is read in it."""

from __future__ import annotations

import pytest

from trainkit.schedulers import slurm_answers as read
from trainkit.schedulers.interface import JobState, Output, RefusedError

JOB = (
    "JobId=1 JobName=a b UserId=root(0) Priority=4294901759 Account=(null) JobState={state} Reason={reason} "
    "Dependency=(null) Requeue=1 Restarts=2 ExitCode={code} RunTime=00:00:00 TimeLimit=00:10:00 ReqB:S:C:T=0:0:*:* "
    "NodeList={nodes} NumNodes=1-1 CPUs/Task=1 Command=/tmp/with space/job.sh WorkDir=/tmp/li Power= \n"
)


def job(state: str, reason: str = "None", code: str = "0:0", nodes: str = "tk[1-2]") -> Output:
    return Output(0, JOB.format(state=state, reason=reason, code=code, nodes=nodes), "")


def test_values_with_spaces_are_read_whole() -> None:
    found = read.fields(job("RUNNING").out)
    assert (found["JobName"], found["Command"], found["Power"]) == ("a b", "/tmp/with space/job.sh", "")


@pytest.mark.parametrize(
    ("output", "state"),
    [
        (job("PENDING", "Resources", nodes="(null)"), JobState("queued", "Resources", restarts=2)),
        (job("RUNNING"), JobState("running", nodes="tk[1-2]", restarts=2)),
        (job("COMPLETED"), JobState("ended", nodes="tk[1-2]", restarts=2, exit_code=0)),
        (job("FAILED", "NonZeroExitCode", "7:0"), JobState("ended", "NonZeroExitCode", "tk[1-2]", 2, 7)),
        (job("CANCELLED", code="0:15"), JobState("ended", "", "tk[1-2]", 2, 143, "cancelled")),
        (job("NODE_FAIL", "NodeDown", "1:0"), JobState("ended", "NodeDown", "tk[1-2]", 2, 1, "node_failure")),
        (Output(1, "", "slurm_load_jobs error: Invalid job id specified\n"),
         JobState("unknown", "slurm_load_jobs error: Invalid job id specified")),
        (Output(0, "", ""), JobState("unknown")),
    ],
)  # fmt: skip
def test_the_state_of_a_job(output: Output, state: JobState) -> None:
    assert read.job_state(output) == state


def test_a_submission_gives_the_number_or_slurms_own_words() -> None:
    assert read.submitted(Output(0, "17;cluster\n", "")) == "17"
    with pytest.raises(RefusedError, match="invalid partition specified: nosuch"):
        read.submitted(Output(1, "", "sbatch: error: invalid partition specified: nosuch\n"))
    with pytest.raises(RefusedError, match="does not say"):
        read.submitted(Output(0, "hello\n", ""))


def test_a_rehearsal_says_when_and_where() -> None:
    said = "sbatch: Job 4 to start at 2026-11-22T21:57:40 using 2 processors on nodes tk[1-2] in partition main\n"
    assert read.rehearsed(Output(0, "", said)) == (
        "Slurm would start it at 2026-11-22T21:57:40 on tk[1-2] (partition main)"
    )
    with pytest.raises(RefusedError, match=r"^Requested node configuration"):
        read.rehearsed(Output(1, "", "allocation failure: Requested node configuration is not available\n"))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("30", 1800), ("90:00", 5400), ("1:00:00", 3600), ("1-12", 129600), ("1-12:30", 131400),
        ("2-00:00:05", 172805), ("UNLIMITED", None), ("infinite", None),
    ],
)  # fmt: skip
def test_times_are_slurms(text: str, found: float | None) -> None:
    assert read.seconds(text) == found


@pytest.mark.parametrize("text", ["", "1:2:3:4", "soon", "-1", "1-"])
def test_other_times_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no time"):
        read.seconds(text)


def test_settings_of_slurm() -> None:
    found = read.configuration(Output(0, "KillWait                = 10 sec\nSLURM_VERSION           = 22.05.8\n", ""))
    assert (read.amount(found["KillWait"]), found["SLURM_VERSION"]) == (10, "22.05.8")
