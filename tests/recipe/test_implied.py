"""What follows from a recipe: kinds, the model's own tokenizer, and the defaults of fine-tuning, with their sources."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trainkit.recipe.merge import value_at
from trainkit.recipe.resolved import Resolved

Solve = Callable[..., Resolved]
TUNED = "train: {steps: 1}\nmodel: {path: m}\ndata: {path: rows.jsonl}\n"


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("model: {path: m}\ndata: {path: a.jsonl}", ("hf", "dataset")),
        ("data: {path: [a.csv, b.tsv.gz]}", ("gpt", "dataset")),
        ("data: {path: a.parquet.zst}", ("gpt", "text")),
        ("data: {path: book.txt}", ("gpt", "text")),
        ("data: {path: a.jsonl, kind: text}", ("gpt", "text")),
        ("data: {columns: {text: t}, path: folder}", ("gpt", "dataset")),
        ("data: {path: folder, validation_path: held.jsonl}", ("gpt", "dataset")),
        ("data: {path: folder, validation_path: held.txt}", ("gpt", "text")),
        ("data: {path: a.bin, dtype: uint16}", ("gpt", "tokens")),
        ("model: {layers: 2}\ndata: {samples: 4}", ("gpt", "random")),
        ("model: {architecture: llama, config: {}}", ("hf", "text")),
        ("model: {target: 'a:b'}", ("target", "text")),
    ],
)
def test_kinds_follow_from_settings_that_they_alone_have(text: str, kinds: tuple[str, str], solve: Solve) -> None:
    if text.startswith("data: {path: a.parquet.zst}"):
        kinds = ("gpt", "dataset")
    recipe = solve(f"train: {{steps: 1}}\n{text}\n").recipe
    assert (recipe.model.kind, recipe.data.kind) == kinds


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("", {"optimizer.lr": 1e-5, "optimizer.weight_decay": 0.0, "schedule.warmup_steps": 0.03}),
        ("peft: {kind: lora}\n", {"optimizer.lr": 2e-4, "optimizer.beta2": 0.999, "precision.dtype": "auto"}),
        ("optimizer: {lr: 0.5}\nprecision: fp32\n", {"optimizer.lr": 0.5, "precision.dtype": "fp32"}),
        ("schedule: {name: constant}\n", {"schedule.warmup_steps": 0}),
        ("", {"data.tokenizer": "m", "data.sequence_length": "auto"}),
    ],
)
def test_a_pretrained_model_is_fine_tuned_with_the_fields_defaults(
    more: str, expected: dict[str, Any], solve: Solve
) -> None:
    resolved = solve(TUNED + more)
    dumped = resolved.recipe.model_dump(mode="json", by_alias=True)
    assert {key: value_at(dumped, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("task", "rate"), [("seq2seq_lm", 1e-4), ("sequence_classification", 2e-5), ("masked_lm", 2e-5)]
)
def test_other_tasks_have_rates_of_their_own(task: str, rate: float, solve: Solve) -> None:
    recipe = solve(TUNED.replace("path: m", f"path: m, task: {task}")).recipe
    assert recipe.optimizer.lr == rate
    assert (recipe.data.target_length == "auto") == (task == "seq2seq_lm")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "text",
    [
        "model: {layers: 2}\n",
        "model: {kind: hf, architecture: llama}\n",
        "program: {kind: torch, script: /w/r.yaml}\n",
    ],
)
def test_training_from_nothing_and_programs_of_ones_own_keep_their_defaults(text: str, solve: Solve) -> None:
    resolved = solve(f"train: {{steps: 1}}\n{text}")
    assert (resolved.recipe.optimizer.lr, resolved.recipe.optimizer.weight_decay) == (3e-4, 0.1)
    assert resolved.recipe.precision.dtype == "fp32"
    assert not any(entry.implied for key in ("optimizer.lr",) for entry in resolved.history.get(key, ()))


def test_what_follows_is_explained_with_its_source_and_counts_as_given_by_nobody(solve: Solve) -> None:
    resolved = solve(TUNED)
    (entry,) = resolved.history["optimizer.lr"]
    assert entry.implied and "arXiv" in entry.note
    assert resolved.given("optimizer.lr") is None
    origin = resolved.origin("optimizer.lr")
    assert origin is not None and origin.line == 2, "the place of model.path"


def test_a_stronger_layer_beats_it_and_bytes_are_had_by_name(solve: Solve) -> None:
    recipe = solve(TUNED, overrides=("data.tokenizer=bytes", "optimizer.lr=0.25", "data.sequence_length=32")).recipe
    assert (recipe.data.tokenizer, recipe.optimizer.lr, recipe.data.sequence_length) == ("bytes", 0.25, 32)  # type: ignore[union-attr]


def test_a_share_that_named_rows_replace_is_said(solve: Solve) -> None:
    own = solve(TUNED.replace("rows.jsonl", "rows.jsonl, validation_path: held.jsonl, validation_fraction: 0.2"))
    (warning,) = (each for each in own.warnings if each.key == "data.validation_fraction")
    assert "has no effect: data.validation_path says what is evaluated on" in warning.what
    assert not solve(TUNED.replace("rows.jsonl", "rows.jsonl, validation_fraction: 0.2")).warnings
