"""What a plan says of models of transformers: no network, packages that are missing, attention that cannot be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trainkit.errors import RecipeError
from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan
from trainkit.recipe.resolved import Resolved

Layered = Callable[..., Resolved]
Machine = Callable[..., Facts]

BF16: dict[str, Any] = {"precision": {"dtype": "bf16"}}
LLAMA: dict[str, Any] = {"model": {"kind": "hf", "architecture": "llama"}}
FLASH: dict[str, Any] = {"efficiency": {"attention": "flash_attention_2"}}
PACKAGES = {"torch": "2.13.0", "numpy": "2.0", "safetensors": "0.8.0", "transformers": "5.23.0", "pyarrow": "26.0.1"}


def test_nothing_is_downloaded_in_silence(layered: Layered, machine: Machine) -> None:
    def offline(recipe: dict[str, Any]) -> str:
        variables = dict(build_plan(layered(recipe), machine()).plan.environment.set)
        return str(variables.get("HF_HUB_OFFLINE"))

    assert offline(LLAMA) == "1"
    assert offline({**LLAMA, "env": {"HF_HUB_OFFLINE": "0"}}) == "0"
    assert offline({}) == "None"


@pytest.mark.parametrize(
    ("recipe", "gpus", "package", "remedy"),
    [
        (LLAMA, (0,), "transformers", "/opt/python -m pip install 'transformers>=4.50,<5.24'"),
        ({"data": {"kind": "dataset", "path": "d"}}, (0,), "pyarrow", "/opt/python -m pip install 'pyarrow>=15,<27'"),
        ({"data": {"tokenizer": "t"}}, (0,), "transformers", "/opt/python -m pip install 'transformers>=4.50,<5.24'"),
        (
            {**LLAMA, **FLASH, **BF16},
            (1, "NVIDIA A100"),
            "flash-attn",
            "/opt/python -m pip install flash-attn",
        ),
    ],
)
def test_a_package_that_is_not_there_blocks_the_run(
    layered: Layered, machine: Machine, recipe: dict[str, Any], gpus: tuple[Any, ...], package: str, remedy: str
) -> None:
    packages = {name: version for name, version in PACKAGES.items() if name != package}
    plan = build_plan(layered(recipe), machine(*gpus, packages=packages)).plan
    (blocker,) = [notice for notice in plan.notices if notice.severity == "blocker" and "requires" in notice.what]
    assert f"requires {package}" in blocker.what
    assert remedy in blocker.hint


@pytest.mark.parametrize(
    ("recipe", "gpus", "why"),
    [
        (FLASH, (1, "NVIDIA A100"), "native model has sdpa"),
        ({**LLAMA, **FLASH}, (1, "NVIDIA A100"), "16 bits only"),
        ({"model": {"kind": "target", "target": "a:b"}, **FLASH}, (1, "NVIDIA A100"), "is the model's own"),
        ({**LLAMA, **FLASH, **BF16}, (0,), "CUDA only"),
    ],
)
def test_flash_attention_that_cannot_run_is_refused(
    layered: Layered, machine: Machine, recipe: dict[str, Any], gpus: tuple[Any, ...], why: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        build_plan(layered(recipe), machine(*gpus, packages={**PACKAGES, "flash-attn": "2.8"}))
    assert [found.key for found in caught.value.diagnostics] == ["efficiency.attention"]
    assert why in caught.value.diagnostics[0].why
