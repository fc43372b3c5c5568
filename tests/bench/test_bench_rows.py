"""From summaries of runs to rows, table and CSV: what a comparison says of runs that went well, badly or not at all."""

from __future__ import annotations

import csv
import io
import json
import math
from typing import Any

import pytest

from trainkit.bench import Comparison, Measurement, VariantRow, as_csv, as_data, compare, measure, remaining, render

MIB = 2**20


def summary(**known: Any) -> dict[str, Any]:
    return {
        "exit_code": 0,
        "failure": None,
        "why": "",
        "train_seconds": 10.0,
        "wall_seconds": 15.0,
        "samples_per_second": 4.0,
        "final_loss": 2.5,
        "memory": [{"rank": 0, "rss": 300 * MIB}, {"rank": 1, "rss": 400 * MIB}],
        "gpu_memory_occupied": {"GPU-a": 900 * MIB, "GPU-b": 700 * MIB},
        **known,
    }


def row(name: str, *rates: float, memory: int = 100) -> VariantRow:
    runs = tuple(Measurement("ok", 0, "", 40 / rate, rate, memory * MIB, 2.5) for rate in rates)
    return VariantRow(name, "", runs)


def test_memory_is_that_of_the_largest_rank_or_the_fullest_card() -> None:
    assert measure(summary(), "rss", "", "").memory_bytes == 400 * MIB
    assert measure(summary(), "gpu", "", "").memory_bytes == 900 * MIB
    assert measure(summary(memory=None, gpu_memory_occupied=None), "rss", "", "").memory_bytes is None


def test_a_program_that_reports_nothing_has_its_whole_time() -> None:
    found = measure(summary(train_seconds=None, samples_per_second=None), "rss", "", "")
    assert (found.outcome, found.seconds, found.samples_per_second) == ("ok", 15.0, None)


@pytest.mark.parametrize(
    ("code", "failure", "errors", "outcome"),
    [
        (1, "program", "Traceback\ntorch.OutOfMemoryError: CUDA out of memory.\n", "out of memory"),
        (1, "program", "RuntimeError: DefaultCPUAllocator: can't allocate memory\n", "out of memory"),
        (137, "rank", "", "out of memory"),
        (1, "program", "ValueError: no\n", "failed"),
        (130, "signal", "MemoryError\n", "interrupted"),
    ],
)
def test_a_failure_is_named_by_what_the_ranks_said(code: int, failure: str, errors: str, outcome: str) -> None:
    found = measure(summary(exit_code=code, failure=failure, why="rank 0 fell"), "rss", errors, "")
    assert found.outcome == outcome
    assert found.reason


def test_several_runs_give_medians_and_the_highest_memory() -> None:
    runs = (*row("a", 1.0, 5.0, memory=100).runs, *row("a", 2.0, memory=300).runs, Measurement("failed", 1, "once"))
    found = VariantRow("a", "", runs)
    assert (found.median("samples_per_second"), found.spread, found.memory_bytes) == (2.0, (1.0, 5.0), 300 * MIB)
    assert (found.outcome, found.reason) == ("failed", "once")


def test_rows_are_measured_by_the_base_where_it_ended_well() -> None:
    rows = compare([row("base", 4.0, memory=200), row("a", 2.0, memory=100)], "base")
    assert [(each.speed, each.memory) for each in rows] == [(1.0, 1.0), (0.5, 0.5)]
    alone = compare([VariantRow("base", "", (Measurement("failed", 1),)), row("a", 2.0)], "base")
    assert [each.speed for each in alone] == [None, None]


def test_the_time_left_is_known_once_a_run_has_ended() -> None:
    assert remaining([], 3) is None
    assert remaining([10.0, 20.0], 3) == 45.0
    assert remaining([10.0, 20.0], 3, 5.0) == 40.0
    assert remaining([10.0, 20.0], 3, 500.0) == 30.0


