"""Checkpoints in a bucket: copied with the manifest last, listed, and fetched whole or not at all."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.bucket_server import BucketServer
from trainkit.errors import MachineError, UsageError
from trainkit.runner.rundir import elsewhere
from trainkit.runner.rundir.elsewhere import (
    copied_checkpoints,
    copy_checkpoint,
    copy_export,
    fetch_checkpoint,
    fetch_named,
    make_ready,
)
from trainkit.runner.rundir.layout import MANIFEST
from trainkit.runner.rundir.listing import checksum

pytestmark = [pytest.mark.cli, pytest.mark.needs("s3fs", "moto")]
RUN = "20260101-000000-aaaaaa"


@pytest.fixture
def on_disk(tmp_path: Path) -> str:
    return str(tmp_path / "disk")


@pytest.fixture
def in_bucket(bucket: BucketServer, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    return "s3://bucket/some/where"


def saved(root: Path, step: int, *, digest: str = "d", size: int = 1000, run: str = RUN) -> Path:
    """A complete checkpoint of a run `tiny`, with three files."""
    folder = root / "tiny" / run / "checkpoints" / f"step-{step:08d}"
    (folder / "state").mkdir(parents=True)
    contents = {"generators-0.json": b"{}", "state/.metadata": b"", "state/a.distcp": bytes([step % 256]) * size}
    files = {}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
        files[name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest: dict[str, Any] = {"step": step, "training_digest": digest, "strategy": "single", "world_size": 1}
    manifest |= {"files": files}
    (folder / MANIFEST).write_text(json.dumps({**manifest, "checksum": checksum(manifest)}))
    for name in elsewhere.RUN_FILES:
        folder.parents[1].joinpath(name).write_text(f"{name} of {run}\n")
    return folder


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


@pytest.mark.parametrize("where", ["in_bucket", "on_disk"])
def test_what_is_fetched_on_another_machine_is_what_was_copied(
    where: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    address: str = request.getfixturevalue(where)
    checkpoint = saved(tmp_path / "runs", 4)
    assert copy_checkpoint(checkpoint, address) == f"{address}/tiny/{RUN}/checkpoints/step-00000004"
    (found,) = copied_checkpoints(address, "tiny", str(tmp_path / "other"))
    assert (found.step, found.training_digest, found.run, found.damage) == (4, "d", RUN, "")
    assert found.source == f"{address}/tiny/{RUN}/checkpoints/step-00000004"
    there = Path(found.path)
    assert there == tmp_path / f"other/tiny/{RUN}/checkpoints/step-00000004"
    assert fetch_checkpoint(there, address)
    assert files_below(there) == files_below(checkpoint)
    for name in elsewhere.RUN_FILES:
        assert (there.parents[1] / name).read_text() == f"{name} of {RUN}\n"
    assert not fetch_checkpoint(there, address), "it is there"
    assert copied_checkpoints(address, "another", str(tmp_path / "other")) == []


def test_the_manifest_is_written_last_and_a_second_copy_writes_nothing(
    in_bucket: str, bucket: BucketServer, tmp_path: Path
) -> None:
    checkpoint = saved(tmp_path / "runs", 4)
    copy_checkpoint(checkpoint, in_bucket)
    names = [key.partition("/checkpoints/")[2] for key in bucket.written() if "/checkpoints/" in key]
    assert names[-1] == "step-00000004/manifest.json"
    assert sorted(names) == sorted(f"step-00000004/{name}" for name in files_below(checkpoint))
    count = len(bucket.written())
    copy_checkpoint(checkpoint, in_bucket)
    assert len(bucket.written()) == count


def test_another_checkpoint_of_the_name_loses_its_manifest_first(
    in_bucket: str, bucket: BucketServer, tmp_path: Path
) -> None:
    copy_checkpoint(saved(tmp_path / "runs", 4, size=10), in_bucket)
    shutil.rmtree(tmp_path / "runs")
    begin = len(bucket.requests)
    copy_checkpoint(saved(tmp_path / "runs", 4, size=20), in_bucket)
    changes = [each for each in bucket.requests[begin:] if each.method in ("DELETE", "PUT", "POST")]
    inside = [each for each in changes if "/checkpoints/" in each.path or each.method == "POST"]
    assert (inside[0].method, inside[0].path.rpartition("/")[2]) == ("DELETE", MANIFEST)
    (found,) = copied_checkpoints(in_bucket, "tiny", str(tmp_path))
    assert not found.damage


def test_as_many_of_a_run_stay_there_as_are_kept_with_the_best_one(on_disk: str, tmp_path: Path) -> None:
    other = saved(tmp_path / "runs", 1, run="20250101-000000-bbbbbb")
    copy_checkpoint(other, on_disk, 1)
    for step in (2, 4, 6, 8):
        copy_checkpoint(saved(tmp_path / "runs", step), on_disk, 2, 2)
    steps = [(found.run, found.step) for found in copied_checkpoints(on_disk, "tiny", str(tmp_path))]
    assert steps == [(RUN, 8), (RUN, 6), (RUN, 2), ("20250101-000000-bbbbbb", 1)]
    copy_checkpoint(saved(tmp_path / "runs", 10), on_disk, 0)
    assert len(copied_checkpoints(on_disk, "tiny", str(tmp_path))) == 5, "0 keeps all"


def test_one_that_is_removed_loses_its_manifest_first(in_bucket: str, bucket: BucketServer, tmp_path: Path) -> None:
    copy_checkpoint(saved(tmp_path / "runs", 2), in_bucket, 1)
    begin = len(bucket.requests)
    copy_checkpoint(saved(tmp_path / "runs", 4), in_bucket, 1)
    removed = [each for each in bucket.requests[begin:] if each.method == "DELETE" and "step-00000002" in each.path]
    assert [each.path.rpartition("/")[2] for each in removed][:1] == [MANIFEST]
    assert not [key for key in bucket.names() if "step-00000002" in key]


def test_an_incomplete_one_is_known_as_such(on_disk: str, tmp_path: Path) -> None:
    folder = elsewhere.open_folder
    for step in (2, 4, 6):
        copy_checkpoint(saved(tmp_path / "runs", step), on_disk)
    there = folder(on_disk)
    there.system.rm_file(f"{there.path}/tiny/{RUN}/checkpoints/step-00000004/{MANIFEST}")
    there.system.rm_file(f"{there.path}/tiny/{RUN}/checkpoints/step-00000006/state/a.distcp")
    damage = {found.step: found.damage for found in copied_checkpoints(on_disk, "tiny", str(tmp_path / "other"))}
    assert damage == {6: "state/a.distcp is missing", 4: f"it has no {MANIFEST}", 2: ""}


def test_a_fetch_that_was_killed_goes_on_where_it_was(
    in_bucket: str, bucket: BucketServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elsewhere, "PART", 400)
    checkpoint = saved(tmp_path / "runs", 4)
    copy_checkpoint(checkpoint, in_bucket)
    there = tmp_path / "other" / "tiny" / RUN / "checkpoints" / checkpoint.name
    scratch = there.with_name(f".fetched-{there.name}")
    (scratch / "state").mkdir(parents=True)
    shutil.copy(checkpoint / MANIFEST, scratch)
    (scratch / "state/a.distcp").write_bytes((checkpoint / "state/a.distcp").read_bytes()[:400])
    assert fetch_checkpoint(there, in_bucket)
    parts = [each.range for each in bucket.requests if each.method == "GET" and each.path.endswith("a.distcp")]
    assert parts == ["bytes=400-799", "bytes=800-999"]
    assert files_below(there) == files_below(checkpoint)
    assert not scratch.exists()


def test_what_another_fetch_has_left_of_the_name_is_not_taken(on_disk: str, tmp_path: Path) -> None:
    checkpoint = saved(tmp_path / "runs", 4)
    copy_checkpoint(checkpoint, on_disk)
    there = tmp_path / "other" / "tiny" / RUN / "checkpoints" / checkpoint.name
    scratch = there.with_name(f".fetched-{there.name}")
    scratch.mkdir(parents=True)
    (scratch / MANIFEST).write_text("{}")
    (scratch / "stray").write_text("of another")
    there.mkdir()  # and one that is damaged has its place
    assert fetch_checkpoint(there, on_disk)
    assert files_below(there) == files_below(checkpoint)


def test_a_file_that_is_not_what_the_manifest_says_is_not_fetched(on_disk: str, tmp_path: Path) -> None:
    checkpoint = saved(tmp_path / "runs", 4)
    copy_checkpoint(checkpoint, on_disk)
    there = elsewhere.open_folder(on_disk)
    there.system.pipe_file(f"{there.path}/tiny/{RUN}/checkpoints/step-00000004/state/a.distcp", bytes(1000))
    target = tmp_path / "other" / "tiny" / RUN / "checkpoints" / checkpoint.name
    with pytest.raises(MachineError, match=r"is damaged: state/a\.distcp does not match its manifest"):
        fetch_checkpoint(target, on_disk)
    assert not target.exists()


def test_a_manifest_that_names_files_elsewhere_is_refused(on_disk: str, tmp_path: Path) -> None:
    checkpoint = saved(tmp_path / "runs", 4)
    copy_checkpoint(checkpoint, on_disk)
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    manifest["files"]["../../../../escaped"] = {"size": 0, "sha256": hashlib.sha256().hexdigest()}
    there = elsewhere.open_folder(on_disk)
    there.system.pipe_file(
        f"{there.path}/tiny/{RUN}/checkpoints/step-00000004/{MANIFEST}", json.dumps(manifest).encode()
    )
    with pytest.raises(MachineError, match="is not a checkpoint of trainkit's: it names"):
        fetch_checkpoint(tmp_path / "other" / "tiny" / RUN / "checkpoints" / checkpoint.name, on_disk)
    assert not list(tmp_path.rglob("escaped"))


def test_what_keeps_it_from_being_written_is_one_error_before_a_run(
    in_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = saved(tmp_path / "runs", 4).parents[1]
    with pytest.raises(MachineError, match=r"uploaded to s3://absent/path: The specified bucket does not exist"):
        make_ready("s3://absent/path", run, None)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(MachineError, match=r"uploaded to s3://bucket/some/where: Unable to locate credentials") as told:
        make_ready(in_bucket, run, None)
    assert "AWS_SECRET_ACCESS_KEY" in str(told.value.hints)


def test_an_exports_config_comes_last(in_bucket: str, bucket: BucketServer, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "a.json"):
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / name).write_text(name)
    copy_export(tmp_path / "model", "s3://bucket/models/one")
    assert bucket.written()[-1] == "models/one/config.json"
    assert bucket.content("models/one/model.safetensors") == b"model.safetensors"


def test_a_checkpoint_is_named_by_its_address(on_disk: str, tmp_path: Path) -> None:
    checkpoint = saved(tmp_path / "runs", 4)
    found = fetch_named(copy_checkpoint(checkpoint, on_disk), tmp_path / "other")
    assert files_below(found) == files_below(checkpoint)
    with pytest.raises(UsageError, match="is not a checkpoint"):
        fetch_named(f"{on_disk}/tiny", tmp_path / "other")
