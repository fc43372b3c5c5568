"""Files that a killed fetch has left half: huggingface_hub begins each file anew, so they are finished here.

It writes `blobs/<checksum>.<8 digits>.incomplete`, from the beginning to the end (huggingface_hub.file_download). Files
of the Hub's Xet storage come in pieces, in any order: those begin anew.
"""

from __future__ import annotations

import argparse
import errno
import glob
import hashlib
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from trainkit.errors import MachineError, TrainkitError, in_words
from trainkit.hub.cache import Copy
from trainkit.hub.lookup import Way, end_silence, look_up
from trainkit.hub.names import Named
from trainkit.hub.splits import Asked
from trainkit.text import format_duration, format_size

END = ".incomplete"
_ALGORITHMS = {64: "sha256", 40: "sha1"}  # by the length of the name
_HEX = re.compile("[0-9a-f]+")
_PIECE = 1 << 22  # bytes


def finish_parts(copy: Copy, way: Way) -> None:
    """Fetch the rest of each file of which a part is here, and remove the parts that no file needs.

    Raises what huggingface_hub raises; the parts stay then.
    """
    blobs = Path(way.root, copy.named.folder, "blobs")
    parts = _left(blobs)
    if not parts:
        return
    wanted = _checksums(copy, way)
    for part in parts:
        checksum = part.name.partition(".")[0]
        with _locked(Path(way.root, ".locks", copy.named.folder, f"{checksum}.lock")) as mine:
            if mine:
                _finish(part, checksum, wanted.get(checksum), copy, way)


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """The lock under which huggingface_hub writes a file: others may share the cache. False: somebody else has it."""
    from filelock import FileLock, Timeout

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, mode=0o664)  # as the library makes it
    try:
        lock.acquire(timeout=0)
    except (Timeout, NotImplementedError):  # somebody is at it, or nobody can tell
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _finish(part: Path, checksum: str, name: str | None, copy: Copy, way: Way) -> None:
    """Make a part the whole file, or remove it."""
    whole = part.with_name(checksum)
    if not part.exists():  # who had the lock before has finished it
        return
    if name is None or whole.exists() or not _finished(part, name, copy, way):
        part.unlink(missing_ok=True)
    elif _has(part, checksum):
        part.rename(whole)
    else:
        part.unlink()


def _left(blobs: Path) -> list[Path]:
    """The parts that nobody has open, the largest first. None where the system does not say who has."""
    found = [each.resolve() for each in blobs.glob(f"*{END}")]
    if not found or not Path("/proc/self/fd").exists():
        return []
    busy = set(_opened("[0-9]*"))
    return sorted((each for each in found if str(each) not in busy), key=lambda each: -each.stat().st_size)


def _opened(processes: str) -> Iterator[str]:
    """The files that processes of this user have open."""
    for link in Path("/proc").glob(f"{processes}/fd/*"):
        with suppress(OSError):  # the process has ended
            yield str(link.readlink())


def _checksums(copy: Copy, way: Way) -> Mapping[str, str]:
    """The missing files by the checksums that name them in the cache, as far as they are large."""
    from huggingface_hub import HfApi

    named = copy.named
    info: Any = HfApi(way.endpoint, library_name="trainkit").repo_info(
        named.name, repo_type=named.kind, revision=named.commit, files_metadata=True
    )
    every = {each.rfilename: each.lfs for each in info.siblings or ()}
    return {str(lfs.sha256): name for name in copy.missing if (lfs := every.get(name)) is not None}


