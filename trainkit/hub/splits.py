"""Which files of a data set hold which split of which subset: from its files' names, and what its README.md says.

As `datasets` reads them (hub docs, "Manual configuration"): the head of README.md lists subsets under `configs`, each
with `data_files` by split; without such a list names and folders tell the split. The branch that the Hub converts data
sets into, `refs/convert/parquet`, has `<subset>/<split>/0000.parquet`.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

README = "README.md"
CONVERTED = "refs/convert/parquet"
# Of a data set that has several formats the first alone is read.
READ = (".parquet", ".arrow", ".jsonl", ".ndjson", ".csv", ".tsv", ".json")
ENDINGS = (*READ, *(f"{ending}{packed}" for ending in READ[2:] for packed in (".gz", ".zst", ".bz2", ".xz")))
# For programs, beside rows.
_NO_ROWS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json")
# Which split a file belongs to: train-00000-of-00002.parquet, dev.jsonl, validation/0000.parquet
_SPLITS = {"train": "train", "validation": "validation", "valid": "validation", "val": "validation"}
_SPLITS |= {"dev": "validation", "test": "test"}
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}\.")
_CONVERTED_FILE = re.compile(r"[^/]+/[^/]+/\d{4,}\.parquet")
_HEAD = re.compile(r"\A---\r?\n(.*?)\r?\n---\s*?$", re.DOTALL | re.MULTILINE)
_SPECIAL = {"**/": "(?:.*/)?", "/**": "(?:/.*)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
_TOKENS = re.compile(r"\*\*/|/\*\*$|\*\*|\*|\?|\[[^\]]+\]")


class NoSuchPartError(Exception):
    """A data set has no such subset, or split. key: what asks for it, `subset`, `split` or `validation_split`."""

    def __init__(self, key: str, what: str, hint: str) -> None:
        super().__init__(what)
        self.key, self.what, self.hint = key, what, hint


@dataclass(frozen=True, slots=True)
class RowSelection:
    """The subset and splits that a recipe names; None follows from what the data set has."""

    subset: str | None = None
    split: str | None = None
    validation_split: str | None = None


def files_by_split(names: Iterable[str], readme: str = "", subset: str | None = None) -> dict[str, tuple[str, ...]]:
    """The files of a subset by split, in order of their names; {} where nothing of it can be read.

    names: all files, from the data set's own folder. subset: None takes the default one. Raises NoSuchPartError.
    """
    every = sorted(names)
    found = _readable([name for name in every if not _hidden(name)])
    configs = dict(_configs(readme)) or _converted(found)
    if not configs and subset is not None:
        raise NoSuchPartError("subset", f"has no subset {subset!r}", f"its {README} lists none: leave data.subset out")
    if not configs:
        return _by_names(found)
    chosen = subset or _default(configs)
    if chosen not in configs:
        raise NoSuchPartError("subset", f"has no subset {subset!r}", f"it has {', '.join(configs)}")
    return _files_of(configs[chosen], every)


def selected_splits(splits: Collection[str], rows: RowSelection) -> tuple[str, str]:
    """The split to train on, and the one to evaluate on; the latter is empty where it is part of the former.

    Raises NoSuchPartError.
    """
    only = next(iter(splits)) if len(splits) == 1 else ""
    first = rows.split or ("train" if "train" in splits else only)
    second = rows.validation_split or ("validation" if "validation" in splits and first != "validation" else "")
    for key, name in (("split", first), ("validation_split", second or first)):
        if name not in splits:
            lacks = f"has no split {name!r}" if name else "has several splits, and none is train"
            raise NoSuchPartError(key, lacks, f"it has {', '.join(splits)}")
    return first, second


def _configs(readme: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The subsets that a README.md lists, by name."""
    head = _HEAD.search(readme)
    try:
        found = yaml.safe_load(head[1]) if head else None
    except yaml.YAMLError:  # the Hub takes none of these; in a folder it is a text like any other
        return
    configs = found.get("configs") if isinstance(found, dict) else None
    for each in configs if isinstance(configs, list) else ():
        if isinstance(each, dict) and ("data_files" in each or "data_dir" in each):
            yield str(each.get("config_name", "default")), each


def _converted(names: Iterable[str]) -> dict[str, Mapping[str, Any]]:
    """The subsets by their folders, where all files lie as the Hub's conversion puts them."""
    configs: dict[str, Any] = {}
    for name in names:
        if not _CONVERTED_FILE.fullmatch(name):
            return {}
        subset, split, _ = name.split("/")
        configs.setdefault(subset, {"data_files": {}})["data_files"][split] = f"{subset}/{split}/*"
    return configs


