"""Figures of cards, for tables in the documentation: results of scripts/gpu/prove that are kept in docs/results.

To measure: scripts/gpu/prove --output FOUND on a machine with a card, copy FOUND/results.json to docs/results, by the
card's name (nvidia-h200.json), and run scripts/renew.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
NONE = "None so far: no card has been at hand."
OF_A_TABLE = ("driver", "python", "torch", "transformers", "deepspeed")  # versions that are shown

# Technique as its table names it -> the kit's case with its row, that row, and the one that differs in nothing else.
COMPARED: Mapping[str, tuple[str, str, str]] = {
    "precision.dtype: fp16": ("table/recipe", "fp16", "base"),
    "precision.tf32: true": ("table/recipe", "tf32", "base"),
    "precision.weights: bf16": ("table/more", "bf16-weights", "bf16"),
    "efficiency.gradient_checkpointing.selective: true": ("table/more", "selective", "checkpointing"),
    "efficiency.compile.scope: blocks": ("table/more", "blocks", "compile"),
    "efficiency.compile.mode: reduce-overhead": ("table/more", "graphs", "compile"),
    "optimizer.name: adamw_torch_foreach": ("table/more", "foreach", "base"),
    "strategy.offload: true": ("table/more", "fsdp-offload", "fsdp"),
}

Card = Mapping[str, Any]  # the content of one results.json


def read_cards(folder: Path = RESULTS) -> list[Card]:
    """All results in a folder, by their names. ValueError for a file that tells nothing of a card."""
    found = []
    for path in sorted(folder.glob("*.json")):
        results = json.loads(path.read_text(encoding="utf-8"))
        if results.get("device") != "cuda" or results.get("tiny") or not results.get("card"):
            raise ValueError(f"{path} are no results of scripts/gpu/prove on a card, in full size")
        found.append(results)
    return found


def figures_of_cards(choice: str, cards: list[Card]) -> str:
    """What a technique did to speed and memory on each card that was measured; empty where none was."""
    case, row, without = COMPARED.get(choice, ("", "", ""))
    found = []
    for card in cards:
        rows = {each["row"]: each for each in table_of(card, case, "rows")}
        if row in rows and without in rows and (ratios := [*_ratios(rows[row], rows[without])]):
            against = "" if without == "base" else f" (against `{without}`)"
            found.append(f"on {card['card']}: {', '.join(ratios)}{against}")
    return "; ".join(found)


def _ratios(row: Mapping[str, Any], without: Mapping[str, Any]) -> Iterator[str]:
    for word, column in (("speed", "samples/s"), ("memory", "allocated MiB")):
        if row.get(column) and without.get(column):
            yield f"{row[column] / without[column]:.2f} of the {word}"


def table_of(card: Card, title: str, name: str) -> list[dict[str, Any]]:
    """Rows that a case of the kit has measured."""
    cases = (each for each in card["cases"] if f"{each['group']}/{each['name']}" == title)
    return [row for each in cases for row in each["table"].get(name, ())]


def cards_table(cards: list[Card]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Head and rows of the cards on which the kit has run."""
    rows: list[tuple[str, ...]] = []
    for card in cards:
        marks = [each["ok"] for each in card["cases"]]
        counts = f"{marks.count(True)} right, {marks.count(False)} wrong, {marks.count(None)} left out"
        versions = ", ".join(f"{name} {card['versions'][name]}" for name in OF_A_TABLE if card["versions"].get(name))
        rows.append((card["card"], card["date"], versions, counts, "; ".join(_speeds(card))))
    return ("card", "date", "versions", "cases", "speed (bf16, compiled)"), rows


def _speeds(card: Card) -> Iterator[str]:
    sizes = [each["name"] for each in card["cases"] if each["group"] == "speed"]
    for size in sizes:
        for row in table_of(card, f"speed/{size}", "speed"):
            yield f"{row['size']}: {row['samples/s, clock']:.1f} samples/s, MFU {row['MFU, metrics']:.1%}"
