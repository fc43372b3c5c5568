"""Create a run directory, with the files that are written before the start."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

from trainkit.errors import MachineError
from trainkit.files import open_regular, publish, read_json_lines
from trainkit.launch_plan.model import Plan, plan_to_json
from trainkit.recipe.secrets import MASK, is_secret_name
from trainkit.runner.binding import BoundPlan
from trainkit.runner.rundir.code_state import Looked, write_code
from trainkit.runner.rundir.layout import RunLayout

TRIES = 20  # names for a run directory


def create_run_dirs(output_root: str, name: str, count: int) -> list[RunLayout]:
    """New run directories whose names differ only in a number at the end: -0, -1, … Raises MachineError."""
    first = create_run_dir(output_root, name, "-0").root
    made = [RunLayout(first)]
    try:
        for number in range(1, count):
            root = first.with_name(f"{first.name.removesuffix('-0')}-{number}")
            root.mkdir()
            made.append(RunLayout(root))
    except OSError as error:
        for layout in made:
            layout.root.rmdir()
        raise MachineError(f"the run directory {root} cannot be created: {error.strerror}") from error
    return made


def create_run_dir(output_root: str, name: str, ending: str = "") -> RunLayout:
    """A new run directory <output_root>/<name>/<timestamp>-<id>. Raises MachineError when it cannot be created."""
    parent = Path(output_root).absolute() / name
    for _ in range(TRIES):
        # The time sorts runs by age, the random part separates runs of the same second.
        root = parent / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}{ending}"
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


def write_plan(
    layout: RunLayout, plan: Plan, recipe_yaml: str, command_shell: str, looked: Looked | None = None
) -> None:
    """Write the recipe, the plan, the plan as a script, and the state of the program's code."""
    remember_root(str(layout.root.parent.parent), os.environ)
    publish(layout.recipe, recipe_yaml)
    publish(layout.plan, plan_text(plan))
    publish(layout.command, command_shell, mode=0o777)
    write_code(layout, recipe_yaml, looked)


def plan_text(plan: Plan) -> str:
    """The content of plan.json."""
    return json.dumps(plan_to_json(plan), indent=2) + "\n"


def write_attempt(layout: RunLayout, number: int, plan: Plan, bound: BoundPlan) -> None:
    """Write the folders of a start within the run, its environment, and the planned files."""
    attempt = layout.attempt(number)
    attempt.logs.mkdir(parents=True)
    attempt.ranks.mkdir()
    if plan.topology.nodes > 1:
        attempt.nodes.mkdir()
    diff, environment = plan.environment, bound.environment
    lines = [f"unset {name}" for name in diff.unset]
    for name in sorted({*(name for name, _ in diff.set), *diff.take}):
        value = environment[name]
        # a variable that is passed on from the caller may be a secret too
        if name in diff.take or is_secret_name(name):
            value = MASK
        lines.append(f"{name}={value if value.isprintable() else value.encode('unicode_escape').decode('ascii')}")
    publish(layout.environment, "".join(f"{line}\n" for line in lines))
    for file in plan.files:
        path = layout.root / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        publish(path, file.content)


def remember_root(output_root: str, environ: Mapping[str, str]) -> None:
    """Record for `runs list --all` that a folder has runs. If that fails, they are not listed."""
    file = _roots_file(environ)
    root = os.path.abspath(output_root)
    if file is None or root in remembered_roots(environ):
        return
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(file), mode=0o700, exist_ok=True)
        fd = open_regular(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            # in one write: other runs may append at the same time
            os.write(fd, json.dumps({"root": root}).encode() + b"\n")
        finally:
            os.close(fd)


def remembered_roots(environ: Mapping[str, str]) -> list[str]:
    """The recorded folders that exist."""
    file = _roots_file(environ)
    found = (each.get("root") for each in read_json_lines(file)) if file else ()
    return [*dict.fromkeys(each for each in found if isinstance(each, str) and os.path.isdir(each))]


def _roots_file(environ: Mapping[str, str]) -> str | None:
    """This user's file (XDG base directories); None without a home."""
    base, home = environ.get("XDG_STATE_HOME", ""), environ.get("HOME", "")
    if not os.path.isabs(base):
        base = os.path.join(home, ".local", "state") if home else ""
    return os.path.join(base, "trainkit", "roots.jsonl") if base else None
