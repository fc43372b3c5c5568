"""Whoever is ended, by whatever signal, whenever: nothing of the run stays, and the exit code is the documented one."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from supervised_run import SupervisedRun, wait_for

from tests.unused_port import unused_port

GRACE = 2.0
LIMIT = GRACE + 10.0
SIGNALS = {"INT": signal.SIGINT, "TERM": signal.SIGTERM, "KILL": signal.SIGKILL}

# launcher, signal, who gets it, when
CASES = [
    ("python", "INT", "trainkit", "startup"),
    ("python", "TERM", "trainkit", "step"),
    ("python", "KILL", "trainkit", "startup"),
    ("python", "TERM", "launcher", "step"),
    ("python", "KILL", "launcher", "startup"),
    ("python", "INT", "rank", "step"),
    ("torchrun", "INT", "trainkit", "step"),
    ("torchrun", "TERM", "trainkit", "startup"),
    ("torchrun", "KILL", "trainkit", "step"),
    ("torchrun", "INT", "launcher", "startup"),
    ("torchrun", "TERM", "launcher", "step"),
    ("torchrun", "KILL", "launcher", "step"),
    ("torchrun", "TERM", "rank", "startup"),
    ("torchrun", "KILL", "rank", "step"),
    ("accelerate", "INT", "trainkit", "startup"),
    ("accelerate", "TERM", "trainkit", "step"),
    ("accelerate", "KILL", "trainkit", "step"),
    ("accelerate", "TERM", "launcher", "step"),
    ("accelerate", "KILL", "launcher", "startup"),
    ("accelerate", "INT", "rank", "step"),
    ("deepspeed", "INT", "trainkit", "step"),
    ("deepspeed", "TERM", "trainkit", "startup"),
    ("deepspeed", "KILL", "trainkit", "startup"),
    ("deepspeed", "INT", "launcher", "step"),
    ("deepspeed", "TERM", "launcher", "startup"),
    ("deepspeed", "KILL", "launcher", "step"),
    ("deepspeed", "KILL", "rank", "startup"),
    ("deepspeed", "TERM", "rank", "step"),
]
AXES = (("python", "torchrun", "accelerate", "deepspeed"), tuple(SIGNALS), ("trainkit", "launcher", "rank"), ("startup", "step"))  # fmt: skip  # noqa: E501


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Any]:
    started: list[SupervisedRun] = []

    def start(program: str, *arguments: str, **plan: Any) -> SupervisedRun:
        started.append(SupervisedRun(plan.pop("folder", tmp_path), program, *arguments, **{"grace": GRACE, **plan}))
        return started[-1]

    yield start
    for run in started:
        run.end()


def ranks_of(launcher: str) -> int:
    return 1 if launcher == "python" else 2


def has_changed(path: Path, before: str) -> bool:
    return path.read_text() != before


def target(run: SupervisedRun, who: str) -> int:
    if who == "trainkit":
        run.launcher()
        return run.process.pid
    return run.launcher() if who == "launcher" else run.wrapper(run.ranks - 1)


def is_past_its_start(launcher: int) -> bool:
    """Whether the launcher is importing torch. Before, an INT is an error of Python's own start, which exits with 1."""
    return "torch" in Path(f"/proc/{launcher}/maps").read_text()


def assert_nothing_is_left(run: SupervisedRun, since: float) -> None:
    left = LIMIT - (time.monotonic() - since)
    try:
        wait_for("the end of every process", lambda: not run.living(), left)
    except AssertionError:
        raise AssertionError(f"still there: {run.living()}\n{run.console()}") from None
    assert run.status()["state"] == "ended"
    assert run.leftovers() == []


def test_the_cases_cover_every_pair_of_values() -> None:
    for (i, first), (j, second) in itertools.combinations(enumerate(AXES), 2):
        assert {(case[i], case[j]) for case in CASES} == set(itertools.product(first, second))


@pytest.mark.parametrize(("launcher", "name", "who", "when"), CASES)
def test_a_signal_ends_everything_with_the_documented_code(
    runs: Any, launcher: str, name: str, who: str, when: str
) -> None:
    run = runs("heartbeat.py", launcher=launcher, ranks=ranks_of(launcher))
    if when == "step":
        run.wait_for_beats()
    pid = target(run, who)
    if (who, name) == ("launcher", "INT"):
        wait_for("the launcher's own code", partial(is_past_its_start, pid))
    began = time.monotonic()
    os.kill(pid, SIGNALS[name])

    code = run.wait(LIMIT)
    assert_nothing_is_left(run, began)
    by_trainkit = 128 + SIGNALS[name] if who == "trainkit" else 137
    assert code == (-signal.SIGKILL if (who, name) == ("trainkit", "KILL") else by_trainkit), run.console()
    status = run.status()
    assert status["exit_code"] == by_trainkit
    assert status["why"]


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_ranks_that_ignore_term_are_killed_after_the_grace_time(runs: Any, launcher: str) -> None:
    run = runs("heartbeat.py", "--ignore-term", launcher=launcher, ranks=2)
    run.wait_for_beats()
    began = time.monotonic()
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(LIMIT) == 143
    assert time.monotonic() - began >= GRACE
    assert_nothing_is_left(run, began)


