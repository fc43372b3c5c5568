"""Weights and checkpoints on the Hub: uploaded beside the training, waited for at its end, said plainly where not."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file
from strategy_runs import CASES, write_settings
from supervised_run import wait_for

from tests.hub_server.server import READER, TOKEN, Hub
from trainkit.trainer.checkpoint.export import export
from trainkit.trainer.checkpoint.pushing import Pushes
from trainkit.trainer.settings import read_settings

Trainkit = Callable[..., subprocess.CompletedProcess[str]]
COMMIT = "/api/models/*/commit/*"
CARD = "---\ntags:\n- trainkit\n---\n\n# tiny\n\nTrained with trainkit (gpt): {}.\n"


@pytest.fixture
def logged_in(hub: Hub) -> dict[str, str]:
    return {**hub.environment, "HF_TOKEN": TOKEN}


def titles(hub: Hub, repo: str) -> list[str]:
    return [commit.message for commit in reversed(list(hub.repository(repo).branches["main"].history()))]


def run_of(folder: Path) -> Path:
    (run,) = (folder / "runs/tiny").iterdir()
    return run


def texts_below(folder: Path) -> str:
    return "".join(path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())


def test_the_weights_that_a_run_ends_with_are_on_the_hub_when_it_has_ended(
    tmp_path: Path, trainkit: Trainkit, tiny_recipe: Path, hub: Hub, logged_in: dict[str, str]
) -> None:
    done = trainkit("run", str(tiny_recipe), "--hub_model_id=ada/tiny", "--hub_private_repo", environ=logged_in)
    assert done.returncode == 0, done.stdout + done.stderr
    assert hub.repository("ada/tiny").private
    assert titles(hub, "ada/tiny") == ["first commit", "tiny: step-00000003"]
    files = hub.repository("ada/tiny").files()
    assert set(files) == {".gitattributes", "README.md", "config.json", "model.safetensors"}
    assert files["README.md"].decode() == CARD.format("3 steps")
    export(run_of(tmp_path) / "checkpoints/step-00000003", tmp_path / "out")
    ours, theirs = load_file(tmp_path / "out/model.safetensors"), load(files["model.safetensors"])
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert not (run_of(tmp_path) / "pushes").exists()
    assert TOKEN not in done.stdout + done.stderr + texts_below(run_of(tmp_path))


def test_two_ranks_upload_each_save_with_a_checkpoint_to_resume_from(
    tmp_path: Path, trainkit: Trainkit, tiny_recipe: Path, hub: Hub, logged_in: dict[str, str]
) -> None:
    ddp = ("strategy.kind=ddp", "nodes.processes_per_node=2", "batch.micro=1")
    saving = ("checkpoint.every_steps=1", "checkpoint.keep=1", "checkpoint.push_to_hub.repo=ada/tiny")
    hub.fail(COMMIT, status=503)  # of the first: tried again
    done = trainkit("run", str(tiny_recipe), *ddp, *saving, "--hub_strategy=checkpoint", environ=logged_in)
    assert done.returncode == 0, done.stdout + done.stderr
    files = hub.repository("ada/tiny").files()
    assert load(files["model.safetensors"])
    last = {name: content for name, content in files.items() if name.startswith("last-checkpoint/")}
    assert {Path(name).parts[1] for name in last} == {"step-00000003"}, "only the newest is kept"
    assert titles(hub, "ada/tiny")[-1] == "tiny: step-00000003"
    assert files["README.md"].decode() == CARD.format("3 steps")
    for name, content in last.items():
        path = tmp_path / "fetched" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    checkpoint = tmp_path / "fetched/last-checkpoint/step-00000003"
    again = trainkit("run", str(tiny_recipe), *ddp, "train.steps=4", f"checkpoint.resume={checkpoint}")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "(step 3)" in again.stdout + again.stderr


def test_every_checkpoint_is_uploaded_where_all_are_asked_for(
    tmp_path: Path, trainkit: Trainkit, tiny_recipe: Path, hub: Hub, logged_in: dict[str, str]
) -> None:
    push = "checkpoint.push_to_hub={repo: ada/tiny, strategy: all}"
    hub.fail(COMMIT, status=403)  # of the first, which is tried again at the end
    done = trainkit("run", str(tiny_recipe), "checkpoint.every_steps=1", "checkpoint.keep=1", push, environ=logged_in)
    assert done.returncode == 0, done.stdout + done.stderr
    kept = {name.split("/")[1] for name in hub.repository("ada/tiny").files() if name.startswith("checkpoints/")}
    assert kept == {"step-00000001", "step-00000002", "step-00000003"}
    assert titles(hub, "ada/tiny")[-1] == "tiny: step-00000001"
    assert hub.repository("ada/tiny").files()["README.md"].decode() == CARD.format("3 steps"), "newer weights stay"
    assert [path.name for path in (run_of(tmp_path) / "checkpoints").iterdir()] == ["step-00000003"]


def test_an_upload_that_fails_ends_the_run_with_an_error_and_leaves_the_weights(
    tmp_path: Path, trainkit: Trainkit, tiny_recipe: Path, hub: Hub, logged_in: dict[str, str]
) -> None:
    hub.fail(COMMIT, status=403, times=None)
    done = trainkit("run", str(tiny_recipe), "--hub_model_id=ada/tiny", environ=logged_in)
    told = done.stdout + done.stderr
    assert done.returncode == 1, told
    assert "the training is over, and step-00000003 could not be uploaded: nothing can be uploaded to ada/tiny" in told
    saved = run_of(tmp_path) / "checkpoints/step-00000003"
    remedy = f"trainkit export {saved} --push ada/tiny"
    assert remedy in told
    assert json.loads((run_of(tmp_path) / "result.json").read_text())["steps"] == 3
    hub.faults.clear()
    done = trainkit(*remedy.split()[1:], environ=logged_in)
    assert done.returncode == 0, done.stderr
    assert set(hub.repository("ada/tiny").files()) >= {"model.safetensors", "config.json", "README.md"}
    assert titles(hub, "ada/tiny")[-1] == f"step-00000003 of {run_of(tmp_path).parent.name}"


def test_a_run_that_is_stopped_while_it_waits_for_an_upload_ends_at_once_and_says_what_is_missing(
    tmp_path: Path, tiny_recipe: Path, hub: Hub, logged_in: dict[str, str], clean_environment: dict[str, str]
) -> None:
    hub.fail(COMMIT, hangs=True)
    call = [sys.executable, "-m", "trainkit", "run", str(tiny_recipe), "--hub_model_id=ada/tiny"]
    environ = {**clean_environment, **logged_in}
    run = subprocess.Popen(call, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for("the upload", lambda: any("/commit/" in request.path for request in hub.requests))
    run.send_signal(signal.SIGINT)
    told = run.communicate(timeout=30)[0]
    assert run.returncode == 128 + signal.SIGINT, told
    saved = run_of(tmp_path) / "checkpoints/step-00000003"
    assert f"step-00000003; later: trainkit export {saved} --push ada/tiny" in told
    assert "Traceback" not in told
    assert not (run_of(tmp_path) / "pushes").exists()
    assert set(hub.repository("ada/tiny").files()) == {".gitattributes"}


def test_what_an_attempt_before_has_not_uploaded_is_taken_over_where_all_are_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for strategy, restarts, left in (("all", 1, ["step-00000002"]), ("all", 0, []), ("every_save", 1, [])):
        run = tmp_path / f"{strategy}-{restarts}"
        case = CASES["single"].changed(
            checkpoint={"push_to_hub": {"repo": "ada/tiny", "strategy": strategy}}, launcher={"max_restarts": restarts}
        )
        settings = read_settings(write_settings(run, case, tmp_path))
        for name in ("pushes/step-00000002", "pushes/step-00000002.export", "checkpoints/step-00000002"):
            (run / name).mkdir(parents=True)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "trainkit.trainer"):
            Pushes(settings, "ada/tiny").abandon()
        assert ("step-00000002; later" in caplog.text) == (strategy == "all")
        assert [path.name for path in run.glob("pushes/*")] == left


def test_a_run_that_trains_nothing_says_that_nothing_is_uploaded(
    trainkit: Trainkit, tiny_recipe: Path, hub: Hub, logged_in: dict[str, str]
) -> None:
    done = trainkit("run", str(tiny_recipe), "--hub_model_id=ada/tiny", "train.steps=0", environ=logged_in)
    assert done.returncode == 0, done.stderr
    assert "warning: nothing is uploaded to ada/tiny: the run has trained nothing" in done.stderr + done.stdout


def test_without_a_token_no_rank_starts(tmp_path: Path, trainkit: Trainkit, tiny_recipe: Path, hub: Hub) -> None:
    done = trainkit("run", str(tiny_recipe), "--hub_model_id=ada/tiny", environ=hub.environment)
    told = done.stdout + done.stderr
    assert done.returncode == 4, told
    assert "nothing can be uploaded to ada/tiny: there is no token for the Hub" in told
    assert "hf auth login" in told
    assert not (run_of(tmp_path) / "metrics.jsonl").exists()
    done = trainkit("export", "--push", "ada/tiny", "--private", "tiny", environ=hub.environment)
    assert (done.returncode, hub.repositories) == (2, {}), "nothing is asked of the Hub before there is a checkpoint"


def pushed(repo: str, environ: Mapping[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, "-P", "-m", "trainkit.hub.push", repo, *words]
    return subprocess.run(call, env=environ, capture_output=True, text=True, timeout=60, check=False)


def test_what_keeps_an_upload_back_is_said_before_the_ranks_start(hub: Hub, clean_environment: dict[str, str]) -> None:
    hub.add("ada/public", {"a.txt": "a"})
    hub.add("rob/his", {"a.txt": "a"})
    environ = {**clean_environment, **hub.environment, "HF_TOKEN": TOKEN}
    cases = {
        "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set": pushed("ada/new", {**environ, "HF_HUB_OFFLINE": "1"}),
        "does not let this token write there": pushed("rob/his", environ),
        "it is there already and public": pushed("ada/public", environ, "--private", "yes"),
        "Invalid": pushed("ada/new", {**environ, "HF_TOKEN": "hf_" + "x" * 34}),
        "not let this token": pushed("ada/public", {**environ, "HF_TOKEN": READER}),
    }
    for told, done in cases.items():
        assert (done.returncode, done.stdout) == (4, ""), done.stderr
        assert done.stderr.startswith("error: "), done.stderr
        assert told.removeprefix("it ") in done.stderr, done.stderr
        assert done.stderr.count("\n") == 1
    assert pushed("rob/his", environ, "--node", "1").returncode == 0, "the first node alone uploads"


def test_a_model_card_that_somebody_has_changed_stays(
    tmp_path: Path, hub: Hub, clean_environment: dict[str, str]
) -> None:
    environ = {**clean_environment, **hub.environment, "HF_TOKEN": TOKEN}
    (tmp_path / "folder").mkdir()
    written = {"old": CARD.format("1 step"), "changed": CARD.format("1 step") + "Do not use it.\n"}
    for name, card in written.items():
        hub.add(f"ada/{name}", {"README.md": card})
        (tmp_path / "folder/README.md").write_text(CARD.format("2 steps"))
        done = pushed(f"ada/{name}", environ, "--folder", str(tmp_path / "folder"))
        assert done.returncode == 0, done.stderr
    assert hub.repository("ada/old").files()["README.md"].decode() == CARD.format("2 steps")
    assert hub.repository("ada/changed").files()["README.md"].decode() == written["changed"]


def test_an_upload_ends_with_the_rank_that_has_started_it(
    tmp_path: Path, hub: Hub, clean_environment: dict[str, str]
) -> None:
    """An old one that goes on beside the next attempt would put old weights over new ones."""
    environ = {**clean_environment, **hub.environment, "HF_TOKEN": TOKEN}
    hub.add("ada/tiny", {})
    (tmp_path / "a.txt").write_text("a")
    hub.fail(COMMIT, hangs=True)
    reading, writing = os.pipe()
    call = [sys.executable, "-P", "-m", "trainkit.hub.push", "ada/tiny", "--folder", str(tmp_path), "--tied"]
    with subprocess.Popen(call, env=environ, stdin=reading, stderr=subprocess.PIPE) as process:
        wait_for("the upload", lambda: any("/commit/" in request.path for request in hub.requests))
        assert process.poll() is None
        os.close(writing)
        assert process.wait(10) == 1
        assert process.stderr is not None
        assert process.stderr.read() == b""
    os.close(reading)
