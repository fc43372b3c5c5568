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
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file
from strategy_runs import CASES, finish, write_settings
from supervised_run import wait_for

from tests.hub_server.server import READER, TOKEN, Hub
from tests.trainer.tiny_tokenizer import save_tokenizer
from tests.warm_ranks import start_ranks
from trainkit.hub.push import signed
from trainkit.recipe.schema import Recipe
from trainkit.recipe.validate import with_kinds
from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.rundir.listing import clear_uploads
from trainkit.trainer.checkpoint.card import card
from trainkit.trainer.checkpoint.export import export
from trainkit.trainer.checkpoint.uploads import HubUploads
from trainkit.trainer.settings import read_settings

Trainkit = Callable[..., subprocess.CompletedProcess[str]]
COMMIT = "/api/models/*/commit/*"
TRAINED = "---\n\n# {}\n\nTrained with trainkit (gpt): {}.\n"
# as an older release has written it
CARD = f"---\ntags:\n- trainkit\n{TRAINED}"
GPT2 = {
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture
def logged_in(hub: Hub) -> dict[str, str]:
    return {**hub.environment, "HF_TOKEN": TOKEN}


def titles(hub: Hub, repo: str) -> list[str]:
    return [commit.message for commit in reversed(list(hub.repository(repo).branches["main"].history()))]


def texts_below(folder: Path) -> str:
    return "".join(path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())


def trained(
    folder: Path, environ: Mapping[str, Any], push: Mapping[str, object], strategy: str = "single", **changes: Any
) -> tuple[list[int], str]:
    """Exit codes and output of ranks that are warm already and upload to ada/tiny; their run directory is run/."""
    (folder / "corpus").mkdir()
    (folder / "corpus/some.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    checkpoint = {"push_to_hub": {"repo": "ada/tiny", **push}, "every_steps": 1, "keep": 1}
    changes = {"train": {"steps": 2}, "eval": {"every_steps": 0}, "checkpoint": checkpoint, **changes}
    case = CASES[strategy].changed(**changes)
    ranks = start_ranks(write_settings(folder / "run", case, folder / "corpus"), case.ranks, **environ)
    return finish(ranks), "".join(path.read_text() for path in sorted((folder / "run").glob("rank-*.log")))


def test_a_run_that_is_stopped_while_it_uploads_ends_at_once_and_the_next_uploads_what_is_missing(
    tmp_path: Path,
    trainkit: Trainkit,
    tiny_recipe: Path,
    hub: Hub,
    logged_in: dict[str, str],
    clean_environment: dict[str, str],
) -> None:
    hub.fail(COMMIT, hangs=True)
    words = ("run", str(tiny_recipe), "--hub_model_id=ada/tiny", "--hub_private_repo")
    environ = {**clean_environment, **logged_in}
    call = [sys.executable, "-m", "trainkit", *words]
    run = subprocess.Popen(call, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for("the upload", lambda: any("/commit/" in request.path for request in hub.requests))
    run.send_signal(signal.SIGINT)
    told = run.communicate(timeout=30)[0]
    assert run.returncode == 128 + signal.SIGINT, told
    (folder,) = (tmp_path / "runs/tiny").iterdir()
    saved = folder / "checkpoints/step-00000003"
    assert "waiting for the upload of step-00000003 to ada/tiny" in told
    assert f"step-00000003; to upload later: trainkit export {saved} --push ada/tiny --private" in told
    assert "Traceback" not in told
    assert not (folder / "pushes").exists()
    assert set(hub.repository("ada/tiny").files()) == {".gitattributes"}

    done = trainkit(*words, "--resume_from_checkpoint", "true", environ=logged_in)
    assert done.returncode == 0, done.stdout + done.stderr
    assert hub.repository("ada/tiny").private
    assert titles(hub, "ada/tiny") == ["first commit", "tiny: step-00000003"]
    files = hub.repository("ada/tiny").files()
    assert set(files) == {".gitattributes", *GPT2}
    assert TRAINED.format("tiny", "3 steps") in files["README.md"].decode()
    export(saved, tmp_path / "out")
    ours, theirs = load_file(tmp_path / "out/model.safetensors"), load(files["model.safetensors"])
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert not list(tmp_path.glob("runs/tiny/*/pushes"))
    assert TOKEN not in told + done.stdout + done.stderr + texts_below(tmp_path / "runs")


def test_two_ranks_upload_each_save_with_a_checkpoint_to_resume_from(
    tmp_path: Path, hub: Hub, logged_in: dict[str, str]
) -> None:
    before = {"notes.txt": "mine", "model.safetensors.index.json": "{}", "last-checkpoint/step-00000009/a.bin": "a"}
    hub.add("ada/tiny", {**before, "model-00001-of-00001.safetensors": "of an older release"})
    hub.fail(COMMIT, status=503)  # of the first: tried again
    codes, told = trained(tmp_path, logged_in, {"strategy": "checkpoint"}, "ddp")
    assert codes == [0, 0], told
    files = hub.repository("ada/tiny").files()
    assert load(files["model.safetensors"])
    assert titles(hub, "ada/tiny")[-1].endswith(": step-00000002")
    saved = tmp_path / "run/checkpoints/step-00000002"
    there = {path.relative_to(saved): path.read_bytes() for path in saved.rglob("*") if path.is_file()}
    whole = {f"last-checkpoint/{saved.name}/{name}": content for name, content in there.items()}
    own = {"notes.txt", *GPT2}
    assert files.keys() == own | whole.keys(), "the newest alone, and no weights of before"
    assert {name: files[name] for name in whole} == whole
    assert not [name for name, content in files.items() if tmp_path.name.encode() in content], "no path of this machine"


def test_every_checkpoint_is_uploaded_where_all_are_asked_for(
    tmp_path: Path, hub: Hub, logged_in: dict[str, str]
) -> None:
    hub.add("ada/tiny", {"checkpoints/step-00000001/generators-7.json": "of a run on more ranks"})
    hub.fail(COMMIT, status=403)  # of the first, which is tried again at the end
    codes, told = trained(tmp_path, logged_in, {"strategy": "all"})
    assert codes == [0], told
    files = hub.repository("ada/tiny").files()
    kept = {Path(name).parts[1]: name for name in files if name.startswith("checkpoints/")}
    assert kept.keys() == {"step-00000001", "step-00000002"}
    assert "checkpoints/step-00000001/generators-7.json" not in files
    assert titles(hub, "ada/tiny")[-1].endswith(": step-00000001")
    assert "2 steps" in files["README.md"].decode(), "newer weights stay"
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000002"]
    assert not (tmp_path / "run/pushes").exists()


def test_an_upload_that_fails_ends_the_run_with_an_error_and_leaves_the_weights(
    tmp_path: Path, trainkit: Trainkit, hub: Hub, logged_in: dict[str, str]
) -> None:
    hub.add("ada/tiny", {})
    hub.fail(COMMIT, status=403, times=None)
    codes, told = trained(tmp_path, logged_in, {"strategy": "end"})
    assert codes == [1], told
    assert "error: the training is over, and step-00000002 could not be uploaded to ada/tiny: the Hub does not" in told
    assert "this token write there (403: Something went wrong)" in told
    assert told.count("403") == 1, "said once"
    remedy = f"trainkit export {tmp_path / 'run/checkpoints/step-00000002'} --push ada/tiny"
    assert remedy in told
    assert json.loads((tmp_path / "run/result.json").read_text())["steps"] == 2
    hub.faults.clear()
    hub.stored.clear()
    hub.fail("/lfs/*", method="PUT", cut_after=1000)  # in the middle of the weights, which are sent again
    seen = len(hub.requests)
    done = trainkit(*remedy.split()[1:], environ=logged_in)
    assert done.returncode == 0, done.stderr
    assert [request.status for request in hub.requests[seen:] if request.method == "PUT"] == [0, 200]
    written = load_file(tmp_path / "run/exports/step-00000002/model.safetensors")
    assert load(hub.repository("ada/tiny").files()["model.safetensors"]).keys() == written.keys()
    assert titles(hub, "ada/tiny")[-1] == f"step-00000002 of {tmp_path.name}"
    again = trainkit(*remedy.split()[1:], environ=logged_in)
    assert again.returncode == 2, again.stderr
    assert f"`hf upload ada/tiny {tmp_path / 'run/exports/step-00000002'} .` uploads it as it is" in again.stderr


STRANGER = """
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer
model = AutoPeftModelForCausalLM.from_pretrained("ada/tiny")
print(model.base_model.model.model.layers[0].self_attn.q_proj.lora_B["default"].weight.abs().sum().item() > 0)
print(AutoTokenizer.from_pretrained("ada/tiny")("two")["input_ids"] != [])
"""


def test_a_stranger_reads_adapters_beside_the_revision_of_their_base(
    tmp_path: Path, hub: Hub, logged_in: dict[str, str], clean_environment: dict[str, str]
) -> None:
    pytest.importorskip("peft")
    from huggingface_hub import snapshot_download
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=300, max_position_embeddings=64, **sizes)).save_pretrained(tmp_path / "m")
    hub.add("owner/base", save_tokenizer(tmp_path / "m"))
    commit = hub.repository("owner/base").branches["main"].oid
    base = snapshot_download("owner/base", endpoint=hub.url, cache_dir=hub.home / "hub", token=False)
    hub.repository("owner/base").change({"config.json": b"{}"})  # main is another commit now
    hub.add("ada/tiny", {})
    lora: dict[str, Any] = {"model": {"kind": "hf", "path": base}, "peft": {"kind": "lora", "rank": 2}}
    text = {"kind": "text", "path": str(tmp_path / "corpus"), "include": "*.txt", "cache": str(tmp_path / "cache")}
    data = {**text, "tokenizer": base, "sequence_length": 16}
    codes, told = trained(tmp_path, logged_in, {"strategy": "end"}, **lora, data=data)
    assert codes == [0], told
    files = hub.repository("ada/tiny").files()
    assert "model.safetensors" not in files
    card = files["README.md"].decode()
    assert card.startswith("---\nlibrary_name: peft\nbase_model: owner/base\npipeline_tag: text-generation\ntags:\n")
    assert f"(hf, adapters of owner/base at {commit}): 2 steps." in card
    environ = {**clean_environment, **hub.environment, "HF_TOKEN": READER, "HF_HOME": str(tmp_path / "theirs")}
    call = [sys.executable, "-c", STRANGER]
    read = subprocess.run(call, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert (read.returncode, read.stdout) == (0, "True\nTrue\n"), read.stderr


def test_a_run_whose_rank_is_killed_leaves_nothing_that_was_made_to_be_uploaded(
    tmp_path: Path, trainkit: Trainkit
) -> None:
    (tmp_path / "killed.py").write_text(
        "import os, pathlib\n"
        "run = pathlib.Path(os.environ['TRAINKIT_RECIPE']).parent\n"
        "(run / 'pushes/step-00000001.export').mkdir(parents=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    (tmp_path / "r.yaml").write_text("version: 1\nname: k\nprogram: {kind: torch, script: killed.py}\n")
    done = trainkit("run", "r.yaml", "devices.type=cpu")
    assert done.returncode == 137, done.stderr
    (run,) = (tmp_path / "runs/k").iterdir()
    assert not (run / "pushes").exists()


def test_a_card_says_in_how_many_bits_the_base_was() -> None:
    model = {"kind": "hf", "path": "/models/small", "quantize": {"bits": 4}}
    recipe = Recipe.model_validate(with_kinds({"name": "q", "model": model, "peft": {"kind": "lora"}}))
    written = card(recipe, {"step": 1}, Path("/runs/q/1"), adapters=True)
    assert "# q\n\nTrained with trainkit (hf, adapters of small, which was in 4 bits): 1 step.\n" in written
    assert "/models" not in written


def test_a_run_that_trains_nothing_says_that_nothing_is_uploaded(
    tmp_path: Path, hub: Hub, logged_in: dict[str, str]
) -> None:
    codes, told = trained(tmp_path, logged_in, {}, train={"steps": 0})
    assert codes == [0], told
    assert "warning: nothing is uploaded to ada/tiny: the run has trained nothing" in told


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft": {"kind": "lora"}}, "RUN/checkpoints/step-00000002 --adapter --push ada/tiny"),
        ({"model": {"kind": "target", "target": "a:b"}}, "step-00000002 --trust-code --push ada/tiny"),
        (
            {"push": {"strategy": "checkpoint", "private": True}},
            "--push ada/tiny --private; hf upload ada/tiny RUN/checkpoints",
        ),
        (
            {"push": {"strategy": "all"}},
            "hf upload ada/tiny RUN/pushes/step-00000001 checkpoints/step-00000001; hf upload",
        ),
    ],
)
def test_the_command_that_uploads_later_does_what_the_run_would_have_done(
    changes: dict[str, Any], words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    push = {"repo": "ada/tiny", **changes.get("push", {})}
    others = {name: changes[name] for name in changes if name != "push"}
    case = CASES["single"].changed(checkpoint={"push_to_hub": push}, **others)
    settings = read_settings(write_settings(tmp_path / "run", case, tmp_path))
    for name in ("pushes/step-00000001", "checkpoints/step-00000002"):
        (tmp_path / "run" / name).mkdir(parents=True)
        (tmp_path / "run" / name / "manifest.json").write_text('{"step": 2}')
    with caplog.at_level(logging.WARNING, "trainkit.trainer"):
        pushes = HubUploads(settings, "ada/tiny")
        pushes._failures["step-00000002"] = "403"
        pushes.abandon()
    assert words.replace("RUN", str(tmp_path / "run")) in caplog.text


def test_what_a_killed_upload_leaves_goes_with_its_run(tmp_path: Path) -> None:
    left = ("step-00000002", "step-00000002.export", ".step-00000003")
    for strategy, stays in (("every_save", None), ("all", ["step-00000002"])):
        run = tmp_path / strategy
        case = CASES["single"].changed(checkpoint={"push_to_hub": {"repo": "ada/tiny", "strategy": strategy}})
        write_settings(run, case, tmp_path)
        for name in left:
            (run / "pushes" / name / "state").mkdir(parents=True)
        clear_uploads(RunLayout(run))
        found = sorted(path.name for path in run.glob("pushes/*")) if (run / "pushes").exists() else None
        assert found == stays


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
            HubUploads(settings, "ada/tiny").abandon()
        assert ("step-00000002; to upload later" in caplog.text) == (strategy == "all")
        assert [path.name for path in run.glob("pushes/*")] == left


def test_without_a_token_no_rank_starts(tmp_path: Path, trainkit: Trainkit, tiny_recipe: Path, hub: Hub) -> None:
    done = trainkit("run", str(tiny_recipe), "--hub_model_id=ada/tiny", environ=hub.environment)
    told = done.stdout + done.stderr
    assert done.returncode == 4, told
    assert "nothing can be uploaded to ada/tiny: there is no token for the Hub" in told
    assert "hf auth login" in told
    assert not list(tmp_path.glob("runs/tiny/*/metrics.jsonl"))
    done = trainkit("export", "--push", "ada/tiny", "--private", "tiny", environ=hub.environment)
    assert (done.returncode, hub.repositories) == (2, {}), "nothing is asked of the Hub before there is a checkpoint"


def pushed(repo: str, environ: Mapping[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, "-P", "-m", "trainkit.hub.push", repo, *words]
    return subprocess.run(call, env=environ, capture_output=True, text=True, timeout=60, check=False)


def test_what_keeps_an_upload_back_is_said_before_the_ranks_start(hub: Hub, clean_environment: dict[str, str]) -> None:
    hub.add("ada/public", {"a.txt": "a"})
    hub.add("rob/his", {"a.txt": "a"})
    hub.add("ada/lora", {"adapter_config.json": "{}"})
    environ = {**clean_environment, **hub.environment, "HF_TOKEN": TOKEN}
    cases = {
        "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set": pushed("ada/new", {**environ, "HF_HUB_OFFLINE": "1"}),
        "does not let this token write there": pushed("rob/his", environ),
        "it is there already and public": pushed("ada/public", environ, "--private", "yes"),
        "ada/lora holds adapters (adapter_config.json)": pushed("ada/lora", environ, "--holds", "weights"),
        "Invalid": pushed("ada/new", {**environ, "HF_TOKEN": "hf_" + "x" * 34}),
        "not let this token": pushed("ada/public", {**environ, "HF_TOKEN": READER}),
    }
    for told, done in cases.items():
        assert (done.returncode, done.stdout) == (4, ""), done.stderr
        assert done.stderr.startswith("error: "), done.stderr
        assert told.removeprefix("it ") in done.stderr, done.stderr
        assert done.stderr.count("\n") == 1
    assert pushed("rob/his", environ, "--node", "1").returncode == 0, "the first node alone uploads"
    assert pushed("ada/lora", environ, "--holds", "adapters").returncode == 0


def test_a_hub_that_never_answers_is_given_up(hub: Hub, clean_environment: dict[str, str]) -> None:
    hub.fail("/api/repos/create", hangs=True, times=None)
    impatient = (
        "from trainkit.hub import push; push.SILENCE, push.PAUSES = 0.2, (); raise SystemExit(push.main(['a/b']))"
    )
    environ = {**clean_environment, **hub.environment, "HF_TOKEN": TOKEN}
    call = [sys.executable, "-P", "-c", impatient, "a/b"]
    done = subprocess.run(call, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 4, done.stderr
    assert "nothing can be uploaded to a/b: timed out" in done.stderr


def test_a_model_card_that_somebody_has_changed_stays(
    tmp_path: Path, hub: Hub, clean_environment: dict[str, str]
) -> None:
    environ = {**clean_environment, **hub.environment, "HF_TOKEN": TOKEN}
    (tmp_path / "folder").mkdir()
    older, newer = CARD.format("tiny", "1 step"), signed(CARD.format("tiny", "1 step") + "| Loss | 1 |\n")
    written = {"old": older, "signed": newer, "changed": older + "No.\n", "edited": newer.replace("1 |", "0 |")}
    for name, text in written.items():
        hub.add(f"ada/{name}", {"README.md": text})
        (tmp_path / "folder/README.md").write_text(CARD.format("tiny", "2 steps"))
        done = pushed(f"ada/{name}", environ, "--folder", str(tmp_path / "folder"))
        assert done.returncode == 0, done.stderr
    for name in written:
        kept = hub.repository(f"ada/{name}").files()["README.md"].decode()
        assert kept == (written[name] if name in ("changed", "edited") else CARD.format("tiny", "2 steps"))


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
        export = ["trainkit.trainer.checkpoint", "--checkpoint", str(tmp_path), "--destination", "out", "--tied"]
        call = [sys.executable, "-P", "-m", *export]  # it would say that there is no checkpoint
        done = subprocess.run(call, env=environ, stdin=reading, capture_output=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (1, b"")
    os.close(reading)