def test_a_second_interrupt_kills_at_once(runs: Any) -> None:
    run = runs("heartbeat.py", "--ignore-term", launcher="torchrun", ranks=2, max_restarts=3, grace=10 * LIMIT)
    run.wait_for_beats()
    began = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    run.process.send_signal(signal.SIGINT)
    assert run.wait(LIMIT) == 130
    assert_nothing_is_left(run, began)


def test_the_guardian_killed_from_outside_leaves_nothing(runs: Any) -> None:
    run = runs("heartbeat.py", launcher="torchrun", ranks=2)
    run.wait_for_beats()
    began = time.monotonic()
    os.kill(run.status()["pids"]["guardian"], signal.SIGKILL)
    assert run.wait(LIMIT) == 137
    assert_nothing_is_left(run, began)
    assert run.status()["failure"] == "guardian"


@pytest.mark.parametrize("launcher", ["python", "torchrun", "accelerate", "deepspeed"])
def test_trainkit_and_its_guardian_killed_at_once_leave_nothing_that_trains(runs: Any, launcher: str) -> None:
    run = runs("heartbeat.py", launcher=launcher, ranks=ranks_of(launcher))
    run.wait_for_beats()
    began = time.monotonic()
    pids = run.status()["pids"]
    for pid in (pids["guardian"], pids["trainkit"]):
        os.kill(pid, signal.SIGKILL)
    assert run.wait(LIMIT) == -signal.SIGKILL
    wait_for("the end of every process", lambda: not run.living(), LIMIT - (time.monotonic() - began))
    assert all(record["told_to_stop"] for record in run.records())


def test_trainkit_killed_while_it_ends_the_run_for_its_guardian_leaves_nothing(runs: Any) -> None:
    run = runs("heartbeat.py", "--slow-term", launcher="torchrun", ranks=2)
    run.wait_for_beats()
    pids = run.status()["pids"]
    os.kill(pids["guardian"], signal.SIGKILL)
    wait_for("TERM", lambda: (run.folder / "told-0").exists() and (run.folder / "told-1").exists(), LIMIT)
    os.kill(pids["trainkit"], signal.SIGKILL)
    assert run.wait(LIMIT) == -signal.SIGKILL
    wait_for("the end of every process", lambda: not run.living(), LIMIT)


@pytest.mark.parametrize("sentinel", ["lives", "killed"])
def test_a_launcher_ends_without_ranks_when_trainkit_and_its_guardian_are_gone(runs: Any, sentinel: str) -> None:
    run = runs("heartbeat.py", launcher="torchrun", ranks=2)
    wait_for("the launcher", lambda: run.status().get("pids", {}).get("launcher"), LIMIT)
    pids = run.status()["pids"]
    os.kill(pids["launcher"], signal.SIGSTOP)  # before it has started any rank, as one that waits for other nodes
    assert run.records() == []
    below = wait_for("the sentinel", lambda: len(found := psutil.Process(pids["guardian"]).children()) == 2 and found)
    for pid in (pids["guardian"], pids["trainkit"]):
        os.kill(pid, signal.SIGKILL)
    if sentinel == "killed":  # then the ranks that it starts end by themselves
        for each in below:
            os.kill(each.pid, signal.SIGCONT if each.pid == pids["launcher"] else signal.SIGKILL)
    assert run.wait(LIMIT) == -signal.SIGKILL
    wait_for("the end of every process", lambda: not run.living(), 2 * LIMIT)


def test_the_ranks_that_a_launcher_restarts_end_where_nobody_is_left_to_end_them(runs: Any) -> None:
    run = runs("heartbeat.py", launcher="torchrun", ranks=2, max_restarts=2)
    run.wait_for_beats()
    began = time.monotonic()
    pids = run.status()["pids"]
    for pid in (pids["guardian"], pids["trainkit"]):
        os.kill(pid, signal.SIGKILL)
    wait_for("the end of every process", lambda: not run.living(), 3 * LIMIT - (time.monotonic() - began))


def test_the_guardian_writes_the_summary_of_a_run_whose_trainkit_was_killed(runs: Any) -> None:
    run = runs("heartbeat.py")
    run.wait_for_beats()
    os.kill(run.process.pid, signal.SIGKILL)
    wait_for("the end of every process", lambda: not run.living(), LIMIT)
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert (summary["exit_code"], summary["failure"], summary["why"]) == (137, "trainkit", "trainkit was killed")
    assert summary["wall_seconds"] > 0


@pytest.mark.parametrize(("launcher", "code"), [("python", 7), ("torchrun", 1), ("python", 0)])
def test_a_program_whose_run_directory_is_gone_has_its_own_exit_code(runs: Any, launcher: str, code: int) -> None:
    run = runs("wait_then_exit.py", str(code and 7), launcher=launcher, ranks=ranks_of(launcher))
    for rank in range(run.ranks):
        run.wrapper(rank)
    shutil.rmtree(run.run_dir)
    (run.folder / "go").touch()
    assert run.wait() == code
    assert "killed from outside" not in run.console()
    assert run.console().count("the run directory was removed during the run") == 1


