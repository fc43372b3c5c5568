"""Merging layers, weakest first: mappings merge, scalars and lists replace, and history keeps every value given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from trainkit.errors import Diagnostic, Origin
from trainkit.recipe.hub_name import ROWS
from trainkit.recipe.layer import Layer
from trainkit.recipe.resolved import Entry
from trainkit.recipe.schema.fields import open_keys, schema, tagged_sections
from trainkit.recipe.secrets import mask, why_secret

MODIFIERS = ("+", "!")  # of a key: append to the list, replace the mapping


@dataclass
class Merge:
    """The state of merging: the tree so far, what each leaf was given, each key's strongest place, what went wrong.

    begun: the strength of the layer that began a section again with a path that means another kind.
    """

    tree: dict[str, Any] = field(default_factory=dict)
    history: dict[str, list[Entry]] = field(default_factory=dict)
    places: dict[str, Origin] = field(default_factory=dict)
    errors: list[Diagnostic] = field(default_factory=list)
    begun: dict[str, int] = field(default_factory=dict)

    def get(self, key: str) -> Any:
        """The merged value at a dotted key; None where no layer gives it."""
        return value_at(self.tree, key)

    def add(self, layer: Layer, target: dict[str, Any], source: Mapping[str, Any], path: str) -> None:
        """Put a mapping of the layer on top of `target`, the mapping so far at the same path."""
        if path in tagged_sections():
            self._change_kind(layer, target, source, path)
        for raw, value in source.items():
            name, modifier = split_modifier(raw, path)
            key = f"{path}.{name}" if path else name
            origin = _origin(layer, key)
            if modifier == "+":
                self._append(layer, target, name, key, value)
            elif isinstance(value, Mapping):
                self.places[key] = origin
                # A mapping over a scalar or a list: there is nothing below to merge with.
                if modifier == "!" or not isinstance(target.get(name), dict):
                    if name in target:
                        self._replace(key, origin, itself=True)
                    target[name] = {}
                self.add(layer, target[name], value, key)
            else:
                if isinstance(target.get(name), dict):
                    self._replace(key, origin)
                target[name] = deepcopy(value)  # a list may hold mappings, and interpolation writes into them
                self._record(layer, key, Entry(_shown(key, value), origin))

    def _append(self, layer: Layer, target: dict[str, Any], name: str, key: str, value: Any) -> None:
        before, origin = target.get(name), _origin(layer, key)
        if before is not None and not isinstance(before, list):
            kind = "a mapping" if isinstance(before, Mapping) else "a single value"
            given = self.places.get(key)
            what = f"`{name}+` appends to a list, and {key} is {kind}"
            why = f"it was given at {given.place}" if given else ""
            self.errors.append(Diagnostic("error", what, key, origin, why, f"write `{name}:` to replace it"))
            return
        added = deepcopy(value) if isinstance(value, list) else [value]
        target[name] = [*(before or []), *added]
        note = f"appended {added!r}" if before else ""
        self._record(layer, key, Entry(_shown(key, target[name]), origin, note), skip=len(before or []))

    def _change_kind(self, layer: Layer, target: dict[str, Any], source: Mapping[str, Any], path: str) -> None:
        """Settings of one kind mean nothing to another: a new kind starts its section again."""
        old, new = target.get("kind"), source.get("kind", source.get("kind!"))
        if new is None and (meant := _meant(path, target, source)):
            place = _origin(layer, f"{path}.path").place
            self._drop(f"{path}.", f"dropped: {meant} at {place}")
            target.clear()
            self.begun[path] = layer.strength
        if path == "model":
            self._change_model(layer, target, source)
        if old is None or new is None or old == new:
            return
        place = _origin(layer, f"{path}.kind").place
        self._drop(f"{path}.", f"dropped: {path}.kind changed from {old} to {new} at {place}", keep=f"{path}.kind")
        target.clear()

    def _change_model(self, layer: Layer, target: dict[str, Any], source: Mapping[str, Any]) -> None:
        """A model with weights takes the place of an architecture without, and the reverse."""
        for given, before in (("path", ("architecture", "config")), ("architecture", ("path", "revision", "config"))):
            if isinstance(source.get(given), str) and before[0] in target and before[0] not in source:
                place = _origin(layer, f"model.{given}").place
                for name in before:
                    target.pop(name, None)
                    for key in (f"model.{name}", f"model.{name}."):
                        self._drop(key, f"dropped: model.{given} takes the place of model.{before[0]} at {place}")

    def _record(self, layer: Layer, key: str, entry: Entry, skip: int = 0) -> None:
        """Add to the history. skip: how many elements a list had before; these keep their places."""
        self.history.setdefault(key, []).append(entry)
        self.places[key] = entry.origin
        if isinstance(entry.value, list):
            for position in range(len(entry.value) - skip):
                place = layer.values.get(f"{key}.{position}", entry.origin)
                self.places[f"{key}.{position + skip}"] = place
            if any(isinstance(each, Mapping) for each in entry.value):
                self._place_mappings(layer, f"{key}.", skip)

    def _place_mappings(self, layer: Layer, list_prefix: str, skip: int) -> None:
        """Where the settings of a list's elements that are mappings were given, by `list.position.setting`."""
        for name, origin in layer.values.items():
            if name.startswith(list_prefix):
                position, dot, setting = name.removeprefix(list_prefix).partition(".")
                if dot and position.isdecimal():
                    self.places[f"{list_prefix}{int(position) + skip}.{setting}"] = origin

    def _replace(self, key: str, by: Origin, *, itself: bool = False) -> None:
        """Mark every entry below the key as without effect. itself: the key's own, too."""
        note = f"dropped: {key} is replaced as a whole by {by.place}"
        if itself:
            self._drop(key, note)
        self._drop(f"{key}.", note)

    def _drop(self, prefix: str, note: str, keep: str = "") -> None:
        """Mark every entry at the prefix as without effect. A prefix with a final dot means what lies below it."""
        below = prefix.endswith(".")
        for key, entries in self.history.items():
            if (key.startswith(prefix) if below else key == prefix) and key != keep:
                entries[:] = [each if each.dropped else replace(each, note=note, dropped=True) for each in entries]
                self.places.pop(key, None)


