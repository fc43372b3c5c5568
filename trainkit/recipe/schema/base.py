"""How a recipe section and its settings are declared: once, with everything that is derived from the declaration."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.config import JsonDict

# The upper bound of every number that declares none: what is larger only overflows, or fills the memory.
MOST = 10**12
Count = Annotated[int, Field(ge=1, le=MOST)]
ImportPath = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")]


# A path leads to a file or a folder; a repository is a folder, or a name on the Hub.
Reads = Literal["", "file", "folder", "path", "repository", "content", "output"]


class Section(BaseModel):
    """One mapping of the recipe. Unknown keys are errors, values are typed strictly, instances are frozen."""

    # Strict, for a number in quotes is a text in YAML; by name, for `global` is a keyword of Python (field global_).
    # Validators are built once, as parts of the whole recipe's, instead of once more for each section alone.
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        populate_by_name=True,
        protected_namespaces=(),
        defer_build=True,
        allow_inf_nan=False,
    )

    # The setting that a single value sets where the section is not written as a mapping (`precision: bf16`).
    short_form: ClassVar[str] = ""

    @property
    def is_read(self) -> bool:
        """Whether the run reads what the section names."""
        return True

    def _contradictions(self) -> Iterator[str]:
        """What several settings say against one another, a line each."""
        yield from ()

    def __init_subclass__(cls, **options: Any) -> None:
        """Pydantic calls a function of Python's only for the sections that have need of it."""
        super().__init_subclass__(**options)
        for need, validator in _VALIDATORS.items():
            if need in vars(cls):
                setattr(cls, f"_of_{need}", validator)


def _expand(cls: type[Section], value: Any) -> Any:
    return {cls.short_form: value} if isinstance(value, (str, int, float)) else value


def _agree(section: Section) -> Section:
    if found := "\n".join(section._contradictions()):
        raise ValueError(found)
    return section


_EXPAND: Any = classmethod(_expand)
# What a section declares, and what then validates it.
_VALIDATORS = {
    "short_form": model_validator(mode="before")(_EXPAND),
    "_contradictions": model_validator(mode="after")(_agree),
}


def section(model: type[Section], description: str) -> Any:
    """Declare one mapping of the recipe, by default with the defaults of its settings."""
    # Constructed, not validated: that would build a validator for the section alone while modules load.
    return setting(model.model_construct(), description)


def setting(
    default: Any,
    description: str,
    *,
    unit: str = "",
    flag: str = "",
    reads: Reads = "",
    missing: str = "",
    words: tuple[str, ...] = (),
    lines: bool = False,
    here: bool = False,
    alias: str | None = None,
    **constraints: Any,
) -> Any:
    """Declare one setting.

    unit: of the value, shown in help and reference text.
    flag: the command-line name that HF users know (a ``TrainingArguments`` field), without dashes.
    reads: what lies at the path that the value names; empty where it is no path. ``content`` is a file that the plan
        depends on: the resolver reads it and hands it on. ``output`` is a folder that the run writes.
    missing: what to do where nothing lies there. words: values that are no paths.
    here: whether planning itself reads it, so that a plan for another machine needs it on this one, too.
    lines: its texts may have several lines, tabs and the like; those of other settings hold no control character.
    constraints: pydantic's (``ge``, ``le``, ``pattern``, ``min_length``, …).
    """
    extra: JsonDict = {}
    named = (("unit", unit), ("flag", flag), ("reads", reads), ("missing", missing), ("here", here), ("lines", lines))
    for name, value in named:
        if value:
            extra[name] = value
    if words:
        extra["words"] = [*words]
    if constraints.keys() & {"ge", "gt"} and not constraints.keys() & {"le", "lt"}:
        constraints["le"] = MOST
    return Field(default, description=description, alias=alias, json_schema_extra=extra or None, **constraints)
