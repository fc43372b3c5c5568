"""Which settings of a recipe name repositories of the Hub, and which files of one a run needs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import Any, Literal

from trainkit.recipe.schema import DatasetData, HfModel, Recipe

MAIN = "main"
COMMIT = re.compile(r"[0-9a-f]{40}")
# `name` or `owner/name` (huggingface_hub: validate_repo_id).
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_FORM = re.compile(rf"(?:{_PART}/)?{_PART}")
_LONGEST = 96


@dataclass(frozen=True, slots=True)
class Named:
    """A repository that a setting names. revision: a branch, a tag or a commit, as the recipe has it.

    commit: what that is, once it is known.
    """

    key: str
    kind: Literal["model", "dataset"]
    name: str
    revision: str = MAIN
    commit: str = ""

    @property
    def folder(self) -> str:
        """The repository's folder in the Hub's cache (huggingface_hub: repo_folder_name)."""
        return f"{self.kind}s--{self.name.replace('/', '--')}"


# Setting -> the one of its revision.
REVISIONS: Mapping[str, str] = {
    "model.path": "model.revision",
    "peft.path": "peft.revision",
    "data.tokenizer": "data.tokenizer_revision",
    "data.path": "data.revision",
}

_TOKENIZER = (
    "config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model",
    "*.tiktoken", "chat_template.*", "additional_chat_templates/*.jinja",
)  # fmt: skip
# Setting -> its files, by patterns; of the alternatives the first that is there.
_WANTED: Mapping[str, tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]] = {
    "model.path": (
        ("config.json", "generation_config.json"),
        (
            ("model.safetensors", "model-[0-9]*-of-[0-9]*.safetensors", "model.safetensors.index.json"),
            ("pytorch_model.bin", "pytorch_model-[0-9]*-of-[0-9]*.bin", "pytorch_model.bin.index.json"),
        ),
    ),
    "peft.path": (("adapter_config.json",), (("adapter_model.safetensors",), ("adapter_model.bin",))),
    "data.tokenizer": (_TOKENIZER, ()),
    "data.path": (
        ("README.md", "dataset_info.json", "dataset_dict.json", "state.json", "*/dataset_info.json", "*/state.json"),
        (("*.parquet",), ("*.jsonl", "*.json"), ("*.arrow",)),
    ),
}
# Setting -> the file that says what a repository is, which is read while planning.
DESCRIPTION: Mapping[str, str] = {
    "model.path": "config.json",
    "peft.path": "adapter_config.json",
    "data.tokenizer": "tokenizer_config.json",
    "data.path": "README.md",
}


def is_name(value: str) -> bool:
    """Whether a text has the form of a repository's name."""
    odd = "--" in value or ".." in value or value.endswith(".git")
    return len(value) <= _LONGEST and not odd and bool(_FORM.fullmatch(value))


def named_by(recipe: Recipe, absent: Mapping[str, Sequence[str]]) -> tuple[Named, ...]:
    """What the built-in trainer will read from the Hub: names where nothing of that name is on this disk.

    absent: the paths without a file, by setting.
    """
    if recipe.program.kind != "builtin":
        return ()
    return tuple(each for each in _named(recipe) if is_name(each.name) and each.name in absent.get(each.key, ()))


def revision_without_name(recipe: Recipe, named: Iterable[Named]) -> Iterator[tuple[str, str]]:
    """Settings of revisions, each with what it is of, that no name of the Hub goes with."""
    known = {each.key for each in named}
    for key, revision in REVISIONS.items():
        if recipe.program.kind == "builtin" and key not in known and _value(recipe, revision) is not None:
            yield revision, str(_value(recipe, key))


def _named(recipe: Recipe) -> Iterator[Named]:
    model = recipe.model if isinstance(recipe.model, HfModel) else None
    tokenizer = getattr(recipe.data, "tokenizer", None)
    if model is not None and model.path:
        yield Named("model.path", "model", model.path, model.revision or MAIN)
    if recipe.peft.path:
        yield Named("peft.path", "model", recipe.peft.path, recipe.peft.revision or MAIN)
    if tokenizer:
        same = model is not None and model.path == tokenizer
        revision = _value(recipe, "data.tokenizer_revision") or (model.revision if model and same else None)
        yield Named("data.tokenizer", "model", tokenizer, revision or MAIN)
    if isinstance(recipe.data, DatasetData):
        yield Named("data.path", "dataset", recipe.data.path, recipe.data.revision or MAIN)


def _value(recipe: Recipe, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(recipe, section), name, None)


def with_values(recipe: Recipe, values: Mapping[str, str]) -> Recipe:
    """The recipe with other values of settings by dotted key."""
    sections: dict[str, dict[str, str]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    changed = {name: getattr(recipe, name).model_copy(update=each) for name, each in sections.items()}
    return recipe.model_copy(update=changed)


def pinned(recipe: Recipe, named: Iterable[Named]) -> Recipe:
    """The recipe with the commits of what it names, so that the same again is the same."""
    return with_values(recipe, {REVISIONS[each.key]: each.commit for each in named if each.commit})


def at(named: Named, commit: str) -> Named:
    """The repository at a commit."""
    return replace(named, commit=commit)


def wanted(key: str, names: Iterable[str]) -> tuple[str, ...]:
    """Those of a repository's files that a run needs for a setting."""
    every = sorted(names)
    always, alternatives = _WANTED[key]
    chosen = next((found for each in alternatives if (found := _matching(key, each, every))), [])
    return tuple(dict.fromkeys([*_matching(key, always, every), *chosen]))


def has_content(key: str, names: Iterable[str]) -> bool:
    """Whether a repository has what the setting is for: weights, rows, or a tokenizer."""
    every = list(names)
    alternatives = _WANTED[key][1] or (tuple(each for each in _TOKENIZER if each != "config.json"),)
    return any(_matching(key, each, every) for each in alternatives)


def _matching(key: str, patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    # Of models only what is at the top: folders below hold other formats. A data set has its files anywhere.
    deep = key == "data.path"
    listed = tuple(patterns)
    return [
        name
        for name in names
        if any(fnmatch(name, each) and (deep or name.count("/") == each.count("/")) for each in listed)
    ]
