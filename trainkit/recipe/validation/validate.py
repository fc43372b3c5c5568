"""Validation: unknown keys in every layer, and every pydantic error turned into one diagnostic at the value's place."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from trainkit.errors import Diagnostic, Origin
from trainkit.recipe.layers.layer import Layer
from trainkit.recipe.layers.merge import split_modifier, value_at
from trainkit.recipe.schema import Recipe
from trainkit.recipe.schema.fields import open_keys, schema, tagged_sections
from trainkit.recipe.validation.suggestions import did_you_mean, nearest_key
from trainkit.recipe.validation.type_errors import complain, element, inside, shown

# Comparing an unknown word with every key takes a millisecond; more advice than this is not read anyway.
_MAX_SUGGESTIONS = 30

Locate = Callable[[str], Origin | None]


def unknown_keys(layer: Layer) -> list[Diagnostic]:
    """An error for each key of the layer that the schema does not have in any kind of its section."""
    found: list[Diagnostic] = []
    unknown: list[tuple[str, str]] = []
    _sift(layer.tree, unknown)
    for key, written in unknown:
        origin = layer.keys.get(key) or layer.origin(key)  # a caret under the key itself
        if "." in written and key in schema().keys:
            # A key with dots is one name in YAML; only the command line takes it apart.
            *sections, last = written.split(".")
            nested = "".join(f"{section}: {{" for section in sections) + f"{last}: …" + "}" * len(sections)
            what = f"{written} is written as one name, and the settings of a file are nested"
            hint = f"write `{nested}`; only flags have dots: {key}=VALUE"
            found.append(Diagnostic("error", what, key, origin, hint=hint))
            continue
        close = nearest_key(key) if len(found) < _MAX_SUGGESTIONS else None
        section, _, name = key.rpartition(".")
        name = name if "." in written else written
        what = f"{section} has no setting {name!r}" if section else f"there is no section or setting {name!r}"
        siblings = sorted(each.rpartition(".")[2] for each in schema().keys if each.rpartition(".")[0] == section)
        hint = f"did you mean {close}?" if close else f"known are: {', '.join(siblings)}"
        found.append(Diagnostic("error", what, key, origin, hint=hint))
    return found


def without_unknown(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The tree without keys that no kind of their section has; those are reported at their layers' positions."""
    return _sift(tree, [])


def _sift(
    tree: Mapping[str, Any],
    unknown: list[tuple[str, str]],
    prefix: str = "",
    kinds: Mapping[str, str] | None = None,
    skip: Callable[[Any], bool] | None = None,
) -> dict[str, Any]:
    """The settings of a tree, keys without their modifiers.

    unknown: gets the dotted key and the name as written of each that the schema does not have.
    kinds: what tagged sections are where they do not say it.
    skip: whether a value is not final; then lists to be appended, which are not either, are left out too.
    """
    kept: dict[str, Any] = {}
    for raw, value in tree.items():
        name, modifier = split_modifier(raw, prefix)
        key = f"{prefix}.{name}" if prefix else name
        if "." in name or (key not in schema().sections and key not in schema().settings):
            unknown.append((key, name if "." in name else raw))
        elif isinstance(value, Mapping) and key in schema().sections:
            kept[name] = _sift(value, unknown, key, kinds, skip)
        elif skip is None or (modifier != "+" and (key in open_keys() or not skip(value))):
            kept[name] = value
    if kinds and prefix in kinds:
        kept.setdefault("kind", kinds[prefix])
    return kept


def validate_layer(layer: Layer, kinds: Mapping[str, str], skip: Callable[[Any], bool]) -> list[Diagnostic]:
    """Errors in the values that one layer gives, even where a stronger layer replaces them.

    kinds: the kind of each tagged section, for a layer that does not say it.
    skip: whether a value is not final (an interpolation).
    """
    tree = _sift(layer.tree, [], kinds=kinds, skip=skip)
    try:
        Recipe.model_validate(tree)
    except ValidationError as error:
        # A rule over several settings can be judged only where all of them are known: on the merged tree.
        single = [each for each in error.errors(include_url=False) if each["type"] != "value_error"]
        return list(_translate(single, tree, layer.origin))
    return []


def validate(tree: Mapping[str, Any], locate: Locate) -> tuple[Recipe | None, list[Diagnostic]]:
    """The recipe, or every error in the merged tree."""
    complete = with_kinds(tree)
    try:
        return Recipe.model_validate(complete), []
    except ValidationError as error:
        wrong = error.errors(include_url=False)
    found = list(_translate(wrong, complete, locate))
    # Settings are compared only where each by itself is right: once more without those that are not.
    apart = {
        key for each in wrong if (key := _setting_key(each["loc"])[0]) and (each["type"] != "value_error" or "." in key)
    }
    sound = deepcopy(complete)
    for key in apart:
        section, _, name = key.rpartition(".")
        (value_at(sound, section) if section else sound).pop(name, None)
    if sound != complete:
        names = {key.rpartition(".")[2] for key in apart}
        found += [each for each in validate(sound, locate)[1] if names.isdisjoint(re.findall(r"\w+", each.what))]
    return None, found


