"""Runs that Python starts: followed, stopped, interrupted, and ended with the process that has started them."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

import trainkit
from trainkit.files import read_json

pytestmark = pytest.mark.cli

LOOP = """
import sys, time, trainkit
for step in range(1, 4):
    trainkit.log(step, total_steps=3, loss=1 / step)
print("said", *sys.argv[1:])
sys.exit(int(sys.argv[1]))
"""
HELD = "import time, trainkit\ntrainkit.log(1, loss=1.0)\ntime.sleep(300)\n"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, clean_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        monkeypatch.delenv(name)
    for name, value in clean_environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "held.py").write_text(HELD)


@contextmanager
def unchanged() -> Iterator[None]:
    """This process is as it was: variables, folder, signal handlers, children, open files."""

    def seen() -> list[Any]:
        gc.collect()  # errors and their frames hold one another
        process = psutil.Process()
        handlers = [signal.getsignal(each) for each in signal.valid_signals()]
        return [dict(os.environ), Path.cwd(), handlers, process.children(), process.num_fds()]

    before = seen()
    yield
    assert seen() == before


def test_a_run_is_iterated_over_and_has_a_summary_and_its_output_is_kept(tmp_path: Path) -> None:
    with unchanged():
        run = trainkit.run("loop.py", "devices.type=cpu", arguments=["0"], quiet=True)
        assert [record["step"] for record in run] == [1, 2, 3]
        assert [record["loss"] for record in run] == [1.0, 0.5, pytest.approx(1 / 3)]  # again, of one that is over
        run.wait()
        assert (run.state, run.exit_code, run.directory.parent) == ("done", 0, tmp_path / "runs" / "loop")
        assert run.summary["steps"] == 3
        assert "said 0\n" in run.output
        assert f"run directory: {run.directory}" in run.output
        assert (run.standing.total, run.plan.launcher.kind) == (3, "python")
        assert "<b>done</b>" in run._repr_html_()
        assert repr(run).endswith(": done>")
        del run


def test_a_run_that_fails_says_why_as_on_the_command_line() -> None:
    with pytest.raises(trainkit.RunError, match="the run failed: rank 0 exited with code 7") as caught:
        trainkit.run("loop.py", arguments=["7"], quiet=True).wait()
    error = caught.value
    assert (error.code, error.run.state) == (7, "failed")
    assert "said 7" in "".join(error.__notes__) or "its log" in "".join(error.__notes__)


def test_what_refuses_a_run_is_raised_before_one_begins(tmp_path: Path) -> None:
    (tmp_path / "several.yaml").write_text(
        "version: 1\nname: several\nstrategy: {kind: ddp}\ntrain: {steps: 1}\nnodes: {count: 2, rendezvous: 'a:1'}\n"
    )
    with unchanged(), pytest.raises(trainkit.RecipeError) as caught:
        trainkit.run("quickstart", "train.stepz=3")
    (found,) = caught.value.diagnostics
    assert (found.what, found.origin and found.origin.text) == ("train has no setting 'stepz'", "train.stepz=3")
    with pytest.raises(trainkit.UsageError, match=r"on this machine alone, and nodes\.count is 2"):
        trainkit.run("several.yaml", quiet=True)
    assert not (tmp_path / "runs").exists()


def test_a_run_is_stopped_by_hand_by_its_context_and_not_by_a_timeout() -> None:
    with unchanged():
        with pytest.raises(KeyError), trainkit.run("held.py", quiet=True) as run:
            assert next(iter(run))["loss"] == 1.0
            with pytest.raises(TimeoutError, match="has not ended after 0 s"):
                run.wait(timeout=0)
            assert (run.state, run.exit_code) == ("running", None)
            raise KeyError
        assert (run.state, run.exit_code) == ("cancelled", 143)
        run.stop()  # of one that is over
        with pytest.raises(trainkit.RunError, match="the run was ended"):
            run.wait()
        del run


CALLER = """
import signal, trainkit
run = trainkit.run("held.py", quiet=True)
next(iter(run))
print(run.directory, flush=True)
try:
    run.wait()
except KeyboardInterrupt:
    print(run.state, run.exit_code, signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
def test_a_run_ends_in_order_with_an_interrupt_and_with_its_caller(number: signal.Signals) -> None:
    caller = subprocess.Popen([sys.executable, "-c", CALLER], stdout=subprocess.PIPE, text=True)
    assert caller.stdout is not None
    with caller, caller.stdout:
        directory = Path(caller.stdout.readline().strip())
        caller.send_signal(number)
        told = caller.stdout.read()
        caller.wait(60)
    until = time.monotonic() + 60
    while (status := read_json(directory / "status.json"))["state"] != "ended" and time.monotonic() < until:
        time.sleep(0.05)
    assert (status["state"], status.get("survivors", [])) == ("ended", [])
    if number == signal.SIGINT:
        assert told == "cancelled 130 True\n"
    else:
        assert status["exit_code"] == 128 + signal.SIGTERM


def test_a_function_of_this_process_runs_in_another_one(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    seen = {"from": "its surroundings"}

    def step(count: int, *, by: int) -> None:
        """Count \\ up."""
        import sys

        import trainkit

        trainkit.log(count * by, loss=0.5)
        print(seen["from"], "torch" in sys.modules)

    run = trainkit.run_function(step, "devices.type=cpu", args=(2,), kwargs={"by": 3}, quiet=True)
    assert [record["step"] for record in run] == [6]
    assert "its surroundings False\n" in run.output
    (program,) = (tmp_path / "runs" / ".functions").iterdir()
    assert "def step(count: int, *, by: int) -> None:" in program.read_text()
    assert [each.run.layout.name for each in trainkit.runs()] == ["step"]


def test_a_function_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cloudpickle")
    lock = __import__("threading").Lock()
    with pytest.raises(trainkit.UsageError, match="cannot pickle"):
        trainkit.run_function(lambda: lock)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(trainkit.MachineError, match="cloudpickle is not installed") as caught:
        trainkit.run_function(lambda: None)
    assert "-m pip install 'cloudpickle>=3,<4'" in caught.value.hints[0]
    assert not (tmp_path / "runs").exists()
