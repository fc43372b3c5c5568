"""Text files, one token per byte or those of a tokenizer, cut into samples of equal length."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from trainkit.errors import TrainingError
from trainkit.files import cache_folder
from trainkit.recipe.schema import Recipe, TextData
from trainkit.trainer.data.cache import Corpus, open_corpus
from trainkit.trainer.data.encoding import Encoder, open_encoder
from trainkit.trainer.data.source import Samples, Source, held_out
from trainkit.trainer.data.tokens import Stretch

STDLIB = "python-stdlib"
# Installed packages and the interpreter's own tests differ between machines; without them it is 12 MB everywhere.
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})


def find_files(data: TextData) -> list[Path]:
    """The files of a data set, in a fixed order. TrainingError names a path that is missing or holds nothing."""
    paths = [data.path] if isinstance(data.path, str) else list(data.path)
    files = [file for path in paths for file in _files_under(path, data.include)]
    if not files:
        raise TrainingError(
            f"data.path: no file in {', '.join(paths)} matches {data.include!r}", hint="see data.include"
        )
    return files


def _files_under(path: str, include: str) -> list[Path]:
    root = Path(sysconfig.get_path("stdlib") if path == STDLIB else path).absolute()
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise TrainingError(f"data.path: {root} does not exist")
    skipped = _NOT_STDLIB if path == STDLIB else frozenset()
    found = sorted(file for file in root.glob(include) if not skipped.intersection(file.relative_to(root).parts))
    return [file for file in found if file.is_file()]


def read_corpus(
    data: TextData, run_dir: Path, environ: Mapping[str, str] = os.environ, encoder: Encoder | None = None
) -> Corpus:
    """Tokenise once, then map. Where the cache folder cannot be written, the run directory holds the corpus."""
    folder = data.cache or cache_folder(environ, "corpora")
    corpus = open_corpus(find_files(data), [*([Path(folder)] if folder else []), run_dir / "corpus"], encoder)
    if corpus.size == 0:
        raise TrainingError(f"data.path: the files of {data.path} are empty")
    return corpus


def open_source(recipe: Recipe, run_dir: Path) -> Source:
    """The source of a recipe whose `data.kind` is text."""
    data = cast("TextData", recipe.data)
    encoder = open_encoder(data.tokenizer)
    corpus = read_corpus(data, run_dir, encoder=encoder)
    train, validation = split(corpus, data)
    facts: dict[str, int | float | str] = {corpus.unit: corpus.size, "unigram_entropy": corpus.unigram_entropy}
    if data.tokenizer:
        facts["tokenizer"] = encoder.fingerprint
    description = f"{corpus.size:,} {corpus.unit} of text"
    return Source(train, validation, description, facts, highest=corpus.highest, encoder=encoder)


def split(corpus: Corpus, data: TextData) -> tuple[Samples, Samples]:
    """Training and validation samples. TrainingError if the corpus is too short for both."""
    border = held_out(corpus.size, data.sequence_length, data.validation_fraction, corpus.unit)
    return (
        text_samples(corpus, range(border), data.sequence_length),
        text_samples(corpus, range(border, corpus.size), data.sequence_length),
    )


def text_samples(corpus: Corpus, places: range, length: int) -> Samples:
    """Samples of one stretch of the corpus. A file's first token does not follow from the file before."""
    last = int(corpus.tokens[places.stop - 1])
    return Stretch(corpus.tokens, places, length, padding=last, starts=corpus.starts).samples()
