"""What a plan says of weights in 4 or 8 bits: what they need, what they do, and what they do not go with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml

from trainkit.errors import RecipeError
from trainkit.launch_plan.model import Notice
from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan
from trainkit.recipe.resolved import Resolved

Layered = Callable[..., Resolved]
Machine = Callable[..., Facts]
PACKAGES = {
    "torch": "2.13.0",
    "numpy": "2.0",
    "safetensors": "0.8.0",
    "transformers": "5.23.0",
    "peft": "0.21.2",
    "bitsandbytes": "0.50.2",
}
PACKAGES["deepspeed"] = "0.19.8"


def recipe_of(text: str, bits: int = 4) -> dict[str, Any]:
    """A recipe of QLoRA with changes, as sections of YAML."""
    base: dict[str, Any] = {
        "model": {"kind": "hf", "architecture": "llama", "quantize": bits},
        "peft": {"kind": "lora"},
        "data": {"kind": "random", "samples": 64, "sequence_length": 16},
    }
    for name, changes in (yaml.safe_load(text) or {}).items():
        base[name] = {**base.get(name, {}), **changes}
    return base


def notices(layered: Layered, facts: Facts, text: str = "", bits: int = 4) -> list[Notice]:
    return [each for each in build_plan(layered(recipe_of(text, bits)), facts).plan.notices if each.severity != "note"]


@pytest.mark.parametrize(
    ("bits", "text", "devices", "key", "words"),
    [
        (4, "peft: {kind: none}", 0, "model.quantize", "quantised weights have no gradient"),
        (8, "strategy: {kind: fsdp}", 2, "strategy.kind", "keeps its weights and their scales whole"),
        (8, "strategy: {kind: zero3}", 2, "strategy.kind", "keeps its weights and their scales whole"),
        (8, "peft: {dora: true}", 0, "peft.dora", "loses the scales of 8-bit layers"),
        (4, "precision: {dtype: bf16, weights: bf16}", 1, "precision.weights", "kept in fp32 beside them"),
        (4, "precision: {dtype: bf16, eval: fp32}", 1, "precision.eval", "4-bit layers compute in one format"),
        (
            4,
            "efficiency: {gradient_checkpointing: {every: true, selective: true}}",
            1,
            "efficiency.gradient_checkpointing.selective",
            "would be done again all the same",
        ),
    ],
)
def test_what_quantised_weights_do_not_go_with_is_refused_at_its_place(
    bits: int, text: str, devices: int, key: str, words: str, layered: Layered, machine: Machine
) -> None:
    with pytest.raises(RecipeError) as caught:
        build_plan(layered(recipe_of(text, bits)), machine(devices, packages=PACKAGES))
    (found,) = caught.value.diagnostics
    assert (found.key, words in (found.why or "")) == (key, True)
    assert (found.hint or "").startswith("closest supported choice: ")


@pytest.mark.parametrize(
    ("bits", "text"),
    [
        (4, ""),
        (8, "strategy: {kind: ddp}\noptimizer: {name: adamw_bnb_8bit}"),
        (4, "strategy: {kind: fsdp}\nefficiency: {gradient_checkpointing: true}"),
        (4, "strategy: {kind: zero3}"),
        (8, "strategy: {kind: zero2}"),
        (8, "precision: {dtype: bf16, eval: fp32}\nefficiency: {compile: true}"),
    ],
)
def test_what_they_go_with_is_planned_and_listed(bits: int, text: str, layered: Layered, machine: Machine) -> None:
    cards = 2 if "strategy" in text else 1
    plan = build_plan(layered(recipe_of(text, bits)), machine(cards, packages=PACKAGES)).plan
    assert {each.key: each.value for each in plan.techniques}["model.quantize.bits"] == str(bits)
    assert [each for each in plan.notices if each.severity != "note"] == []


def test_mps_is_refused(layered: Layered, machine: Machine) -> None:
    with pytest.raises(RecipeError) as caught:
        build_plan(layered(recipe_of("devices: {type: mps}")), machine(packages=PACKAGES, mps=True))
    assert "no kernels of its own for MPS" in str(caught.value.diagnostics[0].why)


@pytest.mark.parametrize(
    ("packages", "what", "release"),
    [
        (
            {"bitsandbytes": ""},
            "model.quantize 4 bits requires bitsandbytes >= 0.50; it is not installed",
            "bitsandbytes>=0.50,<0.51",
        ),
        (
            {"transformers": "4.57.6"},
            "model.quantize 4 bits requires transformers >= 5; 4.57.6 is installed",
            "transformers>=5,<5.24",
        ),
    ],
)
def test_packages_that_it_needs_are_named_with_their_releases(
    packages: dict[str, str], what: str, release: str, layered: Layered, machine: Machine
) -> None:
    installed = {name: version for name, version in {**PACKAGES, **packages}.items() if version}
    (found,) = notices(layered, machine(packages=installed))
    assert (found.severity, found.what, found.hint) == ("blocker", what, f"/opt/python -m pip install '{release}'")
    assert notices(layered, machine(packages=installed), "model: {quantize: 0}") == []


def test_fsdp_takes_quantised_weights_from_torch_2_12_on(layered: Layered, machine: Machine) -> None:
    before, since = (machine(packages={**PACKAGES, "torch": version}) for version in ("2.11.0+cu130", "2.12.0+cu130"))
    (found,) = notices(layered, before, "strategy: {kind: fsdp}")
    what = "model.quantize under fsdp requires torch >= 2.12; 2.11.0+cu130 is installed"
    assert (found.severity, found.what, found.hint) == (
        "blocker",
        what,
        "/opt/python -m pip install 'torch>=2.12,<2.14'",
    )
    assert notices(layered, since, "strategy: {kind: fsdp}") == []
    assert notices(layered, before) == []


def test_recomputing_in_8_bits_is_warned_of(layered: Layered, machine: Machine) -> None:
    recomputing = "efficiency: {gradient_checkpointing: true}"
    (found,) = notices(layered, machine(packages=PACKAGES), recomputing, bits=8)
    assert found.what.startswith("8-bit layers of bitsandbytes keep their inputs by themselves")
    assert notices(layered, machine(packages=PACKAGES), recomputing, bits=4) == []


def test_settings_of_4_bits_are_errors_beside_8(layered: Layered) -> None:
    with pytest.raises(ValueError, match="quant_type and double_quant are for 4 bits, and bits is 8"):
        layered(recipe_of("model: {kind: hf, architecture: llama, quantize: {bits: 8, quant_type: fp4}}"))
