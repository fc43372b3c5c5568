"""What is printed of the schema: the JSON Schema of recipes, and the reference of every key as Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainkit.recipe.extends import BASE, NAME_PATTERN
from trainkit.recipe.layer import VARIANTS
from trainkit.recipe.schema import Recipe
from trainkit.recipe.schema.base import Section
from trainkit.recipe.schema.fields import SectionEntry, Setting, schema, short_forms
from trainkit.recipe.validate import expected
from trainkit.recipe.yaml_writer import scalar

_VARIANTS = (
    "## variants",
    "",
    "Named changes to the recipe, each a mapping of sections as above, with an optional `description`.",
    "`--variant NAME` selects one in `run`, `plan` and `explain`; `trainkit bench` compares all.",
)


def reference_text() -> str:
    """Every key with what it takes, its default, unit, flag and description, section by section."""
    lines = ["# Recipe keys", ""]
    top = [each for each in schema().all_settings() if "." not in each.key]
    lines += [*(_line(each) for each in top), ""]
    for section in schema().sections.values():
        lines += [*_section(section), ""]
    return "\n".join([*lines, *_VARIANTS]) + "\n"


def _section(section: SectionEntry) -> Iterator[str]:
    yield f"## {section.key}"
    yield ""
    yield section.description
    if section.key in short_forms():
        yield f"A single value is short for `{{{short_forms()[section.key]}: value}}`."
    yield ""
    own = [each for each in schema().all_settings() if each.key.rpartition(".")[0] == section.key]
    if len(section.kinds) <= 1:
        yield from map(_line, own)
        return
    for kind, model in section.kinds.items():
        yield f"### {section.key}.kind: {kind}"
        yield ""
        yield (model.__doc__ or "").strip().splitlines()[0]
        yield ""
        yield from (_line(each) for each in own if each.variant == kind and not each.key.endswith(".kind"))
        yield ""


def _line(setting: Setting) -> str:
    default = setting.default
    shown = "[]" if default == [] else "{}" if default == {} else scalar(default)
    unit = f" [{setting.unit}]" if setting.unit else ""
    flag = f" Flag `--{setting.flag}`." if setting.flag else ""
    lines = " Its text may have several lines." if setting.lines else ""
    return f"- `{setting.key}`: {expected(setting)}{unit}; default `{shown}`. {setting.description}{flag}{lines}"


_INTERPOLATION = "Interpolation"
_VARIANT = "Variant"


def _sections() -> Iterator[type[Section]]:
    """Every section: pydantic before 2.10 writes the defaults only of those that are built."""
    found = Section.__subclasses__()
    while found:
        section = found.pop()
        found += section.__subclasses__()
        yield section


def json_schema() -> dict[str, Any]:
    """A fresh schema document (draft 2020-12) that every valid recipe or preset file satisfies."""
    for section in _sections():
        section.model_rebuild()
    document = Recipe.model_json_schema(by_alias=True)
    definitions = document.setdefault("$defs", {})
    for definition in [*definitions.values(), document]:
        _extend_mapping(definition, definitions)
    for key, setting in short_forms().items():
        name = schema().sections[key].model.__name__
        mapping = definitions[name]
        definitions[name] = {
            "description": mapping.get("description", ""),
            "anyOf": [mapping, dict(mapping["properties"][setting])],
        }
    definitions[_INTERPOLATION] = {
        "type": "string",
        "pattern": r"\$\{",
        "description": "A reference to another value (${train.seed}) or to the environment (${oc.env:NAME,default}).",
    }
    definitions[_VARIANT] = _variant(document)
    one = {"type": "string", "minLength": 1}
    extends = {
        "description": "Presets by name (strategy/fsdp) or files by path to build on; later ones override "
        "earlier ones, this file overrides all.",
        "anyOf": [one, {"type": "array", "items": one}],
    }
    variants = {
        "description": "Named changes to this recipe: `trainkit run --variant NAME`; `trainkit bench` compares all.",
        "type": ["object", "null"],
        "propertyNames": {"pattern": NAME_PATTERN, "not": {"const": BASE}},
        "additionalProperties": {"$ref": f"#/$defs/{_VARIANT}"},
    }
    document["properties"] = {"extends": extends, **document["properties"], VARIANTS: variants}
    document["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    document["title"] = "trainkit recipe"
    document["description"] = "A recipe of trainkit, or a preset to extend."
    return document


def _variant(document: dict[str, Any]) -> dict[str, Any]:
    """Whatever a recipe may hold, and a description."""
    description = {"description": "What the variant is, for tables and plots.", "type": "string"}
    return {
        "description": "Changes to the recipe, written like a recipe.",
        "type": ["object", "null"],
        "properties": {"description": description, **document["properties"]},
        "patternProperties": document.get("patternProperties", {}),
        "additionalProperties": False,
    }


def _extend_mapping(definition: dict[str, Any], definitions: dict[str, Any]) -> None:
    """Add the modifiers `name+` and `name!`, interpolation in values, and partial mappings of tagged sections."""
    properties: dict[str, Any] = definition.get("properties", {})
    modified: dict[str, Any] = {}
    for name, declared in properties.items():
        if "oneOf" in declared:
            # Without a kind (which another layer gives) a mapping fits several members.
            declared["anyOf"] = declared.pop("oneOf")
            declared.pop("discriminator", None)
        lists = (each for each in (declared, *declared.get("anyOf", ())) if each.get("type") == "array")
        element = next((each.get("items", {}) for each in lists), None)
        if element is not None:
            modified[f"^{name}\\+$"] = {"anyOf": [{"type": "array", "items": element}, element]}
        parts = (declared, *declared.get("anyOf", ()), *declared.get("allOf", ()))
        targets = (definitions.get(str(each.get("$ref", "")).rpartition("/")[2], each) for each in parts)
        if any("properties" in each or "additionalProperties" in each for each in targets):
            modified[f"^{name}!$"] = dict(declared)
        else:
            _allow_interpolation(declared)
    if modified:
        definition["patternProperties"] = modified
    if "properties" in definition:
        # An empty section (all of its lines commented out) means nothing was given.
        definition["type"] = ["object", "null"]


def _allow_interpolation(declared: dict[str, Any]) -> None:
    """A value that is no free text may also be written as `${…}`."""
    kinds = {"description", "title", "default", "unit", "flag", "reads", "missing", "words", "expects", "here", "lines"}
    core = {name: declared.pop(name) for name in list(declared) if name not in kinds}
    if core.get("type") == "string" and not set(core) & {"enum", "const", "pattern"}:
        declared.update(core)
        return
    options = core.pop("anyOf") if set(core) == {"anyOf"} else [core]
    declared["anyOf"] = [*options, {"$ref": f"#/$defs/{_INTERPOLATION}"}]
