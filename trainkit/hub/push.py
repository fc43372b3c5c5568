"""Upload a folder to a model repository of the Hub: ``python -m trainkit.hub.push owner/name --folder FOLDER``.

Without a folder it prepares an upload: the repository is made where it does not exist, and the token must be allowed to
write. huggingface_hub does the work, with the token that it finds (HF_TOKEN, or the file of `hf auth login`).
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from trainkit import lora
from trainkit.distribution import install
from trainkit.errors import ExitCode, MachineError, TrainkitError, one_line_each
from trainkit.hub.lookup import set_http_timeout
from trainkit.recipe.secrets import MASK

Result = TypeVar("Result")
CARD = "README.md"
PAUSES = (2.0, 10.0)  # seconds between the tries, where the Hub fails
SILENCE = 120.0  # seconds without a byte to or from the Hub, by which the library alone would wait for ever
WEIGHTS = ("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json")  # of which one set is read
HOLDS = {"weights": "model.safetensors", "adapters": lora.CONFIG}  # and the file that tells
HOW_TO_LOG_IN = "export HF_TOKEN=… and list it under env_from, or log in with `hf auth login`"
# The last line of a card that trainkit has written: the digest of the lines above.
_SIGNATURE = "<!-- written by trainkit: {} -->\n"
# A card of an older release, unchanged.
_OLDER = re.compile(
    r"---\n(?:library_name: \S+\n)?(?:base_model: \S+\n)?tags:\n- trainkit\n---\n\n"
    r"# [^\n]*\n\nTrained with trainkit \([^\n]*\.\n"
)
LONGEST = 400  # characters of the library's reason


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare the repository, upload a folder, print the commit's address. Exit code 4 if that fails."""
    parser = argparse.ArgumentParser(prog="python -m trainkit.hub.push", description=__doc__)
    parser.add_argument("repo", help="owner/name")
    parser.add_argument("--node", type=int, default=0, help="this node's number: the first one alone uploads")
    parser.add_argument("--private", choices=("yes", "no"), help="whether only its owner is to see the repository")
    parser.add_argument("--holds", choices=tuple(HOLDS), help="what is to be read there, not beside the other")
    parser.add_argument("--folder", type=Path, help="what to upload")
    parser.add_argument("--message", default="Upload", help="of the commit")
    parser.add_argument("--tied", action="store_true", help="end when the standard input does, with who holds it")
    parser.add_argument("--replace", help="pattern of files that go from the repository where the folder has them not")
    given = parser.parse_args(argv)
    if given.node:
        return 0
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # at once: the library's threads would first send what they have
    if given.tied:
        threading.Thread(target=end_with_input, daemon=True).start()
    try:
        api = ready(given.repo, None if given.private is None else given.private == "yes", given.holds)
        if given.folder is not None:
            sys.stdout.write(upload(api, given.repo, given.folder, given.message, given.replace) + "\n")
    except TrainkitError as error:
        sys.stderr.write(one_line_each(error))
        return int(error.exit_code)
    return 0


def end_with_input() -> None:
    """End this process when its standard input does, at once: of an upload nothing counts before its commit."""
    while os.read(0, 1024):  # not by sys.stdin, whose lock would be in the way of this process's own end
        pass
    os._exit(int(ExitCode.FAILED))


def ready(repo: str, private: bool | None, holds: str | None = None) -> Any:
    """The library's HfApi, after checking that the token may write to the repository.

    private: whether a new one is, and an existing one must be; None takes what exists. holds: of HOLDS, what is to be
    read there. MachineError where the token may not write, no answer comes, or readers would take something else.
    """
    try:
        from huggingface_hub import HfApi, get_token
        from huggingface_hub.constants import HF_HUB_OFFLINE
    except ImportError as error:
        what = f"huggingface_hub is not installed, which uploads to {repo}"
        raise MachineError(what, hint=install(sys.executable, "huggingface-hub")) from error
    if HF_HUB_OFFLINE:
        what = f"nothing can be uploaded to {repo}: HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set"
        raise MachineError(what, hint="unset it; `trainkit export --push` uploads later")
    if get_token() is None:
        raise MachineError(f"nothing can be uploaded to {repo}: there is no token for the Hub", hint=HOW_TO_LOG_IN)
    set_http_timeout(SILENCE)
    api: Any = HfApi(library_name="trainkit")

    def create() -> Any:
        api.create_repo(repo, private=private, exist_ok=True)
        # For an existing one, a token that only reads is enough so far. Older releases cannot ask.
        if "write" in inspect.signature(api.auth_check).parameters:
            api.auth_check(repo, write=True)
        return api.model_info(repo)

    found = patiently(repo, create)
    if private is not None and found.private is not private:
        what = f"{repo} is there already and {'public' if private else 'private'}, which it is not to be"
        raise MachineError(what, hint="change that on its page of settings, or name another repository")
    names = {each.rfilename for each in found.siblings or ()}
    for other, file in HOLDS.items():
        if holds not in (None, other) and file in names:
            what = f"{repo} holds {other} ({file}), and some readers would take them for these {holds}, or add them"
            raise MachineError(what, hint=f"name another repository, or remove the {other} there")
    return api


