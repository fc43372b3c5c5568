"""TRL's own scripts, launched with the shipped recipes: planned, proven, the same on two ranks, and resumed."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_models import save_model

from tests.conftest import Trainkit

pytestmark = [pytest.mark.e2e, pytest.mark.needs("trl>=1.15")]

SMALL = (
    "program.args.model_name_or_path=model", "devices.type=cpu", "precision=fp32", "optimizer.name=adamw_torch",
    "batch.global=8", "batch.micro=2", "optimizer.lr=1e-3", "logging.every_steps=1",
)  # fmt: skip
DPO = (
    "dpo",
    *SMALL,
    "program.args.dataset_name=pairs",
    "schedule.name=constant_with_warmup",
    "schedule.warmup_steps=2",
)
SFT = """\
model_name_or_path: model
dataset_name: pairs
max_steps: 2
per_device_train_batch_size: 2
report_to: none
use_cpu: true
bf16: false
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and rows of both kinds."""
    folder = tmp_path_factory.mktemp("preferences")
    save_model(folder / "model", "llama")
    rows = [{"prompt": f"what is {n}?", "chosen": f" a {n}", "rejected": f" no {n}"} for n in range(32)]
    (folder / "pairs").mkdir()
    (folder / "pairs/train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    texts = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows]
    (folder / "texts").mkdir()
    (folder / "texts/train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in texts))
    return folder


@pytest.fixture
def here(prepared: Path, tmp_path: Path) -> Path:
    """The working folder, in which they lie."""
    for name in ("model", "pairs", "texts"):
        (tmp_path / name).symlink_to(prepared / name)
    return tmp_path


def losses(here: Path, name: str) -> dict[int, float]:
    """The losses of a finished run, as Trainer keeps them."""
    saved = here.glob(f"runs/{name}/*/output/checkpoint-*/trainer_state.json")
    newest = max(saved, key=lambda path: int(path.parent.name.rpartition("-")[2]))
    return {each["step"]: each["loss"] for each in json.loads(newest.read_text())["log_history"] if "loss" in each}


def test_dpo_learns_the_same_on_two_ranks_and_when_it_was_stopped(
    trainkit: Trainkit, clean_environment: dict[str, str], here: Path
) -> None:
    words = ("run", *DPO, "train.steps=24", "train.epochs=null", "checkpoint.every_steps=8")
    for name, *more in (("alone",), ("both", "--with", "strategy/ddp")):
        done = trainkit(*words, f"name={name}", *more)
        assert done.returncode == 0, done.stderr
        assert f"as planned, seen in {'2 ranks: ddp' if more else '1 rank: single'}, cpu, fp32" in done.stderr
    alone = losses(here, "alone")
    assert alone[1] == pytest.approx(math.log(2), rel=1e-3)  # the model and its reference agree at first
    assert alone[24] < 0.1
    assert losses(here, "both") == pytest.approx(alone, rel=1e-3)

    with (here / "log").open("w") as log:
        command = [sys.executable, "-m", "trainkit", *words, "name=cut"]
        process = subprocess.Popen(command, cwd=here, env={**os.environ, **clean_environment}, stdout=log, stderr=log)
        deadline = time.monotonic() + 120
        while not [*here.glob("runs/cut/*/output/checkpoint-8/trainer_state.json")]:
            assert time.monotonic() < deadline and process.poll() is None, (here / "log").read_text()
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    done = trainkit(*words, "name=cut")
    assert done.returncode == 0, done.stderr
    assert "resuming from" in done.stderr
    assert "as planned, seen in 1 rank: single, cpu, fp32, from step " in done.stderr
    assert losses(here, "cut") == pytest.approx(alone, rel=1e-4)


def test_the_command_of_trl_is_launched_with_its_own_file(trainkit: Trainkit, here: Path) -> None:
    (here / "sft.yaml").write_text(SFT.replace("pairs", "texts"))
    done = trainkit("run", "--with", "devices/cpu", "nodes.processes_per_node=1", "trl", "sft", "--config", "sft.yaml")
    assert done.returncode == 0, done.stderr
    assert "as planned, seen in " in done.stderr
    assert [*here.glob("runs/*/*/output/model.safetensors")]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("reward-model", "program.args.dataset_name=pairs"), "trl.scripts.reward"),
        (("grpo", "program.args.dataset_name=texts", "program.args.num_generations=4"), "trl.scripts.grpo"),
        (("dpo", "program.module=trl.scripts.kto", "program.args.loss_type=kto"), "trl.scripts.kto"),
        (("dpo", "--variant", "lora"), "--use_peft --lora_r 32"),
        (("dpo", "--with", "strategy/zero3"), "deepspeed.json"),
    ],
)
def test_the_other_recipes_plan_what_trl_is_told(
    trainkit: Trainkit, here: Path, words: tuple[str, ...], says: str
) -> None:
    done = trainkit("plan", words[0], *SMALL, *words[1:])
    assert done.returncode == 0, done.stderr
    flat = " ".join(done.stdout.replace("\\\n", " ").split())
    assert says in flat
    assert "--activation_checkpointing True" in flat and "--learning_rate 0.001" in flat
