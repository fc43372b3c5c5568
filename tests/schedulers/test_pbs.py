"""PBS: the script of a job, what OpenPBS 23.06 has printed, and jobs that qsub took without saying so."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainkit.errors import MachineError, RecipeError
from trainkit.launch_plan.model import Plan, Variable
from trainkit.launch_plan.render.explain import render
from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan
from trainkit.recipe.resolved import Resolved
from trainkit.schedulers import pbs
from trainkit.schedulers.base import EndedError, Job, JobState, NoAnswerError, Output, Place, Query, RefusedError
from trainkit.schedulers.jobs import submitting
from trainkit.schedulers.jobs.records import Submission, read_submission
from trainkit.schedulers.jobs.submitting import Task, submit_array
from trainkit.schedulers.pbs import SCHEDULER as PBS
from trainkit.schedulers.registry import place_in

Solve = Callable[..., Resolved]
Machine = Callable[..., Facts]


def recipe(root: str = "/data/runs", device: str = "cpu", more: str = "", **section: Any) -> str:
    cluster = json.dumps({"kind": "pbs", **section})
    given = f"version: 1\nname: r\ntrain: {{steps: 1}}\ndata: {{kind: random}}\ndevices: {{type: {device}}}\n"
    return f"{given}output: {{root: {root}}}\n{more}\ncluster: {cluster}\n"


def script(resolved: Resolved, facts: Facts) -> list[str]:
    job = build_plan(resolved, facts).plan.job
    assert job is not None
    return job.content.bind({Variable.RUN_DIR: "/run"}).splitlines()


def test_each_node_is_a_chunk_with_all_that_the_recipe_asks_for(solve: Solve, machine: Machine) -> None:
    section: dict[str, Any] = {
        "queue": "gpu", "account": "a1", "time": "36:00:00", "memory_per_node": "480gb", "cpus_per_node": 64,
        "exclusive": True, "resources": {"gpu_model": "h100", "scratch": "1tb"}, "qsub": ["-Wumask=027"],
        "setup": ["module load cuda"],
    }  # fmt: skip
    resolved = solve(recipe(device="cuda", more="nodes: {count: 4}\nstrategy: {kind: ddp}", **section))
    facts = machine(2)
    lines = script(resolved, facts)
    chunk = "ncpus=64:mpiprocs=1:ngpus=2:mem=480gb:gpu_model=h100:scratch=1tb"
    assert [line for line in lines if line.startswith("#PBS")] == [
        "#PBS -N r", f"#PBS -l select=4:{chunk}", "#PBS -l place=scatter:excl", "#PBS -l walltime=36:00:00",
        "#PBS -q gpu", "#PBS -A a1", "#PBS -r y", "#PBS -j oe", "#PBS -o /run/pbs.out", "#PBS -Wumask=027",
    ]  # fmt: skip
    planned = build_plan(resolved, facts)
    assert "cluster.memory_per_node" in render(f"#PBS -l select=4:{chunk}", resolved, planned)
    assert lines[-1].endswith('-m trainkit job batch "$trainkit_run"')
    assert planned.plan.job is not None
    assert [str(word) for word in planned.plan.job.step] == ["pbsdsh", "--", "/bin/bash", "<run_dir>/job.sh"]
    assert PBS.starts_step(("pbsdsh", "--", "/bin/bash", "/run/job.sh"), "/run")
    assert not PBS.starts_step(("pbsdsh", "--", "/bin/bash", "/other/job.sh"), "/run")


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"qsub": ["-lwalltime=1"]}, "cluster.qsub sets -l walltime"),
        ({"qsub": ["-l x=1,select=2"]}, "cluster.qsub sets -l select"),
        ({"qsub": ["-qgpu"]}, "cluster.qsub sets -q"),
        ({"qsub": ["-J0-3"]}, "cluster.qsub sets -J"),
        ({"qsub": ["job.sh"]}, r"cluster.qsub\[0\] is 'job.sh'"),
        ({"time": "90"}, "cluster.time"),
        ({"memory_per_node": "480G"}, "cluster.memory_per_node"),
    ],
)
def test_what_trainkit_sets_itself_is_refused(solve: Solve, here: Facts, section: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        build_plan(solve(recipe(**section)), here)


@pytest.mark.cli
@pytest.mark.parametrize("task", [False, True])
def test_the_script_is_run_again_on_each_node_up_to_its_set_up(
    solve: Solve, here: Facts, tmp_path: Path, task: bool
) -> None:
    setup = ["export LOADED=yes", "set -- of the set-up"]
    lines = script(solve(recipe(setup=setup)), replace(here, executable="/bin/echo"))
    file = tmp_path / "job.sh"
    file.write_text("\n".join(lines).replace("/run", str(tmp_path)) + "\n")
    words = ["bash", "-c", 'echo "$LOADED $1"', "sh", "a b"] if task else []
    environ = {"PATH": os.environ["PATH"], "PBS_O_WORKDIR": str(tmp_path), "PBS_NODENUM": "0"}
    done = subprocess.run(["bash", str(file), *words], env=environ, capture_output=True, text=True, check=False)
    said = "yes a b\n" if task else f"-P -m trainkit job batch {tmp_path}\n"
    assert (done.returncode, done.stdout, (tmp_path / "job.out").read_text()) == (0, "", said)
    done = subprocess.run(
        ["bash", str(file), *words], env={**environ, "PBS_NODENUM": "1"}, capture_output=True, text=True, check=False
    )
    assert done.stdout == said  # which PBS collects: files of two machines are not appended to at once
    file.write_text(file.read_text().replace("export LOADED=yes", "false"))
    done = subprocess.run(["bash", str(file), *words], env=environ, capture_output=True, text=True, check=False)
    assert f"{tmp_path} --failed cluster.setup line 1 failed with exit code 1" in (tmp_path / "job.out").read_text()


def test_the_tasks_of_an_array_have_one_script(solve: Solve, here: Facts) -> None:
    job = build_plan(solve(recipe()), here).plan.job
    assert job is not None
    lines = job.content.bind({Variable.RUN_DIR: "\0"}).splitlines()
    text = PBS.array_script(lines, "\0", "/runs/r/x", 3, 2)
    assert "#PBS -o /runs/r/x-^array_index^/pbs.out" in text.splitlines()
    assert "trainkit_run=/runs/r/x-$PBS_ARRAY_INDEX" in text.splitlines()
    assert PBS.task("17[].server", 2) == "17[2].server"
    assert PBS.task_of("17[2].server") == ("17[].server", 2)
    assert PBS.task_of("17.server") is None
    assert [PBS.is_named("17[].server", word) for word in ("17", "17[]", "17[].server", "1")] == [True] * 3 + [False]


@pytest.mark.cli
def test_a_folder_that_pbs_would_read_otherwise_is_refused(solve: Solve, here: Facts, tmp_path: Path) -> None:
    plan = build_plan(solve(recipe(root=str(tmp_path / "a b"))), here).plan
    with pytest.raises(MachineError, match="in its own way"):
        submitting.submit(plan, "", "", os.environ)
    assert not list((tmp_path / "a b" / "r").iterdir())


def test_a_node_knows_its_number_and_is_told_the_names(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("tk1\ntk2\ntk2\n")
    assert place_in({"PBS_JOBID": "7.s", "PBS_NODENUM": "1"}) == Place(1)
    assert PBS.step_words({"PBS_NODEFILE": str(tmp_path / "nodes")}) == ("--hosts", "tk1,tk2")
    with pytest.raises(MachineError, match="PBS_NODEFILE cannot be read"):
        PBS.step_words({})


# As `qstat -f -F json` of OpenPBS 23.06 prints it, cut to what is read.
SHOWN: dict[str, Any] = {
    "Job_Name": "r", "Job_Owner": "me@tk0", "job_state": "R", "exec_host": "tk1/0*2+tk2/0*2", "substate": 42,
    "Output_Path": "tk0:/runs/r/20261127-212532-37cebe/pbs.out", "stime": "Fri Nov 27 21:25:32 2026", "run_count": 1,
    "Resource_List": {"walltime": "00:10:00", "select": "2:ncpus=2:mpiprocs=1"},
    "comment": "Job run at Fri Nov 27 at 21:25 on (tk1:ncpus=2)+(tk2:ncpus=2)",
}  # fmt: skip


def shown(number: str = "7.tk0", **changed: Any) -> Output:
    return Output(0, json.dumps({"timestamp": 1795814441, "Jobs": {number: SHOWN | changed}}), "")


UNKNOWN = Output(153, '{"timestamp": 1795814441, "pbs_server": "tk0"}', "qstat: Unknown Job Id 7.tk0\n")


@pytest.mark.parametrize(
    ("changed", "known"),
    [
        ({}, {"state": "running", "nodes": "tk1,tk2", "restarts": 0, "why": ""}),
        ({"job_state": "Q", "comment": "Can Never Run: x"}, {"state": "queued", "reason": "Can Never Run: x"}),
        ({"job_state": "H"}, {"state": "queued"}),
        ({"run_count": 3}, {"restarts": 2}),
        ({"substate": 60}, {"state": "running", "restarts": 1}),  # it is ended, to be begun again
        ({"comment": "Job run and terminated by me@tk0"}, {"state": "running", "why": "cancelled"}),
        ({"job_state": "F", "Exit_status": 0}, {"state": "ended", "exit_code": 0, "why": ""}),
        ({"job_state": "F", "Exit_status": 3}, {"exit_code": 3}),
        ({"job_state": "F", "Exit_status": 271}, {"exit_code": 143}),
        ({"job_state": "F", "Exit_status": -29}, {"exit_code": None, "why": "time_limit"}),
        ({"job_state": "F", "Exit_status": -27}, {"exit_code": None, "why": "out_of_memory"}),
        ({"job_state": "F", "Exit_status": 265, "comment": "terminated by me@x"}, {"exit_code": 137}),
        ({"job_state": "?", "run_count": "many", "Resource_List": {}, "stime": "soon"}, {"state": "unknown"}),
    ],
)
def test_the_state_of_a_job(changed: dict[str, Any], known: dict[str, Any]) -> None:
    found = PBS.state(Job("7.tk0")).read(shown(**changed))
    assert {name: getattr(found, name) for name in known} == known
    assert found.is_of("20261127-212532-37cebe", "r", 0)
    assert found.files == ("/runs/r/20261127-212532-37cebe/job.sh",)


def test_a_running_job_says_when_its_time_is_up() -> None:
    found = PBS.state(Job("7.tk0")).read(shown())
    assert found.started is not None
    assert found.ends == found.started + 600


def test_a_job_that_the_server_knows_no_more_is_gone_and_a_silent_server_is_no_answer() -> None:
    assert PBS.state(Job("7.tk0")).read(UNKNOWN) == JobState("gone")
    assert PBS.states(Job("7.tk0")).read(UNKNOWN) == {}
    finished = Output(35, "{}", "qstat: 7.tk0 Job has finished, use -x or -H to obtain historical job information\n")
    assert PBS.states(Job("7.tk0")).read(finished) == {}
    query = PBS.past(Job("7.tk0"))
    assert query.argv == ("qstat", "-x", "-f", "-F", "json", "7.tk0")
    for silent in (Output(111, "", "Connection refused\nqstat: cannot connect to server tk0\n"), Output(0, "{", "")):
        with pytest.raises(RefusedError):
            PBS.states(Job("7.tk0")).read(silent)
    no_history = Output(1, "{}", "qstat: PBS is not configured to maintain job history 7.tk0\n")
    with pytest.raises(RefusedError, match="not configured"):
        query.read(no_history)


def test_orders_name_one_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, task = Job("7.tk0"), Job("7[2].tk0")
    assert PBS.states(task).argv == ("qstat", "-t", "-f", "-F", "json", "7[].tk0")
    assert PBS.cancel(job, now=False).argv == ("qdel", "7.tk0")
    assert PBS.cancel(job, now=True).argv == ("qdel", "-W", "force", "7.tk0")
    assert PBS.end(job).argv == PBS.save(job, ("tk1",), "").argv == ("qsig", "-s", "SIGURG", "7.tk0")
    with pytest.raises(EndedError):
        PBS.end(job).read(Output(153, "", "qsig: Unknown Job Id 7.tk0\n"))
    with pytest.raises(RefusedError, match="Unauthorized"):
        PBS.end(job).read(Output(159, "", "qsig: Unauthorized Request  7.tk0\n"))
    asked: list[tuple[str, ...]] = []

    def answer(query: Query[Any], *_: object) -> Any:
        asked.append(query.argv)
        return query.read(Output(0, "8.tk0\n", ""))

    monkeypatch.setattr(pbs, "ask", answer)
    assert PBS.requeue(job, "/run", {}) == "8.tk0"
    PBS.requeue(task, "/run", {})
    tail = ("-o", "/run/pbs.out", "/run/job.sh")
    assert asked[0] == ("qsub", "-W", "depend=afterany:7.tk0", *tail)
    assert (asked[1][1], asked[1][3:]) == ("-a", ("-v", "PBS_ARRAY_INDEX=2", *tail))


@pytest.mark.parametrize(
    ("output", "error"),
    [
        (Output(0, "12.tk0\n", ""), None),
        (Output(0, "Welcome\n12[].tk0\n", ""), None),
        (Output(170, "", "qsub: Unknown queue\n"), RefusedError),
        (Output(188, "", "qsub: Job violates queue and/or server resource limits\n"), RefusedError),
        (Output(2, "", "qsub: illegal -W value\nusage: qsub [-a date_time]\n"), RefusedError),
        (Output(111, "", "Connection refused\nqsub: cannot connect to server tk0 (errno=111)\n"), NoAnswerError),
        (Output(1, "", ""), NoAnswerError),
        (Output(0, "", ""), NoAnswerError),
        (Output(-9, "12.tk0\n", ""), NoAnswerError),
    ],
)
def test_a_submission_gives_the_number_or_the_words_of_qsub(output: Output, error: type[Exception] | None) -> None:
    if error is None:
        assert pbs.submitted(output).startswith("12")
        return
    with pytest.raises(error):
        pbs.submitted(output)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put shell scripts in the place of PBS's commands."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("STAND_IN", str(tmp_path))
    monkeypatch.setattr(pbs, "LATE_SECONDS", 0.5)
    monkeypatch.setattr(pbs, "LOOK_SECONDS", 0.1)

    def put(**scripts: str) -> None:
        for name, text in scripts.items():
            (folder / name).write_text(f"#!/bin/sh\n{text}\n")
            (folder / name).chmod(0o755)

    return put


TAKE = (
    "for script; do :; done; "
    'printf \'{"Jobs": {"7.s": {"Output_Path": "s:%spbs.out"}}}\' "${script%job.sh}" >"$STAND_IN/q"'
)
QSTAT = 'cat "$STAND_IN/q" 2>/dev/null || echo "{}"'
SILENT = "echo 'qstat: cannot connect to server s' >&2; exit 111"


def task_of(solve: Solve, here: Facts, tmp_path: Path) -> Task:
    resolved = solve(recipe(root=str(tmp_path / "runs")))
    return Task("a", resolved, build_plan(resolved, here))


def submitted(plan: Plan) -> Submission:
    layout, submission = submitting.submit(plan, "version: 1\n", "#!/bin/sh\n", os.environ)
    found = read_submission(layout.root)
    assert found is not None
    assert found._replace(at=0.0, host="") == submission
    return submission


@pytest.mark.cli
@pytest.mark.parametrize(
    ("qsub", "qstat", "outcome"),
    [
        ("echo 7.s", SILENT, "7.s"),
        (f"{TAKE}; exit 1", QSTAT, "7.s"),
        (f"{TAKE}; kill -9 $$", QSTAT, "7.s"),
        ("exit 1", QSTAT, "PBS has no such job"),
        ("exit 1", SILENT, "PBS may have the job"),
        ("echo 'qsub: Unknown queue' >&2; exit 170", SILENT, "PBS refuses the job: qsub: Unknown queue"),
    ],
)
def test_a_job_that_pbs_took_is_the_submission_whatever_qsub_says(
    stand_in: Callable[..., None], solve: Solve, here: Facts, tmp_path: Path, qsub: str, qstat: str, outcome: str
) -> None:
    stand_in(qsub=qsub, qstat=qstat)
    task = task_of(solve, here, tmp_path)
    if outcome == "7.s":
        assert submitted(task.plan).job == "7.s"
    else:
        with pytest.raises((MachineError, RecipeError), match=outcome):
            submitted(task.plan)
    assert len([*(tmp_path / "runs").glob("r/*")]) == (outcome in ("7.s", "PBS may have the job"))


@pytest.mark.cli
def test_an_array_is_submitted_by_words_of_qsub(
    stand_in: Callable[..., None], solve: Solve, here: Facts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PBS_DPREFIX", "#OTHER")  # the lines that qsub would take for options
    stand_in(qsub='echo "$@$PBS_DPREFIX" >"$STAND_IN/words"; echo "7[].s"')
    task = task_of(solve, here, tmp_path)
    made = submit_array([task, task, task], 2, lambda _: ("version: 1\n", "#!/bin/sh\n"), os.environ)
    assert [submission.job for _, submission in made] == ["7[0].s", "7[1].s", "7[2].s"]
    assert (tmp_path / "words").read_text() == f"-J 0-2%2 {made[0][0].root}/job.sh\n"


@pytest.mark.cli
@pytest.mark.parametrize(
    ("section", "queue", "severity", "said"),
    [
        ({"time": "02:00:00"}, '"resources_max": {"walltime": "01:00:00"}', "error", "has resources_max.walltime"),
        ({"time": "00:30:00"}, '"resources_max": {"walltime": "01:00:00"}', "", ""),
        ({}, '"enabled": "False"', "warning", "takes no jobs at the moment"),
        ({}, '"kill_delay": 5', "warning", r"PBS kills 5 s after .* launcher.grace_seconds is 9"),
        ({"requeue": {"warn_seconds": 10}}, '"kill_delay": 60', "", ""),
    ],
)
def test_limits_of_a_queue_are_told_before_a_job_is_submitted(
    stand_in: Callable[..., None],
    solve: Solve,
    here: Facts,
    tmp_path: Path,
    section: dict[str, Any],
    queue: str,
    severity: str,
    said: str,
) -> None:
    server = 'echo \'{"Server": {"s": {"default_queue": "workq"}}}\''
    stand_in(qstat=f'case "$1" in -B) {server};; *) echo \'{{"Queue": {{"workq": {{{queue}}}}}}}\';; esac')
    # A queue whose attributes say nothing kills ten seconds after it has told a job to end.
    resolved = solve(recipe(root=str(tmp_path / "runs"), more="launcher: {grace_seconds: 9}", **section))
    found = submitting.dry_run(build_plan(resolved, here).plan, resolved, os.environ, str(tmp_path))
    diagnostics = (*found.refused, *found.remarks)
    assert [each.severity for each in diagnostics] == ([severity] if severity else [])
    for each in diagnostics:
        assert re.search(said, each.what)


@pytest.mark.cli
def test_variables_that_a_job_would_not_have_are_named(
    stand_in: Callable[..., None], solve: Solve, here: Facts, tmp_path: Path
) -> None:
    stand_in(qstat='case "$1" in -B) echo \'{"Server": {"s": {"default_queue": "q"}}}\';; *) echo \'{}\';; esac')
    text = recipe(more="env_from: [HF_TOKEN, OTHER]", setup=["export HF_TOKEN=$(cat ~/.hf_token)"])
    resolved = solve(text)
    found = submitting.dry_run(build_plan(resolved, here).plan, resolved, os.environ, str(tmp_path))
    (remark,) = [each for each in found.remarks if each.key == "env_from"]
    assert "env_from passes OTHER on" in remark.what
    assert "cluster.setup" in remark.hint
