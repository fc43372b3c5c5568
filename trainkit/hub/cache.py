"""Which files of a repository of the Hub a run needs, and what it lacks of what it is named for."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, Protocol

from trainkit import lora
from trainkit.hub.names import COMMIT, Named, at, with_values
from trainkit.hub.splits import README, Asked, NoSuchPartError, chosen, files_by_split
from trainkit.recipe.described import CONFIG, TEMPLATE, TOKENIZER
from trainkit.recipe.schema import Recipe

_TOKENIZER = (
    CONFIG, "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model",
    "*.tiktoken", "chat_template.*", "additional_chat_templates/*.jinja",
)  # fmt: skip
# Setting -> its files, by patterns.
_WANTED: Mapping[str, tuple[str, ...]] = {
    "model.path": (CONFIG, "generation_config.json"),
    "peft.path": (lora.CONFIG, lora.WEIGHTS),
    "data.tokenizer": _TOKENIZER,
}
# A model's weights in one file, in the order in which transformers looks; `.index.json` behind it names shards.
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
# What `save_to_disk` of datasets writes, and one of its files at the top.
_SAVED, _SAVED_HERE = (
    ("dataset_info.json", "dataset_dict.json", "state.json", "*.arrow"),
    {"dataset_dict.json", "state.json"},
)
# Setting -> the file that says what a repository is, which is read while planning.
DESCRIPTION: Mapping[str, str] = {
    "model.path": CONFIG,
    "peft.path": lora.CONFIG,
    "data.tokenizer": TOKENIZER,
    "data.path": README,
}
# Setting -> the files that transformers and peft ask for by themselves, one by one, whatever they find.
_ASKED_SINGLY: Mapping[str, tuple[str, ...]] = {
    "peft.path": _WANTED["peft.path"],
    "data.tokenizer": (
        "tokenizer.json", TOKENIZER, "special_tokens_map.json", "added_tokens.json", TEMPLATE,
    ),
}  # fmt: skip
_NAMED = 3  # files that a message names
_NOTHING = "has nothing that the trainer reads there"


def guide(named: Named, names: Collection[str]) -> str:
    """The file that says which of the others a run needs: the index of a model's shards, a data set's README.md.

    Empty where there is none.
    """
    if named.role == "data.path":
        return README if README in names else ""
    for whole in _WEIGHTS if named.role == "model.path" else ():
        if whole in names:
            return ""
        if (index := _index(whole)) in names:
            return index
    return ""


def fetched_singly(
    named: Named, read: Callable[[str], str], has: Callable[[str], bool], lacks: Callable[[str], bool]
) -> tuple[str, ...]:
    """The files of a commit that a library has fetched one by one, where these tell that they are all; else none.

    read: the text of a file that is here, empty without one; has: whether one is here; lacks: whether it is known that
    the commit has none of that name.
    """
    asked = _ASKED_SINGLY.get(named.role, ())
    here = tuple(name for name in asked if has(name))
    if named.role == "data.tokenizer":
        return here if asked[0] in here and all(name in here or lacks(name) for name in asked) else ()
    if named.role != "model.path":
        return here if here == asked else ()
    for whole in _WEIGHTS if has(CONFIG) else ():
        if has(whole):
            return (CONFIG, whole)
        if shards := _shards(read(_index(whole))):
            return (CONFIG, _index(whole), *shards)
    return ()


def wanted(named: Named, names: Iterable[str], guiding: str = "") -> tuple[str, ...]:
    """Those of a repository's files that a run needs. guiding: the text of its guide. Raises NoSuchPartError."""
    every = sorted(names)
    if named.role == "data.path":
        return _wanted_rows(named.rows, every, guiding)
    weights = [name for name in _weights(named, every, guiding) if name in every]
    return tuple(dict.fromkeys([*_matching(_WANTED[named.role], every), *weights]))


