"""LLaMA-Factory's files as recipes for the built-in trainer, key by key."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.convert.reading import columns_of, comments, imported, refusal, settings
from tests.convert.trainers import files_of, unnamed

INFO = "data/dataset_info.json"
REFUSED = {
    "dpo.yaml": "preferences",
    "freeze.yaml": "all weights, or adapters",
    "merge.yaml": "exports a model",
    "pictures.yaml": "models of text alone",
    "second.yaml": "second command line",
}
SMALL: dict[str, Any] = {
    "model_name_or_path": "our-org/helper-3b",
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "full",
    "dataset": "desk",
    "template": "chatml",
}


def text_of(info: dict[str, Any] | None = None, **keys: Any) -> str:
    """The recipe's text of a small file with other keys. info: further data sets."""
    known = {"desk": {"file_name": "desk.json"}, **(info or {})}
    return imported("l.yaml", {"l.yaml": yaml.safe_dump({**SMALL, **keys}), INFO: known})


def read(info: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    """The settings that a small file becomes with other keys."""
    return settings(text_of(info, **keys))


def why(info: dict[str, Any] | None = None, **keys: Any) -> str:
    """For what reason a small file is refused with other keys; LLaMA-Factory itself is named as the way."""
    known = {"desk": {"file_name": "desk.json"}, **(info or {})}
    found = refusal("l.yaml", {"l.yaml": yaml.safe_dump({**SMALL, **keys}), INFO: known})
    assert "trainkit run llamafactory-cli train l.yaml" in found.hint
    return f"{found.what}: {found.why}"


@pytest.mark.parametrize(
    "name", [name for name in files_of("llama_factory") if name.endswith(".yaml") and name not in REFUSED]
)
def test_all_that_is_set_in_a_file_is_a_setting_or_named(name: str) -> None:
    assert unnamed("llama_factory", name) == []


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_built_in_trainer_cannot_train_is_refused(name: str) -> None:
    found = refusal(name, files_of("llama_factory"))
    assert REFUSED[name] in f"{found.what} {found.why}"


def test_a_file_for_lora_becomes_settings() -> None:
    found = settings(imported("lora-instructions.yaml", files_of("llama_factory")))
    assert found == {
        "strategy.kind": "ddp",
        "hang.collective_seconds": 3600,
        "precision.dtype": "bf16",
        "batch.micro": 1,
        "batch.accumulation": 16,
        "batch.eval_micro": 2,
        "efficiency.gradient_checkpointing.every": True,
        "model.kind": "hf",
        "model.path": "our-org/helper-3b",
        "peft.kind": "lora",
        "peft.rank": 12,
        "peft.alpha": 24.0,
        "peft.target_modules": [],
        "data.kind": "dataset",
        "data.path": ["data/desk.json", "data/manual.json"],
        "data.packing": "none",
        "data.chat_template": "llama3",
        "data.validation_fraction": 0.02,
        "data.sequence_length": 1024,
        "data.workers": 2,
        "data.tokenizer": "our-org/helper-3b",
        "optimizer.name": "adamw_torch",
        "optimizer.lr": 0.0001,
        "optimizer.weight_decay": 0.0,
        "optimizer.beta2": 0.999,
        "schedule.name": "cosine",
        "schedule.min_lr_ratio": 0.0,
        "schedule.from_zero": True,
        "schedule.warmup_steps": 0.05,
        "train.epochs": 2.0,
        "train.seed": 42,
        "eval.every_steps": 125,
        "eval.batches": 1_000_000,
        "checkpoint.every_steps": 250,
        "checkpoint.keep": 0,
        "logging.every_steps": 10,
        "logging.report_to": [],
        "output.root": "saves/try",
    }


def test_what_trainer_takes_by_default_is_written_where_the_file_is_silent() -> None:
    found = read()
    assert (found["optimizer.lr"], found["optimizer.weight_decay"], found["optimizer.beta2"]) == (5e-5, 0.0, 0.999)
    assert (found["schedule.name"], found["schedule.min_lr_ratio"], found["schedule.warmup_steps"]) == ("linear", 0, 0)
    assert (found["train.epochs"], found["train.seed"]) == (3.0, 42)
    assert (found["batch.micro"], found["batch.accumulation"]) == (8, 1)
    assert (found["data.sequence_length"], found["precision.dtype"]) == (2048, "fp32")
    assert (found["checkpoint.every_steps"], found["checkpoint.keep"], found["eval.every_steps"]) == (500, 0, 0)
    assert found["efficiency.gradient_checkpointing.every"] is True


def test_trained_weights_are_in_32_bits_unless_the_file_says_pure_bf16() -> None:
    assert read(bf16=True)["precision.weights"] == "fp32"
    assert read(pure_bf16=True)["precision.weights"] == "bf16"


def test_an_adapter_has_twice_its_rank_as_alpha_where_the_file_is_silent() -> None:
    found = read(finetuning_type="lora", lora_rank=6)
    assert (found["peft.rank"], found["peft.alpha"]) == (6, 12.0)
    assert "finetuning_type is peft.kind" not in text_of(finetuning_type=None)
    assert read(finetuning_type=None)["peft.kind"] == "lora"


@pytest.mark.parametrize(
    ("entry", "path", "columns"),
    [
        ({"file_name": "x.json"}, "data/x.json", {}),
        ({"file_name": "x.json", "columns": {"prompt": "ask", "response": "tell"}}, "data/x.json",
         {"instruction": "ask", "output": "tell"}),
        ({"hf_hub_url": "our-org/x", "columns": {"prompt": "instruction", "response": "output", "system": "told"}},
         "our-org/x", {"system": "told"}),
        ({"file_name": "x.json", "formatting": "sharegpt"}, "data/x.json", {}),
        ({"file_name": "x.json", "formatting": "sharegpt", "columns": {"messages": "turns"},
          "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}},
         "data/x.json", {"messages": "turns"}),
        ({"file_name": "x.json", "formatting": "openai", "columns": {"messages": "said"}}, "data/x.json",
         {"messages": "said"}),
    ],
)  # fmt: skip
def test_rows_are_read_by_their_entry(entry: dict[str, Any], path: str, columns: dict[str, str]) -> None:
    found = read({"x": entry}, dataset="x")
    assert (found["data.path"], columns_of(found)) == (path, columns)


def test_texts_are_learned_whole_and_end_to_end() -> None:
    found = read({"x": {"file_name": "x.jsonl", "columns": {"prompt": "body"}}}, dataset="x", stage="pt")
    assert (columns_of(found), found["data.packing"]) == ({"text": "body"}, "dense")
    plain = read({"x": {"file_name": "x.txt"}}, dataset="x", stage="pt")
    assert (plain["data.kind"], plain["data.path"]) == ("text", "data/x.txt")


def test_a_data_set_that_nothing_describes_is_a_guess_that_says_so() -> None:
    text = imported("guessed.yaml", files_of("llama_factory"))
    assert settings(text)["data.path"] == "other/elsewhere.json"
    assert "other/dataset_info.json is not here: other/elsewhere.json is a guess" in comments(text)


@pytest.mark.parametrize(
    "keys",
    [
        {"stage": "ppo"},
        {"finetuning_type": "oft"},
        {"use_galore": True},
        {"use_dft_loss": True},
        {"mask_history": True},
        {"additional_target": "embed_tokens"},
        {"resize_vocab": True},
        {"quantization_bit": 4},
        {"image_max_pixels": 1024},
        {"template": "qwen3_vl"},
        {"neftune_noise_alpha": 5},
        {"lr_scheduler_type": "polynomial"},
        {"optim": "apollo_adamw"},
        {"label_smoothing_factor": 0.1},
        {"mix_strategy": "interleave_over"},
        {"dataset": "unknown"},
        {"resume_from_checkpoint": "saves/checkpoint-100"},
        {"deepspeed": {"optimizer": {"type": "AdamW", "params": {"lr": 1.0}}}},
    ],
)
def test_another_training_is_refused(keys: dict[str, Any]) -> None:
    assert next(iter(keys)) in why(**keys)


@pytest.mark.parametrize(
    "entry",
    [
        {"file_name": "x.json", "ranking": True},
        {"file_name": "x.json", "formatting": "sharegpt", "columns": {"messages": "messages", "images": "images"}},
        {"file_name": "x.json", "columns": {"prompt": "ask", "response": "tell", "history": "before"}},
        {"file_name": "x.json", "num_samples": 10},
        {"file_name": "x.json", "formatting": "sharegpt", "tags": {"role_tag": "who", "content_tag": "what"}},
        {"script_url": "x"},
    ],
)
def test_rows_that_are_no_answers_to_learn_are_refused(entry: dict[str, Any]) -> None:
    assert "x" in why({"x": entry}, dataset="x")


def test_the_first_rows_of_each_source_and_prompts_are_learned_where_the_file_says_so() -> None:
    found = read(max_samples=100, train_on_prompt=True)
    assert (found["data.max_rows"], found["data.train_on_prompts"]) == (100, True)
    assert "max_samples" in why({"x": {"file_name": "x.txt"}}, dataset="x", stage="pt", max_samples=5)


def test_a_fixed_length_leaves_out_the_epochs() -> None:
    text = text_of(max_steps=30, num_train_epochs=3.0, eval_strategy="steps", eval_steps=0.5, val_size=0.1)
    found = settings(text)
    assert (found["train.steps"], found.get("train.epochs"), found["eval.every_steps"]) == (30, None, 0.5)
    assert "num_train_epochs 3.0: max_steps counts" in comments(text)


def test_arguments_of_an_optimizer_by_its_class_reach_the_class() -> None:
    found = read(optim="lion_32bit", adam_beta2=0.99)
    assert (found["optimizer.name"], found["optimizer.args.betas"]) == ("bitsandbytes.optim:Lion", [0.9, 0.99])
    assert read(optim="sgd")["optimizer.beta1"] == 0.0  # Trainer's SGD has no momentum


def test_nothing_is_uploaded_unless_the_file_says_so() -> None:
    assert "checkpoint.push_to_hub.repo" not in read(hub_model_id="our-org/x")
    for given in ({"push_to_hub": True}, {"push_to_hub": True, "hub_model_id": "x"}):  # nobody says whose
        assert "checkpoint.push_to_hub.repo" not in read(**given)
        assert "owner/name" in comments(text_of(**given))
    found = read(hub_model_id="our-org/x", push_to_hub=True)
    assert (found["checkpoint.push_to_hub.repo"], found["checkpoint.push_to_hub.strategy"]) == (
        "our-org/x",
        "every_save",
    )


EVALUATED: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 10, "val_size": 0.1}


def test_what_the_best_checkpoint_is_by_is_measured_here_too() -> None:
    best: dict[str, Any] = {**EVALUATED, "load_best_model_at_end": True}
    found = read(**best)
    assert (found["checkpoint.keep_best"], found.get("eval.best_metric")) == (True, None)
    found = read(**best, compute_accuracy=True, metric_for_best_model="eval_accuracy")
    assert (found["eval.metrics"], found["eval.best_metric"]) == (["perplexity", "accuracy"], "accuracy")
    others: tuple[dict[str, Any], ...] = (
        {"metric_for_best_model": "rouge-l"},
        {"metric_for_best_model": "loss", "greater_is_better": True},
    )
    for other in others:
        text = text_of(**best, **other)
        assert "checkpoint.keep_best" not in settings(text)
        assert "load_best_model_at_end True" in comments(text)
    assert "eval.metrics" not in read(compute_accuracy=True)  # nothing is evaluated
