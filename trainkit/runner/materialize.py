"""From a plan to what is executed: fill in what is known only at run time, and write it into a new run directory."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainkit.errors import Diagnostic, MachineError
from trainkit.files import publish
from trainkit.plan.model import EnvironmentDiff, Plan, Text, Variable
from trainkit.recipe.layers.secrets import MASK, is_secret_name
from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.supervisor.channel import Preparation

TRIES = 20


@dataclass(frozen=True, slots=True)
class Bindings:
    """What is known only at run time. run_dir is absolute; group is the node group whose command this node runs."""

    run_id: str
    run_dir: str
    attempt: int
    port: int
    node_rank: int
    master_addr: str
    local_addr: str
    group: int = 0

    @property
    def values(self) -> Mapping[Variable, str]:
        """A value for every variable that a plan may hold."""
        return {
            Variable.RUN_ID: self.run_id,
            Variable.RUN_DIR: self.run_dir,
            Variable.ATTEMPT_DIR: str(RunLayout(Path(self.run_dir)).attempt(self.attempt).root),
            Variable.PORT: str(self.port),
            Variable.NODE_RANK: str(self.node_rank),
            Variable.MASTER_ADDR: self.master_addr,
            Variable.LOCAL_ADDR: self.local_addr,
            Variable.IS_HOST: "true" if self.node_rank == 0 else "false",
        }


@dataclass(frozen=True, slots=True)
class BoundPlan:
    """Exactly what is started: argv, the child's whole environment, and the files written before."""

    argv: tuple[str, ...]
    preparations: tuple[Preparation, ...]  # with the locks' names, not yet their paths
    environment: Mapping[str, str]
    files: tuple[tuple[str, str], ...]  # absolute path, content


def bind(plan: Plan, bindings: Bindings, environ: Mapping[str, str]) -> BoundPlan:
    """Fill in the plan's variables. Raises MachineError when a variable that `env_from` names is not in environ."""
    values = bindings.values

    def argv(texts: tuple[Text, ...]) -> tuple[str, ...]:
        return tuple(item.bind(values) for item in texts)

    return BoundPlan(
        argv=argv(plan.commands[bindings.group].argv),
        preparations=tuple(Preparation(item.title, argv(item.argv), item.lock) for item in plan.preparations),
        environment=child_environment(plan.environment, values, environ),
        files=tuple((str(Path(bindings.run_dir) / file.path), file.content) for file in plan.files),
    )


def child_environment(
    diff: EnvironmentDiff, values: Mapping[Variable, str], environ: Mapping[str, str]
) -> dict[str, str]:
    """The ranks' whole environment: the caller's without what the plan unsets, what it takes, and what it sets."""
    if missing := [name for name in diff.take if name not in environ]:
        raise MachineError(
            Diagnostic(
                "error",
                f"the environment has no {name}, which the recipe takes from it (env_from)",
                key="env_from",
                hint=f"set it (export {name}=…) or remove it from env_from",
            )
            for name in missing
        )

    # What is taken may be among what is unset; what is set counts over all. A pattern's * is its last character.
    exact, prefixes = set(diff.unset), tuple(item[:-1] for item in diff.unset if item.endswith("*"))
    child = {name: value for name, value in environ.items() if name not in exact and not name.startswith(prefixes)}
    child |= {name: environ[name] for name in diff.take}
    return child | {name: value.bind(values) for name, value in diff.set}


def create_run_dir(output_root: str, name: str) -> RunLayout:
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


def write_run_dir(layout: RunLayout, plan: Plan, bound: BoundPlan, recipe_yaml: str, command_shell: str) -> None:
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
