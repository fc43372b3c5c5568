"""`trainkit.sweep`: the command's own sweep, whose result is a value; nothing of the caller is changed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import trainkit
from trainkit.files import read_json

pytest.importorskip("optuna")
pytestmark = pytest.mark.cli

# The nearer its rate is to 3, the better; 7 fails, 8 evaluates nothing, and 9 never ends.
PROGRAM = """
import os, pathlib, re, time, trainkit
rate = float(re.search(r"lr: (\\S+)", pathlib.Path(os.environ["TRAINKIT_RECIPE"]).read_text())[1])
if rate == 7:
    raise SystemExit("MemoryError: all of it")
if rate != 8:
    trainkit.log(1, eval_loss=abs(rate - 3))
while rate == 9:
    time.sleep(0.02)
"""
RECIPE = """
version: 1
name: own
program: {kind: torch, script: program.py, reads_recipe: true}
devices: {type: cpu}
launcher: {kind: python, grace_seconds: 5}
"""


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, clean_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        monkeypatch.delenv(name)
    for name, value in clean_environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "own.yaml").write_text(RECIPE)


SPACES: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"optimizer.lr": [1e-4, 3e-4], "train.seed": "range(3)", "peft": None},
        ["optimizer.lr=0.0001,0.0003", "train.seed=range(3)", "peft=null"],
    ),
    (
        {"optimizer": {"lr": (1, 2), "betas": [[0.9, 0.95], [0.9, 0.99]]}},
        ["optimizer.lr=1,2", "optimizer.betas=[0.9, 0.95],[0.9, 0.99]"],
    ),
    ({"train.seed": range(2), "data.path": ["a,b", Path("c d")]}, ["train.seed=0,1", 'data.path="a,b","c d"']),
]


@pytest.mark.parametrize(("space", "words"), SPACES)
def test_a_space_is_written_as_the_command_line_has_it(space: dict[str, Any], words: list[str]) -> None:
    from trainkit.api import _axes

    assert [*_axes(space)] == words
    with pytest.raises(trainkit.UsageError, match=r"optimizer\.lr has no values"):
        [*_axes({"optimizer.lr": []})]


def test_a_sweep_returns_what_it_has_found_and_a_failed_trial_raises_nothing(tmp_path: Path) -> None:
    before = [dict(os.environ), Path.cwd(), *(signal.getsignal(each) for each in signal.valid_signals())]
    found: list[trainkit.SweepResult] = []

    def work() -> None:  # no thread but the main one may handle signals
        found.append(
            trainkit.sweep(
                "own.yaml", {"optimizer.lr": [2, 7, 3]}, {"name": "mine"}, jobs=2, folder="found", quiet=True
            )
        )

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    (result,) = found
    assert [dict(os.environ), Path.cwd(), *(signal.getsignal(each) for each in signal.valid_signals())] == before
    assert (result.folder, result.definition.recipe, result.complete) == (tmp_path / "found", "mine", False)
    assert [(each.point, each.state, each.value) for each in result.trials] == [
        ({"optimizer.lr": "2"}, "done", 1.0),
        ({"optimizer.lr": "7"}, "failed", None),
        ({"optimizer.lr": "3"}, "done", 0.0),
    ]
    assert "MemoryError: all of it" in result.trials[1].why
    assert result.best == result.trials[2]
    assert str(result).splitlines()[1].split()[:4] == ["2", "0.0000", "3", "done"]
    assert str(result).endswith("best: trial 2, loss 0.0000: lr=3\n")
    assert result.best_recipe == tmp_path / "found" / "best.yaml"
    assert "lr: 3" in str(trainkit.load(result.best_recipe))


def test_what_refuses_a_sweep_is_raised_with_the_diagnostics_of_the_command_line(tmp_path: Path) -> None:
    with pytest.raises(trainkit.RecipeError, match="no section or setting 'optmizer'") as caught:
        trainkit.sweep("own.yaml", {"optmizer.lr": [1, 2], "train.seed": ["abc", 0]})
    assert [each.key for each in caught.value.diagnostics] == ["optmizer", "train.seed"]
    with pytest.raises(trainkit.UsageError, match="draws without an end"):
        trainkit.sweep(trainkit.load("own.yaml"), {"optimizer.lr": "log(1, 2)"}, sampler="tpe")
    with pytest.raises(trainkit.UsageError, match="a program has none"):
        trainkit.sweep("program.py", {"optimizer.lr": [1, 2]})
    assert not (tmp_path / "runs").exists()
    with pytest.raises(trainkit.UsageError, match="evaluates no loss, so that no trial can be compared"):
        trainkit.sweep("own.yaml", {"optimizer.lr": [8, 9]}, quiet=True)


CALLER = """
import trainkit
try:
    trainkit.sweep("own.yaml", {"optimizer.lr": [2, 9]}, folder="found")
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.e2e
def test_an_interrupt_ends_the_runs_in_order_and_is_raised(tmp_path: Path) -> None:
    caller = subprocess.Popen([sys.executable, "-c", CALLER], stdout=subprocess.PIPE, text=True)
    with caller:
        until = time.monotonic() + 120
        while len(found := [*tmp_path.glob("runs/own/*/metrics.jsonl")]) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        caller.send_signal(signal.SIGINT)
        assert caller.communicate(timeout=120)[0] == "interrupted\n"
    codes = {read_json(each.parent / "status.json").get("exit_code") for each in found}
    assert codes == {0, 130}