def _finished(part: Path, name: str, copy: Copy, way: Way) -> bool:
    """Fetch what a part lacks; False where that does not work for this file."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import get_hf_file_metadata, http_get
    from huggingface_hub.utils import build_hf_headers

    named = copy.named
    url = hf_hub_url(named.name, name, repo_type=named.kind, revision=named.commit, endpoint=way.endpoint)
    known: Any = get_hf_file_metadata(url, endpoint=way.endpoint, library_name="trainkit")
    size = part.stat().st_size
    if getattr(known, "xet_file_data", None) is not None or known.size is None or size > known.size:
        return False
    headers = build_hf_headers(library_name="trainkit")
    if urlsplit(url).netloc != urlsplit(known.location).netloc:  # the token is for the Hub alone
        headers.pop("authorization", None)
    with part.open("ab") as file:
        http_get(known.location, file, resume_size=size, headers=headers, expected_size=known.size)
    return True


def is_sound(path: Path) -> bool:
    """Whether a file of the cache has the checksum that names it there."""
    stored = path.resolve()
    return _has(stored, stored.name)


def _has(path: Path, checksum: str) -> bool:
    """Whether a file has a checksum: SHA-256, or of small files that of git (SHA-1)."""
    if len(checksum) not in _ALGORITHMS or not _HEX.fullmatch(checksum):
        return True  # a cache without links: the files have their own names
    made = hashlib.new(_ALGORITHMS[len(checksum)], usedforsecurity=False)
    if made.name == "sha1":
        made.update(b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            made.update(piece)
    return made.hexdigest() == checksum


_READERS = 4  # threads that compute checksums
EVERY = 1.0  # seconds from one word on the progress to the next, at first
LATER = 30.0  # seconds, after which they are ten times as far apart
SILENCE = 30.0  # seconds without a byte from the Hub, after which it is asked anew, a few times
QUIET = 5.0  # seconds without a byte, after which that is said


def main(argv: Sequence[str] | None = None) -> int:
    """Fetch what is missing. Exit code 4 where the Hub or this machine does not let it, 2 for what is not there."""
    parser = argparse.ArgumentParser(prog="python -m trainkit.hub.fetch", description=__doc__)
    parser.add_argument("key", help="the setting that names it")
    parser.add_argument("kind", choices=("model", "dataset"))
    parser.add_argument("name", help="of the repository, owner/name")
    parser.add_argument("commit", help="of its files")
    for name in ("subset", "split", "validation-split"):
        parser.add_argument(f"--{name}", help="of a data set; without it the usual one")
    asked = parser.parse_args(argv)
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # ours is told in lines
    signal.signal(signal.SIGTERM, _end)
    os.environ.pop("HF_HUB_OFFLINE", None)  # set for the ranks; where the caller's is, planning has found it
    try:
        rows = Asked(asked.subset, asked.split, asked.validation_split)
        fetch(Named(asked.key, asked.kind, asked.name, asked.commit, asked.commit, rows))
    except TrainkitError as error:
        sys.stderr.write(in_words(error))
        return int(error.exit_code)
    return 0


def _end(number: int, _frame: object) -> NoReturn:
    """At once: the threads of huggingface_hub would first fetch what they are at to its end."""
    os._exit(128 + number)


def fetch(named: Named) -> None:
    """Bring what the run needs of a repository into the cache. MachineError where that does not work."""
    way = Way.of(os.environ)
    root, copy = way.root, look_up(named, way)
    if copy.whole:
        return
    if copy.sizes is None:
        raise MachineError(copy.obstacle, hint=copy.remedy)
    _refuse_too_large(copy, root)
    done = threading.Event()
    watcher = threading.Thread(target=_tell, args=(copy, root, done), daemon=True)
    watcher.start()
    try:
        _download(copy, way)
    finally:
        done.set()
        watcher.join()
    _refuse_damaged(copy)
    left = look_up(named, way)
    if not left.whole:
        names = ", ".join(left.missing[:3])
        raise MachineError(f"{named.name}: {names} did not come", hint="start the run again: files that are there stay")


def _download(copy: Copy, way: Way) -> None:
    from huggingface_hub import snapshot_download

    named, root = copy.named, way.root
    end_silence(SILENCE)
    try:
        finish_parts(copy, way)
        snapshot_download(
            named.name, repo_type=named.kind, revision=named.commit, cache_dir=root, endpoint=way.endpoint,
            library_name="trainkit",
            allow_patterns=[glob.escape(name) for name in copy.sizes or ()],
        )  # fmt: skip
    except Exception as error:  # the library, its HTTP library and the Rust of its transfers raise anything
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            what = f"{named.name}: the disk of the Hub's cache {root} is full"
            raise MachineError(what, hint="make room, or set HF_HOME to a folder on another disk") from error
        reason = str(error).strip().partition("\n")[0][:300] or type(error).__name__
        what = f"{named.name} cannot be fetched from the Hub: {reason}"
        raise MachineError(what, hint="start the run again: files that are there stay") from error


def _refuse_damaged(copy: Copy) -> None:
    """Remove what came with other bytes than the Hub has, and raise MachineError."""
    came = [path for name in copy.missing if (path := Path(copy.folder, name)).exists()]
    with ThreadPoolExecutor(_READERS) as readers:
        sound = list(readers.map(is_sound, came))
    damaged = [path for path, good in zip(came, sound, strict=True) if not good]
    for path in damaged:
        path.resolve().unlink()
        path.unlink(missing_ok=True)
    if damaged:
        names = ", ".join(path.name for path in damaged)
        what = f"{copy.named.name}: {names} came with another checksum than the Hub has, and is removed"
        raise MachineError(what, hint="start the run again; if it comes so again, something on its way changes files")


def _refuse_too_large(copy: Copy, root: str) -> None:
    """MachineError where the disk has no room for what is missing."""
    needed = sum((copy.sizes or {})[name] for name in copy.missing)
    folder = Path(root)
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed > free:
        room = f"in the Hub's cache {root}, where {format_size(free)} are free"
        what = f"{copy.named.name} needs {format_size(needed)} more {room}"
        raise MachineError(what, hint="make room, or set HF_HOME to a folder on another disk")


def _arrived(copy: Copy, root: str) -> int:
    """Bytes of the missing files that are on the disk: whole ones, and parts of others."""
    blobs = Path(root, copy.named.folder, "blobs")
    parts = sum(each.stat().st_size for each in blobs.glob(f"*{END}") if each.exists())
    whole = (name for name in copy.missing if Path(copy.folder, name).exists())
    return parts + sum((copy.sizes or {})[name] for name in whole)


def _tell(copy: Copy, root: str, done: threading.Event) -> None:
    """How far it is, in a line now and then."""
    total = sum((copy.sizes or {})[name] for name in copy.missing)
    began, first = time.monotonic(), _arrived(copy, root)
    before, moved = first, began
    while not done.wait(EVERY if time.monotonic() - began < LATER else 10 * EVERY):
        here, now = _arrived(copy, root), time.monotonic()
        if here != before:
            before, moved = here, now
        pace = (here - first) / (now - began)
        left = f", {format_duration((total - here) / pace)} left" if pace > 0 else ""
        if now - moved > QUIET:
            left = f", nothing has come for {format_duration(now - moved)}"
        sys.stdout.write(f"{copy.named.name}: {format_size(here)} of {format_size(total)}{left}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
