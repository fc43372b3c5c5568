"""Upload a folder to a model repository of the Hub: ``python -m trainkit.hub.push owner/name --folder FOLDER``.

Without a folder only what an upload needs: a token that may write, and the repository, which is made where it is not
there. huggingface_hub does the work, with the token that it finds (HF_TOKEN, or the file of `hf auth login`).
"""

from __future__ import annotations

import argparse
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
from trainkit.errors import ExitCode, MachineError, TrainkitError, in_words
from trainkit.hub.lookup import end_silence
from trainkit.recipe.secrets import MASK

Given = TypeVar("Given")
CARD = "README.md"
PAUSES = (2.0, 10.0)  # seconds between one try and the next, where the Hub fails
SILENCE = 120.0  # seconds without a byte to or from the Hub, by which the library alone would wait for ever
WEIGHTS = ("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json")  # of which one set is read
HOLDS = {"weights": "model.safetensors", "adapters": lora.CONFIG}  # and the file that tells
HOW_TO_LOG_IN = "export HF_TOKEN=… and list it under env_from, or log in with `hf auth login`"
# A card as trainkit/trainer/checkpoint/export.py writes it, and nobody has changed it.
_OURS = re.compile(
    r"---\n(?:library_name: \S+\n)?(?:base_model: \S+\n)?tags:\n- trainkit\n---\n\n"
    r"# [^\n]*\n\nTrained with trainkit \([^\n]*\.\n"
)
LONGEST = 400  # characters of the library's reason


def main(argv: Sequence[str] | None = None) -> int:
    """Make the repository ready, upload a folder, say the commit's address. Exit code 4 where that does not work."""
    parser = argparse.ArgumentParser(prog="python -m trainkit.hub.push", description=__doc__)
    parser.add_argument("repo", help="owner/name")
    parser.add_argument("--node", type=int, default=0, help="this node's number: the first one alone uploads")
    parser.add_argument("--private", choices=("yes", "no"), help="whether only its owner is to see the repository")
    parser.add_argument("--holds", choices=tuple(HOLDS), help="what is to be read there, not beside the other")
    parser.add_argument("--folder", type=Path, help="what to upload")
    parser.add_argument("--message", default="Upload", help="of the commit")
    parser.add_argument("--tied", action="store_true", help="end when the standard input does, with who holds it")
    parser.add_argument("--replace", help="pattern of files that go from the repository where the folder has them not")
    asked = parser.parse_args(argv)
    if asked.node:
        return 0
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # at once: the library's threads would first send what they have
    if asked.tied:
        threading.Thread(target=end_with_input, daemon=True).start()
    try:
        api = ready(asked.repo, None if asked.private is None else asked.private == "yes", asked.holds)
        if asked.folder is not None:
            sys.stdout.write(upload(api, asked.repo, asked.folder, asked.message, asked.replace) + "\n")
    except TrainkitError as error:
        sys.stderr.write(in_words(error))
        return int(error.exit_code)
    return 0


def end_with_input() -> None:
    """End this process when its standard input does, at once: of an upload nothing counts before its commit."""
    while os.read(0, 1024):  # not by sys.stdin, whose lock would be in the way of this process's own end
        pass
    os._exit(int(ExitCode.FAILED))


def ready(repo: str, private: bool | None, holds: str | None = None) -> Any:
    """The library's HfApi, once the token may write to the repository.

    private: whether a new one is, and one that is there must be; None takes what there is. holds: of HOLDS, what is to
    be read there. MachineError where the token may not write, nobody answers, or readers would take something else.
    """
    try:
        from huggingface_hub import HfApi, get_token
        from huggingface_hub.constants import HF_HUB_OFFLINE
    except ImportError as error:
        what = f"huggingface_hub is not installed, which uploads to {repo}"
        raise MachineError(what, hint="pip install 'trainkit[hf]'") from error
    if HF_HUB_OFFLINE:
        what = f"nothing can be uploaded to {repo}: HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set"
        raise MachineError(what, hint="unset it; `trainkit export --push` uploads later")
    if get_token() is None:
        raise MachineError(f"nothing can be uploaded to {repo}: there is no token for the Hub", hint=HOW_TO_LOG_IN)
    end_silence(SILENCE)
    api: Any = HfApi(library_name="trainkit")

    def made() -> Any:
        api.create_repo(repo, private=private, exist_ok=True)
        # For one that is there, a token that only reads is enough so far.
        if "write" in inspect.signature(api.auth_check).parameters:
            api.auth_check(repo, write=True)
        return api.model_info(repo)

    found = patiently(repo, made)
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
    folder has them not. MachineError where the Hub does not take them, after a few tries.
    """
    goes = [replace] if replace else []
    goes += WEIGHTS if any(path for pattern in WEIGHTS for path in folder.glob(pattern)) else ()

    def commit() -> str:
        leave = [CARD] if has_card_of_others(api, repo) else []
        done = api.upload_folder(
            repo_id=repo, folder_path=folder, commit_message=message, ignore_patterns=leave, delete_patterns=goes
        )
        return str(done.commit_url)

    return patiently(repo, commit)


def has_card_of_others(api: Any, repo: str) -> bool:
    """Whether the repository has a model card that trainkit has not written."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session

    if not api.file_exists(repo, CARD):
        return False
    # By no file of the library's: a process that ends at once would leave it.
    headers = build_hf_headers(token=api.token)
    answer = get_session().get(hf_hub_url(repo, CARD, endpoint=api.endpoint), headers=headers)
    answer.raise_for_status()
    return not _OURS.fullmatch(answer.text)


def patiently(repo: str, act: Callable[[], Given]) -> Given:
    """What it gives, tried again where the Hub or the way to it fails. MachineError with the reason at last."""
    for pause in (*PAUSES, None):
        try:
            return act()
        except Exception as error:  # the library, its HTTP library and the Rust of its transfers raise anything
            if pause is None or not is_passing(error):
                raise refused(repo, error) from error
            time.sleep(pause)
    raise AssertionError("the last try has no pause")


def underlying(error: BaseException) -> BaseException:
    """What an error is about: the first in its chain of causes with an answer of the Hub's, or the last."""
    while getattr(error, "response", None) is None and error.__cause__ is not None:
        error = error.__cause__
    return error


def status_of(error: BaseException) -> int | None:
    """The HTTP status that an error is about; None where nothing was answered."""
    response = getattr(underlying(error), "response", None)
    return None if response is None else int(response.status_code)


def is_passing(error: BaseException) -> bool:
    """Whether it may be over soon: the Hub is busy or fails, or no answer came."""
    status = status_of(error)
    return status in (408, 409, 412, 429) or status is None or status >= 500


def reason_of(error: BaseException) -> str:
    """What the Hub said, or else the library, in one line."""
    found = underlying(error)
    said, status = getattr(found, "server_message", None), status_of(error)
    return " ".join(f"{status}: {said}".split() if said else str(found).split())


def refused(repo: str, error: BaseException) -> MachineError:
    """The library's reason in one line, without the token."""
    from huggingface_hub import get_token

    status, reason = status_of(error), reason_of(error)
    if token := get_token():
        reason = reason.replace(token, MASK)
    reason = reason[:LONGEST] or type(error).__name__
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
