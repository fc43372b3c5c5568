"""The Hub's cache on a disk, as huggingface_hub keeps it: which files of a repository are there.

models--owner--name/refs/main             the commit that a branch or tag was when it was last asked for
models--owner--name/snapshots/<commit>/   the files
models--owner--name/trees/<commit>.json   all files of the commit with their sizes (from 1.0 on, by snapshots)
models--owner--name/.no_exist/<commit>/   files that were asked for and that the commit does not have
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from trainkit.hub.names import COMMIT, Named, at, with_values
from trainkit.hub.wanted import fetched_singly, guide, lack, wanted
from trainkit.recipe.schema import Recipe

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
