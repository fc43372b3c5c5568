"""Files of `trl sft`, trained by TRL and by the recipe that trainkit makes of each: the same losses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_models import save_model

from tests.conftest import Trainkit, call_trainkit

pytestmark = [pytest.mark.e2e, pytest.mark.needs("trl>=1.15")]
PROGRAM = Path(__file__).parent / "programs" / "trl_losses.py"
# With the marks by which TRL knows what an assistant says.
TEMPLATE = (
    "{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{%- if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}{%- else %}"
    "{{ m['content'] + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
WORDS = (
    "the cat sat on the mat", "what is the sum of two and two", "a dog ran", "sum", "on the mat", "is it",
    "two and two is four, and the cat is on the mat", "what is it that ran",
)  # fmt: skip
ROWS: Mapping[str, Any] = {
    "texts": lambda words: {"text": words},
    "pairs": lambda words: {"prompt": f"{words}:", "completion": f" {words[::-1]}"},
    "chats": lambda words: {
        "messages": [
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": words},
            {"role": "assistant", "content": words.upper()},
            {"role": "user", "content": "more"},
            {"role": "assistant", "content": words},
        ]
    },
}
# All rows are one batch, so that their order says nothing.
BASE: dict[str, Any] = {
    "model_name_or_path": "model", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 5,
    "learning_rate": 1.0e-3, "lr_scheduler_type": "constant", "logging_steps": 1, "bf16": False, "use_cpu": True,
    "report_to": "none", "save_strategy": "no", "max_length": 256,
}  # fmt: skip
LORA = {"use_peft": True, "lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "texts": {"dataset_name": "texts"},
    "pairs": {"dataset_name": "pairs", "weight_decay": 0.1, "max_grad_norm": 0.3},
    "chats": {"dataset_name": "chats"},
    "answers": {"dataset_name": "chats", "assistant_only_loss": True},
    "cut": {
        "dataset_name": "chats",
        "max_length": 48,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
    },
    "lora": {"dataset_name": "pairs", "lora_target_modules": "all-linear", **LORA},
    "lora-chats": {"dataset_name": "chats", "lora_target_modules": ["q_proj", "o_proj"], "use_rslora": True, **LORA},
    "moments": {"dataset_name": "pairs", "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1.0e-6},
    "linear": {"dataset_name": "texts", "lr_scheduler_type": "linear", "warmup_steps": 2},
    "cosine": {"dataset_name": "pairs", "lr_scheduler_type": "cosine"},
    "floor": {
        "dataset_name": "chats",
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": 0.2},
        "warmup_steps": 1,
    },
    "warm": {"dataset_name": "texts", "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2},
    "epochs": {"dataset_name": "pairs", "max_steps": -1, "num_train_epochs": 5},
    "single": {"dataset_name": "chats", "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
    "whole": {"dataset_name": "pairs", "completion_only_loss": False},
    "fused": {"dataset_name": "texts", "optim": "adamw_torch_fused", "weight_decay": 0.05},
    "sgd": {"dataset_name": "texts", "optim": "sgd", "learning_rate": 0.5},
    "unclipped": {"dataset_name": "pairs", "max_grad_norm": 0.0},
    "kept": {"dataset_name": "chats", "gradient_checkpointing": False, "assistant_only_loss": True},
    "dora": {"dataset_name": "pairs", "lora_target_modules": "all-linear", "use_dora": True, **LORA},
}
# A length here is one of positions: with the token that the last one predicts it is one more than TRL's.
CHANGED = {"cut": ["data.sequence_length=47"]}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files, trained by TRL, with model and rows beside them."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("trl")
    save_model(folder / "model", "llama")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    for name, row in ROWS.items():
        (folder / name).mkdir()
        rows = "".join(f"{json.dumps(row(words))}\n" for words in WORDS)
        (folder / name / "train.jsonl").write_text(rows)
        (folder / f"held-{name}.jsonl").write_text(f"{json.dumps(row('a cow'))}\n")
    for name, keys in VARIANTS.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({**BASE, **keys}))
    command = [sys.executable, str(PROGRAM), *(f"{name}.yaml" for name in VARIANTS)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("name", VARIANTS)
def test_the_recipe_of_a_file_has_the_losses_of_trl(
    name: str, trained: Path, clean_environment: dict[str, str]
) -> None:
    trainkit: Trainkit = call_trainkit(trained, clean_environment)
    recipe, rows = f"{name}-recipe.yaml", VARIANTS[name]["dataset_name"]
    made = trainkit("import", f"{name}.yaml", "--output", recipe)
    assert made.returncode == 0, made.stderr
    held = (f"data.validation_path=held-{rows}.jsonl", "data.validation_fraction=0.05")  # so that no row is left out
    # trainkit draws each adapter by its name.
    start = [f"peft.path={name}.yaml.adapters"] if "use_peft" in VARIANTS[name] else []
    more = (*held, *start, *CHANGED.get(name, []))
    done = trainkit("run", recipe, f"name={name}", "nodes.processes_per_node=1", *more)
    assert done.returncode == 0, done.stderr
    (metrics,) = trained.glob(f"runs/{name}/*/metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    ours = {str(each["step"]): each["loss"] for each in lines if "loss" in each}
    theirs = json.loads((trained / f"{name}.yaml.losses").read_text())
    assert len(theirs) == 5
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert ours["5"] < ours["1"] - 0.02
