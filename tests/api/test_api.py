"""The functions that start nothing: what they take, what they return, and which errors they raise."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import trainkit
from tests.made_up_runs import MakeRun, records
from trainkit.launch_plan.model import Plan

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, clean_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        monkeypatch.delenv(name)
    for name, value in clean_environment.items():
        monkeypatch.setenv(name, value)


@pytest.mark.cli
def test_importing_trainkit_imports_nothing_and_every_name_is_there() -> None:
    code = """
import sys
before = set(sys.modules)
import trainkit
after = {name.partition(".")[0] for name in set(sys.modules) - before}
assert after <= {"trainkit", "__future__"}, after
assert set(trainkit.__all__) <= set(dir(trainkit))
assert all(callable(getattr(trainkit, name)) for name in trainkit.__all__)
trainkit.log(1, loss=2.0)
assert not {"torch", "typer", "IPython", "cloudpickle"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = trainkit.trian  # type: ignore[attr-defined]


def test_overrides_are_words_and_dictionaries_and_a_later_one_wins() -> None:
    values = {"optimizer": {"lr": 1e-5}, "env": {"A": "yes"}, "schedule.warmup_steps": 1, "name": "null"}
    loaded = trainkit.load("quickstart", "optimizer.lr=1", values, "train.steps=3", {"train.steps": 4}, variant=None)
    recipe = loaded.recipe
    assert (recipe.optimizer.lr, recipe.train.steps, recipe.name) == (1e-5, 4, "null")
    assert recipe.env == {"A": "yes"}
    assert loaded.words[:3] == ("quickstart", "optimizer.lr=1", "optimizer.lr=1.0e-05")
    assert "\n  steps: 4\n" in str(loaded)
    more = trainkit.load(loaded, {"batch.micro": 2}, presets=["strategy/ddp"])
    assert (more.recipe.train.steps, more.recipe.batch.micro, more.recipe.strategy.kind) == (4, 2, "ddp")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"train": {"seed": True}, "model.path": Path("a b")}, ["train.seed=true", 'model.path="a b"']),
        ({"program.args": [1, "x: y", None]}, ['program.args=[1, "x: y", null]']),
        ({"optimizer.args+": {"a": 1}, "peft": None}, ["optimizer.args+={a: 1}", "peft=null"]),
        ({"env": {}, "name": "${x}"}, ["env={}", r'name="\\${x}"']),
    ],
)
def test_values_of_python_are_written_as_a_command_line_has_them(settings: dict[str, Any], words: list[str]) -> None:
    from trainkit.api import _words

    assert [*_words([settings])] == words


def test_a_program_and_a_command_take_the_place_of_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text("print(1)\n")
    own = trainkit.load("loop.py", "name=own", arguments=["--lr", "0.1"])
    assert (own.recipe.program.script, own.recipe.name) == ("loop.py", "own")
    assert own.words == ("name=own", "loop.py", "--lr", "0.1")
    made = trainkit.plan(["torchrun", "--nproc_per_node", "2", "loop.py", "--lr", "0.1"], on="laptop-cpu")
    assert (made.launcher.kind, made.topology.world_size) == ("torchrun", 2)


def test_a_plan_is_the_one_that_the_command_line_shows() -> None:
    from trainkit.launch_plan.render import table

    made = trainkit.plan("quickstart", {"train.steps": 40}, on="1x4090")
    assert isinstance(made, Plan)
    assert str(made) == table.render(made)
    assert made.cards


def test_an_estimate_is_the_one_of_the_command_line() -> None:
    found = trainkit.estimate("quickstart", on="1x4090", quick=True)
    assert (found.verdict, found.basis) == ("fits", "formula")
    assert "in all" in str(found)


