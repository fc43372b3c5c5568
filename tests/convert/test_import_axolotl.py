"""axolotl's files as recipes for the built-in trainer, key by key."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.convert.reading import columns_of, comments, context, imported, refusal, settings
from tests.convert.trainers import files_of, unnamed
from trainkit.convert.importing import foreign_recipe

Trainkit = Callable[..., subprocess.CompletedProcess[str]]

REFUSED = {
    "part.yml": "split train[5%:] is a part of the rows",
    "pictures.yml": "models of text alone",
    "preferences.yml": "neither preferences nor rewards",
    "some-weights.yml": "trains all weights, or adapters",
}
SMALL: dict[str, Any] = {
    "base_model": "our-org/base-1b",
    "datasets": [{"path": "rows.jsonl", "type": "alpaca"}],
    "sequence_len": 256,
    "micro_batch_size": 2,
    "learning_rate": 1e-5,
}


def read(**keys: Any) -> dict[str, Any]:
    """The settings that a small file becomes with other keys."""
    return settings(text_of(**keys))


def text_of(files: dict[str, Any] | None = None, **keys: Any) -> str:
    """The recipe's text of a small file with other keys."""
    return imported("a.yml", {"a.yml": yaml.safe_dump({**SMALL, **keys}), **(files or {})})


def why(**keys: Any) -> str:
    """For what reason a small file is refused with other keys; axolotl itself is named as the way."""
    found = refusal("a.yml", {"a.yml": yaml.safe_dump({**SMALL, **keys})})
    assert "trainkit run axolotl train a.yml" in found.hint
    return f"{found.what}: {found.why}"


@pytest.mark.parametrize("name", [name for name in files_of("axolotl") if name not in REFUSED])
def test_all_that_is_set_in_a_file_is_a_setting_or_named(name: str) -> None:
    assert unnamed("axolotl", name) == []


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_built_in_trainer_cannot_train_is_refused_with_the_way_to_axolotl(name: str) -> None:
    found = refusal(name, files_of("axolotl"))
    assert REFUSED[name] in f"{found.what} {found.why}"
    assert f"trainkit run axolotl train {name}" in found.hint


def test_a_file_for_qlora_becomes_settings() -> None:
    found = settings(imported("qlora-instructions.yml", files_of("axolotl")))
    assert found == {
        "strategy.kind": "ddp",
        "precision.dtype": "auto",
        "batch.micro": 5,
        "batch.accumulation": 3,
        "efficiency.gradient_checkpointing.every": True,
        "efficiency.attention": "flash_attention_2",
        "model.kind": "hf",
        "model.path": "our-org/helper-3b",
        "model.quantize.bits": 4,
        "peft.kind": "lora",
        "peft.rank": 24,
        "peft.alpha": 48,
        "peft.dropout": 0.1,
        "peft.target_modules": [],
        "data.kind": "dataset",
        "data.path": "rows/tickets.jsonl",
        "data.validation_fraction": 0.03,
        "data.packing": "isolated",
        "data.chat_template": "alpaca",
        "data.sequence_length": 1536,
        "data.tokenizer": "our-org/helper-3b",
        "optimizer.lr": 0.00015,
        "optimizer.name": "bitsandbytes.optim:PagedAdamW",
        "optimizer.weight_decay": 0.02,
        "optimizer.beta2": 0.999,
        "schedule.name": "cosine",
        "schedule.min_lr_ratio": 0.0,
        "schedule.from_zero": True,
        "schedule.warmup_steps": 0.07,
        "train.epochs": 2,
        "train.seed": 42,
        "eval.every_steps": 0.166666666667,
        "eval.batches": 1_000_000,
        "checkpoint.every_steps": 0.25,
        "checkpoint.keep": 4,
        "logging.every_steps": 5,
        "logging.report_to": ["wandb"],
        "output.root": "./out/tickets",
        "env.WANDB_PROJECT": "desk",
        "env.WANDB_NAME": "tickets-1",
    }


def test_what_axolotl_takes_by_default_is_written_where_the_file_is_silent() -> None:
    text = text_of()
    found = settings(text)
    assert found["optimizer.name"] == "adamw_torch_fused"
    assert (found["optimizer.weight_decay"], found["optimizer.beta2"]) == (0.0, 0.999)
    assert (found["schedule.name"], found["schedule.min_lr_ratio"], found["schedule.warmup_steps"]) == (
        "cosine",
        0,
        0.03,
    )
    assert (found["train.epochs"], found["train.seed"], found["batch.accumulation"]) == (1.0, 42, 1)
    assert found["data.packing"] == "none"
    assert "100 at most" in comments(text)


def test_all_weights_are_trained_in_16_bits_as_they_are_loaded() -> None:
    assert read(bf16="auto")["precision.weights"] == "bf16"
    assert "precision.weights" not in read(bf16=True, deepspeed="zero2.json")  # which keeps them in 32
    adapters = {"adapter": "lora", "lora_r": 8, "lora_alpha": 8, "lora_target_linear": True}
    assert "precision.weights" not in read(bf16=True, **adapters)
    assert read(bf16=False)["precision.dtype"] == "fp32"


