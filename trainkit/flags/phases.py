"""Flags for which parts of a run are wanted: HF's `--do_train`, `--do_eval`, `--do_predict`, and `--profile`."""

from __future__ import annotations

from collections.abc import Mapping

from trainkit.flags.flag import Flag, Outcome, Use, setting_reader, switched_on
from trainkit.recipe.layers.layer import ARGUMENTS

PROFILED = 3  # steps: enough to see one that is like another
ONLY_AT_THE_END = 1_000_000_000  # eval.every_steps evaluates at the end in any case


def _for_script(use: Use) -> bool:
    """Whether the program is the user's own: its script says what a phase is."""
    return (use.current("program.kind") or "builtin") != "builtin"


def _to_script(use: Use) -> Outcome:
    """The flag as one of the program's own words, where these are given by name."""
    args = use.current(ARGUMENTS)
    if args is None or isinstance(args, Mapping):
        return [use.assign(f"{ARGUMENTS}.{use.name}", switched_on(use))], []
    hint = f"write it behind the end of trainkit's own: -- --{use.name}"
    return [], [use.error(f"--{use.name} is for the program, whose words are given as a list", hint, key=ARGUMENTS)]


def _do_train(use: Use) -> Outcome:
    """Training is what a run does anyway; only its denial changes something."""
    if _for_script(use):
        return _to_script(use)
    return ([] if switched_on(use) else [use.assign("train.steps", 0)]), []


def _do_eval(use: Use) -> Outcome:
    """Alone it evaluates and trains nothing; beside `--do_train` it evaluates after training."""
    if _for_script(use):
        return _to_script(use)
    if not switched_on(use):
        return [], []
    if "do_train" not in use.given:
        return [use.assign("train.steps", 0)], []
    silent = "eval_steps" not in use.given and not use.current("eval.every_steps")
    return ([use.assign("eval.every_steps", ONLY_AT_THE_END)] if silent else []), []


def _do_predict(use: Use) -> Outcome:
    """Alone it predicts the validation samples and trains nothing; beside `--do_train` it does so after training."""
    if not switched_on(use):
        return [use.assign("predict.split", "none")], []
    chosen = use.current("predict.split")
    made = [use.assign("predict.split", chosen if chosen not in (None, "none") else "validation")]
    return made + ([] if "do_train" in use.given else [use.assign("train.steps", 0)]), []


def _profile(use: Use) -> Outcome:
    """The bare flag watches a few steps, or as many as a file says."""
    if use.value is not None:
        return setting_reader("profile.steps")(use)
    return ([] if use.current("profile.steps") else [use.assign("profile.steps", PROFILED)]), []


PHASES = (
    Flag(
        "do_train",
        "switch",
        ("train.steps", "program.args"),
        "Train, which is the default; `false` trains nothing. A script of your own gets the flag itself.",
        _do_train,
    ),
    Flag(
        "do_eval",
        "switch",
        ("train.steps", "eval.every_steps", "program.args"),
        "Evaluate and train nothing; with --do_train, evaluate after training (at least). A script of your own gets "
        "the flag itself.",
        _do_eval,
    ),
    Flag(
        "do_predict",
        "switch",
        ("train.steps", "predict.split"),
        "Predict (the validation samples, unless predict.split says others) and train nothing; with --do_train, "
        "predict after training.",
        _do_predict,
    ),
    Flag(
        "profile",
        "optional",
        ("profile.steps",),
        f"Watch some steps with torch.profiler ({PROFILED} where no number is given): time by groups of operators, and "
        "a trace file.",
        _profile,
        "steps",
        "STEPS",
    ),
)
