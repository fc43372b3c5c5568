"""What a plan says of repositories of the Hub, by what is known of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from trainkit.errors import RecipeError
from trainkit.hub.cache import CachedRepo
from trainkit.hub.references import Download, RepoRef
from trainkit.hub.splits import RowSelection
from trainkit.launch_plan.model import plan_from_json, plan_to_json
from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan
from trainkit.recipe.resolved import Resolved

Layered = Callable[..., Resolved]
Machine = Callable[..., Facts]
COMMIT = "c" * 40
NAMED = RepoRef("data.path", "dataset", "owner/rows", "main", COMMIT, RowSelection("en", "test"))
FOLDER = f"/cache/datasets--owner--rows/snapshots/{COMMIT}"
PART = CachedRepo(NAMED, FOLDER, {"a.parquet": 3 << 20, "b.parquet": 1 << 20}, ("a.parquet",))
WHOLE = replace(PART, missing=())
FETCH = ["data.path", "dataset", "owner/rows", COMMIT, "--subset", "en", "--split", "test"]
RECIPE: dict[str, Any] = {"data": {"kind": "dataset", "path": "owner/rows", "subset": "en", "split": "test"}}
CONTAINER = {"container": {"kind": "podman", "image": "i", "packages": {"torch": "2.13.0"}}}
NODES = {"nodes": {"count": 2, "processes_per_node": 1, "rendezvous": "n0:29500"}, "strategy": {"kind": "ddp"}}


@pytest.mark.parametrize(
    ("more", "copy", "fetches", "told"),
    [
        ({}, WHOLE, False, f"data.path: owner/rows on the Hub (main, ccccccc) is in the cache: {FOLDER}"),
        ({}, PART, True, f"3 MiB of 4 MiB fetched before the ranks start, into {FOLDER}"),
        (CONTAINER, WHOLE, True, "4 MiB, of which the container's cache gets what it lacks"),
        (NODES, WHOLE, True, "4 MiB, of which the cache of each node gets what it lacks"),
    ],
)
def test_what_is_fetched_and_where(
    more: dict[str, Any], copy: CachedRepo, fetches: bool, told: str, layered: Layered, machine: Machine
) -> None:
    resolved = replace(layered(RECIPE, more), absent={"data.path": ("owner/rows",)})
    plan = build_plan(resolved, machine(), hub=(copy,)).plan
    assert told in " ".join(each.what for each in plan.notices)
    assert not [each for each in plan.notices if each.severity == "blocker" and "data.path" in each.what]
    words = [[str(word) for word in each.argv] for each in plan.preparations if each.title.startswith("fetch")]
    assert [each[-len(FETCH) :] for each in words] == ([FETCH] if fetches else [])
    assert plan.repositories == (NAMED,)
    missing = None if more else sum((copy.sizes or {})[name] for name in copy.missing)
    assert plan.downloads == (Download("data.path", "owner/rows", 4 << 20, missing),)
    assert plan_from_json(plan_to_json(plan)) == plan


def test_a_repository_that_is_named_twice_is_in_the_way_once(layered: Layered, machine: Machine) -> None:
    model = {
        "model": {"kind": "hf", "path": "owner/m"},
        "data": {"kind": "dataset", "path": "r", "tokenizer": "owner/m"},
    }
    resolved = replace(layered(model), absent=dict.fromkeys(("model.path", "data.tokenizer"), ("owner/m",)))
    hub = [CachedRepo(RepoRef(key, "model", "owner/m"), obstacle="owner/m is gated") for key in resolved.absent]
    blockers = [each.what for each in build_plan(resolved, machine(), hub=hub).plan.notices if "gated" in each.what]
    assert blockers == ["model.path, data.tokenizer: owner/m is gated"]


def test_what_is_in_the_way_blocks(layered: Layered, machine: Machine) -> None:
    resolved = replace(layered(RECIPE), absent={"data.path": ("owner/rows",)})
    for copy in (replace(PART, obstacle="no network", remedy="bring it up"), CachedRepo(NAMED, obstacle="no network")):
        (blocker,) = [
            each for each in build_plan(resolved, machine(), hub=(copy,)).plan.notices if "no net" in each.what
        ]
        assert blocker.severity == "blocker"


def test_on_another_machine_its_own_cache_counts(layered: Layered, machine: Machine) -> None:
    resolved = replace(layered(RECIPE), absent={"data.path": ("owner/rows",)})
    plan = build_plan(resolved, replace(machine(), origin="facts.json"), hub=(WHOLE,)).plan
    assert "4 MiB, of which that machine's cache gets what it lacks" in " ".join(each.what for each in plan.notices)
    assert [each.missing for each in plan.downloads] == [None]


def test_an_address_is_no_folder_and_its_name_is_told(layered: Layered, machine: Machine) -> None:
    path = "https://huggingface.co/datasets/owner/rows"
    resolved = replace(layered(RECIPE), absent={"data.path": (path,)})
    (blocker,) = [each for each in build_plan(resolved, machine()).plan.notices if path in each.what]
    assert "write owner/rows" in blocker.hint


def test_a_token_that_a_container_does_not_get_is_warned_of(layered: Layered, machine: Machine) -> None:
    for closed, passed, warned in ((True, [], True), (True, ["HF_TOKEN"], False), (False, [], False)):
        resolved = replace(layered(RECIPE, CONTAINER, {"env_from": passed}), absent={"data.path": ("owner/rows",)})
        plan = build_plan(resolved, machine(), hub=(replace(PART, closed=closed),)).plan
        told = [each.what for each in plan.notices if each.severity == "warning" and "your token" in each.what]
        assert bool(told) == warned


def test_a_folder_that_hides_a_repository_is_said_to(layered: Layered, machine: Machine) -> None:
    for path, hides in (("owner/m", True), ("./m", False)):
        resolved = layered({"model": {"kind": "hf", "path": path}})
        described = replace(resolved.described, fault=("there is no config.json", "name one"))
        with pytest.raises(RecipeError) as caught:
            build_plan(replace(resolved, described=described), machine())
        assert ("for owner/m of the Hub move the folder" in caught.value.diagnostics[0].hint) == hides