def test_a_run_directory_that_is_removed_meanwhile_does_not_end_the_run(runs: Any) -> None:
    run = runs("heartbeat.py")
    run.wait_for_beats()
    shutil.rmtree(run.run_dir)
    time.sleep(0.5)
    assert run.process.poll() is None
    began = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    assert run.wait(LIMIT) == 130
    wait_for("the end of every process", lambda: not run.living(), LIMIT - (time.monotonic() - began))
    assert "Traceback" not in run.console()


def test_deepspeed_losing_its_inner_launcher_is_no_success(runs: Any) -> None:

    run = runs("heartbeat.py", launcher="deepspeed", ranks=2)
    run.wait_for_beats()
    began = time.monotonic()
    inner = psutil.Process(run.launcher()).children()
    os.kill(inner[0].pid, signal.SIGKILL)
    assert run.wait(LIMIT) == 137
    assert_nothing_is_left(run, began)


def test_torchrun_is_not_allowed_to_restart_ranks_that_were_told_to_stop(runs: Any) -> None:
    run = runs("heartbeat.py", launcher="torchrun", ranks=2, max_restarts=5)
    run.wait_for_beats()
    began = time.monotonic()
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(LIMIT) == 143
    assert_nothing_is_left(run, began)
    assert {record["restart"] for record in run.records()} == {0}


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate", "deepspeed"])
def test_the_code_of_the_first_rank_that_failed_is_the_code_of_the_run(runs: Any, launcher: str) -> None:
    run = runs("gloo_steps.py", "100000", "1", "7", launcher=launcher, ranks=2)
    assert run.wait() == 7
    assert_nothing_is_left(run, time.monotonic())
    assert (run.status()["failure"], run.status()["rank"]) == ("program", 1)
    assert "rank 1 exited with code 7" in run.console()


def test_a_restart_that_succeeds_is_a_success(runs: Any) -> None:
    flags = ("--exit-at", "3", "9", "1", "--once", "--stop-at", "10")
    run = runs("heartbeat.py", *flags, launcher="torchrun", ranks=2, max_restarts=1)
    assert run.wait() == 0, run.console()
    assert {record["restart"] for record in run.records()} == {1}
    assert_nothing_is_left(run, time.monotonic())


def test_usr1_reaches_every_program_and_the_run_goes_on(runs: Any) -> None:
    run = runs("heartbeat.py", launcher="torchrun", ranks=2)
    run.wait_for_beats()
    run.process.send_signal(signal.SIGUSR1)
    for rank in range(2):
        wait_for(f"a checkpoint by rank {rank}", (run.folder / f"checkpoint-{rank}").exists)
    beats = [(run.folder / f"beat-{rank}").read_text() for rank in range(2)]
    for rank in range(2):
        wait_for("another beat", partial(has_changed, run.folder / f"beat-{rank}", beats[rank]))
    began = time.monotonic()
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(LIMIT) == 143
    assert_nothing_is_left(run, began)


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate", "deepspeed"])
def test_usr1_to_all_processes_of_a_job_ends_none_and_reaches_the_programs(runs: Any, launcher: str) -> None:
    """As `scancel --signal=USR1` does, with a program that handles it under a launcher that does not."""
    run = runs("heartbeat.py", launcher=launcher, ranks=2)
    run.wait_for_beats()
    own = [line for line in run.living() if "sleep" not in line and "resource_tracker" not in line]
    for line in own:
        os.kill(int(line.split()[0]), signal.SIGUSR1)
    os.kill(run.launcher(), signal.SIGUSR2)
    for rank in range(2):
        wait_for(f"a checkpoint by rank {rank}", (run.folder / f"checkpoint-{rank}").exists)
    beats = [(run.folder / f"beat-{rank}").read_text() for rank in range(2)]
    for rank in range(2):
        wait_for("another beat", partial(has_changed, run.folder / f"beat-{rank}", beats[rank]))
    still = {line.split()[0] for line in run.living()}
    assert {line.split()[0] for line in own} <= still
    began = time.monotonic()
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(LIMIT) == 143
    assert_nothing_is_left(run, began)


def test_two_nodes_are_one_run_and_the_first_shows_the_first_rank(runs: Any, tmp_path: Path) -> None:
    meeting = f"127.0.0.1:{unused_port()}"
    nodes = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        options = {"nodes": {"count": 2, "rendezvous": meeting}, "words": ("--node-rank", str(number))}
        nodes.append(runs("gloo_steps.py", "5", folder=folder, shared=tmp_path, launcher="torchrun", **options))
    assert [node.wait() for node in nodes] == [0, 0], [node.console() for node in nodes]
    assert sorted(record["rank"] for record in nodes[0].records()) == [0, 1]
    assert "rank 0 is done" in nodes[0].console()
    assert "is done" not in nodes[1].console()
    for node in nodes:
        assert_nothing_is_left(node, time.monotonic())
