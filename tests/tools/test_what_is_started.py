"""What a plan starts for a program of the user's own: the interpreter with a Python file, any other file itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan
from trainkit.recipe.resolved import Resolved

Layered = Callable[..., Resolved]
Machine = Callable[..., Facts]


@pytest.mark.parametrize(
    ("target", "words", "named"),
    [
        ({"script": "a b/train.py"}, ["/opt/python", "a b/train.py"], "your script a b/train.py"),
        ({"script": "-train.py"}, ["/opt/python", "./-train.py"], "your script -train.py"),
        ({"script": "train.pyz"}, ["/opt/python", "train.pyz"], "your script train.pyz"),
        ({"module": "pkg.mod"}, ["/opt/python", "-m", "pkg.mod"], "your module pkg.mod"),
        ({"script": "train.sh"}, ["./train.sh"], "your executable train.sh"),
        ({"script": "bin/train"}, ["bin/train"], "your executable bin/train"),
        ({"script": "/opt/train"}, ["/opt/train"], "your executable /opt/train"),
    ],
)
@pytest.mark.parametrize("kind", ["torch", "hf", "accelerate", "deepspeed"])
def test_the_name_decides_whether_the_interpreter_runs_it(
    layered: Layered, machine: Machine, kind: str, target: dict[str, str], words: list[str], named: str
) -> None:
    packages = {"torch": "2.13.0", "accelerate": "1.15.0", "deepspeed": "0.19.8", "transformers": "5.23.0"}
    strategy = {"kind": "zero1" if kind == "deepspeed" else "single"}
    recipe = {"program": {"kind": kind, **target}, "strategy": strategy, "devices": {"type": "cpu"}}
    plan = build_plan(layered(recipe), machine(packages=packages)).plan
    started = [str(word) for word in plan.commands[0].program[: len(words)]]
    assert started == words
    assert plan.program.reason.startswith(named)
