"""`trainkit sweep` with a program that reports evaluations: trials at once, kill -9 and going on, early stopping."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pexpect
import pytest

from tests.conftest import Trainkit

pytest.importorskip("optuna")
pytestmark = pytest.mark.cli

# Evaluates in four steps, the better the nearer its rate is to 3; waits at the second while there is a `hold-RATE`.
PROGRAM = """
import json, os, pathlib, re, time
recipe = pathlib.Path(os.environ["TRAINKIT_RECIPE"])
rate = float(re.search(r"lr: (\\S+)", recipe.read_text())[1])
with (recipe.parent / "metrics.jsonl").open("a") as metrics:
    for step in range(1, 5):
        while step == 2 and pathlib.Path(f"hold-{rate:g}").exists():
            time.sleep(0.02)
        if rate == 7:
            raise SystemExit("MemoryError: all of it")
        if rate != 8:
            print(json.dumps({"step": step, "eval_loss": abs(rate - 3) / step}), file=metrics, flush=True)
"""
RECIPE = """
version: 1
name: own
program: {kind: torch, script: program.py, reads_recipe: true}
devices: {type: cpu}
launcher: {kind: python, grace_seconds: 5}
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "own.yaml").write_text(RECIPE)
    return tmp_path


def runs(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob("runs/own/*/plan.json"))


def ended(run: Path) -> bool:
    return bool(json.loads((run / "status.json").read_text()).get("ended"))


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_sweep_ranks_its_trials_goes_on_where_nothing_is_left_and_keeps_the_best_recipe(
    own: Path, trainkit: Trainkit
) -> None:
    words = ("sweep", "own.yaml", "optimizer.lr=2,3,7", "--jobs", "2", "--output", "found")
    done = trainkit(*words, "--json", environ={"TRAINKIT__OPTIMIZER__LR": "5"})
    assert done.returncode == 1, done.stderr
    data = json.loads(done.stdout)
    assert [each["overrides"] for each in data["trials_made"]] == [[f"optimizer.lr={n}"] for n in (3, 2, 7)]
    assert [(each["state"], each["value"]) for each in data["trials_made"][:2]] == [("done", 0.0), ("done", 0.25)]
    assert "MemoryError: all of it" in data["trials_made"][2]["why"]
    assert (data["best"], data["metric"], data["lower_is_better"]) == (1, "loss", True)
    best = (own / "found/best.yaml").read_text()
    assert "lr: 3" in best and "trial 1: lr=3" in best
    assert "trial 1: done, loss 0.0000 (best so far)" in done.stderr
    page = (own / "found/report.html").read_text()
    assert "Sweep of own" in page and "1: lr=3" in page
    first = runs(own)
    assert len(first) == 3 and {each["run"] for each in data["trials_made"]} == {*map(str, first)}
    # What has failed is tried again, and nothing else.
    (own / "program.py").write_text(PROGRAM.replace("rate == 7", "False"))
    again = trainkit(*words, environ={"TRAINKIT__OPTIMIZER__LR": "5"})
    assert again.returncode == 0, again.stderr
    assert [line.split()[:4] for line in again.stdout.splitlines()[1:4]] == [
        ["1", "0.0000", "3", "done"],
        ["0", "0.2500", "2", "done"],
        ["3", "1.0000", "7", "done"],
    ]
    assert len(runs(own)) == 4
    shown = trainkit("sweep", "found", "--show")
    assert shown.returncode == 0 and shown.stdout == again.stdout


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_sweep_goes_on_and_trains_nothing_twice(
    own: Path, clean_environment: dict[str, str], trainkit: Trainkit, number: signal.Signals
) -> None:
    words = ["sweep", "own.yaml", "optimizer.lr=2,3,4", "--jobs", "2", "--output", "found"]
    holds = [own / "hold-3", own / "hold-4"]
    for hold in holds:
        hold.touch()
    argv = [sys.executable, "-P", "-m", "trainkit", *words]
    with subprocess.Popen(argv, cwd=own, env=clean_environment, stderr=subprocess.PIPE, text=True) as sweep:
        try:
            until(lambda: len([*own.glob("runs/own/*/metrics.jsonl")]) == 3)
            sweep.send_signal(number)
            said = sweep.communicate(timeout=120)[1]
        finally:
            sweep.kill()
    first = runs(own)
    for run in first:  # nothing outlives the sweep
        until(partial(ended, run))
    codes = [json.loads((run / "status.json").read_text())["exit_code"] for run in first]
    assert codes.count(0) == 1
    if number == signal.SIGINT:
        assert sweep.returncode == 130, said
        assert "the same line goes on: trainkit sweep own.yaml" in said
        assert codes.count(130) == 2
    shown = json.loads(trainkit("sweep", "found", "--show", "--json").stdout)["trials_made"]
    assert [each["state"] for each in shown] == ["done", "running", "running"]
    for hold in holds:
        hold.unlink()
    done = trainkit(*words, "--json")
    assert done.returncode == 0, done.stderr
    assert "trial 1 was interrupted, and begins again, without a checkpoint" in done.stderr
    trials = json.loads(done.stdout)["trials_made"]
    assert [(each["number"], each["value"]) for each in trials] == [(1, 0.0), (0, 0.25), (2, 0.25)]
    assert trials[1]["run"] == str(first[codes.index(0)])
    assert len(runs(own)) == 5
    assert not trainkit(*words).stderr.count("was interrupted")


