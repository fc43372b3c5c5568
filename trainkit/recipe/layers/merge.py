"""Merging layers, weakest first: mappings merge, scalars and lists replace, and history keeps every value given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trainkit.errors import Diagnostic, Origin
from trainkit.recipe.layers.layer import Layer
from trainkit.recipe.layers.secrets import is_secret_name, mask
from trainkit.recipe.resolved import Entry
from trainkit.recipe.schema.fields import open_keys, tagged_sections


@dataclass
class Merge:
    """The state of merging: the tree so far, what each leaf was given, each key's strongest place, what went wrong."""

    tree: dict[str, Any] = field(default_factory=dict)
    history: dict[str, list[Entry]] = field(default_factory=dict)
    places: dict[str, Origin] = field(default_factory=dict)
    errors: list[Diagnostic] = field(default_factory=list)

    def add(self, layer: Layer) -> None:
        """Put one more layer on top."""
        _merge_mapping(self, layer, self.tree, layer.tree, "")

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


@dataclass(frozen=True)
class _Step:
    """One key of one layer on its way into the tree. target: the mapping that gets it."""

    state: Merge
    layer: Layer
    target: dict[str, Any]
    name: str
    key: str
    origin: Origin


def _merge_mapping(state: Merge, layer: Layer, target: dict[str, Any], source: Mapping[str, Any], path: str) -> None:
    if path in tagged_sections():
        _change_kind(state, layer, target, source, path)
    for raw, value in source.items():
        name, modifier = split_modifier(raw, path)
        key = f"{path}.{name}" if path else name
        step = _Step(state, layer, target, name, key, layer.origin(key) or _unplaced(layer))
        if modifier == "+":
            _append(step, value)
        elif isinstance(value, Mapping):
            _merge_into(step, value, modifier)
        else:
            _replace(step, value)


def _unplaced(layer: Layer) -> Origin:
    return Origin(layer.name, layer.strength, layer.name)


def _merge_into(step: _Step, value: Mapping[str, Any], modifier: str) -> None:
    step.state.places[step.key] = step.origin
    if modifier == "!" or not isinstance(step.target.get(step.name), dict):
        note = f"dropped: {step.key} is replaced as a whole by {step.origin.place}"
        _drop(step.state, step.key, note)
        _drop(step.state, f"{step.key}.", note)
        step.target[step.name] = {}
    _merge_mapping(step.state, step.layer, step.target[step.name], value, step.key)


def _replace(step: _Step, value: Any) -> None:
    if isinstance(step.target.get(step.name), dict):
        _drop(step.state, f"{step.key}.", f"dropped: {step.key} is replaced as a whole by {step.origin.place}")
    step.target[step.name] = list(value) if isinstance(value, list) else value
    _record(step, Entry(_shown(step.key, value), step.origin))


def _append(step: _Step, value: Any) -> None:
    before = step.target.get(step.name)
    if before is not None and not isinstance(before, list):
        kind = "a mapping" if isinstance(before, Mapping) else "a single value"
        given = step.state.places.get(step.key)
        what = f"`{step.name}+` appends to a list, and {step.key} is {kind}"
        why = f"it was given at {given.place}" if given else ""
        hint = f"write `{step.name}:` to replace it"
        step.state.errors.append(Diagnostic("error", what, step.key, step.origin, why, hint))
        return
    added = value if isinstance(value, list) else [value]
    step.target[step.name] = [*(before or []), *added]
    note = f"appended {added!r}" if before else ""
    _record(step, Entry(_shown(step.key, step.target[step.name]), step.origin, note), skip=len(before or []))


def _change_kind(state: Merge, layer: Layer, target: dict[str, Any], source: Mapping[str, Any], path: str) -> None:
    old, new = target.get("kind"), source.get("kind", source.get("kind!"))
    if old is None or new is None or old == new:
        return
    place = (layer.origin(f"{path}.kind") or _unplaced(layer)).place
    _drop(state, f"{path}.", f"dropped: {path}.kind changed from {old} to {new} at {place}", keep=f"{path}.kind")
    target.clear()


def _record(step: _Step, entry: Entry, skip: int = 0) -> None:
    """Add to the history. skip: how many elements of a list stood there before, and keep their places."""
    step.state.history.setdefault(step.key, []).append(entry)
    step.state.places[step.key] = entry.origin
    if isinstance(entry.value, list):
        for position in range(len(entry.value) - skip):
            place = step.layer.values.get(f"{step.key}.{position}", entry.origin)
            step.state.places[f"{step.key}.{position + skip}"] = place


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