def test_mistakes_are_all_told_at_their_places_as_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text("version: 1\nname: wrong\noptmizer: {lr: 1}\n")
    with pytest.raises(trainkit.RecipeError) as caught:
        trainkit.load("wrong.yaml", {"train.steps": "many"})
    error: Any = caught.value
    assert error.exit_code == 2
    assert len(error.diagnostics) == 2
    (note,) = error.__notes__
    assert "wrong.yaml:3:1: error: " in note
    assert "did you mean optimizer?" in note
    assert error._render_traceback_() == ["RecipeError", note]  # what IPython shows
    with pytest.raises(trainkit.UsageError, match="no recipe is named"):
        trainkit.load()
    with pytest.raises(trainkit.UsageError, match=r"train\.steps is object"):
        trainkit.load("quickstart", {"train.steps": object()})


def test_what_the_command_line_only_warns_of_is_a_warning_here() -> None:
    with pytest.warns(UserWarning, match=r"schedule\.warmup_steps 20 is longer") as caught:
        trainkit.plan("quickstart", "train.steps=3", on="laptop-cpu")
    assert caught[0].filename == __file__


def test_runs_are_listed_with_their_standings(make_run: MakeRun) -> None:
    make_run("good", records(3, float))
    make_run("bad", verdict={"exit_code": 1, "failure": "program", "why": "it failed"}, number=2)
    assert [each.state.word for each in trainkit.runs()] == ["done", "failed"]
    (failed,) = trainkit.runs(where=["state=failed"])
    assert (failed.run.layout.name, failed.exit_code) == ("bad", 1)
    assert str(trainkit.runs()).startswith("ID ")
    assert trainkit.runs("none") == []
    with pytest.raises(trainkit.UsageError, match="no condition on a run"):
        trainkit.runs(where=["stat=failed"])


def test_a_report_is_a_file_that_a_notebook_shows(make_run: MakeRun, tmp_path: Path) -> None:
    one, two = make_run("one", records(3, float)), make_run("two", records(3, float), number=2)
    made = trainkit.report("one")
    assert made.path == one.root / "report.html"
    assert made._repr_html_().startswith('<iframe srcdoc="&lt;!doctype html&gt;')
    both = trainkit.report(one.root, trainkit.runs("two")[0], output=tmp_path / "both.html")
    assert both.path.read_text().count('class="key"') == 2
    assert two.root.exists()
    with pytest.raises(trainkit.UsageError, match="nobody is neither a run directory nor a run"):
        trainkit.report("nobody")


def test_a_run_in_a_cell_has_its_state_its_curves_and_what_it_said(make_run: MakeRun) -> None:
    from trainkit.api.inline import html_of

    make_run("one", records(40, lambda step: 3 - step / 20, every=10))
    output = "warning: it is <small>\n" + "".join(f"line {number}\n" for number in range(20)) + "12%\r99%\n"
    shown = html_of(trainkit.runs()[0], output)
    assert "<b>one</b> abcde1: <b>done</b>" in shown
    assert shown.count("<polyline") == 2
    assert "evaluation loss" in shown
    assert "warning: it is &lt;small&gt;" in shown
    assert "line 19\n99%" in shown
    assert "line 3\n" not in shown
    make_run("none", number=3)
    assert "<svg" not in html_of(trainkit.runs("none")[0], "")


@pytest.mark.cli
def test_nothing_of_this_process_is_changed() -> None:
    signals = [signal.getsignal(each) for each in signal.valid_signals()]
    variables, folder, path = dict(os.environ), Path.cwd(), [*sys.path]
    trainkit.plan("quickstart", "train.steps=30")
    trainkit.estimate("quickstart", quick=True)
    assert (dict(os.environ), Path.cwd(), [*sys.path]) == (variables, folder, path)
    assert [signal.getsignal(each) for each in signal.valid_signals()] == signals


def test_diagnostics_reach_the_caller_of_another_process_unchanged() -> None:
    from trainkit.api.running import error_of, message_of

    with pytest.raises(trainkit.RecipeError) as caught:
        trainkit.load("quickstart", "train.stepz=3")
    told = json.loads(json.dumps(message_of(caught.value)))
    again = error_of(told)
    assert isinstance(again, trainkit.RecipeError)
    assert again.diagnostics == caught.value.diagnostics
