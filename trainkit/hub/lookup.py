"""A bound on waiting for a Hub that says nothing."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainkit.errors import Diagnostic, UsageError
from trainkit.files import read_whole
from trainkit.hub.cache import DESCRIPTION, Copy, cache_root, copy_of, guide, lack
from trainkit.hub.names import Named, at
from trainkit.hub.splits import CONVERTED, NoSuchPartError
from trainkit.recipe.repository import is_on

_LIMITED = ("connect", "read", "write", "pool")  # what httpx waits for


def end_silence(seconds: float) -> None:
    """Have the library give up on a Hub that is reached and says nothing (huggingface_hub's client waits for ever)."""
    try:
        from huggingface_hub import set_client_factory
        from huggingface_hub.utils._http import default_client_factory
    except ImportError:  # before 1.0, which sends by another HTTP library
        return

    def bound(request: Any) -> None:  # listings ask for no limit of their own, which would win over the client's
        limits = request.extensions.get("timeout", {})
        request.extensions["timeout"] = {name: limits.get(name) or seconds for name in _LIMITED}

    def client() -> Any:
        made = default_client_factory()
        hooks = made.event_hooks
        made.event_hooks = {**hooks, "request": [*hooks["request"], bound]}
        return made

    set_client_factory(client)


ALLOWED_BY = "env_from: [HF_TOKEN] and the variable, or `hf auth login`"
UNREACHABLE = "no folder of that name is here, {} is not whole in the Hub's cache, and the Hub cannot be asked"
OTHERWISE = "check the path, if a folder is meant; else {}, or bring the files into this cache (`hf download`)"
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOENT)
_KINDS = {"model": "model", "dataset": "data set"}
UNAUTHORIZED, TOO_MANY, FAILED = 401, 429, 500  # HTTP


def obstacles() -> tuple[type[Exception], ...]:
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


def in_words(named: Named, error: Exception, root: str) -> tuple[str, str]:
    """What is in the way, and the remedy. root: the folder of the cache.

    Raises UsageError for what no waiting mends.
    """
    if isinstance(error, ImportError):
        return f"huggingface_hub is not installed, which fetches {named.name}", "pip install 'trainkit[hf]'"
    _refuse(named, error)
    from huggingface_hub.errors import GatedRepoError

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, GatedRepoError):
        who = "without a token" if status == UNAUTHORIZED else "to this token"
        page = f"{named.kind}s/{named.name}" if named.kind != "model" else named.name
        what = f"{named.name} is gated, and the Hub does not give it {who}"
        return what, f"ask for access on its page ({page}), then give a token of who has it: {ALLOWED_BY}"
    if status == UNAUTHORIZED:
        what = f"the Hub refuses the token with which {named.name} is asked for"
        return what, f"give another one: {ALLOWED_BY}; or none, if the repository is public"
    if status is not None and (status == TOO_MANY or status >= FAILED):
        return f"{UNREACHABLE.format(named.name)}: it answers with status {status}", "try again later"
    if isinstance(error, OSError) and error.errno in _DISK:
        what = f"{named.name} cannot be brought into the Hub's cache {root}: {error.strerror}"
        return what, "make room or allow it, or set HF_HOME to a folder on another disk"
    reason = str(error).strip().partition("\n")[0][:200] or type(error).__name__
    return f"{UNREACHABLE.format(named.name)}: {reason}", OTHERWISE.format("bring the network up")


