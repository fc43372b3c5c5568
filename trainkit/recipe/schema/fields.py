"""The schema as a table: every setting by its dotted key, read off the declarations in schema/."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from trainkit.recipe.schema import Recipe, Section


@dataclass(frozen=True)
class Setting:
    """One leaf of the schema.

    variant: the kind of the tagged section that has it (``zero3``); empty where every kind has it.
    open: whether the value may be a mapping with the user's own keys (`env`, `program.args`).
    """

    key: str
    annotation: Any
    metadata: tuple[Any, ...]
    default: Any
    description: str
    unit: str = ""
    flag: str = ""
    reads: str = ""
    missing: str = ""
    words: tuple[str, ...] = ()
    expects: str = ""
    here: bool = False
    lines: bool = False
    variant: str = ""
    open: bool = False


@dataclass(frozen=True)
class SectionEntry:
    """One mapping of the schema. kinds: the section classes by kind, where it is tagged by a key `kind`."""

    key: str
    model: type[Section]
    description: str
    kinds: Mapping[str, type[Section]]


@dataclass(frozen=True)
class Schema:
    """All sections and settings. A key of a tagged section has one setting for each kind that declares it."""

    sections: Mapping[str, SectionEntry]
    settings: Mapping[str, tuple[Setting, ...]]

    @property
    def keys(self) -> tuple[str, ...]:
        """Every dotted key, sections and settings, in the order of declaration."""
        return (*self.sections, *self.settings)

    def setting(self, key: str, kind: str = "") -> Setting | None:
        """The setting at the key, as the kind of its tagged section declares it where that is given."""
        found = self.settings.get(key, ())
        return next((each for each in found if each.variant == kind), found[0] if found else None)

    def all_settings(self) -> list[Setting]:
        """Every setting, in the order of declaration."""
        return list(chain.from_iterable(self.settings.values()))


@cache
def schema() -> Schema:
    """The table of the recipe's schema."""
    sections: dict[str, SectionEntry] = {}
    settings: dict[str, list[Setting]] = {}
    _walk(Recipe, "", "", sections, settings)
    return Schema(sections, {key: tuple(declared) for key, declared in settings.items()})


@cache
def path_keys() -> tuple[str, ...]:
    """Settings that name files or folders of the user's."""
    return tuple(dict.fromkeys([each.key for each in schema().all_settings() if each.reads]))


@cache
def open_keys() -> frozenset[str]:
    """Settings whose keys are the user's own words."""
    return frozenset({each.key for each in schema().all_settings() if each.open})


def split_key(key: str) -> list[str]:
    """The parts of a dotted key; what lies inside `env` or `program.args` is one part, dots and all."""
    for prefix in open_keys():
        if key.startswith(f"{prefix}."):
            return [*prefix.split("."), key[len(prefix) + 1 :]]
    return key.split(".")


def nest(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted key as the tree of a recipe."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *sections, name = key.split(".") if key in schema().settings else split_key(key)
        target = tree
        for section in sections:
            target = target.setdefault(section, {})
        target[name] = value
    return tree


def lies_in(key: str, sections: Iterable[str]) -> bool:
    """Whether a dotted key is one of the keys, or below one."""
    return any(key == each or key.startswith(f"{each}.") for each in sections)


@cache
def tagged_sections() -> frozenset[str]:
    """Sections whose `kind` decides which settings they have."""
    return frozenset(key for key, section in schema().sections.items() if section.kinds)


@cache
def short_forms() -> Mapping[str, str]:
    """Sections that may be written as one value, and the setting that it then is (``precision``: ``dtype``)."""
    return {key: section.model.short_form for key, section in schema().sections.items() if section.model.short_form}


def defaults(kinds: Mapping[str, str]) -> dict[str, Any]:
    """Every setting's default as a tree, for tagged sections of the given kinds."""
    settings = schema().all_settings()
    chosen = [each for each in settings if each.variant in ("", kinds.get(each.key.rpartition(".")[0]))]
    return nest({each.key: each.default for each in chosen})


def _walk(
    model: type[Section],
    prefix: str,
    variant: str,
    sections: dict[str, SectionEntry],
    settings: dict[str, list[Setting]],
) -> None:
    for name, info in model.model_fields.items():
        key = f"{prefix}{info.alias or name}"
        models: list[type[Section]] = []
        is_open = False
        for member, _ in members(info.annotation):
            is_open = is_open or get_origin(member) is dict
            if isinstance(member, type) and issubclass(member, Section):
                models.append(member)
        if not models:
            extra: Mapping[str, Any] = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
            setting = Setting(
                key,
                info.annotation,
                tuple(info.metadata),
                info.get_default(),
                info.description or "",
                unit=str(extra.get("unit", "")),
                flag=str(extra.get("flag", "")),
                reads=str(extra.get("reads", "")),
                missing=str(extra.get("missing", "")),
                words=tuple(extra.get("words", ())),
                expects=str(extra.get("expects", "")),
                here=bool(extra.get("here", False)),
                lines=bool(extra.get("lines", False)),
                variant=variant,
                open=is_open,
            )
            settings.setdefault(key, []).append(setting)
            continue
        named = [(_kind(each), each) for each in models]
        kinds = {kind: each for kind, each in named if kind}
        sections[key] = SectionEntry(key, models[0], info.description or "", kinds)
        for kind, each in named:
            _walk(each, f"{key}.", kind if len(models) > 1 else variant, sections, settings)


def _kind(model: type[Section]) -> str:
    """The one kind that the section class stands for; empty for a section that is not tagged."""
    info = model.model_fields.get("kind")
    choices = get_args(info.annotation) if info and get_origin(info.annotation) is Literal else ()
    return str(choices[0]) if len(choices) == 1 else ""


def members(annotation: Any, metadata: tuple[Any, ...] = ()) -> list[tuple[Any, tuple[Any, ...]]]:
    """The alternatives of a type, each with its constraints: `Literal["auto"] | Annotated[int, …]` has two."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *extra = get_args(annotation)
        found = [item for each in extra for item in (each.metadata if isinstance(each, FieldInfo) else [each])]
        return members(inner, (*metadata, *found))
    if origin in (Union, UnionType):
        return [member for each in get_args(annotation) for member in members(each, metadata)]
    return [(annotation, metadata)]
