"""The reference of every recipe key as Markdown, read off the schema."""

from __future__ import annotations

from collections.abc import Iterator

from trainkit.recipe.schema.fields import SectionEntry, Setting, schema, short_forms
from trainkit.recipe.validation.type_errors import expected
from trainkit.recipe.yaml.writer import scalar

_VARIANTS = (
    "## variants",
    "",
    "Named changes to the recipe, each a mapping of sections as above, with an optional `description`.",
    "`--variant NAME` takes one in `run`, `plan` and `explain`; `trainkit bench` compares all.",
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
