"""Whoever of a run on three nodes is killed, on whichever node: all end, the cause is named, and nothing is left."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from kills import NodesRun, shared_memory, wait_for
from slurm import Slurm

from trainkit.runner.rundir.layout import RunLayout
from trainkit.schedulers.jobs.run_state import state_of

# The grace time of these runs is 2 s: 15 s are given to nodes that are silent, and as many to those that are slow.
ENDS_SECONDS = 60.0
PORTS = {"pulled": 21000, "late": 21010, "twice": 21020, "other": 21030, "alone": 21040}


class Case(NamedTuple):
    """Who is killed, and what people are to read of it. code: of the job."""

    target: str
    node: int
    signal: str
    code: int
    why: str


CASES = [
    Case("rank", 0, "KILL", 137, "rank 0 (tk1) was ended by SIGKILL"),
    Case("launcher", 2, "KILL", 137, "torchrun was ended from outside by SIGKILL (node 2, tk3)"),
    Case("launcher", 1, "TERM", 137, "torchrun or rank 1 was stopped from outside (node 1, tk2)"),
    Case("guardian", 0, "KILL", 137, "trainkit's guardian process was killed from outside (node 0, tk1)"),
    Case("guardian", 2, "KILL", 137, "trainkit's guardian process was killed from outside (node 2, tk3)"),
    Case("trainkit", 0, "KILL", 137, "trainkit was killed (node 0, tk1)"),
    Case("trainkit+guardian", 1, "KILL", 137, "node 1 (tk2) was lost"),
]
# scripts/campaign/nodes draws from all of them, and from the cables.


@pytest.fixture(scope="module")
def place(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], NodesRun]]:
    """Make a run in a folder of its own."""
    made: list[NodesRun] = []

    def make(name: str) -> NodesRun:
        made.append(NodesRun(slurm, tmp_path_factory.mktemp("killed") / name))
        return made[-1]

    yield make
    for run in made:
        run.end()


def at_work(run: NodesRun) -> NodesRun:
    """Submit a run, and wait until all of its ranks work."""
    run.submit()
    assert run.runs(), run.said()
    return run


@pytest.fixture(scope="module")
def ended(place: Callable[[str], NodesRun]) -> Iterator[dict[Case, NodesRun]]:
    """Every case, once it is over: Slurm runs as many at once as the nodes have cores."""

    def carry_out(case: Case) -> NodesRun:
        run = at_work(place(re.sub(r"\W", "-", f"{case.target}-{case.node}-{case.signal}")))
        run.strike(case.target, case.node, case.signal)
        assert wait_for(run.is_over, ENDS_SECONDS), [*run.living(), run.said()]
        return run

    with ThreadPoolExecutor(4) as pool:
        yield dict(zip(CASES, pool.map(carry_out, CASES), strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.target} of node {case.node} by {case.signal}")
def test_a_kill_is_named_on_every_node_and_leaves_nothing(case: Case, ended: dict[Case, NodesRun]) -> None:
    run = ended[case]
    assert run.code() == case.code
    gone = {case.node} if case.target == "trainkit+guardian" else set[int]()
    for status in (run.status(node) for node in {0, 1, 2} - gone):
        assert (status["state"], status["exit_code"], status["why"]) == ("ended", case.code, case.why)
    assert f": {case.why}\n" in run.said()
    assert not run.living()
    assert not run.is_locked()
    assert not shared_memory(run.slurm)


def test_a_lost_first_node_is_named_where_runs_are_listed(place: Callable[[str], NodesRun]) -> None:
    run = at_work(place("first-lost"))
    run.strike("trainkit+guardian", 0)
    assert wait_for(run.is_over, ENDS_SECONDS), run.living()
    assert run.code() == 137
    assert "node 1 (tk2): node 0 (tk1) was lost" in run.said()
    found = state_of(RunLayout(run.directory))
    assert (found.word, found.exit_code) == ("lost", 137)
    # The guardian may have come to say why before it was killed too.
    assert found.why == "trainkit was killed" or "node 0 (tk1) was lost" in found.why
    assert not shared_memory(run.slurm)


def test_cancelling_a_job_is_told_once_and_from_no_node(place: Callable[[str], NodesRun]) -> None:
    run = at_work(place("cancelled"))
    run.slurm.run("scancel", run.job)
    assert wait_for(run.is_over, ENDS_SECONDS), run.living()
    assert run.said().count("SIGTERM: ending the run") == 1
    assert (run.status()["exit_code"], run.status()["why"]) == (143, "trainkit received SIGTERM")
    assert not shared_memory(run.slurm)


def test_a_run_does_not_notice_when_slurms_daemons_are_killed_and_come_back(place: Callable[[str], NodesRun]) -> None:
    run = at_work(place("daemons"))
    slurm = run.slurm
    for name, machine in (("slurmctld", "tk0"), ("slurmd", "tk2")):
        found = slurm.run("pgrep", "-x", name, on=machine).stdout.split()
        assert found
        run.kill([*map(int, found)], machine)
    slurm.start_controller()
    slurm.start_node("tk2")
    assert wait_for(lambda: run.job_field("JobState") == "RUNNING")
    (run.folder / "go").touch()
    assert wait_for(run.is_over), run.living()
    assert run.code() == 0, run.said()


def test_killing_srun_is_slurms_end_of_the_run(place: Callable[[str], NodesRun]) -> None:
    run = at_work(place("srun"))
    run.kill([int(run.living("srun")[0].split()[1])], "tk1")
    assert wait_for(run.is_over, ENDS_SECONDS), run.living()
    assert run.code() == 137
    known = state_of(RunLayout(run.directory))  # one guardian may have seen another one go, just before its own end
    assert known.word in ("lost", "unknown") or "was lost" in known.why or "SIGTERM" in known.why, known
    for name in ("tk1", "tk2", "tk3"):  # Slurm has killed who would have removed it
        run.slurm.run("sh", "-c", "rm -f /dev/shm/psm_*", on=name)


def by_hand(run: NodesRun, port: int, *nodes: int) -> None:
    for node in nodes:
        run.start(node, port)


def test_a_pulled_plug_ends_the_run_on_plain_machines(place: Callable[[str], NodesRun]) -> None:
    run = place("pulled")
    by_hand(run, PORTS["pulled"], 0, 1)
    assert wait_for(lambda: "waiting for node 2" in run.said()), run.said()
    by_hand(run, PORTS["pulled"], 2)
    assert run.runs(), [run.said(node) for node in range(3)]
    machines = run.slurm.machines
    machines.down("tk3")
    try:
        assert wait_for(run.is_over, ENDS_SECONDS), run.living()
        assert [run.processes[node].wait() for node in (0, 1)] == [137, 137]
        assert "the run failed: node 2 (tk3) was lost\n" in run.said()
        assert run.status(1)["why"] == "node 2 (tk3) was lost"
        assert not shared_memory(run.slurm)
    finally:
        machines.again("tk3", tied=True)
        run.slurm.start_node("tk3")
        assert wait_for(lambda: run.slurm.idle() == 3)


def test_nodes_that_do_not_fit_together_are_refused_on_all_of_them(place: Callable[[str], NodesRun]) -> None:
    twice, other = place("twice"), place("other")
    by_hand(twice, PORTS["twice"], 0, 1)
    twice.start(2, PORTS["twice"], number=1)
    by_hand(other, PORTS["other"], 0, 1)
    other.start(2, PORTS["other"], "launcher.grace_seconds=9")
    for run in (twice, other):
        assert wait_for(run.is_over, ENDS_SECONDS), run.living()
        assert {each.wait() for each in run.processes.values()} == {4}, [run.said(node) for node in range(3)]
        assert not (run.folder / "runs").exists()
    for node in range(3):
        assert "was started twice" in twice.said(node)
        assert "node 2 (tk3) has another plan than node 0 (tk1): grace_seconds" in other.said(node)


def test_who_waits_for_a_node_that_never_comes_can_be_ended(place: Callable[[str], NodesRun]) -> None:
    run = place("alone")
    by_hand(run, PORTS["alone"], 0, 1)
    assert wait_for(lambda: "2 of 3 nodes are here; waiting for node 2" in run.said()), run.said()
    assert [path.name[:7] for path in (run.folder / "runs").iterdir()] == [".token-"]
    run.kill([int(run.living("python")[0].split()[1])], "tk1", "TERM")
    assert wait_for(run.is_over, ENDS_SECONDS), run.living()
    assert run.processes[0].wait() == 143
    assert run.processes[1].wait() == 4
    assert "node 0 (tk1) has ended before the start" in run.said(1)
    assert not (run.folder / "runs").exists()


def test_what_the_page_on_runs_shows_starts_a_run_on_all_nodes(place: Callable[[str], NodesRun]) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "runs.md"
    script, by_hand = re.findall(r"^```bash\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    lines = [line.partition("#")[0].split()[3:] for line in by_hand.splitlines()]
    job, hands = place("page-job"), place("page-hands")
    for run in (job, hands):
        (run.folder / "my-run.yaml").write_text((run.folder / "r.yaml").read_text())
        (run.folder / "go").touch()
    command = script.splitlines()[-1].split()
    options = [word for line in script.splitlines() if line.startswith("#SBATCH") for word in line.split()[1:]]
    job.submit(*options, command=command[1:])
    for node, words in enumerate(lines):
        assert f"--node-rank {node}" in " ".join(words)
        hands.start_as(node, "run", "my-run.yaml", *words)
    for run in (job, hands):
        assert wait_for(run.is_over), run.living()
        assert len(list((run.folder / "runs" / "r").glob("*"))) == 1, run.said()
        assert run.status()["exit_code"] == run.status(1)["exit_code"] == 0
        assert sorted(path.name for path in run.folder.glob("here-*")) == ["here-0", "here-1"]
