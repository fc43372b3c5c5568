"""The figures that the README takes from a kept bench.csv: whose they are, and what stands where there are none."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from measured import COMPARED, NOT_MEASURED, figures, read_rows, small_table

from trainkit.planner.techniques import TECHNIQUES

ROOT = Path(__file__).resolve().parents[2]
HEAD = "variant,description,outcome,seconds,samples_per_second,memory_bytes,relative_speed,relative_memory,final_loss"


def written(folder: Path, *lines: str) -> Path:
    path = folder / "bench.csv"
    path.write_text("\n".join([HEAD, *lines]) + "\n")
    return path


def test_every_technique_with_figures_is_one_of_the_table_and_a_variant_of_the_small_recipe() -> None:
    assert {row.choice for row in TECHNIQUES} >= COMPARED.keys()
    recipe = yaml.safe_load((ROOT / "recipes/efficiency-table-small.yaml").read_text())
    assert {"base", *recipe["variants"]} >= {name for pair in COMPARED.values() for name in pair}


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
        assert figures(choice, rows) == NOT_MEASURED


@pytest.mark.parametrize(("seconds", "columns"), [("2", 8), ("", 7)])
def test_a_column_of_which_nothing_was_measured_is_left_out(tmp_path: Path, seconds: str, columns: int) -> None:
    head, rows = small_table(read_rows(written(tmp_path, f"base,,ok,{seconds},10,1048576,1,1,4.5")))
    assert len(head) == len(rows[0]) == columns
    assert rows[0][-3:] == ("1 MiB", "1.00", "4.5000")
