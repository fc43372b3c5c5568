"""Cards and what the installed torch, inductor and FlashAttention-2 were compiled for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trainkit.errors import RecipeError
from trainkit.launch_plan.model import Notice
from trainkit.machine.facts import Facts, TorchBuild
from trainkit.planner.build import build_plan
from trainkit.recipe.resolved import Resolved

Layered = Callable[..., Resolved]
Machine = Callable[..., Facts]
K80, P100, V100, T4 = "Tesla K80", "Tesla P100", "NVIDIA V100", "Tesla T4"
GTX_1660, A100, H100, RTX_5090 = "NVIDIA GeForce GTX 1660", "NVIDIA A100", "NVIDIA H100", "NVIDIA GeForce RTX 5090"
BERT: dict[str, Any] = {"kind": "hf", "architecture": "bert", "task": "masked_lm"}
FLASH: dict[str, Any] = {"model": BERT, "efficiency": {"attention": "flash_attention_2"}}


def notices(layered: Layered, facts: Facts, words: str, **recipe: Any) -> list[Notice]:
    found = build_plan(layered({"precision": {"dtype": "fp32"}, **recipe}), facts).plan.notices
    return [each for each in found if words in each.what]


def built(torch: str, cuda: str) -> dict[str, Any]:
    packages = {"torch": torch, "numpy": "2.4.0", "safetensors": "0.8.0"}
    return {"packages": packages, "torch": TorchBuild(f"{torch}+cu{cuda.replace('.', '')}", cuda)}


@pytest.mark.parametrize(
    ("card", "torch", "cuda", "severity", "words", "hint"),
    [
        (V100, "2.13.0", "13.0", "blocker", "no code for GPUs before 7.5; NVIDIA V100 has 7.0", "CUDA 12.6"),
        (K80, "2.13.0", "12.6", "blocker", "no code for GPUs before 5.0; Tesla K80 has 3.7", "CUDA 11.8"),
        (
            K80,
            "2.6.0",
            "11.8",
            "warning",
            "no kernels for GPUs before 5.0; Tesla K80 has 3.7",
            "compiled for this GPU",
        ),
        (P100, "2.9.0", "12.8", "warning", "no kernels for GPUs before 7.0; Tesla P100 has 6.0", "CUDA 12.6"),
        (V100, "2.13.0", "12.9", "warning", "no kernels for GPUs before 7.5; NVIDIA V100 has 7.0", "CUDA 12.6"),
        (RTX_5090, "2.8.0", "12.6", "warning", "RTX 5090 have code from 12.8 on", "CUDA 12.8 or newer"),
        (V100, "2.10.0", "12.8", None, "", ""),
        (V100, "2.13.0", "12.6", None, "", ""),
        (P100, "2.13.0", "12.6", None, "", ""),
        (T4, "2.13.0", "13.0", None, "", ""),
        (H100, "2.6.0", "11.8", None, "", ""),
        (RTX_5090, "2.13.0", "13.0", None, "", ""),
    ],
)
def test_a_torch_without_kernels_for_a_card_is_told_before_the_run(
    layered: Layered,
    machine: Machine,
    card: str,
    torch: str,
    cuda: str,
    severity: str | None,
    words: str,
    hint: str,
) -> None:
    found = notices(layered, machine(2, A100, card, **built(torch, cuda)), "CUDA", strategy={"kind": "ddp"})
    assert [each.severity for each in found] == ([severity] if severity else [])
    assert all(words in each.what and hint in each.hint for each in found)


def test_the_build_is_known_by_the_version_where_torch_is_not_installed(layered: Layered, machine: Machine) -> None:
    def said(torch: str, gpus: int = 1) -> list[str]:
        facts = machine(gpus, V100, packages={"torch": torch, "numpy": "2.4.0", "safetensors": "0.8.0"})
        return [each.severity for each in notices(layered, facts, "built for CUDA")]

    assert said("2.13.0+cu130") == ["blocker"]
    assert said("2.13.0") == []
    assert said("2.13.0+cu130", gpus=0) == []


@pytest.mark.parametrize(
    ("card", "compiled", "blocked"),
    [
        (P100, {"enabled": True}, True),
        (P100, {"enabled": True, "backend": "aot_eager"}, False),
        (P100, {"enabled": False}, False),
        (V100, {"enabled": True}, False),
    ],
)
def test_inductor_needs_cards_that_triton_knows(
    layered: Layered, machine: Machine, card: str, compiled: dict[str, Any], blocked: bool
) -> None:
    found = notices(layered, machine(1, card), "Triton", efficiency={"compile": compiled})
    assert [each.severity for each in found] == ["blocker"] * blocked


def test_flash_attention_needs_ampere_and_is_not_to_be_installed_before(layered: Layered, machine: Machine) -> None:
    fp16 = {**FLASH, "precision": {"dtype": "fp16"}}
    (found,) = [each for each in notices(layered, machine(1, V100), "", **fp16) if "ttention" in each.what + each.hint]
    assert (found.severity, found.hint) == ("blocker", "set efficiency.attention to sdpa")
    assert "FlashAttention-2 requires compute capability 8.0; NVIDIA V100 has 7.0" in found.what
    (missing,) = notices(layered, machine(1, A100), "flash_attention_2", **fp16)
    assert "pip install flash-attn" in missing.hint


def test_flash_attention_does_not_evaluate_in_fp32(layered: Layered, machine: Machine) -> None:
    def refused(**precision: str) -> list[str]:
        try:
            build_plan(layered({**FLASH, "precision": precision}), machine(1, A100))
        except RecipeError as error:
            return [each.key for each in error.diagnostics]
        return []

    assert refused(dtype="bf16", eval="fp32") == ["precision.eval"]
    assert refused(dtype="fp32") == ["efficiency.attention"]
    assert refused(dtype="bf16", eval="fp16") == []
    assert refused(dtype="auto") == []


@pytest.mark.parametrize(("card", "told"), [(P100, True), (GTX_1660, True), (V100, False), (T4, False), (A100, False)])
def test_fp16_on_a_card_without_tensor_cores_is_remarked(
    layered: Layered, machine: Machine, card: str, told: bool
) -> None:
    found = notices(layered, machine(1, card), "has no tensor cores", precision={"dtype": "fp16"})
    assert [each.severity for each in found] == ["note"] * told


@pytest.mark.parametrize(
    ("card", "recipe", "faster"),
    [
        (A100, {}, "bf16"),
        (V100, {}, "fp16"),
        (P100, {}, None),
        (GTX_1660, {}, None),
        (A100, {"precision": {"dtype": "fp32"}}, None),
        (A100, {"precision": {"tf32": True}}, None),
        (A100, {"precision": {"dtype": "auto"}}, None),
        (A100, {"devices": {"type": "cpu"}}, None),
        (A100, {"program": {"kind": "torch", "script": "t.py"}}, None),
    ],
)
def test_fp32_that_nobody_asked_for_is_remarked_where_the_card_is_faster(
    layered: Layered, machine: Machine, card: str, recipe: dict[str, Any], faster: str | None
) -> None:
    found = build_plan(layered(recipe), machine(1, card)).plan.notices
    said = [each.what for each in found if "no number format is set" in each.what]
    assert [f"several times as fast in {faster}" in each for each in said] == [True] * (faster is not None)
