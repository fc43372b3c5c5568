"""What cannot be swept is refused before anything is planned or written, and what `run` says of several values."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from trainkit.cli.commands.sweep import line_of
from trainkit.cli.file_system import ReadOnce
from trainkit.cli.pipeline import plan_recipe, resolve_request
from trainkit.errors import RecipeError, TrainkitError, UsageError
from trainkit.sweeps.preparing import SweepOptions, objective, prepare
from trainkit.sweeps.study import Sampler

RECIPE = """
version: 1
name: tiny
model: {layers: 1, heads: 2, hidden_size: 16}
data: {path: corpus.txt}
eval: {every_steps: 2}
train: {steps: 4}
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_text("a quick brown fox\n" * 100)
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    monkeypatch.setattr("trainkit.sweeps.study.find_spec", lambda name: importlib.util.find_spec("json"))
    return "tiny.yaml"


def refused(recipe: str, *words: str, submit: bool = False, **options: Any) -> TrainkitError:
    with pytest.raises(TrainkitError) as caught:
        prepare(words, SweepOptions(**options), partial(resolve_request, recipe), plan_recipe, [], submit=submit)
    assert not Path("runs").exists()
    return caught.value


@pytest.mark.parametrize(
    ("words", "options", "what", "hint"),
    [
        (["optimizer.lr=log(1e-5,1e-3)"], {}, "a grid runs all of them", "--sampler random or --sampler tpe"),
        (["optimizer.lr=log(1e-5,1e-3)"], {"sampler": "tpe"}, "draws without an end", "--trials 20"),
        (["optimizer.lr=1,2"], {"trials": 1}, "a grid runs every combination", "leave --trials out"),
        (["train.seed=range(9999)", "train.steps=1,2"], {}, "the grid has 19998 points", "--sampler random"),
        (["optimizer.lr=1,abc"], {}, "optimizer.lr must be a number (0 or more), not the text 'abc'", ""),
        (["optmizer.lr=1,2"], {}, "there is no section or setting 'optmizer'", "did you mean optimizer?"),
        (["optimizer.lr=log(1e-5,1e-3)", "model.layers=int(0,3)"], {"sampler": "tpe", "trials": 3}, "model.layers", ""),
        (["optimizer.lr=1,2", "eval.every_steps=0"], {}, "eval.every_steps is 0: never", "eval.every_steps=0.1"),
        (
            ["optimizer.lr=1,2"],
            {"metric": "f1"},
            "the evaluation of this recipe gives no f1",
            "it gives loss, perplexity",
        ),
        (["eval.metrics=[],[perplexity]"], {}, "compared by different metrics", "--metric loss"),
    ],
)
def test_what_cannot_be_swept_is_refused(
    recipe: str, words: list[str], options: dict[str, Any], what: str, hint: str
) -> None:
    error = refused(recipe, *words, **options)
    assert int(error.exit_code) == 2
    assert what in str(error)
    assert hint in "".join(error.hints)


def test_what_is_wrong_with_a_key_is_said_once_and_all_of_it_at_once(recipe: str) -> None:
    error = refused(recipe, "optmizer.lr=1,2,3", "train.seed=0,abc")
    assert [each.key for each in error.diagnostics] == ["optmizer", "train.seed"]


@pytest.mark.parametrize(("sampler", "early_stop"), [("tpe", False), ("random", True)])
def test_what_decides_by_earlier_results_is_no_array(recipe: str, sampler: Sampler, early_stop: bool) -> None:
    error = refused(recipe, "optimizer.lr=1,2", submit=True, sampler=sampler, trials=2, early_stop=early_stop)
    assert "does not go with --submit" in str(error) and "submitted at once" in str(error)


@pytest.mark.cli
def test_a_recipe_that_is_edited_during_a_sweep_stays_what_it_was(recipe: str) -> None:
    resolve = partial(resolve_request, recipe, disk=ReadOnce())
    made = prepare(["optimizer.lr=1,2", "devices.type=cpu"], SweepOptions(), resolve, plan_recipe, [])
    before = made.recipes.trial(made.points[1], None, alone=True)
    Path(recipe).write_text(RECIPE.replace("steps: 4", "steps: 5"))
    assert made.recipes.trial(made.points[1], None, alone=True) == before
    assert "lr: 2" in before.text and "steps: 4" in before.text


@pytest.mark.parametrize(
    ("overrides", "asked", "found"),
    [
        ((), None, ("perplexity", True)),
        ((), "loss", ("loss", True)),
        (("eval.metrics=[]",), None, ("loss", True)),
        (("eval.metrics=[accuracy,perplexity]",), None, ("accuracy", False)),
        (("eval.metrics=[accuracy,perplexity]", "eval.best_metric=perplexity"), None, ("perplexity", True)),
    ],
)
def test_the_metric_is_that_of_lists_of_runs(
    recipe: str, overrides: tuple[str, ...], asked: str | None, found: tuple[str, bool]
) -> None:
    assert objective(resolve_request(recipe, overrides).recipe, asked) == found


def test_a_function_that_names_its_own_numbers_must_be_named(recipe: str) -> None:
    made = resolve_request(recipe).recipe
    made = made.model_copy(update={"eval": made.eval.model_copy(update={"metrics": ["pkg.mod:score"]})})
    with pytest.raises(UsageError, match="only when it is called"):
        objective(made, None)
    assert objective(made, "score") == ("score", False)


def test_a_missing_optuna_is_named_with_the_command_that_installs_it(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainkit.sweeps.study.find_spec", lambda name: None)
    error = refused(recipe, "optimizer.lr=1,2")
    assert int(error.exit_code) == 4
    assert "sweeps need optuna, which is not installed" in str(error)
    assert "pip install 'optuna>=" in "".join(error.hints)


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("optimizer.lr=[1e-4,3e-4]", "'optimizer.lr=0.0001,0.0003'"),
        ("optimizer.lr=1e-4,3e-4", "'optimizer.lr=1e-4,3e-4'"),
        ("train.seed=range(3)", "'train.seed=range(3)'"),
        ("optimizer.name=adamw_torch,sgd", "'optimizer.name=adamw_torch,sgd'"),
    ],
)
def test_several_values_given_to_a_run_are_answered_with_the_sweep(recipe: str, word: str, hint: str) -> None:
    with pytest.raises(RecipeError) as caught:
        resolve_request(recipe, (word,))
    assert f"trainkit sweep RECIPE {hint}" in "".join(caught.value.hints)


@pytest.mark.parametrize("word", ["optimizer.lr=abc", "optimizer.betas=1,2,3", "optimizer.lr=[]", "train.seed=1.5"])
def test_one_wrong_value_is_answered_as_ever(recipe: str, word: str) -> None:
    with pytest.raises(RecipeError) as caught:
        resolve_request(recipe, (word,))
    assert "sweep" not in "".join(caught.value.hints)


def test_the_line_that_goes_on_is_the_same_line() -> None:
    options = SweepOptions("tpe", 5, 3, early_stop=True, metric="loss")
    words = line_of("a.yaml", ["train.seed=0,1"], options, ["strategy/ddp"], "fast", ("--x",), Path("found"))
    assert " ".join(words) == (
        "a.yaml train.seed=0,1 --sampler tpe --trials 5 --seed 3 --early-stop --metric loss --with strategy/ddp "
        "--variant fast --output found -- --x"
    )
