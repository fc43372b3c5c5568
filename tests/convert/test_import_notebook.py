"""Notebooks: their shell lines are imported, and a training in a cell is refused with what to do."""

from __future__ import annotations

import json

import pytest

from tests.convert.reading import comments, imported, read, settings
from trainkit.errors import UsageError
from trainkit.recipe.schema.launching import program_argv

pytestmark = pytest.mark.cli


def notebook(*cells: str) -> dict[str, str]:
    """A notebook with these cells of code, and one of prose that is no code."""
    prose = {"cell_type": "markdown", "source": ["!torchrun not_this.py\n"]}
    code = [{"cell_type": "code", "source": each.splitlines(keepends=True)} for each in cells]
    return {"nb.ipynb": json.dumps({"cells": [prose, *code], "nbformat": 4})}


@pytest.mark.parametrize(
    "cells",
    [
        ("!pip install x\n", "import os\n!torchrun --nproc_per_node 2 train.py \\\n    --lr 1e-3\nprint(1)"),
        ("%env LR=1e-3\n%cd .", "%%bash\ntorchrun --nproc_per_node 2 train.py --lr $LR\n"),
    ],
)
def test_the_command_of_a_shell_line_or_cell_is_imported(cells: tuple[str, ...]) -> None:
    text = imported("nb.ipynb", notebook(*cells))
    assert settings(text)["nodes.processes_per_node"] == 2
    assert program_argv(read(text).recipe.program.args) == ["--lr", "1e-3"]


def test_variables_and_folders_of_python_carry_over_and_those_of_a_shell_line_do_not() -> None:
    cells = (
        "import os\nos.environ['LR'] = '1e-3'\nos.environ[\"NAME\"] = f'{x}-1'\nos.chdir('sub')",
        "!export SEED=7\n!cd ..\n%set_env OUT=a b",
        "!torchrun --nproc_per_node 2 train.py --lr $LR --seed x$SEED --out $OUT --name $NAME",
    )
    files = {**notebook(*cells), "sub/train.py": ""}
    text = imported("nb.ipynb", files)
    found = read(text, files, environ={"NAME": "n"}).recipe
    assert program_argv(found.program.args) == ["--lr", "1e-3", "--seed", "x", "--out", "a", "b", "--name", "n"]
    assert (found.program.folder, found.env["OUT"]) == ("sub", "a b")
    assert "NAME is what" in comments(text)


@pytest.mark.parametrize(
    ("cell", "what", "hint"),
    [
        (
            "notebook_launcher(train, num_processes=2)",
            "processes inside the notebook",
            "nbconvert --to script nb.ipynb",
        ),
        (
            "trainer = Trainer(model=m)\ntrainer.train()",
            "in the notebook's own cells",
            "nbconvert --to script nb.ipynb",
        ),
        ("print(1)", "no cell starts a training", "name the script"),
    ],
)
def test_a_training_in_a_cell_is_refused_with_what_to_do(cell: str, what: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        imported("nb.ipynb", notebook(cell))
    (found,) = caught.value.diagnostics
    assert what in found.what
    assert hint in found.hint


def test_what_is_no_notebook_is_said_to_be_none() -> None:
    for content in ("{", "[]", '{"cells": 3}'):
        with pytest.raises(UsageError, match=r"nb\.ipynb is no Jupyter notebook"):
            imported("nb.ipynb", {"nb.ipynb": content})
