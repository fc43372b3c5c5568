"""Exported weights are those that were trained, whichever strategy saved them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from strategy_runs import CASES, write_corpus, write_settings
from supervised_run import wait_for
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from tests.warm_ranks import run_case
from trainkit.data.encode import IGNORE_INDEX
from trainkit.trainer.checkpoint.export import trained_model
from trainkit.trainer.settings import World, read_settings
from trainkit.trainer.setup import assemble

Trainkit = Callable[..., subprocess.CompletedProcess[str]]
CHANGES: dict[str, dict[str, Any]] = {
    "train": {"steps": 4},
    "eval": {"every_steps": 4},
    "checkpoint": {"every_steps": 4},
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text") / "corpus"
    write_corpus(folder)
    return folder


@pytest.mark.parametrize("name", ["ddp", "fsdp", "zero1", "zero3"])
def test_exported_weights_have_the_evaluation_loss_of_the_run(
    name: str, corpus: Path, tmp_path: Path, trainkit: Trainkit
) -> None:
    curve = run_case(tmp_path / "run", CASES[name].changed(**CHANGES), corpus)
    saved = tmp_path / "run/checkpoints/step-00000004"
    done = trainkit("export", str(saved), "out")
    assert (done.returncode, done.stdout, done.stderr) == (0, "out\n", "")
    settings = read_settings(write_settings(tmp_path / "alone", CASES["single"].changed(**CHANGES), corpus))
    parts = assemble(settings, World(), torch.device("cpu"))
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert {tensor.dtype for tensor in read.state_dict().values()} == {torch.float32}

    def loss(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = read(input_ids=tokens).logits
        return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")

    parts.strategy.model.forward = loss
    assert parts.evaluation.measured(parts.strategy, parts.eval_autocast)["loss"] == pytest.approx(
        curve.eval_losses[4], rel=1e-6
    )
    assert (read.config.architectures, read.config.n_positions) == (["GPT2LMHeadModel"], 32)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("README.md", "config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json"),
    }


@pytest.mark.parametrize(
    ("name", "changes"),
    [("zero1", {}), ("zero1", {"peft": {"kind": "lora", "rank": 2}}), ("zero2", {})],
    ids=["zero1", "zero1-lora", "zero2"],
)
def test_half_precision_under_zero_is_exported_from_its_32_bit_weights(
    name: str, changes: dict[str, Any], corpus: Path, tmp_path: Path
) -> None:
    """The model that was trained and evaluated is these weights, rounded."""
    changed = {**CHANGES, **changes, "precision": {"dtype": "bf16"}}
    curve = run_case(tmp_path / "run", CASES[name].changed(**changed), corpus)
    model = trained_model(tmp_path / "run/checkpoints/step-00000004")[0]
    trained = [each for each in model.parameters() if each.requires_grad]
    assert {each.dtype for each in trained} == {torch.float32}
    assert any(not torch.equal(each, each.bfloat16().float()) for each in trained)
    settings = read_settings(write_settings(tmp_path / "alone", CASES["single"].changed(**CHANGES), corpus))
    parts = assemble(settings, World(), torch.device("cpu"))
    parts.strategy.model.forward = model.bfloat16().eval().forward
    assert parts.evaluation.measured(parts.strategy, parts.eval_autocast)["loss"] == pytest.approx(
        curve.eval_losses[4], rel=1e-6
    )


def test_a_run_is_exported_by_its_name_and_never_over_what_is_there(
    tmp_path: Path, trainkit: Trainkit, tiny_recipe: Path
) -> None:
    evaluating = ("eval.every_steps=1", "checkpoint.every_steps=2", "checkpoint.keep_best=true")
    assert trainkit("run", str(tiny_recipe), *evaluating, "optimizer.lr=0").returncode == 0
    (run,) = (tmp_path / "runs/tiny").iterdir()
    best = trainkit("export", "tiny", "--best", "best")  # nothing is learned, so the first evaluation is the lowest
    with safe_open(tmp_path / "best/model.safetensors", "pt") as tensors:
        assert (best.returncode, tensors.metadata()["step"]) == (0, "1")
    done = trainkit("export", "tiny")
    assert (done.returncode, done.stdout) == (0, f"{run}/exports/step-00000003\n")
    divided = trainkit("export", "tiny", "divided", "--shard-size", "2KB", "--dtype", "bf16")
    assert (divided.returncode, divided.stdout) == (0, "divided\n")
    files = sorted(path.name for path in (tmp_path / "divided").glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert len(AutoModelForCausalLM.from_pretrained(tmp_path / "divided").state_dict()) > len(files) > 1
    again = trainkit("export", "tiny")
    assert again.returncode == 2
    assert f"{run}/exports/step-00000003 exists" in again.stderr
    weights = next(run.glob("checkpoints/step-00000002/state/*.distcp"))
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    damaged = trainkit("export", str(run / "checkpoints/step-00000002"), "out")
    assert damaged.returncode == 1
    assert "is damaged: state/" in damaged.stderr
    assert not (tmp_path / "out").exists()


def test_an_interrupt_while_torch_is_imported_leaves_no_trace(
    corpus: Path, tmp_path: Path, clean_environment: dict[str, str]
) -> None:
    run_case(tmp_path / "run", CASES["single"].changed(train={"steps": 1}, checkpoint={"every_steps": 1}), corpus)
    call = [sys.executable, "-m", "trainkit", "export", str(tmp_path / "run/checkpoints/step-00000001"), "out"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(call, cwd=tmp_path, env=clean_environment, start_new_session=True, **pipes) as exporting:
        children = Path(f"/proc/{exporting.pid}/task/{exporting.pid}/children")
        wait_for("torch", lambda: any("libtorch" in maps_of(pid) for pid in children.read_text().split()))
        os.killpg(exporting.pid, signal.SIGINT)
        told = exporting.communicate(timeout=30)[0]
    assert (exporting.returncode, told) == (130, "")
    assert not (tmp_path / "out").exists()


def maps_of(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:  # it has ended
        return ""


def test_a_name_means_its_newest_run_that_has_a_checkpoint(
    tmp_path: Path, trainkit: Trainkit, tiny_recipe: Path
) -> None:
    assert trainkit("run", str(tiny_recipe), "train.steps=1", "checkpoint.every_steps=1").returncode == 0
    (trained,) = (tmp_path / "runs/tiny").iterdir()
    assert trainkit("run", str(tiny_recipe), "--do_eval", "checkpoint.resume=auto").returncode == 0
    (evaluated,) = set((tmp_path / "runs/tiny").iterdir()) - {trained}
    done = trainkit("export", "tiny")
    assert (done.returncode, done.stdout) == (0, f"{trained}/exports/step-00000001\n")
    assert done.stderr == f"{evaluated} has no complete checkpoint: this is of {trained}\n"
    by_id = trainkit("export", evaluated.name)
    assert (by_id.returncode, by_id.stderr.splitlines()[0]) == (2, f"error: {evaluated} has no complete checkpoint")


def test_what_has_no_checkpoint_cannot_be_exported(trainkit: Trainkit, tmp_path: Path, tiny_recipe: Path) -> None:
    assert trainkit("run", str(tiny_recipe), "train.steps=1", "checkpoint.at_end=false").returncode == 0
    done = trainkit("export", "tiny")
    assert done.returncode == 2
    assert "has no complete checkpoint" in done.stderr
    assert trainkit("export", "nothing").returncode == 2
