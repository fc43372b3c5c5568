"""Open data sets and JSON lines, in memory or as a stream: find their files, and hold out rows for evaluation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

from trainkit.data.files import (
    START,
    TABLES,
    RawRow,
    ShardPosition,
    SourceRow,
    check_shard,
    chosen_files,
    reading,
    rows_of,
)
from trainkit.errors import TrainingError
from trainkit.hub.cache import public_name
from trainkit.hub.splits import RowSelection
from trainkit.recipe.schema import DatasetData, Recipe
from trainkit.recipe.schema.data import Mixed
from trainkit.seeds import derived_seed
from trainkit.text import join_names, pluralize
from trainkit.trainer.data.rows import RowReader, Rows, source_of_rows
from trainkit.trainer.data.source import Batch, BatchFormat, Labels, Samples, Source
from trainkit.trainer.data.streaming import RowStream, Sample, Shards, Windows, batch_of, samples_of

_LOOK = 4096  # bytes
_TAIL = 8  # bytes at the end of a parquet file: the size of the metadata before them, and PAR1
_FORMAT = 1  # version of `_identity`: increased when the order of samples changes
# Settings that do not affect the numbering of samples; files and tokenizers count by content.
_APART = {"path", "tokenizer", "mix", "workers", "persistent_workers", "prefetch_factor", "pin_memory"}


@dataclass(frozen=True, slots=True)
class SourceFiles:
    """The files of one source. held_out: separate files to evaluate on, if any. names: of labels."""

    asked: Mixed
    files: Sequence[Path]
    held_out: Sequence[Path]
    columns: Sequence[str]
    size: int  # bytes
    names: tuple[str, ...]


def open_source(recipe: Recipe, run_dir: Path) -> Source:
    """The source of a recipe whose `data.kind` is dataset or jsonl. TrainingError names the bad file or row."""
    data = cast("Rows", recipe.data)
    asked = [each for each in data.mix if each.weight]
    if not asked:
        own = {name: getattr(data, name) for name in ("split", "subset") if hasattr(data, name)}
        asked = [Mixed(path=data.path, **own)]
    if data.streaming:
        return _open_stream(recipe, asked)
    found = _files_of(asked[0], data)

    def rows(files: Sequence[Path]) -> Iterator[SourceRow]:
        return (raw.row() for file in files for raw in rows_of(file, found.columns))

    return source_of_rows(recipe, rows(found.files), rows(found.held_out) if found.held_out else None, found.names)


def _files_of(asked: Mixed, data: Rows) -> SourceFiles:
    """The files of a source, each checked. TrainingError names a file or a column."""
    paths = [Path(each).absolute() for each in ([asked.path] if isinstance(asked.path, str) else asked.path)]
    text = None if data.messages_field or data.tokens_field else asked.field or data.field
    named = (text, data.prompt_field, data.messages_field, data.tokens_field, data.targets_field, data.label_field)
    columns = [name for name in named if name]
    files, held_out = paths, list[Path]()
    if isinstance(data, DatasetData):
        parts = [chosen_files(path, RowSelection(asked.subset, asked.split, data.validation_split)) for path in paths]
        files, held_out = ([file for part in parts for file in part[which]] for which in (0, 1))
    elif odd := [path for path in paths if path.suffix in TABLES]:
        raise TrainingError(f"data.path: {odd[0]} is not a JSON-lines file", hint="data.kind: dataset reads it")
    looked_at = [check_shard(path, columns, streamed=data.streaming) for path in (*files, *held_out)]
    names = {names[data.label_field] for _, names in looked_at if data.label_field and data.label_field in names}
    if len(names) > 1 and not data.labels:
        raise TrainingError(f"data.path: the files of {paths[0]} give labels different names", hint="set data.labels")
    return SourceFiles(asked, files, held_out, columns, sum(size for size, _ in looked_at), next(iter(names), ()))


@dataclass(frozen=True, slots=True)
class OpenedSource:
    """One source of a stream. begins: the first row after those held out, in files that have both kinds."""

    found: SourceFiles
    reader: RowReader
    seed: int
    held_out: Sequence[RawRow]
    begins: Mapping[Path, ShardPosition | None]  # None if a file has no rows left to train on


def _open_stream(recipe: Recipe, asked: Sequence[Mixed]) -> Source:
    """The source of a recipe with `data.streaming`. Only the held-out rows are read now."""
    data, seed, reader = cast("Rows", recipe.data), recipe.train.seed, RowReader.of(recipe)
    # A single source has the seed that it has without streaming.
    seeds = [derived_seed(seed, "source", number) if data.mix else seed for number in range(len(asked))]
    opened = [_opened(each, reader, own) for each, own in zip(asked, seeds, strict=True)]
    names = tuple(data.labels)
    if data.label_field and not names:
        if len({each.found.names for each in opened}) > 1:
            what = "data.mix: the sources name their labels differently, or only some of them do"
            raise TrainingError(what, hint="name the labels in data.labels")
        names = opened[0].found.names
    # Rows that one source holds out of a file are not trained on by another source with the same file.
    begins: dict[Path, ShardPosition | None] = {}
    for path, begin in (pair for each in opened for pair in each.begins.items()):
        known = begins.get(path, START)
        begins[path] = None if begin is None or known is None else max(begin, known)
    windows = [Windows(_shards(each, begins), each.reader, names, each.seed) for each in opened]
    held_out = [sample for each in opened for sample in samples_of(each.held_out, each.reader, names)]
    described = _described([each.found for each in opened])
    if not held_out:
        rows = sum(len(each.held_out) for each in opened)
        what = f"data.path: {described} has no row to evaluate on"
        hint = "check that its files are complete, or set data.validation_split"
        if rows:
            what = f"data.path: {pluralize(rows, 'row')} held out of {described} have no target to predict"
            what += f" within {data.sequence_length} tokens"
            hint = "raise data.validation_rows, or data.sequence_length if prompts are longer"
        raise TrainingError(what, hint=hint)
    encoder = reader.encoder
    identity = _identity(recipe, [each.found for each in opened], encoder.fingerprint)
    facts: dict[str, int | float | str] = {
        "files": sum(len(each.found.files) for each in opened),
        "file_bytes": sum(each.found.size for each in opened),
        "stream": identity,
    }
    stream = RowStream(windows, [each.weight for each in asked], reader.form, seed, identity)
    return Source(
        Samples(0, stream.batch),
        Samples(len(held_out), partial(_held_out_batch, reader.form, held_out)),
        f"a stream of {described}",
        facts if encoder.unit == "bytes" else {**facts, "tokenizer": encoder.fingerprint},
        labels=Labels(-1, "", names) if data.label_field else None,
        encoder=encoder,
        padding=encoder.padding if reader.form.whole else None,
        stream=stream,
    )


def _held_out_batch(form: BatchFormat, samples: Sequence[Sample], indices: Sequence[int]) -> Batch:
    return batch_of(form, [samples[index] for index in indices])


def _opened(asked: Mixed, reader: RowReader, seed: int) -> OpenedSource:
    """A source with its first rows, or those of its validation files, held out. TrainingError as of `_files_of`."""
    found, data = _files_of(asked, reader.data), reader.data
    reader = replace(reader, data=data.model_copy(update={"field": asked.field or data.field}))
    rows: list[RawRow] = []
    begins: dict[Path, ShardPosition | None] = {}
    for file in found.held_out or found.files:
        known = file.resolve()
        if len(rows) == data.validation_rows or known in begins:
            continue
        begins[known] = None
        for raw in rows_of(file, found.columns):
            if len(rows) == data.validation_rows:
                begins[known] = raw.position
                break
            if not (data.skip_empty and raw.row().blank(reader.content_fields)):
                rows.append(raw)
    return OpenedSource(found, reader, seed, rows, {} if found.held_out else begins)


def _shards(opened: OpenedSource, begins: Mapping[Path, ShardPosition | None]) -> Shards:
    """The files to train on, without the held-out rows. TrainingError if nothing is left."""
    paths, data = opened.found.files, opened.reader.data
    order = opened.seed if data.shuffle_files and len(paths) > 1 else None
    filled = opened.reader.content_fields if data.skip_empty else ()
    starts = [begins.get(path.resolve(), START) for path in paths]
    shards = Shards(paths, opened.found.columns, starts, order, filled)
    if next(shards.rows(0, START), None) is None:
        for raw in opened.held_out:  # an invalid row is reported first
            raw.row()
        rows = len(opened.held_out) if opened.begins else 0
        held = f" beside the {pluralize(rows, 'row')} held out for evaluation" if rows else ""
        what = f"data.path: {join_names([str(path) for path in paths])} has no row to train on{held}"
        hint = "set data.validation_rows lower" if held else "check that the files are complete"
        raise TrainingError(what, hint=hint)
    return shards


def _identity(recipe: Recipe, sources: Sequence[SourceFiles], tokenizer: str) -> str:
    """A digest of everything that decides the numbering of samples."""
    task = getattr(recipe.model, "task", "causal_lm")
    settings = recipe.data.model_dump(mode="json", exclude=_APART)
    files = [
        [each.asked.weight, each.asked.field, [(file.name, *_look_at(file)) for file in each.files]] for each in sources
    ]
    described = json.dumps([_FORMAT, settings, recipe.train.seed, task, tokenizer, files], sort_keys=True)
    return hashlib.sha256(described.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _look_at(file: Path) -> tuple[int, str]:
    """Size in bytes, and a digest of parts of the content: a rewritten file may have the same size.

    Of parquet the whole footer counts: offset, size, lowest and highest value of each column chunk.
    """
    size, found, foot = file.stat().st_size, hashlib.sha256(), 0
    with reading(file), file.open("rb") as content:
        if file.suffix == ".parquet":
            content.seek(size - _TAIL)
            foot = int.from_bytes(content.read(4), "little") + _TAIL
        end = max(0, size - max(_LOOK, foot))
        for place, length in ((0, _LOOK), (size // 2, _LOOK), (end, size - end)):
            content.seek(place)
            found.update(content.read(length))
    return size, found.hexdigest()[:16]


def _described(sources: Sequence[SourceFiles]) -> str:
    """`3 files of 1.2 GB`, or each source with its share."""
    total = sum(each.asked.weight for each in sources)
    parts = []
    for each in sources:
        share = f"{each.asked.weight / total:.1%} " if len(sources) > 1 else ""
        name = each.asked.path if isinstance(each.asked.path, str) else each.asked.path[0]
        parts.append(f"{share}{public_name(name)} ({pluralize(len(each.files), 'file')}, {each.size:,} bytes)")
    return ", ".join(parts)
