"""Which files of a Hub repository a run needs, and which are cached: decided from file lists and small files only.

The cache's layout (huggingface_hub docs, "Understand caching"): <owner>--<name>/refs/<branch> holds a commit,
snapshots/<commit>/ its files, .no_exist/<commit>/ names that it does not have, trees/<commit>.json the list of its
files.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import Any, Protocol

from trainkit import lora
from trainkit.hub.references import COMMIT, RepoRef, with_values
from trainkit.hub.splits import READ, README, NoSuchPartError, files_by_split, selected_splits
from trainkit.recipe.described import CONFIG, TEMPLATE, TOKENIZER
from trainkit.recipe.schema import Recipe

# A model's weights in the order in which transformers looks: in one file, or in shards that an index names.
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_TOKENIZER = (
    CONFIG, "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model",
    "*.tiktoken", "chat_template.*", "additional_chat_templates/*.jinja",
)  # fmt: skip
# Setting -> its files besides the weights, by patterns.
_PATTERNS: Mapping[str, tuple[str, ...]] = {
    "model.path": (CONFIG, "generation_config.json"),
    "peft.path": (lora.CONFIG, lora.WEIGHTS),
    "data.tokenizer": _TOKENIZER,
}
# What `save_to_disk` of datasets writes, and the files of these that lie at the top.
_SAVED, _SAVED_AT_THE_TOP = (
    ("dataset_info.json", "dataset_dict.json", "state.json", "*.arrow"),
    {"dataset_dict.json", "state.json"},
)
# Setting -> the file that describes a repository, which is read while planning.
DESCRIPTION: Mapping[str, str] = {
    "model.path": CONFIG,
    "peft.path": lora.CONFIG,
    "data.tokenizer": TOKENIZER,
    "data.path": README,
}
# All files that transformers asks for, one by one, to load a fast tokenizer.
_SINGLY = ("tokenizer.json", TOKENIZER, "special_tokens_map.json", "added_tokens.json", TEMPLATE)
_NOTHING = "has nothing that the trainer reads there"


def index_file(ref: RepoRef, names: Collection[str]) -> str:
    """The file that lists which others a run needs: the index of a model's shards, or a data set's README.md.

    Empty where there is none.
    """
    if ref.role == "data.path":
        return README if README in names else ""
    first = _first_weights(ref, names)
    return first if first.endswith(".index.json") else ""


def _first_weights(ref: RepoRef, names: Collection[str]) -> str:
    return next((name for name in _WEIGHTS if ref.role == "model.path" and name in names), "")


def _weights(ref: RepoRef, names: Collection[str], index: str) -> tuple[str, ...]:
    """The files that hold a model's weights, or those of adapters, whether they exist or not."""
    if ref.role == "peft.path":
        return (lora.WEIGHTS,)
    first = _first_weights(ref, names)
    return (first, *(_shards(index) if index_file(ref, names) else ())) if first else ()


def _shards(index: str) -> list[str]:
    """The files that an index names, in order."""
    try:
        return sorted({str(name) for name in json.loads(index)["weight_map"].values()})
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):  # not an index
        return []


def needed_files(ref: RepoRef, names: Iterable[str], index: str = "") -> tuple[str, ...]:
    """Those of a repository's files that a run needs. index: the text of its index file. Raises NoSuchPartError."""
    every = sorted(names)
    if ref.role != "data.path":
        weights = [name for name in _weights(ref, every, index) if name in every]
        return tuple(dict.fromkeys([*_matching(_PATTERNS[ref.role], every), *weights]))
    if _SAVED_AT_THE_TOP & set(every):
        if ref.rows.subset is not None:
            raise NoSuchPartError("subset", f"has no subset {ref.rows.subset!r}", "leave data.subset out")
        return tuple(name for name in every if any(fnmatch(posixpath.basename(name), each) for each in _SAVED))
    splits = files_by_split(every, index, ref.rows.subset)
    rows = [name for split in selected_splits(splits, ref.rows) if split for name in splits[split]] if splits else []
    return tuple(dict.fromkeys([*(name for name in every if name == README), *rows]))


