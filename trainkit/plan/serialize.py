"""The plan as JSON and back, without loss and in a stable order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from trainkit.decode import decode
from trainkit.errors import MachineError
from trainkit.plan.model import PLAN_VERSION, Plan, Text


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """Builtins only, in the order of the plan's fields; :func:`plan_from_json` gives an equal value back.

    A command is its whole `argv`, with the place of trainkit's wrapper in it (`first`, `count`); without the wrapper it
    is the bare command. `container` is the number of its words in front of the launcher, where there are any. A word
    without run-time variables is a string, one with them a list of its parts.
    """
    topology, environment = plan.topology, plan.environment
    return {
        **_builtins(plan),
        "topology": {
            "device": topology.device,
            "nodes": topology.nodes,  # this and the next follow from the groups, for those who read the JSON
            "world_size": topology.world_size,
            "groups": _builtins(topology.groups),
        },
        "commands": [
            {
                "argv": _builtins(command.argv),
                "wrapper": {
                    "first": len(command.container) + len(command.launcher),
                    "count": len(command.wrapper),
                },
                **({"container": len(command.container)} if command.container else {}),
            }
            for command in plan.commands
        ],
        "environment": {
            **_builtins(environment),
            "set": {name: value.to_json() for name, value in environment.set},
            "added": {name: value.to_json() if value else None for name, value in environment.added},
        },
        "files": {file.path: file.content for file in plan.files},
    }


def plan_from_json(data: object) -> Plan:
    """The inverse of :func:`plan_to_json`.

    Raises MachineError for a plan of another version, and ValueError, KeyError or TypeError for what is not a plan.
    """
    if not isinstance(data, Mapping):
        raise ValueError("a plan is a JSON object")
    version = data.get("plan_version")
    if version != PLAN_VERSION:
        raise MachineError(
            f"this plan is of version {version}, and this trainkit reads version {PLAN_VERSION}",
            hint="make the plan again from its recipe with `trainkit plan`",
        )
    topology, environment = _mapping(data, "topology"), _mapping(data, "environment")
    shaped = {
        **data,
        "topology": {"device": topology["device"], "groups": topology["groups"]},
        "batch": {"global_" if key == "global" else key: value for key, value in _mapping(data, "batch").items()},
        "commands": [_command(command) for command in data["commands"]],
        "environment": {
            **environment,
            "set": [*_mapping(environment, "set").items()],
            "added": [*_mapping({"added": {}, **environment}, "added").items()],
        },
        "files": [{"path": path, "content": content} for path, content in _mapping(data, "files").items()],
    }
    plan: Plan = decode(Plan, shaped)
    return plan


def _mapping(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    if not isinstance(data[name], Mapping):
        raise TypeError(f"{name} is no mapping")
    return data[name]  # type: ignore[no-any-return]


def _builtins(value: Any) -> Any:
    if isinstance(value, Text):
        return value.to_json()
    if is_dataclass(value):
        return {each.name.rstrip("_"): _builtins(getattr(value, each.name)) for each in fields(value)}
    return [_builtins(item) for item in value] if isinstance(value, tuple) else value


def _command(data: Mapping[str, Any]) -> dict[str, Any]:
    argv, inside, first = data["argv"], data.get("container", 0), data["wrapper"]["first"]
    end = first + data["wrapper"]["count"]
    return {
        "container": argv[:inside],
        "launcher": argv[inside:first],
        "wrapper": argv[first:end],
        "program": argv[end:],
    }
