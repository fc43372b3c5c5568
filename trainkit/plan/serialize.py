"""The plan as JSON and back, without loss and in a stable order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from trainkit.errors import MachineError
from trainkit.plan.model import (
    PLAN_VERSION,
    BatchArithmetic,
    Card,
    Choice,
    Command,
    EnvironmentDiff,
    NodeGroup,
    Notice,
    Plan,
    PlannedFile,
    Preparation,
    Resume,
    TechniqueInForce,
    Text,
    Topology,
)


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """Builtins only; :func:`plan_from_json` gives an equal value back.

    A command is its whole `argv`, with the place of trainkit's wrapper in it (`first`, `count`); without the wrapper it
    is the bare command. A word without run-time variables is a string, one with them a list of its parts.
    """
    return {
        "plan_version": plan.plan_version,
        "name": plan.name,
        "recipe_digest": plan.recipe_digest,
        "training_digest": plan.training_digest,
        "strategy": asdict(plan.strategy),
        "launcher": asdict(plan.launcher),
        "program": asdict(plan.program),
        "device": asdict(plan.device),
        "topology": _topology_to_json(plan.topology),
        "cards": [asdict(card) for card in plan.cards],
        "shares_cards": plan.shares_cards,
        "batch": {
            "global": plan.batch.global_,
            "micro": plan.batch.micro,
            "accumulation": plan.batch.accumulation,
            "ranks": plan.batch.ranks,
            "eval_micro": plan.batch.eval_micro,
            "note": plan.batch.note,
            "search": list(plan.batch.search),
        },
        "commands": [_command_to_json(command) for command in plan.commands],
        "preparations": [
            {"title": item.title, "argv": [word.to_json() for word in item.argv], "lock": item.lock}
            for item in plan.preparations
        ],
        "environment": {
            "set": {name: value.to_json() for name, value in plan.environment.set},
            "unset": list(plan.environment.unset),
            "take": list(plan.environment.take),
            "added": {name: value.to_json() if value else None for name, value in plan.environment.added},
        },
        "files": {file.path: file.content for file in plan.files},
        "resume": asdict(plan.resume),
        "rendezvous": plan.rendezvous,
        "output_root": plan.output_root,
        "max_restarts": plan.max_restarts,
        "grace_seconds": plan.grace_seconds,
        "techniques": [asdict(technique) for technique in plan.techniques],
        "notices": [asdict(notice) for notice in plan.notices],
    }


def plan_from_json(data: Mapping[str, Any]) -> Plan:
    """The inverse of :func:`plan_to_json`. Raises MachineError for a plan of another version."""
    version = data.get("plan_version")
    if version != PLAN_VERSION:
        raise MachineError(
            f"this plan is of version {version}, and this trainkit reads version {PLAN_VERSION}",
            hint="Make the plan again from its recipe with `trainkit plan`.",
        )
    batch = dict(data["batch"])
    return Plan(
        plan_version=version,
        name=data["name"],
        recipe_digest=data["recipe_digest"],
        training_digest=data["training_digest"],
        strategy=Choice(**data["strategy"]),
        launcher=Choice(**data["launcher"]),
        program=Choice(**data["program"]),
        device=Choice(**data["device"]),
        topology=_topology_from_json(data["topology"]),
        batch=BatchArithmetic(global_=batch.pop("global"), search=tuple(batch.pop("search", ())), **batch),
        commands=tuple(_command_from_json(command) for command in data["commands"]),
        preparations=tuple(
            Preparation(item["title"], _words(item["argv"]), item["lock"]) for item in data["preparations"]
        ),
        environment=EnvironmentDiff(
            set=tuple((name, Text.from_json(value)) for name, value in data["environment"]["set"].items()),
            unset=tuple(data["environment"]["unset"]),
            take=tuple(data["environment"]["take"]),
            added=tuple(
                (name, None if value is None else Text.from_json(value))
                for name, value in data["environment"].get("added", {}).items()
            ),
        ),
        files=tuple(PlannedFile(path, content) for path, content in data["files"].items()),
        resume=Resume(**data["resume"]),
        output_root=data["output_root"],
        max_restarts=data["max_restarts"],
        grace_seconds=data["grace_seconds"],
        techniques=tuple(TechniqueInForce(**technique) for technique in data["techniques"]),
        notices=tuple(Notice(**notice) for notice in data["notices"]),
        cards=tuple(Card(**card) for card in data.get("cards", ())),
        shares_cards=data.get("shares_cards", False),
        rendezvous=data["rendezvous"],
    )


def _topology_to_json(topology: Topology) -> dict[str, Any]:
    groups = [
        {"count": group.count, "processes": group.processes, "devices": list(group.devices)}
        for group in topology.groups
    ]
    return {"device": topology.device, "nodes": topology.nodes, "world_size": topology.world_size, "groups": groups}


def _topology_from_json(data: Mapping[str, Any]) -> Topology:
    groups = (NodeGroup(group["count"], group["processes"], tuple(group["devices"])) for group in data["groups"])
    return Topology(data["device"], tuple(groups))


def _command_to_json(command: Command) -> dict[str, Any]:
    return {
        "argv": [word.to_json() for word in command.argv],
        "wrapper": {"first": len(command.launcher), "count": len(command.wrapper)},
    }


def _command_from_json(data: Mapping[str, Any]) -> Command:
    words = _words(data["argv"])
    first, end = data["wrapper"]["first"], data["wrapper"]["first"] + data["wrapper"]["count"]
    return Command(words[:first], words[first:end], words[end:])


def _words(data: list[str | list[str | dict[str, str]]]) -> tuple[Text, ...]:
    return tuple(Text.from_json(word) for word in data)
