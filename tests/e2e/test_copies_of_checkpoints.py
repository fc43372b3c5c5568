"""Runs that copy their checkpoints to a bucket: killed in the middle, resumed on a machine that has nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from supervised_run import wait_for

from tests.bucket_server import SECRET, BucketServer

pytestmark = pytest.mark.needs("s3fs", "moto")
Trainkit = Callable[..., subprocess.CompletedProcess[str]]
ADDRESS = "s3://bucket/some/path"
COPIES = (f"checkpoint.copy_to={ADDRESS}", "checkpoint.every_steps=2", "checkpoint.resume=auto")


def steps_in(bucket: BucketServer) -> list[str]:
    """The whole checkpoints there, by run and step."""
    return [name.split("/")[-2] for name in bucket.names() if name.endswith("/manifest.json")]


def processes_with(mark: str) -> list[psutil.Process]:
    """Whatever has a word in its environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("MARK_OF_TEST") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_a_fresh_machine_goes_on_and_exports_and_no_file_has_a_secret(
    tmp_path: Path, trainkit: Trainkit, tiny_recipe: Path, bucket: BucketServer
) -> None:
    done = trainkit("run", str(tiny_recipe), *COPIES, "train.steps=6", "checkpoint.keep=1", environ=bucket.environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert steps_in(bucket) == ["step-00000006"]
    home = tmp_path / "other home"
    home.mkdir()
    fresh = ("output.root=fresh", "train.steps=8")
    environ = {**bucket.environment, "HOME": str(home)}
    planned = trainkit("plan", str(tiny_recipe), *COPIES, *fresh, "--json", environ=environ)
    resume = json.loads(planned.stdout)["resume"]
    assert resume["step"] == 6
    assert f"fetched from {ADDRESS}/tiny/" in resume["reason"]
    again = trainkit("run", str(tiny_recipe), *COPIES, *fresh, environ=environ)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "after step 6, saved by single on 1 rank" in again.stdout + again.stderr
    assert steps_in(bucket) == ["step-00000006", "step-00000008"], "of two runs"
    for word in (resume["path"], f"{ADDRESS}/{bucket_folder(bucket, 'step-00000008')}"):
        exported = trainkit("export", word, f"out/{Path(word).name}", environ=environ)
        assert exported.returncode == 0, exported.stderr
        assert (tmp_path / "out" / Path(word).name / "model.safetensors").exists()
    sent = trainkit("export", resume["path"], "s3://bucket/models/tiny", environ=environ)
    assert (sent.returncode, sent.stdout) == (0, "s3://bucket/models/tiny\n"), sent.stderr
    assert bucket.written()[-1] == "models/tiny/config.json"
    for folder in (tmp_path / "runs", tmp_path / "fresh", home):
        for path in folder.rglob("*"):
            assert not (path.is_file() and SECRET.encode() in path.read_bytes()), path
    assert not [name for name in bucket.names() if SECRET.encode() in bucket.content(name)]


def bucket_folder(bucket: BucketServer, step: str) -> str:
    (name,) = (name for name in bucket.names() if name.endswith(f"{step}/manifest.json"))
    return name.removeprefix("some/path/").removesuffix("/manifest.json")


@pytest.mark.parametrize("file", ["generators-0.json", r"state/__0_0\.distcp", "manifest.json"])
def test_a_run_that_is_killed_in_the_middle_of_a_copy_leaves_the_one_before_to_a_fresh_machine(
    file: str,
    tmp_path: Path,
    trainkit: Trainkit,
    tiny_recipe: Path,
    bucket: BucketServer,
    clean_environment: dict[str, str],
) -> None:
    bucket.lose(f"^PUT .*/step-00000004/{file}")
    environ = {**clean_environment, **bucket.environment, "MARK_OF_TEST": str(tmp_path)}
    words = [sys.executable, "-m", "trainkit", "run", str(tiny_recipe), *COPIES, "train.steps=4"]
    with (tmp_path / "log").open("wb") as log:
        run = subprocess.Popen(words, cwd=tmp_path, env=environ, stdout=log, stderr=log)
    try:
        wait_for("the copy of step 4", bucket.held.is_set)
        assert steps_in(bucket) == ["step-00000002"], (tmp_path / "log").read_text()
        for process in processes_with(str(tmp_path)):
            process.send_signal(signal.SIGKILL)
        assert run.wait(30) == -signal.SIGKILL
        wait_for("the end of every process", lambda: not processes_with(str(tmp_path)))
    finally:
        bucket.release()
        if run.poll() is None:
            os.kill(run.pid, signal.SIGKILL)
            run.wait()
    home = tmp_path / "other home"
    home.mkdir()
    fresh = (*COPIES, "output.root=fresh", "train.steps=4")
    done = trainkit("run", str(tiny_recipe), *fresh, environ={**bucket.environment, "HOME": str(home)})
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    assert "after step 2, saved by single on 1 rank" in told
    incomplete = [name for name in bucket.names() if "/step-00000004/" in name]
    assert len({name.split("/")[3] for name in incomplete if name.endswith("manifest.json")}) == 1, "of the second run"
    skipped = "step-00000004 is damaged and skipped: it has no manifest.json"
    assert (skipped in " ".join(told.split())) == (file != "generators-0.json"), told


def test_a_copy_that_fails_is_a_warning_meanwhile_and_an_error_at_the_end(
    trainkit: Trainkit, tiny_recipe: Path, bucket: BucketServer
) -> None:
    bucket.refuse("^PUT .*/checkpoints/")
    done = trainkit("run", str(tiny_recipe), *COPIES, "train.steps=4", environ=bucket.environment)
    told = done.stdout + done.stderr
    assert done.returncode == 1, told
    assert "warning: step-00000002 is not uploaded to s3://bucket/some/path" in told or "step-00000004" in told
    assert "the training is over, and step-00000004 could not be uploaded to s3://bucket/some/path" in told
    assert SECRET not in told
    (remedy,) = {
        line.partition("later: ")[2].rstrip(") ") for line in told.splitlines() if "upload them later: " in line
    }
    bucket.release()
    words = remedy.partition("  ")[0].split()
    assert subprocess.run(words, env={**os.environ, **bucket.environment}, check=False).returncode == 0
    assert steps_in(bucket) == ["step-00000004"]


def test_a_run_that_is_stopped_does_not_wait_for_its_copy(
    tmp_path: Path, tiny_recipe: Path, bucket: BucketServer, clean_environment: dict[str, str]
) -> None:
    bucket.lose("^PUT .*/step-00000004/state/__0_0")
    environ = {**clean_environment, **bucket.environment}
    words = [sys.executable, "-m", "trainkit", "run", str(tiny_recipe), *COPIES, "train.steps=4"]
    with (tmp_path / "log").open("wb") as log:
        run = subprocess.Popen(words, cwd=tmp_path, env=environ, stdout=log, stderr=log)
    wait_for("the copy of step 4", bucket.held.is_set)
    wait_for("the wait for it", lambda: "waiting for the upload of" in (tmp_path / "log").read_text())
    run.send_signal(signal.SIGTERM)
    assert run.wait(60) == 128 + signal.SIGTERM
    told = (tmp_path / "log").read_text()
    assert "warning: not uploaded to s3://bucket/some/path, because the run ends early: step-00000004" in told
    assert steps_in(bucket) == ["step-00000002"]
