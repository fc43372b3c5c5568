"""Names of the Hub in recipes, and what of them is in the cache: decided from texts alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest

from trainkit.hub.cache import (
    CachedRepo,
    cache_root,
    cached_repo,
    index_file,
    located,
    missing_files,
    needed_files,
    shown,
)
from trainkit.hub.references import RepoRef, pinned, repo_refs, revision_without_name
from trainkit.hub.splits import RowSelection
from trainkit.recipe.hub_name import is_repository, meant
from trainkit.recipe.schema import Recipe

A, B = "a" * 40, "b" * 40
ROOT = "/cache/hub"
STORAGE = f"{ROOT}/models--owner--small"
SNAPSHOT = f"{STORAGE}/snapshots/{A}"
MODEL = RepoRef("model.path", "model", "owner/small")
TOKENIZER = RepoRef("data.tokenizer", "model", "owner/words")
ADAPTERS = RepoRef("peft.path", "model", "owner/small-lora")
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = json.dumps({"weight_map": {"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[0]}})


class Texts:
    """A disk of a few files."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self.files = files

    def read(self, path: str) -> bytes:
        if path not in self.files:
            raise FileNotFoundError(path)
        return self.files[path].encode()

    def exists(self, path: str) -> bool:
        return path in self.files


def listing(**sizes: int) -> str:
    return json.dumps({"format_version": 1, "files": {name: {"size": size} for name, size in sizes.items()}})


def recipe(**sections: object) -> Recipe:
    return Recipe.model_validate(
        {"model": {"kind": "hf", "path": "owner/small"}, "data": {"kind": "dataset", "path": "rows.jsonl"}, **sections}
    )


@pytest.mark.parametrize("word", ["gpt2", "owner/name", "meta-llama/Llama-3.1-8B", "a/b_c.d-e", "_x/y"])
def test_the_form_of_a_name(word: str) -> None:
    assert is_repository(word)


@pytest.mark.parametrize(
    "word",
    ["", "a/b/c", "./model", "../model", "/models/x", "owner/", "a--b/c", "x..y", "-a/b", "a/b.", "a b", "x.git"],
)
def test_what_is_no_name(word: str) -> None:
    assert not is_repository(word)
    assert not is_repository("a" * 97)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("https://huggingface.co/owner/small", "owner/small"),
        ("https://huggingface.co/datasets/owner/rows/tree/main/data?x", "owner/rows"),
        ("hf://datasets/owner/rows@v1/a.parquet", "owner/rows"),
        ("owner/small@v1.0", "owner/small"),
        ("owner/small/", "owner/small"),
        ("owner/small", ""),
        ("./owner/small", ""),
        ("models/llama/8b", ""),
        ("https://huggingface.co/owner", ""),
    ],
)
def test_an_address_is_of_a_repository(path: str, name: str) -> None:
    assert meant(path) == name


def test_a_folder_of_that_name_is_meant_first() -> None:
    assert repo_refs(recipe(), {}) == ()
    assert repo_refs(recipe(), {"model.path": ("owner/small",)}) == (MODEL,)
    own = recipe(program={"kind": "torch", "script": "train.py"})
    assert repo_refs(own, {"model.path": ("owner/small",)}) == ()  # the program reads what it reads


def test_a_tokenizer_of_the_models_repository_is_of_the_same_revision() -> None:
    absent = {"model.path": ("owner/small",), "data.tokenizer": ("owner/small", "other/words")}
    model = {"kind": "hf", "path": "owner/small", "revision": "v2"}
    rows = {"kind": "dataset", "path": "rows.jsonl"}
    same = repo_refs(recipe(model=model, data={**rows, "tokenizer": "owner/small"}), absent)
    assert [(each.key, each.revision) for each in same] == [("model.path", "v2"), ("data.tokenizer", "v2")]
    other = repo_refs(recipe(model=model, data={**rows, "tokenizer": "other/words"}), absent)
    assert other[1].revision == "main"
    told = {**rows, "tokenizer": "owner/small", "tokenizer_revision": "v3"}
    assert repo_refs(recipe(model=model, data=told), absent)[1].revision == "v3"


