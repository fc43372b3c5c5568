"""A plan with its variables filled in: argv, preparations, the ranks' whole environment."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainkit.errors import Diagnostic, MachineError
from trainkit.files import cache_folder
from trainkit.launch_plan.model import EnvironmentDiff, Plan, Variable, bind_words
from trainkit.runner.rundir.layout import RunLayout


@dataclass(frozen=True, slots=True)
class BoundPlan:
    """Exactly what is started: argv, what runs before, and the ranks' whole environment."""

    argv: tuple[str, ...]
    preparations: tuple[tuple[str, Sequence[str], str], ...]  # title, argv, name of the lock
    environment: Mapping[str, str]
    end: tuple[str, ...] = ()  # ends the containers, whose processes need not descend from argv
    caches: str = ""  # folder that the containers keep their caches in


def run_values(
    layout: RunLayout, port: int, rank: int, master: str, local: str, resume: str = "", attempt: int = 1
) -> dict[Variable, str]:
    """A value for every variable of a plan. rank: of the node; master, local: addresses of node 0 and of this one.

    The layout's root must be absolute. resume: path of a checkpoint, or empty.
    """
    return {
        Variable.RUN_ID: layout.id,
        Variable.RUN_DIR: str(layout.root),
        Variable.ATTEMPT: str(attempt),
        Variable.ATTEMPT_DIR: str(layout.attempt(attempt).root),
        Variable.PORT: str(port),
        Variable.NODE_RANK: str(rank),
        Variable.MASTER_ADDR: master,
        Variable.LOCAL_ADDR: local,
        Variable.IS_HOST: "true" if rank == 0 else "false",
        Variable.RESUME: resume,
    }


def bind(plan: Plan, values: Mapping[Variable, str], environ: Mapping[str, str], group: int = 0) -> BoundPlan:
    """Fill in the plan's variables. Raises MachineError if a variable that `env_from` names is not in environ."""
    child, container = child_environment(plan.environment, values, environ), plan.container
    if container is not None and container.prefix:  # the engine reads the variables under names of its own
        child |= {f"{container.prefix}{name}": child[name] for name in container.handed_in}
    return BoundPlan(
        bind_words(plan.commands[group].argv, values),
        tuple((item.title, bind_words(item.argv, values), item.lock) for item in plan.preparations),
        child,
        bind_words(container.end, values) if container else (),
        container.caches.bind(values) if container else "",
    )


def container_values(environ: Mapping[str, str]) -> dict[Variable, str]:
    """A value for every variable in a container's arguments. Raises MachineError without a home."""
    caches = cache_folder(environ, "containers")
    if caches is None:
        raise MachineError("there is no home for the container's caches", hint="set HOME, or container.caches")
    return {
        Variable.USER: f"{os.getuid()}:{os.getgid()}",
        Variable.WORKING_DIR: os.getcwd(),
        Variable.CACHE_DIR: caches,
        Variable.PACKAGE: str(Path(__file__).resolve().parents[1]),
        Variable.HOST: os.uname().nodename,
    }


def child_environment(
    diff: EnvironmentDiff, values: Mapping[Variable, str], environ: Mapping[str, str]
) -> dict[str, str]:
    """The ranks' whole environment: the caller's, minus what the plan unsets, plus what it passes on and sets."""
    require_env_from(diff, environ)
    # A variable that is passed on may match a pattern of `unset`; a pattern's * is its last character.
    exact, prefixes = set(diff.unset), tuple(item[:-1] for item in diff.unset if item.endswith("*"))
    child = {name: value for name, value in environ.items() if name not in exact and not name.startswith(prefixes)}
    child |= {name: environ[name] for name in diff.take}
    return child | {name: value.bind(values) for name, value in diff.set}


def require_env_from(diff: EnvironmentDiff, environ: Mapping[str, str]) -> None:
    """Raises MachineError if a variable that `env_from` names is not in environ."""
    if missing := [name for name in diff.take if name not in environ]:
        raise MachineError(
            Diagnostic(
                "error",
                f"{name} is not set in the environment, and env_from passes it on",
                key="env_from",
                hint=f"set it (export {name}=…) or remove it from env_from",
            )
            for name in missing
        )
