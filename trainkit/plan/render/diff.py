"""Two plans side by side: what differs."""

from __future__ import annotations

import difflib
import json
from collections.abc import Container, Iterator, Mapping
from typing import Any

from trainkit.plan.model import Plan
from trainkit.plan.render.shell import quoted
from trainkit.plan.serialize import plan_to_json
from trainkit.recipe.schema.fields import lies_in

# Parts that are compared value by value, in the order of the page.
PARTS = (
    "name", "strategy.kind", "launcher.kind", "program.kind", "program.reason", "topology", "batch", "resume",
    "output_root", "rendezvous", "max_restarts", "grace_seconds", "hang",
    "preparations", "repositories", "container",
)  # fmt: skip
TRAINING = "The settings that decide training differ: neither resumes from the other's checkpoints on its own."


def render(other: Plan, plan: Plan) -> str:
    """What changes from `other` to `plan`: lines with ``-`` are only in the first, with ``+`` only in the second."""
    old, new = ({file.path: file.content for file in one.files} for one in (other, plan))
    sections = {
        "Decisions": _values(_decisions(other), _decisions(plan)),
        "Command": _sequence(*([quoted(word) for each in one.commands for word in each.argv] for one in (other, plan))),
        "Environment": _values(_environment(other), _environment(plan)),
        **{f"File {path}": _file(path, old.get(path), new.get(path)) for path in sorted({*old, *new})},
        "Remarks": _sequence(*([f"{each.severity}: {each.what}" for each in one.notices] for one in (other, plan))),
        "Training": [] if other.training_digest == plan.training_digest else [TRAINING],
    }
    found = {title: lines for title, part in sections.items() if (lines := list(part))}
    if not found:
        return "The plans are the same.\n"
    return "\n".join("\n".join([title, *(f"  {line}" for line in lines)]) + "\n" for title, lines in found.items())


def _decisions(plan: Plan) -> dict[str, Any]:
    flat = leaves(plan_to_json(plan))
    return {key: value for part in PARTS for key, value in flat.items() if lies_in(key, (part,))}


def _environment(plan: Plan) -> dict[str, str]:
    values = {name: str(value) for name, value in plan.environment.set}
    values |= dict.fromkeys(plan.environment.take, "(taken from the caller)")
    values |= {name: str(value) if value else "(the launcher's own)" for name, value in plan.environment.added}
    return values | dict.fromkeys((f"unset {name}" for name in plan.environment.unset), "")


def _values(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    for key in dict.fromkeys((*before, *after)):
        if key not in before or key not in after:
            sign, value = ("-", _plain(before[key])) if key in before else ("+", _plain(after[key]))
            yield f"{sign} {key}: {value}" if value else f"{sign} {key}"
        elif before[key] != after[key]:
            yield f"~ {key}: {_plain(before[key])} -> {_plain(after[key])}"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) and value.isprintable() else json.dumps(value, ensure_ascii=False)


def _sequence(before: list[str], after: list[str]) -> Iterator[str]:
    return (line for line in difflib.ndiff(before, after) if line[:1] in "+-")


def _file(path: str, old: str | None, new: str | None) -> Iterator[str]:
    if old is None or new is None:
        yield f"{'+' if old is None else '-'} the whole file"
        return
    trees = [_tree(path, content) for content in (old, new)]
    if None in trees:
        yield from _sequence(old.splitlines(), new.splitlines())
    else:
        yield from _values(*map(leaves, trees))


def _tree(path: str, content: str) -> Any:
    """What a JSON file holds; None for any other, which is compared line by line."""
    try:
        return json.loads(content) if path.endswith(".json") else None
    except ValueError:
        return None


def leaves(value: Any, prefix: str = "", whole: Container[str] = ()) -> dict[str, Any]:
    """The values of a tree by dotted key; lists of plain values stay whole. whole: keys of other lists that do."""
    if isinstance(value, Mapping) and value:
        items = value.items()
    elif isinstance(value, list) and prefix not in whole and any(isinstance(item, Mapping) for item in value):
        items = {str(index): item for index, item in enumerate(value)}.items()
    else:
        return {prefix: value}
    found: dict[str, Any] = {}
    for key, item in items:
        found |= leaves(item, f"{prefix}.{key}" if prefix else str(key), whole)
    return found