def _matching(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """Files at the top, or in a folder that a pattern names: other folders hold other formats."""
    listed = tuple(patterns)
    return [name for name in names if any(fnmatch(name, p) and name.count("/") == p.count("/") for p in listed)]


def missing_files(ref: RepoRef, names: Iterable[str], index: str = "") -> str:
    """What a repository lacks for the setting, as the end of a sentence; empty if nothing.

    Raises NoSuchPartError.
    """
    every = set(names)
    if ref.role == "data.path":
        rows = set(needed_files(ref, every, index)) - {README}
        return "" if rows else f"{_NOTHING}: no file of rows ({', '.join(READ)})"
    if ref.role == "data.tokenizer":
        found = _matching((each for each in _TOKENIZER if each != CONFIG), every)
        return "" if found else f"{_NOTHING}: no tokenizer"
    weights = _weights(ref, every, index)
    if not every & set(weights):
        model = "no weights (model.safetensors or pytorch_model.bin, whole or in shards with an index)"
        return f"{_NOTHING}: {model if ref.role == 'model.path' else f'no adapters ({lora.WEIGHTS})'}"
    if weights == (index_file(ref, every),):
        return f"{_NOTHING}: its {weights[0]} names no files"
    absent = [name for name in (DESCRIPTION[ref.role], *weights) if name not in every]
    more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
    return f"lacks {', '.join(absent[:3])}{more}" if absent else ""


class CacheFiles(Protocol):
    """Read access to the cache's disk."""

    def read(self, path: str) -> bytes:
        """The file's bytes. Raises OSError."""

    def exists(self, path: str) -> bool:
        """Whether there is a file at the path."""


@dataclass(frozen=True, slots=True)
class CachedRepo:
    """The cached part of a repository. sizes: of all files that the run needs, in bytes; missing: those to download.

    closed: whether the Hub, if asked, requires a token.
    Without sizes the content of the repository, and so what is missing, is unknown: obstacle says why, remedy what to
    do.
    """

    ref: RepoRef
    folder: str = ""
    sizes: Mapping[str, int] | None = None
    missing: tuple[str, ...] = ()
    obstacle: str = ""
    remedy: str = ""
    closed: bool = False

    @property
    def whole(self) -> bool:
        """Whether everything that the run needs is here."""
        return self.sizes is not None and not self.missing

    @property
    def missing_bytes(self) -> int:
        """Bytes to download."""
        return sum((self.sizes or {})[name] for name in self.missing)


_VARIABLE = re.compile(r"\$(?:(\w+)|\{([^}]*)\})", re.ASCII)  # as os.path.expandvars takes them


def cache_root(environ: Mapping[str, str], home: str) -> str:
    """The folder of the cache (huggingface_hub.constants). home: of the user, where ~ is."""
    above = environ.get("HF_HOME") or posixpath.join(
        environ.get("XDG_CACHE_HOME") or posixpath.join(home, ".cache"), "huggingface"
    )
    found = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE") or posixpath.join(above, "hub")
    found = posixpath.join(home, found[2:]) if found.startswith("~/") else found
    return _VARIABLE.sub(lambda each: environ.get(each[1] or each[2], each[0]), found)


def snapshot(root: str, ref: RepoRef) -> str:
    """The folder of a repository's files at its commit."""
    return posixpath.join(root, ref.folder, "snapshots", ref.commit)


def name_of(folder: str) -> tuple[str, str] | None:
    """The repository and the commit whose files a folder of the cache holds; None for any other folder."""
    match = re.search(r"/(?:model|dataset)s--([^/]+)/snapshots/([0-9a-f]{40})/?$", folder)
    return (match[1].replace("--", "/"), match[2]) if match else None


def public_name(path: str) -> str:
    """The name of a folder for others: its name on the Hub where it came from there, else its own."""
    found = name_of(path)
    return found[0] if found else posixpath.basename(posixpath.normpath(path))


def shown(path: str) -> str:
    """A path for messages: a cache folder by its name on the Hub."""
    found = name_of(path)
    return f"{found[0]} on the Hub" if found else path


def located(recipe: Recipe, repositories: Iterable[tuple[str, str, str, str]], root: str) -> Recipe:
    """The recipe with folders of the cache in the place of names. repositories: setting, kind, name and commit of each.

    root: the folder of the cache.
    """
    every = (RepoRef(key, kind, name, commit, commit) for key, kind, name, commit in repositories)  # type: ignore[arg-type]
    return with_values(recipe, {each.key: snapshot(root, each) for each in every})


def cached_repo(
    ref: RepoRef, root: str, files: CacheFiles, sizes: Mapping[str, int] | None = None
) -> CachedRepo | None:
    """The cached part of a repository; None if nothing is cached. sizes: of its files, if known.

    Raises NoSuchPartError for a subset or a split that a data set does not have.
    """
    storage = posixpath.join(root, ref.folder)
    commit = ref.commit or (ref.revision if COMMIT.fullmatch(ref.revision) else "")
    commit = commit or _text(files, posixpath.join(storage, "refs", ref.revision)).strip()
    if not COMMIT.fullmatch(commit):
        return None
    ref = replace(ref, commit=commit)
    folder = snapshot(root, ref)
    listed = sizes or _listed(files, storage, commit) or _fetched_singly(ref, folder, storage, files)
    if listed is None:
        return CachedRepo(ref, folder)
    index, text = index_file(ref, listed), ""
    if index:
        if not files.exists(posixpath.join(folder, index)):
            return CachedRepo(ref, folder, {index: listed[index]}, (index,))
        text = _text(files, posixpath.join(folder, index))
    if missing_files(ref, listed, text):  # the Hub is to say so
        return CachedRepo(ref, folder)
    needed = {name: listed[name] for name in needed_files(ref, listed, text)}
    missing = tuple(name for name in needed if not files.exists(posixpath.join(folder, name)))
    return CachedRepo(ref, folder, needed, missing)


def _text(files: CacheFiles, path: str) -> str:
    try:
        return files.read(path).decode("utf-8", "replace")
    except OSError:  # it does not exist
        return ""


def _listed(files: CacheFiles, storage: str, commit: str) -> dict[str, int] | None:
    """The sizes in the list of a commit's files; huggingface_hub.get_cached_repo_tree would take a second to import."""
    try:
        found: Any = json.loads(_text(files, posixpath.join(storage, "trees", f"{commit}.json")))
        return {str(name): int(entry["size"]) for name, entry in found["files"].items()}
    except (ValueError, LookupError, TypeError, AttributeError):  # none, or of another format
        return None


def _fetched_singly(ref: RepoRef, folder: str, storage: str, files: CacheFiles) -> dict[str, int] | None:
    """Files that transformers or peft fetched one by one, where they are known to be all; sizes are unknown, so 0."""

    def here(name: str) -> bool:
        return files.exists(posixpath.join(folder, name))

    found: tuple[str, ...] = ()
    if ref.role == "peft.path":
        found = (lora.CONFIG, lora.WEIGHTS)
    elif ref.role == "data.tokenizer":
        absent = posixpath.join(storage, ".no_exist", ref.commit)
        found = tuple(name for name in _SINGLY if name == _SINGLY[0] or not files.exists(posixpath.join(absent, name)))
    elif ref.role == "model.path" and here(CONFIG):
        first = next((name for name in _WEIGHTS if here(name)), "")
        shards = _shards(_text(files, posixpath.join(folder, first))) if first.endswith(".index.json") else []
        return dict.fromkeys((CONFIG, first, *shards), 0) if first else None
    return dict.fromkeys(found, 0) if found and all(map(here, found)) else None
