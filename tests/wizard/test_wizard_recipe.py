"""The recipe that the answers make: valid, short, commented, on top of presets and of what it extends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.wizard.conftest import Machine, Start, answered
from trainkit.cli.machines import machine_facts, profiles
from trainkit.planner.build import build_plan
from trainkit.recipe.merge import Merge
from trainkit.recipe.resolved import Resolved
from trainkit.wizard.question import resolve_text
from trainkit.wizard.session import Session, answers_text, compose, finish, read_given


def written(session: Session, folder: Path, name: str = "mine.yaml") -> tuple[str, Resolved]:
    """The recipe's text, and what it resolves to."""
    text = compose(session.view, str(folder / name))
    return text, resolve_text(session.view, text, name)


def tree(text: str) -> dict[str, Any]:
    """The recipe as any YAML reader sees it, less what every recipe has."""
    read = yaml.safe_load(text)
    return {key: value for key, value in read.items() if key not in ("version", "name")}


@pytest.mark.parametrize(
    ("count", "typed"),
    [
        (0, {}),
        (0, {"where": "cpu-2", "strategy": "zero3", "offload": "cpu-all"}),
        (1, {"precision": "fp32", "checkpointing": "yes", "batch": "64/8"}),
        (1, {"where": "cpu", "data": "corpus/**/*.txt", "length": "2.5 epochs/100"}),
        (2, {"strategy": "fsdp", "sharding": "offload", "wrapping": "BertLayer,T5Block"}),
        (2, {"where": "1,0", "strategy": "zero2", "offload": "cpu", "launcher": "accelerate"}),
        (2, {"where": "nodes", "machines": "4 first:2950", "strategy": "ddp"}),
        (1, {"program": "torch", "command": "train.py --lr 0.1 'two words' -x"}),
    ],
)
def test_the_recipe_says_what_was_answered(
    machine: Machine, start: Start, tmp_path: Path, count: int, typed: dict[str, str]
) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").touch()
    session, _ = answered(start(machine(count)), **typed)
    text, resolved = written(session, tmp_path)
    for key, value in session.view.chosen.items():
        found: Any = resolved.recipe
        for name in key.split("."):
            found = getattr(found, {"global": "global_"}.get(name, name))
        assert found == value, key
    assert build_plan(resolved, session.view.facts).plan.name == "mine"
    assert all(len(line) <= 100 for line in text.splitlines())


def test_presets_stand_for_what_they_say_and_defaults_are_not_written(
    machine: Machine, start: Start, tmp_path: Path
) -> None:
    session, _ = answered(start(machine(1)))
    text, _ = written(session, tmp_path)
    assert tree(text) == {
        "extends": ["devices/single-gpu", "precision/bf16"],
        "batch": {"global": 32, "micro": 32},
        "train": {"steps": 500},
        "checkpoint": {"every_steps": 250},
    }
    session, _ = answered(start(machine(2)), strategy="fsdp", sharding="offload")
    text, _ = written(session, tmp_path)
    assert tree(text)["extends"] == ["strategy/fsdp-offload", "precision/bf16"]
    assert "strategy" not in tree(text)


def test_every_line_that_was_chosen_has_its_reason(machine: Machine, start: Start, tmp_path: Path) -> None:
    session, _ = answered(
        start(machine(2)), strategy="zero3", offload="cpu", launcher="accelerate", checkpointing="yes"
    )
    text, _ = written(session, tmp_path)
    reasons = {answer.reason for answer in session.view.answers if any(map(session.view.written, answer.sets))}
    flat = " ".join(text.replace("#", " ").split())
    assert len(reasons) > 5
    assert all(reason in flat for reason in reasons)


def test_a_result_that_extends_holds_only_what_differs(machine: Machine, start: Start, tmp_path: Path) -> None:
    session, _ = answered(start(machine(0), base="recipes/fsdp"))
    text, resolved = written(session, tmp_path)
    assert tree(text) == {"extends": ["recipes/fsdp"]}
    assert resolved.recipe.train.steps == 50
    session, _ = answered(start(machine(0), base="recipes/fsdp"), strategy="ddp", length="7")
    text, resolved = written(session, tmp_path)
    assert tree(text) == {"extends": ["recipes/fsdp", "strategy/ddp"], "train": {"steps": 7}}
    assert resolved.recipe.strategy.kind == "ddp"
    assert resolved.recipe.optimizer.lr == 3.0e-3