def test_the_table_lines_up_and_says_what_failed_and_what_did_not_run() -> None:
    failed = VariantRow("big", "", (Measurement("out of memory", 1, "CUDA out of memory"),))
    rows = compare([row("base", 4.0, memory=200), row("accumulation", 2.0), failed], "base")
    head, *lines = render(Comparison("r", "cpu", "rss", rows, ("late",))).splitlines()
    assert head.split() == ["variant", "time", "samples/s", "vs", "base", "peak", "RSS", "vs", "base", "final", "loss"]
    assert lines[1].split() == ["accumulation", "20.00", "s", "2.00", "0.50", "100", "MiB", "0.50", "2.5000"]
    assert len(head) == len(lines[0]) == len(lines[1])
    assert lines[2].split(maxsplit=1) == ["big", "out of memory: CUDA out of memory"]
    assert lines[-1] == "not run: late"


def test_csv_and_json_hold_the_same_figures_and_no_invalid_number() -> None:
    broken = VariantRow("nan", "a, b", (Measurement("ok", 0, "", 1.0, 1.0, MIB, math.nan),))
    found = Comparison("r", "cpu", "gpu", [broken])
    (record,) = csv.DictReader(io.StringIO(as_csv(found)))
    assert (record["variant"], record["description"], record["memory_bytes"]) == ("nan", "a, b", str(MIB))
    assert record["final_loss"] == ""
    data = json.loads(json.dumps(as_data(found), allow_nan=False))
    assert data["rows"][0]["runs"][0]["final_loss"] is None
    assert data["rows"][0]["memory_bytes"] == MIB


def test_the_table_has_the_evaluation_loss_and_the_metric_where_all_variants_measure_the_same() -> None:
    measured = {"metrics": {"accuracy": 0.5}, "best_metric": "loss", "eval_loss": 0.7}
    rows = [VariantRow(name, "", (measure(summary(**measured), "rss", "", ""),)) for name in ("base", "other")]
    shown = render(Comparison("r", "m", "rss", rows))
    assert shown.splitlines()[0].endswith("final loss  eval loss  eval accuracy")
    assert shown.splitlines()[1].split()[-2:] == ["0.7000", "0.5000"]
    losses = [VariantRow("base", "", (measure(summary(eval_loss=0.75), "rss", "", ""),)), *rows]
    mixed = render(Comparison("r", "m", "rss", losses)).splitlines()
    assert mixed[0].endswith("final loss  eval loss")
    assert [line.split()[-1] for line in mixed[1:4]] == ["0.7500", "0.7000", "0.7000"]
    assert "eval " not in render(Comparison("r", "m", "rss", [row("base", 4.0)]))
    record = next(csv.DictReader(io.StringIO(as_csv(Comparison("r", "m", "rss", rows)))))
    assert (record["evaluated"], record["eval_loss"]) == ("accuracy", "0.7")
    run = as_data(Comparison("r", "m", "rss", rows))["rows"][0]["runs"][0]
    assert (run["eval_loss"], run["evaluation"]) == (0.7, 0.5)


def test_the_table_says_what_its_rates_are_of_and_compares_no_two_definitions() -> None:
    def covering(name: str, cover: str) -> VariantRow:
        return VariantRow(name, "", (measure(summary(rates_cover=cover), "rss", "", ""),))

    same = compare([covering("base", "these steps"), covering("other", "these steps")], "base")
    assert [each.speed for each in same] == [1.0, 1.0]
    shown = render(Comparison("r", "m", "rss", same)).splitlines()
    assert (
        shown[-1] == "samples/s is global batch \N{MULTIPLICATION SIGN} steps \N{DIVISION SIGN} seconds of these steps"
    )
    mixed = compare([covering("base", "these steps"), covering("other", "all of it")], "base")
    assert [(each.speed, each.memory) for each in mixed] == [(1.0, 1.0), (None, 1.0)]
    *_, first, second, warning = render(Comparison("r", "m", "rss", mixed)).splitlines()
    assert first.startswith("samples/s of base is ")
    assert second.startswith("samples/s of other is ")
    assert second.endswith("seconds of all of it")
    assert warning.startswith("warning: ")
    record = next(csv.DictReader(io.StringIO(as_csv(Comparison("r", "m", "rss", mixed)))))
    assert record["samples_per_second_covers"] == "these steps"
