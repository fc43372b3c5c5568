"""HF's flags for which parts of a run are wanted: `--do_train`, `--do_eval`."""

from __future__ import annotations

from trainkit.recipe.flag import Flag, Outcome, Use, switched_on

ONLY_AT_THE_END = 1_000_000_000  # eval.every_steps evaluates at the end in any case


def _do_train(use: Use) -> Outcome:
    """Training is what a run does anyway; only its denial changes something."""
    return ([] if switched_on(use) else [use.assign("train.steps", 0)]), []


def _do_eval(use: Use) -> Outcome:
    """Alone it evaluates and trains nothing; beside `--do_train` it evaluates after training."""
    if not switched_on(use):
        return [], []
    if "do_train" not in use.given:
        return [use.assign("train.steps", 0)], []
    silent = "eval_steps" not in use.given and not use.current("eval.every_steps")
    return ([use.assign("eval.every_steps", ONLY_AT_THE_END)] if silent else []), []


PHASES = (
    Flag("do_train", "switch", ("train.steps",), "Train, which is the default; `false` trains nothing.", _do_train),
    Flag(
        "do_eval",
        "switch",
        ("train.steps", "eval.every_steps"),
        "Evaluate and train nothing; with --do_train, evaluate after training (at least).",
        _do_eval,
    ),
)
