"""What the Hub says of repositories that are not whole in the cache: their commit and files, or why it says nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainkit.errors import Diagnostic, UsageError
from trainkit.files import read_whole
from trainkit.hub.cache import Copy, cache_root, copy_of
from trainkit.hub.names import DESCRIPTION, Named, at, has_content
from trainkit.hub.splits import CONVERTED, README, NoSuchPartError

LARGEST_LISTING = 1 << 26  # bytes; that of a repository with a hundred thousand files takes a third
PATIENCE = 10.0  # seconds for an answer
ALLOWED_BY = "env_from: [HF_TOKEN] and the variable, or `hf auth login`"
OFFLINE = (
    "check the path, if a folder is meant; else bring the network up, or the files into this cache (`hf download`)"
)


class CacheDisk:
    """The cache's files, as :func:`trainkit.hub.cache.copy_of` reads them."""

    def read(self, path: str) -> bytes:
        """The file's bytes. Raises OSError."""
        return read_whole(path, LARGEST_LISTING, links=True)

    def exists(self, path: str) -> bool:
        """Whether there is a file."""
        return Path(path).exists()


@dataclass(frozen=True, slots=True)
class Way:
    """Where the cache is, and where the Hub; endpoint: None is the library's own, by its environment."""

    root: str
    endpoint: str | None = None

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Way:
        """Of processes with this environment."""
        return cls(cache_root(environ, str(Path.home())), environ.get("HF_ENDPOINT") or None)


def look_up(named: Named, way: Way) -> Copy:
    """What of a repository is in the cache, and what there is to fetch.

    Asks the Hub only where the cache does not know all of it, and then fetches the small file that describes it.
    Raises UsageError for a name or a revision that the Hub does not have, and for one without what is looked for.
    """
    try:
        return _looked_up(named, way, CacheDisk())
    except NoSuchPartError as error:
        key = named.beside(error.key)
        what = f"{key}: {named.name} on the Hub {error.what}"
        raise UsageError(Diagnostic("error", what, key, hint=error.hint)) from error


def _looked_up(named: Named, way: Way, files: CacheDisk) -> Copy:
    known = copy_of(named, way.root, files)
    if known is not None and known.whole:
        return known
    try:
        commit, sizes = _asked(named, way)
        found = at(named, commit)
        description = _fetch_description(named, sizes, way)
    except _obstacles() as error:
        obstacle, remedy = _in_words(named, error)
        # What an older fetch has left may be all there is to it.
        return replace(known or Copy(named), obstacle=obstacle, remedy=remedy)
    readme = files.read(description).decode("utf-8", "replace") if Path(description).name == README else ""
    if not has_content(named, sizes, readme):
        what = f"{named.key}: {named.name} on the Hub has nothing that the trainer reads there"
        raise UsageError(
            Diagnostic("error", what, named.key, hint=f"it has {', '.join(sorted(sizes)[:6])}{_converted(named)}")
        )
    copy = copy_of(found, way.root, files, sizes)
    assert copy is not None, "its commit is known"
    return copy


def _converted(named: Named) -> str:
    """Where rows in other formats may be had."""
    if named.role != "data.path" or named.revision == CONVERTED:
        return ""
    return f"; what the Hub has made parquet of is its branch {CONVERTED}: set {named.revision_key} to it"


def _asked(named: Named, way: Way) -> tuple[str, Mapping[str, int]]:
    """The commit of a revision, and the sizes of its files."""
    from huggingface_hub import HfApi

    info: Any = HfApi(way.endpoint, library_name="trainkit").repo_info(
        named.name, repo_type=named.kind, revision=named.revision, files_metadata=True, timeout=PATIENCE
    )
    return str(info.sha), {each.rfilename: each.size or 0 for each in info.siblings or ()}


def _fetch_description(named: Named, sizes: Mapping[str, int], way: Way) -> str:
    """The path of the file that says what it is, or else of the smallest: with it the cache learns of the revision."""
    from huggingface_hub import hf_hub_download

    usual = DESCRIPTION[named.role]
    file = usual if usual in sizes else min(sizes, key=lambda name: sizes[name])
    path = hf_hub_download(
        named.name, file, repo_type=named.kind, revision=named.revision, cache_dir=way.root, endpoint=way.endpoint,
        library_name="trainkit",
    )  # fmt: skip
    return str(path)


def _obstacles() -> tuple[type[Exception], ...]:
    """What the library raises, and the HTTP library below it, where something is in the way."""
    try:
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
    except ImportError:
        return (ImportError,)
    return (ImportError, HfHubHTTPError, EntryNotFoundError, OSError, *_of_http())


def _of_http() -> tuple[type[Exception], ...]:
    """Of the HTTP library that huggingface_hub has taken: connections and time-outs are no OSError there."""
    import huggingface_hub.errors

    base = huggingface_hub.errors.HfHubHTTPError.__mro__
    return tuple(kind for kind in base if kind.__name__ in ("HTTPError", "RequestException"))


def _in_words(named: Named, error: Exception) -> tuple[str, str]:
    """What is in the way, and the remedy. Raises UsageError for what no waiting mends."""
    if isinstance(error, ImportError):
        return f"huggingface_hub is not installed, which fetches {named.name}", "pip install 'trainkit[hf]'"
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    page = f"{named.kind}s/" if named.kind != "model" else ""
    if isinstance(error, GatedRepoError):
        what = f"{named.name} is gated, and the Hub does not give it to this token, or to nobody without one"
        return what, f"ask for access on its page ({page}{named.name}), then give a token: {ALLOWED_BY}"
    if isinstance(error, RevisionNotFoundError):
        what = f"{named.revision_key}: {named.name} on the Hub has no revision {named.revision!r}"
        hint = "name a branch, a tag or a whole commit of it"
        raise UsageError(Diagnostic("error", what, named.revision_key, hint=hint)) from error
    if isinstance(error, RepositoryNotFoundError):
        what = f"{named.key}: {named.name} is no folder here, and the Hub has no {named.kind} of that name"
        hint = f"check the name; where it is private, give a token that may read it: {ALLOWED_BY}"
        raise UsageError(Diagnostic("error", what, named.key, hint=hint)) from error
    reason = str(error).strip().partition("\n")[0][:200] or type(error).__name__
    what = f"no folder of that name is here, {named.name} is not whole in the Hub's cache, and the Hub cannot be asked"
    return f"{what}: {reason}", OFFLINE