def test_each_source_of_a_mixture_may_be_named() -> None:
    sources = [
        {"path": "owner/a", "revision": "v1", "subset": "en", "split": "test"},
        {"path": ["folder", "owner/b"]},  # several: a revision would be of which?
        {"path": ["owner/c"]},
        {"path": "owner/d", "weight": 0, "revision": "v1"},  # left out
    ]
    mixed = recipe(data={"kind": "dataset", "streaming": True, "mix": sources, "validation_split": "dev"})
    found = repo_refs(mixed, {"data.mix": ("owner/a", "owner/b", "owner/c", "owner/d")})
    assert [(each.key, each.name, each.revision) for each in found] == [
        ("data.mix.0.path", "owner/a", "v1"),
        ("data.mix.2.path", "owner/c", "main"),
    ]
    assert found[0].rows == RowSelection("en", "test", "dev")
    with_commits = pinned(mixed, [replace(each, commit=A) for each in found]).model_dump()["data"]["mix"]
    assert [each["revision"] for each in with_commits] == [A, None, A, "v1"]
    assert not list(revision_without_name(mixed, found))
    folders = located(mixed, [(each.key, each.kind, each.name, B) for each in found], ROOT)
    assert folders.model_dump()["data"]["mix"][0]["path"] == f"{ROOT}/datasets--owner--a/snapshots/{B}"


def test_a_revision_of_a_folder_is_noticed() -> None:
    model = {"kind": "hf", "path": "folder", "revision": "v2"}
    assert list(revision_without_name(recipe(model=model), ())) == [("model.revision", "folder")]
    known = repo_refs(recipe(model={**model, "path": "owner/small"}), {"model.path": ("owner/small",)})
    assert list(revision_without_name(recipe(model={**model, "path": "owner/small"}), known)) == []


def test_a_pinned_recipe_names_the_commit() -> None:
    assert pinned(recipe(), [replace(MODEL, commit=A)]).model_dump()["model"]["revision"] == A
    assert pinned(recipe(), [MODEL]) == recipe()  # nobody knows it


def test_of_the_formats_of_a_model_the_safe_one_is_fetched() -> None:
    every = ["config.json", "model.safetensors", "pytorch_model.bin", "tf_model.h5", "onnx/model.onnx", "README.md"]
    assert needed_files(MODEL, every) == ("config.json", "model.safetensors")
    assert needed_files(MODEL, every[:1] + every[2:]) == ("config.json", "pytorch_model.bin")
    sharded = ["config.json", "model.safetensors.index.json", *SHARDS, "original/model-00001-of-00002.safetensors"]
    assert index_file(MODEL, sharded) == sharded[1]
    assert needed_files(MODEL, sharded, INDEX) == tuple(sharded[:-1])
    assert needed_files(MODEL, [*sharded, "model.safetensors"], INDEX) == ("config.json", "model.safetensors")
    assert needed_files(TOKENIZER, ["tokenizer.json", "model.safetensors", "vocab.txt"]) == (
        "tokenizer.json",
        "vocab.txt",
    )
    assert needed_files(ADAPTERS, ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"])[1:] == (
        "adapter_model.safetensors",
    )


@pytest.mark.parametrize(
    ("named", "names", "told"),
    [
        (MODEL, [], "no weights"),
        (MODEL, ["config.json", "model.gguf"], "no weights"),
        (MODEL, ["model.safetensors"], "lacks config.json"),
        (MODEL, ["config.json", *SHARDS], "no weights"),  # nothing says what is in them
        (MODEL, ["config.json", "model.safetensors.index.json", SHARDS[0]], f"lacks {SHARDS[1]}"),
        (MODEL, ["config.json", "model.safetensors.index.json", *SHARDS], ""),
        (TOKENIZER, ["config.json"], "no tokenizer"),
        (ADAPTERS, ["adapter_config.json", "adapter_model.bin"], "no adapters"),  # a pickle
        (ADAPTERS, ["adapter_model.safetensors"], "lacks adapter_config.json"),
    ],
)
def test_what_a_repository_lacks_is_named(named: RepoRef, names: list[str], told: str) -> None:
    assert told in missing_files(named, names, INDEX)
    assert told or not missing_files(named, names, INDEX)


def test_an_index_that_names_nothing_is_no_guide() -> None:
    for index in ("", "{}", "[1]", '{"weight_map": 3}', '{"weight_map": {}}'):
        assert "names no files" in missing_files(MODEL, ["config.json", "model.safetensors.index.json", *SHARDS], index)


def test_where_the_cache_is() -> None:
    assert cache_root({}, "/home/me") == "/home/me/.cache/huggingface/hub"
    assert cache_root({"XDG_CACHE_HOME": "/xdg"}, "/home/me") == "/xdg/huggingface/hub"
    assert cache_root({"HF_HOME": "/big", "XDG_CACHE_HOME": "/xdg"}, "/home/me") == "/big/hub"
    assert cache_root({"HF_HUB_CACHE": "~/hub", "HF_HOME": "/big"}, "/home/me") == "/home/me/hub"
    scratch = {"HF_HOME": "$SCRATCH/${USER}/hf$UNKNOWN", "SCRATCH": "/scratch", "USER": "me"}
    assert cache_root(scratch, "/home/me") == "/scratch/me/hf$UNKNOWN/hub"