def _meant(section: str, below: Mapping[str, Any], source: Mapping[str, Any]) -> str:
    """Why a layer's path alone begins a section again: only a model of transformers has one, and rows are no text."""
    path, kinds = source.get("path"), schema().sections[section].kinds
    if section == "model" and isinstance(path, str) and not {*below} <= {*kinds["hf"].model_fields}:
        return f"model.path is {path}, which is a model of kind hf,"
    if section == "data" and are_rows(path) and {"kind", "path"} & {*below}:
        rows = any(are_rows(below.get(name)) for name in ("path", "validation_path"))
        text = below["kind"] in ("text", "tokens") if "kind" in below else {*below} <= {*kinds["text"].model_fields}
        if text and not rows:
            return f"data.path is {path}, whose rows are of kind dataset,"
    return ""


def are_rows(path: Any) -> bool:
    """Whether a `data.path` names files of rows."""
    paths = path if isinstance(path, list) else [path]
    return bool(paths) and all(isinstance(each, str) and ROWS.search(each) for each in paths)


def merge(layers: Sequence[Layer]) -> Merge:
    """Merge layers, weakest first."""
    state = Merge()
    for layer in layers:
        state.add(layer, state.tree, layer.tree, "")
    _count_hosts(state)
    return state


def _count_hosts(state: Merge) -> None:
    """One node for each of cluster.hosts, where no layer says how many nodes there are."""
    hosts, nodes = state.get("cluster.hosts"), state.tree.get("nodes", {})
    if isinstance(hosts, list) and hosts and isinstance(nodes, dict) and nodes.get("count") is None:
        state.tree["nodes"] = {**nodes, "count": len(hosts)}
        origin = state.places["cluster.hosts"]
        state.places["nodes.count"] = origin
        state.history.setdefault("nodes.count", []).append(Entry(len(hosts), origin, "one for each of cluster.hosts"))


def value_at(tree: object, key: str, absent: Any = None) -> Any:
    """The value at a dotted key of a tree, `absent` where there is none. Names with dots in them are found too."""
    while isinstance(tree, Mapping):
        if key in tree:
            return tree[key]
        head, dot, key = key.partition(".")
        if not dot:
            break
        tree = tree.get(head)
    return absent


def split_modifier(raw: str, prefix: str) -> tuple[str, str]:
    """A key and its modifier (`+`, `!` or nothing); the user's own names have none."""
    if raw.endswith(MODIFIERS) and prefix not in open_keys():
        return raw[:-1], raw[-1]
    return raw, ""


def _origin(layer: Layer, key: str) -> Origin:
    return layer.values.get(key) or layer.origin(key) or Origin(layer.name, layer.strength, layer.name)


def _shown(key: str, value: Any) -> Any:
    return mask(value) if isinstance(value, (str, int)) and why_secret(key.rpartition(".")[2], value) else value
