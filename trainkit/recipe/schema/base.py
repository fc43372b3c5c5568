"""How a recipe section and its settings are declared: once, with everything that is derived from the declaration."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic.config import JsonDict
from pydantic_core import CoreSchema
from pydantic_core.core_schema import no_info_after_validator_function, no_info_before_validator_function

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

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """The section's validator, with Python functions only if the section needs them."""
        # Copied: pydantic before 2.10 keeps what it hands out, and finds it by this reference.
        made: Any = {**handler.resolve_ref_schema(handler(source))}
        ref = made.pop("ref", None)  # of the section in the JSON Schema: the outermost validator must carry it
        if cls.short_form:
            made = no_info_before_validator_function(cls._expand, made)
        if cls._contradictions is not Section._contradictions:
            made = no_info_after_validator_function(cls._agree, made)
        return {**made, "ref": ref} if ref else made

    @classmethod
    def _expand(cls, value: Any) -> Any:
        return {cls.short_form: value} if isinstance(value, (str, int, float)) else value

    def _agree(self) -> Self:
        if found := "\n".join(self._contradictions()):
            raise ValueError(found)
        return self


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
    expects: str = "",
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
    expects: what a value (or an element of a list) must be, in words for messages: where a pattern decides it.
    here: whether planning itself reads it, so that a plan for another machine needs it on this one, too.
    lines: its texts may have several lines, tabs and the like; those of other settings hold no control character.
    constraints: pydantic's (``ge``, ``le``, ``pattern``, ``min_length``, …).
    """
    said: JsonDict = {"unit": unit, "flag": flag, "reads": reads, "missing": missing, "expects": expects}
    said |= {"here": here, "lines": lines}
    extra: JsonDict = {name: value for name, value in said.items() if value}
    if words:
        extra["words"] = [*words]
    if constraints.keys() & {"ge", "gt"} and not constraints.keys() & {"le", "lt"}:
        constraints["le"] = MOST
    return Field(default, description=description, alias=alias, json_schema_extra=extra or None, **constraints)