def found(ref: RepoRef, disk: Mapping[str, str]) -> CachedRepo:
    repo = cached_repo(ref, ROOT, Texts(disk))
    assert repo is not None
    return repo


def test_what_was_never_asked_for_is_not_known() -> None:
    assert cached_repo(MODEL, ROOT, Texts({})) is None
    assert cached_repo(MODEL, ROOT, Texts({f"{STORAGE}/refs/main": "no commit"})) is None


def test_a_listing_says_what_is_missing() -> None:
    disk = {
        f"{STORAGE}/refs/main": A,
        f"{STORAGE}/trees/{A}.json": listing(**{"config.json": 3, "model.safetensors": 70, "tf_model.h5": 90}),
        f"{SNAPSHOT}/config.json": "{}",
    }
    part = found(MODEL, disk)
    assert (part.ref.commit, part.folder, part.missing) == (A, SNAPSHOT, ("model.safetensors",))
    assert (part.sizes, part.missing_bytes) == ({"config.json": 3, "model.safetensors": 70}, 70)
    assert found(MODEL, {**disk, f"{SNAPSHOT}/model.safetensors": "x"}).whole


def test_the_readme_of_a_data_set_says_what_is_missing() -> None:
    rows = RepoRef("data.path", "dataset", "owner/rows", A)
    storage = f"{ROOT}/datasets--owner--rows"
    disk = {f"{storage}/trees/{A}.json": listing(**{"README.md": 3, "a.parquet": 70, "b.parquet": 90})}
    assert found(rows, disk).missing == ("README.md",)
    readme = "---\nconfigs:\n- data_files: b.parquet\n---\n"
    assert found(rows, {**disk, f"{storage}/snapshots/{A}/README.md": readme}).missing == ("b.parquet",)


def test_a_commit_needs_no_branch() -> None:
    disk = {f"{STORAGE}/snapshots/{B}/config.json": "{}", f"{STORAGE}/snapshots/{B}/model.safetensors": "x"}
    assert found(replace(MODEL, revision=B), disk).whole


@pytest.mark.parametrize("listed", ["", "[1]", "{", '{"files": {"config.json": {}}}'])
def test_without_a_sound_listing_the_index_says_which_shards_there_are(listed: str) -> None:
    disk = {
        f"{STORAGE}/refs/main": f"{A}\n",
        f"{STORAGE}/trees/{A}.json": listed,
        f"{SNAPSHOT}/config.json": "{}",
        f"{SNAPSHOT}/model.safetensors.index.json": INDEX,
        f"{SNAPSHOT}/{SHARDS[0]}": "x",
    }
    assert found(MODEL, disk).missing == (SHARDS[1],)
    unknown = found(MODEL, {f"{STORAGE}/refs/main": A, f"{SNAPSHOT}/config.json": "{}"})
    assert (unknown.sizes, unknown.whole) == (None, False)


def test_what_transformers_has_fetched_one_by_one_tells_where_it_is_all() -> None:
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    disk = {f"{SNAPSHOT}/{name}": "x" for name in names}
    disk |= {f"{STORAGE}/.no_exist/{A}/{name}": "" for name in ("special_tokens_map.json", "added_tokens.json")}
    here = replace(TOKENIZER, name="owner/small", commit=A)
    assert found(here, disk).whole
    for missing in disk:  # it is unknown whether the commit has it
        assert found(here, {name: text for name, text in disk.items() if name != missing}).sizes is None
    adapters = {f"{SNAPSHOT}/adapter_config.json": "{}", f"{SNAPSHOT}/adapter_model.safetensors": "x"}
    here = replace(ADAPTERS, name="owner/small", commit=A)
    assert found(here, adapters).whole
    assert not found(here, {f"{SNAPSHOT}/adapter_config.json": "{}"}).whole


def test_the_trainer_gets_folders() -> None:
    folders = located(recipe(), [("model.path", "model", "owner/small", A)], ROOT)
    assert folders.model_dump()["model"]["path"] == SNAPSHOT
    assert located(recipe(), [], ROOT) == recipe()
    assert shown(SNAPSHOT) == "owner/small on the Hub"
    assert shown("/models/small") == "/models/small"
