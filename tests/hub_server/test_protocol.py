"""The tests' own Hub answers the real huggingface_hub, datasets and transformers as huggingface.co would."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hub_server.server import READER, TOKEN, Hub
from tests.trainer.tiny_tokenizer import save_tokenizer
from trainkit.hub.lookup import HubClient, look_up
from trainkit.hub.names import RepoRef

pytestmark = pytest.mark.torch
hub_library = pytest.importorskip("huggingface_hub")

from huggingface_hub import HfApi, hf_hub_download, snapshot_download  # noqa: E402
from huggingface_hub.errors import (  # noqa: E402
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

WEIGHTS = bytes(range(256)) * 1000
FILES: dict[str, bytes | str] = {
    "config.json": '{"model_type": "gpt2"}',
    "model.safetensors": WEIGHTS,
    "deep/er/notes.txt": "hello",
}


@pytest.fixture(autouse=True)
def without_xet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_library.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(hub_library.constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)


def snapshot(hub: Hub, name: str, cache: Path, **more: object) -> Path:
    return Path(snapshot_download(name, endpoint=hub.url, cache_dir=cache, token=False, **more))


def test_a_snapshot_has_every_file_and_is_downloaded_once(hub: Hub, tmp_path: Path) -> None:
    hub.add("ada/tiny", FILES)
    for _ in range(2):
        folder = snapshot(hub, "ada/tiny", tmp_path)
        assert {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()} == set(FILES)
        assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert {name: hub.downloads("ada/tiny", name) for name in FILES} == dict.fromkeys(FILES, 1)
    assert hub.sent("ada/tiny", "model.safetensors") == len(WEIGHTS)


def test_a_name_without_an_owner_is_a_repository_too(hub: Hub, tmp_path: Path) -> None:
    hub.add("gpt2", FILES)
    assert (snapshot(hub, "gpt2", tmp_path) / "deep/er/notes.txt").read_text() == "hello"


def test_a_file_comes_from_the_branch_tag_or_commit_that_is_named(hub: Hub, tmp_path: Path) -> None:
    repository = hub.add("ada/tiny", FILES)
    first = repository.branches["main"].oid
    repository.tags["v1.0"] = repository.branches["refs/pr/1"] = repository.branches["main"]
    second = repository.change({"config.json": b"{}", "deep/er/notes.txt": None})

    def text(revision: str | None) -> str:
        options = {"endpoint": hub.url, "cache_dir": tmp_path, "revision": revision, "token": False}
        return Path(hf_hub_download("ada/tiny", "config.json", **options)).read_text()

    assert [text(revision) for revision in (None, "main", second)] == ["{}"] * 3
    assert [text(revision) for revision in ("v1.0", "refs/pr/1", first)] == [FILES["config.json"]] * 3
    with pytest.raises(RevisionNotFoundError):
        text("gone")
    with pytest.raises(EntryNotFoundError):
        hf_hub_download("ada/tiny", "deep/er/notes.txt", endpoint=hub.url, cache_dir=tmp_path, token=False)


def test_a_listing_tells_folders_sizes_and_what_is_in_lfs(hub: Hub) -> None:
    hub.add("ada/data", {**FILES, "train.parquet": b"PAR1"}, kind="dataset")
    api = HfApi(endpoint=hub.url, token=False)
    found = api.dataset_info("ada/data", files_metadata=True)
    sizes = {sibling.rfilename: sibling.size for sibling in found.siblings}
    assert sizes == {**{name: len(content) for name, content in FILES.items()}, "train.parquet": 4}
    top = {entry.path: type(entry).__name__ for entry in api.list_repo_tree("ada/data", repo_type="dataset")}
    assert top == dict.fromkeys(("config.json", "model.safetensors", "train.parquet"), "RepoFile") | {
        "deep": "RepoFolder"
    }
    below = [e.path for e in api.list_repo_tree("ada/data", "deep", repo_type="dataset", recursive=True)]
    assert below == ["deep/er", "deep/er/notes.txt"]
    (weights,) = api.get_paths_info("ada/data", "model.safetensors", repo_type="dataset")
    assert weights.lfs is not None
    assert weights.lfs.size == len(WEIGHTS)


@pytest.mark.parametrize(
    ("token", "error", "status"), [(False, RepositoryNotFoundError, 401), (TOKEN, RepositoryNotFoundError, 404)]
)
def test_a_name_that_is_not_there_is_refused(
    hub: Hub, token: str | bool, error: type[HfHubHTTPError], status: int
) -> None:
    with pytest.raises(error) as caught:
        HfApi(endpoint=hub.url, token=token).model_info("ada/none")
    assert caught.value.response.status_code == status


def test_a_gated_model_opens_to_the_right_token(hub: Hub, tmp_path: Path) -> None:
    hub.add("meta/llama", FILES, gated=True, readers=("rob",))

    def get(token: str | bool) -> bytes:
        options = {"endpoint": hub.url, "cache_dir": tmp_path, "token": token}
        return Path(hf_hub_download("meta/llama", "model.safetensors", **options)).read_bytes()

    for token, status in ((False, 401), (TOKEN, 403)):
        with pytest.raises(GatedRepoError) as caught:
            get(token)
        assert caught.value.response.status_code == status
    with pytest.raises(HfHubHTTPError, match="Invalid credentials"):
        get("hf_wrong")
    assert HfApi(endpoint=hub.url, token=False).model_info("meta/llama").gated == "manual"
    assert get(READER) == WEIGHTS  # the CDN refuses a request that brings a token
    assert {request.user for request in hub.contents("meta/llama", "model.safetensors")} == {None}


def test_a_private_repository_is_not_there_for_others(hub: Hub) -> None:
    hub.add("ada/secret", FILES, private=True)
    assert HfApi(endpoint=hub.url, token=TOKEN).model_info("ada/secret").private
    for token in (False, READER):
        with pytest.raises(RepositoryNotFoundError):
            HfApi(endpoint=hub.url, token=token).model_info("ada/secret")


def test_a_download_that_is_cut_goes_on_where_it_stopped(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_library.constants, "DOWNLOAD_CHUNK_SIZE", 50_000)  # of 10 MB, only whole ones are kept
    hub.add("ada/tiny", FILES)
    hub.fail("*/model.safetensors", cut_after=100_000)
    folder = snapshot(hub, "ada/tiny", tmp_path)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    first, second = hub.contents("ada/tiny", "model.safetensors")
    assert (first.status, first.sent, first.range) == (200, 100_000, None)
    assert (second.status, second.sent, second.range) == (206, len(WEIGHTS) - 100_000, "bytes=100000-")


def test_faults_come_as_often_as_they_were_asked_for(hub: Hub, tmp_path: Path) -> None:
    hub.add("ada/tiny", FILES)
    hub.fail("*/model.safetensors", corrupt=True)
    hub.fail("*/model.safetensors", bytes_per_second=2_000_000)
    options = {"endpoint": hub.url, "token": False}
    spoiled = Path(hf_hub_download("ada/tiny", "model.safetensors", cache_dir=tmp_path / "a", **options)).read_bytes()
    assert (len(spoiled), spoiled[1:]) == (len(WEIGHTS), WEIGHTS[1:])  # the library compares no checksum
    assert spoiled != WEIGHTS
    whole = hf_hub_download("ada/tiny", "model.safetensors", cache_dir=tmp_path / "b", **options)
    assert Path(whole).read_bytes() == WEIGHTS
    hub.fail("/api/models/*", status=503, times=2)
    hub.fail("/api/models/*", status=429, times=None)
    for status in (503, 503, 429, 429):
        with pytest.raises(HfHubHTTPError, match=str(status)):
            HfApi(**options).model_info("ada/tiny")
    hub.faults.clear()
    assert HfApi(**options).model_info("ada/tiny").id == "ada/tiny"


def test_a_hub_that_is_closed_refuses_connections(hub: Hub, tmp_path: Path) -> None:
    hub.add("ada/tiny", FILES)
    hub.close()
    with pytest.raises(LocalEntryNotFoundError):
        snapshot(hub, "ada/tiny", tmp_path)


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub 2.4's own, of httpx
def test_a_folder_is_uploaded_into_a_repository_of_its_own(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "deep").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    (folder / "README.md").write_text("---\nlibrary_name: transformers\n---\n# Tiny\n")
    (folder / "deep" / "empty.bin").touch()
    api = HfApi(endpoint=hub.url, token=TOKEN)
    assert api.whoami()["name"] == "ada"
    api.create_repo("ada/new", private=True)
    first = api.upload_folder(repo_id="ada/new", folder_path=folder, commit_message="step 10")
    assert hub.repository("ada/new").private
    files = hub.repository("ada/new").files(first.oid)
    assert files == {
        ".gitattributes": b"",
        "README.md": (folder / "README.md").read_bytes(),
        "deep/empty.bin": b"",
        "model.safetensors": WEIGHTS,
    }
    (folder / "README.md").write_text("---\nlibrary_name: transformers\n---\n# Tiny, twice\n")
    second = api.upload_folder(repo_id="ada/new", folder_path=folder, delete_patterns="deep/*")
    assert "deep/empty.bin" in hub.repository("ada/new").files(second.oid)
    assert len([request for request in hub.requests if request.method == "PUT"]) == 1, "what is there stays"
    assert [commit.title for commit in api.list_repo_commits("ada/new")][1:] == ["step 10", "first commit"]
    second = api.delete_file("deep/empty.bin", "ada/new")
    assert "deep/empty.bin" not in hub.repository("ada/new").files(second.oid)
    api.create_tag("ada/new", tag="v1")
    api.create_branch("ada/new", branch="next", revision=first.oid)
    named = api.list_repo_refs("ada/new")
    assert {ref.name: ref.target_commit for ref in (*named.branches, *named.tags)} == {
        "main": second.oid,
        "next": first.oid,
        "v1": second.oid,
    }


def test_uploads_that_may_not_be_are_refused(hub: Hub) -> None:
    hub.add("rob/his", FILES)
    hub.add("ada/mine", FILES)

    def write(token: str, name: str, **more: object) -> None:
        api = HfApi(endpoint=hub.url, token=token)
        api.upload_file(path_or_fileobj=io.BytesIO(b"x" * 9), path_in_repo="a.txt", repo_id=name, **more)

    for token, name in ((READER, "rob/his"), (TOKEN, "rob/his")):
        with pytest.raises(HfHubHTTPError) as caught:
            write(token, name)
        assert caught.value.response.status_code == 403
    with pytest.raises(HfHubHTTPError, match="412"):
        write(TOKEN, "ada/mine", parent_commit="0" * 40)
    with pytest.raises(HfHubHTTPError, match="409"):
        HfApi(endpoint=hub.url, token=TOKEN).create_repo("ada/mine")
    with pytest.raises(HfHubHTTPError, match="403"):
        HfApi(endpoint=hub.url, token=TOKEN).create_repo("rob/new")
    with pytest.raises(ValueError, match="Invalid metadata"):
        HfApi(endpoint=hub.url, token=TOKEN).upload_file(
            path_or_fileobj=b"---\na: [\n---\n", path_in_repo="README.md", repo_id="ada/mine"
        )
    assert set(hub.repository("ada/mine").files()) == set(FILES)


LIBRARIES = """
import datasets, transformers
found = datasets.load_dataset("ada/data", split="train")
assert found["text"] == ["one", "two", "three"], found["text"]
streamed = datasets.load_dataset("ada/data", split="train", streaming=True)
assert [row["text"] for row in streamed] == ["one", "two", "three"]
assert transformers.AutoConfig.from_pretrained("ada/tiny", revision="v1").model_type == "gpt2"
transformers.AutoTokenizer.from_pretrained("ada/words")
"""


def test_datasets_and_transformers_load_by_name(hub: Hub, tmp_path: Path, clean_environment: dict[str, str]) -> None:
    pytest.importorskip("datasets"), pytest.importorskip("transformers")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = io.BytesIO()
    parquet.write_table(parquet.core.pa.table({"text": ["one", "two", "three"]}), table)
    hub.add("ada/data", {"data/train-00000-of-00001.parquet": table.getvalue()}, kind="dataset")
    repository = hub.add("ada/tiny", FILES)
    repository.tags["v1"] = repository.branches["main"]
    save_tokenizer(tmp_path / "words")
    hub.add("ada/words", tmp_path / "words")
    environment = {**clean_environment, **hub.environment}
    call = [sys.executable, "-c", LIBRARIES]
    done = subprocess.run(call, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert (hub.home / "hub" / "models--ada--tiny").is_dir(), "the cache is the test's own"
    online = HubClient.of(environment)
    offline = HubClient.of({**environment, "HF_HUB_OFFLINE": "1"})
    words, data = RepoRef("data.tokenizer", "model", "ada/words"), RepoRef("data.path", "dataset", "ada/data")
    assert look_up(words, offline).whole, "what transformers has fetched tells that it is all"
    assert not look_up(data, offline).whole
    assert look_up(data, online).whole
    asked = len(hub.requests)
    assert look_up(data, offline) == look_up(data, online)
    assert len(hub.requests) == asked, "the cache knows it now"
