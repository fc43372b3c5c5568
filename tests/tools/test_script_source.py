"""A script whose source shows that no flag reaches its TrainingArguments is refused what only flags would say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from trainkit.errors import RecipeError
from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan
from trainkit.recipe.resolved import Resolved

Layered = Callable[..., Resolved]
Machine = Callable[..., Facts]

PACKAGES = {"torch": "2.13.0", "accelerate": "1.15.0", "deepspeed": "0.19.8", "transformers": "5.23.0"}
HF: dict[str, Any] = {"program": {"kind": "hf", "script": "train.py"}, "devices": {"type": "cpu"}}
WRITTEN_OUT = """\
from transformers import Trainer, TrainingArguments
rate = 1e-4
args = TrainingArguments(
    output_dir="out", max_steps=2, learning_rate=rate, report_to=["none"], per_device_train_batch_size=4,
)
args.seed = rate
Trainer(args=args).train()
"""


@pytest.fixture
def refused(layered: Layered, machine: Machine) -> Callable[..., list[tuple[str, str]]]:
    """(key, why) of the errors of a recipe for a script with this source."""

    def errors(source: str, **recipe: Any) -> list[tuple[str, str]]:
        try:
            build_plan(replace(layered(HF, recipe), script=source), machine(packages=PACKAGES))
        except RecipeError as error:
            return [(each.key, each.why) for each in error.diagnostics]
        return []

    return errors


@pytest.mark.parametrize(
    ("recipe", "key", "why"),
    [
        ({"train": {"steps": 5}}, "train.steps", "line 3 says max_steps=2"),
        ({"batch": {"micro": 2}}, "batch.micro", "per_device_train_batch_size=4"),
        ({"batch": {"global": 8}}, "batch.global", "per_device_train_batch_size=4"),
        ({"logging": {"report_to": ["wandb"]}}, "logging.report_to", "report_to=['none']"),
        ({"precision": {"dtype": "bf16"}}, "precision.dtype", "leaves bf16 at its default"),
        ({"strategy": {"kind": "zero2"}}, "strategy.kind", "leaves deepspeed at its default"),
    ],
)
def test_a_setting_that_is_written_out_in_the_script_is_refused_with_its_line(
    refused: Callable[..., list[tuple[str, str]]], recipe: dict[str, Any], key: str, why: str
) -> None:
    found = refused(WRITTEN_OUT, **recipe)
    assert {each for each, _ in found} == {key}
    assert any(why in each for _, each in found)


@pytest.mark.parametrize(
    ("source", "recipe"),
    [
        (WRITTEN_OUT, {}),  # nothing is said
        (WRITTEN_OUT, {"strategy": {"kind": "ddp"}}),  # the launcher says it
        (WRITTEN_OUT, {"optimizer": {"lr": 0.1}}),  # `rate` may be anything
        (WRITTEN_OUT, {"train": {"seed": 3}}),  # set later
        (WRITTEN_OUT.replace("max_steps=2", "**more"), {"train": {"steps": 5}}),
        (f"{WRITTEN_OUT}parser = HfArgumentParser(TrainingArguments)\n", {"train": {"steps": 5}}),
        (f"{WRITTEN_OUT}other = TrainingArguments(max_steps=3)\n", {"train": {"steps": 5}}),
        (WRITTEN_OUT.replace("max_steps=2", "max_steps=cli.steps"), {"train": {"steps": 5}}),
        ("", {"train": {"steps": 5}}),
        ("def TrainingArguments(", {"train": {"steps": 5}}),
    ],
)
def test_what_the_source_does_not_show_is_left_to_the_proof(
    refused: Callable[..., list[tuple[str, str]]], source: str, recipe: dict[str, Any]
) -> None:
    assert refused(source, **recipe) == []


@pytest.mark.parametrize(
    ("source", "severity"),
    [("trainer.train(resume_from_checkpoint=args.x)", "note"), ("trainer.train()", "warning"), ("", "note")],
)
def test_a_script_that_names_no_checkpoint_is_warned_about(
    layered: Layered, machine: Machine, source: str, severity: str
) -> None:
    resolved = replace(layered(HF, {"checkpoint": {"resume": "/old/checkpoint-40"}}), script=source)
    plan = build_plan(resolved, machine(packages=PACKAGES)).plan
    (notice,) = [each for each in plan.notices if "hand it to train()" in each.what]
    assert notice.severity == severity
