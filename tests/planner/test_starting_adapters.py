"""Adapters to start from that are others than the recipe's, or none, are refused in the plan."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from trainkit.recipe.resolved import Asked, Resolved
from trainkit.tools.builtin.inputs import adapters_are_those_of_the_recipe

Solve = Callable[..., Resolved]
RECIPE = """version: 1
train: {steps: 1}
data: {kind: random}
model: {kind: hf, architecture: llama}
peft:
  kind: lora
  path: /mine
  rank: 4
  alpha: 8
"""
SAVED = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_rslora": False, "use_dora": False}


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"adapter_config.json": json.dumps(SAVED)}, ""),
        ({"adapter_config.json": json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8.0})}, ""),
        (
            {"adapter_config.json": json.dumps({**SAVED, "r": 16, "use_dora": True})},
            "the adapters in /mine are others than the recipe's: peft.rank is 4 in the recipe and 16 there; peft.dora",
        ),
        ({"adapter_config.json": '{"peft_type": "IA3"}'}, "what lies in /mine are no LoRA adapters"),
        ({"adapter_config.json": "["}, "/mine/adapter_config.json is no JSON"),
        ({"config.json": "{}"}, "there is no /mine/adapter_config.json, which says what adapters these are"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(files: dict[str, str], told: str, solve: Solve) -> None:
    folder = {"/mine": "", **{f"/mine/{name}": text for name, text in files.items()}}
    found = list(adapters_are_those_of_the_recipe(Asked(solve({"r.yaml": RECIPE, **folder}), {})))
    assert len(found) == bool(told)
    for each in found:
        assert each.what.startswith(f"peft.path: {told}")
        assert each.origin is not None
        assert (each.origin.line, bool(each.hint)) == (7, True)


def test_adapters_that_are_not_on_this_disk_are_not_judged(solve: Solve) -> None:
    assert list(adapters_are_those_of_the_recipe(Asked(solve({"r.yaml": RECIPE}), {}))) == []
