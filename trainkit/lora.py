"""The folder of LoRA adapters that peft writes: its files, and where a recipe asks for others than lie there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
NO_LORA = "its peft_type must be LORA"
SAME = "set the recipe's to those of the folder"
# Key of the recipe -> peft's name, of what the recipe and the folder must agree on.
AGREED = {"peft.rank": "r", "peft.alpha": "lora_alpha", "peft.rslora": "use_rslora", "peft.dora": "use_dora"}


def numbers(saved: Mapping[str, Any]) -> dict[str, int | float]:
    """Those of the settings in adapter_config.json that are numbers, switches included."""
    return {name: value for name, value in saved.items() if isinstance(value, int | float) and abs(value) < 1e18}


def differing(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """What the folder says otherwise than the recipe, by the recipe's keys. own: the recipe's, by peft's names."""
    found = numbers(saved)
    return [
        f"{key} is {own[name]:g} in the recipe and {found[name]:g} there"
        for key, name in AGREED.items()
        if found.get(name, own[name]) != own[name]
    ]
