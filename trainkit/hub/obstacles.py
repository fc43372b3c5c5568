"""What keeps a repository of the Hub from being looked up, in words with a remedy."""

from __future__ import annotations

import errno

from trainkit.errors import Diagnostic, UsageError
from trainkit.hub.names import Named

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
