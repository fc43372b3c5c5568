"""What the schema says about settings and their values, cut to the size of a question."""

from __future__ import annotations

import re
from typing import Any

from trainkit.recipe.schema.fields import Setting, schema, tagged_sections
from trainkit.recipe.validation.type_errors import choices
from trainkit.wizard.view import View


def values_of(key: str, kind: str = "") -> list[Any]:
    """The literal values of a setting; the kinds, for the kind of a tagged section."""
    section, _, name = key.rpartition(".")
    if name == "kind" and section in tagged_sections():
        return list(schema().sections[section].kinds)
    setting = declared(key, kind)
    return choices(setting.annotation) if setting else []


def declared(key: str, kind: str = "") -> Setting | None:
    """The setting as the kind of its section declares it; None where that kind lacks it."""
    setting = schema().setting(key, kind)
    return setting if setting and setting.variant in ("", kind) else None


def meaning(key: str, value: Any, kind: str = "") -> str:
    """What the schema's description says of one value, without the final dot; empty where it says nothing."""
    section, _, name = key.rpartition(".")
    if name == "kind" and section in tagged_sections():
        setting = schema().setting(key, str(value))
        return setting.description.rstrip(".") if setting else ""
    setting = declared(key, kind)
    if setting is None:
        return ""
    found = re.search(rf"(?:^|[.;,:] )`{re.escape(str(value))}`:? (.*?)(?:[.;](?: |$)|, `|$)", setting.description)
    return found[1].replace("`", "").removeprefix("is ") if found else ""


def explained(*keys: str, view: View) -> tuple[str, ...]:
    """A line for each setting: its key and the schema's description."""
    found = []
    for key in keys:
        section = key.rpartition(".")[0]
        setting = declared(key, view.kind(section) if section in tagged_sections() else "")
        if setting:
            found.append(f"{key}: {setting.description}")
    return tuple(found)
