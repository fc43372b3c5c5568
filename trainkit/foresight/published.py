"""Figures that others have published, to stand beside trainkit's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Published:
    """A published run. mib: of a GPU as nvidia-smi counts it. recipe: as far as the run is known to follow it."""

    mib: int
    samples_per_second: float
    micro: int
    recipe: Mapping[str, Any] = field(default_factory=dict)


_BERT: Mapping[str, Any] = {
    "model": {"kind": "hf", "architecture": "bert", "task": "sequence_classification",
              "config": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
                         "intermediate_size": 4096, "vocab_size": 30522}},
    "data": {"kind": "random", "sequence_length": 512, "high": 30522},
    "precision": {"dtype": "fp32"},
    "efficiency": {"attention": "eager"},
}  # fmt: skip
_CHECKPOINTING: Mapping[str, Any] = {"efficiency": {"attention": "eager", "gradient_checkpointing": {"every": 1}}}
_FP16: Mapping[str, Any] = {"precision": {"dtype": "fp16"}}
_ADAFACTOR: Mapping[str, Any] = {"optimizer": {"name": "adafactor"}}
_EIGHT_BIT: Mapping[str, Any] = {"optimizer": {"name": "adamw_bnb_8bit"}}

TABLE = "efficiency-table"  # the recipe whose variants these are
# bert-large on random data, 4 samples of 512 tokens a step, on a V100 of 16 GB; by variants of the recipe
# efficiency-table (https://huggingface.co/docs/transformers/v4.18.0/en/performance).
V100_BERT: Mapping[str, Published] = {
    "": Published(14949, 8.86, 4, _BERT),
    "accumulation": Published(8681, 7.75, 1, _BERT),
    "checkpointing": Published(6775, 5.99, 1, {**_BERT, **_CHECKPOINTING}),
    "fp16": Published(13939, 18.64, 4, {**_BERT, **_FP16}),
    "all": Published(7275, 10.09, 1, {**_BERT, **_CHECKPOINTING, **_FP16}),
    "adafactor": Published(12295, 7.96, 4, {**_BERT, **_ADAFACTOR}),
    "all-adafactor": Published(4847, 9.06, 1, {**_BERT, **_CHECKPOINTING, **_FP16, **_ADAFACTOR}),
    "adam-8bit": Published(13085, 9.15, 4, {**_BERT, **_EIGHT_BIT}),
    "all-8bit": Published(5363, 10.35, 1, {**_BERT, **_CHECKPOINTING, **_FP16, **_EIGHT_BIT}),
}


def published(recipe: str, variant: str) -> str:
    """What was published of a variant, in words; empty where nothing was. variant: `base` for the recipe itself."""
    found = V100_BERT.get("" if variant == "base" else variant) if recipe == TABLE else None
    return f"{found.mib:,} MiB, {found.samples_per_second:g}/s" if found else ""
