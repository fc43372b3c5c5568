"""Recipes for scripts of the user's own: whose file must be there, and whom HF's flags of a phase are for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.made_up_recipes import MemoryFiles
from trainkit.errors import Diagnostic, RecipeError
from trainkit.recipe.resolve import resolve
from trainkit.recipe.resolved import Request, Resolved

Solve = Callable[..., Resolved]
Refuse = Callable[..., list[Diagnostic]]
RECIPE = "program: {kind: hf, script: train.py, args: {lr: 1}}\n"
FILES = {"r.yaml": RECIPE, "train.py": ""}


def test_a_script_that_is_not_there_is_an_error_of_the_users_recipe_alone(refuse: Refuse) -> None:
    (error,) = refuse({"r.yaml": RECIPE})
    assert error.what == "there is no file train.py"
    shipped = MemoryFiles({"/shipped/job.yaml": RECIPE}, {"recipes/job": "/shipped/job.yaml"})
    by_path = resolve(Request("/shipped/job.yaml", "/w"), shipped)
    assert by_path.absent == {"program.script": ("train.py",)}
    mine = {"/shipped/job.yaml": RECIPE, "/w/r.yaml": "extends: recipes/job\nprogram: {script: mine.py}\n"}
    with pytest.raises(RecipeError, match=r"there is no file mine\.py"):
        resolve(Request("r.yaml", "/w"), MemoryFiles(mine, {"recipes/job": "/shipped/job.yaml"}))


@pytest.mark.parametrize("kind", ["hf", "torch"])
def test_flags_of_a_phase_go_to_the_script(solve: Solve, kind: str) -> None:
    files = {**FILES, "r.yaml": RECIPE.replace("hf", kind)}
    resolved = solve(files, overrides=("--do_train", "--do_eval=false"))
    assert resolved.recipe.program.args == {"lr": "1", "do_train": True, "do_eval": False}
    assert resolved.recipe.train.steps is None
    words = ("program.kind=hf", "program.script=train.py", "--do_eval", "train.steps=3")
    typed = solve({"train.py": "", "r.yaml": ""}, overrides=words)
    assert (typed.recipe.program.args, typed.recipe.train.steps) == ({"do_eval": True}, 3)


def test_flags_of_a_phase_beside_a_list_of_words_are_an_error(refuse: Refuse) -> None:
    (error,) = refuse({**FILES, "r.yaml": RECIPE.replace("{lr: 1}", "[--lr, '1']")}, overrides=("--do_train",))
    assert error.hint.endswith("-- --do_train")
