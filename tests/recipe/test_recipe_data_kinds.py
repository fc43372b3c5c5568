"""Settings of data and models that do not go together, and flags that stand for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trainkit.errors import Diagnostic
from trainkit.recipe.resolved import Resolved

HEAD = "version: 1\ntrain: {steps: 1}\n"
CLASSES = "model: {kind: hf, architecture: bert, task: sequence_classification}\n"
WRITES = "model: {kind: hf, architecture: t5, task: seq2seq_lm}\n"
PAIRS = WRITES + "data: {kind: dataset, path: a}\n"
MASKED = "model: {kind: hf, architecture: bert, task: masked_lm}\n"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("data: {kind: dataset, path: a, columns: {promt: l}}", "columns has no part 'promt'"),
        ("data: {kind: dataset, path: a, labels: [x, y]}", "data.labels: labels are for model.task"),
        (
            "data: {kind: dataset, path: a, validation_path: b, validation_split: c}",
            "each name the rows to evaluate on",
        ),
        ("data: {kind: dataset}", "path must name a file of rows"),
        ("data: {kind: dataset, path: a, columns: {label: l}}", "labels are for model.task sequence_classification"),
        (CLASSES + "data: {kind: tokens, path: a.npy}", "needs labels, and tokens has none"),
        (MASKED + "data: {kind: dataset, path: a}", "masked_lm requires model.mask_token"),
        (MASKED + "sample: {prompt: x}", "a model for masked_lm cannot continue a text"),
        ("data: {kind: dataset, path: a, sequence_length: auto}", "a gpt has as many positions as that says"),
        (WRITES + "data: {kind: text}", "needs sources with targets, and data.kind text has none"),
        (WRITES + "data: {kind: tokens, path: a.npy}", "needs sources with targets, and data.kind tokens has none"),
        (WRITES + "data: {kind: dataset, path: a, columns: {label: l}}", "are for model.task sequence_classification"),
        (
            MASKED + "data: {kind: dataset, path: a, train_on_prompts: true}",
            "data.train_on_prompts is for model.task causal_lm, and masked_lm learns no prompt",
        ),
        ("data: {kind: dataset, path: a, max_rows: 0}", "data.max_rows must be"),
        (PAIRS + "predict: {tokens: 8}", "predict.tokens requires predict.split"),
        ("predict: {split: all, tokens: 8}", "predict.tokens is for models of transformers that write"),
        (
            WRITES + "data: {kind: target, target: 'a:b'}\npredict: {split: all, tokens: 8}",
            "predict.tokens needs rows with prompts or sources, and data.kind target has none",
        ),
        ("data: {kind: dataset, path: a, target_length: 8}", "data.target_length is for model.task seq2seq_lm"),
        ("data: {kind: random, target_length: 8}", "data.target_length is for model.task seq2seq_lm"),
        ("data: {kind: dataset, path: a, padding: max_length}", "data.padding is for model.task seq2seq_lm"),
        ("model: {kind: target, target: 'a:b'}\nsample: {prompt: x}", "a model of the user's own cannot continue"),
        ("model: {kind: hf, architecture: bert, mask_token: 3}", "mask_share and mask_token are for task masked_lm"),
        ("model: {kind: target, target: a.b}", "model.target must be an import path"),
        ("train: {steps: 1, loss_reduction: sum}", "a model of the user's own, and there is neither"),
        ("train: {steps: 1, loss: a.b}", "train.loss must be"),
        ("data: {persistent_workers: false}", "data.persistent_workers must be true, not false"),
    ],
)
def test_settings_that_mean_nothing_together_are_errors(
    text: str, what: str, refuse: Callable[..., list[Diagnostic]]
) -> None:
    found = refuse((HEAD if "train:" not in text else "version: 1\n") + text + "\n")
    assert any(what in each.what for each in found), [each.what for each in found]


@pytest.mark.parametrize(
    ("flags", "steps", "split"),
    [
        (["--do_predict"], 0, "validation"),
        (["--do_predict", "predict=all"], 0, "all"),
        (["--do_train", "--do_predict"], 1, "validation"),
        (["--do_predict=false"], 1, "none"),
        (["--dataloader_persistent_workers"], 1, "none"),
    ],
)
def test_predictions_alone_train_nothing(
    flags: list[str], steps: int, split: str, solve: Callable[..., Resolved]
) -> None:
    recipe: Any = solve(HEAD, overrides=tuple(flags)).recipe
    assert (recipe.train.steps, recipe.predict.split) == (steps, split)
