"""What a DeepSpeed file says of the strategy: one reading for `--deepspeed`, and for files that are imported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainkit.recipe.layers.merge import value_at

ZERO = "zero_optimization"
KINDS: Mapping[int, str] = {1: "zero1", 2: "zero2", 3: "zero3"}  # by stage
# Part of ZeRO's section -> the setting, and the stages at which DeepSpeed has it.
OFFLOADS: Mapping[str, tuple[int, ...]] = {"offload_optimizer": (1, 2, 3), "offload_param": (3,)}
# Names of the first versions, which DeepSpeed refuses beside today's: what to write.
OUTDATED: Mapping[str, str] = {
    f"{ZERO}.cpu_offload": '"offload_optimizer": {"device": "cpu"}',
    f"{ZERO}.cpu_offload_param": '"offload_param": {"device": "cpu"}',
    f"{ZERO}.cpu_offload_params": '"offload_param": {"device": "cpu"}',
    f"{ZERO}.cpu_offload_use_pin_memory": '"pin_memory" in the section of what is offloaded',
    "bfloat16": '"bf16"',
}


# Why a file cannot be the base of another, and what to do.
_FOLDERS = "optimizer state and parameters are swapped to different folders"


@dataclass(frozen=True, slots=True)
class Said:
    """A setting of the recipe, the key of the file that says it, and its value."""

    setting: str
    key: str
    value: Any


def faults(tree: Any) -> Iterator[tuple[str, str, str]]:
    """Key by key, what a recipe cannot build upon: what is wrong, and what to write."""
    for key, instead in OUTDATED.items():
        if value_at(tree, key) not in (None, False):
            yield key, f"{key} is a name that DeepSpeed has replaced", f"write {instead}"
    swapped = [f"{ZERO}.{name}.nvme_path" for name in OFFLOADS if value_at(tree, f"{ZERO}.{name}.device") == "nvme"]
    if len({str(path) for key in swapped if (path := value_at(tree, key)) is not None}) > 1:
        yield swapped[0], _FOLDERS, "write one path; each run swaps to folders of its own below it"


def sharding(tree: Any, stage: int) -> Iterator[Said]:
    """Everything that the file says and a recipe's strategy has a setting for, apart from sizes."""
    if isinstance(overlap := value_at(tree, f"{ZERO}.overlap_comm"), bool):
        yield Said("strategy.overlap_comm", f"{ZERO}.overlap_comm", overlap)
    gathering = f"{ZERO}.stage3_gather_16bit_weights_on_model_save"
    if stage == 3 and isinstance(gathers := value_at(tree, gathering), bool):
        yield Said("strategy.gather_16bit", gathering, gathers)
    swapped = ""
    for name, stages in OFFLOADS.items():
        section = f"{ZERO}.{name}"
        device = value_at(tree, f"{section}.device")
        if device is None or stage not in stages:
            continue
        yield Said(f"strategy.{name}", f"{section}.device", device)
        if device == "nvme" and not swapped and value_at(tree, f"{section}.nvme_path") is not None:
            swapped = f"{section}.nvme_path"
    if swapped:  # one folder for both; a second one is a disagreement with the file
        yield Said("strategy.nvme_path", swapped, value_at(tree, swapped))
