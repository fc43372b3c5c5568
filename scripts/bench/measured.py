"""Figures that are kept here, for tables in the documentation: of the small experiment table, and of many nodes.

To measure again: trainkit bench efficiency-table-small --repeat 3 --output FOUND, copy FOUND/bench.csv to
efficiency-table-small.csv in this folder, and run scripts/renew. An empty cell was not measured. For many nodes:
scripts/bench/nodes --write.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path

SMALL_TABLE = Path(__file__).with_name("efficiency-table-small.csv")
NODES = Path(__file__).with_name("nodes.csv")
NOT_MEASURED = "not measured here"
MIB = 2**20

# Technique as its table names it -> the variant that has it, and the variant that differs in nothing else.
COMPARED: Mapping[str, tuple[str, str]] = {
    "batch.accumulation: n": ("accumulation", "base"),
    "efficiency.gradient_checkpointing.every: true": ("checkpointing", "accumulation"),
    "precision.dtype: bf16": ("bf16", "base"),
    "optimizer.name: adamw_torch_fused": ("fused", "base"),
    "optimizer.name: adamw_bnb_8bit": ("adam-8bit", "base"),
    "optimizer.name: adafactor": ("adafactor", "base"),
    "optimizer.name: sgd": ("sgd", "base"),
    "efficiency.attention: sdpa": ("base", "eager-attention"),
    "efficiency.attention: eager": ("eager-attention", "base"),
    "efficiency.compile.enabled: true": ("compile", "base"),
}

Rows = Mapping[str, Mapping[str, str]]  # by variant, as the file has them


def read_rows(path: Path = SMALL_TABLE) -> Rows:
    """The rows of a bench.csv that ended well, by variant."""
    with path.open(encoding="utf-8", newline="") as file:
        return {row["variant"]: row for row in csv.DictReader(file) if row["outcome"] == "ok"}


def figures(choice: str, rows: Rows) -> str:
    """What a technique did to speed and memory, as multiples of the variant without it."""
    variant, without = COMPARED.get(choice, ("", ""))
    if variant not in rows or without not in rows:
        return NOT_MEASURED
    found = [
        f"{ratio:.2f} of the {word}"
        for word, column in (("speed", "samples_per_second"), ("memory", "memory_bytes"))
        if (ratio := _ratio(rows[variant][column], rows[without][column])) is not None
    ]
    return ", ".join(found) + ("" if without == "base" else f" (against `{without}`)") if found else NOT_MEASURED


def small_table(rows: Rows) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Head and rows of the table for people; a column in which nothing was measured is left out."""
    columns = list(_columns(rows))
    filled = [(head, cells) for head, cells in columns if any(cells)]
    return tuple(head for head, _ in filled), list(zip(*(cells for _, cells in filled), strict=True))


def nodes_table(path: Path = NODES) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Head and rows of what so many nodes cost, with the ratio of the last two numbers of nodes."""
    with path.open(encoding="utf-8", newline="") as file:
        head, *rows = csv.reader(file)
    counts = [f"{int(count):,} nodes" for count in head[1:]]
    ratios = (_ratio(row[-1], row[-2]) for row in rows)
    found = [
        (*map(_plain, row), f"{ratio:.2g}" if ratio is not None else "")
        for row, ratio in zip(rows, ratios, strict=True)
    ]
    return ("", *counts, f"{head[-1]} : {head[-2]}"), found


def _plain(text: str) -> str:
    """Three digits of a figure, without an exponent."""
    try:
        value = float(text)
    except ValueError:
        return text
    return f"{value:,.0f}" if abs(value) >= 100 else f"{float(f'{value:.3g}'):g}"


def _columns(rows: Rows) -> Iterator[tuple[str, list[str]]]:
    each = rows.values()
    yield "variant", list(rows)
    yield "what", [row["description"] or "batch 4, AdamW, fp32, fused attention" for row in each]
    yield "time", [_as(row["seconds"], "{:.2f} s") for row in each]
    yield "samples/s", [_as(row["samples_per_second"], "{:.3g}") for row in each]
    yield "vs base", [_as(row["relative_speed"], "{:.2f}") for row in each]
    yield "peak RSS", [f"{float(row['memory_bytes']) / MIB:,.0f} MiB" if row["memory_bytes"] else "" for row in each]
    yield "vs base", [_as(row["relative_memory"], "{:.2f}") for row in each]
    yield "final loss", [_as(row["final_loss"], "{:.4f}") for row in each]


def _as(text: str, form: str) -> str:
    return form.format(float(text)) if text else ""


def _ratio(value: str, reference: str) -> float | None:
    return float(value) / float(reference) if value and reference else None
