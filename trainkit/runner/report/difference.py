"""Differences between two runs: their recipes, plans and environments."""

from __future__ import annotations

import contextlib
import difflib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from trainkit.errors import MachineError
from trainkit.files import read_whole
from trainkit.launch_plan.model import Plan
from trainkit.launch_plan.render.explain import decisions, leaves
from trainkit.recipe.secrets import MASK, mask_line, mask_words, secret_keys, why_secret
from trainkit.recipe.yaml_reader import compose_bytes
from trainkit.runner.rundir.code_state import read_code
from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.rundir.listing import RunInfo, read_plan

# Name -> the values of the first and of the second run; None where one has none.
Difference = dict[str, tuple[Any, Any]]
CHANCE = ("MASTER_PORT",)  # variables that differ between any two runs
MIRRORS = ("trainer.json",)  # planned files that repeat the recipe


def differences(first: RunInfo, second: RunInfo) -> dict[str, Difference]:
    """By part: recipe, plan, environment. Secrets are masked; a file that cannot be read is a difference itself."""
    plans = [_plan(each.layout) for each in (first, second)]
    found = {
        "recipe": compared(*(recipe_values(each.layout) for each in (first, second))),
        "plan": compared(*(_decisions(each) for each in plans)),
        "environment": compared(*(_environment(each, plan) for each, plan in zip((first, second), plans, strict=True))),
    }
    if plans[0] and plans[1]:
        found["plan"] |= dict(_arguments(plans[0], plans[1]))
    return found


def compared(first: Mapping[str, Any], second: Mapping[str, Any]) -> Difference:
    """What differs, in the order of the names."""
    names = sorted({*first, *second})
    return {name: (first.get(name), second.get(name)) for name in names if first.get(name) != second.get(name)}


def recipe_values(layout: RunLayout) -> dict[str, Any]:
    """The resolved recipe by dotted keys, secrets masked; of one that cannot be read only why."""
    try:
        read = compose_bytes(read_whole(layout.recipe, below=layout.root))
    except OSError as error:
        return {layout.recipe.name: f"cannot be read: {error.strerror}"}
    secret = dict(secret_keys(read.tree))

    def masked(key: str, value: Any) -> Any:
        if isinstance(value, list):
            return [masked(f"{key}.{position}", each) for position, each in enumerate(value)]
        return MASK if key in secret else value

    known = {key: masked(key, value) for key, value in leaves(read.tree).items()}
    return {layout.recipe.name: f"is damaged: {read.errors[0].what}"} if read.errors else known


def _plan(layout: RunLayout) -> Plan | None:
    with contextlib.suppress(MachineError):
        return read_plan(layout)
    return None


def _decisions(plan: Plan | None) -> dict[str, Any]:
    """Decisions of a plan, and the content of the files it writes, by dotted keys."""
    if plan is None:
        return {"plan.json": "is damaged, or of another version"}
    found = decisions(plan)
    for file in plan.files:
        if file.path not in MIRRORS and file.path.endswith(".json"):
            found |= leaves(json.loads(file.content), file.path)
    return {key: MASK if why_secret(key.rpartition(".")[2], value) else value for key, value in found.items()}


def _arguments(first: Plan, second: Plan) -> Iterator[tuple[str, tuple[str | None, str | None]]]:
    """The words of the commands that differ, by their place in the first."""
    before, after = (mask_words([str(word) for word in plan.commands[0].argv]) for plan in (first, second))
    for tag, begin, end, start, stop in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if tag != "equal":
            pair = (" ".join(before[begin:end]) or None, " ".join(after[start:stop]) or None)
            yield f"command, word {begin + 1}", pair


def _environment(run: RunInfo, plan: Plan | None) -> dict[str, Any]:
    """Code, packages, machine, and the variables of the ranks."""
    layout, code = run.layout, read_code(run.layout)
    found: dict[str, Any] = {"host": run.host or None}
    if plan is not None:
        found["GPUs"] = ", ".join(card.name for card in plan.cards) or None
    if code is not None:
        found |= {name: value or None for name, value in code._asdict().items() if name not in ("packages", "python")}
        found |= {f"package {name}": version for name, version in code.packages.items()}
        found["python"] = code.python or None
    try:
        text = read_whole(layout.environment, below=layout.root).decode("utf-8", "replace")
    except OSError:
        text = ""
    for line in text.replace(str(layout.root), "<run_dir>").splitlines():
        name, equals, value = line.partition("=")
        if name not in CHANCE:
            found[f"variable {name}"] = mask_line(f"{name}={value}").partition("=")[2] if equals else "is removed"
    return found