def with_kinds(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The tree with the default kind in each tagged section that does not say its kind."""
    complete = dict(tree)
    for key in tagged_sections():
        section = complete.get(key)
        if isinstance(section, Mapping) and "kind" not in section:
            complete[key] = {"kind": default_kind(key), **section}
    return complete


def default_kind(section: str) -> str:
    """The kind of a tagged section that no layer mentions."""
    info = next(field for name, field in Recipe.model_fields.items() if (field.alias or name) == section)
    return str(info.get_default().kind)


def likely_kind(section: str, given: Any) -> str:
    """The kind of a tagged section that names none: the first that has the given settings, else the default."""
    names = given.keys() if isinstance(given, Mapping) else ()
    kinds = schema().sections[section].kinds.items()  # in the order of the schema, the default first
    return next((kind for kind, model in kinds if {*names} <= model.model_fields.keys()), default_kind(section))


def _translate(errors: Sequence[ErrorDetails], tree: Mapping[str, Any], locate: Locate) -> Iterator[Diagnostic]:
    found: dict[str, Diagnostic] = {}
    for each in errors:
        key, rest = _setting_key(each["loc"])
        if each["type"] == "extra_forbidden":
            yield from _foreign(key, rest, tree, locate)
            continue
        if each["type"] == "value_error" and key in schema().sections:
            messages = each["msg"].removeprefix("Value error, ").splitlines()
            yield from (_contradiction(key, message, tree, locate) for message in messages)
            continue
        wrong = _wrong(key, rest, each, tree, locate)
        found.setdefault(wrong.key, wrong)
    # Each alternative of a type complains for itself: those that want no list, about the whole of it.
    with_elements = {key.rpartition(".")[0] for key in found}
    yield from (wrong for key, wrong in found.items() if key not in with_elements)


def _setting_key(loc: tuple[int | str, ...]) -> tuple[str, tuple[int | str, ...]]:
    """The setting or section that a pydantic location lies in, and what of the location lies below it."""
    key, table = "", schema()
    tag = -1
    for position, part in enumerate(loc):
        if tag < 0 and key in tagged_sections() and part in table.sections[key].kinds:
            tag = position  # pydantic names the kind of a tagged section as a step of the path, before any setting
            continue
        following = f"{key}.{part}" if key else str(part)
        if following not in table.sections and following not in table.settings:
            return key, loc[position:]
        key = following
    return key, ()


def _wrong(
    key: str, rest: tuple[int | str, ...], error: ErrorDetails, tree: Mapping[str, Any], locate: Locate
) -> Diagnostic:
    setting = schema().setting(key, str(value_at(tree, f"{key.partition('.')[0]}.kind")))
    value = value_at(tree, key)
    if error["type"] == "union_tag_invalid":
        kinds = list(schema().sections[key].kinds)
        given = value.get("kind") if isinstance(value, Mapping) else value
        what = f"{key}.kind must be one of {', '.join(kinds)}, not {shown('kind', given)}"
        otherwise = f"write one of them; the default is {default_kind(key)}"
        hint = did_you_mean(given, kinds, otherwise) if isinstance(given, str) else otherwise
        return Diagnostic("error", what, f"{key}.kind", locate(f"{key}.kind"), hint=hint)
    if setting is None:
        section = schema().sections[key]
        kind = isinstance(value, str) and value in section.kinds
        hint = f"write `{key}: {{kind: {value}}}`" if kind else f"write `{key}:` and its settings indented below"
        what = f"{key} must be a mapping, not {shown(key, value)}"
        return Diagnostic("error", what, key, locate(key), section.description, hint)
    # The list elements and mapping entries that a location names, behind the names of union members.
    for part in rest:
        if part in (range(len(value)) if isinstance(value, list) else value if isinstance(value, Mapping) else ()):
            key, setting, value = f"{key}.{part}", inside(setting, type(value), part), value[part]
    if error["type"] == "value_error":
        what = f"{key}: {error['msg'].removeprefix('Value error, ')}"
        return Diagnostic("error", what, key, locate(key), setting.description, "change what it says")
    what, why, hint = complain(setting, key, value)
    return Diagnostic("error", what, key, locate(key), why, hint)


def _contradiction(section: str, message: str, tree: Mapping[str, Any], locate: Locate) -> Diagnostic:
    """A rule over several settings of a section, at the place where the strongest layer gives one of them."""
    given = value_at(tree, section)
    named = [name for name in given if name in message.split()] if isinstance(given, Mapping) else []
    places = {f"{section}.{name}": locate(f"{section}.{name}") for name in named}
    key = max(places, key=lambda each: place.strength if (place := places[each]) else 0, default=section)
    about = {each for word in message.split() if (each := f"{section}.{word}") in schema().settings}
    hint = f"{'change' if named else 'set'} {about.pop()}" if len(about) == 1 else "change one of them"
    return Diagnostic("error", f"{section}: {message}", key, locate(key), hint=hint)


def _foreign(key: str, rest: tuple[int | str, ...], tree: Mapping[str, Any], locate: Locate) -> Iterator[Diagnostic]:
    """A key that other kinds of its section have, but not the chosen one."""
    if (declared := schema().setting(key)) and len(rest) > 1 and (model := element(declared)):
        # A mapping in a list, which no layer is searched for unknown keys in.
        full, names = ".".join(map(str, (key, *rest))), sorted(model.model_fields)
        hint = did_you_mean(str(rest[1]), names, f"known are: {', '.join(names)}")
        yield Diagnostic("error", f"{key}.{rest[0]} has no setting {rest[1]!r}", full, locate(full), hint=hint)
        return
    full = key if key in schema().settings and not rest else f"{key}.{rest[0]}" if rest else key
    section, _, name = full.rpartition(".")
    kinds = schema().sections[section].kinds if section in schema().sections else {}
    owners = [kind for kind, model in kinds.items() if name in model.model_fields]
    if not owners:
        return  # no kind has it: already reported at the layer that gives it
    kind = value_at(tree, f"{section}.kind")
    what = f"{section}.kind {kind} has no setting {name!r}"
    owner = " or ".join(owners)
    hint = f"remove it, or choose {section}.kind: {owner}"
    if locate(f"{section}.kind") == locate(section):  # this layer leaves the kind to others
        hint += f"; with `kind: {owner}` beside it, it yields to the kind of a stronger layer"
    yield Diagnostic("error", what, full, locate(full), hint=hint)
