"""The watch over one small program: what is said when it stands still, and that the program does not notice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from trainkit.cli.commands.runs import dump
from trainkit.errors import MachineError
from trainkit.files import read_json, write_json
from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.rundir.records import ORDERS
from trainkit.runner.watch.activity import Activity, disk_bytes

pytestmark = pytest.mark.cli

Trainkit = Callable[..., subprocess.CompletedProcess[str]]
RECIPE = {
    "version": 1,
    "name": "r",
    "program": {"kind": "torch", "script": "program.py"},
    "devices": {"type": "cpu"},
    "launcher": {"grace_seconds": 2},
}


def write(folder: Path, program: str, **hang: object) -> Path:
    (folder / "program.py").write_text(program)
    recipe = folder / "r.yaml"
    program_at = {"kind": "torch", "script": str(folder / "program.py")}
    root = {"root": str(folder / "runs")}
    recipe.write_text(json.dumps({**RECIPE, "program": program_at, "output": root, "hang": hang}))
    return recipe


def test_a_program_that_stands_still_is_named_by_its_line_and_not_ended(trainkit: Trainkit, tmp_path: Path) -> None:
    program = "import time\ndef wait():\n    time.sleep(7)\nwait()\n"
    done = trainkit("run", str(write(tmp_path, program, start_seconds=1, then="end")))
    assert done.returncode == 0, done.stderr
    assert "has not moved for " in done.stderr
    assert ". It is at program.py:3 in wait, last seen in the start-up. Stacks: attempts/1/dumps" in done.stderr
    (run,) = (tmp_path / "runs" / "r").glob("*")
    assert "program.py" in (run / "attempts" / "1" / "dumps" / "rank-0.stack").read_text()
    assert read_json(run / "status.json")["exit_code"] == 0


@pytest.mark.parametrize(
    "program",
    [
        pytest.param("import time\nfor _ in range(6): print('.', flush=True); time.sleep(0.5)\n", id="writes"),
        pytest.param(
            "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import time\\nend = time.time() + 3\\n"
            "while time.time() < end: pass'])\n",
            id="has a child that computes",
        ),
    ],
)
def test_a_program_that_moves_is_left_alone(trainkit: Trainkit, tmp_path: Path, program: str) -> None:
    done = trainkit("run", str(write(tmp_path, program, start_seconds=1)))
    assert done.returncode == 0, done.stderr
    assert "hang" not in done.stderr
    (run,) = (tmp_path / "runs" / "r").glob("*")
    assert not (run / "attempts" / "1" / "dumps").exists()


# Writes for a second as a checkpoint is written to a slow disk, and sleeps.
WRITES = """
import os, sys, time
with open(sys.argv[1], "wb") as file:
    for _ in range(10):
        file.write(os.urandom(1 << 18))
        file.flush()
        time.sleep(0.1)
time.sleep(60)
"""


def test_who_writes_slowly_moves_and_who_sleeps_does_not(tmp_path: Path) -> None:
    (tmp_path / "here").write_bytes(bytes(1 << 20))
    if not disk_bytes([os.getpid()]):
        pytest.skip(f"{tmp_path} is on no disk, or this system does not count what is written")
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", WRITES, str(tmp_path / "file")]) as writer:
        wait_for((tmp_path / "file").exists)
        activity, steps = Activity(0.0, []), Activity(0.0, [])
        activity.look([writer.pid], 100.0)  # longer ago than its start, which has used the processor
        moved = list[float]()
        for seconds in (0.7, 1.0, 1.0):
            time.sleep(seconds)
            activity.look([writer.pid], 101.0 + len(moved))
            steps.look([writer.pid], 101.0 + len(moved), since=100.5 + len(moved))
            moved.append(activity.moved)
        writer.kill()
    assert moved[0] == 101.0
    assert moved[-1] < 103.0
    assert steps.moved == 0.0  # each time a step came later: it may have been for that


WAITS = "import pathlib, sys, time\nhere = pathlib.Path(sys.argv[0]).parent\n(here / 'ready').touch()\n"
WAITS += "while not (here / 'go').exists(): time.sleep(0.05)\n"


def test_a_launcher_that_is_stopped_is_named_when_its_ranks_have_ended(tmp_path: Path) -> None:
    recipe = write(tmp_path, WAITS, after_seconds=2)
    words = ("launcher.kind=torchrun", "strategy.kind=single", "program.verify=false")
    argv = [sys.executable, "-P", "-m", "trainkit", "run", str(recipe), *words]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        wait_for((tmp_path / "ready").exists)
        (run,) = (tmp_path / "runs" / "r").glob("*")
        launcher = read_json(run / "status.json")["pids"]["launcher"]
        os.kill(launcher, signal.SIGSTOP)
        try:
            (tmp_path / "go").touch()
            line = wait_for(lambda: read_json(run / "status.json")["hang"])
        finally:
            os.kill(launcher, signal.SIGCONT)
        running.communicate(timeout=30)
    name = f"torchrun ({os.uname().nodename}, pid {launcher}, state T stopped)"
    assert line.startswith(f"hang: {name} has had no rank running for ")
    assert running.returncode == 0


def wait_for(condition: Callable[[], Any]) -> Any:
    """The first true value."""
    until = time.monotonic() + 30
    while not (found := condition()):
        assert time.monotonic() < until
        time.sleep(0.05)
    return found


# Forks, starts another Python and a shell, and says what they and it have.
FORKS = """
import os, pathlib, subprocess, sys, threading, time
here = pathlib.Path(sys.argv[0]).parent
child = os.fork()
if child == 0:
    time.sleep(1)
    os._exit(5)
