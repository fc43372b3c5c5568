"""Runs that wait for their cards: in order of arrival, cancelled, killed, detached; real runs on made-up cards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pexpect
import pytest

import trainkit
from tests.conftest import Trainkit
from tests.made_up_cards import GIGABYTE, Cards, card
from trainkit.machine.gpu_locks import GpuLocks, Signature
from trainkit.machine.gpu_queue import Ticket, line

pytestmark = pytest.mark.cli
HERE = Path(__file__).parent
PATIENCE = 240.0  # seconds: for a machine that does much else
# Says which cards it sees, then waits to be let go, if it is told to.
PROGRAM = """
import os, pathlib, sys, time
here = pathlib.Path(sys.argv[1])
pathlib.Path(here, f"seen-{os.getpid()}").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
print("began", flush=True)
deadline = time.monotonic() + 60
while not (here / "go").exists() and time.monotonic() < deadline:
    time.sleep(0.05)
"""
RECIPE = """\
version: 1
name: patient
program: {kind: torch, script: program.py, args: ["."]}
devices: {select: 1, when_busy: wait}
"""


def until(wanted: Callable[[], Any]) -> Any:
    """What is waited for, once it is there."""
    deadline = time.monotonic() + PATIENCE
    while not (found := wanted()):
        assert time.monotonic() < deadline, "it has not come"
        time.sleep(0.05)
    return found


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM)
    file = tmp_path / "patient.yaml"
    file.write_text(RECIPE)
    return file


@pytest.fixture
def one_card(cards: Cards, clean_environment: dict[str, str]) -> dict[str, str]:
    return {**clean_environment, **cards(card(0))}


@pytest.fixture
def held(one_card: Mapping[str, str]) -> Iterator[GpuLocks]:
    """The card, which another run has."""
    locks = GpuLocks(one_card)
    assert locks.take([card(0)["uuid"]]) is None
    locks.sign("ada", "/runs/other")
    yield locks
    locks.release()


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path, recipe: Path, one_card: Mapping[str, str]) -> Iterator[Start]:
    """Start a real run of the recipe and come back at once."""
    runs: list[subprocess.Popen[str]] = []

    def started(*words: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "trainkit", "run", str(recipe), *words]
        run = subprocess.Popen(
            argv, cwd=tmp_path, env=one_card, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        runs.append(run)
        return run

    yield started
    (tmp_path / "go").touch()
    for run in runs:
        run.communicate(timeout=PATIENCE)


def status_of(folder: Path) -> dict[str, Any]:
    """status.json of the only run, once it says what it waits for."""

    def told() -> Any:
        for file in folder.glob("runs/patient/*/status.json"):
            if (status := json.loads(file.read_text()))["why"] and status["state"] == "queued":
                return status
        return None

    found: dict[str, Any] = until(told)
    return found


def test_a_run_waits_says_for_whom_and_starts_with_the_card_that_is_free(
    tmp_path: Path, start: Start, held: GpuLocks, trainkit: Trainkit, one_card: dict[str, str]
) -> None:
    (tmp_path / "go").touch()
    run = start()
    why = "waits for its GPUs: it is next; 1 GPU held by /runs/other (pid"
    assert status_of(tmp_path)["why"].startswith(why)
    listed = json.loads(trainkit("status", "--json", environ=one_card).stdout)
    assert listed["state"] == "queued"
    assert listed["why"].startswith(why)
    assert line(one_card)[0].run == "patient"
    held.release()
    said, _ = run.communicate(timeout=PATIENCE)
    assert run.returncode == 0, said
    assert why in said
    assert f"now: GPU 0 ({card(0)['uuid']})" in said
    (plan,) = tmp_path.glob("runs/patient/*/plan.json")
    written = json.loads(plan.read_text())
    assert written["waits"] == {
        "count": 1, "among": [card(0)["uuid"]], "idle_below": 1 << 30, "ready": True,
    }  # fmt: skip
    assert [each["severity"] for each in written["notices"] if "waits" in each["what"]] == []
    assert json.loads((plan.parent / "status.json").read_text())["state"] == "ended"
    assert list((tmp_path / "locks").iterdir()) == []


def test_who_comes_first_has_the_card_first_and_one_that_is_killed_is_passed_over(
    tmp_path: Path, start: Start, held: GpuLocks, one_card: dict[str, str]
) -> None:
    first = Ticket(one_card, 1, [card(0)["uuid"]], Signature(os.getpid(), "bob", "large"))
    second = start()
    assert "before it large waits for 1 GPU (pid" in status_of(tmp_path)["why"]
    held.release()
    third = start()
    until(lambda: len(line(one_card)) == 3)
    second.kill()
    second.wait(PATIENCE)
    assert [each.run for each in line(one_card)] == ["large", "patient"]
    assert list(tmp_path.glob("seen-*")) == []
    first.release()
    until(lambda: list(tmp_path.glob("seen-*")))
    (tmp_path / "go").touch()
    assert third.wait(PATIENCE) == 0
    assert len(list(tmp_path.glob("seen-*"))) == 1


def test_a_card_that_a_process_of_others_uses_is_waited_for(
    tmp_path: Path, start: Start, cards: Cards, one_card: dict[str, str]
) -> None:
    (tmp_path / "go").touch()
    cards(card(0, free=10 * GIGABYTE))
    run = start()
    assert "it is next; GPU 0 is busy: 70.0 GiB of 80 in use" in status_of(tmp_path)["why"]
    cards(card(0))
    assert run.wait(PATIENCE) == 0


def test_ctrl_c_ends_the_waiting_and_leaves_nothing(tmp_path: Path, start: Start, held: GpuLocks) -> None:
    run = start()
    status_of(tmp_path)
    run.send_signal(signal.SIGINT)
    assert run.wait(PATIENCE) == 130
    assert not (tmp_path / "runs").exists()
    assert [each.name for each in (tmp_path / "locks").iterdir()] == [card(0)["uuid"]]


def test_a_waiting_run_can_be_cancelled_and_is_recorded_as_such(
    tmp_path: Path, start: Start, held: GpuLocks, trainkit: Trainkit, one_card: dict[str, str]
) -> None:
    run = start()
    status_of(tmp_path)
    assert trainkit("cancel", environ=one_card).returncode == 0
    assert run.wait(PATIENCE) == 143
    listed = json.loads(trainkit("status", "--json", environ=one_card).stdout)
    assert (listed["state"], listed["exit_code"]) == ("cancelled", 143)
    assert listed["why"] == "trainkit received SIGTERM while the run waited for GPUs"
    assert line(one_card) == ()


def test_a_detached_run_outlives_its_terminal_and_is_found_from_anywhere(
    tmp_path: Path, recipe: Path, one_card: dict[str, str], trainkit: Trainkit
) -> None:
    words = ["-m", "trainkit", "run", "--detach", str(recipe)]
    terminal = pexpect.spawn(sys.executable, words, cwd=str(tmp_path), env=one_card, timeout=PATIENCE, encoding="utf-8")
    terminal.expect("run directory: ([^\r]*)\r\n")
    directory = Path(terminal.match[1])
    terminal.expect(pexpect.EOF)
    terminal.close()  # which hangs up
    assert terminal.exitstatus == 0
    until(lambda: list(tmp_path.glob("seen-*")))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    listed = json.loads(trainkit("status", "--json", directory.name[-6:], cwd=elsewhere, environ=one_card).stdout)
    assert listed["state"] == "running"
    leader = json.loads((directory / "status.json").read_text())["pids"]["trainkit"]
    assert os.getsid(leader) == leader
    assert Path(f"/proc/{leader}/fd/1").readlink() == directory / "job.out"
    (tmp_path / "go").touch()
    followed = trainkit("logs", "-f", directory.name[-6:], cwd=elsewhere, environ=one_card)
    assert followed.returncode == 0, followed.stderr
    assert "began\n" in followed.stdout
    assert f"Run directory        {directory}" in followed.stdout
    until(lambda: not Path(f"/proc/{leader}").exists())
    assert list((tmp_path / "locks").iterdir()) == []


def test_a_detached_run_may_wait_and_be_cancelled(
    tmp_path: Path, recipe: Path, held: GpuLocks, one_card: dict[str, str], trainkit: Trainkit
) -> None:
    done = trainkit("run", str(recipe), "--detach", environ=one_card)
    assert done.returncode == 0, done.stderr
    assert "waits for its GPUs: it is next; 1 GPU held by /runs/other" in done.stdout
    leader = status_of(tmp_path)["pids"]["trainkit"]
    assert trainkit("cancel", environ=one_card).returncode == 0
    until(lambda: not Path(f"/proc/{leader}").exists())
    (output,) = tmp_path.glob("runs/patient/*/job.out")
    assert "it is next" in output.read_text()
    assert json.loads((output.parent / "status.json").read_text())["exit_code"] == 143


def test_a_run_from_python_may_wait_and_be_stopped_or_get_its_card(
    tmp_path: Path, recipe: Path, held: GpuLocks, one_card: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in one_card.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    with trainkit.run(recipe, quiet=True) as run:
        assert run.state == "queued"
        stopped = trainkit.run(recipe, quiet=True)
        stopped.stop()
        assert (stopped.state, stopped.exit_code) == ("cancelled", 143)
        (tmp_path / "go").touch()
        held.release()
    assert run.state == "done"
    assert f"now: GPU 0 ({card(0)['uuid']})" in run.output
    with pytest.raises(trainkit.UsageError, match="ends with the process that has started it"):
        trainkit.run(recipe, "--detach", quiet=True)


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (("devices.when_busy=refuse",), 4, "GPU 0 is busy: held by the trainkit run /runs/other"),
        (("nodes.count=2", "nodes.rendezvous=a:1", "strategy.kind=ddp"), 2, "a run on 2 nodes cannot be detached"),
    ],
)
def test_a_run_that_cannot_be_detached_says_why_where_it_was_asked_for(
    tmp_path: Path,
    recipe: Path,
    held: GpuLocks,
    one_card: dict[str, str],
    trainkit: Trainkit,
    words: tuple[str, ...],
    code: int,
    why: str,
) -> None:
    done = trainkit("run", str(recipe), "--detach", *words, environ=one_card)
    assert done.returncode == code, done.stderr
    assert why in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("seed", [1])
def test_of_many_runs_none_is_lost_and_none_is_twice_on_a_card(
    tmp_path: Path, cards: Cards, clean_environment: dict[str, str], seed: int
) -> None:
    """The whole of it, with users and runs as they are, is scripts/campaign/queue."""
    environ = {**clean_environment, **cards(*(card(number) for number in range(4)))}
    argv = [sys.executable, str(HERE / "swarm.py"), str(tmp_path), "30", str(seed)]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=PATIENCE * 2, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["wrong"] == {}, [(tmp_path / f"said-{number}").read_text() for number in found["wrong"]]
    assert set(found["killed"]) <= set(found["aimed"])
    assert sorted(found["well"] + found["killed"]) == list(range(30))
    assert found["killed"], "nobody was killed"
    assert len(found["well"]) > 15
    assert line(environ) == ()
