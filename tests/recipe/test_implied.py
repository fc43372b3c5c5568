"""What follows from a recipe: kinds, the model's own tokenizer, and the defaults of fine-tuning, with their sources."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trainkit.cli.pipeline import resolve_request
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


@pytest.mark.parametrize(
    ("text", "override", "model", "left", "note"),
    [
        ("model: {layers: 2}\n", "model.path=m", "hf", {"path": "m"}, "model.path is m, which is a model of kind hf,"),
        ("model: {kind: gpt, layers: 2}\n", "model.path=m", "hf", {"path": "m"}, "which is a model of kind hf, at"),
        ("model: {target: 'a:b'}\n", "model.path=m", "hf", {"path": "m"}, "which is a model of kind hf, at"),
        (
            "model: {kind: hf, architecture: llama, config: {num_hidden_layers: 2}, task: masked_lm, mask_token: 3}\n",
            *("model.path=m", "hf", {"path": "m", "task": "masked_lm", "architecture": None, "config": {}}),
            "model.path takes the place of model.architecture",
        ),
        (
            "model: {kind: hf, path: m, revision: v1, config: {num_hidden_layers: 2}}\n",
            *("model.architecture=llama", "hf", {"path": None, "revision": None, "config": {}}),
            "model.architecture takes the place of model.path",
        ),
    ],
)
def test_a_model_that_a_stronger_layer_names_takes_the_place_of_another(
    text: str, override: str, model: str, left: dict[str, Any], note: str, solve: Solve
) -> None:
    resolved = solve(f"train: {{steps: 1}}\n{text}", overrides=(override,))
    found = resolved.recipe.model.model_dump()
    assert resolved.recipe.model.kind == model
    assert {name: found[name] for name in left} == left
    dropped = [each for entries in resolved.history.values() for each in entries if each.dropped]
    assert dropped and all(note in each.note for each in dropped)


def test_the_settings_of_a_model_with_weights_stay_where_its_path_changes(solve: Solve) -> None:
    text = "train: {steps: 1}\nmodel: {kind: hf, path: m, config: {rope_theta: 2.0}}\n"
    found = solve(text, overrides=("model.path=n",)).recipe.model.model_dump()
    assert (found["path"], found["config"]) == ("n", {"rope_theta": 2.0})


@pytest.mark.parametrize(
    ("text", "kind", "length"),
    [
        ("path: python-stdlib, sequence_length: 64", "dataset", 128),
        ("kind: text, path: python-stdlib, sequence_length: 64", "dataset", 128),
        ("kind: tokens, path: a.bin, dtype: uint16, sequence_length: 64", "dataset", 128),
        ("kind: text, path: rows.json, sequence_length: 64", "text", 64),  # source text of JSON, by that name
        ("path: folder, columns: {text: t}, sequence_length: 64", "dataset", 64),
        ("workers: 1", "dataset", 128),
    ],
)
def test_rows_that_a_stronger_layer_names_are_read_as_rows(text: str, kind: str, length: int, solve: Solve) -> None:
    recipe = solve(f"train: {{steps: 1}}\ndata: {{{text}}}\n", overrides=("data.path=chats.jsonl",)).recipe
    assert (recipe.data.kind, recipe.data.sequence_length) == (kind, length)
    assert recipe.data.workers == (1 if text == "workers: 1" else 0)


@pytest.mark.parametrize("name", ["quickstart", "moe", "ddp", "gpt-124m", "lora", "llama-8b-lora", "llama-70b-qlora"])
def test_another_model_in_a_shipped_recipe_brings_its_tokenizer(name: str) -> None:
    """In each of its variants, too."""
    for variant in (None, *resolve_request(name).variants):
        recipe = resolve_request(name, ["model.path=m"], variant=variant).recipe
        assert recipe.model.kind == "hf"
        assert recipe.data.kind == "tokens" or recipe.data.tokenizer == "m"  # type: ignore[union-attr]