code = "import os; print([name for name in os.environ if name.startswith('TRAINKIT_S')])"
other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
shell = subprocess.Popen(["sleep", "30"])
(here / "ready").touch()
while not (here / "go").exists():
    time.sleep(0.05)
shell.terminate()
print(threading.active_count(), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), other.communicate()[0], flush=True)
assert shell.wait() == -15
"""


def test_a_program_that_forks_is_dumped_and_nobody_of_it_notices(trainkit: Trainkit, tmp_path: Path) -> None:
    recipe = write(tmp_path, FORKS)
    argv = [sys.executable, "-P", "-m", "trainkit", "run", str(recipe)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        wait_for((tmp_path / "ready").exists)
        done = trainkit("dump", "r", "--root", str(tmp_path / "runs"))
        (tmp_path / "go").touch()
        out, err = running.communicate(timeout=30)
    assert done.returncode == 0, done.stderr
    first, outcome, folder = done.stdout.splitlines()
    assert first.startswith(f"rank 0 ({os.uname().nodename}, pid ")
    assert "it is at program.py:" in first
    assert outcome == "the run moves"
    assert "program.py" in (Path(folder) / "rank-0.stack").read_text()
    assert running.returncode == 0, err
    assert "1 5 []" in out


@pytest.mark.parametrize(
    "said",
    [
        {"ranks": [{"rank": 0, "seconds": "x"}]}, {"ranks": [{"rank": 0, "phase": 99}]}, {"missing": None}, {"line": 1},
        {"ranks": [{"rank": 0, "groups": 5}]}, {"ranks": [{"rank": 0, "host": 5}]}, {"missing": 5}, {"ranks": 5},
    ],
)  # fmt: skip
def test_an_answer_that_is_not_the_guardians_is_called_so(tmp_path: Path, said: dict[str, Any]) -> None:
    layout = RunLayout(tmp_path / "r" / "20260101-000000-aa")
    dumps, order = layout.attempt(1).root / "dumps", layout.attempt(1).root / ORDERS / "dump"
    dumps.mkdir(parents=True)
    layout.plan.write_text("{}")
    layout.recipe.write_text("version: 1\n")
    layout.status.write_text(json.dumps({"state": "running", "host": "elsewhere", "attempt": 1}))
    account = {"line": "", "ranks": [], "missing": [], **said}

    def answer() -> None:
        wait_for(order.exists)
        write_json(dumps / "asked.json", {**account, "asked": order.read_text()})

    with ThreadPoolExecutor() as threads:
        threads.submit(answer)
        with pytest.raises(MachineError, match="is not the guardian's"):
            dump(str(layout.root))


def test_a_run_that_has_ended_cannot_be_dumped(trainkit: Trainkit, tmp_path: Path) -> None:
    assert trainkit("run", str(write(tmp_path, "print('done')\n"))).returncode == 0
    done = trainkit("dump", "r", "--root", str(tmp_path / "runs"))
    assert done.returncode == 2
    assert "is not running: it is done" in done.stderr
