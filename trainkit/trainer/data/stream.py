"""Opens rows that are read while they are trained on: their files, what is held out of them, and how they are cut."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

from trainkit.errors import TrainingError
from trainkit.hub.cache import public_name
from trainkit.hub.splits import Asked, chosen
from trainkit.recipe.schema import DatasetData, HfModel, JsonlData, Recipe
from trainkit.recipe.schema.data import Mixed
from trainkit.recipe.schema.model import is_packed
from trainkit.text import counted, listed
from trainkit.trainer.data.encoding import Encoder, open_encoder
from trainkit.trainer.data.folders import explained, shards_by_split
from trainkit.trainer.data.mixture import Form, RowStream
from trainkit.trainer.data.pairs import Lengths, is_writing
from trainkit.trainer.data.rows import Reading, Rows, content_fields
from trainkit.trainer.data.shards import TABLES, Mark, RawRow, check_shard, rows_of
from trainkit.trainer.data.source import Batch, Labels, Samples, Source, reading
from trainkit.trainer.data.windows import Cut, Files, Place, Sample, Windows, samples_of
from trainkit.trainer.randomness import derived_seed

_LOOK = 4096  # bytes
_TAIL = 8  # bytes that end a parquet file: the size of the metadata before them, and PAR1
_FORMAT = 1  # of what is told apart by `_identity`: another order of samples is another number
# Settings that decide no sample's number; files and tokenizers count with their content.
_APART = {"path", "tokenizer", "mix", "workers", "persistent_workers", "prefetch_factor", "pin_memory"}


@dataclass(frozen=True, slots=True)
class Opened:
    """One source, looked at: its files, the rows that are held out, and the names of labels that it knows.

    begins: where the rows behind those do, in the files that have them; None where there are no others.
    """

    asked: Mixed
    seed: int
    files: Files
    held_out: Sequence[RawRow]
    begins: Mapping[Path, Mark | None]
    size: int  # bytes
    names: tuple[str, ...]


def open_stream(recipe: Recipe) -> Source:
    """The source of a recipe with `data.streaming`. TrainingError names the file, column or row to blame."""
    data, seed = cast("Rows", recipe.data), recipe.train.seed
    task = recipe.model.task if isinstance(recipe.model, HfModel) else "causal_lm"
    whole = task != "causal_lm"
    pairs = Lengths.of(data) if is_writing(recipe) else None
    packing = is_packed(recipe)
    length = pairs.source + pairs.target if pairs else data.sequence_length
    encoder = open_encoder(data.tokenizer)
    opened = _all_opened(data, seed)
    windows: list[Windows] = []
    held_out: list[Sample] = []
    for each in opened:
        fields = _of_source(data, each.asked)
        limit = data.sequence_length if whole and not packing else None
        reading = Reading(fields, encoder, final=not whole, limit=limit, pairs=pairs)
        cut = Cut(reading, length, int(not whole), packing, data.shuffle_buffer, each.seed)
        windows.append(Windows(each.files, cut))
        held_out += samples_of(each.held_out, cut)
    names = _label_names(data, opened)
    form = Form(length, encoder.padding, whole, data.label_field, names, pairs)
    if not held_out:
        raise _nothing_to_evaluate(data, opened)
    facts = _facts(recipe, opened, encoder)
    stream = RowStream(windows, [each.asked.weight for each in opened], form, seed, str(facts["stream"]))
    return Source(
        Samples(0, stream.batch),
        Samples(len(held_out), partial(_of_held_out, form, held_out)),
        f"a stream of {_described(opened)}",
        facts,
        labels=Labels(-1, "", names) if data.label_field else None,
        encoder=encoder,
        padding=encoder.padding if whole else None,
        stream=stream,
    )


def _of_source(data: Rows, asked: Mixed) -> Rows:
    """How the rows of one source are read."""
    return data.model_copy(update={"field": asked.field or data.field})


def _nothing_to_evaluate(data: Rows, opened: Sequence[Opened]) -> TrainingError:
    """Why no sample comes of the rows that are held out."""
    rows = sum(len(each.held_out) for each in opened)
    if not rows:
        hint = "see whether its files are whole, or set data.validation_split"
        return TrainingError(f"data.path: {_described(opened)} has no row to evaluate on", hint=hint)
    what = f"data.path: {counted(rows, 'row')} held out of {_described(opened)}: nothing of them is to be predicted"
    hint = "raise data.validation_rows, or data.sequence_length where prompts are longer"
    return TrainingError(f"{what} within {data.sequence_length} tokens", hint=hint)


def _facts(recipe: Recipe, opened: Sequence[Opened], encoder: Encoder) -> dict[str, int | float | str]:
    """For the summary."""
    facts: dict[str, int | float | str] = {
        "files": sum(len(each.files.paths) for each in opened),
        "file_bytes": sum(each.size for each in opened),
        "stream": _identity(recipe, opened, encoder.fingerprint),
    }
    return facts if encoder.unit == "bytes" else {**facts, "tokenizer": encoder.fingerprint}


def _of_held_out(form: Form, samples: Sequence[Sample], indices: Sequence[int]) -> Batch:
    return form.batch([samples[index] for index in indices])


def _all_opened(data: Rows, seed: int) -> list[Opened]:
    """Every source that has a weight, each with a seed of its own. TrainingError for one without rows to train on."""
    asked = [each for each in data.mix if each.weight]
    if data.mix:
        found = [_opened(each, data, derived_seed(seed, "source", number)) for number, each in enumerate(asked)]
    else:  # alone it has the seed of data that is not streamed
        alone = Mixed(path=data.path, split=getattr(data, "split", None), subset=getattr(data, "subset", None))
        found = [_opened(alone, data, seed)]
    # What one source holds out of a file is not trained on by another, or where the file is named again.
    begins: dict[Path, Mark | None] = {}
    for path, begin in (pair for each in found for pair in each.begins.items()):
        known = begins.get(path, Mark())
        begins[path] = None if begin is None or known is None else max(begin, known)
    return [_behind_held_out(each, begins) for each in found]


def _behind_held_out(opened: Opened, begins: Mapping[Path, Mark | None]) -> Opened:
    """The same, whose rows to train on begin here. TrainingError where there are none."""
    paths = opened.files.paths
    files = replace(opened.files, begins=[begins.get(path.resolve(), Mark()) for path in paths])
    if next(files.rows(0, Place()), None) is None:
        for raw in opened.held_out:  # what is no row at all is named first
            raw.row()
        rows = len(opened.held_out) if opened.begins else 0
        held = f" beside the {counted(rows, 'row')} held out for evaluation" if rows else ""
        what = f"data.path: {listed([str(path) for path in paths])} has no row to train on{held}"
        raise TrainingError(what, hint="set data.validation_rows lower" if held else "see whether the files are whole")
    return replace(opened, files=files)


def _opened(asked: Mixed, data: Rows, seed: int) -> Opened:
    """The files of a source, each looked at. TrainingError names a file or a column."""
    paths = [Path(each).absolute() for each in ([asked.path] if isinstance(asked.path, str) else asked.path)]
    text = None if data.messages_field or data.tokens_field else asked.field or data.field
    named = (text, data.prompt_field, data.messages_field, data.tokens_field, data.targets_field, data.label_field)
    columns = [name for name in named if name]
    files, held_out_files = paths, list[Path]()
    if odd := [path for path in paths if isinstance(data, JsonlData) and path.suffix in TABLES]:
        raise TrainingError(f"data.path: {odd[0]} is no file of JSON lines", hint="data.kind: dataset reads it")
    if isinstance(data, DatasetData):
        files, held_out_files = _of_split(paths, asked, data.validation_split)
    looked_at = [check_shard(path, columns) for path in (*files, *held_out_files)]
    names = {names[data.label_field] for _, names in looked_at if data.label_field and data.label_field in names}
    if len(names) > 1:
        raise TrainingError(f"data.path: the files of {paths[0]} give labels different names", hint="set data.labels")
    filled = content_fields(_of_source(data, asked)) if data.skip_empty else ()
    rows, begins = _held_out(held_out_files or files, columns, filled, data.validation_rows)
    order = seed if data.shuffle_files and len(files) > 1 else None
    found = Files(files, columns, [Mark()] * len(files), order, filled)
    size, known = sum(size for size, _ in looked_at), next(iter(names), ())
    return Opened(asked, seed, found, rows, {} if held_out_files else begins, size, known)


def _of_split(paths: Sequence[Path], asked: Mixed, second: str | None) -> tuple[list[Path], list[Path]]:
    """The files to train on, and those to evaluate on, which may be none. TrainingError for a missing split."""
    files: list[Path] = []
    held_out: list[Path] = []
    for path in paths:
        splits = shards_by_split(path, asked.subset)
        with explained(path):
            first, other = chosen(splits, Asked(asked.subset, asked.split, second))
        files += splits[first]
        held_out += splits[other] if other else []
    return files, held_out


def _held_out(
    files: Sequence[Path], columns: Sequence[str], filled: Sequence[str], most: int
) -> tuple[list[RawRow], dict[Path, Mark | None]]:
    """The first rows of a source, and where in each of their files the others begin; None in one without others."""
    rows: list[RawRow] = []
    begins: dict[Path, Mark | None] = {}
    for file in files:
        known = file.resolve()
        if len(rows) == most or known in begins:
            continue
        begins[known] = None
        for mark, raw in rows_of(file, columns, Mark()):
            if len(rows) == most:
                begins[known] = mark
                break
            if not (filled and raw.row().blank(filled)):
                rows.append(raw)
    return rows, begins


def _label_names(data: Rows, opened: Sequence[Opened]) -> tuple[str, ...]:
    """The names of the labels, in order. TrainingError where sources name them differently."""
    if not data.label_field or data.labels:
        return tuple(data.labels)
    if len({each.names for each in opened}) > 1:
        what = "data.mix: the sources give labels different names, or only some of them do"
        raise TrainingError(what, hint="name the labels in data.labels")
    return opened[0].names


def _identity(recipe: Recipe, opened: Sequence[Opened], tokenizer: str) -> str:
    """A digest of all that decides which sample has which number."""
    task = getattr(recipe.model, "task", "causal_lm")
    settings = recipe.data.model_dump(mode="json", exclude=_APART)
    files = [
        [each.asked.weight, each.asked.field, [(file.name, *_look_at(file)) for file in each.files.paths]]
        for each in opened
    ]
    described = json.dumps([_FORMAT, settings, recipe.train.seed, task, tokenizer, files], sort_keys=True)
    return hashlib.sha256(described.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _look_at(file: Path) -> tuple[int, str]:
    """Size in bytes, and a digest of some of the content: a file that was written anew may be as long as before.

    Of parquet the whole foot is looked at: the place, size, lowest and highest value of each part of a column.
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


def _described(opened: Sequence[Opened]) -> str:
    """`3 files of 1.2 GB`, or each source with its share."""
    total = sum(each.asked.weight for each in opened)
    parts = []
    for each in opened:
        share = f"{each.asked.weight / total:.1%} " if len(opened) > 1 else ""
        name = each.asked.path if isinstance(each.asked.path, str) else each.asked.path[0]
        parts.append(f"{share}{public_name(name)} ({counted(len(each.files.paths), 'file')}, {each.size:,} bytes)")
    return ", ".join(parts)
