"""Which settings of a recipe name repositories of the Hub."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trainkit.hub.splits import RowSelection
from trainkit.recipe.hub_name import is_repository
from trainkit.recipe.schema import DatasetData, HfModel, Recipe
from trainkit.recipe.schema.data import BYTES

MAIN = "main"
COMMIT = re.compile(r"[0-9a-f]{40}")
# Setting -> the one of its revision.
REVISIONS: Mapping[str, str] = {
    "model.path": "model.revision",
    "peft.path": "peft.revision",
    "data.tokenizer": "data.tokenizer_revision",
    "data.path": "data.revision",
}


@dataclass(frozen=True, slots=True)
class RepoRef:
    """A repository that a setting names. revision: a branch, a tag or a commit, as given in the recipe.

    commit: what that is, once it is known. rows: subset and splits of a data set.
    """

    key: str
    kind: Literal["model", "dataset"]
    name: str
    revision: str = MAIN
    commit: str = ""
    rows: RowSelection = field(default_factory=RowSelection)

    @property
    def role(self) -> str:
        """The setting, or the one that a part of `data.mix` stands for."""
        return "data.path" if self.key.startswith("data.mix.") else self.key

    @property
    def revision_key(self) -> str:
        """The setting of its revision."""
        return REVISIONS[self.key] if self.key in REVISIONS else self.beside("revision")

    def beside(self, name: str) -> str:
        """A setting of the same section."""
        return f"{self.key.rpartition('.')[0]}.{name}"

    @property
    def folder(self) -> str:
        """The repository's folder in the Hub's cache (huggingface_hub: repo_folder_name)."""
        return f"{self.kind}s--{self.name.replace('/', '--')}"


@dataclass(frozen=True, slots=True)
class Download:
    """A run's download from a Hub repository. key: the setting that names it.

    bytes: of all its files that are read; missing: of those that the cache lacks, None where ranks have another cache.
    """

    key: str
    name: str
    bytes: int
    missing: int | None


def repo_refs(recipe: Recipe, absent: Mapping[str, Sequence[str]]) -> tuple[RepoRef, ...]:
    """The repositories that the built-in trainer reads from the Hub: names without a local folder.

    absent: the paths without a file, by setting.
    """
    if recipe.program.kind != "builtin":
        return ()
    absent = {**absent, **dict.fromkeys(_mixed_keys(recipe), absent.get("data.mix", ()))}
    return tuple(ref for ref in _paths(recipe) if is_repository(ref.name) and ref.name in absent.get(ref.key, ()))


def _paths(recipe: Recipe) -> Iterator[RepoRef]:
    """All that may be a repository's name, or a path."""
    model = recipe.model if isinstance(recipe.model, HfModel) else None
    tokenizer = getattr(recipe.data, "tokenizer", None)
    tokenizer = None if tokenizer == BYTES else tokenizer
    if model is not None and model.path:
        yield RepoRef("model.path", "model", model.path, model.revision or MAIN)
    if recipe.peft.path:
        yield RepoRef("peft.path", "model", recipe.peft.path, recipe.peft.revision or MAIN)
    if tokenizer:
        same = model is not None and model.path == tokenizer
        revision = _value(recipe, "data.tokenizer_revision") or (model.revision if model and same else None)
        yield RepoRef("data.tokenizer", "model", tokenizer, revision or MAIN)
    data = recipe.data
    if isinstance(data, DatasetData):
        rows = RowSelection(data.subset, data.split, data.validation_split)
        if isinstance(data.path, str):  # a revision is of one repository
            yield RepoRef("data.path", "dataset", data.path, data.revision or MAIN, rows=rows)
        mix = (each for each in data.mix if each.weight)
        for key, each in zip(_mixed_keys(recipe), mix, strict=True):
            paths = [each.path] if isinstance(each.path, str) else each.path
            if len(paths) == 1:  # a revision is of one repository
                rows = RowSelection(each.subset, each.split, data.validation_split)
                yield RepoRef(key, "dataset", paths[0], each.revision or MAIN, rows=rows)


def _mixed_keys(recipe: Recipe) -> list[str]:
    """Of the sources that are read."""
    mix = enumerate(getattr(recipe.data, "mix", ()))
    return [f"data.mix.{number}.path" for number, each in mix if each.weight]


def revision_without_name(recipe: Recipe, refs: Iterable[RepoRef]) -> Iterator[tuple[str, str]]:
    """Revisions that are set for what is no repository: the setting, and the value beside it."""
    known = {ref.key for ref in refs}
    mixed = {key: f"{key.removesuffix('path')}revision" for key in _mixed_keys(recipe)}
    for key, revision in {**REVISIONS, **mixed}.items():
        if recipe.program.kind == "builtin" and key not in known and _value(recipe, revision) is not None:
            yield revision, str(_value(recipe, key))


def pinned(recipe: Recipe, refs: Iterable[RepoRef]) -> Recipe:
    """The recipe with the commits of what it names, so that the same again is the same."""
    return with_values(recipe, {ref.revision_key: ref.commit for ref in refs if ref.commit})


def _value(recipe: Recipe, key: str) -> Any:
    found: Any = recipe
    for name in key.split("."):
        found = found[int(name)] if isinstance(found, list) else getattr(found, name, None)
    return found


def with_values(recipe: Recipe, values: Mapping[str, str]) -> Recipe:
    """The recipe with other values of settings by dotted key."""
    for key, value in values.items():
        recipe = _with_value(recipe, key.split("."), value)
    return recipe


def _with_value(node: Any, names: Sequence[str], value: str) -> Any:
    """A section, or a list of them, with another value below it."""
    first, *rest = names
    if isinstance(node, list):
        return [_with_value(each, rest, value) if str(at) == first else each for at, each in enumerate(node)]
    return node.model_copy(update={first: _with_value(getattr(node, first), rest, value) if rest else value})