def upload(api: Any, repo: str, folder: Path, message: str, replace: str | None = None) -> str:
    """Commit a folder's files; the address of the commit. A model card that somebody has written stays.

    Weights in other files, which readers would prefer, go. replace: pattern of more files that are removed where the
    folder does not have them. MachineError where the Hub does not take them, after a few tries.
    """
    removed = [replace] if replace else []
    removed += WEIGHTS if any(path for pattern in WEIGHTS for path in folder.glob(pattern)) else ()

    def commit() -> str:
        kept = [CARD] if has_card_of_others(api, repo) else []
        done = api.upload_folder(
            repo_id=repo, folder_path=folder, commit_message=message, ignore_patterns=kept, delete_patterns=removed
        )
        return str(done.commit_url)

    return patiently(repo, commit)


def has_card_of_others(api: Any, repo: str) -> bool:
    """Whether the repository has a model card that trainkit has not written."""
    from huggingface_hub import HfFileSystem

    # Read, not downloaded: this process may end at any time, and would leave the file. Read anew in each try.
    files = HfFileSystem(endpoint=api.endpoint, token=api.token, skip_instance_cache=True)
    try:
        found = files.read_text(f"{repo}/{CARD}", encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return False
    text, mark, _ = found.rpartition("\n" + _SIGNATURE.partition("{")[0])
    return found != signed(text) if mark else not _OLDER.fullmatch(found)


def signed(text: str) -> str:
    """A card with a last line by which an upload sees that nobody has changed it, and that it may be replaced."""
    return f"{text}\n{_SIGNATURE.format(hashlib.sha256(text.encode()).hexdigest()[:16])}"


def patiently(repo: str, act: Callable[[], Result]) -> Result:
    """The result of an action, repeated if the Hub fails or is unreachable; MachineError after the last try."""
    from huggingface_hub import get_token

    for pause in (*PAUSES, None):
        try:
            return act()
        except Exception as error:  # the library, its HTTP library and its Rust code may raise anything
            status, reason = answer_in(error)
            is_passing = status in (None, 408, 409, 412, 429) or status >= 500
            if pause is None or not is_passing:
                if token := get_token():
                    reason = reason.replace(token, MASK)
                raise refused(repo, status, reason[:LONGEST] or type(error).__name__) from error
            time.sleep(pause)
    raise AssertionError("the last try has no pause")


def answer_in(error: BaseException) -> tuple[int | None, str]:
    """The HTTP status that an error is about, None without an answer; and the Hub's or the library's reason."""
    while getattr(error, "response", None) is None and error.__cause__ is not None:
        error = error.__cause__
    response, message = getattr(error, "response", None), getattr(error, "server_message", None)
    if response is None:
        return None, " ".join(str(error).split())
    status = int(response.status_code)
    return status, " ".join((f"{status}: {message}" if message else str(error)).split())


def refused(repo: str, status: int | None, reason: str) -> MachineError:
    """The error for a refused upload, with the remedy."""
    if status in (401, 403, 404):
        return MachineError(
            f"nothing can be uploaded to {repo}: the Hub does not let this token write there ({reason})",
            hint=f"check the name, and give a token that may write there: {HOW_TO_LOG_IN}",
        )
    return MachineError(
        f"nothing can be uploaded to {repo}: {reason}",
        hint="bring the way to the Hub up (HF_ENDPOINT); `trainkit export --push` uploads later",
    )


if __name__ == "__main__":
    sys.exit(main())
