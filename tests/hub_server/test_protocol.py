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
from trainkit.hub.references import RepoRef

pytestmark = pytest.mark.torch
hub_library = pytest.importorskip("huggingface_hub")

from huggingface_hub import HfApi, hf_hub_download, snapshot_download  # noqa: E402
from huggingface_hub.errors import (  # noqa: E402
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
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


@pytest.mark.parametrize("name", ["ada/tiny", "gpt2"])
def test_a_snapshot_has_every_file_and_is_downloaded_once(hub: Hub, tmp_path: Path, name: str) -> None:
    hub.add(name, FILES)
    for _ in range(2):
        folder = Path(snapshot_download(name, endpoint=hub.url, cache_dir=tmp_path, token=False))
        assert {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()} == set(FILES)
        assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert {file: hub.downloads(name, file) for file in FILES} == dict.fromkeys(FILES, 1)
    assert hub.sent(name, "model.safetensors") == len(WEIGHTS)


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


@pytest.mark.parametrize(("token", "status"), [(False, 401), (READER, 404)])
@pytest.mark.parametrize("name", ["ada/none", "ada/secret"])
def test_a_name_that_does_not_exist_is_refused_as_one_that_is_private(
    hub: Hub, name: str, token: str | bool, status: int
) -> None:
    hub.add("ada/secret", FILES, private=True)
    assert HfApi(endpoint=hub.url, token=TOKEN).model_info("ada/secret").private
    with pytest.raises(RepositoryNotFoundError) as caught:
        HfApi(endpoint=hub.url, token=token).model_info(name)
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


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub 2.4's own, of httpx
def test_a_folder_is_uploaded_into_a_repository_of_its_own(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "deep").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    (folder / "README.md").write_text("---\nlibrary_name: transformers\n---\n# Tiny\n")
    (folder / "deep" / "empty.bin").touch()
    api = HfApi(endpoint=hub.url, token=TOKEN)
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
    (folder / "deep" / "empty.bin").unlink()
    second = api.upload_folder(repo_id="ada/new", folder_path=folder, delete_patterns="deep/*")
    assert hub.repository("ada/new").files(second.oid).keys() == files.keys() - {"deep/empty.bin"}
    assert len([request for request in hub.requests if request.method == "PUT"]) == 1, "what is there stays"


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