@pytest.mark.e2e
def test_a_run_worse_than_the_median_is_ended_in_order_and_is_no_failure(own: Path, trainkit: Trainkit) -> None:
    (own / "hold-900").touch()
    done = trainkit("sweep", "own.yaml", "optimizer.lr=3,4,900", "--early-stop", "--json")
    assert done.returncode == 0, done.stderr
    trials = json.loads(done.stdout)["trials_made"]
    assert [each["state"] for each in trials] == ["done", "done", "stopped early"]
    assert "trial 2: stopped early at step 1: loss 897" in done.stderr
    assert json.loads(Path(trials[2]["run"], "status.json").read_text())["exit_code"] == 130


@pytest.mark.e2e
def test_a_recipe_that_evaluates_nothing_ends_the_sweep_at_its_first_trial(own: Path, trainkit: Trainkit) -> None:
    done = trainkit("sweep", "own.yaml", "optimizer.lr=8,9,10")
    assert done.returncode == 1, done.stderr
    assert "error: a run of this recipe evaluates no loss, so that no trial can be compared" in done.stderr
    assert len(runs(own)) == 1


def test_a_dry_run_shows_the_trials_and_starts_and_writes_nothing(own: Path, trainkit: Trainkit) -> None:
    done = trainkit("sweep", "own.yaml", "optimizer.lr=1,2", "train.seed=range(2)", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "4 trials of own by grid; the best has the lowest loss" in done.stdout
    assert re.findall(r"trial \d: .*", done.stdout) == [
        f"trial {number}: lr={lr} seed={seed}" for number, (lr, seed) in enumerate([(1, 0), (1, 1), (2, 0), (2, 1)])
    ]
    assert not (own / "runs").exists()


def screen(output: str) -> list[str]:
    """What a terminal shows in the end: rows, without colours."""
    rows, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[\d*[A-Za-z]|.", output, re.DOTALL):
        if token == "\n":
            row += 1
            rows += [""] if row == len(rows) else []
        elif token == "\r":
            column = 0
        elif token == "\x1b[2K":
            rows[row] = ""
        elif token == "\x1b[A":
            row -= 1
        elif not token.startswith("\x1b"):
            rows[row] = f"{rows[row][:column]:{column}}{token}{rows[row][column + 1 :]}"
            column += 1
    return [each.rstrip() for each in rows]


@pytest.mark.e2e
def test_a_terminal_shows_the_table_while_it_runs_within_its_width_and_once_in_the_end(
    own: Path, clean_environment: dict[str, str]
) -> None:
    (own / "hold-4").touch()
    words = ["sweep", "own.yaml", "optimizer.lr=3,4", "optimizer.weight_decay=0.1,0.123456789", "train.seed=range(3)"]
    environ = {**clean_environment, "TERM": "xterm", "NO_COLOR": "1", "LINES": "40"}  # of another terminal
    argv = ["-P", "-m", "trainkit", *words, "--jobs", "4"]
    child = pexpect.spawn(
        sys.executable, argv, env=environ, cwd=str(own), dimensions=(12, 80), timeout=240, encoding="utf-8"
    )
    output = child.logfile_read = io.StringIO()
    try:
        for _ in range(2):  # of four that run; there is no room for the others
            child.expect(r"\n[6-9] [^\r\n]*running +1\r")  # the step that it has reached
        child.expect("and 4 trials more: trainkit sweep runs/own/sweep-")
        shown = screen(output.getvalue())
        assert sum(line.startswith("TRIAL") for line in shown) == 1
        assert max(map(len, shown)) < 80
        (own / "hold-4").unlink()
        child.expect(pexpect.EOF)
    finally:
        child.close(force=True)
    assert child.exitstatus == 0
    shown = screen(output.getvalue())
    table = shown[next(at for at, line in enumerate(shown) if line.startswith("TRIAL")) :]
    assert len([line for line in table if "done" in line]) == 12
    assert sum(line.startswith("TRIAL") for line in shown) == 1
    assert max(map(len, table[:13])) <= 80
    assert table[13].startswith("best: trial 0, loss 0.0000: lr=3 weight_decay=0.1 seed=0")
