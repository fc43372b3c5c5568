"""Tokenised corpora on disk: built once by one process a node, memory-mapped by all."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainkit.errors import TrainingError

_FORMAT = 1  # of the files below; part of the digest
_PATIENCE = 600.0  # seconds to wait for another process that builds the same corpus


@dataclass(frozen=True, slots=True)
class Corpus:
    """All files as one row of bytes. `starts` holds the offset of each file's first byte, ascending."""

    tokens: NDArray[np.uint8]
    starts: NDArray[np.int64]
    highest: int  # largest byte value that occurs; -1 in an empty corpus
    unigram_entropy: float  # nats per byte: the loss of the best model that sees no context

    @property
    def bytes(self) -> int:
        """Size of the text."""
        return len(self.tokens)


def open_corpus(files: Sequence[Path], folders: Sequence[Path]) -> Corpus:
    """The corpus of these files, from the first of the cache folders that can be used. TrainingError if none can."""
    digest = _digest(files)
    refusals = []
    for folder in folders:
        try:
            return _load(_built(files, folder, digest))
        except OSError as error:
            refusals.append(f"{folder}: {error.strerror or error}")
    raise TrainingError(
        f"no folder can hold the tokenised corpus ({'; '.join(refusals)})", hint="set data.cache to a writable folder"
    )


def _digest(files: Sequence[Path]) -> str:
    described = hashlib.sha256(f"{_FORMAT} {sys.version_info[:3]}".encode())
    for file in files:
        with _naming(file):
            status = file.stat()
        described.update(f"\0{file}\0{status.st_size}\0{status.st_mtime_ns}".encode("utf-8", "surrogateescape"))
    return described.hexdigest()[:24]


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """A file of the user's that cannot be read is not the cache folder's fault."""
    try:
        yield
    except OSError as error:
        raise TrainingError(f"data.path: {file} cannot be read: {error.strerror}") from error


def _built(files: Sequence[Path], folder: Path, digest: str) -> Path:
    ready = folder / digest
    if _is_whole(ready):
        return ready
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder / f"{digest}.lock"):
        if not _is_whole(ready):
            # Of a builder that was killed, for we hold its lock now; and what a disk has damaged.
            for leftover in (*folder.glob(f".tmp-{digest}-*"), *folder.glob(digest)):
                shutil.rmtree(leftover)
            _build(files, ready, folder / f".tmp-{digest}-{os.getpid()}")
    return ready


def _is_whole(ready: Path) -> bool:
    """Whether a corpus is there, of the size that it had."""
    try:
        meta = json.loads((ready / "meta.json").read_text())
        return bool((ready / "tokens.bin").stat().st_size == meta["bytes"] and (ready / "starts.npy").exists())
    except (OSError, ValueError, KeyError, TypeError):
        return False


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """An exclusive lock that dies with its holder. TrainingError when another process holds it for too long."""
    deadline = time.monotonic() + _PATIENCE
    with path.open("a") as file:
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() > deadline:
                raise TrainingError(f"another process has been building the corpus under {path} for {_PATIENCE:.0f} s")
            time.sleep(0.1)
        yield


def _build(files: Sequence[Path], ready: Path, scratch: Path) -> None:
    scratch.mkdir()
    counts, starts, offset = np.zeros(256, dtype=np.int64), [], 0
    try:
        with (scratch / "tokens.bin").open("wb") as out:
            for file in files:
                with _naming(file):
                    text = file.read_bytes()
                if text:
                    starts.append(offset)
                    offset += out.write(text)
                    counts += np.bincount(np.frombuffer(text, dtype=np.uint8), minlength=256)
        np.save(scratch / "starts.npy", np.array(starts, dtype=np.int64))
        meta = {
            "bytes": offset,
            "highest": int(counts.nonzero()[0].max(initial=-1)),
            "unigram_entropy": _entropy(counts),
        }
        (scratch / "meta.json").write_text(json.dumps(meta))
        for part in scratch.iterdir():  # a power cut after the rename must not leave zeros to learn from
            with part.open("rb") as whole:
                os.fsync(whole.fileno())
        scratch.rename(ready)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _entropy(counts: NDArray[np.int64]) -> float:
    shares = counts[counts > 0] / max(1, counts.sum())
    return float(-(shares * np.log(shares)).sum())


def _load(ready: Path) -> Corpus:
    meta = json.loads((ready / "meta.json").read_text())
    path = ready / "tokens.bin"
    # an empty file cannot be mapped
    tokens = np.memmap(path, dtype=np.uint8, mode="r") if meta["bytes"] else np.zeros(0, dtype=np.uint8)
    return Corpus(tokens, np.load(ready / "starts.npy"), meta["highest"], meta["unigram_entropy"])
