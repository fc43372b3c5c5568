"""From a plan to what is executed: the one function that fills in what is known only at run time. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainkit.errors import Diagnostic, MachineError
from trainkit.plan.model import EnvironmentDiff, Plan, Text, Variable
from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.supervisor.channel import Preparation


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
