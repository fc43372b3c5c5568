"""The libraries' log levels follow the rank's: one on main ranks, another on the rest, none where none is asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trainkit.launch_plan.model import Plan
from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan
from trainkit.recipe.resolved import Resolved

Layered = Callable[..., Resolved]
Machine = Callable[..., Facts]
PACKAGES = {"torch": "2.13.0", "accelerate": "1.15.0", "transformers": "5.23.0"}


def planned(layered: Layered, machine: Machine, kind: str, **logging: Any) -> Plan:
    program = {"kind": kind, "script": "train.py"}
    strategy = {"kind": "ddp"}
    recipe: dict[str, Any] = {"program": program, "strategy": strategy, "devices": {"type": "cpu"}}
    recipe |= {"logging": logging} if logging else {}
    return build_plan(layered(recipe), machine(packages=PACKAGES)).plan


@pytest.mark.parametrize("kind", ["hf", "accelerate"])
@pytest.mark.parametrize("library", ["TRANSFORMERS_VERBOSITY", "DATASETS_VERBOSITY"])
@pytest.mark.parametrize(("each_node", "main"), [(True, "each-node"), (False, "one")])
def test_both_libraries_are_told_the_level_of_the_rank(
    layered: Layered, machine: Machine, kind: str, library: str, each_node: bool, main: str
) -> None:
    plan = planned(layered, machine, kind, level="warning", replica_level="error", each_node=each_node)
    wrapper = [str(word) for word in plan.commands[0].wrapper]
    assert str(dict(plan.environment.set)[library]) == "warning"
    assert wrapper[wrapper.index(f"{library}=error") - 1] == "--replica-env"
    assert wrapper[wrapper.index("--main") + 1] == main


@pytest.mark.parametrize("kind", ["hf", "accelerate"])
def test_a_recipe_without_levels_leaves_the_libraries_theirs(layered: Layered, machine: Machine, kind: str) -> None:
    plan = planned(layered, machine, kind)
    assert not [name for name, _ in plan.environment.set if name.endswith("_VERBOSITY")]
    assert "--replica-env" not in [str(word) for word in plan.commands[0].wrapper]
