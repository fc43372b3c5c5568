"""A file of another project's stays as it is for a program of the user's own, whatever it says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.convert.reading import checked, context, imported, read
from tests.tools.foreign_deepspeed_files import files
from trainkit.convert.importing import refusals
from trainkit.errors import RecipeError
from trainkit.machine.facts import Facts, Gpu
from trainkit.planner.build import build_plan

BOUNDED = settings(max_examples=60, derandomize=True, deadline=None)
CARDS = tuple(Gpu(each, f"GPU-{each}", "A100", 2**36, 2**36, (8, 0)) for each in range(2))
MACHINE = Facts("linux", "x86_64", "h", "3.11", "/opt/python", 8, 2**36, gpus=CARDS)
CODE = {
    "hf": "from transformers import HfArgumentParser, Trainer, TrainingArguments\n",
    "accelerate": "from accelerate import Accelerator\nAccelerator()\n",
    "deepspeed": "import deepspeed\ndeepspeed.initialize()\n",
}
LINES = {
    "hf": "torchrun --nproc_per_node 2 {} --deepspeed ds.json",
    "deepspeed": "deepspeed --num_gpus 2 {} --deepspeed --deepspeed_config ds.json",
    "accelerate": "accelerate launch --num_processes 2 --use_deepspeed --deepspeed_config_file ds.json {}",
}


def planned_file(text: str, there: Mapping[str, Any]) -> dict[str, Any]:
    """The file of the plan for what was imported."""
    plan = build_plan(read(text, there), MACHINE).plan
    (content,) = [file.content for file in plan.files if PurePosixPath(file.path).name == "deepspeed.json"]
    return dict(json.loads(content))


@pytest.mark.parametrize("kind", LINES)
@BOUNDED
@given(st.data())
def test_the_plan_gives_the_program_the_very_file_that_its_command_names(kind: str, data: st.DataObject) -> None:
    tree = data.draw(files(auto=kind != "deepspeed"))
    if kind == "accelerate":  # which ends with an error at these
        params = tree.get("optimizer", {}).get("params", {})
        for name in [name for name in ("betas", "eps") if params.get(name) == "auto"]:
            del params[name]
    there = {"ds.json": tree, "own.py": CODE[kind]}
    text = imported(LINES[kind].format("own.py"), there)
    assert planned_file(text, there) == tree
    by_file = imported("ds.json", there, program=("own.py",))
    assert f"kind: {kind}" in by_file
    assert (
        build_plan(read(by_file, there), MACHINE).plan.strategy == build_plan(read(text, there), MACHINE).plan.strategy
    )


@BOUNDED
@given(files(auto=False))
def test_what_an_import_writes_for_the_built_in_trainer_can_be_planned(tree: dict[str, Any]) -> None:
    try:
        text = checked(["ds.json"], context({"ds.json": tree}), "/here/recipe.yaml")
    except RecipeError as error:
        assert all(each.what and each.hint for each in error.diagnostics), error
        return
    assert not refusals(read(text, {"ds.json": tree}))
