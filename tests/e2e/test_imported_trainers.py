"""A file of another trainer as a recipe that plans and trains here: a tiny model on a few rows of a CPU."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import save_model

Trainkit = Callable[..., subprocess.CompletedProcess[str]]
ROWS = [{"instruction": f"What is {each}?", "output": f"It is {each}."} for each in range(20)]
CHATS = [{"turns": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": f"Hello {each}"}]} for each in range(20)]
AXOLOTL = """
base_model: model
datasets:
  - {path: chats.jsonl, type: chat_template, field_messages: turns,
     message_property_mappings: {role: from, content: value}}
chat_template: chatml
val_set_size: 0.1
evals_per_epoch: 1
adapter: lora
lora_r: 4
lora_alpha: 8
lora_target_linear: true
sequence_len: 128
sample_packing: true
micro_batch_size: 2
max_steps: 3
optimizer: adamw_torch
learning_rate: 1e-3
bf16: false
fp16: false
logging_steps: 1
"""
LLAMA_FACTORY = """
model_name_or_path: model
stage: sft
do_train: true
finetuning_type: full
dataset: desk
template: llama3
cutoff_len: 250
max_samples: 12
per_device_train_batch_size: 2
max_steps: 3
logging_steps: 1
output_dir: saves
"""


@pytest.mark.parametrize("text", [AXOLOTL, LLAMA_FACTORY], ids=["axolotl", "LLaMA-Factory"])
def test_a_file_of_another_trainer_plans_and_trains(text: str, trainkit: Trainkit, tmp_path: Path) -> None:
    save_model(tmp_path / "model", "llama")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps({"desk": {"file_name": "desk.json"}}))
    (tmp_path / "data/desk.json").write_text(json.dumps(ROWS))
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, CHATS)))
    (tmp_path / "theirs.yml").write_text(text)
    for words in (
        ("import", "theirs.yml", "--output", "ours.yaml"),
        ("plan", "ours.yaml"),
        ("run", "ours.yaml", "devices.type=cpu", "nodes.processes_per_node=1"),
    ):
        done = trainkit(*words)
        assert done.returncode == 0, done.stderr
    assert "step 3/3" in done.stderr
