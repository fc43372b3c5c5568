"""What is asked of the Hub while planning, and how each obstacle is told: the real library, the tests' own Hub."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.hub_server.server import READER, Hub
from trainkit.errors import RecipeError, UsageError
from trainkit.hub.cache import Copy
from trainkit.hub.fetch import fetch, finish_parts
from trainkit.hub.lookup import Way, look_up
from trainkit.hub.names import Named
from trainkit.recipe.resolved import Resolved

pytestmark = pytest.mark.torch
constants = pytest.importorskip("huggingface_hub.constants")

Layered = Callable[..., Resolved]
MODEL = Named("model.path", "model", "owner/small")
FILES: dict[str, bytes | str] = {"config.json": "{}", "model.safetensors": b"weights", "tokenizer.json": "{}"}
INDEX = '{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}'
SHARDED: dict[str, bytes | str] = {"config.json": "{}", "model.safetensors.index.json": INDEX, "one.safetensors": b"1"}


@pytest.fixture(autouse=True)
def without_xet(monkeypatch: pytest.MonkeyPatch, clean_environment: dict[str, str]) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    for name in os.environ.keys() - clean_environment.keys():
        monkeypatch.delenv(name)


def looked_up(hub: Hub, named: Named = MODEL, **environ: str) -> Copy:
    return look_up(named, Way.of({**os.environ, **hub.environment, **environ}))


@pytest.mark.parametrize(
    ("files", "told", "hint"),
    [
        ({}, "has nothing that the trainer reads there: no weights", "it is empty"),
        ({"adapter_config.json": "{}", "adapter_model.safetensors": b"x"}, "no weights", "name them in peft.path"),
        (SHARDED, "owner/small on the Hub lacks two.safetensors", "it has config.json"),
    ],
)
def test_what_a_repository_lacks_is_said_before_it_is_fetched(
    files: dict[str, bytes | str], told: str, hint: str, hub: Hub
) -> None:
    hub.add("owner/small", files)
    with pytest.raises(UsageError) as caught:
        looked_up(hub)
    (found,) = caught.value.diagnostics
    assert told in found.what
    assert hint in found.hint


def test_of_shards_those_are_fetched_that_the_index_names(hub: Hub) -> None:
    hub.add("owner/small", {**SHARDED, "two.safetensors": b"22", "three.safetensors": b"333"})
    found = looked_up(hub)
    assert found.missing == ("one.safetensors", "two.safetensors")
    assert looked_up(hub) == found


def test_a_gated_repository_is_refused_also_where_its_description_is_in_the_cache(hub: Hub) -> None:
    hub.add("owner/small", FILES, gated=True, readers=("rob",))
    allowed = looked_up(hub, HF_TOKEN=READER)
    assert allowed.closed
    assert not allowed.obstacle
    found = looked_up(hub)
    assert "owner/small is gated, and the Hub does not give it without a token" in found.obstacle
    assert "HF_TOKEN" in found.remedy


def test_a_token_that_nobody_knows_is_said_to_be_one(hub: Hub) -> None:
    hub.add("owner/small", FILES)
    assert looked_up(hub, HF_TOKEN="hf_unknown").obstacle.startswith("the Hub refuses the token")
    assert "HF_TOKEN" not in os.environ


@pytest.mark.parametrize(
    ("variable", "kind", "asks"),
    [
        ("HF_HUB_OFFLINE", "model", False),
        ("TRANSFORMERS_OFFLINE", "dataset", False),
        ("HF_DATASETS_OFFLINE", "dataset", False),
        ("HF_DATASETS_OFFLINE", "model", True),
    ],
)
def test_who_is_offline_does_not_ask(variable: str, kind: Any, asks: bool, hub: Hub) -> None:
    hub.add("owner/small", {**FILES, "train.parquet": b"x"}, kind=kind)
    key = "model.path" if kind == "model" else "data.path"
    found = looked_up(hub, Named(key, kind, "owner/small"), **{variable: "true"})
    assert bool(hub.requests) == asks
    assert asks or found.obstacle.endswith(f"the Hub cannot be asked: {variable} is set")
    assert asks or f"unset {variable}" in found.remedy


def test_what_else_is_in_the_way_is_told_in_words(hub: Hub, tmp_path: Path) -> None:
    hub.add("owner/small", FILES)
    hub.fail("/api/models/*", status=503)
    assert looked_up(hub).obstacle.endswith("it answers with status 503")
    (tmp_path / "file").touch()
    full = looked_up(hub, HF_HUB_CACHE=str(tmp_path / "file" / "hub"))
    assert f"cannot be brought into the Hub's cache {tmp_path}/file/hub: Not a directory" in full.obstacle


def test_a_name_that_stands_twice_is_of_one_commit_and_each_wrong_one_is_told(
    hub: Hub, layered: Layered, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainkit.cli.pipeline import on_hub

    for name, value in hub.environment.items():
        monkeypatch.setenv(name, value)
    repository = hub.add("owner/small", FILES)
    model = {"model": {"kind": "hf", "path": "owner/small"}, "data": {"kind": "jsonl", "path": "r", "tokenizer": "t"}}
    (whole,) = on_hub(replace(layered(model), absent={"model.path": ("owner/small",)}))
    fetched = Path(whole.folder, "model.safetensors")
    fetched.write_bytes(b"weights")
    (fetched.parents[2] / "trees").mkdir()
    (fetched.parents[2] / "trees" / f"{whole.named.commit}.json").write_text(
        '{"files": {"config.json": {"size": 2}, "model.safetensors": {"size": 7}, "tokenizer.json": {"size": 2}}}'
    )
    repository.change({"config.json": b'{"a": 1}'})
    model["data"]["tokenizer"] = "owner/small"
    both = replace(layered(model), absent=dict.fromkeys(("model.path", "data.tokenizer"), ("owner/small",)))
    assert [each.named.commit for each in on_hub(both)] == [whole.named.commit] * 2
    del hub.repositories["model", "owner/small"]
    model["model"]["path"] = "owner/other"
    wrong = replace(layered(model), absent={"model.path": ("owner/other",), "data.tokenizer": ("owner/small",)})
    with pytest.raises(RecipeError) as caught:
        on_hub(wrong)
    assert [each.key for each in caught.value.diagnostics] == ["model.path", "data.tokenizer"]


def test_a_part_that_another_node_is_at_is_left_to_it(hub: Hub) -> None:
    from filelock import FileLock

    weights = bytes(range(256)) * 100
    held = hub.add("owner/small", {**FILES, "model.safetensors": weights}).branches["main"].files["model.safetensors"]
    copy, way = looked_up(hub), Way.of({**os.environ, **hub.environment})
    blobs = Path(way.root, copy.named.folder, "blobs")
    part = blobs / f"{held.sha256}.01234567.incomplete"
    part.write_bytes(weights[:1000])
    with FileLock(Path(way.root, ".locks", copy.named.folder, f"{held.sha256}.lock")):
        finish_parts(copy, way)
        assert part.read_bytes() == weights[:1000]
    finish_parts(copy, way)
    assert (blobs / held.sha256).read_bytes() == weights
    assert not part.exists()
    assert hub.sent("owner/small", "model.safetensors") == len(weights) - 1000


def test_a_list_that_does_not_come_is_asked_for_anew(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    http = pytest.importorskip("huggingface_hub.utils._http", reason="huggingface_hub 1.0")
    hub.add("owner/rows", {"a.jsonl": "{}"}, kind="dataset")
    monkeypatch.setattr("trainkit.hub.lookup.PATIENCE", 0.4)
    hub.fail("/api/datasets/owner/rows/tree/*", hangs=True)
    try:
        assert looked_up(hub, Named("data.path", "dataset", "owner/rows")).whole
    finally:
        http.set_client_factory(http.default_client_factory)


def test_a_hub_that_falls_silent_is_asked_anew(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    http = pytest.importorskip("huggingface_hub.utils._http", reason="huggingface_hub 1.0")
    for name, value in hub.environment.items():
        monkeypatch.setenv(name, value)
    for name, seconds in (("SILENCE", 0.4), ("EVERY", 0.1), ("QUIET", 0.2)):
        monkeypatch.setattr(f"trainkit.hub.fetch.{name}", seconds)
    commit = hub.add("owner/small", FILES).branches["main"].oid
    hub.fail("/api/models/owner/small/tree/*", hangs=True)
    try:
        fetch(Named("model.path", "model", "owner/small", commit, commit))
    finally:
        http.set_client_factory(http.default_client_factory)
    assert hub.downloads("owner/small", "model.safetensors") == 1
    assert "nothing has come for" in capsys.readouterr().out
