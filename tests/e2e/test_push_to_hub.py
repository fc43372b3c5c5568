"""Weights and checkpoints on the Hub: uploaded beside the training, waited for at its end, said plainly where not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file

from tests.hub_server.server import READER, TOKEN, Hub
from trainkit.trainer.checkpoint.export import export

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
    assert files["README.md"].decode() != CARD.format("3 steps"), "the card of the first upload stays"
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
    done = trainkit("run", str(tiny_recipe), "checkpoint.every_steps=1", "checkpoint.keep=1", push, environ=logged_in)
    assert done.returncode == 0, done.stdout + done.stderr
    kept = {name.split("/")[1] for name in hub.repository("ada/tiny").files() if name.startswith("checkpoints/")}
    assert kept == {"step-00000001", "step-00000002", "step-00000003"}
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
