"""Text files, one token per byte or those of a tokenizer, cut into samples of equal length.

They are tokenised once, by one process of a node, into a cache on disk that all processes map into memory.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import sysconfig
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray

from trainkit.data.files import reading
from trainkit.data.prepare import text_length
from trainkit.data.prepared import Mapped, finish, locked, read_whole_folder, save_array
from trainkit.data.tokenizer import Encoder, open_encoder
from trainkit.errors import TrainingError
from trainkit.files import cache_folder, remove_tree
from trainkit.recipe.schema import Recipe, TextData
from trainkit.trainer.data.source import Ids, Samples, Source
from trainkit.trainer.data.tokens import Stretch, held_out

STDLIB = "python-stdlib"
# Installed packages and the interpreter's own tests differ between machines; without these it is 12 MB everywhere.
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
_FORMAT = 3  # version of the cache's format; part of its digest


@dataclass(frozen=True, slots=True)
class Corpus:
    """All files as one sequence of tokens. `starts`: the index of each file's first token, ascending."""

    tokens: Ids
    starts: NDArray[np.int64]
    highest: int  # highest token id; -1 for an empty corpus
    unigram_entropy: float  # nats per token: the loss of the best model without context
    unit: str = "bytes"  # what a token is

    def samples(self, places: range, length: int) -> Samples:
        """Samples of a range of tokens. A file's first token is not predicted from the previous file."""
        last = int(self.tokens[places.stop - 1])
        return Stretch(self.tokens, places, length, padding=last, starts=self.starts).samples()


def open_source(recipe: Recipe, run_dir: Path) -> Source:
    """The source of a recipe whose `data.kind` is text. TrainingError names a path without enough text."""
    data = cast("TextData", recipe.data)
    encoder = open_encoder(data.tokenizer)
    corpus = read_corpus(data, run_dir, encoder=encoder)
    length, size, highest = text_length(recipe), len(corpus.tokens), corpus.highest
    facts: dict[str, int | float | str] = {corpus.unit: size, "unigram_entropy": corpus.unigram_entropy}
    if encoder.unit != "bytes":
        facts["tokenizer"] = encoder.fingerprint
    if data.validation_path is None:
        border = held_out(size, length, data.validation_fraction, corpus.unit)
        train, validation = corpus.samples(range(border), length), corpus.samples(range(border, size), length)
    else:
        own = read_corpus(data, run_dir, encoder=encoder, key="validation_path")
        for key, each in (("path", corpus), ("validation_path", own)):
            if len(each.tokens) <= length:
                what = f"data.{key}: {len(each.tokens)} {each.unit} are too few for a sample of {length}"
                raise TrainingError(what, hint="lower data.sequence_length, or provide more text")
        highest, facts[f"validation_{own.unit}"] = max(highest, own.highest), len(own.tokens)
        train, validation = (each.samples(range(len(each.tokens)), length) for each in (corpus, own))
    description = f"{size:,} {corpus.unit} of text"
    return Source(train, validation, description, facts, highest=highest, encoder=encoder, lengths=(length, None))


def find_files(data: TextData, key: Literal["path", "validation_path"] = "path") -> list[Path]:
    """The files of a data set, in a fixed order. TrainingError names a path that is missing or empty."""
    named = getattr(data, key)
    paths = [named] if isinstance(named, str) else list(named)
    files: list[Path] = []
    for path in paths:
        root = Path(sysconfig.get_path("stdlib") if path == STDLIB else path).absolute()
        if not root.exists():
            raise TrainingError(f"data.{key}: {root} does not exist")
        skipped = _NOT_STDLIB if path == STDLIB else frozenset()
        found = [root] if root.is_file() else sorted(root.glob(data.include))
        files += [each for each in found if each.is_file() and not skipped.intersection(each.relative_to(root).parts)]
    if not files:
        what = f"data.{key}: no file in {', '.join(paths)} matches {data.include!r}"
        raise TrainingError(what, hint="see data.include")
    return files


