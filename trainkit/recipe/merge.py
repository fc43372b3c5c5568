"""Merging layers, weakest first: mappings merge, scalars and lists replace, and history keeps every value that was given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trainkit.errors import Diagnostic, Origin
from trainkit.recipe.fields import open_keys, tagged_sections
from trainkit.recipe.layer import Layer
from trainkit.recipe.resolved import Entry
from trainkit.recipe.secrets import is_secret_name, mask


@dataclass
class Merge:
    """The state of merging: the tree so far, what each leaf was given, the strongest place of each key, and what went wrong."""

    tree: dict[str, Any] = field(default_factory=dict)
    history: dict[str, list[Entry]] = field(default_factory=dict)
    places: dict[str, Origin] = field(default_factory=dict)
    errors: list[Diagnostic] = field(default_factory=list)

    def add(self, layer: Layer) -> None:
        """Put one more layer on top."""
        _merge_mapping(self, self.tree, layer.tree, "", layer)

    def get(self, key: str) -> Any:
        """The merged value at a dotted key; None where no layer gives it."""
        return value_at(self.tree, key)


def merge(layers: Sequence[Layer]) -> Merge:
    """Merge layers, weakest first."""
    state = Merge()
    for layer in layers:
        state.add(layer)
    return state


def value_at(tree: object, key: str) -> Any:
    """The value at a dotted key of a tree; None where there is none. Names with dots in them are found too."""
    if not isinstance(tree, Mapping):
        return None
    if key in tree:
        return tree[key]
    head, dot, rest = key.partition(".")
    return value_at(tree.get(head), rest) if dot else None


def split_modifier(raw: str, prefix: str) -> tuple[str, str]:
    """A key and its modifier (`+`, `!` or nothing); the user's own names have none."""
    if raw[-1:] in ("+", "!") and prefix not in open_keys():
        return raw[:-1], raw[-1]
    return raw, ""


def _merge_mapping(state: Merge, target: dict[str, Any], source: Mapping[str, Any], path: str, layer: Layer) -> None:
    if path in tagged_sections():
        _change_kind(state, target, source, path, layer)
    for raw, value in source.items():
        name, modifier = split_modifier(raw, path)
        key = f"{path}.{name}" if path else name
        origin = layer.origin(key) or Origin(layer.name, layer.strength, layer.name)
        if modifier == "+":
            _append(state, target, name, key, value, origin)
        elif isinstance(value, Mapping):
            _merge_into(state, target, name, key, value, modifier, layer, origin)
        else:
            if isinstance(target.get(name), dict):
                _drop(state, f"{key}.", f"dropped: {key} is replaced as a whole by {origin.place}")
            target[name] = value
            _record(state, key, Entry(_shown(key, value), origin), layer)


def _merge_into(
    state: Merge,
    target: dict[str, Any],
    name: str,
    key: str,
    value: Mapping[str, Any],
    modifier: str,
    layer: Layer,
    origin: Origin,
) -> None:
    state.places[key] = origin
    if modifier == "!" or not isinstance(target.get(name), dict):
        for prefix in (key, f"{key}."):
            _drop(state, prefix, f"dropped: {key} is replaced as a whole by {origin.place}")
        target[name] = {}
    _merge_mapping(state, target[name], value, key, layer)


def _append(state: Merge, target: dict[str, Any], name: str, key: str, value: Any, origin: Origin) -> None:
    before = target.get(name)
    if before is not None and not isinstance(before, list):
        kind = "a mapping" if isinstance(before, Mapping) else "a single value"
        given = state.places.get(key)
        state.errors.append(
            Diagnostic(
                "error",
                f"`{name}+` appends to a list, and {key} is {kind}",
                key,
                origin,
                why=f"it was given at {given.place}" if given else "",
                hint=f"write `{name}:` to replace it",
            )
        )
        return
    added = value if isinstance(value, list) else [value]
    target[name] = [*(before or []), *added]
    state.places[key] = origin
    note = f"appended {added!r}" if before else ""
    state.history.setdefault(key, []).append(Entry(_shown(key, target[name]), origin, note))


def _change_kind(state: Merge, target: dict[str, Any], source: Mapping[str, Any], path: str, layer: Layer) -> None:
    old, new = target.get("kind"), source.get("kind", source.get("kind!"))
    if old is None or new is None or old == new:
        return
    place = (layer.origin(f"{path}.kind") or Origin(layer.name, layer.strength, layer.name)).place
    _drop(state, f"{path}.", f"dropped: {path}.kind changed from {old} to {new} at {place}", keep=f"{path}.kind")
    target.clear()


def _record(state: Merge, key: str, entry: Entry, layer: Layer) -> None:
    state.history.setdefault(key, []).append(entry)
    state.places[key] = entry.origin
    if isinstance(entry.value, list):
        for position in range(len(entry.value)):
            if f"{key}.{position}" in layer.values:
                state.places[f"{key}.{position}"] = layer.values[f"{key}.{position}"]


def _drop(state: Merge, prefix: str, note: str, keep: str = "") -> None:
    """Mark every entry at the prefix as without effect. A prefix with a final dot means what lies below it."""
    below = prefix.endswith(".")
    found = [key for key in state.history if (key.startswith(prefix) if below else key == prefix) and key != keep]
    for key in found:
        entries = state.history[key]
        state.history[key] = [each if each.dropped else replace(each, note=note, dropped=True) for each in entries]
        state.places.pop(key, None)


def _shown(key: str, value: Any) -> Any:
    return mask(value) if is_secret_name(key.rpartition(".")[2]) and isinstance(value, (str, int)) else value
