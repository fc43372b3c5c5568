"""Two plans side by side: what differs."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from trainkit.plan.model import Plan
from trainkit.plan.render.argv import named, quoted
from trainkit.plan.serialize import plan_to_json

# Parts that are compared value by value, in the order of the page.
PARTS = (
    "name", "strategy.kind", "launcher.kind", "program.kind", "program.reason", "topology", "batch", "resume",
    "output_root", "rendezvous", "max_restarts", "grace_seconds", "preparations",
)  # fmt: skip
TRAINING = "The settings that decide training differ: neither resumes from the other's checkpoints on its own."
_ABSENT = object()


def render(other: Plan, plan: Plan) -> str:
    """What changes from `other` to `plan`: lines with ``-`` are only in the first, with ``+`` only in the second."""
    before, after = plan_to_json(other), plan_to_json(plan)
    sections = {
        "Decisions": _values(*map(_decisions, (before, after))),
        "Command": _sequence(*map(_argv, (other, plan))),
        "Environment": _values(_environment(before), _environment(after)),
        **{f"File {path}": _file(before, after, path) for path in sorted({*before["files"], *after["files"]})},
        "Remarks": _sequence(*([f"{each.severity}: {each.what}" for each in one.notices] for one in (other, plan))),
        "Training": [] if other.training_digest == plan.training_digest else [TRAINING],
    }
    found = {title: lines for title, part in sections.items() if (lines := list(part))}
    if not found:
        return "The plans are the same.\n"
    return "\n".join("\n".join([title, *(f"  {line}" for line in lines)]) + "\n" for title, lines in found.items())


def _decisions(data: Mapping[str, Any]) -> dict[str, Any]:
    flat = leaves(data)
    return {key: value for part in PARTS for key, value in flat.items() if key == part or key.startswith(f"{part}.")}


def _environment(data: Mapping[str, Any]) -> dict[str, Any]:
    environment = data["environment"]
    values = {name: _shown(value) for name, value in environment["set"].items()}
    values |= dict.fromkeys(environment["take"], "(taken from the caller)")
    own = environment.get("added", {}).items()
    values |= {name: "(the launcher's own)" if value is None else _shown(value) for name, value in own}
    return values | dict.fromkeys((f"unset {name}" for name in environment["unset"]), "")


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "".join(part if isinstance(part, str) else f"<{part['variable']}>" for part in value)


def _values(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    for key in dict.fromkeys((*before, *after)):
        old, new = before.get(key, _ABSENT), after.get(key, _ABSENT)
        if old == new:
            continue
        if old is not _ABSENT and new is not _ABSENT:
            yield f"~ {key}: {_plain(old)} -> {_plain(new)}"
            continue
        sign, value = ("+", _plain(new)) if old is _ABSENT else ("-", _plain(old))
        yield f"{sign} {key}: {value}" if value else f"{sign} {key}"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _sequence(before: list[str], after: list[str]) -> Iterator[str]:
    return (line for line in difflib.ndiff(before, after) if line[:1] in "+-")


def _argv(plan: Plan) -> list[str]:
    return [quoted(word, named) for command in plan.commands for word in command.argv]


def _file(before: Mapping[str, Any], after: Mapping[str, Any], path: str) -> Iterator[str]:
    old, new = before["files"].get(path), after["files"].get(path)
    if old is None or new is None:
        yield f"{'+' if old is None else '-'} the whole file"
    elif path.endswith(".json"):
        yield from _values(leaves(json.loads(old)), leaves(json.loads(new)))
    else:
        yield from _sequence(old.splitlines(), new.splitlines())


def leaves(value: Any, prefix: str = "") -> dict[str, Any]:
    """The values of a tree by dotted key; lists of plain values stay whole."""
    if isinstance(value, Mapping) and value:
        items = value.items()
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        items = {str(index): item for index, item in enumerate(value)}.items()
    else:
        return {prefix: value}
    found: dict[str, Any] = {}
    for key, item in items:
        found |= leaves(item, f"{prefix}.{key}" if prefix else str(key))
    return found
