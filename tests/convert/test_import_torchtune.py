"""torchtune's files as recipes for the built-in trainer, key by key."""

from __future__ import annotations

import pytest
import yaml

from tests.convert.reading import columns_of, comments, imported, refusal, settings
from tests.convert.trainers import files_of, unnamed
from trainkit.convert.importing import most_alike

REFUSED = {
    "distil.yaml": "distillation",
    "dpo.yaml": "TRL's trainers",
    "pictures.yaml": "models of text alone",
    "qat.yaml": "QAT",
    "own-rows.yaml": "reads rows of files, and no code",
    "meta.yaml": "save_pretrained",
    "generate.yaml": "trains nothing",
}


@pytest.mark.parametrize("name", [name for name in files_of("torchtune") if name not in REFUSED])
def test_all_that_is_set_in_a_file_is_a_setting_or_named(name: str) -> None:
    assert unnamed("torchtune", name) == []


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_built_in_trainer_cannot_train_is_refused(name: str) -> None:
    files = files_of("torchtune")
    assert most_alike(yaml.safe_load(files[name])) == "torchtune"
    found = refusal(name, files)
    assert REFUSED[name] in f"{found.what} {found.why}"
    assert f"trainkit run tune run RECIPE --config {name}" in found.hint


def test_a_file_for_full_finetuning_becomes_settings() -> None:
    found = settings(imported("full-single.yaml", files_of("torchtune")))
    assert columns_of(found) == {"messages": "talk"}
    assert found.pop("data.tokenizer") == found["model.path"]
    assert {key: each for key, each in found.items() if not key.startswith("data.columns")} == {
        "strategy.kind": "single", "precision.dtype": "bf16", "precision.weights": "bf16", "batch.micro": 3,
        "batch.eval_micro": 3, "batch.accumulation": 4, "efficiency.gradient_checkpointing.every": True,
        "efficiency.compile.enabled": True, "model.kind": "hf", "model.path": "/data/helper-1b",
        "peft.kind": "none",
        "data.kind": "dataset", "data.path": "desk.json", "data.sequence_length": 1536, "data.packing": "isolated",
        "data.validation_fraction": 1e-9, "optimizer.name": "adamw_torch", "optimizer.lr": 2.5e-5,
        "optimizer.beta1": 0.9, "optimizer.beta2": 0.95, "optimizer.eps": 1e-8, "optimizer.weight_decay": 0.01,
        "schedule.name": "cosine", "schedule.min_lr_ratio": 0.0, "schedule.warmup_steps": 25,
        "schedule.from_zero": True, "train.steps": 80,
        "train.seed": 11, "train.max_grad_norm": 0.8, "logging.every_steps": 2, "logging.report_to": ["wandb"],
    }  # fmt: skip


@pytest.mark.parametrize(("split", "rows"), [("train[:40%]", 0.4), ("train[0:25%]", 0.25), ("train[:100%]", None)])
def test_a_part_of_a_split_is_that_of_the_first_rows(split: str, rows: float | None) -> None:
    files = files_of("torchtune")
    files["part.yaml"] = files["texts-sharded.yaml"].replace("train[:500]", split)
    assert settings(imported("part.yaml", files)).get("data.max_rows") == rows


def test_builders_say_the_adapters_and_what_is_frozen() -> None:
    dora = settings(imported("dora.yaml", files_of("torchtune")))
    assert (dora["peft.kind"], dora["peft.rank"], dora["peft.dora"]) == ("lora", 12, True)
    assert dora["peft.target_modules"] == ["q_proj", "k_proj"]
    assert columns_of(dora) == {"prompt": "question", "completion": "reply"}
    assert dora["optimizer.name"] == "bitsandbytes.optim:PagedAdamW8bit"
    qlora = settings(imported("qlora.yaml", files_of("torchtune")))
    assert (qlora["model.quantize.bits"], qlora["peft.rank"], qlora["peft.alpha"]) == (4, 8, 16.0)
    assert qlora["peft.target_modules"] == ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert (qlora["data.validation_fraction"], qlora["eval.every_steps"]) == (0.1, 30)
    assert "data.train_on_prompts" not in qlora


def test_what_differs_is_said() -> None:
    said = comments(imported("qlora.yaml", files_of("torchtune")))
    assert "Norms and biases are not decayed" in said
    assert "sentences of Stanford Alpaca" in said
    assert "trainkit data counts what is cut" in said


def test_a_part_of_the_rows_and_sharding_are_taken_over() -> None:
    found = settings(imported("texts-sharded.yaml", files_of("torchtune")))
    assert (found["strategy.kind"], found["strategy.offload"]) == ("fsdp", True)
    assert (found["data.max_rows"], columns_of(found)) == (500, {"text": "body"})
    assert (found["schedule.name"], found["precision.dtype"]) == ("constant", "fp32")