@pytest.mark.parametrize(
    ("entry", "columns"),
    [
        ({"type": "alpaca"}, {}),
        ({"type": "alpaca_chat.load_qa"}, {"prompt": "question", "completion": "answer"}),
        ({"type": "completion", "field": "body"}, {"text": "body"}),
        ({"type": "chat_template"}, {}),
        ({"type": "chat_template", "field_messages": "turns"}, {"messages": "turns"}),
        (
            {"type": "chat_template", "field_messages": "conversations",
             "message_property_mappings": {"role": "from", "content": "value"}},
            {},
        ),
        ({"type": {"field_instruction": "ask", "field_output": "tell"}}, {"instruction": "ask", "output": "tell"}),
    ],
)  # fmt: skip
def test_rows_are_read_by_their_type(entry: dict[str, Any], columns: dict[str, str]) -> None:
    assert columns_of(read(datasets=[{"path": "rows.jsonl", **entry}])) == columns


@pytest.mark.parametrize(
    "keys",
    [
        {"datasets": [{"path": "a/x", "type": "alpaca", "split": "train[20%:]"}]},
        {"datasets": [{"path": "a/x", "type": "alpaca"}, {"path": "a/y", "type": "alpaca"}]},
        {"datasets": [{"path": "x.jsonl", "type": "alpaca"}, {"path": "y.jsonl", "type": "chat_template"}]},
        {"datasets": [{"path": "a/x", "type": "alpaca", "data_files": ["y.json"]}]},
        {"datasets": [{"path": "x.jsonl", "type": "chat_template", "roles_to_train": ["user"]}]},
        {"datasets": [{"path": "x.jsonl", "type": "input_output"}]},
        {"datasets": [{"path": "x.jsonl", "type": {"format": "Q: {instruction} A:"}}]},
        {"lr_scheduler": "rex"},
        {"optimizer": "muon"},
        {"optimizer": "adafactor"},
        {"lora_target_modules": "model.layers.*", "adapter": "lora"},
        {"lora_modules_to_save": ["embed_tokens"]},
        {"plugins": ["axolotl.integrations.spectrum.SpectrumPlugin"]},
        {"neftune_noise_alpha": 5},
        {"context_parallel_size": 2},
        {"load_in_4bit": True},
        {"tokens": ["<new>"]},
        {"special_tokens": {"additional_special_tokens": ["<new>"]}},
    ],
)
def test_another_training_is_refused(keys: dict[str, Any]) -> None:
    assert next(iter(keys)).split("_")[0] in why(**keys)


@pytest.mark.parametrize(
    "keys",
    [
        {"neftune_noise_alpha": None, "rl": None, "context_parallel_size": 1, "lora_modules_to_save": []},
        {"lr_scheduler": "", "tokens": [], "plugins": [], "fsdp": None, "trust_remote_code": False},
    ],
)
def test_what_is_off_is_named_in_one_line(keys: dict[str, Any]) -> None:
    said = comments(text_of(**keys))
    assert all(name in said.partition("Off, empty, or as trainkit has it:")[2] for name in keys)


def test_the_first_rows_alone_are_read_where_the_split_says_how_many() -> None:
    found = read(datasets=[{"path": "our-org/x", "type": "alpaca", "split": "train[:500]"}])
    assert (found["data.max_rows"], "data.split" in found) == (500, False)
    share = read(datasets=[{"path": "our-org/x", "type": "alpaca", "split": "train[:20%]"}])
    assert (share["data.max_rows"], "data.split" in share) == (0.2, False)
    tests = [{"path": "our-org/x", "type": "alpaca", "split": "test"}]
    assert "max_rows" in why(
        datasets=[{"path": "our-org/x", "type": "alpaca", "split": "train[:500]"}], test_datasets=tests
    )


def test_instructions_without_words_around_them_are_written_as_they_are() -> None:
    found = settings(imported("own-columns.yml", files_of("axolotl")))
    assert (columns_of(found), found["data.chat_template"]) == ({"instruction": "ask", "output": "tell"}, "none")


def test_hybrid_sharding_is_the_trainers_own() -> None:
    found = read(fsdp=["hybrid_shard", "auto_wrap"])
    assert (found["strategy.kind"], found["strategy.sharding"]) == ("fsdp", "hybrid_shard")


def test_prompts_are_learned_where_the_file_says_so() -> None:
    assert read(train_on_inputs=True)["data.train_on_prompts"] is True
    texts = read(datasets=[{"path": "rows.jsonl", "type": "completion"}], train_on_inputs=True)
    assert "data.train_on_prompts" not in texts  # which are learned whole


