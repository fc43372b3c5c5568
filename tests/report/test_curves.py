"""Curves are thinned so that nothing that an eye looks for is lost."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.made_up_runs import MakeRun, records
from trainkit.html_report.collect import Collected, collect
from trainkit.html_report.curves import POINTS, chart_data, charts_of, kept, phase_seconds, rounded
from trainkit.html_report.page import page
from trainkit.runner.report.history import Curve
from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.rundir.listing import RunInfo

Info = Callable[[RunLayout], RunInfo]
VALUES = st.lists(st.one_of(st.none(), st.floats(-1e9, 1e9)), max_size=400)


@given(VALUES, st.integers(6, 60))
def test_a_thinned_curve_has_its_ends_its_extremes_and_what_is_not_finite(
    values: list[float | None], most: int
) -> None:
    places = kept(values, most)
    assert places == sorted(set(places))
    assert len(places) <= most
    assert len(places) == min(len(values), len(places))
    shown, known = [values[place] for place in places], [value for value in values if value is not None]
    if values:
        assert (shown[0], shown[-1]) == (values[0], values[-1])
    if known:
        assert max(each for each in shown if each is not None) == max(known)
    if known and len(known) == len(values):
        assert min(each for each in shown if each is not None) == min(known)
    assert (None in shown) == (None in values)


def test_a_spike_of_one_step_among_a_hundred_thousand_is_kept_with_its_neighbours_apart() -> None:
    values: list[float | None] = [2 + math.sin(step / 999) for step in range(100_000)]
    values[54_321], values[77_777] = 40.0, -40.0
    places = kept(values, POINTS)
    assert {54_321, 77_777} <= {*places}
    assert len(places) <= POINTS


def test_numbers_have_five_digits_and_no_more_characters_than_they_need() -> None:
    found = [rounded(each) for each in (1.0, 3.1415926, 0.00014285714, 7_000_123.4, 1e-12, None)]
    assert json.dumps(found) == "[1, 3.1416, 0.00014286, 7000100, 1e-12, null]"


def test_each_number_of_the_metrics_has_a_chart_and_what_is_no_curve_has_none(make_run: MakeRun, info: Info) -> None:
    more = [*records(8, float, every=4), {"step": 9, "loss": 1.0, "my_own_number": 3, "note": "words"}]
    run = collect(info(make_run("one", more)), "one", {})
    titles = [chart.title for chart in charts_of([run])]
    assert titles == [
        "Training loss, and evaluation loss as marks",
        "Evaluation accuracy",
        "Learning rate",
        "Gradient norm",
        "Samples per second",
        "Tokens per second",
        "Time of a step",
        "Waiting for data",
        "Memory of rank 0",
        "my own number",
    ]
    loss = chart_data([run])["charts"][0]["series"]
    assert [(each["run"], each.get("marks"), len(each["x"])) for each in loss] == [(0, None, 9), (0, True, 2)]


def test_the_log_of_a_script_on_trainer_has_curves(make_run: MakeRun, info: Info) -> None:
    program = {"kind": "hf", "script": "train.py"}
    layout = make_run("one", recipe={"program": program, "train": {"steps": 4}, "optimizer": {"lr": 1e-3}})
    log = [
        {"step": 2, "epoch": 0.5, "loss": 2.5, "grad_norm": 1.5, "learning_rate": 1e-4},
        {
            "step": 2,
            "epoch": 0.5,
            "eval_loss": 2.25,
            "eval_accuracy": 0.5,
            "eval_runtime": 1.5,
            "eval_steps_per_second": 3,
        },
        {"step": 4, "epoch": 1.0, "loss": 1.5, "grad_norm": math.nan},
        {"step": 4, "epoch": 1.0, "train_runtime": 9.0, "train_loss": 2.0, "total_flos": 7.0},
        {"step": "four", "loss": 1.0},
        "damaged",
    ]
    folder = layout.root / "output" / "checkpoint-4"
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 4, "log_history": log}))
    run = collect(info(layout), "one", {})
    assert {name: curve for name, curve in run.curves.items() if curve.steps} == {
        "loss": Curve([2, 4], [2.5, 1.5]),
        "grad_norm": Curve([2, 4], [1.5, None]),
        "learning_rate": Curve([2], [1e-4]),
        "eval_loss": Curve([2], [2.25]),
        "eval_accuracy": Curve([2], [0.5]),
    }
    assert len(charts_of([run])) == 4


def test_the_seconds_of_phases_are_those_of_all_steps_also_where_one_is_seldom() -> None:
    curves = {
        "phases.forward": Curve([10, 20, 30], [0.1, 0.1, 0.4]),
        "phases.checkpoint": Curve([20], [0.3]),
    }
    assert phase_seconds(curves, 0) == {"forward": 0.2, "checkpoint": 0.1}
    assert phase_seconds({}, 0) == {}


def test_two_runs_of_a_hundred_thousand_steps_are_a_page_below_two_megabytes(make_run: MakeRun, info: Info) -> None:
    run = collect(info(make_run("one", records(4, float))), "one", {})
    steps = list(range(1, 100_001))
    wild: list[float | None] = [math.sin(step * step) * 1.2345678 for step in steps]
    curves = {f"metric_{number}": Curve(steps, wild) for number in range(10)}
    long = replace(run, curves=curves, times=Curve(steps, [1e9 + step * 0.123456 for step in steps]))
    runs: list[Collected] = [replace(long, label=label) for label in ("one", "two")]
    assert len(page(runs, "two runs")) < 2_000_000
    assert len(page([replace(long, label=f"run {number}") for number in range(24)], "many runs")) < 2_000_000
