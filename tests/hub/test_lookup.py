"""What is asked of the Hub while planning, how each obstacle is told, and what goes on with a fetch that was killed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.hub_server.server import READER, Hub
from trainkit.errors import MachineError, RecipeError, UsageError
from trainkit.hub.cache import CachedRepo
from trainkit.hub.fetch import PARTS, fetch, resume_partial_downloads
from trainkit.hub.lookup import HubClient, look_up, set_http_timeout
from trainkit.hub.references import RepoRef
from trainkit.recipe.resolved import Resolved

pytestmark = pytest.mark.torch
constants = pytest.importorskip("huggingface_hub.constants")

from huggingface_hub.hf_api import RepoFile  # noqa: E402

Layered = Callable[..., Resolved]
MODEL = RepoRef("model.path", "model", "owner/small")
FILES: dict[str, bytes | str] = {"config.json": "{}", "model.safetensors": b"weights", "tokenizer.json": "{}"}
INDEX = '{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}'
SHARDED: dict[str, bytes | str] = {"config.json": "{}", "model.safetensors.index.json": INDEX, "one.safetensors": b"1"}
WEIGHTS = bytes(range(256)) * 100


@pytest.fixture(autouse=True)
def without_xet(monkeypatch: pytest.MonkeyPatch, clean_environment: dict[str, str]) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    for name in os.environ.keys() - clean_environment.keys():
        monkeypatch.delenv(name)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, seconds in (("lookup.PATIENCE", 0.4), ("fetch.SILENCE", 0.4), ("fetch.EVERY", 0.1), ("fetch.QUIET", 0.2)):
        monkeypatch.setattr(f"trainkit.hub.{name}", seconds)
    yield
    set_http_timeout(60)


def client_of(hub: Hub, **environ: str) -> HubClient:
    return HubClient.of({**os.environ, **hub.environment, **environ})


def looked_up(hub: Hub, ref: RepoRef = MODEL, **environ: str) -> CachedRepo:
    return look_up(ref, client_of(hub, **environ))


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
    found = looked_up(hub, RepoRef(key, kind, "owner/small"), **{variable: "true"})
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
    model = {"model": {"kind": "hf", "path": "owner/small"}, "data": {"kind": "dataset", "path": "r", "tokenizer": "t"}}
    (whole,) = on_hub(replace(layered(model), absent={"model.path": ("owner/small",)}))
    Path(whole.folder, "model.safetensors").write_bytes(b"weights")
    repository.change({"config.json": b'{"a": 1}'})
    model["data"]["tokenizer"] = "owner/small"
    both = replace(layered(model), absent=dict.fromkeys(("model.path", "data.tokenizer"), ("owner/small",)))
    assert [each.ref.commit for each in on_hub(both)] == [whole.ref.commit] * 2
    del hub.repositories["model", "owner/small"]
    model["model"]["path"] = "owner/other"
    wrong = replace(layered(model), absent={"model.path": ("owner/other",), "data.tokenizer": ("owner/small",)})
    with pytest.raises(RecipeError) as caught:
        on_hub(wrong)
    assert [each.key for each in caught.value.diagnostics] == ["model.path", "data.tokenizer"]


@pytest.mark.needs("huggingface_hub>=1.0")
@pytest.mark.usefixtures("impatient")
def test_a_list_that_does_not_come_is_asked_for_anew(hub: Hub) -> None:
    hub.add("owner/rows", {"a.jsonl": "{}"}, kind="dataset")
    hub.fail("/api/datasets/owner/rows/tree/*", hangs=True)
    assert looked_up(hub, RepoRef("data.path", "dataset", "owner/rows")).whole


@pytest.fixture
def part(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The beginning of a model's weights, as a fetch that was killed has left it."""
    if "xet_hash" not in RepoFile.__annotations__:
        pytest.skip("this release of huggingface_hub goes on with files by itself")
    monkeypatch.setattr("trainkit.hub.fetch.LARGE", 1000)
    added = hub.add("owner/small", {**FILES, "model.safetensors": WEIGHTS})
    folder = Path(client_of(hub).root, looked_up(hub).ref.folder, PARTS)
    folder.mkdir()
    path = folder / added.branches["main"].files["model.safetensors"].sha256
    path.write_bytes(WEIGHTS[:1000])
    return path


def test_a_part_that_another_node_is_at_is_left_to_it(hub: Hub, part: Path) -> None:
    from filelock import FileLock

    repo, client = looked_up(hub), client_of(hub)
    with ThreadPoolExecutor() as others:
        with FileLock(f"{part}.lock"):
            done = others.submit(resume_partial_downloads, repo, client)
            time.sleep(0.5)
            assert part.read_bytes() == WEIGHTS[:1000]
        assert done.result() == {"model.safetensors"}
    assert (part.parents[1] / "blobs" / part.name).read_bytes() == WEIGHTS
    assert not list(part.parent.iterdir())
    assert hub.sent("owner/small", "model.safetensors") == len(WEIGHTS) - 1000


@pytest.mark.parametrize("begin", [bytes(1000), bytes(2 * len(WEIGHTS))])
def test_a_part_with_other_bytes_is_not_taken(hub: Hub, part: Path, begin: bytes) -> None:
    part.write_bytes(begin)
    old = part.with_name("0" * 64)  # of a commit that nobody fetches any more
    old.write_bytes(b"old")
    os.utime(old, (0, 0))
    fetch(MODEL, client_of(hub))
    assert Path(looked_up(hub).folder, "model.safetensors").read_bytes() == WEIGHTS
    assert not part.parent.exists()


def test_a_fetch_that_is_cut_off_goes_on_where_it_ended(hub: Hub, part: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainkit.hub.fetch._PIECE", 1000)
    hub.fail("*/model.safetensors", cut_after=5500)
    fetch(MODEL, client_of(hub))
    assert [each.range for each in hub.contents("owner/small", "model.safetensors")] == ["bytes=1000-", "bytes=6000-"]


@pytest.mark.usefixtures("impatient", "part")
def test_a_hub_that_falls_silent_is_asked_anew(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.fail("/models/owner/small/*", method="GET", hangs=True)
    fetch(MODEL, client_of(hub))
    assert hub.sent("owner/small", "model.safetensors") == len(WEIGHTS) - 1000
    assert "nothing has come for" in capsys.readouterr().out


def test_a_file_with_another_checksum_is_not_kept(hub: Hub, part: Path) -> None:
    hub.fail("*/model.safetensors", corrupt=True, times=None)
    with pytest.raises(MachineError, match="came with another checksum than the Hub has"):
        fetch(MODEL, client_of(hub))
    assert not list(part.parents[1].rglob("model.safetensors"))
    hub.faults.clear()
    fetch(MODEL, client_of(hub))
    assert Path(looked_up(hub).folder, "model.safetensors").read_bytes() == WEIGHTS


def test_a_blob_in_the_store_that_repositories_share_is_sound(hub: Hub, part: Path) -> None:
    store = part.parents[2] / "blobs" / "ab" / ("ab" * 32)  # named by Xet's hash
    store.parent.mkdir(parents=True)
    store.write_bytes(WEIGHTS)
    (part.parents[1] / "blobs" / part.name).symlink_to(store)
    fetch(MODEL, client_of(hub))
    assert looked_up(hub).whole
    assert not hub.downloads("owner/small", "model.safetensors")
