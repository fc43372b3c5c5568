"""Open a data set: prepared rows as samples, or a stream of rows."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

from trainkit.data.encode import Limits, RowEncoder
from trainkit.data.files import START, RawRow, ShardPosition, ending, reading, rows_of
from trainkit.data.formats import packing_of
from trainkit.data.prepare import RowFiles, model_settings, own_source, prepare, row_encoder, row_files
from trainkit.data.prepared import Prepared
from trainkit.data.report import described, remarks
from trainkit.errors import TrainingError
from trainkit.hub.cache import public_name
from trainkit.recipe.schema import DatasetData, Recipe
from trainkit.recipe.schema.data import Mixed
from trainkit.seeds import derived_seed
from trainkit.tasks import CAUSAL, WRITING, task_of
from trainkit.text import join_names, pluralize
from trainkit.trainer.data.rows import BinnedSamples, JoinedSamples, TextSamples
from trainkit.trainer.data.source import Batch, BatchFormat, Labels, Lengths, Samples, Source
from trainkit.trainer.data.streaming import RowReader, RowStream, Sample, Shards, Windows, batch_of, samples_of

log = logging.getLogger("trainkit.trainer")
_LOOK = 4096  # bytes
_TAIL = 8  # bytes at the end of a parquet file: the size of the metadata before them, and PAR1
_FORMAT = 2  # version of `_identity`: increased when the order of samples changes
# Settings that do not affect the numbering of samples; files and tokenizers count by content.
_APART = {"path", "tokenizer", "mix", "workers", "persistent_workers", "prefetch_factor", "pin_memory", "cache"}

_LATER = ("train_on_prompts", "max_rows")  # streams of before them go on as long as they say nothing


def open_source(recipe: Recipe, run_dir: Path) -> Source:
    """The source of a recipe whose `data.kind` is dataset. TrainingError names the bad file or row."""
    data = cast("DatasetData", recipe.data)
    if data.streaming:
        return _open_stream(recipe, [each for each in data.mix if each.weight] or [own_source(data)])
    prepared, _, encoder, names = prepare(recipe, run_dir, say=lambda line: log.info("preparing the data: %s", line))
    return _source(recipe, prepared, encoder, names)


def batch_format(recipe: Recipe, encoder: RowEncoder, length: int, target: int | None) -> BatchFormat:
    """The form of the batches of a recipe's rows."""
    padding = encoder.encoder.padding
    if encoder.task == WRITING:
        lengths = Lengths(length, target or length, cast("DatasetData", recipe.data).padding)
        return BatchFormat(lengths.source + lengths.target, padding, True, lengths)
    return BatchFormat(length, padding, encoder.task != CAUSAL)


def _source(recipe: Recipe, prepared: Prepared, encoder: RowEncoder, names: tuple[str, ...]) -> Source:
    view, tokens = prepared.view, prepared.tokens
    form = batch_format(recipe, encoder, view.sequence_length, view.target_length)
    limits = Limits.of(encoder, view.sequence_length, view.target_length)
    labelled = "label" in encoder.form.columns
    sides: list[Samples] = []
    for name in ("train", "validation"):
        spans, side = prepared.spans(name), prepared.side(name)
        if view.packing == "isolated":
            binned = BinnedSamples(tokens, spans, form, side.bins, recipe.train.seed)
            sides.append(Samples(len(binned), binned.batch))
        elif view.packing == "dense":
            joined = JoinedSamples(tokens, spans, prepared.joined(name), form, 0 if form.whole else 1)
            sides.append(Samples(side.window, joined.batch))
        else:
            labels = prepared.labels(name) if labelled else None
            sides.append(Samples(side.samples, TextSamples(tokens, spans, form, limits, labels).batch))
    facts = _facts(prepared, encoder, names)
    known = [number for number, _ in enumerate(view.labels)]
    return Source(
        sides[0],
        sides[1],
        described(prepared, encoder, names),
        facts,
        highest=max(tokens.meta["highest"], encoder.encoder.padding),
        where=tokens.meta["where"],
        labels=Labels(len(known) - 1, _where_is(prepared, names), names) if labelled else None,
        encoder=encoder.encoder,
        padding=encoder.encoder.padding if form.whole else None,
        draws=view.packing == "isolated",
        lengths=(view.sequence_length, view.target_length),
        remarks=tuple(remarks(prepared, encoder, names)),
    )


def _where_is(prepared: Prepared, names: tuple[str, ...]) -> str:
    """Where the highest label occurs first."""
    numbers = {
        label: names.index(label) if isinstance(label, str) else label for label, _ in prepared.tokens.meta["labels"]
    }
    return next(
        (place for label, place in prepared.tokens.meta["labels"] if numbers[label] == len(prepared.view.labels) - 1),
        "",
    )