def lack(named: Named, names: Iterable[str], guiding: str = "") -> str:
    """What a repository does not have of what the setting is for, in words; empty where it has it all.

    Raises NoSuchPartError.
    """
    every = set(names)
    if named.role == "data.path":
        rows = set(wanted(named, every, guiding)) - {README}
        return "" if rows else f"{_NOTHING}: no parquet, JSON lines, or what save_to_disk writes"
    if named.role == "data.tokenizer":
        words = _matching((each for each in _TOKENIZER if each != DESCRIPTION["model.path"]), every)
        return "" if words else f"{_NOTHING}: no tokenizer"
    weights = _weights(named, every, guiding)
    if not every & set(weights):
        sought = f"no adapters ({lora.WEIGHTS})"
        if named.role == "model.path":
            sought = f"no weights ({' or '.join(_WEIGHTS)}, whole or in shards with an index)"
        return f"{_NOTHING}: {sought}"
    if weights == (guide(named, every),):
        return f"{_NOTHING}: its {weights[0]} names no files"
    absent = [name for name in (DESCRIPTION[named.role], *weights) if name not in every]
    more = f" and {len(absent) - _NAMED} more" if len(absent) > _NAMED else ""
    return f"lacks {', '.join(absent[:_NAMED])}{more}" if absent else ""


def _weights(named: Named, every: Collection[str], guiding: str) -> tuple[str, ...]:
    """The files that hold a model's weights, or those of adapters, whether they are there or not."""
    if named.role == "peft.path":
        return (lora.WEIGHTS,)
    if index := guide(named, every):
        return (index, *_shards(guiding))
    return tuple(each for each in _WEIGHTS if each in every)[:1] if named.role == "model.path" else ()


def _shards(index: str) -> list[str]:
    """The files that an index names, in order."""
    try:
        found = json.loads(index)["weight_map"].values()
        return sorted({str(name) for name in found})
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):  # it is none
        return []


def _index(whole: str) -> str:
    return f"{whole}.index.json"


def _wanted_rows(asked: Asked, every: Sequence[str], readme: str) -> tuple[str, ...]:
    if _SAVED_HERE & set(every):
        if asked.subset is not None:
            raise NoSuchPartError("subset", f"has no subset {asked.subset!r}", "leave data.subset out")
        return tuple(name for name in every if any(fnmatch(name.rpartition("/")[2], each) for each in _SAVED))
    splits = files_by_split(every, readme, asked.subset)
    files = [name for split in chosen(splits, asked) if split for name in splits[split]] if splits else []
    return tuple(dict.fromkeys([*(name for name in every if name == README), *files]))


