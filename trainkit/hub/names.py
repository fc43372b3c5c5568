"""Which settings of a recipe name repositories of the Hub, and which files of one a run needs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from typing import Any, Literal

from trainkit.hub.splits import README, Asked, NoSuchPartError, chosen, files_by_split
from trainkit.recipe.repository import is_repository
from trainkit.recipe.schema import DatasetData, HfModel, Recipe

MAIN = "main"
COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class Named:
    """A repository that a setting names. revision: a branch, a tag or a commit, as the recipe has it.

    commit: what that is, once it is known. rows: what is asked of a data set.
    """

    key: str
    kind: Literal["model", "dataset"]
    name: str
    revision: str = MAIN
    commit: str = ""
    rows: Asked = field(default_factory=Asked)

    @property
    def role(self) -> str:
        """What the repository is for: the setting, or that which a part of `data.mix` stands for."""
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
}
# What `save_to_disk` of datasets writes, and one of its files at the top.
_SAVED, _SAVED_HERE = (
    ("dataset_info.json", "dataset_dict.json", "state.json", "*.arrow"),
    {"dataset_dict.json", "state.json"},
)
# Setting -> the file that says what a repository is, which is read while planning.
DESCRIPTION: Mapping[str, str] = {
    "model.path": "config.json",
    "peft.path": "adapter_config.json",
    "data.tokenizer": "tokenizer_config.json",
    "data.path": README,
}


def named_by(recipe: Recipe, absent: Mapping[str, Sequence[str]]) -> tuple[Named, ...]:
    """What the built-in trainer will read from the Hub: names where nothing of that name is on this disk.

    absent: the paths without a file, by setting.
    """
    if recipe.program.kind != "builtin":
        return ()
    missing = {**absent, **{key: absent.get("data.mix", ()) for key in _mixed_keys(recipe)}}
    return tuple(each for each in _named(recipe) if is_repository(each.name) and each.name in missing.get(each.key, ()))


def revision_without_name(recipe: Recipe, named: Iterable[Named]) -> Iterator[tuple[str, str]]:
    """Settings of revisions, each with what it is of, that no name of the Hub goes with."""
    known = {each.key for each in named}
    mixed = {key: f"{key.removesuffix('path')}revision" for key in _mixed_keys(recipe)}
    for key, revision in {**REVISIONS, **mixed}.items():
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
    data = recipe.data
    if isinstance(data, DatasetData):
        rows = Asked(data.subset, data.split, data.validation_split)
        yield Named("data.path", "dataset", data.path, data.revision or MAIN, rows=rows)
        mix = (each for each in data.mix if each.weight)
        for key, each in zip(_mixed_keys(recipe), mix, strict=True):
            paths = [each.path] if isinstance(each.path, str) else each.path
            if len(paths) == 1:  # a revision is of one repository
                rows = Asked(each.subset, each.split, data.validation_split)
                yield Named(key, "dataset", paths[0], each.revision or MAIN, rows=rows)


def _mixed_keys(recipe: Recipe) -> list[str]:
    """Of the sources that are not left out."""
    mix = enumerate(getattr(recipe.data, "mix", ()))
    return [f"data.mix.{number}.path" for number, each in mix if each.weight]


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


def pinned(recipe: Recipe, named: Iterable[Named]) -> Recipe:
    """The recipe with the commits of what it names, so that the same again is the same."""
    return with_values(recipe, {each.revision_key: each.commit for each in named if each.commit})


def at(named: Named, commit: str) -> Named:
    """The repository at a commit."""
    return replace(named, commit=commit)


def wanted(named: Named, names: Iterable[str], readme: str = "") -> tuple[str, ...]:
    """Those of a repository's files that a run needs. readme: the text of a data set's. Raises NoSuchPartError."""
    every = sorted(names)
    if named.role == "data.path":
        return _wanted_rows(named.rows, every, readme)
    always, alternatives = _WANTED[named.role]
    found = next((found for each in alternatives if (found := _matching(each, every))), [])
    return tuple(dict.fromkeys([*_matching(always, every), *found]))


def _wanted_rows(asked: Asked, every: Sequence[str], readme: str) -> tuple[str, ...]:
    if _SAVED_HERE & set(every):
        if asked.subset is not None:
            raise NoSuchPartError("subset", f"has no subset {asked.subset!r}", "leave data.subset out")
        return tuple(name for name in every if any(fnmatch(name.rpartition("/")[2], each) for each in _SAVED))
    splits = files_by_split(every, readme, asked.subset)
    files = [name for split in chosen(splits, asked) if split for name in splits[split]] if splits else []
    return tuple(dict.fromkeys([*(name for name in every if name == README), *files]))


def has_content(named: Named, names: Iterable[str], readme: str = "") -> bool:
    """Whether a repository has what the setting is for: weights, rows, or a tokenizer. Raises NoSuchPartError."""
    every = list(names)
    if named.role == "data.path":
        return bool(set(wanted(named, every, readme)) - {README})
    alternatives = _WANTED[named.role][1] or (tuple(each for each in _TOKENIZER if each != "config.json"),)
    return any(_matching(each, every) for each in alternatives)


def _matching(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """Files at the top, or of a folder that a pattern names: the others hold other formats."""
    listed = tuple(patterns)
    return [
        name for name in names if any(fnmatch(name, each) and name.count("/") == each.count("/") for each in listed)
    ]
