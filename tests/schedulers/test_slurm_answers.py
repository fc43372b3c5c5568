"""What Slurm 22.05 has printed, and what is read in it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trainkit.schedulers import slurm as read
from trainkit.schedulers.base import Job, JobState, NoAnswerError, Output, RefusedError

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
        # It runs on, on another cluster of the federation.
        (job("REVOKED"), JobState("unknown", "Slurm says REVOKED", "tk[1-2]", 2)),
    ],
)  # fmt: skip
def test_the_state_of_a_job(output: Output, state: JobState) -> None:
    whose = {"name": "a b", "uid": 0, "user": "root", "files": ("/tmp/with space/job.sh",)} if output.out else {}
    assert read.job_state(output) == replace(state, **whose)  # type: ignore[arg-type]


def test_the_tasks_of_an_array_are_read_in_one_answer_those_that_wait_too() -> None:
    lines = (
        "JobId=103 ArrayJobId=101 ArrayTaskId=2 JobName=a JobState=RUNNING Restarts=(null)",
        "JobId=101 ArrayJobId=101 ArrayTaskId=3,5-9:2%1 JobName=a JobState=PENDING Reason=Resources",
    )
    found = read.job_states(Output(0, "\n".join(lines), ""))
    assert (found["101_2"].state, found["101_2"].restarts) == ("running", 0)
    assert [each for each in found if found[each].state == "queued"] == ["101", "101_3", "101_5", "101_7", "101_9"]
    assert read.job_states(Output(1, "", "slurm_load_jobs error: Invalid job id specified\n")) == {}
    cut = "JobId=101 ArrayJobId=101 ArrayTaskId=1-10,12,44,4...%1 JobName=a JobState=PENDING"
    with pytest.raises(RefusedError, match="only some"):
        read.job_states(Output(0, cut, ""))
    with pytest.raises(RefusedError, match="Unable to contact"):
        read.job_states(Output(1, "", "slurm_load_jobs error: Unable to contact slurm controller\n"))


def test_the_queue_of_a_user_is_read_and_what_a_cluster_says_of_itself_is_none() -> None:
    said = "CLUSTER: far\n101|PENDING\n102_7|COMPLETING\n103|FAILED\n104|REVOKED\n"
    states = {"101": "queued", "102_7": "running", "103": "ended", "104": "unknown"}
    assert read.queue(Output(0, said, "")) == states
    with pytest.raises(RefusedError, match="Invalid user"):
        read.queue(Output(1, "", "squeue: error: Invalid user: 4242\n"))


@pytest.mark.parametrize(
    ("line", "state", "why", "code"),
    [
        ("COMPLETED|0:0|0|root|tk1|a|sbatch --parsable /runs/a/1/job.sh", "ended", "", 0),
        ("CANCELLED by 0|0:15|0|root|tk1|a|sbatch x|y", "ended", "cancelled", 143),
        ("TIMEOUT|0:0|0|root|tk1|a|", "ended", "time_limit", 0),
        ("", "gone", "", None),
        ("Slurm accounting storage is disabled", "gone", "", None),
    ],
)
def test_a_job_that_has_left_the_queue_is_told_by_the_accounts(
    line: str, state: str, why: str, code: int | None
) -> None:
    found = read.past_job(Output(0, f"{line}\n", ""))
    assert (found.state, found.why, found.exit_code) == (state, why, code)


@pytest.mark.parametrize(
    ("changed", "is_of"),
    [
        ({}, True),
        ({"name": "other"}, False),
        ({"uid": 7}, False),
        ({"files": ("/runs/a/20260102-000000-bbbbbb/job.sh",)}, False),
        ({"files": ("/runs/a/20260101-000000-aaaaaa-0/job.sh", "/runs/a/20260101-000000-aaaaaa-3/job.out")}, True),
        ({"name": "", "uid": None, "files": ()}, True),  # of a scheduler that does not say
    ],
)
def test_a_number_alone_makes_no_job_a_runs(changed: dict[str, Any], is_of: bool) -> None:
    known = JobState("running", name="a", uid=0, files=("/runs/a/20260101-000000-aaaaaa/job.sh",))
    assert replace(known, **changed).is_of("20260101-000000-aaaaaa-3", "a", 0) is is_of


@pytest.mark.parametrize(
    "word", ["RESV_DEL_HOLD", "LAUNCH_FAILED", "RECONFIG_FAIL", "EXPEDITING", "POWER_UP_NODE", "CONFIGURING"]
)
def test_what_waits_for_nodes_or_is_held_is_still_to_run(word: str) -> None:
    assert read.job_state(job(word)).state == "queued"


@pytest.mark.parametrize("odd", ["(null)", "", "many", "-1", "1e3", "9" * 5000])
def test_odd_values_of_scontrol_are_no_traceback(odd: str) -> None:
    shown = job("RUNNING", code=odd).out.replace("Restarts=2", f"Restarts={odd} EndTime={odd} PreemptTime={odd}")
    found = read.job_state(Output(0, shown, ""))
    assert (found.state, found.nodes) == ("running", "tk[1-2]")


def test_a_submission_gives_the_number_or_slurms_own_words() -> None:
    assert read.submitted(Output(0, "17;cluster\n", "")) == Job("17", "cluster")
    with pytest.raises(RefusedError, match="invalid partition specified: nosuch"):
        read.submitted(Output(1, "", "sbatch: error: invalid partition specified: nosuch\n"))
    noisy = "Welcome to the cluster\n2 messages\n18\nsbatch: lua: time limit set\n"
    assert read.submitted(Output(0, noisy, "")) == Job("18")


@pytest.mark.parametrize(
    "output",
    [
        Output(0, "hello\n", ""),
        Output(0, "", ""),
        Output(0, "17\n18\n", ""),
        Output(-9, "17\n", ""),
        Output(1, "", ""),
        Output(1, "", "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation\n"),
    ],
)
def test_a_submission_that_may_have_succeeded_is_no_refusal(output: Output) -> None:
    with pytest.raises(NoAnswerError, match="does not say the job's number"):
        read.submitted(output)


def test_a_job_is_found_in_the_queue_by_its_script() -> None:
    shown = "16|/r/a/job.sh\n17|/r/with | and space/job.sh\n18|(null)\nslurm_load_jobs: hello\n"
    assert read.found_in_queue(Output(0, shown, ""), "/r/with | and space/job.sh") == Job("17")
    assert read.found_in_queue(Output(0, shown, ""), "/r/b/job.sh") is None
    with pytest.raises(RefusedError, match="Unable to contact"):
        read.found_in_queue(Output(1, "", "slurm_load_jobs error: Unable to contact slurm controller\n"), "/r/a/job.sh")
    query = read.in_queue("r", "/r/a/job.sh", "#!/bin/bash\n#SBATCH --job-name=r -M b,c\nsleep 1\n")
    assert query.argv[-1] == "--clusters=b,c"


def test_a_dry_run_says_when_and_where() -> None:
    said = "sbatch: Job 4 to start at 2026-11-22T21:57:40 using 2 processors on nodes tk[1-2] in partition main\n"
    assert read.accepted(Output(0, "", said)) == (
        "Slurm would start it at 2026-11-22T21:57:40 on tk[1-2] (partition main)"
    )
    with pytest.raises(RefusedError, match=r"^Requested node configuration"):
        read.accepted(Output(1, "", "allocation failure: Requested node configuration is not available\n"))


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
