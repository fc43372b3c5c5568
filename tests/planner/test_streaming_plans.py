"""What a plan says of streamed data: its sources with their shares, and who reads all of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from trainkit.launch_plan.render.explain import render
from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan
from trainkit.recipe.resolved import Resolved

Layered = Callable[..., Resolved]
Machine = Callable[..., Facts]
MIX = [{"path": "web", "weight": 3}, {"path": ["code/0.parquet", "code/1.parquet"], "weight": 1}]
DATA: dict[str, Any] = {"kind": "dataset", "streaming": True, "mix": MIX}


def said(layered: Layered, facts: Facts, data: dict[str, Any], **more: Any) -> list[str]:
    plan = build_plan(layered({"data": data, **more}), facts).plan
    return [each.what for each in plan.notices if each.severity == "note"]


def test_the_sources_and_their_shares_are_in_the_plan(layered: Layered, machine: Machine) -> None:
    data = {**DATA, "mix": [*MIX, {"path": "books", "weight": 0}]}
    assert "samples are drawn from web (75.0%), code/0.parquet (25.0%)" in said(layered, machine(), data)
    alone = {**DATA, "mix": [], "path": "web"}
    assert not [each for each in said(layered, machine(), alone) if "drawn" in each]


def test_every_process_that_reads_all_of_a_packed_stream_is_counted(layered: Layered, machine: Machine) -> None:
    two: dict[str, Any] = {"strategy": {"kind": "ddp"}, "nodes": {"processes_per_node": 2}}
    words = "each of the 4 processes that read turns the whole stream into tokens"
    (found,) = [each for each in said(layered, machine(), {**DATA, "workers": 2}, **two) if "whole stream" in each]
    assert words in found
    for data in ({**DATA, "packing": "none", "workers": 2}, DATA):
        more = two if data is not DATA else {}
        assert not [each for each in said(layered, machine(), data, **more) if "whole stream" in each]


def test_absent_paths_of_a_mixture_are_blockers_and_the_list_is_explained_whole(
    layered: Layered, machine: Machine
) -> None:
    resolved = replace(layered({"data": DATA}), absent={"data.mix": ("code/1.parquet",)})
    planned = build_plan(resolved, machine())
    blockers = [each.what for each in planned.plan.notices if each.severity == "blocker"]
    assert "data.mix code/1.parquet does not exist on this machine" in blockers
    shown = render("data.mix", resolved, planned)
    assert shown.startswith('data.mix = [{"path": "web", "weight": 3.0,')
    assert shown.count("data.mix") == 1
