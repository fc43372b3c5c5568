"""Look up repositories while planning: what the Hub's cache has, and what the Hub reports about the rest."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainkit.distribution import install
from trainkit.errors import Diagnostic, UsageError
from trainkit.files import read_whole
from trainkit.hub.cache import DESCRIPTION, CachedRepo, cache_root, cached_repo, index_file, missing_files
from trainkit.hub.references import RepoRef
from trainkit.hub.splits import CONVERTED, NoSuchPartError
from trainkit.recipe.hub_name import is_on

LARGEST_LISTING = 1 << 26  # bytes; that of a repository with a hundred thousand files takes a third
PATIENCE = 10.0  # seconds for an answer
ALLOWED_BY = "env_from: [HF_TOKEN] and the variable, or `hf auth login`"
UNREACHABLE = "no folder of that name is here, {} is not whole in the Hub's cache, and the Hub cannot be asked"
OTHERWISE = "check the path, if a folder is meant; else {}, or bring the files into this cache (`hf download`)"
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOENT)


class CacheDisk:
    """The cache's files, as :func:`trainkit.hub.cache.cached_repo` reads them."""

    def read(self, path: str) -> bytes:
        return read_whole(path, LARGEST_LISTING, links=True)

    def exists(self, path: str) -> bool:
        return Path(path).exists()


@dataclass(frozen=True, slots=True)
class HubClient:
    """The locations of the cache and of the Hub; endpoint: None is the library's default, by its environment.

    environ: the variables of the processes that fetch, by which the library finds the token, too.
    """

    root: str
    endpoint: str | None
    environ: Mapping[str, str]

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> HubClient:
        """Of processes with this environment."""
        return cls(cache_root(environ, str(Path.home())), environ.get("HF_ENDPOINT") or None, dict(environ))

    def forbidden_by(self, kind: str) -> str:
        """The variable that forbids requests to the Hub for a repository; empty if none does."""
        names = ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", *(["HF_DATASETS_OFFLINE"] if kind == "dataset" else [])]
        return next((name for name in names if is_on(self.environ.get(name, ""))), "")

    def download(self, ref: RepoRef, names: Iterable[str]) -> Path:
        """Download files of a repository into the cache, with its revision and file list; returns their folder."""
        from glob import escape

        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
        folder = snapshot_download(
            ref.name, repo_type=ref.kind, revision=ref.commit or ref.revision, cache_dir=self.root,
            endpoint=self.endpoint, library_name="trainkit", allow_patterns=[escape(name) for name in names],
        )  # fmt: skip
        return Path(folder)


def set_http_timeout(seconds: float) -> None:
    """Set a timeout in huggingface_hub for a Hub that sends nothing: by default it waits for ever."""
    import huggingface_hub

    session: Any = huggingface_hub.get_session()
    if not hasattr(session, "event_hooks"):  # before 1.0, which sends by another HTTP library
        return

    def limit_silence(request: Any) -> None:  # listings ask for no limit, which would win over the client's
        limits = request.extensions.get("timeout", {})
        names = ("connect", "read", "write", "pool")
        request.extensions["timeout"] = {name: limits.get(name) or seconds for name in names}

    kept = [hook for hook in session.event_hooks["request"] if getattr(hook, "__name__", "") != limit_silence.__name__]
    hooks = {**session.event_hooks, "request": [*kept, limit_silence]}
    # Of the same HTTP library, which is another one from release to release.
    huggingface_hub.set_client_factory(lambda: type(session)(event_hooks=hooks, follow_redirects=True, timeout=seconds))


def hub_errors() -> tuple[type[Exception], ...]:
    """The exceptions of huggingface_hub, and of its HTTP library, if the Hub or the disk refuses something."""
    try:
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
    except ImportError:
        return (ImportError,)
    http = [kind for kind in HfHubHTTPError.__mro__ if kind.__name__ in ("HTTPError", "RequestException")]
    return (ImportError, EntryNotFoundError, OSError, *http)


def look_up(ref: RepoRef, client: HubClient) -> CachedRepo:
    """What the cache has of a repository, and what is to be downloaded.

    Asks the Hub only if the cache is incomplete, and then downloads the small files that describe the repository.
    Raises UsageError if the Hub does not have the name or revision, or if that lacks what is needed.
    """
    try:
        known = cached_repo(ref, client.root, CacheDisk())
        if known is not None and known.whole:
            return known
        known = known or CachedRepo(ref)  # what an older fetch has left may be all there is to it
        if forbidden := client.forbidden_by(ref.kind):
            obstacle = f"{UNREACHABLE.format(ref.name)}: {forbidden} is set"
            return replace(known, obstacle=obstacle, remedy=OTHERWISE.format(f"unset {forbidden}"))
        try:
            with _environment(client.environ):
                return _ask(ref, client)
        except hub_errors() as error:
            obstacle, remedy = explain(ref, error, client.root)
            return replace(known, obstacle=obstacle, remedy=remedy)
    except NoSuchPartError as error:
        key = ref.beside(error.key)
        what = f"{key}: {ref.name} on the Hub {error.what}"
        raise UsageError(Diagnostic("error", what, key, hint=error.hint)) from error


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


