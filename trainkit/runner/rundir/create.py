"""Create a run directory that no other run shares, and write into it what will be executed."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

from trainkit.errors import MachineError
from trainkit.files import publish
from trainkit.plan.model import EnvironmentDiff, Plan
from trainkit.recipe.layers.secrets import MASK, is_secret_name
from trainkit.runner.materialize import BoundPlan
from trainkit.runner.rundir.layout import RunLayout

TRIES = 20


def create(output_root: str, name: str) -> RunLayout:
    """A new run directory <output_root>/<name>/<timestamp>-<id>. Raises MachineError when it cannot be created."""
    parent = Path(output_root).absolute() / name
    for _ in range(TRIES):
        # The time sorts runs by age, the random part keeps apart those of one second.
        root = parent / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        try:
            parent.mkdir(parents=True, exist_ok=True)
            root.mkdir()
        except FileExistsError:
            continue
        except OSError as error:
            raise MachineError(
                f"the run directory {root} cannot be created: {error.strerror}",
                hint="set output.root to a folder that you may write to",
            ) from error
        return RunLayout(root)
    raise MachineError(f"no free name for a run directory was found in {parent}", hint="check that it is a folder")


def write(layout: RunLayout, plan: Plan, bound: BoundPlan, recipe_yaml: str, command_shell: str) -> None:
    """Write recipe, plan, script, environment and planned files."""
    from trainkit.plan.serialize import plan_to_json

    attempt = layout.attempt(1)
    attempt.logs.mkdir(parents=True)
    attempt.ranks.mkdir()
    publish(layout.recipe, recipe_yaml)
    publish(layout.plan, json.dumps(plan_to_json(plan), indent=2) + "\n")
    publish(layout.command, command_shell)
    layout.command.chmod(0o755)
    publish(layout.environment, _masked_environment(plan.environment, bound.environment))
    for path, content in bound.files:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        publish(path, content)


def _masked_environment(diff: EnvironmentDiff, bound: Mapping[str, str]) -> str:
    """The environment diff as text. What was taken from the caller, and what is named like a secret, is masked."""
    lines = [f"unset {name}" for name in diff.unset]
    for name in sorted({*(name for name, _ in diff.set), *diff.take}):
        hidden = name in diff.take or is_secret_name(name)
        value = bound[name] if bound[name].isprintable() else bound[name].encode("unicode_escape").decode("ascii")
        lines.append(f"{name}={MASK if hidden else value}")
    return "".join(f"{line}\n" for line in lines)
