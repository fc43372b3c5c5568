"""Figures that others have published, to stand beside trainkit's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Published:
    """A published run. mib: of a GPU as nvidia-smi counts it."""

    mib: int
    samples_per_second: float


TABLE = "efficiency-table"  # the recipe whose variants these are
# bert-large on random data, 4 samples of 512 tokens a step, on a V100 of 16 GB; by variants of the recipe
# efficiency-table (https://huggingface.co/docs/transformers/v4.18.0/en/performance).
V100_BERT: Mapping[str, Published] = {
    "": Published(14949, 8.86),
    "accumulation": Published(8681, 7.75),
    "checkpointing": Published(6775, 5.99),
    "fp16": Published(13939, 18.64),
    "all": Published(7275, 10.09),
    "adafactor": Published(12295, 7.96),
    "all-adafactor": Published(4847, 9.06),
    "adam-8bit": Published(13085, 9.15),
    "all-8bit": Published(5363, 10.35),
}


def published(recipe: str, variant: str) -> str:
    """What was published of a variant, in words; empty where nothing was. variant: `base` for the recipe itself."""
    found = V100_BERT.get("" if variant == "base" else variant) if recipe == TABLE else None
    return f"{found.mib:,} MiB, {found.samples_per_second:g}/s" if found else ""
