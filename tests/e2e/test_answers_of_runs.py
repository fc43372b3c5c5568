"""Runs answer and are exported: of every strategy at their end, and while they are in progress."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from strategy_runs import CASES
from supervised_run import wait_for

from tests.trainer.sources import lines
from tests.trainer.tiny_llama import save_llama
from tests.warm_ranks import run_case

Trainkit = Callable[..., subprocess.CompletedProcess[str]]
GREEDY = ("--temperature", "0", "--max-new-tokens", "20")


def test_a_run_in_progress_answers_and_is_exported_from_its_newest_checkpoint(
    tmp_path: Path, trainkit: Trainkit, tiny_recipe: Path, clean_environment: dict[str, str]
) -> None:
    words = ("train.steps=1000000", "checkpoint.every_steps=50", "checkpoint.keep=0", "logging.every_steps=1000")
    call = [sys.executable, "-m", "trainkit", "run", str(tiny_recipe), *words]
    with subprocess.Popen(call, cwd=tmp_path, env=clean_environment, stderr=subprocess.DEVNULL) as run:
        try:
            wait_for("a checkpoint", lambda: next(tmp_path.glob("runs/tiny/*/checkpoints/step-*/manifest.json"), None))
            answered = trainkit("generate", "tiny", "the quick", *GREEDY, "--json")
            exported = trainkit("export", "tiny", "out")
            assert run.poll() is None
        finally:
            run.send_signal(signal.SIGINT)
    assert answered.returncode == 0, answered.stderr
    assert json.loads(answered.stdout)["tokens"] == 20
    assert (exported.returncode, exported.stdout) == (0, "out\n"), exported.stderr
    first = min(path.name for path in tmp_path.glob("runs/tiny/*/checkpoints/step-*"))
    one = trainkit("generate", "tiny", "the quick", *GREEDY, "--checkpoint", str(int(first.removeprefix("step-"))))
    assert one.returncode == 0, one.stderr
    none = trainkit("generate", "tiny", "the quick", "--checkpoint", "3")
    assert none.returncode == 2
    assert "has no complete checkpoint of step 3" in none.stderr
    assert "it has those of 50, 100" in none.stderr


@pytest.mark.parametrize("name", ["fsdp", "zero3"])
def test_sharded_ranks_sample_a_chat_through_its_template_to_its_stop(
    name: str, tmp_path: Path, trainkit: Trainkit
) -> None:
    base = save_llama(tmp_path / "base")
    chat = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on the mat"}]
    path = lines(tmp_path / "chats.jsonl", [{"messages": chat}] * 20)
    data = {"kind": "dataset", "path": str(path), "tokenizer": str(base)}
    case = CASES[name].changed(
        model={"kind": "hf", "path": str(base)},
        data={**data, "sequence_length": 32, "packing": "none"},
        sample={"prompt": "the cat", "tokens": 20, "temperature": 0.01},
        optimizer={"lr": 1e-2},
        schedule={"warmup_steps": 2},
        train={"steps": 30},
        eval={"every_steps": 0},
        checkpoint={"every_steps": 30},
    )
    run_case(tmp_path / "run", case, tmp_path)
    assert json.loads((tmp_path / "run/result.json").read_text())["sample"] == "sat on the mat"
    done = trainkit("generate", str(tmp_path / "run/checkpoints/step-00000030"), "the cat", *GREEDY)
    assert (done.returncode, done.stdout) == (0, "sat on the mat\n"), done.stderr
