"""Download what a run needs from a Hub repository: ``python -m trainkit.hub.fetch KEY KIND NAME COMMIT``.

huggingface_hub does it, but would start a file again after a kill. So large files are first downloaded as parts
(trainkit/<checksum> beside the blobs), which the next fetch goes on with. Files of the Hub's Xet storage are left to
huggingface_hub, which fetches many pieces of them at once, in any order.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from trainkit.errors import MachineError, TrainkitError, one_line_each
from trainkit.hub.cache import CachedRepo
from trainkit.hub.lookup import HubClient, hub_errors, look_up, set_http_timeout
from trainkit.hub.references import RepoRef
from trainkit.hub.splits import RowSelection
from trainkit.text import format_duration, format_size

PARTS = "trainkit"  # subfolder of a repository's cache folder for partly downloaded files
LARGE = 10_000_000  # bytes from which resuming a file is worthwhile
EVERY = 1.0  # seconds from one line on the progress to the next, at first
LATER = 30.0  # seconds, after which they are ten times as far apart
SILENCE = 30.0  # seconds without a byte from the Hub until the request is repeated, a few times
QUIET = 5.0  # seconds without a byte until a line reports it
_DAY = 24 * 3600.0  # seconds after which a part of another commit is not resumed
_WORKERS = 8  # files at once, as of huggingface_hub
_READERS = 4  # threads that compute checksums
_RETRIES = 5
_PIECE = 1 << 20  # bytes
_ALGORITHMS = {64: "sha256", 40: "sha1"}  # by the length of a blob's name
_HEX = re.compile("[0-9a-f]+")


def main(argv: Sequence[str] | None = None) -> int:
    """Download what is missing. Exit code 4 if the Hub or this machine prevents it, 2 if something does not exist."""
    parser = argparse.ArgumentParser(prog="python -m trainkit.hub.fetch", description=__doc__)
    parser.add_argument("key", help="the setting that names it")
    parser.add_argument("kind", choices=("model", "dataset"))
    parser.add_argument("name", help="of the repository, owner/name")
    parser.add_argument("commit", help="of its files")
    for name in ("subset", "split", "validation-split"):
        parser.add_argument(f"--{name}", help="of a data set; without it the usual one")
    given = parser.parse_args(argv)
    rows = RowSelection(given.subset, given.split, given.validation_split)
    ref = RepoRef(given.key, given.kind, given.name, given.commit, given.commit, rows)
    os.environ.pop("HF_HUB_OFFLINE", None)  # set for the ranks; where the caller's is, planning has found it
    client = HubClient.of(os.environ)
    signal.signal(signal.SIGTERM, partial(_end, Path(client.root, ref.folder, "blobs").resolve()))
    try:
        fetch(ref, client)
    except TrainkitError as error:
        sys.stderr.write(one_line_each(error))
        return int(error.exit_code)
    return 0


def _end(blobs: Path, number: int, _frame: object) -> NoReturn:
    """End immediately: the threads of huggingface_hub would first finish their files.

    Their partial files are removed, because nothing resumes them.
    """
    for link in Path("/proc/self/fd").glob("*"):  # empty where the system has none
        with suppress(OSError):
            half = link.readlink()
            if half.parent == blobs and not _HEX.fullmatch(half.name):
                half.unlink()
    os._exit(128 + number)


def fetch(ref: RepoRef, client: HubClient) -> None:
    """Download what the run needs from a repository into the cache. MachineError if that fails."""
    repo = look_up(ref, client)
    if repo.whole:
        return
    if repo.sizes is None:
        raise MachineError(repo.obstacle, hint=repo.remedy)
    _refuse_too_large(repo, client.root)
    done = threading.Event()
    watcher = threading.Thread(target=_report_progress, args=(repo, client, done), daemon=True)
    watcher.start()
    try:
        sound = _download(repo, client)
    finally:
        done.set()
        watcher.join()
    _refuse_damaged(repo, sound)
    left = look_up(ref, client)
    if not left.whole:
        names = ", ".join(left.missing[:3])
        raise MachineError(f"{ref.name}: {names} did not come", hint="start the run again: files that are there stay")


def _refuse_too_large(repo: CachedRepo, root: str) -> None:
    """MachineError if the disk has no space for the missing files."""
    folder = Path(root)
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if repo.missing_bytes > free:
        room = f"in the Hub's cache {root}, where {format_size(free)} are free"
        what = f"{repo.ref.name} needs {format_size(repo.missing_bytes)} more {room}"
        raise MachineError(what, hint="make room, or set HF_HOME to a folder on another disk")


def _download(repo: CachedRepo, client: HubClient) -> set[str]:
    """Download everything that the run needs; the names of files with verified checksums.

    MachineError with the reason.
    """
    name, parts = repo.ref.name, Path(client.root, repo.ref.folder, PARTS)
    set_http_timeout(SILENCE)
    try:
        sound = resume_partial_downloads(repo, client)
        client.download(repo.ref, repo.sizes or ())
    except Exception as error:  # the library, its HTTP library and its Rust code may raise anything
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            shutil.rmtree(parts, ignore_errors=True)
            what = f"{name}: the disk of the Hub's cache {client.root} is full"
            raise MachineError(what, hint="make room, or set HF_HOME to a folder on another disk") from error
        reason = str(error).strip().partition("\n")[0][:300] or type(error).__name__
        what = f"{name} cannot be fetched from the Hub: {reason}"
        raise MachineError(what, hint="start the run again: files that are there stay") from error
    with suppress(OSError):  # another commit's are in it
        parts.rmdir()
    return sound


def resume_partial_downloads(repo: CachedRepo, client: HubClient) -> set[str]:
    """Download the large files, each resuming an earlier download; the names of the verified ones.

    Raises what huggingface_hub raises; the parts stay then.
    """
    from huggingface_hub import HfApi

    large = [name for name in repo.missing if (repo.sizes or {})[name] >= LARGE]
    if not any(path.is_symlink() for path in Path(repo.folder).glob("*")):
        return set()  # a cache without links, into which huggingface_hub moves its own files and copies others
    api, ref = HfApi(client.endpoint, library_name="trainkit"), repo.ref
    found: list[Any] = []
    for at in range(0, len(large), 500):
        batch = large[at : at + 500]
        found += api.get_paths_info(ref.name, batch, repo_type=ref.kind, revision=ref.commit)
    # Before 1.0 huggingface_hub goes on with files by itself, and does not tell those of Xet storage.
    files = [each for each in found if each.lfs is not None and getattr(each, "xet_hash", "unknown") is None]
    parts = Path(client.root, ref.folder, PARTS)
    parts.mkdir(exist_ok=True)
    for left in parts.iterdir():
        if left.stat().st_mtime < time.time() - _DAY and left.name not in {each.lfs.sha256 for each in files}:
            left.unlink(missing_ok=True)
    with ThreadPoolExecutor(_WORKERS) as workers:
        return set(workers.map(partial(_fetch_large, parts, ref, client), files)) - {""}


def _fetch_large(parts: Path, ref: RepoRef, client: HubClient, file: Any) -> str:
    """Make the part of a file whole, and a blob of the cache; its name, empty where other bytes came than expected."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import WeakFileLock

    checksum = file.lfs.sha256
    part, blob, lock = parts / checksum, parts.parent / "blobs" / checksum, parts / f"{checksum}.lock"
    url = hf_hub_url(ref.name, file.path, repo_type=ref.kind, revision=ref.commit, endpoint=client.endpoint)
    sound = False
    with WeakFileLock(lock):  # other nodes may share the cache
        if not blob.exists():
            with part.open("ab", buffering=0) as target:
                _append_rest(target, url, file.size)
            sound = _has(part, checksum)
            if sound:
                part.replace(blob)
            else:
                part.unlink()
        lock.unlink(missing_ok=True)
    return str(file.path) if sound else ""