def read_corpus(
    data: TextData,
    run_dir: Path,
    environ: Mapping[str, str] = os.environ,
    encoder: Encoder | None = None,
    key: Literal["path", "validation_path"] = "path",
) -> Corpus:
    """Tokenise once, then memory-map. If the cache folder cannot be written, the run directory holds the corpus.

    key: the setting that names the files.
    """
    folder = data.cache or cache_folder(environ, "corpora")
    corpus = open_corpus(find_files(data, key), [*([Path(folder)] if folder else []), run_dir / "corpus"], encoder)
    if not len(corpus.tokens):
        raise TrainingError(f"data.{key}: the files of {getattr(data, key)} are empty")
    return corpus


def open_corpus(files: Sequence[Path], folders: Sequence[Path], encoder: Encoder | None = None) -> Corpus:
    """The corpus of these files, in the first usable cache folder. TrainingError if none is usable."""
    encoder = encoder or Encoder()
    described = hashlib.sha256(f"{_FORMAT} {sys.version_info[:3]} {encoder.fingerprint}".encode())
    for file in files:
        with reading(file):  # an error of the user's files is not the cache folder's fault
            status = file.stat()
        described.update(f"\0{file}\0{status.st_size}\0{status.st_mtime_ns}".encode("utf-8", "surrogateescape"))
    digest = described.hexdigest()[:24]
    refusals = []
    for folder in folders:
        ready = folder / digest
        try:
            if (meta := read_whole_folder(ready)) is None:
                folder.mkdir(parents=True, exist_ok=True)
                with locked(folder / f"{digest}.lock"):
                    if read_whole_folder(ready) is None:  # else another process has just built it
                        # Left by a killed builder, since we hold its lock now, or damaged on disk.
                        for leftover in (*folder.glob(f".tmp-{digest}-*"), *folder.glob(digest)):
                            remove_tree(leftover)
                        _build(files, ready, folder / f".tmp-{digest}-{os.getpid()}", encoder)
                meta = read_whole_folder(ready)
            if meta is not None:
                arrays = ((name, *meta["arrays"][name]) for name in ("tokens", "starts"))
                tokens, starts = (Mapped(ready / f"{name}.bin", kind, (size,)).array for name, kind, size in arrays)
                return Corpus(tokens, starts, meta["highest"], meta["unigram_entropy"], meta["unit"])
            refusals.append(f"{folder}: the written data differs when read back")
        except OSError as error:
            refusals.append(f"{folder}: {error.strerror or error}")
    raise TrainingError(
        f"no folder can hold the tokenised corpus ({'; '.join(refusals)})", hint="set data.cache to a writable folder"
    )


def _build(files: Sequence[Path], ready: Path, scratch: Path, encoder: Encoder) -> None:
    scratch.mkdir()
    # Vocabularies exceed 16 bits (Llama 3 has 128,256 tokens).
    kind = np.dtype(np.uint8 if encoder.unit == "bytes" else np.uint32)
    counts, starts, offset = np.zeros(encoder.size, dtype=np.int64), [], 0
    try:
        with (scratch / "tokens.bin").open("wb") as out:
            for file in files:
                tokens = _tokens(file, encoder)
                if tokens:
                    starts.append(offset)
                    offset += out.write(tokens) // kind.itemsize
                    counts += np.bincount(np.frombuffer(tokens, dtype=kind), minlength=encoder.size)
            out.flush()
            os.fsync(out.fileno())
        shares = counts[counts > 0] / max(1, counts.sum())
        save_array(scratch, "starts", np.array(starts, dtype=np.int64))
        meta = {
            "arrays": {"tokens": (kind.name, offset), "starts": ("int64", len(starts))},
            "unit": encoder.unit,
            "highest": int(counts.nonzero()[0].max(initial=-1)),
            "unigram_entropy": float(-(shares * np.log(shares)).sum()),
        }
        finish(scratch, ready, meta)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _tokens(file: Path, encoder: Encoder) -> bytes:
    """A file's token ids, one or four bytes each. Without a tokenizer they are its bytes, in any encoding."""
    with reading(file):
        content = file.read_bytes()
    if encoder.unit == "bytes" or not content:
        return content
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise TrainingError(
            f"data.path: {file} is not UTF-8 text (byte {error.start}), which a tokenizer requires",
            hint="leave the file out with data.include",
        ) from error
    return array("I", [*encoder.opening(), *encoder.plain(text), *encoder.closing(final=True)]).tobytes()
