"""Exported models of transformers are what `from_pretrained` reads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.training import MakeSettings, trained
from trainkit.trainer.checkpoint.export import export

GPT2: dict[str, Any] = {  # its output layer shares the embedding's weights
    "kind": "hf",
    "architecture": "gpt2",
    "config": {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 256, "n_positions": 32},
}


def test_from_pretrained_reads_what_was_trained(make_settings: MakeSettings) -> None:
    transformers = pytest.importorskip("transformers")
    settings = make_settings(model=GPT2, train={"steps": 2}, checkpoint={"every_steps": 2})
    parts = trained(settings).parts
    export(settings.run_dir / "checkpoints/step-00000002", settings.run_dir / "out")
    read = transformers.AutoModelForCausalLM.from_pretrained(settings.run_dir / "out").eval()
    tokens = torch.arange(32).reshape(1, 32)
    with torch.no_grad():
        expected = parts.strategy.model.eval()(tokens)
        assert torch.equal(read(input_ids=tokens).logits, expected)
    assert (settings.run_dir / "out/model.safetensors").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="needs limits on a process's files")
def test_nothing_but_a_failure_is_said_and_a_full_disk_leaves_nothing(make_settings: MakeSettings) -> None:
    import resource

    settings = make_settings(model=GPT2, train={"steps": 1}, checkpoint={"every_steps": 1})
    trained(settings)
    out = settings.run_dir / "out"

    free = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}

    def exported(limit: int) -> tuple[int, str, str]:
        words = ["--checkpoint", str(settings.run_dir / "checkpoints/step-00000001"), "--destination", str(out)]
        done = subprocess.run(
            [sys.executable, "-m", "trainkit.trainer.checkpoint", *words],
            env={**free, "PYTHONPATH": str(Path(__file__).parents[2])},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    code, said, trouble = exported(10_000)
    assert (code, said) == (1, "")
    [line] = trouble.splitlines()
    assert line.startswith(f"error: {out} cannot be written: ")
    assert "File too large" in line
    assert not any("out" in path.name for path in settings.run_dir.iterdir())
    assert exported(-1) == (0, "", "")