def _matching(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """Files at the top, or of a folder that a pattern names: the others hold other formats."""
    listed = tuple(patterns)
    return [
        name for name in names if any(fnmatch(name, each) and name.count("/") == each.count("/") for each in listed)
    ]


_VARIABLE = re.compile(r"\$(?:(\w+)|\{([^}]*)\})", re.ASCII)  # as os.path.expandvars takes them


class Files(Protocol):
    """What is read of a disk."""

    def read(self, path: str) -> bytes:
        """The file's bytes. Raises OSError."""

    def exists(self, path: str) -> bool:
        """Whether there is a file at the path."""


@dataclass(frozen=True, slots=True)
class Copy:
    """What of a repository is on this disk. sizes: of all files that the run needs, in bytes; missing: which are not.

    closed: whether the Hub gives it to those alone who have a token, where it was asked.
    Without sizes nobody knows what the repository holds, and so what is missing; obstacle says why, and remedy what to
    do about it.
    """

    named: Named
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


def cache_root(environ: Mapping[str, str], home: str) -> str:
    """The folder of the cache (huggingface_hub.constants). home: of the user, where ~ is."""
    above = environ.get("HF_HOME") or posixpath.join(
        environ.get("XDG_CACHE_HOME") or posixpath.join(home, ".cache"), "huggingface"
    )
    found = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE") or posixpath.join(above, "hub")
    found = posixpath.join(home, found[2:]) if found.startswith("~/") else found
    return _VARIABLE.sub(lambda each: environ.get(each[1] or each[2], each[0]), found)


def snapshot(root: str, named: Named) -> str:
    """The folder of a repository's files at its commit."""
    return posixpath.join(root, named.folder, "snapshots", named.commit)


def name_of(folder: str) -> tuple[str, str] | None:
    """The repository and the commit whose files a folder of the cache holds; None for any other folder."""
    match = re.search(r"/(?:model|dataset)s--([^/]+)/snapshots/([0-9a-f]{40})/?$", folder)
    return (match[1].replace("--", "/"), match[2]) if match else None


def public_name(path: str) -> str:
    """What others know a folder by: its name on the Hub where it came from there, else its own."""
    found = name_of(path)
    return found[0] if found else posixpath.basename(posixpath.normpath(path))


def shown(path: str) -> str:
    """A path as people know it: a folder of the cache by its name on the Hub."""
    found = name_of(path)
    return f"{found[0]} on the Hub" if found else path


def located(recipe: Recipe, repositories: Iterable[tuple[str, str, str, str]], root: str) -> Recipe:
    """The recipe with folders of the cache in the place of names. repositories: setting, kind, name and commit of each.

    root: the folder of the cache.
    """
    every = (Named(key, kind, name, commit, commit) for key, kind, name, commit in repositories)  # type: ignore[arg-type]
    return with_values(recipe, {each.key: snapshot(root, each) for each in every})


def copy_of(named: Named, root: str, files: Files, sizes: Mapping[str, int] | None = None) -> Copy | None:
    """What is on this disk of a repository; None where it was never asked for. sizes: of its files, where known.

    Raises NoSuchPartError for a subset or a split that a data set does not have.
    """
    storage = posixpath.join(root, named.folder)
    commit = named.commit or (named.revision if COMMIT.fullmatch(named.revision) else "")
    commit = commit or _text(files, posixpath.join(storage, "refs", named.revision)).strip()
    if not COMMIT.fullmatch(commit):
        return None
    here = at(named, commit)
    folder = snapshot(root, here)
    listed = (
        sizes
        or _listed(files, posixpath.join(storage, "trees", f"{commit}.json"))
        or _fetched_singly(here, folder, posixpath.join(storage, ".no_exist", commit), files)
    )
    if listed is None:
        return Copy(here, folder)
    guided, guiding = guide(here, listed), ""
    if guided:
        if not files.exists(posixpath.join(folder, guided)):  # it says which files there are to fetch
            return Copy(here, folder, {guided: listed[guided]}, (guided,))
        guiding = _text(files, posixpath.join(folder, guided))
    if lack(here, listed, guiding):  # the Hub is to say so
        return Copy(here, folder)
    needed = {name: listed[name] for name in wanted(here, listed, guiding)}
    missing = tuple(name for name in needed if not files.exists(posixpath.join(folder, name)))
    return Copy(here, folder, needed, missing)


def _text(files: Files, path: str) -> str:
    try:
        return files.read(path).decode("utf-8", "replace")
    except OSError:  # it is not there
        return ""


def _listed(files: Files, path: str) -> dict[str, int] | None:
    """The sizes in a listing of the cache's own."""
    try:
        found: Any = json.loads(_text(files, path))
        return {str(name): int(entry["size"]) for name, entry in found["files"].items()}
    except (ValueError, LookupError, TypeError, AttributeError):  # none, or of another format
        return None


def _fetched_singly(named: Named, folder: str, absent: str, files: Files) -> dict[str, int] | None:
    """Files that came one by one, as transformers fetches them, where they are known to be all; not their sizes.

    absent: the folder of the names that the commit does not have.
    """
    found = fetched_singly(
        named,
        lambda name: _text(files, posixpath.join(folder, name)),
        lambda name: files.exists(posixpath.join(folder, name)),
        lambda name: files.exists(posixpath.join(absent, name)),
    )
    return dict.fromkeys(found, 0) or None