def test_settings_of_wandb_are_its_variables_where_it_is_used() -> None:
    found = read(wandb_project="desk", wandb_mode="offline", use_trackio=True)
    assert found["logging.report_to"] == ["wandb", "trackio"]
    assert (found["env.WANDB_PROJECT"], found["env.WANDB_MODE"]) == ("desk", "offline")
    assert "env.WANDB_PROJECT" not in read(wandb_project="desk", use_wandb=False)


def test_several_files_of_one_form_are_read_together() -> None:
    both = [
        {"path": "x.jsonl", "type": "chat_template"},
        {"path": "json", "data_files": "y.jsonl", "type": "chat_template"},
    ]
    assert read(datasets=both)["data.path"] == ["x.jsonl", "y.jsonl"]


def test_another_split_of_the_same_data_is_evaluated_on() -> None:
    rows = {"path": "our-org/x", "type": "alpaca"}
    found = read(datasets=[{**rows, "split": "train"}], test_datasets=[{**rows, "split": "test"}], eval_steps=7)
    assert (found["data.validation_split"], found["eval.every_steps"]) == ("test", 7)


def test_shares_of_an_epoch_are_shares_of_all_steps() -> None:
    found = read(max_steps=90, num_epochs=3, evals_per_epoch=2, saves_per_epoch=1, val_set_size=0.1, warmup_ratio=0.05)
    assert found["schedule.warmup_steps"] == 4
    assert found["eval.every_steps"] == pytest.approx(1 / 6)
    assert found["checkpoint.every_steps"] == pytest.approx(1 / 3)
    assert read(saves_per_epoch=1, num_epochs=1)["checkpoint.every_steps"] == 0  # at the end alone


def test_a_deepspeed_file_gives_its_stage_and_the_rest_of_it_is_named() -> None:
    engine = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "stage3_max_live_parameters": 0},
              "bf16": {"enabled": "auto"}, "train_batch_size": "auto"}  # fmt: skip
    text = text_of({"z.json": engine}, deepspeed="z.json", bf16=True)
    found = settings(text)
    assert (found["strategy.kind"], found["strategy.offload_param"]) == ("zero3", "cpu")
    assert "strategy.config" not in found
    assert "stage3_max_live_parameters" in comments(text)


def test_a_deepspeed_file_that_is_not_here_counts_by_its_name() -> None:
    text = text_of(deepspeed="deepspeed_configs/zero3_bf16_cpuoffload_all.json", bf16=True)
    assert settings(text)["strategy.offload_optimizer"] == "cpu"
    assert "is not here: by its name" in comments(text)
    assert (
        refusal("a.yml", {"a.yml": yaml.safe_dump({**SMALL, "deepspeed": "mine.json"})}).what
        == "there is no file mine.json"
    )


def test_secrets_are_not_written_into_the_recipe() -> None:
    text = text_of(comet_api_key="k-123456789", swanlab_api_key="s-987654321")
    assert "123456789" not in text
    assert "987654321" not in text
    assert "comet_api_key" in text


def test_a_file_of_axolotl_named_as_a_recipe_is_one_error_with_both_ways() -> None:
    there = context({"a.yml": yaml.safe_dump(SMALL), "own.yaml": "version: 1\nname: x\nmodel: {kin: hf}\n"})
    found = foreign_recipe(there, "a.yml")
    assert found is not None
    assert found.what == "a.yml is a file of axolotl, and no recipe"
    assert "trainkit import a.yml -o recipe.yaml" in found.hint
    assert "trainkit run axolotl train a.yml" in found.hint
    assert foreign_recipe(there, "own.yaml") is None


@pytest.mark.cli
def test_plan_says_of_such_a_file_only_that(trainkit: Trainkit, tmp_path: Path) -> None:
    (tmp_path / "a.yml").write_text(yaml.safe_dump(SMALL))
    done = trainkit("plan", "a.yml")
    assert done.returncode == 2
    assert done.stderr.count("error:") == 1
    assert "a.yml is a file of axolotl, and no recipe" in done.stderr


def test_a_switch_that_is_off_is_named_too() -> None:
    adapters: dict[str, Any] = {"adapter": "qlora", "lora_r": 8, "lora_alpha": 8, "lora_target_linear": True}
    said = comments(text_of(**adapters, load_in_4bit=True, load_in_8bit=False))
    assert "load_in_8bit" in said.partition("Off, empty, or as trainkit has it:")[2]


def test_texts_that_an_evaluation_writes_are_measured_here_too() -> None:
    asked: dict[str, Any] = {"do_causal_lm_eval": True, "val_set_size": 0.1, "evals_per_epoch": 2, "num_epochs": 3}
    found = read(**asked, eval_causal_lm_metrics=["chrf", "perplexity"], eval_max_new_tokens=40)
    assert (found["eval.metrics"], found["eval.tokens"]) == (["chrf", "perplexity"], 40)
    text = text_of(**asked, eval_causal_lm_metrics=["sacrebleu", "comet"])
    assert settings(text)["eval.metrics"] == ["bleu"]
    assert "eval.metrics has no comet" in comments(text)
    assert "eval.metrics" not in read(do_causal_lm_eval=True)  # nothing is held out