def _ask(ref: RepoRef, client: HubClient) -> CachedRepo:
    """Ask the Hub for the commit and the sizes of its files, and fetch those that describe the others."""
    import logging

    from huggingface_hub import HfApi

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # the plan has messages of its own
    set_http_timeout(PATIENCE)
    api = HfApi(client.endpoint, library_name="trainkit")
    info: Any = api.repo_info(
        ref.name, repo_type=ref.kind, revision=ref.commit or ref.revision, files_metadata=True, timeout=PATIENCE
    )
    if info.gated:  # the names of its files are public, the files are not
        api.auth_check(ref.name, repo_type=ref.kind)
    sizes = {each.rfilename: each.size or 0 for each in info.siblings or ()}
    index = index_file(ref, sizes)
    if not index:
        _refuse_without_content(ref, sizes)
    usual = DESCRIPTION[ref.role]  # without it, the smallest file: with any file the cache learns of the revision
    folder = client.download(ref, {usual if usual in sizes else min(sizes, key=sizes.__getitem__), index} - {""})
    _refuse_without_content(ref, sizes, (folder / index).read_text("utf-8", "replace") if index else "")
    found = cached_repo(replace(ref, commit=str(info.sha)), client.root, CacheDisk(), sizes)
    assert found is not None, "its commit is known"
    return replace(found, closed=bool(info.gated or info.private))


def _refuse_without_content(ref: RepoRef, sizes: Mapping[str, int], index: str = "") -> None:
    """UsageError where a repository does not have what the setting needs. index: the text of its index file."""
    if lacking := missing_files(ref, sizes, index):
        hint = f"it has {', '.join(sorted(sizes)[:6])}" if sizes else "it is empty"
        if ref.role == "model.path" and DESCRIPTION["peft.path"] in sizes:
            hint += "; these are adapters: name them in peft.path, and their base model here"
        if ref.role == "data.path" and ref.revision != CONVERTED:
            hint += f"; what the Hub has made parquet of is its branch {CONVERTED}: set {ref.revision_key} to it"
        raise UsageError(Diagnostic("error", f"{ref.key}: {ref.name} on the Hub {lacking}", ref.key, hint=hint))


def explain(ref: RepoRef, error: Exception, root: str) -> tuple[str, str]:
    """What prevents the download, and the remedy. root: the folder of the cache.

    Raises UsageError if a repository or a revision does not exist: retrying does not help.
    """
    if isinstance(error, ImportError):
        return f"huggingface_hub is not installed, which fetches {ref.name}", install(sys.executable, "huggingface-hub")
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, GatedRepoError):
        who = "without a token" if status == 401 else "to this token"
        page = f"{ref.kind}s/{ref.name}" if ref.kind != "model" else ref.name
        what = f"{ref.name} is gated, and the Hub does not give it {who}"
        return what, f"ask for access on its page ({page}), then give a token of who has it: {ALLOWED_BY}"
    if isinstance(error, RevisionNotFoundError):
        what = f"{ref.revision_key}: {ref.name} on the Hub has no revision {(ref.commit or ref.revision)!r}"
        hint = "name a branch, a tag or a whole commit of it"
        if ref.commit:  # which another setting has in the cache
            hint += f"; the cache has {ref.revision} at a commit that is gone"
        raise UsageError(Diagnostic("error", what, ref.revision_key, hint=hint)) from error
    if isinstance(error, RepositoryNotFoundError):
        kind = {"model": "model", "dataset": "data set"}[ref.kind]
        what = f"{ref.key}: {ref.name} is not a folder here, and the Hub has no {kind} of that name"
        hint = f"check the name; where it is private, give a token that may read it: {ALLOWED_BY}"
        raise UsageError(Diagnostic("error", what, ref.key, hint=hint)) from error
    if status == 401:
        what = f"the Hub refuses the token for {ref.name}"
        return what, f"give another one: {ALLOWED_BY}; or none, if the repository is public"
    if status is not None and (status == 429 or status >= 500):
        return f"{UNREACHABLE.format(ref.name)}: it answers with status {status}", "try again later"
    if isinstance(error, OSError) and error.errno in _DISK:
        what = f"{ref.name} cannot be brought into the Hub's cache {root}: {error.strerror}"
        return what, "make room or allow it, or set HF_HOME to a folder on another disk"
    reason = str(error).strip().partition("\n")[0][:200] or type(error).__name__
    return f"{UNREACHABLE.format(ref.name)}: {reason}", OTHERWISE.format("bring the network up")
