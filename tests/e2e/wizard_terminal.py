"""The real wizard in a real pseudo-terminal of 80 columns, and what its recipe becomes."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pexpect

from trainkit.cli.file_system import FileSystem
from trainkit.launch_plan.model import Plan
from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan
from trainkit.recipe.resolve import resolve
from trainkit.recipe.resolved import Request

DOWN, UP, ENTER = "\x1b[B", "\x1b[A", "\r"
# The beginning of each question by its topic.
QUESTIONS = {
    "program": "What do you want to do",
    "command": "Which script, with which arguments",
    "rows": "Which file or folder holds your data",
    "model": "Which model learns from it",
    "template": "How does a chat become one text",
    "method": "Are all weights trained, or adapters",
    "where": "Where does it run",
    "machines": "How many machines",
    "strategy": "How is the model spread",
    "sharding": "What is sharded",
    "wrapping": "Which modules are units",
    "offload": "What leaves the GPUs",
    "nvme": "In which folder on a fast disk",
    "launcher": "Who starts the processes",
    "data": "What text does it train on",
    "precision": "Which number format",
    "batch": "How many samples per step",
    "checkpointing": "Is memory so tight",
    "length": "How long does it train",
    "output": "In which folder are its runs saved",
    "saving": "Save after how many steps",
}


def spawn(folder: Path, environ: Mapping[str, str], words: Sequence[str] = (), **more: str) -> Any:
    """`trainkit config WORDS` on a terminal."""
    return pexpect.spawn(
        sys.executable,
        ["-m", "trainkit", "config", *words],
        cwd=str(folder),
        env={**environ, "TERM": "xterm-256color", **more},
        dimensions=(50, 80),
        timeout=60,
        encoding="utf-8",
    )


def converse(child: Any, **typed: str) -> list[str]:
    """Answer each question that comes with what is typed for its topic, else with Enter; then write the recipe.

    Returns the topics in order.
    """
    topics, patterns = list(QUESTIONS), [re.escape(each) for each in QUESTIONS.values()]
    asked: list[str] = []
    while (number := child.expect([*patterns, r"Write \S+\?"])) < len(topics):
        asked.append(topics[number])
        child.send(typed.get(topics[number], "") + ENTER)
        child.expect(rf"{len(asked)}\. {patterns[number]}[^\r\n]*\r\n")  # the line that stays
    child.send(ENTER)
    child.expect("is written")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    assert typed.keys() <= set(asked), asked
    return asked


def planned(folder: Path, facts: Facts, recipe: str = "recipe.yaml") -> Plan:
    """The plan of the recipe on a machine."""
    return build_plan(resolve(Request(recipe, str(folder)), FileSystem()), facts).plan


def contents(plan: Plan, name: str) -> Any:
    """A JSON file of the plan."""
    (found,) = (file.content for file in plan.files if file.path == name)
    return json.loads(found)


def words(plan: Plan) -> list[str]:
    """The whole command."""
    return [str(word) for word in plan.commands[0].argv]


def environment(plan: Plan) -> dict[str, str]:
    """The variables that the plan sets."""
    return {name: str(value) for name, value in plan.environment.set}
