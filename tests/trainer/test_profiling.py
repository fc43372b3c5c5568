"""The profile of some steps: every operator in one group and phase, a trace file, and the same losses."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.training import MakeSettings, trained
from trainkit.runner.report.summary import profile_rows
from trainkit.trainer.perf import profiling
from trainkit.trainer.perf.profiling import GROUPS, NAMES, group_of, seconds_by_group

FIVE: dict[str, Any] = {"train": {"steps": 5}, "eval": {"every_steps": 0}, "model": {"dropout": 0.1}}


def test_contractions_take_time_forward_and_backward_and_the_losses_stay_bit_equal(make_settings: MakeSettings) -> None:
    found, without = trained(make_settings(**FIVE, profile={"steps": 2, "after": 1})), trained(make_settings(**FIVE))
    assert (without.result["profile"], without.losses) == (None, found.losses)
    assert not (without.parts.settings.run_dir / "profile").exists()
    profile = found.result["profile"]
    assert profile["steps"] == 2
    for phase in ("forward", "backward"):
        assert all(profile["operators"][phase][group] > 0 for group in GROUPS)
    rest = profile["operators"]["rest"]
    assert rest["element-wise"] > 0  # the optimizer's
    assert rest["contractions"] == rest["normalizations"] == 0
    names = events_of(Path(profile["trace"]))
    assert {"trainkit: forward", "trainkit: backward", "aten::addmm"} <= names
    assert dict(profile_rows(profile))["Profiled"].startswith("2 steps, ")


def events_of(trace: Path) -> set[str]:
    content = json.loads(gzip.decompress(trace.read_bytes()))
    return {event["name"] for event in content["traceEvents"] if "name" in event}


def test_the_time_of_all_operators_is_accounted_for() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.LayerNorm(32))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as watched:
        with torch.profiler.record_function("trainkit: forward"):
            loss = model(torch.randn(4, 32)).sum()
        with torch.profiler.record_function("trainkit: backward"):
            loss.backward()
        torch.ones(3).sort()
    events = list(watched.events())
    told = seconds_by_group(events, on_device=False)
    marked = ("trainkit: forward", "trainkit: backward")
    whole = sum(event.self_cpu_time_total for event in events if event.name not in marked) / 1e6
    assert sum(sum(groups.values()) for groups in told.values()) == pytest.approx(whole, rel=1e-6)
    assert told["rest"]["other"] > 0
    outer = {event.name: event.cpu_time_total / 1e6 for event in events if event.name in marked}
    own = {event.name: event.self_cpu_time_total / 1e6 for event in events if event.name in marked}
    for mark in marked:  # a phase is its operators and the Python between them
        inside = sum(told[mark.removeprefix("trainkit: ")].values())
        assert inside == pytest.approx(outer[mark] - own[mark], rel=1e-3)


def test_the_watched_seconds_begin_and_end_with_nothing_left_to_do_on_the_device(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def wait(_device: torch.device) -> None:  # as if the device was a second behind
        time.sleep(1.0)
        waits.append(time.perf_counter())

    monkeypatch.setattr(profiling, "wait_for", wait)
    profile = trained(make_settings(**FIVE, profile={"steps": 2, "after": 1})).result["profile"]
    ended = time.perf_counter()
    begun, _ = waits  # and not in each step
    assert 1.0 <= profile["seconds"] < ended - begun  # the second wait is among them, the first is not


def test_a_run_that_ends_before_all_steps_were_seen_says_how_many_were(
    make_settings: MakeSettings, caplog: pytest.LogCaptureFixture
) -> None:
    found = trained(make_settings(**FIVE, profile={"steps": 9, "after": 3}))
    assert found.result["profile"]["steps"] == 2
    assert "2 of 9 steps were profiled: the run ended before" in caplog.text


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("aten::addmm", "contractions"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "contractions"),
        ("aten::convolution_backward", "contractions"),
        ("aten::_softmax_backward_data", "normalizations"),
        ("aten::native_layer_norm_backward", "normalizations"),
        ("aten::_log_softmax", "normalizations"),
        ("aten::gelu_backward", "element-wise"),
        ("aten::add_", "element-wise"),
        ("aten::_foreach_addcdiv_", "element-wise"),
        ("aten::native_dropout_backward", "element-wise"),
        ("aten::_fused_adamw_", "element-wise"),
        ("triton_poi_fused_add_gelu_3", "element-wise"),
        ("triton_per_fused_native_layer_norm_0", "normalizations"),
        ("aten::copy_", "other"),
        ("aten::sum", "other"),
        ("aten::embedding", "other"),
        ("autograd::engine::evaluate_function: AddmmBackward0", "other"),
    ],
)
def test_an_operator_is_in_the_group_that_the_anatomy_gives_it(name: str, group: str) -> None:
    assert group_of(name) == group


def test_no_operator_is_in_two_groups() -> None:
    every = [name for names in NAMES.values() for name in names]
    assert len(every) == len(set(every))