def _facts(prepared: Prepared, encoder: RowEncoder, names: tuple[str, ...]) -> dict[str, int | float | str]:
    """What the summary keeps of the data, and ranks must agree on: tokenizers may differ between machines."""
    view, meta = prepared.view, prepared.tokens.meta
    train, validation = view.train, view.validation
    facts: dict[str, int | float | str] = {
        "format": encoder.form.name,
        "rows": meta["rows"],
        "validation_rows": validation.rows,
        "texts": int(prepared.tokens.meta["arrays"]["starts"]["shape"][0]) - 1,
        meta["unit"]: int(prepared.tokens.meta["arrays"]["ids"]["shape"][0]),
        "learned": train.learned + validation.learned,
        "sequence_length": view.sequence_length,
        "packing": view.packing,
        "content": prepared.folder.parent.name,
        "chats": int(encoder.template is not None),
    }
    if view.packing == "isolated":
        places = train.tokens - train.samples
        facts["fill"] = round(places / max(1, sum(train.bins) * view.sequence_length), 4)
    for name, count in (
        ("cut", train.cut + validation.cut),
        ("in_pieces", train.pieces + validation.pieces),
        ("left_out", train.without + validation.without),
        ("rows_passed_over", meta["skipped"]),
    ):
        facts |= {name: count} if count else {}
    if view.target_length is not None:
        facts["target_length"] = view.target_length
    if encoder.encoder.unit != "bytes":
        facts["tokenizer"] = encoder.encoder.fingerprint
    if names:
        facts["labels"] = ", ".join(f"{number} {name}" for number, name in enumerate(names))
    return facts


@dataclass(frozen=True, slots=True)
class OpenedSource:
    """One source of a stream. begins: the first row after those held out, in files that have both kinds."""

    found: RowFiles
    reader: RowReader
    seed: int
    held_out: Sequence[RawRow]
    begins: Mapping[Path, ShardPosition | None]  # None if a file has no rows left to train on


def _open_stream(recipe: Recipe, asked: Sequence[Mixed]) -> Source:
    """The source of a recipe with `data.streaming`. Only the held-out rows are read now."""
    data, seed, task = cast("DatasetData", recipe.data), recipe.train.seed, task_of(recipe)
    if data.sequence_length == "auto" or data.target_length == "auto":
        what = "data.sequence_length: how long the texts of a stream are is not known before its end"
        raise TrainingError(what, hint="write a number of tokens")
    every = [row_files(each, data, task) for each in asked]
    names = tuple(data.labels)
    if "label" in every[0].form.columns and not names:
        if len({found.names for found in every}) > 1:
            what = "data.mix: the sources name their labels differently, or only some of them do"
            raise TrainingError(what, hint="name the labels in data.labels")
        names = every[0].names
    # A single source has the seed that it has without streaming.
    seeds = [derived_seed(seed, "source", number) if data.mix else seed for number in range(len(asked))]
    opened = [_opened(recipe, found, names, own) for found, own in zip(every, seeds, strict=True)]
    # Rows that one source holds out of a file are not trained on by another source with the same file.
    begins: dict[Path, ShardPosition | None] = {}
    for path, begin in (pair for each in opened for pair in each.begins.items()):
        known = begins.get(path, START)
        begins[path] = None if begin is None or known is None else max(begin, known)
    windows = [Windows(_shards(each, begins), each.reader, each.seed) for each in opened]
    held_out = [sample for each in opened for sample in samples_of(each.held_out, each.reader)]
    described = _described(recipe, every)
    if not held_out:
        rows = sum(len(each.held_out) for each in opened)
        what = f"data.path: {described} has no row to evaluate on"
        hint = "check that its files are complete, or set data.validation_split"
        if rows:
            what = f"data.path: {pluralize(rows, 'row')} held out of {described} have no target to predict"
            what += f" within {data.sequence_length} tokens"
            hint = "raise data.validation_rows, or data.sequence_length if prompts are longer"
        raise TrainingError(what, hint=hint)
    reader = opened[0].reader
    encoder = reader.encoder.encoder
    identity = _identity(recipe, every, encoder.fingerprint)
    facts: dict[str, int | float | str] = {
        "files": sum(len(found.files) for found in every),
        "file_bytes": sum(found.size for found in every),
        "stream": identity,
        "format": every[0].form.name,
    }
    stream = RowStream(windows, [each.weight for each in asked], reader, seed, identity)
    return Source(
        Samples(0, stream.batch),
        Samples(len(held_out), partial(_held_out_batch, reader, held_out)),
        f"a stream of {described}",
        facts if encoder.unit == "bytes" else {**facts, "tokenizer": encoder.fingerprint},
        labels=Labels(-1, "", names) if "label" in every[0].form.columns else None,
        encoder=encoder,
        padding=encoder.padding if reader.form.whole else None,
        stream=stream,
        remarks=tuple(dict.fromkeys(each for found in every for each in found.remarks)),
    )


