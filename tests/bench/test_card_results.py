"""Results of a card that are kept: what of them comes into the documentation, and what stays as it is without them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest
from card_results import COMPARED, RESULTS, read_cards
from measure_table import ROWS
from measured import COMPARED as ON_CPU
from proof_cases import CASES

from trainkit.planner.techniques import TECHNIQUES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def renew() -> Any:
    """`scripts/renew` as a module."""
    loader = SourceFileLoader("renew", str(ROOT / "scripts" / "renew"))
    spec = spec_from_loader("renew", loader)
    assert spec
    module = sys.modules["renew"] = module_from_spec(spec)
    loader.exec_module(module)
    return module


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
    assert {row.choice for row in TECHNIQUES} >= COMPARED.keys()
    assert not COMPARED.keys() & ON_CPU.keys()
    titles = {each.title for each in CASES}
    for title, row, without in COMPARED.values():
        assert title in titles and {row, without} <= ROWS[title.partition("/")[2]].keys()


def test_what_is_kept_can_be_read() -> None:
    assert all(card["cases"] for card in read_cards(RESULTS))