def test_a_base_is_named_from_the_folder_of_the_recipe(machine: Machine, start: Start, tmp_path: Path) -> None:
    (tmp_path / "team.yaml").write_text("version: 1\ntrain: {steps: 9}\n")
    (tmp_path / "below").mkdir()
    session, _ = answered(start(machine(0), base="team.yaml"))
    for name, reference in (("mine.yaml", "./team.yaml"), ("below/mine.yaml", "../team.yaml")):
        text, resolved = written(session, tmp_path, name)
        assert tree(text)["extends"] == [reference]
        assert resolved.recipe.train.steps == 9


@pytest.mark.parametrize(
    ("name", "called"), [("a b.yaml", "a-b"), ("x/run.2.yaml", "run.2"), ("mine", "mine"), ("ü.yaml", "run")]
)
def test_the_run_is_named_after_the_file(
    machine: Machine, start: Start, tmp_path: Path, name: str, called: str
) -> None:
    session, _ = answered(start(machine(0)))
    assert yaml.safe_load(compose(session.view, str(tmp_path / name)))["name"] == called


def test_kept_answers_are_the_same_answers_again(machine: Machine, start: Start, tmp_path: Path) -> None:
    session, _ = answered(start(machine(2)), strategy="zero2", offload="cpu", batch="64/4")

    (tmp_path / "kept.yaml").write_text(answers_text(session.view, "trainkit config"))
    given, _ = read_given("kept.yaml", (), session.view.files, str(tmp_path))
    assert given == session.view.chosen
    again, topics = answered(start(machine(2), given))
    assert topics == []
    assert tree(compose(again.view, "/x/a.yaml")) == tree(compose(session.view, "/x/a.yaml"))


def test_a_choice_that_was_given_has_the_reason_of_the_choice(machine: Machine, start: Start, tmp_path: Path) -> None:
    session, _ = answered(start(machine(2), {"strategy.kind": "zero2", "batch.global": 64}))
    text, _ = written(session, tmp_path)
    flat = " ".join(text.replace("#", " ").split())
    assert "Optimizer state and gradients partitioned over ranks; room for about" in flat
    assert "batch: {global: 64}  # given" in text


@pytest.mark.parametrize("name", sorted(profiles()))
def test_each_shipped_machine_gets_a_recipe_that_it_can_run(start: Start, tmp_path: Path, name: str) -> None:
    session, _ = answered(start(machine_facts(name)))
    plan = finish(session.view, str(tmp_path / "mine.yaml"), Merge()).plan
    assert not [notice for notice in plan.notices if notice.severity == "blocker"]
    cards = len(session.view.facts.gpus)
    assert plan.topology.world_size == max(cards, 1)


def test_the_plan_at_the_end_is_the_planners(machine: Machine, start: Start, tmp_path: Path) -> None:
    session, _ = answered(start(machine(2)), strategy="fsdp")
    finished = finish(session.view, str(tmp_path / "mine.yaml"), Merge())
    assert finished.plan.strategy.kind == "fsdp"
    assert finished.plan.topology.world_size == 2
    (tmp_path / "mine.yaml").write_text(finished.text)
    again = resolve_text(session.view, finished.text, "mine.yaml")
    assert build_plan(again, session.view.facts).plan == finished.plan


@pytest.mark.parametrize("program", ["torch", "hf", "accelerate", "deepspeed"])
@pytest.mark.parametrize("name", ["8xh100", "1x4090", "laptop-cpu"])
def test_what_is_proposed_for_a_script_of_each_kind_can_be_planned(start: Start, name: str, program: str) -> None:
    session, _ = answered(start(machine_facts(name), {"program.kind": program, "program.script": "train.py"}))
    result = session.view.outcome
    assert not result.errors
    assert result.plan is not None
    if program == "deepspeed":
        assert result.plan.strategy.kind.startswith("zero")