def _held_out_batch(reader: RowReader, samples: Sequence[Sample], indices: Sequence[int]) -> Batch:
    return batch_of(reader, [samples[index] for index in indices])


def _opened(recipe: Recipe, found: RowFiles, names: tuple[str, ...], seed: int) -> OpenedSource:
    """A source with its first rows, or those of its validation files, held out. TrainingError names a row."""
    data = cast("DatasetData", recipe.data)
    encoder = row_encoder(recipe, found.form)
    length, target = cast("int", data.sequence_length), cast("int | None", data.target_length)
    packing = packing_of(recipe, str(model_settings(recipe).get("model_type", "")))
    form, limits = batch_format(recipe, encoder, length, target), Limits.of(encoder, length, target)
    reader = RowReader(encoder, limits, form, packing, names)
    rows: list[RawRow] = []
    begins: dict[Path, ShardPosition | None] = {}
    for number, file in enumerate(found.held_out or found.files, start=len(found.files) if found.held_out else 0):
        known = file.resolve()
        if len(rows) == data.validation_rows or known in begins:
            continue
        begins[known] = None
        for raw in rows_of(file, found.form.sought, START, found.ends.get(number)):
            if len(rows) == data.validation_rows:
                begins[known] = raw.position
                break
            if not (data.skip_empty and raw.row().blank(encoder.content_fields)):
                rows.append(raw)
    return OpenedSource(found, reader, seed, rows, {} if found.held_out else begins)


def _shards(opened: OpenedSource, begins: Mapping[Path, ShardPosition | None]) -> Shards:
    """The files to train on, without the held-out rows. TrainingError if nothing is left."""
    paths, data = opened.found.files, opened.reader.data
    order = opened.seed if data.shuffle_files and len(paths) > 1 else None
    filled = opened.reader.encoder.content_fields if data.skip_empty else ()
    starts = [begins.get(path.resolve(), START) for path in paths]
    shards = Shards(paths, opened.found.form.sought, starts, order, filled, opened.found.ends)
    if next(shards.rows(0, START), None) is None:
        for raw in opened.held_out:  # an invalid row is reported first
            raw.row()
        rows = len(opened.held_out) if opened.begins else 0
        held = f" beside the {pluralize(rows, 'row')} held out for evaluation" if rows else ""
        what = f"data.path: {join_names([str(path) for path in paths])} has no row to train on{held}"
        hint = "set data.validation_rows lower" if held else "check that the files are complete"
        hint += ", or data.max_rows higher" if held and data.max_rows else ""
        raise TrainingError(what, hint=hint)
    return shards


def _identity(recipe: Recipe, sources: Sequence[RowFiles], tokenizer: str) -> str:
    """A digest of everything that decides the numbering of samples."""
    task = getattr(recipe.model, "task", "causal_lm")
    unset = {name for name in _LATER if not getattr(recipe.data, name)}
    settings = recipe.data.model_dump(mode="json", exclude=_APART | unset)
    files = [
        [each.asked.weight, dict(each.form.columns), [(file.name, *_look_at(file)) for file in each.files]]
        for each in sources
    ]
    described = json.dumps([_FORMAT, settings, recipe.train.seed, task, tokenizer, files], sort_keys=True)
    return hashlib.sha256(described.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _look_at(file: Path) -> tuple[int, str]:
    """Size in bytes, and a digest of parts of the content: a rewritten file may have the same size.

    Of parquet the whole footer counts: offset, size, lowest and highest value of each column chunk.
    """
    size, found, foot = file.stat().st_size, hashlib.sha256(), 0
    with reading(file), file.open("rb") as content:
        if ending(file) == ".parquet":
            content.seek(size - _TAIL)
            foot = int.from_bytes(content.read(4), "little") + _TAIL
        end = max(0, size - max(_LOOK, foot))
        for place, length in ((0, _LOOK), (size // 2, _LOOK), (end, size - end)):
            content.seek(place)
            found.update(content.read(length))
    return size, found.hexdigest()[:16]


def _described(recipe: Recipe, sources: Sequence[RowFiles]) -> str:
    """`3 files of 1.2 GB`, or each source with its share."""
    total = sum(each.asked.weight for each in sources)
    parts = []
    for each in sources:
        share = f"{each.asked.weight / total:.1%} " if len(sources) > 1 else ""
        name = each.asked.path if isinstance(each.asked.path, str) else each.asked.path[0]
        parts.append(f"{share}{public_name(name)} ({pluralize(len(each.files), 'file')}, {each.size:,} bytes)")
    limit = cast("DatasetData", recipe.data).limit_in_words
    return ", ".join(parts) + (f", {limit} of each" if limit else "")
