"""Files that a killed fetch has left half: huggingface_hub begins each file anew, so they are finished here.

It writes `blobs/<checksum>.<8 digits>.incomplete`, from the beginning to the end (huggingface_hub.file_download). Files
of the Hub's Xet storage come in pieces, in any order: those begin anew.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trainkit.hub.cache import Copy
from trainkit.hub.lookup import Way

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
