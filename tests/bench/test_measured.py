"""Figures that are kept for the documentation: whose they are, and what stands where there are none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from measure import ROWS
from measured import ON_CARDS, ON_CPU, RESULTS, figures, read_cards, read_rows, small_table
from proof_cases import CASES

from tests.loaded_scripts import script
from trainkit.planner.techniques import TECHNIQUES

ROOT = Path(__file__).resolve().parents[2]
HEAD = "variant,description,outcome,seconds,samples_per_second,memory_bytes,relative_speed,relative_memory,final_loss"


def written(folder: Path, *lines: str) -> Path:
    path = folder / "bench.csv"
    path.write_text("\n".join([HEAD, *lines]) + "\n")
    return path


def test_every_technique_with_figures_is_one_of_the_table_and_a_variant_of_the_small_recipe() -> None:
    assert {row.choice for row in TECHNIQUES} >= ON_CPU.keys()
    recipe = yaml.safe_load((ROOT / "recipes/efficiency-table-small.yaml").read_text())
    assert {"base", *recipe["variants"]} >= {name for pair in ON_CPU.values() for name in pair}


def test_the_kept_table_has_a_row_for_every_variant_of_the_small_recipe() -> None:
    recipe = yaml.safe_load((ROOT / "recipes/efficiency-table-small.yaml").read_text())
    assert list(read_rows()) == ["base", *recipe["variants"]]


def test_figures_are_multiples_of_the_variant_without_the_technique(tmp_path: Path) -> None:
    rows = read_rows(
        written(
            tmp_path,
            "base,,ok,2,10,1000,1,1,4.5",
            "accumulation,,ok,4,5,500,0.5,0.5,4.5",
            "checkpointing,,ok,5,4,400,0.4,0.4,4.5",
            "bf16,,failed,,,,,,",
            "sgd,,ok,,,900,,0.9,4.5",
        )
    )
    assert figures("batch.accumulation: n", rows) == "0.50 of the speed, 0.50 of the memory"
    recomputed = figures("efficiency.gradient_checkpointing.every: true", rows)
    assert recomputed == "0.80 of the speed, 0.80 of the memory (against `accumulation`)"
    assert figures("optimizer.name: sgd", rows) == "0.90 of the memory"
    for choice in ("precision.dtype: bf16", "precision.tf32: true", "optimizer.name: adafactor"):
        assert figures(choice, rows) == ""


@pytest.mark.parametrize(("seconds", "columns"), [("2", 8), ("", 7)])
def test_a_column_of_which_nothing_was_measured_is_left_out(tmp_path: Path, seconds: str, columns: int) -> None:
    head, rows = small_table(read_rows(written(tmp_path, f"base,,ok,{seconds},10,1048576,1,1,4.5")))
    assert len(head) == len(rows[0]) == columns
    assert rows[0][-3:] == ("1 MiB", "1.00", "4.5000")


@pytest.fixture(scope="module")
def renew() -> Any:
    return script("renew")


def case(group: str, name: str, ok: bool | None = True, **table: Any) -> dict[str, Any]:
    return {
        "group": group,
        "name": name,
        "ok": ok,
        "expected": "",
        "found": "",
        "table": table,
        "log": "",
        "seconds": 1,
    }


def kept(folder: Path, **more: Any) -> Path:
    """A folder with the made-up results of one card."""
    fast = {"row": "fp16", "samples/s": 30.0, "allocated MiB": 600.0}
    cases = [
        case("table", "recipe", rows=[{"row": "base", "samples/s": 10.0, "allocated MiB": 1000.0}, fast]),
        case("table", "more", rows=[{"row": "fsdp-offload", "samples/s": 2.0}, {"row": "fsdp", "samples/s": 8.0}]),
        case("speed", "350M", speed=[{"size": "350M", "samples/s, clock": 99.04, "MFU, metrics": 0.456}]),
        case("strategy", "zero3", ok=False),
        case("strategy", "zero2", ok=None),
    ]
    results = {"results_version": 1, "card": "NVIDIA H200", "versions": {"torch": "2.11.0+cu130", "numpy": "2"},
               "device": "cuda", "tiny": False, "date": "2026-01-02", "seconds": 9, "cases": cases, **more}  # fmt: skip
    (folder / "nvidia-h200.json").write_text(json.dumps(results))
    return folder


def cells(page: str) -> Mapping[str, str]:
    """The last cell of each row, by its first."""
    rows = [line.strip("| ").split(" | ") for line in page.splitlines()]
    return {row[0].strip("`"): row[-1] for row in rows}


def test_what_a_cpu_has_not_measured_is_filled_in_from_a_card(renew: Any, tmp_path: Path) -> None:
    without, found = cells(renew.techniques(tmp_path)), cells(renew.techniques(kept(tmp_path)))
    changed = {choice: cell for choice, cell in found.items() if cell != without[choice]}
    assert changed == {
        "key": "measured on CPU, or on the card that is named",
        "precision.dtype: fp16": "on NVIDIA H200: 3.00 of the speed, 0.60 of the memory",
        "strategy.offload: true": "on NVIDIA H200: 0.25 of the speed (against `fsdp`)",
    }
    assert {without["precision.dtype: fp16"], without["strategy.offload: true"]} == {"not measured here"}


def test_cards_are_listed_with_what_was_right_and_how_fast_they_are(renew: Any, tmp_path: Path) -> None:
    assert renew.cards(tmp_path) == "None so far: no card has been at hand."
    row = renew.cards(kept(tmp_path)).splitlines()[-1]
    counted, speed = "3 right, 1 wrong, 1 left out", "350M: 99.0 samples/s, MFU 45.6%"
    assert row == f"| NVIDIA H200 | 2026-01-02 | torch 2.11.0+cu130 | {counted} | {speed} |"


@pytest.mark.parametrize("more", [{"device": "cpu"}, {"tiny": True}, {"card": None}])
def test_results_that_tell_nothing_of_a_card_are_refused(tmp_path: Path, more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no results of scripts/gpu/prove on a card"):
        read_cards(kept(tmp_path, **more))


def test_every_technique_is_one_of_the_table_and_its_rows_are_measured() -> None:
    assert {row.choice for row in TECHNIQUES} >= ON_CARDS.keys()
    assert not ON_CARDS.keys() & ON_CPU.keys()
    titles = {each.title for each in CASES}
    for title, row, without in ON_CARDS.values():
        assert title in titles and {row, without} <= ROWS[title.partition("/")[2]].keys()


def test_what_is_kept_can_be_read() -> None:
    assert all(card["cases"] for card in read_cards(RESULTS))
