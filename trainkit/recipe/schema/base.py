"""How a recipe section and its settings are declared: once, with everything that is derived from the declaration."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.config import JsonDict


class Section(BaseModel):
    """One mapping of the recipe. Unknown keys are errors, values are typed strictly, instances are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, populate_by_name=True, protected_namespaces=())

    # The setting that a single value stands for where the section is not written as a mapping (`precision: bf16`).
    short_form: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        return {cls.short_form: value} if cls.short_form and isinstance(value, (str, int, float)) else value


def setting(
    default: Any,
    description: str,
    *,
    unit: str = "",
    flag: str = "",
    file: bool = False,
    alias: str | None = None,
    **constraints: Any,
) -> Any:
    """Declare one setting.

    unit: of the value, shown in help and reference text.
    flag: the command-line name that HF users know (a ``TrainingArguments`` field), without dashes.
    file: the value names a file whose content the plan depends on; the resolver reads it and hands it on.
    constraints: pydantic's (``ge``, ``le``, ``pattern``, ``min_length``, …).
    """
    extra: JsonDict = {name: value for name, value in (("unit", unit), ("flag", flag), ("file", file)) if value}
    return Field(default, description=description, alias=alias, json_schema_extra=extra or None, **constraints)
