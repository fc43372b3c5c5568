"""Runs that only evaluate, and what compares evaluation losses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trainkit.errors import Diagnostic
from trainkit.recipe.resolved import Resolved

Solve = Callable[..., Resolved]
SHORT = "version: 1\ntrain: {steps: 3}\n"


@pytest.mark.parametrize(
    ("words", "steps", "every"),
    [
        (("--do_eval",), 0, 0),
        (("--do_train",), 3, 0),
        (("--do_train", "--do_eval"), 3, 1_000_000_000),
        (("--do_train", "--do_eval", "--eval_steps=2"), 3, 2),
        (("--do_eval=false",), 3, 0),
        (("--do_train=false",), 0, 0),
        (("train.steps=0",), 0, 0),
    ],
)
def test_do_eval_alone_trains_nothing_and_beside_do_train_evaluates_at_the_end(
    solve: Solve, words: tuple[str, ...], steps: int, every: int
) -> None:
    recipe = solve(SHORT, overrides=words).recipe
    assert (recipe.train.steps, recipe.eval.every_steps) == (steps, every)


@pytest.mark.parametrize("setting", ["eval: {patience: 2}", "checkpoint: {keep_best: true}"])
def test_what_goes_by_the_evaluation_loss_needs_evaluations(
    refuse: Callable[..., list[Diagnostic]], solve: Solve, setting: str
) -> None:
    (error,) = refuse(f"{SHORT}{setting}\n")
    assert "requires eval.every_steps > 0" in error.what
    assert solve(f"{SHORT}{setting}\n", overrides=("eval.every_steps=2",)).recipe.eval.every_steps == 2


CLASSES = "model: {kind: hf, architecture: bert, task: sequence_classification}\ndata: {kind: dataset, path: a}\n"
WRITES = "model: {kind: hf, architecture: t5, task: seq2seq_lm}\ndata: {kind: dataset, path: a}\n"
OWN_MODEL = "model: {kind: target, target: 'a:b'}\n"


@pytest.mark.parametrize(
    ("text", "evaluation", "what", "hint"),
    [
        ("", "metrics: [acuracy]", "eval.metrics", "accuracy"),
        ("", "metrics: [f1]", "eval.metrics f1 is for a classifier, and this is none", "perplexity"),
        ("", "metrics: [chrf]", "chrf is for a model of transformers that writes, with data.kind dataset", "remove it"),
        (CLASSES, "metrics: [perplexity]", "perplexity is for a language model with its own loss", "accuracy"),
        (OWN_MODEL, "metrics: ['m:f']", "m:f needs predictions", "remove it"),
        (OWN_MODEL, "metrics: [accuracy]", "accuracy is for a classifier", "remove it"),
        ("", "best_metric: perplexty", "perplexty is no number that an evaluation gives", "did you mean perplexity"),
        (WRITES, "{metrics: [rouge], best_metric: rouge}", "rouge is no number", "name one of rouge1, rouge2"),
        (CLASSES, "best_metric: chrf", "chrf is no number that an evaluation gives", "loss, accuracy"),
        ("", "greater_is_better: false", "is about eval.best_metric, which is the loss", "remove it"),
        (CLASSES, "tokens: 5", "eval.tokens is for models of transformers that write", "remove it"),
        (
            "",
            "{every_steps: 0, metrics: [perplexity]}",
            "eval.metrics requires eval.every_steps > 0",
            "eval.every_steps",
        ),
    ],
)
def test_metrics_that_nothing_can_be_measured_by_are_errors_with_a_way_out(
    refuse: Callable[..., list[Diagnostic]], text: str, evaluation: str, what: str, hint: str
) -> None:
    given = evaluation.strip("{}")
    every = "" if "every_steps" in given else "every_steps: 2, "
    (found,) = refuse(f"{SHORT}{text}eval: {{{every}{given}}}\n")
    assert what in found.what
    assert hint in found.hint


@pytest.mark.parametrize(
    ("text", "evaluation"),
    [
        (CLASSES, "metrics: [accuracy, f1_macro, 'm:f'], best_metric: f1_macro"),
        (CLASSES, "best_metric: f1"),  # of the task by itself
        ("", "best_metric: perplexity"),
        (WRITES, "metrics: [rouge, exact_match], best_metric: rougeL, tokens: 7"),
        (WRITES, "best_metric: chrf, patience: 2"),
        ("", "metrics: []"),
        (CLASSES, "metrics: ['m:f'], best_metric: what_it_returns, greater_is_better: false"),
    ],
)
def test_metrics_that_fit_the_task_are_taken(solve: Solve, text: str, evaluation: str) -> None:
    assert solve(f"{SHORT}{text}eval: {{every_steps: 2, {evaluation}}}\n").recipe.eval.every_steps == 2
