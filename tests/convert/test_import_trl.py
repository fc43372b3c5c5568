"""TRL's files as recipes for the built-in trainer, key by key."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from tests.convert.reading import columns_of, comments, imported, refusal, settings
from tests.convert.trainers import files_of, unnamed
from trainkit.convert.importing import most_alike

REFUSED = {
    "dpo.yaml": ("trl dpo", "trainkit cp dpo"),
    "grpo.yaml": ("trl grpo", "trainkit cp grpo"),
    "kto.yaml": ("trl kto", "trainkit cp dpo"),
    "reward.yaml": ("trl reward", "trainkit cp reward-model"),
    "dft.yaml": ("cross entropy", "trainkit run trl sft --config dft.yaml"),
}
SMALL: dict[str, Any] = {"model_name_or_path": "our-org/helper-1b", "dataset_name": "rows"}
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def text_of(row: dict[str, Any] | None = None, **keys: Any) -> str:
    """The recipe's text of a small file with other keys. row: the first of the data set, where that is here."""
    files = {"t.yaml": yaml.safe_dump({**SMALL, **keys}), **({"rows/train.jsonl": json.dumps(row)} if row else {})}
    if row:
        files["rows"] = ""
    return imported("t.yaml", files)


def read(row: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    """The settings that a small file becomes with other keys."""
    return settings(text_of(row, **keys))


def why(**keys: Any) -> str:
    """For what reason a small file is refused with other keys; TRL itself is named as the way."""
    found = refusal("t.yaml", {"t.yaml": yaml.safe_dump({**SMALL, **keys})})
    assert "trainkit run trl sft --config t.yaml" in found.hint
    return f"{found.what}: {found.why}"


@pytest.mark.parametrize("name", [name for name in files_of("trl") if name not in REFUSED])
def test_all_that_is_set_in_a_file_is_a_setting_or_named(name: str) -> None:
    assert most_alike(yaml.safe_load(files_of("trl")[name])) == "TRL"
    assert unnamed("trl", name) == []


@pytest.mark.parametrize("name", REFUSED)
def test_files_for_other_trainers_of_trl_are_refused_with_the_recipe_for_them(name: str) -> None:
    found = refusal(name, files_of("trl"))
    says, hint = REFUSED[name]
    assert says in f"{found.what} {found.why}"
    assert hint in found.hint


def test_what_trl_takes_by_itself_is_written_out() -> None:
    found = read(CHAT)
    expected = {
        "optimizer.lr": 2e-5, "optimizer.weight_decay": 0.0, "optimizer.beta2": 0.999, "optimizer.name": "adamw_torch",
        "schedule.name": "linear", "schedule.min_lr_ratio": 0.0, "schedule.warmup_steps": 0, "train.epochs": 3.0,
        "train.seed": 42, "train.max_grad_norm": 1.0, "batch.micro": 8, "batch.accumulation": 1,
        "precision.dtype": "bf16", "efficiency.gradient_checkpointing.every": True, "data.sequence_length": 1024,
        "data.packing": "none", "data.train_on_prompts": True, "checkpoint.every_steps": 500, "checkpoint.keep": 0,
        "logging.every_steps": 10,
    }  # fmt: skip
    assert {key: found.get(key) for key in expected} == expected
    assert "precision.weights" not in found and "data.chat_template" not in found


@pytest.mark.parametrize(
    ("row", "keys", "expected"),
    [
        (CHAT, {}, (True, None)),
        (CHAT, {"assistant_only_loss": True}, (False, None)),
        ({"prompt": "a", "completion": "b"}, {}, (None, "none")),
        ({"prompt": "a", "completion": "b"}, {"completion_only_loss": False}, (True, "none")),
        ({"prompt": CHAT["messages"][:1], "completion": CHAT["messages"][1:]}, {}, (None, None)),
        ({"text": "a"}, {}, (True, None)),
    ],
)
def test_what_is_learned_of_a_row_follows_from_its_columns(
    row: dict[str, Any], keys: dict[str, Any], expected: tuple[bool | None, str | None]
) -> None:
    found = read(row, **keys)
    assert (found.get("data.train_on_prompts"), found.get("data.chat_template")) == expected


def test_what_rows_decide_that_are_not_here_is_said() -> None:
    said = comments(text_of())
    assert "set data.train_on_prompts=false for them" in said
    assert "data.chat_template=none" in said
    assert "becomes several samples" in said


def test_adapters_and_quantisation_have_trls_defaults() -> None:
    found = read(CHAT, use_peft=True, load_in_4bit=True)
    assert {key: found[key] for key in found if key.startswith(("peft", "model.quantize"))} == {
        "peft.kind": "lora", "peft.rank": 16, "peft.alpha": 32.0, "peft.dropout": 0.05,
        "peft.target_modules": ["q_proj", "v_proj"], "model.quantize.bits": 4, "model.quantize.double_quant": False,
    }  # fmt: skip


def test_several_files_and_a_column_of_texts_are_read() -> None:
    found = settings(imported("several.yaml", files_of("trl")))
    assert found["data.path"] == ["desk.jsonl", "manual.jsonl"]
    assert (found["data.validation_fraction"], found["strategy.kind"]) == (0.1, "fsdp")
    assert columns_of(settings(imported("packed.yaml", files_of("trl")))) == {"text": "content"}


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"max_length": None}, "TRL cuts no row"),
        ({"packing": True, "packing_strategy": "bfd_split"}, "becomes a sample there"),
        ({"eos_token": "<|im_end|>"}, "another token"),
        ({"chat_template_path": "our-org/other"}, "template and the tokens of another"),
        ({"use_peft": True, "lora_modules_to_save": ["lm_head"]}, "nothing is trained beside"),
        ({"load_in_8bit": True}, "weights in few bits are frozen"),
        ({"dtype": "float16"}, "32 bits or in bfloat16"),
        ({"neftune_noise_alpha": 5}, "NEFTune"),
        ({"lr_scheduler_type": "cosine_with_restarts"}, "the built-in trainer has cosine"),
        ({"datasets": [{"path": "a/b", "fraction": 0.5}]}, "fraction 0.5 takes a part of a/b"),
    ],
)
def test_what_would_be_another_training_is_refused(keys: dict[str, Any], reason: str) -> None:
    assert reason in why(**keys)


def test_a_part_of_the_rows_is_named_by_its_split() -> None:
    assert read(dataset_train_split="train[:10%]")["data.max_rows"] == 0.1
    assert read(dataset_train_split="more[:500]")["data.max_rows"] == 500
    assert "takes a part" in why(dataset_train_split="train[10%:]")


def test_a_mixture_of_one_is_a_data_set() -> None:
    one = {"id": "our-org/chats", "config": "default", "split": "train_sft", "columns": ["messages"], "weight": 1.0}
    found = read(dataset_name=None, dataset_mixture={"datasets": [one], "test_split_size": 0.1, "seed": 0})
    assert (found["data.path"], found["data.split"], found["data.validation_fraction"]) == (
        "our-org/chats", "train_sft", 0.1,
    )  # fmt: skip
    assert "weight" not in found
    half = {"datasets": [{**one, "weight": 0.5}]}
    assert "fraction 0.5 takes a part of our-org/chats" in why(dataset_name=None, dataset_mixture=half)


def test_a_template_that_stands_in_the_file_is_to_be_written_into_one_of_its_own() -> None:
    assert "names a template that is built in, or a file" in why(chat_template="{{ messages }}")
    assert read(chat_template="chatml")["data.chat_template"] == "chatml"