def _refuse(named: Named, error: Exception) -> None:
    """UsageError for a repository or a revision that is not there."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, GatedRepoError):  # it is there
        return
    if isinstance(error, RevisionNotFoundError):
        what = f"{named.revision_key}: {named.name} on the Hub has no revision {(named.commit or named.revision)!r}"
        hint = "name a branch, a tag or a whole commit of it"
        if named.commit:  # which another setting has in the cache
            hint += f"; the cache has {named.revision} at a commit that is gone"
        raise UsageError(Diagnostic("error", what, named.revision_key, hint=hint)) from error
    if isinstance(error, RepositoryNotFoundError):
        kind = _KINDS[named.kind]
        what = f"{named.key}: {named.name} is no folder here, and the Hub has no {kind} of that name"
        hint = f"check the name; where it is private, give a token that may read it: {ALLOWED_BY}"
        raise UsageError(Diagnostic("error", what, named.key, hint=hint)) from error


LARGEST_LISTING = 1 << 26  # bytes; that of a repository with a hundred thousand files takes a third
PATIENCE = 10.0  # seconds for an answer


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
    """Where the cache is, and where the Hub; endpoint: None is the library's own, by its environment.

    environ: the variables of the processes that fetch, by which the library finds the token, too.
    """

    root: str
    endpoint: str | None
    environ: Mapping[str, str]

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Way:
        """Of processes with this environment."""
        return cls(cache_root(environ, str(Path.home())), environ.get("HF_ENDPOINT") or None, dict(environ))

    def forbidden_by(self, kind: str) -> str:
        """The variable that keeps from asking the Hub for a repository; empty where none does."""
        names = ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", *(["HF_DATASETS_OFFLINE"] if kind == "dataset" else [])]
        return next((name for name in names if is_on(self.environ.get(name, ""))), "")


def look_up(named: Named, way: Way) -> Copy:
    """What of a repository is in the cache, and what there is to fetch.

    Asks the Hub only where the cache does not know all of it, and then fetches the small files that describe it.
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
    # What an older fetch has left may be all there is to it.
    left = known or Copy(named)
    if forbidden := way.forbidden_by(named.kind):
        obstacle = f"{UNREACHABLE.format(named.name)}: {forbidden} is set"
        return replace(left, obstacle=obstacle, remedy=OTHERWISE.format(f"unset {forbidden}"))
    with _environment(way.environ):
        try:
            commit, sizes, closed = _asked(named, way)
            guided = guide(named, sizes)
            if not guided:
                _refuse_without_content(named, sizes)
            _fetch(named, _description(named, sizes), way)
            guiding = _fetch(named, guided, way).decode("utf-8", "replace") if guided else ""
        except obstacles() as error:
            obstacle, remedy = in_words(named, error, way.root)
            return replace(left, obstacle=obstacle, remedy=remedy)
    _refuse_without_content(named, sizes, guiding)
    copy = copy_of(at(named, commit), way.root, files, sizes)
    assert copy is not None, "its commit is known"
    if copy.whole:  # no fetch comes, which would keep it
        with _environment(way.environ):
            _keep_listing(copy.named, sizes, way)
    return replace(copy, closed=closed)


@contextmanager
def _environment(environ: Mapping[str, str]) -> Iterator[None]:
    """This process with other variables: the library reads them when it is imported, and asked for a token."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _refuse_without_content(named: Named, sizes: Mapping[str, int], guiding: str = "") -> None:
    """UsageError where a repository does not have what it is named for."""
    if lacking := lack(named, sizes, guiding):
        what = f"{named.key}: {named.name} on the Hub {lacking}"
        has = f"it has {', '.join(sorted(sizes)[:6])}" if sizes else "it is empty"
        raise UsageError(Diagnostic("error", what, named.key, hint=f"{has}{_elsewhere(named, sizes)}"))


def _elsewhere(named: Named, sizes: Mapping[str, int]) -> str:
    """What such a repository may be for, or where its rows may be had in a format that is read."""
    if named.role == "model.path" and DESCRIPTION["peft.path"] in sizes:
        return "; these are adapters: name them in peft.path, and their base model here"
    if named.role != "data.path" or named.revision == CONVERTED:
        return ""
    return f"; what the Hub has made parquet of is its branch {CONVERTED}: set {named.revision_key} to it"


def _asked(named: Named, way: Way) -> tuple[str, Mapping[str, int], bool]:
    """The commit of a revision, the sizes of its files, and whether it takes a token to have them."""
    from huggingface_hub import HfApi

    hub = HfApi(way.endpoint, library_name="trainkit")
    info: Any = hub.repo_info(
        named.name, repo_type=named.kind, revision=_revision(named), files_metadata=True, timeout=PATIENCE
    )
    if info.gated:  # all may know of its files
        hub.auth_check(named.name, repo_type=named.kind)
    sizes = {each.rfilename: each.size or 0 for each in info.siblings or ()}
    return str(info.sha), sizes, bool(info.gated or info.private)


def _revision(named: Named) -> str:
    return named.commit or named.revision


def _description(named: Named, sizes: Mapping[str, int]) -> str:
    """The file that says what it is, or else the smallest: with it the cache learns of the revision."""
    usual = DESCRIPTION[named.role]
    return usual if usual in sizes else min(sizes, key=lambda name: sizes[name])


def _fetch(named: Named, file: str, way: Way) -> bytes:
    """The content of a small file, which is in the cache then."""
    from huggingface_hub import hf_hub_download

    path = hf_hub_download(
        named.name, file, repo_type=named.kind, revision=_revision(named), cache_dir=way.root, endpoint=way.endpoint,
        library_name="trainkit",
    )  # fmt: skip
    return Path(path).read_bytes()


def _keep_listing(named: Named, sizes: Mapping[str, int], way: Way) -> None:
    """Have the library keep the list of a commit's files, by which the cache alone tells next time what is there."""
    storage = Path(way.root, named.folder)
    if (storage / "trees" / f"{named.commit}.json").exists() or not os.access(storage, os.W_OK):
        return
    from glob import escape

    from huggingface_hub import snapshot_download

    end_silence(PATIENCE)
    snapshot_download(
        named.name, repo_type=named.kind, revision=named.commit, cache_dir=way.root, endpoint=way.endpoint,
        library_name="trainkit", allow_patterns=[escape(_description(named, sizes))],
    )  # fmt: skip