def _append_rest(target: BinaryIO, url: str, size: int) -> None:
    """Write the rest of a file. A broken connection is resumed as long as bytes arrive."""
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

    headers = build_hf_headers(library_name="trainkit") | {"Accept-Encoding": "identity"}
    failures = 0
    while (begin := target.tell()) < size:
        ranged = {**headers, "Range": f"bytes={begin}-"}
        try:
            # Its own retries do not cover a break in the middle.
            with http_stream_backoff("GET", url, headers=ranged, timeout=SILENCE, retry_on_exceptions=()) as answer:
                hf_raise_for_status(answer)
                if answer.status_code != 206:  # a proxy that sends the whole file
                    target.truncate(0)
                for piece in answer.iter_bytes(_PIECE):
                    target.write(piece)
        except hub_errors() as error:
            failures = 0 if target.tell() > begin else failures + 1
            if isinstance(error, OSError) or failures > _RETRIES:  # of the disk, or the Hub refuses it
                raise
            time.sleep(1)


def _refuse_damaged(repo: CachedRepo, sound: set[str]) -> None:
    """Remove files with wrong checksums, and raise MachineError. sound: files that are already verified."""
    came = [path for name in repo.missing if name not in sound and (path := Path(repo.folder, name)).exists()]
    with ThreadPoolExecutor(_READERS) as readers:
        # The link of a snapshot alone: its blob, which is named by the checksum, may be a link into a shared store.
        blobs = [path.readlink().name if path.is_symlink() else "" for path in came]
        checked = list(readers.map(_has, came, blobs))
    damaged = [path for path, good in zip(came, checked, strict=True) if not good]
    for path in damaged:
        path.resolve().unlink()
        path.unlink(missing_ok=True)
    if damaged:
        names = ", ".join(path.name for path in damaged)
        what = f"{repo.ref.name}: {names} came with another checksum than the Hub has, and is removed"
        raise MachineError(what, hint="start the run again; if it comes so again, something on its way changes files")


