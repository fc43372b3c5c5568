"""Figures that are kept, for tables in the documentation: of the small table, of many nodes, and of cards.

To measure again, and then run scripts/renew:
- the small table: trainkit bench efficiency-table-small --repeat 3 --output FOUND, and copy FOUND/bench.csv to
  efficiency-table-small.csv in this folder. An empty cell was not measured.
- many nodes: scripts/bench/nodes --write.
- a card: scripts/gpu/prove --output FOUND on a machine with it, and copy FOUND/results.json to docs/results, by the
  card's name (nvidia-h200.json).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SMALL_TABLE = Path(__file__).with_name("efficiency-table-small.csv")
NODES = Path(__file__).with_name("nodes.csv")
RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
NO_CARDS = "None so far: no card has been at hand."
MIB = 2**20

# Technique as its table names it -> the variant that has it, and the variant that differs in nothing else.
ON_CPU: Mapping[str, tuple[str, str]] = {
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
# The same of cards, with the case of the kit that has both rows.
ON_CARDS: Mapping[str, tuple[str, str, str]] = {
    "precision.dtype: fp16": ("table/recipe", "fp16", "base"),
    "precision.tf32: true": ("table/recipe", "tf32", "base"),
    "precision.weights: bf16": ("table/more", "bf16-weights", "bf16"),
    "efficiency.gradient_checkpointing.selective: true": ("table/more", "selective", "checkpointing"),
    "efficiency.compile.scope: model": ("table/more", "whole-model", "compile"),
    "efficiency.compile.mode: reduce-overhead": ("table/more", "graphs", "compile"),
    "optimizer.name: adamw_torch_foreach": ("table/more", "foreach", "base"),
    "strategy.offload: true": ("table/more", "fsdp-offload", "fsdp"),
}
VERSIONS = ("driver", "python", "torch", "transformers", "deepspeed")  # of a card's results, that are shown

Rows = Mapping[str, Mapping[str, str]]  # by variant, as the file has them
Card = Mapping[str, Any]  # the content of one results.json
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]  # head and rows


def read_rows(path: Path = SMALL_TABLE) -> Rows:
    """The rows of a bench.csv that ended well, by variant."""
    with path.open(encoding="utf-8", newline="") as file:
        return {row["variant"]: row for row in csv.DictReader(file) if row["outcome"] == "ok"}


def read_cards(folder: Path = RESULTS) -> list[Card]:
    """All results in a folder, by their names. ValueError for a file that tells nothing of a card."""
    found = []
    for path in sorted(folder.glob("*.json")):
        results = json.loads(path.read_text(encoding="utf-8"))
        if results.get("device") != "cuda" or results.get("tiny") or not results.get("card"):
            raise ValueError(f"{path} are no results of scripts/gpu/prove on a card, in full size")
        found.append(results)
    return found


def figures(choice: str, rows: Rows) -> str:
    """What a technique did to speed and memory on a CPU, as multiples of the variant without it; empty if unknown."""
    variant, without = ON_CPU.get(choice, ("", ""))
    if variant not in rows or without not in rows:
        return ""
    ratios = _ratios(rows[variant], rows[without], "samples_per_second", "memory_bytes")
    return f"{ratios}{_against(without)}" if ratios else ""


def figures_of_cards(choice: str, cards: list[Card]) -> str:
    """The same on each card that was measured."""
    case, variant, without = ON_CARDS.get(choice, ("", "", ""))
    found = []
    for card in cards:
        rows = {each["row"]: each for each in _measured_by(card, case, "rows")}
        if variant in rows and without in rows:
            ratios = _ratios(rows[variant], rows[without], "samples/s", "allocated MiB")
            found += [f"on {card['card']}: {ratios}{_against(without)}"] if ratios else []
    return "; ".join(found)


def _ratios(row: Mapping[str, Any], without: Mapping[str, Any], speed: str, memory: str) -> str:
    found = (
        ("speed", _ratio(row.get(speed), without.get(speed))),
        ("memory", _ratio(row.get(memory), without.get(memory))),
    )
    return ", ".join(f"{ratio:.2f} of the {word}" for word, ratio in found if ratio is not None)


def _ratio(value: Any, reference: Any) -> float | None:
    return float(value) / float(reference) if value and reference else None


def _against(without: str) -> str:
    return "" if without == "base" else f" (against `{without}`)"


def _measured_by(card: Card, title: str, name: str) -> list[dict[str, Any]]:
    """Rows that a case of the kit has measured."""
    cases = (each for each in card["cases"] if f"{each['group']}/{each['name']}" == title)
    return [row for each in cases for row in each["table"].get(name, ())]


def small_table(rows: Rows) -> Table:
    """The small table for people; a column in which nothing was measured is left out."""
    columns = [
        ("variant", "variant", "{}"),
        ("what", "description", "{}"),
        ("time", "seconds", "{:.2f} s"),
        ("samples/s", "samples_per_second", "{:.3g}"),
        ("vs base", "relative_speed", "{:.2f}"),
        ("peak RSS", "memory_bytes", "{:,.0f} MiB"),
        ("vs base", "relative_memory", "{:.2f}"),
        ("final loss", "final_loss", "{:.4f}"),
    ]

    def cell(row: Mapping[str, str], name: str, form: str) -> str:
        if form == "{}":
            return row[name] or "batch 4, AdamW, fp32, fused attention"
        return form.format(float(row[name]) / (MIB if name == "memory_bytes" else 1)) if row[name] else ""

    found = [(head, [cell(row, name, form) for row in rows.values()]) for head, name, form in columns]
    filled = [(head, cells) for head, cells in found if any(cells)]
    return tuple(head for head, _ in filled), list(zip(*(cells for _, cells in filled), strict=True))


def nodes_table(path: Path = NODES) -> Table:
    """What so many nodes cost, with the ratio of the last two numbers of nodes."""
    with path.open(encoding="utf-8", newline="") as file:
        head, *rows = csv.reader(file)
    ratios = [_ratio(row[-1], row[-2]) for row in rows]
    found = [
        (name, *map(_plain, cells), f"{ratio:.2g}" if ratio is not None else "")
        for (name, *cells), ratio in zip(rows, ratios, strict=True)
    ]
    return ("", *(f"{int(count):,} nodes" for count in head[1:]), f"{head[-1]} : {head[-2]}"), found


def _plain(text: str) -> str:
    """Three digits of a figure, without an exponent."""
    value = float(text)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{float(f'{value:.3g}'):g}"


def cards_table(cards: list[Card]) -> Table:
    """The cards on which the kit has run."""
    found = list[tuple[str, ...]]()
    for card in cards:
        marks = [each["ok"] for each in card["cases"]]
        counts = f"{marks.count(True)} right, {marks.count(False)} wrong, {marks.count(None)} left out"
        versions = ", ".join(f"{name} {card['versions'][name]}" for name in VERSIONS if card["versions"].get(name))
        sizes = [f"speed/{each['name']}" for each in card["cases"] if each["group"] == "speed"]
        speeds = "; ".join(
            f"{row['size']}: {row['samples/s, clock']:.1f} samples/s, MFU {row['MFU, metrics']:.1%}"
            for size in sizes
            for row in _measured_by(card, size, "speed")
        )
        found.append((card["card"], card["date"], versions, counts, speeds))
    return ("card", "date", "versions", "cases", "speed (bf16, compiled)"), found