def _default(configs: Mapping[str, Mapping[str, Any]]) -> str:
    """The subset that is meant where none is named (datasets: MetadataConfigs.get_default_config_name)."""
    marked = [name for name, each in configs.items() if each.get("default") is True]
    found = [*marked, *(name for name in configs if name == "default" or len(configs) == 1)]
    if not found:
        raise NoSuchPartError("subset", "has several subsets, and none is the default", f"it has {', '.join(configs)}")
    return found[0]


def _files_of(config: Mapping[str, Any], every: list[str]) -> dict[str, tuple[str, ...]]:
    """The files of one subset by split, as its patterns say; without patterns by the names in its folder."""
    below = posixpath.normpath(str(config.get("data_dir") or "."))
    inside = [name for name in every if below == "." or name.startswith(f"{below}/")]
    if "data_files" not in config:
        return _by_names(_readable([name for name in inside if _hidden(name) == _hidden(f"{below}/")]))
    found: dict[str, tuple[str, ...]] = {}
    for split, patterns in _patterns(config["data_files"]):
        meant = [posixpath.normpath(posixpath.join(below, each)) for each in patterns]
        forms = [(_as_regex(each), _hidden(each)) for each in meant]
        files = [name for name in inside if any(form.fullmatch(name) and _hidden(name) == n for form, n in forms)]
        if readable := _readable(files):
            found[split] = tuple(readable)
    return found


def _patterns(data_files: Any) -> Iterator[tuple[str, list[str]]]:
    """Split and patterns; without a split they are of `train`."""
    entries: list[tuple[str, Any]] = [("train", data_files)]
    if isinstance(data_files, Mapping):
        entries = [(str(split), path) for split, path in data_files.items()]
    elif isinstance(data_files, list) and data_files and all(isinstance(each, Mapping) for each in data_files):
        entries = [(str(each.get("split", "train")), each.get("path")) for each in data_files]
    for split, path in entries:
        yield split, [str(each) for each in (path if isinstance(path, list) else [path])]


def _hidden(name: str) -> int:
    """How many parts of a file's name, or of a pattern, hide it from patterns that do not name them.

    As for `datasets`: .ipynb_checkpoints/a.jsonl, __MACOSX/a.jsonl, ._a.jsonl (datasets.data_files).
    """
    *folders, file = name.split("/")
    return sum(part.startswith((".", "__")) and part != "." for part in folders) + file.startswith(".")


def _as_regex(pattern: str) -> re.Pattern[str]:
    """A pattern of files: `*` stays within a folder, `**` does not."""
    made, last = "", 0
    for token in _TOKENS.finditer(pattern):
        special = _SPECIAL.get(token[0]) or "[" + token[0][1:-1].replace("!", "^", 1).replace("\\", r"\\") + "]"
        made += re.escape(pattern[last : token.start()]) + special
        last = token.end()
    try:
        return re.compile(made + re.escape(pattern[last:]))
    except re.error:  # [z-a]
        return re.compile(re.escape(pattern))


def of_other_formats(names: Iterable[str], readme: str) -> list[str]:
    """The files of rows that are not read, for others are of an earlier format; none where a README.md lists them."""
    formats = [*_by_format(name for name in names if not _hidden(name)).values()]
    return [] if dict(_configs(readme)) else sorted(name for each in formats[1:] for name in each)


def _readable(names: Iterable[str]) -> list[str]:
    """Those of the first format of which there are any."""
    return next(iter(_by_format(names).values()), [])


def _by_format(names: Iterable[str]) -> dict[str, list[str]]:
    """The files of rows by their format, in the order of READ."""
    by_format: dict[str, list[str]] = {ending: [] for ending in READ}
    for name in names:
        low = name.lower()
        bare = low if low.endswith(READ[:2]) else re.sub(r"\.(gz|zst|bz2|xz)$", "", low)
        ending = posixpath.splitext(bare)[1]
        if ending in READ and posixpath.basename(name) not in _NO_ROWS:
            by_format[ending].append(name)
    return {ending: found for ending, found in by_format.items() if found}


def _by_names(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """By what names of files and folders tell; what tells nothing is of train.

    Beside files of known splits the shards of another name are a split of that name.
    """
    told = {name: next(_splits_in(name), "") for name in names}
    several, found = any(told.values()), dict[str, list[str]]()
    for name, split in told.items():
        shard = _SHARD.match(posixpath.basename(name)) if several else None
        found.setdefault(split or (shard[1] if shard else "train"), []).append(name)
    return {split: tuple(files) for split, files in found.items()}


def _splits_in(name: str) -> Iterator[str]:
    """The splits that a file's name and the folders above it name, the nearest first."""
    words = (re.split(r"[-_.]", part.lower())[0] for part in reversed(name.split("/")))
    return (_SPLITS[word] for word in words if word in _SPLITS)
