"""The rows of recipes/efficiency-table.yaml, and techniques that it leaves out: each alone on the card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from measure_parts import Asked, Row, each_built, occupied, peaks, seconds_of_step

CHECKPOINTING = ("batch.micro=1", "efficiency.gradient_checkpointing.every=true")
COMPILED = ("efficiency.compile.enabled=true",)
# By part: row -> words beyond the recipe's own.
ROWS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "recipe": {
        "base": (),
        **{
            name: ("--variant", name)
            for name in ("accumulation", "checkpointing", "fp16", "all", "adafactor", "all-adafactor", "adam-8bit",
                         "all-8bit", "bf16", "tf32", "sdpa", "fused", "compile")
        },
    },
    "more": {
        "base": (),
        "bf16": ("precision.dtype=bf16",),
        "checkpointing": CHECKPOINTING,
        "selective": (*CHECKPOINTING, "efficiency.gradient_checkpointing.selective=true"),
        "foreach": ("optimizer.name=adamw_torch_foreach",),
        "sgd": ("optimizer.name=sgd",),
        "bf16-weights": ("precision.dtype=bf16", "precision.weights=bf16"),
        "compile": COMPILED,
        "blocks": (*COMPILED, "efficiency.compile.scope=blocks"),
        "graphs": (*COMPILED, "efficiency.compile.mode=reduce-overhead"),
        "fsdp": ("--with", "strategy/fsdp"),
        "fsdp-offload": ("--with", "strategy/fsdp-offload"),
    },
}  # fmt: skip
SMALL = ("model.config.num_hidden_layers=2", "model.config.hidden_size=64", "model.config.intermediate_size=128",
         "model.config.num_attention_heads=2", "data.sequence_length=64")  # fmt: skip
ON_CPU = ("base", "accumulation", "fused")  # enough to try the measuring


def table(asked: Asked) -> dict[str, Any]:
    """Speed and memory of each row."""
    small = SMALL if asked.tiny else ()
    chosen = {
        name: ("efficiency-table", *small, *words)
        for name, words in ROWS[asked.which].items()
        if asked.cuda or name in ON_CPU
    }
    problems: list[str] = []
    before = occupied(asked)

    def timed(name: str, parts: Any) -> Row:
        seconds = seconds_of_step(parts, *((2, 1) if asked.tiny else (12, 4)))
        return {"row": name, "samples/s": parts.settings.batch.global_ / seconds, **peaks(asked, before)}

    rows = each_built(asked, chosen, timed, problems)
    base = next((row["samples/s"] for row in rows if row["row"] == "base"), None)
    for row in rows:
        row["speed over base"] = row["samples/s"] / base if base else None
    return {"problems": problems, "said": f"{len(rows)} of {len(chosen)} rows", "rows": rows}