def _has(path: Path, checksum: str) -> bool:
    """Whether a file has a checksum: SHA-256, or of small files that of git (SHA-1)."""
    if len(checksum) not in _ALGORITHMS or not _HEX.fullmatch(checksum):
        return True  # a cache without links does not record it
    made = hashlib.new(_ALGORITHMS[len(checksum)], usedforsecurity=False)
    if made.name == "sha1":
        made.update(b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            made.update(piece)
    return made.hexdigest() == checksum


def _report_progress(repo: CachedRepo, client: HubClient, done: threading.Event) -> None:
    """Report the progress in a line now and then."""
    storage, total = Path(client.root, repo.ref.folder), repo.missing_bytes
    began, first = time.monotonic(), _bytes_in(storage)
    before, moved, had = first, began, _bytes_in(storage / PARTS)
    while not done.wait(EVERY if time.monotonic() - began < LATER else 10 * EVERY):
        size, now = _bytes_in(storage), time.monotonic()
        if size != before:
            before, moved = size, now
        here, pace = had + size - first, (size - first) / (now - began)
        left = f", {format_duration((total - here) / pace)} left" if pace > 0 else ""
        if now - moved > QUIET:
            left = f", nothing has come for {format_duration(now - moved)}"
        sys.stdout.write(f"{repo.ref.name}: {format_size(here)} of {format_size(total)}{left}\n")
        sys.stdout.flush()


def _bytes_in(folder: Path) -> int:
    """The size of the files of a repository in the cache, of those that are being written too."""
    found = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # renamed meanwhile
            if path.is_file() and (path.parent.name == "blobs" or not path.is_symlink()):
                found += path.stat().st_size
    return found


if __name__ == "__main__":
    sys.exit(main())
